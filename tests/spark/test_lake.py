"""A batch is in a table once, wherever its driver was killed, however often it came."""

from __future__ import annotations

import collections

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from mpbroker.spark.pipeline.decode import row_schema
from mpbroker.spark.pipeline.description import Table, ValueFormat
from mpbroker.spark.pipeline.errors import PipelineError
from mpbroker.spark.pipeline.staging import ROWS, Stager, hive_directory
from mpbroker.spark.pipeline.tables.lake import LakeTable, ParquetTable
from mpbroker.spark.pipeline.tables.opening import as_stored, open_table
from tests.spark.lakes import SCHEMA, opened, rows, stage

VALUE = ValueFormat("json", {"n": "bigint", "kind": "string"})
KINDS = ["parquet", "delta"]


@pytest.fixture(params=KINDS)
def table(request, tmp_path):
    return Table(str(tmp_path / "lake"), request.param, ("date", "kind"))


def bring(table, batch_id, first, end):
    """What a driver does with a batch, from its start on."""
    lake = opened(table)
    if not lake.has_batch(batch_id):
        lake.commit(batch_id, stage(lake, batch_id, rows(first, end)))


def numbers(table):
    if table.format == "delta":
        from deltalake import DeltaTable

        found = DeltaTable(table.path).to_pyarrow_table()
    else:
        found = pa.dataset.dataset(table.path, partitioning="hive").to_table()
    return sorted(found.column("n").to_pylist())


def test_batches_are_added_and_a_second_time_dropped(table):
    for batch_id in (0, 1, 0, 1, 1, 2):
        bring(table, batch_id, batch_id * 10, batch_id * 10 + 10)
    assert numbers(table) == list(range(30))


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_that_is_named_by_a_uri_names_its_files_so(kind, tmp_path):
    place = f"file://{tmp_path}/lake"
    table = Table(place, kind, ("date",))
    bring(table, 0, 0, 10)
    found = open_table(table, SCHEMA, "p").uris()
    assert found
    if kind == "parquet":  # Delta's log has its own spelling
        assert all(each.startswith(f"{place}/date=") for each in found)
    files = [each.removeprefix("file://") for each in found]
    read = [pq.read_table(each, partitioning=None).column("n") for each in files]
    assert sorted(n for column in read for n in column.to_pylist()) == list(range(10))


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_is_opened_as_it_lies_there(kind, tmp_path):
    table = Table(str(tmp_path / "lake"), kind, ("_topic", "kind", "date"))
    assert as_stored(Table(table.path, kind)) == (Table(table.path, kind), False)
    for batch_id in range(3):
        bring(table, batch_id, batch_id * 10, batch_id * 10 + 10)
    assert as_stored(Table(table.path, kind)) == (table, False)
    lake = opened(table)
    before, after = lake.compact()
    assert before == len(lake.data_files()) * 3 == after * 3 > 0
    stored = open_table(table, SCHEMA, "p")
    files = [each.removeprefix("file://") for each in stored.uris()]
    found = [n for each in files for n in pq.read_table(each, partitioning=None)["n"]]
    assert sorted(n.as_py() for n in found) == list(range(30))


@pytest.mark.parametrize("kind", KINDS)
def test_empty_text_is_in_the_directory_of_null_as_spark_has_it(kind, tmp_path):
    table = Table(str(tmp_path / "lake"), kind, ("kind",))
    batch = rows(0, 4).set_column(
        1, SCHEMA.field("kind"), pa.array(["", "a", None, ""])
    )
    lake = opened(table)
    lake.commit(0, stage(lake, 0, batch))
    directories = {each.split("/")[-2] for each in lake.data_files()}
    assert directories == {"kind=a", "kind=__HIVE_DEFAULT_PARTITION__"}
    assert numbers(table) == [0, 1, 2, 3]


def test_directories_are_named_as_spark_and_hive_name_them():
    text = "a b/\u00fc%=\u65e5"  # of other letters Spark would read the bytes
    assert hive_directory({"k": text, "n": None}) == (
        "k=a b%2F\u00fc%25%3D\u65e5/n=__HIVE_DEFAULT_PARTITION__"
    )


class KilledError(BaseException):
    """A driver's end, in the middle of something."""


@pytest.mark.parametrize("step", range(8))
def test_a_driver_killed_at_any_file_leaves_no_row_out_and_none_twice(
    table, step, monkeypatch
):
    bring(table, 0, 0, 10)
    calls = collections.Counter()

    def dying(function):
        def call(*arguments):
            if calls["all"] >= step:
                raise KilledError
            calls["all"] += 1
            return function(*arguments)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(LakeTable, "_move", dying(LakeTable._move))
        patch.setattr(LakeTable, "_write_json", dying(LakeTable._write_json))
        try:
            bring(table, 1, 10, 20)
        except KilledError:
            assert step < 8
    bring(table, 1, 10, 20)
    bring(table, 2, 20, 30)
    assert numbers(table) == list(range(30))


def test_what_a_late_task_stages_is_swept_and_never_seen(table):
    lake = opened(table)
    files = stage(lake, 0, rows(0, 10))
    stage(lake, 0, rows(0, 10))  # the task's earlier try
    lake.commit(0, files)
    assert numbers(table) == list(range(10))
    stage(lake, 0, rows(0, 10))  # and one that did not know it was dead
    bring(table, 1, 10, 20)
    assert numbers(table) == list(range(20))


@pytest.mark.parametrize("dies", [False, True])
def test_small_files_become_large_ones_and_rows_stay(table, dies, monkeypatch):
    for batch_id in range(6):
        bring(table, batch_id, batch_id * 10, batch_id * 10 + 10)
    lake = opened(table)
    before = len(lake.data_files())
    if dies and table.format == "parquet":

        def apply(*_arguments, **_options):
            raise KilledError

        with monkeypatch.context() as patch:
            patch.setattr(ParquetTable, "_apply", apply)
            with pytest.raises(KilledError):
                lake.compact()
        lake = opened(table)
    else:
        lake.compact()
    assert len(lake.data_files()) < before
    assert numbers(table) == list(range(60))
    bring(table, 5, 50, 60)
    bring(table, 6, 60, 70)
    assert numbers(table) == list(range(70))


def test_a_table_of_another_checkpoint_is_refused(table):
    bring(table, 0, 0, 10)
    lake = open_table(table, SCHEMA, "p")
    for check in (lake.check_claim, lake.claim):
        with pytest.raises(PipelineError, match=r"another.*checkpoint"):
            check("other")
    opened(table, "other", name="another-pipeline")  # which may share the table
    assert numbers(table) == list(range(10))


@pytest.mark.parametrize(
    "fields",
    [
        {"n": "string", "kind": "string"},
        {"kind": "string"},
    ],
)
def test_other_columns_than_the_tables_are_named_and_nothing_is_touched(table, fields):
    bring(table, 0, 0, 10)
    schema = row_schema(ValueFormat("json", fields), with_headers=False)
    with pytest.raises(PipelineError, match=r"column 'n' is .* in the table"):
        open_table(table, schema, "p")
    assert numbers(table) == list(range(10))


@pytest.mark.parametrize("kind", KINDS)
def test_another_partitioning_is_refused(kind, tmp_path):
    bring(Table(str(tmp_path / "lake"), kind, ("date",)), 0, 0, 10)
    with pytest.raises(PipelineError, match="partition"):
        open_table(Table(str(tmp_path / "lake"), kind), SCHEMA, "p")


def test_rows_older_than_allowed_are_counted_and_kept(tmp_path):
    table = Table(str(tmp_path / "lake"), late_after="1d")
    lake = opened(table)
    stager = Stager(
        *(None, table, None, {ROWS: lake.staging(0)}, False, 0),
        reached_us=2 * 86_400 * 1_000_000,
    )
    files = [each for found in stager([rows(0, 10)]) for each in found.to_pylist()]
    assert sum(each["late"] for each in files) == 4  # of the first of three days
    assert sum(each["rows"] for each in files) == 10


def test_readers_that_take_every_parquet_file_see_nothing_that_is_staged(
    tmp_path, monkeypatch
):
    table = Table(str(tmp_path / "lake"), "parquet", ("date",))
    lake = opened(table)

    def everything():
        found = [
            pq.read_table(path, partitioning=None).column("n").to_pylist()
            for path in (tmp_path / "lake").glob("**/*.parquet")
        ]
        return sorted(n for each in found for n in each)

    for batch_id in range(2):
        files = stage(lake, batch_id, rows(batch_id * 10, batch_id * 10 + 10))
        assert everything() == list(range(batch_id * 10))
        lake.commit(batch_id, files)
        assert everything() == list(range(batch_id * 10 + 10))

    def die(*_):
        raise OSError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(LakeTable, "_write_json", die)
        with pytest.raises(OSError, match="killed"):
            lake.compact()
    assert list((tmp_path / "lake").glob("**/*.staged")), "nothing was merged"
    assert everything() == list(range(20))
    opened(table).compact()
    assert everything() == list(range(20))
    assert not list((tmp_path / "lake").glob("**/*.staged"))

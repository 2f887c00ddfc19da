"""A batch is in an Iceberg table once, whatever is killed or written beside it."""

from __future__ import annotations

from functools import partial

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from msgspec.structs import replace
from pyiceberg.catalog import load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.utils.config import Config

from mpbroker.spark.pipeline.decode import row_schema
from mpbroker.spark.pipeline.description import Table, ValueFormat, parse
from mpbroker.spark.pipeline.errors import PipelineError
from mpbroker.spark.pipeline.tables import iceberg
from mpbroker.spark.pipeline.tables.opening import as_stored, open_table
from tests.spark import lakes
from tests.spark.lakes import stage

SCHEMA = row_schema(
    ValueFormat("json", {"n": "int", "kind": "string"}), with_headers=False
)
rows = partial(lakes.rows, schema=SCHEMA)
opened = partial(lakes.opened, schema=SCHEMA)


@pytest.fixture
def table(tmp_path):
    return Table(
        str(tmp_path / "lake"),
        "iceberg",
        ("date", "bucket(4, kind)"),
        identifier="default.lake",
        catalog={"uri": f"sqlite:///{tmp_path}/catalog.db"},
    )


def bring(table, batch_id, first, end):
    """What a driver does with a batch, from its start on."""
    lake = opened(table)
    if not lake.has_batch(batch_id):
        files = stage(lake, batch_id, rows(first, end))
        lake.commit(batch_id, files, f'{{"t":{{"0":{end}}}}}')


def stored(table):
    """Return the table as PyIceberg alone sees it."""
    return load_catalog("default", **table.catalog).load_table(table.identifier)


def numbers(table):
    return sorted(stored(table).scan().to_arrow()["n"].to_pylist())


def test_batches_are_added_and_a_second_time_dropped(table):
    for batch_id in (0, 1, 0, 1, 1, 2):
        bring(table, batch_id, batch_id * 10, batch_id * 10 + 10)
    assert numbers(table) == list(range(30))
    found = stored(table)
    assert [
        each.summary.additional_properties["mpbroker.offsets"]
        for each in found.snapshots()
    ] == [f'{{"t":{{"0":{end}}}}}' for end in (10, 20, 30)]
    partitions = found.inspect.partitions()["partition"].to_pylist()
    assert {each["_timestamp_day"].isoformat() for each in partitions} == {
        "1970-01-01",
        "1970-01-02",
        "1970-01-03",
    }
    assert {each["kind_bucket"] for each in partitions} <= {None, 0, 1, 2, 3}
    assert as_stored(table) == (replace(table, partition_by=()), False)


@pytest.mark.parametrize("landed", [False, True])
def test_a_driver_killed_around_the_commit_leaves_no_row_out_and_none_twice(
    table, landed, monkeypatch
):
    bring(table, 0, 0, 10)
    commit = SqlCatalog.commit_table

    class KilledError(BaseException):
        """A driver's end."""

    def dying(*arguments):
        if landed:
            commit(*arguments)
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(SqlCatalog, "commit_table", dying)
        with pytest.raises(KilledError):
            bring(table, 1, 10, 20)
    assert numbers(table) == list(range(20 if landed else 10))
    bring(table, 1, 10, 20)
    bring(table, 2, 20, 30)
    assert numbers(table) == list(range(30))


def test_a_commit_is_tried_again_when_another_writer_was_faster(table, monkeypatch):
    bring(table, 0, 0, 10)
    commit = SqlCatalog.commit_table
    others = iter(range(2))

    def slow(catalog, stored_table, requirements, updates):
        if next(others, None) is not None:
            with monkeypatch.context() as patch:
                patch.setattr(SqlCatalog, "commit_table", commit)
                stored(table).append(
                    pa.Table.from_batches([rows(100, 101)]),
                    snapshot_properties={"by": "another tool"},
                )
        return commit(catalog, stored_table, requirements, updates)

    monkeypatch.setattr(SqlCatalog, "commit_table", slow)
    bring(table, 1, 10, 20)
    assert numbers(table) == [*range(20), 100, 100]
    bring(table, 1, 10, 20)
    assert numbers(table) == [*range(20), 100, 100]


def test_a_batch_is_known_although_another_tool_expired_its_snapshot(table):
    bring(table, 0, 0, 10)
    found = stored(table)
    found.append(pa.Table.from_batches([rows(100, 101)]))
    found = stored(table)
    found.maintenance.expire_snapshots().by_id(
        found.snapshots()[0].snapshot_id
    ).commit()
    assert len(stored(table).snapshots()) == 1
    bring(table, 0, 0, 10)
    assert numbers(table) == [*range(10), 100]


def test_new_columns_wider_types_and_other_partitions_come_by_evolution(table):
    bring(table, 0, 0, 10)
    schema = row_schema(
        ValueFormat("json", {"n": "bigint", "kind": "string", "more": "double"}),
        with_headers=False,
    )
    changed = replace(table, partition_by=("month(_timestamp)", "kind"))
    lake = opened(changed, schema=schema)
    lake.commit(1, stage(lake, 1, rows(10, 20, schema=schema, more=[0.5] * 10)))
    found = stored(table)
    assert [str(each.transform) for each in found.spec().fields] == [
        "month",
        "identity",
    ]
    read = found.scan().to_arrow()
    assert read["n"].type == pa.int64()
    assert pc.sum(read["more"]).as_py() == 5
    assert read["more"].null_count == 10
    # A pipeline that does not know of the column goes on beside.
    bring(changed, 2, 20, 30)
    assert numbers(table) == list(range(30))


@pytest.mark.parametrize("fields", [{"n": "string", "kind": "string"}])
def test_a_column_of_another_type_is_refused_and_nothing_is_touched(table, fields):
    bring(table, 0, 0, 10)
    schema = row_schema(ValueFormat("json", fields), with_headers=False)
    with pytest.raises(PipelineError, match=r"n: int -> string.*change the descr"):
        open_table(table, schema, "p")
    assert numbers(table) == list(range(10))


def test_opening_a_table_changes_nothing(table, tmp_path):
    open_table(table, SCHEMA, "p")
    assert stored_tables(table) == []
    bring(table, 0, 0, 10)
    before = stored(table).metadata
    other = row_schema(ValueFormat("json", {"x": "int"}), with_headers=False)
    open_table(replace(table, partition_by=()), other, "p")
    assert stored(table).metadata == before


def stored_tables(table):
    catalog = load_catalog("default", **table.catalog)
    return [
        each for name in catalog.list_namespaces() for each in catalog.list_tables(name)
    ]


def test_a_table_of_another_place_or_checkpoint_is_refused(table, tmp_path):
    bring(table, 0, 0, 10)
    with pytest.raises(PipelineError, match=r"is at file:.*set table.path"):
        open_table(replace(table, path=str(tmp_path / "other")), SCHEMA, "p")
    with pytest.raises(PipelineError, match=r"another.*checkpoint"):
        open_table(table, SCHEMA, "p").claim("other")


@pytest.mark.parametrize(
    ("catalog", "message"),
    [
        ({}, r"give \[table.catalog\] a uri"),
        ({"uri": "sqlite:////no/such/directory.db"}, "cannot be reached: .*unable to"),
        ({"uri": "http://127.0.0.1:1/catalog"}, "cannot be reached: .*refused"),
    ],
)
def test_a_catalog_that_cannot_be_used_is_told_in_one_sentence(
    table, catalog, message, monkeypatch
):
    monkeypatch.setenv("PYICEBERG_HOME", "/nonexistent")
    with pytest.raises(PipelineError, match=message) as error:
        open_table(replace(table, catalog=catalog), SCHEMA, "p")
    assert "\n" not in str(error.value)


def test_a_table_that_is_dropped_meanwhile_stops_the_pipeline(table):
    lake = opened(table)
    files = stage(lake, 0, rows(0, 10))
    load_catalog("default", **table.catalog).drop_table(table.identifier)
    with pytest.raises(PipelineError, match=r"was dropped.*new checkpoint"):
        lake.commit(0, files)


def test_the_environment_says_how_s3_is_reached(table, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://all:1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://s3:1")
    monkeypatch.setenv("AWS_REGION", "eu-1")
    given = replace(table, catalog={**table.catalog, "s3.region": "eu-2"})
    properties = iceberg.load_iceberg_catalog(given).properties
    assert properties["s3.endpoint"] == "http://s3:1"
    assert properties["s3.region"] == "eu-2"


@pytest.fixture
def configure(tmp_path, monkeypatch):
    """Return what writes PyIceberg's own configuration file."""

    def write(**properties):
        lines = [f'    {key}: "{value}"' for key, value in properties.items()]
        text = "\n".join(["catalog:", "  default:", *lines, ""])
        (tmp_path / ".pyiceberg.yaml").write_text(text)
        monkeypatch.setenv("PYICEBERG_HOME", str(tmp_path))
        # PyIceberg has read it at its import.
        monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())

    return write


def test_pyicebergs_own_configuration_counts_more_than_the_environment(
    table, configure, monkeypatch
):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://all:1")
    monkeypatch.setenv("AWS_REGION", "eu-1")
    monkeypatch.setenv("PYICEBERG_CATALOG__DEFAULT__S3__ENDPOINT", "http://own:1")
    configure(**{"client.region": "eu-2", "s3.connect-timeout": "7"})
    properties = iceberg.load_iceberg_catalog(table).properties
    assert properties["s3.endpoint"] == "http://own:1"
    assert properties["client.region"] == "eu-2"
    assert "s3.region" not in properties  # PyIceberg would prefer it
    given = replace(table, catalog={**table.catalog, "s3.endpoint": "http://given:1"})
    properties = iceberg.load_iceberg_catalog(given).properties
    assert properties["s3.endpoint"] == "http://given:1"
    assert properties["s3.connect-timeout"] == "7"


@pytest.mark.parametrize("where", ["description", "configuration"])
def test_credentials_come_from_one_place(table, configure, monkeypatch, where):
    """A store refuses a key with the token of another one."""
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN"):
        monkeypatch.setenv(f"AWS_{name}", "theirs")
    monkeypatch.setenv("AWS_REGION", "eu-1")
    own = {"s3.access-key-id": "own", "s3.secret-access-key": "own"}
    if where == "configuration":
        configure(**own)
        own = {}
    given = replace(table, catalog={**table.catalog, **own})
    properties = iceberg.load_iceberg_catalog(given).properties
    assert properties["s3.access-key-id"] == "own"
    assert properties["s3.secret-access-key"] == "own"
    assert "s3.session-token" not in properties
    assert properties["s3.region"] == "eu-1"


def described(**table):
    content = {
        "pipeline": {"job": "ingest", "checkpoint": "/c"},
        "source": {"bootstrap": "b"},
        "value": {"format": "json", "fields": {"kind": "string", "at": "date"}},
        "table": {"path": "/lake/my-rows", **table},
        "dead_letter": {"path": "/lake/bad", "format": "iceberg"},
    }
    return parse(content)


def test_a_description_names_the_table_its_catalog_and_partitions():
    found = described(
        format="iceberg",
        catalog={"uri": "sqlite:///x"},
        partition_by=["kind", "truncate(2, kind)", "hour(_timestamp)", "month(at)"],
    )
    assert found.table.identifier == "default.my_rows"
    assert found.dead_letter.identifier == "default.bad"
    assert found.dead_letter.catalog == found.table.catalog == {"uri": "sqlite:///x"}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"partition_by": ["day(at)"]}, 'only Iceberg.*set table.format = "iceberg"'),
        ({"catalog": {"uri": "x"}}, "table.format='parquet' has no catalog"),
        ({"identifier": "a.b"}, "table.format='parquet' has no catalog"),
        ({"format": "iceberg", "identifier": "a"}, "must be a namespace and a name"),
        ({"format": "iceberg", "catalog": {"a": {"b": 1}}}, r"catalog\.a=.*quotes"),
        ({"format": "iceberg", "partition_by": ["week(at)"]}, "is no partition of"),
        ({"format": "iceberg", "partition_by": ["bucket(kind)"]}, "is no partition"),
        ({"format": "iceberg", "partition_by": ["hour(at)"]}, "date; it must be times"),
        ({"format": "iceberg", "partition_by": ["day(no)"]}, "'no', which is none of"),
    ],
)
def test_what_iceberg_has_not_is_refused_before_spark_is_started(table, message):
    with pytest.raises(PipelineError, match=message):
        described(**table)

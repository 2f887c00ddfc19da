"""Tables by key: a compacted topic as a table, and the changes of a database."""

from __future__ import annotations

import json
import random

import pyarrow as pa
import pytest
from msgspec.structs import replace

from mpbroker.spark.pipeline.decode import Decoder, row_schema
from mpbroker.spark.pipeline.description import Maintain, ValueFormat, parse
from mpbroker.spark.pipeline.errors import PipelineError
from mpbroker.spark.pipeline.staging import ROWS, Stager
from mpbroker.spark.pipeline.tables.iceberg import IcebergTable
from mpbroker.spark.pipeline.tables.lake import DeltaTable, LakeTable
from mpbroker.spark.pipeline.tables.maintain import maintain_table
from mpbroker.spark.pipeline.tables.opening import open_table
from tests.spark.lakes import lake_table, read

KINDS = ("delta", "iceberg")
FIELDS = {"id": "bigint", "name": "string"}
PLAIN = ValueFormat("json", FIELDS)
DEBEZIUM = ValueFormat("json", FIELDS, envelope="debezium")
DAY_MS = 86_400_000


def records(changes, first=0):
    """Records of (key, value as JSON or None), at offsets from the first on."""
    count = len(changes)
    return pa.RecordBatch.from_pydict(
        {
            "key": [key for key, _ in changes],
            "value": [
                None if value is None else json.dumps(value).encode()
                for _, value in changes
            ],
            "topic": ["t"] * count,
            "partition": pa.array([0] * count, pa.int32()),
            "offset": range(first, first + count),
            "timestamp": pa.array(
                [i % 3 * DAY_MS * 1000 for i in range(count)],
                pa.timestamp("us", tz="UTC"),
            ),
        }
    )


@pytest.fixture(params=KINDS)
def table(request, tmp_path):
    found = lake_table(
        request.param, str(tmp_path / "lake"), f"{tmp_path}/catalog.db", key=("_key",)
    )
    return replace(found, partition_by=("date",))


def bring(table, batch_id, batches, value=PLAIN):
    """What a driver does with a batch of so many tasks, from its start on."""
    schema = row_schema(value, with_headers=False)
    lake = open_table(table, schema, "p")
    lake.claim("q")
    if lake.has_batch(batch_id):
        return
    assert lake.file_writer() is None
    directories = {ROWS: lake.staging(batch_id)}
    stager = Stager(value, lake.table, None, directories, False, 0)
    files = [
        each
        for batch in batches
        for report in stager([batch])
        for each in report.to_pylist()
        if each["kind"] == ROWS
    ]
    lake.commit(batch_id, files, "{}")


def names(table):
    found = read(table).select(["id", "name"]).to_pylist()
    assert len({each["id"] for each in found}) == len(found)
    return {each["id"]: each["name"] for each in found}


def test_a_compacted_topic_is_a_table_of_its_newest_values(table):
    a, b, c = (b"a", b"b", b"c")
    first = records(
        [
            (a, {"id": 1, "name": "old"}),
            (b, {"id": 2, "name": "b"}),
            (a, {"id": 1, "name": "a"}),
            (c, {"id": 3, "name": "c"}),
            (c, None),
        ]
    )
    # In whichever order the tasks are read.
    bring(table, 0, [first.slice(3), first.slice(0, 3)])
    assert names(table) == {1: "a", 2: "b"}
    bring(table, 1, [records([(b, None), (c, {"id": 3, "name": "new"})], 5)])
    bring(table, 1, [records([(b, None), (c, {"id": 3, "name": "new"})], 5)])
    assert names(table) == {1: "a", 3: "new"}
    bring(table, 2, [records([(a, None), (c, None), (b, None)], 7)])
    assert names(table) == {}
    bring(table, 3, [records([(a, {"id": 1, "name": "again"})], 10)])
    assert names(table) == {1: "again"}


def test_random_changes_end_as_in_a_dictionary(table):
    chosen = random.Random(1)
    wanted = {}
    offset = 0
    for batch_id in range(6):
        changes = []
        for _ in range(30):
            number = chosen.randrange(20)
            gone = chosen.random() < 0.3
            name = f"{batch_id}-{len(changes)}"
            changes.append(
                (b"%d" % number, None if gone else {"id": number, "name": name})
            )
            wanted.pop(number, None)
            if not gone:
                wanted[number] = name
        bring(table, batch_id, [records(changes, offset)])
        offset += len(changes)
        if batch_id == 3:
            maintain_table(table, Maintain(), "_timestamp")
    assert names(table) == wanted


@pytest.mark.parametrize("schemas", [False, True])
def test_debeziums_changes_make_the_databases_table(table, schemas):
    def change(op, before=None, after=None):
        found = {"op": op, "before": before, "after": after, "ts_ms": 1}
        return {"schema": {}, "payload": found} if schemas else found

    one, two = {"id": 1, "name": "one"}, {"id": 2, "name": "two"}
    table = replace(table, key=("id",))
    bring(
        table,
        0,
        [records([(b"1", change("r", after=one)), (b"2", change("c", after=two))])],
        DEBEZIUM,
    )
    assert names(table) == {1: "one", 2: "two"}
    changed = {"id": 1, "name": "eins"}
    changes = [
        (b"1", change("u", one, changed)),
        (b"2", change("d", two)),
        (b"2", None),  # the tombstone behind a deletion
    ]
    bring(table, 1, [records(changes, 2)], DEBEZIUM)
    assert names(table) == {1: "eins"}


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"op": "t"}, "op='t' is no change of a row"),
        ({"id": 1}, "op=None is no change of a row"),
        ({"payload": 3}, "op=None is no change"),
        ({"op": "u", "before": {}, "after": None}, "op='u' without the row in 'after'"),
        ({"op": "d", "before": None}, "op='d' without the row in 'before'"),
        ({"op": "c", "after": {"id": "x"}}, "id='x'"),
    ],
)
def test_what_is_no_change_of_a_row_is_a_dead_letter(value, reason):
    good = (b"1", {"op": "c", "after": {"id": 1}})
    found = Decoder(DEBEZIUM, with_headers=False).decode(
        records([good, (b"k", value), (b"1", None)])
    )
    assert reason in found.bad["_error"].to_pylist()[0]
    assert found.rows["_offset"].to_pylist() == [0, 2]
    assert found.deleted.to_pylist() == [False, True]


class KilledError(BaseException):
    """A driver's end."""


@pytest.mark.parametrize("landed", [False, True])
def test_a_driver_killed_around_the_commit_changes_each_row_once(
    table, landed, monkeypatch
):
    bring(table, 0, [records([(b"a", {"id": 1, "name": "a"})])])
    batch = [records([(b"a", None), (b"b", {"id": 2, "name": "b"})], 1)]
    commit = type(open_table(table, row_schema(PLAIN, with_headers=False), "p")).commit

    def dying(lake, *arguments):
        if landed:
            commit(lake, *arguments)
        raise KilledError

    with monkeypatch.context() as patch:
        for kind in LakeTable.__subclasses__():
            patch.setattr(kind, "commit", dying)
        with pytest.raises(KilledError):
            bring(table, 1, batch)
    bring(table, 1, batch)
    assert names(table) == {2: "b"}


def test_another_writer_in_between_makes_the_changes_be_applied_anew(
    table, monkeypatch
):
    tasks = [records([(b"%d" % i, {"id": i, "name": "0"})], i) for i in range(4)]
    for batch_id, task in enumerate(tasks):
        bring(table, batch_id, [task])
    kind = {"delta": DeltaTable, "iceberg": IcebergTable}[table.format]
    opens, commit = kind._open, kind.commit
    # Of a commit's looks at the table, the one that its merge begins with.
    last = {"delta": 2, "iceberg": 1}[table.format]
    looks = [None] * 9  # those before do not count

    def stale(lake):
        found = opens(lake)
        looks.append(found)
        if len(looks) == last:
            # Between the look at the table and the commit, files are merged.
            maintain_table(table, Maintain(), "_timestamp")
        return found

    def committing(lake, *arguments):
        looks.clear()
        return commit(lake, *arguments)

    monkeypatch.setattr(kind, "_open", stale)
    monkeypatch.setattr(kind, "commit", committing)
    bring(table, 4, [records([(b"1", {"id": 1, "name": "new"}), (b"2", None)], 5)])
    assert len(looks) > last  # it looked again
    assert names(table) == {0: "0", 1: "new", 3: "0"}


def described(value=None, job="ingest", **table):
    return parse(
        {
            "pipeline": {"job": job, "checkpoint": "/c"},
            "source": {"bootstrap": "b"},
            "value": {"format": "json", "fields": FIELDS, **(value or {})},
            "table": {"path": "/lake", "format": "delta", **table},
        }
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"value": {"envelope": "debezium"}}, "envelope='debezium' needs table.key"),
        (
            {"key": ["id"], "format": "parquet"},
            'only in tables with table.format = "del',
        ),
        ({"key": ["no"]}, "table.key names 'no', which is none of the columns"),
    ],
)
def test_a_key_that_cannot_be_kept_is_refused(settings, message):
    assert described(key=["id", "_key"]).table.key == ("id", "_key")
    with pytest.raises(PipelineError, match=message):
        described(**settings)

"""Pipelines from their TOML to their tables and topics, on a real broker and Spark."""

from __future__ import annotations

import io
import json
import re
import time

import pyarrow.dataset
import pyarrow.parquet
import pytest
from confluent_kafka import Producer
from pyiceberg.catalog import load_catalog

from mpbroker.spark.pipeline import aggregate, replay
from mpbroker.spark.pipeline.description import parse
from mpbroker.spark.pipeline.errors import PipelineError
from mpbroker.spark.pipeline.progress import Progress
from mpbroker.spark.pipeline.run import preview, run_description
from tests.spark.topic_records import offsets_in, topic_records

pytestmark = pytest.mark.timeout(900)

# An hour ago: retention must leave them alone.
BASE_MS = (int(time.time()) // 3600 - 1) * 3_600_000
FIELDS = {"number": "bigint", "name": "string"}


@pytest.fixture
def put(bootstrap):
    def write(topic, values, partitions=2):
        producer = Producer({"bootstrap.servers": bootstrap})
        for index, value in enumerate(values):
            producer.produce(
                topic,
                value,
                b"k%d" % (index % 5),
                partition=index % partitions,
                timestamp=BASE_MS + index * 1000,
            )
        assert producer.flush(90) == 0

    return write


@pytest.fixture
def get(bootstrap):
    """Return a partition's messages."""
    return lambda topic, partition=0: topic_records(bootstrap, topic, partition)


@pytest.fixture
def run(spark, bootstrap):
    """Run a description; return its Progress."""

    def go(job, out=None, **sections):
        description = parse(
            {
                "pipeline": {"job": job, "name": "p"} | sections.pop("pipeline", {}),
                "source": {"bootstrap": bootstrap} | sections.pop("source", {}),
                **sections,
            }
        )
        progress = Progress("p", out or io.StringIO())
        assert list(preview(description))
        run_description(description, spark, progress)
        return progress

    return go


def numbers(first, end):
    return [b'{"number":%d,"name":"n%d"}' % (i, i) for i in range(first, end)]


KINDS = ["parquet", "delta", "iceberg"]


def lake_of(kind, tmp_path, **more):
    """Return a [table] in a format; Iceberg's has a catalog in SQLite."""
    found = {"path": str(tmp_path / "lake"), "format": kind, **more}
    if kind == "iceberg":
        found["catalog"] = {"uri": f"sqlite:///{tmp_path}/catalog.db"}
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_ingest_brings_each_record_once_and_bad_ones_aside(
    kind, run, put, make_topic, tmp_path
):
    topic, lake = make_topic(partitions=2), tmp_path / "lake"
    settings = {
        "pipeline": {"checkpoint": str(tmp_path / "checkpoint")},
        "source": {"subscribe": topic, "maxOffsetsPerTrigger": 400},
        "value": {"format": "json", "fields": FIELDS | {"nmae": "string"}},
        "table": lake_of(kind, tmp_path, partition_by=["date"]),
        "dead_letter": {"path": str(tmp_path / "bad"), "format": kind},
    }
    bad = [b"{", b"[]", b'{"number":"x"}', b"\xff"]
    put(topic, [*numbers(0, 1_000), *bad])
    first = run("ingest", **settings)
    assert (first.rows, first.bad, first.batches) == (1_000, 4, 3)
    assert first.fields - first.seen == {"nmae"}
    put(topic, numbers(1_000, 1_050))
    again = run("ingest", **settings)
    assert (again.rows, again.bad, again.batches) == (50, 0, 1)
    rows = table(kind, lake)
    assert sorted(rows["number"]) == list(range(1_050))
    day = time.strftime("%Y-%m-%d", time.gmtime(BASE_MS / 1000))
    if kind == "iceberg":
        assert list(lake.glob(f"data/_timestamp_day={day}/*.parquet"))
        last = iceberg_table(lake).current_snapshot().summary.additional_properties
        offsets = offsets_in(json.loads(last["mpbroker.offsets"]))
        assert offsets == {topic: {"0": 527, "1": 527}}
    else:
        assert sorted(set(map(str, rows["date"])))[0] == day
    reasons = table(kind, tmp_path / "bad")
    assert sorted(map(bytes, reasons["value"])) == sorted(bad)
    assert "number='x' is no bigint" in reasons["_error"]


def iceberg_table(path):
    catalog = load_catalog("default", uri=f"sqlite:///{path.parent}/catalog.db")
    return catalog.load_table(f"default.{path.name}")


def table(kind, path):
    if kind == "iceberg":
        return iceberg_table(path).scan().to_arrow().to_pydict()
    if kind == "delta":
        from deltalake import DeltaTable

        return DeltaTable(str(path)).to_pyarrow_table().to_pydict()
    found = pyarrow.dataset.dataset(str(path), partitioning="hive")
    return found.to_table().to_pydict()


def test_a_bad_value_without_a_place_for_it_stops_and_nothing_is_written(
    run, put, make_topic, tmp_path
):
    topic = make_topic(partitions=2)
    put(topic, [*numbers(0, 10), b"nonsense"])
    with pytest.raises(PipelineError, match=r"-0 offset 5 cannot be read.*dead_letter"):
        run(
            "ingest",
            pipeline={"checkpoint": str(tmp_path / "checkpoint")},
            source={"subscribe": topic},
            value={"format": "json", "fields": FIELDS},
            table={"path": str(tmp_path / "lake")},
        )
    assert not list((tmp_path / "lake").glob("*.parquet"))


def test_values_of_another_schema_go_aside_and_another_description_is_refused(
    run, put, make_topic, tmp_path
):
    topic, lake = make_topic(partitions=2), tmp_path / "lake"
    settings = {
        "pipeline": {"checkpoint": str(tmp_path / "checkpoint")},
        "source": {"subscribe": topic, "maxOffsetsPerTrigger": 20},
        "value": {"format": "json", "fields": FIELDS, "unknown_fields": "dead_letter"},
        "table": {"path": str(lake)},
        "dead_letter": {"path": str(tmp_path / "bad")},
    }
    # A producer that adds a field, and one that changes a type, amid those that do not.
    strange = [b'{"number":1,"name":"a","colour":"red"}', b'{"number":"one"}']
    put(topic, [*numbers(0, 20), *strange, *numbers(20, 40)])
    done = run("ingest", **settings)
    assert (done.rows, done.bad) == (40, 2)
    assert sorted(table("parquet", lake)["number"]) == list(range(40))
    reasons = sorted(table("parquet", tmp_path / "bad")["_error"])
    assert reasons == [
        "number='one' is no bigint",
        "unknown fields: colour",
    ]
    # A field that is described later is a new column.
    put(topic, [b'{"number":40,"name":"b","colour":"red"}'])
    changed = {"format": "json", "fields": FIELDS | {"colour": "string"}}
    assert run("ingest", **settings | {"value": changed}).rows == 1
    [path] = [
        each
        for each in lake.glob("*.parquet")
        if "colour" in pyarrow.parquet.read_schema(each).names
    ]
    colours = pyarrow.parquet.read_table(path)["colour"]
    assert colours.drop_null().to_pylist() == ["red"]
    # A column of another type is refused, and nothing is touched.
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    changed = {"format": "json", "fields": FIELDS | {"colour": "int"}}
    with pytest.raises(PipelineError, match=r"'colour' is string in the table and int"):
        run("ingest", **settings | {"value": changed})
    after = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    assert after == before


def test_windows_are_counted_to_a_table_and_to_a_topic(
    run, put, get, make_topic, tmp_path
):
    topic, target = make_topic(partitions=2), make_topic(partitions=1)
    put(topic, [*numbers(0, 600), b"?"])  # a second apart: ten minutes
    wanted = {
        "source": {"subscribe": topic},
        "value": {"format": "json", "fields": FIELDS},
        "aggregate": {
            "window": "1 minute",
            "watermark": "0 seconds",
            "measures": {"records": "count(*)", "highest": "max(number)"},
        },
    }
    progress = run(
        "aggregate",
        pipeline={"checkpoint": str(tmp_path / "c1")},
        table={"path": str(tmp_path / "lake")},
        **wanted,
    )
    rows = table("parquet", tmp_path / "lake")
    # The last window waits for a later event.
    assert sorted(rows["highest"]) == list(range(59, 599, 60))
    assert set(rows["records"]) == {60}
    assert progress.rows == 9
    assert progress.bad == 1
    run(
        "aggregate",
        pipeline={"checkpoint": str(tmp_path / "c2")},
        topic={"topic": target},
        **wanted,
    )
    found = [json.loads(message.value()) for message in get(target)]
    assert sorted(each["highest"] for each in found) == list(range(59, 599, 60))


def test_replay_keeps_order_keys_and_timestamps(run, put, get, make_topic, tmp_path):
    topic = make_topic(partitions=2)
    put(topic, [b"v%d" % i for i in range(100)])
    lake = {"path": str(tmp_path / "lake")}
    run(
        "ingest",
        pipeline={"checkpoint": str(tmp_path / "checkpoint")},
        source={"subscribe": topic},
        table=lake,
    )
    for speed in ({}, {"speed": 60}):
        target = make_topic(partitions=2)
        started = time.monotonic()
        progress = run(
            "replay",
            table=lake,
            topic={"topic": target},
            replay={"where": "_offset >= 10", **speed},
        )
        assert progress.rows == 80
        if speed:
            # 20 s to 99 s of event time at sixty times the speed.
            assert time.monotonic() - started >= 79 / 60
        for partition in (0, 1):
            messages = get(target, partition)
            there = list(range(20 + partition, 100, 2))
            assert [m.value() for m in messages] == [b"v%d" % i for i in there]
            assert [m.timestamp()[1] for m in messages] == [
                BASE_MS + i * 1000 for i in there
            ]
            assert [m.key() for m in messages] == [b"k%d" % (i % 5) for i in there]
            headers = dict(messages[0].headers())
            assert headers["mpbroker.replay.from"] == f"{topic}-{partition}@10".encode()


@pytest.mark.parametrize("kind", KINDS)
def test_replay_reads_a_table_as_ingest_has_written_it(
    kind, run, bootstrap, get, make_topic, tmp_path
):
    topic, target = make_topic(), make_topic()
    producer = Producer({"bootstrap.servers": bootstrap})
    # Text that could be a number, or no name of a directory; and a tombstone.
    places = ["007", "a b/c%2F=d", "1.50", "null", "", "\u00fc?*{x}", "2013-01-01"]
    batch, places = len(places), places * 2  # each twice: files to be compacted
    for number, place in enumerate(places):
        value = json.dumps({"place": place, "number": number}).encode()
        producer.produce(topic, value, b"k", headers=[("h", b"%d" % number)])
    producer.produce(topic, None, b"k")
    assert producer.flush(90) == 0
    sections = {
        "value": {
            "format": "json",
            "fields": {"place": "string", "number": "bigint"},
        },
    }
    run(
        "ingest",
        pipeline={"checkpoint": str(tmp_path / "checkpoint")},
        source={
            "subscribe": topic,
            "includeHeaders": True,
            "maxOffsetsPerTrigger": batch,
        },
        table=lake_of(kind, tmp_path, partition_by=["date", "place"], compact_every=2),
        **sections,
    )
    # What the table says of itself need not be said again.
    again = {
        "table": lake_of(kind, tmp_path),
        "topic": {"topic": target},
        "replay": {"partitions": "key"},
    }
    assert run("replay", **again, **sections).rows == len(places) + 1
    *messages, tombstone = get(target)
    # Empty text is null in a table that is partitioned by it, but for Iceberg's.
    assert [json.loads(each.value()) for each in messages] == [
        {"place": place, "number": number}
        if place or kind == "iceberg"
        else {"number": number}
        for number, place in enumerate(places)
    ]
    assert tombstone.value() is None
    assert [dict(each.headers())["h"] for each in messages] == [
        b"%d" % number for number in range(len(places))
    ]
    sections["value"] = {"format": "json", "fields": {"number": "bigint"}}
    if kind == "iceberg":
        return
    with pytest.raises(PipelineError, match="is partitioned by 'place', which is none"):
        run("replay", **again, **sections)


def test_a_replay_says_how_far_it_is_and_windows_to_a_topic_each_batch(
    run, put, make_topic, tmp_path, monkeypatch
):
    topic, target = make_topic(partitions=2), make_topic(partitions=2)
    put(topic, numbers(0, 100))
    lake = {"path": str(tmp_path / "lake")}
    run(
        "ingest",
        pipeline={"checkpoint": str(tmp_path / "checkpoint")},
        source={"subscribe": topic},
        table=lake,
    )
    monkeypatch.setattr(replay, "_SAY_S", 0.2)
    done = run(
        "replay", table=lake, topic={"topic": target}, replay={"rate": 40}
    ).out.getvalue()
    assert re.search(rf"p: [1-9]\d* of 100 records are in topic {target}\n", done)
    # For ever, until it has said something and is interrupted.
    said = []

    class Out(io.StringIO):
        def write(self, text):
            said.append(text)
            return super().write(text)

    with monkeypatch.context() as patch:
        patch.setattr(aggregate._Seen, "newest", interrupting(said))
        progress = run(
            "aggregate",
            pipeline={"checkpoint": str(tmp_path / "c"), "trigger": "100ms"},
            source={"subscribe": topic},
            value={"format": "json", "fields": FIELDS},
            aggregate={
                "window": "1 minute",
                "watermark": "0 seconds",
                "measures": {"records": "count(*)"},
            },
            topic={"topic": target},
            out=Out(),
        )
    assert progress.rows == 1  # of 100 seconds, one whole minute
    assert [text for text in said if re.match(r"p: batch 0: 0 rows in", text)]
    assert [text for text in said if re.match(r"p: batch \d: 1 rows in", text)]


def interrupting(said):
    """What looks at a query, and presses Ctrl-C when its window was written."""
    look = aggregate._Seen.newest

    def looked(seen, query):
        look(seen, query)
        if any(": 1 rows" in text for text in said):
            raise KeyboardInterrupt

    return looked

"""Nested values and a registry's schemas, from a topic to a table, with real Spark."""

from __future__ import annotations

import io
import json
import time
import tomllib

import pytest
from confluent_kafka import Producer
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from deltalake import DeltaTable

from mpbroker.spark.pipeline.description import parse
from mpbroker.spark.pipeline.infer import infer, toml
from mpbroker.spark.pipeline.progress import Progress
from mpbroker.spark.pipeline.registered import resolved
from mpbroker.spark.pipeline.run import preview, run_description
from mpbroker.spark.pipeline.schemas.sample import Sample
from tests.support.schema_registry import SchemaRegistry

pytestmark = pytest.mark.timeout(900)

FIELDS = {
    "number": "int not null",
    "price": "decimal(9, 2)",
    "from": "struct<airport: string, `the gate`: int>",
    "legs": "array<struct<to: string, tags: map<string, double>>>",
    "payload": "json<struct<x: int>>",
    "more": "json",
    "local": "timestamp_ntz",
    "seen": "timestamp(s)",
}


@pytest.fixture
def run(spark, bootstrap, tmp_path):
    def go(job="ingest", progress=None, **sections):
        description = parse(
            {
                "pipeline": {"job": job, "name": "p", "checkpoint": str(tmp_path / job)}
                | sections.pop("pipeline", {}),
                "source": {"bootstrap": bootstrap} | sections.pop("source", {}),
                **sections,
            }
        )
        progress = progress or Progress("p", io.StringIO())
        description = resolved(description, progress.say)
        assert list(preview(description))
        run_description(description, spark, progress)
        return progress

    return go


@pytest.fixture
def put(bootstrap):
    def write(topic, *values):
        producer = Producer({"bootstrap.servers": bootstrap})
        for value in values:
            producer.produce(topic, value, b"k", headers=[("trace", b"7")])
        assert producer.flush(90) == 0

    return write


def test_nested_values_reach_a_table_that_spark_reads_and_groups(
    run, put, spark, make_topic, tmp_path
):
    topic = make_topic()
    good = {
        "number": 5,
        "price": 12.5,
        "from": {"airport": "EWR", "the gate": 3},
        "legs": [{"to": "IAH", "tags": {"a": 0.5}}, {"to": "SFO"}],
        "payload": '{"x":1}',
        "more": {"any": [1, None]},
        "local": "2013-01-01T05:00:00",
        "seen": 1357016400,
    }
    bad = [{"price": 1}, good | {"legs": [{"to": 5}]}, good | {"price": 1.555}]
    put(topic, *(json.dumps(each).encode() for each in (good, *bad)))
    value = {"format": "json", "fields": FIELDS}
    for kind in ("delta", "parquet"):
        done = run(
            pipeline={"checkpoint": str(tmp_path / f"c-{kind}")},
            source={"subscribe": topic},
            value=value,
            table={"path": str(tmp_path / kind), "format": kind},
            dead_letter={"path": str(tmp_path / f"bad-{kind}"), "format": kind},
        )
        assert (done.rows, done.bad) == (1, 3)
    [row] = spark.read.parquet(str(tmp_path / "parquet")).toArrow().to_pylist()
    [same] = DeltaTable(str(tmp_path / "delta")).to_pyarrow_table().to_pylist()
    assert row["from"] == same["from"] == good["from"]
    assert row["legs"][0]["tags"] == same["legs"][0]["tags"] == [("a", 0.5)]
    assert str(row["price"]) == str(same["price"]) == "12.50"
    assert row["payload"] == {"x": 1} and row["more"] == '{"any":[1,null]}'
    assert row["local"].isoformat() == good["local"]
    assert row["seen"].timestamp() == good["seen"]
    letters = DeltaTable(str(tmp_path / "bad-delta")).to_pyarrow_table().to_pylist()
    assert [each["_error"] for each in letters] == [
        "number is missing",
        "legs[0].to=5 is no string",
        "price=Decimal('1.555') is no decimal(9, 2)",
    ]
    for offset, letter in enumerate(letters, 1):
        assert (letter["_offset"], letter["_key"]) == (offset, b"k")
        assert letter["_headers"] == [{"key": "trace", "value": b"7"}]
    counted = run(
        "aggregate",
        source={"subscribe": topic},
        value=value,
        aggregate={
            "window": "1 minute",
            "watermark": "0 seconds",
            "event_time": "seen",
            "measures": {"gates": "sum(`from`.`the gate`)", "legs": "sum(size(legs))"},
        },
        table={"path": str(tmp_path / "windows")},
    )
    assert counted.bad == 3


def test_a_schema_that_grows_while_a_pipeline_runs_grows_its_table(
    run, put, make_topic, tmp_path
):
    topic = make_topic()
    registry = SchemaRegistry()
    try:
        client = SchemaRegistryClient({"url": registry.url})

        def write(subject, fields, values):
            schema = {"type": "record", "name": "R", "fields": fields}
            serializer = AvroSerializer(client, json.dumps(schema))
            context = SerializationContext(subject, MessageField.VALUE)
            put(topic, *(serializer(each, context) for each in values))
            return {"schema": registry.schemas[-1]["schema"]}

        old = [{"name": "n", "type": "int"}]
        new = [*old, {"name": "carrier", "type": "string"}]
        write(topic, old, [{"n": n} for n in range(40)])
        # Under another subject, so that its version comes when the first batch is done.
        later = write("other", new, [{"n": n, "carrier": "UA"} for n in range(40, 80)])
        narrowed = [{"name": "n", "type": "string"}]
        write("other", narrowed, [{"n": "x"}])
        put(topic, b"\0\0\0\0\x63x")

        class Register(Progress):
            def batch(self, batch_id, rows, seconds, **more):
                super().batch(batch_id, rows, seconds, **more)
                registry.register(f"{topic}-value", later)

        done = run(
            progress=Register("p", io.StringIO()),
            source={"subscribe": topic, "maxOffsetsPerTrigger": 40},
            value={"format": "registry", "registry": registry.url},
            table={"path": str(tmp_path / "lake"), "format": "delta"},
            dead_letter={"path": str(tmp_path / "bad")},
        )
    finally:
        registry.close()
    assert (done.rows, done.bad) == (80, 2)
    assert "p: the table has new columns: carrier\n" in done.out.getvalue()
    table = DeltaTable(str(tmp_path / "lake")).to_pyarrow_table().sort_by("n")
    assert table["n"].to_pylist() == list(range(80))
    assert table["carrier"].to_pylist() == [None] * 40 + ["UA"] * 40


def test_an_inferred_file_runs_as_it_stands_and_late_rows_go_aside(
    run, put, bootstrap, make_topic, tmp_path
):
    topic = make_topic()
    now_s = int(time.time())
    documents = [
        {"number": n, "seen_at": now_s - n * 86_400, "legs": [{"to": "IAH"}]}
        for n in range(10)
    ]
    values = [json.dumps(each).encode() for each in documents]
    put(topic, *values)
    found = infer(Sample(topic, values, len(values)))
    sections = tomllib.loads(toml(found, {"bootstrap": bootstrap}, str(tmp_path)))
    assert sections["table"]["event_time"] == "seen_at"
    assert run(**sections).rows == 10
    # Once more, into another table, with the late ones aside.
    sections["pipeline"]["checkpoint"] += "-2"
    sections["table"] |= {
        "path": str(tmp_path / "fresh"),
        "late_after": "84h",
        "late": "aside",
    }
    sections["late"] = {"path": str(tmp_path / "late"), "format": "delta"}
    sections["dead_letter"]["path"] += "-2"
    sections["source"]["maxOffsetsPerTrigger"] = 4
    done = run(**sections)
    assert (done.rows, done.late) == (4, 6)
    assert "batch 0: 4 rows in" in done.out.getvalue()
    assert "batch 1: 0 rows, 4 late and set aside in" in done.out.getvalue()
    for place, wanted in (("fresh", range(4)), ("late", range(4, 10))):
        table = DeltaTable(str(tmp_path / place)).to_pyarrow_table()
        assert sorted(table["number"].to_pylist()) == list(wanted)

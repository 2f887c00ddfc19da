"""Spark's own Kafka connector works unchanged: batch, stream, write; ours agrees.

Both read the same topics with the same options: the rows, or that there is a refusal,
must be the same.
"""

from __future__ import annotations

import json
import re
import time

import pytest
from confluent_kafka import Producer

from tests.spark.test_option_table import option_table
from tests.support.fetch_clients import have_spark_connector

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not have_spark_connector(),
        reason="Spark's Kafka connector is not in .downloads/spark (Maven)",
    ),
]

# The connector refuses these when it writes, or not at all.
OF_THE_SINK = {
    "kafka.key.serializer",
    "kafka.value.serializer",
    "kafka.partitioner.class",
}
COLUMNS = ["partition", "offset", "key", "value", "timestamp", "timestampType"]


@pytest.fixture
def kafka(spark, bootstrap):
    def reader(read):
        return read.format("kafka").option("kafka.bootstrap.servers", bootstrap)

    return reader


def fill(bootstrap, topic):
    producer = Producer({"bootstrap.servers": bootstrap, "compression.type": "zstd"})
    for number in range(500):
        producer.produce(topic, b"%d" % number, b"k", partition=number % 2)
    assert producer.flush(90) == 0


def rows_of(frame):
    return sorted(tuple(map(str, row)) for row in frame.select(*COLUMNS).collect())


def test_a_batch_query_shows_what_ours_shows(spark, kafka, read, bootstrap, make_topic):
    topic = make_topic(partitions=2)
    fill(bootstrap, topic)
    theirs = kafka(spark.read).option("subscribe", topic).load()
    assert rows_of(theirs) == rows_of(read(subscribe=topic).load())
    assert theirs.count() == 500


def test_a_stream_goes_on_from_its_checkpoint_and_is_written_to_a_topic(
    spark, kafka, read, finish, bootstrap, make_topic, tmp_path
):
    source, target = make_topic(partitions=2), make_topic(partitions=1)
    for expected in (500, 1_000):
        fill(bootstrap, source)
        writer = (
            kafka(spark.readStream)
            .option("subscribe", source)
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", "300")
            .load()
            .select("key", "value")
            .writeStream.format("kafka")
            .option("kafka.bootstrap.servers", bootstrap)
            .option("topic", target)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
        )
        finish(writer.start)
        assert read(subscribe=target).load().count() == expected


T0 = time.time_ns() // 1_000_000 - 60_000


@pytest.fixture
def topics(bootstrap, make_topic, delete_records):
    """Two topics: one with headers and timestamps; one with transactions, and cut."""
    plain, cut = make_topic(partitions=2), make_topic(partitions=1)
    producer = Producer({"bootstrap.servers": bootstrap})
    for number in range(60):
        producer.produce(
            plain,
            None if number % 7 == 0 else b"%d" % number,
            None if number % 5 == 0 else b"k",
            partition=number % 2,
            timestamp=T0 + number * 1_000,
            headers=[("h", b"1"), ("h", None)] if number % 3 == 0 else None,
        )
    assert producer.flush(90) == 0
    writer = Producer({"bootstrap.servers": bootstrap, "transactional.id": cut})
    writer.init_transactions(90)
    for turn in range(8):
        writer.begin_transaction()
        for number in range(5):
            writer.produce(cut, b"%d of %d" % (number, turn), partition=0)
        writer.flush(90)
        (writer.abort_transaction if turn % 2 else writer.commit_transaction)(90)
    delete_records(cut, 0, 3)
    return plain, cut


def option_cases(plain, cut):
    """Return options by the name of the case."""

    def offsets(topic, **partitions):
        return json.dumps({topic: {k.strip("p"): v for k, v in partitions.items()}})

    both = {"subscribe": f"{plain},{cut}"}
    of_plain, of_cut = {"subscribe": plain}, {"subscribe": cut}
    committed = {"kafka.isolation.level": "read_committed"}
    lossy = {"failOnDataLoss": "false"}
    early = str(T0 + 20_500)
    future = str(T0 + 10**9)
    part = offsets(plain, p0=10, p1=-2)
    from_part = of_plain | {"startingOffsets": part}
    long_ago = {"startingOffsets": offsets(cut, p0=0)}
    return {
        "topics": both,
        "pattern": {"subscribePattern": f"{plain[:-1]}[\\p{{XDigit}}&&[^.]]"},
        "pattern within": {"subscribePattern": f"{plain[1:-1]}|^{cut}$"},
        "pattern of none": {"subscribePattern": r"\p{Lower}\p{Upper}"},
        "assign": {"assign": json.dumps({plain: [1], cut: [0]})},
        "headers": of_plain | {"includeHeaders": "true"},
        "offsets": from_part | {"endingOffsets": offsets(plain, p0=-1, p1=20)},
        "offsets of some partitions": of_plain
        | {"startingOffsets": offsets(plain, p0=1)},
        "timestamp": of_plain | {"startingTimestamp": early},
        "ending timestamp": of_plain | {"endingTimestamp": early},
        "timestamps": of_plain
        | {"startingOffsetsByTimestamp": offsets(plain, p0=T0 + 30_000, p1=T0)},
        "ending timestamps": of_plain
        | {"endingOffsetsByTimestamp": offsets(plain, p0=T0 + 30_000, p1=T0 + 9_000)},
        "future": of_plain | {"startingTimestamp": future},
        "future is latest": of_plain
        | {"startingTimestamp": future, "startingOffsetsByTimestampStrategy": "latest"},
        "start after the end in time": of_plain
        | {"startingTimestamp": str(T0 + 40_000), "endingTimestamp": early},
        "future end": of_plain | {"endingTimestamp": future},
        "committed": of_cut | committed,
        "committed, to a marker": of_cut
        | committed
        | {"endingOffsets": offsets(cut, p0=12)},
        "committed, inside an aborted": of_cut
        | committed
        | {"startingOffsets": offsets(cut, p0=7), "endingOffsets": offsets(cut, p0=9)},
        "committed, in pieces": of_cut | committed | {"minPartitions": "9"},
        "uncommitted, in pieces": of_cut | {"minPartitions": "9"},
        "lost": of_cut | long_ago,
        "lost, and no matter": of_cut | long_ago | lossy,
        "beyond the end": of_plain | {"startingOffsets": offsets(plain, p0=99, p1=0)},
        "beyond the end, and no matter": of_plain
        | lossy
        | {"startingOffsets": offsets(plain, p0=99, p1=0)},
        "end before start": from_part | {"endingOffsets": offsets(plain, p0=2, p1=2)},
        "latest": of_plain | {"startingOffsets": "latest"},
        "end is earliest": of_plain | {"endingOffsets": "earliest"},
        "two subscriptions": of_plain | {"assign": json.dumps({plain: [0]})},
        "no such topic": {"subscribe": f"{plain}-not"},
        "a group": of_plain | {"kafka.group.id": "mine"},
        "a group's prefix": of_plain | {"groupIdPrefix": "mine"},
        "an unknown name": of_plain | {"startingOffset": "latest"},
        **{
            name: of_plain | {name: "true"}
            for name, here in option_table().items()
            if here == "refused" and name not in OF_THE_SINK
        },
        "zero parts": of_plain | {"minPartitions": "0"},
    }


def test_the_table_of_options_has_all_that_the_connector_has(spark):
    provider = "org.apache.spark.sql.kafka010.KafkaSourceProvider$"
    loader = spark._jvm.java.lang.Thread.currentThread().getContextClassLoader()
    fields = loader.loadClass(provider).getDeclaredFields()
    found = set()
    for each in fields:
        if each.getType().getSimpleName() == "String":
            each.setAccessible(True)
            found.add(each.get(None))
    # The others are messages, names of classes and a time.
    options = {each for each in found if re.fullmatch(r"[a-z.]+", each)}
    assert {"assign", "maxoffsetspertrigger", "topic"} <= options
    assert options <= {name.lower() for name in option_table()}


def outcome(reader, options):
    """Return all rows with all columns, or that there is an error."""
    try:
        rows = reader.options(**options).load().collect()
    except Exception:  # noqa: BLE001  # of many kinds: only that there is one counts
        return "refused"
    return sorted(str(row.asDict(recursive=True)) for row in rows)


def test_each_option_gives_the_rows_that_the_connector_gives(
    spark, kafka, read, topics
):
    seen, different = {}, {}
    for name, options in option_cases(*topics).items():
        seen[name] = outcome(read(), options)
        theirs = outcome(kafka(spark.read), options)
        if theirs != seen[name]:
            different[name] = {"ours": seen[name], "theirs": theirs}
    assert not different
    refused = {name for name, found in seen.items() if found == "refused"}
    assert {"lost", "latest", "end before start", "beyond the end"} <= refused
    assert not refused & {"pattern", "headers", "committed, to a marker", "timestamp"}
    assert len(seen["committed"]) == 4 * 5 - 3

"""Spark's own Kafka connector works unchanged: batch, stream, write; ours agrees."""

from __future__ import annotations

import pytest
from confluent_kafka import Producer

from tests.support.fetch_clients import have_spark_connector

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not have_spark_connector(),
        reason="Spark's Kafka connector is not in .downloads/spark (Maven)",
    ),
]

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

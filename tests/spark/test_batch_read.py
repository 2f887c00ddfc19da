"""A batch query sees what clients that we did not write have put into topics."""

from __future__ import annotations

import datetime
import json
import time
from collections import Counter

import pytest
from confluent_kafka import Producer
from pyspark.sql.functions import count, sum

# An hour ago: retention must leave them alone.
BASE_MS = int(time.time() * 1000) - 3_600_000


@pytest.fixture
def produce(bootstrap):
    """Write (partition, key, value, timestamp_ms, headers) through librdkafka."""

    def write(topic, records, **settings):
        producer = Producer({"bootstrap.servers": bootstrap, **settings})
        failed = []
        for partition, key, value, timestamp, headers in records:
            producer.produce(
                topic,
                value,
                key,
                partition=partition,
                timestamp=timestamp,
                headers=headers,
                on_delivery=lambda error, _: error and failed.append(error),
            )
        assert producer.flush(90) == 0
        assert not failed

    return write


def numbered(partition, first, size):
    return [
        (partition, b"k%d" % i, b"v%d" % i, BASE_MS + i, None)
        for i in range(first, first + size)
    ]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
def test_every_record_comes_once_with_all_that_it_has(codec, read, make_topic, produce):
    topic = make_topic(partitions=3)
    records = [
        (0, None, b"", BASE_MS, [("h", b"\xff"), ("n", None)]),
        (2, b"", None, BASE_MS + 1, []),
        *numbered(1, 0, 500),
    ]
    produce(topic, records, **{"compression.type": codec})
    rows = read(subscribe=topic, includeHeaders="true").load().collect()
    assert len(rows) == len(records)
    first = next(row for row in rows if row.partition == 0)
    assert (first.key, first.value, first.topic, first.offset, first.timestampType) == (
        None,
        bytearray(),
        topic,
        0,
        0,
    )
    assert [(each.key, each.value) for each in first.headers] == [
        ("h", bytearray(b"\xff")),
        ("n", None),
    ]
    second = next(row for row in rows if row.partition == 2)
    assert (second.key, second.value, second.headers) == (bytearray(), None, None)
    rest = [row for row in rows if row.partition == 1]
    assert [row.offset for row in rest] == list(range(500))
    assert [bytes(row.value) for row in rest] == [b"v%d" % i for i in range(500)]
    moment = datetime.datetime.fromtimestamp((BASE_MS + 7) / 1000, datetime.UTC)
    assert rest[7].timestamp.timestamp() == moment.timestamp()


@pytest.mark.timeout(900)
def test_offsets_and_timestamps_bound_what_is_read_also_within_a_batch(
    read, make_topic, produce
):
    topic = make_topic(partitions=2)
    produce(topic, numbered(0, 0, 100) + numbered(1, 0, 100))

    def offsets(**options):
        rows = read(subscribe=topic, **options).load().select("partition", "offset")
        found = sorted((row.partition, row.offset) for row in rows.collect())
        return [
            [offset for partition, offset in found if partition == which]
            for which in (0, 1)
        ]

    assert offsets(
        startingOffsets=json.dumps({topic: {"0": 10, "1": -2}}),
        endingOffsets=json.dumps({topic: {"0": 13, "1": 2}}),
    ) == [[10, 11, 12], [0, 1]]
    assert offsets(startingTimestamp=str(BASE_MS + 98), endingOffsets="latest") == [
        [98, 99],
        [98, 99],
    ]
    assert offsets(
        startingOffsetsByTimestamp=json.dumps(
            {topic: {"0": BASE_MS + 52, "1": BASE_MS + 50}}
        ),
        endingTimestamp=str(BASE_MS + 52),
    ) == [[], [50, 51]]
    assert offsets(
        startingTimestamp=str(BASE_MS + 5_000),
        startingOffsetsByTimestampStrategy="latest",
    ) == [[], []]


@pytest.mark.timeout(900)
def test_a_partition_is_cut_for_more_tasks(read, make_topic, produce):
    topic = make_topic(partitions=1)
    produce(topic, numbered(0, 0, 1_000))
    frame = read(subscribe=topic, minPartitions=4).load()
    assert frame.rdd.getNumPartitions() == 4
    assert sorted(row.offset for row in frame.collect()) == list(range(1_000))
    frame = read(subscribe=topic, maxRecordsPerPartition=300).load()
    assert frame.rdd.getNumPartitions() == 4
    assert frame.agg(count("*"), sum("offset")).first()[:] == (1_000, 499_500)


@pytest.mark.timeout(900)
def test_topics_are_found_by_pattern_and_partitions_by_assignment(
    read, make_topic, produce
):
    topics = [make_topic(partitions=2) for _ in range(2)]
    for topic in topics:
        produce(topic, numbered(0, 0, 3) + numbered(1, 0, 2))
    pattern = "|".join(topics)
    rows = read(subscribePattern=pattern).load().collect()
    assert Counter(row.topic for row in rows) == dict.fromkeys(topics, 5)
    rows = read(assign=json.dumps({topics[0]: [1]})).load().collect()
    assert [(row.topic, row.partition) for row in rows] == [(topics[0], 1)] * 2


@pytest.mark.timeout(900)
def test_records_that_are_gone_stop_the_query_or_are_skipped(
    read, make_topic, produce, delete_records
):
    topic = make_topic(partitions=1)
    produce(topic, numbered(0, 0, 50))
    delete_records(topic, 0, 20)
    asked = {"subscribe": topic, "startingOffsets": json.dumps({topic: {"0": 5}})}
    with pytest.raises(
        Exception, match=r"offsets 5 to 19 cannot be read.*failOnDataLoss"
    ):
        read(**asked).load().collect()
    rows = read(**asked, failOnDataLoss="false").load().collect()
    assert [row.offset for row in rows] == list(range(20, 50))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"subscribe": "no-such-topic"}, "UNKNOWN_TOPIC_OR_PARTITION"),
        ({}, "exactly one of subscribe"),
    ],
)
def test_a_query_that_cannot_work_says_why(read, options, message):
    with pytest.raises(Exception, match=message):
        read(**options).load().collect()

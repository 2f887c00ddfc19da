"""Every range of a log with hidden records, gaps and empty batches, on any broker.

A range may end on an offset that no reader sees: on the marker of a transaction, inside
an aborted one, in a gap that compaction left. Its rows are those of a whole read.
"""

from __future__ import annotations

import json
import random
import time
from itertools import combinations

import pytest
from confluent_kafka import Producer

from mpbroker.client.cluster import Cluster, TopicPartition
from mpbroker.client.consumer.fetcher import Fetcher, FetchSettings
from mpbroker.spark.offsets import OffsetRange, OffsetReader
from mpbroker.spark.options import LATEST, parse_source_options
from mpbroker.spark.partition_reader import read_range
from tests.spark.topic_records import topic_records
from tests.support.broker import Broker
from tests.support.children import wait_until

LEVELS = ["read_uncommitted", "read_committed"]
LATER_MS = 600_000  # so late that a new segment begins


@pytest.fixture
def compacting(broker, make_broker):
    """Return the address of a broker that compacts soon after a segment is closed."""
    if isinstance(broker, Broker):
        return make_broker({"log.cleaner.backoff.ms": 50}).bootstrap
    return broker.bootstrap


@pytest.fixture
def bootstrap(compacting):
    return compacting


@pytest.fixture
def put(bootstrap):
    """Write batches of one record each, in transactions or without."""
    producers = {}
    now_ms = time.time_ns() // 1_000_000  # markers have the broker's time

    def producer_of(topic, name):
        if name not in producers:
            settings = {"bootstrap.servers": bootstrap, "enable.idempotence": True}
            if not name.startswith("plain"):
                settings["transactional.id"] = f"{topic}-{name}"
            producers[name] = Producer(settings)
            if not name.startswith("plain"):
                producers[name].init_transactions(90)
        return producers[name]

    def write(topic, name, *keys, end=None, later=0, begin=True):
        producer = producer_of(topic, name)
        if begin and not name.startswith("plain"):
            producer.begin_transaction()
        for key in keys:
            producer.produce(
                topic, b"of " + key, key, partition=0, timestamp=now_ms + later
            )
            assert producer.flush(90) == 0
        if end == "commit":
            producer.commit_transaction(90)
        elif end == "abort":
            producer.abort_transaction(90)

    yield write
    producers.clear()  # their threads outlive no broker


@pytest.fixture
def filled(bootstrap, make_topic, put):
    """Return a topic with a compacted segment, and one after it."""
    topic = make_topic(
        **{
            "cleanup.policy": "compact",
            "segment.ms": "300000",
            "min.cleanable.dirty.ratio": "0.01",
        }
    )
    put(topic, "plain", b"k0", b"k1")
    put(topic, "a", b"k0", b"k2", end="commit")
    put(topic, "b", b"k1", b"k3", end="abort")
    # The last batch of this producer stays without records, for its sequence number.
    put(topic, "plain once", b"k4")
    put(topic, "plain", b"k4", b"k5")
    put(topic, "a", b"k2", b"k0", end="commit")
    put(topic, "b", b"k6", end="abort")
    for _ in range(3):
        put(topic, "plain", b"k1", later=LATER_MS)
        put(topic, "a", b"k1", later=LATER_MS)
        put(topic, "b", b"k7", later=LATER_MS)
        put(topic, "plain", b"k8", later=LATER_MS)
        put(topic, "b", later=LATER_MS, begin=False, end="abort")
        put(topic, "a", b"k7", later=LATER_MS, begin=False, end="commit")
    put(topic, "b", b"k9", later=LATER_MS, end="abort")

    # Of the first segment the last of each key is left.
    wait_until(lambda: offsets_seen(bootstrap, topic, LEVELS[1])[0] > 0)
    return topic


def offsets_seen(bootstrap, topic, level):
    found = topic_records(bootstrap, topic, isolation=level)
    return [message.offset() for message in found]


def batch_sizes(bootstrap, topic):
    """Return base offset and number of records of each batch that readers are given."""
    options = parse(bootstrap, topic, LEVELS[0])
    partition = TopicPartition(topic, 0)
    end = end_of(options)
    found = []
    with Cluster(options.bootstrap, 30, options.client) as cluster:
        (entry,) = cluster.topic(topic).partitions
        fetcher = Fetcher(
            cluster, {partition: 0}, {partition: entry.leader_id}, FetchSettings(0)
        )
        while fetcher.positions[partition] < end:
            found += [
                (each.header.base_offset, each.header.record_count)
                for each in fetcher.fetch()
            ]
    return dict(found)


def parse(bootstrap, topic, level):
    return parse_source_options(
        {
            "kafka.bootstrap.servers": bootstrap,
            "subscribe": topic,
            "kafka.isolation.level": level,
        },
        streaming=False,
    )


def end_of(options):
    reader = OffsetReader(options)
    try:
        ((_, end),) = reader.offsets(reader.partitions(), LATEST).items()
    finally:
        reader.close()
    return end


def test_every_range_has_the_rows_that_a_whole_read_has_there(bootstrap, filled):
    sizes = batch_sizes(bootstrap, filled)
    assert 0 in sizes.values(), "there is no empty batch to read"
    for level in LEVELS:
        options = parse(bootstrap, filled, level)
        end = end_of(options)
        whole = offsets_seen(bootstrap, filled, level)
        hidden = sorted(set(range(end)) - set(whole))
        assert len(hidden) >= 10
        assert hidden[-1] == end - 1, "the log ends with a record that is seen"
        ranges = list(combinations(range(end + 1), 2))
        # A connection each: in an order that shows what one leaves behind.
        random.shuffle(ranges)
        for start, stop in ranges:
            range_ = OffsetRange(TopicPartition(filled, 0), start, stop)
            rows = [
                offset
                for batch in read_range(range_, options)
                for offset in batch.column("offset").to_pylist()
            ]
            assert rows == [each for each in whole if start <= each < stop], range_


@pytest.mark.timeout(900)
def test_a_query_shows_the_rows_of_ranges_that_end_unseen(read, bootstrap, filled):
    for level in LEVELS:
        whole = offsets_seen(bootstrap, filled, level)
        end = end_of(parse(bootstrap, filled, level))
        hidden = sorted(set(range(end)) - set(whole))
        # Alone, up to it, and from it on: what is behind it is in the same answers.
        last = random.choice(hidden[:-1])
        for start, stop in ((last, last + 1), (0, last + 1), (last, end)):
            frame = read(
                subscribe=filled,
                startingOffsets=json.dumps({filled: {"0": start}}),
                endingOffsets=json.dumps({filled: {"0": stop}}),
                **{"kafka.isolation.level": level},
            ).load()
            rows = sorted(row.offset for row in frame.select("offset").collect())
            assert rows == [each for each in whole if start <= each < stop], last

"""format("mpbroker-segments") shows what format("mpbroker") and other clients show."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from confluent_kafka import Producer

from tests.support.directory_store import directory_store

pytestmark = pytest.mark.timeout(900)

COLUMNS = [
    "partition",
    "offset",
    "key",
    "value",
    "timestamp",
    "timestampType",
    "headers",
]


def rows_of(frame):
    return sorted(tuple(map(str, row)) for row in frame.select(*COLUMNS).collect())


def test_the_files_show_what_the_broker_shows(spark, own_broker, read, make_topic):
    topic = make_topic(partitions=2, **{"segment.bytes": "1048576"})
    sent = []
    for codec in ("none", "zstd"):
        producer = Producer(
            {"bootstrap.servers": own_broker.bootstrap, "compression.type": codec}
        )
        for number in range(1_500):
            key = None if number % 3 else b"k%d" % number
            value = None if number % 7 == 6 else b"%d" % number * 900
            producer.produce(
                topic,
                value,
                key,
                partition=number % 2,
                headers=[("h", b"\xff"), ("n", None)] if number % 5 == 0 else None,
            )
            sent.append((key, value))
            if number % 100 == 99:
                producer.flush(90)  # more batches than one
        assert producer.flush(90) == 0
    segments = spark.read.format("mpbroker-segments").options(
        path=str(own_broker.data_dir), subscribe=topic, includeHeaders="true"
    )
    from_broker = read(subscribe=topic, includeHeaders="true").load()
    whole = rows_of(segments.option("includeActive", "true").load())
    assert whole == rows_of(from_broker)
    assert len(whole) == len(sent)

    closed = segments.option("includeActive", "false").load()
    found = rows_of(closed)
    ends = {
        number: _active_base(own_broker.data_dir / f"{topic}-{number}")
        for number in (0, 1)
    }
    assert min(ends.values()) > 0
    until = read(
        subscribe=topic,
        includeHeaders="true",
        endingOffsets=json.dumps({topic: {str(k): v for k, v in ends.items()}}),
    )
    assert found == rows_of(until.load())
    assert closed.rdd.getNumPartitions() >= 2

    with directory_store(own_broker.data_dir) as store:
        there = segments.option("path", store.uri()).option("includeActive", "true")
        assert rows_of(there.load()) == whole
        asked = {key.partition("/")[0] for key, _, _ in store.ranges if "/" in key}
        assert asked == {f"{topic}-{number}" for number in (0, 1)}


def _active_base(directory):
    bases = sorted(int(path.stem) for path in directory.glob("*.log"))
    assert all(a < b for a, b in pairwise(bases))
    return bases[-1]

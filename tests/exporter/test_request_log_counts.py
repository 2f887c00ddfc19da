"""Between the requests' lines stand what errors and partitions' ends have risen by."""

from __future__ import annotations

from mpbroker.exporter.partitions import PartitionFigures
from mpbroker.exporter.requests.request_log_counts import INTERVAL_NS, RequestLogCounts


class Broker:
    """What is counted, to be changed between looks."""

    def __init__(self):
        self.errors = {(1, 1): 5}
        self.ends = {("old", 0): (10, 1_000)}

    def counts(self):
        return RequestLogCounts(
            lambda: dict(self.errors),
            self,
            lambda: {topic for topic, _ in self.ends} | {"unloaded"},
            now_ns=0,
        )

    def __iter__(self):
        for (topic, partition), (end, size) in self.ends.items():
            yield PartitionFigures(topic, partition, 0, end, size, 0, 0, False)


def test_nothing_is_said_where_nothing_has_happened():
    counts = Broker().counts()
    assert counts.lines(INTERVAL_NS, 100.0) == []


def test_errors_are_counted_from_the_last_look_on():
    broker = Broker()
    counts = broker.counts()
    broker.errors = {(1, 1): 7, (0, 3): 1, (0, 9999): 2}
    assert counts.lines(INTERVAL_NS - 1, 99.0) == []
    assert counts.lines(INTERVAL_NS, 100.0) == [
        {
            "time": 100.0,
            "seconds": 5.0,
            "errors": [
                {"api": "Produce", "error": "UNKNOWN_TOPIC_OR_PARTITION", "count": 1},
                {"api": "Produce", "error": "9999", "count": 2},
                {"api": "Fetch", "error": "OFFSET_OUT_OF_RANGE", "count": 2},
            ],
        }
    ]
    assert counts.lines(2 * INTERVAL_NS, 105.0) == []


def test_partitions_that_grew_come_by_how_much():
    broker = Broker()
    counts = broker.counts()
    broker.ends = {
        ("old", 0): (15, 900),  # retention took more than was added
        ("new", 1): (7, 700),
        ("unloaded", 0): (1_000, 9_000),  # opened, and was there before
    }
    (line,) = counts.lines(1_000_000_000, 1.0, is_last=True)
    assert line["appended"] == [
        {"topic": "new", "partition": 1, "records": 7, "bytes": 700},
        {"topic": "old", "partition": 0, "records": 5, "bytes": 0},
    ]
    assert line["seconds"] == 1.0
    broker.ends["unloaded", 0] = (1_001, 9_010)
    (line,) = counts.lines(INTERVAL_NS * 2, 6.0)
    assert line["appended"] == [
        {"topic": "unloaded", "partition": 0, "records": 1, "bytes": 10}
    ]

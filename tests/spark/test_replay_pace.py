"""How fast a replay sends, told by what is due in each second, not by a clock."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest

from mpbroker.spark.pipeline.description import Replay
from mpbroker.spark.pipeline.replay import Pace, in_order


class FakeClock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock():
    return FakeClock()


def sent_by_second(pace, clock, dues, pauses=None):
    """Return how many rows are sent in each second; the pauses come before rows."""
    found = Counter()
    for number, due in enumerate(dues):
        clock.now += (pauses or {}).get(number, 0)
        pace.wait(due)
        found[int(clock.now)] += 1
    return found


TEN_A_SECOND = [number / 10 for number in range(50)]


def test_a_rate_is_held(clock):
    pace = Pace(clock.now, 1.0, now=clock, sleep=clock.sleep)
    found = sent_by_second(pace, clock, TEN_A_SECOND)
    assert sum(found.values()) == 50
    assert all(9 <= count <= 11 for count in found.values())


def test_a_task_that_begins_late_makes_up_for_nothing(clock):
    pace = Pace(clock.now - 30, 1.0, now=clock, sleep=clock.sleep)
    found = sent_by_second(pace, clock, TEN_A_SECOND)
    assert max(found.values()) <= 11


def test_after_a_pause_one_second_is_made_up_for(clock):
    pace = Pace(clock.now, 1.0, now=clock, sleep=clock.sleep)
    found = sent_by_second(pace, clock, TEN_A_SECOND, {20: 10})
    assert sorted(found.values())[-1] <= 21
    assert sorted(found.values())[-2] <= 11


def test_with_a_speed_all_tasks_keep_to_one_clock(clock):
    pace = Pace(clock.now - 3, None, now=clock, sleep=clock.sleep)
    found = sent_by_second(pace, clock, TEN_A_SECOND)
    assert found[100] >= 30
    assert sum(found.values()) == 50
    assert clock.now < 102


BEGUN = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def rows(spark):
    """Make rows of partitions by their sizes, one a minute."""

    def make(*sizes):
        found = [
            ("t", partition, offset, BEGUN + timedelta(minutes=offset))
            for partition, size in enumerate(sizes)
            for offset in range(size)
        ]
        ddl = "_topic STRING, _partition INT, _offset BIGINT, _timestamp TIMESTAMP"
        return spark.createDataFrame(found, ddl)

    return make


@pytest.mark.parametrize("sizes", [(1_000,), (900, 90, 10)])
def test_the_rate_does_not_depend_on_how_rows_fall_to_tasks(spark, rows, sizes):
    ordered = in_order(rows(*sizes), 8, Replay(rate=100), total=1_000, first_s=0)
    dues = [row["_due"] for row in ordered.select("_due").collect()]
    found = Counter(int(due) for due in dues)
    assert set(found) == set(range(10))
    assert all(100 - 3 <= count <= 100 + 3 for count in found.values())


def test_partitions_of_a_task_are_sent_side_by_side_and_each_in_order(rows):
    ordered = in_order(rows(40, 20), 1, Replay(rate=10), total=60, first_s=0)
    found = [(row["_partition"], row["_offset"]) for row in ordered.collect()]
    for partition, size in ((0, 40), (1, 20)):
        offsets = [offset for where, offset in found if where == partition]
        assert offsets == list(range(size))
    assert Counter(where for where, _ in found[:30]) == {0: 20, 1: 10}


def test_with_a_speed_rows_are_due_at_the_pace_of_their_timestamps(rows):
    replay = Replay(speed=60)
    first_s = BEGUN.timestamp()
    ordered = in_order(rows(5), 2, replay, total=5, first_s=first_s)
    assert [row["_due"] for row in ordered.collect()] == [0, 1, 2, 3, 4]

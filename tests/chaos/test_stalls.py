"""What is subtracted from a pause is the machine's own standing still, and no more."""

from __future__ import annotations

import os
import signal
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.stalls import Stalls, latest, overlap_s
from tests.support.children import wait_until

_TICKS = st.integers(0, 60)
_INTERVALS = st.lists(st.tuples(_TICKS, _TICKS).map(lambda pair: tuple(sorted(pair))))


@given(_INTERVALS, _TICKS, _TICKS)
def test_overlap_is_what_a_count_of_moments_says(intervals, one, other) -> None:
    begin, end = sorted((one, other))
    moments = sum(
        any(first <= moment < last for first, last in intervals)
        for moment in range(begin, end)
    )
    assert overlap_s(intervals, begin, end) == moments


@pytest.mark.parametrize(
    ("stalls", "expected"),
    [
        ([], 0.0),
        ([(1.0, 2.0)], 0.0),  # before the pause
        ([(9.0, 11.0)], 1.0),  # only its end is in the pause
        ([(11.0, 12.0), (11.5, 12.5)], 1.5),  # two cores at the same time
        ([(0.0, 99.0)], 10.0),  # never more than the pause itself
    ],
)
def test_only_stalls_within_the_pause_count(stalls, expected) -> None:
    assert overlap_s(stalls, 10.0, 20.0) == pytest.approx(expected)


@given(_INTERVALS, _TICKS)
def test_the_latest_are_all_that_matter_from_a_moment_on(intervals, begin) -> None:
    ended = sorted(intervals, key=lambda each: each[1])
    found = overlap_s(latest(ended, begin), begin, 99)
    assert found == overlap_s(ended, begin, 99)


def test_standing_still_is_known_while_it_lasts_and_afterwards() -> None:
    stalls = Stalls()

    def seen_s() -> float:
        now = time.monotonic()
        return overlap_s(stalls.during(stopped, now), stopped, now)

    try:
        wait_until(lambda: stalls.has_looked)
        stopped = time.monotonic()
        os.kill(stalls.pid, signal.SIGSTOP)
        try:
            wait_until(lambda: seen_s() > 0.2)
        finally:
            os.kill(stalls.pid, signal.SIGCONT)
        resumed = time.monotonic()
        wait_until(lambda: not stalls.during(time.monotonic() - 1e-3, time.monotonic()))
        assert overlap_s(stalls.during(stopped, resumed), stopped, resumed) > 0.2
    finally:
        stalls.close()

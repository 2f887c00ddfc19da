"""Work is held down to its rate, and can be ended while it waits."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.storage.files.throttler import Throttler


class Clock:
    """A clock that only sleeping, or working, moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds
        self.slept += seconds


@given(
    st.lists(st.tuples(st.integers(0, 100_000), st.floats(0, 0.2)), min_size=1),
    st.integers(1_000, 1_000_000),
)
def test_the_rate_is_kept_but_for_one_interval(
    work: list[tuple[int, float]], rate: int
) -> None:
    clock = Clock()
    throttler = Throttler(rate, lambda: None, clock, clock.sleep)
    total = 0
    for size, took_s in work:
        clock.now += took_s
        throttler.done(size)
        total += size
    assert total <= rate * (clock.now + 0.3) + 1


def test_work_below_the_rate_is_never_held() -> None:
    clock = Clock()
    throttler = Throttler(1_000, lambda: None, clock, clock.sleep)
    for _ in range(100):
        clock.now += 0.1
        throttler.done(99)
    assert clock.slept == 0
    unlimited = Throttler(math.inf, lambda: None, clock, clock.sleep)
    unlimited.done(1 << 40)
    assert clock.slept == 0


def test_waiting_can_be_ended() -> None:
    clock = Clock()
    beats = iter(range(5))

    def beat() -> None:
        if next(beats) == 4:
            raise InterruptedError

    throttler = Throttler(1, beat, clock, clock.sleep)
    with pytest.raises(InterruptedError):
        throttler.done(1_000_000)
    assert clock.slept < 1

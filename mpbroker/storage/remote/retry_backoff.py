"""RetryBackoff: the time at which a failed operation of a store is tried again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Final

from mpbroker.base.named_tuple import NamedTuple


class BackoffLimits(NamedTuple):
    """The bounds of the time between two attempts; the defaults are Kafka's.

    Attributes:
        first_s: the time after the first failure, in seconds; it doubles with each
            failure that follows.
        longest_s: the longest time, in seconds, before the jitter.
        jitter: the largest random change of each time, as a fraction of it, up or down.
            Without it all brokers of a store would come back at the same moment.
    """

    first_s: float = 0.5
    longest_s: float = 30.0
    jitter: float = 0.2


DEFAULT_BACKOFF: Final = BackoffLimits()


class RetryBackoff:
    """Counts the failures in a row of one operation; tells when to try it again.

    Args:
        limits: the limits of the time between two attempts.
        clock: returns the time in seconds, as ``time.monotonic``.
        draw: returns a random number from 0 to 1, as ``random.random``.
    """

    __slots__ = ("_clock", "_draw", "_due", "_failures", "_limits")

    def __init__(
        self,
        limits: BackoffLimits,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._draw = draw
        self._failures = 0
        self._due = 0.0

    @property
    def is_failing(self) -> bool:
        """Whether the last attempt failed."""
        return self._failures > 0

    def is_due(self) -> bool:
        """Whether enough time has passed for the next attempt."""
        return not self._failures or self._clock() >= self._due

    def failed(self) -> None:
        """Note a failed attempt, and set the time of the next one."""
        limits = self._limits
        doubled = min(self._failures, 30)  # 2.0**1100 is an error
        wait = min(limits.first_s * 2.0**doubled, limits.longest_s)
        wait *= 1 + limits.jitter * (2 * self._draw() - 1)
        self._failures += 1
        self._due = self._clock() + wait

    def worked(self) -> None:
        """Note an attempt that worked: the count of failures in a row begins anew."""
        self._failures = 0

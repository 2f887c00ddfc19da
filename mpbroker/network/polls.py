"""Polls: count a processor's polls of the kernel, and those that return too early.

A poll that waits should return with an event, or when its time is over. An empty poll
returns earlier without an event. The cause is a signal, or a bug in the kernel or in
the broker that makes a processor spin instead of sleep (netty calls this the "epoll
bug"; Kafka does not handle it either). A few empty polls are harmless. If there are a
thousand in a second, a warning is logged.

The C code that does the same as ``count`` is in native/network/processor_turn.c.
"""

from __future__ import annotations

from typing import Final

from mpbroker.base.logger import get_logger
from mpbroker.ipc.layout import PROCESSOR_COUNTERS, ProcessorCounter, processor_row

_LOG = get_logger(__name__)

# This many empty polls in a second are not harmless any more.
_MANY: Final = 1000
_QUIET_NS: Final = 60_000_000_000


class Polls:
    """Counts one processor's polls in shared memory.

    A restarted processor continues the counts of its predecessor.
    """

    def __init__(self, processor: int, words: memoryview) -> None:
        counters = processor_row(processor) + PROCESSOR_COUNTERS
        self._words = words
        self._processor = processor
        self._polls_word = counters + ProcessorCounter.POLLS
        self._empty_word = counters + ProcessorCounter.EMPTY_POLLS
        self._before: int = words[self._empty_word]
        self._quiet_until_ns = 0

    def count(self, last_poll: tuple[int, float], waited_ns: int) -> None:
        """Count a poll that has returned, and whether it was an empty one.

        Args:
            last_poll: the selector's ``last_poll``: the number of events, and the
                timeout in seconds. A poll with timeout 0 is never counted as empty.
            waited_ns: how long the poll took.
        """
        found, wait_s = last_poll
        words = self._words
        words[self._polls_word] += 1
        # Half of the timeout: clocks and timers do not agree to the nanosecond.
        if not found and wait_s and waited_ns < wait_s * 5e8:
            words[self._empty_word] += 1

    def look(self, now_ns: int) -> None:
        """Log a warning if 1,000 or more polls since the last call were empty.

        To be called once a second. At most one warning is logged in a minute.
        """
        empty = self._words[self._empty_word]
        many, self._before = empty - self._before, empty
        if many >= _MANY and now_ns >= self._quiet_until_ns:
            self._quiet_until_ns = now_ns + _QUIET_NS
            _LOG.warning(
                "processor %d: %d polls of the last second returned early and without"
                " events: it spins; please report this, with the kernel's version",
                self._processor,
                many,
            )

"""How often a processor has asked the kernel for events, and in vain.

A poll that waits comes back with an event, or when its time is over. One that comes
back early and with nothing is an empty poll: a signal, or a fault of the kernel or of
ours that makes a processor spin where it should sleep (netty's "epoll bug"; Kafka has
nothing against it either). One now and then is nothing; many are told to the log.

The twin of ``count`` is in native/network/processor_turn.c.
"""

from __future__ import annotations

from typing import Final

from mpbroker.base.logger import get_logger
from mpbroker.ipc.layout import PROCESSOR_COUNTERS, ProcessorCounter, processor_row

_LOG = get_logger(__name__)

# Of a second's empty polls: from here on they are no accident.
_MANY: Final = 1000
_QUIET_NS: Final = 60_000_000_000


class Polls:
    """One processor's; its successors go on with the counts."""

    def __init__(self, processor: int, words: memoryview) -> None:
        counters = processor_row(processor) + PROCESSOR_COUNTERS
        self._words = words
        self._processor = processor
        self._polls_word = counters + ProcessorCounter.POLLS
        self._empty_word = counters + ProcessorCounter.EMPTY_POLLS
        self._before: int = words[self._empty_word]
        self._quiet_until_ns = 0

    def count(self, last_poll: tuple[int, float], waited_ns: int) -> None:
        """A poll has come back.

        Args:
            last_poll: of the selector; where it was not to wait, it only looked.
        """
        found, wait_s = last_poll
        words = self._words
        words[self._polls_word] += 1
        # Half of it: clocks and timers do not agree to the nanosecond.
        if not found and wait_s and waited_ns < wait_s * 5e8:
            words[self._empty_word] += 1

    def look(self, now_ns: int) -> None:
        """Once a second: are there too many?"""
        empty = self._words[self._empty_word]
        many, self._before = empty - self._before, empty
        if many >= _MANY and now_ns >= self._quiet_until_ns:
            self._quiet_until_ns = now_ns + _QUIET_NS
            _LOG.warning(
                "processor %d: %d polls of the last second came back early and with"
                " nothing: it spins; please report it, with the kernel's version",
                self._processor,
                many,
            )

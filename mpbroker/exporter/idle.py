"""Compute shares of the last seconds: how long processes and acceptors did no work.

A processor or handler is idle while it has nothing to do. An acceptor is blocked while
it has a connection that no processor has room for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from mpbroker.exporter.exposition import Family, gauge
from mpbroker.ipc.layout import (
    HANDLER_ACTIVE,
    HANDLER_COUNTERS,
    MAX_HANDLERS,
    MAX_PROCESSORS,
    METRICS,
    METRICS_BLOCKED,
    PROCESSOR_COUNTERS,
    PROCESSOR_LISTENER,
    HandlerCounter,
    ProcessorCounter,
    handler_row,
    processor_row,
)

BLOCKED_RATIO: Final = "mpbroker_acceptor_blocked_ratio"


class IdleRatios:
    """Computes each process's share of idle time between two calls of ``look``.

    A process that sleeps longer than the time between the calls has counted nothing
    yet, or counts all at once: therefore the ratios are kept between 0 and 1.

    Args:
        words: the words of the control segment, the shared memory of all processes.
        listeners: the names of the broker's listeners, by index.

    Attributes:
        ratios: the shares, by role and id. For the role "acceptor", they are the shares
            in which new connections had to wait, by the index of the listener.
    """

    def __init__(self, words: memoryview, listeners: Sequence[str] = ()) -> None:
        self._words = words
        self._listeners = listeners
        self._before: dict[tuple[str, int], int] = {}
        self._before_ns = 0
        self.ratios: dict[tuple[str, int], float] = {}

    def look(self, now_ns: int) -> None:
        """Compute processes' shares of idle time since the last call."""
        idle, span = self._times_ns(), now_ns - self._before_ns
        if self._before and span > 0:
            self.ratios = {
                key: min(1.0, max(0.0, (ns - self._before[key]) / span))
                for key, ns in idle.items()
                if key in self._before
            }
        self._before, self._before_ns = idle, now_ns

    def _times_ns(self) -> dict[tuple[str, int], int]:
        words = self._words
        found = {
            ("acceptor", index): words[METRICS + METRICS_BLOCKED + index]
            for index in range(len(self._listeners))
        }
        for number in range(MAX_HANDLERS):
            row = handler_row(number)
            if words[row + HANDLER_ACTIVE]:
                word = row + HANDLER_COUNTERS + HandlerCounter.IDLE_NS
                found["handler", number] = words[word]
        for number in range(MAX_PROCESSORS):
            row = processor_row(number)
            if words[row + PROCESSOR_LISTENER]:
                word = row + PROCESSOR_COUNTERS + ProcessorCounter.IDLE_NS
                found["processor", number] = words[word]
        return found

    def families(self) -> tuple[Family, Family]:
        """Return two gauges: idle time of processes, and waiting time of acceptors."""
        ratio = gauge("mpbroker_idle_ratio", "Share of the last seconds without work.")
        blocked = gauge(
            BLOCKED_RATIO,
            "Share of the last seconds in which new connections waited for a processor"
            " with room.",
        )
        for (role, number), value in sorted(self.ratios.items()):
            if role == "acceptor":
                blocked.add(value, listener=self._listeners[number])
            else:
                ratio.add(value, role=role, id=number)
        return ratio, blocked

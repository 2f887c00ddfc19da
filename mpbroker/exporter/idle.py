"""Compute which share of the last seconds each process was idle, 0 to 1."""

from __future__ import annotations

from mpbroker.exporter.exposition import Family, gauge
from mpbroker.ipc.layout import (
    HANDLER_ACTIVE,
    HANDLER_COUNTERS,
    MAX_HANDLERS,
    MAX_PROCESSORS,
    PROCESSOR_COUNTERS,
    PROCESSOR_LISTENER,
    HandlerCounter,
    ProcessorCounter,
    handler_row,
    processor_row,
)


class IdleRatios:
    """Compares the idle times of two looks.

    A process that sleeps longer than the time between them has counted nothing yet, or
    counts all at once: therefore the ratios are bounded.
    """

    def __init__(self, words: memoryview) -> None:
        self._words = words
        self._before: dict[tuple[str, int], int] = {}
        self._before_ns = 0
        self.ratios: dict[tuple[str, int], float] = {}

    def look(self, now_ns: int) -> None:
        """Compute the ratios since the last look."""
        idle, span = self._idle_ns(), now_ns - self._before_ns
        if self._before and span > 0:
            self.ratios = {
                key: min(1.0, max(0.0, (ns - self._before[key]) / span))
                for key, ns in idle.items()
                if key in self._before
            }
        self._before, self._before_ns = idle, now_ns

    def _idle_ns(self) -> dict[tuple[str, int], int]:
        words = self._words
        found = {}
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

    def family(self) -> Family:
        ratio = gauge("mpbroker_idle_ratio", "Share of the last seconds without work.")
        for (role, number), value in sorted(self.ratios.items()):
            ratio.add(value, role=role, id=number)
        return ratio

"""What a request costs its processor: a share of the processor's time.

Kafka looks at the clock around each read and write of a connection. Here a processor
works on many connections in one go, most of whose clients have no quota. So once a
second it divides the CPU time that it has used by what it has done meanwhile, and
stores what one unit costs; whoever charges a request multiplies. What is charged adds
up to the processor's time, and a single request costs what such a one did on the
average of the last second that had enough of them. The way of a request is as it was.

A unit is a request, and as much again for each 64 KiB of it and of its answer. Measured
of produces that come one by one: 45 us of CPU for a small one, 170 us for 256 KiB, 350
us for 900 KiB.

The twin of ``network_ns`` is in native/server/quotas.c.

Source: KIP-124; Kafka's KafkaChannel.getAndResetNetworkThreadTimeNanos.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from mpbroker.ipc.layout import (
    PROCESSOR_BEAT,
    PROCESSOR_COUNTERS,
    PROCESSOR_UNIT_COST,
    SLOTS_PER_PROCESSOR,
    UNIT_SHIFT,
    ProcessorCounter,
    processor_row,
)

# Of fewer in a second the share would mostly be of what nobody has asked for.
_ENOUGH_UNITS: Final = 64
# New connections and handshakes are nobody's requests, and should not become dear ones.
_MOST_NS: Final = 1_000_000


def network_ns(words: memoryview, slot: int, length: int) -> int:
    """Return what a slot's request costs its processor, ns.

    Args:
        words: the control segment.
        length: bytes of the request and of its answer.
    """
    row = processor_row(slot // SLOTS_PER_PROCESSOR)
    unit_ns: int = words[row + PROCESSOR_UNIT_COST]
    return unit_ns * ((1 << UNIT_SHIFT) + length) >> UNIT_SHIFT


class NetworkCosts:
    """One processor's: its to write.

    Args:
        cpu_ns: the time that the calling thread has used.
    """

    def __init__(
        self,
        processor: int,
        words: memoryview,
        cpu_ns: Callable[[], int] = time.thread_time_ns,
    ) -> None:
        self._words = words
        self._row = processor_row(processor)
        self._cpu_ns = cpu_ns
        self._before = cpu_ns(), self._units()

    def beat(self, now_ns: int) -> None:
        """Say that the processor is alive, and what a unit has cost since last time."""
        words, row = self._words, self._row
        words[row + PROCESSOR_BEAT] = now_ns
        before_ns, before_units = self._before
        self._before = spent_ns, units = self._cpu_ns(), self._units()
        if units - before_units >= _ENOUGH_UNITS:
            unit_ns = (spent_ns - before_ns) // (units - before_units)
            words[row + PROCESSOR_UNIT_COST] = min(unit_ns, _MOST_NS)

    def _units(self) -> int:
        counters, words = self._row + PROCESSOR_COUNTERS, self._words
        in_and_out: int = (
            words[counters + ProcessorCounter.BYTES_IN]
            + words[counters + ProcessorCounter.BYTES_OUT]
        )
        requests: int = words[counters + ProcessorCounter.REQUESTS]
        return requests + (in_and_out >> UNIT_SHIFT)

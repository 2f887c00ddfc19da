"""The cost of a request for its processor: a share of the processor's CPU time.

Kafka reads the clock around each read and write of a connection. Here a processor works
on many connections at once, and most of their clients have no quota. So once a second
the processor divides the CPU time it has used by the number of units it has processed,
and stores the cost of one unit. A handler that charges a request multiplies that by the
request's units. All charges together are the processor's time, and a single request is
charged the average cost of the last second that had enough requests. Nothing is
measured while a request is processed.

A request is one unit, and one more for each 64 KiB of the request and of its answer.
Measured for Produce requests that come one by one: 45 us of CPU for a small one, 170 us
for 256 KiB, 350 us for 900 KiB.

The C code that does the same as ``network_ns`` is in native/server/quotas.c.

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

# With fewer units a second, most of the CPU time would not come from requests.
_ENOUGH_UNITS: Final = 64
# An upper limit: new connections and handshakes take time too, and must not make a few
# requests expensive.
_MOST_NS: Final = 1_000_000


def network_ns(words: memoryview, slot: int, length: int) -> int:
    """Return how much of its processor's CPU time a request has cost, in ns.

    It is the processor's present cost of a unit, times the units of the request.

    Args:
        words: the words of the control segment.
        slot: the request's slot; it also says which processor has the request.
        length: bytes of the request and of its answer.
    """
    row = processor_row(slot // SLOTS_PER_PROCESSOR)
    unit_ns: int = words[row + PROCESSOR_UNIT_COST]
    return unit_ns * ((1 << UNIT_SHIFT) + length) >> UNIT_SHIFT


class NetworkCosts:
    """The CPU time that one processor needs for a unit of work, measured each second.

    A unit is a request, or 64 KiB of bytes. Only this processor writes the cost.

    Args:
        processor: its id.
        words: the control segment.
        cpu_ns: returns the CPU time that the calling thread has used.
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
        """Store that the processor is alive, and what a unit of its work cost lately.

        The time is that since the last call. If there were too few units in it, the
        cost that was stored before stays.
        """
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

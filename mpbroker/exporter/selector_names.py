"""Processors' figures under the names of Kafka's selectors (socket-server-metrics).

The names are those that the JMX exporter's usual rules make. Totals come from shared
memory, rates and shares from two looks at them. In Kafka the "requests" of a broker's
selector are what it has sent and the "responses" what it has received; here both are
the requests received, and request_size_avg is their size.

Source: Kafka's Selector.SelectorMetrics; the JMX exporter's example kafka-2_0_0.yml.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from mpbroker.exporter.collector import CLOSED_REASONS
from mpbroker.exporter.exposition import Family, counter, gauge
from mpbroker.ipc.counters.authentication_counts import (
    AuthenticationResult,
    read_authentications,
    read_reauthentication,
)
from mpbroker.ipc.layout import (
    MAX_PROCESSORS,
    PROCESSOR_COUNTERS,
    PROCESSOR_LISTENER,
    PROCESSOR_REGISTERED,
    ProcessorCounter,
    processor_row,
)

_PREFIX: Final = "kafka_server_socket_server_metrics_"
_TEXT: Final = "As Kafka's selectors have it."
C = ProcessorCounter
R = AuthenticationResult

_NO_FAILURE: Final = (
    R.HANDSHAKE,
    R.AUTHENTICATED,
    R.REAUTHENTICATED,
    R.SESSION_EXPIRED,
)
# The words of a processor's row that are added up for each name.
_COUNTED: Final[Mapping[str, Sequence[int]]] = {
    "connection_creation": (PROCESSOR_REGISTERED,),
    "connection_close": [PROCESSOR_COUNTERS + each for each in CLOSED_REASONS],
    "incoming_byte": (PROCESSOR_COUNTERS + C.BYTES_IN,),
    "outgoing_byte": (PROCESSOR_COUNTERS + C.BYTES_OUT,),
    "request": (PROCESSOR_COUNTERS + C.REQUESTS,),
    "response": (PROCESSOR_COUNTERS + C.REQUESTS,),
    "select": (PROCESSOR_COUNTERS + C.POLLS,),
    "io_wait_time_ns": (PROCESSOR_COUNTERS + C.IDLE_NS,),
}
# The results of authentications that are added up for each name.
_AUTHENTICATED: Final[Mapping[str, Sequence[AuthenticationResult]]] = {
    "successful_authentication": (R.HANDSHAKE, R.AUTHENTICATED),
    "failed_authentication": [each for each in R if each not in _NO_FAILURE],
    "successful_reauthentication": (R.REAUTHENTICATED,),
}
_NAMES: Final = (*_COUNTED, *_AUTHENTICATED)

# The totals of one processor by name. Each is shown as it is, and as a rate unless it
# is a time.
_Totals = dict[str, int]


class SelectorNames:
    """Makes metrics of processors; its owner calls ``look`` every few seconds.

    Args:
        listeners: the names of the broker's listeners, by index.
    """

    def __init__(self, words: memoryview, listeners: Sequence[str]) -> None:
        self._words = words
        self._listeners = listeners
        self._before: dict[int, _Totals] = {}
        self._before_ns = 0
        self._rates: dict[int, dict[str, float]] = {}

    def look(self, now_ns: int) -> None:
        """Read the processors' totals, and compute rates since the last call."""
        now, span_s = self._totals(), (now_ns - self._before_ns) / 1e9
        if self._before and span_s > 0:
            self._rates = {
                number: _rates(totals, self._before[number], span_s)
                for number, totals in now.items()
                if number in self._before
            }
        self._before, self._before_ns = now, now_ns

    def families(self) -> list[Family]:
        """Return metrics under the names of Kafka's selectors, for each processor."""
        totals = {name: counter(f"{_PREFIX}{name}_total", _TEXT) for name in _NAMES}
        gauges: dict[str, Family] = {}
        for number, values in self._totals().items():
            labels: dict[str, object] = {
                "listener": self._listener(number),
                "network_processor": number,
            }
            for name, value in values.items():
                totals[name].add(value, **labels)
            for name, shown in self._gauges(number, values).items():
                family = gauges.setdefault(name, gauge(_PREFIX + name, _TEXT))
                family.add(shown, **labels)
        return [*totals.values(), *gauges.values()]

    def _listener(self, number: int) -> str:
        index = self._words[processor_row(number) + PROCESSOR_LISTENER] - 1
        known = 0 <= index < len(self._listeners)
        return self._listeners[index] if known else ""

    def _gauges(self, number: int, totals: _Totals) -> dict[str, float]:
        words = self._words
        open_now = words[processor_row(number) + PROCESSOR_COUNTERS + C.CONNECTIONS]
        again = read_reauthentication(words, [number])
        return {
            "connection_count": open_now,
            "request_size_avg": totals["incoming_byte"] / max(1, totals["request"]),
            "reauthentication_latency_avg": again.sum_ns / 1e6 / max(1, again.times),
            "reauthentication_latency_max": again.max_ns / 1e6,
            **self._rates.get(number, {}),
        }

    def _totals(self) -> dict[int, _Totals]:
        return {
            number: self._totals_of(number)
            for number in range(MAX_PROCESSORS)
            if self._words[processor_row(number) + PROCESSOR_LISTENER]
        }

    def _totals_of(self, number: int) -> _Totals:
        words, row = self._words, processor_row(number)
        ended = read_authentications(words, [number])
        return {
            name: sum(words[row + word] for word in counted)
            for name, counted in _COUNTED.items()
        } | {
            name: sum(ended[each] for each in results)
            for name, results in _AUTHENTICATED.items()
        }


def _rates(now: _Totals, before: _Totals, span_s: float) -> dict[str, float]:
    grown = {name: max(0, now[name] - before[name]) for name in _NAMES}
    waited_ns = grown.pop("io_wait_time_ns")
    # A processor that sleeps longer than the time between two looks counts it all at
    # once, hence the bound.
    waited = min(1.0, waited_ns / (span_s * 1e9))
    polls = max(1, grown["select"])
    return {
        **{f"{name}_rate": value / span_s for name, value in grown.items()},
        "io_wait_ratio": waited,
        "io_ratio": 1.0 - waited,
        "io_wait_time_ns_avg": waited_ns / polls,
        "io_time_ns_avg": (1.0 - waited) * span_s * 1e9 / polls,
    }

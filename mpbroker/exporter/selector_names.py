"""Processors' figures as Kafka's selectors have them (socket-server-metrics), under the
names that the JMX exporter's usual rules make of them.

Totals come from shared memory, rates and shares from two looks at them. In Kafka the
"requests" of a broker's selector are what it has sent and the "responses" what it has
received; here both are the requests that came, and request_size_avg is theirs.

Source: Kafka's Selector.SelectorMetrics; the JMX exporter's example kafka-2_0_0.yml.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

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

_CLOSED: Final = (
    C.CLOSED_BY_PEER,
    C.CLOSED_BAD_FRAME,
    C.CLOSED_IDLE,
    C.CLOSED_ERROR,
    C.CLOSED_BY_HANDLER,
    C.LOST,
    C.CLOSED_EXCESS,
)
_SUCCESSFUL: Final = (R.HANDSHAKE, R.AUTHENTICATED)
_AGAIN: Final = (R.REAUTHENTICATED,)
_NO_FAILURE: Final = (*_SUCCESSFUL, *_AGAIN, R.SESSION_EXPIRED)


class _Totals(NamedTuple):
    """Of one processor; each is shown as a total and, but for the last, as a rate."""

    connection_creation: int
    connection_close: int
    incoming_byte: int
    outgoing_byte: int
    request: int
    response: int
    select: int
    successful_authentication: int
    failed_authentication: int
    successful_reauthentication: int
    io_wait_time_ns: int


_FIELDS: Final = _Totals._fields
_WITH_RATES: Final = _FIELDS[:-1]


class SelectorNames:
    """Makes the families; asked to look every few seconds.

    Args:
        listeners: their names, by index.
    """

    def __init__(self, words: memoryview, listeners: Sequence[str]) -> None:
        self._words = words
        self._listeners = listeners
        self._before: dict[int, _Totals] = {}
        self._before_ns = 0
        self._rates: dict[int, dict[str, float]] = {}

    def look(self, now_ns: int) -> None:
        """Reckon what has changed since the last look."""
        now, span_s = self._totals(), (now_ns - self._before_ns) / 1e9
        if self._before and span_s > 0:
            self._rates = {
                number: _rates(totals, self._before[number], span_s)
                for number, totals in now.items()
                if number in self._before
            }
        self._before, self._before_ns = now, now_ns

    def families(self) -> list[Family]:
        """All of them, by processor."""
        words = self._words
        totals = {name: counter(f"{_PREFIX}{name}_total", _TEXT) for name in _FIELDS}
        gauges: dict[str, Family] = {}
        for number, values in self._totals().items():
            row = processor_row(number)
            listener = words[row + PROCESSOR_LISTENER] - 1
            labels: dict[str, object] = {
                "listener": self._listeners[listener]
                if 0 <= listener < len(self._listeners)
                else "",
                "network_processor": number,
            }
            for name, value in values._asdict().items():
                totals[name].add(value, **labels)
            again = read_reauthentication(words, [number])
            shown = {
                "connection_count": words[row + PROCESSOR_COUNTERS + C.CONNECTIONS],
                "request_size_avg": values.incoming_byte / max(1, values.request),
                "reauthentication_latency_avg": again.sum_ns
                / 1e6
                / max(1, again.times),
                "reauthentication_latency_max": again.max_ns / 1e6,
                **self._rates.get(number, {}),
            }
            for name, value in shown.items():
                family = gauges.setdefault(name, gauge(_PREFIX + name, _TEXT))
                family.add(value, **labels)
        return [*totals.values(), *gauges.values()]

    def _totals(self) -> dict[int, _Totals]:
        return {
            number: self._totals_of(number)
            for number in range(MAX_PROCESSORS)
            if self._words[processor_row(number) + PROCESSOR_LISTENER]
        }

    def _totals_of(self, number: int) -> _Totals:
        words, row = self._words, processor_row(number)
        first = row + PROCESSOR_COUNTERS
        counted = words[first : first + len(C)].tolist()
        ended = read_authentications(words, [number])
        return _Totals(
            connection_creation=words[row + PROCESSOR_REGISTERED],
            connection_close=sum(counted[each] for each in _CLOSED),
            incoming_byte=counted[C.BYTES_IN],
            outgoing_byte=counted[C.BYTES_OUT],
            request=counted[C.REQUESTS],
            response=counted[C.REQUESTS],
            select=counted[C.POLLS],
            successful_authentication=sum(ended[each] for each in _SUCCESSFUL),
            failed_authentication=sum(
                count for each, count in ended.items() if each not in _NO_FAILURE
            ),
            successful_reauthentication=sum(ended[each] for each in _AGAIN),
            io_wait_time_ns=counted[C.IDLE_NS],
        )


def _rates(now: _Totals, before: _Totals, span_s: float) -> dict[str, float]:
    found = {
        f"{name}_rate": max(0.0, getattr(now, name) - getattr(before, name)) / span_s
        for name in _WITH_RATES
    }
    waited_ns = now.io_wait_time_ns - before.io_wait_time_ns
    # Who sleeps longer than the time between two looks counts it all at once.
    waited = min(1.0, max(0.0, waited_ns / (span_s * 1e9)))
    polls = max(1, now.select - before.select)
    return {
        **found,
        "io_wait_ratio": waited,
        "io_ratio": 1.0 - waited,
        "io_wait_time_ns_avg": max(0, waited_ns) / polls,
        "io_time_ns_avg": (1.0 - waited) * span_s * 1e9 / polls,
    }

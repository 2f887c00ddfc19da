"""The rates and averages that clients measure, under Kafka's names.

Source: KIP-187 for totals beside rates; the "Monitoring" tables of the Apache Kafka
documentation for the windows.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import Final

from mpbroker.client.client_request import NetworkCounts

_WINDOW_MS: Final = 30_000.0
_SAMPLES: Final = 2


class Rate:
    """A total, and its rate a second over the last two windows of 30 s."""

    __slots__ = ("_samples", "total")

    def __init__(self) -> None:
        self.total = 0.0
        self._samples: deque[list[float]] = deque(maxlen=_SAMPLES)

    def add(self, amount: float, now_ms: float) -> None:
        self.total += amount
        if not self._samples or now_ms - self._samples[-1][0] >= _WINDOW_MS:
            self._samples.append([now_ms, 0.0])
        self._samples[-1][1] += amount

    def follow(self, total: float, now_ms: float) -> None:
        """Set the total to a count kept elsewhere; its growth counts for the rate."""
        self.add(total - self.total, now_ms)

    def per_second(self, now_ms: float) -> float:
        """Return the rate a second over the last windows."""
        oldest = now_ms - _SAMPLES * _WINDOW_MS
        samples = [sample for sample in list(self._samples) if sample[0] >= oldest]
        if not samples:
            return 0.0
        # As in Kafka: a window that has just begun counts as a whole one.
        elapsed_ms = max(now_ms - samples[0][0], _WINDOW_MS * (_SAMPLES - 1))
        return sum(sample[1] for sample in samples) * 1000 / elapsed_ms


class Average:
    """The mean and the maximum of the values of the last two windows of 30 s."""

    __slots__ = ("_samples",)

    def __init__(self) -> None:
        # Each sample: the time its window began, and the count, sum and maximum in it.
        self._samples: deque[list[float]] = deque(maxlen=_SAMPLES)

    def add(
        self,
        value: float,
        now_ms: float,
        count: int = 1,
        maximum: float | None = None,
    ) -> None:
        """Add ``count`` values whose sum is ``value``.

        Args:
            value: the sum of the values.
            now_ms: the time of the client's clock, in ms.
            count: how many values there are, 1 or more.
            maximum: the largest value; None if all are equal.
        """
        if maximum is None:
            maximum = value / count
        if not self._samples or now_ms - self._samples[-1][0] >= _WINDOW_MS:
            self._samples.append([now_ms, 0, 0.0, maximum])
        sample = self._samples[-1]
        sample[1] += count
        sample[2] += value
        if maximum > sample[3]:
            sample[3] = maximum

    def _recent(self, now_ms: float) -> list[list[float]]:
        oldest = now_ms - _SAMPLES * _WINDOW_MS
        return [sample for sample in list(self._samples) if sample[0] >= oldest]

    def mean(self, now_ms: float) -> float:
        recent = self._recent(now_ms)
        count = sum(sample[1] for sample in recent)
        return sum(sample[2] for sample in recent) / count if count else float("nan")

    def maximum(self, now_ms: float) -> float:
        return max((s[3] for s in self._recent(now_ms)), default=float("nan"))


class Tally:
    """Sums up values cheaply, until `move_to` adds them to an `Average`."""

    __slots__ = ("count", "maximum", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.maximum = -float("inf")

    def add(self, value: float, count: int = 1) -> None:
        """Add ``count`` equal values whose sum is ``value``."""
        self.count += count
        self.total += value
        each = value / count
        if each > self.maximum:
            self.maximum = each

    def move_to(self, average: Average, now_ms: float) -> None:
        """Add the values summed up here to an `Average`, and begin again."""
        if self.count:
            average.add(self.total, now_ms, self.count, self.maximum)
            self.count, self.total, self.maximum = 0, 0.0, -float("inf")


# Kafka's names of what `NetworkCounts` counts, and its attributes.
_NETWORK_RATES: Final = {
    "connection-creation": "connections_made",
    "connection-close": "connections_closed",
    "failed-authentication": "failed_authentications",
    "successful-reauthentication": "reauthentications",
    "request": "requests",
    "response": "responses",
    "incoming-byte": "bytes_in",
    "outgoing-byte": "bytes_out",
    "network-io": "transfers",
    "select": "polls",
}
_NETWORK_TIMES: Final = {"io-wait": "wait_ns", "io": "io_ns"}
FOLLOW_MS: Final = 100.0  # how often counts are taken over into rates


class NetworkMetrics:
    """The rates and times of one or more network clients, added up.

    Any thread may call the methods.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rates = {name: Rate() for name in (*_NETWORK_RATES, *_NETWORK_TIMES)}
        self._followed_ms = -float("inf")

    def follow(
        self, counts: Iterable[NetworkCounts], now_ms: float, *, at_once: bool = False
    ) -> None:
        """Update the rates from the total counts of all network clients.

        Calls are cheap: one that comes less than `FOLLOW_MS` after the last one does
        nothing, unless ``at_once`` is True.
        """
        if not at_once and now_ms - self._followed_ms < FOLLOW_MS:
            return
        self._followed_ms = now_ms
        listed = list(counts)
        with self._lock:
            for name, attribute in (_NETWORK_RATES | _NETWORK_TIMES).items():
                total = sum(getattr(each, attribute) for each in listed)
                self._rates[name].follow(total, now_ms)

    def snapshot(self, now_ms: float) -> dict[str, float]:
        """Return all metrics, under Kafka's names."""
        found: dict[str, float] = {}
        with self._lock:
            for name in _NETWORK_RATES:
                found |= rate_entries(name, self._rates[name], now_ms)
            for name in _NETWORK_TIMES:
                rate = self._rates[name]
                found[f"{name}-time-ns-total"] = rate.total
                found[f"{name}-ratio"] = rate.per_second(now_ms) / 1e9
        return found


class MetricGroup:
    """Rates and averages by name; any thread may call the methods."""

    def __init__(self, rates: Iterable[str], averages: Iterable[str]) -> None:
        """Make rates and averages without values.

        Args:
            rates: their names; `snapshot` returns NAME-rate (a second) and NAME-total.
            averages: their names; `snapshot` returns NAME-avg and NAME-max.
        """
        self._lock = threading.Lock()
        self._rates = {name: Rate() for name in rates}
        self._averages = {name: Average() for name in averages}

    def count(self, name: str, amount: float, now_ms: float) -> None:
        """Add ``amount`` to the rate called ``name``."""
        with self._lock:
            self._rates[name].add(amount, now_ms)

    def observe(self, name: str, value: float, now_ms: float) -> None:
        """Add a value to the average called ``name``."""
        with self._lock:
            self._averages[name].add(value, now_ms)

    def snapshot(self, now_ms: float) -> dict[str, float]:
        """Return all metrics, under Kafka's names."""
        found: dict[str, float] = {}
        with self._lock:
            for name, rate in self._rates.items():
                found |= rate_entries(name, rate, now_ms)
            for name, average in self._averages.items():
                found[f"{name}-avg"] = average.mean(now_ms)
                found[f"{name}-max"] = average.maximum(now_ms)
        return found


def rate_entries(name: str, rate: Rate, now_ms: float) -> dict[str, float]:
    """Return a rate and its total, under Kafka's names."""
    return {f"{name}-rate": rate.per_second(now_ms), f"{name}-total": rate.total}

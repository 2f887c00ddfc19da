"""What a producer counts, under Kafka's names.

Source: the "Producer Monitoring" tables of the Apache Kafka documentation.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

from mpbroker.client.client_request import NetworkCounts

_WINDOW_MS: Final = 30_000.0
_SAMPLES: Final = 2
_FOLLOW_MS: Final = 100.0


class Rate:
    """A total, and how much of it came a second lately, in windows of 30 s."""

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
        """Take on a total that somebody else counts."""
        self.add(total - self.total, now_ms)

    def per_second(self, now_ms: float) -> float:
        """Return the rate over the last windows."""
        oldest = now_ms - _SAMPLES * _WINDOW_MS
        samples = [sample for sample in list(self._samples) if sample[0] >= oldest]
        if not samples:
            return 0.0
        # As in Kafka: a window that has just begun does not count as a short one.
        elapsed_ms = max(now_ms - samples[0][0], _WINDOW_MS * (_SAMPLES - 1))
        return sum(sample[1] for sample in samples) * 1000 / elapsed_ms


class Average:
    """The mean and the maximum of what was seen in the last two windows of 30 s."""

    __slots__ = ("_samples",)

    def __init__(self) -> None:
        # When a window began; count, sum and maximum in it.
        self._samples: deque[list[float]] = deque(maxlen=_SAMPLES)

    def add(self, value: float, now_ms: float, count: int = 1) -> None:
        """Note ``count`` values whose sum is ``value``."""
        if not self._samples or now_ms - self._samples[-1][0] >= _WINDOW_MS:
            self._samples.append([now_ms, 0, 0.0, value / count])
        sample = self._samples[-1]
        sample[1] += count
        sample[2] += value
        sample[3] = max(sample[3], value / count)

    def _recent(self, now_ms: float) -> list[list[float]]:
        oldest = now_ms - _SAMPLES * _WINDOW_MS
        return [sample for sample in list(self._samples) if sample[0] >= oldest]

    def mean(self, now_ms: float) -> float:
        recent = self._recent(now_ms)
        count = sum(sample[1] for sample in recent)
        return sum(sample[2] for sample in recent) / count if count else float("nan")

    def maximum(self, now_ms: float) -> float:
        return max((s[3] for s in self._recent(now_ms)), default=float("nan"))


_RATES: Final = ("record-send", "byte", "record-error", "record-retry")
_MORE_RATES: Final = ("batch-split", "buffer-exhausted")
# What the network client counts, under Kafka's names.
_NETWORK_RATES: Final = {
    "connection-creation": "connections_made",
    "connection-close": "connections_closed",
    "failed-authentication": "failed_authentications",
    "successful-reauthentication": "reauthentications",
    "request": "requests",
    "response": "responses",
    "incoming-byte": "bytes_in",
    "outgoing-byte": "bytes_out",
}
_AVERAGES: Final = (
    "batch-size",
    "compression-rate",
    "record-queue-time",
    "record-size",
    "records-per-request",
    "request-latency",
    "produce-throttle-time",
)
_TOTALS: Final = (
    "flush-time-ns",
    "metadata-wait-time-ns",
    "txn-init-time-ns",
    "txn-begin-time-ns",
    "txn-send-offsets-time-ns",
    "txn-commit-time-ns",
    "txn-abort-time-ns",
)


class ProducerMetrics:
    """Counters of one producer. Every method may be called by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rates = {
            name: Rate() for name in (*_RATES, *_MORE_RATES, *_NETWORK_RATES)
        }
        self._followed_ms = -float("inf")
        self._averages = {name: Average() for name in _AVERAGES}
        self._totals = dict.fromkeys(_TOTALS, 0.0)
        self._topics: dict[str, dict[str, Rate]] = {}
        self._nodes: dict[int, tuple[Rate, Average]] = {}

    def count(self, name: str, amount: float, now_ms: float, topic: str = "") -> None:
        """Add to a rate, and to the topic's if one is named."""
        with self._lock:
            self._rates[name].add(amount, now_ms)
            if topic:
                rates = self._topics.get(topic)
                if rates is None:
                    rates = self._topics[topic] = {key: Rate() for key in _RATES}
                rates[name].add(amount, now_ms)

    def follow(
        self, counts: NetworkCounts, now_ms: float, *, at_once: bool = False
    ) -> None:
        """Take on what the network client has counted.

        Cheap to call often: not all calls do it, unless it must be ``at_once``.
        """
        if not at_once and now_ms - self._followed_ms < _FOLLOW_MS:
            return
        self._followed_ms = now_ms
        with self._lock:
            for name, attribute in _NETWORK_RATES.items():
                self._rates[name].follow(getattr(counts, attribute), now_ms)

    def observe(self, name: str, value: float, now_ms: float, count: int = 1) -> None:
        """Add to an average."""
        with self._lock:
            self._averages[name].add(value, now_ms, count)

    def answered(self, node: int, latency_ms: float, now_ms: float) -> None:
        """Note an answer and how long it took."""
        with self._lock:
            self._averages["request-latency"].add(latency_ms, now_ms)
            if node not in self._nodes:
                self._nodes[node] = Rate(), Average()
            rate, latency = self._nodes[node]
            rate.add(1, now_ms)
            latency.add(latency_ms, now_ms)

    def spend(self, name: str, seconds: float) -> None:
        """Add to one of the total times."""
        with self._lock:
            self._totals[name] += seconds * 1e9

    def snapshot(self, now_ms: float) -> dict[str, dict[str, float]]:
        """Return all by group: producer-metrics, and per topic and node."""
        with self._lock:
            own: dict[str, float] = {}
            for name, rate in self._rates.items():
                own |= _rate(name, rate, now_ms)
            for name, average in self._averages.items():
                own[f"{name}-avg"] = average.mean(now_ms)
                own[f"{name}-max"] = average.maximum(now_ms)
            own |= {f"{name}-total": total for name, total in self._totals.items()}
            groups = {"producer-metrics": own}
            for topic, rates in self._topics.items():
                found: dict[str, float] = {}
                for name, rate in rates.items():
                    found |= _rate(name, rate, now_ms)
                groups[f"producer-topic-metrics.{topic}"] = found
            for node, (rate, latency) in self._nodes.items():
                groups[f"producer-node-metrics.node-{node}"] = {
                    **_rate("response", rate, now_ms),
                    "request-latency-avg": latency.mean(now_ms),
                    "request-latency-max": latency.maximum(now_ms),
                }
            return groups


def _rate(name: str, rate: Rate, now_ms: float) -> dict[str, float]:
    return {f"{name}-rate": rate.per_second(now_ms), f"{name}-total": rate.total}

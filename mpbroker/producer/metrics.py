"""What a producer counts, under Kafka's names.

Source: the "Producer Monitoring" tables of the Apache Kafka documentation.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

from mpbroker.client.client_request import NetworkCounts
from mpbroker.client.measures import Average, NetworkMetrics, Rate, rate_entries
from mpbroker.producer.batch import ProducerBatch
from mpbroker.protocol.batch_header import BATCH_HEADER_SIZE

_RATES: Final = ("record-send", "byte", "record-error", "record-retry")
_MORE_RATES: Final = ("batch-split", "buffer-exhausted")
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
        self._rates = {name: Rate() for name in (*_RATES, *_MORE_RATES)}
        self._network = NetworkMetrics()
        self._averages = {name: Average() for name in _AVERAGES}
        self._totals = dict.fromkeys(_TOTALS, 0.0)
        self._topics: dict[str, dict[str, Rate]] = {}
        self._nodes: dict[int, tuple[Rate, Average]] = {}

    def count(self, name: str, amount: float, now_ms: float, topic: str = "") -> None:
        """Add to a rate, and to the topic's if one is named."""
        with self._lock:
            self._rates[name].add(amount, now_ms)
            if topic:
                self._topic(topic)[name].add(amount, now_ms)

    def _topic(self, name: str) -> dict[str, Rate]:
        rates = self._topics.get(name)
        if rates is None:
            rates = self._topics[name] = {key: Rate() for key in _RATES}
        return rates

    def sent(self, batches: Sequence[ProducerBatch], now_ms: float) -> None:
        """Note a request with these batches; of those sent before, that alone."""
        records = sum(batch.record_count for batch in batches)
        fresh = [batch for batch in batches if not batch.attempts]
        with self._lock:
            averages = self._averages
            averages["records-per-request"].add(records, now_ms)
            if not fresh:
                return
            for name, values in (
                ("record-queue-time", [now_ms - each.created_ms for each in fresh]),
                ("batch-size", [each.size for each in fresh]),
                (
                    "compression-rate",
                    [each.size / (each.raw_size + BATCH_HEADER_SIZE) for each in fresh],
                ),
            ):
                averages[name].add(sum(values), now_ms, len(fresh), max(values))
            counts: dict[str, list[int]] = {}
            for batch in fresh:
                averages["record-size"].add(batch.raw_size, now_ms, batch.record_count)
                found = counts.setdefault(batch.topic, [0, 0])
                found[0] += batch.record_count
                found[1] += batch.size
            for topic, amounts in counts.items():
                rates = self._topic(topic)
                for name, amount in zip(("record-send", "byte"), amounts, strict=True):
                    self._rates[name].add(amount, now_ms)
                    rates[name].add(amount, now_ms)

    def follow(
        self, counts: NetworkCounts, now_ms: float, *, at_once: bool = False
    ) -> None:
        """See `NetworkMetrics.follow`."""
        self._network.follow([counts], now_ms, at_once=at_once)

    def observe(self, name: str, value: float, now_ms: float) -> None:
        """Add to an average."""
        with self._lock:
            self._averages[name].add(value, now_ms)

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
            own = self._network.snapshot(now_ms)
            for name, rate in self._rates.items():
                own |= rate_entries(name, rate, now_ms)
            for name, average in self._averages.items():
                own[f"{name}-avg"] = average.mean(now_ms)
                own[f"{name}-max"] = average.maximum(now_ms)
            own |= {f"{name}-total": total for name, total in self._totals.items()}
            groups = {"producer-metrics": own}
            for topic, rates in self._topics.items():
                found: dict[str, float] = {}
                for name, rate in rates.items():
                    found |= rate_entries(name, rate, now_ms)
                groups[f"producer-topic-metrics.{topic}"] = found
            for node, (rate, latency) in self._nodes.items():
                groups[f"producer-node-metrics.node-{node}"] = {
                    **rate_entries("response", rate, now_ms),
                    "request-latency-avg": latency.mean(now_ms),
                    "request-latency-max": latency.maximum(now_ms),
                }
            return groups

"""ProducerMetrics: count records, bytes and times of a producer, under Kafka's names.

Source: the "Producer Monitoring" tables of the Apache Kafka documentation.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

from mpbroker.client.client_request import NetworkCounts
from mpbroker.client.telemetry.measures import (
    FOLLOW_MS,
    Average,
    NetworkMetrics,
    Rate,
    Tally,
    rate_entries,
)
from mpbroker.producer.batch import ProducerBatch
from mpbroker.protocol.records.batch_header import BATCH_HEADER_SIZE

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
    """The counters of one producer; any thread may call the methods."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rates = {name: Rate() for name in (*_RATES, *_MORE_RATES)}
        self._network = NetworkMetrics()
        self._averages = {name: Average() for name in _AVERAGES}
        self._totals = dict.fromkeys(_TOTALS, 0.0)
        self._topics: dict[str, dict[str, Rate]] = {}
        self._nodes: dict[int, tuple[Rate, Average, Tally]] = {}
        # Values that the rates and averages do not have yet. To add each at once would
        # cost a tenth of all that sending costs.
        self._lately = {name: Tally() for name in _AVERAGES}
        self._sent_lately: dict[str, list[int]] = {}  # by topic: records, bytes
        self._folded_ms = -float("inf")

    def count(self, name: str, amount: float, now_ms: float, topic: str = "") -> None:
        """Add to the rate called ``name``, and to that of a topic if one is given."""
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
        """Count a Produce request, and its batches except those that are sent again."""
        records = 0
        with self._lock:
            lately = self._lately
            for batch in batches:
                count, size, raw_size = batch.record_count, batch.size, batch.raw_size
                records += count
                if batch.attempts:
                    continue
                lately["record-queue-time"].add(now_ms - batch.created_ms)
                lately["batch-size"].add(size)
                lately["compression-rate"].add(size / (raw_size + BATCH_HEADER_SIZE))
                lately["record-size"].add(raw_size, count)
                found = self._sent_lately.get(batch.topic)
                if found is None:
                    found = self._sent_lately[batch.topic] = [0, 0]
                found[0] += count
                found[1] += size
            lately["records-per-request"].add(records)
            self._fold(now_ms)

    def _fold(self, now_ms: float, *, at_once: bool = False) -> None:
        """Add what was counted since the last call to the rates and averages.

        A call soon after the last one does nothing, unless ``at_once`` is True.
        """
        if not at_once and now_ms - self._folded_ms < FOLLOW_MS:
            return
        self._folded_ms = now_ms
        for name, tally in self._lately.items():
            tally.move_to(self._averages[name], now_ms)
        for topic, amounts in self._sent_lately.items():
            rates = self._topic(topic)
            for name, amount in zip(("record-send", "byte"), amounts, strict=True):
                self._rates[name].add(amount, now_ms)
                rates[name].add(amount, now_ms)
        self._sent_lately.clear()
        for rate, latency, tally in self._nodes.values():
            if tally.count:
                rate.add(tally.count, now_ms)
                tally.move_to(latency, now_ms)

    def follow(
        self, counts: NetworkCounts, now_ms: float, *, at_once: bool = False
    ) -> None:
        """Bring the network's metrics up to date; see `NetworkMetrics.follow`."""
        self._network.follow([counts], now_ms, at_once=at_once)

    def answered(
        self, node: int, latency_ms: float, throttle_ms: float, now_ms: float
    ) -> None:
        """Count a node's response, its latency, and the time that a quota throttles."""
        with self._lock:
            self._lately["request-latency"].add(latency_ms)
            self._lately["produce-throttle-time"].add(throttle_ms)
            found = self._nodes.get(node)
            if found is None:
                found = self._nodes[node] = Rate(), Average(), Tally()
            found[2].add(latency_ms)
            self._fold(now_ms)

    def spend(self, name: str, seconds: float) -> None:
        """Add a time to the total called ``name``, which is in ns."""
        with self._lock:
            self._totals[name] += seconds * 1e9

    def snapshot(self, now_ms: float) -> dict[str, dict[str, float]]:
        """Return all metrics by Kafka's names, in groups.

        The groups are producer-metrics, and one for each topic and for each node.
        """
        with self._lock:
            self._fold(now_ms, at_once=True)
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
            for node, (rate, latency, _) in self._nodes.items():
                groups[f"producer-node-metrics.node-{node}"] = {
                    **rate_entries("response", rate, now_ms),
                    "request-latency-avg": latency.mean(now_ms),
                    "request-latency-max": latency.maximum(now_ms),
                }
            return groups

"""ConsumerMetrics: count bytes, records and times of a consumer, under Kafka's names.

Source: the "Consumer Monitoring" tables of the Apache Kafka documentation.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Final, NamedTuple

from mpbroker.client.cluster import TopicPartition
from mpbroker.client.selector import monotonic_ms
from mpbroker.client.telemetry.measures import MetricGroup, NetworkMetrics

_CONSUMED: Final = ("bytes-consumed", "records-consumed")
_FETCHED: Final = ("fetch-size", "records-per-request")
_FETCH_AVERAGES: Final = (
    *_FETCHED,
    "fetch-latency",
    "fetch-throttle-time",
    "records-lag",
)
_GROUP_RATES: Final = ("commit", "heartbeat", "join", "sync", "rebalance")
_GROUP_AVERAGES: Final = (
    "commit-latency",
    "heartbeat-response-time",
    "join-time",
    "sync-time",
    "rebalance-latency",
)


class _Reached(NamedTuple):
    """A partition's first and end offset, and the offset to fetch next."""

    start: int
    end: int
    position: int


class ConsumerMetrics:
    """The counters of one consumer; any thread may call the methods."""

    def __init__(self) -> None:
        self.network = NetworkMetrics()
        self._lock = threading.Lock()
        self._fetch = MetricGroup((*_CONSUMED, "fetch"), _FETCH_AVERAGES)
        self._topics: dict[str, MetricGroup] = {}
        self._partitions: dict[TopicPartition, _Reached] = {}
        self._group = MetricGroup(_GROUP_RATES, _GROUP_AVERAGES)
        self._polls = MetricGroup((), ("time-between-poll", "poll-idle-ratio"))
        self._since_poll_ms = 0.0
        self._rebalances_ms = 0.0  # the time that all rebalances took
        self._nodes: dict[int, MetricGroup] = {}
        self._heard_ms = self._rebalanced_ms = self._polled_ms = float("nan")

    # -- fetching ----------------------------------------------------------------------

    def fetched(self, node: int, latency_ms: float, throttle_ms: float) -> None:
        """Count a Fetch response of a node, its latency and its throttle time."""
        now_ms = monotonic_ms()
        found = self._nodes.get(node)
        if found is None:
            with self._lock:
                found = MetricGroup(("response",), ("request-latency",))
                self._nodes[node] = found
        found.count("response", 1, now_ms)
        found.observe("request-latency", latency_ms, now_ms)
        self._fetch.count("fetch", 1, now_ms)
        self._fetch.observe("fetch-latency", latency_ms, now_ms)
        self._fetch.observe("fetch-throttle-time", throttle_ms, now_ms)

    def answered(self, sizes: dict[str, int], records: dict[str, int]) -> None:
        """Count the batches and records of a Fetch response.

        Args:
            sizes: the bytes of the batches, by topic.
            records: the number of records, by topic.
        """
        now_ms = monotonic_ms()
        self._fetch.observe("fetch-size", sum(sizes.values()), now_ms)
        self._fetch.observe("records-per-request", sum(records.values()), now_ms)
        for topic, size in sizes.items():
            group = self._topic(topic)
            group.observe("fetch-size", size, now_ms)
            group.observe("records-per-request", records.get(topic, 0), now_ms)

    def _topic(self, topic: str) -> MetricGroup:
        with self._lock:
            found = self._topics.get(topic)
            if found is None:
                found = self._topics[topic] = MetricGroup(_CONSUMED, _FETCHED)
            return found

    def consumed(self, topic: str, size: int, records: int) -> None:
        """Count bytes and records of a topic that the user has got; one may be 0."""
        now_ms = monotonic_ms()
        for group in (self._fetch, self._topic(topic)):
            group.count("bytes-consumed", size, now_ms)
            group.count("records-consumed", records, now_ms)

    def reached(
        self, partition: TopicPartition, start: int, end: int, position: int
    ) -> None:
        """Store a partition's first and end offset, and the offset to fetch next."""
        with self._lock:
            self._partitions[partition] = _Reached(start, end, position)
        self._fetch.observe("records-lag", max(0, end - position), monotonic_ms())

    def assigned(self, partitions: list[TopicPartition]) -> None:
        """Forget all partitions but those that are assigned now."""
        with self._lock:
            kept = {p: at for p, at in self._partitions.items() if p in partitions}
            self._partitions = kept

    def polled(self) -> None:
        """Note that a call of poll() begins."""
        now_ms = monotonic_ms()
        if self._polled_ms == self._polled_ms:  # not the first
            self._since_poll_ms = now_ms - self._polled_ms
            self._polls.observe("time-between-poll", self._since_poll_ms, now_ms)
        self._polled_ms = now_ms

    def poll_ended(self) -> None:
        """Note the end of a call of poll(), during which the user was idle.

        As in Kafka, the idle ratio is the time of the call, divided by that time plus
        the time since the previous call.
        """
        now_ms = monotonic_ms()
        idle_ms = now_ms - self._polled_ms
        whole_ms = idle_ms + self._since_poll_ms
        if whole_ms > 0:
            self._polls.observe("poll-idle-ratio", idle_ms / whole_ms, now_ms)

    # -- the group ---------------------------------------------------------------------

    def asked(self, what: str, time: str, latency_ms: float) -> None:
        """Count a response of the coordinator, and its latency.

        Args:
            what: the name of the rate that counts it, such as "heartbeat".
            time: the name of the average that gets its latency.
            latency_ms: the time that the response took, in ms.
        """
        now_ms = monotonic_ms()
        self._group.count(what, 1, now_ms)
        self._group.observe(time, latency_ms, now_ms)
        if what == "heartbeat":
            self._heard_ms = now_ms
        elif what == "rebalance":
            self._rebalanced_ms = now_ms
            self._rebalances_ms += latency_ms

    # -- all ---------------------------------------------------------------------------

    def snapshot(
        self,
        assigned: int,
        positions: Mapping[TopicPartition, int],
        separator: str = ".",
    ) -> dict[str, dict[str, float]]:
        """Return the metrics by Kafka's names, in groups.

        There is a group for each node, each topic and each partition, too.

        Args:
            assigned: how many partitions are assigned.
            positions: by partition, the offset that the user gets next.
            separator: the text between topic and partition in a group's name.
        """
        now_ms = monotonic_ms()
        fetch = self._fetch.snapshot(now_ms)
        del fetch["records-lag-avg"]  # Kafka has it for partitions only
        group = self._group.snapshot(now_ms)
        group["rebalance-rate-per-hour"] = group.pop("rebalance-rate") * 3600
        group |= {
            "assigned-partitions": float(assigned),
            "rebalance-latency-total": self._rebalances_ms,
            "last-heartbeat-seconds-ago": (now_ms - self._heard_ms) / 1000,
            "last-rebalance-seconds-ago": (now_ms - self._rebalanced_ms) / 1000,
        }
        polls = self._polls.snapshot(now_ms)
        del polls["poll-idle-ratio-max"]  # Kafka has the mean only
        polls["last-poll-seconds-ago"] = (now_ms - self._polled_ms) / 1000
        groups = {
            "consumer-metrics": self.network.snapshot(now_ms) | polls,
            "consumer-fetch-manager-metrics": fetch,
            "consumer-coordinator-metrics": group,
        }
        with self._lock:
            topics, partitions = dict(self._topics), dict(self._partitions)
            nodes = dict(self._nodes)
        for node, metrics in nodes.items():
            groups[f"consumer-node-metrics.node-{node}"] = metrics.snapshot(now_ms)
        for topic, metrics in topics.items():
            name = f"consumer-fetch-manager-metrics.{topic}"
            groups[name] = metrics.snapshot(now_ms)
        for where, at in partitions.items():
            position = positions.get(where, at.position)
            name = f"{where.topic}{separator}{where.partition}"
            groups[f"consumer-fetch-manager-metrics.{name}"] = {
                "records-lag": float(max(0, at.end - position)),
                "records-lead": float(max(0, position - at.start)),
            }
        return groups

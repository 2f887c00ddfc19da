"""A client's metrics as they are pushed: those asked for, under KIP-714's names.

``record-send-total`` of the group ``producer-topic-metrics.t`` becomes
``org.apache.kafka.producer.topic.record.send.total`` with the attribute ``topic``; a
group of the partition 0 of that topic has ``t/0`` for ``t``, and a second attribute.
Totals are sums, since the client began or since the push before; all else are gauges.

Source: KIP-714; Kafka's TelemetryMetricNamingConvention and KafkaMetricsCollector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Final

from mpbroker.protocol.otlp_encode import Metric, Point, encode_metrics

# A receiver refuses what is too much for it, and with that the client for good.
MAX_POINTS: Final = 4000
_PREFIX: Final = "org.apache.kafka."
_GROUP_SUFFIX: Final = "-metrics"
_SUM_SUFFIX: Final = "-total"
_ALL: Final = ["*"]

Groups = Mapping[str, Mapping[str, float]]
# What was told of sums, and when since 1970, by their groups' names and their own.
_Sums = dict[tuple[str, str], tuple[float, int]]


def is_requested(name: str, requested: Sequence[str]) -> bool:
    """Return whether a metric begins with one of these prefixes; ``*`` is all."""
    return requested == _ALL or name.startswith(tuple(requested))


class MetricsCollector:
    """Makes payloads of what a client measures.

    Args:
        snapshot: Kafka's metrics by group; a group of one topic or node has its name
            after a dot. Groups that matter most come first.
        resource: attributes of the client; what the broker knows is not among them.
        wall_ns: the time since 1970.
    """

    def __init__(
        self,
        snapshot: Callable[[], Groups],
        resource: Mapping[str, str],
        wall_ns: Callable[[], int],
    ) -> None:
        self._snapshot = snapshot
        self._resource = resource
        self._wall_ns = wall_ns
        self._began_ns = wall_ns()
        self.reset()

    def reset(self) -> None:
        """Begin anew: what is told next are whole sums."""
        self._told: _Sums = {}
        self._telling: _Sums = {}

    def refused(self) -> None:
        """Forget the last payload: nobody took it, so the next one tells it again."""
        self._telling = {}

    def collect(
        self, requested: Sequence[str], is_delta: bool, max_bytes: int
    ) -> bytes:
        """Return a payload, empty if nothing is asked for.

        What is above ``max_bytes`` is left out, but for what is about the whole client;
        a payload of that alone may still be above it. 0 is no limit.
        """
        self._told |= self._telling
        now_ns = self._wall_ns()
        groups = self._snapshot()
        payload, sums = self._encode(groups, requested, is_delta, now_ns)
        if 0 < max_bytes < len(payload):
            groups = {name: group for name, group in groups.items() if "." not in name}
            payload, sums = self._encode(groups, requested, is_delta, now_ns)
        self._telling = sums
        return payload

    def _encode(
        self, groups: Groups, requested: Sequence[str], is_delta: bool, now_ns: int
    ) -> tuple[bytes, _Sums]:
        """Return a payload, and the sums that it tells."""
        metrics: dict[str, Metric] = {}
        sums: _Sums = {}
        left = MAX_POINTS
        for group, values in groups.items():
            kind, _, of = group.partition(".")
            kind = kind.removesuffix(_GROUP_SUFFIX)
            attributes = _attributes(kind, of)
            for key, value in values.items():
                name = f"{_PREFIX}{kind}.{key}".replace("-", ".").lower()
                if not left or not isfinite(value) or not is_requested(name, requested):
                    continue
                left -= 1
                is_sum, start_ns = key.endswith(_SUM_SUFFIX), 0
                if is_sum:
                    sums[group, key] = value, now_ns
                    start_ns = self._began_ns
                    if is_delta and (group, key) in self._told:
                        told, start_ns = self._told[group, key]
                        value -= told
                point = Point(value, start_ns, now_ns, attributes)
                metric = metrics.get(name)
                if metric is None:
                    metric = metrics[name] = Metric(name, is_sum, is_delta, [])
                metric.points.append(point)
        return encode_metrics(self._resource, metrics.values()), sums


def _attributes(kind: str, of: str) -> dict[str, str]:
    if not of:
        return {}
    if kind.endswith("node"):
        return {"node_id": of}
    topic, _, partition = of.partition("/")
    return {"topic": topic, "partition": partition} if partition else {"topic": topic}

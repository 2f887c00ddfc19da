"""MetricsCollector: the payload of a push, with the metrics asked for (KIP-714).

``record-send-total`` of the group ``producer-topic-metrics.t`` becomes
``org.apache.kafka.producer.topic.record.send.total`` with the attribute ``topic``. A
group of a partition ends with ``t/0`` instead of ``t``, and gives a second attribute.
Totals are sums since the client began, or since the last push; all others are gauges.

Source: KIP-714; Kafka's TelemetryMetricNamingConvention and KafkaMetricsCollector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Final

from mpbroker.protocol.otlp_encode import Metric, Point, encode_metrics

# A receiver that gets too many points refuses the push, and the client gives up then.
MAX_POINTS: Final = 4000
_PREFIX: Final = "org.apache.kafka."
_GROUP_SUFFIX: Final = "-metrics"
_SUM_SUFFIX: Final = "-total"
_ALL: Final = ["*"]

Groups = Mapping[str, Mapping[str, float]]
# The sums of a push, each with its time in ns since 1970, by group and metric.
_Sums = dict[tuple[str, str], tuple[float, int]]


def is_requested(name: str, requested: Sequence[str]) -> bool:
    """Return whether a metric's name begins with one of these prefixes; ``*``: all."""
    return requested == _ALL or name.startswith(tuple(requested))


class MetricsCollector:
    """Makes payloads of a client's metrics.

    Args:
        snapshot: a function that returns Kafka's metrics by group, the most important
            groups first. The name of a group for one topic or node ends with a dot and
            that topic or node.
        resource: attributes of the client that the broker does not know by itself.
        wall_ns: a function that returns the time in ns since 1970.
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
        """Forget all pushes, so that the next one has sums since the client began."""
        self._told: _Sums = {}
        self._telling: _Sums = {}

    def refused(self) -> None:
        """Forget the last payload, which was refused; the next one repeats its sums."""
        self._telling = {}

    def collect(
        self, requested: Sequence[str], is_delta: bool, max_bytes: int
    ) -> bytes:
        """Return a payload; b"" if no metric is asked for.

        Args:
            requested: prefixes of metrics' names; see `is_requested`.
            is_delta: whether sums count from the last push, not from the beginning.
            max_bytes: if a payload is larger, only metrics of the whole client are in
                it, and it may still be larger; 0 means no limit.
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
        """Return a payload of the metrics asked for, and the sums that are in it."""
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

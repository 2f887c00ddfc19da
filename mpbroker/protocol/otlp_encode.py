"""Encode metrics in OpenTelemetry's protobuf format, in which clients push them.

Only sums, gauges and histograms of doubles, with attributes of text, are encoded.
`otlp_metrics` reads them.

Source: opentelemetry-proto 1.x, metrics.proto, common.proto, resource.proto; protobuf's
encoding guide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from struct import Struct
from typing import Final, NamedTuple

from mpbroker.protocol.primitives import write_unsigned_varint

_BYTES: Final = 2  # wire types
_FIXED64: Final = 1
_DOUBLE: Final = Struct("<d")
_UINT64: Final = Struct("<Q")

_GAUGE: Final = 5  # fields of Metric
_SUM: Final = 7
_HISTOGRAM: Final = 9
_DELTA: Final = b"\x10\x01"  # Sum.aggregation_temporality, field 2
_CUMULATIVE: Final = b"\x10\x02"
_MONOTONIC: Final = b"\x18\x01"  # Sum.is_monotonic, field 3


class Point(NamedTuple):
    """A value of a sum or gauge at one time.

    Attributes:
        value: the value.
        start_ns: the time at which a sum began, in ns since 1970; 0 for gauges.
        time_ns: the time of the value, in ns since 1970.
        attributes: the point's attributes.
    """

    value: float
    start_ns: int
    time_ns: int
    attributes: Mapping[str, str]


class Metric(NamedTuple):
    """A metric, which is a sum or a gauge, and its points.

    Attributes:
        name: the metric's name.
        is_sum: whether the metric is a monotonic sum; otherwise it is a gauge.
        is_delta: whether a sum counts from the last push on; otherwise it counts from
            its start.
        points: its points.
        unit: the unit of the values, as in UCUM.
        description: the meaning of the metric, as a text for people.
    """

    name: str
    is_sum: bool
    is_delta: bool
    points: list[Point]
    unit: str = ""
    description: str = ""


class HistogramPoint(NamedTuple):
    """The state of a histogram at one time.

    Attributes:
        number: the number of values.
        total: the sum of the values.
        counts: the number of values in each bucket, which is one count more than there
            are bounds; empty: the counts are not known.
        start_ns: the time at which counting began, in ns since 1970.
        time_ns: the time of the point, in ns since 1970.
        attributes: the point's attributes.
    """

    number: int
    total: float
    counts: Sequence[int]
    start_ns: int
    time_ns: int
    attributes: Mapping[str, str]


class Distribution(NamedTuple):
    """A metric that is a cumulative histogram, and its points.

    Attributes:
        name: the metric's name.
        bounds: the upper bounds of all buckets but the last, which has no bound.
        points: its points.
        unit: the unit of the values, as in UCUM.
        description: the meaning of the metric, as a text for people.
    """

    name: str
    bounds: Sequence[float]
    points: list[HistogramPoint]
    unit: str = ""
    description: str = ""


def encode_metrics(
    resource: Mapping[str, str], metrics: Iterable[Metric | Distribution]
) -> bytes:
    """Return the metrics of one resource as OpenTelemetry's message MetricsData.

    Args:
        resource: the resource's attributes.
        metrics: the resource's metrics.

    Returns:
        The protobuf; empty bytes if there are no metrics.
    """
    scope = b"".join(_sized(2, _metric(metric)) for metric in metrics)
    if not scope:
        return b""
    return _sized(1, _sized(1, _attributes(1, resource)) + _sized(2, scope))


def _metric(metric: Metric | Distribution) -> bytes:
    name = _sized(1, metric.name.encode())
    if metric.description:
        name += _sized(2, metric.description.encode())
    if metric.unit:
        name += _sized(3, metric.unit.encode())
    if isinstance(metric, Distribution):
        bounds = b"".join(map(_DOUBLE.pack, metric.bounds))
        points = b"".join(
            _sized(1, _histogram_point(point, bounds)) for point in metric.points
        )
        return name + _sized(_HISTOGRAM, points + _CUMULATIVE)
    points = b"".join(_sized(1, _point(point)) for point in metric.points)
    if not metric.is_sum:
        return name + _sized(_GAUGE, points)
    temporality = _DELTA if metric.is_delta else _CUMULATIVE
    return name + _sized(_SUM, points + temporality + _MONOTONIC)


def _point(point: Point) -> bytes:
    start = _fixed(2, _UINT64.pack(point.start_ns)) if point.start_ns else b""
    return b"".join(
        (
            start,
            _fixed(3, _UINT64.pack(point.time_ns)),
            _fixed(4, _DOUBLE.pack(point.value)),
            _attributes(7, point.attributes),
        )
    )


def _histogram_point(point: HistogramPoint, bounds: bytes) -> bytes:
    buckets = b""
    if point.counts:
        counts = b"".join(map(_UINT64.pack, point.counts))
        buckets = _sized(6, counts) + _sized(7, bounds)
    return b"".join(
        (
            _fixed(2, _UINT64.pack(point.start_ns)),
            _fixed(3, _UINT64.pack(point.time_ns)),
            _fixed(4, _UINT64.pack(point.number)),
            _fixed(5, _DOUBLE.pack(point.total)),
            buckets,
            _attributes(9, point.attributes),
        )
    )


def _attributes(field: int, attributes: Mapping[str, str]) -> bytes:
    return b"".join(
        _sized(field, _sized(1, name.encode()) + _sized(2, _sized(1, text.encode())))
        for name, text in attributes.items()
    )


def _fixed(field: int, data: bytes) -> bytes:
    return bytes((field << 3 | _FIXED64,)) + data


def _sized(field: int, data: bytes) -> bytes:
    """Return a protobuf field of bytes: key, length and data.

    The field's number is below 16, so its key is one byte.
    """
    return bytes((field << 3 | _BYTES,)) + write_unsigned_varint(len(data)) + data

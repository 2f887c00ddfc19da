"""Read metrics in OpenTelemetry's protobuf format, as clients push them.

From MetricsData these are read: names, units, and points with their attributes and
values. From a histogram's point only count and sum are read. Points of summaries and of
exponential histograms are left out.

A field is a key (number << 3 | wire type) and a value; unknown fields are skipped. A
length must fit into its message. MAX_POINTS limits the number of resources, metrics
and points, and MAX_FIELDS the number of fields: a compressed request of a hundred bytes
may have a megabyte of empty fields, which would take a hundred megabytes here, or
seconds of work.

Source: opentelemetry-proto 1.x, metrics.proto, common.proto, resource.proto; protobuf's
encoding guide.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import Any, Final

from mpbroker.protocol.errors import ProtocolError
from mpbroker.protocol.primitives import read_unsigned_varint

MAX_POINTS: Final = 10_000
# A point with three attributes has about twenty fields.
MAX_FIELDS: Final = 25 * MAX_POINTS
_MAX_ATTRIBUTES: Final = 64
_MAX_TEXT: Final = 1024

_VARINT: Final = 0
_FIXED64: Final = 1
_BYTES: Final = 2
_FIXED32: Final = 5

_DOUBLE: Final = Struct("<d")
_INT64: Final = Struct("<q")
_UINT64: Final = Struct("<Q")

# The type of a metric, by the number of the field of Metric that has its points.
_KINDS: Final = {5: "gauge", 7: "sum", 9: "histogram"}
# The number of the field that has the attributes of a point.
_NUMBER_ATTRIBUTES: Final = 7
_HISTOGRAM_ATTRIBUTES: Final = 9
_DELTA: Final = 1

Value = Any  # a field's value: an int for a varint, else a memoryview


def read_metrics(data: bytes) -> list[dict[str, Any]]:
    """Read metrics that a client has pushed: OpenTelemetry's message MetricsData.

    Returns:
        A dictionary for each resource: "attributes", and "metrics", which is a list of
        dictionaries with "name", "unit", "type" and "points". Times are ns since 1970.

    Raises:
        ProtocolError: the bytes are malformed, or have more than MAX_POINTS points or
            MAX_FIELDS fields.
    """
    reader = _Reader()
    return [
        reader.resource(value)
        for number, value in reader.messages(memoryview(data))
        if number == 1
    ]


class _Reader:
    """Reads one message MetricsData, and limits the number of its points and fields."""

    def __init__(self) -> None:
        self._left = MAX_POINTS
        self._fields_left = MAX_FIELDS

    def resource(self, view: memoryview) -> dict[str, Any]:
        self._count()
        attributes: dict[str, Any] = {}
        metrics: list[dict[str, Any]] = []
        for number, value in self.messages(view):
            if number == 1:
                attributes |= self._attributes(value, 1)
            elif number == 2:  # the metrics of one scope
                metrics += [
                    self._metric(each)
                    for field, each in self.messages(value)
                    if field == 2
                ]
        return {"attributes": attributes, "metrics": metrics}

    def _metric(self, view: memoryview) -> dict[str, Any]:
        self._count()
        metric: dict[str, Any] = {"name": ""}
        for number, value in self.messages(view):
            if number == 1:
                metric["name"] = _text(value)
            elif number == 3:
                metric["unit"] = _text(value)
            elif number in _KINDS:
                metric["type"] = _KINDS[number]
                metric |= self._points(_KINDS[number], value)
        return metric

    def _points(self, kind: str, view: memoryview) -> dict[str, Any]:
        points: list[dict[str, Any]] = []
        found: dict[str, Any] = {"points": points}
        for number, value in self._fields(view):
            if number == 1 and isinstance(value, memoryview):
                self._count()
                points.append(self._point(kind, value))
            elif number == 2 and isinstance(value, int):
                found["temporality"] = "delta" if value == _DELTA else "cumulative"
            elif number == 3 and isinstance(value, int):
                found["monotonic"] = bool(value)
        return found

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise ProtocolError(f"more than {MAX_POINTS} resources, metrics and points")

    def _point(self, kind: str, view: memoryview) -> dict[str, Any]:
        is_histogram = kind == "histogram"
        point: dict[str, Any] = {}
        for number, value in self._fields(view):
            if isinstance(value, int) or len(value) != 8:
                continue
            if number == 3:
                point["time_ns"] = _UINT64.unpack(value)[0]
            elif number == 4 and is_histogram:
                point["count"] = _UINT64.unpack(value)[0]
            elif number == 4:
                point["value"] = _DOUBLE.unpack(value)[0]
            elif number == 5 and is_histogram:
                point["sum"] = _DOUBLE.unpack(value)[0]
            elif number == 6 and not is_histogram:
                point["value"] = _INT64.unpack(value)[0]
        field = _HISTOGRAM_ATTRIBUTES if is_histogram else _NUMBER_ATTRIBUTES
        attributes = self._attributes(view, field)
        if attributes:
            point["attributes"] = attributes
        return point

    def _attributes(self, view: memoryview, field: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for number, pair in self.messages(view):
            if number == field and len(found) < _MAX_ATTRIBUTES:
                parts = dict(self.messages(pair))
                if 1 in parts:
                    found[_text(parts[1])] = self._any_value(
                        parts.get(2, memoryview(b""))
                    )
        return found

    def _any_value(self, view: memoryview) -> Any:
        """Return an attribute's value: text, number or boolean; None: another type."""
        for number, value in self._fields(view):
            if number == 1 and isinstance(value, memoryview):
                return _text(value)
            if number == 2 and isinstance(value, int):
                return bool(value)
            if number == 3 and isinstance(value, int):
                return value - (1 << 64) if value >> 63 else value
            if number == 4 and isinstance(value, memoryview) and len(value) == 8:
                return _DOUBLE.unpack(value)[0]
        return None

    def messages(self, view: memoryview) -> Iterator[tuple[int, memoryview]]:
        """Yield the number and the bytes of each field of a message, except varints."""
        for number, value in self._fields(view):
            if isinstance(value, memoryview):
                yield number, value

    def _fields(self, view: memoryview) -> Iterator[tuple[int, Value]]:
        position, end = 0, len(view)
        while position < end:
            self._fields_left -= 1
            if self._fields_left < 0:
                raise ProtocolError(f"more than {MAX_FIELDS} fields")
            key = view[position]
            if key & 0x87 == _BYTES and position + 1 < end:  # most: saves two calls
                size = view[position + 1]
                if size < 0x80 and position + 2 + size <= end:
                    position += 2 + size
                    yield key >> 3, view[position - size : position]
                    continue
            key, position = read_unsigned_varint(view, position, 64)
            value, position = _value(view, position, key & 7)
            yield key >> 3, value


def _text(view: memoryview) -> str:
    return str(view[:_MAX_TEXT], "utf-8", "replace")


def _value(view: memoryview, position: int, wire_type: int) -> tuple[Value, int]:
    if wire_type == _VARINT:
        return read_unsigned_varint(view, position, 64)
    if wire_type == _BYTES:
        size, position = read_unsigned_varint(view, position, 64)
    elif wire_type == _FIXED64:
        size = 8
    elif wire_type == _FIXED32:
        size = 4
    else:
        raise ProtocolError(f"wire type {wire_type} at byte {position}")
    end = position + size
    if end > len(view):
        raise ProtocolError(f"{size} bytes at byte {position} of {len(view)}")
    return view[position:end], end

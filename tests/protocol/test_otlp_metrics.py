"""Clients' metrics in OpenTelemetry's protobuf: read whole, or refused, never worse."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.protocol.errors import ProtocolError
from mpbroker.protocol.otlp_metrics import MAX_FIELDS, MAX_POINTS, read_metrics


def varint(number):
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def sized(number, *parts):
    data = b"".join(parts)
    return varint(number << 3 | 2) + varint(len(data)) + data


def number_field(number, value):
    return varint(number << 3) + varint(value & 0xFFFF_FFFF_FFFF_FFFF)


def fixed(number, kind, value):
    return varint(number << 3 | 1) + struct.pack(f"<{kind}", value)


def attribute(field, name, value):
    return sized(field, sized(1, name.encode()), sized(2, value))


def metrics_data(*metrics, resource=b""):
    return sized(1, sized(1, resource), sized(2, *(sized(2, each) for each in metrics)))


TEXT = sized(1, b"x")


def test_sums_gauges_and_histograms_are_read_with_all_that_belongs_to_them():
    total = b"".join(
        (
            sized(1, b"a.total"),
            sized(2, b"what it is"),
            sized(3, b"By"),
            sized(
                7,
                sized(1, attribute(7, "node", number_field(3, -1)), fixed(6, "q", -5)),
                number_field(2, 1),
                number_field(3, 1),
            ),
        )
    )
    gauge = sized(1, b"b") + sized(5, sized(1, fixed(3, "Q", 99), fixed(4, "d", 0.5)))
    point = fixed(4, "Q", 3), fixed(5, "d", 1.5), attribute(9, "on", number_field(2, 1))
    histogram = sized(1, b"c") + sized(9, sized(1, *point), number_field(2, 2))
    data = metrics_data(
        total,
        gauge,
        histogram,
        resource=attribute(1, "client_rack", sized(1, b"r1"))
        + attribute(1, "load", fixed(4, "d", 0.25)),
    )
    assert read_metrics(data) == [
        {
            "attributes": {"client_rack": "r1", "load": 0.25},
            "metrics": [
                {
                    "name": "a.total",
                    "unit": "By",
                    "type": "sum",
                    "points": [{"value": -5, "attributes": {"node": -1}}],
                    "temporality": "delta",
                    "monotonic": True,
                },
                {
                    "name": "b",
                    "type": "gauge",
                    "points": [{"time_ns": 99, "value": 0.5}],
                },
                {
                    "name": "c",
                    "type": "histogram",
                    "points": [{"count": 3, "sum": 1.5, "attributes": {"on": True}}],
                    "temporality": "cumulative",
                },
            ],
        }
    ]


def test_fields_of_tomorrow_are_skipped():
    unknown = number_field(99, 7) + sized(98, b"new") + varint(97 << 3 | 5) + b"1234"
    plain = metrics_data(sized(1, b"a"))
    assert read_metrics(unknown + plain) == read_metrics(plain)


def test_points_are_counted():
    def of(count):
        points = sized(1) * count
        return metrics_data(sized(1, b"a") + sized(5, points))

    (found,) = read_metrics(of(MAX_POINTS - 2))
    assert len(found["metrics"][0]["points"]) == MAX_POINTS - 2
    with pytest.raises(ProtocolError, match="more than 10000"):
        read_metrics(of(MAX_POINTS - 1))
    with pytest.raises(ProtocolError, match="more than 10000"):
        read_metrics(sized(1, sized(2, sized(2) * (MAX_POINTS + 1))))
    with pytest.raises(ProtocolError, match="more than 10000"):
        read_metrics(sized(1) * (MAX_POINTS + 1))
    # With all that may belong to each of them they are few enough fields.
    attributes = [attribute(7, name, TEXT) for name in "abc"]
    point = sized(1, fixed(2, "q", 1), fixed(3, "q", 2), fixed(4, "d", 3), *attributes)
    (found,) = read_metrics(metrics_data(sized(5, point * (MAX_POINTS - 2))))
    assert len(found["metrics"][0]["points"]) == MAX_POINTS - 2


@pytest.mark.parametrize(
    "outer",
    [
        lambda fields: fields,
        lambda fields: sized(1, fields),
        lambda fields: sized(1, sized(1, fields)),
        lambda fields: metrics_data(fields),
        lambda fields: metrics_data(sized(7, fields)),
        lambda fields: metrics_data(sized(9, sized(1, fields))),
        lambda fields: metrics_data(sized(5, sized(1, sized(7, fields)))),
        lambda fields: metrics_data(sized(5, sized(1, attribute(7, "a", fields)))),
    ],
)
@pytest.mark.parametrize("field", [sized(99), number_field(98, 1)])
def test_fields_are_counted_wherever_they_are(outer, field):
    with pytest.raises(ProtocolError, match=f"more than {MAX_FIELDS} fields"):
        read_metrics(outer(field * (MAX_FIELDS + 1)))


@given(st.binary(max_size=200))
def test_any_bytes_are_metrics_or_a_protocol_error(data):
    try:
        read_metrics(data)
    except ProtocolError:
        pass


WHOLE = metrics_data(
    sized(1, b"name") + sized(7, sized(1, fixed(6, "q", 1), attribute(7, "k", TEXT)))
)


@given(st.data())
def test_a_byte_changed_or_an_end_cut_off_does_no_harm(data):
    at = data.draw(st.integers(0, len(WHOLE) - 1))
    byte = data.draw(st.integers(0, 255))
    for damaged in (WHOLE[:at], WHOLE[:at] + bytes([byte]) + WHOLE[at + 1 :]):
        try:
            read_metrics(damaged)
        except ProtocolError:
            pass

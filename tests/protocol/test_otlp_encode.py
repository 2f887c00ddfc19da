"""Metrics made protobuf are those that are read from it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mpbroker.protocol.otlp_encode import Metric, Point, encode_metrics
from mpbroker.protocol.otlp_metrics import read_metrics

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)
attributes = st.dictionaries(texts, texts, max_size=5)
times = st.integers(0, (1 << 64) - 1)
points = st.builds(Point, st.floats(allow_nan=False), times, times, attributes)
metrics = st.builds(
    Metric,
    texts,
    st.booleans(),
    st.booleans(),
    st.lists(points, max_size=5),
    unit=texts,
    description=texts,
)


def as_read(metric):
    """What a reader makes of it."""
    found = {"name": metric.name, "type": "sum" if metric.is_sum else "gauge"}
    if metric.unit:
        found["unit"] = metric.unit
    if metric.is_sum:
        found["temporality"] = "delta" if metric.is_delta else "cumulative"
        found["monotonic"] = True
    found["points"] = [
        {"time_ns": point.time_ns, "value": point.value}
        | ({"attributes": point.attributes} if point.attributes else {})
        for point in metric.points
    ]
    return found


@given(attributes, st.lists(metrics, min_size=1, max_size=5))
def test_what_is_encoded_is_read_back(resource, told):
    (found,) = read_metrics(encode_metrics(resource, told))
    assert found["attributes"] == resource
    assert found["metrics"] == [as_read(metric) for metric in told]


def test_no_metrics_are_no_bytes():
    assert encode_metrics({"a": "b"}, []) == b""


def test_a_sums_point_says_since_when():
    point = Point(1.0, 0x1122334455667788, 2, {})
    data = encode_metrics({}, [Metric("m", True, True, [point])])
    assert bytes((2 << 3 | 1,)) + point.start_ns.to_bytes(8, "little") in data

"""The search for a record by its timestamp, and that its two twins find the same."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.protocol.records import record_find
from mpbroker.protocol.records.record_batch import RecordBatchError
from mpbroker.protocol.records.record_walk import IS_COMPILED
from tests.support.batch_forgery import record, varint

needs_extension = pytest.mark.skipif(
    not IS_COMPILED, reason="mpbroker.native._records is not built"
)
LATEST = (1 << 63) - 1


@pytest.fixture(
    params=[
        pytest.param(record_find.find_record_in_python, id="python"),
        pytest.param(record_find._compiled, id="compiled", marks=needs_extension),
    ]
)
def find_record(request: pytest.FixtureRequest) -> Any:
    return request.param


def payload(*rows: tuple[int, int]) -> bytes:
    """Records of (offset delta, timestamp delta)."""
    return b"".join(
        record(0, offset_delta=varint(offset), timestamp_delta=varint(delta))
        for offset, delta in rows
    )


ROWS = ((0, 5), (2, -70), (3, 9000), (7, 9001), (8, 9000))


@pytest.mark.parametrize(
    ("timestamp_delta", "offset_delta", "found"),
    [
        (-(1 << 63), 0, (0, 5)),
        (6, 0, (3, 9000)),
        (9000, 4, (7, 9001)),
        (0, 8, (8, 9000)),
        (9002, 0, (record_find.NOT_FOUND, 9001)),
        (LATEST, 8, (record_find.NOT_FOUND, 9000)),
        (-100, 9, (record_find.NO_RECORDS, 0)),
    ],
)
def test_the_first_record_at_or_after_both(
    find_record, timestamp_delta, offset_delta, found
):
    data = payload(*ROWS)
    assert find_record(data, 5, timestamp_delta, offset_delta) == found
    assert record_find.find_record(data, 5, timestamp_delta, offset_delta) == found


def test_no_records_are_none(find_record):
    assert find_record(b"", 0, 0, 0) == (record_find.NO_RECORDS, 0)


def test_a_time_beyond_all_numbers_is_not_found():
    data = payload(*ROWS)
    assert record_find.find_record(data, 5, 1 << 70, -5) == (-1, 9001)
    assert record_find.find_record(data, 5, -(1 << 70), -5) == (0, 5)


def test_damaged_records_are_named_by_the_python_function():
    data = payload(*ROWS)
    with pytest.raises(RecordBatchError, match="record 4"):
        record_find.find_record(data[:-1], 5, LATEST, 0)
    with pytest.raises(RecordBatchError, match="1 bytes after"):
        record_find.find_record(data + b"\0", 5, LATEST, 0)
    # What is behind the record that was found is not looked at.
    assert record_find.find_record(data[:-1], 5, 6, 0) == (3, 9000)


@needs_extension
@given(
    rows=st.lists(st.tuples(st.integers(0, 20), st.integers(-99, 99)), max_size=8),
    timestamp_delta=st.integers(-99, 99),
    offset_delta=st.integers(0, 20),
    bend=st.none() | st.tuples(st.integers(0, 60), st.integers(0, 255)),
)
def test_the_twins_find_the_same(rows, timestamp_delta, offset_delta, bend):
    data = bytearray(payload(*rows))
    if bend is not None and bend[0] < len(data):
        data[bend[0]] = bend[1]
    asked = bytes(data), len(rows), timestamp_delta, offset_delta
    compiled = record_find._compiled(*asked)
    if compiled is not None:
        assert record_find.find_record_in_python(*asked) == compiled

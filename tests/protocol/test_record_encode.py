"""Encoding a batch's records: both twins write what RecordBatchBuilder writes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.protocol.records import record_encode
from mpbroker.protocol.records.record_batch import (
    BATCH_HEADER_SIZE,
    RecordBatchBuilder,
    parse_batch_header,
)

needs_extension = pytest.mark.skipif(
    not record_encode.IS_COMPILED, reason="mpbroker.native._records is not built"
)


@pytest.fixture(
    params=[
        pytest.param(record_encode.encode_records_in_python, id="python"),
        pytest.param(
            record_encode.encode_records, id="compiled", marks=needs_extension
        ),
    ]
)
def encode(request: pytest.FixtureRequest) -> Any:
    return request.param


def built(records):
    builder = RecordBatchBuilder()
    for timestamp, key, value, headers in records:
        named = [(name.decode(), header_value) for name, header_value in headers]
        builder.append(timestamp, key, value, named)
    batch = builder.build()
    header = parse_batch_header(batch)
    times = (header.base_timestamp, header.max_timestamp) if records else (-1, -1)
    return batch[BATCH_HEADER_SIZE:], *times


TIMES = st.integers(0, 2**62)
FIELDS = st.none() | st.binary(max_size=80) | st.integers(0, 9000).map(bytes)
HEADERS = st.lists(
    st.tuples(st.text(max_size=9).map(str.encode), FIELDS), max_size=3
).map(tuple)
RECORDS = st.lists(st.tuples(TIMES, FIELDS, FIELDS, HEADERS), max_size=12)


@given(records=RECORDS)
def test_python_writes_what_the_builder_writes(records):
    assert record_encode.encode_records_in_python(records) == built(records)


@needs_extension
@given(records=RECORDS)
def test_c_writes_what_the_builder_writes(records):
    assert record_encode.encode_records(records) == built(records)


@pytest.mark.parametrize(
    "encode_batch",
    [
        record_encode.encode_batch_in_python,
        pytest.param(record_encode.encode_batch, marks=needs_extension),
    ],
)
@given(records=RECORDS)
def test_a_batch_has_room_for_its_header(encode_batch, records):
    batch, *times = encode_batch(records)
    assert type(batch) is bytearray
    assert (bytes(batch), *times) == (
        bytes(BATCH_HEADER_SIZE) + built(records)[0],
        *built(records)[1:],
    )


@pytest.mark.parametrize("key", [None, b"", b"k" * 70])
@pytest.mark.parametrize("size", [0, 40, 50, 63, 64, 120, 8100, 8128, 8200])
def test_varints_grow_with_the_offset_delta_and_the_sizes(encode, key, size):
    records = [(1000 + i // 40, key, b"v" * size, ()) for i in range(200)]
    assert encode(records) == built(records)


def test_a_batch_of_more_records_than_two_bytes_can_count(encode):
    records = [(5, None, b"v", ())] * 9000
    assert encode(records) == built(records)


def test_times_may_go_back(encode):
    records = [(t, None, b"v", ()) for t in (50, 70, 20, 20, 0, 71)]
    assert encode(records) == built(records)


def test_nothing_is_encoded_as_nothing(encode):
    assert encode([]) == (b"", -1, -1)


@needs_extension
@pytest.mark.parametrize(
    "record",
    [
        (1, None, "text", ()),
        (1, 7, b"", ()),
        ("1", None, b"", ()),
        (2**63, None, b"", ()),
        (1, None, b"", [(b"h", b"")]),
        (1, None, b"", ((None, b""),)),
        (1, None, b"", ((b"h",),)),
        (1, None, bytearray(b"x"), ()),
        (1, None),
        [1, None, b"", ()],
    ],
)
def test_c_takes_nothing_it_could_not_read_twice(record):
    with pytest.raises((TypeError, OverflowError)):
        record_encode.encode_records([(1, None, b"", ()), record])

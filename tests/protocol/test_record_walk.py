"""The walk over records: what it finds, and that its two twins find the same."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpbroker.protocol.records import record_walk as walk
from mpbroker.protocol.records.record_batch import RecordBatchBuilder
from tests.support.batch_forgery import record, varint

needs_extension = pytest.mark.skipif(
    not walk.IS_COMPILED, reason="mpbroker.native._records is not built"
)
NO_TIMESTAMP_DELTA = -1_000_000


@pytest.fixture(
    params=[
        pytest.param(walk.walk_records_in_python, id="python"),
        pytest.param(walk.walk_records, id="compiled", marks=needs_extension),
    ]
)
def walk_records(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_records_without_fault_are_all_walked(walk_records):
    payload = b"".join(record(i) for i in range(5))
    assert walk_records(payload, 0, 5, NO_TIMESTAMP_DELTA) == (0, 5, 0, 0, 0, -1)


def test_no_records_in_no_bytes_are_no_fault(walk_records):
    assert walk_records(b"xx", 2, 0, 0) == (0, 0, 0, -1, 0, -1)


def test_the_walk_starts_where_it_is_told(walk_records):
    assert walk_records(b"\xff" * 61 + record(0), 61, 1, 5)[0] == walk.NO_FAULT


@pytest.mark.parametrize("start", [-1, 4])
def test_a_start_outside_the_data_is_our_own_mistake(walk_records, start):
    with pytest.raises(ValueError, match="start"):
        walk_records(b"abc", start, 1, 0)


def test_a_shared_writable_view_is_walked_like_bytes(walk_records):
    view = memoryview(bytearray(b"?" + record(0) + b"?"))[1:-1]
    assert walk_records(view, 0, 1, 5)[:2] == (walk.NO_FAULT, 1)


def test_the_newest_and_oldest_are_found_and_the_first_of_equals_is_named(walk_records):
    deltas = [3, -70, 9000, 2, 9000, -70]
    payload = b"".join(
        record(i, timestamp_delta=varint(d)) for i, d in enumerate(deltas)
    )
    assert walk_records(payload, 0, 6, NO_TIMESTAMP_DELTA)[2:5] == (9000, 2, -70)


def test_records_without_a_timestamp_are_neither_newest_nor_oldest(walk_records):
    deltas = [-500, 7, -500]
    payload = b"".join(
        record(i, timestamp_delta=varint(d)) for i, d in enumerate(deltas)
    )
    assert walk_records(payload, 0, 3, -500)[2:5] == (7, 1, 7)
    payload = record(0, timestamp_delta=varint(-500))
    assert walk_records(payload, 0, 1, -500)[3] == -1


@pytest.mark.parametrize("delta", [2**63 - 1, -(2**63)])
def test_timestamp_deltas_have_all_64_bits(walk_records, delta):
    payload = record(0, timestamp_delta=varint(delta))
    assert walk_records(payload, 0, 1, 0)[2:5] == (delta, 0, delta)


def test_the_first_record_without_a_key_is_named(walk_records):
    payload = record(0) + record(1, key=None) + record(2, key=None)
    assert walk_records(payload, 0, 3, 5)[5] == 1


def test_a_record_is_called_keyless_only_by_what_it_says_itself(walk_records):
    # Unusual (it has a header), so it is looked at twice.
    payload = record(0, key=None, headers=b"\x02\x02h\x02x") + record(1, key=None)
    assert walk_records(payload, 0, 2, 5)[5] == 0
    payload = record(0, key=b"\x00", headers=b"\x02\x02h\x01")
    assert walk_records(payload, 0, 1, 5)[5] == -1


@pytest.mark.parametrize("size", [0, 63, 64, 8191, 8192, 70_000])
def test_lengths_of_any_number_of_bytes_are_read(walk_records, size):
    data = b"x" * size
    builder = RecordBatchBuilder()
    builder.append(1, data, data, [("h", data), ("", None)])
    builder.append(1, data, None)
    payload = builder.build()[61:]
    assert walk_records(payload, 0, 2, 5)[:2] == (walk.NO_FAULT, 2)


def test_offset_deltas_of_one_two_and_three_bytes_are_read(walk_records):
    payload = b"".join(record(i) for i in range(8300))
    assert walk_records(payload, 0, 8300, 5)[:2] == (walk.NO_FAULT, 8300)
    payload = payload[: -len(record(8299))] + record(8298)
    assert walk_records(payload, 0, 8300, 5)[:2] == (walk.BAD_OFFSET_DELTA, 8299)


LIES = {
    "one record fewer": (b"", walk.TOO_FEW_RECORDS),
    "length cut off": (b"\x80", walk.BAD_VARINT),
    "length of 6 bytes": (record(1, length=varint(7, 6)), walk.BAD_VARINT),
    "length of 10 bytes": (record(1, length=b"\xff" * 9 + b"\x01"), walk.BAD_VARINT),
    "length of 33 bits": (record(1, length=b"\x90\x80\x80\x80\x10"), walk.BAD_VARINT),
    "negative length": (record(1, length=varint(-8)), walk.BAD_RECORD_LENGTH),
    "length of 0": (record(1, length=b"\x00"), walk.BAD_RECORD_LENGTH),
    "length past the batch": (record(1, length=varint(9)), walk.BAD_RECORD_LENGTH),
    "huge length": (record(1, length=varint(2**31 - 1)), walk.BAD_RECORD_LENGTH),
    "length below its fields": (record(1, length=varint(7)), walk.BAD_VARINT),
    "timestamp of 11 bytes": (
        record(1, timestamp_delta=varint(0, 11)),
        walk.BAD_VARINT,
    ),
    "timestamp of 65 bits": (
        record(1, timestamp_delta=b"\xff" * 9 + b"\x02"),
        walk.BAD_VARINT,
    ),
    "offset of 6 bytes": (record(1, offset_delta=varint(1, 6)), walk.BAD_VARINT),
    "offset repeated": (record(0), walk.BAD_OFFSET_DELTA),
    "offset skipped": (record(2), walk.BAD_OFFSET_DELTA),
    "offset negative": (record(-1), walk.BAD_OFFSET_DELTA),
    "key length -2": (record(1, key=varint(-2)), walk.BAD_KEY_LENGTH),
    "key past the record": (record(1, key=varint(50)), walk.BAD_KEY_LENGTH),
    "value length -2": (record(1, value=varint(-2)), walk.BAD_VALUE_LENGTH),
    "value past the record": (record(1, value=varint(50)), walk.BAD_VALUE_LENGTH),
    "huge value": (record(1, value=varint(2**31 - 1)), walk.BAD_VALUE_LENGTH),
    "header count -1": (record(1, headers=varint(-1)), walk.BAD_HEADER_COUNT),
    "header count a lie": (record(1, headers=varint(2**31 - 1)), walk.BAD_HEADER_COUNT),
    "header without key": (record(1, headers=b"\x02\x01\x01"), walk.BAD_HEADER),
    "header key too long": (record(1, headers=b"\x02\x08h\x01"), walk.BAD_HEADER),
    "header value too long": (record(1, headers=b"\x02\x02h\x08x"), walk.BAD_HEADER),
    "header value -2": (record(1, headers=b"\x02\x02h\x03"), walk.BAD_HEADER),
    "headers cut off": (record(1, headers=b"\x04\x02h\x01"), walk.BAD_VARINT),
    "bytes after its headers": (
        record(1, headers=b"\x00?"),
        walk.BYTES_LEFT_IN_RECORD,
    ),
    "another record": (record(1) + record(2), walk.BYTES_LEFT_IN_BATCH),
    "a stray byte": (record(1) + b"\x00", walk.BYTES_LEFT_IN_BATCH),
}


@pytest.mark.parametrize("lie", LIES)
def test_every_lie_has_its_fault_and_place(walk_records, lie):
    second, fault = LIES[lie]
    index = 2 if fault == walk.BYTES_LEFT_IN_BATCH else 1
    assert walk_records(record(0) + second, 0, 2, 5)[:2] == (fault, index)


def test_every_fault_has_its_words():
    faults = {fault for _, fault in LIES.values()}
    assert set(walk.FAULT_MESSAGES) == faults


def test_varints_longer_than_needed_are_read_for_what_they_say(walk_records):
    body = record(0, timestamp_delta=varint(0, 10), offset_delta=varint(0, 5))
    padded = varint(len(body) - 1, 5) + body[1:]
    assert walk_records(padded, 0, 1, 5)[:2] == (walk.NO_FAULT, 1)


def test_a_count_of_billions_costs_no_more_than_the_bytes_there(walk_records):
    fault, index, *_ = walk_records(record(0), 0, 2**31 - 1, 5)
    assert (fault, index) == (walk.TOO_FEW_RECORDS, 1)


payloads = st.lists(
    st.tuples(
        st.integers(-(2**40), 2**40) | st.integers(0, 300),
        st.none() | st.binary(max_size=80),
        st.none() | st.binary(max_size=150),
        st.lists(
            st.tuples(st.text(max_size=4), st.none() | st.binary(max_size=4)),
            max_size=2,
        ),
    ),
    min_size=1,
    max_size=6,
)


@needs_extension
@settings(max_examples=100)
@given(payloads, st.data())
def test_the_twins_agree_on_mutated_records(entries, data):
    builder = RecordBatchBuilder()
    for timestamp, key, value, headers in entries:
        builder.append(timestamp, key, value, headers)
    payload = bytearray(builder.build()[61:])
    for _ in range(data.draw(st.integers(0, 3))):
        position = data.draw(st.integers(0, len(payload) - 1))
        payload[position] = data.draw(st.integers(0, 255))
    payload = payload[: data.draw(st.integers(0, len(payload)) | st.just(len(payload)))]
    count = data.draw(st.just(len(entries)) | st.integers(-1, 8))
    no_timestamp = data.draw(st.integers(-3, 3))
    answers = [
        twin(payload, 0, count, no_timestamp)
        for twin in (walk.walk_records, walk.walk_records_in_python)
    ]
    assert answers[0] == answers[1]


@needs_extension
@settings(max_examples=100)
@given(st.binary(max_size=60), st.integers(0, 4))
def test_the_twins_agree_on_any_bytes(data, count):
    assert walk.walk_records(data, 0, count, 3) == walk.walk_records_in_python(
        data, 0, count, 3
    )


@needs_extension
@pytest.mark.parametrize(
    "arguments",
    [(), (b"", 0, 0), ("text", 0, 0, 0), (b"", "0", 0, 0), (b"", 0, 2**70, 0)],
)
def test_the_compiled_twin_refuses_other_arguments(arguments):
    with pytest.raises((TypeError, OverflowError)):
        walk.walk_records(*arguments)

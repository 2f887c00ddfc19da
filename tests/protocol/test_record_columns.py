"""Columns hold what a reader of records would have seen, from either twin."""

from __future__ import annotations

import struct
from array import array
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.protocol.records import record_columns
from mpbroker.protocol.records.compression import Codec
from mpbroker.protocol.records.record_batch import (
    BATCH_HEADER_SIZE,
    LOG_APPEND_TIME,
    Record,
    RecordBatchBuilder,
    iter_records,
    parse_batch_header,
    set_base_offset,
)
from mpbroker.protocol.records.record_columns import (
    BadRecordsError,
    EncodedRecords,
    RecordColumns,
    encoded_records,
    read_columns,
    read_columns_in_python,
)

FIELD = st.none() | st.binary(max_size=200)
RECORDS = st.lists(
    st.tuples(
        st.integers(0, 1 << 42),
        FIELD,
        FIELD,
        st.lists(st.tuples(st.text(max_size=4), FIELD), max_size=3),
    ),
    min_size=1,
    max_size=20,
)


@pytest.fixture(params=["compiled", "python"])
def twin(request, monkeypatch):
    if request.param == "python":
        monkeypatch.setattr(record_columns, "_read_columns", read_columns_in_python)
    elif not record_columns.IS_COMPILED:
        pytest.skip("built without a compiler")


def build(records, codec=Codec.NONE, **options) -> bytes:
    builder = RecordBatchBuilder(codec, **options)
    for timestamp, key, value, headers in records:
        builder.append(timestamp, key, value, headers)
    return builder.build()


def fields(column):
    validity, offsets, content = column
    ends = array("i", offsets)
    return [
        content[start:end]
        if validity is None or validity[index >> 3] >> (index & 7) & 1
        else None
        for index, (start, end) in enumerate(pairwise(ends))
    ]


def rows(columns: RecordColumns) -> list[Record]:
    """The records that the columns stand for."""
    assert columns.headers is not None
    ends, names, contents = columns.headers
    pairs = [
        (name.decode("utf-8", "surrogateescape"), content)
        for name, content in zip(fields(names), fields(contents), strict=True)
    ]
    bounds = array("i", ends)
    return [
        Record(*row, tuple(pairs[bounds[index] : bounds[index + 1]]))
        for index, row in enumerate(
            zip(
                array("q", columns.offsets),
                array("q", columns.timestamps),
                fields(columns.keys),
                fields(columns.values),
                strict=True,
            )
        )
    ]


def expected(batch: bytes, first_offset: int) -> list[Record]:
    return [
        record._replace(headers=tuple(record.headers))
        for record in iter_records(batch)
        if record.offset >= first_offset
    ]


@pytest.mark.usefixtures("twin")
@pytest.mark.parametrize("codec", [Codec.NONE, Codec.LZ4])
@pytest.mark.parametrize("options", [{}, {"timestamp_type": LOG_APPEND_TIME}])
def test_columns_are_the_records(codec, options):
    @given(RECORDS, st.integers(0, 1 << 40), st.integers(-3, 25))
    def check(records, base_offset, skipped):
        batch = bytearray(build(records, codec, **options))
        set_base_offset(batch, base_offset)
        first = base_offset + skipped
        part = encoded_records(parse_batch_header(batch), batch, first)
        columns = read_columns([part], with_headers=True)
        assert rows(columns) == expected(batch, first)
        assert columns.rows == len(expected(batch, first))
        assert read_columns([part], with_headers=False) == (
            columns._replace(headers=None)
        )

    check()


@pytest.mark.usefixtures("twin")
@given(st.lists(st.tuples(RECORDS, st.integers(-3, 25), st.booleans()), max_size=4))
def test_columns_of_several_batches_are_their_records_in_order(batches):
    parts, wanted = [], []
    for records, skipped, is_compressed in batches:
        batch = build(records, Codec.LZ4 if is_compressed else Codec.NONE)
        parts.append(encoded_records(parse_batch_header(batch), batch, skipped))
        wanted += expected(batch, skipped)
    columns = read_columns(parts, with_headers=True)
    assert columns.rows == len(wanted)
    assert rows(columns) == wanted


@pytest.mark.usefixtures("twin")
def test_a_column_without_nulls_has_no_validity_bitmap():
    batch = build([(1, b"k", None, []), (2, b"", b"v", [])])
    part = encoded_records(parse_batch_header(batch), batch, 0)
    columns = read_columns([part], with_headers=False)
    assert columns.keys[0] is None
    assert columns.values[0] == b"\x02"


@given(RECORDS, st.data())
def test_any_damage_is_refused_or_read_alike_by_both_twins(records, data):
    if not record_columns.IS_COMPILED:
        pytest.skip("built without a compiler")
    payload = bytearray(build(records)[BATCH_HEADER_SIZE:])
    for _ in range(data.draw(st.integers(0, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(
            st.integers(0, 255)
        )
    cut = data.draw(st.integers(0, len(payload)))
    content = bytes(payload[: data.draw(st.sampled_from([cut, len(payload)]))])
    count = data.draw(st.integers(-1, len(records) + 1))
    first = data.draw(st.integers(-1, 5))
    whole = EncodedRecords(
        build(records)[BATCH_HEADER_SIZE:], len(records), 0, 0, 0, False
    )
    damaged = EncodedRecords(content, count, first, 7, 1_000, False)
    for parts in ([damaged], [whole, damaged], [damaged, whole]):
        compiled = record_columns._columns.read_columns(parts, True)
        try:
            by_hand = read_columns_in_python(parts, True)
        except BadRecordsError as error:
            assert compiled[0] != 0
            assert compiled[2] == error.part == parts.index(damaged)
        else:
            assert compiled == by_hand


@pytest.mark.usefixtures("twin")
@pytest.mark.parametrize("base", [2**62, -(2**62)])
def test_a_timestamp_beyond_64_bits_wraps(base):
    payload = build([(0, None, b"", []), (base, None, b"", [])])[BATCH_HEADER_SIZE:]
    part = EncodedRecords(payload, 2, 0, 0, base, False)
    found = record_columns._read_columns([part], False)
    assert list(array("q", found[3])) == [base, -(2**63)]


@pytest.mark.usefixtures("twin")
def test_a_lie_names_the_record():
    batch = bytearray(build([(1, b"k", b"v", []), (2, b"k", b"v", [])]))
    struct.pack_into(">i", batch, 57, 3)  # record_count
    lie = encoded_records(parse_batch_header(batch), batch, 0)
    truth = lie._replace(record_count=2)
    with pytest.raises(BadRecordsError, match=r"record 2.*offset 0") as caught:
        read_columns([truth, lie], with_headers=True)
    assert caught.value.part == 1


@pytest.mark.skipif(not record_columns.IS_COMPILED, reason="built without a compiler")
@pytest.mark.parametrize(
    "parts", [(), None, [None], [()], [(b"", 0, 0, 0, 0)], [("", 0, 0, 0, 0, False)]]
)
def test_parts_of_another_shape_are_a_type_error(parts):
    with pytest.raises(TypeError):
        record_columns._columns.read_columns(parts, True)

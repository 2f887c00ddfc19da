"""Record batches: headers, records, their builder, and what other clients read."""

from __future__ import annotations

import pytest
from aiokafka.record.default_records import (
    DefaultRecordBatch as AioBatch,
)
from aiokafka.record.default_records import (
    DefaultRecordBatchBuilder as AioBuilder,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from mpbroker.protocol.errors import ProtocolError
from mpbroker.protocol.records.compression import Codec, DecompressionLimitError
from mpbroker.protocol.records.control_record import (
    EndTransactionMarker,
    build_end_transaction_marker,
    parse_control_type,
    parse_end_transaction_marker,
)
from mpbroker.protocol.records.crc32c import crc32c
from mpbroker.protocol.records.record_batch import (
    BATCH_HEADER_SIZE,
    LOG_APPEND_TIME,
    BatchHeader,
    Record,
    RecordBatchBuilder,
    RecordBatchError,
    UnsupportedMagicError,
    _read_record,
    _read_usual_record,
    compute_crc,
    increment_sequence,
    iter_batches,
    iter_records,
    parse_batch_header,
    set_base_offset,
)
from tests.support.batch_forgery import batch, record, sized, varint
from tests.support.kafka_python import default_records as kafka_python
from tests.support.kafka_python import legacy_records

every_codec = pytest.mark.parametrize("codec", list(Codec), ids=lambda c: c.name)
TIME = 1_700_000_000_000
RECORDS = [
    Record(i, TIME + i * 7 % 50, key, value, headers)
    for i, (key, value, headers) in enumerate(
        [
            (None, b"v", []),
            (b"", b"", [("h", b"x"), ("h", None), ("", b"")]),
            (b"k" * 64, None, [("ключ", b"y" * 70)]),
        ]
        + [(b"key %d" % i, b"value " * 20, []) for i in range(200)]
    )
]


def build(records: list[Record], codec: Codec = Codec.NONE, **options: int) -> bytes:
    builder = RecordBatchBuilder(codec, **options)
    for entry in records:
        builder.append(entry.timestamp, entry.key, entry.value, entry.headers)
    return builder.build()


def as_records(batch_of_theirs) -> list[Record]:
    return [
        Record(r.offset, r.timestamp, r.key, r.value, list(r.headers))
        for r in batch_of_theirs
    ]


def read(data: bytes) -> list[Record]:
    return [r._replace(headers=list(r.headers)) for r in iter_records(data)]


# -- crc -------------------------------------------------------------------------------


def test_the_crc_is_castagnolis():
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(memoryview(bytearray(b"6789")), crc32c(b"12345")) == 0xE3069283


# -- headers ---------------------------------------------------------------------------


def test_a_header_is_read_as_it_was_written():
    data = build(
        RECORDS,
        Codec.LZ4,
        producer_id=7,
        producer_epoch=3,
        base_sequence=2**31 - 2,
        transactional=True,
    )
    header = parse_batch_header(b"??" + data, 2)
    assert header == parse_batch_header(memoryview(bytearray(data)))
    assert header.size_in_bytes == len(data)
    assert (header.base_offset, header.partition_leader_epoch, header.magic) == (
        0,
        -1,
        2,
    )
    assert header.codec is Codec.LZ4
    assert header.is_transactional and not header.is_control
    assert header.timestamp_type == 0 and not header.has_delete_horizon
    assert (header.base_timestamp, header.max_timestamp) == (TIME, TIME + 49)
    assert header.record_count == len(RECORDS) == header.last_offset_delta + 1
    assert (header.producer_id, header.producer_epoch) == (7, 3)
    assert header.last_sequence == len(RECORDS) - 3
    assert header.crc == compute_crc(data)


def test_offsets_follow_from_the_base_offset():
    data = bytearray(build(RECORDS))
    crc = compute_crc(data)
    for _ in range(2):
        set_base_offset(memoryview(data), 2**40, 5)
        header = parse_batch_header(data)
        assert (header.base_offset, header.partition_leader_epoch) == (2**40, 5)
        assert header.last_offset == header.next_offset - 1 == 2**40 + len(RECORDS) - 1
        assert compute_crc(data) == crc == header.crc
    assert next(iter_records(data)).offset == 2**40


def test_sequences_go_on_at_zero_after_the_largest():
    assert increment_sequence(5, 3) == 8
    assert increment_sequence(2**31 - 1, 1) == 0
    assert increment_sequence(2**31 - 3, 5) == 2
    assert parse_batch_header(build(RECORDS)).last_sequence == -1


@pytest.mark.parametrize("size", range(BATCH_HEADER_SIZE))
def test_a_header_cut_anywhere_is_refused(size):
    with pytest.raises(RecordBatchError, match=f"{size} bytes"):
        parse_batch_header(build(RECORDS)[:size])


@pytest.mark.parametrize("magic", [0, 1])
def test_older_formats_are_told_by_their_magic(magic):
    builder = legacy_records.LegacyRecordBatchBuilder(magic, 0, 9999)
    builder.append(0, TIME, b"k", b"v", [])
    with pytest.raises(UnsupportedMagicError) as caught:
        parse_batch_header(builder.build())
    assert caught.value.magic == magic


@pytest.mark.parametrize("length", [48, 0, -1, -(2**31)])
def test_a_length_below_a_headers_is_refused(length):
    data = bytearray(build(RECORDS))
    data[8:12] = length.to_bytes(4, "big", signed=True)
    with pytest.raises(RecordBatchError, match="batch_length"):
        parse_batch_header(data)


@pytest.mark.parametrize("bits", [5, 6, 7])
def test_an_unknown_codec_is_refused_when_asked_for(bits):
    data = batch(record(0), 1, attributes=bits)
    with pytest.raises(RecordBatchError, match="codec"):
        _ = parse_batch_header(data).codec
    with pytest.raises(RecordBatchError, match="codec"):
        list(iter_records(data))


@settings(max_examples=100)
@given(st.binary(max_size=130))
def test_any_bytes_are_batches_or_a_protocol_error(data):
    try:
        for header, whole in iter_batches(data):
            assert isinstance(header, BatchHeader)
            list(iter_records(whole, 1000))
    except ProtocolError:
        pass


# -- batches ---------------------------------------------------------------------------


def test_batches_follow_one_another():
    parts = [build(RECORDS[:n], c) for n, c in ((1, Codec.NONE), (9, Codec.ZSTD))]
    found = list(iter_batches(b"..." + b"".join(parts), 3))
    assert [bytes(whole) for _, whole in found] == parts
    assert [header.record_count for header, _ in found] == [1, 9]


@pytest.mark.parametrize("kept", [0, 11, 60, 61, 100])
def test_a_last_batch_that_was_cut_is_left_out(kept):
    whole = build(RECORDS)
    assert [h.record_count for h, _ in iter_batches(whole + whole[:kept])] == [
        len(RECORDS)
    ]


# -- records ---------------------------------------------------------------------------


@every_codec
def test_records_come_back_as_they_were_appended(codec):
    assert read(build(RECORDS, codec)) == RECORDS


@settings(max_examples=60)
@given(
    st.sampled_from(list(Codec)),
    st.lists(
        st.tuples(
            st.integers(-(2**61), 2**61),
            st.none() | st.binary(max_size=200),
            st.none() | st.binary(max_size=200),
            st.lists(
                st.tuples(st.text(max_size=9), st.none() | st.binary(max_size=9)),
                max_size=3,
            ),
        ),
        min_size=1,
        max_size=5,
    ),
)
def test_any_records_come_back(codec, entries):
    records = [Record(i, *entry) for i, entry in enumerate(entries)]
    data = build(records, codec)
    assert read(data) == records
    header = parse_batch_header(data)
    assert header.crc == compute_crc(data)
    assert header.max_timestamp == max(-1, *(r.timestamp for r in records))


@settings(max_examples=100)
@given(st.data())
def test_a_usual_record_is_read_as_any_record_is(data):
    payload = bytearray(
        record(
            data.draw(st.sampled_from([0, 63, 64, 8191, 8192])),
            timestamp_delta=varint(data.draw(st.integers(-9000, 9000))),
            key=sized(data.draw(st.none() | st.binary(max_size=99))),
            value=sized(data.draw(st.none() | st.binary(max_size=99))),
        )
    )
    for _ in range(data.draw(st.integers(0, 2))):
        position = data.draw(st.integers(0, len(payload) - 1))
        payload[position] = data.draw(st.integers(0, 255))
    usual = _read_usual_record(bytes(payload), 0)
    assert usual is None or usual == _read_record(bytes(payload), 0)


def test_header_keys_that_are_not_text_go_back_as_they_came():
    payload = record(0, headers=b"\x02\x04\xff\xfe\x02x")
    [found] = iter_records(batch(payload, 1))
    builder = RecordBatchBuilder()
    builder.append(TIME, found.key, found.value, found.headers)
    assert builder.build()[BATCH_HEADER_SIZE:] == payload


def test_the_brokers_time_is_every_records_time():
    builder = RecordBatchBuilder(timestamp_type=LOG_APPEND_TIME)
    builder.append(5, None, b"a")
    builder.append(900, None, b"b")
    data = builder.build(max_timestamp=TIME)
    assert [r.timestamp for r in iter_records(data)] == [TIME, TIME]


def test_a_compacted_batch_keeps_its_offsets():
    builder = RecordBatchBuilder(Codec.GZIP)
    builder.append(1, b"a", b"1", offset_delta=3)
    builder.append(2, b"b", b"2", offset_delta=70)
    data = builder.build(
        base_offset=100, last_offset_delta=99, partition_leader_epoch=4
    )
    assert [r.offset for r in iter_records(data)] == [103, 170]
    header = parse_batch_header(data)
    assert (header.next_offset, header.record_count) == (200, 2)
    assert header.partition_leader_epoch == 4


def test_a_batch_may_be_empty_after_compaction():
    data = RecordBatchBuilder(producer_id=5).build(last_offset_delta=9)
    assert parse_batch_header(data).next_offset == 10
    assert list(iter_records(data)) == []


def test_the_builder_says_its_size():
    builder = RecordBatchBuilder()
    assert builder.size_in_bytes == BATCH_HEADER_SIZE
    builder.append(TIME, b"k", b"v" * 100)
    assert builder.size_in_bytes == len(builder.build())


def test_a_bomb_of_a_batch_is_bounded():
    data = build([Record(0, TIME, None, bytes(10_000_000))], Codec.ZSTD)
    with pytest.raises(DecompressionLimitError):
        list(iter_records(data, 1_000_000))


LIES = {
    "a record past the batch": (record(0, length=varint(60)), 1),
    "a negative length": (record(0, length=varint(-1)), 1),
    "a record fewer": (record(0), 2),
    "a record more": (record(0) + record(1), 1),
    "a value past the record": (record(0, value=varint(99)), 1),
    "bytes after a record's fields": (record(0, headers=b"\x00?"), 1),
    "headers that cannot be": (record(0, headers=varint(2**31 - 1)), 1),
    "a header without key": (record(0, headers=b"\x02\x01\x01"), 1),
    "a long varint": (record(0, offset_delta=varint(0, 6)), 1),
    "a varint of 33 bits": (record(0, length=b"\x90\x80\x80\x80\x10"), 1),
    "a negative count": (record(0), -1),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_about_lengths_and_counts_are_refused(lie):
    payload, count = LIES[lie]
    with pytest.raises(RecordBatchError):
        list(iter_records(batch(payload, count)))


def test_a_batch_that_is_not_all_there_has_no_records():
    with pytest.raises(RecordBatchError, match="bytes in"):
        iter_records(build(RECORDS)[:-1])


# -- control batches -------------------------------------------------------------------


@given(
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**15 - 1),
    st.booleans(),
    st.integers(-1, 2**31 - 1),
    st.integers(0, 2**60),
)
@settings(max_examples=50)
def test_a_marker_is_the_batch_that_the_builder_builds(
    producer_id, epoch, commit, coordinator_epoch, timestamp
):
    builder = RecordBatchBuilder(
        producer_id=producer_id,
        producer_epoch=epoch,
        transactional=True,
        control=True,
    )
    key = bytes((0, 0, 0, commit))
    value = b"\0\0" + coordinator_epoch.to_bytes(4, "big", signed=True)
    builder.append(timestamp, key, value)
    marker = EndTransactionMarker(commit, coordinator_epoch)
    found = build_end_transaction_marker(producer_id, epoch, marker, timestamp)
    assert found == builder.build()


@pytest.mark.parametrize("commit", [True, False])
def test_a_marker_says_how_a_transaction_ended(commit):
    marker = EndTransactionMarker(commit, 77)
    data = build_end_transaction_marker(9, 2, marker, TIME)
    header = parse_batch_header(data)
    assert header.is_control and header.is_transactional
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (
        9,
        2,
        -1,
    )
    [found] = iter_records(data)
    assert parse_end_transaction_marker(found) == marker
    [theirs] = AioBatch(data)
    assert (theirs.key, theirs.value) == (found.key, found.value)
    assert kafka_python.DefaultRecordBatch(data).is_control_batch


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (None, b"\0\0\0\0\0\0"),
        (b"\0\0\0", b"\0\0\0\0\0\0"),
        (b"\xff\xff\0\0", b"\0\0\0\0\0\0"),
        (b"\0\0\0\2", b"\0\0\0\0\0\0"),
        (b"\0\0\0\1", None),
        (b"\0\0\0\1", b"\0\0\0\0\0"),
        (b"\0\0\0\1", b"\xff\xff\0\0\0\0"),
    ],
)
def test_what_is_no_marker_is_refused(key, value):
    with pytest.raises(RecordBatchError):
        parse_end_transaction_marker(Record(0, 0, key, value))


def test_markers_of_later_versions_are_read_as_far_as_known():
    later = Record(0, 0, b"\0\1\0\1new", b"\0\1\0\0\0\7new")
    assert parse_control_type(later) == 1
    assert parse_end_transaction_marker(later) == EndTransactionMarker(True, 7)


# -- other clients ---------------------------------------------------------------------


@every_codec
def test_aiokafka_reads_our_batches(codec):
    theirs = AioBatch(build(RECORDS, codec))
    assert theirs.validate_crc()
    assert as_records(theirs) == RECORDS


@every_codec
def test_we_read_aiokafkas_batches(codec):
    builder = AioBuilder(2, codec, 1, 11, 2, 30, 1 << 20)
    for entry in RECORDS:
        builder.append(
            entry.offset, entry.timestamp, entry.key, entry.value, list(entry.headers)
        )
    data = bytes(builder.build())
    header = parse_batch_header(data)
    assert header.crc == compute_crc(data)
    assert header.codec is codec
    assert (header.producer_id, header.last_sequence) == (11, 29 + len(RECORDS))
    assert read(data) == RECORDS


# kafka-python needs packages of its own for snappy and zstd.
kafka_python_codec = pytest.mark.parametrize(
    "codec", [Codec.NONE, Codec.GZIP, Codec.LZ4], ids=lambda c: c.name
)


@kafka_python_codec
def test_kafka_python_reads_our_batches(codec):
    theirs = kafka_python.DefaultRecordBatch(build(RECORDS, codec))
    assert theirs.validate_crc()
    assert as_records(theirs) == RECORDS


@kafka_python_codec
def test_we_read_kafka_pythons_batches(codec):
    builder = kafka_python.DefaultRecordBatchBuilder(2, codec, 0, -1, -1, -1, 1 << 20)
    for entry in RECORDS:
        builder.append(
            entry.offset, entry.timestamp, entry.key, entry.value, list(entry.headers)
        )
    data = bytes(builder.build())
    assert parse_batch_header(data).crc == compute_crc(data)
    assert read(data) == RECORDS

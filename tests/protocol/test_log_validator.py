"""What may be appended, what is refused and by which name, and what is mended."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from aiokafka.record.default_records import DefaultRecordBatchBuilder as AioBuilder
from hypothesis import given, settings
from hypothesis import strategies as st

from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.records import log_validator, record_walk
from mpbroker.protocol.records.compression import Codec, compress
from mpbroker.protocol.records.control_record import (
    EndTransactionMarker,
    build_end_transaction_marker,
)
from mpbroker.protocol.records.log_validator import (
    InflationBudget,
    RecordError,
    RecordsError,
    ValidatedBatch,
    ValidationPolicy,
    validate_produce,
)
from mpbroker.protocol.records.record_batch import (
    NO_TIMESTAMP,
    RecordBatchBuilder,
    compute_crc,
    iter_records,
    parse_batch_header,
    set_base_offset,
)
from tests.support.batch_forgery import NOW_MS, batch, record, varint, with_true_crc
from tests.support.kafka_python import legacy_records

DEFAULTS = ValidationPolicy()
ANY_TIME = DEFAULTS._replace(after_max_ms=2**63 - 1)
LOG_APPEND_TIME = DEFAULTS._replace(timestamp_type="LogAppendTime")

every_codec = pytest.mark.parametrize("codec", list(Codec), ids=lambda c: c.name)


@pytest.fixture(
    autouse=True,
    params=[
        pytest.param(record_walk.walk_records_in_python, id="python"),
        pytest.param(
            record_walk.walk_records,
            id="compiled",
            marks=pytest.mark.skipif(
                not record_walk.IS_COMPILED,
                reason="mpbroker.native._records is not built",
            ),
        ),
    ],
)
def both_walks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_validator, "walk_records", request.param)


def build(codec: Codec = Codec.NONE, **options: Any) -> bytes:
    """Three records; the second is the newest."""
    builder = RecordBatchBuilder(codec, **options)
    builder.append(NOW_MS, b"a", b"1" * 50)
    builder.append(NOW_MS + 5, b"b", None, [("h", b"x")])
    builder.append(NOW_MS + 2, b"", b"3")
    return builder.build()


def refusal(
    records: bytes, policy: ValidationPolicy = DEFAULTS, now_ms: int = NOW_MS
) -> ApiError:
    before = bytes(records)
    with pytest.raises(ApiError) as caught:
        validate_produce(records, policy, now_ms)
    assert bytes(records) == before
    return caught.value


def refused_as(
    records: bytes, policy: ValidationPolicy = DEFAULTS, now_ms: int = NOW_MS
) -> ErrorCode:
    return refusal(records, policy, now_ms).error_code


def values(data: Any) -> list[tuple[bytes | None, bytes | None, Any]]:
    return [(r.key, r.value, tuple(r.headers)) for r in iter_records(data)]


# -- accepted as it is -----------------------------------------------------------------


@every_codec
def test_a_true_batch_is_appended_as_it_came(codec):
    data = build(codec, producer_id=5, producer_epoch=0, base_sequence=0)
    view = memoryview(bytearray(data))
    found = validate_produce(view, DEFAULTS, NOW_MS)
    assert found == ValidatedBatch(
        parse_batch_header(data), 1, NOW_MS + 5, 3, 2, view, -1
    )
    assert found.data.obj is view.obj
    assert bytes(view) == data


def test_a_batch_that_got_its_offset_before_is_judged_the_same():
    view = memoryview(bytearray(build()))
    first = validate_produce(view, DEFAULTS, NOW_MS)
    set_base_offset(view, 12345, 6)
    again = validate_produce(view, DEFAULTS, NOW_MS)
    assert again[1:] == first[1:]
    assert again.header.base_offset == 12345


@every_codec
def test_batches_of_aiokafka_are_accepted(codec):
    builder = AioBuilder(2, codec, 1, 3, 0, 0, 1 << 20)
    for i in range(300):
        builder.append(i, NOW_MS + i % 7, b"k%d" % i, b"v" * i, [("h", b"x")])
    found = validate_produce(bytes(builder.build()), DEFAULTS, NOW_MS)
    assert (found.record_count, found.offset_of_max_timestamp) == (300, 6)


def test_a_record_without_a_timestamp_is_accepted():
    data = batch(record(0), 1, base_timestamp=-1, max_timestamp=-1)
    found = validate_produce(data, DEFAULTS._replace(before_max_ms=0), NOW_MS)
    assert (found.max_timestamp, found.offset_of_max_timestamp) == (NO_TIMESTAMP, 0)
    assert found.data == data


# -- the batch as a whole --------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 11, 16])
def test_too_few_bytes_hold_no_batch(size):
    assert refused_as(build()[:size]) is ErrorCode.INVALID_RECORD


def test_a_batch_that_is_cut_is_no_batch():
    assert refused_as(build()[:-1]) is ErrorCode.INVALID_RECORD


@pytest.mark.parametrize("more", [b"\x00", build(), build()[:30]])
def test_there_is_exactly_one_batch(more):
    error = refusal(build() + more)
    assert error.error_code is ErrorCode.INVALID_RECORD
    assert "exactly one batch" in error.message


@pytest.mark.parametrize("size", [17, 40, 60])
def test_a_header_that_is_cut_is_corrupt(size):
    assert refused_as(build()[:size]) is ErrorCode.CORRUPT_MESSAGE


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("size", [1, 400])
def test_older_formats_are_refused_by_name(magic, size):
    builder = legacy_records.LegacyRecordBatchBuilder(magic, 0, 9999)
    builder.append(0, NOW_MS, b"k", b"v" * size, [])
    error = refusal(bytes(builder.build()))
    assert error.error_code is ErrorCode.INVALID_RECORD
    assert f"format {magic}" in error.message


@pytest.mark.parametrize("magic", [3, 127, -1])
def test_formats_that_do_not_exist_are_corrupt(magic):
    data = batch(record(0), 1, magic=magic)
    assert refused_as(data) is ErrorCode.CORRUPT_MESSAGE


@pytest.mark.parametrize("length", [0, -1, 48, -(2**31)])
def test_a_length_below_a_header_is_corrupt(length):
    data = bytearray(build())
    data[8:12] = length.to_bytes(4, "big", signed=True)
    assert refused_as(bytes(data)) is ErrorCode.CORRUPT_MESSAGE


def test_every_changed_bit_behind_the_crc_is_noticed():
    data = build()
    for position in range(17, len(data)):
        changed = bytearray(data)
        changed[position] ^= 1 << position % 8
        assert refused_as(bytes(changed)) is ErrorCode.CORRUPT_MESSAGE


def test_a_batch_above_the_topics_limit_is_too_large():
    data = build()
    error = refusal(data, DEFAULTS._replace(max_message_bytes=len(data) - 1))
    assert error.error_code is ErrorCode.MESSAGE_TOO_LARGE
    assert f"max.message.bytes={len(data) - 1}" in error.message
    validate_produce(data, DEFAULTS._replace(max_message_bytes=len(data)), NOW_MS)


def test_size_is_judged_before_the_crc_is_computed():
    data = build()[:-1] + b"?"
    policy = DEFAULTS._replace(max_message_bytes=100)
    assert refused_as(data, policy) is ErrorCode.MESSAGE_TOO_LARGE


# -- the header ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "last_offset_delta"),
    [(2, 2), (2, 0), (0, -1), (0, 0), (-1, -2), (2, -1), (2**31 - 1, 1), (1, -(2**31))],
)
def test_the_count_is_the_range_of_offsets(count, last_offset_delta):
    payload = record(0) + record(1)
    data = batch(payload, count, last_offset_delta=last_offset_delta)
    assert refused_as(data) is ErrorCode.INVALID_RECORD


def test_clients_may_not_write_control_batches():
    data = build(control=True)
    assert refused_as(data) is ErrorCode.INVALID_RECORD


@pytest.mark.parametrize("codec", ["producer", "lz4"])
def test_the_coordinator_may_and_they_stay_uncompressed(codec):
    data = build_end_transaction_marker(4, 1, EndTransactionMarker(True, 2), NOW_MS)
    policy = DEFAULTS._replace(allow_control=True, compression_type=codec)
    assert validate_produce(data, policy, NOW_MS).data == data


@pytest.mark.parametrize("producer_id", [0, 7])
def test_an_idempotent_batch_has_a_sequence(producer_id):
    data = build(producer_id=producer_id, producer_epoch=0)
    error = refusal(data)
    assert error.error_code is ErrorCode.INVALID_RECORD
    assert "base_sequence -1" in error.message


def test_a_producer_may_not_claim_the_brokers_time():
    data = build(timestamp_type=1)
    assert refused_as(data) is ErrorCode.INVALID_TIMESTAMP
    assert refused_as(data, LOG_APPEND_TIME) is ErrorCode.INVALID_TIMESTAMP


# -- codecs ----------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [5, 6, 7])
def test_an_unknown_codec_is_refused(codec):
    data = batch(record(0), 1, attributes=codec)
    assert refused_as(data) is ErrorCode.UNSUPPORTED_COMPRESSION_TYPE


def test_zstd_needs_a_version_that_knows_it():
    policy = DEFAULTS._replace(allow_zstd=False)
    data = build(Codec.ZSTD)
    assert refused_as(data, policy) is ErrorCode.UNSUPPORTED_COMPRESSION_TYPE
    validate_produce(build(Codec.LZ4), policy, NOW_MS)


@pytest.mark.parametrize("codec", [1, 2, 3, 4])
@pytest.mark.parametrize("payload", [b"", b"not compressed", record(0)])
def test_what_cannot_be_decompressed_is_refused(codec, payload):
    data = batch(payload, 1, attributes=codec)
    assert refused_as(data) is ErrorCode.INVALID_RECORD


@pytest.mark.parametrize("codec", [1, 2, 3, 4])
def test_a_bomb_is_too_large(codec):
    payload = compress(codec, record(0, value=varint(10**7) + bytes(10**7)))
    data = batch(payload, 1, attributes=codec)
    policy = DEFAULTS._replace(max_decompressed_bytes=10**6)
    error = refusal(data, policy)
    assert error.error_code is ErrorCode.MESSAGE_TOO_LARGE
    assert str(10**6) in error.message
    validate_produce(data, DEFAULTS, NOW_MS)


@pytest.mark.parametrize("codec", [1, 2, 3, 4])
def test_all_batches_of_a_request_share_what_they_may_inflate_to(codec):
    size = 30_000_000
    payload = compress(codec, record(0, value=varint(size) + bytes(size)))
    data = batch(payload, 1, attributes=codec)
    policy = DEFAULTS._replace(max_message_bytes=10**7)
    budget = InflationBudget(0)
    for _ in range(3):  # 104,857,600 bytes are shared
        validate_produce(data, policy, NOW_MS, budget)
    assert 0 < budget.left < size
    left = budget.left
    with pytest.raises(ApiError, match=str(left)) as refused:
        validate_produce(data, policy, NOW_MS, budget)
    assert refused.value.error_code is ErrorCode.MESSAGE_TOO_LARGE
    assert budget.left == 0  # a batch that fails has cost as much
    validate_produce(data, policy, NOW_MS, InflationBudget(len(data)))


def test_a_request_of_many_bytes_may_inflate_to_ten_times_as_many():
    assert InflationBudget(10**8).left == 104_857_600 + 10**9


def test_lz4_that_java_consumers_cannot_read_is_refused():
    payload = compress(Codec.LZ4, record(0)) + compress(Codec.LZ4, record(1))
    assert refused_as(batch(payload, 2, attributes=3)) is ErrorCode.INVALID_RECORD


# -- records ---------------------------------------------------------------------------

LIES = {
    "a record fewer": record(0),
    "a record more": record(0) + record(1) + record(2),
    "a stray byte": record(0) + record(1) + b"\x00",
    "an offset repeated": record(0) + record(0),
    "an offset out of range": record(0) + record(2**31 - 1),
    "a length past the batch": record(0) + record(1, length=varint(60)),
    "a negative length": record(0) + record(1, length=varint(-1)),
    "a varint of 10 bytes": record(0) + record(1, length=b"\xff" * 9 + b"\x01"),
    "a key past its record": record(0) + record(1, key=varint(30)),
    "a value of -2 bytes": record(0) + record(1, value=varint(-2)),
    "a header count of billions": record(0) + record(1, headers=varint(2**31 - 1)),
}


@every_codec
@pytest.mark.parametrize("lie", LIES)
def test_records_that_lie_are_refused_with_their_index(codec, lie):
    data = batch(compress(codec, LIES[lie]), 2, attributes=codec)
    error = refusal(data)
    assert error.error_code is ErrorCode.INVALID_RECORD
    assert isinstance(error, RecordError)
    assert error.batch_index in (1, 2)
    assert f"record {error.batch_index} of 2" in error.message


def test_a_record_error_survives_a_trip_between_processes():
    error = refusal(batch(record(1), 1))
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.error_code, copy.message, copy.batch_index) == (
        error.error_code,
        error.message,
        0,
    )


def test_a_compacted_topic_needs_keys():
    data = batch(record(0) + record(1, key=None), 2)
    error = refusal(data, DEFAULTS._replace(compacted=True))
    assert error.error_code is ErrorCode.INVALID_RECORD
    assert isinstance(error, RecordsError)
    assert error.reasons == {1: error.message}
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.error_code, copy.message, copy.reasons) == (
        error.error_code,
        error.message,
        error.reasons,
    )
    validate_produce(data, DEFAULTS, NOW_MS)
    validate_produce(build(), DEFAULTS._replace(compacted=True), NOW_MS)


def test_records_can_be_believed_unseen():
    policy = DEFAULTS._replace(verify_records=False)
    data = batch(b"anything", 7)
    found = validate_produce(data, policy, NOW_MS)
    assert (found.max_timestamp, found.offset_of_max_timestamp) == (NOW_MS, 6)
    assert refused_as(data[:-1] + b"?", policy) is ErrorCode.CORRUPT_MESSAGE


# -- timestamps ------------------------------------------------------------------------


def test_timestamps_too_far_ahead_are_refused():
    policy = DEFAULTS._replace(after_max_ms=5)
    validate_produce(build(), policy, NOW_MS)
    error = refusal(build(), policy, NOW_MS - 1)
    assert error.error_code is ErrorCode.INVALID_TIMESTAMP
    assert "message.timestamp.after.max.ms=5" in error.message


def test_timestamps_too_old_are_refused():
    policy = DEFAULTS._replace(before_max_ms=1000)
    validate_produce(build(), policy, NOW_MS + 1000)
    assert refused_as(build(), policy, NOW_MS + 1001) is ErrorCode.INVALID_TIMESTAMP


def test_a_missing_key_is_named_before_a_bad_time():
    data = batch(record(0, key=None), 1)
    policy = DEFAULTS._replace(compacted=True, before_max_ms=0)
    assert refused_as(data, policy, NOW_MS + 1) is ErrorCode.INVALID_RECORD
    data = batch(record(0, key=None) + record(1), 2)
    error = refusal(data, policy, NOW_MS + 1)
    assert error.error_code is ErrorCode.INVALID_TIMESTAMP
    assert "no key" in error.reasons[0] and "timestamp" in error.reasons[1]


@every_codec
@pytest.mark.parametrize("first", [0, 9_999, 10_000, 12_000])
def test_so_many_bad_records_are_named_and_no_more(codec, first):
    keys = [b"k" if index < first else None for index in range(12_001)]
    builder = RecordBatchBuilder(codec)
    for key in keys:
        builder.append(NOW_MS, key, b"")
    error = refusal(bytes(builder.build()), DEFAULTS._replace(compacted=True))
    assert sorted(error.reasons) == list(range(first, max(10_000, first + 1)))
    late = [NOW_MS - 9 if index < first else NOW_MS for index in range(12_001)]
    builder = RecordBatchBuilder(codec)
    for timestamp in late:
        builder.append(timestamp, None, b"")
    policy = DEFAULTS._replace(after_max_ms=0)
    error = refusal(bytes(builder.build()), policy, NOW_MS - 9)
    assert error.error_code is ErrorCode.INVALID_TIMESTAMP
    assert sorted(error.reasons) == list(range(first, 10_000))
    assert "message.timestamp.after.max.ms=0" in error.message


@pytest.mark.parametrize(
    ("base_timestamp", "delta"), [(2**63 - 1, 1), (-(2**63), -1), (-(2**63), -(2**63))]
)
def test_a_time_beyond_64_bits_is_refused(base_timestamp, delta):
    data = batch(
        record(0, timestamp_delta=varint(delta)), 1, base_timestamp=base_timestamp
    )
    assert refused_as(data, ANY_TIME) is ErrorCode.INVALID_TIMESTAMP


@pytest.mark.parametrize("claimed", [0, -1, NOW_MS - 1, 2**62])
def test_a_wrong_newest_time_in_the_header_is_mended(claimed):
    data = batch(record(0, timestamp_delta=varint(-9)), 1, max_timestamp=claimed)
    found = validate_produce(data, DEFAULTS, NOW_MS)
    assert found.max_timestamp == found.header.max_timestamp == NOW_MS - 9
    assert found.header == parse_batch_header(found.data)
    assert compute_crc(found.data) == found.header.crc
    assert values(found.data) == values(data)
    set_base_offset(found.data, 5)


def test_the_brokers_time_replaces_the_producers():
    data = build(Codec.GZIP)
    found = validate_produce(memoryview(data), LOG_APPEND_TIME, NOW_MS + 777)
    assert found.log_append_time_ms == found.max_timestamp == NOW_MS + 777
    assert found.offset_of_max_timestamp == 0
    assert [r.timestamp for r in iter_records(found.data)] == [NOW_MS + 777] * 3
    assert found.header == parse_batch_header(found.data)
    assert compute_crc(found.data) == found.header.crc
    assert values(found.data) == values(data)
    set_base_offset(found.data, 5)


def test_the_brokers_time_does_not_depend_on_the_producers():
    data = batch(record(0), 1, base_timestamp=5, max_timestamp=2**62)
    policy = LOG_APPEND_TIME._replace(before_max_ms=1, after_max_ms=1)
    assert validate_produce(data, policy, NOW_MS).max_timestamp == NOW_MS


# -- compression.type ------------------------------------------------------------------


@every_codec
@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("uncompressed", Codec.NONE),
        ("gzip", Codec.GZIP),
        ("snappy", Codec.SNAPPY),
        ("lz4", Codec.LZ4),
        ("zstd", Codec.ZSTD),
    ],
)
@pytest.mark.parametrize("verify", [True, False])
def test_a_topics_codec_replaces_the_producers(codec, target, expected, verify):
    data = build(codec, producer_id=1, producer_epoch=2, base_sequence=3)
    policy = DEFAULTS._replace(compression_type=target, verify_records=verify)
    found = validate_produce(data, policy, NOW_MS)
    assert found.header.codec is expected
    assert found.header == parse_batch_header(found.data)
    assert found.header.size_in_bytes == len(found.data)
    assert found.header.producer_id == 1 and found.header.base_sequence == 3
    assert compute_crc(found.data) == found.header.crc
    assert list(iter_records(found.data)) == list(iter_records(data))
    if codec is expected:
        assert found.data == data
    else:
        set_base_offset(found.data, 5)


def test_a_batch_that_grows_above_the_limit_is_too_large():
    data = batch(
        compress(4, record(0, value=varint(5000) + bytes(5000))), 1, attributes=4
    )
    policy = DEFAULTS._replace(max_message_bytes=4000, compression_type="uncompressed")
    assert refused_as(data, policy) is ErrorCode.MESSAGE_TOO_LARGE


def test_a_topics_level_is_used():
    text = b"".join(b"%d," % (i * i) for i in range(3000))
    data = batch(record(0, value=varint(len(text)) + text), 1)
    policy = DEFAULTS._replace(compression_type="gzip")
    low = validate_produce(data, policy._replace(compression_level=1), NOW_MS)
    high = validate_produce(data, policy._replace(compression_level=9), NOW_MS)
    assert len(high.data) < len(low.data)


# -- anything at all -------------------------------------------------------------------


@settings(max_examples=60)
@given(st.data())
def test_a_changed_batch_is_refused_or_means_what_it_says(data):
    codec = data.draw(st.sampled_from([Codec.NONE, Codec.NONE, *Codec]))
    changed = bytearray(build(codec, producer_id=1, producer_epoch=0, base_sequence=0))
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(changed) - 1))
        changed[position] = data.draw(st.integers(0, 255))
    forged = with_true_crc(bytes(changed))
    policy = data.draw(
        st.sampled_from(
            [
                DEFAULTS,
                ANY_TIME,
                LOG_APPEND_TIME,
                ANY_TIME._replace(compression_type="lz4", compacted=True),
            ]
        )
    )._replace(max_decompressed_bytes=10_000)
    try:
        found = validate_produce(forged, policy, NOW_MS)
    except ApiError:
        return
    # Whatever was accepted can be read, and is what its header says it is.
    header = parse_batch_header(found.data)
    records = list(iter_records(found.data))
    assert header == found.header
    assert compute_crc(found.data) == header.crc
    assert [r.offset - header.base_offset for r in records] == [*range(3)]
    assert header.max_timestamp == max(-1, *(r.timestamp for r in records))
    newest = records[found.offset_of_max_timestamp].timestamp
    assert newest == found.max_timestamp or found.max_timestamp == NO_TIMESTAMP


@settings(max_examples=60)
@given(st.binary(max_size=120))
def test_any_bytes_are_refused_by_an_error_code(data):
    refusal(data)

"""Read and build the records in batches of format version 2.

Reading raises `RecordBatchError` at malformed bytes. The stricter checks of a batch
that is to be appended are in `log_validator`. The batch's header is in `batch_header`;
its names can be imported from here, too.

    record := length varint, attributes int8, timestamp delta varlong,
              offset delta varint, key length varint, key, value length varint, value,
              header count varint, {key length varint, key, value length varint, value}

Varints are zig-zag encoded. A length of -1 is null. The record's length counts the
bytes behind it.

Source: Kafka documentation, "Message Format"; KIP-98, KIP-82.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.protocol.primitives import VarintError, read_varint, write_varint
from mpbroker.protocol.records.batch_header import (
    ATTRIBUTES_POSITION,
    BATCH_HEADER_SIZE,
    CODEC_MASK,
    CONTROL_FLAG,
    CREATE_TIME,
    LOG_APPEND_TIME,
    NO_PARTITION_LEADER_EPOCH,
    NO_PRODUCER_EPOCH,
    NO_PRODUCER_ID,
    NO_SEQUENCE,
    NO_TIMESTAMP,
    TIMESTAMP_TYPE_FLAG,
    TRANSACTIONAL_FLAG,
    BatchHeader,
    RecordBatchError,
    UnsupportedMagicError,
    compute_crc,
    increment_sequence,
    iter_batches,
    pack_header,
    parse_batch_header,
    set_base_offset,
)
from mpbroker.protocol.records.compression import Codec, compress, decompress

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    Buffer = bytes | bytearray | memoryview
    Header = tuple[str, bytes | None]
    # The end of a record, its timestamp delta and offset delta, key, value, headers.
    _Fields = tuple[int, int, int, bytes | None, bytes | None, Sequence[Header]]

__all__ = [
    "ATTRIBUTES_POSITION",
    "BATCH_HEADER_SIZE",
    "CREATE_TIME",
    "DEFAULT_MAX_DECOMPRESSED_BYTES",
    "LOG_APPEND_TIME",
    "NO_PARTITION_LEADER_EPOCH",
    "NO_PRODUCER_EPOCH",
    "NO_PRODUCER_ID",
    "NO_SEQUENCE",
    "NO_TIMESTAMP",
    "BatchHeader",
    "Codec",
    "Record",
    "RecordBatchBuilder",
    "RecordBatchError",
    "UnsupportedMagicError",
    "compute_crc",
    "increment_sequence",
    "iter_batches",
    "iter_payload",
    "iter_records",
    "pack_header",
    "parse_batch_header",
    "records_payload",
    "set_base_offset",
]

# The default limit of a batch's records when decompressed: the size of the largest
# request (socket.request.max.bytes).
DEFAULT_MAX_DECOMPRESSED_BYTES: Final = 104_857_600

_new_tuple = tuple.__new__  # a NamedTuple's constructor takes three times as long


class Record(NamedTuple):
    """One record of a batch, with its offset in the partition.

    Attributes:
        offset: the record's offset.
        timestamp: its timestamp in ms; with LogAppendTime the batch's timestamp, which
            the broker set.
        key: its key; None: null.
        value: its value; None: null.
        headers: (name, value) pairs. Bytes of a name that are not UTF-8 are surrogate
            escapes, and are written back as the same bytes.
    """

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[Header] = ()


# -- records ---------------------------------------------------------------------------


def records_payload(
    header: BatchHeader,
    batch: Buffer,
    max_decompressed_bytes: int = DEFAULT_MAX_DECOMPRESSED_BYTES,
) -> bytes:
    """Return the bytes of a batch's records, decompressed.

    Raises:
        DecompressionError: see `compression.decompress`.
        RecordBatchError: the codec is unknown.
    """
    payload = memoryview(batch)[BATCH_HEADER_SIZE : header.size_in_bytes]
    if not header.attributes & CODEC_MASK:
        return bytes(payload)
    return decompress(header.codec, payload, max_decompressed_bytes)


def iter_records(
    batch: Buffer, max_decompressed_bytes: int = DEFAULT_MAX_DECOMPRESSED_BYTES
) -> Iterator[Record]:
    """Yield the records of the batch at the start of ``batch``, in order.

    There may be gaps between offsets, because compaction removes records. The CRC is
    not checked.

    Raises:
        RecordBatchError: the batch is not whole, or a length or count in it is wrong.
        DecompressionError: see `compression.decompress`.
    """
    header = parse_batch_header(batch)
    if header.size_in_bytes > len(batch):
        raise RecordBatchError(
            f"batch of {header.size_in_bytes} bytes in {len(batch)} bytes"
        )
    if header.record_count < 0:
        raise RecordBatchError(f"record_count {header.record_count} is negative")
    return iter_payload(
        records_payload(header, batch, max_decompressed_bytes),
        header.record_count,
        header.base_offset,
        header.base_timestamp,
        header.max_timestamp if header.timestamp_type else None,
    )


def iter_payload(
    data: bytes,
    record_count: int,
    base_offset: int,
    base_timestamp: int,
    append_time: int | None,
) -> Iterator[Record]:
    """Yield the records in ``data``, the decompressed records of a batch.

    Args:
        data: the records as bytes.
        record_count: the number of these records.
        base_offset: the batch's base offset.
        base_timestamp: the batch's base timestamp, in ms.
        append_time: the timestamp of all records, if the broker set it; else None.

    Raises:
        RecordBatchError: as `iter_records`.
    """
    pos, index = 0, -1
    try:
        for index in range(record_count):
            found = _read_usual_record(data, pos) or _read_record(data, pos)
            pos, delta, offset_delta, key, value, headers = found
            timestamp = base_timestamp + delta if append_time is None else append_time
            yield _new_tuple(
                Record, (base_offset + offset_delta, timestamp, key, value, headers)
            )
    except IndexError:
        raise RecordBatchError(f"record {index}: cut off by the batch's end") from None
    except (RecordBatchError, VarintError) as error:
        raise RecordBatchError(f"record {index}: {error}") from None
    if pos != len(data):
        raise RecordBatchError(f"{len(data) - pos} bytes after the last record")


def _read_usual_record(data: bytes, pos: int) -> _Fields | None:
    """Read a record if its varints have one or two bytes and it has no headers.

    This takes half the time of `_read_record`, because it calls no function. It does
    not check each length. But a wrong length leads to another end than the record's
    length says.

    Returns:
        None if the record has another shape, or is malformed.
    """
    try:
        length = data[pos]
        pos += 1
        if length & 0x80:
            length = length & 0x7F | data[pos] << 7
            pos += 1
        end = pos + (length >> 1)
        delta = data[pos + 1]
        pos += 2
        if delta & 0x80:
            delta = delta & 0x7F | data[pos] << 7
            pos += 1
        offset = data[pos]
        pos += 1
        if offset & 0x80:
            offset = offset & 0x7F | data[pos] << 7
            pos += 1
        key_size = data[pos]
        pos += 1
        if key_size & 0x80:
            key_size = key_size & 0x7F | data[pos] << 7
            pos += 1
        key = value = None
        if key_size != 1:
            start = pos
            pos += key_size >> 1
            key = data[start:pos]
        value_size = data[pos]
        pos += 1
        if value_size & 0x80:
            value_size = value_size & 0x7F | data[pos] << 7
            pos += 1
        if value_size != 1:
            start = pos
            pos += value_size >> 1
            value = data[start:pos]
        if data[pos] or pos + 1 != end:
            return None
    except IndexError:
        return None
    if (
        (length | delta | offset | key_size | value_size) >= 0x4000  # a third byte
        or (length | offset) & 1  # negative
        or (key_size & 1 and key_size != 1)
        or (value_size & 1 and value_size != 1)
    ):
        return None
    return end, (delta >> 1) ^ -(delta & 1), offset >> 1, key, value, ()


def _read_record(data: bytes, pos: int) -> _Fields:
    """Read a record of any shape at a position of a batch's payload.

    Raises:
        RecordBatchError: a length or count in the record is wrong.
        IndexError: ``data`` ends in the record.
    """
    length, pos = read_varint(data, pos)
    end = pos + length
    if length < 0 or end > len(data):
        raise RecordBatchError(f"length {length} with {len(data) - pos} bytes left")
    delta, pos = read_varint(data, pos + 1, 64)
    offset_delta, pos = read_varint(data, pos)
    key, pos = _read_nullable_bytes(data, pos, end)
    value, pos = _read_nullable_bytes(data, pos, end)
    headers, pos = _read_headers(data, pos, end)
    if pos != end:
        raise RecordBatchError(f"{end - pos} bytes after its last field")
    return end, delta, offset_delta, key, value, headers


def _read_nullable_bytes(data: bytes, pos: int, end: int) -> tuple[bytes | None, int]:
    byte = data[pos]
    if byte & 0x81:  # null, or of several bytes
        length, pos = read_varint(data, pos)
        if length == -1:
            return None, pos
        if length < 0:
            raise RecordBatchError(f"field of {length} bytes")
    else:
        length = byte >> 1
        pos += 1
    if length > end - pos:
        raise RecordBatchError(f"field of {length} bytes with {end - pos} left")
    return data[pos : pos + length], pos + length


def _read_headers(data: bytes, pos: int, end: int) -> tuple[Sequence[Header], int]:
    count, pos = read_varint(data, pos)
    if not 0 <= count <= end - pos:
        raise RecordBatchError(f"{count} headers in {end - pos} bytes")
    if not count:
        return (), pos
    headers: list[Header] = []
    for _ in range(count):
        key, pos = _read_nullable_bytes(data, pos, end)
        if key is None:
            raise RecordBatchError("header without a key")
        value, pos = _read_nullable_bytes(data, pos, end)
        headers.append((key.decode("utf-8", "surrogateescape"), value))
    return headers, pos


# -- building --------------------------------------------------------------------------


class RecordBatchBuilder:
    """Collects records; `build` returns them as one batch.

    The base timestamp is that of the first record. Timestamps are in ms.

    Args:
        codec: the codec of the records.
        level: the level of the codec; see `compression.compress`.
        timestamp_type: CREATE_TIME or LOG_APPEND_TIME.
        producer_id: the producer; NO_PRODUCER_ID: none.
        producer_epoch: the producer's epoch.
        base_sequence: the sequence number of the first record.
        transactional: whether the batch is part of a transaction.
        control: whether it is a control batch.
    """

    __slots__ = (
        "_attributes",
        "_base_timestamp",
        "_codec",
        "_level",
        "_max_timestamp",
        "_next_delta",
        "_producer",
        "_records",
        "record_count",
    )

    def __init__(
        self,
        codec: Codec = Codec.NONE,
        level: int | None = None,
        *,
        timestamp_type: int = CREATE_TIME,
        producer_id: int = NO_PRODUCER_ID,
        producer_epoch: int = NO_PRODUCER_EPOCH,
        base_sequence: int = NO_SEQUENCE,
        transactional: bool = False,
        control: bool = False,
    ) -> None:
        self._codec = codec
        self._level = level
        self._attributes = (
            codec
            | (TIMESTAMP_TYPE_FLAG if timestamp_type == LOG_APPEND_TIME else 0)
            | (TRANSACTIONAL_FLAG if transactional else 0)
            | (CONTROL_FLAG if control else 0)
        )
        self._producer = producer_id, producer_epoch, base_sequence
        self._records = bytearray()
        self._base_timestamp = self._max_timestamp = NO_TIMESTAMP
        self._next_delta = 0
        self.record_count = 0

    @property
    def size_in_bytes(self) -> int:
        """The size of the batch with the records so far, uncompressed."""
        return BATCH_HEADER_SIZE + len(self._records)

    def append(
        self,
        timestamp: int,
        key: Buffer | None,
        value: Buffer | None,
        headers: Iterable[Header] = (),
        *,
        offset_delta: int | None = None,
    ) -> None:
        """Add one record to the batch.

        Args:
            timestamp: the record's timestamp, in ms.
            key: its key; None: null.
            value: its value; None: null.
            headers: (name, value) pairs.
            offset_delta: its offset, less the batch's base offset; None: one more than
                that of the record before. Only compaction leaves gaps.
        """
        if not self.record_count:
            self._base_timestamp = timestamp
        self._max_timestamp = max(self._max_timestamp, timestamp)
        delta = self._next_delta if offset_delta is None else offset_delta
        body = bytearray(1)
        write_varint(body, timestamp - self._base_timestamp)
        write_varint(body, delta)
        _write_nullable_bytes(body, key)
        _write_nullable_bytes(body, value)
        if headers:
            headers = tuple(headers)
            write_varint(body, len(headers))
            for name, header_value in headers:
                _write_nullable_bytes(body, name.encode("utf-8", "surrogateescape"))
                _write_nullable_bytes(body, header_value)
        else:
            body.append(0)
        write_varint(self._records, len(body))
        self._records += body
        self._next_delta = delta + 1
        self.record_count += 1

    def build(
        self,
        *,
        base_offset: int = 0,
        partition_leader_epoch: int = NO_PARTITION_LEADER_EPOCH,
        last_offset_delta: int | None = None,
        max_timestamp: int | None = None,
    ) -> bytes:
        """Return the records that were added as one batch, compressed and with its CRC.

        Args:
            base_offset: the batch's base offset.
            partition_leader_epoch: the leader epoch.
            last_offset_delta: the last offset, less the base offset; None: that of the
                last record. Compaction keeps the one that the batch had.
            max_timestamp: the largest timestamp in ms; None: that of the records. With
                LogAppendTime it is the time of append.
        """
        payload = bytes(self._records)
        if self._codec:
            payload = compress(self._codec, payload, self._level)
        if last_offset_delta is None:
            last_offset_delta = self._next_delta - 1
        header = BatchHeader(
            base_offset,
            0,
            partition_leader_epoch,
            2,
            0,
            self._attributes,
            last_offset_delta,
            self._base_timestamp,
            self._max_timestamp if max_timestamp is None else max_timestamp,
            *self._producer,
            record_count=self.record_count,
        )
        return b"".join((pack_header(header, payload), payload))


def _write_nullable_bytes(out: bytearray, value: Buffer | None) -> None:
    if value is None:
        out.append(1)
        return
    length = len(value)
    if length < 64:
        out.append(length << 1)
    else:
        write_varint(out, length)
    out += value

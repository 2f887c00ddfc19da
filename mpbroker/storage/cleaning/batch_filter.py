"""Remove records from a stored batch, and leave the rest of it unchanged.

A batch keeps its base and last offset, so that offsets and sequences do not move; its
codec; and the bytes of the records that stay. Timestamps in records are relative to the
batch's base timestamp. A delete horizon (the time from which tombstones in the batch
may be removed) replaces the base timestamp, so only then these timestamps are written
again.

Source: KIP-534; Kafka's MemoryRecords.filterTo.
"""

from collections.abc import Iterator
from typing import Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.base.storage_errors import CorruptLogError
from mpbroker.protocol.primitives import VarintError, read_varint, write_varint
from mpbroker.protocol.records.batch_header import (
    BATCH_HEADER_SIZE,
    CODEC_MASK,
    DELETE_HORIZON_FLAG,
    NO_PRODUCER_ID,
    TIMESTAMP_TYPE_FLAG,
    BatchHeader,
    pack_header,
)
from mpbroker.protocol.records.compression import compress
from mpbroker.protocol.records.record_batch import records_payload

NO_TIMESTAMP: Final = -1


class RawRecord(NamedTuple):
    """The fields of a record that decide whether it stays, and the place of its bytes.

    Attributes:
        offset_delta: the record's offset, less the batch's base offset.
        timestamp_delta: the record's timestamp (ms), less the batch's base timestamp.
        key: the record's key; None: it has no key.
        has_value: False for a tombstone.
        start: the index in the payload at which the record's length field begins.
        after_timestamp: the index of the field after the timestamp.
        end: the index behind the record.
    """

    offset_delta: int
    timestamp_delta: int
    key: bytes | None
    has_value: bool
    start: int
    after_timestamp: int
    end: int


class KeptRecords(NamedTuple):
    """The records of a batch that stay.

    Attributes:
        payload: the decompressed bytes of all records of the batch.
        records: the records that stay, with their places in ``payload``.
    """

    payload: bytes
    records: list[RawRecord]

    @property
    def has_tombstone(self) -> bool:
        """Whether one of the records that stay is a tombstone (has no value)."""
        return any(not record.has_value for record in self.records)


def read_raw_records(header: BatchHeader, batch: bytes) -> KeptRecords:
    """Return all records of a stored batch, decompressed.

    Args:
        header: the batch's header.
        batch: all bytes of the batch, header included.

    Raises:
        CorruptLogError, RecordBatchError, DecompressionError: the batch is damaged.
    """
    payload = records_payload(header, batch)
    return KeptRecords(payload, list(walk_raw_records(payload, header.record_count)))


def build_plain(header: BatchHeader, payload: bytes) -> bytes:
    """Return a batch for the compiled walk, which reads neither codecs nor producers.

    Args:
        header: the header of the stored batch.
        payload: its records, decompressed.
    """
    attributes = header.attributes & TIMESTAMP_TYPE_FLAG
    plain = header._replace(attributes=attributes, producer_id=NO_PRODUCER_ID)
    return b"".join((pack_header(plain, payload), payload))


def walk_raw_records(payload: bytes, count: int) -> Iterator[RawRecord]:
    """Yield the records in a batch's decompressed bytes.

    One at a time: 10 KB can inflate to ten million of them, of 250 bytes each here.

    Raises:
        CorruptLogError: a record is damaged.
    """
    at = 0
    try:
        for _ in range(count):
            start = at
            length, at = read_varint(payload, at)
            end = at + length
            timestamp_delta, after_timestamp = read_varint(payload, at + 1, 64)
            offset_delta, at = read_varint(payload, after_timestamp)
            key_length, at = read_varint(payload, at)
            key = None
            if key_length >= 0:
                key = payload[at : at + key_length]
                at += key_length
            value_length, at = read_varint(payload, at)
            if not at <= end <= len(payload):
                raise CorruptLogError(f"a record of {length} bytes at {start}")
            yield RawRecord(
                offset_delta,
                timestamp_delta,
                key,
                value_length >= 0,
                start,
                after_timestamp,
                end,
            )
            at = end
    except (IndexError, VarintError):
        raise CorruptLogError("a record is cut off by its batch's end") from None


def build_filtered(header: BatchHeader, kept: KeptRecords, horizon_ms: int) -> bytes:
    """Return the bytes of a batch that has only the kept records.

    Args:
        header: the header of the stored batch.
        kept: the records that stay, one at least.
        horizon_ms: the time from which tombstones in it may be removed; -1: keep the
            batch's delete horizon, if it has one.
    """
    payload, records = kept
    attributes, base_timestamp = header.attributes, header.base_timestamp
    if horizon_ms == NO_TIMESTAMP:
        content = b"".join(payload[r.start : r.end] for r in records)
    else:
        shift = base_timestamp - horizon_ms
        content = _with_timestamps_moved(payload, records, shift)
        attributes |= DELETE_HORIZON_FLAG
        base_timestamp = horizon_ms
    max_timestamp = header.max_timestamp
    if not attributes & TIMESTAMP_TYPE_FLAG:
        newest = max(record.timestamp_delta for record in records)
        max_timestamp = header.base_timestamp + newest
    new_header = header._replace(
        attributes=attributes,
        base_timestamp=base_timestamp,
        max_timestamp=max_timestamp,
        record_count=len(records),
    )
    return build_compressed(new_header, content)


def build_compressed(header: BatchHeader, content: bytes) -> bytes:
    """Return a batch with this header, and records compressed by its codec."""
    if header.attributes & CODEC_MASK:
        content = compress(header.codec, content)
    return b"".join((pack_header(header, content), content))


def build_empty(header: BatchHeader) -> bytes:
    """Return the bytes of a batch that keeps offsets and sequences, but has no records.

    Args:
        header: the header of the stored batch.
    """
    attributes = header.attributes & ~(CODEC_MASK | DELETE_HORIZON_FLAG)
    return bytes(
        pack_header(
            header._replace(
                attributes=attributes, base_timestamp=NO_TIMESTAMP, record_count=0
            ),
            b"",
        )
    )


def delete_horizon(header: BatchHeader) -> int:
    """Return a batch's delete horizon: from then on its tombstones may be removed.

    It is in ms of the wall clock; -1: it is not set.
    """
    return header.base_timestamp if header.has_delete_horizon else NO_TIMESTAMP


def _with_timestamps_moved(
    payload: bytes, records: list[RawRecord], shift: int
) -> bytes:
    out = bytearray()
    for record in records:
        body = bytearray(1)
        write_varint(body, record.timestamp_delta + shift)
        body += payload[record.after_timestamp : record.end]
        write_varint(out, len(body))
        out += body
    return bytes(out)


__all__ = [
    "BATCH_HEADER_SIZE",
    "KeptRecords",
    "RawRecord",
    "build_compressed",
    "build_empty",
    "build_filtered",
    "build_plain",
    "delete_horizon",
    "read_raw_records",
    "walk_raw_records",
]

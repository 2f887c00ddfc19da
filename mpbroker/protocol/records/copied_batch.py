"""Batches that are copied from another cluster: make them, and check them.

A copy keeps the offsets, the timestamps and the records of a batch, compressed or not.
It has no producer id and belongs to no transaction: the other cluster's coordinator has
assigned producer ids, and the coordinator here may assign the same ids to other
producers. So batches of aborted transactions and control batches are not copied. Their
offsets are left out, as compaction leaves offsets out: a batch may begin above the end
of the one before it, and may have more offsets than records.

An empty batch stands for offsets that are left out at the end of a log, so that both
logs have the same end. Kafka's cleaner keeps such batches, too, so clients know them.

Source: Kafka protocol guide, "Record Batch"; Kafka's DefaultRecordBatch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.records.batch_header import (
    ATTRIBUTES_POSITION,
    BATCH_HEADER_SIZE,
    CODEC_MASK,
    DELETE_HORIZON_FLAG,
    LOG_OVERHEAD,
    MAGIC,
    NO_TIMESTAMP,
    TIMESTAMP_TYPE_FLAG,
    TRANSACTIONAL_FLAG,
    BatchHeader,
    RecordBatchError,
    pack_header,
    parse_batch_header,
)
from mpbroker.protocol.records.compression import Codec
from mpbroker.protocol.records.crc32c import crc32c
from mpbroker.protocol.records.log_validator import ValidatedBatch

if TYPE_CHECKING:
    from collections.abc import Iterator

    Buffer = bytes | bytearray | memoryview

_NONE: Final = -1
_KEPT_FLAGS: Final = CODEC_MASK | TIMESTAMP_TYPE_FLAG | DELETE_HORIZON_FLAG
_MAX_OFFSET: Final = 2**63 - 2


def copied_batch(header: BatchHeader, batch: Buffer) -> Buffer:
    """Return a batch of another cluster without its producer and its transaction.

    Args:
        header: the header of ``batch``.
        batch: the bytes of the batch, which is no control batch.

    Returns:
        ``batch`` itself, if it has neither producer nor transaction; else a copy.
    """
    if header.producer_id == _NONE and not header.attributes & TRANSACTIONAL_FLAG:
        return batch
    records = bytes(memoryview(batch)[BATCH_HEADER_SIZE:])
    plain = header._replace(
        attributes=header.attributes & ~TRANSACTIONAL_FLAG,
        producer_id=_NONE,
        producer_epoch=_NONE,
        base_sequence=_NONE,
    )
    return pack_header(plain, records) + records


def empty_batch(offset: int) -> bytes:
    """Return a batch without records that stands for one offset without a record."""
    header = BatchHeader(
        base_offset=offset,
        batch_length=BATCH_HEADER_SIZE - LOG_OVERHEAD,
        partition_leader_epoch=_NONE,
        magic=MAGIC,
        crc=0,
        attributes=0,
        last_offset_delta=0,
        base_timestamp=NO_TIMESTAMP,
        max_timestamp=NO_TIMESTAMP,
        producer_id=_NONE,
        producer_epoch=_NONE,
        base_sequence=_NONE,
        record_count=0,
    )
    return bytes(pack_header(header, b""))


def copies_in(view: memoryview) -> Iterator[ValidatedBatch]:
    """Yield the copied batches of a records field, each checked before it is yielded.

    Raises:
        ApiError: as ``validate_copied``.
    """
    while view:
        try:
            size = parse_batch_header(view).size_in_bytes
        except RecordBatchError as error:
            raise ApiError(ErrorCode.CORRUPT_MESSAGE, str(error)) from error
        yield validate_copied(view[:size])
        view = view[size:]


def validate_copied(view: memoryview) -> ValidatedBatch:
    """Check a batch that was copied from another cluster and keeps its offsets.

    The checks are those of Kafka's followers: the batch as a whole, and its checksum.
    The other cluster has validated the records, by the settings that the topic had
    then.

    Args:
        view: the bytes of one batch.

    Raises:
        ApiError: CORRUPT_MESSAGE or INVALID_RECORD.
    """
    try:
        header = parse_batch_header(view)
    except RecordBatchError as error:
        raise ApiError(ErrorCode.CORRUPT_MESSAGE, str(error)) from error
    if header.batch_length + LOG_OVERHEAD != len(view):
        raise ApiError(
            ErrorCode.INVALID_RECORD,
            f"a batch of {header.size_in_bytes} bytes in {len(view)} bytes of records",
        )
    crc = crc32c(view[ATTRIBUTES_POSITION:])
    if crc != header.crc:
        raise ApiError(
            ErrorCode.CORRUPT_MESSAGE,
            f"CRC-32C of the batch is {crc:#010x}, its header says {header.crc:#010x}",
        )
    flags = header.attributes & ~_KEPT_FLAGS
    if (
        flags
        or header.producer_id != _NONE
        or header.attributes & CODEC_MASK > Codec.ZSTD
    ):
        raise ApiError(
            ErrorCode.INVALID_RECORD,
            f"a copied batch with attributes {header.attributes:#x} and producer id"
            f" {header.producer_id}; it must have no transaction and no producer",
        )
    count, delta = header.record_count, header.last_offset_delta
    last_offset = header.base_offset + delta
    if (
        not 0 <= count <= delta + 1
        or header.base_offset < 0
        or last_offset > _MAX_OFFSET
        or (not count and len(view) != BATCH_HEADER_SIZE)
    ):
        raise ApiError(
            ErrorCode.INVALID_RECORD,
            f"base offset {header.base_offset}, last_offset_delta {delta},"
            f" record_count {count}",
        )
    return ValidatedBatch(
        header, delta, header.max_timestamp, count, delta, view, _NONE
    )

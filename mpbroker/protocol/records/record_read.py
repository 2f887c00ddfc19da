"""Decode a batch into a list of records of the caller's own class.

This is for consumers: the compiled function of ``_records.c`` makes each record in one
step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

from mpbroker.protocol.records.batch_header import BatchHeader, RecordBatchError
from mpbroker.protocol.records.record_batch import (
    DEFAULT_MAX_DECOMPRESSED_BYTES,
    iter_payload,
    records_payload,
)
from mpbroker.protocol.records.record_columns import as_int64
from mpbroker.protocol.records.record_walk import FAULT_MESSAGES, NO_FAULT

if TYPE_CHECKING:
    from collections.abc import Callable

    Buffer = bytes | bytearray | memoryview

RecordT = TypeVar("RecordT", bound=tuple[Any, ...])


class RecordShape(NamedTuple, Generic[RecordT]):
    """What a list of records consists of.

        record := *before, offset, timestamp, key, value, headers, *after

    Attributes:
        record_type: the class of the records, a named tuple.
        before: the values of its fields before the offset, the same for all records.
        after: the values of its fields after the headers.
    """

    record_type: type[RecordT]
    before: tuple[object, ...]
    after: tuple[object, ...]


def read_records(
    header: BatchHeader,
    batch: Buffer,
    first_offset: int,
    shape: RecordShape[RecordT],
    *,
    max_decompressed_bytes: int = DEFAULT_MAX_DECOMPRESSED_BYTES,
) -> list[RecordT]:
    """Return the records of a batch from ``first_offset`` on.

    The CRC is not checked. Timestamps are in ms; keys and values are bytes, or None for
    null; headers are (name, value) pairs, () if there are none.

    Args:
        header: the header of the batch.
        batch: the bytes of the whole batch.
        first_offset: records with smaller offsets are left out.
        shape: the class of the records, and its other fields.
        max_decompressed_bytes: the limit of the records' bytes when decompressed.

    Raises:
        RecordBatchError: a length or count in the batch is wrong.
        DecompressionError: see `compression.decompress`.
    """
    payload = records_payload(header, batch, max_decompressed_bytes)
    appended = bool(header.timestamp_type)
    fault, index, records = _read_records(
        payload,
        header.record_count,
        first_offset - header.base_offset,
        header.base_offset,
        header.max_timestamp if appended else header.base_timestamp,
        appended,
        shape,
    )
    if fault != NO_FAULT:
        raise RecordBatchError(f"record {index}: {FAULT_MESSAGES[fault]}")
    return cast("list[RecordT]", records)


def read_records_in_python(
    payload: bytes,
    record_count: int,
    first_delta: int,
    base_offset: int,
    base_timestamp: int,
    appended: bool,
    shape: RecordShape[RecordT],
) -> tuple[int, int, list[RecordT]]:
    """Decode ``record_count`` records, which must fill ``payload`` exactly.

    Args:
        payload: the decompressed records.
        record_count: the number of records.
        first_delta: the smallest offset delta of a record to keep.
        base_offset: the batch's base offset.
        base_timestamp: the timestamp in ms to which timestamp deltas are added; with
            ``appended`` the timestamp of all records.
        appended: whether the broker set the timestamp (LogAppendTime).
        shape: see `read_records`.

    Returns:
        NO_FAULT, the number of records in the payload, and those that are kept. The
        compiled function returns other faults of record_walk, too, with the index of
        the record and None.

    Raises:
        RecordBatchError: a length or count is wrong.
    """
    record_type, before, after = shape
    records: list[RecordT] = []
    for delta, timestamp, key, value, headers in iter_payload(
        payload, record_count, 0, base_timestamp, base_timestamp if appended else None
    ):
        if delta >= first_delta:
            place = as_int64(base_offset + delta), as_int64(timestamp)
            fields = (*before, *place, key, value, headers, *after)
            records.append(tuple.__new__(record_type, fields))
    return NO_FAULT, max(0, record_count), records


try:
    from mpbroker.native import _records  # type: ignore[attr-defined, unused-ignore]

    _read_records: Callable[..., tuple[int, int, list[Any]]] = _records.read_records
except (ImportError, AttributeError):  # not built, or built before it had this
    IS_COMPILED = False
    _read_records = read_records_in_python
else:
    IS_COMPILED = True

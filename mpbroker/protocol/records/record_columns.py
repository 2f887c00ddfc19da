"""Read a batch's records as columns: buffers in Arrow's layout.

This is for readers of millions of rows: the compiled function (``_columns.c``) makes no
Python object for a field.

    BinaryColumn := validity bitmap or None (no nulls), int32 offsets (n + 1), bytes

Source: Arrow columnar format, "Variable-size Binary Layout".
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mpbroker.protocol.records.batch_header import BatchHeader, RecordBatchError
from mpbroker.protocol.records.record_batch import (
    DEFAULT_MAX_DECOMPRESSED_BYTES,
    iter_payload,
    records_payload,
)
from mpbroker.protocol.records.record_walk import FAULT_MESSAGES, NO_FAULT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Buffer = bytes | bytearray | memoryview
    BinaryColumn = tuple[bytes | None, bytes, bytes]
    # For each row the index of its first header (int32, n + 1); all keys; all values.
    HeaderColumns = tuple[bytes, BinaryColumn, BinaryColumn]

_MAX_COLUMN_BYTES: Final = 0x7FFF_FFFF


class RecordColumns(NamedTuple):
    """The records of one batch as columns, in buffers that Arrow can use.

    Attributes:
        rows: the number of records, which is the length of each column.
        offsets: the offsets, as native-endian int64.
        timestamps: the timestamps in ms, as native-endian int64.
        keys: the keys.
        values: the values.
        headers: the headers; None: they were not read.
    """

    rows: int
    offsets: bytes
    timestamps: bytes
    keys: BinaryColumn
    values: BinaryColumn
    headers: HeaderColumns | None


def read_columns(
    header: BatchHeader,
    batch: Buffer,
    first_offset: int,
    *,
    with_headers: bool,
    max_decompressed_bytes: int = DEFAULT_MAX_DECOMPRESSED_BYTES,
) -> RecordColumns:
    """Return the records of a batch from ``first_offset`` on, as columns.

    The CRC is not checked.

    Args:
        header: the header of the batch.
        batch: the bytes of the whole batch.
        first_offset: records with smaller offsets are left out.
        with_headers: whether to read the headers of records.
        max_decompressed_bytes: the limit of the records' bytes when decompressed.

    Raises:
        RecordBatchError: a length or count in the batch is wrong.
        DecompressionError: see `compression.decompress`.
        OverflowError: one column has 2 GiB or more.
    """
    payload = records_payload(header, batch, max_decompressed_bytes)
    appended = bool(header.timestamp_type)
    fault, *found = _read_columns(
        payload,
        header.record_count,
        first_offset - header.base_offset,
        header.base_offset,
        header.max_timestamp if appended else header.base_timestamp,
        appended,
        with_headers,
    )
    if fault != NO_FAULT:
        raise RecordBatchError(f"record {found[0]}: {FAULT_MESSAGES[fault]}")
    return RecordColumns(*found)


def read_columns_in_python(
    payload: bytes,
    record_count: int,
    first_delta: int,
    base_offset: int,
    base_timestamp: int,
    appended: bool,
    with_headers: bool,
) -> tuple[int, int, bytes, bytes, BinaryColumn, BinaryColumn, HeaderColumns | None]:
    """Read ``record_count`` records, which must fill ``payload`` exactly, as columns.

    The compiled function in ``_columns.c`` must return the same values.

    Args:
        payload: the decompressed records.
        record_count: the number of records.
        first_delta: the smallest offset delta of a record to keep.
        base_offset: the batch's base offset.
        base_timestamp: the timestamp in ms to which timestamp deltas are added; with
            ``appended`` the timestamp of all records.
        appended: whether the broker set the timestamp (LogAppendTime).
        with_headers: whether to read the headers of records.

    Returns:
        NO_FAULT and the fields of RecordColumns. The compiled function returns other
        faults of record_walk, too, with the index of the record.

    Raises:
        RecordBatchError: a length or count is wrong.
    """
    offsets, timestamps = array("q"), array("q")
    keys: list[bytes | None] = []
    values: list[bytes | None] = []
    ends = array("i", [0])
    header_keys: list[bytes | None] = []
    header_values: list[bytes | None] = []
    for record in iter_payload(
        payload, record_count, 0, base_timestamp, base_timestamp if appended else None
    ):
        if record.offset < first_delta:
            continue
        offsets.append(base_offset + record.offset)
        timestamps.append(as_int64(record.timestamp))
        keys.append(record.key)
        values.append(record.value)
        if with_headers:
            for name, content in record.headers:
                header_keys.append(name.encode("utf-8", "surrogateescape"))
                header_values.append(content)
            ends.append(len(header_keys))
    return (
        NO_FAULT,
        len(offsets),
        offsets.tobytes(),
        timestamps.tobytes(),
        _column(keys),
        _column(values),
        (ends.tobytes(), _column(header_keys), _column(header_values))
        if with_headers
        else None,
    )


def as_int64(number: int) -> int:
    """Return a number wrapped to 64 bits, as Kafka's own clients wrap timestamps."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _column(fields: Iterable[bytes | None]) -> BinaryColumn:
    offsets = array("i", [0])
    validity = bytearray()
    content = bytearray()
    has_nulls = False
    for index, field in enumerate(fields):
        if not index & 7:
            validity.append(0)
        if field is None:
            has_nulls = True
        else:
            validity[-1] |= 1 << (index & 7)
            content += field
            if len(content) > _MAX_COLUMN_BYTES:
                raise OverflowError("a column of 2 GiB or more")
        offsets.append(len(content))
    return bytes(validity) if has_nulls else None, offsets.tobytes(), bytes(content)


try:
    from mpbroker.native import _columns  # type: ignore[attr-defined, unused-ignore]
except ImportError:  # no compiler where this was installed
    IS_COMPILED = False
    _read_columns: Callable[..., tuple[Any, ...]] = read_columns_in_python
else:
    IS_COMPILED = True
    _read_columns = _columns.read_columns

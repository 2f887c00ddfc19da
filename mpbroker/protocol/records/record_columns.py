"""Read the records of batches as columns: buffers in Arrow's layout.

This is for readers of millions of rows: the compiled function (``_columns.c``) makes no
Python object for a field.

    BinaryColumn := validity bitmap or None (no nulls), int32 offsets (n + 1), bytes

Source: Arrow columnar format, "Variable-size Binary Layout".
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mpbroker.protocol.records.batch_header import (
    BATCH_HEADER_SIZE,
    CODEC_MASK,
    BatchHeader,
    RecordBatchError,
)
from mpbroker.protocol.records.record_batch import (
    DEFAULT_MAX_DECOMPRESSED_BYTES,
    Record,
    iter_payload,
    records_payload,
)
from mpbroker.protocol.records.record_walk import FAULT_MESSAGES, NO_FAULT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    Buffer = bytes | bytearray | memoryview
    BinaryColumn = tuple[bytes | None, bytes, bytes]
    # For each row the index of its first header (int32, n + 1); all keys; all values.
    HeaderColumns = tuple[bytes, BinaryColumn, BinaryColumn]

_MAX_COLUMN_BYTES: Final = 0x7FFF_FFFF


class EncodedRecords(NamedTuple):
    """The records of one batch, decompressed, and what is needed to read them.

    Attributes:
        payload: the records.
        record_count: the number of records.
        first_delta: the smallest offset delta of a record to read.
        base_offset: the batch's base offset.
        base_timestamp: the timestamp in ms to which timestamp deltas are added; with
            ``appended`` the timestamp of all records.
        appended: whether the broker set the timestamp (LogAppendTime).
    """

    payload: Buffer
    record_count: int
    first_delta: int
    base_offset: int
    base_timestamp: int
    appended: bool


class RecordColumns(NamedTuple):
    """Records as columns, in buffers that Arrow can use.

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


class BadRecordsError(RecordBatchError):
    """The records of a batch are corrupt; the user reads an undamaged copy.

    Attributes:
        part: the index of the batch among those that were to be read.
    """

    def __init__(self, text: str, part: int) -> None:
        super().__init__(text)
        self.part = part


def encoded_records(
    header: BatchHeader,
    batch: Buffer,
    first_offset: int,
    *,
    max_decompressed_bytes: int = DEFAULT_MAX_DECOMPRESSED_BYTES,
) -> EncodedRecords:
    """Return the records of a batch, for `read_columns`; the CRC is not checked.

    Those of an uncompressed batch are not copied: ``batch`` must not change.

    Args:
        header: the header of the batch.
        batch: the bytes of the whole batch.
        first_offset: records with smaller offsets are not read.
        max_decompressed_bytes: the limit of the records' bytes when decompressed.

    Raises:
        RecordBatchError: the codec is unknown.
        DecompressionError: see `compression.decompress`.
    """
    if header.attributes & CODEC_MASK:
        payload: Buffer = records_payload(header, batch, max_decompressed_bytes)
    else:
        payload = memoryview(batch)[BATCH_HEADER_SIZE : header.size_in_bytes]
    appended = bool(header.timestamp_type)
    return EncodedRecords(
        payload,
        header.record_count,
        first_offset - header.base_offset,
        header.base_offset,
        header.max_timestamp if appended else header.base_timestamp,
        appended,
    )


def read_columns(parts: list[EncodedRecords], *, with_headers: bool) -> RecordColumns:
    """Return the records of several batches, in their order, as columns.

    Args:
        parts: the records of each batch.
        with_headers: whether to read the headers of records.

    Raises:
        BadRecordsError: a length or count in a batch is wrong.
        OverflowError: one column has 2 GiB or more.
    """
    fault, *found = _read_columns(parts, with_headers)
    if fault != NO_FAULT:
        index, part = found[:2]
        raise BadRecordsError(
            f"record {index} of the batch at offset {parts[part].base_offset}:"
            f" {FAULT_MESSAGES[fault]}",
            part,
        )
    return RecordColumns(*found)


def read_columns_in_python(
    parts: list[EncodedRecords], with_headers: bool
) -> tuple[int, int, bytes, bytes, BinaryColumn, BinaryColumn, HeaderColumns | None]:
    """Read the records of each part, which must fill its payload exactly, as columns.

    The compiled function in ``_columns.c`` must return the same values.

    Returns:
        NO_FAULT and the fields of RecordColumns. The compiled function returns other
        faults of record_walk, too, with the index of the record, and of the part.

    Raises:
        BadRecordsError: a length or count is wrong.
    """
    offsets, timestamps = array("q"), array("q")
    keys: list[bytes | None] = []
    values: list[bytes | None] = []
    ends = array("i", [0])
    header_keys: list[bytes | None] = []
    header_values: list[bytes | None] = []
    for record in _records(parts):
        offsets.append(as_int64(record.offset))
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


def _records(parts: list[EncodedRecords]) -> Iterator[Record]:
    for index, part in enumerate(parts):
        payload, count, first_delta, base_offset, base_timestamp, appended = part
        try:
            for record in iter_payload(
                bytes(payload),
                count,
                0,
                base_timestamp,
                base_timestamp if appended else None,
            ):
                if record.offset >= first_delta:
                    yield record._replace(offset=base_offset + record.offset)
        except RecordBatchError as error:
            text = f"{error} (in the batch at offset {base_offset})"
            raise BadRecordsError(text, index) from None


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

"""Check the lengths of all records in a batch, and find their timestamps.

This is the only work of an append that grows with the number of records.
`walk_records` is the compiled function of ``_records.c``, if it was built; else the
Python function below. Both must return the same values for the same bytes.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.protocol.primitives import VarintError, read_varint, write_unsigned_varint

if TYPE_CHECKING:
    from collections.abc import Callable

    Buffer = bytes | bytearray | memoryview
    WalkFunction = Callable[
        [Buffer, int, int, int], tuple[int, int, int, int, int, int]
    ]

NO_FAULT: Final = 0
TOO_FEW_RECORDS: Final = 1
BAD_VARINT: Final = 2
BAD_RECORD_LENGTH: Final = 3
BAD_OFFSET_DELTA: Final = 4
BAD_KEY_LENGTH: Final = 5
BAD_VALUE_LENGTH: Final = 6
BAD_HEADER_COUNT: Final = 7
BAD_HEADER: Final = 8
BYTES_LEFT_IN_RECORD: Final = 9
BYTES_LEFT_IN_BATCH: Final = 10

FAULT_MESSAGES: Final = {
    TOO_FEW_RECORDS: "the batch ends before it",
    BAD_VARINT: "a varint is cut off or too long",
    BAD_RECORD_LENGTH: "its length is below 6 or reaches past the batch",
    BAD_OFFSET_DELTA: "its offset delta is not its index",
    BAD_KEY_LENGTH: "its key length is below -1 or reaches past the record",
    BAD_VALUE_LENGTH: "its value length is below -1 or reaches past the record",
    BAD_HEADER_COUNT: "its header count is negative or above the bytes that follow",
    BAD_HEADER: "a header has no key, or a length that reaches past the record",
    BYTES_LEFT_IN_RECORD: "bytes are left after its last field",
    BYTES_LEFT_IN_BATCH: "bytes are left in the batch after the last record",
}

# Attributes, two deltas, two lengths and a header count, of one byte each.
_MIN_RECORD_LENGTH: Final = 6


class Walk(NamedTuple):
    """The result of `walk_records`; the compiled function returns a plain tuple.

    Deltas are timestamps in ms, less the batch's base_timestamp. Records without a
    timestamp do not count for the largest and smallest delta.

    Attributes:
        fault: NO_FAULT, or the first fault.
        walked: the index of the record with the fault; without a fault, the number of
            records.
        max_delta: the largest delta.
        max_index: the index of the first record with the largest delta; -1: no record
            has a timestamp.
        min_delta: the smallest delta.
        first_keyless: the index of the first record without a key; -1: all have keys.
    """

    fault: int
    walked: int
    max_delta: int
    max_index: int
    min_delta: int
    first_keyless: int


@cache
def small_varints() -> list[bytes]:
    """Return a list of the unsigned varints of 0 to 32,767, made when first used."""
    return [write_unsigned_varint(number) for number in range(1 << 15)]


class _Fault(Exception):
    def __init__(self, fault: int) -> None:
        self.fault = fault


class _Unusual(Exception):
    """Raised for a record of an unusual shape, which `_read_record` then reads."""


def walk_records_in_python(
    data: Buffer, start: int, record_count: int, no_timestamp_delta: int
) -> Walk:
    """Check ``record_count`` records, which must fill ``data`` from ``start`` exactly.

    Args:
        data: the records, decompressed.
        start: the position in ``data`` where the records begin.
        record_count: the number of records.
        no_timestamp_delta: the delta of a record without a timestamp, that is, -1 less
            the batch's base_timestamp.

    Raises:
        ValueError: ``start`` is outside ``data``.
    """
    if not 0 <= start <= len(data):
        raise ValueError("start lies outside the data")
    # Indexing bytes takes half the time of indexing a memoryview.
    buf = bytes(memoryview(data)[start:])
    deltas: list[int] = []
    keyless: list[int] = []
    fault = NO_FAULT
    try:
        if _visit(buf, record_count, deltas, keyless) != len(buf):
            fault = BYTES_LEFT_IN_BATCH
    except _Fault as error:
        fault = error.fault
    walked = len(deltas)
    first_keyless = keyless[0] if keyless else -1
    timed = deltas
    if no_timestamp_delta in deltas:
        timed = [delta for delta in deltas if delta != no_timestamp_delta]
    if not timed:
        return Walk(fault, walked, 0, -1, 0, first_keyless)
    latest = max(timed)
    return Walk(fault, walked, latest, deltas.index(latest), min(timed), first_keyless)


def first_deltas(data: Buffer, start: int, count: int) -> tuple[list[int], list[int]]:
    """Return timestamp deltas and missing keys of a batch's first ``count`` records.

    Args:
        data, start: see walk_records_in_python(), which found no fault.

    Returns:
        The timestamp delta of each record, and the indexes of records without keys.
    """
    deltas: list[int] = []
    keyless: list[int] = []
    _visit(bytes(memoryview(data)[start:]), count, deltas, keyless)
    return deltas, keyless


def _visit(buf: bytes, count: int, deltas: list[int], keyless: list[int]) -> int:
    """Check each record; collect timestamp deltas, and indexes of records without keys.

    Args:
        buf: the records.
        count: the number of records.
        deltas: the delta of each record is added to it.
        keyless: the index of each record without a key is added to it.

    Returns:
        The position behind the last record.

    Raises:
        _Fault: the first fault; the lists have the records before it.
    """
    offset_deltas = small_varints()
    pos = 0
    for index in range(count):
        # The usual record is read without a call, which would cost a third of the time.
        # All others, malformed ones included, are left to _read_record().
        try:
            length = buf[pos]
            at = pos + 1
            if length & 0x81:
                second = buf[at]
                if length & 1 or second & 0x80:
                    raise _Unusual
                length = length & 0x7F | second << 7
                at += 1
            end = at + (length >> 1)
            delta = buf[at + 1]
            at += 2
            if delta & 0x80:
                second = buf[at]
                if second & 0x80:
                    raise _Unusual
                at += 1
                delta = delta & 0x7F | second << 7
            offset_delta = offset_deltas[index << 1]
            if not buf.startswith(offset_delta, at):
                raise _Unusual
            at += len(offset_delta)
            key_size = buf[at]
            at += 1
            is_keyless = key_size == 1
            if not is_keyless:
                if key_size & 0x81:
                    raise _Unusual
                at += key_size >> 1
            size = buf[at]
            at += 1
            if size & 0x81:
                second = buf[at]
                if size & 1 or second & 0x80:
                    raise _Unusual
                size = size & 0x7F | second << 7
                at += 1
            at += size >> 1
            if buf[at] or at + 1 != end:  # no headers, and nothing behind them
                raise _Unusual
            delta = (delta >> 1) ^ -(delta & 1)
        except (_Unusual, IndexError):
            end, delta, is_keyless = _read_record(buf, pos, index)
        if is_keyless:
            keyless.append(index)
        deltas.append(delta)
        pos = end
    return pos


def _read_record(buf: bytes, pos: int, index: int) -> tuple[int, int, bool]:
    """Check a record of any shape.

    Args:
        buf: the records.
        pos: the position of the record.
        index: the index of the record, which must be its offset delta.

    Returns:
        The position of the record's end, its timestamp delta in ms, and whether it has
        no key.

    Raises:
        _Fault: the first fault of the record.
    """
    if pos == len(buf):
        raise _Fault(TOO_FEW_RECORDS)
    length, pos = _read_varint(buf, pos, len(buf), 32)
    if length < _MIN_RECORD_LENGTH or length > len(buf) - pos:
        raise _Fault(BAD_RECORD_LENGTH)
    end = pos + length
    delta, pos = _read_varint(buf, pos + 1, end, 64)
    offset_delta, pos = _read_varint(buf, pos, end, 32)
    if offset_delta != index:
        raise _Fault(BAD_OFFSET_DELTA)
    key_length, pos = _skip_bytes(buf, pos, end, -1, BAD_KEY_LENGTH)
    _, pos = _skip_bytes(buf, pos, end, -1, BAD_VALUE_LENGTH)
    count, pos = _read_varint(buf, pos, end, 32)
    if not 0 <= count <= end - pos:
        raise _Fault(BAD_HEADER_COUNT)
    for _ in range(count):
        _, pos = _skip_bytes(buf, pos, end, 0, BAD_HEADER)
        _, pos = _skip_bytes(buf, pos, end, -1, BAD_HEADER)
    if pos != end:
        raise _Fault(BYTES_LEFT_IN_RECORD)
    return end, delta, key_length < 0


def _skip_bytes(
    buf: bytes, pos: int, end: int, lowest: int, bad_length: int
) -> tuple[int, int]:
    length, pos = _read_varint(buf, pos, end, 32)
    if not lowest <= length <= end - pos:
        raise _Fault(bad_length)
    return length, pos + length if length > 0 else pos


def _read_varint(buf: bytes, pos: int, end: int, bits: int) -> tuple[int, int]:
    try:
        value, pos = read_varint(buf, pos, bits)
    except VarintError:
        raise _Fault(BAD_VARINT) from None
    if pos > end:
        raise _Fault(BAD_VARINT)
    return value, pos


try:
    from mpbroker.native import _records  # type: ignore[attr-defined, unused-ignore]
except ImportError:  # no compiler where this was installed
    IS_COMPILED = False
    walk_records: WalkFunction = walk_records_in_python
else:
    IS_COMPILED = True
    walk_records = _records.walk_records

"""Every record of a batch, visited once: are its lengths true, and what is its time?

This is the only cost that a record has of its own on its way into the log.
`walk_records` is the compiled walk of ``_records.c`` where that was built, else its
Python twin below, which is the specification: the same answer for the same bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

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
    """What a walk found; a plain tuple where the compiled one made it.

    Deltas are to the batch's base_timestamp. Of records without a timestamp they do not
    count, so ``max_index`` is -1 if none has one.
    """

    fault: int
    walked: int  # index of the record at fault; without one, how many there are
    max_delta: int
    max_index: int  # the first record of that timestamp
    min_delta: int
    first_keyless: int  # -1: all have keys


class _Fault(Exception):
    def __init__(self, fault: int) -> None:
        self.fault = fault


class _Unusual(Exception):
    """A record for the long way."""


def walk_records_in_python(
    data: Buffer, start: int, record_count: int, no_timestamp_delta: int
) -> Walk:
    """Visit ``record_count`` records, which must fill ``data`` from ``start`` exactly.

    Args:
        no_timestamp_delta: the delta that makes a timestamp of -1 (none).

    Raises:
        ValueError: ``start`` lies outside ``data``.
    """
    if not 0 <= start <= len(data):
        raise ValueError("start lies outside the data")
    # Indexing bytes takes half the time of indexing a memoryview.
    buf = bytes(memoryview(data)[start:])
    pos = index = 0
    last_delta = no_timestamp_delta
    max_delta = min_delta = 0
    max_index = first_keyless = -1
    fault = NO_FAULT
    try:
        for index in range(record_count):
            try:
                # Inlined _skim_record: the call would take a third of the time.
                byte = buf[pos]
                if byte < 0x80:
                    at = pos + 1
                    record_end = at + (byte >> 1)
                else:
                    second = buf[pos + 1]
                    if second & 0x80:
                        raise _Unusual
                    at = pos + 2
                    record_end = at + ((byte & 0x7F | second << 7) >> 1)
                if byte & 1:
                    raise _Unusual

                delta = buf[at + 1]
                at += 2
                if delta & 0x80:
                    second = buf[at]
                    if second & 0x80:
                        raise _Unusual
                    at += 1
                    delta = delta & 0x7F | second << 7

                if index < 64:
                    if buf[at] != index << 1:
                        raise _Unusual
                    at += 1
                elif (
                    buf[at] == index << 1 & 0x7F | 0x80
                    and buf[at + 1] == index >> 6
                    and index < 8192
                ):
                    at += 2
                elif (
                    buf[at + 1] == index >> 6 & 0x7F | 0x80
                    and buf[at + 2] == index >> 13
                    and buf[at] == index << 1 & 0x7F | 0x80
                    and index < 1048576
                ):
                    at += 3
                else:
                    raise _Unusual

                key_length = buf[at]
                if key_length & 0x81:
                    if key_length != 1:
                        raise _Unusual
                    if first_keyless < 0:
                        first_keyless = index
                    at += 1
                else:
                    at += 1 + (key_length >> 1)

                byte = buf[at]
                if byte & 1:
                    raise _Unusual
                if byte < 0x80:
                    at += 1 + (byte >> 1)
                else:
                    second = buf[at + 1]
                    if second & 0x80:
                        raise _Unusual
                    at += 2 + ((byte & 0x7F | second << 7) >> 1)

                if buf[at] or at + 1 != record_end:
                    raise _Unusual
                pos = record_end
                delta = (delta >> 1) ^ -(delta & 1)
            except (_Unusual, IndexError):
                if first_keyless == index:
                    first_keyless = -1
                pos, delta, is_keyless = _read_record(buf, pos, index)
                if is_keyless and first_keyless < 0:
                    first_keyless = index
            if delta != last_delta and delta != no_timestamp_delta:
                last_delta = delta
                if max_index < 0:
                    max_delta = min_delta = delta
                    max_index = index
                elif delta > max_delta:
                    max_delta = delta
                    max_index = index
                elif delta < min_delta:
                    min_delta = delta
        index = max(record_count, 0)
        if pos != len(buf):
            fault = BYTES_LEFT_IN_BATCH
    except _Fault as error:
        fault = error.fault
    return Walk(fault, index, max_delta, max_index, min_delta, first_keyless)


def _read_record(buf: bytes, pos: int, index: int) -> tuple[int, int, bool]:
    """Return the record's end, its timestamp delta, and whether it has no key.

    Raises:
        _Fault: with the first of its faults.
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
    raw = 0
    for shift in range(0, bits, 7):
        if pos >= end:
            break
        byte = buf[pos]
        pos += 1
        raw |= (byte & 0x7F) << shift
        if byte < 0x80:
            if raw >> bits:
                break
            return (raw >> 1) ^ -(raw & 1), pos
    raise _Fault(BAD_VARINT)


try:
    from mpbroker.native import _records  # type: ignore[attr-defined, unused-ignore]
except ImportError:  # no compiler where this was installed
    IS_COMPILED = False
    walk_records: WalkFunction = walk_records_in_python
else:
    IS_COMPILED = True
    walk_records = _records.walk_records

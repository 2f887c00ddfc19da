"""Encode the records of a whole batch: the most expensive loop of a producer.

`encode_records` and `encode_batch` are the compiled functions of ``_records.c``, if it
was built; else the Python functions below. Both must return the same bytes:
tests/protocol/test_record_encode.py compares them with `RecordBatchBuilder`.

Source: Kafka documentation, "Message Format", "Record".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Final

from mpbroker.protocol.primitives import write_varint
from mpbroker.protocol.records.batch_header import BATCH_HEADER_SIZE

RawHeaders = Sequence[tuple[bytes, bytes | None]]
RawRecord = tuple[int, bytes | None, bytes | None, RawHeaders]
"""Timestamp in ms, key, value, headers (names in UTF-8); all of them real `bytes`."""

_EncodeFunction = Callable[[list[RawRecord]], tuple[bytes, int, int]]
_EncodeBatchFunction = Callable[[list[RawRecord]], tuple[bytearray, int, int]]

_TABLE_SIZE: Final = 8192  # smaller numbers have zig-zag varints of two bytes at most
_NULL: Final = b"\x01"  # -1
_END: Final = b"\0"  # no headers


@cache
def _varints() -> list[bytes]:
    """Return a list of the varints of 0 to _TABLE_SIZE - 1, made when first used."""
    return [_varint(number) for number in range(_TABLE_SIZE)]


def _varint(number: int) -> bytes:
    out = bytearray()
    write_varint(out, number)
    return bytes(out)


def encode_records_in_python(records: list[RawRecord]) -> tuple[bytes, int, int]:
    """Encode records with the offset deltas 0, 1, 2, ...

    Returns:
        The bytes, the first record's timestamp (the base timestamp), and the largest
        timestamp; both are -1 if there are no records.
    """
    if not records:
        return b"", -1, -1
    table = _varints()
    parts: list[bytes] = []
    base_timestamp = max_timestamp = timestamp = records[0][0]
    prefix = b"\0\0"  # attributes, and a timestamp delta of 0
    # The bytes before and after the offset delta of the last record without a key.
    # Neighbouring records often have the same length, and then these are used again.
    last_size = -1
    before = after = b""
    for index, (time, key, value, headers) in enumerate(records):
        if time != timestamp:
            timestamp = time
            if time > max_timestamp:
                max_timestamp = time
            prefix = b"\0" + _varint(time - base_timestamp)
            last_size = -1
        if (
            headers
            or value is None
            or index >= _TABLE_SIZE
            or len(value) + (0 if key is None else len(key)) >= _TABLE_SIZE - 64
        ):
            parts.append(_encode_long_way(prefix, index, key, value, headers))
        elif key is None:
            size = len(value)
            if size != last_size or index == 64:
                last_size = size
                after = _NULL + table[size]
                length = len(prefix) + len(table[index]) + len(after) + size + 1
                before = table[length] + prefix
            parts += (before, table[index], after, value, _END)
        else:
            offset, key_size = table[index], table[len(key)]
            value_size = table[len(value)]
            length = len(prefix) + len(offset) + len(key_size) + len(key)
            length += len(value_size) + len(value) + 1
            parts += (table[length], prefix, offset, key_size, key)
            parts += (value_size, value, _END)
    return b"".join(parts), base_timestamp, max_timestamp


def encode_batch_in_python(records: list[RawRecord]) -> tuple[bytearray, int, int]:
    """Encode records as a batch with 61 zero bytes in place of its header.

    The caller overwrites the zero bytes with the header.

    Returns:
        The batch, the base timestamp, and the largest timestamp, as
        `encode_records_in_python`.
    """
    payload, base_timestamp, max_timestamp = encode_records_in_python(records)
    return bytearray(BATCH_HEADER_SIZE) + payload, base_timestamp, max_timestamp


def _encode_long_way(
    prefix: bytes,
    index: int,
    key: bytes | None,
    value: bytes | None,
    headers: RawHeaders,
) -> bytes:
    """Return the bytes of any record, also with headers, nulls or large fields."""
    body = bytearray(prefix)
    write_varint(body, index)
    _write_nullable(body, key)
    _write_nullable(body, value)
    write_varint(body, len(headers))
    for name, header_value in headers:
        _write_nullable(body, name)
        _write_nullable(body, header_value)
    return _varint(len(body)) + body


def _write_nullable(out: bytearray, value: bytes | None) -> None:
    if value is None:
        out += _NULL
    else:
        write_varint(out, len(value))
        out += value


try:
    from mpbroker.native import _records  # type: ignore[attr-defined, unused-ignore]

    encode_records: _EncodeFunction = _records.encode_records
    encode_batch: _EncodeBatchFunction = _records.encode_batch
except (ImportError, AttributeError):  # not built, or built before it had these
    IS_COMPILED = False
    encode_records = encode_records_in_python
    encode_batch = encode_batch_in_python
else:
    IS_COMPILED = True

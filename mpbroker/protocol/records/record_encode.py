"""Records to bytes, a whole batch at once: the hot loop of a producer.

`encode_records` and `encode_batch` are the compiled loop of ``_records.c`` where that
was built, else its Python twins below, which are the specification: the same bytes for
the same records (tests/protocol/test_record_encode.py holds all to
`RecordBatchBuilder`).

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
"""Timestamp in ms, key, value, headers (names in UTF-8). Nothing but real `bytes`."""

_EncodeFunction = Callable[[list[RawRecord]], tuple[bytes, int, int]]
_EncodeBatchFunction = Callable[[list[RawRecord]], tuple[bytearray, int, int]]

_TABLE_SIZE: Final = 8192  # what a zig-zag varint of two bytes can hold
_NULL: Final = b"\x01"  # -1
_END: Final = b"\0"  # no headers


@cache
def _varints() -> list[bytes]:
    """Return the varint of every number below _TABLE_SIZE; built on first use."""
    return [_varint(number) for number in range(_TABLE_SIZE)]


def _varint(number: int) -> bytes:
    out = bytearray()
    write_varint(out, number)
    return bytes(out)


def encode_records_in_python(records: list[RawRecord]) -> tuple[bytes, int, int]:
    """Encode records with the offset deltas 0, 1, 2, ...

    Returns:
        The bytes, the first record's timestamp (that deltas are taken from), and the
        highest timestamp; both -1 if there are no records.
    """
    if not records:
        return b"", -1, -1
    table = _varints()
    parts: list[bytes] = []
    base_timestamp = max_timestamp = timestamp = records[0][0]
    prefix = b"\0\0"  # attributes, and a timestamp delta of 0
    # What stands before the offset delta and after it, for a keyless record as long as
    # the one before: records of one kind often are, and then nothing is computed.
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
    """Encode the records behind 61 zero bytes.

    The caller overwrites them with the batch header.
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
    """Encode a record whatever it holds."""
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
except (ImportError, AttributeError):  # not built, or built before this was in it
    IS_COMPILED = False
    encode_records = encode_records_in_python
    encode_batch = encode_batch_in_python
else:
    IS_COMPILED = True

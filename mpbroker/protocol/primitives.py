"""Read and write the primitive types of the protocol that are not in `struct`: varints.

Readers take a buffer and a position, and return the value and the position behind it.
They raise `ProtocolError` on malformed bytes, and never `IndexError`.

A varint has seven bits of the number in each byte, the lowest first; if a byte is 0x80
or above, another one follows. Lengths and tags in requests are unsigned. Fields of
records are signed, and zig-zag encoded: 0, -1, 1, -2 are written as 0, 1, 2, 3.

Strings are decoded with the error handler `AS_JAVA`, so that bytes which are not UTF-8
are no reason to hang up: text.decode("utf-8", AS_JAVA).

Source: Kafka protocol guide, "Protocol Primitive Types": UNSIGNED_VARINT, VARINT (32
bits) and VARLONG (64 bits); KIP-482 for tagged fields; Java's String(bytes, UTF_8) for
strings.
"""

from __future__ import annotations

import codecs
from struct import Struct
from typing import Final

from mpbroker.protocol.errors import ProtocolError

Buffer = bytes | bytearray | memoryview

MAX_UNSIGNED_VARINT: Final = 0xFFFF_FFFF
# The most tagged fields of one section, as in Kafka.
MAX_TAGGED_FIELDS: Final = 10_000
ZERO_UUID: Final = bytes(16)  # Kafka's "no topic id"

# By its length, a function that reads a short string's bytes from a memoryview in one
# call. A slice would make another memoryview first.
SHORT_TEXT: Final = tuple(Struct(f"{length}s").unpack_from for length in range(64))

AS_JAVA: Final = "mpbroker.as_java"
"""The name of the error handler for text that is not UTF-8; see _replace_as_java()."""

# U+FFFD has three bytes in UTF-8. So a longer text may not fit into an answer or a log
# any more, where the length of a string is an int16.
_MAX_REPLACED: Final = 0x7FFF // 3


def _replace_as_java(error: UnicodeError) -> tuple[str, int]:
    """Replace one malformed sequence of UTF-8 with U+FFFD, as Java does.

    Python's handler "replace" does the same, except for the bytes of a surrogate
    (ED A0 80 to ED BF BF): one U+FFFD in Java, one for each byte in Python.

    Raises:
        UnicodeDecodeError: the text has more than 10,922 bytes.
    """
    if not isinstance(error, UnicodeDecodeError) or len(error.object) > _MAX_REPLACED:
        raise error
    text, end = error.object, error.end
    if text[error.start] == 0xED and text[end : end + 1] >= b"\xa0":
        while end < min(error.start + 3, len(text)) and text[end] & 0xC0 == 0x80:
            end += 1
    return "\ufffd", end


codecs.register_error(AS_JAVA, _replace_as_java)


class VarintError(ProtocolError):
    """The bytes are not a varint of at most the wanted number of bits."""


def read_unsigned_varint(
    buffer: Buffer, position: int, bits: int = 32
) -> tuple[int, int]:
    """Return an unsigned varint and the position behind it.

    Raises:
        VarintError: the varint is cut off by the end of the buffer, or its value has
            more than ``bits`` bits.
    """
    value = shift = 0
    start = position
    try:
        while shift < bits:
            byte = buffer[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if value >> bits:
                    break
                return value, position
            shift += 7
    except IndexError:
        raise VarintError(
            f"varint at byte {start} is cut off by the end at byte {len(buffer)}"
        ) from None
    raise VarintError(f"varint at byte {start} does not fit in {bits} bits")


def read_varint(buffer: Buffer, position: int, bits: int = 32) -> tuple[int, int]:
    """Return a zig-zag varint and the position behind it.

    Raises:
        VarintError: as read_unsigned_varint().
    """
    # Most have one byte: to read these here saves a call.
    if position < len(buffer) and (byte := buffer[position]) < 0x80:
        return (byte >> 1) ^ -(byte & 1), position + 1
    raw, position = read_unsigned_varint(buffer, position, bits)
    return (raw >> 1) ^ -(raw & 1), position


def write_unsigned_varint(value: int) -> bytes:
    """Return the shortest unsigned varint of a value of 0 to 2^32 - 1.

    Raises:
        ProtocolError: the value is outside that range.
    """
    if not 0 <= value <= MAX_UNSIGNED_VARINT:
        raise ProtocolError(f"{value} does not fit in an unsigned varint of 32 bits")
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)


def write_varint(out: bytearray, value: int) -> None:
    """Append a signed value of at most 64 bits to ``out``, as a zig-zag varint."""
    raw = (value << 1) ^ (value >> 63)
    while raw > 0x7F:
        out.append(raw & 0x7F | 0x80)
        raw >>= 7
    out.append(raw)


def skip_tagged_fields(buffer: Buffer, position: int) -> int:
    """Return the position after a section of tagged fields, whatever their tags.

    Tags may be in any order and come twice, as in Kafka; here all of them are skipped.
    The time that this takes is linear in the number of bytes.

    Raises:
        ProtocolError: the section is cut off, or has more than MAX_TAGGED_FIELDS.
    """
    count, position = read_unsigned_varint(buffer, position)
    if count > MAX_TAGGED_FIELDS:
        raise ProtocolError(f"{count} tagged fields; {MAX_TAGGED_FIELDS} are allowed")
    end = len(buffer)
    try:
        for _ in range(count):
            tag = buffer[position]
            position += 1
            if tag > 0x7F:
                tag, position = read_unsigned_varint(buffer, position - 1)
            size = buffer[position]
            position += 1
            if size > 0x7F:
                size, position = read_unsigned_varint(buffer, position - 1)
            if size > end - position:
                raise ProtocolError(
                    f"tagged field {tag} of {size} bytes with {end - position} left"
                )
            position += size
    except IndexError:
        raise ProtocolError(
            f"{count} tagged fields are cut off by the end at byte {end}"
        ) from None
    return position

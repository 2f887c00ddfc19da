"""The protocol's primitive types that `struct` does not know.

Readers take a buffer and a position and return the value and the position after it.
They raise `ProtocolError` on bytes that are no such value, `IndexError` never.

Source: Kafka protocol guide, "Protocol Primitive Types"; KIP-482 for tagged fields.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from mpbroker.protocol.errors import ProtocolError

Buffer = bytes | bytearray | memoryview

MAX_UNSIGNED_VARINT: Final = 0xFFFF_FFFF
ZERO_UUID: Final = bytes(16)  # Kafka's "no topic id"

# Reads a short string's bytes out of a memoryview in one call, by its length; a slice
# would make a memoryview first.
SHORT_TEXT: Final = tuple(Struct(f"{length}s").unpack_from for length in range(64))

_VARINT_BITS: Final = 32  # in groups of 7, the last of which has room for more


def read_unsigned_varint(buffer: Buffer, position: int) -> tuple[int, int]:
    """Read an unsigned varint of at most 5 bytes and 32 bits."""
    value = shift = 0
    start = position
    try:
        while shift < _VARINT_BITS:
            byte = buffer[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if value >> _VARINT_BITS:
                    break
                return value, position
            shift += 7
    except IndexError:
        raise ProtocolError(
            f"varint at byte {start} is cut off by the end at byte {len(buffer)}"
        ) from None
    raise ProtocolError(f"varint at byte {start} does not fit in {_VARINT_BITS} bits")


def write_unsigned_varint(value: int) -> bytes:
    """Return the shortest unsigned varint of a value of 0 to 2^32 - 1."""
    if not 0 <= value <= MAX_UNSIGNED_VARINT:
        raise ProtocolError(f"{value} does not fit in an unsigned varint of 32 bits")
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)


def skip_tagged_fields(buffer: Buffer, position: int) -> int:
    """Return the position after a tagged-field section, whatever its tags.

    Tags must ascend, which also forbids duplicates; the time is linear in the bytes.
    """
    count, position = read_unsigned_varint(buffer, position)
    end = len(buffer)
    previous = -1
    try:
        for _ in range(count):  # ends with the buffer: a field takes 2 bytes or more
            tag = buffer[position]
            position += 1
            if tag > 0x7F:
                tag, position = read_unsigned_varint(buffer, position - 1)
            if tag <= previous:
                raise ProtocolError(f"tagged field {tag} follows {previous}")
            previous = tag
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

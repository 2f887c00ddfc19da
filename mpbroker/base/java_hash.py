"""Compute Java's String.hashCode(), which chooses the partition of a group's records.

Source: Java's String.hashCode; Kafka's Utils.abs.
"""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=65536)
def java_hash(text: str) -> int:
    """Return the absolute value of a text's hash code in Java.

    Return 0, as Kafka does, if the hash code is -2**31: no int32 is its absolute value.
    """
    value = 0
    encoded = text.encode("utf-16-be", "surrogatepass")
    for index in range(0, len(encoded), 2):
        value = value * 31 + (encoded[index] << 8 | encoded[index + 1]) & 0xFFFF_FFFF
    if value >= 0x8000_0000:
        value = 0x1_0000_0000 - value
    return value & 0x7FFF_FFFF

"""The partition of a key, as Kafka's Java client chooses it.

Records with the same key must get to the same partition, whichever client produces
them. So this is Java's murmur2, bit for bit. librdkafka's default (CRC-32) differs; its
setting `partitioner=murmur2_random` chooses as we do.

Source: MurmurHash2 by Austin Appleby (public domain), 32 bits, as Kafka seeds it.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

_SEED: Final = 0x9747B28C
_M: Final = 0x5BD1E995
_MASK: Final = 0xFFFFFFFF
_WORD: Final = Struct("<I")


def murmur2(data: bytes) -> int:
    """Return Kafka's 32-bit murmur2 hash of ``data``, as an unsigned number."""
    length = len(data)
    tail = length & ~3
    h = _SEED ^ length
    for (k,) in _WORD.iter_unpack(memoryview(data)[:tail]):
        k = k * _M & _MASK
        k ^= k >> 24
        h = (h * _M & _MASK) ^ (k * _M & _MASK)
    if length > tail:
        h ^= int.from_bytes(data[tail:], "little")
        h = h * _M & _MASK
    h ^= h >> 13
    h = h * _M & _MASK
    return h ^ h >> 15


def partition_for_key(key: bytes, partition_count: int) -> int:
    """Return the partition of ``key`` in a topic of ``partition_count`` partitions."""
    return (murmur2(key) & 0x7FFFFFFF) % partition_count

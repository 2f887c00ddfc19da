"""Choose the partition of a record that does not name one.

A key goes to the partition where Kafka's Java client puts it (murmur2). Records without
a key go to one partition for a whole batch (`sticky`). A partitioner of your own is any
object with this method::

    class ByCustomer:
        def partition(self, topic, key, value, partition_count, available):
            return zlib.crc32(key) % partition_count
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import count
from typing import Final, Protocol

from mpbroker.client.partitioner import partition_for_key

# Keys repeat, and hashing one costs more than all else that a record needs. The cache
# is never emptied and does not count as buffer.memory: with keys of 64 bytes some 4.5
# MB.
_CACHED_KEYS: Final = 1 << 14
_LONGEST_CACHED: Final = 64

_cached_partition_for_key = lru_cache(maxsize=_CACHED_KEYS)(partition_for_key)


def cached_partition_for_key(key: bytes, partition_count: int) -> int:
    """Return the partition of ``key``; see `partition_for_key`."""
    if len(key) > _LONGEST_CACHED:
        return partition_for_key(key, partition_count)
    return _cached_partition_for_key(key, partition_count)


class Partitioner(Protocol):
    """The interface of a partitioner that a user writes; see the module's example."""

    def partition(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        partition_count: int,
        available: Sequence[int],
    ) -> int | None:
        """Return a partition's number, 0..partition_count - 1, or None.

        After None, the producer chooses a partition as for a record without a key.

        The thread that calls send() calls it, once for each record.

        Args:
            topic: the record's topic.
            key: the record's key, serialized.
            value: the record's value, serialized.
            partition_count: how many partitions the topic has.
            available: the partitions that have a leader now.
        """


class RoundRobinPartitioner:
    """Sends every record to the next partition that has a leader, whatever its key."""

    def __init__(self) -> None:
        self._counters: dict[str, count[int]] = {}

    def partition(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        partition_count: int,
        available: Sequence[int],
    ) -> int:
        """Return the next partition of the topic, among those that have a leader."""
        counter = self._counters.setdefault(topic, count())
        turn = next(counter)  # one step, which no other thread interrupts
        if available:
            return available[turn % len(available)]
        return turn % partition_count

"""The offsets of one group: committed, and of transactions still under way.

A transaction's offsets lie apart, by producer id, until its marker comes: then they
are committed as if they had come at that moment, or forgotten.

Source: Kafka's OffsetMetadataManager; KIP-447 for UNSTABLE_OFFSET_COMMIT.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mpbroker.coordinator.group_records import OffsetCommitValue


class OffsetAndMetadata(NamedTuple):
    """One committed position."""

    offset: int
    leader_epoch: int
    metadata: str
    commit_timestamp_ms: int
    expire_timestamp_ms: int  # -1: by the broker's retention

    @classmethod
    def of_record(cls, value: OffsetCommitValue) -> OffsetAndMetadata:
        return cls(
            value.offset,
            value.leader_epoch,
            value.metadata,
            value.commit_timestamp,
            value.expire_timestamp,
        )


class GroupOffsets:
    """What a group has committed, by topic and partition."""

    __slots__ = ("_pending", "topics")

    def __init__(self) -> None:
        self.topics: dict[str, dict[int, OffsetAndMetadata]] = {}
        # producer id -> (topic, partition) -> what its transaction would commit
        self._pending: dict[int, dict[tuple[str, int], OffsetAndMetadata | None]] = {}

    def __bool__(self) -> bool:
        return bool(self.topics or self._pending)

    def __iter__(self) -> Iterator[tuple[str, int, OffsetAndMetadata]]:
        for topic, partitions in self.topics.items():
            for partition, committed in partitions.items():
                yield topic, partition, committed

    def get(self, topic: str, partition: int) -> OffsetAndMetadata | None:
        partitions = self.topics.get(topic)
        return None if partitions is None else partitions.get(partition)

    def put(self, topic: str, partition: int, committed: OffsetAndMetadata) -> None:
        partitions = self.topics.get(topic)
        if partitions is None:
            partitions = self.topics[topic] = {}
        partitions[partition] = committed

    def remove(self, topic: str, partition: int) -> bool:
        """Forget a position; say whether there was one."""
        partitions = self.topics.get(topic)
        if partitions is None or partition not in partitions:
            return False
        del partitions[partition]
        if not partitions:
            del self.topics[topic]
        return True

    # -- transactions --------------------------------------------------------------

    def put_pending(
        self,
        producer_id: int,
        topic: str,
        partition: int,
        committed: OffsetAndMetadata | None,
    ) -> None:
        """Keep what a transaction commits, or (None) removes, until it has ended."""
        pending = self._pending.setdefault(producer_id, {})
        pending[topic, partition] = committed

    def has_pending(self, topic: str, partition: int) -> bool:
        """Say whether a transaction under way may still change a position."""
        return any((topic, partition) in each for each in self._pending.values())

    def remove_pending(self, topic: str, partition: int) -> bool:
        """Forget what transactions under way would commit; say if there was any."""
        found = [each for each in self._pending.values() if (topic, partition) in each]
        for each in found:
            del each[topic, partition]
        if found:
            self._pending = {
                producer: each for producer, each in self._pending.items() if each
            }
        return bool(found)

    def pending(self) -> set[tuple[str, int]]:
        """All positions that a transaction under way may still change."""
        return {place for each in self._pending.values() for place in each}

    def complete(self, producer_id: int, *, commit: bool) -> None:
        """A transaction has ended: take over what it committed, or forget it."""
        for (topic, partition), committed in self._pending.pop(producer_id, {}).items():
            if not commit:
                continue
            if committed is None:
                self.remove(topic, partition)
            else:
                self.put(topic, partition, committed)

"""The offsets of one group: committed, and of transactions still under way.

A transaction's offsets lie apart, by producer id, until its marker comes: then they
are committed, or forgotten. Of two that were committed for one partition the one counts
whose record is the later, whenever the markers came: compaction of the log keeps that.

Source: Kafka's OffsetMetadataManager; KIP-447 for UNSTABLE_OFFSET_COMMIT.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mpbroker.coordinator.groups.group_records import OffsetCommitValue


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


class PendingOffset(NamedTuple):
    """What a transaction under way would make of a position."""

    number: int  # they rise in the order of their records
    committed: OffsetAndMetadata | None  # None: it is removed
    is_outdone: bool = False  # a later record has been committed


class GroupOffsets:
    """What a group has committed, by topic and partition."""

    __slots__ = ("_count", "_pending", "topics")

    def __init__(self) -> None:
        self.topics: dict[str, dict[int, OffsetAndMetadata]] = {}
        # producer id -> (topic, partition) -> what its transaction would commit
        self._pending: dict[int, dict[tuple[str, int], PendingOffset]] = {}
        self._count = 0  # of pending offsets, ever

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
        if self._pending:
            self._outdo(topic, partition, self._count)

    def _outdo(self, topic: str, partition: int, before: int) -> None:
        """What transactions wrote earlier than this does not count any more."""
        place = topic, partition
        for each in self._pending.values():
            pending = each.get(place)
            if pending is not None and pending.number < before:
                each[place] = pending._replace(is_outdone=True)

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
        pending[topic, partition] = PendingOffset(self._count, committed)
        self._count += 1

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
        for place, pending in self._pending.pop(producer_id, {}).items():
            if not commit or pending.is_outdone:
                continue
            self._outdo(*place, pending.number)
            if pending.committed is None:
                self.remove(*place)
            else:
                self.topics.setdefault(place[0], {})[place[1]] = pending.committed

"""Keep the offsets of one group: the committed ones, and those of open transactions.

The offsets of a transaction are kept apart, by producer id, until its marker comes.
Then they are committed, or forgotten. If there are two offsets for one partition, the
one with the later record in the log counts, whatever the order of the markers is:
compaction keeps the later record, too.

Source: Kafka's OffsetMetadataManager; KIP-447 for UNSTABLE_OFFSET_COMMIT.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Final, NamedTuple

from mpbroker.coordinator.groups.group_records import OffsetCommitValue
from mpbroker.metadata.topic_names import TopicPartition


class OffsetAndMetadata(NamedTuple):
    """Holds a committed offset of one partition, with Kafka's fields."""

    offset: int
    leader_epoch: int
    metadata: str
    commit_timestamp_ms: int
    expire_timestamp_ms: int  # -1: the broker's retention decides

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
    """Holds an offset that an open transaction has written."""

    number: int  # grows in the order of the records
    committed: OffsetAndMetadata | None  # None: the transaction deletes the offset
    is_outdone: bool = False  # a later record for the same partition is committed


_versions: Final = count()


class GroupOffsets:
    """Keeps the committed and the pending offsets of a group, by partition.

    Attributes:
        topics: the committed offsets, by topic and partition.
        version: a number that no other state of any group's offsets has had.
    """

    __slots__ = ("_count", "_pending", "topics", "version")

    def __init__(self) -> None:
        self.version = next(_versions)
        self.topics: dict[str, dict[int, OffsetAndMetadata]] = {}
        # producer id -> (topic, partition) -> the offset that its transaction wrote
        self._pending: dict[int, dict[TopicPartition, PendingOffset]] = {}
        self._count = 0  # how many pending offsets there have ever been

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
        self.version = next(_versions)
        partitions = self.topics.get(topic)
        if partitions is None:
            partitions = self.topics[topic] = {}
        partitions[partition] = committed
        if self._pending:
            self._outdo(topic, partition, self._count)

    def _outdo(self, topic: str, partition: int, before: int) -> None:
        """Mark the offsets of open transactions that a later record has replaced.

        They do not count any more when their transaction ends.

        Args:
            before: the number of the later record; only pending offsets with a smaller
                number are marked.
        """
        place = topic, partition
        for each in self._pending.values():
            pending = each.get(place)
            if pending is not None and pending.number < before:
                each[place] = pending._replace(is_outdone=True)

    def remove(self, topic: str, partition: int) -> bool:
        """Delete a committed offset; return whether there was one."""
        partitions = self.topics.get(topic)
        if partitions is None or partition not in partitions:
            return False
        self.version = next(_versions)
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
        """Keep an offset (None: its deletion) pending until its transaction ends."""
        self.version = next(_versions)
        pending = self._pending.setdefault(producer_id, {})
        pending[topic, partition] = PendingOffset(self._count, committed)
        self._count += 1

    def has_pending(self, topic: str, partition: int) -> bool:
        """Return whether an open transaction may still change an offset."""
        return any((topic, partition) in each for each in self._pending.values())

    def remove_pending(self, topic: str, partition: int) -> bool:
        """Drop the pending offsets of a partition; return whether there were any."""
        found = [each for each in self._pending.values() if (topic, partition) in each]
        for each in found:
            del each[topic, partition]
        if found:
            self.version = next(_versions)
            self._pending = {
                producer: each for producer, each in self._pending.items() if each
            }
        return bool(found)

    def pending(self) -> set[TopicPartition]:
        """Return all partitions whose offsets an open transaction may change."""
        return {place for each in self._pending.values() for place in each}

    def complete(self, producer_id: int, *, commit: bool) -> None:
        """Commit or drop the offsets that a transaction wrote, now that it has ended.

        Skip offsets that a later record has replaced.
        """
        self.version = next(_versions)
        for place, pending in self._pending.pop(producer_id, {}).items():
            if not commit or pending.is_outdone:
                continue
            self._outdo(*place, pending.number)
            if pending.committed is None:
                self.remove(*place)
            else:
                self.topics.setdefault(place[0], {})[place[1]] = pending.committed

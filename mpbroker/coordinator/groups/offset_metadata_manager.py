"""Commit, fetch, delete and expire the offsets of all groups.

Source: Kafka protocol guide; Kafka's OffsetMetadataManager; KIP-211 for the expiry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from mpbroker.coordinator.context import CoordinatorContext
from mpbroker.coordinator.groups.classic_group import ClassicGroup, ClassicGroupState
from mpbroker.coordinator.groups.consumer_group import ConsumerGroup
from mpbroker.coordinator.groups.consumer_protocol import CONSUMER_PROTOCOL
from mpbroker.coordinator.groups.group_config import GroupConfig
from mpbroker.coordinator.groups.group_offsets import GroupOffsets, OffsetAndMetadata
from mpbroker.coordinator.groups.group_records import offset_key, offset_value
from mpbroker.coordinator.outbox import TransactionalRecord
from mpbroker.coordinator.streams.streams_group import StreamsGroup
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitResponsePartition,
    OffsetCommitResponseTopic,
)
from mpbroker.protocol.messages.offset_delete import (
    OffsetDeleteRequestTopic,
    OffsetDeleteResponsePartition,
    OffsetDeleteResponseTopic,
)
from mpbroker.protocol.messages.offset_fetch import OffsetFetchResponsePartitions

_TOPIC_IDS_SINCE: Final = 10
_NO_OFFSET: Final = -1


class OffsetMetadataManager:
    """Keeps the committed offsets of all groups, and those of open transactions."""

    def __init__(
        self,
        config: GroupConfig,
        context: CoordinatorContext,
        partition_of: Callable[[str], int],
    ) -> None:
        self._config = config
        self._out = context.outbox
        self._topics = context.topics
        self._partition_of = partition_of
        self._groups: dict[str, GroupOffsets] = {}
        # The groups that have offsets in a topic, for when it is deleted.
        self._groups_of_topic: dict[str, set[str]] = {}
        # The groups in which a producer's open transaction has offsets.
        self._groups_of_producer: dict[int, set[str]] = {}

    def offsets(self, group_id: str) -> GroupOffsets | None:
        return self._groups.get(group_id)

    def committed(self) -> Iterator[tuple[str, str, int, int]]:
        """Yield each committed offset, as group, topic, partition and offset."""
        for group_id, offsets in self._groups.items():
            for topic, partition, committed in offsets:
                yield group_id, topic, partition, committed.offset

    def groups_of_producer(self, producer_id: int) -> list[str]:
        """Return the groups in which a producer's open transaction has offsets."""
        return list(self._groups_of_producer.get(producer_id, ()))

    # -- commit --------------------------------------------------------------------

    def commit(
        self, group_id: str, request: OffsetCommitRequest, version: int, now_ms: int
    ) -> tuple[list[OffsetCommitResponseTopic], bool]:
        """Commit offsets; the caller has checked that the member may commit.

        Args:
            version: the API version of the request.

        Returns:
            The topics of the answer, and whether a record was written.
        """
        expires = -1
        if request.retention_time_ms >= 0:
            expires = now_ms + request.retention_time_ms
        answers = []
        wrote = False
        for row in request.topics:
            name: str | None = row.name
            unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            if version >= _TOPIC_IDS_SINCE:
                name = self._topics.topic_name(row.topic_id)
                unknown = ErrorCode.UNKNOWN_TOPIC_ID
            count = self._topics.partition_count(name) if name else 0
            partitions = []
            for part in row.partitions:
                index = part.partition_index
                metadata = part.committed_metadata or ""
                code = self.judge(index, count, metadata)
                if code is ErrorCode.NONE:
                    assert name is not None
                    committed = OffsetAndMetadata(
                        part.committed_offset,
                        part.committed_leader_epoch,
                        metadata,
                        now_ms,
                        expires,
                    )
                    self.put(group_id, name, index, committed)
                    wrote = True
                elif not count:
                    code = unknown
                partitions.append(
                    OffsetCommitResponsePartition(
                        partition_index=index, error_code=code
                    )
                )
            answers.append(
                OffsetCommitResponseTopic(
                    name=row.name, topic_id=row.topic_id, partitions=partitions
                )
            )
        return answers, wrote

    def judge(self, partition: int, count: int, metadata: str) -> ErrorCode:
        """Return the error code for an offset to commit; NONE if it is valid.

        Args:
            count: the number of partitions of the topic; 0 if there is no such topic.
            metadata: the text that the client stores with the offset.
        """
        if not 0 <= partition < count:
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        if len(metadata) > self._config.offset_metadata_max_bytes:
            return ErrorCode.OFFSET_METADATA_TOO_LARGE
        return ErrorCode.NONE

    def put(
        self, group_id: str, topic: str, partition: int, committed: OffsetAndMetadata
    ) -> None:
        """Commit an offset, and write its record."""
        self._out.write(
            self._partition_of(group_id),
            offset_key(group_id, topic, partition),
            offset_value(*committed),
        )
        self._keep(group_id, topic, partition, committed)

    def _keep(
        self, group_id: str, topic: str, partition: int, committed: OffsetAndMetadata
    ) -> None:
        offsets = self._groups.get(group_id)
        if offsets is None:
            offsets = self._groups[group_id] = GroupOffsets()
        if topic not in offsets.topics:
            self._groups_of_topic.setdefault(topic, set()).add(group_id)
        offsets.put(topic, partition, committed)

    def put_in_transaction(
        self,
        group_id: str,
        topic: str,
        partition: int,
        committed: OffsetAndMetadata,
        producer: tuple[int, int],
    ) -> None:
        """Write an offset's record; keep the offset pending until the transaction ends.

        Args:
            producer: the id and the epoch of the transaction's producer.
        """
        self._out.write_transactional(
            self._partition_of(group_id),
            TransactionalRecord(
                *producer,
                offset_key(group_id, topic, partition),
                offset_value(*committed),
            ),
        )
        self.replay(group_id, topic, partition, committed, producer[0])

    # -- fetch ---------------------------------------------------------------------

    def fetch(
        self, group_id: str, topic: str, partitions: Iterable[int], *, stable: bool
    ) -> list[OffsetFetchResponsePartitions]:
        """Return a topic's committed offsets as an answer has them; -1: there is none.

        Args:
            stable: answer UNSTABLE_OFFSET_COMMIT for an offset that an open transaction
                may change.
        """
        offsets = self._groups.get(group_id)
        answers = []
        for index in partitions:
            committed = None if offsets is None else offsets.get(topic, index)
            code = ErrorCode.NONE
            if stable and offsets is not None and offsets.has_pending(topic, index):
                code, committed = ErrorCode.UNSTABLE_OFFSET_COMMIT, None
            if committed is None:
                answers.append(no_offset(index, code))
            else:
                answers.append(
                    OffsetFetchResponsePartitions(
                        partition_index=index,
                        committed_offset=committed.offset,
                        committed_leader_epoch=committed.leader_epoch,
                        metadata=committed.metadata,
                        error_code=code,
                    )
                )
        return answers

    # -- delete --------------------------------------------------------------------

    def delete(
        self,
        group_id: str,
        topics: Iterable[OffsetDeleteRequestTopic],
        is_subscribed: Callable[[str], bool],
    ) -> list[OffsetDeleteResponseTopic]:
        """Delete offsets, except in topics to which the group subscribes."""
        answers = []
        for row in topics:
            count = self._topics.partition_count(row.name)
            subscribed = is_subscribed(row.name)
            partitions = []
            for part in row.partitions:
                index = part.partition_index
                code = ErrorCode.NONE
                if not 0 <= index < count:
                    code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                elif subscribed:
                    code = ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC
                else:
                    self.remove(group_id, row.name, index)
                partitions.append(
                    OffsetDeleteResponsePartition(
                        partition_index=index, error_code=code
                    )
                )
            answers.append(
                OffsetDeleteResponseTopic(name=row.name, partitions=partitions)
            )
        return answers

    def remove(self, group_id: str, topic: str, partition: int) -> None:
        """Delete an offset, and write the record that deletes it.

        An offset that an open transaction has written for the partition is forgotten,
        too: the end of that transaction must not bring back a deleted offset.
        """
        if self._drop(group_id, topic, partition):
            self._out.write(
                self._partition_of(group_id),
                offset_key(group_id, topic, partition),
                None,
            )

    def _drop(self, group_id: str, topic: str, partition: int) -> bool:
        offsets = self._groups.get(group_id)
        if offsets is None:
            return False
        had_pending = offsets.remove_pending(topic, partition)
        had_committed = offsets.remove(topic, partition)
        if had_committed and topic not in offsets.topics:
            groups = self._groups_of_topic.get(topic)
            if groups is not None:
                groups.discard(group_id)
                if not groups:
                    del self._groups_of_topic[topic]
        if not offsets:
            del self._groups[group_id]
        return had_pending or had_committed

    def remove_all(self, group_id: str) -> None:
        """Delete all offsets of a group."""
        offsets = self._groups.get(group_id)
        if offsets is not None:
            places = {(topic, partition) for topic, partition, _ in offsets}
            for topic, partition in sorted(places | offsets.pending()):
                self.remove(group_id, topic, partition)

    def topic_deleted(self, topic: str) -> None:
        """Delete all offsets in a topic that was deleted."""
        groups = set(self._groups_of_topic.get(topic, ()))
        for group_id in sorted(groups.union(*self._groups_of_producer.values())):
            offsets = self._groups.get(group_id)
            if offsets is None:
                continue
            partitions = set(offsets.topics.get(topic, ()))
            partitions.update(
                index for name, index in offsets.pending() if name == topic
            )
            for partition in sorted(partitions):
                self.remove(group_id, topic, partition)

    def forget_deleted_topics(self) -> None:
        """Delete offsets in topics that were deleted while no coordinator ran."""
        topics = set(self._groups_of_topic)
        for group_id in set().union(*self._groups_of_producer.values()):
            if (offsets := self._groups.get(group_id)) is not None:
                topics.update(topic for topic, _ in offsets.pending())
        for topic in sorted(topics):
            if not self._topics.partition_count(topic):
                self.topic_deleted(topic)

    # -- expiry --------------------------------------------------------------------

    def expire(
        self,
        group_id: str,
        group: ClassicGroup | ConsumerGroup | StreamsGroup | None,
        now_ms: int,
    ) -> None:
        """Delete the expired offsets of a group."""
        offsets = self._groups.get(group_id)
        if offsets is None:
            return
        retention = self._config.offsets_retention_ms
        for topic, partition, committed in list(offsets):
            if offsets.has_pending(topic, partition):
                continue
            base = _expiry_base(group, topic, committed)
            if base is None:
                continue
            if committed.expire_timestamp_ms >= 0:
                expired = committed.expire_timestamp_ms <= now_ms
            else:
                expired = base + retention <= now_ms
            if expired:
                self.remove(group_id, topic, partition)

    # -- the log -------------------------------------------------------------------

    def replay(
        self,
        group_id: str,
        topic: str,
        partition: int,
        committed: OffsetAndMetadata | None,
        producer_id: int = -1,
    ) -> None:
        """Apply the record of a committed offset.

        Args:
            committed: the offset; None: the record deletes it.
            producer_id: the producer of the record's transaction, until whose end the
                offset is kept apart; -1: the record is in no transaction.
        """
        if producer_id >= 0:
            offsets = self._groups.setdefault(group_id, GroupOffsets())
            offsets.put_pending(producer_id, topic, partition, committed)
            self._groups_of_producer.setdefault(producer_id, set()).add(group_id)
        elif committed is None:
            self._drop(group_id, topic, partition)
        else:
            self._keep(group_id, topic, partition, committed)

    def complete_transaction(
        self, group_id: str, producer_id: int, *, commit: bool
    ) -> None:
        """Commit or forget the offsets of a transaction that a marker has ended."""
        groups = self._groups_of_producer.get(producer_id, set())
        groups.discard(group_id)
        if not groups:
            self._groups_of_producer.pop(producer_id, None)
        offsets = self._groups.get(group_id)
        if offsets is None:
            return
        offsets.complete(producer_id, commit=commit)
        for topic in offsets.topics:
            self._groups_of_topic.setdefault(topic, set()).add(group_id)
        if not offsets:
            del self._groups[group_id]

    def forget(self, group_id: str) -> None:
        """Drop a group's offsets from memory; the log keeps its records."""
        offsets = self._groups.pop(group_id, None)
        if offsets is not None:
            for topic in offsets.topics:
                self._groups_of_topic.get(topic, set()).discard(group_id)
        for producer_id, groups in list(self._groups_of_producer.items()):
            groups.discard(group_id)
            if not groups:
                del self._groups_of_producer[producer_id]


def no_offset(
    partition: int, code: ErrorCode = ErrorCode.NONE
) -> OffsetFetchResponsePartitions:
    return OffsetFetchResponsePartitions(
        partition_index=partition,
        committed_offset=_NO_OFFSET,
        committed_leader_epoch=_NO_OFFSET,
        metadata="",
        error_code=code,
    )


def _expiry_base(
    group: ClassicGroup | ConsumerGroup | StreamsGroup | None,
    topic: str,
    committed: OffsetAndMetadata,
) -> int | None:
    """Return the time (ms) at which an offset's retention begins.

    Return None if the offset does not expire now, because members use it.
    """
    if isinstance(group, (ConsumerGroup, StreamsGroup)):
        wanted = group.is_subscribed_to(topic)
        return None if wanted else committed.commit_timestamp_ms
    if group is None or not group.protocol_type:
        return committed.commit_timestamp_ms  # consumers without group management
    if group.state is ClassicGroupState.EMPTY:
        return max(group.state_timestamp_ms, committed.commit_timestamp_ms)
    if (
        group.state is ClassicGroupState.STABLE
        and group.protocol_type == CONSUMER_PROTOCOL
        and not group.is_subscribed_to(topic)
    ):
        return committed.commit_timestamp_ms
    return None

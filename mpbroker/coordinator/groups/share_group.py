"""Keep the members of a share group (KIP-932), and encode them as records.

The group epoch grows with each change of members, subscriptions or topics, and for it a
target assignment is made. Several members may have the same partition, so no member
waits until another gives it up: at its next heartbeat a member gets its target.

Source: KIP-932; Kafka's ShareGroup, ShareGroupMember, GroupCoordinatorRecordHelpers.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

from mpbroker.coordinator.groups.assignors import Partitions, TopicId
from mpbroker.coordinator.groups.group_records import (
    RecordTopicPartitionsInfo,
    ShareGroupCurrentMemberAssignmentKey,
    ShareGroupCurrentMemberAssignmentValue,
    ShareGroupMemberMetadataKey,
    ShareGroupMemberMetadataValue,
    ShareGroupMetadataKey,
    ShareGroupMetadataValue,
    ShareGroupStatePartitionMetadataKey,
    ShareGroupStatePartitionMetadataValue,
    ShareGroupTargetAssignmentMemberKey,
    ShareGroupTargetAssignmentMemberValue,
    ShareGroupTargetAssignmentMetadataKey,
    ShareGroupTargetAssignmentMetadataValue,
)
from mpbroker.coordinator.groups.partition_rows import read_rows, rows_of
from mpbroker.coordinator.versioned import KeyValue, versioned
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.message import Message

_STABLE: Final = 0  # of a member; the only state there is


class ShareGroupState(Enum):
    """The states of a share group; the values are the names that clients see."""

    EMPTY = "Empty"
    STABLE = "Stable"
    DEAD = "Dead"


class ShareMember:
    """A member of a share group."""

    __slots__ = (
        "assigned",
        "client_host",
        "client_id",
        "member_epoch",
        "member_id",
        "previous_epoch",
        "rack_id",
        "topic_names",
    )

    def __init__(self, member_id: str) -> None:
        self.member_id = member_id
        self.rack_id: str | None = None
        self.client_id = ""
        self.client_host = ""
        self.topic_names: tuple[str, ...] = ()
        self.member_epoch = 0
        self.previous_epoch = -1
        self.assigned: Partitions = {}

    def metadata(self) -> tuple[object, ...]:
        """Return the values that the member's metadata record has."""
        return self.rack_id, self.client_id, self.client_host, self.topic_names


class ShareGroup:
    """One share group.

    Attributes:
        initialized: by topic id, the topic's name and its partitions for which the
            group has a share state (in __share_group_state).
    """

    type_name: Final = "share"
    protocol_type: Final = "share"

    def __init__(self, group_id: str) -> None:
        self.group_id = group_id
        self.group_epoch = 0
        self.assignment_epoch = 0
        self.members: dict[str, ShareMember] = {}
        self.target: dict[str, Partitions] = {}
        self.initialized: dict[TopicId, tuple[str, set[int]]] = {}
        self.metadata_hash = 0
        self.topics_version = -1
        self.is_dead = False

    @property
    def state(self) -> ShareGroupState:
        if self.is_dead:
            return ShareGroupState.DEAD
        return ShareGroupState.STABLE if self.members else ShareGroupState.EMPTY

    @property
    def is_empty(self) -> bool:
        return not self.members

    def is_subscribed_to(self, topic: str) -> bool:
        return any(topic in member.topic_names for member in self.members.values())

    def member(self, member_id: str) -> ShareMember:
        """Return the group's member that has this id.

        Raises:
            ApiError: UNKNOWN_MEMBER_ID.
        """
        found = self.members.get(member_id)
        if found is None:
            raise ApiError(
                ErrorCode.UNKNOWN_MEMBER_ID,
                f"Member {member_id} is not a member of group {self.group_id}.",
            )
        return found


# -- records -----------------------------------------------------------------------


def epoch_record(group: ShareGroup) -> KeyValue:
    value = ShareGroupMetadataValue(
        epoch=group.group_epoch, metadata_hash=group.metadata_hash
    )
    return _key_of(group.group_id), versioned(value, 0)


def _key_of(group_id: str) -> bytes:
    return versioned(ShareGroupMetadataKey(group_id=group_id), 11)


def member_record(
    group_id: str, member_id: str, member: ShareMember | None
) -> KeyValue:
    key = versioned(
        ShareGroupMemberMetadataKey(group_id=group_id, member_id=member_id), 10
    )
    if member is None:
        return key, None
    value = ShareGroupMemberMetadataValue(
        rack_id=member.rack_id,
        client_id=member.client_id,
        client_host=member.client_host,
        subscribed_topic_names=list(member.topic_names),
    )
    return key, versioned(value, 0)


def target_epoch_record(group_id: str, epoch: int | None, now_ms: int = 0) -> KeyValue:
    key = versioned(ShareGroupTargetAssignmentMetadataKey(group_id=group_id), 12)
    if epoch is None:
        return key, None
    value = ShareGroupTargetAssignmentMetadataValue(
        assignment_epoch=epoch, assignment_timestamp=now_ms
    )
    return key, versioned(value, 0)


def target_record(group_id: str, member_id: str, target: Partitions | None) -> KeyValue:
    key = versioned(
        ShareGroupTargetAssignmentMemberKey(group_id=group_id, member_id=member_id), 13
    )
    if target is None:
        return key, None
    value = ShareGroupTargetAssignmentMemberValue(topic_partitions=rows_of(target))
    return key, versioned(value, 0)


def current_record(
    group_id: str, member_id: str, member: ShareMember | None
) -> KeyValue:
    key = versioned(
        ShareGroupCurrentMemberAssignmentKey(group_id=group_id, member_id=member_id), 14
    )
    if member is None:
        return key, None
    value = ShareGroupCurrentMemberAssignmentValue(
        member_epoch=member.member_epoch,
        previous_member_epoch=member.previous_epoch,
        state=_STABLE,
        assigned_partitions=rows_of(member.assigned),
    )
    return key, versioned(value, 0)


def initialized_record(
    group_id: str, topics: Mapping[TopicId, tuple[str, set[int]]] | None
) -> KeyValue:
    key = versioned(ShareGroupStatePartitionMetadataKey(group_id=group_id), 15)
    if topics is None:
        return key, None
    value = ShareGroupStatePartitionMetadataValue(
        initialized_topics=[
            RecordTopicPartitionsInfo(
                topic_id=topic_id, topic_name=name, partitions=sorted(numbers)
            )
            for topic_id, (name, numbers) in sorted(topics.items())
        ]
    )
    return key, versioned(value, 0)


def removal_records(group_id: str, member_id: str) -> list[KeyValue]:
    """Return the tombstones that delete a member, in Kafka's order of writing."""
    return [
        current_record(group_id, member_id, None),
        target_record(group_id, member_id, None),
        member_record(group_id, member_id, None),
    ]


def tombstones(group: ShareGroup) -> list[KeyValue]:
    """Return the records that delete a group and its members."""
    found: list[KeyValue] = []
    for member_id in group.members:
        found.extend(removal_records(group.group_id, member_id))
    found.append(target_epoch_record(group.group_id, None))
    found.append(initialized_record(group.group_id, None))
    found.append((_key_of(group.group_id), None))
    return found


def is_share_key(key: Message) -> bool:
    """Return whether a record of __consumer_offsets is of a share group."""
    return type(key).__name__.startswith("ShareGroup")


def deletes_group(key: Message, value: Message | None) -> bool:
    return isinstance(key, ShareGroupMetadataKey) and value is None


def replay(group: ShareGroup, key: Message, value: Message | None) -> None:
    """Apply a record of __consumer_offsets to its group, in the log's order."""
    if isinstance(key, ShareGroupMetadataKey):
        if isinstance(value, ShareGroupMetadataValue):
            group.group_epoch = value.epoch
            group.metadata_hash = value.metadata_hash
    elif isinstance(key, ShareGroupTargetAssignmentMetadataKey):
        if isinstance(value, ShareGroupTargetAssignmentMetadataValue):
            group.assignment_epoch = value.assignment_epoch
    elif isinstance(key, ShareGroupMemberMetadataKey):
        if isinstance(value, ShareGroupMemberMetadataValue):
            member = _member(group, key.member_id)
            member.rack_id = value.rack_id
            member.client_id = value.client_id
            member.client_host = value.client_host
            member.topic_names = tuple(value.subscribed_topic_names)
        else:
            group.members.pop(key.member_id, None)
            group.target.pop(key.member_id, None)
    elif isinstance(key, ShareGroupTargetAssignmentMemberKey):
        if isinstance(value, ShareGroupTargetAssignmentMemberValue):
            group.target[key.member_id] = read_rows(value.topic_partitions)
        else:
            group.target.pop(key.member_id, None)
    elif isinstance(key, ShareGroupCurrentMemberAssignmentKey):
        if isinstance(value, ShareGroupCurrentMemberAssignmentValue):
            member = _member(group, key.member_id)
            member.member_epoch = value.member_epoch
            member.previous_epoch = value.previous_member_epoch
            member.assigned = read_rows(value.assigned_partitions)
    elif isinstance(key, ShareGroupStatePartitionMetadataKey):
        group.initialized = {}
        if isinstance(value, ShareGroupStatePartitionMetadataValue):
            group.initialized = {
                row.topic_id: (row.topic_name, set(row.partitions))
                for row in value.initialized_topics
            }


def _member(group: ShareGroup, member_id: str) -> ShareMember:
    return group.members.setdefault(member_id, ShareMember(member_id))

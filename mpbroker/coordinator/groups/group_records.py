"""Encode and decode the records of __consumer_offsets.

The version of a record's key says its kind:

    key version  record                                   written by
    0, 1         a committed offset                       both protocols
    2            a classic group: generation, members     classic
    3            a consumer group's epoch                 consumer (KIP-848)
    4            partition metadata of a group            older Kafkas; ignored
    5            a member's subscription                  consumer
    6            the epoch of the target assignment       consumer
    7            a member's target assignment             consumer
    8            a member's current assignment            consumer
    10           a member's subscription                  share (KIP-932)
    11           a share group's epoch                    share
    12           the epoch of the target assignment       share
    13           a member's target assignment             share
    14           a member's current assignment            share
    15           the partitions with a share state        share
    16           the topics that match a pattern          consumer
    17, 19-23    see streams/record_types.py              streams (KIP-1071)

A record without a value deletes its key. Keys and values begin with their version; keys
are never in the flexible encoding.

Source: Kafka's group-coordinator/src/main/resources/common/message, field by field.
"""

from __future__ import annotations

from functools import lru_cache
from struct import Struct as Packing
from struct import error as StructError
from typing import Final, TypeVar

from mpbroker.coordinator.streams.record_types import STREAMS_KEYS
from mpbroker.coordinator.versioned import NO_API, versioned
from mpbroker.protocol.errors import ProtocolError
from mpbroker.protocol.fields import (
    BYTES,
    INT8,
    INT32,
    INT64,
    STRING,
    UUID,
    Struct,
    array,
    field,
)
from mpbroker.protocol.message import Message
from mpbroker.protocol.primitives import Buffer

_VERSION: Final = Packing(">h")
_KEY_HEAD: Final = Packing(">hh")
_PARTITION: Final = Packing(">i")
_VALUE_HEAD: Final = Packing(">hqih")
_EXPIRING_HEAD: Final = Packing(">hqh")
_TIMESTAMP: Final = Packing(">q")
_TIMESTAMPS: Final = Packing(">qq")


# -- offsets and classic groups --------------------------------------------------------


class OffsetCommitKey(Message, api_key=NO_API, versions=(0, 1), flexible_from=None):
    group: str = field(STRING)
    topic: str = field(STRING)
    partition: int = field(INT32)


class OffsetCommitValue(Message, api_key=NO_API, versions=(0, 4), flexible_from=4):
    offset: int = field(INT64)
    leader_epoch: int = field(INT32, "3+", default=-1, ignorable=True)
    metadata: str = field(STRING)
    commit_timestamp: int = field(INT64)
    expire_timestamp: int = field(INT64, "1", default=-1, ignorable=True)
    topic_id: bytes = field(UUID, "4+", tag=0, ignorable=True)


class GroupMetadataKey(Message, api_key=NO_API, versions=(2, 2), flexible_from=None):
    group: str = field(STRING)


class MemberMetadata(Struct):
    member_id: str = field(STRING)
    group_instance_id: str | None = field(
        STRING, "3+", nullable="3+", default=None, ignorable=True
    )
    client_id: str = field(STRING)
    client_host: str = field(STRING)
    rebalance_timeout: int = field(INT32, "1+", ignorable=True)
    session_timeout: int = field(INT32)
    subscription: Buffer = field(BYTES)
    assignment: Buffer = field(BYTES)


class GroupMetadataValue(Message, api_key=NO_API, versions=(0, 4), flexible_from=4):
    protocol_type: str = field(STRING)
    generation: int = field(INT32)
    protocol: str | None = field(STRING, nullable="0+")
    leader: str | None = field(STRING, nullable="0+")
    current_state_timestamp: int = field(INT64, "2+", default=-1, ignorable=True)
    members: list[MemberMetadata] = array(MemberMetadata)


# -- consumer groups -------------------------------------------------------------------


class ConsumerGroupMetadataKey(
    Message, api_key=NO_API, versions=(3, 3), flexible_from=None
):
    group_id: str = field(STRING)


class ConsumerGroupMetadataValue(
    Message, api_key=NO_API, versions=(0, 0), flexible_from=0
):
    epoch: int = field(INT32)
    metadata_hash: int = field(INT64, tag=0)


class ConsumerGroupMemberMetadataKey(
    Message, api_key=NO_API, versions=(5, 5), flexible_from=None
):
    group_id: str = field(STRING)
    member_id: str = field(STRING)


class ClassicProtocol(Struct):
    name: str = field(STRING)
    metadata: Buffer = field(BYTES)


class ClassicMemberMetadata(Struct):
    session_timeout_ms: int = field(INT32)
    supported_protocols: list[ClassicProtocol] = array(ClassicProtocol)


class ConsumerGroupMemberMetadataValue(
    Message, api_key=NO_API, versions=(0, 0), flexible_from=0
):
    instance_id: str | None = field(STRING, nullable="0+")
    rack_id: str | None = field(STRING, nullable="0+")
    client_id: str = field(STRING)
    client_host: str = field(STRING)
    subscribed_topic_names: list[str] = array(STRING)
    subscribed_topic_regex: str | None = field(STRING, nullable="0+")
    rebalance_timeout_ms: int = field(INT32, default=-1)
    server_assignor: str | None = field(STRING, nullable="0+")
    classic_member_metadata: ClassicMemberMetadata | None = field(
        ClassicMemberMetadata, nullable="0+", default=None, tag=0
    )


class ConsumerGroupTargetAssignmentMetadataKey(
    Message, api_key=NO_API, versions=(6, 6), flexible_from=None
):
    group_id: str = field(STRING)


class ConsumerGroupTargetAssignmentMetadataValue(
    Message, api_key=NO_API, versions=(0, 0), flexible_from=0
):
    assignment_epoch: int = field(INT32)


class RecordTopicPartitions(Struct):
    topic_id: bytes = field(UUID)
    partitions: list[int] = array(INT32)
    # Only in records of a consumer group's current assignments (KIP-1251).
    assignment_epochs: list[int] | None = array(
        INT32, nullable="0+", default=None, tag=0
    )


class ConsumerGroupTargetAssignmentMemberKey(
    Message, api_key=NO_API, versions=(7, 7), flexible_from=None
):
    group_id: str = field(STRING)
    member_id: str = field(STRING)


class ConsumerGroupTargetAssignmentMemberValue(
    Message, api_key=NO_API, versions=(0, 0), flexible_from=0
):
    topic_partitions: list[RecordTopicPartitions] = array(RecordTopicPartitions)


class ConsumerGroupCurrentMemberAssignmentKey(
    Message, api_key=NO_API, versions=(8, 8), flexible_from=None
):
    group_id: str = field(STRING)
    member_id: str = field(STRING)


class ConsumerGroupCurrentMemberAssignmentValue(
    Message, api_key=NO_API, versions=(0, 0), flexible_from=0
):
    member_epoch: int = field(INT32)
    previous_member_epoch: int = field(INT32)
    state: int = field(INT8)
    assigned_partitions: list[RecordTopicPartitions] = array(RecordTopicPartitions)
    partitions_pending_revocation: list[RecordTopicPartitions] = array(
        RecordTopicPartitions
    )


class ConsumerGroupRegularExpressionKey(
    Message, api_key=NO_API, versions=(16, 16), flexible_from=None
):
    group_id: str = field(STRING)
    regular_expression: str = field(STRING)


class ConsumerGroupRegularExpressionValue(
    Message, api_key=NO_API, versions=(0, 0), flexible_from=0
):
    topics: list[str] = array(STRING)
    version: int = field(INT64)
    timestamp: int = field(INT64)


# -- share groups ----------------------------------------------------------------------


class ShareGroupMemberMetadataKey(
    Message, api_key=NO_API, versions=(10, 10), flexible_from=None
):
    group_id: str = field(STRING)
    member_id: str = field(STRING)


class ShareGroupMemberMetadataValue(
    Message, api_key=NO_API, versions=(0, 0), flexible_from=0
):
    rack_id: str | None = field(STRING, nullable="0+")
    client_id: str = field(STRING)
    client_host: str = field(STRING)
    subscribed_topic_names: list[str] = array(STRING)


class ShareGroupMetadataKey(
    Message, api_key=NO_API, versions=(11, 11), flexible_from=None
):
    group_id: str = field(STRING)


class ShareGroupMetadataValue(
    Message, api_key=NO_API, versions=(0, 0), flexible_from=0
):
    epoch: int = field(INT32)
    metadata_hash: int = field(INT64)


class ShareGroupTargetAssignmentMetadataKey(
    Message, api_key=NO_API, versions=(12, 12), flexible_from=None
):
    group_id: str = field(STRING)


class ShareGroupTargetAssignmentMetadataValue(
    Message, api_key=NO_API, versions=(0, 0), flexible_from=0
):
    assignment_epoch: int = field(INT32)
    assignment_timestamp: int = field(INT64, tag=0, ignorable=True)


class ShareGroupTargetAssignmentMemberKey(
    Message, api_key=NO_API, versions=(13, 13), flexible_from=None
):
    group_id: str = field(STRING)
    member_id: str = field(STRING)


class ShareGroupTargetAssignmentMemberValue(
    Message, api_key=NO_API, versions=(0, 0), flexible_from=0
):
    topic_partitions: list[RecordTopicPartitions] = array(RecordTopicPartitions)


class ShareGroupCurrentMemberAssignmentKey(
    Message, api_key=NO_API, versions=(14, 14), flexible_from=None
):
    group_id: str = field(STRING)
    member_id: str = field(STRING)


class ShareGroupCurrentMemberAssignmentValue(
    Message, api_key=NO_API, versions=(0, 0), flexible_from=0
):
    member_epoch: int = field(INT32)
    previous_member_epoch: int = field(INT32)
    state: int = field(INT8)
    assigned_partitions: list[RecordTopicPartitions] = array(RecordTopicPartitions)


class RecordTopicPartitionsInfo(Struct):
    topic_id: bytes = field(UUID)
    topic_name: str = field(STRING)
    partitions: list[int] = array(INT32)


class RecordTopicInfo(Struct):
    topic_id: bytes = field(UUID)
    topic_name: str = field(STRING)


class ShareGroupStatePartitionMetadataKey(
    Message, api_key=NO_API, versions=(15, 15), flexible_from=None
):
    group_id: str = field(STRING)


class ShareGroupStatePartitionMetadataValue(
    Message, api_key=NO_API, versions=(0, 0), flexible_from=0
):
    initializing_topics: list[RecordTopicPartitionsInfo] = array(
        RecordTopicPartitionsInfo
    )
    initialized_topics: list[RecordTopicPartitionsInfo] = array(
        RecordTopicPartitionsInfo
    )
    deleting_topics: list[RecordTopicInfo] = array(RecordTopicInfo)


# -- bytes -----------------------------------------------------------------------------

KEYS: Final[dict[int, tuple[type[Message], type[Message]]]] = {
    0: (OffsetCommitKey, OffsetCommitValue),
    1: (OffsetCommitKey, OffsetCommitValue),
    2: (GroupMetadataKey, GroupMetadataValue),
    3: (ConsumerGroupMetadataKey, ConsumerGroupMetadataValue),
    5: (ConsumerGroupMemberMetadataKey, ConsumerGroupMemberMetadataValue),
    6: (
        ConsumerGroupTargetAssignmentMetadataKey,
        ConsumerGroupTargetAssignmentMetadataValue,
    ),
    7: (
        ConsumerGroupTargetAssignmentMemberKey,
        ConsumerGroupTargetAssignmentMemberValue,
    ),
    8: (
        ConsumerGroupCurrentMemberAssignmentKey,
        ConsumerGroupCurrentMemberAssignmentValue,
    ),
    10: (ShareGroupMemberMetadataKey, ShareGroupMemberMetadataValue),
    11: (ShareGroupMetadataKey, ShareGroupMetadataValue),
    12: (
        ShareGroupTargetAssignmentMetadataKey,
        ShareGroupTargetAssignmentMetadataValue,
    ),
    13: (
        ShareGroupTargetAssignmentMemberKey,
        ShareGroupTargetAssignmentMemberValue,
    ),
    14: (
        ShareGroupCurrentMemberAssignmentKey,
        ShareGroupCurrentMemberAssignmentValue,
    ),
    15: (
        ShareGroupStatePartitionMetadataKey,
        ShareGroupStatePartitionMetadataValue,
    ),
    16: (ConsumerGroupRegularExpressionKey, ConsumerGroupRegularExpressionValue),
    **STREAMS_KEYS,
}

_OFFSET_KEY: Final = 1
# Kafka 3.x and 4.x write 3. Only version 1 has a time of expiry.
_OFFSET_VALUE: Final = 3
_EXPIRING_OFFSET_VALUE: Final = 1
_GROUP_VALUE: Final = 3

MessageT = TypeVar("MessageT", bound=Message)


def read_record(
    key: Buffer, value: Buffer | None
) -> tuple[Message, Message | None] | None:
    """Decode the key and the value of a record of __consumer_offsets.

    Return None if the kind of the record is unknown here.

    Raises:
        ProtocolError: the bytes do not match their versions.
    """
    if len(key) < _VERSION.size:
        raise ProtocolError(f"a key of {len(key)} bytes has no version")
    (version,) = _VERSION.unpack_from(key)
    known = KEYS.get(version)
    if known is None:
        return None
    read_key = known[0].decode(version, key, _VERSION.size)
    if value is None:
        return read_key, None
    if len(value) < _VERSION.size:
        raise ProtocolError(f"a value of {len(value)} bytes has no version")
    (value_version,) = _VERSION.unpack_from(value)
    return read_key, known[1].decode(value_version, value, _VERSION.size)


def read_offset(
    key: Buffer, value: Buffer | None
) -> tuple[str, str, int, tuple[int, int, str, int, int] | None] | None:
    """Decode the record of a committed offset, as this broker and Kafka 2+ write it.

    This function does not use Message, because that is slower, and nearly all records
    of the log are of this kind. `read_record` decodes all other records.

    Returns:
        Group, topic, partition, and the offset: (offset, leader epoch, metadata, time
        of commit in ms, time of expiry in ms). The offset is None if the record deletes
        it. The whole result is None if this is another kind of record.
    """
    try:
        version, size = _KEY_HEAD.unpack_from(key)
        if version not in (0, _OFFSET_KEY):
            return None
        at = _KEY_HEAD.size + size
        (topic_size,) = _VERSION.unpack_from(key, at)
        topic_end = at + _VERSION.size + topic_size
        if min(size, topic_size) < 0 or len(key) != topic_end + _PARTITION.size:
            return None
        group = str(key[_KEY_HEAD.size : at], "utf-8")
        topic = str(key[at + _VERSION.size : topic_end], "utf-8")
        (partition,) = _PARTITION.unpack_from(key, topic_end)
        if value is None:
            return group, topic, partition, None
        version, offset, epoch, size = _VALUE_HEAD.unpack_from(value)
        end = _VALUE_HEAD.size + size
        if version != _OFFSET_VALUE or size < 0 or len(value) != end + _TIMESTAMP.size:
            return None
        metadata = str(value[_VALUE_HEAD.size : end], "utf-8")
        (timestamp,) = _TIMESTAMP.unpack_from(value, end)
    except (StructError, UnicodeDecodeError):
        return None
    return group, topic, partition, (offset, epoch, metadata, timestamp, -1)


@lru_cache(maxsize=16384)
def offset_key(group: str, topic: str, partition: int) -> bytes:
    """Encode the key of a committed offset's record.

    This function does not use Message, because that is slower, and each commit calls
    it.
    """
    group_bytes, topic_bytes = group.encode(), topic.encode()
    return b"".join(
        (
            _KEY_HEAD.pack(_OFFSET_KEY, len(group_bytes)),
            group_bytes,
            _VERSION.pack(len(topic_bytes)),
            topic_bytes,
            _PARTITION.pack(partition),
        )
    )


def offset_value(
    offset: int,
    leader_epoch: int,
    metadata: str,
    commit_timestamp: int,
    expire_timestamp: int,
) -> bytes:
    """Encode the value of a committed offset's record; times are in ms.

    Like `offset_key` it does not use Message.
    """
    text = metadata.encode()
    if expire_timestamp >= 0:
        head = _EXPIRING_HEAD.pack(_EXPIRING_OFFSET_VALUE, offset, len(text))
        return head + text + _TIMESTAMPS.pack(commit_timestamp, expire_timestamp)
    head = _VALUE_HEAD.pack(_OFFSET_VALUE, offset, leader_epoch, len(text))
    return head + text + _TIMESTAMP.pack(commit_timestamp)


def group_metadata_key(group: str) -> bytes:
    return versioned(GroupMetadataKey(group=group), 2)


def group_metadata_value(value: GroupMetadataValue) -> bytes:
    return versioned(value, _GROUP_VALUE)

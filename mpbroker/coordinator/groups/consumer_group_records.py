"""Encode the state of consumer groups as records, and apply records to the state.

Source: KIP-848; Kafka's GroupCoordinatorRecordHelpers and ConsumerGroup.replay.
"""

from __future__ import annotations

from mpbroker.coordinator.groups.assignors import Partitions
from mpbroker.coordinator.groups.consumer_group import (
    ClassicSide,
    ConsumerGroup,
    ConsumerMember,
    MemberState,
)
from mpbroker.coordinator.groups.group_records import (
    ClassicMemberMetadata,
    ClassicProtocol,
    ConsumerGroupCurrentMemberAssignmentKey,
    ConsumerGroupCurrentMemberAssignmentValue,
    ConsumerGroupMemberMetadataKey,
    ConsumerGroupMemberMetadataValue,
    ConsumerGroupMetadataKey,
    ConsumerGroupMetadataValue,
    ConsumerGroupRegularExpressionKey,
    ConsumerGroupRegularExpressionValue,
    ConsumerGroupTargetAssignmentMemberKey,
    ConsumerGroupTargetAssignmentMemberValue,
    ConsumerGroupTargetAssignmentMetadataKey,
    ConsumerGroupTargetAssignmentMetadataValue,
    RecordTopicPartitions,
)
from mpbroker.coordinator.groups.partition_rows import read_rows, rows_of
from mpbroker.coordinator.versioned import KeyValue, versioned
from mpbroker.protocol.message import Message


def group_epoch_record(
    group_id: str, epoch: int | None, metadata_hash: int = 0
) -> KeyValue:
    key = versioned(ConsumerGroupMetadataKey(group_id=group_id), 3)
    if epoch is None:
        return key, None
    value = ConsumerGroupMetadataValue(epoch=epoch, metadata_hash=metadata_hash)
    return key, versioned(value, 0)


def member_record(
    group_id: str, member_id: str, member: ConsumerMember | None
) -> KeyValue:
    key = versioned(
        ConsumerGroupMemberMetadataKey(group_id=group_id, member_id=member_id), 5
    )
    if member is None:
        return key, None
    value = ConsumerGroupMemberMetadataValue(
        instance_id=member.instance_id,
        rack_id=member.rack_id,
        client_id=member.client_id,
        client_host=member.client_host,
        subscribed_topic_names=list(member.topic_names),
        subscribed_topic_regex=member.topic_regex,
        rebalance_timeout_ms=member.rebalance_timeout_ms,
        server_assignor=member.server_assignor,
    )
    if member.classic is not None:
        value.classic_member_metadata = ClassicMemberMetadata(
            session_timeout_ms=member.classic.session_timeout_ms,
            supported_protocols=[
                ClassicProtocol(name=name, metadata=metadata)
                for name, metadata in member.classic.protocols
            ],
        )
    return key, versioned(value, 0)


def target_epoch_record(group_id: str, epoch: int | None) -> KeyValue:
    key = versioned(ConsumerGroupTargetAssignmentMetadataKey(group_id=group_id), 6)
    if epoch is None:
        return key, None
    value = ConsumerGroupTargetAssignmentMetadataValue(assignment_epoch=epoch)
    return key, versioned(value, 0)


def target_record(group_id: str, member_id: str, target: Partitions | None) -> KeyValue:
    key = versioned(
        ConsumerGroupTargetAssignmentMemberKey(group_id=group_id, member_id=member_id),
        7,
    )
    if target is None:
        return key, None
    value = ConsumerGroupTargetAssignmentMemberValue(topic_partitions=rows_of(target))
    return key, versioned(value, 0)


def current_record(
    group_id: str, member_id: str, member: ConsumerMember | None
) -> KeyValue:
    key = versioned(
        ConsumerGroupCurrentMemberAssignmentKey(group_id=group_id, member_id=member_id),
        8,
    )
    if member is None:
        return key, None
    value = ConsumerGroupCurrentMemberAssignmentValue(
        member_epoch=member.member_epoch,
        previous_member_epoch=member.previous_epoch,
        state=member.state,
        assigned_partitions=_rows_of(member, member.assigned),
        partitions_pending_revocation=_rows_of(member, member.pending_revocation),
    )
    return key, versioned(value, 0)


def _rows_of(
    member: ConsumerMember, partitions: Partitions
) -> list[RecordTopicPartitions]:
    rows = rows_of(partitions)
    for row in rows:
        since = member.assigned_since.get(row.topic_id, {})
        if all(number in since for number in row.partitions):
            row.assignment_epochs = [since[number] for number in row.partitions]
    return rows


def pattern_record(
    group_id: str, pattern: str, topics: frozenset[str] | None, now_ms: int = 0
) -> KeyValue:
    key = versioned(
        ConsumerGroupRegularExpressionKey(
            group_id=group_id, regular_expression=pattern
        ),
        16,
    )
    if topics is None:
        return key, None
    value = ConsumerGroupRegularExpressionValue(
        topics=sorted(topics), version=0, timestamp=now_ms
    )
    return key, versioned(value, 0)


def removal_records(group_id: str, member_id: str) -> list[KeyValue]:
    """Return the tombstones that delete a member, in Kafka's order of writing."""
    return [
        current_record(group_id, member_id, None),
        target_record(group_id, member_id, None),
        member_record(group_id, member_id, None),
    ]


def tombstones(group: ConsumerGroup) -> list[KeyValue]:
    """Return the records that delete a group, its members and its patterns."""
    found: list[KeyValue] = []
    for member_id in group.members:
        found.extend(removal_records(group.group_id, member_id))
    found.extend(
        pattern_record(group.group_id, pattern, None) for pattern in group.patterns
    )
    found.append(target_epoch_record(group.group_id, None))
    found.append(group_epoch_record(group.group_id, None))
    return found


def replay(group: ConsumerGroup, key: Message, value: Message | None) -> None:
    """Apply a record of __consumer_offsets to its group, in the log's order."""
    if isinstance(key, ConsumerGroupMetadataKey):
        if isinstance(value, ConsumerGroupMetadataValue):
            group.group_epoch = value.epoch
            group.metadata_hash = value.metadata_hash
    elif isinstance(key, ConsumerGroupTargetAssignmentMetadataKey):
        if isinstance(value, ConsumerGroupTargetAssignmentMetadataValue):
            group.assignment_epoch = value.assignment_epoch
    elif isinstance(key, ConsumerGroupRegularExpressionKey):
        if isinstance(value, ConsumerGroupRegularExpressionValue):
            group.patterns[key.regular_expression] = frozenset(value.topics)
        else:
            group.patterns.pop(key.regular_expression, None)
    elif isinstance(key, ConsumerGroupMemberMetadataKey):
        if isinstance(value, ConsumerGroupMemberMetadataValue):
            _replay_member(group, key.member_id, value)
        else:
            group.remove(key.member_id)
    elif isinstance(key, ConsumerGroupTargetAssignmentMemberKey):
        if isinstance(value, ConsumerGroupTargetAssignmentMemberValue):
            group.target[key.member_id] = read_rows(value.topic_partitions)
        else:
            group.target.pop(key.member_id, None)
    elif isinstance(key, ConsumerGroupCurrentMemberAssignmentKey):
        _replay_current(group, key.member_id, value)


def _replay_member(
    group: ConsumerGroup, member_id: str, value: ConsumerGroupMemberMetadataValue
) -> None:
    known = group.members.get(member_id)
    member = ConsumerMember(member_id) if known is None else known
    member.instance_id = value.instance_id
    member.rack_id = value.rack_id
    member.client_id = value.client_id
    member.client_host = value.client_host
    member.topic_names = tuple(value.subscribed_topic_names)
    member.topic_regex = value.subscribed_topic_regex
    member.rebalance_timeout_ms = value.rebalance_timeout_ms
    member.server_assignor = value.server_assignor
    classic = value.classic_member_metadata
    member.classic = None
    if classic is not None:
        protocols = [
            (row.name, bytes(row.metadata)) for row in classic.supported_protocols
        ]
        member.classic = ClassicSide(classic.session_timeout_ms, tuple(protocols))
    group.add(member)


def _replay_current(
    group: ConsumerGroup, member_id: str, value: Message | None
) -> None:
    member = group.members.get(member_id)
    if member is None:
        if value is None:
            return
        # Compaction has removed the member's metadata record that was before this one.
        # A later metadata record follows.
        member = ConsumerMember(member_id)
    target = group.target.get(member_id)
    group.remove(member_id)
    member.assigned, member.pending_revocation = {}, {}
    member.assigned_since = {}
    if isinstance(value, ConsumerGroupCurrentMemberAssignmentValue):
        member.member_epoch = value.member_epoch
        member.previous_epoch = value.previous_member_epoch
        member.state = MemberState(value.state)
        member.assigned = read_rows(value.assigned_partitions)
        member.pending_revocation = read_rows(value.partitions_pending_revocation)
        for row in (*value.assigned_partitions, *value.partitions_pending_revocation):
            # Kafka before 4.3 wrote none.
            if len(row.assignment_epochs or ()) == len(row.partitions):
                member.assigned_since.setdefault(row.topic_id, {}).update(
                    zip(row.partitions, row.assignment_epochs or (), strict=True)
                )
        if member.member_epoch >= 0:  # else a static member that is away
            member.keep_epochs()
    group.add(member)
    if target is not None:
        group.target[member_id] = target

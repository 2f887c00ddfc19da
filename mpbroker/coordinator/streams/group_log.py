"""Write a streams group to the log, and apply its records when the log is loaded.

Source: Kafka's StreamsCoordinatorRecordHelpers.
"""

from __future__ import annotations

from mpbroker.coordinator.streams.record_types import (
    STREAMS_KEYS,
    LastAssignmentConfig,
    RecordCurrentTaskIds,
    RecordEndpoint,
    RecordKeyValue,
    RecordTaskIds,
    StreamsGroupCurrentMemberAssignmentKey,
    StreamsGroupCurrentMemberAssignmentValue,
    StreamsGroupMemberMetadataKey,
    StreamsGroupMemberMetadataValue,
    StreamsGroupMetadataKey,
    StreamsGroupMetadataValue,
    StreamsGroupTargetAssignmentMemberKey,
    StreamsGroupTargetAssignmentMemberValue,
    StreamsGroupTargetAssignmentMetadataKey,
    StreamsGroupTargetAssignmentMetadataValue,
    StreamsGroupTopologyKey,
    StreamsGroupTopologyValue,
)
from mpbroker.coordinator.streams.streams_group import (
    ActiveTasks,
    CurrentTasks,
    StreamsGroup,
    StreamsMember,
    StreamsMemberState,
    TargetTasks,
    Tasks,
)
from mpbroker.coordinator.versioned import KeyValue, versioned
from mpbroker.protocol.message import Message

_STREAMS_KEY_TYPES = tuple(key for key, _ in STREAMS_KEYS.values())


# -- encode ----------------------------------------------------------------------------


def epoch_record(group: StreamsGroup) -> KeyValue:
    """Return the record of the group epoch, and of what it rests on."""
    value = StreamsGroupMetadataValue(
        epoch=group.group_epoch,
        metadata_hash=group.metadata_hash,
        validated_topology_epoch=group.validated_topology_epoch,
        last_assignment_configs=[
            LastAssignmentConfig(key=key, value=value)
            for key, value in sorted(group.assignment_configs.items())
        ],
    )
    return _epoch_key(group.group_id), versioned(value, 0)


def _epoch_key(group_id: str) -> bytes:
    return versioned(StreamsGroupMetadataKey(group_id=group_id), 17)


def member_record(
    group_id: str, member_id: str, member: StreamsMember | None
) -> KeyValue:
    """Return the record of a member's metadata, or the tombstone if it is None."""
    key = versioned(
        StreamsGroupMemberMetadataKey(group_id=group_id, member_id=member_id), 19
    )
    if member is None:
        return key, None
    endpoint = member.user_endpoint
    value = StreamsGroupMemberMetadataValue(
        rack_id=member.rack_id,
        client_id=member.client_id,
        client_host=member.client_host,
        rebalance_timeout_ms=member.rebalance_timeout_ms,
        topology_epoch=member.topology_epoch,
        process_id=member.process_id,
        user_endpoint=(
            None
            if endpoint is None
            else RecordEndpoint(host=endpoint[0], port=endpoint[1])
        ),
        client_tags=[
            RecordKeyValue(key=name, value=text) for name, text in member.client_tags
        ],
    )
    return key, versioned(value, 0)


def target_epoch_record(group_id: str, epoch: int | None, now_ms: int = 0) -> KeyValue:
    """Return the record of the target's epoch, or the tombstone if it is None."""
    key = versioned(StreamsGroupTargetAssignmentMetadataKey(group_id=group_id), 20)
    if epoch is None:
        return key, None
    value = StreamsGroupTargetAssignmentMetadataValue(
        assignment_epoch=epoch, assignment_timestamp=now_ms
    )
    return key, versioned(value, 0)


def target_record(
    group_id: str, member_id: str, target: TargetTasks | None
) -> KeyValue:
    """Return the record of a member's target, or the tombstone if it is None."""
    key = versioned(
        StreamsGroupTargetAssignmentMemberKey(group_id=group_id, member_id=member_id),
        21,
    )
    if target is None:
        return key, None
    value = StreamsGroupTargetAssignmentMemberValue(
        active_tasks=_target_rows(target.active),
        standby_tasks=_target_rows(target.standby),
    )
    return key, versioned(value, 0)


def current_record(
    group_id: str, member_id: str, member: StreamsMember | None
) -> KeyValue:
    """Return the record of a member's current tasks, or the tombstone if it is None."""
    key = versioned(
        StreamsGroupCurrentMemberAssignmentKey(group_id=group_id, member_id=member_id),
        22,
    )
    if member is None:
        return key, None
    assigned, pending = member.assigned, member.pending_revocation
    value = StreamsGroupCurrentMemberAssignmentValue(
        member_epoch=member.member_epoch,
        previous_member_epoch=member.previous_epoch,
        state=member.state,
        active_tasks=_active_rows(assigned.active),
        standby_tasks=_standby_rows(assigned.standby),
        active_tasks_pending_revocation=_active_rows(pending.active),
        standby_tasks_pending_revocation=_standby_rows(pending.standby),
    )
    return key, versioned(value, 0)


def topology_record(
    group_id: str, topology: StreamsGroupTopologyValue | None
) -> KeyValue:
    """Return the record of the topology, or the tombstone if it is None."""
    key = versioned(StreamsGroupTopologyKey(group_id=group_id), 23)
    return key, None if topology is None else versioned(topology, 0)


def removal_records(group_id: str, member_id: str) -> list[KeyValue]:
    """Return the tombstones that delete a member, in Kafka's order of writing."""
    return [
        current_record(group_id, member_id, None),
        target_record(group_id, member_id, None),
        member_record(group_id, member_id, None),
    ]


def tombstones(group: StreamsGroup) -> list[KeyValue]:
    """Return the tombstones that delete a group and its members."""
    found: list[KeyValue] = []
    for member_id in group.members:
        found.extend(removal_records(group.group_id, member_id))
    found.append(target_epoch_record(group.group_id, None))
    found.append(topology_record(group.group_id, None))
    found.append((_epoch_key(group.group_id), None))
    return found


def _target_rows(tasks: Tasks) -> list[RecordTaskIds]:
    return [
        RecordTaskIds(subtopology_id=each, partitions=sorted(numbers))
        for each, numbers in sorted(tasks.items())
    ]


def _standby_rows(tasks: Tasks) -> list[RecordCurrentTaskIds]:
    return [
        RecordCurrentTaskIds(subtopology_id=each, partitions=sorted(numbers))
        for each, numbers in sorted(tasks.items())
    ]


def _active_rows(tasks: ActiveTasks) -> list[RecordCurrentTaskIds]:
    return [
        RecordCurrentTaskIds(
            subtopology_id=each,
            partitions=sorted(epochs),
            assignment_epochs=[epochs[number] for number in sorted(epochs)],
        )
        for each, epochs in sorted(tasks.items())
    ]


# -- replay ----------------------------------------------------------------------------


def is_streams_key(key: Message) -> bool:
    """Return whether a record of __consumer_offsets is of a streams group."""
    return isinstance(key, _STREAMS_KEY_TYPES)


def deletes_group(key: Message, value: Message | None) -> bool:
    """Return whether a record of a streams group deletes the group."""
    return isinstance(key, StreamsGroupMetadataKey) and value is None


def replay(group: StreamsGroup, key: Message, value: Message | None) -> None:
    """Apply a record of the log to its group. Records come in the log's order."""
    if isinstance(key, StreamsGroupMetadataKey):
        if isinstance(value, StreamsGroupMetadataValue):
            group.group_epoch = value.epoch
            group.metadata_hash = value.metadata_hash
            group.validated_topology_epoch = value.validated_topology_epoch
            rows = value.last_assignment_configs or ()
            group.assignment_configs = {row.key: row.value for row in rows}
    elif isinstance(key, StreamsGroupTopologyKey):
        if value is None or isinstance(value, StreamsGroupTopologyValue):
            group.set_topology(value)
    elif isinstance(key, StreamsGroupTargetAssignmentMetadataKey):
        if isinstance(value, StreamsGroupTargetAssignmentMetadataValue):
            group.assignment_epoch = value.assignment_epoch
    elif isinstance(key, StreamsGroupMemberMetadataKey):
        if isinstance(value, StreamsGroupMemberMetadataValue):
            _replay_member(group, key.member_id, value)
        else:
            group.remove(key.member_id)
    elif isinstance(key, StreamsGroupTargetAssignmentMemberKey):
        if isinstance(value, StreamsGroupTargetAssignmentMemberValue):
            group.target[key.member_id] = TargetTasks(
                _read_tasks(value.active_tasks), _read_tasks(value.standby_tasks)
            )
        else:
            group.target.pop(key.member_id, None)
    elif isinstance(key, StreamsGroupCurrentMemberAssignmentKey):
        _replay_current(group, key.member_id, value)


def _member(group: StreamsGroup, member_id: str) -> StreamsMember:
    return group.members.setdefault(member_id, StreamsMember(member_id))


def _replay_member(
    group: StreamsGroup, member_id: str, value: StreamsGroupMemberMetadataValue
) -> None:
    member = _member(group, member_id)
    member.rack_id = value.rack_id
    member.client_id = value.client_id
    member.client_host = value.client_host
    member.rebalance_timeout_ms = value.rebalance_timeout_ms
    member.topology_epoch = value.topology_epoch
    member.process_id = value.process_id
    endpoint = value.user_endpoint
    member.user_endpoint = None if endpoint is None else (endpoint.host, endpoint.port)
    member.client_tags = tuple((row.key, row.value) for row in value.client_tags)


def _replay_current(group: StreamsGroup, member_id: str, value: Message | None) -> None:
    if not isinstance(value, StreamsGroupCurrentMemberAssignmentValue):
        if (known := group.members.get(member_id)) is not None:
            known.assigned = known.pending_revocation = CurrentTasks({}, {})
        return
    # Compaction may have removed the metadata record before this one, for a later one.
    member = _member(group, member_id)
    member.member_epoch = epoch = value.member_epoch
    member.previous_epoch = value.previous_member_epoch
    member.state = StreamsMemberState(value.state)
    member.assigned = CurrentTasks(
        _read_active(value.active_tasks, epoch), _read_standby(value.standby_tasks)
    )
    member.pending_revocation = CurrentTasks(
        _read_active(value.active_tasks_pending_revocation, epoch),
        _read_standby(value.standby_tasks_pending_revocation),
    )


def _read_tasks(rows: list[RecordTaskIds]) -> Tasks:
    return {row.subtopology_id: set(row.partitions) for row in rows}


def _read_standby(rows: list[RecordCurrentTaskIds]) -> Tasks:
    return {row.subtopology_id: set(row.partitions) for row in rows}


def _read_active(rows: list[RecordCurrentTaskIds], member_epoch: int) -> ActiveTasks:
    """Return tasks with their epochs; records of Kafka before 4.3 have none."""
    found: ActiveTasks = {}
    for row in rows:
        epochs = row.assignment_epochs
        if epochs is None or len(epochs) != len(row.partitions):
            epochs = [member_epoch] * len(row.partitions)
        found[row.subtopology_id] = dict(zip(row.partitions, epochs, strict=True))
    return found

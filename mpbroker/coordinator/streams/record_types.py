"""Define the records of __consumer_offsets that belong to streams groups.

    key version  record
    17           the group epoch
    19           a member's metadata
    20           the epoch of the target assignment
    21           a member's target assignment
    22           a member's current assignment
    23           the topology of the application

Source: Kafka's group-coordinator/src/main/resources/common/message, field by field.
"""

from __future__ import annotations

from typing import Final

from mpbroker.coordinator.versioned import NO_API
from mpbroker.protocol.fields import (
    INT8,
    INT16,
    INT32,
    INT64,
    STRING,
    UINT16,
    Struct,
    array,
    field,
)
from mpbroker.protocol.message import Message


class StreamsGroupMetadataKey(
    Message, api_key=NO_API, versions=(17, 17), flexible_from=None
):
    group_id: str = field(STRING)


class LastAssignmentConfig(Struct):
    key: str = field(STRING)
    value: str = field(STRING)


class StreamsGroupMetadataValue(
    Message, api_key=NO_API, versions=(0, 0), flexible_from=0
):
    epoch: int = field(INT32)
    metadata_hash: int = field(INT64)
    validated_topology_epoch: int = field(INT32, default=-1, tag=0)
    last_assignment_configs: list[LastAssignmentConfig] | None = array(
        LastAssignmentConfig, nullable="0+", default=None, tag=1
    )


class StreamsGroupMemberMetadataKey(
    Message, api_key=NO_API, versions=(19, 19), flexible_from=None
):
    group_id: str = field(STRING)
    member_id: str = field(STRING)


class RecordEndpoint(Struct):
    host: str = field(STRING)
    port: int = field(UINT16)


class RecordKeyValue(Struct):
    key: str = field(STRING)
    value: str = field(STRING)


class StreamsGroupMemberMetadataValue(
    Message, api_key=NO_API, versions=(0, 0), flexible_from=0
):
    instance_id: str | None = field(STRING, nullable="0+")
    rack_id: str | None = field(STRING, nullable="0+")
    client_id: str = field(STRING)
    client_host: str = field(STRING)
    rebalance_timeout_ms: int = field(INT32, default=-1)
    topology_epoch: int = field(INT32)
    process_id: str = field(STRING)
    user_endpoint: RecordEndpoint | None = field(
        RecordEndpoint, nullable="0+", default=None
    )
    client_tags: list[RecordKeyValue] = array(RecordKeyValue)


class StreamsGroupTargetAssignmentMetadataKey(
    Message, api_key=NO_API, versions=(20, 20), flexible_from=None
):
    group_id: str = field(STRING)


class StreamsGroupTargetAssignmentMetadataValue(
    Message, api_key=NO_API, versions=(0, 0), flexible_from=0
):
    assignment_epoch: int = field(INT32)
    assignment_timestamp: int = field(INT64, tag=0, ignorable=True)


class RecordTaskIds(Struct):
    subtopology_id: str = field(STRING)
    partitions: list[int] = array(INT32)


class StreamsGroupTargetAssignmentMemberKey(
    Message, api_key=NO_API, versions=(21, 21), flexible_from=None
):
    group_id: str = field(STRING)
    member_id: str = field(STRING)


class StreamsGroupTargetAssignmentMemberValue(
    Message, api_key=NO_API, versions=(0, 0), flexible_from=0
):
    active_tasks: list[RecordTaskIds] = array(RecordTaskIds)
    standby_tasks: list[RecordTaskIds] = array(RecordTaskIds)
    warmup_tasks: list[RecordTaskIds] = array(RecordTaskIds)


class RecordCurrentTaskIds(Struct):
    subtopology_id: str = field(STRING)
    partitions: list[int] = array(INT32)
    assignment_epochs: list[int] | None = array(
        INT32, nullable="0+", default=None, tag=0
    )


class StreamsGroupCurrentMemberAssignmentKey(
    Message, api_key=NO_API, versions=(22, 22), flexible_from=None
):
    group_id: str = field(STRING)
    member_id: str = field(STRING)


class StreamsGroupCurrentMemberAssignmentValue(
    Message, api_key=NO_API, versions=(0, 0), flexible_from=0
):
    member_epoch: int = field(INT32)
    previous_member_epoch: int = field(INT32)
    state: int = field(INT8)
    active_tasks: list[RecordCurrentTaskIds] = array(RecordCurrentTaskIds)
    standby_tasks: list[RecordCurrentTaskIds] = array(RecordCurrentTaskIds)
    warmup_tasks: list[RecordCurrentTaskIds] = array(RecordCurrentTaskIds)
    active_tasks_pending_revocation: list[RecordCurrentTaskIds] = array(
        RecordCurrentTaskIds
    )
    standby_tasks_pending_revocation: list[RecordCurrentTaskIds] = array(
        RecordCurrentTaskIds
    )
    warmup_tasks_pending_revocation: list[RecordCurrentTaskIds] = array(
        RecordCurrentTaskIds
    )


class StreamsGroupTopologyKey(
    Message, api_key=NO_API, versions=(23, 23), flexible_from=None
):
    group_id: str = field(STRING)


class RecordTopicInfo(Struct):
    name: str = field(STRING)
    partitions: int = field(INT32)
    replication_factor: int = field(INT16)
    topic_configs: list[RecordKeyValue] = array(RecordKeyValue)


class RecordCopartitionGroup(Struct):
    source_topics: list[int] = array(INT16)
    source_topic_regex: list[int] = array(INT16)
    repartition_source_topics: list[int] = array(INT16)


class RecordSubtopology(Struct):
    subtopology_id: str = field(STRING)
    source_topics: list[str] = array(STRING)
    source_topic_regex: list[str] = array(STRING)
    state_changelog_topics: list[RecordTopicInfo] = array(RecordTopicInfo)
    repartition_sink_topics: list[str] = array(STRING)
    repartition_source_topics: list[RecordTopicInfo] = array(RecordTopicInfo)
    copartition_groups: list[RecordCopartitionGroup] = array(RecordCopartitionGroup)


class StreamsGroupTopologyValue(
    Message, api_key=NO_API, versions=(0, 0), flexible_from=0
):
    epoch: int = field(INT32)
    subtopologies: list[RecordSubtopology] = array(RecordSubtopology)


STREAMS_KEYS: Final[dict[int, tuple[type[Message], type[Message]]]] = {
    17: (StreamsGroupMetadataKey, StreamsGroupMetadataValue),
    19: (StreamsGroupMemberMetadataKey, StreamsGroupMemberMetadataValue),
    20: (
        StreamsGroupTargetAssignmentMetadataKey,
        StreamsGroupTargetAssignmentMetadataValue,
    ),
    21: (
        StreamsGroupTargetAssignmentMemberKey,
        StreamsGroupTargetAssignmentMemberValue,
    ),
    22: (
        StreamsGroupCurrentMemberAssignmentKey,
        StreamsGroupCurrentMemberAssignmentValue,
    ),
    23: (StreamsGroupTopologyKey, StreamsGroupTopologyValue),
}

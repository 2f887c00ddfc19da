"""StreamsGroupDescribe: describe streams groups, their topologies and their members.

Source: Kafka protocol guide, "StreamsGroupDescribe"; KIP-1071.
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import (
    BOOLEAN,
    INT16,
    INT32,
    INT64,
    STRING,
    UINT16,
    Struct,
    array,
    field,
)
from mpbroker.protocol.message import MAX_REQUEST_NAMES, Message


class StreamsGroupDescribeRequest(
    Message,
    api_key=ApiKey.STREAMS_GROUP_DESCRIBE,
    versions=(0, 0),
    flexible_from=0,
    max_elements=MAX_REQUEST_NAMES,
):
    group_ids: list[str] = array(STRING)
    include_authorized_operations: bool = field(BOOLEAN)


class Endpoint(Struct):
    host: str = field(STRING)
    port: int = field(UINT16)


class TaskOffset(Struct):
    subtopology_id: str = field(STRING)
    partition: int = field(INT32)
    offset: int = field(INT64)


class TaskIds(Struct):
    subtopology_id: str = field(STRING)
    partitions: list[int] = array(INT32)


class Assignment(Struct):
    active_tasks: list[TaskIds] = array(TaskIds)
    standby_tasks: list[TaskIds] = array(TaskIds)
    warmup_tasks: list[TaskIds] = array(TaskIds)


class KeyValue(Struct):
    key: str = field(STRING)
    value: str = field(STRING)


class TopicInfo(Struct):
    name: str = field(STRING)
    partitions: int = field(INT32)
    replication_factor: int = field(INT16)
    topic_configs: list[KeyValue] = array(KeyValue)


class Subtopology(Struct):
    subtopology_id: str = field(STRING)
    source_topics: list[str] = array(STRING)
    repartition_sink_topics: list[str] = array(STRING)
    state_changelog_topics: list[TopicInfo] = array(TopicInfo)
    repartition_source_topics: list[TopicInfo] = array(TopicInfo)


class Topology(Struct):
    epoch: int = field(INT32)
    subtopologies: list[Subtopology] | None = array(
        Subtopology, nullable="0+", default=None
    )


class Member(Struct):
    member_id: str = field(STRING)
    member_epoch: int = field(INT32)
    instance_id: str | None = field(STRING, nullable="0+", default=None)
    rack_id: str | None = field(STRING, nullable="0+", default=None)
    client_id: str = field(STRING)
    client_host: str = field(STRING)
    topology_epoch: int = field(INT32)
    process_id: str = field(STRING)
    user_endpoint: Endpoint | None = field(Endpoint, nullable="0+", default=None)
    client_tags: list[KeyValue] = array(KeyValue)
    task_offsets: list[TaskOffset] = array(TaskOffset)
    task_end_offsets: list[TaskOffset] = array(TaskOffset)
    assignment: Assignment = field(Assignment)
    target_assignment: Assignment = field(Assignment)
    is_classic: bool = field(BOOLEAN)


class DescribedGroup(Struct):
    error_code: int = field(INT16)
    error_message: str | None = field(STRING, nullable="0+", default=None)
    group_id: str = field(STRING)
    group_state: str = field(STRING)
    group_epoch: int = field(INT32)
    assignment_epoch: int = field(INT32)
    topology: Topology | None = field(Topology, nullable="0+", default=None)
    members: list[Member] = array(Member)
    authorized_operations: int = field(INT32, default=-2147483648)


class StreamsGroupDescribeResponse(
    Message, api_key=ApiKey.STREAMS_GROUP_DESCRIBE, versions=(0, 0), flexible_from=0
):
    throttle_time_ms: int = field(INT32)
    groups: list[DescribedGroup] = array(DescribedGroup)

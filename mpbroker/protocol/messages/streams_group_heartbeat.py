"""StreamsGroupHeartbeat: a Kafka Streams client joins a group, stays, or leaves it.

A field that is null has not changed since the member's last heartbeat. With the member
epoch 0 a member joins and sends its topology, with -1 it leaves.

Source: Kafka protocol guide, "StreamsGroupHeartbeat"; KIP-1071.
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import (
    BOOLEAN,
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


class KeyValue(Struct):
    key: str = field(STRING)
    value: str = field(STRING)


class TopicInfo(Struct):
    name: str = field(STRING)
    partitions: int = field(INT32)
    replication_factor: int = field(INT16)
    topic_configs: list[KeyValue] = array(KeyValue)


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


class CopartitionGroup(Struct):
    source_topics: list[int] = array(INT16)
    source_topic_regex: list[int] = array(INT16)
    repartition_source_topics: list[int] = array(INT16)


class Subtopology(Struct):
    subtopology_id: str = field(STRING)
    source_topics: list[str] = array(STRING)
    source_topic_regex: list[str] = array(STRING)
    state_changelog_topics: list[TopicInfo] = array(TopicInfo)
    repartition_sink_topics: list[str] = array(STRING)
    repartition_source_topics: list[TopicInfo] = array(TopicInfo)
    copartition_groups: list[CopartitionGroup] = array(CopartitionGroup)


class Topology(Struct):
    epoch: int = field(INT32)
    subtopologies: list[Subtopology] = array(Subtopology)


class StreamsGroupHeartbeatRequest(
    Message, api_key=ApiKey.STREAMS_GROUP_HEARTBEAT, versions=(0, 0), flexible_from=0
):
    group_id: str = field(STRING)
    member_id: str = field(STRING)
    member_epoch: int = field(INT32)
    endpoint_information_epoch: int = field(INT32)
    instance_id: str | None = field(STRING, nullable="0+", default=None)
    rack_id: str | None = field(STRING, nullable="0+", default=None)
    rebalance_timeout_ms: int = field(INT32, default=-1)
    topology: Topology | None = field(Topology, nullable="0+", default=None)
    active_tasks: list[TaskIds] | None = array(TaskIds, nullable="0+", default=None)
    standby_tasks: list[TaskIds] | None = array(TaskIds, nullable="0+", default=None)
    warmup_tasks: list[TaskIds] | None = array(TaskIds, nullable="0+", default=None)
    process_id: str | None = field(STRING, nullable="0+", default=None)
    user_endpoint: Endpoint | None = field(Endpoint, nullable="0+", default=None)
    client_tags: list[KeyValue] | None = array(KeyValue, nullable="0+", default=None)
    task_offsets: list[TaskOffset] | None = array(
        TaskOffset, nullable="0+", default=None
    )
    task_end_offsets: list[TaskOffset] | None = array(
        TaskOffset, nullable="0+", default=None
    )
    shutdown_application: bool = field(BOOLEAN)


class Status(Struct):
    status_code: int = field(INT8)
    status_detail: str = field(STRING)


class TopicPartition(Struct):
    topic: str = field(STRING)
    partitions: list[int] = array(INT32)


class EndpointToPartitions(Struct):
    user_endpoint: Endpoint = field(Endpoint)
    active_partitions: list[TopicPartition] = array(TopicPartition)
    standby_partitions: list[TopicPartition] = array(TopicPartition)


class StreamsGroupHeartbeatResponse(
    Message, api_key=ApiKey.STREAMS_GROUP_HEARTBEAT, versions=(0, 0), flexible_from=0
):
    throttle_time_ms: int = field(INT32)
    error_code: int = field(INT16)
    error_message: str | None = field(STRING, nullable="0+", default=None)
    member_id: str = field(STRING)
    member_epoch: int = field(INT32)
    heartbeat_interval_ms: int = field(INT32)
    acceptable_recovery_lag: int = field(INT32)
    task_offset_interval_ms: int = field(INT32)
    status: list[Status] | None = array(Status, nullable="0+", default=None)
    active_tasks: list[TaskIds] | None = array(TaskIds, nullable="0+", default=None)
    standby_tasks: list[TaskIds] | None = array(TaskIds, nullable="0+", default=None)
    warmup_tasks: list[TaskIds] | None = array(TaskIds, nullable="0+", default=None)
    endpoint_information_epoch: int = field(INT32)
    partitions_by_user_endpoint: list[EndpointToPartitions] | None = array(
        EndpointToPartitions, nullable="0+", default=None
    )

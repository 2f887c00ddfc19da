"""DescribeTopicPartitions: topics and partitions, page by page.

Source: Kafka protocol guide, "DescribeTopicPartitions"; KIP-966.
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import (
    BOOLEAN,
    INT16,
    INT32,
    STRING,
    UUID,
    Struct,
    array,
    field,
)
from mpbroker.protocol.message import Message


class TopicRequest(Struct):
    name: str = field(STRING)


class Cursor(Struct):
    topic_name: str = field(STRING)
    partition_index: int = field(INT32)


class DescribeTopicPartitionsRequest(
    Message, api_key=ApiKey.DESCRIBE_TOPIC_PARTITIONS, versions=(0, 0), flexible_from=0
):
    topics: list[TopicRequest] = array(TopicRequest)
    response_partition_limit: int = field(INT32, default=2000)
    cursor: Cursor | None = field(Cursor, nullable="0+", default=None)


class DescribeTopicPartitionsResponsePartition(Struct):
    error_code: int = field(INT16)
    partition_index: int = field(INT32)
    leader_id: int = field(INT32)
    leader_epoch: int = field(INT32, default=-1)
    replica_nodes: list[int] = array(INT32)
    isr_nodes: list[int] = array(INT32)
    eligible_leader_replicas: list[int] | None = array(
        INT32, nullable="0+", default=None
    )
    last_known_elr: list[int] | None = array(INT32, nullable="0+", default=None)
    offline_replicas: list[int] = array(INT32)


class DescribeTopicPartitionsResponseTopic(Struct):
    error_code: int = field(INT16)
    name: str | None = field(STRING, nullable="0+")
    topic_id: bytes = field(UUID)
    is_internal: bool = field(BOOLEAN)
    partitions: list[DescribeTopicPartitionsResponsePartition] = array(
        DescribeTopicPartitionsResponsePartition
    )
    topic_authorized_operations: int = field(INT32, default=-2147483648)


class DescribeTopicPartitionsResponse(
    Message, api_key=ApiKey.DESCRIBE_TOPIC_PARTITIONS, versions=(0, 0), flexible_from=0
):
    throttle_time_ms: int = field(INT32)
    topics: list[DescribeTopicPartitionsResponseTopic] = array(
        DescribeTopicPartitionsResponseTopic
    )
    next_cursor: Cursor | None = field(Cursor, nullable="0+", default=None)

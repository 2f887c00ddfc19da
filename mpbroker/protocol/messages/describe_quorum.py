"""DescribeQuorum: the voters of the metadata log, and the log end offset of each.

Version 1 added times (KIP-836); version 2 directory ids, nodes and error messages
(KIP-853).

Source: Kafka protocol guide, "DescribeQuorum".
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import (
    INT16,
    INT32,
    INT64,
    STRING,
    UINT16,
    UUID,
    Struct,
    array,
    field,
)
from mpbroker.protocol.message import Message


class PartitionData(Struct):
    partition_index: int = field(INT32)


class TopicData(Struct):
    topic_name: str = field(STRING)
    partitions: list[PartitionData] = array(PartitionData)


class DescribeQuorumRequest(
    Message, api_key=ApiKey.DESCRIBE_QUORUM, versions=(0, 2), flexible_from=0
):
    topics: list[TopicData] = array(TopicData)


class ReplicaState(Struct):
    replica_id: int = field(INT32)
    replica_directory_id: bytes = field(UUID, "2+")
    log_end_offset: int = field(INT64)
    last_fetch_timestamp: int = field(INT64, "1+", default=-1, ignorable=True)
    last_caught_up_timestamp: int = field(INT64, "1+", default=-1, ignorable=True)


class DescribedPartition(Struct):
    partition_index: int = field(INT32)
    error_code: int = field(INT16)
    error_message: str | None = field(STRING, "2+", nullable="2+", ignorable=True)
    leader_id: int = field(INT32)
    leader_epoch: int = field(INT32)
    high_watermark: int = field(INT64)
    current_voters: list[ReplicaState] = array(ReplicaState)
    observers: list[ReplicaState] = array(ReplicaState)


class DescribedTopic(Struct):
    topic_name: str = field(STRING)
    partitions: list[DescribedPartition] = array(DescribedPartition)


class Listener(Struct):
    name: str = field(STRING, "2+")
    host: str = field(STRING, "2+")
    port: int = field(UINT16, "2+")


class Node(Struct):
    node_id: int = field(INT32, "2+")
    listeners: list[Listener] = array(Listener, "2+")


class DescribeQuorumResponse(
    Message, api_key=ApiKey.DESCRIBE_QUORUM, versions=(0, 2), flexible_from=0
):
    error_code: int = field(INT16)
    error_message: str | None = field(STRING, "2+", nullable="2+", ignorable=True)
    topics: list[DescribedTopic] = array(DescribedTopic)
    nodes: list[Node] = array(Node, "2+")

"""AlterPartitionReassignments: move partitions to other brokers, or stop a move.

Null replicas stop a move. From version 1 a request may forbid that the number of
replicas changes.

Source: Kafka protocol guide, "AlterPartitionReassignments".
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import BOOLEAN, INT16, INT32, STRING, Struct, array, field
from mpbroker.protocol.message import Message


class ReassignablePartition(Struct):
    partition_index: int = field(INT32)
    replicas: list[int] | None = array(INT32, nullable="0+", default=None)


class ReassignableTopic(Struct):
    name: str = field(STRING)
    partitions: list[ReassignablePartition] = array(ReassignablePartition)


class AlterPartitionReassignmentsRequest(
    Message,
    api_key=ApiKey.ALTER_PARTITION_REASSIGNMENTS,
    versions=(0, 1),
    flexible_from=0,
):
    timeout_ms: int = field(INT32, default=60000)
    allow_replication_factor_change: bool = field(BOOLEAN, "1+", default=True)
    topics: list[ReassignableTopic] = array(ReassignableTopic)


class ReassignablePartitionResponse(Struct):
    partition_index: int = field(INT32)
    error_code: int = field(INT16)
    error_message: str | None = field(STRING, nullable="0+")


class ReassignableTopicResponse(Struct):
    name: str = field(STRING)
    partitions: list[ReassignablePartitionResponse] = array(
        ReassignablePartitionResponse
    )


class AlterPartitionReassignmentsResponse(
    Message,
    api_key=ApiKey.ALTER_PARTITION_REASSIGNMENTS,
    versions=(0, 1),
    flexible_from=0,
):
    throttle_time_ms: int = field(INT32)
    allow_replication_factor_change: bool = field(
        BOOLEAN, "1+", default=True, ignorable=True
    )
    error_code: int = field(INT16)
    error_message: str | None = field(STRING, nullable="0+")
    responses: list[ReassignableTopicResponse] = array(ReassignableTopicResponse)

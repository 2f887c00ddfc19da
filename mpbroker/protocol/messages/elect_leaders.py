"""ElectLeaders: elect preferred or unclean leaders.

If the partitions are null, leaders of all partitions are elected.

Source: Kafka protocol guide, "ElectLeaders".
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import INT8, INT16, INT32, STRING, Struct, array, field
from mpbroker.protocol.message import Message


class TopicPartitions(Struct):
    topic: str = field(STRING)
    partitions: list[int] = array(INT32)


class ElectLeadersRequest(
    Message, api_key=ApiKey.ELECT_LEADERS, versions=(0, 2), flexible_from=2
):
    election_type: int = field(INT8, "1+")
    topic_partitions: list[TopicPartitions] | None = array(
        TopicPartitions, nullable="0+"
    )
    timeout_ms: int = field(INT32, default=60000)


class PartitionResult(Struct):
    partition_id: int = field(INT32)
    error_code: int = field(INT16)
    error_message: str | None = field(STRING, nullable="0+")


class ReplicaElectionResult(Struct):
    topic: str = field(STRING)
    partition_result: list[PartitionResult] = array(PartitionResult)


class ElectLeadersResponse(
    Message, api_key=ApiKey.ELECT_LEADERS, versions=(0, 2), flexible_from=2
):
    throttle_time_ms: int = field(INT32)
    error_code: int = field(INT16, "1+")
    replica_election_results: list[ReplicaElectionResult] = array(ReplicaElectionResult)

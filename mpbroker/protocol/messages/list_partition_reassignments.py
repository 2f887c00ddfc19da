"""ListPartitionReassignments: list the reassignments of partitions in progress.

If the topics are null, the reassignments of all topics are listed.

Source: Kafka protocol guide, "ListPartitionReassignments".
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import INT16, INT32, STRING, Struct, array, field
from mpbroker.protocol.message import Message


class ListPartitionReassignmentsTopics(Struct):
    name: str = field(STRING)
    partition_indexes: list[int] = array(INT32)


class ListPartitionReassignmentsRequest(
    Message,
    api_key=ApiKey.LIST_PARTITION_REASSIGNMENTS,
    versions=(0, 0),
    flexible_from=0,
):
    timeout_ms: int = field(INT32, default=60000)
    topics: list[ListPartitionReassignmentsTopics] | None = array(
        ListPartitionReassignmentsTopics, nullable="0+", default=None
    )


class OngoingPartitionReassignment(Struct):
    partition_index: int = field(INT32)
    replicas: list[int] = array(INT32)
    adding_replicas: list[int] = array(INT32)
    removing_replicas: list[int] = array(INT32)


class OngoingTopicReassignment(Struct):
    name: str = field(STRING)
    partitions: list[OngoingPartitionReassignment] = array(OngoingPartitionReassignment)


class ListPartitionReassignmentsResponse(
    Message,
    api_key=ApiKey.LIST_PARTITION_REASSIGNMENTS,
    versions=(0, 0),
    flexible_from=0,
):
    throttle_time_ms: int = field(INT32)
    error_code: int = field(INT16)
    error_message: str | None = field(STRING, nullable="0+")
    topics: list[OngoingTopicReassignment] = array(OngoingTopicReassignment)

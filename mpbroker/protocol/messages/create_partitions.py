"""CreatePartitions: raise the number of partitions of topics.

Source: Kafka protocol guide, "CreatePartitions".
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import BOOLEAN, INT16, INT32, STRING, Struct, array, field
from mpbroker.protocol.message import Message


class CreatePartitionsAssignment(Struct):
    broker_ids: list[int] = array(INT32)


class CreatePartitionsTopic(Struct):
    name: str = field(STRING)
    count: int = field(INT32)
    assignments: list[CreatePartitionsAssignment] | None = array(
        CreatePartitionsAssignment, nullable="0+"
    )


class CreatePartitionsRequest(
    Message, api_key=ApiKey.CREATE_PARTITIONS, versions=(0, 3), flexible_from=2
):
    topics: list[CreatePartitionsTopic] = array(CreatePartitionsTopic)
    timeout_ms: int = field(INT32)
    validate_only: bool = field(BOOLEAN)


class CreatePartitionsTopicResult(Struct):
    name: str = field(STRING)
    error_code: int = field(INT16)
    error_message: str | None = field(STRING, nullable="0+", default=None)


class CreatePartitionsResponse(
    Message, api_key=ApiKey.CREATE_PARTITIONS, versions=(0, 3), flexible_from=2
):
    throttle_time_ms: int = field(INT32)
    results: list[CreatePartitionsTopicResult] = array(CreatePartitionsTopicResult)

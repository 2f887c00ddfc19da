"""DescribeProducers: the active producers of partitions.

Source: Kafka protocol guide, "DescribeProducers".
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import INT16, INT32, INT64, STRING, Struct, array, field
from mpbroker.protocol.message import Message


class TopicRequest(Struct):
    name: str = field(STRING)
    partition_indexes: list[int] = array(INT32)


class DescribeProducersRequest(
    Message, api_key=ApiKey.DESCRIBE_PRODUCERS, versions=(0, 0), flexible_from=0
):
    topics: list[TopicRequest] = array(TopicRequest)


class ProducerState(Struct):
    producer_id: int = field(INT64)
    producer_epoch: int = field(INT32)
    last_sequence: int = field(INT32, default=-1)
    last_timestamp: int = field(INT64, default=-1)
    coordinator_epoch: int = field(INT32)
    current_txn_start_offset: int = field(INT64, default=-1)


class PartitionResponse(Struct):
    partition_index: int = field(INT32)
    error_code: int = field(INT16)
    error_message: str | None = field(STRING, nullable="0+", default=None)
    active_producers: list[ProducerState] = array(ProducerState)


class TopicResponse(Struct):
    name: str = field(STRING)
    partitions: list[PartitionResponse] = array(PartitionResponse)


class DescribeProducersResponse(
    Message, api_key=ApiKey.DESCRIBE_PRODUCERS, versions=(0, 0), flexible_from=0
):
    throttle_time_ms: int = field(INT32)
    topics: list[TopicResponse] = array(TopicResponse)

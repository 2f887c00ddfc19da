"""ReadShareGroupState: read the state of share-partitions.

Source: Kafka protocol guide, "ReadShareGroupState"; KIP-932.
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import (
    INT8,
    INT16,
    INT32,
    INT64,
    STRING,
    UUID,
    Struct,
    array,
    field,
)
from mpbroker.protocol.message import Message


class PartitionData(Struct):
    partition: int = field(INT32)
    leader_epoch: int = field(INT32)


class ReadStateData(Struct):
    topic_id: bytes = field(UUID)
    partitions: list[PartitionData] = array(PartitionData)


class ReadShareGroupStateRequest(
    Message, api_key=ApiKey.READ_SHARE_GROUP_STATE, versions=(0, 0), flexible_from=0
):
    group_id: str = field(STRING)
    topics: list[ReadStateData] = array(ReadStateData)


class StateBatch(Struct):
    first_offset: int = field(INT64)
    last_offset: int = field(INT64)
    delivery_state: int = field(INT8)
    delivery_count: int = field(INT16)


class PartitionResult(Struct):
    partition: int = field(INT32)
    error_code: int = field(INT16)
    error_message: str | None = field(STRING, nullable="0+", default=None)
    state_epoch: int = field(INT32)
    start_offset: int = field(INT64)
    state_batches: list[StateBatch] = array(StateBatch)


class ReadStateResult(Struct):
    topic_id: bytes = field(UUID)
    partitions: list[PartitionResult] = array(PartitionResult)


class ReadShareGroupStateResponse(
    Message, api_key=ApiKey.READ_SHARE_GROUP_STATE, versions=(0, 0), flexible_from=0
):
    results: list[ReadStateResult] = array(ReadStateResult)

"""WriteShareGroupState: write the state of share-partitions.

Source: Kafka protocol guide, "WriteShareGroupState"; KIP-932.
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


class StateBatch(Struct):
    first_offset: int = field(INT64)
    last_offset: int = field(INT64)
    delivery_state: int = field(INT8)
    delivery_count: int = field(INT16)


class PartitionData(Struct):
    partition: int = field(INT32)
    state_epoch: int = field(INT32)
    leader_epoch: int = field(INT32)
    start_offset: int = field(INT64)
    delivery_complete_count: int = field(INT32, "1+", default=-1, ignorable=True)
    state_batches: list[StateBatch] = array(StateBatch)


class WriteStateData(Struct):
    topic_id: bytes = field(UUID)
    partitions: list[PartitionData] = array(PartitionData)


class WriteShareGroupStateRequest(
    Message, api_key=ApiKey.WRITE_SHARE_GROUP_STATE, versions=(0, 1), flexible_from=0
):
    group_id: str = field(STRING)
    topics: list[WriteStateData] = array(WriteStateData)


class PartitionResult(Struct):
    partition: int = field(INT32)
    error_code: int = field(INT16)
    error_message: str | None = field(STRING, nullable="0+", default=None)


class WriteStateResult(Struct):
    topic_id: bytes = field(UUID)
    partitions: list[PartitionResult] = array(PartitionResult)


class WriteShareGroupStateResponse(
    Message, api_key=ApiKey.WRITE_SHARE_GROUP_STATE, versions=(0, 1), flexible_from=0
):
    results: list[WriteStateResult] = array(WriteStateResult)

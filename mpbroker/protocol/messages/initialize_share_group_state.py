"""InitializeShareGroupState: initialize the state of share-partitions.

Source: Kafka protocol guide, "InitializeShareGroupState"; KIP-932.
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import (
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
    state_epoch: int = field(INT32)
    start_offset: int = field(INT64)


class InitializeStateData(Struct):
    topic_id: bytes = field(UUID)
    partitions: list[PartitionData] = array(PartitionData)


class InitializeShareGroupStateRequest(
    Message,
    api_key=ApiKey.INITIALIZE_SHARE_GROUP_STATE,
    versions=(0, 0),
    flexible_from=0,
):
    group_id: str = field(STRING)
    topics: list[InitializeStateData] = array(InitializeStateData)


class PartitionResult(Struct):
    partition: int = field(INT32)
    error_code: int = field(INT16)
    error_message: str | None = field(STRING, nullable="0+", default=None)


class InitializeStateResult(Struct):
    topic_id: bytes = field(UUID)
    partitions: list[PartitionResult] = array(PartitionResult)


class InitializeShareGroupStateResponse(
    Message,
    api_key=ApiKey.INITIALIZE_SHARE_GROUP_STATE,
    versions=(0, 0),
    flexible_from=0,
):
    results: list[InitializeStateResult] = array(InitializeStateResult)

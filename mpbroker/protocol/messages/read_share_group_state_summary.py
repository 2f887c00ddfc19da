"""ReadShareGroupStateSummary: read the start offsets of share-partitions.

Source: Kafka protocol guide, "ReadShareGroupStateSummary"; KIP-932.
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
    leader_epoch: int = field(INT32)


class ReadStateSummaryData(Struct):
    topic_id: bytes = field(UUID)
    partitions: list[PartitionData] = array(PartitionData)


class ReadShareGroupStateSummaryRequest(
    Message,
    api_key=ApiKey.READ_SHARE_GROUP_STATE_SUMMARY,
    versions=(0, 1),
    flexible_from=0,
):
    group_id: str = field(STRING)
    topics: list[ReadStateSummaryData] = array(ReadStateSummaryData)


class PartitionResult(Struct):
    partition: int = field(INT32)
    error_code: int = field(INT16)
    error_message: str | None = field(STRING, nullable="0+", default=None)
    state_epoch: int = field(INT32)
    leader_epoch: int = field(INT32)
    start_offset: int = field(INT64)
    delivery_complete_count: int = field(INT32, "1+", default=-1, ignorable=True)


class ReadStateSummaryResult(Struct):
    topic_id: bytes = field(UUID)
    partitions: list[PartitionResult] = array(PartitionResult)


class ReadShareGroupStateSummaryResponse(
    Message,
    api_key=ApiKey.READ_SHARE_GROUP_STATE_SUMMARY,
    versions=(0, 1),
    flexible_from=0,
):
    results: list[ReadStateSummaryResult] = array(ReadStateSummaryResult)

"""DeleteRecords: delete the records of partitions below an offset.

The offset -1 stands for the high watermark.

Source: Kafka protocol guide, "DeleteRecords".
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import INT16, INT32, INT64, STRING, Struct, array, field
from mpbroker.protocol.message import Message


class DeleteRecordsPartition(Struct):
    partition_index: int = field(INT32)
    offset: int = field(INT64)


class DeleteRecordsTopic(Struct):
    name: str = field(STRING)
    partitions: list[DeleteRecordsPartition] = array(DeleteRecordsPartition)


class DeleteRecordsRequest(
    Message, api_key=ApiKey.DELETE_RECORDS, versions=(0, 2), flexible_from=2
):
    topics: list[DeleteRecordsTopic] = array(DeleteRecordsTopic)
    timeout_ms: int = field(INT32)


class DeleteRecordsPartitionResult(Struct):
    partition_index: int = field(INT32)
    low_watermark: int = field(INT64)
    error_code: int = field(INT16)


class DeleteRecordsTopicResult(Struct):
    name: str = field(STRING)
    partitions: list[DeleteRecordsPartitionResult] = array(DeleteRecordsPartitionResult)


class DeleteRecordsResponse(
    Message, api_key=ApiKey.DELETE_RECORDS, versions=(0, 2), flexible_from=2
):
    throttle_time_ms: int = field(INT32)
    topics: list[DeleteRecordsTopicResult] = array(DeleteRecordsTopicResult)

"""WriteTxnMarkers: append the markers that end transactions in partitions.

Brokers and admin tools send it.

Source: Kafka protocol guide, "WriteTxnMarkers"; KIP-664, KIP-1228.
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import (
    BOOLEAN,
    INT8,
    INT16,
    INT32,
    INT64,
    STRING,
    Struct,
    array,
    field,
)
from mpbroker.protocol.message import Message


class WritableTxnMarkerTopic(Struct):
    name: str = field(STRING)
    partition_indexes: list[int] = array(INT32)


class WritableTxnMarker(Struct):
    producer_id: int = field(INT64)
    producer_epoch: int = field(INT16)
    transaction_result: bool = field(BOOLEAN)
    topics: list[WritableTxnMarkerTopic] = array(WritableTxnMarkerTopic)
    coordinator_epoch: int = field(INT32)
    transaction_version: int = field(INT8, "2+", ignorable=True)


class WriteTxnMarkersRequest(
    Message, api_key=ApiKey.WRITE_TXN_MARKERS, versions=(1, 2), flexible_from=1
):
    markers: list[WritableTxnMarker] = array(WritableTxnMarker)


class WritableTxnMarkerPartitionResult(Struct):
    partition_index: int = field(INT32)
    error_code: int = field(INT16)


class WritableTxnMarkerTopicResult(Struct):
    name: str = field(STRING)
    partitions: list[WritableTxnMarkerPartitionResult] = array(
        WritableTxnMarkerPartitionResult
    )


class WritableTxnMarkerResult(Struct):
    producer_id: int = field(INT64)
    topics: list[WritableTxnMarkerTopicResult] = array(WritableTxnMarkerTopicResult)


class WriteTxnMarkersResponse(
    Message, api_key=ApiKey.WRITE_TXN_MARKERS, versions=(1, 2), flexible_from=1
):
    markers: list[WritableTxnMarkerResult] = array(WritableTxnMarkerResult)

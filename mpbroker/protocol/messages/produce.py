"""Produce: append record batches to partitions.

From version 13 topics are named by id. Versions below 3 have older record formats and
cannot be read; ApiVersions lists them nevertheless, because librdkafka needs that.

Source: Kafka protocol guide, "Produce"; KIP-951 for the current leader of a partition.
"""

from __future__ import annotations

from typing import Final

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import (
    INT16,
    INT32,
    INT64,
    RECORDS,
    STRING,
    UUID,
    Struct,
    array,
    field,
)
from mpbroker.protocol.message import Message
from mpbroker.protocol.primitives import Buffer

# Far above the tags that Kafka has assigned, which begin at 0.
SOURCE_TAG: Final = 10_000


class PartitionProduceData(Struct):
    index: int = field(INT32)
    records: Buffer | None = field(RECORDS, nullable="0+")
    # These two are not fields of Kafka. If source_offset is 0 or more, the records are
    # copies from another cluster and keep their offsets: they are all records that the
    # partition there has from source_offset on. source_log_start_offset is the log
    # start offset there. -1: the records are ordinary ones, and get offsets here.
    source_offset: int = field(INT64, "9+", tag=SOURCE_TAG, default=-1)
    source_log_start_offset: int = field(INT64, "9+", tag=SOURCE_TAG + 1, default=-1)


class TopicProduceData(Struct):
    name: str = field(STRING, "3-12", ignorable=True)
    topic_id: bytes = field(UUID, "13+", ignorable=True)
    partition_data: list[PartitionProduceData] = array(PartitionProduceData)


class ProduceRequest(
    Message, api_key=ApiKey.PRODUCE, versions=(3, 13), flexible_from=9
):
    transactional_id: str | None = field(STRING, nullable="0+", default=None)
    acks: int = field(INT16)
    timeout_ms: int = field(INT32)
    topic_data: list[TopicProduceData] = array(TopicProduceData)


class BatchIndexAndErrorMessage(Struct):
    batch_index: int = field(INT32)
    batch_index_error_message: str | None = field(STRING, nullable="0+", default=None)


class LeaderIdAndEpoch(Struct):
    leader_id: int = field(INT32, default=-1)
    leader_epoch: int = field(INT32, default=-1)


class PartitionProduceResponse(Struct):
    index: int = field(INT32)
    error_code: int = field(INT16)
    base_offset: int = field(INT64)
    log_append_time_ms: int = field(INT64, default=-1)
    log_start_offset: int = field(INT64, "5+", default=-1, ignorable=True)
    record_errors: list[BatchIndexAndErrorMessage] = array(
        BatchIndexAndErrorMessage, "8+", ignorable=True
    )
    error_message: str | None = field(
        STRING, "8+", nullable="0+", default=None, ignorable=True
    )
    current_leader: LeaderIdAndEpoch | None = field(LeaderIdAndEpoch, "10+", tag=0)


class TopicProduceResponse(Struct):
    name: str = field(STRING, "3-12", ignorable=True)
    topic_id: bytes = field(UUID, "13+", ignorable=True)
    partition_responses: list[PartitionProduceResponse] = array(
        PartitionProduceResponse
    )


class NodeEndpoint(Struct):
    node_id: int = field(INT32)
    host: str = field(STRING)
    port: int = field(INT32)
    rack: str | None = field(STRING, nullable="0+", default=None)


class ProduceResponse(
    Message, api_key=ApiKey.PRODUCE, versions=(3, 13), flexible_from=9
):
    responses: list[TopicProduceResponse] = array(TopicProduceResponse)
    throttle_time_ms: int = field(INT32)
    node_endpoints: list[NodeEndpoint] = array(NodeEndpoint, "10+", tag=0)

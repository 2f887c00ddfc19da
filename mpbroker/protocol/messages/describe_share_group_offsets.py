"""DescribeShareGroupOffsets: describe the start offsets of share groups.

Source: Kafka protocol guide, "DescribeShareGroupOffsets"; KIP-932.
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


class DescribeShareGroupOffsetsRequestTopic(Struct):
    topic_name: str = field(STRING)
    partitions: list[int] = array(INT32)


class DescribeShareGroupOffsetsRequestGroup(Struct):
    group_id: str = field(STRING)
    topics: list[DescribeShareGroupOffsetsRequestTopic] | None = array(
        DescribeShareGroupOffsetsRequestTopic, nullable="0+"
    )


class DescribeShareGroupOffsetsRequest(
    Message,
    api_key=ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS,
    versions=(0, 1),
    flexible_from=0,
):
    groups: list[DescribeShareGroupOffsetsRequestGroup] = array(
        DescribeShareGroupOffsetsRequestGroup
    )


class DescribeShareGroupOffsetsResponsePartition(Struct):
    partition_index: int = field(INT32)
    start_offset: int = field(INT64)
    leader_epoch: int = field(INT32)
    lag: int = field(INT64, "1+", default=-1, ignorable=True)
    error_code: int = field(INT16)
    error_message: str | None = field(STRING, nullable="0+", default=None)


class DescribeShareGroupOffsetsResponseTopic(Struct):
    topic_name: str = field(STRING)
    topic_id: bytes = field(UUID)
    partitions: list[DescribeShareGroupOffsetsResponsePartition] = array(
        DescribeShareGroupOffsetsResponsePartition
    )


class DescribeShareGroupOffsetsResponseGroup(Struct):
    group_id: str = field(STRING)
    topics: list[DescribeShareGroupOffsetsResponseTopic] = array(
        DescribeShareGroupOffsetsResponseTopic
    )
    error_code: int = field(INT16)
    error_message: str | None = field(STRING, nullable="0+", default=None)


class DescribeShareGroupOffsetsResponse(
    Message,
    api_key=ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS,
    versions=(0, 1),
    flexible_from=0,
):
    throttle_time_ms: int = field(INT32)
    groups: list[DescribeShareGroupOffsetsResponseGroup] = array(
        DescribeShareGroupOffsetsResponseGroup
    )

"""DescribeLogDirs: the log directories of a broker, and the partitions in them.

If the topics are null, all are returned. Version 4 added the sizes of volumes.

Source: Kafka protocol guide, "DescribeLogDirs".
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import (
    BOOLEAN,
    INT16,
    INT32,
    INT64,
    STRING,
    Struct,
    array,
    field,
)
from mpbroker.protocol.message import Message


class DescribableLogDirTopic(Struct):
    topic: str = field(STRING)
    partitions: list[int] = array(INT32)


class DescribeLogDirsRequest(
    Message, api_key=ApiKey.DESCRIBE_LOG_DIRS, versions=(1, 5), flexible_from=2
):
    topics: list[DescribableLogDirTopic] | None = array(
        DescribableLogDirTopic, nullable="0+"
    )


class DescribeLogDirsPartition(Struct):
    partition_index: int = field(INT32)
    partition_size: int = field(INT64)
    offset_lag: int = field(INT64)
    is_future_key: bool = field(BOOLEAN)


class DescribeLogDirsTopic(Struct):
    name: str = field(STRING)
    partitions: list[DescribeLogDirsPartition] = array(DescribeLogDirsPartition)


class DescribeLogDirsResult(Struct):
    error_code: int = field(INT16)
    log_dir: str = field(STRING)
    topics: list[DescribeLogDirsTopic] = array(DescribeLogDirsTopic)
    total_bytes: int = field(INT64, "4+", default=-1, ignorable=True)
    usable_bytes: int = field(INT64, "4+", default=-1, ignorable=True)
    is_cordoned: bool = field(BOOLEAN, "5+", ignorable=True)


class DescribeLogDirsResponse(
    Message, api_key=ApiKey.DESCRIBE_LOG_DIRS, versions=(1, 5), flexible_from=2
):
    throttle_time_ms: int = field(INT32)
    error_code: int = field(INT16, "3+", ignorable=True)
    results: list[DescribeLogDirsResult] = array(DescribeLogDirsResult)

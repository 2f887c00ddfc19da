"""AlterReplicaLogDirs: move partitions to other log directories of a broker.

The answer comes when the moves have begun; DescribeLogDirs shows how far they are.

Source: Kafka protocol guide, "AlterReplicaLogDirs"; KIP-113.
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import INT16, INT32, STRING, Struct, array, field
from mpbroker.protocol.message import Message


class AlterReplicaLogDirTopic(Struct):
    name: str = field(STRING)
    partitions: list[int] = array(INT32)


class AlterReplicaLogDir(Struct):
    path: str = field(STRING)
    topics: list[AlterReplicaLogDirTopic] = array(AlterReplicaLogDirTopic)


class AlterReplicaLogDirsRequest(
    Message, api_key=ApiKey.ALTER_REPLICA_LOG_DIRS, versions=(1, 2), flexible_from=2
):
    dirs: list[AlterReplicaLogDir] = array(AlterReplicaLogDir)


class AlterReplicaLogDirPartitionResult(Struct):
    partition_index: int = field(INT32)
    error_code: int = field(INT16)


class AlterReplicaLogDirTopicResult(Struct):
    topic_name: str = field(STRING)
    partitions: list[AlterReplicaLogDirPartitionResult] = array(
        AlterReplicaLogDirPartitionResult
    )


class AlterReplicaLogDirsResponse(
    Message, api_key=ApiKey.ALTER_REPLICA_LOG_DIRS, versions=(1, 2), flexible_from=2
):
    throttle_time_ms: int = field(INT32)
    results: list[AlterReplicaLogDirTopicResult] = array(AlterReplicaLogDirTopicResult)

"""AlterReplicaLogDirs: begin to move partitions to other log directories.

The answer says that the moves have begun. The housekeeper makes them, and
DescribeLogDirs shows the copies until they are in place.

Source: Kafka protocol guide, "AlterReplicaLogDirs"; ReplicaManager.alterReplicaLogDirs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mpbroker.base.logger import get_logger
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.alter_replica_log_dirs import (
    AlterReplicaLogDirPartitionResult,
    AlterReplicaLogDirsRequest,
    AlterReplicaLogDirsResponse,
    AlterReplicaLogDirTopicResult,
)

if TYPE_CHECKING:
    from mpbroker.server.handler_context import Broker, HandlerContext

_LOG = get_logger(__name__)
_MAX_NAME: Final = 255  # of a file
# What is added to the name of a partition's directory: ".", 32 digits and "-future".
_ADDED: Final = 1 + 32 + len("-future")


def handle_alter_replica_log_dirs(
    request: AlterReplicaLogDirsRequest, context: HandlerContext
) -> AlterReplicaLogDirsResponse:
    """Begin a move of each partition that the request names; answer each.

    A second execution finds what the first one has begun, and changes nothing. If a
    partition is named with several directories, the last one counts, as in Kafka.
    """
    places = {
        (topic.name, index): each.path
        for each in request.dirs
        for topic in each.topics
        for index in topic.partitions
    }
    results: dict[str, list[AlterReplicaLogDirPartitionResult]] = {}
    for (name, index), path in places.items():
        error = ErrorCode.NONE
        try:
            _begin(context.broker, name, index, path)
        except ApiError as refusal:
            _LOG.warning("%s-%d is not moved to %s: %s", name, index, path, refusal)
            error = refusal.error_code
            if error == ErrorCode.NOT_LEADER_OR_FOLLOWER:
                error = ErrorCode.REPLICA_NOT_AVAILABLE
        results.setdefault(name, []).append(
            AlterReplicaLogDirPartitionResult(partition_index=index, error_code=error)
        )
    return AlterReplicaLogDirsResponse(
        results=[
            AlterReplicaLogDirTopicResult(topic_name=name, partitions=partitions)
            for name, partitions in results.items()
        ]
    )


def _begin(broker: Broker, name: str, index: int, path: str) -> None:
    """Begin the move of one partition.

    Raises:
        ApiError: INVALID_TOPIC_EXCEPTION, LOG_DIR_NOT_FOUND, KAFKA_STORAGE_ERROR,
            UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER_OR_FOLLOWER; INVALID_REQUEST for a
            topic with tiered storage.
    """
    if len(f"{name}-{index}") + _ADDED > _MAX_NAME:
        raise ApiError(ErrorCode.INVALID_TOPIC_EXCEPTION, "The topic name is too long.")
    if path not in broker.log_dirs:
        raise ApiError(
            ErrorCode.LOG_DIR_NOT_FOUND, f"Log dir {path} is not found in the config."
        )
    if broker.volume(path) is None:
        raise ApiError(
            ErrorCode.KAFKA_STORAGE_ERROR, f"Log directory {path} is offline"
        )
    topic = broker.registry.topic(name)
    if topic is None or not 0 <= index < len(topic.partitions):
        raise ApiError(
            ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            f"there is no partition {index} of topic {name}",
        )
    broker.logs.move(topic, index, path)

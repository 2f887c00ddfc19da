"""DeleteRecords: raise the log start offsets of partitions.

Source: Kafka protocol guide, "DeleteRecords"; ReplicaManager.deleteRecords.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mpbroker.metadata.topics import require_partition
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.delete_records import (
    DeleteRecordsPartition,
    DeleteRecordsPartitionResult,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteRecordsTopicResult,
)
from mpbroker.server.handler_context import HandlerContext

if TYPE_CHECKING:
    from mpbroker.metadata.topics import Topic
    from mpbroker.storage.log_manager import LogManager

_NO_WATERMARK: Final = -1


def handle_delete_records(
    request: DeleteRecordsRequest, context: HandlerContext
) -> DeleteRecordsResponse:
    """Answer each partition with its new log start offset, or with an error."""
    broker = context.broker
    response = DeleteRecordsResponse()
    for wanted in request.topics:
        topic = broker.registry.topic(wanted.name)
        results = []
        for partition in wanted.partitions:
            result = DeleteRecordsPartitionResult(
                partition_index=partition.partition_index, error_code=ErrorCode.NONE
            )
            results.append(result)
            try:
                result.low_watermark = _delete(
                    topic, wanted.name, partition, broker.logs
                )
            except ApiError as error:
                result.error_code = error.error_code
                result.low_watermark = _NO_WATERMARK
        response.topics.append(
            DeleteRecordsTopicResult(name=wanted.name, partitions=results)
        )
    return response


def _delete(
    topic: Topic | None,
    name: str,
    wanted: DeleteRecordsPartition,
    logs: LogManager,
) -> int:
    index = wanted.partition_index
    existing = require_partition(topic, name, index)
    if existing.is_internal:
        raise ApiError(
            ErrorCode.INVALID_TOPIC_EXCEPTION,
            f"Cannot delete records of internal topic {name}",
        )
    return logs.log(existing, index).delete_records(wanted.offset)

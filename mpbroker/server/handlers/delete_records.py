"""DeleteRecords: raise the log start offsets of partitions.

Those of shared topics are raised in the cluster's database, and the request waits.

Source: Kafka protocol guide, "DeleteRecords"; ReplicaManager.deleteRecords.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
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
from mpbroker.server.request import PARKED, Deferred

if TYPE_CHECKING:
    from mpbroker.metadata.topics import Topic
    from mpbroker.storage.log_manager import LogManager

_NO_WATERMARK: Final = -1
# A partition of a shared topic, its new start, and the place of its result.
_Shared = tuple["Topic", DeleteRecordsPartition, DeleteRecordsPartitionResult]


def handle_delete_records(
    request: DeleteRecordsRequest, context: HandlerContext
) -> DeleteRecordsResponse | Deferred:
    """Delete the records below the wanted offsets; answer each partition.

    The answer is the partition's new log start offset, or an error. With partitions of
    shared topics, it is sent later.
    """
    broker = context.broker
    response = DeleteRecordsResponse()
    shared: list[_Shared] = []
    for wanted in request.topics:
        topic = broker.registry.topic(wanted.name)
        results = []
        for partition in wanted.partitions:
            result = DeleteRecordsPartitionResult(
                partition_index=partition.partition_index, error_code=ErrorCode.NONE
            )
            results.append(result)
            try:
                existing = _require(topic, wanted.name, partition.partition_index)
                if existing.config.diskless_enable:
                    shared.append((existing, partition, result))
                else:
                    result.low_watermark = _delete(existing, partition, broker.logs)
            except ApiError as error:
                result.error_code = error.error_code
                result.low_watermark = _NO_WATERMARK
        response.topics.append(
            DeleteRecordsTopicResult(name=wanted.name, partitions=results)
        )
    if not shared:
        return response
    assert broker.shared_requests is not None, "a cluster's node starts as one only"
    broker.shared_requests.delete(
        context.request,
        request.timeout_ms,
        [
            (topic.topic_id, topic.partitions[each.partition_index], each)
            for topic, each, _ in shared
        ],
        partial(_finish, response, shared, context),
    )
    return PARKED


def _finish(
    response: DeleteRecordsResponse,
    shared: Sequence[_Shared],
    context: HandlerContext,
    results: Sequence[tuple[int, int]],
) -> bytes:
    """Return the encoded response, with the starts and errors of shared partitions."""
    for (_, _, result), (start, error) in zip(shared, results, strict=True):
        result.low_watermark = start
        result.error_code = error
    if context.amend is not None:
        context.amend(response)
    return response.encode(context.version)


def _require(topic: Topic | None, name: str, index: int) -> Topic:
    """Return a topic whose records may be deleted; raise ApiError if they may not."""
    existing = require_partition(topic, name, index)
    if existing.is_internal:
        raise ApiError(
            ErrorCode.INVALID_TOPIC_EXCEPTION,
            f"Cannot delete records of internal topic {name}",
        )
    return existing


def _delete(topic: Topic, wanted: DeleteRecordsPartition, logs: LogManager) -> int:
    return logs.log(topic, wanted.partition_index).delete_records(wanted.offset)

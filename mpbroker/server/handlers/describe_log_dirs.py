"""DescribeLogDirs: describe the log directories, their partitions and the sizes.

Source: Kafka protocol guide, "DescribeLogDirs"; KIP-113, KIP-827.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.describe_log_dirs import (
    DescribableLogDirTopic,
    DescribeLogDirsPartition,
    DescribeLogDirsRequest,
    DescribeLogDirsResponse,
    DescribeLogDirsResult,
    DescribeLogDirsTopic,
)
from mpbroker.server.handler_context import HandlerContext, Volume

if TYPE_CHECKING:
    from mpbroker.metadata.topics import Topic, TopicRegistry
    from mpbroker.storage.log_manager import LogManager


def handle_describe_log_dirs(
    request: DescribeLogDirsRequest, context: HandlerContext
) -> DescribeLogDirsResponse:
    """Answer with each log directory, and the wanted partitions that are in it.

    A partition that does not exist, or whose size is unknown, is left out.
    """
    broker = context.broker
    found: dict[str, dict[str, list[DescribeLogDirsPartition]]] = {
        path: {} for path in broker.log_dirs
    }
    wanted: dict[tuple[str, int], Topic] = {}
    for topic, indexes in _wanted(request.topics, broker.registry):
        for index in indexes:
            wanted[topic.name, index] = topic
            try:
                path, size = broker.logs.place_and_size(topic, index)
            except ApiError:
                continue
            found[path].setdefault(topic.name, []).append(
                DescribeLogDirsPartition(
                    partition_index=index,
                    partition_size=size,
                    offset_lag=0,  # there is no other replica to lag behind
                    is_future_key=False,
                )
            )
    _add_copies(found, wanted, broker.logs)
    return DescribeLogDirsResponse(
        error_code=ErrorCode.NONE,
        results=[
            _result(path, broker.volume(path), found[path]) for path in broker.log_dirs
        ],
    )


def _add_copies(
    found: dict[str, dict[str, list[DescribeLogDirsPartition]]],
    wanted: dict[tuple[str, int], Topic],
    logs: LogManager,
) -> None:
    """Add the copies of wanted partitions that move to another log directory."""
    for future in logs.future_replicas():
        topic = wanted.get((future.topic, future.partition))
        if topic is None:
            continue
        try:
            size, lag = logs.progress(topic, future)
        except ApiError:
            continue
        found[future.log_directory].setdefault(topic.name, []).append(
            DescribeLogDirsPartition(
                partition_index=future.partition,
                partition_size=size,
                offset_lag=lag,
                is_future_key=True,
            )
        )


def _wanted(
    asked: Sequence[DescribableLogDirTopic] | None, registry: TopicRegistry
) -> Iterator[tuple[Topic, Iterable[int]]]:
    """Yield each wanted topic once, with the wanted partitions that exist.

    Args:
        asked: the topics of the request; None: all topics.
        registry: finds topics.
    """
    if asked is None:
        for topic in registry.topics():
            yield topic, range(len(topic.partitions))
        return
    indexes: dict[str, set[int]] = {}
    for each in asked:
        indexes.setdefault(each.topic, set()).update(each.partitions)
    for name, some in indexes.items():
        found = registry.topic(name)
        if found is not None:
            yield found, sorted(some.intersection(range(len(found.partitions))))


def _result(
    path: str,
    volume: Volume | None,
    topics: dict[str, list[DescribeLogDirsPartition]],
) -> DescribeLogDirsResult:
    if volume is None:
        return DescribeLogDirsResult(
            error_code=ErrorCode.KAFKA_STORAGE_ERROR, log_dir=path
        )
    return DescribeLogDirsResult(
        error_code=ErrorCode.NONE,
        log_dir=path,
        topics=[
            DescribeLogDirsTopic(name=name, partitions=partitions)
            for name, partitions in topics.items()
        ],
        total_bytes=volume.total_bytes,
        usable_bytes=volume.usable_bytes,
    )

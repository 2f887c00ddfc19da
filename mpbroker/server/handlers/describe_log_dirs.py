"""DescribeLogDirs: what lies in each log directory, and how large it is.

Source: Kafka protocol guide, "DescribeLogDirs"; KIP-113, KIP-827.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

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

if TYPE_CHECKING:
    from mpbroker.metadata.topics import Topic


class LogDir(NamedTuple):
    """A log directory and its volume's bytes; None: the volume cannot be asked."""

    path: str
    total_bytes: int | None
    usable_bytes: int | None


class PartitionSize(NamedTuple):
    """In which log directory a partition is, and how many bytes its log has."""

    log_dir: str
    size: int


class Registry(Protocol):
    """The part of the TopicRegistry that is read here."""

    def topic(self, name: str) -> Topic | None: ...

    def topics(self) -> list[Topic]: ...


def handle_describe_log_dirs(
    request: DescribeLogDirsRequest,
    registry: Registry,
    log_dirs: Sequence[LogDir],
    partition_size: Callable[[Topic, int], PartitionSize],
) -> DescribeLogDirsResponse:
    """Answer every directory with those of the wanted partitions that it holds.

    What does not exist, or whose size cannot be told, is in none.
    """
    found: dict[str, dict[str, list[DescribeLogDirsPartition]]] = {
        log_dir.path: {} for log_dir in log_dirs
    }
    for topic, indexes in _wanted(request.topics, registry):
        for index in indexes:
            try:
                path, size = partition_size(topic, index)
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
    return DescribeLogDirsResponse(
        error_code=ErrorCode.NONE,
        results=[_result(log_dir, found[log_dir.path]) for log_dir in log_dirs],
    )


def _wanted(
    asked: Sequence[DescribableLogDirTopic] | None, registry: Registry
) -> Iterator[tuple[Topic, Iterable[int]]]:
    """Yield each topic once, with the indexes asked for that it has."""
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
    log_dir: LogDir, topics: dict[str, list[DescribeLogDirsPartition]]
) -> DescribeLogDirsResult:
    total, usable = log_dir.total_bytes, log_dir.usable_bytes
    if total is None or usable is None:
        return DescribeLogDirsResult(
            error_code=ErrorCode.KAFKA_STORAGE_ERROR, log_dir=log_dir.path
        )
    return DescribeLogDirsResult(
        error_code=ErrorCode.NONE,
        log_dir=log_dir.path,
        topics=[
            DescribeLogDirsTopic(name=name, partitions=partitions)
            for name, partitions in topics.items()
        ],
        total_bytes=total,
        usable_bytes=usable,
    )

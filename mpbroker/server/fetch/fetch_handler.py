"""Read record batches for a Fetch, and make its answer.

Few records are copied into the answer. In place of many records the answer names a
range of a segment file, which the connection's processor sends from the page cache.

Source: Kafka protocol guide, "Fetch"; KafkaApis.handleFetchRequest, ReplicaManager.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.base.storage_errors import RemotePendingError, RemoteWait
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.fetch import (
    AbortedTransaction,
    FetchableTopicResponse,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    PartitionData,
)

if TYPE_CHECKING:
    from mpbroker.metadata.topics import Topic
    from mpbroker.storage.log.log_lookup import EmptyLog, LogLookup
    from mpbroker.storage.log.log_reader import ReadResult
    from mpbroker.storage.log.partition_log import PartitionLog

_READ_COMMITTED: Final = 1
# Errors for which no log is read. The fetch waits for its other partitions.
_NOT_READ: Final = frozenset(
    (
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.UNKNOWN_TOPIC_ID,
        ErrorCode.TOPIC_AUTHORIZATION_FAILED,
    )
)


class SegmentRegion:
    """Names a range of a segment file, which is sent in place of its records' bytes."""

    __slots__ = ("file_id", "path", "position", "size_in_bytes")

    def __init__(self, path: str, file_id: int, position: int, size: int) -> None:
        self.path = path
        self.file_id = file_id
        self.position = position
        self.size_in_bytes = size


class Target(NamedTuple):
    """Describes one partition that a fetch reads, or the error that it gets."""

    name: str
    topic_id: bytes
    partition: int
    fetch_offset: int
    max_bytes: int
    leader_epoch: int
    log: PartitionLog | None
    error: ErrorCode = ErrorCode.NONE
    entry: int = -1  # its place in the session; -1: it is of no session


# Returns whether the sender may read the topic of this name.
MayRead = Callable[[str], bool]


class Topics(Protocol):
    """Finds topics by name or id."""

    def topic(self, name: str) -> Topic | None: ...

    def topic_by_id(self, topic_id: bytes) -> Topic | None: ...


def full_targets(
    request: FetchRequest,
    version: int,
    topics: Topics,
    log: Callable[[Topic, int], PartitionLog],
    may_read: MayRead | None = None,
) -> list[Target]:
    """Find every partition that a request names, or its error.

    Args:
        request: the request.
        version: its version; from 13 on it names topics by id.
        topics: finds topics.
        log: finds a partition's log.
        may_read: called with the name of each topic; None: every sender may read.
    """
    targets: list[Target] = []
    for wanted in request.topics:
        if version >= 13:
            topic = topics.topic_by_id(wanted.topic_id)
            unknown = ErrorCode.UNKNOWN_TOPIC_ID
        else:
            topic = topics.topic(wanted.topic)
            unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        if may_read is not None:
            name = topic.name if topic is not None else wanted.topic
            if name and not may_read(name):
                # The answer is the same if the topic does not exist: the sender may not
                # learn that.
                topic, unknown = None, ErrorCode.TOPIC_AUTHORIZATION_FAILED
        targets.extend(
            _target(partition, topic, wanted.topic, wanted.topic_id, unknown, log)
            for partition in wanted.partitions
        )
    return targets


def _target(
    wanted: FetchPartition,
    topic: Topic | None,
    name: str,
    topic_id: bytes,
    unknown: ErrorCode,
    log: Callable[[Topic, int], PartitionLog],
) -> Target:
    if topic is not None:
        name, topic_id = topic.name, topic.topic_id
    found, error = find_log(topic, wanted.partition, unknown, log)
    return Target(
        name,
        topic_id,
        wanted.partition,
        wanted.fetch_offset,
        wanted.partition_max_bytes,
        wanted.current_leader_epoch,
        found,
        error,
    )


def find_log(
    topic: Topic | None,
    partition: int,
    unknown: ErrorCode,
    log: Callable[[Topic, int], PartitionLog],
) -> tuple[PartitionLog | None, ErrorCode]:
    """Find a partition's log, or the error that stands in its place.

    Args:
        topic: its topic; None: there is none.
        partition: its number, from the request.
        unknown: the error if there is no topic.
        log: finds the log of a partition that exists.
    """
    if topic is None:
        return None, unknown
    if not 0 <= partition < len(topic.partitions):
        return None, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    try:
        return log(topic, partition), ErrorCode.NONE
    except ApiError as refused:
        return None, refused.error_code


class Reading:
    """Holds what was found when a fetch's partitions were all read once."""

    __slots__ = ("bytes_found", "has_error", "pending", "results")

    def __init__(self) -> None:
        self.results: list[tuple[Target, ReadResult | None, ErrorCode]] = []
        # By row of the partition: the answer of the remote store that a read waits for.
        self.pending: dict[int, RemoteWait] = {}
        self.bytes_found = 0
        self.has_error = False  # one for which the answer must not wait


def read_targets(
    targets: list[Target],
    request: FetchRequest,
    max_bytes: int,
    first: int = 0,
    is_behind: Callable[[], bool] = lambda: False,
) -> Reading:
    """Read every partition, until ``max_bytes`` are found in all together.

    The first batch found is returned whole even if it is larger. Otherwise a consumer
    could never pass a large batch. Partitions after the limit are read with no bytes,
    so their results have offsets but no records.

    Args:
        targets: the partitions.
        request: the request.
        max_bytes: the limit.
        first: the index of the partition to begin with; those before it come last.
        is_behind: says whether logs of shared topics may lack records that the client
            knows of. Then an offset above their end is waited for.
    """
    reading = Reading()
    left = max(0, max_bytes)
    read_committed = request.isolation_level == _READ_COMMITTED
    for target in targets[first:] + targets[:first]:
        result: ReadResult | None = None
        error = target.error
        log = target.log
        if not error and log is not None:
            try:
                check_leader_epoch(target.leader_epoch, log.lookup)
                result = log.reader.read(
                    target.fetch_offset,
                    min(left, target.max_bytes),
                    min_one_batch=reading.bytes_found == 0,
                    read_committed=read_committed,
                )
            except ApiError as refused:
                error = refused.error_code
                if _is_above_copy(target, error) and is_behind():
                    error = ErrorCode.NONE
                    result = log.reader.nothing(read_committed=read_committed)
            except RemotePendingError as pending:
                reading.pending[log.row.index] = pending.wait
                pending.wait.ask(log.row.index)
                try:
                    result = log.reader.nothing(read_committed=read_committed)
                except ApiError as refused:
                    error = refused.error_code
        if result is not None:
            reading.bytes_found += result.length
            left = max(0, left - result.length)
        if error and (log is not None or error not in _NOT_READ):
            reading.has_error = True
        reading.results.append((target, result, error))
    return reading


def _is_above_copy(target: Target, error: ErrorCode) -> bool:
    """Return whether an offset is above the end of a log that follows a cluster's."""
    log = target.log
    return (
        error == ErrorCode.OFFSET_OUT_OF_RANGE
        and log is not None
        and log.view.config.diskless_enable
        and target.fetch_offset > log.row.log_end_offset
    )


def check_leader_epoch(current: int, log: LogLookup | EmptyLog) -> None:
    """Refuse a client that knows another leader epoch (KIP-320).

    Args:
        current: the epoch that the client knows; below 0: it knows none.
        log: the partition's log.

    Raises:
        ApiError: FENCED_LEADER_EPOCH if the client's epoch is older than the log's,
            UNKNOWN_LEADER_EPOCH if it is newer.
    """
    if current < 0:
        return
    latest = log.leader_epoch
    if current < latest:
        raise ApiError(ErrorCode.FENCED_LEADER_EPOCH, f"it is {latest} by now")
    if current > latest:
        raise ApiError(ErrorCode.UNKNOWN_LEADER_EPOCH, f"it is {latest} still")


def partition_data(
    target: Target,
    result: ReadResult | None,
    error: ErrorCode,
    read_small: Callable[[ReadResult], bytes | None],
) -> PartitionData:
    """Return the part of a Fetch's answer that is about one partition.

    Args:
        target: the partition.
        result: the records that were found, and offsets; None: only an error.
        error: the partition's error, or NONE.
        read_small: returns the records as bytes if they are few, otherwise None.
    """
    if result is None:
        return PartitionData(
            partition_index=target.partition,
            error_code=error,
            high_watermark=-1,
            aborted_transactions=None,
            records=b"",
        )
    records: bytes | SegmentRegion | None = b""
    if result.length:
        records = read_small(result) or SegmentRegion(
            result.segment_path, result.segment_id, result.position, result.length
        )
    aborted = result.aborted_transactions
    return PartitionData(
        partition_index=target.partition,
        error_code=error,
        high_watermark=result.high_watermark,
        last_stable_offset=result.last_stable_offset,
        log_start_offset=result.log_start_offset,
        aborted_transactions=None
        if aborted is None
        else [
            AbortedTransaction(producer_id=producer, first_offset=offset)
            for producer, offset in aborted
        ],
        records=records,
    )


def grouped(
    answers: list[tuple[Target, PartitionData]],
) -> list[FetchableTopicResponse]:
    """Put the answers of partitions under their topics, in order."""
    responses: dict[tuple[str, bytes], FetchableTopicResponse] = {}
    for target, data in answers:
        key = (target.name, target.topic_id)
        response = responses.get(key)
        if response is None:
            response = responses[key] = FetchableTopicResponse(
                topic=target.name, topic_id=target.topic_id, partitions=[]
            )
        response.partitions.append(data)
    return list(responses.values())


def session_error(error: ErrorCode) -> FetchResponse:
    """Return a Fetch's answer that has only an error of the fetch session."""
    return FetchResponse(error_code=error, session_id=0)

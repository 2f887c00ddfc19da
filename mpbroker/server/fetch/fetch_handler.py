"""Read record batches for a Fetch, and make its answer.

Few records are copied into the answer. In place of many it names a range of a segment
file, which the connection's processor sends from the page cache.

Source: Kafka protocol guide, "Fetch"; KafkaApis.handleFetchRequest, ReplicaManager.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

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


class SegmentRegion:
    """A range of a segment file that stands in a response for the records in it."""

    __slots__ = ("inode", "path", "position", "size_in_bytes")

    def __init__(self, path: str, inode: int, position: int, size: int) -> None:
        self.path = path
        self.inode = inode
        self.position = position
        self.size_in_bytes = size


class Target(NamedTuple):
    """One partition that a fetch reads."""

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
    """Where partitions are found."""

    def topic(self, name: str) -> Topic | None: ...

    def topic_by_id(self, topic_id: bytes) -> Topic | None: ...


def full_targets(
    request: FetchRequest,
    version: int,
    topics: Topics,
    log: Callable[[Topic, int], PartitionLog],
    may_read: MayRead | None = None,
) -> list[Target]:
    """Resolve every partition that a request names.

    Args:
        may_read: asked for each topic; None: every sender may read.
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
                # The same answer whether it exists or not: that is not for the sender.
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
    found = None
    error = ErrorCode.NONE
    if topic is None:
        error = unknown
    elif not 0 <= wanted.partition < len(topic.partitions):
        error = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    else:
        name, topic_id = topic.name, topic.topic_id
        try:
            found = log(topic, wanted.partition)
        except ApiError as refused:
            error = refused.error_code
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


class Reading:
    """What one pass over a fetch's partitions has found."""

    __slots__ = ("bytes_found", "has_error", "results")

    def __init__(self) -> None:
        self.results: list[tuple[Target, ReadResult | None, ErrorCode]] = []
        self.bytes_found = 0
        self.has_error = False


def read_targets(
    targets: list[Target], request: FetchRequest, max_bytes: int, first: int = 0
) -> Reading:
    """Read every partition, in order from ``first``, until ``max_bytes`` are found.

    The first batch found is returned whole even if it is larger. Otherwise a consumer
    could never pass a large batch.
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
        if result is not None:
            reading.bytes_found += result.length
            left = max(0, left - result.length)
        if error:
            reading.has_error = True
        reading.results.append((target, result, error))
    return reading


def check_leader_epoch(current: int, log: LogLookup | EmptyLog) -> None:
    """Refuse a client that knows another leader epoch (KIP-320).

    Args:
        current: the client's; below 0: it knows none.

    Raises:
        ApiError: FENCED_LEADER_EPOCH, UNKNOWN_LEADER_EPOCH.
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
    """Return one partition's answer; ``read_small`` returns records that are few."""
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
            result.segment_path, result.segment_inode, result.position, result.length
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
    """Put partitions under their topics, in order."""
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
    """Return an answer that only says what is wrong with the session."""
    return FetchResponse(error_code=error, session_id=0)

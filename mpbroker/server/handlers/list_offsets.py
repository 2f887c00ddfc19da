"""ListOffsets: find the offset at a timestamp, or at the start or end of a log.

Source: Kafka protocol guide, "ListOffsets"; KIP-734 for the largest timestamp,
KIP-405 and KIP-1005 for the offsets of tiered storage.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Final

from mpbroker.base.storage_errors import LookupLimitError, RemotePendingError
from mpbroker.metadata.topics import require_partition
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsPartitionResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopicResponse,
)
from mpbroker.server.errors import invalid_request
from mpbroker.server.fetch.fetch_handler import check_leader_epoch
from mpbroker.server.handler_context import HandlerContext
from mpbroker.server.repeated.repeatable import OffsetKind, OffsetPlace
from mpbroker.server.request import PARKED, Deferred
from mpbroker.storage.log.log_lookup import EmptyLog, LookupBudget

if TYPE_CHECKING:
    from mpbroker.storage.log.log_lookup import LogLookup

LATEST: Final = -1
EARLIEST: Final = -2
MAX_TIMESTAMP: Final = -3
EARLIEST_LOCAL: Final = -4
LATEST_TIERED: Final = -5
EARLIEST_PENDING_UPLOAD: Final = -6
# The first version that knows a special timestamp.
_SINCE: Final = {
    MAX_TIMESTAMP: 7,
    EARLIEST_LOCAL: 8,
    LATEST_TIERED: 9,
    EARLIEST_PENDING_UPLOAD: 11,
}
_AT_THE_START: Final = (
    EARLIEST,
    EARLIEST_LOCAL,
    LATEST_TIERED,
    EARLIEST_PENDING_UPLOAD,
)
_READ_COMMITTED: Final = 1
_SINCE_NOT_AVAILABLE: Final = 5


def handle_list_offsets(
    request: ListOffsetsRequest, context: HandlerContext
) -> ListOffsetsResponse | Deferred:
    """Answer each partition with an offset, or with an error.

    Offsets of shared topics that are not at the start are answered later: when this
    node has what was acknowledged by any node before. If that takes long, the client
    gets the error upon which it asks again.
    """
    broker = context.broker
    if broker.shared_requests is None:
        return _answer(request, context)
    places: dict[tuple[str, int], tuple[bytes, int, int]] = {}
    for wanted in request.topics:
        topic = broker.registry.topic(wanted.name)
        if topic is None or not topic.config.diskless_enable:
            continue
        for partition in wanted.partitions:
            index = partition.partition_index
            if partition.timestamp not in _AT_THE_START and 0 <= index < len(
                topic.partitions
            ):
                row = topic.partitions[index]
                places[wanted.name, index] = (topic.topic_id, row, index)
    if not places:
        return _answer(request, context)

    def finish(found: Sequence[bool]) -> bytes:
        late = {key for key, has_all in zip(places, found, strict=True) if not has_all}
        response = _answer(request, context, late)
        if context.amend is not None:
            context.amend(response)
        return response.encode(context.version)

    broker.shared_requests.look(context.request, list(places.values()), finish)
    return PARKED


def _answer(
    request: ListOffsetsRequest,
    context: HandlerContext,
    late: Collection[tuple[str, int]] = (),
) -> ListOffsetsResponse:
    """Answer each partition from its log.

    A partition that is named twice gets INVALID_REQUEST. When the lookups by timestamp
    have taken as long as those of one request may, the other ones get the error upon
    which clients ask again.

    Args:
        request: the request.
        context: its context.
        late: the partitions whose logs may lack something.
    """
    budget = LookupBudget()
    seen: set[tuple[str, int]] = set()
    twice: set[tuple[str, int]] = set()
    for wanted in request.topics:
        for partition in wanted.partitions:
            key = (wanted.name, partition.partition_index)
            (twice if key in seen else seen).add(key)
    broker = context.broker
    committed = request.isolation_level == _READ_COMMITTED
    response = ListOffsetsResponse()
    places: list[OffsetPlace | None] = []
    for wanted in request.topics:
        topic = broker.registry.topic(wanted.name)
        answers = []
        for partition in wanted.partitions:
            index, place = partition.partition_index, None
            try:
                if (wanted.name, index) in twice:
                    raise invalid_request("named twice")
                if (wanted.name, index) in late:
                    raise LookupLimitError
                existing = require_partition(topic, wanted.name, index)
                log = broker.logs.look(existing, index)
                answer = _lookup(
                    log,
                    partition,
                    context.version,
                    budget,
                    committed=committed,
                    is_tiered=existing.config.remote_storage_enable,
                )
                kind = _kind(partition.timestamp, committed=committed)
                if kind is not None:
                    place = _place(answer, existing.partitions[index], kind, log)
                answers.append(answer)
            except ApiError as error:
                answers.append(
                    ListOffsetsPartitionResponse(
                        partition_index=index, error_code=error.error_code
                    )
                )
            except LookupLimitError:
                code = _later(context.version)
                answers.append(
                    ListOffsetsPartitionResponse(partition_index=index, error_code=code)
                )
            except RemotePendingError as pending:
                # A client tries again after its backoff, and no handler waits.
                pending.wait.ask(existing.partitions[index])
                answers.append(
                    ListOffsetsPartitionResponse(
                        partition_index=index,
                        error_code=_not_yet(pending, context.version),
                    )
                )
            places.append(place)
        response.topics.append(
            ListOffsetsTopicResponse(name=wanted.name, partitions=answers)
        )
    known = [place for place in places if place is not None]
    if broker.nodes is None and len(known) == len(places):
        context.repeatable = known
    return response


def _kind(timestamp: int, *, committed: bool) -> OffsetKind | None:
    """Return which offset of a partition a timestamp stands for.

    Return None for a timestamp that the files must be searched for.
    """
    if timestamp == EARLIEST:
        return OffsetKind.LOG_START
    if timestamp == LATEST:
        return OffsetKind.LAST_STABLE if committed else OffsetKind.LOG_END
    return None


def _place(
    answer: ListOffsetsPartitionResponse,
    row: int,
    kind: OffsetKind,
    log: LogLookup | EmptyLog,
) -> OffsetPlace | None:
    """Return the place of a partition's offset in an answer that may be repeated.

    Return None for a partition without files, or if later offsets may have another
    leader epoch.
    """
    if isinstance(log, EmptyLog):
        return None
    entries = log.epochs.entries
    since = entries[-1].start_offset if len(entries) > 1 else 0
    return OffsetPlace(answer, row, kind, since) if answer.offset >= since else None


def _not_yet(pending: RemotePendingError, version: int) -> ErrorCode:
    """Return the error for an offset that must first be read from the remote store."""
    if pending.wait.failure():
        return ErrorCode.KAFKA_STORAGE_ERROR
    return _later(version)


def _later(version: int) -> ErrorCode:
    """Return the error upon which a client asks for the same partition again."""
    if version >= _SINCE_NOT_AVAILABLE:
        return ErrorCode.OFFSET_NOT_AVAILABLE
    return ErrorCode.LEADER_NOT_AVAILABLE


def _lookup(
    log: LogLookup | EmptyLog,
    wanted: ListOffsetsPartition,
    version: int,
    budget: LookupBudget,
    *,
    committed: bool,
    is_tiered: bool,
) -> ListOffsetsPartitionResponse:
    check_leader_epoch(wanted.current_leader_epoch, log)
    timestamp = wanted.timestamp
    end = log.last_stable_offset() if committed else log.latest()
    if timestamp < 0 and version < _SINCE.get(timestamp, 0):
        raise ApiError(
            ErrorCode.UNSUPPORTED_VERSION,
            f"timestamp {timestamp} in version {version}",
        )
    found: tuple[int, int] | None  # offset, timestamp
    if timestamp == LATEST:
        found = (end, -1)
    elif timestamp == EARLIEST:
        found = (log.earliest(), -1)
    elif timestamp == EARLIEST_LOCAL:
        found = (log.earliest_local(), -1)
    elif timestamp == MAX_TIMESTAMP:
        found = log.max_timestamp(budget)
        if found is not None and found[0] >= end:
            found = None
    elif timestamp == LATEST_TIERED:
        tiered = log.latest_tiered()
        found = (tiered, -1) if tiered >= 0 else None
    elif timestamp == EARLIEST_PENDING_UPLOAD:
        pending = log.earliest_pending_upload() if is_tiered else -1
        found = (pending, -1) if pending >= 0 else None
    elif timestamp < 0:
        raise invalid_request(f"timestamp {timestamp}")
    else:
        found = log.offset_for_timestamp(timestamp, budget)
        if found is not None and found[0] >= end:
            found = None
    if found is None:
        return ListOffsetsPartitionResponse(
            partition_index=wanted.partition_index, error_code=0
        )
    return ListOffsetsPartitionResponse(
        partition_index=wanted.partition_index,
        error_code=0,
        timestamp=found[1],
        offset=found[0],
        leader_epoch=log.epochs.at(found[0]) if version >= 4 else -1,
    )

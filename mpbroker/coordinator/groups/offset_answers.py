"""Make responses to OffsetCommit and OffsetFetch, for all versions.

Source: Kafka protocol guide, "OffsetCommit" and "OffsetFetch".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Protocol, TypeVar

from mpbroker.coordinator.context import Topics
from mpbroker.coordinator.groups.offset_metadata_manager import (
    OffsetMetadataManager,
    no_offset,
)
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetCommitResponsePartition,
    OffsetCommitResponseTopic,
)
from mpbroker.protocol.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopics,
    OffsetFetchResponse,
    OffsetFetchResponseGroup,
    OffsetFetchResponsePartition,
    OffsetFetchResponsePartitions,
    OffsetFetchResponseTopic,
    OffsetFetchResponseTopics,
)

_ERROR_SINCE: Final = 2
_TOPIC_IDS_SINCE: Final = 10


class _Asked(Protocol):
    """A group of a request, with the wanted topics; None: all."""

    group_id: str
    topics: list[Any] | None


_AskedT = TypeVar("_AskedT", bound=_Asked)


def each_group_once(groups: Iterable[_AskedT]) -> list[_AskedT]:
    """Return the groups of a request, each with all topics that are asked for there.

    An answer has all offsets of a group, each with metadata of the client's. Repeated
    as often as a request can repeat a group, they would exhaust the memory.
    """
    found: dict[str, _AskedT] = {}
    for group in groups:
        first = found.setdefault(group.group_id, group)
        if first is group or first.topics is None:
            continue
        if group.topics is None:
            first.topics = None
        else:
            first.topics.extend(group.topics)
    return list(found.values())


def _each_partition_once(
    wanted: Iterable[OffsetFetchRequestTopics], *, by_id: bool
) -> list[OffsetFetchRequestTopics]:
    found: dict[str | bytes, OffsetFetchRequestTopics] = {}
    for row in wanted:
        first = found.setdefault(row.topic_id if by_id else row.name, row)
        if first is not row:
            first.partition_indexes.extend(row.partition_indexes)
    for row in found.values():
        row.partition_indexes = list(dict.fromkeys(row.partition_indexes))
    return list(found.values())


def refused_commit(
    request: OffsetCommitRequest, version: int, error_code: ErrorCode, topics: Topics
) -> OffsetCommitResponse:
    """Return a response to OffsetCommit with the same error for each partition.

    The response has no field for an error of the whole request. A partition that does
    not exist has the error that says so, as in an answer to a commit that is valid.
    """
    answers = []
    for row in request.topics:
        name: str | None = row.name
        unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        if version >= _TOPIC_IDS_SINCE:
            name = topics.topic_name(row.topic_id)
            if name is None:
                unknown = ErrorCode.UNKNOWN_TOPIC_ID
        count = topics.partition_count(name) if name else 0
        partitions = [
            OffsetCommitResponsePartition(
                partition_index=part.partition_index,
                error_code=error_code if 0 <= part.partition_index < count else unknown,
            )
            for part in row.partitions
        ]
        answers.append(
            OffsetCommitResponseTopic(
                name=row.name, topic_id=row.topic_id, partitions=partitions
            )
        )
    return OffsetCommitResponse(topics=answers)


def single_group(
    version: int, request: OffsetFetchRequest, found: OffsetFetchResponseGroup
) -> OffsetFetchResponse:
    """Return the response to an OffsetFetch whose version names a single group.

    Args:
        found: the group's part of the response, as later versions have it.
    """
    topics = found.topics
    if found.error_code and version < _ERROR_SINCE:
        code = ErrorCode(found.error_code)
        topics = [
            OffsetFetchResponseTopics(
                name=row.name,
                partitions=[no_offset(index, code) for index in row.partition_indexes],
            )
            for row in request.topics or ()
        ]
    return OffsetFetchResponse(
        error_code=found.error_code,
        topics=[
            OffsetFetchResponseTopic(
                name=row.name,
                partitions=[_single_partition(part) for part in row.partitions],
            )
            for row in topics
        ],
    )


def _single_partition(
    part: OffsetFetchResponsePartitions,
) -> OffsetFetchResponsePartition:
    return OffsetFetchResponsePartition(
        partition_index=part.partition_index,
        committed_offset=part.committed_offset,
        committed_leader_epoch=part.committed_leader_epoch,
        metadata=part.metadata,
        error_code=part.error_code,
    )


def fetched_topics(
    offsets: OffsetMetadataManager,
    topics: Topics,
    asked: OffsetFetchRequestGroup,
    *,
    by_id: bool,
    stable: bool,
) -> list[OffsetFetchResponseTopics]:
    """Return a group's offsets in the topics of the request, or in all topics.

    A partition that the request repeats is answered once.

    Args:
        by_id: whether the request names topics by their ids.
        stable: answer UNSTABLE_OFFSET_COMMIT for an offset that an open transaction may
            change.
    """
    group_id, wanted = asked.group_id, asked.topics
    if wanted is None:
        committed = offsets.offsets(group_id)
        wanted = [
            OffsetFetchRequestTopics(
                name=name,
                topic_id=(topics.topic_id(name) or b"") if by_id else b"",
                partition_indexes=list(partitions),
            )
            for name, partitions in (committed.topics.items() if committed else ())
        ]
        if by_id:
            wanted = [row for row in wanted if row.topic_id]
    else:
        wanted = _each_partition_once(wanted, by_id=by_id)
    answers = []
    for row in wanted:
        name = topics.topic_name(row.topic_id) if by_id else row.name
        if name is None:
            code = ErrorCode.UNKNOWN_TOPIC_ID
            found = [no_offset(index, code) for index in row.partition_indexes]
        else:
            found = offsets.fetch(group_id, name, row.partition_indexes, stable=stable)
        answers.append(
            OffsetFetchResponseTopics(
                name=row.name, topic_id=row.topic_id or bytes(16), partitions=found
            )
        )
    return answers

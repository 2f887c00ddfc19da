"""Check the requests of streams groups' members, and read the values in them.

Source: Kafka's GroupCoordinatorService, with its error messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NoReturn

from mpbroker.base.java_text import is_blank
from mpbroker.coordinator.streams.record_types import (
    RecordCopartitionGroup,
    RecordKeyValue,
    RecordSubtopology,
    RecordTopicInfo,
    StreamsGroupTopologyValue,
)
from mpbroker.coordinator.streams.streams_group import Tasks
from mpbroker.metadata.topic_names import INTERNAL_TOPICS, is_legal_topic_name
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.streams_group_heartbeat import (
    StreamsGroupHeartbeatRequest,
    TaskIds,
    TopicInfo,
    Topology,
)

# More than any application has; Kafka has no limit. All of them are looked at when a
# topic is created or deleted, which 10,000 make a matter of some ms.
MAX_PARTS: Final = 10_000

_JOIN_EPOCH: Final = 0
_LEAVE_STATIC_EPOCH: Final = -2


def validate(request: StreamsGroupHeartbeatRequest) -> None:
    """Raise if a request is invalid for every state of its group.

    Raises:
        ApiError: INVALID_REQUEST, STREAMS_INVALID_TOPOLOGY.
    """
    for name, value in (
        ("MemberId", request.member_id),
        ("GroupId", request.group_id),
        ("InstanceId", request.instance_id),
        ("RackId", request.rack_id),
    ):
        if is_blank(value):
            _refuse(f"{name} can't be empty.")
    epoch = request.member_epoch
    tasks = (request.active_tasks, request.standby_tasks, request.warmup_tasks)
    if epoch == _JOIN_EPOCH:
        if request.rebalance_timeout_ms == -1:
            _refuse("RebalanceTimeoutMs must be provided in first request.")
        for kind, rows in zip(("Active", "Standby", "Warmup"), tasks, strict=True):
            if rows:
                _refuse(f"{kind}Tasks must be empty when (re-)joining.")
        if request.topology is None:
            _refuse("Topology must be non-null when (re-)joining.")
        _validate_topology(request.topology)
    elif request.topology is not None:
        _refuse("Topology can only be provided when (re-)joining.")
    if epoch == _LEAVE_STATIC_EPOCH and request.instance_id is None:
        _refuse("InstanceId can't be null.")
    if epoch < _LEAVE_STATIC_EPOCH:
        _refuse(f"MemberEpoch is {epoch}, but must be greater than or equal to -2.")
    given = [rows is not None for rows in tasks]
    if any(given) and not all(given):
        _refuse("If one task-type is non-null, all must be non-null.")
    _refuse_unsupported(request)


def _refuse_unsupported(request: StreamsGroupHeartbeatRequest) -> None:
    """Refuse what Kafka 4.3 does not support either."""
    if request.instance_id is not None:
        _refuse("Static membership is not yet supported.")
    if request.task_offsets is not None:
        _refuse("TaskOffsets are not supported yet.")
    if request.task_end_offsets is not None:
        _refuse("TaskEndOffsets are not supported yet.")
    if request.warmup_tasks:
        _refuse("WarmupTasks are not supported yet.")
    subtopologies = request.topology.subtopologies if request.topology else ()
    if any(each.source_topic_regex for each in subtopologies):
        _refuse("Regular expressions for source topics are not supported yet.")


def _validate_topology(topology: Topology) -> None:
    if topology.epoch < 0:
        raise ApiError(
            ErrorCode.STREAMS_INVALID_TOPOLOGY,
            f"The topology epoch {topology.epoch} is negative.",
        )
    ids = [each.subtopology_id for each in topology.subtopologies]
    if len(set(ids)) < len(ids):
        raise ApiError(
            ErrorCode.STREAMS_INVALID_TOPOLOGY, "Two subtopologies have the same id."
        )
    num_topics = sum(
        len(each.source_topics)
        + len(each.repartition_sink_topics)
        + len(each.repartition_source_topics)
        + len(each.state_changelog_topics)
        + len(each.copartition_groups)
        + 1
        for each in topology.subtopologies
    )
    if num_topics > MAX_PARTS:
        raise ApiError(
            ErrorCode.STREAMS_INVALID_TOPOLOGY,
            f"The topology has {num_topics} subtopologies, topics and copartition"
            f" groups, more than {MAX_PARTS}.",
        )
    _validate_names(topology)
    for each in topology.subtopologies:
        for topic in each.repartition_source_topics:
            if topic.partitions < 0:
                raise ApiError(
                    ErrorCode.STREAMS_INVALID_TOPOLOGY,
                    f"Repartition topic {topic.name} has {topic.partitions}"
                    " partitions.",
                )
        for topic in each.state_changelog_topics:
            if topic.partitions:
                raise ApiError(
                    ErrorCode.STREAMS_INVALID_TOPOLOGY,
                    f"Changelog topic {topic.name} must have an undefined partition"
                    f" count, but it is set to {topic.partitions}.",
                )


def _validate_names(topology: Topology) -> None:
    names = {
        name
        for each in topology.subtopologies
        for name in (
            *each.source_topics,
            *each.repartition_sink_topics,
            *(topic.name for topic in each.repartition_source_topics),
            *(topic.name for topic in each.state_changelog_topics),
        )
    }
    if internal := names & INTERNAL_TOPICS:
        raise ApiError(
            ErrorCode.STREAMS_INVALID_TOPOLOGY,
            f"Use of Kafka internal topics {','.join(sorted(internal))} in a Kafka"
            " Streams topology is prohibited.",
        )
    illegal = sorted(name for name in names if not is_legal_topic_name(name))
    if illegal:
        raise ApiError(
            ErrorCode.STREAMS_INVALID_TOPOLOGY,
            f"Topic names {','.join(illegal)[:1000]} are not valid topic names.",
        )


def read_topology(topology: Topology) -> StreamsGroupTopologyValue:
    """Return a request's topology in the form of its record, in sorted order.

    So topologies that mean the same have the same bytes.
    """
    return StreamsGroupTopologyValue(
        epoch=topology.epoch,
        subtopologies=[
            RecordSubtopology(
                subtopology_id=each.subtopology_id,
                # Copartition groups have positions in these two lists, which keep
                # their order.
                source_topics=list(each.source_topics),
                repartition_source_topics=_topic_rows(each.repartition_source_topics),
                state_changelog_topics=sorted(
                    _topic_rows(each.state_changelog_topics), key=lambda row: row.name
                ),
                repartition_sink_topics=sorted(each.repartition_sink_topics),
                copartition_groups=[
                    RecordCopartitionGroup(
                        source_topics=list(group.source_topics),
                        repartition_source_topics=list(group.repartition_source_topics),
                    )
                    for group in each.copartition_groups
                ],
            )
            for each in sorted(
                topology.subtopologies, key=lambda each: each.subtopology_id
            )
        ],
    )


def _topic_rows(rows: Iterable[TopicInfo]) -> list[RecordTopicInfo]:
    return [
        RecordTopicInfo(
            name=row.name,
            partitions=row.partitions,
            replication_factor=row.replication_factor,
            topic_configs=[
                RecordKeyValue(key=each.key, value=each.value)
                for each in sorted(row.topic_configs, key=lambda each: each.key)
            ],
        )
        for row in rows
    ]


def read_tasks(rows: Iterable[TaskIds]) -> Tasks:
    """Return the tasks in a request."""
    found: Tasks = {}
    for row in rows:
        found.setdefault(row.subtopology_id, set()).update(row.partitions)
    return found


def task_rows(tasks: Mapping[str, Iterable[int]]) -> list[TaskIds]:
    """Return tasks in the form of an answer."""
    return [
        TaskIds(subtopology_id=each, partitions=sorted(numbers))
        for each, numbers in sorted(tasks.items())
    ]


def _refuse(message: str) -> NoReturn:
    raise ApiError(ErrorCode.INVALID_REQUEST, message)

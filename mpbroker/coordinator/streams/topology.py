"""Configure a Kafka Streams topology: which topics it needs, of how many partitions.

A subtopology reads source topics, which must exist, and repartition topics, and has
changelog topics for its state. The application names the last two kinds, and the
coordinator creates them:

    repartition topic   as many partitions as the application says, or else as many as
                        the largest source of the subtopology that writes to it
    changelog topic     as many as the largest source of its subtopology, whose
                        partitions are the numbers of its tasks

Topics of a copartition group must have equal numbers of partitions, because a join
reads the same partition of all of them.

Source: KIP-1071; Kafka's InternalTopicManager, RepartitionTopics, ChangelogTopics and
CopartitionedTopicsEnforcer, with their messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Final, NoReturn

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.coordinator.streams.record_types import (
    RecordSubtopology,
    RecordTopicInfo,
    StreamsGroupTopologyValue,
)
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError

# A message names so many topics at most.
_NAMED: Final = 3
# More than any application has: the state of one such group then takes some megabytes,
# and each of its records fits in a batch. Kafka has no limit.
MAX_TASKS: Final = 50_000


class StatusCode(IntEnum):
    """The statuses of a heartbeat's answer; each has a text beside it."""

    STALE_TOPOLOGY = 0
    MISSING_SOURCE_TOPICS = 1
    INCORRECTLY_PARTITIONED_TOPICS = 2
    MISSING_INTERNAL_TOPICS = 3
    SHUTDOWN_APPLICATION = 4
    ASSIGNMENT_DELAYED = 5


class Problem(NamedTuple):
    """Why a topology is not ready, as the members are told."""

    code: StatusCode
    detail: str


class InternalTopic(NamedTuple):
    """A repartition or changelog topic: its partitions, and its configs."""

    name: str
    num_partitions: int
    replication_factor: int  # 0: the default
    configs: Mapping[str, str]


class ConfiguredSubtopology(NamedTuple):
    """A subtopology whose topics have their numbers of partitions."""

    num_tasks: int
    source_topics: Sequence[str]
    repartition_source_topics: Sequence[InternalTopic]
    repartition_sink_topics: Sequence[str]
    state_changelog_topics: Sequence[InternalTopic]

    @property
    def inputs(self) -> list[str]:
        """The names of the topics that it reads."""
        names = (topic.name for topic in self.repartition_source_topics)
        return sorted({*self.source_topics, *names})


class ConfiguredTopology(NamedTuple):
    """A topology as the existing topics allow it.

    Attributes:
        subtopologies: by id; None: the source topics do not allow any.
        missing: the internal topics that do not exist yet.
        problem: why it is not ready; None: it is.
    """

    subtopologies: Mapping[str, ConfiguredSubtopology] | None
    missing: Sequence[InternalTopic]
    problem: Problem | None


class _WrongTopicsError(Exception):
    """The existing topics do not fit the topology."""

    def __init__(self, code: StatusCode, detail: str) -> None:
        super().__init__(detail)
        self.problem = Problem(code, detail)


def required_topics(topology: StreamsGroupTopologyValue) -> set[str]:
    """Return the names of all topics that a topology reads or keeps its state in."""
    return {
        name
        for each in topology.subtopologies
        for name in (
            *each.source_topics,
            *(topic.name for topic in each.repartition_source_topics),
            *(topic.name for topic in each.state_changelog_topics),
        )
    }


def subtopology_by_input(topology: StreamsGroupTopologyValue) -> dict[str, str]:
    """Return, by each topic that is read, the id of the subtopology that reads it."""
    return {
        name: each.subtopology_id
        for each in topology.subtopologies
        for name in _inputs(each)
    }


def configure(
    topology: StreamsGroupTopologyValue, partition_count: Callable[[str], int]
) -> ConfiguredTopology:
    """Decide the numbers of partitions of a topology's internal topics.

    Args:
        topology: the topology.
        partition_count: returns how many partitions a topic has; 0: it does not exist.

    Raises:
        ApiError: STREAMS_INVALID_TOPOLOGY: no topics could fit it.
    """
    try:
        _require_sources(topology, partition_count)
        decided = _decide_counts(topology, partition_count)
        configured = {
            each.subtopology_id: _configured(each, decided, partition_count)
            for each in sorted(
                topology.subtopologies, key=lambda each: each.subtopology_id
            )
        }
        num_tasks = sum(each.num_tasks for each in configured.values())
        if num_tasks > MAX_TASKS:
            raise _WrongTopicsError(
                StatusCode.INCORRECTLY_PARTITIONED_TOPICS,
                f"The topology has {num_tasks} tasks, more than {MAX_TASKS}.",
            )
        missing = _missing(configured.values(), partition_count)
    except _WrongTopicsError as error:
        return ConfiguredTopology(None, (), error.problem)
    problem = None
    if missing:
        names = _summary([topic.name for topic in missing])
        problem = Problem(
            StatusCode.MISSING_INTERNAL_TOPICS, f"Internal topics are missing: {names}"
        )
    return ConfiguredTopology(configured, missing, problem)


def _inputs(subtopology: RecordSubtopology) -> list[str]:
    names = (topic.name for topic in subtopology.repartition_source_topics)
    return [*subtopology.source_topics, *names]


def _require_sources(
    topology: StreamsGroupTopologyValue, partition_count: Callable[[str], int]
) -> None:
    missing = {
        name
        for each in topology.subtopologies
        for name in each.source_topics
        if not partition_count(name)
    }
    if missing:
        raise _WrongTopicsError(
            StatusCode.MISSING_SOURCE_TOPICS,
            f"Source topics {_summary(sorted(missing))} are missing.",
        )


# -- numbers of partitions -------------------------------------------------------------


def _decide_counts(
    topology: StreamsGroupTopologyValue, partition_count: Callable[[str], int]
) -> dict[str, int]:
    """Return the number of partitions of each internal topic, by name."""
    decided = _repartition_counts(topology.subtopologies, partition_count)

    def count(name: str) -> int:
        return partition_count(name) or decided.get(name, 0)

    topics = [
        topic
        for each in topology.subtopologies
        for topic in each.repartition_source_topics
    ]
    fixed = {topic.name for topic in topics if topic.partitions}
    repartition = {topic.name for topic in topics}
    for each in topology.subtopologies:
        for names in _copartition_groups(each):
            decided.update(_equal_counts(names, fixed, repartition, count))
    for each in topology.subtopologies:
        largest = _largest_input(each, count)
        for topic in each.state_changelog_topics:
            decided[topic.name] = largest
    return decided


def _repartition_counts(
    subtopologies: Sequence[RecordSubtopology], partition_count: Callable[[str], int]
) -> dict[str, int]:
    """Return the numbers of partitions of the repartition topics.

    A subtopology writes to a topic that another one reads, so one is decided after the
    other, until nothing is left.
    """
    decided = {
        topic.name: topic.partitions
        for each in subtopologies
        for topic in each.repartition_source_topics
        if topic.partitions
    }
    readers: dict[str, list[int]] = {}  # by repartition topic
    for index, each in enumerate(subtopologies):
        for topic in each.repartition_source_topics:
            readers.setdefault(topic.name, []).append(index)
    # A subtopology of which a source is known: each is looked at once a known source.
    ready = deque(range(len(subtopologies)))
    while ready:
        each = subtopologies[ready.popleft()]
        sinks = [name for name in each.repartition_sink_topics if name not in decided]
        if not sinks:
            continue
        sizes = [decided.get(t.name, 0) for t in each.repartition_source_topics]
        sizes += map(partition_count, dict.fromkeys(each.source_topics))
        if most := max(sizes, default=0):
            for sink in sinks:
                decided[sink] = most
                ready.extend(readers.get(sink, ()))
    if any(
        sink not in decided
        for each in subtopologies
        for sink in each.repartition_sink_topics
    ):
        _refuse(
            "Failed to compute number of partitions for all repartition topics. There"
            " may be loops in the topology that cannot be resolved."
        )
    for each in subtopologies:
        for topic in each.repartition_source_topics:
            if topic.name not in decided:
                _refuse(
                    "Failed to compute number of partitions for all repartition topics,"
                    " because a repartition source topic is never used as a sink topic."
                )
    return decided


def _copartition_groups(subtopology: RecordSubtopology) -> list[set[str]]:
    """Return the names of topics that must have equal numbers of partitions.

    Raises:
        ApiError: STREAMS_INVALID_TOPOLOGY: a number names no topic.
    """
    found = []
    repartition = subtopology.repartition_source_topics
    for group in subtopology.copartition_groups:
        names: set[str] = set()
        for index in group.source_topics:
            if not 0 <= index < len(subtopology.source_topics):
                _refuse(f"A copartition group names source topic {index}.")
            names.add(subtopology.source_topics[index])
        for index in group.repartition_source_topics:
            if not 0 <= index < len(repartition):
                _refuse(f"A copartition group names repartition topic {index}.")
            names.add(repartition[index].name)
        found.append(names)
    return found


def _equal_counts(
    names: set[str], fixed: set[str], repartition: set[str], count: Callable[[str], int]
) -> dict[str, int]:
    """Return the numbers of partitions of a copartition group's repartition topics.

    Args:
        names: the topics of the group.
        fixed: repartition topics whose number the application has set.
        repartition: all repartition topics of the topology.
        count: returns a topic's number of partitions, as decided until now.
    """
    ours = sorted(names & repartition)
    external = {name: count(name) for name in sorted(names - repartition)}
    set_here = {name: count(name) for name in ours if name in fixed}
    if external:
        wanted = _same(external)
    elif set_here:
        wanted = _same(set_here)
    else:
        wanted = max((count(name) for name in ours), default=0)
    for name, size in set_here.items():
        if size != wanted:
            raise _WrongTopicsError(
                StatusCode.INCORRECTLY_PARTITIONED_TOPICS,
                f"Number of partitions [{size}] of repartition topic [{name}] doesn't"
                f" match number of partitions [{wanted}] of the source topic.",
            )
    return dict.fromkeys(ours, wanted)


def _same(counts: Mapping[str, int]) -> int:
    sizes = set(counts.values())
    if len(sizes) > 1:
        told = ", ".join(f"{name}={size}" for name, size in counts.items())
        raise _WrongTopicsError(
            StatusCode.INCORRECTLY_PARTITIONED_TOPICS,
            f"Following topics do not have the same number of partitions: [{{{told}}}]",
        )
    return sizes.pop()


def _largest_input(subtopology: RecordSubtopology, count: Callable[[str], int]) -> int:
    sizes = [count(name) for name in _inputs(subtopology)]
    if not sizes:
        _refuse(f"No source topics found for subtopology {subtopology.subtopology_id}")
    return max(sizes)


# -- topics ----------------------------------------------------------------------------


def _configured(
    subtopology: RecordSubtopology,
    decided: Mapping[str, int],
    partition_count: Callable[[str], int],
) -> ConfiguredSubtopology:
    def count(name: str) -> int:
        return partition_count(name) or decided.get(name, 0)

    def topics(rows: Iterable[RecordTopicInfo]) -> list[InternalTopic]:
        return [
            InternalTopic(
                row.name,
                row.partitions or decided[row.name],
                row.replication_factor,
                {each.key: each.value for each in row.topic_configs},
            )
            for row in sorted(rows, key=lambda row: row.name)
        ]

    return ConfiguredSubtopology(
        _largest_input(subtopology, count),
        sorted(subtopology.source_topics),
        topics(subtopology.repartition_source_topics),
        sorted(subtopology.repartition_sink_topics),
        topics(subtopology.state_changelog_topics),
    )


def _missing(
    subtopologies: Iterable[ConfiguredSubtopology],
    partition_count: Callable[[str], int],
) -> list[InternalTopic]:
    """Return the internal topics that do not exist; check those that do."""
    wanted = {
        topic.name: topic
        for each in subtopologies
        for topic in (*each.repartition_source_topics, *each.state_changelog_topics)
    }
    missing = []
    for name, topic in sorted(wanted.items()):
        found = partition_count(name)
        if not found:
            missing.append(topic)
        elif found != topic.num_partitions:
            raise _WrongTopicsError(
                StatusCode.INCORRECTLY_PARTITIONED_TOPICS,
                f"Existing topic {name} has different number of partitions: expected"
                f" {topic.num_partitions}, found {found}",
            )
    return missing


def _summary(names: Sequence[str]) -> str:
    """Return the first names of a list, and how many more there are."""
    text = ", ".join(names[:_NAMED])
    more = len(names) - _NAMED
    return f"{text} and {more} additional topics" if more > 0 else text


def _refuse(message: str) -> NoReturn:
    raise ApiError(ErrorCode.STREAMS_INVALID_TOPOLOGY, message)

"""Describe a streams group: its topology, its members and their tasks.

Source: Kafka protocol guide, "StreamsGroupDescribe"; Kafka's StreamsGroup.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mpbroker.coordinator.streams.record_types import (
    RecordTopicInfo,
    StreamsGroupTopologyValue,
)
from mpbroker.coordinator.streams.streams_group import (
    NO_TARGET,
    StreamsGroup,
    StreamsMember,
)
from mpbroker.coordinator.streams.topology import ConfiguredTopology, InternalTopic
from mpbroker.protocol.messages.streams_group_describe import (
    Assignment,
    DescribedGroup,
    Endpoint,
    KeyValue,
    Member,
    Subtopology,
    TaskIds,
    TopicInfo,
    Topology,
)


def describe(group: StreamsGroup) -> DescribedGroup:
    """Return what StreamsGroupDescribe answers for a group."""
    return DescribedGroup(
        group_id=group.group_id,
        group_state=group.state.value,
        group_epoch=group.group_epoch,
        assignment_epoch=group.assignment_epoch,
        topology=None if group.topology is None else _topology(group),
        members=[_member(group, each) for each in group.members.values()],
    )


def _topology(group: StreamsGroup) -> Topology:
    """Return the topology, with numbers of partitions if its topics are ready."""
    assert group.topology is not None
    configured = group.configured
    if configured is None or configured.problem or configured.subtopologies is None:
        return _unconfigured(group.topology)
    return Topology(epoch=group.topology.epoch, subtopologies=_configured(configured))


def _configured(configured: ConfiguredTopology) -> list[Subtopology]:
    return [
        Subtopology(
            subtopology_id=each,
            source_topics=list(subtopology.source_topics),
            repartition_sink_topics=list(subtopology.repartition_sink_topics),
            state_changelog_topics=_internal(subtopology.state_changelog_topics),
            repartition_source_topics=_internal(subtopology.repartition_source_topics),
        )
        for each, subtopology in (configured.subtopologies or {}).items()
    ]


def _internal(topics: Sequence[InternalTopic]) -> list[TopicInfo]:
    return [
        TopicInfo(
            name=topic.name,
            partitions=topic.num_partitions,
            replication_factor=topic.replication_factor,
            topic_configs=[
                KeyValue(key=key, value=value)
                for key, value in sorted(topic.configs.items())
            ],
        )
        for topic in topics
    ]


def _unconfigured(topology: StreamsGroupTopologyValue) -> Topology:
    def rows(topics: Iterable[RecordTopicInfo]) -> list[TopicInfo]:
        return [
            TopicInfo(
                name=topic.name,
                partitions=topic.partitions,
                replication_factor=topic.replication_factor,
                topic_configs=[
                    KeyValue(key=each.key, value=each.value)
                    for each in topic.topic_configs
                ],
            )
            for topic in sorted(topics, key=lambda topic: topic.name)
        ]

    return Topology(
        epoch=topology.epoch,
        subtopologies=[
            Subtopology(
                subtopology_id=each.subtopology_id,
                source_topics=sorted(each.source_topics),
                repartition_sink_topics=sorted(each.repartition_sink_topics),
                state_changelog_topics=rows(each.state_changelog_topics),
                repartition_source_topics=rows(each.repartition_source_topics),
            )
            for each in topology.subtopologies
        ],
    )


def _member(group: StreamsGroup, member: StreamsMember) -> Member:
    target = group.target.get(member.member_id, NO_TARGET)
    endpoint = member.user_endpoint
    return Member(
        member_id=member.member_id,
        member_epoch=member.member_epoch,
        rack_id=member.rack_id,
        client_id=member.client_id,
        client_host=member.client_host,
        topology_epoch=member.topology_epoch,
        process_id=member.process_id,
        user_endpoint=(
            None if endpoint is None else Endpoint(host=endpoint[0], port=endpoint[1])
        ),
        client_tags=[KeyValue(key=key, value=text) for key, text in member.client_tags],
        assignment=_assignment(member.assigned.active, member.assigned.standby),
        target_assignment=_assignment(target.active, target.standby),
    )


def _assignment(
    active: Mapping[str, Iterable[int]], standby: Mapping[str, Iterable[int]]
) -> Assignment:
    return Assignment(active_tasks=_rows(active), standby_tasks=_rows(standby))


def _rows(tasks: Mapping[str, Iterable[int]]) -> list[TaskIds]:
    return [
        TaskIds(subtopology_id=each, partitions=sorted(numbers))
        for each, numbers in sorted(tasks.items())
    ]

"""Tell members which partitions are behind each other's endpoints.

An application may answer queries about its state: it gives each process an endpoint
(``application.server``), and asks the process that has a key's partition.

Source: KIP-1071; Kafka's EndpointToPartitionsManager.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping

from mpbroker.coordinator.streams.streams_group import StreamsGroup
from mpbroker.coordinator.streams.topology import ConfiguredSubtopology
from mpbroker.protocol.messages.streams_group_heartbeat import (
    Endpoint,
    EndpointToPartitions,
    TopicPartition,
)


def partitions_by_endpoint(
    group: StreamsGroup, partition_count: Callable[[str], int]
) -> list[EndpointToPartitions]:
    """Return the input partitions of the tasks of each member that has an endpoint.

    Args:
        group: the group.
        partition_count: returns how many partitions a topic has.
    """
    configured = group.configured
    if configured is None or configured.subtopologies is None:
        return []
    subtopologies = configured.subtopologies
    return [
        EndpointToPartitions(
            user_endpoint=Endpoint(
                host=member.user_endpoint[0], port=member.user_endpoint[1]
            ),
            active_partitions=_inputs(
                member.assigned.active, subtopologies, partition_count
            ),
            standby_partitions=_inputs(
                member.assigned.standby, subtopologies, partition_count
            ),
        )
        for member in group.members.values()
        if member.user_endpoint is not None
    ]


def _inputs(
    tasks: Mapping[str, Iterable[int]],
    subtopologies: Mapping[str, ConfiguredSubtopology],
    partition_count: Callable[[str], int],
) -> list[TopicPartition]:
    found = []
    for each, numbers in sorted(tasks.items()):
        subtopology = subtopologies.get(each)
        if subtopology is None:
            continue
        in_order = sorted(numbers)
        for topic in subtopology.inputs:
            # A topic may have fewer partitions than its subtopology has tasks.
            end = bisect_left(in_order, partition_count(topic))
            found.append(TopicPartition(topic=topic, partitions=in_order[:end]))
    return found

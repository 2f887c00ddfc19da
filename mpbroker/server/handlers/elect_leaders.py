"""ElectLeaders: answer that no election is needed, or that none is possible.

Each partition has only one replica, so its leader is always the preferred one. A
partition that is offline has no leader, and no other replica can be elected.

Source: Kafka protocol guide, "ElectLeaders"; ReplicationControlManager.electLeaders.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from mpbroker.metadata.topics import Topic
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.elect_leaders import (
    ElectLeadersRequest,
    ElectLeadersResponse,
    PartitionResult,
    ReplicaElectionResult,
)
from mpbroker.server.handler_context import HandlerContext
from mpbroker.server.leaders import Leaders

_PREFERRED: Final = 0
_UNCLEAN: Final = 1
# The answer for a partition that is offline, by type of the election.
_OFFLINE: Final = {
    _PREFERRED: (
        ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE,
        "The preferred leader was not available.",
    ),
    _UNCLEAN: (
        ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE,
        "Eligible topic partition leaders are not available.",
    ),
}


def handle_elect_leaders(
    request: ElectLeadersRequest, context: HandlerContext
) -> ElectLeadersResponse:
    """Answer each partition of the request with ELECTION_NOT_NEEDED or another error.

    If the request wants all partitions, the answer names only those that are offline.
    """
    response = ElectLeadersResponse()
    if request.election_type not in (_PREFERRED, _UNCLEAN):
        response.error_code = ErrorCode.INVALID_REQUEST
        return response
    registry, offline = context.broker.registry, _OFFLINE[request.election_type]
    leaders = Leaders(context.broker, context.other_nodes)
    asked: list[tuple[str, Sequence[int]]]
    if request.topic_partitions is None:
        asked = [(each.name, range(len(each.partitions))) for each in registry.topics()]
    else:
        asked = [(each.topic, each.partitions) for each in request.topic_partitions]
    for name, indexes in asked:
        topic = registry.topic(name)
        results = [_outcome(name, topic, index, leaders, offline) for index in indexes]
        if request.topic_partitions is None:
            results = [
                each
                for each in results
                if each.error_code != ErrorCode.ELECTION_NOT_NEEDED
            ]
            if not results:
                continue
        response.replica_election_results.append(
            ReplicaElectionResult(topic=name, partition_result=results)
        )
    return response


def _outcome(
    name: str,
    topic: Topic | None,
    index: int,
    leaders: Leaders,
    offline: tuple[ErrorCode, str],
) -> PartitionResult:
    """Return the answer for a partition.

    Args:
        name: the topic's name.
        topic: the topic; None: there is none.
        index: the partition number.
        leaders: tells whether a partition has a leader.
        offline: error and message for a partition that is offline.
    """
    if topic is None:
        error, message = (
            ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            f"No such topic as {name}",
        )
    elif not 0 <= index < len(topic.partitions):
        error = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        message = f"No such partition as {name}-{index}"
    elif not leaders.has_leader(topic, index):
        error, message = offline
    else:
        error = ErrorCode.ELECTION_NOT_NEEDED
        message = "Leader election not needed for topic partition."
    return PartitionResult(partition_id=index, error_code=error, error_message=message)

"""ElectLeaders: answer that no election is needed.

Each partition has only one replica, so its leader is always the preferred one.

Source: Kafka protocol guide, "ElectLeaders"; ReplicationControlManager.electLeaders.
"""

from __future__ import annotations

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

_PREFERRED: Final = 0
_UNCLEAN: Final = 1


def handle_elect_leaders(
    request: ElectLeadersRequest, context: HandlerContext
) -> ElectLeadersResponse:
    """Answer each partition of the request with ELECTION_NOT_NEEDED or another error.

    If the request wants all partitions, the answer names none: it names only those for
    which there was an election.
    """
    response = ElectLeadersResponse()
    if request.election_type not in (_PREFERRED, _UNCLEAN):
        response.error_code = ErrorCode.INVALID_REQUEST
        return response
    for wanted in request.topic_partitions or ():
        topic = context.broker.registry.topic(wanted.topic)
        response.replica_election_results.append(
            ReplicaElectionResult(
                topic=wanted.topic,
                partition_result=[
                    _outcome(wanted.topic, topic, index) for index in wanted.partitions
                ],
            )
        )
    return response


def _outcome(name: str, topic: Topic | None, index: int) -> PartitionResult:
    if topic is None:
        error, message = (
            ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            f"No such topic as {name}",
        )
    elif not 0 <= index < len(topic.partitions):
        error = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        message = f"No such partition as {name}-{index}"
    else:
        error = ErrorCode.ELECTION_NOT_NEEDED
        message = "Leader election not needed for topic partition."
    return PartitionResult(partition_id=index, error_code=error, error_message=message)

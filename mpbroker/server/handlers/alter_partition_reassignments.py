"""AlterPartitionReassignments: check assignments of replicas, and change nothing.

All partitions have this broker as their only replica, and no other broker is
registered. So the only valid assignment is to this broker, and it changes nothing.

Source: Kafka protocol guide, "AlterPartitionReassignments"; KIP-455;
ReplicationControlManager.alterPartitionReassignments.
"""

from __future__ import annotations

from typing import Final

from mpbroker.metadata.topics import Topic
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.alter_partition_reassignments import (
    AlterPartitionReassignmentsRequest,
    AlterPartitionReassignmentsResponse,
    ReassignablePartitionResponse,
    ReassignableTopicResponse,
)
from mpbroker.server.handler_context import HandlerContext

# The answer repeats the topic's name, which may be long, for each partition.
_MAX_NAME_SHOWN: Final = 249

Outcome = tuple[ErrorCode, str | None]


def handle_alter_partition_reassignments(
    request: AlterPartitionReassignmentsRequest, context: HandlerContext
) -> AlterPartitionReassignmentsResponse:
    """Answer each partition of the request; nothing changes."""
    node_id = context.broker.node_id
    responses = []
    for wanted in request.topics:
        topic = context.broker.registry.topic(wanted.name)
        partitions = []
        for each in wanted.partitions:
            code, message = _outcome(
                wanted.name, topic, each.partition_index, each.replicas, node_id
            )
            partitions.append(
                ReassignablePartitionResponse(
                    partition_index=each.partition_index,
                    error_code=code,
                    error_message=message,
                )
            )
        responses.append(
            ReassignableTopicResponse(name=wanted.name, partitions=partitions)
        )
    return AlterPartitionReassignmentsResponse(
        allow_replication_factor_change=request.allow_replication_factor_change,
        error_code=ErrorCode.NONE,
        error_message=None,
        responses=responses,
    )


def _outcome(
    name: str,
    topic: Topic | None,
    index: int,
    replicas: list[int] | None,
    node_id: int,
) -> Outcome:
    """Return the error code and the message of one partition.

    Args:
        name: the topic's name.
        topic: the topic; None: it does not exist.
        index: the partition's index.
        replicas: the brokers that shall have the partition; None: stop its
            reassignment.
        node_id: this broker's id.
    """
    shown = name[:_MAX_NAME_SHOWN]
    if topic is None:
        return (
            ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            f"Unable to find a topic named {shown}.",
        )
    if not 0 <= index < len(topic.partitions):
        return (
            ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            f"Unable to find partition {shown}:{index}.",
        )
    if replicas is None:
        return ErrorCode.NO_REASSIGNMENT_IN_PROGRESS, None
    reason = _mistake(replicas, node_id)
    if reason is None:
        return ErrorCode.NONE, None
    return (
        ErrorCode.INVALID_REPLICA_ASSIGNMENT,
        f"The manual partition assignment includes {reason}.",
    )


def _mistake(replicas: list[int], node_id: int) -> str | None:
    """Return what is wrong with a list of brokers, or None if it is valid."""
    if not replicas:
        return "an empty replica list"
    for broker_id in sorted(replicas):
        if broker_id != node_id:
            return f"broker {broker_id}, but no such broker is registered"
    if len(replicas) > 1:
        return f"the broker {node_id} more than once"
    return None

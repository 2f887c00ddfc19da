"""CreatePartitions: more partitions for topics that exist.

Source: Kafka protocol guide, "CreatePartitions";
ReplicationControlManager.createPartitions.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from mpbroker.metadata.topics import Topic
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.create_partitions import (
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreatePartitionsTopic,
    CreatePartitionsTopicResult,
)
from mpbroker.server.handler_context import HandlerContext

# Of its own Kafka says that they "should not change after deployment": groups and
# transactions would be looked for where they are not.
_FIXED: Final = (
    "The number of partitions of {} cannot be changed: what is in it is found by it."
)


def handle_create_partitions(
    request: CreatePartitionsRequest, context: HandlerContext
) -> CreatePartitionsResponse:
    """Grow what can be grown; answer every topic that was named.

    The intent gets how many partitions there were, in the place in which each topic is
    named. So a second execution knows what the first one has grown.
    """
    registry, intent = context.broker.registry, context.intent
    permit = context.mutation_permit(strict_since=3)
    earlier = intent.earlier()
    counts = [*earlier, *[0] * (len(request.topics) - len(earlier))]
    named = Counter(wanted.name for wanted in request.topics)
    results: dict[str, CreatePartitionsTopicResult] = {}
    for place, wanted in enumerate(request.topics):
        result = CreatePartitionsTopicResult(
            name=wanted.name, error_code=ErrorCode.NONE
        )
        results[wanted.name] = result
        try:
            if named[wanted.name] > 1:
                raise ApiError(ErrorCode.INVALID_REQUEST, "Duplicate topic name.")
            topic = registry.topic(wanted.name)
            if topic is not None and 0 < counts[place] < wanted.count == len(
                topic.partitions
            ):
                continue
            if topic is not None and topic.is_internal:
                raise ApiError(ErrorCode.INVALID_PARTITIONS, _FIXED.format(topic.name))
            _check_assignments(wanted, topic, context.broker.node_id)
            if permit is not None and topic is not None:
                registry.create_partitions(
                    wanted.name, wanted.count, validate_only=True
                )
                permit(wanted.count - len(topic.partitions))
            if topic is not None and not request.validate_only:
                counts[place] = len(topic.partitions)
                intent.note(counts)
            registry.create_partitions(
                wanted.name, wanted.count, validate_only=request.validate_only
            )
        except ApiError as error:
            result.error_code = error.error_code
            result.error_message = str(error)
    return CreatePartitionsResponse(results=list(results.values()))


def _check_assignments(
    wanted: CreatePartitionsTopic, topic: Topic | None, node_id: int
) -> None:
    """Refuse replicas anywhere but here, and more or fewer of them than partitions.

    Raises:
        ApiError: INVALID_REPLICA_ASSIGNMENT.
    """
    added = wanted.count - (len(topic.partitions) if topic is not None else 0)
    if wanted.assignments is None or topic is None or added <= 0:
        return  # the registry knows what to say to the last two
    if len(wanted.assignments) != added:
        raise ApiError(
            ErrorCode.INVALID_REPLICA_ASSIGNMENT,
            f"Attempted to add {added} additional partition(s), but only"
            f" {len(wanted.assignments)} assignment(s) were specified.",
        )
    for assignment in wanted.assignments:
        if assignment.broker_ids != [node_id]:
            raise ApiError(
                ErrorCode.INVALID_REPLICA_ASSIGNMENT,
                f"The manual partition assignment {assignment.broker_ids} is not"
                f" possible: broker {node_id} is the only one, and holds each partition"
                " once.",
            )

"""CreatePartitions: add partitions to existing topics.

Source: Kafka protocol guide, "CreatePartitions";
ReplicationControlManager.createPartitions.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from mpbroker.metadata.topic_names import (
    OFFSETS_TOPIC,
    SHARE_STATE_TOPIC,
    TRANSACTION_TOPIC,
)
from mpbroker.metadata.topics import MAX_PARTITIONS_PER_BATCH, Topic
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.create_partitions import (
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreatePartitionsTopic,
    CreatePartitionsTopicResult,
)
from mpbroker.server.errors import invalid_request
from mpbroker.server.handler_context import HandlerContext

# A hash of the group or transactional id chooses the partition of an internal topic, so
# another number of partitions would hide what is stored there. Kafka documents that its
# number "should not change after deployment", and changes it if it is asked to.
_FIXED: Final = (
    "The number of partitions of {} cannot be changed: it decides which of them has the"
    " records of a group or transaction, so what is there would not be found any more."
    " {} is the number that a new topic gets."
)
_SETTINGS: Final = {
    OFFSETS_TOPIC: "offsets.topic.num.partitions",
    TRANSACTION_TOPIC: "transaction.state.log.num.partitions",
    SHARE_STATE_TOPIC: "share.coordinator.state.topic.num.partitions",
}


def handle_create_partitions(
    request: CreatePartitionsRequest, context: HandlerContext
) -> CreatePartitionsResponse:
    """Add partitions to each topic for which the request is valid; answer each topic.

    Each topic's number of partitions is noted before the change (intent.py). So a
    second execution after the death of a handler knows what the first one has changed.
    """
    registry, intent = context.broker.registry, context.intent
    permit = context.mutation_permit(strict_since=3)
    earlier = intent.earlier()
    counts = [*earlier, *[0] * (len(request.topics) - len(earlier))]
    named = Counter(wanted.name for wanted in request.topics)
    results: dict[str, CreatePartitionsTopicResult] = {}
    left = MAX_PARTITIONS_PER_BATCH
    for place, wanted in enumerate(request.topics):
        result = CreatePartitionsTopicResult(
            name=wanted.name, error_code=ErrorCode.NONE
        )
        results[wanted.name] = result
        try:
            if named[wanted.name] > 1:
                raise invalid_request("Duplicate topic name.")
            topic = registry.topic(wanted.name)
            if topic is not None and 0 < counts[place] < wanted.count == len(
                topic.partitions
            ):
                continue
            if topic is not None and topic.is_internal:
                setting = _SETTINGS[topic.name]
                raise ApiError(
                    ErrorCode.INVALID_PARTITIONS, _FIXED.format(topic.name, setting)
                )
            _check_assignments(wanted, topic, context.broker.node_id)
            if topic is not None:
                left -= max(0, wanted.count - len(topic.partitions))
                if left < 0:
                    raise ApiError(
                        ErrorCode.POLICY_VIOLATION,
                        "Unable to perform excessively large batch operation: one"
                        f" request may add {MAX_PARTITIONS_PER_BATCH} partitions.",
                    )
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
    """Check the manual assignment of replicas for the new partitions.

    Do nothing if the request has none, or if the topic or its new number of partitions
    is wrong, which the TopicRegistry refuses later.

    Raises:
        ApiError: INVALID_REPLICA_ASSIGNMENT: a replica is on another broker, or the
            number of assignments is not that of the new partitions.
    """
    added = wanted.count - (len(topic.partitions) if topic is not None else 0)
    if wanted.assignments is None or topic is None or added <= 0:
        return  # the registry refuses an unknown topic and a count that is too small
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

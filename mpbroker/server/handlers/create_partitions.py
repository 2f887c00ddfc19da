"""CreatePartitions: add partitions to existing topics.

Source: Kafka protocol guide, "CreatePartitions";
ReplicationControlManager.createPartitions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

from mpbroker.metadata.topic_names import (
    OFFSETS_TOPIC,
    SHARE_STATE_TOPIC,
    TRANSACTION_TOPIC,
)
from mpbroker.metadata.topics import (
    MAX_PARTITIONS_PER_BATCH,
    MorePartitions,
    Topic,
    TopicRegistry,
)
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

    All are added with one write. Each topic's number of partitions is noted before it
    (intent.py). So a second execution after the death of a handler knows what the first
    one has changed.
    """
    registry, intent = context.broker.registry, context.intent
    earlier = intent.earlier()
    counts = [*earlier, *[0] * (len(request.topics) - len(earlier))]
    named = Counter(wanted.name for wanted in request.topics)
    results: dict[str, CreatePartitionsTopicResult] = {}
    valid: dict[int, MorePartitions] = {}  # by place in the request
    left = MAX_PARTITIONS_PER_BATCH
    for place, wanted in enumerate(request.topics):
        results[wanted.name] = CreatePartitionsTopicResult(
            name=wanted.name, error_code=ErrorCode.NONE
        )
        try:
            if named[wanted.name] > 1:
                raise invalid_request("Duplicate topic name.")
            topic = registry.topic(wanted.name)
            if topic is not None and 0 < counts[place] < wanted.count == len(
                topic.partitions
            ):
                continue
            _check(wanted, topic, context.broker.node_id)
            if topic is not None:
                left -= max(0, wanted.count - len(topic.partitions))
                if left < 0:
                    raise _too_many()
            valid[place] = MorePartitions(wanted.name, wanted.count)
        except ApiError as error:
            _refuse(results[wanted.name], error)
    permit = context.mutation_permit(strict_since=3)
    if permit is not None:
        valid = _permitted(valid, registry, permit, results)

    def about_to(outcomes: list[ApiError | None]) -> None:
        for (place, more), error in zip(valid.items(), outcomes, strict=True):
            topic = registry.topic(more.name)
            if topic is not None and error is None:
                counts[place] = len(topic.partitions)
        intent.note(counts)

    outcomes: list[ApiError | None]
    try:
        outcomes = registry.create_partitions(
            list(valid.values()),
            validate_only=request.validate_only,
            about_to=about_to,
        )
    except ApiError as error:  # nothing was changed
        outcomes = [error] * len(valid)
    for more, refusal in zip(valid.values(), outcomes, strict=True):
        if refusal is not None:
            _refuse(results[more.name], refusal)
    return CreatePartitionsResponse(results=list(results.values()))


def _permitted(
    wanted: Mapping[int, MorePartitions],
    registry: TopicRegistry,
    permit: Callable[[int], None],
    results: Mapping[str, CreatePartitionsTopicResult],
) -> dict[int, MorePartitions]:
    """Return the changes for which the sender's quota is enough, and charge it.

    A change that cannot be made is returned too, and not charged.

    Args:
        wanted: the changes, by their place in the request.
        registry: says which of them can be made.
        permit: charges the quota; raises ApiError if it is not enough.
        results: gets the refusals of the other topics, by name.
    """
    permitted = {}
    outcomes = registry.create_partitions(list(wanted.values()), validate_only=True)
    for (place, more), error in zip(wanted.items(), outcomes, strict=True):
        topic = registry.topic(more.name)
        try:
            if topic is not None and error is None:
                permit(more.total - len(topic.partitions))
            permitted[place] = more
        except ApiError as refusal:
            _refuse(results[more.name], refusal)
    return permitted


def _refuse(result: CreatePartitionsTopicResult, error: ApiError) -> None:
    result.error_code, result.error_message = error.error_code, str(error)


def _too_many() -> ApiError:
    return ApiError(
        ErrorCode.POLICY_VIOLATION,
        "Unable to perform excessively large batch operation: one request may add"
        f" {MAX_PARTITIONS_PER_BATCH} partitions.",
    )


def _check(wanted: CreatePartitionsTopic, topic: Topic | None, node_id: int) -> None:
    """Refuse a topic whose partitions cannot be changed, or a wrong assignment.

    Raises:
        ApiError: INVALID_PARTITIONS, or as _check_assignments().
    """
    if topic is not None and topic.is_internal:
        setting = _SETTINGS[topic.name]
        raise ApiError(ErrorCode.INVALID_PARTITIONS, _FIXED.format(topic.name, setting))
    _check_assignments(wanted, topic, node_id)


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

"""Metadata: describe the nodes and topics, and create topics that do not exist.

A topic is created if both the broker and the request allow it. The answer already
describes the new topic. (Kafka answers LEADER_NOT_AVAILABLE, and the client asks
again.)

Source: Kafka protocol guide, "Metadata"; KafkaApis.handleTopicMetadataRequest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final

from mpbroker.metadata.topic_names import check_topic_name
from mpbroker.metadata.topics import (
    MAX_PARTITIONS_PER_BATCH,
    NewTopic,
    Topic,
    TopicRegistry,
)
from mpbroker.protocol.acl import OPERATIONS, ResourceType
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.metadata import (
    MetadataRequest,
    MetadataRequestTopic,
    MetadataResponse,
    MetadataResponseBroker,
    MetadataResponseTopic,
)
from mpbroker.server.handler_context import Broker, HandlerContext
from mpbroker.server.leaders import Leaders

# Without an authorizer all operations are allowed: a bit for each operation of the
# resource type.
TOPIC_OPERATIONS: Final = sum(1 << bit for bit in OPERATIONS[ResourceType.TOPIC])
CLUSTER_OPERATIONS: Final = sum(1 << bit for bit in OPERATIONS[ResourceType.CLUSTER])


def handle_metadata(
    request: MetadataRequest, context: HandlerContext
) -> MetadataResponse:
    """Answer with the live nodes, their addresses for the client, and the topics."""
    broker, version = context.broker, context.version
    registry, others = broker.registry, context.other_nodes
    describe = partial(_describe, leaders=Leaders(broker, others))
    wanted = request.topics
    found: Sequence[Topic | None]
    if wanted is None or (version == 0 and not wanted):
        found = everything = registry.topics()
        topics = [describe(topic) for topic in everything]
    else:
        # Each topic once: a request of some MB that repeats one name would otherwise
        # get an answer of some GB.
        asked = list(
            {(each.asked_name, each.topic_id): each for each in wanted}.values()
        )
        found = [_find(each, registry) for each in asked]
        refusals: Mapping[str, ApiError] = {}
        if None in found:
            may_create = version < 4 or request.allow_auto_topic_creation
            refusals = _create_missing(asked, context, may_create=may_create)
            found = [_find(each, registry) for each in asked]
        topics = [
            _missing(each, refusals, version) if topic is None else describe(topic)
            for each, topic in zip(asked, found, strict=True)
        ]
    if _may_be_repeated(found, broker):
        context.repeatable = ()
    host, port = context.endpoint
    response = MetadataResponse(
        brokers=[
            MetadataResponseBroker(
                node_id=broker.node_id, host=host, port=port, rack=broker.rack
            ),
            *(MetadataResponseBroker(**each._asdict()) for each in others),
        ],
        cluster_id=broker.cluster_id,
        controller_id=broker.node_id,
        topics=topics,
    )
    if version >= 8 and request.include_topic_authorized_operations:
        for described_topic in topics:
            if described_topic.error_code == ErrorCode.NONE:
                described_topic.topic_authorized_operations = TOPIC_OPERATIONS
    if 8 <= version <= 10 and request.include_cluster_authorized_operations:
        response.cluster_authorized_operations = CLUSTER_OPERATIONS
    return response


def _find(wanted: MetadataRequestTopic, registry: TopicRegistry) -> Topic | None:
    """Return the topic that a request names by name or id; None if there is none."""
    name = wanted.asked_name
    if name is None:
        return registry.topic_by_id(wanted.topic_id)
    return registry.topic(name)


def _may_be_repeated(found: Iterable[Topic | None], broker: Broker) -> bool:
    """Return whether an answer holds until the metadata log or a directory changes.

    It does not if a topic is missing, if a leader epoch could not be read, if a
    partition is offline, or if other nodes come and go.
    """
    return broker.nodes is None and all(
        topic is not None and broker.described.may_be_repeated(topic) for topic in found
    )


def _missing(
    wanted: MetadataRequestTopic, refusals: Mapping[str, ApiError], version: int
) -> MetadataResponseTopic:
    """Return the answer for a topic that does not exist, with its error.

    Args:
        wanted: the topic as the request names it.
        refusals: why topics were not created, by name.
        version: the version of the request.
    """
    name = wanted.asked_name
    if name is None:
        return MetadataResponseTopic(
            error_code=ErrorCode.UNKNOWN_TOPIC_ID,
            name=None if version >= 12 else "",
            topic_id=wanted.topic_id,
        )
    refusal = refusals.get(name)  # none: it was deleted a moment ago
    code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    return MetadataResponseTopic(
        error_code=code if refusal is None else refusal.error_code, name=name
    )


def _charge(permit: Callable[[int], None], new: NewTopic) -> None:
    """Charge the sender for the partitions of a new topic.

    Raises:
        ApiError: LEADER_NOT_AVAILABLE: the sender has used up its quota. No version of
            Metadata has an error for that.
    """
    try:
        permit(new.num_partitions)
    except ApiError as error:
        raise ApiError(ErrorCode.LEADER_NOT_AVAILABLE, str(error)) from None


# Topics that are created because a client asks for them leave this part of the broker's
# partitions to CreateTopics and CreatePartitions: a quarter.
AUTO_CREATION_SPARES: Final = 4


def _create_missing(
    asked: Iterable[MetadataRequestTopic],
    context: HandlerContext,
    *,
    may_create: bool,
) -> dict[str, ApiError]:
    """Create the topics that do not exist, all with one write to disk.

    Returns:
        The errors of the topics that still do not exist, by name. A topic that is more
        than one request may create, or more than the sender's controller_mutation_rate
        allows now, gets LEADER_NOT_AVAILABLE, so that clients ask again.
    """
    broker = context.broker
    registry, refusals = broker.registry, dict[str, ApiError]()
    permit = context.mutation_permit(strict_since=0)
    missing: list[NewTopic] = []
    left = MAX_PARTITIONS_PER_BATCH
    for each in asked:
        name = each.asked_name
        if name is None or registry.topic(name) is not None:
            continue
        try:
            check_topic_name(name)
            if not broker.auto_create_topics or not may_create:
                raise ApiError(
                    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {name}"
                )
            new = broker.internal_topics.get(name)
            new = new or NewTopic(name, broker.num_partitions)
            if new.num_partitions > left:
                left = 0
                raise ApiError(
                    ErrorCode.LEADER_NOT_AVAILABLE,
                    f"one request may create {MAX_PARTITIONS_PER_BATCH} partitions",
                )
            if permit is not None:
                _charge(permit, new)
        except ApiError as error:
            refusals[name] = error
        else:
            left -= new.num_partitions
            missing.append(new)
    if missing:
        # A client that asks for many names must not use up the partitions of all.
        spare = registry.capacity // AUTO_CREATION_SPARES
        outcomes = registry.create_topics(missing, spare=spare)
        for new, outcome in zip(missing, outcomes, strict=True):
            if isinstance(outcome, ApiError):
                refusals[new.name] = outcome
    return refusals


def _describe(topic: Topic, leaders: Leaders) -> MetadataResponseTopic:
    return MetadataResponseTopic(
        error_code=ErrorCode.NONE,
        name=topic.name,
        topic_id=topic.topic_id,
        is_internal=topic.is_internal,
        partitions=leaders.partitions(topic),
    )

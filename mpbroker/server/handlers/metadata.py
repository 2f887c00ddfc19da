"""Metadata: describe the broker and topics, and create topics that do not exist.

A topic is created if both the broker and the request allow it. The answer already
describes the new topic; Kafka answers LEADER_NOT_AVAILABLE, and the client asks again.

Source: Kafka protocol guide, "Metadata"; KafkaApis.handleTopicMetadataRequest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
from mpbroker.server.described_partitions import DescribedPartitions
from mpbroker.server.handler_context import Broker, HandlerContext

# Without an authorizer all operations are allowed: a bit for each operation of the
# resource type.
TOPIC_OPERATIONS: Final = sum(1 << bit for bit in OPERATIONS[ResourceType.TOPIC])
CLUSTER_OPERATIONS: Final = sum(1 << bit for bit in OPERATIONS[ResourceType.CLUSTER])


def handle_metadata(
    request: MetadataRequest, context: HandlerContext
) -> MetadataResponse:
    """Answer with this broker, its address for the client, and the wanted topics."""
    broker, version = context.broker, context.version
    registry, described = broker.registry, broker.described
    wanted = request.topics
    if wanted is None or (version == 0 and not wanted):
        topics = [_describe(topic, described) for topic in registry.topics()]
    else:
        # Each topic once: a request of some MB that repeats one name would otherwise
        # get an answer of some GB.
        asked = list({(each.name, each.topic_id): each for each in wanted}.values())
        found = [_find(each, registry) for each in asked]
        refusals: Mapping[str, ApiError] = {}
        if None in found:
            may_create = version < 4 or request.allow_auto_topic_creation
            refusals = _create_missing(asked, broker, may_create=may_create)
            found = [_find(each, registry) for each in asked]
        topics = [
            _missing(each, refusals, version)
            if topic is None
            else _describe(topic, described)
            for each, topic in zip(asked, found, strict=True)
        ]
    host, port = context.endpoint
    response = MetadataResponse(
        brokers=[
            MetadataResponseBroker(
                node_id=broker.node_id, host=host, port=port, rack=broker.rack
            )
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
    """Return a topic by its name, or by its id if the request has no name."""
    if wanted.name is None:
        return registry.topic_by_id(wanted.topic_id)
    return registry.topic(wanted.name)


def _missing(
    wanted: MetadataRequestTopic, refusals: Mapping[str, ApiError], version: int
) -> MetadataResponseTopic:
    """Describe a topic that does not exist by its error."""
    name = wanted.name
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


def _create_missing(
    asked: Iterable[MetadataRequestTopic], broker: Broker, *, may_create: bool
) -> dict[str, ApiError]:
    """Create the topics that do not exist, all with one write to disk.

    Returns:
        Why a topic still does not exist, by name. LEADER_NOT_AVAILABLE, at which
        clients ask again, for what is more than one request may create.
    """
    registry, refusals = broker.registry, dict[str, ApiError]()
    missing: list[NewTopic] = []
    left = MAX_PARTITIONS_PER_BATCH
    for each in asked:
        name = each.name
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
        except ApiError as error:
            refusals[name] = error
        else:
            left -= new.num_partitions
            missing.append(new)
    if missing:
        try:
            outcomes = registry.create_topics(missing)
        except ApiError as error:  # nothing was created
            outcomes = [error] * len(missing)
        for new, outcome in zip(missing, outcomes, strict=True):
            if isinstance(outcome, ApiError):
                refusals[new.name] = outcome
    return refusals


def _describe(topic: Topic, described: DescribedPartitions) -> MetadataResponseTopic:
    return MetadataResponseTopic(
        error_code=ErrorCode.NONE,
        name=topic.name,
        topic_id=topic.topic_id,
        is_internal=topic.is_internal,
        partitions=described.partitions(topic),
    )

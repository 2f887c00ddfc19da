"""Metadata: describe the broker and topics, and create topics that do not exist.

A topic is created if both the broker and the request allow it. The answer already
describes the new topic; Kafka answers LEADER_NOT_AVAILABLE, and the client asks again.

Source: Kafka protocol guide, "Metadata"; KafkaApis.handleTopicMetadataRequest.
"""

from __future__ import annotations

from typing import Final

from mpbroker.metadata.topic_names import check_topic_name
from mpbroker.metadata.topics import Topic
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
        topics = []
        # Each topic once: a request of some MB that repeats one name would otherwise
        # get an answer of some GB.
        for each in {(each.name, each.topic_id): each for each in wanted}.values():
            name = each.name
            if name is None:
                topic = registry.topic_by_id(each.topic_id)
            else:
                topic = registry.topic(name)
            topics.append(
                _missing(each, request, context)
                if topic is None
                else _describe(topic, described)
            )
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


def _missing(
    wanted: MetadataRequestTopic, request: MetadataRequest, context: HandlerContext
) -> MetadataResponseTopic:
    """Create a topic that does not exist and describe it, or return its error."""
    broker, version, name = context.broker, context.version, wanted.name
    if name is None:
        return MetadataResponseTopic(
            error_code=ErrorCode.UNKNOWN_TOPIC_ID,
            name=None if version >= 12 else "",
            topic_id=wanted.topic_id,
        )
    may_create = version < 4 or request.allow_auto_topic_creation
    try:
        topic = _create(name, broker, may_create=may_create)
    except ApiError as error:
        return MetadataResponseTopic(error_code=error.error_code, name=name)
    return _describe(topic, broker.described)


def _create(name: str, broker: Broker, *, may_create: bool) -> Topic:
    """Create a topic with the broker's defaults.

    Raises:
        ApiError: UNKNOWN_TOPIC_OR_PARTITION: the broker or the request does not allow
            it; or another code: the topic cannot be created.
    """
    if not broker.auto_create_topics or not may_create:
        check_topic_name(name)
        raise ApiError(
            ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {name}"
        )
    registry, internal = broker.registry, broker.internal_topics.get(name)
    try:
        if internal is not None:
            return registry.create_topic(*internal)
        return registry.create_topic(name, broker.num_partitions)
    except ApiError as error:
        topic = registry.topic(name)  # another process may have created it meanwhile
        if error.error_code == ErrorCode.TOPIC_ALREADY_EXISTS and topic is not None:
            return topic
        raise


def _describe(topic: Topic, described: DescribedPartitions) -> MetadataResponseTopic:
    return MetadataResponseTopic(
        error_code=ErrorCode.NONE,
        name=topic.name,
        topic_id=topic.topic_id,
        is_internal=topic.is_internal,
        partitions=described.partitions(topic),
    )

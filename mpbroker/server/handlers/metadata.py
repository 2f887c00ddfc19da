"""Metadata: the broker, and the topics a client asks for.

Topics that do not exist are created when both the broker and the request allow it; the
answer then has them already, where Kafka says LEADER_NOT_AVAILABLE and makes the client
ask again.

Source: Kafka protocol guide, "Metadata"; KafkaApis.handleTopicMetadataRequest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.metadata import (
    MetadataRequest,
    MetadataRequestTopic,
    MetadataResponse,
    MetadataResponseBroker,
    MetadataResponsePartition,
    MetadataResponseTopic,
)
from mpbroker.storage.topic_names import check_topic_name
from mpbroker.storage.topics import Topic

_LEADER_EPOCH: Final = 0
# Bits of org.apache.kafka.common.acl.AclOperation that apply to each resource: without
# an authorizer everyone may do all of them.
TOPIC_OPERATIONS: Final = sum(1 << bit for bit in (3, 4, 5, 6, 7, 8, 10, 11))
CLUSTER_OPERATIONS: Final = sum(1 << bit for bit in (5, 7, 8, 9, 10, 11, 12))


class Registry(Protocol):
    """The part of the TopicRegistry that is read here."""

    def topic(self, name: str) -> Topic | None: ...

    def topic_by_id(self, topic_id: bytes) -> Topic | None: ...

    def topics(self) -> list[Topic]: ...


class MetadataAnswers:
    """Answers Metadata requests; keeps each topic's part until the topic changes."""

    def __init__(
        self,
        registry: Registry,
        *,
        node_id: int,
        rack: str | None,
        cluster_id: str,
        create: Callable[[str], Topic] | None,
    ) -> None:
        """Answer from ``registry``.

        Args:
            create: makes a topic with the broker's defaults; None: topics are not
                created for being asked for (auto.create.topics.enable).
        """
        self._registry = registry
        self._node_id = node_id
        self._rack = rack
        self._cluster_id = cluster_id
        self._create = create
        self._partitions: dict[int, list[MetadataResponsePartition]] = {}

    def handle(
        self, request: MetadataRequest, version: int, host: str, port: int
    ) -> MetadataResponse:
        """Answer with this broker at ``host`` and ``port``."""
        wanted = request.topics
        if wanted is None or (version == 0 and not wanted):
            topics = [
                self._describe(topic, request, version)
                for topic in self._registry.topics()
            ]
        else:
            # Once each: a few megabytes that repeat one name would ask for gigabytes.
            once = {(each.name, each.topic_id): each for each in wanted}
            topics = [self._answer(each, request, version) for each in once.values()]
        response = MetadataResponse(
            brokers=[
                MetadataResponseBroker(
                    node_id=self._node_id, host=host, port=port, rack=self._rack
                )
            ],
            cluster_id=self._cluster_id,
            controller_id=self._node_id,
            topics=topics,
        )
        if 8 <= version <= 10 and request.include_cluster_authorized_operations:
            response.cluster_authorized_operations = CLUSTER_OPERATIONS
        return response

    def _answer(
        self, wanted: MetadataRequestTopic, request: MetadataRequest, version: int
    ) -> MetadataResponseTopic:
        name = wanted.name
        if name is None:
            topic = self._registry.topic_by_id(wanted.topic_id)
            if topic is None:
                return MetadataResponseTopic(
                    error_code=ErrorCode.UNKNOWN_TOPIC_ID,
                    name=None if version >= 12 else "",
                    topic_id=wanted.topic_id,
                )
            return self._describe(topic, request, version)
        topic = self._registry.topic(name)
        if topic is None:
            try:
                topic = self._create_missing(name, request, version)
            except ApiError as error:
                return MetadataResponseTopic(error_code=error.error_code, name=name)
        return self._describe(topic, request, version)

    def _create_missing(
        self, name: str, request: MetadataRequest, version: int
    ) -> Topic:
        allowed = request.allow_auto_topic_creation or version < 4
        if self._create is None or not allowed:
            check_topic_name(name)
            raise ApiError(
                ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {name}"
            )
        try:
            return self._create(name)
        except ApiError as error:
            topic = self._registry.topic(name)  # somebody else was faster
            if error.error_code == ErrorCode.TOPIC_ALREADY_EXISTS and topic is not None:
                return topic
            raise

    def _describe(
        self, topic: Topic, request: MetadataRequest, version: int
    ) -> MetadataResponseTopic:
        described = MetadataResponseTopic(
            error_code=ErrorCode.NONE,
            name=topic.name,
            topic_id=topic.topic_id,
            is_internal=topic.is_internal,
            partitions=self._partitions_of(len(topic.partitions)),
        )
        if version >= 8 and request.include_topic_authorized_operations:
            described.topic_authorized_operations = TOPIC_OPERATIONS
        return described

    def _partitions_of(self, count: int) -> list[MetadataResponsePartition]:
        """On one node all topics with as many partitions look alike."""
        known = self._partitions.get(count)
        if known is None:
            node = [self._node_id]
            known = self._partitions[count] = [
                MetadataResponsePartition(
                    error_code=ErrorCode.NONE,
                    partition_index=index,
                    leader_id=self._node_id,
                    leader_epoch=_LEADER_EPOCH,
                    replica_nodes=node,
                    isr_nodes=node,
                )
                for index in range(count)
            ]
        return known

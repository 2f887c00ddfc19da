"""Metadata: the broker, and the topics a client asks for.

Topics that do not exist are created when both the broker and the request allow it; the
answer then has them already, where Kafka says LEADER_NOT_AVAILABLE and makes the client
ask again.

Source: Kafka protocol guide, "Metadata"; KafkaApis.handleTopicMetadataRequest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from mpbroker.metadata.topic_names import check_topic_name
from mpbroker.metadata.topics import Topic
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
from mpbroker.storage.files.leader_epochs import UNDEFINED

_MAX_TOPICS: Final = 20_000
# Bits of org.apache.kafka.common.acl.AclOperation that apply to each resource: without
# an authorizer everyone may do all of them.
TOPIC_OPERATIONS: Final = sum(1 << bit for bit in (3, 4, 5, 6, 7, 8, 10, 11))
CLUSTER_OPERATIONS: Final = sum(1 << bit for bit in (5, 7, 8, 9, 10, 11, 12))


# The leader epoch of a topic's partition.
LeaderEpoch = Callable[[Topic, int], int]


def all_are_first(topic: Topic, partition: int) -> int:
    """As it is where no other broker has ever led."""
    return 0


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
        leader_epoch: LeaderEpoch = all_are_first,
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
        self._leader_epoch = leader_epoch
        self._partitions: dict[tuple[int, ...], list[MetadataResponsePartition]] = {}
        self._of_topics: dict[bytes, list[MetadataResponsePartition]] = {}

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
            partitions=self._partitions_of(topic),
        )
        if version >= 8 and request.include_topic_authorized_operations:
            described.topic_authorized_operations = TOPIC_OPERATIONS
        return described

    def _partitions_of(self, topic: Topic) -> list[MetadataResponsePartition]:
        """Found once: nobody else leads here, so epochs stay what they are."""
        known = self._of_topics.get(topic.topic_id)
        if known is None or len(known) != len(topic.partitions):
            epochs = tuple(
                self._leader_epoch(topic, index)
                for index in range(len(topic.partitions))
            )
            known = self._alike(epochs)
            if UNDEFINED not in epochs:
                if len(self._of_topics) >= _MAX_TOPICS:
                    self._of_topics.clear()
                    self._partitions.clear()
                self._of_topics[topic.topic_id] = known
        return known

    def _alike(self, epochs: tuple[int, ...]) -> list[MetadataResponsePartition]:
        """On one node all topics with as many partitions look alike, mostly."""
        known = self._partitions.get(epochs)
        if known is None:
            node = [self._node_id]
            known = self._partitions[epochs] = [
                MetadataResponsePartition(
                    error_code=ErrorCode.NONE,
                    partition_index=index,
                    leader_id=self._node_id,
                    leader_epoch=epoch,
                    replica_nodes=node,
                    isr_nodes=node,
                )
                for index, epoch in enumerate(epochs)
            ]
        return known

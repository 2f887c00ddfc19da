"""Define the authorization rules of the APIs about topics.

A rule takes the sender's access, the request and the version of the API. It removes the
parts of the request that are denied, and returns a function that adds their refusals to
the response (rulings.py). If all is denied, it may return the whole answer. apis.py
names the rule of each API.

A sender without DESCRIBE permission for a topic name gets the same answer if the topic
exists and if it does not. Topic ids are no secret: a sender that knows an id learns
whether the topic exists.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from mpbroker.protocol.acl import CLUSTER_NAME, AclOperation, ResourceType
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.create_partitions import (
    CreatePartitionsRequest,
    CreatePartitionsTopicResult,
)
from mpbroker.protocol.messages.create_topics import (
    CreatableTopicResult,
    CreateTopicsRequest,
    CreateTopicsResponse,
)
from mpbroker.protocol.messages.delete_records import (
    DeleteRecordsPartitionResult,
    DeleteRecordsRequest,
    DeleteRecordsTopicResult,
)
from mpbroker.protocol.messages.delete_topics import (
    DeletableTopicResult,
    DeleteTopicsRequest,
    DeleteTopicState,
)
from mpbroker.protocol.messages.describe_producers import (
    DescribeProducersRequest,
    PartitionResponse,
    TopicResponse,
)
from mpbroker.protocol.messages.describe_topic_partitions import (
    DescribeTopicPartitionsRequest,
    DescribeTopicPartitionsResponse,
    DescribeTopicPartitionsResponseTopic,
    TopicRequest,
)
from mpbroker.protocol.messages.list_offsets import (
    ListOffsetsPartitionResponse,
    ListOffsetsRequest,
    ListOffsetsTopicResponse,
)
from mpbroker.protocol.messages.metadata import (
    MetadataRequest,
    MetadataRequestTopic,
    MetadataResponse,
    MetadataResponseTopic,
)
from mpbroker.protocol.messages.offset_for_leader_epoch import (
    EpochEndOffset,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderTopicResult,
)
from mpbroker.protocol.messages.produce import (
    PartitionProduceResponse,
    ProduceRequest,
    TopicProduceData,
    TopicProduceResponse,
)
from mpbroker.server.authorization.authorization import TOPIC_DENIED, Access
from mpbroker.server.authorization.rulings import (
    Amend,
    Ruling,
    append_to,
    take_denied,
)

_O = AclOperation
_DENIED: Final = ErrorCode.TOPIC_AUTHORIZATION_FAILED
_NO_ID: Final = bytes(16)
_IDS_SINCE_PRODUCE: Final = 13
_IDS_SINCE_DELETE: Final = 6


# -- descriptions of topics -----------------------------------------------------------


def metadata(access: Access, request: MetadataRequest, version: int) -> Amend | None:
    """Require DESCRIBE for each topic, and CREATE for a topic that would be created.

    If a request wants all topics, the denied topics are left out of the response.
    """
    wanted = request.topics
    is_all = wanted is None or (version == 0 and not wanted)
    refusals: list[MetadataResponseTopic] = []
    if wanted is not None and not is_all:
        once = {(each.asked_name, each.topic_id): each for each in wanted}.values()
        request.topics, refusals = _metadata_topics(access, request, once)
    shows_operations = version >= 8 and request.include_topic_authorized_operations
    shows_cluster = 8 <= version <= 10 and request.include_cluster_authorized_operations
    if not (is_all or refusals or shows_operations or shows_cluster):
        return None
    nothing_left = not is_all and not request.topics

    def amend(response: MetadataResponse) -> None:
        if nothing_left:
            response.topics = []  # in version 0 an empty list has meant all topics
        elif is_all:
            response.topics = [
                topic
                for topic in response.topics
                if topic.name and access.may_topic(_O.DESCRIBE, topic.name, log=False)
            ]
        if shows_operations:
            _show_operations(access, response.topics)
        if shows_cluster:
            response.cluster_authorized_operations = cluster_operations(access)
        response.topics += refusals

    return amend


def _metadata_topics(
    access: Access, request: MetadataRequest, wanted: Iterable[MetadataRequestTopic]
) -> tuple[list[MetadataRequestTopic], list[MetadataResponseTopic]]:
    """Return the topics of a request that are allowed, and refusals of the others.

    Args:
        access: the sender's access.
        request: the request.
        wanted: the topics that it names, each once.
    """
    allowed, refusals = [], []
    for each in wanted:
        name = each.asked_name
        if name is None:
            topic = access.topics.topic_by_id(each.topic_id)
            is_denied = topic is not None and not access.may_topic(
                _O.DESCRIBE, topic.name
            )
        else:
            is_denied = not access.may_topic(_O.DESCRIBE, name) or not _may_be_created(
                access, request, name
            )
        if is_denied:
            refusals.append(
                MetadataResponseTopic(
                    error_code=_DENIED,
                    name=name,
                    topic_id=each.topic_id if name is None else _NO_ID,
                )
            )
        else:
            allowed.append(each)
    return allowed, refusals


def _may_be_created(access: Access, request: MetadataRequest, name: str) -> bool:
    """Return whether a request for a topic may reach the handler.

    Return True if the topic exists, if the handler would not create it, or if the
    sender may create it.
    """
    return (
        not access.auto_create_topics
        or not request.allow_auto_topic_creation
        or access.topics.topic(name) is not None
        or access.may_cluster(_O.CREATE, log=False)
        or access.may_topic(_O.CREATE, name)
    )


def _show_operations(access: Access, topics: Iterable[Any]) -> None:
    """Store in each topic of a response which operations the sender may do on it."""
    for topic in topics:
        if topic.name:
            topic.topic_authorized_operations = access.operations(
                ResourceType.TOPIC, topic.name
            )


def cluster_operations(access: Access) -> int:
    """Return which operations the sender may do on the cluster.

    Bit N of the result is AclOperation N. A sender without DESCRIBE of the cluster
    gets 0.
    """
    if not access.may_cluster(_O.DESCRIBE):
        return 0
    return access.operations(ResourceType.CLUSTER, CLUSTER_NAME)


def describe_topic_partitions(
    access: Access, request: DescribeTopicPartitionsRequest, version: int
) -> Ruling:
    """Require DESCRIBE permission for each topic.

    If a request wants all topics, the denied topics are left out of the response.
    """
    denied: list[TopicRequest] = []
    if request.topics:
        denied = take_denied(
            request, "topics", lambda topic: access.may_topic(_O.DESCRIBE, topic.name)
        )
    else:
        # Name them all: the cursor to the next page must not name a hidden topic.
        request.topics = [
            TopicRequest(name=topic.name)
            for topic in access.topics.topics()
            if access.may_topic(_O.DESCRIBE, topic.name, log=False)
        ]
    refusals = [
        DescribeTopicPartitionsResponseTopic(error_code=_DENIED, name=topic.name)
        for topic in denied
    ]
    if not request.topics:
        return DescribeTopicPartitionsResponse(topics=refusals)

    def amend(response: DescribeTopicPartitionsResponse) -> None:
        _show_operations(access, response.topics)
        response.topics += refusals

    return amend


# -- changes of topics ----------------------------------------------------------------


def create_topics(access: Access, request: CreateTopicsRequest, version: int) -> Amend:
    """Require CREATE permission for the cluster, or else CREATE for each topic.

    The response shows a new topic's configs and numbers only to a sender with
    DESCRIBE_CONFIGS of the topic.
    """
    denied: list[Any] = []
    if not access.may_cluster(_O.CREATE, log=False):
        denied = take_denied(
            request, "topics", lambda topic: access.may_topic(_O.CREATE, topic.name)
        )
    refusals = [
        CreatableTopicResult(
            name=topic.name,
            error_code=_DENIED,
            error_message="Authorization failed.",
            configs=[],
        )
        for topic in denied
    ]

    def amend(response: CreateTopicsResponse) -> None:
        for topic in response.topics:
            if not topic.error_code and not access.may_topic(
                _O.DESCRIBE_CONFIGS, topic.name, log=False
            ):
                topic.topic_config_error_code = _DENIED
                topic.num_partitions = topic.replication_factor = -1
                topic.configs = []
        response.topics += refusals

    return amend


def delete_topics(
    access: Access, request: DeleteTopicsRequest, version: int
) -> Amend | None:
    """Require DELETE permission for each topic."""
    if version < _IDS_SINCE_DELETE:
        names = take_denied(
            request, "topic_names", lambda name: access.may_topic(_O.DELETE, name)
        )
        refusals = [_undeleted(name) for name in names]
    else:
        states = take_denied(
            request, "topics", lambda state: _may_delete(access, state)
        )
        refusals = [
            _undeleted(_told_name(access, state), state.topic_id) for state in states
        ]
    return append_to("responses", refusals)


def _undeleted(name: str | None, topic_id: bytes = _NO_ID) -> DeletableTopicResult:
    return DeletableTopicResult(
        name=name, topic_id=topic_id, error_code=_DENIED, error_message=TOPIC_DENIED
    )


def _name_of(access: Access, state: DeleteTopicState) -> str | None:
    """Return the name of a topic given by name or id; None if no topic has the id."""
    if state.name is not None:
        return state.name
    topic = access.topics.topic_by_id(state.topic_id)
    return None if topic is None else topic.name


def _may_delete(access: Access, state: DeleteTopicState) -> bool:
    name = _name_of(access, state)
    return name is None or access.may_topic(_O.DELETE, name)


def _told_name(access: Access, state: DeleteTopicState) -> str | None:
    """Return the topic name to put into a refusal; None if it must stay hidden.

    A topic's name is hidden if the request has only its id, and the sender lacks
    DESCRIBE.
    """
    name = _name_of(access, state)
    if (
        state.name is None
        and name is not None
        and not access.may_topic(_O.DESCRIBE, name, log=False)
    ):
        return None
    return name


def create_partitions(
    access: Access, request: CreatePartitionsRequest, version: int
) -> Amend | None:
    """Require ALTER permission for each topic."""
    denied = take_denied(
        request, "topics", lambda topic: access.may_topic(_O.ALTER, topic.name)
    )
    return append_to(
        "results",
        [
            CreatePartitionsTopicResult(
                name=topic.name, error_code=_DENIED, error_message=TOPIC_DENIED
            )
            for topic in denied
        ],
    )


# -- partitions -----------------------------------------------------------------------


def list_offsets(
    access: Access, request: ListOffsetsRequest, version: int
) -> Amend | None:
    """Require DESCRIBE permission for each topic."""
    denied = take_denied(
        request, "topics", lambda topic: access.may_topic(_O.DESCRIBE, topic.name)
    )
    return append_to(
        "topics",
        [
            ListOffsetsTopicResponse(
                name=topic.name,
                partitions=[
                    ListOffsetsPartitionResponse(
                        partition_index=each.partition_index, error_code=_DENIED
                    )
                    for each in topic.partitions
                ],
            )
            for topic in denied
        ],
    )


def delete_records(
    access: Access, request: DeleteRecordsRequest, version: int
) -> Amend | None:
    """Require DELETE permission for each topic."""
    denied = take_denied(
        request, "topics", lambda topic: access.may_topic(_O.DELETE, topic.name)
    )
    return append_to(
        "topics",
        [
            DeleteRecordsTopicResult(
                name=topic.name,
                partitions=[
                    DeleteRecordsPartitionResult(
                        partition_index=each.partition_index,
                        low_watermark=-1,
                        error_code=_DENIED,
                    )
                    for each in topic.partitions
                ],
            )
            for topic in denied
        ],
    )


def offset_for_leader_epoch(
    access: Access, request: OffsetForLeaderEpochRequest, version: int
) -> Amend | None:
    """Require CLUSTER_ACTION for the cluster, or else DESCRIBE for each topic.

    Brokers have CLUSTER_ACTION.

    Source: KIP-320.
    """
    if access.may_cluster(_O.CLUSTER_ACTION, log=False):
        return None
    denied = take_denied(
        request, "topics", lambda topic: access.may_topic(_O.DESCRIBE, topic.topic)
    )
    return append_to(
        "topics",
        [
            OffsetForLeaderTopicResult(
                topic=topic.topic,
                partitions=[
                    EpochEndOffset(partition=each.partition, error_code=_DENIED)
                    for each in topic.partitions
                ],
            )
            for topic in denied
        ],
    )


def describe_producers(
    access: Access, request: DescribeProducersRequest, version: int
) -> Amend | None:
    """Require READ permission for each topic."""
    denied = take_denied(
        request, "topics", lambda topic: access.may_topic(_O.READ, topic.name)
    )
    return append_to(
        "topics",
        [
            TopicResponse(
                name=topic.name,
                partitions=[
                    PartitionResponse(
                        partition_index=index,
                        error_code=_DENIED,
                        error_message=TOPIC_DENIED,
                    )
                    for index in topic.partition_indexes
                ],
            )
            for topic in denied
        ],
    )


def forwarded_produce(
    access: Access, request: ProduceRequest, version: int
) -> Amend | None:
    """Require WRITE permission for each topic before the coordinator adds partitions.

    The handler process has asked for this permission before, and asks again when it
    appends. This rule only keeps denied partitions out of the transaction, so it logs
    no denial.
    """

    def may_write(data: TopicProduceData) -> bool:
        if version < _IDS_SINCE_PRODUCE:
            return access.may_topic(_O.WRITE, data.name, log=False)
        topic = access.topics.topic_by_id(data.topic_id)
        return topic is None or access.may_topic(_O.WRITE, topic.name, log=False)

    denied = take_denied(request, "topic_data", may_write)
    return append_to(
        "responses",
        [
            TopicProduceResponse(
                name=data.name,
                topic_id=data.topic_id,
                partition_responses=[
                    PartitionProduceResponse(
                        index=each.index, error_code=_DENIED, base_offset=-1
                    )
                    for each in data.partition_data
                ],
            )
            for data in denied
        ],
    )

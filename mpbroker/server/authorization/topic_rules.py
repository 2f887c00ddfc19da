"""The rules of APIs about topics: see apis.py.

A topic that somebody may not describe must look the same whether it is there or not.
Ids of topics are no secret: who names one is told that it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpbroker.protocol.acl import AclOperation, ResourceType
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages import create_partitions as create_partitions_messages
from mpbroker.protocol.messages import create_topics as create_topics_messages
from mpbroker.protocol.messages import delete_records as delete_records_messages
from mpbroker.protocol.messages import delete_topics as delete_topics_messages
from mpbroker.protocol.messages import describe_producers as describe_producers_messages
from mpbroker.protocol.messages import (
    describe_topic_partitions as describe_topic_partitions_messages,
)
from mpbroker.protocol.messages import list_offsets as list_offsets_messages
from mpbroker.protocol.messages import metadata as metadata_messages
from mpbroker.protocol.messages import offset_for_leader_epoch as epoch_messages
from mpbroker.protocol.messages import produce as produce_messages
from mpbroker.server.authorization.authorization import (
    TOPIC_DENIED,
    Access,
    Verdict,
    refused,
)

_O = AclOperation
_DENIED = ErrorCode.TOPIC_AUTHORIZATION_FAILED
_IDS_SINCE_PRODUCE = 13


def split(
    items: Sequence[Any], is_allowed: Callable[[Any], bool]
) -> tuple[list[Any], list[Any]]:
    """Those that are allowed, and the others."""
    allowed: list[Any] = []
    denied: list[Any] = []
    for item in items:
        (allowed if is_allowed(item) else denied).append(item)
    return allowed, denied


def metadata(access: Access, request: Any, version: int) -> Verdict | None:
    """Describe; and what is not there may be created, or is refused."""
    wanted = request.topics
    is_all = wanted is None or (version == 0 and not wanted)
    refusals: list[Any] = []
    if not is_all:
        once = {(each.name, each.topic_id): each for each in wanted}.values()
        request.topics, refusals = _metadata_topics(access, request, once)
    shows_operations = version >= 8 and request.include_topic_authorized_operations
    shows_cluster = 8 <= version <= 10 and request.include_cluster_authorized_operations
    if not (is_all or refusals or shows_operations or shows_cluster):
        return None
    nothing_left = not is_all and not request.topics

    def amend(response: Any) -> None:
        if nothing_left:
            response.topics = []  # of version 0 it was asked for all
        elif is_all:
            response.topics = [
                topic
                for topic in response.topics
                if access.may_topic(_O.DESCRIBE, topic.name, log=False)
            ]
        if shows_operations:
            for topic in response.topics:
                if topic.name:
                    topic.topic_authorized_operations = access.operations(
                        ResourceType.TOPIC, topic.name
                    )
        if shows_cluster:
            response.cluster_authorized_operations = cluster_operations(access)
        response.topics += refusals

    return Verdict(request, amend)


def _metadata_topics(
    access: Access, request: Any, wanted: Any
) -> tuple[list[Any], list[Any]]:
    allowed, refusals = [], []
    for each in wanted:
        name = each.name
        if name is None:
            topic = access.topics.topic_by_id(each.topic_id)
            if topic is not None and not access.may_topic(_O.DESCRIBE, topic.name):
                refusals.append(
                    metadata_messages.MetadataResponseTopic(
                        error_code=_DENIED, name=None, topic_id=each.topic_id
                    )
                )
                continue
        elif not access.may_topic(_O.DESCRIBE, name) or not _may_be_created(
            access, request, name
        ):
            refusals.append(
                metadata_messages.MetadataResponseTopic(error_code=_DENIED, name=name)
            )
            continue
        allowed.append(each)
    return allowed, refusals


def _may_be_created(access: Access, request: Any, name: str) -> bool:
    """Whether asking for a topic that is not there does what the sender may."""
    return (
        not access.auto_create_topics
        or not request.allow_auto_topic_creation
        or access.topics.topic(name) is not None
        or access.may_cluster(_O.CREATE, log=False)
        or access.may_topic(_O.CREATE, name)
    )


def cluster_operations(access: Access) -> int:
    """What is shown of what the sender may do with the cluster: 0 if not even that."""
    if not access.may_cluster(_O.DESCRIBE):
        return 0
    return access.operations(ResourceType.CLUSTER, "kafka-cluster")


def describe_topic_partitions(
    access: Access, request: Any, version: int
) -> Verdict | None:
    asked = request.topics
    if asked:
        allowed, denied = split(
            asked, lambda topic: access.may_topic(_O.DESCRIBE, topic.name)
        )
    else:
        # By name: the cursor to the next page must not name what is hidden.
        denied = []
        allowed = [
            describe_topic_partitions_messages.TopicRequest(name=topic.name)
            for topic in access.topics.topics()
            if access.may_topic(_O.DESCRIBE, topic.name, log=False)
        ]
    refusals = [
        describe_topic_partitions_messages.DescribeTopicPartitionsResponseTopic(
            error_code=_DENIED, name=topic.name
        )
        for topic in denied
    ]
    if not allowed:
        return refused(
            describe_topic_partitions_messages.DescribeTopicPartitionsResponse(
                topics=refusals
            )
        )
    request.topics = allowed

    def amend(response: Any) -> None:
        for topic in response.topics:
            if topic.name:
                topic.topic_authorized_operations = access.operations(
                    ResourceType.TOPIC, topic.name
                )
        response.topics += refusals

    return Verdict(request, amend)


def create_topics(access: Access, request: Any, version: int) -> Verdict | None:
    """CREATE on the cluster, or on each; its configs are shown to who may see them."""
    refusals = []
    if not access.may_cluster(_O.CREATE, log=False):
        request.topics, denied = split(
            request.topics, lambda topic: access.may_topic(_O.CREATE, topic.name)
        )
        refusals = [
            create_topics_messages.CreatableTopicResult(
                name=topic.name,
                error_code=_DENIED,
                error_message="Authorization failed.",
                configs=[],
            )
            for topic in denied
        ]

    def amend(response: Any) -> None:
        for topic in response.topics:
            if not topic.error_code and not access.may_topic(
                _O.DESCRIBE_CONFIGS, topic.name, log=False
            ):
                topic.topic_config_error_code = _DENIED
                topic.num_partitions = topic.replication_factor = -1
                topic.configs = []
        response.topics += refusals

    return Verdict(request, amend)


def delete_topics(access: Access, request: Any, version: int) -> Verdict | None:
    result = delete_topics_messages.DeletableTopicResult
    refusals = []
    if version < 6:
        request.topic_names, denied = split(
            request.topic_names, lambda name: access.may_topic(_O.DELETE, name)
        )
        refusals = [
            result(name=name, error_code=_DENIED, error_message=TOPIC_DENIED)
            for name in denied
        ]
    else:
        allowed = []
        for topic in request.topics:
            name = topic.name
            if name is None:
                found = access.topics.topic_by_id(topic.topic_id)
                name = found.name if found is not None else None
            if name is None or access.may_topic(_O.DELETE, name):
                allowed.append(topic)
                continue
            if topic.name is None and not access.may_topic(
                _O.DESCRIBE, name, log=False
            ):
                name = None  # of an id that the sender may not know the name of
            refusals.append(
                result(
                    name=name,
                    topic_id=topic.topic_id,
                    error_code=_DENIED,
                    error_message=TOPIC_DENIED,
                )
            )
        request.topics = allowed
    if not refusals:
        return None

    def amend(response: Any) -> None:
        response.responses += refusals

    return Verdict(request, amend)


def create_partitions(access: Access, request: Any, version: int) -> Verdict | None:
    request.topics, denied = split(
        request.topics, lambda topic: access.may_topic(_O.ALTER, topic.name)
    )
    if not denied:
        return None

    def amend(response: Any) -> None:
        response.results += [
            create_partitions_messages.CreatePartitionsTopicResult(
                name=topic.name, error_code=_DENIED, error_message=TOPIC_DENIED
            )
            for topic in denied
        ]

    return Verdict(request, amend)


def list_offsets(access: Access, request: Any, version: int) -> Verdict | None:
    request.topics, denied = split(
        request.topics, lambda topic: access.may_topic(_O.DESCRIBE, topic.name)
    )
    if not denied:
        return None

    def amend(response: Any) -> None:
        response.topics += [
            list_offsets_messages.ListOffsetsTopicResponse(
                name=topic.name,
                partitions=[
                    list_offsets_messages.ListOffsetsPartitionResponse(
                        partition_index=each.partition_index, error_code=_DENIED
                    )
                    for each in topic.partitions
                ],
            )
            for topic in denied
        ]

    return Verdict(request, amend)


def delete_records(access: Access, request: Any, version: int) -> Verdict | None:
    request.topics, denied = split(
        request.topics, lambda topic: access.may_topic(_O.DELETE, topic.name)
    )
    if not denied:
        return None

    def amend(response: Any) -> None:
        response.topics += [
            delete_records_messages.DeleteRecordsTopicResult(
                name=topic.name,
                partitions=[
                    delete_records_messages.DeleteRecordsPartitionResult(
                        partition_index=each.partition_index,
                        low_watermark=-1,
                        error_code=_DENIED,
                    )
                    for each in topic.partitions
                ],
            )
            for topic in denied
        ]

    return Verdict(request, amend)


def offset_for_leader_epoch(
    access: Access, request: Any, version: int
) -> Verdict | None:
    """For brokers at first (CLUSTER_ACTION), and since KIP-320 for consumers."""
    if access.may_cluster(_O.CLUSTER_ACTION, log=False):
        return None
    request.topics, denied = split(
        request.topics, lambda topic: access.may_topic(_O.DESCRIBE, topic.topic)
    )
    if not denied:
        return None

    def amend(response: Any) -> None:
        response.topics += [
            epoch_messages.OffsetForLeaderTopicResult(
                topic=topic.topic,
                partitions=[
                    epoch_messages.EpochEndOffset(
                        partition=each.partition, error_code=_DENIED
                    )
                    for each in topic.partitions
                ],
            )
            for topic in denied
        ]

    return Verdict(request, amend)


def describe_producers(access: Access, request: Any, version: int) -> Verdict | None:
    request.topics, denied = split(
        request.topics, lambda topic: access.may_topic(_O.READ, topic.name)
    )
    if not denied:
        return None

    def amend(response: Any) -> None:
        response.topics += [
            describe_producers_messages.TopicResponse(
                name=topic.name,
                partitions=[
                    describe_producers_messages.PartitionResponse(
                        partition_index=index,
                        error_code=_DENIED,
                        error_message=TOPIC_DENIED,
                    )
                    for index in topic.partition_indexes
                ],
            )
            for topic in denied
        ]

    return Verdict(request, amend)


def forwarded_produce(access: Access, request: Any, version: int) -> Verdict | None:
    """What the coordinator may see of a Produce: it adds partitions to transactions.

    A handler has asked before, and will again; here it is only what was denied that
    must not become part of a transaction.
    """

    def is_allowed(data: Any) -> bool:
        if version < _IDS_SINCE_PRODUCE:
            return access.may_topic(_O.WRITE, data.name, log=False)
        topic = access.topics.topic_by_id(data.topic_id)
        return topic is None or access.may_topic(_O.WRITE, topic.name, log=False)

    request.topic_data, denied = split(request.topic_data, is_allowed)
    if not denied:
        return None

    def amend(response: Any) -> None:
        response.responses += [
            produce_messages.TopicProduceResponse(
                name=data.name,
                topic_id=data.topic_id,
                partition_responses=[
                    produce_messages.PartitionProduceResponse(
                        index=each.index, error_code=_DENIED, base_offset=-1
                    )
                    for each in data.partition_data
                ],
            )
            for data in denied
        ]

    return Verdict(request, amend)

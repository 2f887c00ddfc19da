"""DeleteTopics: delete topics by name, or from version 6 on also by id.

Source: Kafka protocol guide, "DeleteTopics"; ControllerApis.deleteTopics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Final

from mpbroker.metadata.topics import Topic, TopicRegistry
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.delete_topics import (
    DeletableTopicResult,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    DeleteTopicState,
)
from mpbroker.server.errors import invalid_request
from mpbroker.server.handler_context import HandlerContext
from mpbroker.server.intent import NO_ID, id_words, noted_ids

_GONE: Final = (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID)


def handle_delete_topics(
    request: DeleteTopicsRequest, context: HandlerContext
) -> DeleteTopicsResponse:
    """Delete each topic that exists; answer each topic of the request.

    The id of each topic, or NO_ID, is noted before the change (intent.py). So a second
    execution after the death of a handler knows what the first one has deleted. If the
    metadata log cannot be written, nothing is deleted, and the topics get
    KAFKA_STORAGE_ERROR.
    """
    broker, intent, version = context.broker, context.intent, context.version
    permit = context.mutation_permit(strict_since=5)
    earlier = noted_ids(intent.earlier())
    wanted = list(request.topics) if version >= 6 else []
    if version < 6:
        wanted = [DeleteTopicState(name=name) for name in request.topic_names]
    named = Counter((state.name, state.topic_id) for state in wanted)
    named_twice = _named_by_name_and_id(named, broker.registry)
    found: list[Topic] = []
    places: list[DeletableTopicResult] = []
    results = []
    ids = [NO_ID] * len(named)
    for place, ((name, topic_id), times) in enumerate(named.items()):
        result = DeletableTopicResult(name=name, topic_id=topic_id)
        results.append(result)
        try:
            topic = _find(name, topic_id, times, broker.registry)
            if topic.topic_id in named_twice:
                raise invalid_request(
                    "The provided topic name maps to an ID that was already supplied."
                )
            if not broker.delete_topics:
                raise ApiError(
                    # TOPIC_DELETION_DISABLED was added with version 3.
                    ErrorCode.TOPIC_DELETION_DISABLED
                    if version >= 3
                    else ErrorCode.INVALID_REQUEST,
                    "Topic deletion is disabled: set delete.topic.enable=true",
                )
            if permit is not None:
                permit(len(topic.partitions))
        except ApiError as error:
            noted = earlier[place] if place < len(earlier) else NO_ID
            if error.error_code in _GONE and noted != NO_ID:
                ids[place] = result.topic_id = noted
            else:
                _refuse(result, error)
        else:
            ids[place] = topic.topic_id
            result.name, result.topic_id = topic.name, topic.topic_id
            found.append(topic)
            places.append(result)
    if found:
        intent.note(id_words(ids))
    outcomes: Sequence[ApiError | None]
    try:
        outcomes = broker.registry.delete_topics(found) if found else []
    except ApiError as error:  # the disk has failed, and nothing was deleted
        outcomes = [error] * len(found)
    for topic, result, refused in zip(found, places, outcomes, strict=True):
        if refused is not None:
            _refuse(result, refused)
        else:
            broker.delete_logs(topic)
    return DeleteTopicsResponse(responses=results)


def _named_by_name_and_id(
    named: Collection[tuple[str | None, bytes]], registry: TopicRegistry
) -> set[bytes]:
    """Return the ids of topics that a request names by name and again by id."""
    by_name = (registry.topic(name) for name, _ in named if name is not None)
    ids = {topic_id for name, topic_id in named if name is None}
    return ids & {topic.topic_id for topic in by_name if topic is not None}


def _find(
    name: str | None, topic_id: bytes, times: int, registry: TopicRegistry
) -> Topic:
    if times > 1:
        raise invalid_request("Duplicate topic in the request.")
    if name is not None and topic_id != NO_ID:
        raise invalid_request("Topic name and topic ID can not both be set.")
    if name is None and topic_id == NO_ID:
        raise invalid_request("Neither topic name nor id were specified.")
    if name is None:
        topic = registry.topic_by_id(topic_id)
        if topic is None:
            raise ApiError(ErrorCode.UNKNOWN_TOPIC_ID, "This topic ID is not known.")
        return topic
    topic = registry.topic(name)
    if topic is None:
        raise ApiError(
            ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"There is no topic {name}."
        )
    return topic


def _refuse(result: DeletableTopicResult, error: ApiError) -> None:
    result.error_code = error.error_code
    result.error_message = str(error)

"""DeleteTopics: by name, or from version 6 by id.

Source: Kafka protocol guide, "DeleteTopics"; ControllerApis.deleteTopics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from mpbroker.metadata.topics import Topic
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.delete_topics import (
    DeletableTopicResult,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    DeleteTopicState,
)
from mpbroker.server.intent import NO_ID, NO_INTENT, Intent, id_words, noted_ids

_GONE: Final = (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID)


class Registry(Protocol):
    """The part of the TopicRegistry that is used here."""

    def topic(self, name: str) -> Topic | None: ...

    def topic_by_id(self, topic_id: bytes) -> Topic | None: ...

    def delete_topics(self, topics: Iterable[Topic]) -> list[ApiError | None]: ...


def handle_delete_topics(
    request: DeleteTopicsRequest,
    version: int,
    registry: Registry,
    *,
    enabled: bool,
    delete_logs: Callable[[Topic], None],
    permit: Callable[[int], None] | None = None,
    intent: Intent = NO_INTENT,
) -> DeleteTopicsResponse:
    """Delete what exists; answer every topic that was named.

    Args:
        enabled: delete.topic.enable.
        delete_logs: takes a deleted topic's partitions off line.
        permit: told how many partitions would go; raises ApiError if that is too many
            for the sender's quota.
        intent: gets the topics' ids, in the place in which each is named, so that those
            that are gone already are known for this request's.

    Raises:
        ApiError: KAFKA_STORAGE_ERROR; nothing was deleted.
    """
    earlier = noted_ids(intent.earlier())
    wanted = list(request.topics) if version >= 6 else []
    if version < 6:
        wanted = [DeleteTopicState(name=name) for name in request.topic_names]
    named = Counter((state.name, state.topic_id) for state in wanted)
    found: list[Topic] = []
    places: list[DeletableTopicResult] = []
    results = []
    ids = [NO_ID] * len(named)
    for place, ((name, topic_id), times) in enumerate(named.items()):
        result = DeletableTopicResult(name=name, topic_id=topic_id)
        results.append(result)
        try:
            topic = _find(name, topic_id, times, registry)
            if not enabled:
                raise ApiError(
                    # Clients before version 3 do not know the code of its own.
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
    outcomes = registry.delete_topics(found) if found else []
    for topic, result, refused in zip(found, places, outcomes, strict=True):
        if refused is not None:
            _refuse(result, refused)
        else:
            delete_logs(topic)
    return DeleteTopicsResponse(responses=results)


def _find(name: str | None, topic_id: bytes, times: int, registry: Registry) -> Topic:
    if times > 1:
        raise ApiError(ErrorCode.INVALID_REQUEST, "Duplicate topic in the request.")
    if name is not None and topic_id != NO_ID:
        raise ApiError(
            ErrorCode.INVALID_REQUEST, "Topic name and topic ID can not both be set."
        )
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

"""DeleteTopics: delete topics by name, and from version 6 by name or id.

Source: Kafka protocol guide, "DeleteTopics".
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import INT16, INT32, STRING, UUID, Struct, array, field
from mpbroker.protocol.message import Message


class DeleteTopicState(Struct):
    name: str | None = field(STRING, nullable="0+", default=None)
    topic_id: bytes = field(UUID)


class DeleteTopicsRequest(
    Message, api_key=ApiKey.DELETE_TOPICS, versions=(1, 6), flexible_from=4
):
    topics: list[DeleteTopicState] = array(DeleteTopicState, "6+")
    topic_names: list[str] = array(STRING, "1-5", ignorable=True)
    timeout_ms: int = field(INT32)


class DeletableTopicResult(Struct):
    name: str | None = field(STRING, nullable="6+")
    topic_id: bytes = field(UUID, "6+", ignorable=True)
    error_code: int = field(INT16)
    error_message: str | None = field(
        STRING, "5+", nullable="0+", default=None, ignorable=True
    )


class DeleteTopicsResponse(
    Message, api_key=ApiKey.DELETE_TOPICS, versions=(1, 6), flexible_from=4
):
    throttle_time_ms: int = field(INT32)
    responses: list[DeletableTopicResult] = array(DeletableTopicResult)

"""DeleteShareGroupOffsets: delete the start offsets of a share group in topics.

Source: Kafka protocol guide, "DeleteShareGroupOffsets"; KIP-932.
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import INT16, INT32, STRING, UUID, Struct, array, field
from mpbroker.protocol.message import Message


class DeleteShareGroupOffsetsRequestTopic(Struct):
    topic_name: str = field(STRING)


class DeleteShareGroupOffsetsRequest(
    Message, api_key=ApiKey.DELETE_SHARE_GROUP_OFFSETS, versions=(0, 0), flexible_from=0
):
    group_id: str = field(STRING)
    topics: list[DeleteShareGroupOffsetsRequestTopic] = array(
        DeleteShareGroupOffsetsRequestTopic
    )


class DeleteShareGroupOffsetsResponseTopic(Struct):
    topic_name: str = field(STRING)
    topic_id: bytes = field(UUID)
    error_code: int = field(INT16)
    error_message: str | None = field(STRING, nullable="0+", default=None)


class DeleteShareGroupOffsetsResponse(
    Message, api_key=ApiKey.DELETE_SHARE_GROUP_OFFSETS, versions=(0, 0), flexible_from=0
):
    throttle_time_ms: int = field(INT32)
    error_code: int = field(INT16)
    error_message: str | None = field(STRING, nullable="0+", default=None)
    responses: list[DeleteShareGroupOffsetsResponseTopic] = array(
        DeleteShareGroupOffsetsResponseTopic
    )

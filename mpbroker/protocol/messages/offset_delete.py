"""OffsetDelete: delete a group's offsets in some partitions.

Source: Kafka protocol guide, "OffsetDelete"; KIP-496.
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import INT16, INT32, STRING, Struct, array, field
from mpbroker.protocol.message import Message


class OffsetDeleteRequestPartition(Struct):
    partition_index: int = field(INT32)


class OffsetDeleteRequestTopic(Struct):
    name: str = field(STRING)
    partitions: list[OffsetDeleteRequestPartition] = array(OffsetDeleteRequestPartition)


class OffsetDeleteRequest(
    Message, api_key=ApiKey.OFFSET_DELETE, versions=(0, 0), flexible_from=None
):
    group_id: str = field(STRING)
    topics: list[OffsetDeleteRequestTopic] = array(OffsetDeleteRequestTopic)


class OffsetDeleteResponsePartition(Struct):
    partition_index: int = field(INT32)
    error_code: int = field(INT16)


class OffsetDeleteResponseTopic(Struct):
    name: str = field(STRING)
    partitions: list[OffsetDeleteResponsePartition] = array(
        OffsetDeleteResponsePartition
    )


class OffsetDeleteResponse(
    Message, api_key=ApiKey.OFFSET_DELETE, versions=(0, 0), flexible_from=None
):
    error_code: int = field(INT16)
    throttle_time_ms: int = field(INT32, ignorable=True)
    topics: list[OffsetDeleteResponseTopic] = array(OffsetDeleteResponseTopic)

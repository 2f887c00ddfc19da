"""DeleteShareGroupState: delete the state of share-partitions.

Source: Kafka protocol guide, "DeleteShareGroupState"; KIP-932.
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import INT16, INT32, STRING, UUID, Struct, array, field
from mpbroker.protocol.message import Message


class PartitionData(Struct):
    partition: int = field(INT32)


class DeleteStateData(Struct):
    topic_id: bytes = field(UUID)
    partitions: list[PartitionData] = array(PartitionData)


class DeleteShareGroupStateRequest(
    Message, api_key=ApiKey.DELETE_SHARE_GROUP_STATE, versions=(0, 0), flexible_from=0
):
    group_id: str = field(STRING)
    topics: list[DeleteStateData] = array(DeleteStateData)


class PartitionResult(Struct):
    partition: int = field(INT32)
    error_code: int = field(INT16)
    error_message: str | None = field(STRING, nullable="0+", default=None)


class DeleteStateResult(Struct):
    topic_id: bytes = field(UUID)
    partitions: list[PartitionResult] = array(PartitionResult)


class DeleteShareGroupStateResponse(
    Message, api_key=ApiKey.DELETE_SHARE_GROUP_STATE, versions=(0, 0), flexible_from=0
):
    results: list[DeleteStateResult] = array(DeleteStateResult)

"""ShareAcknowledge: acknowledge records that a member of a share group has acquired.

The types are 0 gap, 1 accept, 2 release, 3 reject, and from version 2 on 4, which
renews the acquisition lock (KIP-1222).

Source: Kafka protocol guide, "ShareAcknowledge"; KIP-932.
"""

from __future__ import annotations

from enum import IntEnum

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import (
    BOOLEAN,
    INT8,
    INT16,
    INT32,
    INT64,
    STRING,
    UUID,
    Struct,
    array,
    field,
)
from mpbroker.protocol.message import Message


class AcknowledgeType(IntEnum):
    """A member's acknowledgement of a record that it has acquired."""

    GAP = 0  # there is no record at this offset
    ACCEPT = 1  # the record was processed
    RELEASE = 2  # deliver the record again, to any member
    REJECT = 3  # do not deliver the record any more
    RENEW = 4  # keep the record for the member; its lock begins anew


class AcknowledgementBatch(Struct):
    first_offset: int = field(INT64)
    last_offset: int = field(INT64)
    acknowledge_types: list[int] = array(INT8)


class AcknowledgePartition(Struct):
    partition_index: int = field(INT32)
    acknowledgement_batches: list[AcknowledgementBatch] = array(AcknowledgementBatch)


class AcknowledgeTopic(Struct):
    topic_id: bytes = field(UUID)
    partitions: list[AcknowledgePartition] = array(AcknowledgePartition)


class ShareAcknowledgeRequest(
    Message, api_key=ApiKey.SHARE_ACKNOWLEDGE, versions=(1, 2), flexible_from=0
):
    group_id: str | None = field(STRING, nullable="0+", default=None)
    member_id: str | None = field(STRING, nullable="0+")
    share_session_epoch: int = field(INT32)
    is_renew_ack: bool = field(BOOLEAN, "2+")
    topics: list[AcknowledgeTopic] = array(AcknowledgeTopic)


class LeaderIdAndEpoch(Struct):
    leader_id: int = field(INT32)
    leader_epoch: int = field(INT32)


class PartitionData(Struct):
    partition_index: int = field(INT32)
    error_code: int = field(INT16)
    error_message: str | None = field(STRING, nullable="0+", default=None)
    current_leader: LeaderIdAndEpoch = field(LeaderIdAndEpoch)


class ShareAcknowledgeTopicResponse(Struct):
    topic_id: bytes = field(UUID)
    partitions: list[PartitionData] = array(PartitionData)


class NodeEndpoint(Struct):
    node_id: int = field(INT32)
    host: str = field(STRING)
    port: int = field(INT32)
    rack: str | None = field(STRING, nullable="0+", default=None)


class ShareAcknowledgeResponse(
    Message, api_key=ApiKey.SHARE_ACKNOWLEDGE, versions=(1, 2), flexible_from=0
):
    throttle_time_ms: int = field(INT32)
    error_code: int = field(INT16)
    error_message: str | None = field(STRING, nullable="0+", default=None)
    acquisition_lock_timeout_ms: int = field(INT32, "2+", ignorable=True)
    responses: list[ShareAcknowledgeTopicResponse] = array(
        ShareAcknowledgeTopicResponse
    )
    node_endpoints: list[NodeEndpoint] = array(NodeEndpoint)

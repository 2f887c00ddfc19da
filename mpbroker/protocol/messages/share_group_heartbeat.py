"""ShareGroupHeartbeat: a member joins a share group, stays in it, or leaves it.

A field that is null has not changed since the member's last heartbeat. With the member
epoch 0 a member joins, with -1 it leaves.

Source: Kafka protocol guide, "ShareGroupHeartbeat"; KIP-932.
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import INT16, INT32, STRING, UUID, Struct, array, field
from mpbroker.protocol.message import Message


class ShareGroupHeartbeatRequest(
    Message, api_key=ApiKey.SHARE_GROUP_HEARTBEAT, versions=(1, 1), flexible_from=0
):
    group_id: str = field(STRING)
    member_id: str = field(STRING)
    member_epoch: int = field(INT32)
    rack_id: str | None = field(STRING, nullable="0+", default=None)
    subscribed_topic_names: list[str] | None = array(
        STRING, nullable="0+", default=None
    )


class TopicPartitions(Struct):
    topic_id: bytes = field(UUID)
    partitions: list[int] = array(INT32)


class Assignment(Struct):
    topic_partitions: list[TopicPartitions] = array(TopicPartitions)


class ShareGroupHeartbeatResponse(
    Message, api_key=ApiKey.SHARE_GROUP_HEARTBEAT, versions=(1, 1), flexible_from=0
):
    throttle_time_ms: int = field(INT32)
    error_code: int = field(INT16)
    error_message: str | None = field(STRING, nullable="0+", default=None)
    member_id: str | None = field(STRING, nullable="0+", default=None)
    member_epoch: int = field(INT32)
    heartbeat_interval_ms: int = field(INT32)
    assignment: Assignment | None = field(Assignment, nullable="0+", default=None)

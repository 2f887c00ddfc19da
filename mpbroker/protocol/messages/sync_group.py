"""SyncGroup: the leader sends all assignments, and each member receives its own.

Source: Kafka protocol guide, "SyncGroup".
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import BYTES, INT16, INT32, STRING, Struct, array, field
from mpbroker.protocol.message import Message
from mpbroker.protocol.primitives import Buffer


class SyncGroupRequestAssignment(Struct):
    member_id: str = field(STRING)
    assignment: Buffer = field(BYTES)


class SyncGroupRequest(
    Message, api_key=ApiKey.SYNC_GROUP, versions=(0, 5), flexible_from=4
):
    group_id: str = field(STRING)
    generation_id: int = field(INT32)
    member_id: str = field(STRING)
    group_instance_id: str | None = field(STRING, "3+", nullable="0+", default=None)
    protocol_type: str | None = field(
        STRING, "5+", nullable="0+", default=None, ignorable=True
    )
    protocol_name: str | None = field(
        STRING, "5+", nullable="0+", default=None, ignorable=True
    )
    assignments: list[SyncGroupRequestAssignment] = array(SyncGroupRequestAssignment)


class SyncGroupResponse(
    Message, api_key=ApiKey.SYNC_GROUP, versions=(0, 5), flexible_from=4
):
    throttle_time_ms: int = field(INT32, "1+", ignorable=True)
    error_code: int = field(INT16)
    protocol_type: str | None = field(
        STRING, "5+", nullable="0+", default=None, ignorable=True
    )
    protocol_name: str | None = field(
        STRING, "5+", nullable="0+", default=None, ignorable=True
    )
    assignment: Buffer = field(BYTES)

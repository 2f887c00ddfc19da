"""LeaveGroup: remove a member, or from version 3 several members, from a group.

Source: Kafka protocol guide, "LeaveGroup".
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import INT16, INT32, STRING, Struct, array, field
from mpbroker.protocol.message import Message


class MemberIdentity(Struct):
    member_id: str = field(STRING)
    group_instance_id: str | None = field(STRING, nullable="0+", default=None)
    reason: str | None = field(
        STRING, "5+", nullable="0+", default=None, ignorable=True
    )


class LeaveGroupRequest(
    Message, api_key=ApiKey.LEAVE_GROUP, versions=(0, 5), flexible_from=4
):
    group_id: str = field(STRING)
    member_id: str = field(STRING, "0-2")
    members: list[MemberIdentity] = array(MemberIdentity, "3+")


class MemberResponse(Struct):
    member_id: str = field(STRING)
    group_instance_id: str | None = field(STRING, nullable="0+")
    error_code: int = field(INT16)


class LeaveGroupResponse(
    Message, api_key=ApiKey.LEAVE_GROUP, versions=(0, 5), flexible_from=4
):
    throttle_time_ms: int = field(INT32, "1+", ignorable=True)
    error_code: int = field(INT16)
    members: list[MemberResponse] = array(MemberResponse, "3+")

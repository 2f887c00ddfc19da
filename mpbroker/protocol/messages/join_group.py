"""JoinGroup: join a group, and take part in its next rebalance.

Only clients read the metadata of protocols and members; the broker passes the bytes on.

Source: Kafka protocol guide, "JoinGroup".
"""

from __future__ import annotations

from typing import Final

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import (
    BOOLEAN,
    BYTES,
    INT16,
    INT32,
    STRING,
    Struct,
    array,
    field,
)
from mpbroker.protocol.message import Message
from mpbroker.protocol.primitives import Buffer


class JoinGroupRequestProtocol(Struct):
    name: str = field(STRING)
    metadata: Buffer = field(BYTES)


# The coordinator compares the protocols of all members. Clients send one to three.
_MAX_PROTOCOLS: Final = 1000


class JoinGroupRequest(
    Message,
    api_key=ApiKey.JOIN_GROUP,
    versions=(0, 9),
    flexible_from=6,
    max_elements=_MAX_PROTOCOLS,
):
    group_id: str = field(STRING)
    session_timeout_ms: int = field(INT32)
    rebalance_timeout_ms: int = field(INT32, "1+", default=-1, ignorable=True)
    member_id: str = field(STRING)
    group_instance_id: str | None = field(STRING, "5+", nullable="0+", default=None)
    protocol_type: str = field(STRING)
    protocols: list[JoinGroupRequestProtocol] = array(JoinGroupRequestProtocol)
    reason: str | None = field(
        STRING, "8+", nullable="0+", default=None, ignorable=True
    )


class JoinGroupResponseMember(Struct):
    member_id: str = field(STRING)
    group_instance_id: str | None = field(
        STRING, "5+", nullable="0+", default=None, ignorable=True
    )
    metadata: Buffer = field(BYTES)


class JoinGroupResponse(
    Message, api_key=ApiKey.JOIN_GROUP, versions=(0, 9), flexible_from=6
):
    throttle_time_ms: int = field(INT32, "2+", ignorable=True)
    error_code: int = field(INT16)
    generation_id: int = field(INT32, default=-1)
    protocol_type: str | None = field(
        STRING, "7+", nullable="0+", default=None, ignorable=True
    )
    protocol_name: str | None = field(STRING, nullable="7+")
    leader: str = field(STRING)
    skip_assignment: bool = field(BOOLEAN, "9+")
    member_id: str = field(STRING)
    members: list[JoinGroupResponseMember] = array(JoinGroupResponseMember)

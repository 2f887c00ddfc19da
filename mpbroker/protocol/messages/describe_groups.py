"""DescribeGroups: the state, members and assignments of groups.

Source: Kafka protocol guide, "DescribeGroups".
"""

from __future__ import annotations

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
from mpbroker.protocol.message import MAX_REQUEST_NAMES, Message
from mpbroker.protocol.primitives import Buffer


class DescribeGroupsRequest(
    Message,
    api_key=ApiKey.DESCRIBE_GROUPS,
    versions=(0, 6),
    flexible_from=5,
    max_elements=MAX_REQUEST_NAMES,
):
    groups: list[str] = array(STRING)
    include_authorized_operations: bool = field(BOOLEAN, "3+")


class DescribedGroupMember(Struct):
    member_id: str = field(STRING)
    group_instance_id: str | None = field(
        STRING, "4+", nullable="0+", default=None, ignorable=True
    )
    client_id: str = field(STRING)
    client_host: str = field(STRING)
    member_metadata: Buffer = field(BYTES)
    member_assignment: Buffer = field(BYTES)


class DescribedGroup(Struct):
    error_code: int = field(INT16)
    error_message: str | None = field(STRING, "6+", nullable="0+", default=None)
    group_id: str = field(STRING)
    group_state: str = field(STRING)
    protocol_type: str = field(STRING)
    protocol_data: str = field(STRING)
    members: list[DescribedGroupMember] = array(DescribedGroupMember)
    authorized_operations: int = field(INT32, "3+", default=-2147483648)


class DescribeGroupsResponse(
    Message, api_key=ApiKey.DESCRIBE_GROUPS, versions=(0, 6), flexible_from=5
):
    throttle_time_ms: int = field(INT32, "1+", ignorable=True)
    groups: list[DescribedGroup] = array(DescribedGroup)

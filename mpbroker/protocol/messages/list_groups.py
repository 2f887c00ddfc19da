"""ListGroups: list groups, with a filter by state (version 4) and type (version 5).

Source: Kafka protocol guide, "ListGroups".
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import INT16, INT32, STRING, Struct, array, field
from mpbroker.protocol.message import MAX_REQUEST_NAMES, Message


class ListGroupsRequest(
    Message,
    api_key=ApiKey.LIST_GROUPS,
    versions=(0, 5),
    flexible_from=3,
    max_elements=MAX_REQUEST_NAMES,
):
    states_filter: list[str] = array(STRING, "4+")
    types_filter: list[str] = array(STRING, "5+")


class ListedGroup(Struct):
    group_id: str = field(STRING)
    protocol_type: str = field(STRING)
    group_state: str = field(STRING, "4+", ignorable=True)
    group_type: str = field(STRING, "5+", ignorable=True)


class ListGroupsResponse(
    Message, api_key=ApiKey.LIST_GROUPS, versions=(0, 5), flexible_from=3
):
    throttle_time_ms: int = field(INT32, "1+", ignorable=True)
    error_code: int = field(INT16)
    groups: list[ListedGroup] = array(ListedGroup)

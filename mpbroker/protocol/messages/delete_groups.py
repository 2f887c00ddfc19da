"""DeleteGroups: delete empty groups and their offsets.

Source: Kafka protocol guide, "DeleteGroups".
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import INT16, INT32, STRING, Struct, array, field
from mpbroker.protocol.message import MAX_REQUEST_NAMES, Message


class DeleteGroupsRequest(
    Message,
    api_key=ApiKey.DELETE_GROUPS,
    versions=(0, 2),
    flexible_from=2,
    max_elements=MAX_REQUEST_NAMES,
):
    groups_names: list[str] = array(STRING)


class DeletableGroupResult(Struct):
    group_id: str = field(STRING)
    error_code: int = field(INT16)


class DeleteGroupsResponse(
    Message, api_key=ApiKey.DELETE_GROUPS, versions=(0, 2), flexible_from=2
):
    throttle_time_ms: int = field(INT32)
    results: list[DeletableGroupResult] = array(DeletableGroupResult)

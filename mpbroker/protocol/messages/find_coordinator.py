"""FindCoordinator: find the broker that coordinates a group or a transactional id.

Key types are 0 group, 1 transactional id, 2 share group. From version 4 a request has
several keys.

Source: Kafka protocol guide, "FindCoordinator".
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import INT8, INT16, INT32, STRING, Struct, array, field
from mpbroker.protocol.message import MAX_REQUEST_NAMES, Message


class FindCoordinatorRequest(
    Message,
    api_key=ApiKey.FIND_COORDINATOR,
    versions=(0, 6),
    flexible_from=3,
    max_elements=MAX_REQUEST_NAMES,
):
    key: str = field(STRING, "0-3")
    key_type: int = field(INT8, "1+")
    coordinator_keys: list[str] = array(STRING, "4+")


class Coordinator(Struct):
    key: str = field(STRING)
    node_id: int = field(INT32)
    host: str = field(STRING)
    port: int = field(INT32)
    error_code: int = field(INT16)
    error_message: str | None = field(STRING, nullable="0+")


class FindCoordinatorResponse(
    Message, api_key=ApiKey.FIND_COORDINATOR, versions=(0, 6), flexible_from=3
):
    throttle_time_ms: int = field(INT32, "1+", ignorable=True)
    error_code: int = field(INT16, "0-3")
    error_message: str | None = field(STRING, "1-3", nullable="0+", ignorable=True)
    node_id: int = field(INT32, "0-3")
    host: str = field(STRING, "0-3")
    port: int = field(INT32, "0-3")
    coordinators: list[Coordinator] = array(Coordinator, "4+")

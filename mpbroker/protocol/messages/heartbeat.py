"""Heartbeat: keep a member in its group, and learn whether the group rebalances.

Source: Kafka protocol guide, "Heartbeat".
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import INT16, INT32, STRING, field
from mpbroker.protocol.message import Message


class HeartbeatRequest(
    Message, api_key=ApiKey.HEARTBEAT, versions=(0, 4), flexible_from=4
):
    group_id: str = field(STRING)
    generation_id: int = field(INT32)
    member_id: str = field(STRING)
    group_instance_id: str | None = field(STRING, "3+", nullable="0+", default=None)


class HeartbeatResponse(
    Message, api_key=ApiKey.HEARTBEAT, versions=(0, 4), flexible_from=4
):
    throttle_time_ms: int = field(INT32, "1+", ignorable=True)
    error_code: int = field(INT16)

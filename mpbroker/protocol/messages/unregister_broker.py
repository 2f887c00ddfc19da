"""UnregisterBroker: forget a broker that has gone for good.

Source: Kafka protocol guide, "UnregisterBroker".
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import INT16, INT32, STRING, field
from mpbroker.protocol.message import Message


class UnregisterBrokerRequest(
    Message, api_key=ApiKey.UNREGISTER_BROKER, versions=(0, 0), flexible_from=0
):
    broker_id: int = field(INT32)


class UnregisterBrokerResponse(
    Message, api_key=ApiKey.UNREGISTER_BROKER, versions=(0, 0), flexible_from=0
):
    throttle_time_ms: int = field(INT32)
    error_code: int = field(INT16)
    error_message: str | None = field(STRING, nullable="0+")

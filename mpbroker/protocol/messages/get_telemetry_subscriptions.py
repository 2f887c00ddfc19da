"""GetTelemetrySubscriptions: the metrics that a client is to push, and how often.

Source: KIP-714; Kafka protocol guide, "GetTelemetrySubscriptions".
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import (
    BOOLEAN,
    INT8,
    INT16,
    INT32,
    STRING,
    UUID,
    array,
    field,
)
from mpbroker.protocol.message import Message


class GetTelemetrySubscriptionsRequest(
    Message,
    api_key=ApiKey.GET_TELEMETRY_SUBSCRIPTIONS,
    versions=(0, 0),
    flexible_from=0,
):
    client_instance_id: bytes = field(UUID)


class GetTelemetrySubscriptionsResponse(
    Message,
    api_key=ApiKey.GET_TELEMETRY_SUBSCRIPTIONS,
    versions=(0, 0),
    flexible_from=0,
):
    throttle_time_ms: int = field(INT32)
    error_code: int = field(INT16)
    client_instance_id: bytes = field(UUID)
    subscription_id: int = field(INT32)
    accepted_compression_types: list[int] = array(INT8)
    push_interval_ms: int = field(INT32)
    telemetry_max_bytes: int = field(INT32)
    delta_temporality: bool = field(BOOLEAN)
    requested_metrics: list[str] = array(STRING)

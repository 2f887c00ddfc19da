"""PushTelemetry: push a client's metrics, as OpenTelemetry's MetricsData.

Source: KIP-714; Kafka protocol guide, "PushTelemetry".
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import BOOLEAN, BYTES, INT8, INT16, INT32, UUID, field
from mpbroker.protocol.message import Message
from mpbroker.protocol.primitives import Buffer


class PushTelemetryRequest(
    Message, api_key=ApiKey.PUSH_TELEMETRY, versions=(0, 0), flexible_from=0
):
    client_instance_id: bytes = field(UUID)
    subscription_id: int = field(INT32)
    terminating: bool = field(BOOLEAN)
    compression_type: int = field(INT8)
    metrics: Buffer = field(BYTES)


class PushTelemetryResponse(
    Message, api_key=ApiKey.PUSH_TELEMETRY, versions=(0, 0), flexible_from=0
):
    throttle_time_ms: int = field(INT32)
    error_code: int = field(INT16)

"""ExpireDelegationToken: let a delegation token expire earlier, or at once.

Source: Kafka protocol guide, "ExpireDelegationToken".
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import BYTES, INT16, INT32, INT64, field
from mpbroker.protocol.message import Message
from mpbroker.protocol.primitives import Buffer


class ExpireDelegationTokenRequest(
    Message, api_key=ApiKey.EXPIRE_DELEGATION_TOKEN, versions=(1, 2), flexible_from=2
):
    hmac: Buffer = field(BYTES)
    expiry_time_period_ms: int = field(INT64)


class ExpireDelegationTokenResponse(
    Message, api_key=ApiKey.EXPIRE_DELEGATION_TOKEN, versions=(1, 2), flexible_from=2
):
    error_code: int = field(INT16)
    expiry_timestamp_ms: int = field(INT64)
    throttle_time_ms: int = field(INT32)

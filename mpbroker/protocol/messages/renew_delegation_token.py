"""RenewDelegationToken: let a delegation token expire later.

Source: Kafka protocol guide, "RenewDelegationToken".
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import BYTES, INT16, INT32, INT64, field
from mpbroker.protocol.message import Message
from mpbroker.protocol.primitives import Buffer


class RenewDelegationTokenRequest(
    Message, api_key=ApiKey.RENEW_DELEGATION_TOKEN, versions=(1, 2), flexible_from=2
):
    hmac: Buffer = field(BYTES)
    renew_period_ms: int = field(INT64)


class RenewDelegationTokenResponse(
    Message, api_key=ApiKey.RENEW_DELEGATION_TOKEN, versions=(1, 2), flexible_from=2
):
    error_code: int = field(INT16)
    expiry_timestamp_ms: int = field(INT64)
    throttle_time_ms: int = field(INT32)

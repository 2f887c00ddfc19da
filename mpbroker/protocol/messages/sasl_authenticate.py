"""SaslAuthenticate: exchange one token of the SASL mechanism in each direction.

Source: Kafka protocol guide, "SaslAuthenticate".
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import BYTES, INT16, INT64, STRING, field
from mpbroker.protocol.message import Message
from mpbroker.protocol.primitives import Buffer


class SaslAuthenticateRequest(
    Message, api_key=ApiKey.SASL_AUTHENTICATE, versions=(0, 2), flexible_from=2
):
    auth_bytes: Buffer = field(BYTES)


class SaslAuthenticateResponse(
    Message, api_key=ApiKey.SASL_AUTHENTICATE, versions=(0, 2), flexible_from=2
):
    error_code: int = field(INT16)
    error_message: str | None = field(STRING, nullable="0+")
    auth_bytes: Buffer = field(BYTES)
    session_lifetime_ms: int = field(INT64, "1+", ignorable=True)

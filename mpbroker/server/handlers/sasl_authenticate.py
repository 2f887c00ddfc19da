"""SaslAuthenticate: refuse a request that reaches a handler; see sasl_handshake.py.

Source: Kafka protocol guide, "SaslAuthenticate";
KafkaApis.handleSaslAuthenticateRequest.
"""

from __future__ import annotations

from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.sasl_authenticate import (
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
)
from mpbroker.server.handler_context import HandlerContext


def handle_sasl_authenticate(
    request: SaslAuthenticateRequest, context: HandlerContext
) -> SaslAuthenticateResponse:
    """Answer ILLEGAL_SASL_STATE, without a look at the token."""
    return SaslAuthenticateResponse(
        error_code=ErrorCode.ILLEGAL_SASL_STATE,
        error_message="SaslAuthenticate request received after successful"
        " authentication, or where there is none",
    )

"""SaslHandshake: refuse a request that reaches a handler.

On a listener with SASL, the processor answers this request until the client has
authenticated. So a handler gets the request only if the listener has no SASL, or if the
client has authenticated already.

Source: Kafka protocol guide, "SaslHandshake"; KafkaApis.handleSaslHandshakeRequest.
"""

from __future__ import annotations

from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.sasl_handshake import (
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)
from mpbroker.server.handler_context import HandlerContext


def handle_sasl_handshake(
    request: SaslHandshakeRequest, context: HandlerContext
) -> SaslHandshakeResponse:
    """Answer a SaslHandshake request with ILLEGAL_SASL_STATE."""
    return SaslHandshakeResponse(error_code=ErrorCode.ILLEGAL_SASL_STATE, mechanisms=[])

"""SaslHandshake where a handler gets it: out of place.

Processors answer it on a listener with SASL until the client has authenticated. So the
listener has no SASL, or the client has authenticated already.

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
    """Refuse it."""
    return SaslHandshakeResponse(error_code=ErrorCode.ILLEGAL_SASL_STATE, mechanisms=[])

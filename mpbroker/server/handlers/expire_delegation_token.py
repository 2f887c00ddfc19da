"""ExpireDelegationToken: let a token expire at another time, or remove it.

Source: Kafka protocol guide, "ExpireDelegationToken"; KIP-48;
DelegationTokenControlManager.expireDelegationToken.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpbroker.metadata.metadata_image import MetadataImage, MetadataRecord
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.expire_delegation_token import (
    ExpireDelegationTokenRequest,
    ExpireDelegationTokenResponse,
)
from mpbroker.server.handler_context import HandlerContext
from mpbroker.server.token_requests import find_token, token_requester


def handle_expire_delegation_token(
    request: ExpireDelegationTokenRequest, context: HandlerContext
) -> ExpireDelegationTokenResponse:
    """Set when a token expires. A negative period removes the token at once.

    A removal is noted before it is made (intent.py). So a second execution after the
    death of a handler knows that the first one has removed the token.

    Raises:
        ApiError: the sender may not change the token, or it does not exist or has
            expired.
    """
    settings, principal = token_requester(context)
    registry, intent = context.broker.registry, context.intent
    period_ms, expires_ms = request.expiry_time_period_ms, registry.now_ms()
    was_removing = bool(intent.earlier())

    def decide(image: MetadataImage) -> Sequence[MetadataRecord]:
        nonlocal expires_ms
        try:
            token = find_token(image, settings, bytes(request.hmac), principal)
        except ApiError:
            if was_removing:
                return []
            raise
        if period_ms < 0:
            intent.note([1])
            return [token.removal()]
        if token.has_expired(expires_ms):
            raise ApiError(ErrorCode.DELEGATION_TOKEN_EXPIRED)
        expires_ms = min(token.max_ms, expires_ms + period_ms)
        return [token._replace(expires_ms=expires_ms).record()]

    registry.change(decide)
    return ExpireDelegationTokenResponse(
        error_code=ErrorCode.NONE, expiry_timestamp_ms=expires_ms
    )

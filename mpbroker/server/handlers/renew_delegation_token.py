"""RenewDelegationToken: let a token expire later, within its maximum lifetime.

Source: Kafka protocol guide, "RenewDelegationToken"; KIP-48;
DelegationTokenControlManager.renewDelegationToken.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpbroker.metadata.metadata_image import MetadataImage, MetadataRecord
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.renew_delegation_token import (
    RenewDelegationTokenRequest,
    RenewDelegationTokenResponse,
)
from mpbroker.server.handler_context import HandlerContext
from mpbroker.server.token_requests import find_token, token_requester


def handle_renew_delegation_token(
    request: RenewDelegationTokenRequest, context: HandlerContext
) -> RenewDelegationTokenResponse:
    """Set the time when a token expires, and answer with this time.

    Raises:
        ApiError: the sender may not change the token, or it does not exist or has
            expired.
    """
    settings, principal = token_requester(context)
    registry = context.broker.registry
    now_ms, period_ms = registry.now_ms(), settings.expiry_time_ms
    if request.renew_period_ms > 0:
        period_ms = min(period_ms, request.renew_period_ms)
    expires_ms = 0

    def decide(image: MetadataImage) -> Sequence[MetadataRecord]:
        nonlocal expires_ms
        token = find_token(image, settings, bytes(request.hmac), principal)
        if token.has_expired(now_ms):
            raise ApiError(ErrorCode.DELEGATION_TOKEN_EXPIRED)
        expires_ms = min(token.max_ms, now_ms + period_ms)
        return [token._replace(expires_ms=expires_ms).record()]

    registry.change(decide)
    return RenewDelegationTokenResponse(
        error_code=ErrorCode.NONE, expiry_timestamp_ms=expires_ms
    )

"""Judge who may ask for delegation tokens, and find the token of a request.

Source: KIP-48; KafkaApis.allowTokenRequests; DelegationTokenControlManager.
"""

from __future__ import annotations

from hmac import compare_digest

from mpbroker.ipc.tables.principals import ANONYMOUS
from mpbroker.metadata.delegation_tokens import (
    DelegationToken,
    TokenSettings,
)
from mpbroker.metadata.metadata_image import MetadataImage
from mpbroker.network.connection_rows import is_by_token
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.server.handler_context import HandlerContext


def token_requester(context: HandlerContext) -> tuple[TokenSettings, str]:
    """Return the settings of tokens, and the principal that asks for one.

    Raises:
        ApiError: the sender may not ask for tokens, because it has not authenticated or
            has authenticated by a token; or the broker serves no tokens.
    """
    broker, request = context.broker, context.request
    sender = None
    if broker.senders is not None:
        sender = broker.senders.sender(request.connection, request.slot)
    if (
        sender is None
        or sender.security_protocol == "PLAINTEXT"
        or sender.principal == ANONYMOUS  # of TLS without a client's certificate
        # A token must not outlive itself by making others.
        or is_by_token(broker.words, request.connection)
    ):
        raise ApiError(ErrorCode.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED)
    if broker.tokens is None:
        raise ApiError(ErrorCode.DELEGATION_TOKEN_AUTH_DISABLED)
    return broker.tokens, sender.principal


def find_token(
    image: MetadataImage, settings: TokenSettings, mac: bytes, principal: str
) -> DelegationToken:
    """Find a token by its MAC, for a principal that wants to change it.

    Raises:
        ApiError: no token has this MAC, or the token does not belong to the principal.
    """
    for token in image.delegation_tokens():
        if compare_digest(settings.hmac(token.token_id), mac):
            break
    else:
        raise ApiError(ErrorCode.DELEGATION_TOKEN_NOT_FOUND)
    if not token.belongs_to(principal):
        raise ApiError(ErrorCode.DELEGATION_TOKEN_OWNER_MISMATCH)
    return token

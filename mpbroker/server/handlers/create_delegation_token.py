"""CreateDelegationToken: make a token by which others authenticate as its owner.

Source: Kafka protocol guide, "CreateDelegationToken"; KIP-48, KIP-373;
DelegationTokenControlManager.createDelegationToken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from mpbroker.metadata.delegation_tokens import USER, DelegationToken, token_of_record
from mpbroker.metadata.meta_properties import random_uuid, uuid_of_text, uuid_to_text
from mpbroker.metadata.metadata_image import MetadataImage, MetadataRecord
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.create_delegation_token import (
    CreateDelegationTokenRequest,
    CreateDelegationTokenResponse,
)
from mpbroker.server.errors import invalid_request
from mpbroker.server.handler_context import HandlerContext
from mpbroker.server.intent import id_words, noted_ids
from mpbroker.server.token_requests import token_requester

# A bound of the metadata log, which all processes keep in memory.
_MAX_RENEWERS: Final = 1000


def handle_create_delegation_token(
    request: CreateDelegationTokenRequest, context: HandlerContext
) -> CreateDelegationTokenResponse:
    """Make a delegation token, and answer with its MAC.

    The token's id is noted before the token is made (intent.py). So a second execution
    after the death of a handler finds the token that the first one has made.

    Raises:
        ApiError: the sender may not have such a token; no token is made.
    """
    settings, requester = token_requester(context)
    owner = requester
    if request.owner_principal_name:
        if request.owner_principal_type != USER:
            raise ApiError(ErrorCode.INVALID_PRINCIPAL_TYPE)
        owner = f"{USER}:{request.owner_principal_name}"
    if len(request.renewers) > _MAX_RENEWERS:
        raise invalid_request(f"More than {_MAX_RENEWERS} renewers")
    if any(each.principal_type != USER for each in request.renewers):
        raise ApiError(ErrorCode.INVALID_PRINCIPAL_TYPE)
    registry, intent = context.broker.registry, context.intent
    earlier = noted_ids(intent.earlier())
    now_ms, lifetime_ms = registry.now_ms(), settings.max_lifetime_ms
    if request.max_lifetime_ms > 0:
        lifetime_ms = min(lifetime_ms, request.max_lifetime_ms)
    token = DelegationToken(
        uuid_to_text(earlier[0] if earlier else random_uuid()),
        owner,
        requester,
        tuple(f"{USER}:{each.principal_name}" for each in request.renewers),
        now_ms,
        now_ms + lifetime_ms,
        now_ms + min(lifetime_ms, settings.expiry_time_ms),
    )

    def decide(image: MetadataImage) -> Sequence[MetadataRecord]:
        nonlocal token
        made = image.kept.get(("token", token.token_id))
        if made is not None:
            token = token_of_record(made)
            return []
        intent.note(id_words([uuid_of_text(token.token_id)]))
        return [token.record()]

    registry.change(decide)
    return CreateDelegationTokenResponse(
        error_code=ErrorCode.NONE,
        principal_type=USER,
        principal_name=token.user,
        token_requester_principal_type=USER if context.version >= 3 else "",
        token_requester_principal_name=(
            requester.removeprefix(f"{USER}:") if context.version >= 3 else ""
        ),
        issue_timestamp_ms=token.issued_ms,
        expiry_timestamp_ms=token.expires_ms,
        max_timestamp_ms=token.max_ms,
        token_id=token.token_id,
        hmac=settings.hmac(token.token_id),
    )

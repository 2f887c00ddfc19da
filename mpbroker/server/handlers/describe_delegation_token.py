"""DescribeDelegationToken: list the delegation tokens of some owners, or of all.

Source: Kafka protocol guide, "DescribeDelegationToken"; KIP-48; KafkaApis and
DelegationTokenManager.filterToken.
"""

from __future__ import annotations

from mpbroker.metadata.delegation_tokens import USER, DelegationToken
from mpbroker.protocol.acl import AclOperation, ResourceType
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.describe_delegation_token import (
    DescribedDelegationToken,
    DescribedDelegationTokenRenewer,
    DescribeDelegationTokenRequest,
    DescribeDelegationTokenResponse,
)
from mpbroker.server.handler_context import HandlerContext
from mpbroker.server.token_requests import token_requester


def handle_describe_delegation_token(
    request: DescribeDelegationTokenRequest, context: HandlerContext
) -> DescribeDelegationTokenResponse:
    """Answer with the tokens that the sender may see, and their MACs.

    These are the sender's own tokens, and the tokens of others for which it has a
    permission. Without an authorizer they are all tokens.

    Raises:
        ApiError: the sender may not ask about tokens, or the broker serves none.
    """
    settings, principal = token_requester(context)
    access = context.access
    owners = None
    if request.owners is not None:
        owners = {
            f"{each.principal_type}:{each.principal_name}" for each in request.owners
        }

    def is_visible(token: DelegationToken) -> bool:
        if owners is not None and owners.isdisjoint(token.principals):
            return False
        return (
            access is None
            or token.belongs_to(principal)
            or access.may(
                AclOperation.DESCRIBE,
                ResourceType.DELEGATION_TOKEN,
                token.token_id,
                log=False,
            )
            or access.may(
                AclOperation.DESCRIBE_TOKENS, ResourceType.USER, token.owner, log=False
            )
        )

    found = context.broker.registry.delegation_tokens()
    return DescribeDelegationTokenResponse(
        error_code=ErrorCode.NONE,
        tokens=[
            _described(token, settings.hmac(token.token_id), context.version)
            for token in found
            if is_visible(token)
        ],
    )


def _described(
    token: DelegationToken, mac: bytes, version: int
) -> DescribedDelegationToken:
    described = DescribedDelegationToken(
        principal_type=USER,
        principal_name=token.user,
        issue_timestamp=token.issued_ms,
        expiry_timestamp=token.expires_ms,
        max_timestamp=token.max_ms,
        token_id=token.token_id,
        hmac=mac,
        renewers=[
            DescribedDelegationTokenRenewer(
                principal_type=USER, principal_name=each.removeprefix(f"{USER}:")
            )
            for each in token.renewers
        ],
    )
    if version >= 3:
        described.token_requester_principal_type = USER
        described.token_requester_principal_name = token.requester.removeprefix(
            f"{USER}:"
        )
    return described

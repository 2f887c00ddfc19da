"""Define the authorization rules of the APIs about delegation tokens.

A token's owner, and its renewers, need no permission to renew, expire or describe it.
The handlers check who they are.
"""

from __future__ import annotations

from mpbroker.metadata.delegation_tokens import USER
from mpbroker.protocol.acl import AclOperation, ResourceType
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.create_delegation_token import (
    CreateDelegationTokenRequest,
    CreateDelegationTokenResponse,
)
from mpbroker.protocol.messages.describe_delegation_token import (
    DescribeDelegationTokenRequest,
)
from mpbroker.server.authorization.authorization import Access


def create_delegation_token(
    access: Access, request: CreateDelegationTokenRequest, version: int
) -> CreateDelegationTokenResponse | None:
    """Require CREATE_TOKENS for the token's owner, if that is not the sender.

    Return the refusal, or None if the request is allowed.
    """
    owner = f"{USER}:{request.owner_principal_name}"
    if (
        not request.owner_principal_name
        or owner == access.client.principal
        or access.may(AclOperation.CREATE_TOKENS, ResourceType.USER, owner)
    ):
        return None
    return CreateDelegationTokenResponse(
        error_code=ErrorCode.DELEGATION_TOKEN_AUTHORIZATION_FAILED
    )


def describe_delegation_token(
    access: Access, request: DescribeDelegationTokenRequest, version: int
) -> None:
    """Require nothing. The handler checks each token, whether the sender may see it."""

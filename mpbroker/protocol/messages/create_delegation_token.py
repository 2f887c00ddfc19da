"""CreateDelegationToken: make a token by which others may authenticate as its owner.

Version 3 added an owner other than the sender of the request.

Source: Kafka protocol guide, "CreateDelegationToken".
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import (
    BYTES,
    INT16,
    INT32,
    INT64,
    STRING,
    Struct,
    array,
    field,
)
from mpbroker.protocol.message import Message
from mpbroker.protocol.primitives import Buffer


class CreatableRenewers(Struct):
    principal_type: str = field(STRING)
    principal_name: str = field(STRING)


class CreateDelegationTokenRequest(
    Message, api_key=ApiKey.CREATE_DELEGATION_TOKEN, versions=(1, 3), flexible_from=2
):
    owner_principal_type: str | None = field(STRING, "3+", nullable="3+")
    owner_principal_name: str | None = field(STRING, "3+", nullable="3+")
    renewers: list[CreatableRenewers] = array(CreatableRenewers)
    max_lifetime_ms: int = field(INT64)


class CreateDelegationTokenResponse(
    Message, api_key=ApiKey.CREATE_DELEGATION_TOKEN, versions=(1, 3), flexible_from=2
):
    error_code: int = field(INT16)
    principal_type: str = field(STRING)
    principal_name: str = field(STRING)
    token_requester_principal_type: str = field(STRING, "3+")
    token_requester_principal_name: str = field(STRING, "3+")
    issue_timestamp_ms: int = field(INT64)
    expiry_timestamp_ms: int = field(INT64)
    max_timestamp_ms: int = field(INT64)
    token_id: str = field(STRING)
    hmac: Buffer = field(BYTES)
    throttle_time_ms: int = field(INT32)

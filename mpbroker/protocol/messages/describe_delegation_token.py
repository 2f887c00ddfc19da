"""DescribeDelegationToken: list the delegation tokens of some owners.

If the owners are null, the tokens of all owners are listed.

Source: Kafka protocol guide, "DescribeDelegationToken".
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
from mpbroker.protocol.message import MAX_REQUEST_NAMES, Message
from mpbroker.protocol.primitives import Buffer


class DescribeDelegationTokenOwner(Struct):
    principal_type: str = field(STRING)
    principal_name: str = field(STRING)


class DescribeDelegationTokenRequest(
    Message,
    api_key=ApiKey.DESCRIBE_DELEGATION_TOKEN,
    versions=(1, 3),
    flexible_from=2,
    max_elements=MAX_REQUEST_NAMES,
):
    owners: list[DescribeDelegationTokenOwner] | None = array(
        DescribeDelegationTokenOwner, nullable="0+"
    )


class DescribedDelegationTokenRenewer(Struct):
    principal_type: str = field(STRING)
    principal_name: str = field(STRING)


class DescribedDelegationToken(Struct):
    principal_type: str = field(STRING)
    principal_name: str = field(STRING)
    token_requester_principal_type: str = field(STRING, "3+")
    token_requester_principal_name: str = field(STRING, "3+")
    issue_timestamp: int = field(INT64)
    expiry_timestamp: int = field(INT64)
    max_timestamp: int = field(INT64)
    token_id: str = field(STRING)
    hmac: Buffer = field(BYTES)
    renewers: list[DescribedDelegationTokenRenewer] = array(
        DescribedDelegationTokenRenewer
    )


class DescribeDelegationTokenResponse(
    Message, api_key=ApiKey.DESCRIBE_DELEGATION_TOKEN, versions=(1, 3), flexible_from=2
):
    error_code: int = field(INT16)
    tokens: list[DescribedDelegationToken] = array(DescribedDelegationToken)
    throttle_time_ms: int = field(INT32)

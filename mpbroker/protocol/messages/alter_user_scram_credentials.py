"""AlterUserScramCredentials: set and remove users' SCRAM credentials.

Source: Kafka protocol guide, "AlterUserScramCredentials"; KIP-554.
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import (
    BYTES,
    INT8,
    INT16,
    INT32,
    STRING,
    Struct,
    array,
    field,
)
from mpbroker.protocol.message import Message
from mpbroker.protocol.primitives import Buffer


class ScramCredentialDeletion(Struct):
    name: str = field(STRING)
    mechanism: int = field(INT8)


class ScramCredentialUpsertion(Struct):
    name: str = field(STRING)
    mechanism: int = field(INT8)
    iterations: int = field(INT32)
    salt: Buffer = field(BYTES)
    salted_password: Buffer = field(BYTES)


class AlterUserScramCredentialsRequest(
    Message,
    api_key=ApiKey.ALTER_USER_SCRAM_CREDENTIALS,
    versions=(0, 0),
    flexible_from=0,
):
    deletions: list[ScramCredentialDeletion] = array(ScramCredentialDeletion)
    upsertions: list[ScramCredentialUpsertion] = array(ScramCredentialUpsertion)


class AlterUserScramCredentialsResult(Struct):
    user: str = field(STRING)
    error_code: int = field(INT16)
    error_message: str | None = field(STRING, nullable="0+")


class AlterUserScramCredentialsResponse(
    Message,
    api_key=ApiKey.ALTER_USER_SCRAM_CREDENTIALS,
    versions=(0, 0),
    flexible_from=0,
):
    throttle_time_ms: int = field(INT32)
    results: list[AlterUserScramCredentialsResult] = array(
        AlterUserScramCredentialsResult
    )

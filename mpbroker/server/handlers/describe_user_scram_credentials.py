"""DescribeUserScramCredentials: show users' mechanisms and numbers of iterations.

Secrets are not shown.

Source: Kafka protocol guide, "DescribeUserScramCredentials"; KIP-554; ScramImage.
"""

from __future__ import annotations

from collections import Counter

from mpbroker.metadata.scram_credentials import ScramCredentials
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.describe_user_scram_credentials import (
    CredentialInfo,
    DescribeUserScramCredentialsRequest,
    DescribeUserScramCredentialsResponse,
    DescribeUserScramCredentialsResult,
)
from mpbroker.server.handler_context import HandlerContext


def handle_describe_user_scram_credentials(
    request: DescribeUserScramCredentialsRequest, context: HandlerContext
) -> DescribeUserScramCredentialsResponse:
    """Describe the users of the request, or all users if it names none."""
    credentials = context.broker.registry.scram_credentials
    if request.users:
        asked = Counter(user.name for user in request.users)
    else:
        asked = Counter(credentials.users())
    return DescribeUserScramCredentialsResponse(
        error_code=ErrorCode.NONE,
        error_message=None,
        results=[_result(name, times, credentials) for name, times in asked.items()],
    )


def _result(
    name: str, times: int, credentials: ScramCredentials
) -> DescribeUserScramCredentialsResult:
    found = credentials.of(name)
    code, message = ErrorCode.NONE, None
    if times > 1:
        code = ErrorCode.DUPLICATE_RESOURCE
        message = (
            "Cannot describe SCRAM credentials for the same user twice in a single"
            f" request: {name}"
        )
    elif not found:
        code = ErrorCode.RESOURCE_NOT_FOUND
        message = f"Attempt to describe a user credential that does not exist: {name}"
    return DescribeUserScramCredentialsResult(
        user=name,
        error_code=code,
        error_message=message,
        credential_infos=[
            CredentialInfo(mechanism=mechanism, iterations=credential.iterations)
            for mechanism, credential in found.items()
            if code == ErrorCode.NONE
        ],
    )

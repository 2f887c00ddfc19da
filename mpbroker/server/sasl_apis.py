"""The APIs of SASL that reach a handler: users' credentials, and steps out of order."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.server.intent import Intent, no_intent
from mpbroker.server.request import Request

if TYPE_CHECKING:
    from mpbroker.metadata.topics import TopicRegistry


class SaslApis:
    """What answers them in one handler process."""

    def __init__(
        self,
        registry: TopicRegistry,
        intent: Callable[[Request], Intent] = no_intent,
    ) -> None:
        """Args:
        intent: where a request notes what it is about to change.
        """
        self._registry = registry
        self._intent = intent

    def handlers(self) -> dict[ApiKey, Callable[[Request], bytes]]:
        """Return what answers each API."""
        return {
            ApiKey.SASL_HANDSHAKE: self._handshake,
            ApiKey.SASL_AUTHENTICATE: self._authenticate,
            ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS: self._describe,
            ApiKey.ALTER_USER_SCRAM_CREDENTIALS: self._alter,
        }

    # Processors serve these two where they mean anything. Who gets here has no SASL
    # listener before it, or has authenticated already.

    def _handshake(self, request: Request) -> bytes:
        from mpbroker.protocol.messages.sasl_handshake import SaslHandshakeResponse

        return SaslHandshakeResponse(
            error_code=ErrorCode.ILLEGAL_SASL_STATE, mechanisms=[]
        ).encode(request.api_version)

    def _authenticate(self, request: Request) -> bytes:
        from mpbroker.protocol.messages.sasl_authenticate import (
            SaslAuthenticateResponse,
        )

        return SaslAuthenticateResponse(
            error_code=ErrorCode.ILLEGAL_SASL_STATE,
            error_message="SaslAuthenticate request received after successful"
            " authentication, or where there is none",
        ).encode(request.api_version)

    def _describe(self, request: Request) -> bytes:
        from mpbroker.protocol.messages.describe_user_scram_credentials import (
            DescribeUserScramCredentialsRequest,
        )
        from mpbroker.server.handlers.describe_user_scram_credentials import (
            handle_describe_user_scram_credentials,
        )

        version = request.api_version
        message = DescribeUserScramCredentialsRequest.decode(version, request.body)
        return handle_describe_user_scram_credentials(
            message, self._registry.scram_credentials
        ).encode(version)

    def _alter(self, request: Request) -> bytes:
        from mpbroker.protocol.messages.alter_user_scram_credentials import (
            AlterUserScramCredentialsRequest,
        )
        from mpbroker.server.handlers.alter_user_scram_credentials import (
            handle_alter_user_scram_credentials,
        )

        version = request.api_version
        message = AlterUserScramCredentialsRequest.decode(version, request.body)
        return handle_alter_user_scram_credentials(
            message, self._registry, self._intent(request)
        ).encode(version)

"""What every SASL mechanism is to the authenticator."""

from __future__ import annotations

from typing import Protocol

from mpbroker.ipc.counters.authentication_counts import AuthenticationResult
from mpbroker.network.errors import NetworkError


class SaslError(NetworkError):
    """An attempt that failed. Its text is the client's to read: no secret, no hint.

    Attributes:
        result: what it is counted as.
        detail: for our log, what the client need not know.
    """

    def __init__(
        self,
        message: str,
        result: AuthenticationResult = AuthenticationResult.CREDENTIALS,
        detail: str = "",
    ) -> None:
        super().__init__(message)
        self.result = result
        self.detail = detail or message


class NotYetError(NetworkError):
    """Nobody can judge the token just now: give the same token again a little later."""


class SaslMechanism(Protocol):
    """One authentication under way.

    Attributes:
        user: who it is; empty until ``is_complete``.
        is_complete: the client has proved it.
        expires_ms: when the credential ends, wall clock; None: it does not.
    """

    user: str
    is_complete: bool
    expires_ms: int | None

    def evaluate(self, token: bytes) -> bytes:
        """Take the client's next token; return ours.

        Raises:
            SaslError: it has failed for good.
            NotYetError: see there.
        """
        ...

"""Define the interface of SASL mechanisms, and their errors."""

from __future__ import annotations

from typing import Protocol

from mpbroker.ipc.counters.authentication_counts import AuthenticationResult
from mpbroker.network.errors import NetworkError


class SaslError(NetworkError):
    """The authentication has failed. The text is sent to the client, without secrets.

    Attributes:
        result: which counter the failure adds to.
        detail: the reason for the broker's log, which the client must not know.
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
    """The token cannot be judged yet: give the same token again a little later."""


class SaslMechanism(Protocol):
    """Checks the SASL tokens that a client sends in one authentication.

    Attributes:
        user: the client's user; empty until ``is_complete``.
        claimed: the user or token that the client says it is, which nothing has proved;
            for the log. Empty if it has not said so.
        is_complete: whether the client has authenticated.
        expires_ms: when the credential expires, wall clock; None: never.
        by_token: whether the credential is a delegation token.
    """

    user: str
    claimed: str
    is_complete: bool
    expires_ms: int | None
    by_token: bool

    def evaluate(self, token: bytes) -> bytes:
        """Take the client's next token; return the token to answer with.

        Raises:
            SaslError: the authentication has failed for good.
            NotYetError: the token cannot be judged yet; give the same token again
                later.
        """
        ...

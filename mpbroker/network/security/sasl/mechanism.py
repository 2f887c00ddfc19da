"""The interface of SASL mechanisms."""

from __future__ import annotations

from typing import Protocol

from mpbroker.ipc.counters.authentication_counts import AuthenticationResult
from mpbroker.network.errors import NetworkError


class SaslError(NetworkError):
    """A failed authentication. Its text is sent to the client, so it has no secrets.

    Attributes:
        result: the counter for it.
        detail: the reason for our log, which the client must not know.
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
    """One authentication.

    Attributes:
        user: the client's user; empty until ``is_complete``.
        is_complete: whether the client has authenticated.
        expires_ms: when the credential expires, wall clock; None: never.
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

"""PLAIN: the client sends its user and password unencrypted.

So use it only for connections over TLS or loopback.

Source: RFC 4616; Kafka's PlainSaslServer, for the messages that clients show to users.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Final

from mpbroker.ipc.counters.authentication_counts import AuthenticationResult
from mpbroker.network.security.sasl.mechanism import SaslError

# Returns a user's password; None: there is no such user.
PasswordOf = Callable[[str], str | None]

_PARTS: Final = 3
_WRONG: Final = "Authentication failed: Invalid username or password"


class PlainServer:
    """Checks one attempt to authenticate, in which a client sends one token.

    The answer to a right token is empty.
    """

    def __init__(self, password_of: PasswordOf) -> None:
        self._password_of = password_of
        self.user = self.claimed = ""
        self.is_complete = False
        self.expires_ms: int | None = None
        self.by_token = False

    def evaluate(self, token: bytes) -> bytes:
        if self.is_complete:
            raise SaslError(
                "Authentication failed: a token after the last one",
                AuthenticationResult.NOT_SASL,
            )
        try:
            parts = token.decode().split("\0")
        except UnicodeDecodeError:
            raise SaslError("Authentication failed: the token is not UTF-8") from None
        if len(parts) != _PARTS:
            raise SaslError(
                f"Invalid SASL/PLAIN response: expected 3 tokens, got {len(parts)}"
            )
        authorization_id, user, password = parts
        self.claimed = user
        if not user:
            raise SaslError("Authentication failed: username not specified")
        if not password:
            raise SaslError("Authentication failed: password not specified")
        expected = self._password_of(user)
        # A user that does not exist takes as long, and gets the same error.
        is_right = hmac.compare_digest(
            password.encode(),
            (password + "x" if expected is None else expected).encode(),
        )
        if not is_right:
            raise SaslError(_WRONG)
        if authorization_id not in ("", user):
            raise SaslError(
                "Authentication failed: Client requested an authorization id that is"
                " different from username"
            )
        self.user = user
        self.is_complete = True
        return b""

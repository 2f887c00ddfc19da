"""OAUTHBEARER: the client sends a signed token that names its user.

    client   n,,^Aauth=Bearer token^A^A
    server   nothing; or {"status":"invalid_token"}, to which the client answers ^A

Source: RFC 7628; KIP-255; Kafka's OAuthBearerSaslServer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, NamedTuple

from mpbroker.ipc.counters.authentication_counts import AuthenticationResult
from mpbroker.network.security.sasl.mechanism import SaslError


class Token(NamedTuple):
    """Holds the content of a valid token."""

    user: str
    expires_ms: int  # wall clock


# Takes the token's text; raises SaslError if it is not valid, NotYetError if the keys
# to validate it have not come yet.
Validate = Callable[[str], Token]

_FIRST: Final = re.compile(
    r"[ny],(?:a=(?P<authzid>[^,]*))?,\x01(?P<pairs>(?:[A-Za-z]+=[^\x01]*\x01)*)\x01"
)
_BEARER: Final = re.compile(r"[Bb]earer +(?P<token>[-_.~+/A-Za-z0-9]+=*)")
_INVALID: Final = b'{"status":"invalid_token"}'


class OAuthBearerServer:
    """Checks one attempt to authenticate, in which a client sends one or two tokens.

    If the first is valid, the client has authenticated. If not, the client learns it
    from the answer and sends a second one, upon which the attempt fails.
    """

    def __init__(self, validate: Validate) -> None:
        self._validate = validate
        self._error: SaslError | None = None
        self.user = self.claimed = ""
        self.is_complete = False
        self.expires_ms: int | None = None
        self.by_token = False

    def evaluate(self, token: bytes) -> bytes:
        if self._error is not None:
            # The client has heard why, and acknowledges that it failed.
            raise self._error
        if self.is_complete:
            raise SaslError(
                "Authentication failed: a token after the last one",
                AuthenticationResult.NOT_SASL,
            )
        authorization_id, text = _parse(token)
        self.claimed = authorization_id
        try:
            found = self._validate(text)
            if authorization_id not in ("", found.user):
                raise SaslError(
                    "Authentication failed: Client requested an authorization id that"
                    " is different from the token's principal name"
                )
        except SaslError as error:
            self._error = error
            return _INVALID
        self.user, self.expires_ms = found.user, found.expires_ms
        self.is_complete = True
        return b""


def _parse(token: bytes) -> tuple[str, str]:
    try:
        match = _FIRST.fullmatch(token.decode())
    except UnicodeDecodeError:
        match = None
    if match is None:
        raise _malformed("no client-first message")
    pairs = dict(pair.split("=", 1) for pair in match["pairs"].split("\x01") if pair)
    bearer = _BEARER.fullmatch(pairs.get("auth", ""))
    if bearer is None:
        raise _malformed("no auth=Bearer")
    return match["authzid"] or "", bearer["token"]


def _malformed(what: str) -> SaslError:
    return SaslError(
        f"Authentication failed: invalid OAUTHBEARER message: {what}",
        AuthenticationResult.NOT_SASL,
    )

"""SASL, the client's side: state machines that see tokens, and never a socket.

A mechanism gives its `first` token, and for each challenge of the broker the `answer`
to it, or None when it is content. `SaslAuthenticator` puts Kafka's requests around
them.

Source: RFC 4616 (PLAIN), RFC 5802 and RFC 7677 (SCRAM), RFC 7628 (OAUTHBEARER); Kafka
protocol guide, "SASL Authentication Sequence"; KIP-152, KIP-368.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Callable
from typing import Final, Protocol

from mpbroker.client.errors import (
    SaslAuthenticationError,
    describe_error,
)
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ProtocolError
from mpbroker.protocol.message import Message
from mpbroker.protocol.messages.sasl_authenticate import (
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
)
from mpbroker.protocol.messages.sasl_handshake import (
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)

# What Kafka's brokers store with a password, at least; and what a lying one may make us
# compute, at most (about a second).
_LEAST_ITERATIONS: Final = 4096
_MOST_ITERATIONS: Final = 1_000_000

_HASHES: Final = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}


class Mechanism(Protocol):
    """One authentication by one mechanism."""

    def first(self) -> bytes:
        """Return the token that begins."""

    def answer(self, challenge: bytes) -> bytes | None:
        """Return what to say next; None: the broker has proved what it must.

        Raises:
            SaslAuthenticationError: it has not, or does not make sense.
        """


class PlainMechanism:
    """The password as it is: for connections that are encrypted."""

    def __init__(self, username: str, password: str) -> None:
        self._token = f"\0{username}\0{password}".encode()

    def first(self) -> bytes:
        return self._token

    def answer(self, challenge: bytes) -> bytes | None:
        if challenge:
            raise SaslAuthenticationError(
                f"{len(challenge)} bytes of challenge, where PLAIN has none"
            )
        return None


class ScramMechanism:
    """Both sides prove that they know the password, and neither tells it.

    As in Kafka, names and passwords are taken for what they are in UTF-8, without
    SASLprep.
    """

    def __init__(
        self, mechanism: str, username: str, password: str, nonce: str | None = None
    ) -> None:
        """Begin.

        Args:
            mechanism: SCRAM-SHA-256 or SCRAM-SHA-512.
            username: may hold any character.
            password: likewise.
            nonce: of the client; by chance if None.
        """
        self._hash = _HASHES[mechanism]
        self._password = password.encode()
        self._nonce = nonce or secrets.token_urlsafe(24)
        name = username.replace("=", "=3D").replace(",", "=2C")
        self._first_bare = f"n={name},r={self._nonce}"
        self._server_signature: bytes | None = None

    def first(self) -> bytes:
        return f"n,,{self._first_bare}".encode()

    def answer(self, challenge: bytes) -> bytes | None:
        try:
            text = challenge.decode()
        except UnicodeDecodeError:
            raise SaslAuthenticationError("a SCRAM challenge that is no text") from None
        if self._server_signature is None:
            return self._answer_first(text)
        self._check_final(text)
        return None

    def _answer_first(self, text: str) -> bytes:
        fields = _fields(text)
        try:
            nonce, salt = fields["r"], b64decode(fields["s"], validate=True)
            iterations = int(fields["i"]) if fields["i"].isascii() else 0
        except (KeyError, ValueError, Base64Error):
            raise SaslAuthenticationError(
                f"a SCRAM challenge that cannot be read: {text[:80]!r}"
            ) from None
        if not nonce.startswith(self._nonce) or nonce == self._nonce:
            raise SaslAuthenticationError(
                "the challenge is not for this client: it has another nonce"
            )
        if not _LEAST_ITERATIONS <= iterations <= _MOST_ITERATIONS:
            raise SaslAuthenticationError(
                f"{iterations} iterations of SCRAM: it must be {_LEAST_ITERATIONS} to"
                f" {_MOST_ITERATIONS}"
            )
        salted = hashlib.pbkdf2_hmac(self._hash, self._password, salt, iterations)
        client_key = self._hmac(salted, b"Client Key")
        final = f"c=biws,r={nonce}"
        message = f"{self._first_bare},{text},{final}".encode()
        stored_key = hashlib.new(self._hash, client_key).digest()
        signature = self._hmac(stored_key, message)
        proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
        self._server_signature = self._hmac(self._hmac(salted, b"Server Key"), message)
        return f"{final},p={b64encode(proof).decode()}".encode()

    def _hmac(self, key: bytes, message: bytes) -> bytes:
        return hmac.digest(key, message, self._hash)

    def _check_final(self, text: str) -> None:
        fields = _fields(text)
        if "e" in fields:
            raise SaslAuthenticationError(fields["e"])
        try:
            signature = b64decode(fields.get("v", ""), validate=True)
        except (ValueError, Base64Error):
            signature = b""
        assert self._server_signature is not None
        if not hmac.compare_digest(signature, self._server_signature):
            raise SaslAuthenticationError(
                "the broker does not know this user's password: its signature is wrong"
            )


def _fields(text: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        fields.setdefault(name, value)
    return fields


class OAuthBearerMechanism:
    """A token that somebody else has signed."""

    def __init__(self, token: str) -> None:
        """Begin; ``token`` is without the word Bearer."""
        self._token = token

    def first(self) -> bytes:
        return f"n,,\x01auth=Bearer {self._token}\x01\x01".encode()

    def answer(self, challenge: bytes) -> bytes | None:
        if not challenge:
            return None
        # Why it was refused. The broker says no more than that it was, and only once
        # we have said that we have understood: so it is told from here.
        raise SaslAuthenticationError(f"the token was refused: {_refusal(challenge)}")


def _refusal(challenge: bytes) -> str:
    try:
        status = json.loads(challenge)["status"]
    except (ValueError, KeyError, TypeError):
        return repr(challenge[:80])
    return str(status)[:200]


class SaslAuthenticator:
    """What a connection says, and is told, until it is authenticated; once or again."""

    def __init__(
        self, mechanism: str, make_mechanism: Callable[[], Mechanism], advice: str
    ) -> None:
        """Say nothing yet.

        Args:
            mechanism: its name.
            make_mechanism: for each authentication.
            advice: what to look at if it fails, to end the error's text with.
        """
        self.session_lifetime_ms = 0
        self._name = mechanism
        self._make = make_mechanism
        self._advice = advice
        self._mechanism: Mechanism | None = None

    def begin(self) -> Message:
        """Return the request to begin with."""
        self._mechanism = None
        return SaslHandshakeRequest(mechanism=self._name)

    def take(self, response: Message) -> Message | None:
        """Take an answer; return the next request, None when it is done.

        Raises:
            SaslAuthenticationError: refused, or the broker is not to be trusted.
            ProtocolError: an answer that does not belong here.
        """
        try:
            if isinstance(response, SaslHandshakeResponse):
                return self._take_handshake(response)
            if isinstance(response, SaslAuthenticateResponse):
                return self._take_token(response)
        except SaslAuthenticationError as error:
            raise SaslAuthenticationError(
                f"SASL {self._name}: {error}; {self._advice}"
            ) from error
        raise ProtocolError(f"{type(response).__name__} during authentication")

    def _take_handshake(self, response: SaslHandshakeResponse) -> Message:
        if response.error_code == ErrorCode.UNSUPPORTED_SASL_MECHANISM:
            raise SaslAuthenticationError(
                f"the broker has only {', '.join(response.mechanisms) or 'none'}"
            )
        if response.error_code:
            raise SaslAuthenticationError(describe_error(response.error_code, None))
        if self._mechanism is not None:
            raise ProtocolError("a second SaslHandshake answer")
        self._mechanism = self._make()
        return SaslAuthenticateRequest(auth_bytes=self._mechanism.first())

    def _take_token(self, response: SaslAuthenticateResponse) -> Message | None:
        if self._mechanism is None:
            raise ProtocolError("a SaslAuthenticate answer before the handshake's")
        if response.error_code:
            raise SaslAuthenticationError(
                describe_error(response.error_code, response.error_message)
            )
        token = self._mechanism.answer(bytes(response.auth_bytes))
        if token is not None:
            return SaslAuthenticateRequest(auth_bytes=token)
        self.session_lifetime_ms = response.session_lifetime_ms
        return None

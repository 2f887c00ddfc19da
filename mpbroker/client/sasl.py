"""The client's side of SASL, without a socket.

A mechanism returns its `first` token, and then the `answer` to each challenge of the
broker, or None when the login is complete. `SaslAuthenticator` puts the tokens into
Kafka's requests.

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

# Kafka's brokers store a password with at least so many iterations; a hostile broker
# can make us compute at most so many, which takes about a second.
_LEAST_ITERATIONS: Final = 4096
_MOST_ITERATIONS: Final = 1_000_000

_HASHES: Final = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}


class Mechanism(Protocol):
    """The client's side of one login by one SASL mechanism."""

    def first(self) -> bytes:
        """Return the first token of the client."""

    def answer(self, challenge: bytes) -> bytes | None:
        """Return the client's next token, or None if the login is complete.

        Raises:
            SaslAuthenticationError: the challenge cannot be read, refuses the login, or
                does not prove that the broker knows the password.
        """


class PlainMechanism:
    """SASL PLAIN: the password is sent as it is, so use it with TLS."""

    def __init__(self, username: str, password: str) -> None:
        self._token = f"\0{username}\0{password}".encode()

    def first(self) -> bytes:
        return self._token

    def answer(self, challenge: bytes) -> bytes | None:
        if challenge:
            raise SaslAuthenticationError(
                f"a challenge of {len(challenge)} bytes, but PLAIN has none"
            )
        return None


class ScramMechanism:
    """SASL SCRAM: both sides prove that they know the password, without sending it.

    As in Kafka, names and passwords are encoded in UTF-8, without SASLprep.
    """

    def __init__(
        self, mechanism: str, username: str, password: str, nonce: str | None = None
    ) -> None:
        """Prepare the first token.

        Args:
            mechanism: SCRAM-SHA-256 or SCRAM-SHA-512.
            username: the user's name, of any characters.
            password: the password, of any characters.
            nonce: the client's nonce; None makes a random one.
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
            raise SaslAuthenticationError("a SCRAM challenge is not UTF-8") from None
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
                f"a SCRAM challenge cannot be read: {text[:80]!r}"
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
    """SASL OAUTHBEARER: a token proves who the client is."""

    def __init__(self, token: str) -> None:
        """Store the token, which comes without the word Bearer before it."""
        self._token = token

    def first(self) -> bytes:
        return f"n,,\x01auth=Bearer {self._token}\x01\x01".encode()

    def answer(self, challenge: bytes) -> bytes | None:
        if not challenge:
            return None
        # The challenge says why the token was refused. The broker's own error would
        # come only after one more answer, and would not say why.
        raise SaslAuthenticationError(f"the token was refused: {_refusal(challenge)}")


def _refusal(challenge: bytes) -> str:
    try:
        status = json.loads(challenge)["status"]
    except (ValueError, KeyError, TypeError):
        return repr(challenge[:80])
    return str(status)[:200]


class SaslAuthenticator:
    """Makes the requests of a connection's logins, and reads the responses.

    Attributes:
        session_lifetime_ms: how long the last login is valid, in ms; 0 means for ever.
    """

    def __init__(
        self, mechanism: str, make_mechanism: Callable[[], Mechanism], advice: str
    ) -> None:
        """Prepare the login; no request is made yet.

        Args:
            mechanism: the mechanism's name.
            make_mechanism: makes a `Mechanism` for each login.
            advice: a text with which errors end; it names the settings to look at.
        """
        self.session_lifetime_ms = 0
        self._name = mechanism
        self._make = make_mechanism
        self._advice = advice
        self._mechanism: Mechanism | None = None

    def begin(self) -> Message:
        """Begin a login; return its first request."""
        self._mechanism = None
        return SaslHandshakeRequest(mechanism=self._name)

    def take(self, response: Message) -> Message | None:
        """Take a response; return the next request, or None if the login is complete.

        Raises:
            SaslAuthenticationError: the broker refused the login, or could not prove
                that it knows the password.
            ProtocolError: this response does not belong to a login, or not here.
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
                f"the broker offers only {', '.join(response.mechanisms) or 'none'}"
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

"""A client's half of SASL, for tests: frames, tokens and proofs."""

from __future__ import annotations

import hashlib
import hmac
from base64 import b64decode, b64encode

from mpbroker.metadata.scram_credentials import ScramMechanism
from mpbroker.network.security.sasl.authenticator import SaslServerAuthenticator
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.headers import encode_request_header, parse_response_header
from mpbroker.protocol.messages.sasl_authenticate import (
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
)
from mpbroker.protocol.messages.sasl_handshake import (
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)


def request(
    key: int, version: int, body: bytes = b"", correlation_id: int = 7
) -> bytes:
    return encode_request_header(key, version, correlation_id, "test") + body


def handshake(mechanism: str, version: int = 1) -> bytes:
    body = SaslHandshakeRequest(mechanism=mechanism).encode(version)
    return request(ApiKey.SASL_HANDSHAKE, version, body)


def authenticate(token: bytes, version: int = 2) -> bytes:
    body = SaslAuthenticateRequest(auth_bytes=token).encode(version)
    return request(ApiKey.SASL_AUTHENTICATE, version, body)


def payload(frame: bytes, key: int, version: int) -> memoryview:
    """What an answer holds, without its size field and header."""
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4
    view = memoryview(frame)[4:]
    correlation_id, size = parse_response_header(view, key, version)
    assert correlation_id == 7
    return view[size:]


def handshake_answer(frame: bytes, version: int = 1) -> SaslHandshakeResponse:
    body = payload(frame, ApiKey.SASL_HANDSHAKE, version)
    return SaslHandshakeResponse.decode(version, body)


def token_answer(frame: bytes, version: int = 2) -> SaslAuthenticateResponse:
    body = payload(frame, ApiKey.SASL_AUTHENTICATE, version)
    return SaslAuthenticateResponse.decode(version, body)


def say(
    authenticator: SaslServerAuthenticator, frame: bytes, now_ms: int = 1_000_000
) -> bytes:
    return authenticator.handle(memoryview(frame), now_ms)


class ScramClient:
    """The client of RFC 5802."""

    def __init__(
        self,
        mechanism: ScramMechanism,
        user: str,
        password: str,
        nonce: str = "fyko+d2lbbFgONRv9qkxdawL",
        extensions: str = "",
    ) -> None:
        self._hash = mechanism.hash_name
        self._password = password
        self.nonce = nonce
        name = user.replace("=", "=3D").replace(",", "=2C")
        self._bare = f"n={name},r={nonce}{extensions}"
        self._server_key = b""
        self._message = b""

    def first(self) -> bytes:
        return f"n,,{self._bare}".encode()

    def final(self, server_first: bytes) -> bytes:
        text = server_first.decode()
        parts = dict(part.split("=", 1) for part in text.split(","))
        assert parts["r"].startswith(self.nonce)
        salted = hashlib.pbkdf2_hmac(
            self._hash,
            self._password.encode(),
            b64decode(parts["s"]),
            int(parts["i"]),
        )
        without_proof = f"c=biws,r={parts['r']}"
        self._message = f"{self._bare},{text},{without_proof}".encode()
        client_key = hmac.digest(salted, b"Client Key", self._hash)
        stored_key = hashlib.new(self._hash, client_key).digest()
        signature = hmac.digest(stored_key, self._message, self._hash)
        proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
        self._server_key = hmac.digest(salted, b"Server Key", self._hash)
        return f"{without_proof},p={b64encode(proof).decode()}".encode()

    def trusts(self, server_final: bytes) -> bool:
        expected = hmac.digest(self._server_key, self._message, self._hash)
        return server_final == b"v=" + b64encode(expected)

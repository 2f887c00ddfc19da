"""SCRAM: client and server prove to each other that they know a password.

    client   n,,n=user,r=nonce                 client-first
    server   r=nonce+ours,s=salt,i=iterations  server-first
    client   c=biws,r=both,p=proof             client-final
    server   v=signature                       server-final

A client that names an unknown user gets a salt too, the same at every attempt, and
fails at the same step as with a wrong password. So a client cannot find out which users
exist.

Source: RFC 5802, RFC 7677; Kafka's ScramSaslServer.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Callable
from typing import Final

from mpbroker.ipc.counters.authentication_counts import AuthenticationResult
from mpbroker.metadata.delegation_tokens import TokenLoginOf
from mpbroker.metadata.scram_credentials import (
    MIN_ITERATIONS,
    ScramCredential,
    ScramMechanism,
)
from mpbroker.network.security.sasl.mechanism import SaslError

CredentialOf = Callable[[str, ScramMechanism], ScramCredential | None]

_FAILED: Final = (
    "Authentication failed during authentication due to invalid credentials"
)
# Value characters are all but "," and, in a name, "=" unless it begins =2C or =3D.
_CLIENT_FIRST: Final = re.compile(
    r"(?P<gs2>(?P<binding>n|y|p=[^,]*),(?:a=(?P<authzid>[^,]*))?,)"
    r"(?P<bare>n=(?P<user>[^,]+),r=(?P<nonce>[\x21-\x2b\x2d-\x7e]+)"
    r"(?P<extensions>(?:,[A-Za-z]+=[^,]*)*))"
)
_CLIENT_FINAL: Final = re.compile(
    r"(?P<without_proof>c=(?P<binding>[A-Za-z0-9+/=]*),"
    r"r=(?P<nonce>[\x21-\x2b\x2d-\x7e]+)(?:,[A-Za-z]+=[^,]*)*)"
    r",p=(?P<proof>[A-Za-z0-9+/=]+)"
)
_MAX_FIRST_BYTES: Final = 4096
# Kafka's clients send 26 characters, librdkafka 32. Server-first repeats the nonce, and
# an answer to a re-authentication must fit into the place that small answers have.
_MAX_NONCE: Final = 256


class ScramServer:
    """Checks one attempt to authenticate, in which a client sends two tokens.

    Args:
        mechanism: says which hash is used.
        credential_of: returns a user's credential; None: there is no such user.
        nonce: random, new for every attempt, printable and without a comma.
        secret: the same for all attempts; the salts of unknown users are made from it.
        token_of: returns the login of a delegation token. None: clients cannot log in
            with delegation tokens.
    """

    def __init__(
        self,
        mechanism: ScramMechanism,
        credential_of: CredentialOf,
        nonce: str,
        secret: bytes,
        token_of: TokenLoginOf | None = None,
    ) -> None:
        self._mechanism = mechanism
        self._credential_of = credential_of
        self._nonce = nonce
        self._secret = secret
        self._token_of = token_of
        self._name = ""
        self._proved = ""  # the user that a right proof makes
        self._gs2 = ""
        self._messages = ""  # client-first-bare, server-first
        self._credential: ScramCredential | None = None
        self._is_known = False
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
            text = token.decode()
        except UnicodeDecodeError:
            raise _malformed("the token is not UTF-8") from None
        answer = self._final(text) if self._messages else self._first(text)
        return answer.encode()

    def _first(self, text: str) -> str:
        match = _CLIENT_FIRST.fullmatch(text) if len(text) <= _MAX_FIRST_BYTES else None
        if match is None:
            raise _malformed("no client-first message")
        if match["binding"].startswith("p"):
            raise _malformed("channel binding is not served")
        if len(match["nonce"]) > _MAX_NONCE:
            raise _malformed(f"the nonce has more than {_MAX_NONCE} characters")
        if "tokenauth=true" in match["extensions"].split(","):
            if self._token_of is None:
                raise _malformed("delegation tokens are not served")
            self.by_token = True
        self._name = self._proved = self.claimed = _saslname(match["user"])
        if match["authzid"] and _saslname(match["authzid"]) != self._name:
            raise SaslError(
                "Authentication failed: Client requested an authorization id that is"
                " different from username"
            )
        found = self._find()
        self._is_known = found is not None
        self._credential = found or self._made_up()
        self._gs2 = match["gs2"]
        salt = b64encode(self._credential.salt).decode()
        nonce = match["nonce"] + self._nonce
        server_first = f"r={nonce},s={salt},i={self._credential.iterations}"
        self._messages = f"{match['bare']},{server_first}"
        return server_first

    def _find(self) -> ScramCredential | None:
        """Return the credential of the user or token that the client has named.

        Return None if there is none. In the case of a delegation token also note its
        owner as the user, and when it expires.
        """
        if not self.by_token:
            return self._credential_of(self._name, self._mechanism)
        assert self._token_of is not None
        token = self._token_of(self._name, self._mechanism)
        if token is None:
            return None
        self._proved, self.expires_ms = token.user, token.expires_ms
        return token.credential

    def _made_up(self) -> ScramCredential:
        keys = hmac.digest(self._secret, self._name.encode(), "sha512")
        size = self._mechanism.key_bytes
        return ScramCredential(keys[:16], keys[:size], keys[:size], MIN_ITERATIONS)

    def _final(self, text: str) -> str:
        match = _CLIENT_FINAL.fullmatch(text) if len(text) <= _MAX_FIRST_BYTES else None
        if match is None:
            raise _malformed("no client-final message")
        if _decoded(match["binding"]) != self._gs2.encode():
            raise _malformed("the channel binding is another")
        # Not all of it is looked at, as in Kafka: librdkafka before 2.2 sends its own
        # half twice. The proof covers what was sent, and our half is new every time.
        if not match["nonce"].endswith(self._nonce):
            raise _malformed("the nonce is another")
        credential = self._credential
        assert credential is not None
        hash_name = self._mechanism.hash_name
        message = f"{self._messages},{match['without_proof']}".encode()
        signature = hmac.digest(credential.stored_key, message, hash_name)
        proof = _decoded(match["proof"])
        if len(proof) != len(signature):
            raise SaslError(self._failed)
        client_key = bytes(a ^ b for a, b in zip(proof, signature, strict=True))
        is_right = hmac.compare_digest(
            hashlib.new(hash_name, client_key).digest(), credential.stored_key
        )
        if not (is_right and self._is_known):
            raise SaslError(self._failed)
        self.user = self._proved
        self.is_complete = True
        server_signature = hmac.digest(credential.server_key, message, hash_name)
        return "v=" + b64encode(server_signature).decode()

    @property
    def _failed(self) -> str:
        return f"{_FAILED} with SASL mechanism {self._mechanism.mechanism_name}"


def _saslname(text: str) -> str:
    if re.search("=(?!2C|3D)", text):
        raise _malformed("a name with = that is neither =2C nor =3D")
    return text.replace("=2C", ",").replace("=3D", "=")


def _decoded(text: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except (Base64Error, ValueError):
        raise _malformed("no base64") from None


def _malformed(what: str) -> SaslError:
    return SaslError(
        f"Authentication failed: invalid SCRAM message: {what}",
        AuthenticationResult.NOT_SASL,
    )

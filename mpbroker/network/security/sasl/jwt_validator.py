"""Validate signed JWTs with keys from a JWKS file or URL.

PyJWT does the cryptography. Only signatures that need a private key are accepted: not
"none", and not HMAC, since a key that verifies an HMAC can also sign.

A file is read again when it changes. A URL is fetched by a thread of its own, which
touches only the keys: a processor never waits for another machine.

Source: RFC 7519, RFC 7517; KIP-768 for the settings.
"""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

from mpbroker.base.config_def import ConfigError, without_credentials
from mpbroker.base.logger import get_logger
from mpbroker.ipc.counters.authentication_counts import AuthenticationResult
from mpbroker.network.security.sasl.mechanism import NotYetError, SaslError
from mpbroker.network.security.sasl.oauthbearer import Token

_LOG = get_logger(__name__)

_URL_KEY: Final = "sasl.oauthbearer.jwks.endpoint.url"
_ALGORITHMS: Final = [
    *("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    *("ES256", "ES384", "ES512", "EdDSA"),
]
# So much is read of a token's JSON whose signature is not verified. A header has an
# algorithm, a key id, and perhaps certificates; to read 375 KB takes 10 ms or more.
_MAX_UNVERIFIED: Final = 16 * 1024
_LATEST_S: Final = 253_402_300_799  # the end of 9999; some issuers send nanoseconds
_MAX_JWKS_BYTES: Final = 1 << 20
_FETCH_TIMEOUT_S: Final = 10.0


class JwtSettings(NamedTuple):
    """Holds the settings sasl.oauthbearer.* of one listener."""

    jwks_url: str
    expected_audience: tuple[str, ...] = ()
    expected_issuer: str | None = None
    user_claim: str = "sub"
    clock_skew_s: int = 30
    refresh_s: float = 3600.0
    retry_s: float = 0.1
    max_retry_s: float = 10.0


class JwtValidator:
    """Validates signed JWTs with the newest keys of a JWKS file or URL.

    Args:
        settings: where the keys are, and what a token must claim.
    """

    def __init__(self, settings: JwtSettings) -> None:
        import jwt

        self._jwt = jwt
        self._settings = settings
        if settings.expected_issuer is None:
            _LOG.warning(
                "sasl.oauthbearer.expected.issuer is not set: a token of any issuer is"
                " accepted that one of the keys has signed"
            )
        self._keys = source_of(settings)

    def __call__(self, text: str) -> Token:
        """Validate a token; return its user and the time when it expires.

        Args:
            text: the token as the client has sent it.

        Raises:
            SaslError: the token is not valid. The client is not told which check
                failed; the broker's log says it.
            NotYetError: the keys have not been fetched yet.
        """
        keys = self._keys.keys()
        jwt, settings = self._jwt, self._settings
        header = text.partition(".")[0]
        if len(header) > _MAX_UNVERIFIED:
            raise _invalid(
                f"its header has {len(header)} characters, at most {_MAX_UNVERIFIED}"
                " are accepted"
            )
        try:
            key = self._key_for(jwt.get_unverified_header(text), keys)
            claims: dict[str, Any] = jwt.decode(
                text,
                key,
                algorithms=_ALGORITHMS,
                audience=list(settings.expected_audience) or None,
                issuer=settings.expected_issuer,
                leeway=settings.clock_skew_s,
                options={
                    "require": ["exp", "iat", settings.user_claim],
                    "verify_aud": bool(settings.expected_audience),
                    "verify_iss": settings.expected_issuer is not None,
                },
            )
        except (jwt.PyJWTError, RecursionError) as error:
            # RecursionError: JSON in JSON without end, which PyJWT 2.10 lets through.
            who = self._claimed(text)
            raise _invalid(f"{type(error).__name__}: {error}{who}") from None
        user = claims.get(settings.user_claim)
        if not isinstance(user, str) or not user.strip():
            raise _invalid(f"the claim {settings.user_claim} is no name")
        late_s = time.time() - claims["exp"]
        if late_s >= 0:
            # Within the skew, so PyJWT lets it through. A session of no length would
            # begin, and end before the client has asked anything.
            raise _invalid(f"ExpiredSignatureError: it expired {late_s:.1f} s ago")
        return Token(user, int(min(claims["exp"], _LATEST_S) * 1000))

    def close(self) -> None:
        """Stop fetching keys from a URL, if there is one."""
        self._keys.close()

    def _claimed(self, text: str) -> str:
        """Return words about the user that a refused token names, for the log."""
        if len(text) > _MAX_UNVERIFIED:
            return ""
        try:
            claims = self._jwt.decode(text, options={"verify_signature": False})
        except (self._jwt.PyJWTError, RecursionError):
            return ""
        return f" (the token is for {claims.get(self._settings.user_claim)!r:.100})"

    def _key_for(self, header: dict[str, Any], keys: dict[str, Any]) -> Any:
        if header.get("alg") not in _ALGORITHMS:
            raise _invalid(f"alg {header.get('alg')!r:.40} is not accepted")
        name = header.get("kid")
        if name is None and len(keys) == 1:
            return next(iter(keys.values()))
        if name not in keys:
            self._keys.want_newer()
            raise _invalid(f"no key has the kid {name!r:.100}")
        return keys[name]


def source_of(settings: JwtSettings) -> _KeySource:
    """Return the source of the keys that verify tokens: a file or a URL.

    Raises:
        ConfigError: the URL's scheme is not supported, or the file is not usable.
    """
    url = urlsplit(settings.jwks_url)
    if url.scheme == "file":
        return _FileKeys(unquote(url.path))
    if url.scheme in ("https", "http") and url.netloc:
        if url.scheme == "http":
            _LOG.warning(
                "%s=%s: keys that come over plain HTTP can be replaced on the way, and"
                " then anyone can sign tokens; use https:// or file:///",
                _URL_KEY,
                without_credentials(settings.jwks_url),
            )
        return _UrlKeys(settings)
    shown = without_credentials(settings.jwks_url)
    raise ConfigError(
        f"{_URL_KEY}={shown:.200}: it must be a file:///, https:// or http:// URL"
    )


class _KeySource(Protocol):
    """Returns keys for signatures by their key id, the "kid" of RFC 7517."""

    def keys(self) -> dict[str, Any]: ...

    def want_newer(self) -> None:
        """Ask for a fresh set of keys, because a token names a key that is unknown."""

    def close(self) -> None:
        """Stop fetching keys, if they come from a URL."""


class _FileKeys:
    """Reads the keys for signatures from a file, again whenever the file changes."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._keys: dict[str, Any] = {}
        try:
            self._read()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{_URL_KEY}=file://{path}: {error}") from None

    def keys(self) -> dict[str, Any]:
        try:
            self._read()
        except (OSError, ValueError) as error:
            # It may be half written. The keys read before are still valid.
            _LOG.warning(
                "%s=file://%s: %s; the keys before stay", _URL_KEY, self._path, error
            )
        return self._keys

    def want_newer(self) -> None:
        """Do nothing: each call of keys() reads the file if it has changed."""

    def close(self) -> None:
        """Do nothing: the file is open only while it is read."""

    def _read(self) -> None:
        status = os.stat(self._path)
        seen = status.st_mtime_ns, status.st_size, status.st_ino
        if seen == self._seen:
            return
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("not a file")  # reading a pipe might block
        with open(self._path, "rb") as file:
            keys = parse_jwks(file.read(_MAX_JWKS_BYTES))
        self._keys, self._seen = keys, seen


class _UrlKeys:
    """Fetches the keys for signatures from a URL in a thread, and keeps the newest."""

    def __init__(self, settings: JwtSettings) -> None:
        self._settings = settings
        self._shown = without_credentials(settings.jwks_url)
        self._keys: dict[str, Any] | None = None
        self._wanted = threading.Event()
        self._closed = threading.Event()
        self._is_fetching = False

    def keys(self) -> dict[str, Any]:
        if not self._is_fetching:
            # Not earlier: a process that has threads should not fork.
            self._is_fetching = True
            threading.Thread(target=self._fetch_for_ever, daemon=True).start()
        keys = self._keys
        if keys is None:
            raise NotYetError(f"no keys from {self._shown} yet")
        return keys

    def want_newer(self) -> None:
        self._wanted.set()

    def close(self) -> None:
        self._closed.set()
        self._wanted.set()

    def _fetch_for_ever(self) -> None:
        settings, wait_s = self._settings, 0.0
        while not self._closed.is_set():
            try:
                self._keys = self._fetch()
            except Exception as error:  # noqa: BLE001 - the thread must go on
                wait_s = min(max(settings.retry_s, wait_s * 2), settings.max_retry_s)
                _LOG.warning(
                    "%s=%s: %s; tried again in %.1f s",
                    _URL_KEY,
                    self._shown,
                    str(error) or type(error).__name__,
                    wait_s,
                )
                self._closed.wait(wait_s)
                continue
            wait_s = 0.0
            # Tokens with made-up key ids must not make us fetch without a pause.
            self._closed.wait(settings.max_retry_s)
            self._wanted.wait(max(0.0, settings.refresh_s - settings.max_retry_s))
            self._wanted.clear()

    def _fetch(self) -> dict[str, Any]:
        from urllib.request import urlopen

        with urlopen(self._settings.jwks_url, timeout=_FETCH_TIMEOUT_S) as answer:
            return parse_jwks(answer.read(_MAX_JWKS_BYTES))


def parse_jwks(data: bytes) -> dict[str, Any]:
    """Return the keys of a JWKS that can verify accepted signatures, by key id.

    Other keys are left out. A key without an id gets its number as id: "#0".

    Raises:
        ValueError: the bytes are not a JWKS, or none of its keys can be used.
    """
    import jwt

    try:
        found = json.loads(data)
    except RecursionError:
        raise ValueError("no JWKS: lists in lists without end") from None
    if not isinstance(found, dict) or not isinstance(found.get("keys"), list):
        raise ValueError("no JWKS: an object with a list of keys is expected")
    keys = {}
    for number, each in enumerate(found["keys"]):
        if not isinstance(each, dict) or each.get("use", "sig") != "sig":
            continue
        try:
            key = jwt.PyJWK(each)
        except jwt.PyJWTError:
            continue  # PyJWT does not know this kind of key
        if key.algorithm_name in _ALGORITHMS:
            keys[str(each.get("kid", f"#{number}"))] = key
    if not keys:
        raise ValueError(f"none of {len(found['keys'])} keys is one to verify with")
    return keys


def _invalid(detail: str) -> SaslError:
    return SaslError(
        "Authentication failed: the token is not valid",
        AuthenticationResult.CREDENTIALS,
        f"the token is not valid: {detail}",
    )

"""The settings of TLS and SASL: checked, and turned into channels and logins.

Source: the "Security" chapter of the Apache Kafka documentation; KIP-651 (PEM), KIP-768
(tokens from a file), RFC 7515 for unsecured tokens.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, cast
from urllib.parse import unquote, urlsplit

from mpbroker.base.config_def import (
    ConfigError,
    ConfigKey,
    ConfigType,
    ConfigValue,
    list_of,
    one_of,
    utf8,
)
from mpbroker.client.errors import SaslAuthenticationError

if TYPE_CHECKING:
    import socket

    from mpbroker.client.sasl import Mechanism, SaslAuthenticator
    from mpbroker.client.tls_channel import TlsChannel

TokenProvider = Callable[[], str]

_STRING, _PASSWORD, _LIST = ConfigType.STRING, ConfigType.PASSWORD, ConfigType.LIST
_PLAINTEXT: Final = "PLAINTEXT"
_OAUTHBEARER: Final = "OAUTHBEARER"
_MECHANISMS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", _OAUTHBEARER)
_PROVIDER: Final = "sasl.oauthbearer.token.provider"
_TOKEN_URL: Final = "sasl.oauthbearer.token.endpoint.url"
_TLS_VERSIONS: Final = ("TLSv1.2", "TLSv1.3")

# fmt: off
SECURITY_KEYS: Final = (
    ConfigKey("security.protocol", _STRING, _PLAINTEXT,
        "Whether connections use TLS, SASL, both or neither.",
        validator=one_of(_PLAINTEXT, "SSL", "SASL_PLAINTEXT", "SASL_SSL")),
    ConfigKey("ssl.truststore.type", _STRING, "PEM",
        "Format of the trusted certificates.", validator=one_of("PEM")),
    ConfigKey("ssl.truststore.location", _STRING, None,
        "File with the trusted certificates; None: those that the system trusts."),
    ConfigKey("ssl.truststore.certificates", _PASSWORD, None,
        "The trusted certificates themselves, instead of a file."),
    ConfigKey("ssl.keystore.type", _STRING, "PEM",
        "Format of the client's key and certificates.", validator=one_of("PEM")),
    ConfigKey("ssl.keystore.location", _STRING, None,
        "File with the client's private key and its certificates."),
    ConfigKey("ssl.keystore.certificate.chain", _PASSWORD, None,
        "The client's certificates themselves, instead of a file."),
    ConfigKey("ssl.keystore.key", _PASSWORD, None,
        "The client's private key itself, instead of a file."),
    ConfigKey("ssl.key.password", _PASSWORD, None,
        "Password of the client's private key, if it is encrypted."),
    ConfigKey("ssl.endpoint.identification.algorithm", _STRING, "https",
        "https: the broker's certificate must be for the name that was dialled. Empty:"
        " it may be for any name.",
        validator=one_of("https", "")),
    ConfigKey("ssl.enabled.protocols", _LIST, ("TLSv1.2", "TLSv1.3"),
        "Versions of TLS to use.", validator=list_of(*_TLS_VERSIONS)),
    ConfigKey("ssl.cipher.suites", _LIST, (),
        "OpenSSL's names of the TLS 1.2 ciphers to use; none: OpenSSL's default."),
    ConfigKey("sasl.mechanism", _STRING, "GSSAPI",
        "Mechanism of the login. It has to be set: the default GSSAPI does not exist"
        " here.",
        validator=one_of(*_MECHANISMS, "GSSAPI")),
    ConfigKey("sasl.jaas.config", _PASSWORD, None,
        "User and password in the syntax of Kafka's Java client.", validator=utf8()),
    ConfigKey("sasl.username", _STRING, None, "The user, as in librdkafka.",
        validator=utf8()),
    ConfigKey("sasl.password", _PASSWORD, None, "The password, as in librdkafka.",
        validator=utf8()),
    ConfigKey(_PROVIDER, _STRING, None,
        "Function that returns a token, or its MODULE:FUNCTION. The client's thread"
        " calls it for each login."),
    ConfigKey(_TOKEN_URL, _STRING, None,
        "URL (file://) of a file with a token; it is read for each login."),
)
# fmt: on


class SecuritySettings(NamedTuple):
    """The settings of TLS and SASL as checked, plain values, which can be pickled."""

    protocol: str = _PLAINTEXT
    values: Mapping[str, ConfigValue] = {}
    mechanism: str = ""
    username: str = ""
    password: str = ""
    # The subject of an unsecured token, from sasl.jaas.config.
    subject: str = ""

    @property
    def uses_tls(self) -> bool:
        return self.protocol in ("SSL", "SASL_SSL")

    @property
    def uses_sasl(self) -> bool:
        return self.protocol in ("SASL_PLAINTEXT", "SASL_SSL")

    @classmethod
    def of(cls, values: Mapping[str, ConfigValue]) -> SecuritySettings:
        """Return the security settings among the parsed settings of a client.

        Raises:
            ConfigError: settings contradict each other, or one is missing.
        """
        protocol = str(values["security.protocol"])
        found = cls(protocol, {key.name: values[key.name] for key in SECURITY_KEYS[1:]})
        return found._with_sasl() if found.uses_sasl else found

    def _with_sasl(self) -> SecuritySettings:
        mechanism = str(self.values["sasl.mechanism"])
        if mechanism not in _MECHANISMS:
            raise ConfigError(
                f"sasl.mechanism={mechanism}: it must be one of"
                f" {', '.join(_MECHANISMS)}"
            )
        text = self.values["sasl.jaas.config"]
        options = parse_jaas(str(text)) if text else {}
        if mechanism == _OAUTHBEARER:
            subject = options.get("unsecuredLoginStringClaim_sub", "")
            if not (subject or self.values[_PROVIDER] or self.values[_TOKEN_URL]):
                raise ConfigError(
                    f"sasl.mechanism=OAUTHBEARER needs {_TOKEN_URL} (a file:// with a"
                    f" token) or {_PROVIDER}"
                )
            _check_url(self.values[_TOKEN_URL])
            return self._replace(mechanism=mechanism, subject=subject)
        username = self.values["sasl.username"] or options.get("username")
        password = self.values["sasl.password"] or options.get("password")
        if not username or password is None:
            raise ConfigError(
                f"sasl.mechanism={mechanism} needs sasl.username and sasl.password, or"
                " both in sasl.jaas.config"
            )
        return self._replace(
            mechanism=mechanism, username=str(username), password=str(password)
        )

    # -- logins and channels -----------------------------------------------------------

    def make_authenticator(self) -> SaslAuthenticator | None:
        """Return the object that logs one connection in; None without SASL."""
        if not self.uses_sasl:
            return None
        # Imported here, as TLS below: most clients need neither.
        from mpbroker.client.sasl import SaslAuthenticator

        advice = f"see sasl.username ({self.username}) and sasl.password"
        if self.mechanism == _OAUTHBEARER:
            advice = "see where the token comes from"
        return SaslAuthenticator(self.mechanism, self._make_mechanism, advice)

    def _make_mechanism(self) -> Mechanism:
        from mpbroker.client import sasl

        if self.mechanism == "PLAIN":
            return sasl.PlainMechanism(self.username, self.password)
        if self.mechanism == _OAUTHBEARER:
            return sasl.OAuthBearerMechanism(self._token())
        return sasl.ScramMechanism(self.mechanism, self.username, self.password)

    def _token(self) -> str:
        provider, url = self.values[_PROVIDER], self.values[_TOKEN_URL]
        try:
            if provider is not None:
                return load_provider(provider)().strip()
            if url is not None:
                path = unquote(urlsplit(str(url)).path)
                return Path(path).read_text(encoding="utf-8").strip()
        except Exception as error:
            raise SaslAuthenticationError(f"no token: {error}") from error
        return unsecured_token(self.subject, time.time())

    def make_channels(self) -> Callable[[socket.socket, str], TlsChannel] | None:
        """Return a function that makes a connection's TLS channel; None without TLS.

        Raises:
            ConfigError: a certificate or key cannot be read.
        """
        if not self.uses_tls:
            return None
        from mpbroker.client.tls_channel import TlsChannel, make_context

        context = make_context(self.values)
        return lambda sock, host: TlsChannel(sock, host, context)


def load_provider(provider: object) -> TokenProvider:
    """Return the function that provides OAUTHBEARER tokens, also if only named.

    Args:
        provider: the function, or its name as MODULE:FUNCTION.

    Raises:
        ConfigError: there is no function of that name.
    """
    if callable(provider):
        return cast(TokenProvider, provider)
    module, _, name = str(provider).partition(":")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{_PROVIDER}={provider}: it must be MODULE:FUNCTION ({error})"
        ) from None
    return cast(TokenProvider, found)


def _check_url(url: ConfigValue) -> None:
    if url is not None and urlsplit(str(url)).scheme != "file":
        raise ConfigError(
            f"{_TOKEN_URL}={url}: only file:// is read; for others give {_PROVIDER}"
        )


def unsecured_token(subject: str, now_s: float) -> str:
    """Return a token without a signature, valid for an hour, for brokers under test.

    Args:
        subject: the user that the token names.
        now_s: the time in seconds since 1970.
    """
    import json
    from base64 import urlsafe_b64encode

    claims = {"sub": subject, "iat": int(now_s), "exp": int(now_s) + 3600}
    parts = ({"alg": "none"}, claims)
    encoded = [urlsafe_b64encode(json.dumps(part).encode()) for part in parts]
    return ".".join(part.rstrip(b"=").decode() for part in encoded) + "."


_JAAS_OPTION: Final = re.compile(
    r"""\s*([\w.]+)\s*=\s*(?:"((?:\\.|[^"\\])*)"|'((?:\\.|[^'\\])*)'|([^\s;"']+))""",
    re.DOTALL,
)
_JAAS_HEAD: Final = re.compile(r"\s*[\w.$]+\s+(?:required|requisite|sufficient)\b")


def parse_jaas(text: str) -> dict[str, str]:
    """Return the options of a sasl.jaas.config value, by name.

    Raises:
        ConfigError: the text is not `MODULE required NAME="VALUE" ...;`. The error does
            not quote it, because it has a password.
    """
    head = _JAAS_HEAD.match(text)
    options: dict[str, str] = {}
    at = 0 if head is None else head.end()
    while head is not None and (match := _JAAS_OPTION.match(text, at)):
        name, double, single, bare = match.groups()
        value = next(each for each in (double, single, bare) if each is not None)
        options[name] = re.sub(r"\\(.)", r"\1", value, flags=re.DOTALL)
        at = match.end()
    if head is None or text[at:].strip() != ";":
        raise ConfigError(
            'sasl.jaas.config must be MODULE required username="..." password="...";'
            " with the semicolon at its end"
        )
    return options

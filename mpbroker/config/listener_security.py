"""Read the settings of TLS and SASL of a listener as they are now.

Imported only if a listener is not PLAINTEXT.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from mpbroker.base.config_def import LISTENER_PREFIX, ConfigError
from mpbroker.config.console_settings import console_address, console_endpoint
from mpbroker.config.dynamic import DynamicConfig
from mpbroker.config.listeners import EndPoint
from mpbroker.metadata.delegation_tokens import TokenLoginOf
from mpbroker.network.security.listener_authentication import (
    MECHANISMS,
    ListenerSecurity,
    SaslSettings,
)
from mpbroker.network.security.sasl.authenticator import AnswerApiVersions
from mpbroker.network.security.sasl.jaas import users_of_jaas
from mpbroker.network.security.sasl.scram import CredentialOf

if TYPE_CHECKING:
    from mpbroker.config.broker_config import BrokerConfig
    from mpbroker.network.security.sasl.jwt_validator import JwtSettings
    from mpbroker.network.security.tls import TlsSettings

_MS = 1_000_000
_T = TypeVar("_T")
_OPTIONAL: Any = (str, type(None))
# The settings of TLS that messages name.
_TLS_KEYS = (
    "ssl.keystore.location",
    "ssl.keystore.certificate.chain",
    "ssl.keystore.key",
    "ssl.truststore.location",
    "ssl.truststore.certificates",
    "ssl.client.auth",
    "ssl.enabled.protocols",
    "ssl.cipher.suites",
)


class SecuritySettings(NamedTuple):
    """The settings that decide which clients may connect to a listener, and how.

    Attributes:
        protocol: SSL, SASL_PLAINTEXT or SASL_SSL.
        tls: None for SASL_PLAINTEXT.
        sasl: None for SSL.
        failure_delay_ns: connection.failed.authentication.delay.ms.
        setup_timeout_ns: connections.setup.timeout.ms.
    """

    protocol: str
    tls: TlsSettings | None
    sasl: SaslSettings | None
    failure_delay_ns: int
    setup_timeout_ns: int

    def make(
        self,
        credential_of: CredentialOf,
        answer_api_versions: AnswerApiVersions,
        token_of: TokenLoginOf | None = None,
    ) -> ListenerSecurity:
        """Return the ListenerSecurity that applies these settings to connections.

        Raises:
            ConfigError: the settings cannot be used.
        """
        return ListenerSecurity(
            self.protocol,
            self.tls,
            self.sasl,
            credential_of,
            answer_api_versions,
            self.failure_delay_ns,
            self.setup_timeout_ns,
            token_of,
        )

    def check(self) -> None:
        """Raise ConfigError if these settings cannot be used."""

        def never_called(*_: object) -> Any:
            raise AssertionError("no client logs in here")

        self.make(never_called, never_called).close()


def security_settings(
    now: DynamicConfig, endpoint: EndPoint, secret: bytes = b""
) -> SecuritySettings:
    """Return the settings of TLS and SASL of a listener.

    Args:
        secret: the bytes from which the salts of unknown users are made; see
            ScramServer.

    Raises:
        ConfigError: a setting is missing or malformed.
    """
    protocol, name = endpoint.security_protocol, endpoint.listener_name
    get = partial(_get, now, name)
    return SecuritySettings(
        protocol,
        _tls(now, name) if "SSL" in protocol else None,
        _sasl(now, name, get, secret) if "SASL" in protocol else None,
        get("connection.failed.authentication.delay.ms", int) * _MS,
        get("connections.setup.timeout.ms", int) * _MS,
    )


def tls_of_console(config: BrokerConfig) -> TlsSettings | None:
    """Return the settings of TLS of the console; None: it does not use HTTPS.

    They are those of the listener that the console connects to, or the broker's. A
    browser needs no certificate of its own: users log in.

    Raises:
        ConfigError: a setting is malformed.
    """
    address = console_address(config)
    if address is None or not address.is_secure:
        return None
    name = console_endpoint(config).listener_name
    now = DynamicConfig(config, lambda resource: {})
    return _tls(now, name)._replace(client_auth="none", where="console.listeners: ")


def _get(now: DynamicConfig, listener: str, key: str, kind: type[_T]) -> _T:
    value = now.for_listener(listener, key)
    assert isinstance(value, kind), key
    return value


def _get_of(
    now: DynamicConfig, listener: str, mechanism: str, key: str, kind: type[_T]
) -> _T:
    """Return the value that a setting has for one SASL mechanism of a listener."""
    value = now.for_mechanism(listener, mechanism, key)
    assert isinstance(value, kind), key
    return value


def _tls(now: DynamicConfig, name: str) -> TlsSettings:
    get: Any = partial(_get, now, name)
    # Imported here, because SASL_PLAINTEXT does not need OpenSSL.
    from mpbroker.network.security.tls import TlsSettings

    return TlsSettings(
        keystore_location=get("ssl.keystore.location", _OPTIONAL),
        keystore_certificate_chain=get("ssl.keystore.certificate.chain", _OPTIONAL),
        keystore_key=get("ssl.keystore.key", _OPTIONAL),
        key_password=get("ssl.key.password", _OPTIONAL),
        truststore_location=get("ssl.truststore.location", _OPTIONAL),
        truststore_certificates=get("ssl.truststore.certificates", _OPTIONAL),
        client_auth=get("ssl.client.auth", str),
        enabled_protocols=get("ssl.enabled.protocols", tuple),
        cipher_suites=get("ssl.cipher.suites", tuple),
        principal_mapping_rules=get("ssl.principal.mapping.rules", str),
        prefix=f"{LISTENER_PREFIX}{name.lower()}.",
        own=frozenset(
            key for key in _TLS_KEYS if now.own_of_listener(name, key) is not None
        ),
    )


def _sasl(now: DynamicConfig, name: str, get: Any, secret: bytes) -> SaslSettings:
    mechanisms = get("sasl.enabled.mechanisms", tuple)
    if not mechanisms:
        raise ConfigError(
            "sasl.enabled.mechanisms is empty; it may name " + ", ".join(MECHANISMS)
        )
    users = {}
    jaas = now.for_mechanism(name, "plain", "sasl.jaas.config")
    if jaas is not None and "PLAIN" in mechanisms:
        key = f"listener.name.{name.lower()}.plain.sasl.jaas.config"
        users = users_of_jaas(str(jaas), key)
    reauth = {}
    for mechanism in mechanisms:
        reauth[mechanism] = _get_of(
            now, name, mechanism, "connections.max.reauth.ms", int
        )
    return SaslSettings(
        mechanisms,
        users,
        _get_of(now, name, "plain", "sasl.plain.users.file", _OPTIONAL),
        _jwt(partial(_get_of, now, name, "oauthbearer"))
        if "OAUTHBEARER" in mechanisms
        else None,
        reauth,
        get("sasl.server.max.receive.size", int),
        secret,
    )


def _jwt(get: Any) -> JwtSettings | None:
    from mpbroker.network.security.sasl.jwt_validator import JwtSettings

    prefix = "sasl.oauthbearer"
    url = get(f"{prefix}.jwks.endpoint.url", _OPTIONAL)
    if not url:
        return None
    return JwtSettings(
        url,
        get(f"{prefix}.expected.audience", tuple),
        get(f"{prefix}.expected.issuer", _OPTIONAL),
        get(f"{prefix}.sub.claim.name", str),
        get(f"{prefix}.clock.skew.seconds", int),
        get(f"{prefix}.jwks.endpoint.refresh.ms", int) / 1000,
        get(f"{prefix}.jwks.endpoint.retry.backoff.ms", int) / 1000,
        get(f"{prefix}.jwks.endpoint.retry.backoff.max.ms", int) / 1000,
    )

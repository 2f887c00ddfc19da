"""A listener's settings of TLS and SASL, and the processor that makes use of them.

Imported only where a listener is not PLAINTEXT.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from mpbroker.config import BrokerConfig
from mpbroker.config.listeners import EndPoint
from mpbroker.config_def import ConfigError
from mpbroker.network.listener_security import (
    MECHANISMS,
    ListenerSecurity,
    SaslSettings,
)
from mpbroker.network.sasl.jaas import users_of_jaas
from mpbroker.network.secure_processor import SecureProcessor
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.messages.api_versions import ApiVersionsRequest
from mpbroker.server.apis import SERVED, advertised_versions
from mpbroker.server.handlers.api_versions import (
    handle_api_versions,
    unsupported_version,
)
from mpbroker.storage.metadata_log import MetadataLog
from mpbroker.storage.scram_credentials import ScramCredentialReader
from mpbroker.supervisor.memory import BrokerMemory

_MS = 1_000_000
_T = TypeVar("_T")


def check_security(config: BrokerConfig) -> None:
    """Try the settings of all listeners, in the process that reads them.

    Raises:
        ConfigError: those of one cannot be used.
    """
    for endpoint in config.endpoints:
        if endpoint.security_protocol != "PLAINTEXT":
            try:
                _security(config, endpoint, b"", _no_log)
            except ConfigError as error:
                name = endpoint.connection_string
                raise ConfigError(f"listener {name}: {error}") from None


def _no_log() -> MetadataLog:
    raise AssertionError("nobody logs in here")


def secure_processor(
    config: BrokerConfig,
    endpoint: EndPoint,
    memory: BrokerMemory,
    log_dir: str,
    secret: bytes,
) -> Callable[..., SecureProcessor]:
    """Return what makes the processors of a listener."""

    def open_log() -> MetadataLog:
        return MetadataLog(log_dir, memory.metadata_cell)

    return partial(
        SecureProcessor,
        security=_security(config, endpoint, secret, open_log),
        principals=memory.principals,
    )


def _security(
    config: BrokerConfig,
    endpoint: EndPoint,
    secret: bytes,
    open_log: Callable[[], MetadataLog],
) -> ListenerSecurity:
    protocol, name = endpoint.security_protocol, endpoint.listener_name
    get = partial(_get, partial(config.for_listener, name))
    return ListenerSecurity(
        protocol,
        _tls(get, name) if "SSL" in protocol else None,
        _sasl(config, name, get, secret) if "SASL" in protocol else None,
        ScramCredentialReader(open_log).credential,
        _answer_api_versions,
        get("connection.failed.authentication.delay.ms", int) * _MS,
        get("connections.setup.timeout.ms", int) * _MS,
    )


def _get(lookup: Callable[[str], Any], key: str, kind: type[_T]) -> _T:
    value = lookup(key)
    assert isinstance(value, kind), key
    return value


def _tls(get: Any, name: str) -> Any:
    # Imported here: SASL_PLAINTEXT does without OpenSSL.
    from mpbroker.network.tls import TlsSettings

    optional: Any = (str, type(None))
    return TlsSettings(
        keystore_location=get("ssl.keystore.location", optional),
        keystore_certificate_chain=get("ssl.keystore.certificate.chain", optional),
        keystore_key=get("ssl.keystore.key", optional),
        key_password=get("ssl.key.password", optional),
        truststore_location=get("ssl.truststore.location", optional),
        truststore_certificates=get("ssl.truststore.certificates", optional),
        client_auth=get("ssl.client.auth", str),
        enabled_protocols=get("ssl.enabled.protocols", tuple),
        cipher_suites=get("ssl.cipher.suites", tuple),
        principal_mapping_rules=get("ssl.principal.mapping.rules", str),
        prefix=f"listener.name.{name.lower()}.",
    )


def _sasl(config: BrokerConfig, name: str, get: Any, secret: bytes) -> SaslSettings:
    mechanisms = get("sasl.enabled.mechanisms", tuple)
    optional: Any = (str, type(None))
    if not mechanisms:
        raise ConfigError(
            "sasl.enabled.mechanisms is empty; served are " + ", ".join(MECHANISMS)
        )
    users = {}
    jaas = config.for_mechanism(name, "plain", "sasl.jaas.config")
    if jaas is not None and "PLAIN" in mechanisms:
        key = f"listener.name.{name.lower()}.plain.sasl.jaas.config"
        users = users_of_jaas(str(jaas), key)
    reauth = {}
    for mechanism in mechanisms:
        value = config.for_mechanism(name, mechanism, "connections.max.reauth.ms")
        assert isinstance(value, int)
        reauth[mechanism] = value
    return SaslSettings(
        mechanisms,
        users,
        get("sasl.plain.users.file", optional),
        _jwt(get) if "OAUTHBEARER" in mechanisms else None,
        reauth,
        get("sasl.server.max.receive.size", int),
        secret,
    )


def _jwt(get: Any) -> Any:
    from mpbroker.network.sasl.jwt_validator import JwtSettings

    optional: Any = (str, type(None))
    prefix = "sasl.oauthbearer"
    url = get(f"{prefix}.jwks.endpoint.url", optional)
    if not url:
        return None
    return JwtSettings(
        url,
        get(f"{prefix}.expected.audience", tuple),
        get(f"{prefix}.expected.issuer", optional),
        get(f"{prefix}.sub.claim.name", str),
        get(f"{prefix}.scope.claim.name", str),
        get(f"{prefix}.clock.skew.seconds", int),
        get(f"{prefix}.jwks.endpoint.refresh.ms", int) / 1000,
        get(f"{prefix}.jwks.endpoint.retry.backoff.ms", int) / 1000,
        get(f"{prefix}.jwks.endpoint.retry.backoff.max.ms", int) / 1000,
    )


def _answer_api_versions(version: int, body: memoryview) -> tuple[bytes, bool]:
    """Answer as a handler would, since no request goes there yet."""
    versions = advertised_versions(SERVED)
    if version > SERVED[ApiKey.API_VERSIONS][1]:
        return unsupported_version(versions).encode(0), False
    request = ApiVersionsRequest.decode(version, body)
    response = handle_api_versions(request, version, versions)
    return response.encode(version), not response.error_code

"""Apply a listener's settings of TLS and SASL to its processors.

Imported only where a listener is not PLAINTEXT.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

from mpbroker.base.config_def import ConfigError
from mpbroker.base.logger import get_logger
from mpbroker.broker.authorizer_setup import token_settings
from mpbroker.broker.process_parts import ProcessParts
from mpbroker.config import BrokerConfig
from mpbroker.config.dynamic import DynamicConfig
from mpbroker.config.listener_security import SecuritySettings, security_settings
from mpbroker.config.listeners import EndPoint
from mpbroker.metadata.delegation_tokens import (
    TokenLogin,
    TokenSettings,
    token_login,
    token_of_record,
)
from mpbroker.metadata.metadata_log import MetadataLog
from mpbroker.metadata.scram_credentials import (
    ScramCredential,
    ScramCredentialReader,
    ScramMechanism,
)
from mpbroker.metadata.topics import TopicRegistry
from mpbroker.network.security.listener_authentication import ListenerSecurity
from mpbroker.network.security.sasl.mechanism import NotYetError
from mpbroker.network.security.secure_processor import SecureProcessor
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.messages.api_versions import ApiVersionsRequest
from mpbroker.server.apis import APIS, advertised_versions, served
from mpbroker.server.handlers.api_versions import (
    handle_api_versions,
    unsupported_version,
)

_LOG = get_logger(__name__)

# A login with a delegation token hashes 4,096 times, which takes some ms. The results
# for this many tokens are kept.
_MAX_TOKEN_LOGINS: Final = 1000

T = TypeVar("T")


def check_security(config: BrokerConfig) -> None:
    """Try the TLS and SASL settings of all listeners, before the first fork.

    Raises:
        ConfigError: a listener's settings cannot be used; the text names it.
    """
    static = DynamicConfig(config, lambda resource: {})
    for endpoint in config.endpoints:
        if endpoint.security_protocol != "PLAINTEXT":
            try:
                security_settings(static, endpoint).check()
            except ConfigError as error:
                name = endpoint.connection_string
                raise ConfigError(f"listener {name}: {error}") from None


def secure_processor(
    parts: ProcessParts, endpoint: EndPoint, secret: bytes, registry: TopicRegistry
) -> Callable[..., SecureProcessor]:
    """Return a function that makes a processor of a listener with TLS or SASL.

    Args:
        parts: the settings and the shared memory.
        endpoint: the listener's.
        secret: the broker's random secret; see ScramServer.
        registry: the view of the metadata log, this process's own or inherited.
    """
    config = parts.config
    credentials = Credentials(parts.metadata_log, token_settings(config))
    live = LiveSecurity(
        config,
        endpoint,
        registry,
        secret,
        lambda settings: settings.make(
            credentials.credential,
            ApiVersionsAnswers(config, registry),
            credentials.token if credentials.tokens is not None else None,
        ),
    )
    return partial(
        SecureProcessor,
        security=live.current,
        news=live.news,
        principals=parts.memory.principals,
    )


class Credentials:
    """Reads the credentials of SCRAM users and delegation tokens in the metadata log.

    While the log cannot be read, logins wait. The log is opened at the first login,
    when no descriptor may be left for it. That must not end a processor, which would
    close all its connections over TLS.

    Attributes:
        tokens: the settings of delegation tokens; None: they are not served.
    """

    def __init__(
        self,
        open_log: Callable[[], MetadataLog],
        tokens: TokenSettings | None = None,
    ) -> None:
        self._reader = ScramCredentialReader(open_log)
        self._token_logins: dict[tuple[str, ScramMechanism], TokenLogin] = {}
        self.tokens = tokens
        self._failed = False

    def credential(
        self, name: str, mechanism: ScramMechanism
    ) -> ScramCredential | None:
        """Return a user's credential; None: the user has none.

        Raises:
            NotYetError: the log cannot be read now; ask again later.
        """
        return self._read(lambda: self._reader.credential(name, mechanism))

    def token(self, token_id: str, mechanism: ScramMechanism) -> TokenLogin | None:
        """Return the login of a delegation token; None: it is unknown or has expired.

        Raises:
            NotYetError: the log cannot be read now; ask again later.
        """
        record = self._read(lambda: self._reader.token(token_id))
        if record is None or self.tokens is None:
            return None
        token = token_of_record(record)
        if token.has_expired(time.time_ns() // 1_000_000):
            return None
        logins, key = self._token_logins, (token_id, mechanism)
        login = logins.get(key)
        if login is None:
            if len(logins) >= _MAX_TOKEN_LOGINS:
                logins.clear()
            login = logins[key] = token_login(token, self.tokens, mechanism)
        return login._replace(expires_ms=token.ends_ms)

    def _read(self, read: Callable[[], T]) -> T:
        try:
            found = read()
        except OSError as error:
            if not self._failed:  # logged once, until it works again
                _LOG.error("logins with SCRAM wait: %s", error)
            self._failed = True
            raise NotYetError(str(error)) from error
        self._failed = False
        return found


class LiveSecurity:
    """The TLS and SASL settings in use on one listener, as the metadata log sets them.

    A setting that cannot be used any more (its file is gone) changes nothing: the last
    usable settings stay, at the start those of the configuration file.

    Attributes:
        current: the security in use.
    """

    def __init__(
        self,
        config: BrokerConfig,
        endpoint: EndPoint,
        registry: TopicRegistry,
        secret: bytes,
        make: Callable[[SecuritySettings], ListenerSecurity],
    ) -> None:
        """Make the listener's TLS and SASL objects from its present settings.

        Raises:
            ConfigError: neither the present settings nor those of the start are usable.
        """
        self._endpoint = endpoint
        self._registry = registry
        self._secret = secret
        self._make = make
        self._now = DynamicConfig(config, registry.broker_overrides)
        self._settings: SecuritySettings | None = None
        registry.catch_up()
        self._version = registry.version
        fresh = self._fresh()
        if fresh is None:
            static = DynamicConfig(config, lambda resource: {})
            self._settings = security_settings(static, endpoint, secret)
            fresh = make(self._settings)
        self.current: ListenerSecurity = fresh

    def news(self) -> ListenerSecurity | None:
        """Return the new TLS and SASL settings if they have changed, else None.

        Without a change of the metadata log this costs one comparison.
        """
        self._registry.catch_up()
        if self._registry.version == self._version:
            return None
        self._version = self._registry.version
        fresh = self._fresh()
        if fresh is not None:
            _LOG.info(
                "listener %s: new connections get other settings of TLS and SASL",
                self._endpoint.listener_name,
            )
            self.current.close()
            self.current = fresh
        return fresh

    def _fresh(self) -> ListenerSecurity | None:
        try:
            settings = security_settings(self._now, self._endpoint, self._secret)
            if settings == self._settings:
                return None
            fresh = self._make(settings)
        except ConfigError as error:
            name = self._endpoint.listener_name
            _LOG.warning("listener %s: %s; what was before stays in use", name, error)
            return None
        self._settings = settings
        return fresh


class ApiVersionsAnswers:
    """Answers ApiVersions before authentication, when no request reaches a handler."""

    def __init__(self, config: BrokerConfig, registry: TopicRegistry) -> None:
        self._registry = registry
        self._versions = advertised_versions(
            served(has_receiver=config.has_telemetry_receiver)
        )

    def __call__(self, version: int, body: memoryview) -> tuple[bytes, bool]:
        """Return the encoded response, and whether it has no error.

        Args:
            version: the version of the ApiVersions request.
            body: the request's body.
        """
        if version > APIS[ApiKey.API_VERSIONS].versions[1]:
            return unsupported_version(self._versions).encode(0), False
        request = ApiVersionsRequest.decode(version, body)
        response = handle_api_versions(
            request, version, self._versions, self._registry.features
        )
        return response.encode(version), not response.error_code

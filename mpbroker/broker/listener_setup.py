"""A listener's settings of TLS and SASL, and the processor that makes use of them.

Imported only where a listener is not PLAINTEXT.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mpbroker.base.config_def import ConfigError
from mpbroker.base.logger import get_logger
from mpbroker.broker.process_parts import ProcessParts
from mpbroker.config import BrokerConfig
from mpbroker.config.dynamic import DynamicConfig
from mpbroker.config.listener_security import SecuritySettings, security_settings
from mpbroker.config.listeners import EndPoint
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
from mpbroker.server.apis import SERVED, TELEMETRY_APIS, advertised_versions
from mpbroker.server.handlers.api_versions import (
    handle_api_versions,
    unsupported_version,
)

_LOG = get_logger(__name__)


def check_security(config: BrokerConfig) -> None:
    """Try the settings of all listeners, in the process that reads them.

    Raises:
        ConfigError: those of one cannot be used.
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
    """Return what makes the processors of a listener.

    Args:
        secret: see ScramServer.
        registry: this process's own, or a copy of its parent's.
    """
    config = parts.config
    live = LiveSecurity(
        config,
        endpoint,
        registry,
        secret,
        lambda settings: settings.make(
            Credentials(parts.metadata_log).credential, ApiVersionsAnswers(config)
        ),
    )
    return partial(
        SecureProcessor,
        security=live.current,
        news=live.news,
        principals=parts.memory.principals,
    )


class Credentials:
    """SCRAM's users; while their log cannot be read, nobody is judged.

    It is opened at the first login, when there may be no descriptor for it: that must
    not end a processor, with all its connections over TLS.
    """

    def __init__(self, open_log: Callable[[], MetadataLog]) -> None:
        self._reader = ScramCredentialReader(open_log)
        self._failed = False

    def credential(
        self, name: str, mechanism: ScramMechanism
    ) -> ScramCredential | None:
        """Return a user's credential; None: there is none.

        Raises:
            NotYetError: ask again later.
        """
        try:
            found = self._reader.credential(name, mechanism)
        except OSError as error:
            if not self._failed:  # once, until it works again
                _LOG.error("who logs in with SCRAM waits: %s", error)
            self._failed = True
            raise NotYetError(str(error)) from error
        self._failed = False
        return found


class LiveSecurity:
    """The security of one listener, as the metadata log has it.

    What is set and cannot be used any more (a file has gone) changes nothing: what was
    in use stays, or at the start what the broker was started with.

    Attributes:
        current: what is in use.
    """

    def __init__(
        self,
        config: BrokerConfig,
        endpoint: EndPoint,
        registry: TopicRegistry,
        secret: bytes,
        make: Callable[[SecuritySettings], ListenerSecurity],
    ) -> None:
        """Make use of what is set now.

        Raises:
            ConfigError: neither that nor what the broker was started with is usable.
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
        """Return another one if the settings have changed; one comparison if not."""
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
    """Answers as a handler would, since no request goes there yet."""

    def __init__(self, config: BrokerConfig) -> None:
        self._versions = advertised_versions(
            key
            for key in SERVED
            if key not in TELEMETRY_APIS or config.has_telemetry_receiver
        )

    def __call__(self, version: int, body: memoryview) -> tuple[bytes, bool]:
        """Return an answer, and whether it is a good one."""
        if version > SERVED[ApiKey.API_VERSIONS][1]:
            return unsupported_version(self._versions).encode(0), False
        request = ApiVersionsRequest.decode(version, body)
        response = handle_api_versions(request, version, self._versions)
        return response.encode(version), not response.error_code

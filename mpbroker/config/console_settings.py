"""Check the settings of the console, and choose the listener that it connects to."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Protocol
from urllib.parse import urlsplit

from mpbroker.base.config_def import ConfigError, ConfigValue
from mpbroker.config.listeners import EndPoint
from mpbroker.config.metrics_settings import HttpListener, parse_http_listener

_KEY: Final = "console.listeners"
# The mechanisms with a user and a password. PLAIN comes last: it sends the password.
_MECHANISMS: Final = ("SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN")
_SASL: Final = ("SASL_PLAINTEXT", "SASL_SSL")


class ConsoleConfig(Protocol):
    """The part of a BrokerConfig that decides about the console."""

    @property
    def console_listeners(self) -> tuple[str, ...]: ...

    @property
    def console_schema_registry_url(self) -> tuple[str, ...]: ...

    @property
    def console_schema_registry_basic_auth_user_info(self) -> str | None: ...

    @property
    def console_schema_registry_ssl_truststore_location(self) -> str | None: ...

    @property
    def control_plane_listener_name(self) -> str | None: ...

    @property
    def sasl_enabled_mechanisms(self) -> tuple[str, ...]: ...

    @property
    def endpoints(self) -> tuple[EndPoint, ...]: ...

    def own_value(self, listener_name: str, name: str, /) -> ConfigValue: ...


def check_console(config: ConsoleConfig) -> None:
    """Raise ConfigError if the console cannot be served with these settings."""
    address = console_address(config)
    if address is None:
        return
    _check_registry(config)
    endpoint, host = console_endpoint(config), address.host
    if host in ("localhost", "::1") or host.startswith("127."):
        return
    if not address.is_secure:
        raise ConfigError(
            f"{_KEY}: {host or 'an empty host'!r} is not loopback, and HTTP would show"
            " passwords to the network; name 127.0.0.1, or use HTTPS"
        )
    if endpoint.security_protocol == "PLAINTEXT":
        raise ConfigError(
            f"{_KEY}: {host or 'an empty host'!r} is not loopback, and the console has"
            " no login without a listener with SASL; name 127.0.0.1, or add one"
        )


def _check_registry(config: ConsoleConfig) -> None:
    for url in config.console_schema_registry_url:
        try:
            parts = urlsplit(url)
            is_right = parts.scheme in ("http", "https") and bool(parts.hostname)
            parts.port  # noqa: B018 - raises if it is none
        except ValueError:
            is_right = False
        if not is_right:
            raise ConfigError(
                f"console.schema.registry.url: {url!r} is not http://host:port or"
                " https://host:port"
            )
        if parts.username is not None or parts.query or parts.fragment:
            raise ConfigError(
                "console.schema.registry.url: an address has no password and no query;"
                " user:password is console.schema.registry.basic.auth.user.info"
            )
    login = config.console_schema_registry_basic_auth_user_info
    if login and ":" not in login:
        raise ConfigError(
            "console.schema.registry.basic.auth.user.info is not user:password"
        )
    trusted = config.console_schema_registry_ssl_truststore_location
    if trusted and not Path(trusted).is_file():
        raise ConfigError(
            f"console.schema.registry.ssl.truststore.location: {trusted!r} is no file"
        )


def console_address(config: ConsoleConfig) -> HttpListener | None:
    """Return the address of the console; None: there is to be no console.

    Raises:
        ConfigError: the setting is malformed.
    """
    return parse_http_listener(_KEY, config.console_listeners, may_be_secure=True)


def console_endpoint(config: ConsoleConfig) -> EndPoint:
    """Return the listener that the console connects to.

    A listener with SASL comes first. PLAINTEXT is used only if no listener has SASL:
    any process of this machine can connect there with the same rights.

    Raises:
        ConfigError: there is no such listener.
    """
    control_plane = (config.control_plane_listener_name or "").upper()
    usable = [
        each
        for each in config.endpoints
        if each.path is None and each.listener_name.upper() != control_plane
    ]
    for protocol in _SASL:
        for each in usable:
            if each.security_protocol == protocol and login_mechanisms(config, each):
                return each
    has_sasl = any(each.security_protocol in _SASL for each in config.endpoints)
    for each in usable:
        if each.security_protocol == "PLAINTEXT" and not has_sasl:
            return each
    raise ConfigError(
        f"{_KEY}: no listener lets the console in; it needs a TCP listener with SASL"
        f" and one of {', '.join(_MECHANISMS)}, or PLAINTEXT and no SASL listener"
    )


def login_mechanisms(config: ConsoleConfig, endpoint: EndPoint) -> tuple[str, ...]:
    """Return the SASL mechanisms of a listener that take a user and a password."""
    own = config.own_value(endpoint.listener_name, "sasl.enabled.mechanisms")
    enabled = own if isinstance(own, tuple) else config.sasl_enabled_mechanisms
    return tuple(each for each in _MECHANISMS if each in enabled)

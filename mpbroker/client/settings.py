"""The settings of clients: Kafka's names, with dots or underscores, and typed values.

    settings = parse_settings(PRODUCER_CONFIG, {"linger.ms": 5, "acks": "all"})
    settings["linger.ms"]

Source: the "Producer Configs" and "Consumer Configs" of the Apache Kafka documentation.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeVar, cast

from mpbroker.base.config_def import (
    INT_MAX,
    LONG_MAX,
    ConfigDef,
    ConfigError,
    ConfigKey,
    ConfigType,
    ConfigValue,
    Validator,
    at_least,
    between,
    one_of,
    utf8,
)
from mpbroker.client.addresses import Address, parse_addresses
from mpbroker.client.java_keys import JKS_ADVICE, advice_for
from mpbroker.client.security import SECURITY_KEYS, SecuritySettings

Settings = Mapping[str, ConfigValue]
_SettingsT = TypeVar("_SettingsT", bound=tuple[Any, ...])


def _integer(
    name: str, default: int, documentation: str, lowest: int = 0, highest: int = INT_MAX
) -> ConfigKey:
    return ConfigKey(
        name,
        ConfigType.INT if highest <= INT_MAX else ConfigType.LONG,
        default,
        documentation,
        validator=at_least(lowest) if highest >= INT_MAX else between(lowest, highest),
    )


COMMON_KEYS: Final = (
    ConfigKey(
        "bootstrap.servers",
        ConfigType.LIST,
        None,
        "HOST:PORT of one or more brokers to learn the others from.",
        validator=Validator("one HOST:PORT or more", bool),
    ),
    ConfigKey(
        "client.id",
        ConfigType.STRING,
        "",
        "Name of the client in the broker's logs, metrics and quotas; empty: a name"
        " is made up.",
        validator=utf8(),
    ),
    ConfigKey(
        "client.dns.lookup",
        ConfigType.STRING,
        "use_all_dns_ips",
        "Whether every address of a host name is tried.",
        validator=one_of("use_all_dns_ips", "resolve_canonical_bootstrap_servers_only"),
    ),
    *SECURITY_KEYS,
    _integer("request.timeout.ms", 30_000, "Longest wait for an answer.", 1),
    _integer("reconnect.backoff.ms", 50, "First wait before connecting again."),
    _integer("reconnect.backoff.max.ms", 1000, "Longest wait before that."),
    _integer("retry.backoff.ms", 100, "First wait before a request is tried again."),
    _integer("retry.backoff.max.ms", 1000, "Longest wait before that."),
    _integer(
        "socket.connection.setup.timeout.ms",
        10_000,
        "Limit for the first attempt to connect.",
        1,
    ),
    _integer(
        "socket.connection.setup.timeout.max.ms",
        30_000,
        "Limit for an attempt after many failures.",
        1,
    ),
    _integer(
        "connections.max.idle.ms", 540_000, "A connection unused for so long is closed."
    ),
    # The system sizes the buffers of sockets, unless the user does. It lets them grow
    # to several times Kafka's default, and a request or an answer that goes in one
    # piece costs both sides a tenth less than one that goes in several.
    _integer("send.buffer.bytes", -1, "SO_SNDBUF; -1: the system's.", -1),
    _integer("receive.buffer.bytes", -1, "SO_RCVBUF; -1: the system's.", -1),
    _integer("metadata.max.age.ms", 300_000, "Older metadata is asked for again."),
    ConfigKey(
        "metadata.recovery.strategy",
        ConfigType.STRING,
        "rebootstrap",
        "What to do when no known broker can be reached.",
        validator=one_of("rebootstrap", "none"),
    ),
    _integer(
        "metadata.recovery.rebootstrap.trigger.ms",
        300_000,
        "With rebootstrap: do so, too, when no metadata has come for so long.",
    ),
)


METRICS_PUSH_KEY: Final = ConfigKey(
    "enable.metrics.push",
    ConfigType.BOOLEAN,
    True,
    "Push metrics to brokers that ask for them (KIP-714).",
)

ADMIN_CONFIG: Final = ConfigDef("client setting", COMMON_KEYS)
"""The settings that every client has."""


def settings_together(
    config: Mapping[str, object] | None, more: Mapping[str, object]
) -> dict[str, object]:
    """Return the settings of a client's two arguments; a keyword counts before.

    Raises:
        ConfigError: the first argument is no mapping, but perhaps a topic's name.
    """
    if config is None:
        return dict(more)
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"{config!r:.100} is given as the settings: they are a mapping, such as"
            ' {"bootstrap.servers": "localhost:9092"}, or keywords; topics are named'
            " to subscribe() and send()"
        )
    return {**config, **more}


def parse_settings(
    definition: ConfigDef, given: Mapping[str, object]
) -> dict[str, ConfigValue]:
    """Return a checked value for every key of a definition, or the key's default.

    Raises:
        ConfigError: a key does not exist (the text has the nearest spelling) or is
            given twice, or a value is outside its limits.
    """
    values = {key.name: key.default for key in definition}
    spellings: dict[str, str] = {}
    by_attribute = {key.attribute: key.name for key in definition}
    for spelling, value in given.items():
        key = _key(definition, by_attribute.get(spelling, spelling))
        if key.name in spellings:
            raise ConfigError(
                f"{key.name} is given twice, as {spellings[key.name]} and {spelling};"
                " give it once"
            )
        spellings[key.name] = spelling
        values[key.name] = _parse_value(key, value)
    return values


def _key(definition: ConfigDef, name: str) -> ConfigKey:
    key = definition.get(name)
    if key is None and (advice := advice_for(name.replace("_", "."))):
        raise ConfigError(f"{name} is for Kafka's Java client: {advice}")
    return key or definition.key(name)


def _parse_value(key: ConfigKey, value: object) -> ConfigValue:
    if value is None and key.default is None:
        return None
    if key.name in JKS_ADVICE and str(value) in ("JKS", "PKCS12"):
        raise ConfigError(f"{key.name}={value}: {JKS_ADVICE[key.name]}")
    if callable(value):
        return cast(ConfigValue, value)  # a provider of tokens
    if isinstance(value, (list, tuple)) and key.type is ConfigType.LIST:
        items = tuple(map(str, value))
        key.check(items)
        return items
    if isinstance(value, bool):
        return key.parse("true" if value else "false")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return key.parse(str(value))


def integer(settings: Settings, name: str) -> int:
    """Return the value of a setting whose type is int."""
    value = settings[name]
    assert isinstance(value, int)
    return value


def text(settings: Settings, name: str) -> str | None:
    """Return the value of a setting whose type is str; None if it is not set."""
    value = settings[name]
    assert value is None or isinstance(value, str)
    return value


def pick(kind: type[_SettingsT], settings: Settings, **others: object) -> _SettingsT:
    """Make a NamedTuple from the settings that its fields name.

    Args:
        kind: a NamedTuple class. The field ``linger_ms`` gets the value of linger.ms.
        settings: the result of `parse_settings`.
        others: values for fields that name no setting, or that replace its value.
    """
    names: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]
    by_field = {name.replace(".", "_"): value for name, value in settings.items()}
    found = {name: by_field[name] for name in names if name in by_field}
    return kind(**{**found, **others})


# Numbers for the consumers of this process without client.id, as in Kafka's client.
_consumers: Final = itertools.count(1)


class ClientSettings(NamedTuple):
    """The settings of `NetworkClient` and `Metadata`, as plain values."""

    bootstrap: tuple[Address, ...]
    client_id: str
    request_timeout_ms: int = 30_000
    reconnect_backoff_ms: int = 50
    reconnect_backoff_max_ms: int = 1000
    retry_backoff_ms: int = 100
    retry_backoff_max_ms: int = 1000
    socket_connection_setup_timeout_ms: int = 10_000
    socket_connection_setup_timeout_max_ms: int = 30_000
    connections_max_idle_ms: int = 540_000
    send_buffer_bytes: int = -1
    receive_buffer_bytes: int = -1
    metadata_max_age_ms: int = 300_000
    rebootstrap: bool = True
    metadata_recovery_rebootstrap_trigger_ms: int = 300_000
    max_in_flight: int = 5
    security: SecuritySettings = SecuritySettings()

    @classmethod
    def of(cls, settings: Settings, max_in_flight: int) -> ClientSettings:
        """Return the values for parsed settings.

        Args:
            settings: the result of `parse_settings`.
            max_in_flight: how many requests a connection may have in flight.

        Raises:
            ConfigError: bootstrap.servers is not given.
            AddressError: bootstrap.servers cannot be read.
        """
        servers = settings["bootstrap.servers"]
        if not servers:
            raise ConfigError(
                "bootstrap.servers is not set; give the HOST:PORT of a broker"
            )
        assert isinstance(servers, tuple)
        return pick(
            cls,
            settings,
            bootstrap=tuple(parse_addresses(",".join(servers))),
            rebootstrap=settings["metadata.recovery.strategy"] == "rebootstrap",
            max_in_flight=max_in_flight,
            security=SecuritySettings.of(settings),
        )

    def named_as_consumer(self, settings: Settings) -> ClientSettings:
        """Return the values with Kafka's default client.id if client.id is not set.

        The default is consumer-GROUP-INSTANCE. Without group.instance.id, a number
        takes the place of INSTANCE; without group.id, GROUP is left out.
        """
        if self.client_id:
            return self
        last = settings.get("group.instance.id") or next(_consumers)
        parts = ("consumer", settings["group.id"], last)
        name = "-".join(str(part) for part in parts if part)
        return self._replace(client_id=name)


__all__ = [
    "ADMIN_CONFIG",
    "COMMON_KEYS",
    "INT_MAX",
    "LONG_MAX",
    "METRICS_PUSH_KEY",
    "ClientSettings",
    "Settings",
    "integer",
    "parse_settings",
    "pick",
    "text",
]

"""DynamicConfig: what a setting is now, dynamic values before static ones.

Precedence is Kafka's: of this broker, of all brokers, as it was started, the default;
and what is set for a listener (listener.name.NAME.KEY) before what is set for all. A
dynamic value that is not accepted any more has no effect, and one log line says so.

Source: Kafka's DynamicBrokerConfig (KIP-226).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Final

from mpbroker.config.broker_config import SASL_MECHANISMS, BrokerConfig
from mpbroker.config.listeners import EndPoint
from mpbroker.config.live_keys import LISTENER_SECURITY, READER_OF
from mpbroker.config.pool_limits import PROCESSORS_KEY
from mpbroker.config_def import (
    ConfigDef,
    ConfigError,
    ConfigKey,
    ConfigValue,
    UnusableConfigError,
)
from mpbroker.ipc.layout import MAX_PROCESSORS
from mpbroker.logger import get_logger

_LOG = get_logger(__name__)

_PREFIX: Final = "listener.name."

# The dynamic configs of one broker, by its id, or of all, by "".
Overrides = Callable[[str], Mapping[str, str]]


class DynamicConfig:
    """One broker's settings as they are now.

    Args:
        config: as it was started.
        overrides: from the metadata log.
    """

    def __init__(self, config: BrokerConfig, overrides: Overrides) -> None:
        self.config = config
        self._overrides = overrides
        self._refused: set[tuple[str, str]] = set()

    def value(self, name: str) -> ConfigValue:
        """Return a setting of the broker.

        Raises:
            ConfigError: no such key.
        """
        found = self._dynamic(name, self.config.definition.key(name))
        return self.config.resolved(name).value if found is None else found

    def for_listener(self, listener: str, name: str) -> ConfigValue:
        """Return a setting of one listener, which may be the broker's."""
        found = self.own_of_listener(listener, name)
        return self.value(name) if found is None else found

    def for_mechanism(self, listener: str, mechanism: str, name: str) -> ConfigValue:
        """Return a setting of one SASL mechanism of a listener."""
        full = f"{_PREFIX}{listener.lower()}.{mechanism.lower()}.{name}"
        found = self._dynamic(full, self.config.definition.key(name))
        if found is None:
            found = self.config.own_of_mechanism(listener, mechanism, name)
        return self.for_listener(listener, name) if found is None else found

    def own_of_listener(self, listener: str, name: str) -> ConfigValue:
        """Return what is set for one listener alone; None: nothing is."""
        key = self.config.definition.key(name)
        if name == PROCESSORS_KEY and self._is_control_plane(listener):
            return 1
        found = self._dynamic(f"{_PREFIX}{listener.lower()}.{name}", key)
        return self.config.own_value(listener, name) if found is None else found

    def integer(self, name: str, listener: str | None = None) -> int:
        """Return a setting that is a whole number, of a listener if one is given."""
        value = (
            self.value(name) if listener is None else self.for_listener(listener, name)
        )
        assert isinstance(value, int)
        return value

    def effective(self) -> BrokerConfig:
        """Return the settings as attributes, dynamic ones included.

        What is not an attribute (resolved(), static_texts(), broker_values()) stays as
        the broker was started.
        """
        now = copy.copy(self.config)
        for name in READER_OF:
            key = self.config.definition.get(name)
            if key is not None:
                object.__setattr__(now, key.attribute, self.value(name))
        return now

    def _is_control_plane(self, listener: str) -> bool:
        control_plane = self.config.control_plane_listener_name
        return control_plane is not None and control_plane.upper() == listener.upper()

    def _dynamic(self, name: str, key: ConfigKey) -> ConfigValue:
        for resource in (str(self.config.node_id), ""):
            text = self._overrides(resource).get(name)
            if text is None:
                continue
            try:
                return key.parse(text)
            except ConfigError as error:
                # Set when the limits were others: no reason not to go on.
                if (name, text) not in self._refused:
                    self._refused.add((name, text))
                    _LOG.warning("a dynamic config has no effect: %s", error)
        return None


def checked_definition(config: BrokerConfig) -> ConfigDef:
    """Return the broker's keys, with a check of what dynamic configs add up to."""

    def check(
        own: Mapping[str, str], of_all: Mapping[str, str], touched: Collection[str]
    ) -> None:
        layers = {str(config.node_id): own, "": of_all}
        now = DynamicConfig(config, lambda name: layers.get(name, {}))
        if any(name in own or name in of_all for name in touched):
            _check_together(now)  # and taking away is always a way out
        _check_security(now, touched, own.keys() | of_all.keys())

    return config.definition.with_check(check)


_ORDERS: Final = (
    ("group.min.session.timeout.ms", "group.max.session.timeout.ms"),
    ("log.cleaner.min.compaction.lag.ms", "log.cleaner.max.compaction.lag.ms"),
)


def _check_together(now: DynamicConfig) -> None:
    for lower, upper in _ORDERS:
        low, high = now.integer(lower), now.integer(upper)
        if low > high:
            raise ConfigError(f"{lower}={low}: above {upper}={high}")
    if now.integer("max.connections.per.ip") == 0 and not now.value(
        "max.connections.per.ip.overrides"
    ):
        raise ConfigError(
            "max.connections.per.ip can be set to zero only if"
            " max.connections.per.ip.overrides property is set."
        )
    each = {
        endpoint.listener_name: now.integer(PROCESSORS_KEY, endpoint.listener_name)
        for endpoint in now.config.endpoints
    }
    if sum(each.values()) > MAX_PROCESSORS:
        told = ", ".join(f"{name} {number}" for name, number in each.items())
        raise ConfigError(
            f"{PROCESSORS_KEY}: {sum(each.values())} processors over all listeners"
            f" ({told}); at most {MAX_PROCESSORS} can run; lower one of them"
        )


def _check_security(
    now: DynamicConfig, touched: Collection[str], wanted: Collection[str]
) -> None:
    """Try the settings of TLS and SASL of the listeners that get others."""
    endpoints = {each.listener_name.lower(): each for each in now.config.endpoints}
    listeners: dict[str, EndPoint] = {}
    for name in touched:
        prefixed = now.config.definition.of_listener(name)
        if prefixed is None or prefixed[1].name not in LISTENER_SECURITY:
            continue
        endpoint = endpoints.get(prefixed[0])
        if endpoint is not None and endpoint.security_protocol != "PLAINTEXT":
            listeners[prefixed[0]] = endpoint
        elif name in wanted:  # and may always be taken away
            raise UnusableConfigError(
                f"{name}: there is no such listener; listeners are"
                f" {', '.join(endpoints)}"
                if endpoint is None
                else f"{name}: {prefixed[0]} is a listener of PLAINTEXT, which has"
                " neither TLS nor SASL; listener.security.protocol.map says so"
            )
        mechanism = name.removeprefix(f"{_PREFIX}{prefixed[0]}.")
        mechanism = mechanism.removesuffix(prefixed[1].name).rstrip(".")
        if mechanism and mechanism not in SASL_MECHANISMS and name in wanted:
            raise UnusableConfigError(
                f"{name}: there is no mechanism {mechanism!r:.100}; in names of"
                f" settings they are {', '.join(SASL_MECHANISMS)}"
            )
    if not listeners:
        return
    # Imported here: most brokers have no such listener.
    from mpbroker.config.listener_security import security_settings

    for listener, endpoint in listeners.items():
        try:
            security_settings(now, endpoint).check()
        except ConfigError as error:
            raise UnusableConfigError(f"listener {listener}: {error}") from None

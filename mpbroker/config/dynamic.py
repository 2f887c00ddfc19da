"""DynamicConfig: what a setting is now, dynamic values before static ones.

Precedence is Kafka's: of this broker, of all brokers, as it was started, the default;
and what is set for a listener (listener.name.NAME.KEY) before what is set for all. A
dynamic value that is not accepted any more has no effect, and one log line says so.

Source: Kafka's DynamicBrokerConfig (KIP-226).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mpbroker.base.config_def import (
    LISTENER_PREFIX,
    ConfigError,
    ConfigKey,
    ConfigValue,
)
from mpbroker.base.logger import get_logger
from mpbroker.config.broker_config import PROCESSORS_KEY, BrokerConfig
from mpbroker.config.broker_key import told_keys

_LOG = get_logger(__name__)

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
        full = f"{LISTENER_PREFIX}{listener.lower()}.{mechanism.lower()}.{name}"
        found = self._dynamic(full, self.config.definition.key(name))
        if found is None:
            found = self.config.own_of_mechanism(listener, mechanism, name)
        return self.for_listener(listener, name) if found is None else found

    def own_of_listener(self, listener: str, name: str) -> ConfigValue:
        """Return what is set for one listener alone; None: nothing is."""
        key = self.config.definition.key(name).of_listener()
        if name == PROCESSORS_KEY and self._is_control_plane(listener):
            return 1
        found = self._dynamic(f"{LISTENER_PREFIX}{listener.lower()}.{name}", key)
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
        told = told_keys(self.config.definition)
        return self.config.with_values({key.name: self.value(key.name) for key in told})

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

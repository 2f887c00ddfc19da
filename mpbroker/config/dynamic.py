"""DynamicConfig: a broker's settings now; dynamic values count before static ones.

The order is Kafka's. The dynamic value of this broker counts first, then the dynamic
value of all brokers, then the value that the broker was started with, then the default.
A value for one listener (listener.name.NAME.KEY) counts before a value for all
listeners. A dynamic value that is no longer accepted has no effect; the log says so.

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

# A function that returns the dynamic configs: for a broker's id those of that broker,
# for "" those of all brokers.
Overrides = Callable[[str], Mapping[str, str]]


class DynamicConfig:
    """The settings of one broker as they are now.

    Args:
        config: the settings that the broker was started with.
        overrides: a function that returns the dynamic configs in the metadata log.
    """

    def __init__(self, config: BrokerConfig, overrides: Overrides) -> None:
        self.config = config
        self._overrides = overrides
        self._refused: set[tuple[str, str]] = set()

    def value(self, name: str) -> ConfigValue:
        """Return the value that a setting of the broker has now.

        Raises:
            ConfigError: there is no such key.
        """
        found = self._dynamic(name, self.config.definition.key(name))
        return self.config.resolved(name).value if found is None else found

    def for_listener(self, listener: str, name: str) -> ConfigValue:
        """Return the value that a setting has now for one listener.

        It is the listener's own value, or else the broker's.
        """
        found = self.own_of_listener(listener, name)
        return self.value(name) if found is None else found

    def for_mechanism(self, listener: str, mechanism: str, name: str) -> ConfigValue:
        """Return the value that a setting has now for a SASL mechanism of a listener.

        It is the mechanism's own value, or else the listener's own, or else the
        broker's.
        """
        full = f"{LISTENER_PREFIX}{listener.lower()}.{mechanism.lower()}.{name}"
        found = self._dynamic(full, self.config.definition.key(name))
        if found is None:
            found = self.config.own_of_mechanism(listener, mechanism, name)
        return self.for_listener(listener, name) if found is None else found

    def own_of_listener(self, listener: str, name: str) -> ConfigValue:
        """Return the value that is set now for one listener alone, or None."""
        key = self.config.definition.key(name).of_listener()
        if name == PROCESSORS_KEY and self._is_control_plane(listener):
            return 1
        found = self._dynamic(f"{LISTENER_PREFIX}{listener.lower()}.{name}", key)
        return self.config.own_value(listener, name) if found is None else found

    def integer(self, name: str, listener: str | None = None) -> int:
        """Return the value that a setting has now, which is a whole number.

        Args:
            listener: the listener whose value is wanted; None: the broker's value.
        """
        value = (
            self.value(name) if listener is None else self.for_listener(listener, name)
        )
        assert isinstance(value, int)
        return value

    def effective(self) -> BrokerConfig:
        """Return a configuration whose attributes have the values that count now.

        Its resolved(), static_texts() and broker_values() return the values that the
        broker was started with.
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
                # It was accepted under other limits, and must not stop the broker now.
                if (name, text) not in self._refused:
                    self._refused.add((name, text))
                    _LOG.warning("a dynamic config has no effect: %s", error)
        return None

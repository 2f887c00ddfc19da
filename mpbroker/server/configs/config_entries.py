"""Where a config's value comes from, layer by layer, as DescribeConfigs tells it.

Source: KIP-226; org.apache.kafka.clients.admin.ConfigEntry.ConfigSource.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import dropwhile
from typing import Final, NamedTuple

from mpbroker.base.config_def import ConfigDef, ConfigError, ConfigKey
from mpbroker.metadata.log_config_def import BROKER_SYNONYMS
from mpbroker.protocol.config_source import ConfigSource

TOPIC_RESOURCE: Final = 2
BROKER_RESOURCE: Final = 4
BROKER_LOGGER_RESOURCE: Final = 8
CLIENT_METRICS_RESOURCE: Final = 16
GROUP_RESOURCE: Final = 32


class Synonym(NamedTuple):
    """One place that has a value for a config; of several, the first counts."""

    name: str
    text: str
    source: ConfigSource


class BrokerConfigs:
    """A broker's configs in their layers: dynamic, dynamic default, static, default."""

    def __init__(
        self,
        definition: ConfigDef,
        dynamic: Mapping[str, str],
        dynamic_default: Mapping[str, str],
        static: Mapping[str, str],
    ) -> None:
        """Take the texts that were set in each layer, by key.

        Args:
            definition: the broker's keys; their defaults are the last layer.
            dynamic: of this broker.
            dynamic_default: of all brokers.
            static: from the command line, the environment or a file.
        """
        self.definition = definition
        self.dynamic_default = dynamic_default
        self._layers = (
            (ConfigSource.DYNAMIC_BROKER_CONFIG, dynamic),
            (ConfigSource.DYNAMIC_DEFAULT_BROKER_CONFIG, dynamic_default),
            (ConfigSource.STATIC_BROKER_CONFIG, static),
        )

    def synonyms(self, name: str) -> list[Synonym]:
        """Return all that set a broker's key, and keys that then have no say.

        Nothing if only keys that stand in for it are set: it has no value itself.
        """
        found = self._synonyms_of(_STAND_INS.get(name, (name,)))
        return list(dropwhile(lambda synonym: synonym.name != name, found))

    def of_listeners(self) -> list[str]:
        """Return the names that are set for single listeners, in any layer."""
        found = {
            name: None
            for _, layer in self._layers
            for name in layer
            if self.definition.of_listener(name) is not None
        }
        return list(found)

    def synonyms_of_listener(self, name: str, key: ConfigKey) -> list[Synonym]:
        """Return all that set a listener's key: its own values, then the broker's."""
        own = [
            Synonym(name, layer[name], source)
            for source, layer in self._layers
            if name in layer
        ]
        return own + self.synonyms(key.name)

    def synonyms_of_topic_key(self, name: str) -> list[Synonym]:
        """Return all that set the default of a topic's key.

        Kafka leaves out what stands behind the first name, so that a topic that lives
        by log.retention.hours=1 seems to have no reason. Here it is told.
        """
        return self._synonyms_of(
            tuple(synonym.name for synonym in BROKER_SYNONYMS.get(name, ()))
        )

    def _synonyms_of(self, names: tuple[str, ...]) -> list[Synonym]:
        found = [
            Synonym(name, layer[name], source)
            for source, layer in self._layers
            for name in names
            if name in layer
        ]
        for name in names:
            key = self.definition.get(name)
            text = None if key is None else key.format(key.default)
            if text is not None:
                found.append(Synonym(name, text, ConfigSource.DEFAULT_CONFIG))
        return found


# Broker keys that stand in for one that is not set: log.retention.ms, else minutes,
# else hours.
_STAND_INS: Final = {
    synonym.name: tuple(other.name for other in synonyms[position:])
    for synonyms in BROKER_SYNONYMS.values()
    for position, synonym in enumerate(synonyms)
}


def canonical(key: ConfigKey, text: str) -> str | None:
    """Return a text as the key writes it ("TRUE" is "true"); as it is if it is bad."""
    try:
        return key.format(key.parse(text))
    except ConfigError:
        return text

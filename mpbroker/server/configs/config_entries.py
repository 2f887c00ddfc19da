"""Find all sources of a config's value, layer by layer, for DescribeConfigs.

Source: KIP-226; org.apache.kafka.clients.admin.ConfigEntry.ConfigSource.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import dropwhile
from typing import Final

from mpbroker.base.config_def import ConfigDef, ConfigError, ConfigKey
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.metadata.log_config_def import BROKER_SYNONYMS
from mpbroker.protocol.config_source import ConfigSource

TOPIC_RESOURCE: Final = 2
BROKER_RESOURCE: Final = 4
BROKER_LOGGER_RESOURCE: Final = 8
CLIENT_METRICS_RESOURCE: Final = 16
GROUP_RESOURCE: Final = 32


class Synonym(NamedTuple):
    """Describes one source of a config's value. The first of a list is in effect.

    Attributes:
        name: the key that is set. It may be another key than the config's, such as
            log.retention.ms for a topic's retention.ms.
        text: the value.
        source: the layer.
    """

    name: str
    text: str
    source: ConfigSource


class BrokerConfigs:
    """Finds the values of a broker's configs in four layers.

    The layers are: dynamic configs of this broker, dynamic configs of all brokers,
    static configs, defaults. The first that has a value is in effect.
    """

    def __init__(
        self,
        definition: ConfigDef,
        dynamic: Mapping[str, str],
        dynamic_default: Mapping[str, str],
        static: Mapping[str, str],
    ) -> None:
        """Make the layers from the texts that are set in each, by key.

        Args:
            definition: the broker's keys; their defaults are the last layer.
            dynamic: dynamic configs of this broker.
            dynamic_default: dynamic configs of all brokers.
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
        """Return the sources of a broker key's value; the first is in effect.

        Another key may serve while this key is not set, such as log.retention.hours for
        log.retention.ms. The sources of such a key come after those of this key. If
        only such keys are set, the list is empty, since this key itself has no value.
        """
        found = self._synonyms_of(_STAND_INS.get(name, (name,)))
        return list(dropwhile(lambda synonym: synonym.name != name, found))

    def of_listeners(self) -> list[str]:
        """Return the keys ``listener.name.NAME.KEY`` that are set in any layer."""
        found = {
            name: None
            for _, layer in self._layers
            for name in layer
            if self.definition.of_listener(name) is not None
        }
        return list(found)

    def synonyms_of_listener(self, name: str, key: ConfigKey) -> list[Synonym]:
        """Return the sources of a listener's key, before those of the broker's key.

        Args:
            name: the key with its prefix: ``listener.name.NAME.KEY``.
            key: the definition of KEY.
        """
        own = [
            Synonym(name, layer[name], source)
            for source, layer in self._layers
            if name in layer
        ]
        return own + self.synonyms(key.name)

    def synonyms_of_topic_key(self, name: str) -> list[Synonym]:
        """Return the sources of a topic key's default: the values of broker keys.

        Kafka returns only the first broker key, so it does not show that a topic's
        retention.ms comes from log.retention.hours=1. This method returns all broker
        keys.
        """
        return self._synonyms_of(
            tuple(synonym.name for synonym in BROKER_SYNONYMS.get(name, ()))
        )

    def source_of_topic_key(self, name: str) -> ConfigSource:
        """Return where a topic's value comes from that it has not set itself."""
        synonyms = self.synonyms_of_topic_key(name)
        return synonyms[0].source if synonyms else ConfigSource.DEFAULT_CONFIG

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


# For each broker key, itself and the keys that serve if it is not set, in order:
# log.retention.ms, log.retention.minutes, log.retention.hours.
_STAND_INS: Final = {
    synonym.name: tuple(other.name for other in synonyms[position:])
    for synonyms in BROKER_SYNONYMS.values()
    for position, synonym in enumerate(synonyms)
}


def canonical(key: ConfigKey, text: str) -> str | None:
    """Return a config's text in the form in which its key prints it ("TRUE" as "true").

    A text that cannot be parsed is returned unchanged.
    """
    try:
        return key.format(key.parse(text))
    except ConfigError:
        return text

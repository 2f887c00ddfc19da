"""Resolution: find the value of each setting among the sources that set it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from mpbroker.base.config_def import (
    LISTENER_PREFIX,
    ConfigDef,
    ConfigError,
    ConfigKey,
    ConfigValue,
)
from mpbroker.config.broker_key import BrokerKey, ListenerPools
from mpbroker.config.sources import Setting, Source

# Settings in files made for Kafka that mpbroker does not have: of other brokers, the
# controller, ZooKeeper, remote storage, Java classes. They are warnings and no errors,
# so that such a file works as it is.
NOT_NEEDED: Final = (
    "alter.config.policy.",
    "auto.include.jmx.reporter",
    "auto.leader.rebalance.enable",
    "broker.heartbeat.interval.ms",
    "broker.id.generation.enable",
    "broker.session.timeout.ms",
    "client.quota.callback.",
    "confluent.",
    "controller.",
    "create.topic.policy.",
    "delegation.token.",
    "early.start.listeners",
    "eligible.leader.replicas.",
    "fetch.purgatory.",
    "group.share.",
    "initial.broker.registration.timeout.ms",
    "inter.broker.protocol.version",
    "kafka.metrics.",
    "leader.",
    "log.message.downconversion.enable",
    "log.message.format.version",
    "log.message.timestamp.difference.max.ms",
    "metadata.log.",
    "metadata.max.",
    "metric.",
    # Whole names: a misspelt metrics.listeners, which is ours, must stay an error.
    "metrics.num.samples",
    "metrics.recording.level",
    "metrics.sample.window.ms",
    "num.replica.",
    "password.encoder.",
    "principal.builder.class",
    "process.roles",
    "producer.purgatory.",
    "remote.",
    "replica.",
    "reserved.broker.max.id",
    "sasl.client.callback.handler.class",
    "sasl.kerberos.",
    "sasl.login.",
    "sasl.mechanism.controller.protocol",
    "security.providers",
    "share.coordinator.",
    "ssl.allow.dn.changes",
    "ssl.allow.san.changes",
    "ssl.endpoint.identification.algorithm",
    "ssl.keymanager.algorithm",
    "ssl.provider",
    "ssl.secure.random.implementation",
    "ssl.trustmanager.algorithm",
    "unstable.",
    "zookeeper.",
)

# As names of settings spell them: listener.name.x.scram-sha-256.sasl.jaas.config.
SASL_MECHANISMS: Final = (
    "plain",
    "scram-sha-256",
    "scram-sha-512",
    "oauthbearer",
    "gssapi",
)


class ResolvedValue(NamedTuple):
    """A value, and the source that it comes from.

    Attributes:
        text: as it was set; None: the value is the default.
        origin: names the source for people, such as a file and a line.
    """

    value: ConfigValue
    text: str | None
    source: Source
    origin: str


class Resolution:
    """Sorts the settings of all sources by what they set.

    Attributes:
        resolved: by key, the value that counts.
        per_listener: by listener and key, values set for one listener.
        per_mechanism: by listener, SASL mechanism and key, values set for one of both.
        of_listeners: each setting of a listener that is there or not, by listener.
        warnings: about settings without effect.
    """

    def __init__(self, definition: ConfigDef) -> None:
        self._definition = definition
        self._set_as: dict[str, Setting] = {}
        self._late: list[Setting] = []
        self.per_listener: dict[tuple[str, str], ConfigValue] = {}
        self.per_mechanism: dict[tuple[str, str, str], ConfigValue] = {}
        self.of_listeners: list[tuple[str, Setting]] = []
        self.warnings: list[str] = []
        self.resolved = {
            key.name: ResolvedValue(key.default, None, Source.DEFAULT, "default")
            for key in definition
        }

    def read(self, settings: Iterable[Setting]) -> None:
        """Read settings; those whose limits follow from the listeners wait."""
        # A stable sort: of one source, the last setting counts.
        for setting in sorted(settings, key=lambda setting: setting.source):
            key = self._definition.get(setting.name)
            if isinstance(key, BrokerKey) and key.room is not None:
                self._late.append(setting)
            else:
                self._read_one(setting)

    def read_late(self, pools: ListenerPools) -> ConfigDef:
        """Read the settings that wait; return all keys with the limits that count.

        They were not read before, because all messages about a setting shall name the
        same limits.
        """
        limited = [
            key.beside(pools)
            for key in self._definition
            if isinstance(key, BrokerKey) and key.room is not None
        ]
        self._definition = self._definition.with_keys(limited)
        for setting in self._late:
            self._read_one(setting)
        for key in limited:
            value, _, _, origin = self.resolved[key.name]
            try:
                key.check(value)  # which may be the default
            except ConfigError as error:
                raise ConfigError(f"{error} ({origin})") from None
        return self._definition

    def _read_one(self, setting: Setting) -> None:
        name = setting.name
        if name.startswith(LISTENER_PREFIX):
            self._read_per_listener(setting)
        elif name in self._definition:
            self._read_known(self._definition.key(name), setting)
        elif name.startswith(NOT_NEEDED):
            self.warnings.append(f"{name} has no effect in mpbroker ({setting.origin})")
        elif setting.source is Source.ENVIRONMENT:
            # No error: the variable may belong to another program.
            self.warnings.append(f"{self._unknown(name)} ({setting.origin})")
        else:
            raise ConfigError(f"{self._unknown(name)} ({setting.origin})")

    def _read_known(self, key: ConfigKey, setting: Setting) -> None:
        earlier = self._set_as.get(key.name)
        if (
            earlier is not None
            and earlier.source == setting.source
            and earlier.name != setting.name
            and earlier.text != setting.text
        ):
            raise ConfigError(
                f"{earlier.name}={earlier.text} and {setting.name}={setting.text} are"
                f" two names of one setting ({setting.origin}); keep one"
            )
        self._set_as[key.name] = setting
        value = _parse(key, setting)
        self.resolved[key.name] = ResolvedValue(
            value, setting.text, setting.source, setting.origin
        )

    def _read_per_listener(self, setting: Setting) -> None:
        found = self._definition.of_listener(setting.name)
        if found is None or found.mechanism not in ("", *SASL_MECHANISMS):
            reason = why_not_of_listener(setting.name, self._definition)
            self.warnings.append(
                f"{setting.name} has no effect{reason} ({setting.origin})"
            )
            return
        listener, key, mechanism = found
        value = _parse(key, setting)
        self.of_listeners.append((listener.lower(), setting))
        if mechanism:
            self.per_mechanism[listener.lower(), mechanism, key.name] = value
        else:
            self.per_listener[listener.lower(), key.name] = value

    def warnings_beside(self, listeners: Iterable[str]) -> list[str]:
        """Return warnings about settings of listeners that do not exist.

        Args:
            listeners: the names of the listeners that do.
        """
        names = {name.lower() for name in listeners}
        return [
            f"{setting.name} has no effect: there is no listener {listener}; there"
            f" are {', '.join(sorted(names))} ({setting.origin})"
            for listener, setting in self.of_listeners
            if listener not in names
        ]

    def _unknown(self, name: str) -> str:
        try:
            self._definition.key(name)
        except ConfigError as error:
            return str(error)
        raise AssertionError(f"{name} is known")


def why_not_of_listener(name: str, definition: ConfigDef) -> str:
    """Return why ``listener.name.LISTENER.KEY`` has no effect.

    Returns:
        The end of a sentence; "" if there is no such key at all.
    """
    _, _, rest = name.removeprefix(LISTENER_PREFIX).partition(".")
    if rest in definition:
        return f": {rest} cannot be set for one listener"
    mechanism, _, key = rest.partition(".")
    if key not in definition:
        return ""
    if mechanism in SASL_MECHANISMS:
        return f": {key} cannot be set for one SASL mechanism"
    return f": there is no SASL mechanism {mechanism!r:.100}"


def _parse(key: ConfigKey, setting: Setting) -> ConfigValue:
    if key.default is None and not setting.text.strip():
        return None
    try:
        return key.parse(setting.text)
    except ConfigError as error:
        of_listener = setting.name.startswith(LISTENER_PREFIX)
        prefix = setting.name.removesuffix(key.name) if of_listener else ""
        raise ConfigError(f"{prefix}{error} ({setting.origin})") from None

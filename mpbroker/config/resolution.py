"""Resolution: find the value of each setting among the sources that set it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from mpbroker.base.config_def import (
    LISTENER_PREFIX,
    ConfigDef,
    ConfigError,
    ConfigKey,
    ConfigValue,
)
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.config.broker_key import BrokerKey, ListenerPools
from mpbroker.config.sources import Setting, Source, variable_of

# The beginnings of settings of older releases of Kafka, of its plug-ins and of related
# products. They cause a warning, not an error, so that a file with them works as it is.
# The settings of Apache Kafka 4.4.0 are rows of the table (kafka_keys.py).
NOT_NEEDED: Final = (
    "alter.config.policy.",
    "auto.include.jmx.reporter",
    "broker.id.generation.enable",
    "client.quota.callback.",
    "confluent.",
    "controller.",
    "create.topic.policy.",
    "delegation.token.",
    "eligible.leader.replicas.",
    "inter.broker.protocol.version",
    "kafka.metrics.",
    "leader.",
    "log.message.downconversion.enable",
    "log.message.format.version",
    "log.message.timestamp.difference.max.ms",
    "metadata.",
    "metric.",
    "num.replica.",
    "password.encoder.",
    "remote.",
    "replica.",
    "reserved.broker.max.id",
    "rlmm.config.",
    "rsm.config.",
    "sasl.kerberos.",
    "sasl.login.",
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


class ArgumentError(ConfigError):
    """A setting of the command line cannot be used."""


class ResolvedValue(NamedTuple):
    """A value, and the source that it comes from.

    Attributes:
        text: the text that was set; None: the value is the default.
        origin: the source as people name it, such as a file and a line.
    """

    value: ConfigValue
    text: str | None
    source: Source
    origin: str


class Resolution:
    """Sorts settings into those of the broker, of a listener, and of a SASL mechanism.

    Attributes:
        resolved: the value that counts, by key.
        per_listener: the values set for one listener, by listener and key.
        per_mechanism: the values set for one SASL mechanism of a listener, by listener,
            mechanism and key.
        of_listeners: every setting for one listener, with the listener's name; there
            may be no such listener.
        warnings: sentences about settings without effect.
    """

    def __init__(self, definition: ConfigDef) -> None:
        self._definition = definition
        self._set_as: dict[str, Setting] = {}
        self._late: list[Setting] = []
        self.per_listener: dict[tuple[str, str], ConfigValue] = {}
        self.per_mechanism: dict[tuple[str, str, str], ConfigValue] = {}
        self.of_listeners: list[tuple[str, Setting]] = []
        self._of_no_listener: list[Setting] = []  # by variables
        self.warnings: list[str] = []
        self.resolved = {
            key.name: ResolvedValue(key.default, None, Source.DEFAULT, "default")
            for key in definition
        }

    def read(self, settings: Iterable[Setting]) -> None:
        """Read settings, except those whose limits depend on the listeners.

        `read_late` reads these, when the listeners are known.
        """
        # A stable sort: of one source, the last setting counts.
        for setting in sorted(settings, key=lambda setting: setting.source):
            key = self._definition.get(setting.name)
            if isinstance(key, BrokerKey) and key.room is not None:
                self._late.append(setting)
            else:
                self._read_one(setting)

    def read_late(self, pools: ListenerPools) -> ConfigDef:
        """Read the settings that `read` left out; return all keys with their limits.

        The limits of these settings follow from the listeners. The settings are read
        only now, so that all messages about a setting name the same limits.
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
            value, _, source, origin = self.resolved[key.name]
            try:
                key.check(value)  # which may be the default
            except ConfigError as error:
                raise _refusal(str(error), source, origin) from None
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
            raise _refusal(self._unknown(name), setting.source, setting.origin)

    def _read_known(self, key: ConfigKey, setting: Setting) -> None:
        earlier = self._set_as.get(key.name)
        if (
            earlier is not None
            and earlier.source == setting.source
            and earlier.name != setting.name
            and earlier.text != setting.text
        ):
            raise _refusal(
                f"{earlier.name}={earlier.text} and {setting.name}={setting.text} are"
                " two names of one setting; keep one",
                setting.source,
                setting.origin,
            )
        self._set_as[key.name] = setting
        self._warn_of_no_effect(key, setting)
        value = _parse(key, setting)
        self.resolved[key.name] = ResolvedValue(
            value, setting.text, setting.source, setting.origin
        )

    def _read_per_listener(self, setting: Setting) -> None:
        found = self._definition.of_listener(setting.name)
        if found is None or found.mechanism not in ("", *SASL_MECHANISMS):
            if setting.source is Source.ENVIRONMENT:
                self._of_no_listener.append(setting)
                return
            reason = why_not_of_listener(setting.name, self._definition)
            self.warnings.append(
                f"{setting.name} has no effect{reason} ({setting.origin})"
            )
            return
        listener, key, mechanism = found
        self._warn_of_no_effect(key, setting)
        value = _parse(key, setting)
        self.of_listeners.append((listener.lower(), setting))
        if mechanism:
            self.per_mechanism[listener.lower(), mechanism, key.name] = value
        else:
            self.per_listener[listener.lower(), key.name] = value

    def _warn_of_no_effect(self, key: ConfigKey, setting: Setting) -> None:
        if not key.has_effect and setting.text != key.holds_anyway:
            self.warnings.append(
                f"{setting.name} has no effect in mpbroker ({setting.origin})."
                f" {key.meaning}"
            )

    def check_variables(self, listeners: Iterable[str]) -> None:
        """Refuse variables that name no listener that exists, or no setting of it.

        Such a variable is a setting that got lost, mostly one that spells a name with
        too few underscores: SASL_PLAINTEXT for SASL___PLAINTEXT. Other unknown
        variables are warned of, because they may belong to another program.

        Args:
            listeners: the names of the listeners that exist.

        Raises:
            ConfigError: there is such a variable; the message has the right spelling.
        """
        names = {name.lower() for name in listeners}
        of_others = [
            setting
            for listener, setting in self.of_listeners
            if listener not in names and setting.source is Source.ENVIRONMENT
        ]
        for setting in (*self._of_no_listener, *of_others):
            meant = next(_meant(setting.name, names, self._definition), None)
            advice = f"; there are {', '.join(sorted(names))}"
            if meant is not None:
                advice = f"; did you mean {variable_of(meant)}? ({meant})"
            raise _refusal(
                f"{setting.name} is no setting of a listener{advice}",
                setting.source,
                setting.origin,
            )

    def warnings_beside(self, listeners: Iterable[str]) -> list[str]:
        """Return warnings about settings of listeners that do not exist.

        Args:
            listeners: the names of the listeners that exist.
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
    """Return the reason why a setting ``listener.name.LISTENER.KEY`` has no effect.

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


def _meant(name: str, listeners: Iterable[str], definition: ConfigDef) -> Iterator[str]:
    """Yield the settings of listeners that look like a name if "-" and "_" are dots.

    First those that are equal then, at last the one that is nearest.
    """
    import difflib  # imported here: it takes 2 ms, and is needed for errors only

    flat, others = _flat(name), dict[str, str]()
    for listener in sorted(listeners):
        prefix = f"{LISTENER_PREFIX}{listener}."
        if not flat.startswith(_flat(prefix)):
            continue
        rest = flat.removeprefix(_flat(prefix))
        for between in ("", *(f"{each}." for each in SASL_MECHANISMS)):
            if rest.startswith(_flat(between)):
                meant = prefix + between + rest.removeprefix(_flat(between))
                if definition.of_listener(meant) is not None:
                    yield meant
        for key in definition:
            for between in ("", *(f"{each}." for each in SASL_MECHANISMS)):
                if definition.of_listener(other := prefix + between + key.name):
                    others[_flat(other)] = other
    for near in difflib.get_close_matches(flat, others, n=1, cutoff=0.9):
        yield others[near]


def _flat(name: str) -> str:
    return name.replace("-", ".").replace("_", ".")


def _parse(key: ConfigKey, setting: Setting) -> ConfigValue:
    if key.default is None and not setting.text.strip():
        return None
    try:
        return key.parse(setting.text)
    except ConfigError as error:
        of_listener = setting.name.startswith(LISTENER_PREFIX)
        prefix = setting.name.removesuffix(key.name) if of_listener else ""
        raise _refusal(f"{prefix}{error}", setting.source, setting.origin) from None


def _refusal(text: str, source: Source, origin: str) -> ConfigError:
    kind = ArgumentError if source is Source.ARGUMENT else ConfigError
    return kind(f"{text} ({origin})")

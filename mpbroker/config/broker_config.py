"""BrokerConfig: every setting of a broker, resolved, checked and typed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from mpbroker.base.config_def import (
    ConfigDef,
    ConfigError,
    ConfigKey,
    ConfigValue,
    UpdateMode,
)
from mpbroker.config.broker_key import BrokerKey, ListenerPools, Reader
from mpbroker.config.broker_keys import LOG_KEYS, PROCESSORS_KEY, SERVER_KEYS
from mpbroker.config.broker_values import BrokerValues
from mpbroker.config.consistency import check_values
from mpbroker.config.coordinator_keys import (
    GROUP_KEYS,
    SECURITY_KEYS,
    TRANSACTION_KEYS,
    check_internal_topics,
)
from mpbroker.config.cores import available_cores
from mpbroker.config.listeners import (
    AdvertisedEndPoint,
    EndPoint,
    advertised_by_listener,
    check_listeners,
    check_planes,
    exposure_warnings,
    parse_connection_overrides,
    parse_listeners,
    parse_protocol_map,
)
from mpbroker.config.machine import Machine
from mpbroker.config.metrics_keys import (
    METRICS_KEYS,
    check_otlp,
    parse_metrics_listener,
)
from mpbroker.config.quota_keys import QUOTA_KEYS
from mpbroker.config.security_keys import SECURITY_PROTOCOL_KEYS
from mpbroker.config.sources import (
    Setting,
    Source,
    settings_of_arguments,
    settings_of_environment,
    settings_of_file,
)
from mpbroker.config.telemetry_keys import TELEMETRY_KEYS
from mpbroker.metadata.log_config import defaults_of_broker
from mpbroker.metadata.log_config_def import broker_log_keys

if TYPE_CHECKING:
    from pathlib import Path


def _topic_default(key: ConfigKey) -> BrokerKey:
    """Return the row of a key that supplies a default of topics."""
    reader = Reader.TOPICS if key.update_mode is UpdateMode.CLUSTER_WIDE else None
    if key.name == "log.flush.scheduler.interval.ms":
        reader = Reader.HOUSEKEEPER  # which looks for unforced records as often
    return BrokerKey(
        key.name,
        key.type,
        key.default,
        key.meaning,
        validator=key.validator,
        not_above=key.not_above,
        has_effect=key.has_effect,
        reader=reader,
    )


BROKER_CONFIG_DEF: Final = ConfigDef(
    "setting",
    [
        *SERVER_KEYS,
        *LOG_KEYS,
        *map(_topic_default, broker_log_keys()),
        *GROUP_KEYS,
        *TRANSACTION_KEYS,
        *SECURITY_KEYS,
        *SECURITY_PROTOCOL_KEYS,
        *METRICS_KEYS,
        *QUOTA_KEYS,
        *TELEMETRY_KEYS,
    ],
)

# What a file written for Kafka may hold and nothing here needs: other brokers, the
# controller, ZooKeeper, remote storage, Java plug-ins. Such a file must work as it is.
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
    # Not all that begins so: metrics.listeners is ours, and must not be misspelt.
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

_PER_LISTENER: Final = "listener.name."
# As settings spell them: listener.name.x.scram-sha-256.connections.max.reauth.ms.
SASL_MECHANISMS: Final = (
    "plain",
    "scram-sha-256",
    "scram-sha-512",
    "oauthbearer",
    "gssapi",
)


class ResolvedValue(NamedTuple):
    """A value and where it came from. ``text`` is None for a default."""

    value: ConfigValue
    text: str | None
    source: Source
    origin: str


class BrokerConfig(BrokerValues):
    """The settings of one broker; immutable, and valid if it exists at all.

    Besides one attribute per key:

        endpoints: the listeners to open, parsed.
        advertised: what clients are told, by listener name.
        warnings: sentences about settings that had no effect.
        definition: the keys, with the defaults of this machine.
    """

    endpoints: tuple[EndPoint, ...]
    advertised: Mapping[str, AdvertisedEndPoint]
    warnings: tuple[str, ...]
    definition: ConfigDef
    _load_again: Callable[[], BrokerConfig]
    _resolved: Mapping[str, ResolvedValue]
    _per_listener: Mapping[tuple[str, str], ConfigValue]
    _per_mechanism: Mapping[tuple[str, str, str], ConfigValue]

    def __init__(
        self,
        settings: Iterable[Setting],
        *,
        environ: Mapping[str, str],
        cores: int,
    ) -> None:
        """Resolve settings; see load() for the usual way to get here.

        Args:
            settings: from all sources, in any order.
            environ: for computed defaults, as cores.
            cores: cores that the broker may keep busy.

        Raises:
            ConfigError: names the setting, the value, the limit and the way out.
        """
        definition, notes = _keys_on(cores, environ)
        reader = _Reader(definition)
        reader.read(settings)
        resolved = reader.resolved
        super().__init__({name: entry.value for name, entry in resolved.items()})
        put = object.__setattr__
        put(self, "definition", definition)
        put(self, "_resolved", resolved)
        put(self, "_per_listener", reader.per_listener)
        put(self, "_per_mechanism", reader.per_mechanism)
        # A comma at the end names no directory: not the one where we are started.
        named = filter(None, self.log_dirs)
        put(self, "log_dirs", tuple(_absolute(path) for path in named))
        put(self, "endpoints", self._parse_endpoints())
        put(self, "advertised", self._parse_advertised())
        put(self, "definition", reader.read_late(self._pools()))
        for key in self.definition:
            if isinstance(key, BrokerKey) and key.room is not None:
                put(self, key.attribute, resolved[key.name].value)
        self._check_together()
        exposed = exposure_warnings(self.endpoints)
        put(
            self,
            "warnings",
            (
                *reader.warnings,
                *(
                    text
                    for name, texts in notes.items()
                    if resolved[name].source is Source.DEFAULT
                    for text in texts
                ),
                *self._replication_warnings(),
                *exposed,
            ),
        )

    @classmethod
    def load(
        cls,
        arguments: Mapping[str, str],
        file: Path | None,
        environ: Mapping[str, str],
        *,
        cores: int | None = None,
    ) -> BrokerConfig:
        """Resolve settings: arguments win over the environment, that over the file.

        Args:
            arguments: texts by key, from key=value on the command line.
            file: TOML or Java properties, or None.
            environ: the environment; MPBROKER_LOG_DIRS sets log.dirs.
            cores: cores that the broker may keep busy; asked of the system if None.

        Raises:
            ConfigError: names the setting, the value, the limit and the way out.
        """
        settings = settings_of_file(file) if file is not None else []
        settings += settings_of_environment(environ)
        settings += settings_of_arguments(arguments)
        config = cls(settings, environ=environ, cores=cores or available_cores())
        again = partial(cls.load, arguments, file, environ, cores=cores)
        object.__setattr__(config, "_load_again", again)
        return config

    def load_again(self) -> BrokerConfig:
        """Resolve the same sources once more: the file may have changed.

        Raises:
            ConfigError: as load(); this configuration stays as it is.
        """
        return self._load_again()

    @property
    def has_telemetry_receiver(self) -> bool:
        """Whether pushed client metrics have a receiver; if not, none are asked for."""
        return bool(
            self.client_telemetry_log_path or self.client_telemetry_receiver_class_name
        )

    def resolved(self, name: str) -> ResolvedValue:
        """Return the value of a key with its source.

        Raises:
            ConfigError: no such key.
        """
        return self._resolved[self.definition.key(name).name]

    def static_texts(self) -> dict[str, str]:
        """Return the texts that were set, by key: static values in DescribeConfigs."""
        texts = {
            name: entry.text
            for name, entry in self._resolved.items()
            if entry.text is not None
        }
        for (listener, name), value in self._per_listener.items():
            text = self.definition.key(name).format(value)
            if text is not None:
                texts[f"{_PER_LISTENER}{listener}.{name}"] = text
        for (listener, mechanism, name), value in self._per_mechanism.items():
            text = self.definition.key(name).format(value)
            if text is not None:
                texts[f"{_PER_LISTENER}{listener}.{mechanism}.{name}"] = text
        return texts

    def for_listener(self, listener_name: str, name: str) -> ConfigValue:
        """Return a key's value for one listener (listener.name.<listener>.<key>)."""
        value = self.resolved(name).value
        return self._per_listener.get((listener_name.lower(), name), value)

    def for_mechanism(
        self, listener_name: str, mechanism: str, name: str
    ) -> ConfigValue:
        """Return a key's value for one SASL mechanism of a listener."""
        own = self.own_of_mechanism(listener_name, mechanism, name)
        return self.for_listener(listener_name, name) if own is None else own

    def own_of_mechanism(
        self, listener_name: str, mechanism: str, name: str
    ) -> ConfigValue:
        """Return what was set for one mechanism of a listener; None: nothing was."""
        return self._per_mechanism.get((listener_name.lower(), mechanism.lower(), name))

    def own_value(self, listener_name: str, name: str) -> ConfigValue:
        """Return what was set for one listener alone; None: nothing was."""
        return self._per_listener.get((listener_name.lower(), name))

    def broker_values(self) -> dict[str, ConfigValue]:
        """Return the value of every key, by Kafka's name."""
        return {name: entry.value for name, entry in self._resolved.items()}

    def log_defaults(self) -> dict[str, ConfigValue]:
        """Return what topics inherit, by topic key, for LogConfig.from_overrides()."""
        return defaults_of_broker(self.broker_values())

    def connection_overrides(self) -> dict[str, int]:
        """Return max.connections.per.ip.overrides by host.

        Raises:
            ConfigError: an entry is not host:count.
        """
        return parse_connection_overrides(self.max_connections_per_ip_overrides)

    def _parse_endpoints(self) -> tuple[EndPoint, ...]:
        endpoints = tuple(self._served(self.listeners, "listeners"))
        check_listeners(endpoints)
        return endpoints

    def _parse_advertised(self) -> dict[str, AdvertisedEndPoint]:
        advertised = self._served(
            self.advertised_listeners or (), "advertised.listeners"
        )
        return advertised_by_listener(advertised, self.endpoints)

    def _served(self, items: Iterable[str], key: str) -> list[EndPoint]:
        protocols = parse_protocol_map(self.listener_security_protocol_map)
        controller = {name.upper() for name in self.controller_listener_names}
        wanted = [
            item
            for item in items
            if item.partition("://")[0].strip().upper() not in controller
        ]
        return parse_listeners(wanted, protocols, key=key)

    def own_processors(self) -> dict[str, int]:
        """Return the processors of listeners that have a number of their own, by name.

        The others have num.network.threads each.
        """
        own = {
            endpoint.listener_name: number
            for endpoint in self.endpoints
            if isinstance(
                number := self._per_listener.get(
                    (endpoint.listener_name.lower(), PROCESSORS_KEY)
                ),
                int,
            )
        }
        if self.control_plane_listener_name is not None:
            own[self.control_plane_listener_name.upper()] = 1  # whatever is set
        return own

    def _pools(self) -> ListenerPools:
        return ListenerPools(
            [endpoint.listener_name for endpoint in self.endpoints],
            self.own_processors(),
            self.control_plane_listener_name is not None,
        )

    def _check_together(self) -> None:
        parse_metrics_listener(self.metrics_listeners)
        check_otlp(self.otlp_endpoint, self.otlp_headers, self.otlp_resource_attributes)
        self.connection_overrides()
        check_planes(
            self.endpoints,
            self.control_plane_listener_name,
            self.inter_broker_listener_name,
        )
        check_values(self.definition, lambda name: self._resolved[name].value)
        if (
            self.inter_broker_listener_name is not None
            and self.resolved("security.inter.broker.protocol").text is not None
        ):
            raise ConfigError(
                "Only one of inter.broker.listener.name and"
                " security.inter.broker.protocol should be set; remove the second"
            )
        request, queued = self.socket_request_max_bytes, self.queued_max_request_bytes
        if 0 <= queued < request:
            raise ConfigError(
                f"queued.max.request.bytes={queued}: below socket.request.max.bytes="
                f"{request}, so that the largest request would never fit; raise the"
                " first or lower the second"
            )
        if not self.log_dirs:
            raise ConfigError("log.dirs: no directory is named; give one at least")
        for path in self.log_dirs:
            if not path.isascii() and re.search("[\ud800-\udfff]", path):
                raise ConfigError(
                    f"log.dirs: {path!r} is not UTF-8, as what tells of it must be;"
                    " use a directory of another name"
                )
        if len(set(self.log_dirs)) != len(self.log_dirs):
            raise ConfigError(
                f"log.dirs={','.join(self.log_dirs)}: a directory is named twice"
            )
        check_internal_topics(
            self.offsets_topic_num_partitions, self.transaction_state_log_num_partitions
        )

    def _replication_warnings(self) -> list[str]:
        return [
            f"{name}={entry.value} has no effect: there is one broker, so every topic"
            " has one replica"
            for name in (
                "default.replication.factor",
                "offsets.topic.replication.factor",
                "transaction.state.log.replication.factor",
            )
            if (entry := self._resolved[name]).value != 1
        ]


class _Reader:
    """Sorts settings from all sources into what they set."""

    def __init__(self, definition: ConfigDef) -> None:
        self._definition = definition
        self._set_as: dict[str, Setting] = {}
        self._late: list[Setting] = []
        self.per_listener: dict[tuple[str, str], ConfigValue] = {}
        self.per_mechanism: dict[tuple[str, str, str], ConfigValue] = {}
        self.warnings: list[str] = []
        self.resolved = {
            key.name: ResolvedValue(key.default, None, Source.DEFAULT, "default")
            for key in definition
        }

    def read(self, settings: Iterable[Setting]) -> None:
        """Read settings, but those whose limits follow from the listeners."""
        # Stable, so that of one source the last counts.
        for setting in sorted(settings, key=lambda setting: setting.source):
            key = self._definition.get(setting.name)
            if isinstance(key, BrokerKey) and key.room is not None:
                self._late.append(setting)
            else:
                self._read_one(setting)

    def read_late(self, pools: ListenerPools) -> ConfigDef:
        """Read the others; return all keys with their limits beside these listeners.

        So a setting has one limit in all that is said about it.
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
                key.check(value)  # of a default, too
            except ConfigError as error:
                raise ConfigError(f"{error} ({origin})") from None
        return self._definition

    def _read_one(self, setting: Setting) -> None:
        name = setting.name
        if name.startswith(_PER_LISTENER):
            self._read_per_listener(setting)
        elif name in self._definition:
            self._read_known(self._definition.key(name), setting)
        elif name.startswith(NOT_NEEDED):
            self.warnings.append(f"{name} has no effect in mpbroker ({setting.origin})")
        elif setting.source is Source.ENVIRONMENT:
            # Other programs have variables of that prefix, so it is no error.
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
        listener, _, name = setting.name.removeprefix(_PER_LISTENER).partition(".")
        key = key_below_prefix(setting.name, self._definition)
        mechanism = name.partition(".")[0]
        if key is not None and mechanism in SASL_MECHANISMS:
            value = _parse(key, setting)
            self.per_mechanism[listener.lower(), mechanism, key.name] = value
            return
        if key is None:
            self.warnings.append(f"{setting.name} has no effect ({setting.origin})")
            return
        value = _parse(key.of_listener(), setting)
        self.per_listener[listener.lower(), key.name] = value

    def _unknown(self, name: str) -> str:
        try:
            self._definition.key(name)
        except ConfigError as error:
            return str(error)
        raise AssertionError(f"{name} is known")


def key_below_prefix(name: str, definition: ConfigDef) -> ConfigKey | None:
    """Return the key that ``listener.name.LISTENER.[MECHANISM.]KEY`` sets."""
    if not name.startswith(_PER_LISTENER):
        return None
    _, _, rest = name.removeprefix(_PER_LISTENER).partition(".")
    mechanism, _, of_mechanism = rest.partition(".")
    return definition.get(of_mechanism if mechanism in SASL_MECHANISMS else rest)


def _parse(key: ConfigKey, setting: Setting) -> ConfigValue:
    if key.default is None and not setting.text.strip():
        return None
    try:
        return key.parse(setting.text)
    except ConfigError as error:
        of_listener = setting.name.startswith(_PER_LISTENER)
        prefix = setting.name.removesuffix(key.name) if of_listener else ""
        raise ConfigError(f"{prefix}{error} ({setting.origin})") from None


def _keys_on(
    cores: int, environ: Mapping[str, str]
) -> tuple[ConfigDef, dict[str, list[str]]]:
    """Return the keys with the defaults of a machine, and warnings about these."""
    notes: dict[str, list[str]] = {}
    keys = []
    for key in BROKER_CONFIG_DEF:
        if isinstance(key, BrokerKey) and key.computed is not None:
            said = notes[key.name] = []
            keys.append(key.on(Machine(cores, environ, said.append)))
    return BROKER_CONFIG_DEF.with_keys(keys), notes


def _absolute(path: str) -> str:
    # A daemon changes its working directory, and messages should name the place.
    return os.path.abspath(os.path.expanduser(path))

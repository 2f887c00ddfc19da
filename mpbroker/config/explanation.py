"""Explain a setting: its meaning, limits, default and value now."""

from __future__ import annotations

from typing import Final, NamedTuple

from mpbroker.base.config_def import LISTENER_PREFIX, ConfigDef, ConfigError, ConfigKey
from mpbroker.config.broker_config import BROKER_CONFIG_DEF, BrokerConfig
from mpbroker.config.broker_key import BrokerKey
from mpbroker.config.resolution import NOT_NEEDED, why_not_of_listener
from mpbroker.metadata.log_config_def import BROKER_SYNONYMS, LOG_CONFIG_DEF

# All other settings are Kafka's. A name that ends with a dot stands for all behind it.
_OURS: Final = (
    *("client.telemetry.log.", "client.telemetry.receiver.class.name"),
    *(
        "cluster.database.",
        "connections.setup.timeout.ms",
        "console.",
        "control.inject.",
    ),
    *("control.socket.path", "diskless.", "flush.acks.all", "log.flush.acks.all"),
    *("max.partitions", "metrics.kafka.names.enable"),
    *("metrics.listeners", "mirror.source", "otlp.", "remote.metadata.interval.ms"),
    *("remote.storage.cache.bytes", "remote.storage.endpoint"),
    *("remote.storage.region", "remote.storage.url", "request.log."),
    *("sasl.plain.users.file", "slow.request.log."),
)


class Explanation(NamedTuple):
    """The facts about one key, as texts; None where a fact is not known.

    Attributes:
        scope: "broker" or "topic".
        is_computed: whether the default depends on the machine, by a rule that the
            documentation tells.
        related: for a topic key, the broker keys that supply its default; for a broker
            key, the topic key whose default it supplies.
        instead: the broker keys that count if this one is not set, in this order.
        origin: the source of the value, such as a file and a line.
        is_ours: whether the setting is mpbroker's own, and not one of Kafka's.
        is_of_this_machine: False if this machine's facts are not known: a computed
            default is then that of a machine with one core.
    """

    name: str
    scope: str
    aliases: tuple[str, ...]
    documentation: str
    type: str
    limit: str
    default: str | None
    is_computed: bool
    update_mode: str
    importance: str
    since: str
    related: tuple[str, ...]
    instead: tuple[str, ...]
    value: str | None
    origin: str | None
    is_ours: bool
    is_of_this_machine: bool = True

    def text(self, width: int = 80) -> str:
        """Return the facts as lines of text, at most ``width`` characters long."""
        import textwrap  # imported here: a broker that starts does not need it

        lines = [f"{self.name}  ({self.scope} setting)", ""]
        lines += textwrap.wrap(
            self.documentation, width, initial_indent="  ", subsequent_indent="  "
        )
        lines.append("")
        for label, content in self._facts():
            lines += textwrap.wrap(
                f"{label:<12}{content}",
                width,
                initial_indent="  ",
                subsequent_indent=" " * 14,
            )
        return "\n".join(lines)

    def _facts(self) -> list[tuple[str, str]]:
        default = "none" if self.default is None else self.default or "empty"
        if self.is_computed and self.is_of_this_machine:
            default += " on this machine"
        elif self.is_computed:
            default += " on a machine with one core"
        facts = [("accepts", self.limit), ("default", default)]
        if self.instead:
            facts.append(("if not set", ", then ".join(self.instead)))
        if self.origin is not None:
            value = "none" if self.value is None else self.value or "empty"
            origin = (
                f"from {self.origin}" if self.origin != "default" else "the default"
            )
            facts.append(("now", f"{value}, {origin}"))
        facts.append(("update", self.update_mode))
        if self.is_ours:
            facts.append(("whose", "mpbroker's own; Kafka does not have it"))
        if self.aliases:
            facts.append(("also", ", ".join(self.aliases)))
        if self.related and self.scope == "topic":
            facts.append(("inherits", ", then ".join(self.related)))
        elif self.related:
            facts.append(("topic key", ", ".join(self.related)))
        return facts


def explain(name: str, config: BrokerConfig | None = None) -> Explanation:
    """Explain a key of the broker or of topics; if both have the name, the broker's.

    Args:
        config: has the value, and the default on this machine. None: the value is not
            known, and a computed default is that of a machine with one core.

    Raises:
        ConfigError: there is no such key, and the message has the nearest spelling; or
            the key is one of Kafka's that has no effect here.
    """
    definition = BROKER_CONFIG_DEF if config is None else config.definition
    key = definition.get(name)
    if key is not None:
        return _explain_broker_key(key, config)._replace(
            is_of_this_machine=config is not None
        )
    if name in LOG_CONFIG_DEF:
        return explain_topic_key(name)
    of_listener = definition.of_listener(name)
    if of_listener is not None:
        # Without the value: each listener may have another one.
        return _explain_broker_key(of_listener.key, None)._replace(
            is_of_this_machine=config is not None
        )
    if name.startswith(LISTENER_PREFIX) and (
        reason := why_not_of_listener(name, definition)
    ):
        raise ConfigError(f"{name} has no effect{reason}")
    if name.startswith(NOT_NEEDED):
        raise ConfigError(f"{name} has no effect in mpbroker")
    raise ConfigError(_unknown(name, definition))


def explain_topic_key(name: str) -> Explanation:
    """Explain a key of topics, even if the broker has a key of the same name.

    Raises:
        ConfigError: topics have no such key.
    """
    synonyms = BROKER_SYNONYMS.get(name, ())
    related = tuple(synonym.name for synonym in synonyms)
    return _explanation(LOG_CONFIG_DEF.key(name), "topic", related)


def _explain_broker_key(key: ConfigKey, config: BrokerConfig | None) -> Explanation:
    chains = {
        topic_name: [synonym.name for synonym in synonyms]
        for topic_name, synonyms in BROKER_SYNONYMS.items()
    }
    related = tuple(name for name, chain in chains.items() if key.name in chain)
    instead: tuple[str, ...] = ()
    if related and key.default is None:
        chain = chains[related[0]]
        instead = tuple(chain[chain.index(key.name) + 1 :])
    if config is None:
        return _explanation(key, "broker", related, instead)
    resolved = config.resolved(key.name)
    text = key.format(resolved.value)
    value = text if text is None else key.shown(text)
    return _explanation(key, "broker", related, instead, value, resolved.origin)


def _explanation(
    key: ConfigKey,
    scope: str,
    related: tuple[str, ...],
    instead: tuple[str, ...] = (),
    value: str | None = None,
    origin: str | None = None,
) -> Explanation:
    default = key.format(key.default)
    is_computed = isinstance(key, BrokerKey) and key.computed is not None
    return Explanation(
        name=key.name,
        scope=scope,
        aliases=key.aliases,
        documentation=key.documentation,
        type=key.type.name.lower(),
        limit=key.limit,
        default=None if default is None else key.shown(default),
        is_computed=is_computed,
        update_mode=key.update_mode.value,
        importance=key.importance.value,
        since=key.since,
        related=related,
        instead=instead,
        value=value,
        origin=origin,
        is_ours=any(
            key.name.startswith(name) if name.endswith(".") else key.name == name
            for name in _OURS
        ),
    )


def _unknown(name: str, definition: ConfigDef) -> str:
    both = ConfigDef("setting", [*definition, *LOG_CONFIG_DEF])
    try:
        both.key(name)
    except ConfigError as error:
        return str(error)
    raise AssertionError(f"{name} is known")

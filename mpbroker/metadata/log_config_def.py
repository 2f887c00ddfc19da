"""The keys of topic-level configuration, and the broker keys behind each of them.

Each topic key has synonyms among the broker's keys: `retention.ms` of a topic is,
until somebody sets it there, `log.retention.ms` of the broker, else
`log.retention.minutes`, else `log.retention.hours`. A key's row below is the only
place that knows this; the broker's own `log.*` keys are derived from it.

Source: "Topic-Level Configs" of the Apache Kafka 4.x documentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple, Unpack

from mpbroker.base.config_def import (
    LONG_MAX,
    ConfigDef,
    ConfigError,
    ConfigKey,
    ConfigType,
    ConfigValue,
    UpdateMode,
    Validator,
    at_least,
    between,
    list_of,
    minus_one_or,
    one_of,
)

if TYPE_CHECKING:
    from mpbroker.base.config_def import Columns

    class TopicColumns(Columns, total=False):
        """The columns that a row may leave out; see TopicKey for what they mean."""

        synonyms: tuple[BrokerSynonym, ...]


_BOOLEAN, _INT, _LONG = ConfigType.BOOLEAN, ConfigType.INT, ConfigType.LONG
_DOUBLE, _STRING, _LIST = ConfigType.DOUBLE, ConfigType.STRING, ConfigType.LIST
_HOUR_MS: Final = 3_600_000
_WEEK_MS: Final = 7 * 24 * _HOUR_MS


class BrokerSynonym(NamedTuple):
    """A broker key that supplies a topic key's default.

    ``factor`` turns the broker's unit into the topic's (hours into milliseconds).
    ``validator`` is there if the broker's key has other limits than the topic's.
    """

    name: str
    factor: int = 1
    validator: Validator | None = None


class TopicKey(ConfigKey):
    """One setting of topics. Its column beside ConfigKey's:

    synonyms: the broker's keys that supply its default. The first that has a value
        counts, and the last has Kafka's default.
    """

    synonyms: tuple[BrokerSynonym, ...] = ()
    update_mode = UpdateMode.CLUSTER_WIDE

    if TYPE_CHECKING:

        def __init__(
            self,
            name: str,
            type: ConfigType,
            default: ConfigValue,
            documentation: str,
            **columns: Unpack[TopicColumns],
        ) -> None: ...


_SOME_RETENTION: Final = minus_one_or(at_least(1))


_KEYS: Final = [
    TopicKey(
        "cleanup.policy",
        _LIST,
        ("delete",),
        "What happens to old segments: `delete` drops them by age or size,"
        " `compact` keeps the last record of every key, and both may be given.",
        validator=list_of("compact", "delete"),
        synonyms=(BrokerSynonym("log.cleanup.policy"),),
    ),
    TopicKey(
        "compression.gzip.level",
        _INT,
        -1,
        "Level at which the broker compresses with gzip; -1 is gzip's own default.",
        validator=minus_one_or(between(1, 9)),
        synonyms=(BrokerSynonym("compression.gzip.level"),),
    ),
    TopicKey(
        "compression.lz4.level",
        _INT,
        9,
        "Level at which the broker compresses with lz4.",
        validator=between(1, 17),
        synonyms=(BrokerSynonym("compression.lz4.level"),),
    ),
    TopicKey(
        "compression.type",
        _STRING,
        "producer",
        "Codec of stored batches. `producer` keeps what the producer chose;"
        " anything else makes the broker recompress what arrives differently.",
        validator=one_of("uncompressed", "zstd", "lz4", "snappy", "gzip", "producer"),
        synonyms=(BrokerSynonym("compression.type"),),
    ),
    TopicKey(
        "compression.zstd.level",
        _INT,
        3,
        "Level at which the broker compresses with zstd.",
        validator=between(-131072, 22),
        synonyms=(BrokerSynonym("compression.zstd.level"),),
    ),
    TopicKey(
        "delete.retention.ms",
        _LONG,
        86_400_000,
        "How long a tombstone (a record without a value) stays in a compacted"
        " topic, so that slow readers learn of the deletion.",
        validator=at_least(0),
        synonyms=(BrokerSynonym("log.cleaner.delete.retention.ms"),),
    ),
    TopicKey(
        "file.delete.delay.ms",
        _LONG,
        60_000,
        "How long a segment's files outlive its removal, for readers still in it.",
        validator=at_least(0),
        synonyms=(BrokerSynonym("log.segment.delete.delay.ms"),),
    ),
    TopicKey(
        "flush.messages",
        _LONG,
        LONG_MAX,
        "Number of records after which a partition is forced to disk. The default"
        " leaves that to the operating system and to acks=all.",
        validator=at_least(1),
        synonyms=(BrokerSynonym("log.flush.interval.messages"),),
    ),
    TopicKey(
        "flush.ms",
        _LONG,
        LONG_MAX,
        "Longest time that a record stays unforced in a partition. The default"
        " leaves that to the operating system and to acks=all.",
        validator=at_least(0),
        synonyms=(
            BrokerSynonym("log.flush.interval.ms"),
            BrokerSynonym("log.flush.scheduler.interval.ms"),
        ),
    ),
    TopicKey(
        "follower.replication.throttled.replicas",
        _LIST,
        (),
        "One broker has no followers.",
        has_effect=False,
    ),
    TopicKey(
        "index.interval.bytes",
        _INT,
        4096,
        "Bytes of log between two entries of the offset index. Fewer make lookups"
        " more exact and the index larger.",
        validator=at_least(0),
        synonyms=(BrokerSynonym("log.index.interval.bytes"),),
    ),
    TopicKey(
        "leader.replication.throttled.replicas",
        _LIST,
        (),
        "One broker has no followers.",
        has_effect=False,
    ),
    TopicKey(
        "local.retention.bytes",
        _LONG,
        -2,
        "There is no remote storage, so retention.bytes decides.",
        validator=at_least(-2),
        has_effect=False,
    ),
    TopicKey(
        "local.retention.ms",
        _LONG,
        -2,
        "There is no remote storage, so retention.ms decides.",
        validator=at_least(-2),
        has_effect=False,
    ),
    TopicKey(
        "max.compaction.lag.ms",
        _LONG,
        LONG_MAX,
        "Longest time that a record may stay uncompacted in a compacted topic.",
        validator=at_least(1),
        synonyms=(BrokerSynonym("log.cleaner.max.compaction.lag.ms"),),
    ),
    TopicKey(
        "max.message.bytes",
        _INT,
        1_048_588,
        "Largest record batch accepted, as it arrives (compressed or not).",
        validator=at_least(0),
        synonyms=(BrokerSynonym("message.max.bytes"),),
    ),
    TopicKey(
        "message.timestamp.after.max.ms",
        _LONG,
        _HOUR_MS,
        "How far a record's timestamp may lie ahead of the broker's clock."
        " Ignored for LogAppendTime.",
        validator=at_least(0),
        synonyms=(BrokerSynonym("log.message.timestamp.after.max.ms"),),
    ),
    TopicKey(
        "message.timestamp.before.max.ms",
        _LONG,
        LONG_MAX,
        "How far a record's timestamp may lie behind the broker's clock."
        " Ignored for LogAppendTime.",
        validator=at_least(0),
        synonyms=(BrokerSynonym("log.message.timestamp.before.max.ms"),),
    ),
    TopicKey(
        "message.timestamp.type",
        _STRING,
        "CreateTime",
        "Whose clock stamps a record: the producer's (CreateTime) or the broker's"
        " at the time of the append (LogAppendTime).",
        validator=one_of("CreateTime", "LogAppendTime"),
        synonyms=(BrokerSynonym("log.message.timestamp.type"),),
    ),
    TopicKey(
        "min.cleanable.dirty.ratio",
        _DOUBLE,
        0.5,
        "Share of a compacted log that must be new since the last cleaning before"
        " it is cleaned again.",
        validator=between(0, 1),
        synonyms=(BrokerSynonym("log.cleaner.min.cleanable.ratio"),),
    ),
    TopicKey(
        "min.compaction.lag.ms",
        _LONG,
        0,
        "Shortest time that a record stays uncompacted in a compacted topic.",
        validator=at_least(0),
        not_above="max.compaction.lag.ms",
        synonyms=(BrokerSynonym("log.cleaner.min.compaction.lag.ms"),),
    ),
    TopicKey(
        "min.insync.replicas",
        _INT,
        1,
        "acks=all asks for no more replicas than a topic has, as in Kafka, and with"
        " one broker that is one.",
        validator=at_least(1),
        has_effect=False,
        synonyms=(BrokerSynonym("min.insync.replicas"),),
    ),
    TopicKey(
        "preallocate",
        _BOOLEAN,
        False,
        "Whether a new segment's file gets its full size at once.",
        synonyms=(BrokerSynonym("log.preallocate"),),
    ),
    TopicKey(
        "remote.log.copy.disable",
        _BOOLEAN,
        False,
        "There is no remote storage.",
        has_effect=False,
    ),
    TopicKey(
        "remote.log.delete.on.disable",
        _BOOLEAN,
        False,
        "There is no remote storage.",
        has_effect=False,
    ),
    TopicKey(
        "remote.storage.enable",
        _BOOLEAN,
        False,
        "Remote storage is not served: only false is accepted.",
        validator=Validator("false", lambda value: value is False),
        has_effect=False,
    ),
    TopicKey(
        "retention.bytes",
        _LONG,
        -1,
        "Size above which a partition's oldest segments are deleted; -1 keeps all.",
        validator=at_least(-1),
        synonyms=(BrokerSynonym("log.retention.bytes"),),
    ),
    TopicKey(
        "retention.ms",
        _LONG,
        _WEEK_MS,
        "Age above which a partition's segments are deleted; -1 keeps them.",
        validator=at_least(-1),
        # 0 deletes what it can: right for one topic, a mistake for all, as in Kafka.
        synonyms=(
            BrokerSynonym("log.retention.ms", 1, _SOME_RETENTION),
            BrokerSynonym("log.retention.minutes", 60_000, _SOME_RETENTION),
            BrokerSynonym("log.retention.hours", _HOUR_MS, _SOME_RETENTION),
        ),
    ),
    # Kafka 4.0 raised the minimum from 14 bytes to 1 MiB (KIP-1030). The old one
    # is kept: small segments are what people try retention and compaction with.
    TopicKey(
        "segment.bytes",
        _INT,
        1 << 30,
        "Size at which a segment is closed and a new one begun. Deletion and"
        " compaction work on whole closed segments.",
        validator=at_least(14),
        synonyms=(BrokerSynonym("log.segment.bytes"),),
    ),
    TopicKey(
        "segment.index.bytes",
        _INT,
        10 << 20,
        "Largest size of a segment's offset index, and of its time index.",
        validator=at_least(4),
        synonyms=(BrokerSynonym("log.index.size.max.bytes"),),
    ),
    TopicKey(
        "segment.jitter.ms",
        _LONG,
        0,
        "Largest random amount taken off segment.ms, so that the segments of many"
        " partitions do not roll at one time.",
        validator=at_least(0),
        synonyms=(
            BrokerSynonym("log.roll.jitter.ms"),
            BrokerSynonym("log.roll.jitter.hours", _HOUR_MS),
        ),
    ),
    TopicKey(
        "segment.ms",
        _LONG,
        _WEEK_MS,
        "Age at which a segment is closed even if it is not full.",
        validator=at_least(1),
        synonyms=(
            BrokerSynonym("log.roll.ms"),
            BrokerSynonym("log.roll.hours", _HOUR_MS),
        ),
    ),
    TopicKey(
        "unclean.leader.election.enable",
        _BOOLEAN,
        False,
        "One broker elects nobody.",
        has_effect=False,
        synonyms=(BrokerSynonym("unclean.leader.election.enable"),),
    ),
]

LOG_CONFIG_DEF: Final = ConfigDef("topic config", _KEYS)


# The broker's keys behind each topic key that has some.
BROKER_SYNONYMS: Final[Mapping[str, tuple[BrokerSynonym, ...]]] = {
    key.name: key.synonyms for key in _KEYS if key.synonyms
}


def _broker_log_keys() -> list[ConfigKey]:
    """Return the broker's keys that set defaults of topic keys.

    Where several broker keys stand behind one topic key, the last (the one in the
    coarsest unit) carries Kafka's default and the others have none.
    """
    return [
        _broker_key(key, synonym, has_default=synonym is key.synonyms[-1])
        for key in _KEYS
        for synonym in key.synonyms
    ]


def _broker_name(topic_name: str) -> str:
    return BROKER_SYNONYMS[topic_name][0].name if topic_name else ""


def _broker_key(
    topic_key: ConfigKey, synonym: BrokerSynonym, *, has_default: bool
) -> ConfigKey:
    default = topic_key.default if has_default else None
    kind, documentation = topic_key.type, topic_key.meaning
    mode = UpdateMode.CLUSTER_WIDE
    if synonym.factor != 1:
        # Coarse units are 32-bit in Kafka, and only their ms sibling is dynamic.
        kind, mode = _INT, UpdateMode.READ_ONLY
        if isinstance(default, int):
            default //= synonym.factor
        unit = "hours" if synonym.factor == _HOUR_MS else "minutes"
        documentation = f"In {unit}: {documentation}"
    return ConfigKey(
        synonym.name,
        kind,
        default,
        f"{documentation} Default of the topic config {topic_key.name}.",
        validator=synonym.validator or topic_key.validator,
        not_above=_broker_name(topic_key.not_above),
        update_mode=mode,
        has_effect=topic_key.has_effect,
    )


# The broker's keys that set defaults of topic keys.
BROKER_LOG_DEF: Final = ConfigDef("setting", _broker_log_keys())


def broker_log_value(name: str, text: str) -> ConfigValue:
    """Return the value of a broker's setting for logs; None: it is no such thing.

    A value that a later release accepted must not keep this one from starting.
    """
    key = BROKER_LOG_DEF.get(name)
    if key is None:
        return None
    try:
        return key.parse(text)
    except ConfigError:
        return None

"""The keys of topic-level configuration, and the broker keys behind each of them.

A topic key may have synonyms among the broker's keys: a topic without a
`retention.ms` of its own has the broker's `log.retention.ms`, else
`log.retention.minutes`, else `log.retention.hours`. Only the rows below say so; the
broker's `log.*` keys are derived from them.

Source: "Topic-Level Configs" of the Apache Kafka 4.x documentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Unpack

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
from mpbroker.base.named_tuple import NamedTuple

if TYPE_CHECKING:
    from mpbroker.base.config_def import Columns

    class TopicColumns(Columns, total=False):
        """The arguments that a TopicKey may leave out; TopicKey has their meanings."""

        synonyms: tuple[BrokerSynonym, ...]


_BOOLEAN, _INT, _LONG = ConfigType.BOOLEAN, ConfigType.INT, ConfigType.LONG
_DOUBLE, _STRING, _LIST = ConfigType.DOUBLE, ConfigType.STRING, ConfigType.LIST
_HOUR_MS: Final = 3_600_000
_WEEK_MS: Final = 7 * 24 * _HOUR_MS


class BrokerSynonym(NamedTuple):
    """A broker key that supplies the default of a topic key.

    Attributes:
        name: the broker key.
        factor: the number by which a value of the broker key is multiplied to get the
            unit of the topic key, such as from hours to milliseconds.
        validator: the limits of the broker key; None: those of the topic key.
    """

    name: str
    factor: int = 1
    validator: Validator | None = None


class TopicKey(ConfigKey):
    """One setting of topics.

    Attributes:
        synonyms: the broker keys that supply the setting's default. The first one that
            has a value counts, and the last one has Kafka's default. The other
            attributes are those of ConfigKey.
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
        "What happens to old segments: `delete` deletes them by age or size, `compact`"
        " keeps the last record of every key; both may be given.",
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
        "Codec of stored batches. `producer` keeps the producer's choice; with any"
        " other value the broker compresses batches again that arrive otherwise.",
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
        "How long a tombstone (a record without a value) stays in a compacted topic,"
        " so that slow consumers learn of the deletion.",
        validator=at_least(0),
        synonyms=(BrokerSynonym("log.cleaner.delete.retention.ms"),),
    ),
    TopicKey(
        "diskless.enable",
        _BOOLEAN,
        False,
        "Whether the topic is shared by the nodes of a cluster: its records are in the"
        " cluster's store. Fixed when the topic is created. Not a setting of Kafka.",
    ),
    TopicKey(
        "errors.deadletterqueue.group.enable",
        _BOOLEAN,
        False,
        "Share groups have no dead-letter queue.",
        has_effect=False,
    ),
    TopicKey(
        "file.delete.delay.ms",
        _LONG,
        60_000,
        "How long the files of a deleted segment are kept for processes that still"
        " read them.",
        validator=at_least(0),
        synonyms=(BrokerSynonym("log.segment.delete.delay.ms"),),
    ),
    # Kafka's acks=all means all replicas, and with one replica the page cache.
    TopicKey(
        "flush.acks.all",
        _BOOLEAN,
        True,
        "Whether acks=all, and with it a transaction or a committed offset, waits for"
        " the disk. If not, it is answered when the records are in the page cache, as"
        " Kafka does: a power cut may lose them, a death of processes does not. For"
        " tests and development. Not a setting of Kafka.",
        synonyms=(BrokerSynonym("log.flush.acks.all"),),
    ),
    TopicKey(
        "flush.messages",
        _LONG,
        LONG_MAX,
        "Number of records after which a partition is forced to disk. By default the"
        " operating system and acks=all decide.",
        validator=at_least(1),
        synonyms=(BrokerSynonym("log.flush.interval.messages"),),
    ),
    TopicKey(
        "flush.ms",
        _LONG,
        LONG_MAX,
        "Longest time before a record is forced to disk. By default the operating"
        " system and acks=all decide.",
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
        "With one broker there are no followers.",
        has_effect=False,
    ),
    TopicKey(
        "index.interval.bytes",
        _INT,
        4096,
        "Bytes of log between two entries of the offset index. With fewer bytes"
        " lookups are more exact and the index is larger.",
        validator=at_least(0),
        synonyms=(BrokerSynonym("log.index.interval.bytes"),),
    ),
    TopicKey(
        "leader.replication.throttled.replicas",
        _LIST,
        (),
        "With one broker there are no followers.",
        has_effect=False,
    ),
    TopicKey(
        "local.retention.bytes",
        _LONG,
        -2,
        "With remote storage: size in bytes above which the oldest copied segments of a"
        " partition leave this machine; -1 is no limit, -2 that of retention.bytes.",
        validator=at_least(-2),
        synonyms=(BrokerSynonym("log.local.retention.bytes"),),
    ),
    TopicKey(
        "local.retention.ms",
        _LONG,
        -2,
        "With remote storage: age after which copied segments leave this machine; -1 is"
        " no limit, -2 that of retention.ms.",
        validator=at_least(-2),
        synonyms=(BrokerSynonym("log.local.retention.ms"),),
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
        "max.decompressed.message.bytes",
        _INT,
        2_147_483_639,
        "A batch may have 100 MiB when it is decompressed, and so may a record.",
        validator=between(1, 2_147_483_639),
        has_effect=False,
        synonyms=(BrokerSynonym("max.decompressed.message.bytes"),),
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
        "How far a record's timestamp may be ahead of the broker's clock. It is"
        " ignored for LogAppendTime.",
        validator=at_least(0),
        synonyms=(BrokerSynonym("log.message.timestamp.after.max.ms"),),
    ),
    TopicKey(
        "message.timestamp.before.max.ms",
        _LONG,
        LONG_MAX,
        "How far a record's timestamp may be behind the broker's clock. It is ignored"
        " for LogAppendTime.",
        validator=at_least(0),
        synonyms=(BrokerSynonym("log.message.timestamp.before.max.ms"),),
    ),
    TopicKey(
        "message.timestamp.type",
        _STRING,
        "CreateTime",
        "Which clock stamps a record: the producer's (CreateTime), or the broker's"
        " when it appends the record (LogAppendTime).",
        validator=one_of("CreateTime", "LogAppendTime"),
        synonyms=(BrokerSynonym("log.message.timestamp.type"),),
    ),
    TopicKey(
        "min.cleanable.dirty.ratio",
        _DOUBLE,
        0.5,
        "Share of a compacted log that must be new since its last compaction before it"
        " is compacted again.",
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
        "With acks=all the broker waits for no more replicas than a topic has, as in"
        " Kafka, and with one broker a topic has one.",
        validator=at_least(1),
        has_effect=False,
        synonyms=(BrokerSynonym("min.insync.replicas"),),
    ),
    TopicKey(
        "mirror.source",
        _STRING,
        "",
        "Brokers from which `mpbroker mirror` copies the topic. As long as it is set,"
        " records keep the offsets that they have there, and other producers are"
        " refused. Not a setting of Kafka.",
    ),
    TopicKey(
        "preallocate",
        _BOOLEAN,
        False,
        "Whether the file of a new segment gets its full size at once.",
        synonyms=(BrokerSynonym("log.preallocate"),),
    ),
    TopicKey(
        "remote.copy.lag.bytes",
        _LONG,
        -1,
        "Bytes behind a closed segment from which on it is copied to the remote store,"
        " or earlier by remote.copy.lag.ms; 0: at once, -1: as local.retention.bytes.",
        validator=at_least(-1),
        synonyms=(BrokerSynonym("log.remote.copy.lag.bytes"),),
    ),
    TopicKey(
        "remote.copy.lag.ms",
        _LONG,
        0,
        "Age from which on a closed segment is copied to the remote store, or earlier"
        " by remote.copy.lag.bytes; 0: at once, -1: as local.retention.ms.",
        validator=at_least(-1),
        synonyms=(BrokerSynonym("log.remote.copy.lag.ms"),),
    ),
    TopicKey(
        "remote.log.copy.disable",
        _BOOLEAN,
        False,
        "Whether no more segments are copied to the remote store. What is there can be"
        " read, and is deleted by retention.",
    ),
    TopicKey(
        "remote.log.delete.on.disable",
        _BOOLEAN,
        False,
        "Whether remote.storage.enable may be set to false, which deletes all segments"
        " of the topic in the remote store; its first record is then the first that is"
        " local.",
    ),
    TopicKey(
        "remote.storage.enable",
        _BOOLEAN,
        False,
        "Whether closed segments are copied to the remote store. The broker must have"
        " remote.log.storage.system.enable=true, and cleanup.policy must be delete.",
    ),
    TopicKey(
        "retention.bytes",
        _LONG,
        -1,
        "Size of a partition above which its oldest segments are deleted; -1: no"
        " limit.",
        validator=at_least(-1),
        synonyms=(BrokerSynonym("log.retention.bytes"),),
    ),
    TopicKey(
        "retention.ms",
        _LONG,
        _WEEK_MS,
        "Age above which a segment is deleted; -1: no limit.",
        validator=at_least(-1),
        # As in Kafka, a topic may have 0, which deletes all that can be deleted; as the
        # default of all topics it is refused.
        synonyms=(
            BrokerSynonym("log.retention.ms", 1, _SOME_RETENTION),
            BrokerSynonym("log.retention.minutes", 60_000, _SOME_RETENTION),
            BrokerSynonym("log.retention.hours", _HOUR_MS, _SOME_RETENTION),
        ),
    ),
    # Kafka 4.0 raised the minimum from 14 bytes to 1 MiB (KIP-1030). The old one is
    # kept, because small segments are useful to try retention and compaction.
    TopicKey(
        "segment.bytes",
        _INT,
        1 << 30,
        "Size at which a segment is closed and a new one begun. Retention and"
        " compaction work on closed segments.",
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
        "Largest random time taken off segment.ms, so that the segments of many"
        " partitions are not closed at the same moment.",
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
        "With one broker there is no leader election.",
        has_effect=False,
        synonyms=(BrokerSynonym("unclean.leader.election.enable"),),
    ),
]

LOG_CONFIG_DEF: Final = ConfigDef("topic config", _KEYS)


# By topic key, the broker's keys that supply its default.
BROKER_SYNONYMS: Final[Mapping[str, tuple[BrokerSynonym, ...]]] = {
    key.name: key.synonyms for key in _KEYS if key.synonyms
}


def _broker_log_keys() -> list[ConfigKey]:
    """Return the broker's keys that supply defaults of topic keys.

    Of several broker keys for one topic key, the last one, which has the coarsest
    unit, has Kafka's default. The others have no default.
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
        # As in Kafka, a key in hours or minutes has 32 bits and cannot change while the
        # broker serves; the key in milliseconds can.
        kind, mode = _INT, UpdateMode.READ_ONLY
        if isinstance(default, int):
            default //= synonym.factor
        unit = "hours" if synonym.factor == _HOUR_MS else "minutes"
        documentation = f"In {unit}: {documentation}"
    return ConfigKey(
        synonym.name,
        kind,
        default,
        f"{documentation} It is the default of the topic setting {topic_key.name}.",
        validator=synonym.validator or topic_key.validator,
        not_above=_broker_name(topic_key.not_above),
        update_mode=mode,
        has_effect=topic_key.has_effect,
    )


# The broker's keys that supply defaults of topic keys.
BROKER_LOG_DEF: Final = ConfigDef("setting", _broker_log_keys())


def broker_log_value(name: str, text: str) -> ConfigValue:
    """Parse the text of a broker setting that supplies a default of topics.

    Args:
        name: the broker key.
        text: its value, as text.

    Returns:
        The value; None if it is another setting, or if the text is not accepted: a text
        that a later release wrote must not keep this release from starting.
    """
    key = BROKER_LOG_DEF.get(name)
    if key is None:
        return None
    try:
        return key.parse(text)
    except ConfigError:
        return None

"""The settings of a consumer, with Kafka's names and defaults.

Source: the "Consumer Configs" of the Apache Kafka documentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from mpbroker.base.config_def import (
    ConfigDef,
    ConfigError,
    ConfigKey,
    ConfigType,
    ConfigValue,
    Validator,
    at_least,
    one_of,
    utf8,
)
from mpbroker.client.assignor import ASSIGNORS, COOPERATIVE_STICKY, RANGE
from mpbroker.client.consumer.fetcher import (
    READ_COMMITTED,
    READ_UNCOMMITTED,
    FetchSettings,
)
from mpbroker.client.consumer.group_member import CLASSIC, CONSUMER, GroupSettings
from mpbroker.client.settings import (
    COMMON_KEYS,
    METRICS_PUSH_KEY,
    ClientSettings,
    integer,
    parse_settings,
    pick,
    text,
)

# The names of assignors in Kafka's own client.
_CLASSES: Final = {
    "org.apache.kafka.clients.consumer.RangeAssignor": RANGE,
    "org.apache.kafka.clients.consumer.RoundRobinAssignor": "roundrobin",
    "org.apache.kafka.clients.consumer.CooperativeStickyAssignor": COOPERATIVE_STICKY,
}


def _are_assignors(value: ConfigValue) -> bool:
    return (
        isinstance(value, tuple)
        and bool(value)
        and {_CLASSES.get(each, each) for each in value} <= ASSIGNORS.keys()
    )


# By group.protocol: the settings that only this protocol has. With the other one, the
# coordinator decides such things, or they have no meaning.
_OF_PROTOCOL: Final = {
    CLASSIC: (
        "partition.assignment.strategy",
        "session.timeout.ms",
        "heartbeat.interval.ms",
    ),
    CONSUMER: ("group.remote.assignor",),
}

# fmt: off
CONSUMER_CONFIG: Final = ConfigDef("consumer setting", (
    *COMMON_KEYS,
    METRICS_PUSH_KEY,
    ConfigKey("group.id", ConfigType.STRING, None,
        "Name of the consumer group; without it there are no commits.",
        validator=utf8()),
    ConfigKey("group.protocol", ConfigType.STRING, CLASSIC,
        "classic: members assign the partitions; consumer: the coordinator does, and no"
        " member waits for the others (KIP-848).",
        validator=one_of(CLASSIC, CONSUMER)),
    ConfigKey("group.remote.assignor", ConfigType.STRING, None,
        "With group.protocol=consumer: the coordinator's assignor, uniform or range;"
        " None: the group's.", validator=utf8()),
    ConfigKey("group.instance.id", ConfigType.STRING, None,
        "Name of a member that keeps its partitions while it restarts.",
        validator=utf8()),
    ConfigKey("partition.assignment.strategy", ConfigType.LIST,
        (RANGE, COOPERATIVE_STICKY),
        "Assignors; the group takes the first that all members have. With"
        " cooperative-sticky alone, members go on reading during a rebalance what stays"
        " theirs.",
        validator=Validator(
            "a comma-separated list of " + ", ".join(ASSIGNORS), _are_assignors
        )),
    ConfigKey("auto.offset.reset", ConfigType.STRING, "latest",
        "Where a partition without a committed offset begins.",
        validator=one_of("earliest", "latest", "none")),
    ConfigKey("enable.auto.commit", ConfigType.BOOLEAN, True,
        "Commit the offsets of what poll() returned, at intervals."),
    ConfigKey("auto.commit.interval.ms", ConfigType.INT, 5000,
        "Time between two of these commits.", validator=at_least(0)),
    ConfigKey("session.timeout.ms", ConfigType.INT, 45_000,
        "A member without heartbeats for so long leaves the group.",
        validator=at_least(1)),
    ConfigKey("heartbeat.interval.ms", ConfigType.INT, 3_000,
        "Time between two heartbeats of a member.", validator=at_least(1)),
    ConfigKey("max.poll.interval.ms", ConfigType.INT, 300_000,
        "A member that does not call poll() for so long leaves the group.",
        validator=at_least(1)),
    ConfigKey("max.poll.records", ConfigType.INT, 500,
        "Most records of one poll().", validator=at_least(1)),
    ConfigKey("fetch.max.wait.ms", ConfigType.INT, 500,
        "Longest time for which a broker waits for records.", validator=at_least(0)),
    ConfigKey("fetch.min.bytes", ConfigType.INT, 1,
        "A broker waits until it has so many bytes.", validator=at_least(0)),
    ConfigKey("fetch.max.bytes", ConfigType.INT, 52_428_800,
        "Most bytes of an answer.", validator=at_least(0)),
    ConfigKey("max.partition.fetch.bytes", ConfigType.INT, 1_048_576,
        "Most bytes of a partition in an answer.", validator=at_least(0)),
    ConfigKey("isolation.level", ConfigType.STRING, "read_uncommitted",
        "read_committed leaves out transactions that are aborted or not decided yet.",
        validator=one_of("read_uncommitted", "read_committed")),
    ConfigKey("allow.auto.create.topics", ConfigType.BOOLEAN, True,
        "Let the broker create a topic that is read and does not exist."),
))
# fmt: on


class ConsumerSettings(NamedTuple):
    """A consumer's settings as plain values; see `CONSUMER_CONFIG`."""

    client: ClientSettings
    group: GroupSettings | None
    fetch: FetchSettings
    auto_offset_reset: str
    enable_auto_commit: bool
    auto_commit_interval_ms: int
    max_poll_records: int
    read_committed: bool
    allow_auto_create_topics: bool
    enable_metrics_push: bool

    @classmethod
    def parse(cls, given: Mapping[str, object]) -> ConsumerSettings:
        """Check the settings that a user gave, and return all settings.

        Raises:
            ConfigError: a setting is wrong or missing; the text says which, and what to
                do.
            AddressError: bootstrap.servers cannot be read.
        """
        values = parse_settings(CONSUMER_CONFIG, given)
        read_committed = values["isolation.level"] == "read_committed"
        level = READ_COMMITTED if read_committed else READ_UNCOMMITTED
        return pick(
            cls,
            values,
            client=ClientSettings.of(values, max_in_flight=5).named_as_consumer(values),
            group=_group_settings(values, {n.replace("_", ".") for n in given}),
            fetch=pick(FetchSettings, values, isolation_level=level),
            read_committed=read_committed,
        )


def _group_settings(
    values: Mapping[str, ConfigValue], explicit: set[str]
) -> GroupSettings | None:
    """Return the settings of a group's member; None if group.id is not set.

    Raises:
        ConfigError: settings contradict each other.
    """
    group_id = text(values, "group.id")
    if not group_id:
        return None
    protocol = values["group.protocol"]
    for name in _OF_PROTOCOL[CLASSIC if protocol == CONSUMER else CONSUMER]:
        if name in explicit:
            raise ConfigError(
                f"{name} has no meaning with group.protocol={protocol}; leave it out"
            )
    session_ms = integer(values, "session.timeout.ms")
    heartbeat_ms = integer(values, "heartbeat.interval.ms")
    if heartbeat_ms >= session_ms:
        raise ConfigError(
            f"heartbeat.interval.ms={heartbeat_ms}: it must be below"
            f" session.timeout.ms={session_ms}; a third of it is usual"
        )
    assignors = values["partition.assignment.strategy"]
    assert isinstance(assignors, tuple)
    return pick(
        GroupSettings,
        values,
        assignors=tuple(dict.fromkeys(_CLASSES.get(each, each) for each in assignors)),
    )

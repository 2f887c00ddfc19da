"""Settings of a consumer, with Kafka's names and defaults.

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
from mpbroker.client.consumer.group_member import GroupSettings
from mpbroker.client.settings import (
    COMMON_KEYS,
    METRICS_PUSH_KEY,
    ClientSettings,
    integer,
    parse_settings,
    pick,
    text,
)

# How Kafka's own client spells them.
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


# fmt: off
CONSUMER_CONFIG: Final = ConfigDef("consumer setting", (
    *COMMON_KEYS,
    METRICS_PUSH_KEY,
    ConfigKey("group.id", ConfigType.STRING, None, "Whose positions are stored.",
        validator=utf8()),
    ConfigKey("group.instance.id", ConfigType.STRING, None,
        "Name of a member that keeps its partitions while it restarts.",
        validator=utf8()),
    ConfigKey("partition.assignment.strategy", ConfigType.LIST,
        (RANGE, COOPERATIVE_STICKY),
        "Who reads what; the first that all members know. With cooperative-sticky"
        " alone, members keep reading what stays theirs during a rebalance.",
        validator=Validator(
            "a comma-separated list of " + ", ".join(ASSIGNORS), _are_assignors
        )),
    ConfigKey("auto.offset.reset", ConfigType.STRING, "latest",
        "Where to begin without a position.",
        validator=one_of("earliest", "latest", "none")),
    ConfigKey("enable.auto.commit", ConfigType.BOOLEAN, True,
        "Store positions of what poll() returned, from time to time."),
    ConfigKey("auto.commit.interval.ms", ConfigType.INT, 5000,
        "How often that is.", validator=at_least(0)),
    ConfigKey("session.timeout.ms", ConfigType.INT, 45_000,
        "A member that is silent for so long is dead.", validator=at_least(1)),
    ConfigKey("heartbeat.interval.ms", ConfigType.INT, 3_000,
        "How often a member says it is alive.", validator=at_least(1)),
    ConfigKey("max.poll.interval.ms", ConfigType.INT, 300_000,
        "A member that does not poll for so long gives its partitions up.",
        validator=at_least(1)),
    ConfigKey("max.poll.records", ConfigType.INT, 500,
        "Records of one poll().", validator=at_least(1)),
    ConfigKey("fetch.max.wait.ms", ConfigType.INT, 500,
        "Brokers wait no longer for records.", validator=at_least(0)),
    ConfigKey("fetch.min.bytes", ConfigType.INT, 1,
        "Brokers wait until there is so much.", validator=at_least(0)),
    ConfigKey("fetch.max.bytes", ConfigType.INT, 52_428_800,
        "Bytes of one answer.", validator=at_least(0)),
    ConfigKey("max.partition.fetch.bytes", ConfigType.INT, 1_048_576,
        "Bytes of one partition in an answer.", validator=at_least(0)),
    ConfigKey("isolation.level", ConfigType.STRING, "read_uncommitted",
        "Whether aborted and undecided transactions are left out.",
        validator=one_of("read_uncommitted", "read_committed")),
    ConfigKey("allow.auto.create.topics", ConfigType.BOOLEAN, True,
        "Let the broker create a topic that is read, if it does that."),
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
        """Check what a user gave.

        Raises:
            ConfigError: says which setting, and what to do.
            AddressError: bootstrap.servers cannot be read.
        """
        values = parse_settings(CONSUMER_CONFIG, given)
        read_committed = values["isolation.level"] == "read_committed"
        level = READ_COMMITTED if read_committed else READ_UNCOMMITTED
        return pick(
            cls,
            values,
            client=ClientSettings.of(values, max_in_flight=5),
            group=_group_settings(values),
            fetch=pick(FetchSettings, values, isolation_level=level),
            read_committed=read_committed,
        )


def _group_settings(values: Mapping[str, ConfigValue]) -> GroupSettings | None:
    group_id = text(values, "group.id")
    if not group_id:
        return None
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

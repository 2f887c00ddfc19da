"""The broker's keys of groups, offsets, transactions and security.

Parsed, checked and kept, so that a file written for Kafka means here what it means
there. Replication factors default to 1 where Kafka's do to 3: there is one broker.

Source: "Broker Configs" of the Apache Kafka 4.x documentation.
"""

from __future__ import annotations

from typing import Final

from mpbroker.base.config_def import (
    ConfigError,
    ConfigType,
    at_least,
    between,
    list_of,
    one_of,
)
from mpbroker.config.broker_key import BrokerKey, Reader
from mpbroker.ipc.layout import MAX_PARTITIONS

_BOOLEAN, _INT, _LONG = ConfigType.BOOLEAN, ConfigType.INT, ConfigType.LONG
_SHORT, _STRING = ConfigType.SHORT, ConfigType.STRING
_LIST, _PASSWORD = ConfigType.LIST, ConfigType.PASSWORD

GROUP_KEYS: Final = [
    BrokerKey(
        "offsets.topic.num.partitions",
        _INT,
        50,
        "Partitions of the topic that holds committed offsets.",
        validator=between(1, MAX_PARTITIONS),
    ),
    BrokerKey(
        "offsets.topic.replication.factor",
        _SHORT,
        1,
        "Replicas of that topic. Kafka's default is 3; one broker holds one.",
        validator=at_least(1),
    ),
    BrokerKey(
        "offsets.topic.segment.bytes",
        _INT,
        104_857_600,
        "Segment size of that topic; small, so that compaction has closed segments.",
        validator=at_least(1),
    ),
    BrokerKey(
        "offsets.topic.compression.codec",
        _INT,
        0,
        "Codec of that topic: 0 none, 1 gzip, 2 snappy, 3 lz4, 4 zstd.",
        validator=between(0, 4),
    ),
    BrokerKey(
        "offsets.retention.minutes",
        _INT,
        10_080,
        "How long the offsets of a group without members are kept.",
        validator=at_least(1),
        reader=Reader.COORDINATOR,
    ),
    BrokerKey(
        "offsets.retention.check.interval.ms",
        _LONG,
        600_000,
        "Time between two looks for such offsets.",
        validator=at_least(1),
        reader=Reader.COORDINATOR,
    ),
    BrokerKey(
        "offsets.load.buffer.size",
        _INT,
        5_242_880,
        "Bytes read at a time when offsets are loaded at the start.",
        validator=at_least(1),
    ),
    BrokerKey(
        "offsets.commit.timeout.ms",
        _INT,
        5000,
        "A commit waits for the disk as long as that takes.",
        validator=at_least(1),
        has_effect=False,
    ),
    BrokerKey(
        "offset.metadata.max.bytes",
        _INT,
        4096,
        "Most bytes of the text that a client may keep with a committed offset.",
        validator=at_least(0),
        reader=Reader.COORDINATOR,
    ),
    BrokerKey(
        "group.initial.rebalance.delay.ms",
        _INT,
        3000,
        "How long the first member of a group waits for others to join.",
        validator=at_least(0),
        reader=Reader.COORDINATOR,
    ),
    BrokerKey(
        "group.min.session.timeout.ms",
        _INT,
        6000,
        "Shortest session timeout that a member may ask for.",
        validator=at_least(1),
        not_above="group.max.session.timeout.ms",
        reader=Reader.COORDINATOR,
    ),
    BrokerKey(
        "group.max.session.timeout.ms",
        _INT,
        1_800_000,
        "Longest session timeout that a member may ask for.",
        validator=at_least(1),
        reader=Reader.COORDINATOR,
    ),
    BrokerKey(
        "group.max.size",
        _INT,
        2_147_483_647,
        "Most members of a group.",
        validator=at_least(1),
        reader=Reader.COORDINATOR,
    ),
    BrokerKey(
        "group.coordinator.rebalance.protocols",
        _LIST,
        (
            "classic",
            "consumer",
        ),
        "Group protocols served.",
        validator=list_of("classic", "consumer", "share", "streams"),
    ),
    BrokerKey(
        "group.coordinator.threads",
        _INT,
        4,
        "One coordinator process owns all groups.",
        validator=at_least(1),
        has_effect=False,
    ),
    BrokerKey(
        "group.consumer.session.timeout.ms",
        _INT,
        45_000,
        "Session timeout of a member under the `consumer` protocol.",
        validator=at_least(1),
        reader=Reader.COORDINATOR,
    ),
    BrokerKey(
        "group.consumer.min.session.timeout.ms",
        _INT,
        45_000,
        "Least value of group.consumer.session.timeout.ms that a group may set.",
        validator=at_least(1),
        not_above="group.consumer.max.session.timeout.ms",
    ),
    BrokerKey(
        "group.consumer.max.session.timeout.ms",
        _INT,
        60_000,
        "Greatest value of group.consumer.session.timeout.ms that a group may set.",
        validator=at_least(1),
    ),
    BrokerKey(
        "group.consumer.heartbeat.interval.ms",
        _INT,
        5000,
        "Time between a member's heartbeats under the `consumer` protocol.",
        validator=at_least(1),
        reader=Reader.COORDINATOR,
    ),
    BrokerKey(
        "group.consumer.min.heartbeat.interval.ms",
        _INT,
        5000,
        "Least value of group.consumer.heartbeat.interval.ms that a group may set.",
        validator=at_least(1),
        not_above="group.consumer.max.heartbeat.interval.ms",
    ),
    BrokerKey(
        "group.consumer.max.heartbeat.interval.ms",
        _INT,
        15_000,
        "Greatest value of group.consumer.heartbeat.interval.ms that a group may set.",
        validator=at_least(1),
    ),
    BrokerKey(
        "group.consumer.max.size",
        _INT,
        2_147_483_647,
        "Most members of a group under the `consumer` protocol.",
        validator=at_least(1),
        reader=Reader.COORDINATOR,
    ),
    BrokerKey(
        "group.consumer.assignors",
        _LIST,
        (
            "uniform",
            "range",
        ),
        "Assignors offered under the `consumer` protocol; the first is the default.",
    ),
    BrokerKey(
        "group.consumer.migration.policy",
        _STRING,
        "bidirectional",
        "Whether a group may change between the two protocols while it runs.",
        validator=one_of("disabled", "downgrade", "upgrade", "bidirectional"),
    ),
]

TRANSACTION_KEYS: Final = [
    BrokerKey(
        "transaction.state.log.num.partitions",
        _INT,
        50,
        "Partitions of the topic that holds the state of transactions.",
        validator=between(1, MAX_PARTITIONS),
    ),
    BrokerKey(
        "transaction.state.log.replication.factor",
        _SHORT,
        1,
        "Replicas of that topic. Kafka's default is 3; one broker holds one.",
        validator=at_least(1),
    ),
    BrokerKey(
        "transaction.state.log.min.isr",
        _INT,
        1,
        "In-sync replicas that topic asks for. Kafka's default is 2; one broker has"
        " one.",
        validator=at_least(1),
    ),
    BrokerKey(
        "transaction.state.log.segment.bytes",
        _INT,
        104_857_600,
        "Segment size of that topic.",
        validator=at_least(1),
    ),
    BrokerKey(
        "transaction.state.log.load.buffer.size",
        _INT,
        5_242_880,
        "Bytes read at a time when that state is loaded at the start.",
        validator=at_least(1),
    ),
    BrokerKey(
        "transaction.max.timeout.ms",
        _INT,
        900_000,
        "Longest transaction timeout that a producer may ask for.",
        validator=at_least(1),
        reader=Reader.COORDINATOR,
    ),
    BrokerKey(
        "transaction.abort.timed.out.transaction.cleanup.interval.ms",
        _INT,
        10_000,
        "Time between two looks for transactions that timed out.",
        validator=at_least(1),
        reader=Reader.COORDINATOR,
    ),
    BrokerKey(
        "transaction.remove.expired.transaction.cleanup.interval.ms",
        _INT,
        3_600_000,
        "Time between two looks for transactional ids that expired.",
        validator=at_least(1),
        reader=Reader.COORDINATOR,
    ),
    BrokerKey(
        "transaction.partition.verification.enable",
        _BOOLEAN,
        True,
        "Whether a transactional write is checked to belong to a running transaction.",
        reader=Reader.HANDLER,
    ),
    BrokerKey(
        "transactional.id.expiration.ms",
        _INT,
        604_800_000,
        "Time after which an unused transactional id is forgotten.",
        validator=at_least(1),
        reader=Reader.COORDINATOR,
    ),
]

SECURITY_KEYS: Final = [
    BrokerKey(
        "authorizer.class.name",
        _STRING,
        "",
        "Who decides what clients may do; empty allows everybody everything. Kafka's"
        " org.apache.kafka.metadata.authorizer.StandardAuthorizer goes by ACLs in the"
        " metadata log; python:MODULE:CLASS, or the name of an entry point in the group"
        " mpbroker.authorizers, is an authorizer of your own: a subclass of"
        " mpbroker.extensions.Authorizer.",
    ),
    BrokerKey(
        "super.users",
        _STRING,
        "",
        "Principals that are allowed everything, as User:name, separated by"
        " semicolons.",
    ),
    BrokerKey(
        "allow.everyone.if.no.acl.found",
        _BOOLEAN,
        False,
        "Whether a resource that no ACL names is open to everybody.",
    ),
]


def check_internal_topics(offsets: int, transactions: int) -> None:
    """Refuse what a broker has no room for, of which each alone would have been.

    Args:
        offsets: offsets.topic.num.partitions.
        transactions: transaction.state.log.num.partitions.

    Raises:
        ConfigError: they are too many.
    """
    if offsets + transactions > MAX_PARTITIONS:
        raise ConfigError(
            f"offsets.topic.num.partitions={offsets} and"
            f" transaction.state.log.num.partitions={transactions}: together above"
            f" {MAX_PARTITIONS}, as many as a broker can have; lower one"
        )

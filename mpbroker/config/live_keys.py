"""Which settings can change while the broker serves, and who has to be told.

Kafka's documentation marks some as dynamic ("cluster-wide", "per-broker"). Here more
are: what a role's processes read when they start is changed by replacing them one by
one, which no client notices.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Final

from mpbroker.base.config_def import ConfigKey, UpdateMode
from mpbroker.config.security_keys import SECURITY_PROTOCOL_KEYS


class Reader(Enum):
    """Who reads a setting, and how a new value comes to it."""

    PAGE = "page"  # acceptors and processors, from shared memory (ipc/limits_page.py)
    POOLS = "pools"  # the supervisor, which resizes
    TOPICS = "topics"  # every view of the metadata log, as the default of topics
    SOCKETS = "sockets"  # the supervisor, which has the listen sockets
    RING = "ring"  # processors, as they start
    HANDLER = "handler"  # these, as they start
    COORDINATOR = "coordinator"
    HOUSEKEEPER = "housekeeper"
    EXPORTER = "exporter"
    SECURITY = "security"  # processors, from the metadata log, per new connection
    NOBODY = "nobody"  # kept for tools that set it


# Besides what the tables of keys say already.
_READERS: Final = {
    Reader.PAGE: (
        "connections.max.idle.ms",
        "max.connection.creation.rate",
        "max.connections",
        "max.connections.per.ip",
        "max.connections.per.ip.overrides",
        "socket.send.buffer.bytes",
    ),
    Reader.SOCKETS: ("socket.listen.backlog.size", "socket.receive.buffer.bytes"),
    Reader.POOLS: ("num.io.threads", "num.network.threads"),
    Reader.RING: ("queued.max.requests",),
    Reader.HANDLER: (
        "auto.create.topics.enable",
        "broker.rack",
        "delete.topic.enable",
        "fetch.max.bytes",
        "num.partitions",
        "producer.id.expiration.ms",
        "transaction.partition.verification.enable",
    ),
    Reader.COORDINATOR: (
        "group.consumer.heartbeat.interval.ms",
        "group.consumer.max.size",
        "group.consumer.session.timeout.ms",
        "group.initial.rebalance.delay.ms",
        "group.max.session.timeout.ms",
        "group.max.size",
        "group.min.session.timeout.ms",
        "offset.metadata.max.bytes",
        "offsets.retention.check.interval.ms",
        "offsets.retention.minutes",
        "transaction.abort.timed.out.transaction.cleanup.interval.ms",
        "transaction.max.timeout.ms",
        "transaction.remove.expired.transaction.cleanup.interval.ms",
        "transactional.id.expiration.ms",
    ),
    Reader.HOUSEKEEPER: (
        "log.cleaner.backoff.ms",
        "log.cleaner.dedupe.buffer.size",
        "log.cleaner.enable",
        "log.cleaner.io.max.bytes.per.second",
        "log.flush.offset.checkpoint.interval.ms",
        "log.flush.scheduler.interval.ms",
        "log.retention.check.interval.ms",
    ),
    Reader.EXPORTER: (
        "metrics.kafka.names.enable",
        "slow.request.log.threshold.ms",
    ),
    Reader.NOBODY: (
        "background.threads",
        "log.cleaner.io.buffer.load.factor",
        "log.cleaner.io.buffer.size",
        "log.cleaner.threads",
        "num.recovery.threads.per.data.dir",
        "num.replica.fetchers",
        "sasl.mechanism.inter.broker.protocol",
    ),
}

READER_OF: Final = {key: reader for reader, keys in _READERS.items() for key in keys}

# TLS and SASL: may only be set for one listener, and counts for new connections.
LISTENER_SECURITY: Final = frozenset(
    key.name
    for key in SECURITY_PROTOCOL_KEYS
    if key.name != "sasl.mechanism.inter.broker.protocol"
)

# May be set for one listener, as listener.name.NAME.KEY, or for all.
PER_LISTENER: Final = frozenset(
    {
        "max.connection.creation.rate",
        "max.connections",
        "num.network.threads",
        "socket.send.buffer.bytes",
    }
)


def reader_of(key: ConfigKey) -> Reader | None:
    """Who reads a setting that can change; None: it waits for the next start."""
    if key.name in READER_OF:
        return READER_OF[key.name]
    if key.name in LISTENER_SECURITY:
        return Reader.SECURITY
    return Reader.TOPICS if key.update_mode is UpdateMode.CLUSTER_WIDE else None


def with_live_modes(keys: Iterable[ConfigKey]) -> list[ConfigKey]:
    """Mark the keys that can change here although they cannot in Kafka, and prefixes.

    The keys themselves are changed: they are made once, for this.
    """
    marked = list(keys)
    for key in marked:
        if key.name in READER_OF and key.update_mode is UpdateMode.READ_ONLY:
            key.update_mode = UpdateMode.CLUSTER_WIDE
        if key.name in LISTENER_SECURITY:
            key.update_mode = UpdateMode.PER_BROKER
        if key.name in PER_LISTENER or key.name in LISTENER_SECURITY:
            key.per_listener = True
    return marked

"""The broker's keys for processes, network and logs.

Names, defaults and meanings are Kafka's; what differs says so. The keys of groups,
transactions and security are in coordinator_keys.py, and those that only set a
topic's default are derived in mpbroker.metadata.log_config_def.

Source: "Broker Configs" of the Apache Kafka 4.x documentation.
"""

from __future__ import annotations

from typing import Final

from mpbroker.base.config_def import (
    INT_MAX,
    ConfigError,
    ConfigType,
    Importance,
    Validator,
    at_least,
    between,
    minus_one_or,
    not_empty,
    one_of,
)
from mpbroker.config.broker_key import BrokerKey, ListenerPools, Reader
from mpbroker.config.listeners import connection_overrides
from mpbroker.config.machine import DEFAULT_LOG_DIRS, share_of_cores
from mpbroker.ipc.layout import MAX_HANDLERS, MAX_PARTITIONS, MAX_PROCESSORS

_BOOLEAN, _INT, _LONG = ConfigType.BOOLEAN, ConfigType.INT, ConfigType.LONG
_SHORT, _DOUBLE = ConfigType.SHORT, ConfigType.DOUBLE
_STRING, _LIST = ConfigType.STRING, ConfigType.LIST
_HIGH, _LOW = Importance.HIGH, Importance.LOW

HANDLERS_KEY: Final = "num.io.threads"
PROCESSORS_KEY: Final = "num.network.threads"


def _room_for_handlers(pools: ListenerPools) -> Validator:
    # Shared memory has room for so many; the control plane's is one of them.
    return between(1, MAX_HANDLERS - pools.has_control_plane)


def _room_for_processors(pools: ListenerPools) -> Validator:
    """Return what num.network.threads may be, which counts once a listener.

    Raises:
        ConfigError: listeners' own numbers leave too few for the others.
    """
    listeners, own = len(pools.names), pools.own_processors
    following = listeners - len(own)
    left = MAX_PROCESSORS - sum(own.values())
    if left < following:
        raise ConfigError(
            f"listener.name.NAME.{PROCESSORS_KEY}: {sum(own.values())} processors for"
            f" {len(own)} of {listeners} listeners; at most {MAX_PROCESSORS} can"
            " run over all listeners, at least 1 for each; lower them"
        )
    limits = between(1, left // max(1, following))
    if listeners == 1:
        return limits
    return Validator(
        f"{limits.limit}, since {listeners} listeners share at most {MAX_PROCESSORS}"
        f" processors (see listener.name.NAME.{PROCESSORS_KEY})",
        limits.accepts,
    )


SERVER_KEYS: Final = [
    # Kafka has no usable default (-1). 1 is what its own example files use, and one
    # broker needs no thought about numbers.
    BrokerKey(
        "node.id",
        _INT,
        1,
        "Number by which clients know this broker. It is written into the data"
        " directory and must not change afterwards.",
        validator=at_least(0),
        importance=_HIGH,
        aliases=("broker.id",),
    ),
    # Kafka binds every address by default. There is no authentication yet, so here
    # nobody outside the machine is served unless asked for.
    BrokerKey(
        "listeners",
        _LIST,
        ("PLAINTEXT://127.0.0.1:9092",),
        "Addresses to serve, as NAME://host:port. An empty host or 0.0.0.0 is every"
        " IPv4 address, [::] every address; port 0 lets the system choose. A Unix"
        " socket is NAME://unix:/path.",
        validator=not_empty(),
        importance=_HIGH,
    ),
    BrokerKey(
        "advertised.listeners",
        _LIST,
        None,
        "Addresses that clients are told to connect to, per listener. Unset, a client"
        " is told the address that it dialled; so is an empty host or a port 0.",
        importance=_HIGH,
    ),
    BrokerKey(
        "listener.security.protocol.map",
        _LIST,
        (
            "PLAINTEXT:PLAINTEXT",
            "SSL:SSL",
            "SASL_PLAINTEXT:SASL_PLAINTEXT",
            "SASL_SSL:SASL_SSL",
        ),
        "Security protocol of each listener name, as NAME:PROTOCOL.",
    ),
    BrokerKey(
        "inter.broker.listener.name",
        _STRING,
        None,
        "Listener whose clients may act as another broker. Checked to exist.",
    ),
    BrokerKey(
        "security.inter.broker.protocol",
        _STRING,
        "PLAINTEXT",
        "Security protocol between brokers; with one broker nothing uses it.",
        validator=one_of("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"),
    ),
    BrokerKey(
        "controller.listener.names",
        _LIST,
        (),
        "Listeners of a KRaft controller. There is no controller here: listeners named"
        " here are not opened, so that a file written for Kafka works as it is.",
    ),
    BrokerKey(
        "control.plane.listener.name",
        _STRING,
        None,
        "Listener with processes of its own, so that control requests never queue"
        " behind data.",
    ),
    BrokerKey(
        "num.network.threads",
        _INT,
        # Kafka's 3 and 8 are threads; here they are processes, and more of them than
        # cores only take turns: a second processor on two cores cost ApiVersions a
        # third more CPU a request.
        share_of_cores(2, at_least=1, at_most=3),
        "Processors per listener: processes that read and write connections.",
        validator=between(1, MAX_PROCESSORS),
        room=_room_for_processors,
        importance=_HIGH,
        reader=Reader.POOLS,
        per_listener=between(1, MAX_PROCESSORS),
    ),
    BrokerKey(
        "num.io.threads",
        _INT,
        share_of_cores(1, at_least=2, at_most=8),  # 2: one slow disk must not stop all
        "Request handlers: processes that execute requests, disk included.",
        validator=between(1, MAX_HANDLERS),
        room=_room_for_handlers,
        importance=_HIGH,
        reader=Reader.POOLS,
    ),
    BrokerKey(
        "background.threads",
        _INT,
        10,
        "One housekeeper does this work.",
        validator=at_least(1),
        reader=Reader.NONE,
        has_effect=False,
    ),
    BrokerKey(
        "num.replica.fetchers",
        _INT,
        1,
        "With one broker there is no other to fetch from.",
        validator=at_least(1),
        reader=Reader.NONE,
        has_effect=False,
    ),
    BrokerKey(
        "num.recovery.threads.per.data.dir",
        _INT,
        2,
        "A log is recovered by the process that needs it first.",
        validator=at_least(1),
        reader=Reader.NONE,
        has_effect=False,
    ),
    BrokerKey(
        "queued.max.requests",
        _INT,
        500,
        "Requests that may wait for a handler before processors stop reading.",
        validator=at_least(1),
        importance=_HIGH,
        reader=Reader.RING,
    ),
    BrokerKey(
        "queued.max.request.bytes",
        _LONG,
        -1,
        "Bytes of requests that may be in the broker at one time; -1 sizes that by"
        " the number of processors. At least socket.request.max.bytes.",
        validator=minus_one_or(at_least(1)),
    ),
    BrokerKey(
        "socket.send.buffer.bytes",
        _INT,
        # Kafka's 102400 switches the kernel's own sizing off; a 1 MiB fetch then cost
        # 1.35 times the CPU in alternating runs.
        -1,
        "SO_SNDBUF of a connection; -1 leaves it to the operating system, which is the"
        " default here (Kafka's is 102400).",
        validator=minus_one_or(at_least(1)),
        reader=Reader.PAGE,
        per_listener=True,
    ),
    BrokerKey(
        "socket.receive.buffer.bytes",
        _INT,
        # Likewise: 7-13 % of the CPU of a 1 MiB produce.
        -1,
        "SO_RCVBUF of a connection; -1 leaves it to the operating system, which is the"
        " default here (Kafka's is 102400).",
        validator=minus_one_or(at_least(1)),
        reader=Reader.SOCKETS,
    ),
    BrokerKey(
        "socket.request.max.bytes",
        _INT,
        104_857_600,
        "Largest request accepted; a connection that announces more is closed.",
        validator=at_least(1),
        importance=_HIGH,
    ),
    BrokerKey(
        "socket.listen.backlog.size",
        _INT,
        # As much as Linux allows by default. Who finds Kafka's 50 taken tries again a
        # second later: of 2,000 clients that came at once, 34 did, one after another,
        # and the last was let in after 35 s instead of one.
        4096,
        "Connections that may wait to be accepted (Kafka's default is 50); Linux caps"
        " it by net.core.somaxconn.",
        validator=at_least(1),
        reader=Reader.SOCKETS,
    ),
    BrokerKey(
        "max.connections",
        _INT,
        INT_MAX,
        "Connections open at one time on all listeners together.",
        validator=at_least(0),
        reader=Reader.PAGE,
        per_listener=at_least(1),
    ),
    BrokerKey(
        "max.connections.per.ip",
        _INT,
        INT_MAX,
        "Connections open at one time from one address.",
        validator=at_least(0),
        reader=Reader.PAGE,
    ),
    BrokerKey(
        "max.connections.per.ip.overrides",
        _LIST,
        (),
        "Exceptions to max.connections.per.ip, as host:count.",
        validator=connection_overrides(),
        reader=Reader.PAGE,
    ),
    BrokerKey(
        "max.connection.creation.rate",
        _INT,
        INT_MAX,
        "Connections accepted per second on all listeners together.",
        validator=at_least(0),
        reader=Reader.PAGE,
        per_listener=at_least(1),
    ),
    BrokerKey(
        "connections.max.idle.ms",
        _LONG,
        600_000,
        "Time without traffic after which a connection is closed; -1 never.",
        reader=Reader.PAGE,
    ),
    BrokerKey(
        "request.timeout.ms",
        _INT,
        30_000,
        "Longest time that the broker waits for an answer of its own requests.",
        validator=at_least(1),
    ),
    BrokerKey(
        "fetch.max.bytes",
        _INT,
        57_671_680,
        "Most bytes of records in one fetch response, whatever the client asks for.",
        validator=at_least(1024),
        reader=Reader.HANDLER,
    ),
    BrokerKey(
        "max.incremental.fetch.session.cache.slots",
        _INT,
        1000,
        "Fetch sessions kept; consumers beyond that send full requests.",
        validator=at_least(0),
    ),
    BrokerKey(
        "control.socket.path",
        _STRING,
        None,
        "Unix socket of mpbroker ctl. Not Kafka's. Default: control.sock in"
        " $RUNTIME_DIRECTORY under systemd, otherwise in the first of log.dirs.",
        importance=_LOW,
    ),
    BrokerKey(
        "control.inject.enable",
        _BOOLEAN,
        False,
        "Whether mpbroker ctl may inject faults, for tests (serve --enable-inject)."
        " Not Kafka's.",
        importance=_LOW,
    ),
    BrokerKey(
        "broker.rack",
        _STRING,
        None,
        "Place of this broker, told to clients that ask for the nearest replica.",
        reader=Reader.HANDLER,
    ),
    BrokerKey(
        "controlled.shutdown.enable",
        _BOOLEAN,
        True,
        "A stop is always controlled.",
        has_effect=False,
    ),
]

LOG_KEYS: Final = [
    BrokerKey(
        "log.dirs",
        _LIST,
        DEFAULT_LOG_DIRS,
        "Directories of the partitions' logs.",
        validator=not_empty(),
        importance=_HIGH,
        aliases=("log.dir",),
    ),
    BrokerKey(
        "num.partitions",
        _INT,
        1,
        "Partitions of a topic whose creator does not say.",
        validator=between(1, MAX_PARTITIONS),
        reader=Reader.HANDLER,
    ),
    BrokerKey(
        "default.replication.factor",
        _SHORT,
        1,
        "Replicas of a topic whose creator does not say. One broker can hold one.",
        validator=at_least(1),
    ),
    BrokerKey(
        "auto.create.topics.enable",
        _BOOLEAN,
        True,
        "Whether a client that asks for an unknown topic's metadata creates it.",
        importance=_HIGH,
        reader=Reader.HANDLER,
    ),
    BrokerKey(
        "delete.topic.enable",
        _BOOLEAN,
        True,
        "Whether topics may be deleted.",
        importance=_HIGH,
        reader=Reader.HANDLER,
    ),
    BrokerKey(
        "log.retention.check.interval.ms",
        _LONG,
        300_000,
        "Time between two looks for segments that retention lets go.",
        validator=at_least(1),
        reader=Reader.HOUSEKEEPER,
    ),
    BrokerKey(
        "log.cleaner.enable",
        _BOOLEAN,
        True,
        "Whether topics with cleanup.policy=compact are compacted.",
        reader=Reader.HOUSEKEEPER,
    ),
    BrokerKey(
        "log.cleaner.threads",
        _INT,
        1,
        "The housekeeper compacts one log at a time.",
        validator=at_least(0),
        reader=Reader.NONE,
        has_effect=False,
    ),
    BrokerKey(
        "log.cleaner.backoff.ms",
        _LONG,
        15_000,
        "Time between two looks for a log worth compacting.",
        validator=at_least(0),
        reader=Reader.HOUSEKEEPER,
    ),
    BrokerKey(
        "log.cleaner.dedupe.buffer.size",
        _LONG,
        134_217_728,
        "Memory for the keys of one compaction pass; more keys take more passes.",
        validator=at_least(1),
        reader=Reader.HOUSEKEEPER,
    ),
    BrokerKey(
        "log.cleaner.io.buffer.size",
        _INT,
        524_288,
        "Compaction decides by itself how much it reads at a time.",
        validator=at_least(1),
        reader=Reader.NONE,
        has_effect=False,
    ),
    BrokerKey(
        "log.cleaner.io.buffer.load.factor",
        _DOUBLE,
        0.9,
        "All of the dedupe buffer is filled.",
        validator=between(0, 1),
        reader=Reader.NONE,
        has_effect=False,
    ),
    BrokerKey(
        "log.cleaner.io.max.bytes.per.second",
        _DOUBLE,
        1.7976931348623157e308,
        "Most bytes per second that compaction reads and writes.",
        reader=Reader.HOUSEKEEPER,
    ),
    BrokerKey(
        "log.flush.offset.checkpoint.interval.ms",
        _INT,
        60_000,
        "Time between two writes of the recovery points.",
        validator=at_least(0),
        reader=Reader.HOUSEKEEPER,
    ),
    BrokerKey(
        "log.flush.start.offset.checkpoint.interval.ms",
        _INT,
        60_000,
        "Log start offsets are written with the recovery points, every"
        " log.flush.offset.checkpoint.interval.ms.",
        validator=at_least(0),
        has_effect=False,
    ),
    BrokerKey(
        "log.initial.task.delay.ms",
        _LONG,
        30_000,
        "Time after the start before retention and compaction begin.",
        validator=at_least(0),
        importance=_LOW,
    ),
    BrokerKey(
        "producer.id.expiration.ms",
        _INT,
        86_400_000,
        "Time after which an idempotent producer that stopped writing is forgotten.",
        validator=at_least(1),
        reader=Reader.HANDLER,
    ),
    BrokerKey(
        "producer.id.expiration.check.interval.ms",
        _INT,
        600_000,
        "Whoever appends to a log looks for such producers every ten minutes.",
        validator=at_least(1),
        importance=_LOW,
        has_effect=False,
    ),
]

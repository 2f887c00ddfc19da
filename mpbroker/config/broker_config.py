"""BrokerConfig: every setting of a broker, each as one row of a table.

A row says everything about a key: name, type, default, meaning, limits, which process
reads a new value while the broker serves, and whether a listener may have a value of
its own. The row is also an attribute: `config.num_io_threads` is the value of
num.io.threads, and has the type that the row declares. To add a setting, add a row.

Names, defaults and meanings are Kafka's; where they differ, the documentation of the
key says so. A key that only supplies a default of topics is in the table of topics
(metadata/log_config_def.py).

Source: "Broker Configs" of the Apache Kafka 4.x documentation; KIP-651 (PEM), KIP-768
(OAUTHBEARER), KIP-368 (sessions), KIP-371 (mapping rules), KIP-714 (clients' metrics).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from mpbroker.base.config_def import (
    INT_MAX,
    LISTENER_PREFIX,
    LONG_MAX,
    ConfigDef,
    ConfigError,
    ConfigType,
    ConfigValue,
    Importance,
    Validator,
    at_least,
    between,
    list_of,
    minus_one_or,
    not_empty,
    one_of,
    some_of,
    type_of,
)
from mpbroker.config.broker_key import BrokerKey, ListenerPools, Reader
from mpbroker.config.consistency import (
    check_cluster,
    check_directories,
    check_inter_broker,
    check_internal_topics,
    check_remote_storage,
    check_request_sizes,
    check_store_options,
    check_values,
)
from mpbroker.config.cores import available_cores
from mpbroker.config.kafka_keys import KEYS_WITHOUT_EFFECT
from mpbroker.config.listeners import (
    AdvertisedEndPoint,
    EndPoint,
    advertised_by_listener,
    check_listeners,
    check_planes,
    connection_overrides,
    exposure_warnings,
    parse_connection_overrides,
    parse_listeners,
    parse_protocol_map,
)
from mpbroker.config.machine import (
    DEFAULT_LOG_DIRS,
    Computed,
    Machine,
    of_variables,
    share_of_cores,
)
from mpbroker.config.metrics_settings import (
    check_otlp,
    default_attributes,
    default_endpoint,
    default_headers,
    parse_http_listener,
)
from mpbroker.config.plug_ins import RECEIVER_GROUP
from mpbroker.config.resolution import Resolution, ResolvedValue
from mpbroker.config.sources import (
    Setting,
    Source,
    settings_of_arguments,
    settings_of_environment,
    settings_of_file,
)
from mpbroker.ipc.layout import MAX_HANDLERS, MAX_PARTITIONS, MAX_PROCESSORS
from mpbroker.ipc.quota_layout import MAX_QUOTA_SAMPLES
from mpbroker.ipc.session_layout import MAX_SESSIONS
from mpbroker.metadata.log_config import defaults_of_broker
from mpbroker.metadata.log_config_def import BROKER_LOG_DEF

if TYPE_CHECKING:
    from pathlib import Path

_BOOLEAN: Final = ConfigType.BOOLEAN
_DOUBLE: Final = ConfigType.DOUBLE
_INT: Final = ConfigType.INT
_LIST: Final = ConfigType.LIST
_LONG: Final = ConfigType.LONG
_PASSWORD: Final = ConfigType.PASSWORD
_SHORT: Final = ConfigType.SHORT
_STRING: Final = ConfigType.STRING
_HIGH, _LOW = Importance.HIGH, Importance.LOW

# The samples of a quota lie in shared memory, which has room for so many. More samples
# remember a burst for longer.
_SAMPLES: Final = between(1, MAX_QUOTA_SAMPLES)
_SECONDS: Final = between(1, 3600)

T = TypeVar("T", bound=ConfigValue)


def _room_for_handlers(pools: ListenerPools) -> Validator:
    # Shared memory has room for MAX_HANDLERS; the control plane takes one of them.
    return between(1, MAX_HANDLERS - pools.has_control_plane)


def _room_for_processors(pools: ListenerPools) -> Validator:
    """Return the limits of num.network.threads, the processors of each listener.

    Raises:
        ConfigError: some listeners have so many processors of their own that too few
            are left for the other listeners.

    Together the listeners may have MAX_PROCESSORS.
    """
    listeners, own = pools.listeners, pools.own_processors
    following = listeners - len(own)
    left = MAX_PROCESSORS - sum(own.values())
    if left < following:
        raise ConfigError(
            f"listener.name.NAME.num.network.threads: {sum(own.values())} processors"
            f" for {len(own)} of {listeners} listeners; at most {MAX_PROCESSORS} can"
            " run over all listeners, at least 1 for each; lower them"
        )
    limits = between(1, left // max(1, following))
    if listeners == 1:
        return limits
    return Validator(
        f"{limits.limit}, since {listeners} listeners share at most {MAX_PROCESSORS}"
        f" processors (see listener.name.NAME.num.network.threads)",
        limits.accepts,
    )


def _topic_default(
    name: str, kind: type[T], reader: Reader | None = None, more: str = ""
) -> BrokerKey[T]:
    """Return the broker's key that sets the default of a topic config.

    Args:
        more: text to add to the documentation: what the broker does with the value.
    """
    key = BROKER_LOG_DEF.key(name)
    assert type_of[key.type] is kind
    row: BrokerKey[T] = BrokerKey.of_topics(key, reader)
    row.meaning += more
    return row


class BrokerConfig:
    """The settings of one broker: immutable, and checked when they are made.

    Besides one attribute for each key:

        endpoints: the listeners to open.
        advertised: the addresses that clients are told, by listener name.
        warnings: sentences about settings that have no effect or are dangerous.
        definition: the keys, with their defaults and limits on this machine.
    """

    # -- processes, listeners and connections ------------------------------------------

    # Kafka's default, -1, cannot be used. Its example files say 1.
    node_id = BrokerKey(
        "node.id",
        _INT,
        1,
        "Number by which clients know this broker. It is written into the data"
        " directory and must not change afterwards.",
        validator=at_least(0),
        importance=_HIGH,
        aliases=("broker.id",),
    )
    # Kafka's default is every address. Here other machines are served only if listeners
    # is set, because the default has neither TLS nor authentication.
    listeners = BrokerKey(
        "listeners",
        _LIST,
        ("PLAINTEXT://127.0.0.1:9092",),
        "Addresses to serve, as NAME://host:port. An empty host or [::] is every"
        " address of the machine, 0.0.0.0 is every IPv4 address. Port 0 lets the"
        " system choose a port. NAME://unix:/path is a Unix socket.",
        validator=not_empty(),
        importance=_HIGH,
    )
    advertised_listeners = BrokerKey(
        "advertised.listeners",
        _LIST,
        None,
        "Addresses that clients are told to connect to, one for each listener. A"
        " listener without one, or with an empty host or port 0, tells each client the"
        " address that the client connected to.",
        importance=_HIGH,
    )
    listener_security_protocol_map = BrokerKey(
        "listener.security.protocol.map",
        _LIST,
        (
            "PLAINTEXT:PLAINTEXT",
            "SSL:SSL",
            "SASL_PLAINTEXT:SASL_PLAINTEXT",
            "SASL_SSL:SASL_SSL",
        ),
        "Security protocol of each listener name, as NAME:PROTOCOL.",
    )
    inter_broker_listener_name = BrokerKey(
        "inter.broker.listener.name",
        _STRING,
        None,
        "Listener for other brokers. There are no other brokers, but as in Kafka its"
        " clients may connect although max.connections or max.connection.creation.rate"
        " is reached, if there is another listener. The name must be that of a"
        " listener.",
    )
    security_inter_broker_protocol = BrokerKey(
        "security.inter.broker.protocol",
        _STRING,
        "PLAINTEXT",
        "Security protocol between brokers. With one broker nothing uses it. Set"
        " either this or inter.broker.listener.name, not both.",
        validator=one_of("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"),
    )
    controller_listener_names = BrokerKey(
        "controller.listener.names",
        _LIST,
        (),
        "Listeners of a KRaft controller. There is no controller here: listeners with"
        " these names are not opened, so that a file made for Kafka works as it is.",
    )
    control_plane_listener_name = BrokerKey(
        "control.plane.listener.name",
        _STRING,
        None,
        "Listener with a processor, a handler and a queue of its own, so that metadata"
        " and administration requests do not wait behind data. It serves no produce or"
        " fetch requests.",
    )
    num_network_threads = BrokerKey(
        "num.network.threads",
        _INT,
        # Kafka's defaults, 3 and 8, are numbers of threads. Here they are processes,
        # and more processes than cores only take turns: a second processor on two
        # cores raised the CPU time of an ApiVersions request by a third.
        share_of_cores(2, at_least=1, at_most=3),
        "Processors for each listener: processes that read requests from connections"
        " and send responses.",
        validator=between(1, MAX_PROCESSORS),
        room=_room_for_processors,
        importance=_HIGH,
        reader=Reader.POOLS,
        per_listener=between(1, MAX_PROCESSORS),
    )
    num_io_threads = BrokerKey(
        "num.io.threads",
        _INT,
        # At least 2, so that one slow disk does not stop all requests.
        share_of_cores(1, at_least=2, at_most=8),
        "Request handlers: processes that execute requests, with their reads and"
        " writes of the disk.",
        validator=between(1, MAX_HANDLERS),
        room=_room_for_handlers,
        importance=_HIGH,
        reader=Reader.POOLS,
    )
    max_partitions = BrokerKey(
        "max.partitions",
        _INT,
        MAX_PARTITIONS,
        "Partitions that may exist at once, those of internal topics included. Each has"
        " a row of shared memory. The row of a deleted partition is used again when all"
        " processes have let go of it, which takes some seconds. Topics that are"
        " created because a client asks for them leave a quarter of the partitions to"
        " CreateTopics. Not a setting of Kafka.",
        validator=between(1, MAX_PARTITIONS),
    )
    background_threads = BrokerKey(
        "background.threads",
        _INT,
        10,
        "One housekeeper process does this work.",
        validator=at_least(1),
        reader=Reader.NONE,
        has_effect=False,
    )
    num_replica_fetchers = BrokerKey(
        "num.replica.fetchers",
        _INT,
        1,
        "With one broker there is no other broker to fetch from.",
        validator=at_least(1),
        reader=Reader.NONE,
        has_effect=False,
    )
    num_recovery_threads_per_data_dir = BrokerKey(
        "num.recovery.threads.per.data.dir",
        _INT,
        2,
        "The process that first needs a log recovers it.",
        validator=at_least(1),
        reader=Reader.NONE,
        has_effect=False,
    )
    queued_max_requests = BrokerKey(
        "queued.max.requests",
        _INT,
        500,
        "Requests that may wait for a handler. While as many wait, processors read no"
        " more.",
        validator=at_least(1),
        importance=_HIGH,
        reader=Reader.RING,
    )
    queued_max_request_bytes = BrokerKey(
        "queued.max.request.bytes",
        _LONG,
        -1,
        "Bytes of requests that may be in the broker at one time; -1 sizes this by the"
        " number of processors. It must be at least socket.request.max.bytes.",
        validator=minus_one_or(at_least(1)),
    )
    socket_send_buffer_bytes = BrokerKey(
        "socket.send.buffer.bytes",
        _INT,
        # Kafka's default, 102400, switches the kernel's own sizing off. With it a fetch
        # of 1 MiB took 1.35 times the CPU time, in alternating runs.
        -1,
        "SO_SNDBUF of a connection; -1 leaves the size to the operating system"
        " (Kafka's default is 102400).",
        validator=minus_one_or(at_least(1)),
        reader=Reader.PAGE,
        per_listener=True,
    )
    socket_receive_buffer_bytes = BrokerKey(
        "socket.receive.buffer.bytes",
        _INT,
        # For the same reason: 7-13 % of the CPU time of a produce of 1 MiB.
        -1,
        "SO_RCVBUF of a connection; -1 leaves the size to the operating system"
        " (Kafka's default is 102400).",
        validator=minus_one_or(at_least(1)),
        reader=Reader.SOCKETS,
    )
    socket_request_max_bytes = BrokerKey(
        "socket.request.max.bytes",
        _INT,
        104_857_600,
        "Largest request accepted. A connection that announces a larger request is"
        " closed.",
        validator=at_least(1),
        importance=_HIGH,
    )
    socket_listen_backlog_size = BrokerKey(
        "socket.listen.backlog.size",
        _INT,
        # As many as Linux allows by default. A client that finds the backlog full tries
        # again a second later. With Kafka's default, 50, that happened to 34 of 2,000
        # clients that connected at once, and the last one waited 35 s instead of 1 s.
        4096,
        "Connections that may wait to be accepted (Kafka's default is 50). Linux"
        " allows at most net.core.somaxconn.",
        validator=at_least(1),
        reader=Reader.SOCKETS,
    )
    max_connections = BrokerKey(
        "max.connections",
        _INT,
        INT_MAX,
        "Connections that may be open at one time, over all listeners.",
        validator=at_least(0),
        reader=Reader.PAGE,
        per_listener=at_least(1),
    )
    max_connections_per_ip = BrokerKey(
        "max.connections.per.ip",
        _INT,
        INT_MAX,
        "Connections that may be open at one time from one address.",
        validator=at_least(0),
        reader=Reader.PAGE,
    )
    max_connections_per_ip_overrides = BrokerKey(
        "max.connections.per.ip.overrides",
        _LIST,
        (),
        "Exceptions to max.connections.per.ip, as host:count.",
        validator=connection_overrides(),
        reader=Reader.PAGE,
    )
    max_connection_creation_rate = BrokerKey(
        "max.connection.creation.rate",
        _INT,
        INT_MAX,
        "Connections accepted per second, over all listeners.",
        validator=at_least(0),
        reader=Reader.PAGE,
        per_listener=at_least(1),
    )
    connections_max_idle_ms = BrokerKey(
        "connections.max.idle.ms",
        _LONG,
        600_000,
        "Time without traffic after which a connection is closed; 0 or less: never.",
        reader=Reader.PAGE,
    )
    request_timeout_ms = BrokerKey(
        "request.timeout.ms",
        _INT,
        30_000,
        "The broker sends no requests of its own.",
        validator=at_least(1),
        has_effect=False,
    )
    fetch_max_bytes = BrokerKey(
        "fetch.max.bytes",
        _INT,
        57_671_680,
        "Most bytes of records in one fetch response, even if the client asks for"
        " more.",
        validator=at_least(1024),
        reader=Reader.HANDLER,
    )
    max_incremental_fetch_session_cache_slots = BrokerKey(
        "max.incremental.fetch.session.cache.slots",
        _INT,
        1000,
        f"Fetch sessions kept, at most {MAX_SESSIONS}. A consumer for which there is"
        " no session sends full fetch requests.",
        validator=at_least(0),
    )
    control_socket_path = BrokerKey(
        "control.socket.path",
        _STRING,
        None,
        "Unix socket for mpbroker ctl. If it is not set: control.sock in"
        " $RUNTIME_DIRECTORY, which systemd sets, else in the first of log.dirs. Not a"
        " setting of Kafka.",
        importance=_LOW,
    )
    control_inject_enable = BrokerKey(
        "control.inject.enable",
        _BOOLEAN,
        False,
        "Whether mpbroker ctl inject may cause faults, for tests; serve"
        " --enable-inject sets it. Not a setting of Kafka.",
        importance=_LOW,
    )
    broker_rack = BrokerKey(
        "broker.rack",
        _STRING,
        None,
        "Rack or zone of this broker, as Metadata and DescribeCluster tell clients.",
        reader=Reader.HANDLER,
    )
    controlled_shutdown_enable = BrokerKey(
        "controlled.shutdown.enable",
        _BOOLEAN,
        True,
        "The broker always stops in a controlled way.",
        has_effect=False,
    )

    # -- logs --------------------------------------------------------------------------

    log_dirs = BrokerKey(
        "log.dirs",
        _LIST,
        DEFAULT_LOG_DIRS,
        "Directories for the logs of partitions.",
        validator=not_empty(),
        importance=_HIGH,
        aliases=("log.dir",),
    )
    num_partitions = BrokerKey(
        "num.partitions",
        _INT,
        1,
        "Partitions of a new topic, if the request that creates it does not say.",
        validator=between(1, MAX_PARTITIONS),
        reader=Reader.HANDLER,
    )
    default_replication_factor = BrokerKey(
        "default.replication.factor",
        _INT,
        1,
        "Replicas of a new topic, if the request that creates it does not say. One"
        " broker holds one replica; the broker warns of any other value and uses 1.",
        validator=at_least(1),
    )
    auto_create_topics_enable = BrokerKey(
        "auto.create.topics.enable",
        _BOOLEAN,
        True,
        "Whether the broker creates an unknown topic when a client asks for its"
        " metadata.",
        importance=_HIGH,
        reader=Reader.HANDLER,
    )
    delete_topic_enable = BrokerKey(
        "delete.topic.enable",
        _BOOLEAN,
        True,
        "Whether topics may be deleted.",
        importance=_HIGH,
        reader=Reader.HANDLER,
    )
    log_retention_check_interval_ms = BrokerKey(
        "log.retention.check.interval.ms",
        _LONG,
        300_000,
        "Time between two searches for segments that retention deletes.",
        validator=at_least(1),
        reader=Reader.HOUSEKEEPER,
    )
    log_cleaner_enable = BrokerKey(
        "log.cleaner.enable",
        _BOOLEAN,
        True,
        "Whether topics with cleanup.policy=compact are compacted.",
        reader=Reader.HOUSEKEEPER,
    )
    log_cleaner_threads = BrokerKey(
        "log.cleaner.threads",
        _INT,
        1,
        "Processes that compact logs, each one log at a time. They share"
        " log.cleaner.dedupe.buffer.size and log.cleaner.io.max.bytes.per.second.",
        validator=between(0, 64),
        reader=Reader.HOUSEKEEPER,
    )
    log_cleaner_backoff_ms = BrokerKey(
        "log.cleaner.backoff.ms",
        _LONG,
        15_000,
        "Time between two searches for a log that needs compaction.",
        validator=at_least(0),
        reader=Reader.HOUSEKEEPER,
    )
    log_cleaner_dedupe_buffer_size = BrokerKey(
        "log.cleaner.dedupe.buffer.size",
        _LONG,
        134_217_728,
        "Memory for the keys of one compaction pass. A log with more keys takes"
        " several passes.",
        validator=at_least(1),
        reader=Reader.HOUSEKEEPER,
    )
    log_cleaner_io_buffer_size = BrokerKey(
        "log.cleaner.io.buffer.size",
        _INT,
        524_288,
        "Compaction chooses how much it reads at a time.",
        validator=at_least(1),
        reader=Reader.NONE,
        has_effect=False,
    )
    log_cleaner_io_buffer_load_factor = BrokerKey(
        "log.cleaner.io.buffer.load.factor",
        _DOUBLE,
        0.9,
        "Compaction fills all of log.cleaner.dedupe.buffer.size.",
        validator=between(0, 1),
        reader=Reader.NONE,
        has_effect=False,
    )
    log_cleaner_io_max_bytes_per_second = BrokerKey(
        "log.cleaner.io.max.bytes.per.second",
        _DOUBLE,
        1.7976931348623157e308,
        "Most bytes per second that compaction reads and writes together.",
        reader=Reader.HOUSEKEEPER,
    )
    log_flush_offset_checkpoint_interval_ms = BrokerKey(
        "log.flush.offset.checkpoint.interval.ms",
        _INT,
        60_000,
        "Time between two writes of the recovery points.",
        validator=at_least(0),
        reader=Reader.HOUSEKEEPER,
    )
    log_flush_start_offset_checkpoint_interval_ms = BrokerKey(
        "log.flush.start.offset.checkpoint.interval.ms",
        _INT,
        60_000,
        "Log start offsets are written with the recovery points, every"
        " log.flush.offset.checkpoint.interval.ms.",
        validator=at_least(0),
        has_effect=False,
    )
    log_initial_task_delay_ms = BrokerKey(
        "log.initial.task.delay.ms",
        _LONG,
        30_000,
        "Time after the start before the housekeeper begins with retention,"
        " compaction, timed flushes and checkpoints. A task whose own interval is"
        " shorter begins after that interval.",
        validator=at_least(0),
        importance=_LOW,
    )
    producer_id_expiration_ms = BrokerKey(
        "producer.id.expiration.ms",
        _INT,
        86_400_000,
        "Time after which the broker forgets an idempotent producer that has stopped"
        " writing.",
        validator=at_least(1),
        reader=Reader.HANDLER,
    )
    producer_id_expiration_check_interval_ms = BrokerKey(
        "producer.id.expiration.check.interval.ms",
        _INT,
        600_000,
        "Every ten minutes, an append to a log looks for producers to forget.",
        validator=at_least(1),
        importance=_LOW,
        has_effect=False,
    )

    # -- remote storage ----------------------------------------------------------------

    remote_log_storage_system_enable = BrokerKey(
        "remote.log.storage.system.enable",
        _BOOLEAN,
        False,
        "Whether topics may keep closed segments in a remote store (tiered storage),"
        " which they do with remote.storage.enable. It needs remote.storage.url.",
    )
    remote_storage_url = BrokerKey(
        "remote.storage.url",
        _STRING,
        None,
        "The remote store: s3://BUCKET/PREFIX, gs://, az:// or file:///DIRECTORY. It"
        " belongs to this broker alone. Credentials are taken from the environment"
        " (AWS_ACCESS_KEY_ID...). Not a setting of Kafka.",
    )
    remote_storage_endpoint = BrokerKey(
        "remote.storage.endpoint",
        _STRING,
        None,
        "URL of the remote store's server, such as http://HOST:9000, if it is not the"
        " cloud's own. Without it AWS_ENDPOINT_URL of the environment counts, for S3."
        " Not a setting of Kafka.",
    )
    remote_storage_region = BrokerKey(
        "remote.storage.region",
        _STRING,
        None,
        "Region of a remote store that is S3 or like it. Without it AWS_REGION of the"
        " environment counts. Not a setting of Kafka.",
    )
    remote_storage_cache_bytes = BrokerKey(
        "remote.storage.cache.bytes",
        _LONG,
        1 << 30,
        "Size of the files with what was read from the remote store last, in the data"
        " directories. Not a setting of Kafka.",
        validator=at_least(1),
        reader=Reader.HOUSEKEEPER,
    )
    remote_log_manager_task_interval_ms = BrokerKey(
        "remote.log.manager.task.interval.ms",
        _LONG,
        30_000,
        "Time between two searches for segments to copy to the remote store, or to"
        " delete there.",
        validator=at_least(1),
        reader=Reader.HOUSEKEEPER,
    )
    remote_metadata_interval_ms = BrokerKey(
        "remote.metadata.interval.ms",
        _LONG,
        60_000,
        "Shortest time between two copies of the metadata log and of the committed"
        " offsets to the remote store, from which `mpbroker restore` makes a broker."
        " Not a setting of Kafka.",
        validator=at_least(1),
        reader=Reader.HOUSEKEEPER,
    )
    remote_log_manager_copy_max_bytes_per_second = BrokerKey(
        "remote.log.manager.copy.max.bytes.per.second",
        _LONG,
        LONG_MAX,
        "Rate at which segments are copied to the remote store, at most.",
        validator=at_least(1),
        reader=Reader.HOUSEKEEPER,
    )
    remote_log_manager_fetch_max_bytes_per_second = BrokerKey(
        "remote.log.manager.fetch.max.bytes.per.second",
        _LONG,
        LONG_MAX,
        "Rate at which records are read from the remote store, at most.",
        validator=at_least(1),
        reader=Reader.HOUSEKEEPER,
    )
    remote_log_manager_task_retry_backoff_ms = BrokerKey(
        "remote.log.manager.task.retry.backoff.ms",
        _LONG,
        500,
        "Time after which the remote store is asked again when it has failed; it"
        " doubles with each failure that follows.",
        validator=at_least(1),
    )
    remote_log_manager_task_retry_backoff_max_ms = BrokerKey(
        "remote.log.manager.task.retry.backoff.max.ms",
        _LONG,
        30_000,
        "Longest time after which the remote store is asked again.",
        validator=at_least(1),
    )
    remote_log_manager_task_retry_jitter = BrokerKey(
        "remote.log.manager.task.retry.jitter",
        _DOUBLE,
        0.2,
        "These times are longer or shorter by so much, as a part of them, by chance.",
        validator=between(0, 0.5),
    )
    remote_log_manager_copier_thread_pool_size = BrokerKey(
        "remote.log.manager.copier.thread.pool.size",
        _INT,
        10,
        "How many partitions' segments are copied to the remote store at a time. Of"
        " those above 8 MiB one is copied at a time, in four parts.",
        validator=between(1, 1000),
        reader=Reader.HOUSEKEEPER,
    )
    remote_log_reader_threads = BrokerKey(
        "remote.log.reader.threads",
        _INT,
        10,
        "How many pieces of 4 MiB are read from the remote store at a time.",
        validator=between(1, 1000),
        reader=Reader.HOUSEKEEPER,
    )
    remote_fetch_max_wait_ms = BrokerKey(
        "remote.fetch.max.wait.ms",
        _INT,
        500,
        "Longest time that a fetch waits for records from the remote store.",
        validator=at_least(1),
        reader=Reader.HANDLER,
    )

    # -- a cluster, under construction: docs/cluster.md --------------------------------

    cluster_database_url = BrokerKey(
        "cluster.database.url",
        _PASSWORD,
        None,
        "PostgreSQL database of the cluster that this broker is a node of:"
        " postgresql://USER@HOST[,HOST]/DATABASE, made by 'mpbroker cluster init'."
        " Under construction. Not a setting of Kafka.",
    )
    diskless_storage_url = BrokerKey(
        "diskless.storage.url",
        _STRING,
        None,
        "The store of the cluster's objects, as its database names it:"
        " s3://BUCKET/PREFIX, gs://, az:// or file:///DIRECTORY. Not a setting of"
        " Kafka.",
    )
    diskless_storage_endpoint = BrokerKey(
        "diskless.storage.endpoint",
        _STRING,
        None,
        "URL of that store's server, as remote.storage.endpoint. Not a setting of"
        " Kafka.",
    )
    diskless_storage_region = BrokerKey(
        "diskless.storage.region",
        _STRING,
        None,
        "Region of that store, as remote.storage.region. Not a setting of Kafka.",
    )
    diskless_append_commit_interval_ms = BrokerKey(
        "diskless.append.commit.interval.ms",
        _INT,
        250,
        "Longest time that records of shared topics wait for others to share an object"
        " with them. Not a setting of Kafka.",
        validator=at_least(1),
    )
    diskless_append_buffer_max_bytes = BrokerKey(
        "diskless.append.buffer.max.bytes",
        _INT,
        8 * 1024 * 1024,
        "Size of an object of shared topics from which on it does not wait for more"
        " records. Not a setting of Kafka.",
        validator=at_least(1),
    )

    # -- defaults of topics that the broker reads itself -------------------------------
    # All other defaults of topics are in metadata/log_config_def.py only.

    message_max_bytes = _topic_default("message.max.bytes", int)
    log_flush_scheduler_interval_ms = _topic_default(
        "log.flush.scheduler.interval.ms",
        int,
        Reader.HOUSEKEEPER,
        " The housekeeper looks as often for records that it has to force.",
    )

    # -- groups and committed offsets --------------------------------------------------

    offsets_topic_num_partitions = BrokerKey(
        "offsets.topic.num.partitions",
        _INT,
        50,
        "Partitions of __consumer_offsets, the topic that holds committed offsets.",
        validator=between(1, MAX_PARTITIONS),
    )
    offsets_topic_replication_factor = BrokerKey(
        "offsets.topic.replication.factor",
        _SHORT,
        1,
        "Replicas of __consumer_offsets (Kafka's default is 3). One broker holds one"
        " replica; the broker warns of any other value and uses 1.",
        validator=at_least(1),
    )
    offsets_topic_segment_bytes = BrokerKey(
        "offsets.topic.segment.bytes",
        _INT,
        104_857_600,
        "Segment size of __consumer_offsets. It is small because compaction works on"
        " closed segments.",
        validator=at_least(1),
    )
    offsets_topic_compression_codec = BrokerKey(
        "offsets.topic.compression.codec",
        _INT,
        0,
        "Compression codec of __consumer_offsets: 0 none, 1 gzip, 2 snappy, 3 lz4, 4"
        " zstd.",
        validator=between(0, 4),
    )
    offsets_retention_minutes = BrokerKey(
        "offsets.retention.minutes",
        _INT,
        10_080,
        "How long the committed offsets of a group without members are kept.",
        validator=at_least(1),
        reader=Reader.COORDINATOR,
    )
    offsets_retention_check_interval_ms = BrokerKey(
        "offsets.retention.check.interval.ms",
        _LONG,
        600_000,
        "Time between two searches for committed offsets that are no longer kept.",
        validator=at_least(1),
        reader=Reader.COORDINATOR,
    )
    offsets_load_buffer_size = BrokerKey(
        "offsets.load.buffer.size",
        _INT,
        5_242_880,
        "Bytes read at a time when the committed offsets are loaded at the start.",
        validator=at_least(1),
    )
    offsets_commit_timeout_ms = BrokerKey(
        "offsets.commit.timeout.ms",
        _INT,
        5000,
        "A commit takes as long as the disk takes.",
        validator=at_least(1),
        has_effect=False,
    )
    offset_metadata_max_bytes = BrokerKey(
        "offset.metadata.max.bytes",
        _INT,
        4096,
        "Largest text, in bytes, that a client may store with a committed offset.",
        validator=at_least(0),
        reader=Reader.COORDINATOR,
    )
    group_initial_rebalance_delay_ms = BrokerKey(
        "group.initial.rebalance.delay.ms",
        _INT,
        3000,
        "How long the first member of a new group waits for other members to join.",
        validator=at_least(0),
        reader=Reader.COORDINATOR,
    )
    group_min_session_timeout_ms = BrokerKey(
        "group.min.session.timeout.ms",
        _INT,
        6000,
        "Shortest session timeout that a member under the `classic` protocol may ask"
        " for.",
        validator=at_least(1),
        not_above="group.max.session.timeout.ms",
        reader=Reader.COORDINATOR,
    )
    group_max_session_timeout_ms = BrokerKey(
        "group.max.session.timeout.ms",
        _INT,
        1_800_000,
        "Longest session timeout that a member under the `classic` protocol may ask"
        " for. A rebalance waits no longer than that either, or than half an hour if"
        " that is more, whatever rebalance timeout its members ask for.",
        validator=at_least(1),
        reader=Reader.COORDINATOR,
    )
    group_max_size = BrokerKey(
        "group.max.size",
        _INT,
        2_147_483_647,
        "Most members of a group under the `classic` protocol.",
        validator=at_least(1),
        reader=Reader.COORDINATOR,
    )
    group_coordinator_rebalance_protocols = BrokerKey(
        "group.coordinator.rebalance.protocols",
        _LIST,
        (
            "classic",
            "consumer",
            "streams",
        ),
        "Group protocols served: `classic` and `share` always, `consumer` and"
        " `streams` if they are named.",
        validator=list_of("classic", "consumer", "share", "streams"),
    )
    group_coordinator_threads = BrokerKey(
        "group.coordinator.threads",
        _INT,
        4,
        "One coordinator process owns all groups.",
        validator=at_least(1),
        has_effect=False,
    )
    group_consumer_session_timeout_ms = BrokerKey(
        "group.consumer.session.timeout.ms",
        _INT,
        45_000,
        "Session timeout of a member under the `consumer` protocol, unless its group"
        " has one of its own.",
        validator=at_least(1),
        reader=Reader.COORDINATOR,
    )
    group_consumer_min_session_timeout_ms = BrokerKey(
        "group.consumer.min.session.timeout.ms",
        _INT,
        45_000,
        "Shortest session timeout that a group under the `consumer` protocol may have"
        " of its own.",
        validator=at_least(1),
        not_above="group.consumer.max.session.timeout.ms",
    )
    group_consumer_max_session_timeout_ms = BrokerKey(
        "group.consumer.max.session.timeout.ms",
        _INT,
        60_000,
        "Longest session timeout that a group under the `consumer` protocol may have"
        " of its own.",
        validator=at_least(1),
    )
    group_consumer_heartbeat_interval_ms = BrokerKey(
        "group.consumer.heartbeat.interval.ms",
        _INT,
        5000,
        "Time between the heartbeats of a member under the `consumer` protocol, unless"
        " its group has an interval of its own.",
        validator=at_least(1),
        reader=Reader.COORDINATOR,
    )
    group_consumer_min_heartbeat_interval_ms = BrokerKey(
        "group.consumer.min.heartbeat.interval.ms",
        _INT,
        5000,
        "Shortest heartbeat interval that a group under the `consumer` protocol may"
        " have of its own.",
        validator=at_least(1),
        not_above="group.consumer.max.heartbeat.interval.ms",
    )
    group_consumer_max_heartbeat_interval_ms = BrokerKey(
        "group.consumer.max.heartbeat.interval.ms",
        _INT,
        15_000,
        "Longest heartbeat interval that a group under the `consumer` protocol may"
        " have of its own.",
        validator=at_least(1),
    )
    group_consumer_max_size = BrokerKey(
        "group.consumer.max.size",
        _INT,
        2_147_483_647,
        "Most members of a group under the `consumer` protocol.",
        validator=at_least(1),
        reader=Reader.COORDINATOR,
    )
    group_consumer_assignors = BrokerKey(
        "group.consumer.assignors",
        _LIST,
        (
            "uniform",
            "range",
        ),
        "Assignors offered under the `consumer` protocol; the first is the default.",
        validator=some_of("uniform", "range"),
    )
    group_consumer_migration_policy = BrokerKey(
        "group.consumer.migration.policy",
        _STRING,
        "bidirectional",
        "Which way a group may change its protocol while it has members: from"
        " `classic` to `consumer` (upgrade), back (downgrade), both or neither.",
        validator=one_of("disabled", "downgrade", "upgrade", "bidirectional"),
    )

    # -- streams groups ----------------------------------------------------------------

    group_streams_session_timeout_ms = BrokerKey(
        "group.streams.session.timeout.ms",
        _INT,
        45_000,
        "Session timeout of a member of a streams group, unless its group has one"
        " of its own.",
        validator=at_least(1),
    )
    group_streams_min_session_timeout_ms = BrokerKey(
        "group.streams.min.session.timeout.ms",
        _INT,
        45_000,
        "Smallest `streams.session.timeout.ms` that a group may have.",
        validator=at_least(1),
        not_above="group.streams.max.session.timeout.ms",
    )
    group_streams_max_session_timeout_ms = BrokerKey(
        "group.streams.max.session.timeout.ms",
        _INT,
        60_000,
        "Largest `streams.session.timeout.ms` that a group may have.",
        validator=at_least(1),
    )
    group_streams_heartbeat_interval_ms = BrokerKey(
        "group.streams.heartbeat.interval.ms",
        _INT,
        5000,
        "Time between the heartbeats of a member of a streams group, unless its"
        " group has an interval of its own.",
        validator=at_least(1),
    )
    group_streams_min_heartbeat_interval_ms = BrokerKey(
        "group.streams.min.heartbeat.interval.ms",
        _INT,
        5000,
        "Smallest `streams.heartbeat.interval.ms` that a group may have.",
        validator=at_least(1),
        not_above="group.streams.max.heartbeat.interval.ms",
    )
    group_streams_max_heartbeat_interval_ms = BrokerKey(
        "group.streams.max.heartbeat.interval.ms",
        _INT,
        15_000,
        "Largest `streams.heartbeat.interval.ms` that a group may have.",
        validator=at_least(1),
    )
    group_streams_max_size = BrokerKey(
        "group.streams.max.size",
        _INT,
        2_147_483_647,
        "Most members of a streams group.",
        validator=at_least(1),
    )
    group_streams_num_standby_replicas = BrokerKey(
        "group.streams.num.standby.replicas",
        _INT,
        0,
        "Standbys of each task with state, unless the group has a number of its own.",
        validator=at_least(0),
        not_above="group.streams.max.standby.replicas",
    )
    group_streams_max_standby_replicas = BrokerKey(
        "group.streams.max.standby.replicas",
        _INT,
        2,
        "Most `streams.num.standby.replicas` that a group may have.",
        validator=at_least(0),
    )
    group_streams_initial_rebalance_delay_ms = BrokerKey(
        "group.streams.initial.rebalance.delay.ms",
        _INT,
        3000,
        "How long a new streams group waits for more members before its first"
        " assignment, unless the group has a delay of its own.",
        validator=at_least(0),
    )
    group_streams_assignment_interval_ms = BrokerKey(
        "group.streams.assignment.interval.ms",
        _INT,
        1000,
        "A target assignment is made with each change of a streams group.",
        validator=at_least(0),
        has_effect=False,
        reader=Reader.NONE,
    )
    group_streams_min_assignment_interval_ms = BrokerKey(
        "group.streams.min.assignment.interval.ms",
        _INT,
        0,
        "A target assignment is made with each change of a streams group.",
        validator=at_least(0),
        has_effect=False,
    )
    group_streams_max_assignment_interval_ms = BrokerKey(
        "group.streams.max.assignment.interval.ms",
        _INT,
        15_000,
        "A target assignment is made with each change of a streams group.",
        validator=at_least(0),
        has_effect=False,
    )

    # -- share groups ------------------------------------------------------------------

    group_share_session_timeout_ms = BrokerKey(
        "group.share.session.timeout.ms",
        _INT,
        45_000,
        "Session timeout of a member of a share group, unless its group has one"
        " of its own.",
        validator=at_least(1),
    )
    group_share_min_session_timeout_ms = BrokerKey(
        "group.share.min.session.timeout.ms",
        _INT,
        45_000,
        "Smallest `share.session.timeout.ms` that a group may have.",
        validator=at_least(1),
        not_above="group.share.max.session.timeout.ms",
    )
    group_share_max_session_timeout_ms = BrokerKey(
        "group.share.max.session.timeout.ms",
        _INT,
        60_000,
        "Largest `share.session.timeout.ms` that a group may have.",
        validator=at_least(1),
    )
    group_share_heartbeat_interval_ms = BrokerKey(
        "group.share.heartbeat.interval.ms",
        _INT,
        5000,
        "Time between the heartbeats of a member of a share group, unless its"
        " group has an interval of its own.",
        validator=at_least(1),
    )
    group_share_min_heartbeat_interval_ms = BrokerKey(
        "group.share.min.heartbeat.interval.ms",
        _INT,
        5000,
        "Smallest `share.heartbeat.interval.ms` that a group may have.",
        validator=at_least(1),
        not_above="group.share.max.heartbeat.interval.ms",
    )
    group_share_max_heartbeat_interval_ms = BrokerKey(
        "group.share.max.heartbeat.interval.ms",
        _INT,
        15_000,
        "Largest `share.heartbeat.interval.ms` that a group may have.",
        validator=at_least(1),
    )
    group_share_max_size = BrokerKey(
        "group.share.max.size",
        _INT,
        200,
        "Most members of a share group.",
        validator=between(1, 1000),
    )
    group_share_assignors = BrokerKey(
        "group.share.assignors",
        _LIST,
        ("simple",),
        "Assignors of share groups; there is one.",
        validator=some_of("simple"),
        has_effect=False,
    )
    group_share_max_share_sessions = BrokerKey(
        "group.share.max.share.sessions",
        _INT,
        2000,
        "Most share sessions: members of share groups that fetch.",
        validator=at_least(1),
    )
    group_share_delivery_count_limit = BrokerKey(
        "group.share.delivery.count.limit",
        _INT,
        5,
        "Most deliveries of a record to a share group, unless its group has a"
        " limit of its own.",
        validator=between(2, 10),
    )
    group_share_min_delivery_count_limit = BrokerKey(
        "group.share.min.delivery.count.limit",
        _INT,
        2,
        "Smallest `share.delivery.count.limit` that a group may have.",
        validator=between(2, 5),
        not_above="group.share.max.delivery.count.limit",
    )
    group_share_max_delivery_count_limit = BrokerKey(
        "group.share.max.delivery.count.limit",
        _INT,
        10,
        "Largest `share.delivery.count.limit` that a group may have.",
        validator=between(5, 25),
    )
    group_share_record_lock_duration_ms = BrokerKey(
        "group.share.record.lock.duration.ms",
        _INT,
        30_000,
        "How long a member of a share group may keep a record before it is"
        " delivered again, unless its group has a time of its own.",
        validator=between(1000, 3_600_000),
    )
    group_share_min_record_lock_duration_ms = BrokerKey(
        "group.share.min.record.lock.duration.ms",
        _INT,
        15_000,
        "Smallest `share.record.lock.duration.ms` that a group may have.",
        validator=between(1000, 30_000),
        not_above="group.share.max.record.lock.duration.ms",
    )
    group_share_max_record_lock_duration_ms = BrokerKey(
        "group.share.max.record.lock.duration.ms",
        _INT,
        60_000,
        "Largest `share.record.lock.duration.ms` that a group may have.",
        validator=between(30_000, 3_600_000),
    )
    group_share_partition_max_record_locks = BrokerKey(
        "group.share.partition.max.record.locks",
        _INT,
        2000,
        "Most records of a partition that are delivered to a share group and"
        " not finished, unless its group has a limit of its own.",
        validator=between(100, 10_000),
    )
    group_share_min_partition_max_record_locks = BrokerKey(
        "group.share.min.partition.max.record.locks",
        _INT,
        100,
        "Smallest `share.partition.max.record.locks` that a group may have.",
        validator=between(100, 2000),
        not_above="group.share.max.partition.max.record.locks",
    )
    group_share_max_partition_max_record_locks = BrokerKey(
        "group.share.max.partition.max.record.locks",
        _INT,
        4000,
        "Largest `share.partition.max.record.locks` that a group may have.",
        validator=between(2000, 10_000),
    )
    group_share_assignment_interval_ms = BrokerKey(
        "group.share.assignment.interval.ms",
        _INT,
        1000,
        "A target assignment is made with each change of a share group.",
        validator=at_least(0),
        has_effect=False,
        reader=Reader.NONE,
    )
    group_share_min_assignment_interval_ms = BrokerKey(
        "group.share.min.assignment.interval.ms",
        _INT,
        0,
        "A target assignment is made with each change of a share group.",
        validator=at_least(0),
        has_effect=False,
    )
    group_share_max_assignment_interval_ms = BrokerKey(
        "group.share.max.assignment.interval.ms",
        _INT,
        15_000,
        "A target assignment is made with each change of a share group.",
        validator=at_least(0),
        has_effect=False,
    )
    share_coordinator_state_topic_num_partitions = BrokerKey(
        "share.coordinator.state.topic.num.partitions",
        _INT,
        # Each turn of the coordinator forces to disk all the logs to which it has
        # written. With 50 partitions that is about one log for each request that
        # acknowledges. CPU of a ShareFetch by 50 consumers, in turns: 353 us with 50
        # partitions, 296 with 8, 280 with 4, 247 with 1; that of a Fetch: 153. Kafka
        # does not wait for its disk.
        4,
        "Partitions of __share_group_state, the topic that holds the state of"
        " share groups in their partitions (Kafka's default is 50). An acknowledgement"
        " is answered when it is on disk; the fewer partitions, the more of them share"
        " a sync. A topic that exists keeps its number.",
        validator=between(1, MAX_PARTITIONS),
    )
    share_coordinator_state_topic_replication_factor = BrokerKey(
        "share.coordinator.state.topic.replication.factor",
        _SHORT,
        1,
        "Replicas of __share_group_state (Kafka's default is 3). One broker"
        " holds one replica; the broker warns of any other value and uses 1.",
        validator=at_least(1),
    )
    share_coordinator_state_topic_min_isr = BrokerKey(
        "share.coordinator.state.topic.min.isr",
        _SHORT,
        1,
        "The min.insync.replicas of __share_group_state (Kafka's default is 2)."
        " DescribeConfigs shows it; it has no effect, as one broker has one"
        " replica.",
        validator=at_least(1),
    )
    share_coordinator_state_topic_segment_bytes = BrokerKey(
        "share.coordinator.state.topic.segment.bytes",
        _INT,
        104_857_600,
        "Segment size of __share_group_state.",
        validator=at_least(1),
    )
    share_coordinator_load_buffer_size = BrokerKey(
        "share.coordinator.load.buffer.size",
        _INT,
        5_242_880,
        "Bytes read at a time when the state of share groups is loaded at the start.",
        validator=at_least(1),
    )
    share_coordinator_snapshot_update_records_per_snapshot = BrokerKey(
        "share.coordinator.snapshot.update.records.per.snapshot",
        _INT,
        500,
        "Changes of a share group's state in a partition that are written"
        " before the whole state is written again.",
        validator=between(0, 500),
    )

    # -- transactions ------------------------------------------------------------------

    transaction_state_log_num_partitions = BrokerKey(
        "transaction.state.log.num.partitions",
        _INT,
        50,
        "Partitions of __transaction_state, the topic that holds the state of"
        " transactions.",
        validator=between(1, MAX_PARTITIONS),
    )
    transaction_state_log_replication_factor = BrokerKey(
        "transaction.state.log.replication.factor",
        _SHORT,
        1,
        "Replicas of __transaction_state (Kafka's default is 3). One broker holds one"
        " replica; the broker warns of any other value and uses 1.",
        validator=at_least(1),
    )
    transaction_state_log_min_isr = BrokerKey(
        "transaction.state.log.min.isr",
        _INT,
        1,
        "The min.insync.replicas of __transaction_state (Kafka's default is 2)."
        " DescribeConfigs shows it; it has no effect, as one broker has one replica.",
        validator=at_least(1),
    )
    transaction_state_log_segment_bytes = BrokerKey(
        "transaction.state.log.segment.bytes",
        _INT,
        104_857_600,
        "Segment size of __transaction_state.",
        validator=at_least(1),
    )
    transaction_state_log_load_buffer_size = BrokerKey(
        "transaction.state.log.load.buffer.size",
        _INT,
        5_242_880,
        "Bytes read at a time when the state of transactions is loaded at the start.",
        validator=at_least(1),
    )
    transaction_max_timeout_ms = BrokerKey(
        "transaction.max.timeout.ms",
        _INT,
        900_000,
        "Longest transaction timeout that a producer may ask for.",
        validator=at_least(1),
        reader=Reader.COORDINATOR,
    )
    transaction_abort_timed_out_transaction_cleanup_interval_ms = BrokerKey(
        "transaction.abort.timed.out.transaction.cleanup.interval.ms",
        _INT,
        10_000,
        "Time between two searches for transactions that have timed out.",
        validator=at_least(1),
        reader=Reader.COORDINATOR,
    )
    transaction_remove_expired_transaction_cleanup_interval_ms = BrokerKey(
        "transaction.remove.expired.transaction.cleanup.interval.ms",
        _INT,
        3_600_000,
        "Time between two searches for transactional ids that have expired.",
        validator=at_least(1),
        reader=Reader.COORDINATOR,
    )
    transaction_partition_verification_enable = BrokerKey(
        "transaction.partition.verification.enable",
        _BOOLEAN,
        True,
        "Whether the broker refuses a transactional write that belongs to no open"
        " transaction.",
        reader=Reader.HANDLER,
    )
    transactional_id_expiration_ms = BrokerKey(
        "transactional.id.expiration.ms",
        _INT,
        604_800_000,
        "Time after which the broker forgets a transactional id that is not used.",
        validator=at_least(1),
        reader=Reader.COORDINATOR,
    )

    # -- authorization -----------------------------------------------------------------

    authorizer_class_name = BrokerKey(
        "authorizer.class.name",
        _STRING,
        "",
        "Class that decides what each client may do; empty: every client may do"
        " everything. org.apache.kafka.metadata.authorizer.StandardAuthorizer decides"
        " by the ACLs in the metadata log, as in Kafka. python:MODULE:CLASS, or the"
        " name of an entry point in the group mpbroker.authorizers, is a class of your"
        " own: a subclass of mpbroker.extensions.Authorizer.",
    )
    super_users = BrokerKey(
        "super.users",
        _STRING,
        "",
        "Principals that may do everything, as User:name, separated by semicolons.",
    )
    allow_everyone_if_no_acl_found = BrokerKey(
        "allow.everyone.if.no.acl.found",
        _BOOLEAN,
        False,
        "Whether every client may use a resource that no ACL names.",
    )

    # -- delegation tokens -------------------------------------------------------------

    delegation_token_secret_key = BrokerKey(
        "delegation.token.secret.key",
        _PASSWORD,
        None,
        "Secret by which delegation tokens are made and checked. Without it there are"
        " none. Another secret makes the tokens that exist useless.",
    )
    delegation_token_max_lifetime_ms = BrokerKey(
        "delegation.token.max.lifetime.ms",
        _LONG,
        604_800_000,
        "Longest lifetime of a delegation token, however often it is renewed.",
        validator=at_least(1),
    )
    delegation_token_expiry_time_ms = BrokerKey(
        "delegation.token.expiry.time.ms",
        _LONG,
        86_400_000,
        "How long a delegation token is valid after it was made or renewed.",
        validator=at_least(1),
    )
    delegation_token_expiry_check_interval_ms = BrokerKey(
        "delegation.token.expiry.check.interval.ms",
        _LONG,
        3_600_000,
        "How often delegation tokens that have expired are removed.",
        validator=at_least(1),
    )

    # -- TLS and SASL ------------------------------------------------------------------

    sasl_enabled_mechanisms = BrokerKey(
        "sasl.enabled.mechanisms",
        _LIST,
        ("GSSAPI",),
        "SASL mechanisms offered: PLAIN, SCRAM-SHA-256, SCRAM-SHA-512, OAUTHBEARER."
        " Kafka's default, GSSAPI (Kerberos), is not served: a listener with SASL has"
        " to set others.",
        reader=Reader.SECURITY,
        per_listener=True,
        per_mechanism=True,
    )
    sasl_jaas_config = BrokerKey(
        "sasl.jaas.config",
        _PASSWORD,
        None,
        "Login settings of a SASL mechanism, set as"
        " listener.name.<listener>.<mechanism>.sasl.jaas.config. PLAIN takes its users"
        ' from it, for example user_alice="password".',
        reader=Reader.SECURITY,
        per_listener=True,
        per_mechanism=True,
    )
    sasl_mechanism_inter_broker_protocol = BrokerKey(
        "sasl.mechanism.inter.broker.protocol",
        _STRING,
        "GSSAPI",
        "With one broker there is no other broker to log in to.",
        reader=Reader.NONE,
        has_effect=False,
    )
    connection_failed_authentication_delay_ms = BrokerKey(
        "connection.failed.authentication.delay.ms",
        _INT,
        100,
        "How long the broker holds back its answer to a failed authentication.",
        validator=at_least(0),
        reader=Reader.SECURITY,
        per_listener=True,
    )
    connections_max_reauth_ms = BrokerKey(
        "connections.max.reauth.ms",
        _LONG,
        0,
        "Time after which a SASL connection must authenticate again; 0: never.",
        validator=at_least(0),
        reader=Reader.SECURITY,
        per_listener=True,
        per_mechanism=True,
    )
    ssl_client_auth = BrokerKey(
        "ssl.client.auth",
        _STRING,
        "none",
        "Whether a client must (required), may (requested) or need not (none) show a"
        " certificate.",
        validator=one_of("required", "requested", "none"),
        reader=Reader.SECURITY,
        per_listener=True,
    )
    ssl_protocol = BrokerKey(
        "ssl.protocol",
        _STRING,
        "TLSv1.3",
        "The setting ssl.enabled.protocols says which versions of TLS are offered.",
        reader=Reader.SECURITY,
        per_listener=True,
        has_effect=False,
    )
    ssl_enabled_protocols = BrokerKey(
        "ssl.enabled.protocols",
        _LIST,
        (
            "TLSv1.2",
            "TLSv1.3",
        ),
        "Versions of TLS that are offered.",
        validator=list_of("TLSv1.2", "TLSv1.3"),
        reader=Reader.SECURITY,
        per_listener=True,
    )
    ssl_cipher_suites = BrokerKey(
        "ssl.cipher.suites",
        _LIST,
        (),
        "Cipher suites that are offered, under their Java or OpenSSL names; empty:"
        " OpenSSL's choice. The suites of TLSv1.3 are offered together or not at all.",
        reader=Reader.SECURITY,
        per_listener=True,
    )
    ssl_keystore_type = BrokerKey(
        "ssl.keystore.type",
        _STRING,
        "JKS",
        "A key store is read as PEM, whatever type is set.",
        reader=Reader.SECURITY,
        per_listener=True,
        only_per_listener=True,
        has_effect=False,
        holds_anyway="PEM",
    )
    ssl_keystore_location = BrokerKey(
        "ssl.keystore.location",
        _STRING,
        None,
        "File in PEM with the broker's private key and certificates. It is read again"
        " when it changes.",
        reader=Reader.SECURITY,
        per_listener=True,
        only_per_listener=True,
    )
    ssl_keystore_password = BrokerKey(
        "ssl.keystore.password",
        _PASSWORD,
        None,
        "Only the private key in a PEM file may be encrypted: see ssl.key.password.",
        reader=Reader.SECURITY,
        per_listener=True,
        only_per_listener=True,
        has_effect=False,
    )
    ssl_keystore_key = BrokerKey(
        "ssl.keystore.key",
        _PASSWORD,
        None,
        "The private key itself, in PEM.",
        reader=Reader.SECURITY,
        per_listener=True,
        only_per_listener=True,
    )
    ssl_keystore_certificate_chain = BrokerKey(
        "ssl.keystore.certificate.chain",
        _PASSWORD,
        None,
        "The certificate chain itself, in PEM.",
        reader=Reader.SECURITY,
        per_listener=True,
        only_per_listener=True,
    )
    ssl_key_password = BrokerKey(
        "ssl.key.password",
        _PASSWORD,
        None,
        "Password of the private key.",
        reader=Reader.SECURITY,
        per_listener=True,
        only_per_listener=True,
    )
    ssl_truststore_type = BrokerKey(
        "ssl.truststore.type",
        _STRING,
        "JKS",
        "A trust store is read as PEM, whatever type is set.",
        reader=Reader.SECURITY,
        per_listener=True,
        only_per_listener=True,
        has_effect=False,
        holds_anyway="PEM",
    )
    ssl_truststore_location = BrokerKey(
        "ssl.truststore.location",
        _STRING,
        None,
        "File in PEM with the certificates of the authorities that vouch for clients."
        " It is read again when it changes.",
        reader=Reader.SECURITY,
        per_listener=True,
        only_per_listener=True,
    )
    ssl_truststore_password = BrokerKey(
        "ssl.truststore.password",
        _PASSWORD,
        None,
        "Certificates in PEM have no password.",
        reader=Reader.SECURITY,
        per_listener=True,
        only_per_listener=True,
        has_effect=False,
    )
    ssl_truststore_certificates = BrokerKey(
        "ssl.truststore.certificates",
        _PASSWORD,
        None,
        "The trusted certificates themselves, in PEM.",
        reader=Reader.SECURITY,
        per_listener=True,
        only_per_listener=True,
    )
    ssl_principal_mapping_rules = BrokerKey(
        "ssl.principal.mapping.rules",
        _STRING,
        "DEFAULT",
        "How the distinguished name of a client certificate becomes a principal: rules"
        " RULE:pattern/replacement/, with L or U behind it for lower or upper case,"
        " and DEFAULT for the whole name, separated by commas. The first rule that"
        " matches counts.",
        reader=Reader.SECURITY,
        per_listener=True,
    )
    connections_setup_timeout_ms = BrokerKey(
        "connections.setup.timeout.ms",
        _INT,
        30000,
        "How long a client may take to set up TLS and to authenticate before its"
        " connection is closed. Not a setting of Kafka.",
        validator=at_least(1),
        reader=Reader.SECURITY,
        per_listener=True,
    )
    sasl_server_max_receive_size = BrokerKey(
        "sasl.server.max.receive.size",
        _INT,
        524288,
        "Largest request, in bytes, of a client that has not authenticated yet.",
        validator=at_least(1),
        reader=Reader.SECURITY,
        per_listener=True,
        per_mechanism=True,
    )
    sasl_plain_users_file = BrokerKey(
        "sasl.plain.users.file",
        _STRING,
        None,
        "File with the users of SASL PLAIN, one on each line as user:password. It is"
        " read again when it changes. Kafka's sasl.jaas.config may name users, too."
        " Not a setting of Kafka.",
        reader=Reader.SECURITY,
        per_listener=True,
        per_mechanism=True,
    )
    sasl_oauthbearer_jwks_endpoint_url = BrokerKey(
        "sasl.oauthbearer.jwks.endpoint.url",
        _STRING,
        None,
        "Where the keys are that tokens are signed with, as a JWKS: a file:/// URL,"
        " whose file is read again when it changes, or an https:// URL.",
        is_url=True,
        reader=Reader.SECURITY,
        per_listener=True,
        per_mechanism=True,
    )
    sasl_oauthbearer_expected_audience = BrokerKey(
        "sasl.oauthbearer.expected.audience",
        _LIST,
        (),
        "Audiences of which a token must have one; empty: a token may have any"
        " audience.",
        reader=Reader.SECURITY,
        per_listener=True,
        per_mechanism=True,
    )
    sasl_oauthbearer_expected_issuer = BrokerKey(
        "sasl.oauthbearer.expected.issuer",
        _STRING,
        None,
        "Issuer that a token must have. If it is not set, any issuer with a key in the"
        " JWKS is accepted.",
        reader=Reader.SECURITY,
        per_listener=True,
        per_mechanism=True,
    )
    sasl_oauthbearer_scope_claim_name = BrokerKey(
        "sasl.oauthbearer.scope.claim.name",
        _STRING,
        "scope",
        "The broker does not look at the scopes of a token.",
        reader=Reader.SECURITY,
        per_listener=True,
        per_mechanism=True,
        has_effect=False,
    )
    sasl_oauthbearer_sub_claim_name = BrokerKey(
        "sasl.oauthbearer.sub.claim.name",
        _STRING,
        "sub",
        "Claim of a token that names the user.",
        reader=Reader.SECURITY,
        per_listener=True,
        per_mechanism=True,
    )
    sasl_oauthbearer_clock_skew_seconds = BrokerKey(
        "sasl.oauthbearer.clock.skew.seconds",
        _INT,
        30,
        "How many seconds the clock of a token's issuer may differ from the broker's.",
        validator=at_least(0),
        reader=Reader.SECURITY,
        per_listener=True,
        per_mechanism=True,
    )
    sasl_oauthbearer_jwks_endpoint_refresh_ms = BrokerKey(
        "sasl.oauthbearer.jwks.endpoint.refresh.ms",
        _LONG,
        3_600_000,
        "Time between two fetches of the keys from an https:// URL.",
        validator=at_least(1),
        reader=Reader.SECURITY,
        per_listener=True,
        per_mechanism=True,
    )
    sasl_oauthbearer_jwks_endpoint_retry_backoff_ms = BrokerKey(
        "sasl.oauthbearer.jwks.endpoint.retry.backoff.ms",
        _LONG,
        100,
        "How long to wait after the keys could not be fetched; the wait doubles with"
        " each failure.",
        validator=at_least(1),
        reader=Reader.SECURITY,
        per_listener=True,
        per_mechanism=True,
    )
    sasl_oauthbearer_jwks_endpoint_retry_backoff_max_ms = BrokerKey(
        "sasl.oauthbearer.jwks.endpoint.retry.backoff.max.ms",
        _LONG,
        10_000,
        "Longest wait after the keys could not be fetched.",
        validator=at_least(1),
        reader=Reader.SECURITY,
        per_listener=True,
        per_mechanism=True,
    )

    # -- quotas ------------------------------------------------------------------------

    quota_window_num = BrokerKey(
        "quota.window.num",
        _INT,
        11,
        "How many samples of a client's rate are kept for produce, fetch and request"
        " quotas, with the sample that is being filled.",
        validator=_SAMPLES,
        importance=_LOW,
    )
    quota_window_size_seconds = BrokerKey(
        "quota.window.size.seconds",
        _INT,
        1,
        "Length of each sample of quota.window.num.",
        validator=_SECONDS,
        importance=_LOW,
    )
    controller_quota_window_num = BrokerKey(
        "controller.quota.window.num",
        _INT,
        11,
        "How many windows' worth of topic changes a client may make at once before its"
        " controller_mutation_rate limits it. A window has"
        " controller.quota.window.size.seconds.",
        validator=_SAMPLES,
        importance=_LOW,
    )
    controller_quota_window_size_seconds = BrokerKey(
        "controller.quota.window.size.seconds",
        _INT,
        1,
        "Length of each window of controller.quota.window.num.",
        validator=_SECONDS,
        importance=_LOW,
    )

    # -- metrics and the request log ---------------------------------------------------

    # No port is opened unless it is set: two brokers on one machine could not both have
    # it. The files in deploy/ and systemd/ set 127.0.0.1:9404.
    metrics_listeners = BrokerKey(
        "metrics.listeners",
        _LIST,
        (),
        "Address of the metrics and the status page, as HTTP://host:port; at most one."
        " If it is not set, there are none. Port 0 lets the system choose a port."
        " There is no authentication: keep the address on loopback or in a network"
        " that you trust. Not a setting of Kafka.",
    )
    console_listeners = BrokerKey(
        "console.listeners",
        _LIST,
        (),
        "Address of the console, as HTTP://host:port on loopback, or as"
        " HTTPS://host:port with the certificate of ssl.keystore.location; at most one."
        " If it is not set, there is no console. Port 0 lets the system choose. Users"
        " log in with user and password of a SASL listener, and ACLs decide what they"
        " see and do. Without such a listener there is no login: the console is"
        " User:ANONYMOUS of a PLAINTEXT listener. Not a setting of Kafka.",
    )
    console_schema_registry_url = BrokerKey(
        "console.schema.registry.url",
        _LIST,
        (),
        "Addresses of one schema registry, as http://host:port or https://host:port:"
        " the console shows values in the format of Confluent's serializers by its"
        " schemas. The first address that answers is used. Needs pip install"
        " 'mpbroker-server[registry]'. Whoever may read a message sees it by whatever"
        " schema it names. Not a setting of Kafka.",
    )
    console_schema_registry_basic_auth_user_info = BrokerKey(
        "console.schema.registry.basic.auth.user.info",
        _PASSWORD,
        None,
        "The login at console.schema.registry.url, as user:password. Not a setting of"
        " Kafka.",
    )
    console_schema_registry_ssl_truststore_location = BrokerKey(
        "console.schema.registry.ssl.truststore.location",
        _STRING,
        None,
        "File with the certificates, in PEM, that console.schema.registry.url may be"
        " signed by; if it is not set, those that the system trusts. Not a setting of"
        " Kafka.",
    )
    metrics_kafka_names_enable = BrokerKey(
        "metrics.kafka.names.enable",
        _BOOLEAN,
        False,
        "Whether metrics are also shown under the names of kafka_exporter and of the"
        " usual rules of the JMX exporter, for dashboards made for those. Not a"
        " setting of Kafka.",
        reader=Reader.EXPORTER,
    )
    request_log_path = BrokerKey(
        "request.log.path",
        _STRING,
        None,
        "File to which requests are appended as lines of JSON, with the time of each"
        " stage. If it is not set, none is written. Not a setting of Kafka.",
    )
    request_log_max_bytes = BrokerKey(
        "request.log.max.bytes",
        _LONG,
        1024**3,
        "When the file of request.log.path reaches this size, it is renamed to its"
        " name with .1 at the end, and a new file is begun. Both files together take"
        " little more than twice this. Not a setting of Kafka.",
        validator=at_least(1),
    )
    slow_request_log_path = BrokerKey(
        "slow.request.log.path",
        _STRING,
        None,
        "File for requests that took slow.request.log.threshold.ms or longer, as that"
        " of request.log.path, which has all requests then. Not a setting of Kafka.",
    )
    slow_request_log_threshold_ms = BrokerKey(
        "slow.request.log.threshold.ms",
        _LONG,
        0,
        "Shortest total time of a request that is written to slow.request.log.path or,"
        " if that is not set, to request.log.path; 0: all are written. Not a setting of"
        " Kafka.",
        validator=at_least(0),
        reader=Reader.EXPORTER,
    )
    otlp_endpoint = BrokerKey(
        "otlp.endpoint",
        _STRING,
        Computed(
            default_endpoint,
            "$OTEL_EXPORTER_OTLP_METRICS_ENDPOINT, else $OTEL_EXPORTER_OTLP_ENDPOINT"
            " with /v1/metrics behind it; none if they are not set, if"
            " $OTEL_METRICS_EXPORTER asks for another exporter, or if"
            " $OTEL_SDK_DISABLED is true",
        ),
        "URL of an OpenTelemetry collector to which metrics are pushed as OTLP over"
        " HTTP, for example http://127.0.0.1:4318/v1/metrics. If there is none,"
        " nothing is pushed. The query of the URL (?token=...) is never shown. Not a"
        " setting of Kafka.",
        is_url=True,
    )
    otlp_interval_ms = BrokerKey(
        "otlp.interval.ms",
        _LONG,
        of_variables(60_000, "OTEL_METRIC_EXPORT_INTERVAL"),
        "Time between two pushes of metrics to otlp.endpoint. Not a setting of Kafka.",
        validator=at_least(100),
    )
    otlp_timeout_ms = BrokerKey(
        "otlp.timeout.ms",
        _LONG,
        of_variables(
            10_000, "OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT"
        ),
        "How long a push waits for the collector: for the connection, and then for the"
        " whole answer. Not a setting of Kafka.",
        validator=between(1, 3_600_000),
    )
    otlp_headers = BrokerKey(
        "otlp.headers",
        _PASSWORD,
        Computed(
            default_headers,
            "$OTEL_EXPORTER_OTLP_METRICS_HEADERS, else $OTEL_EXPORTER_OTLP_HEADERS,"
            " else none",
        ),
        "Headers of each push, as NAME=VALUE,NAME=VALUE with values encoded as in a"
        " URL, for example authorization=Bearer%20TOKEN. Not a setting of Kafka.",
    )
    otlp_compression = BrokerKey(
        "otlp.compression",
        _STRING,
        of_variables(
            "none",
            "OTEL_EXPORTER_OTLP_METRICS_COMPRESSION",
            "OTEL_EXPORTER_OTLP_COMPRESSION",
        ),
        "How pushes are compressed: none or gzip. Not a setting of Kafka.",
        validator=one_of("none", "gzip"),
    )
    otlp_resource_attributes = BrokerKey(
        "otlp.resource.attributes",
        _LIST,
        Computed(
            default_attributes,
            "$OTEL_RESOURCE_ATTRIBUTES, and service.name of $OTEL_SERVICE_NAME",
        ),
        "Resource attributes of pushed metrics, as NAME=VALUE. The broker adds"
        " service.name=mpbroker, service.version and service.instance.id (the"
        " cluster's id and node.id) if they are not among them. Not a setting of"
        " Kafka.",
    )

    # -- clients' metrics --------------------------------------------------------------

    telemetry_max_bytes = BrokerKey(
        "telemetry.max.bytes",
        _INT,
        1024 * 1024,
        "Largest push of a client's metrics that is accepted, both compressed and"
        " decompressed.",
        validator=at_least(1),
    )
    client_telemetry_log_path = BrokerKey(
        "client.telemetry.log.path",
        _STRING,
        None,
        "File to which the metrics that clients push are appended, one line of JSON"
        " for each push. Subscriptions say which clients push what, as in Kafka:"
        " mpbroker config set --client-metrics, or kafka-client-metrics.sh. If neither"
        " this nor client.telemetry.receiver.class.name is set, clients are not asked"
        " for metrics. Not a setting of Kafka.",
    )
    client_telemetry_log_max_bytes = BrokerKey(
        "client.telemetry.log.max.bytes",
        _LONG,
        100 * 1024 * 1024,
        "When the file of client.telemetry.log.path reaches this size, it is renamed"
        " to its name with .1 at the end, and a new file is begun. Both files together"
        " take at most twice this, and one push of each request handler. Not a setting"
        " of Kafka.",
        validator=at_least(1),
    )
    client_telemetry_receiver_class_name = BrokerKey(
        "client.telemetry.receiver.class.name",
        _STRING,
        "",
        "Class that receives the metrics that clients push: python:MODULE:CLASS, or"
        f" the name of an entry point in the group {RECEIVER_GROUP}. It is a subclass"
        " of mpbroker.extensions.ClientTelemetryReceiver. Not a setting of Kafka.",
    )

    # -- values from elsewhere ---------------------------------------------------------

    config_providers = BrokerKey(
        "config.providers",
        _LIST,
        (),
        "Names of config providers: ${NAME:PATH:KEY} in a value stands for a value in a"
        " file, ${env:KEY} for a variable. config.providers.NAME.class has to be"
        " org.apache.kafka.common.config.provider.FileConfigProvider,"
        " DirectoryConfigProvider or EnvVarConfigProvider; with"
        " config.providers.NAME.param.allowed.paths the first two read nothing outside"
        " these paths, with config.providers.NAME.param.allowlist.pattern the third"
        " reads only variables whose whole name matches. A dynamic config is not"
        " searched for such values.",
        importance=_LOW,
    )

    # -- the configuration itself ------------------------------------------------------

    endpoints: tuple[EndPoint, ...]
    advertised: Mapping[str, AdvertisedEndPoint]
    warnings: tuple[str, ...]
    definition: ConfigDef
    attributes: Mapping[str, ConfigValue]  # by name; see BrokerKey
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
        """Resolve and check settings; load() reads them from their sources first.

        Args:
            settings: the settings of all sources, in any order.
            environ: the environment, from which some defaults are computed.
            cores: the number of cores that the broker may keep busy; some defaults
                depend on it.

        Raises:
            ConfigError: a setting is wrong; the message has its name, its value, the
                limit and what to do.
        """
        definition, notes = _keys_on(cores, environ)
        resolution = Resolution(definition)
        resolution.read(settings)
        resolved = resolution.resolved
        put = object.__setattr__
        put(self, "_resolved", resolved)
        put(self, "_per_listener", resolution.per_listener)
        put(self, "_per_mechanism", resolution.per_mechanism)
        self._take_values()
        put(self, "endpoints", self._parse_endpoints())
        put(self, "advertised", self._parse_advertised())
        resolution.check_variables(self.advertised)
        put(self, "definition", resolution.read_late(self._pools()))
        self._take_values()
        self._check_together()
        put(
            self,
            "warnings",
            (
                *resolution.warnings,
                *(
                    text
                    for name, texts in notes.items()
                    if resolved[name].source is Source.DEFAULT
                    for text in texts
                ),
                *resolution.warnings_beside(self.advertised),
                *self._replication_warnings(),
                *exposure_warnings(self.endpoints),
            ),
        )

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"the configuration is immutable: cannot set {name}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"the configuration is immutable: cannot delete {name}")

    def with_values(self, values: Mapping[str, ConfigValue]) -> BrokerConfig:
        """Return a copy of this configuration, with other values of some attributes.

        The copy's resolved(), static_texts() and broker_values() return the old values.

        Args:
            values: the other values, by Kafka's names of the keys.
        """
        changed = object.__new__(type(self))
        attributes = {**self.attributes, **values}
        changed.__dict__.update(self.__dict__, attributes=attributes)
        return changed

    def _take_values(self) -> None:
        values = {name: entry.value for name, entry in self._resolved.items()}
        # An empty item, such as after a last comma, is not the working directory.
        named = values["log.dirs"]
        assert isinstance(named, tuple)
        values["log.dirs"] = tuple(_absolute(path) for path in named if path)
        object.__setattr__(self, "attributes", values)

    @classmethod
    def load(
        cls,
        arguments: Mapping[str, str],
        file: Path | None,
        environ: Mapping[str, str],
        *,
        cores: int | None = None,
    ) -> BrokerConfig:
        """Read and resolve settings.

        An argument counts before the environment, which counts before the file.

        Args:
            arguments: the texts of key=value on the command line, by key.
            file: a file of TOML or Java properties; None: there is none.
            environ: the environment; the variable MPBROKER_LOG_DIRS sets log.dirs.
            cores: the number of cores that the broker may keep busy; None: ask the
                system.

        Raises:
            ConfigError: a setting is wrong; the message has its name, its value, the
                limit and what to do.
        """
        settings = settings_of_file(file) if file is not None else []
        settings += settings_of_environment(environ)
        settings += settings_of_arguments(arguments)
        if any(setting.name.startswith("config.providers") for setting in settings):
            # Imported here: most brokers have no providers.
            from mpbroker.config.providers import with_provided_values

            settings = with_provided_values(settings, environ)
        config = cls(settings, environ=environ, cores=cores or available_cores())
        again = partial(cls.load, arguments, file, environ, cores=cores)
        object.__setattr__(config, "_load_again", again)
        return config

    def load_again(self) -> BrokerConfig:
        """Read the same sources again, and return the configuration that they give now.

        Raises:
            ConfigError: see load(); this configuration stays as it is.
        """
        return self._load_again()

    @property
    def remote_storage_place(self) -> str | None:
        """The remote store's URL with endpoint and region, as ObjectStore takes it."""
        return _store_place(
            self.remote_storage_url,
            self.remote_storage_endpoint,
            self.remote_storage_region,
        )

    @property
    def diskless_storage_place(self) -> str | None:
        """The URL of the cluster's store, as ``remote_storage_place``."""
        return _store_place(
            self.diskless_storage_url,
            self.diskless_storage_endpoint,
            self.diskless_storage_region,
        )

    @property
    def has_telemetry_receiver(self) -> bool:
        """Whether clients are asked for their metrics: a setting names a receiver."""
        return bool(
            self.client_telemetry_log_path or self.client_telemetry_receiver_class_name
        )

    def resolved(self, name: str) -> ResolvedValue:
        """Return the value of a key, and where it was set.

        It is that of the broker, and not that of one listener.

        Raises:
            ConfigError: there is no such key.
        """
        return self._resolved[self.definition.key(name).name]

    def static_texts(self) -> dict[str, str]:
        """Return the texts of the settings that are set, by key.

        DescribeConfigs calls these settings static.
        """
        texts = {
            name: entry.text
            for name, entry in self._resolved.items()
            if entry.text is not None
        }
        for (listener, name), value in self._per_listener.items():
            text = self.definition.key(name).format(value)
            if text is not None:
                texts[f"{LISTENER_PREFIX}{listener}.{name}"] = text
        for (listener, mechanism, name), value in self._per_mechanism.items():
            text = self.definition.key(name).format(value)
            if text is not None:
                texts[f"{LISTENER_PREFIX}{listener}.{mechanism}.{name}"] = text
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
        """Return the value set for one SASL mechanism of a listener, or None."""
        return self._per_mechanism.get((listener_name.lower(), mechanism.lower(), name))

    def own_value(self, listener_name: str, name: str) -> ConfigValue:
        """Return the value set for one listener alone, or None."""
        return self._per_listener.get((listener_name.lower(), name))

    def broker_values(self) -> dict[str, ConfigValue]:
        """Return the value of every key, by Kafka's name."""
        return {name: entry.value for name, entry in self._resolved.items()}

    def log_defaults(self) -> dict[str, ConfigValue]:
        """Return the defaults that the broker's settings give to topic configs.

        The keys of the result are names of topic configs.
        """
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
        """Return the number of processors of each listener that has its own number.

        Every other listener has num.network.threads. The control plane has one.
        """
        own = {}
        for endpoint in self.endpoints:
            number = self.own_value(endpoint.listener_name, "num.network.threads")
            if isinstance(number, int):
                own[endpoint.listener_name] = number
        if self.control_plane_listener_name is not None:
            own[self.control_plane_listener_name.upper()] = 1  # even if more are set
        return own

    def _pools(self) -> ListenerPools:
        return ListenerPools(
            len(self.endpoints),
            self.own_processors(),
            self.control_plane_listener_name is not None,
        )

    def _check_together(self) -> None:
        parse_http_listener("metrics.listeners", self.metrics_listeners)
        if self.console_listeners:
            # Imported here: most brokers have no console.
            from mpbroker.config.console_settings import check_console

            check_console(self)
        check_otlp(self.otlp_endpoint, self.otlp_headers, self.otlp_resource_attributes)
        check_planes(
            self.endpoints,
            self.control_plane_listener_name,
            self.inter_broker_listener_name,
        )
        check_values(self.definition, lambda name: self._resolved[name].value)
        check_inter_broker(
            self.inter_broker_listener_name,
            self.resolved("security.inter.broker.protocol").text,
        )
        check_request_sizes(
            self.socket_request_max_bytes, self.queued_max_request_bytes
        )
        check_directories(self.log_dirs)
        check_remote_storage(
            self.remote_log_storage_system_enable, self.remote_storage_url
        )
        check_cluster(self.cluster_database_url, self.diskless_storage_url)
        check_store_options(
            "remote.storage",
            self.remote_storage_url,
            self.remote_storage_endpoint,
            self.remote_storage_region,
        )
        check_store_options(
            "diskless.storage",
            self.diskless_storage_url,
            self.diskless_storage_endpoint,
            self.diskless_storage_region,
        )
        check_internal_topics(
            self.offsets_topic_num_partitions,
            self.transaction_state_log_num_partitions,
            self.share_coordinator_state_topic_num_partitions,
        )

    def _replication_warnings(self) -> list[str]:
        return [
            f"{name}={entry.value} has no effect: there is one broker, so each topic"
            " has one replica"
            for name in (
                "default.replication.factor",
                "offsets.topic.replication.factor",
                "transaction.state.log.replication.factor",
                "share.coordinator.state.topic.replication.factor",
            )
            if (entry := self._resolved[name]).value != 1
        ]


def _keys_on(
    cores: int, environ: Mapping[str, str]
) -> tuple[ConfigDef, dict[str, list[str]]]:
    """Return all keys with their defaults on this machine, and warnings by key.

    A warning says that an environment variable cannot be used for a default.
    """
    notes: dict[str, list[str]] = {}
    keys = []
    for key in BROKER_CONFIG_DEF:
        if isinstance(key, BrokerKey) and key.computed is not None:
            said = notes[key.name] = []
            keys.append(key.on(Machine(cores, environ, said.append)))
    return BROKER_CONFIG_DEF.with_keys(keys), notes


def _absolute(path: str) -> str:
    # A daemon changes its working directory; an absolute path stays right, and tells
    # where the directory is.
    return os.path.abspath(os.path.expanduser(path))


BROKER_CONFIG_DEF: Final = ConfigDef(
    "setting",
    [
        *KEYS_WITHOUT_EFFECT,
        *(BrokerKey.of_topics(key) for key in BROKER_LOG_DEF),
        *(row for row in vars(BrokerConfig).values() if isinstance(row, BrokerKey)),
    ],
)

HANDLERS_KEY: Final = BrokerConfig.num_io_threads.name
PROCESSORS_KEY: Final = BrokerConfig.num_network_threads.name

if TYPE_CHECKING:
    # mypy proves here that a row of each kind makes an attribute of its type.
    from typing import assert_type

    def _types_of_attributes(config: BrokerConfig) -> None:
        assert_type(config.log_cleaner_enable, bool)
        assert_type(config.node_id, int)
        assert_type(config.num_io_threads, int)
        assert_type(config.log_cleaner_io_max_bytes_per_second, float)
        assert_type(config.super_users, str)
        assert_type(config.broker_rack, str | None)
        assert_type(config.ssl_key_password, str | None)
        assert_type(config.otlp_endpoint, str | None)
        assert_type(config.log_dirs, tuple[str, ...])
        assert_type(config.advertised_listeners, tuple[str, ...] | None)
        assert_type(config.message_max_bytes, int)
        assert_type(BrokerConfig.node_id, BrokerKey[int])


def _store_place(
    url: str | None, endpoint: str | None, region: str | None
) -> str | None:
    if not url or not (endpoint or region):
        return url
    # Imported here: most brokers have no store.
    from mpbroker.base.store_url import StoreUrl

    options = {
        name: value
        for name, value in (("endpoint", endpoint), ("region", region))
        if value
    }
    return str(StoreUrl.parse(url)._replace(**options))

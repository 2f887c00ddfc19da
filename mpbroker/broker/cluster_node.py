"""ClusterNode: the housekeeper's child that does a broker's work for its cluster.

It keeps the node's lease, copies the cluster's metadata, deletes objects that are not
used any more, writes the batches that handlers hand over for shared topics (those with
their records in the object store), and copies the batches that all nodes have written
into local logs.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import signal
import socket
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from mpbroker import __version__
from mpbroker.base.logger import get_logger
from mpbroker.base.storage_errors import RemoteStorageError
from mpbroker.broker.housekeeper_child import HousekeeperChild
from mpbroker.cluster.errors import (
    ClusterError,
    DatabaseUnavailableError,
    NodeFencedError,
)
from mpbroker.ipc.layout import (
    HOUSEKEEPER,
    ROW_SYNC_OWNER,
    ROW_WORDS,
    is_with_handlers,
)
from mpbroker.ipc.tables.partition_table import rows_made
from mpbroker.metadata.cluster_nodes import (
    NodeEpoch,
    node_epoch_path,
    write_node_epoch,
)
from mpbroker.metadata.metadata_image import TopicImage
from mpbroker.metadata.topics import Topic, TopicRegistry
from mpbroker.storage.files.log_files import create_file

if TYPE_CHECKING:
    from mpbroker.broker.process_parts import ProcessParts
    from mpbroker.cluster.database import ClusterDatabase
    from mpbroker.cluster.membership import Membership
    from mpbroker.cluster.sequencer import Sequencer
    from mpbroker.cluster.shared_topics import SharedTopics
    from mpbroker.config.listeners import AdvertisedEndPoint
    from mpbroker.storage.log_manager import LogManager
    from mpbroker.supervisor.listen_sockets import Listener

_LOG = get_logger(__name__)
_DATABASE_S: Final = 5.0
# A handler waits for a change of the metadata, and serves no other client meanwhile.
_CHANGE_S: Final = 3.0
_STORE_S: Final = 10.0
_LEAVE_S: Final = 3.0
# Commits, the materialiser's questions, keys, topics, the lease, the collector,
# deletions of records, offline partitions, and two for the metadata log and one for the
# live nodes.
_CONNECTIONS: Final = 11
_LOCK_FILE: Final = ".cluster-node-lock"
_ALL_PASSED: Final = 1 << 62


class ClusterNode(HousekeeperChild):
    """Joins the cluster, and does this broker's work for it in a child process.

    The start of the broker has claimed the node id before. Each new child joins again,
    with the ports in use. If the node is fenced because a copy of its directories runs
    elsewhere, the child logs that and ends, and joins again after 10 s.
    """

    NAME = "the node of the cluster"
    TITLE = "cluster-node"
    PASSING = (ClusterError, NodeFencedError, RemoteStorageError)

    def __init__(self, parts: ProcessParts) -> None:
        super().__init__(parts)
        # Shared with the child: the position in the metadata log up to which it uses
        # nothing that was deleted.
        self._passed = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")
        self._passed[0] = _ALL_PASSED

    def has_passed(self, position: int) -> bool:
        """Return whether the cluster node's child process has let go of old partitions.

        It has if it uses no partition that was deleted before a position.

        Args:
            position: a position in the metadata log.
        """
        return bool(self._passed[0] >= position)

    def _after_death(self) -> None:
        self._passed[0] = _ALL_PASSED
        # It synced logs under the housekeeper's id. The housekeeper is between two
        # tasks now, so every sync under that id was the dead child's.
        table = self._parts.memory.table
        words = table.row(0).words  # of all rows: a row object each would be slow
        for index in range(rows_made(words)):
            if words[index * ROW_WORDS + ROW_SYNC_OWNER] == HOUSEKEEPER + 1:
                table.row(index).forget_sync(HOUSEKEEPER)

    def _serve(self) -> None:
        asyncio.run(self._keep())

    async def _keep(self) -> None:
        from mpbroker.cluster.database import ClusterDatabase
        from mpbroker.cluster.join_cluster import node_directory
        from mpbroker.cluster.membership import Membership, NodeDescription

        parts = self._parts
        config = parts.config
        assert config.cluster_database_url
        # Until the child of a killed housekeeper is gone: one process has the socket.
        lock = create_file(f"{parts.directories[0].path}/{_LOCK_FILE}")
        fcntl.flock(lock, fcntl.LOCK_EX)
        node = NodeDescription(
            node_directory([each.path for each in parts.directories]),
            told_listeners(parts.listeners, config.advertised),
            __version__,
            config.node_id,
            config.broker_rack,
        )
        async with ClusterDatabase(
            config.cluster_database_url,
            timeout_s=_DATABASE_S,
            connections=_CONNECTIONS,
        ) as database:
            membership = Membership(database, node)
            stopped = asyncio.Event()
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGTERM, stopped.set)
            work = asyncio.gather(
                _stay(membership, node_epoch_path(parts.directories[0].path)),
                *self._metadata_work(database),
                *self._work(database, membership),
            )
            stop = asyncio.ensure_future(stopped.wait())
            either: set[asyncio.Future[Any]] = {work, stop}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await work  # it has failed
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work
            with suppress(TimeoutError):
                async with asyncio.timeout(_LEAVE_S):
                    await membership.leave()

    def _metadata_work(
        self, database: ClusterDatabase
    ) -> list[Coroutine[Any, Any, None]]:
        """Return the tasks that keep this node's copies of the cluster's metadata."""
        from mpbroker.cluster.live_nodes import LiveNodes
        from mpbroker.cluster.metadata_replica import MetadataReplica
        from mpbroker.cluster.shared_metadata_log import SharedMetadataLog
        from mpbroker.metadata.cluster_metadata_log import change_socket_path

        directory = self._parts.directories[0].path
        copy = MetadataReplica(
            SharedMetadataLog(database, timeout_s=_CHANGE_S),
            self._parts.copy_registry(),
            change_socket_path(directory),
        )
        return [copy.run(), LiveNodes(database, directory).follow()]

    def _work(
        self, database: ClusterDatabase, membership: Membership
    ) -> list[Coroutine[Any, Any, None]]:
        """Return what is to be run, beside the lease."""
        from mpbroker.cluster.last_look import LastLook
        from mpbroker.cluster.materialiser import Materialiser
        from mpbroker.cluster.object_collector import CollectorSettings, ObjectCollector
        from mpbroker.cluster.object_writer import ObjectWriter, WriterSettings
        from mpbroker.cluster.offline_partitions import OfflinePartitions
        from mpbroker.cluster.produce_server import ProduceServer
        from mpbroker.cluster.recent_objects import RecentObjects
        from mpbroker.cluster.shared_deletions import SharedDeletions
        from mpbroker.cluster.shared_retention import SharedRetention
        from mpbroker.cluster.stats.cluster_stats import ClusterStats
        from mpbroker.cluster.stats.counted_calls import (
            CountedSequencer,
            CountedStore,
            StatsWriter,
        )
        from mpbroker.storage.remote.object_store import ObjectStore

        config = self._parts.config
        directory = self._parts.directories[0].path
        assert config.diskless_storage_place
        objects = ObjectStore(config.diskless_storage_place, retry_s=_STORE_S)
        stats = ClusterStats()
        sequencer = CountedSequencer(database, stats)
        store = RecentObjects(CountedStore(objects, stats))
        silence = timedelta(milliseconds=config.producer_id_expiration_ms)
        collector = ObjectCollector(
            sequencer, objects, CollectorSettings(producers_after=silence)
        )
        topics, registry, logs = self._topics(sequencer)
        look = LastLook(directory)
        look.begin()

        def caught_up(began_ns: int) -> None:
            if topics.has_all_logs:
                look.note(began_ns)

        materialiser = Materialiser(
            sequencer, store, topics.logs, topics.appended, caught_up=caught_up
        )
        topics.wakes(materialiser.wake)
        writer = ObjectWriter(
            sequencer,
            store,
            config.node_id,
            WriterSettings(
                config.diskless_append_commit_interval_ms / 1000,
                config.diskless_append_buffer_max_bytes,
            ),
        )
        interval_s = config.log_retention_check_interval_ms / 1000
        notices = self._parts.memory.notices
        server = ProduceServer(
            directory,
            writer,
            topics,
            SharedDeletions(sequencer, topics),
            lambda handler, row: notices[handler].put(row),
            partial(is_with_handlers, self._parts.memory.control.words),
        )
        numbers = StatsWriter(directory, stats, database, membership)
        return [
            numbers.run(writer, materialiser),
            OfflinePartitions(database, membership, registry, logs).run(),
            collector.run(),
            topics.run(),
            SharedRetention(sequencer, topics, interval_s).run(),
            materialiser.run(),
            writer.run(),
            server.run(self._tell_handlers),
        ]

    def _topics(
        self, sequencer: Sequencer
    ) -> tuple[SharedTopics, TopicRegistry, LogManager]:
        """Return the shared topics, and the registry and the logs that they use."""
        from mpbroker.cluster.shared_topics import SharedTopics

        def removed(topic: Topic) -> None:
            topics.removed(topic)

        def passed(position: int) -> None:
            self._passed[0] = position

        self._passed[0] = -1  # before it knows any row
        removed_before: list[TopicImage] = []
        registry = self._parts.registry(removed, removed_before=removed_before)
        logs = self._parts.logs(registry)
        topics = SharedTopics(
            sequencer,
            registry,
            logs,
            lambda log: self._tell(log.row.index),
            passed,
        )
        topics.removed_before(each.topic_id for each in removed_before)
        return topics, registry, logs

    def _tell(self, row: int) -> None:
        """Wake every handler that waits for news of a partition.

        Args:
            row: the partition's entry in shared memory.
        """
        memory = self._parts.memory
        waiters = memory.table.row(row).take_waiters()
        for handler, notices in enumerate(memory.notices):
            if waiters >> handler & 1:
                notices.put(row)

    def _tell_handlers(self) -> None:
        """Make all handlers check their parked requests.

        A new writer of shared topics has started; they must send requests to it again.
        """
        for notices in self._parts.memory.notices:
            notices.overflow()
            notices.put(0)


async def _stay(membership: Membership, epoch_path: str) -> None:
    """Join the cluster, and renew the node's lease; retry while the database is away.

    Args:
        epoch_path: the file that tells the coordinator the node's epoch.

    Raises:
        ClusterError: the node cannot join.
        NodeFencedError: another process has this node's id now.
    """
    while True:
        try:
            await membership.join()
        except DatabaseUnavailableError as error:
            _LOG.warning("this node has no lease: %s", error)
        else:
            write_node_epoch(
                epoch_path, NodeEpoch(membership.node_id, membership.epoch)
            )
            await membership.keep()


def told_listeners(
    listeners: Sequence[Listener], advertised: Mapping[str, AdvertisedEndPoint]
) -> list[str]:
    """Return the addresses that other machines can use, as "NAME://host:port".

    Unix sockets are left out.
    """
    told = []
    for listener in listeners:
        endpoint = listener.endpoint
        if endpoint.path is not None:
            continue  # a Unix socket
        host, port = endpoint.host, listener.port
        if endpoint.is_wildcard:
            host = socket.gethostname()
        given = advertised.get(endpoint.listener_name)
        if given is not None:
            host, port = given.host or host, given.port or port
        name = f"[{host}]" if ":" in host else host
        told.append(f"{endpoint.listener_name}://{name}:{port}")
    return told

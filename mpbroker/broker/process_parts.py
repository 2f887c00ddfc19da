"""Build the objects that processes of several roles need.

Each process has its own view of the metadata log, its own logs, its own objects that
authorize requests and charge clients. All are made from the settings and the shared
memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from mpbroker.base.logger import get_logger
from mpbroker.broker.authorizer_setup import make_authorization, request_contexts
from mpbroker.config import BrokerConfig
from mpbroker.ipc.layout import (
    HEADER,
    HEADER_CLEAN_START,
    HOUSEKEEPER,
)
from mpbroker.ipc.tables.quota_table import QuotaTable
from mpbroker.ipc.tables.row_users import passed
from mpbroker.ipc.tables.transaction_table import TransactionTable
from mpbroker.metadata.metadata_image import TopicImage
from mpbroker.metadata.metadata_log import MetadataLog
from mpbroker.metadata.topic_names import (
    OFFSETS_TOPIC,
    SHARE_STATE_TOPIC,
    TRANSACTION_TOPIC,
)
from mpbroker.metadata.topics import NewTopic, RegistryHooks, Topic, TopicRegistry
from mpbroker.server.quotas.client_quotas import ClientQuotas
from mpbroker.storage.full_directories import FullDirectories
from mpbroker.storage.log_directory import LogDirectory, know_of_each_other
from mpbroker.storage.log_manager import LogManager, Syncer
from mpbroker.storage.offline_directories import OfflineDirectories
from mpbroker.supervisor.listen_sockets import Listener
from mpbroker.supervisor.memory import BrokerMemory

if TYPE_CHECKING:
    from mpbroker.metadata.cluster_nodes import ClusterNodes
    from mpbroker.server.authorization.authorization import Authorization
    from mpbroker.server.request_context import RequestContexts
    from mpbroker.server.telemetry.client_telemetry import ClientTelemetry

_LOG = get_logger(__name__)

_NS_PER_MS: Final = 1_000_000
_NS_PER_S: Final = 1_000_000_000


class ProcessParts:
    """Makes the objects of one process, when that process asks for them.

    Attributes:
        config: the settings for processes that start from now on.
        memory: the shared memory of all processes.
        directories: the data directories, in the order of log.dirs.
        listeners: the open listeners, by index.
        cluster_id: the cluster's id.
    """

    def __init__(
        self,
        config: BrokerConfig,
        memory: BrokerMemory,
        directories: Sequence[LogDirectory],
        listeners: Sequence[Listener],
        cluster_id: str,
    ) -> None:
        self.config = config
        self.memory = memory
        self.directories = directories
        self.listeners = listeners
        self.cluster_id = cluster_id
        self._is_lost = config.remote_log_storage_system_enable and self._lacks()

    # -- metadata and logs -------------------------------------------------------------

    def metadata_log(self) -> MetadataLog:
        """Open the metadata log in the first data directory, for this process."""
        where = self.directories[0].path, self.memory.metadata_cell
        if not self.config.cluster_database_url:
            return MetadataLog(*where)
        # Imported here: most brokers are in no cluster.
        from mpbroker.metadata.cluster_metadata_log import ClusterMetadataLog

        return ClusterMetadataLog(*where)

    def registry(
        self,
        on_removed: Callable[[Topic], None] | None = None,
        on_broker_config: Callable[[], None] | None = None,
        step: Callable[[], None] = lambda: None,
        removed_before: list[TopicImage] | None = None,
        on_unreadable: Callable[[OSError], None] | None = None,
    ) -> TopicRegistry:
        """Make the process's own view of the metadata log.

        Args:
            on_removed: called with each topic that is deleted from now on.
            on_broker_config: called when a dynamic config of brokers has changed.
            step: called again and again while a long log is read.
            removed_before: receives the topics that the log has already deleted.
            on_unreadable: called instead of an error if the log's disk fails later.
        """
        config = self.config
        # In a cluster, the process that copies the log makes the rows: copy_registry().
        rows = None if config.cluster_database_url else self.memory.table
        return TopicRegistry(
            self.metadata_log(),
            broker_id=config.node_id,
            capacity=config.max_partitions,
            broker_values=config.broker_values(),
            now_ms=_now_ms,
            hooks=RegistryHooks(
                on_removed,
                on_broker_config,
                rows,
                step,
                partial(passed, self.memory.control.words),
                removed_before,
                on_unreadable,
            ),
        )

    def cluster_nodes(self) -> ClusterNodes | None:
        """Make the list of the other nodes; None: this broker is in no cluster."""
        if not self.config.cluster_database_url:
            return None
        # Imported here: most brokers are in no cluster.
        from mpbroker.metadata.cluster_nodes import ClusterNodes

        return ClusterNodes(
            self.directories[0].path,
            self.config.node_id,
            [each.endpoint.listener_name for each in self.listeners],
        )

    def copy_registry(self) -> TopicRegistry:
        """Make the registry of topics for the process that copies the metadata.

        Only a node of a cluster has such a process.
        """
        config, memory = self.config, self.memory
        return TopicRegistry(
            MetadataLog(self.directories[0].path, memory.metadata_cell),
            broker_id=config.node_id,
            capacity=config.max_partitions,
            now_ms=_now_ms,
            hooks=RegistryHooks(
                rows=memory.table, passed=partial(passed, memory.control.words)
            ),
        )

    def logs(
        self,
        registry: TopicRegistry,
        is_restored: Callable[[], bool] = lambda: True,
        step: Callable[[], None] = lambda: None,
        process: int = HOUSEKEEPER,
    ) -> LogManager:
        """Make the LogManager, which opens partitions' logs.

        Args:
            registry: the process's view of the metadata log.
            is_restored: returns whether partitions may be opened; see
                close_until_restored.
            step: called for each log that a request touches.
            process: the process's id as the owner of a log's sync (fsync).
        """
        manager = LogManager(
            self.directories,
            self.memory.table,
            registry,
            producer_id_expiration_ms=self.config.producer_id_expiration_ms,
            is_behind=lambda: registry.is_behind,
            is_restored=is_restored,
            step=step,
            syncer=Syncer(process, self._notify),
        )
        manager.note_full = self.full_directories().note
        paths = [directory.path for directory in self.directories]
        if len(paths) < len(self.config.log_dirs) or self._is_lost:
            manager.lacks_directory = lambda: True
        elif know_of_each_other(paths):
            from mpbroker.storage.used_directories import LostDirectories

            are_lost = LostDirectories(paths)
            if are_lost():  # no other is lost before the next start
                manager.lacks_directory = are_lost
        if self.config.cluster_database_url:
            manager.node_id = self.config.node_id
        return manager

    def _lacks(self) -> bool:
        """Return whether a log directory is lost as this program starts.

        With tiered storage its partitions begin anew at no moment before the next
        start, also if it is given up meanwhile: then the store restores them.
        """
        paths = [directory.path for directory in self.directories]
        if not know_of_each_other(paths):
            return False
        from mpbroker.storage.used_directories import may_lack_partitions

        return may_lack_partitions(paths)

    def full_directories(self) -> FullDirectories:
        """Make the object that notes and tells which log directories are full."""
        return FullDirectories(
            self.memory.control.words, [each.path for each in self.directories]
        )

    def offline_directories(self) -> OfflineDirectories:
        """Make the object that notes and tells which log directories have failed."""
        return OfflineDirectories(self.memory.control.words, self.directories)

    def _notify(self, row: int, handlers: int) -> None:
        for handler, notices in enumerate(self.memory.notices):
            if handlers >> handler & 1:
                notices.put(row)

    def close_until_restored(self, registry: TopicRegistry) -> None:
        """Let no partition be opened until the coordinator has loaded transactions.

        Called once, at a start and before the first fork. It does nothing after a
        clean stop, when all transaction markers are on disk, nor where there have never
        been transactions.
        """
        was_clean = self.memory.control.words[HEADER + HEADER_CLEAN_START]
        if not was_clean and registry.topic(TRANSACTION_TOPIC) is not None:
            TransactionTable(self.memory.transactions).await_restoring()
            _LOG.info(
                "an unclean stop: all partitions are closed until transactions are"
                " loaded, and their ends there that a power cut may have taken"
            )

    def internal_topics(self) -> dict[str, NewTopic]:
        """Return the coordinator's topics by name, with the settings for creation.

        A topic is created by the coordinator, or by a handler whose client asks for it.

        Source: Kafka's AutoTopicCreationManager; GroupCoordinatorConfig,
        TransactionLogConfig, ShareCoordinatorService.
        """
        config = self.config
        topics = (
            NewTopic(
                OFFSETS_TOPIC,
                config.offsets_topic_num_partitions,
                {
                    "cleanup.policy": "compact",
                    "compression.type": "producer",
                    "segment.bytes": str(config.offsets_topic_segment_bytes),
                },
            ),
            NewTopic(
                TRANSACTION_TOPIC,
                config.transaction_state_log_num_partitions,
                {
                    "cleanup.policy": "compact",
                    "compression.type": "uncompressed",
                    "unclean.leader.election.enable": "false",
                    "min.insync.replicas": str(config.transaction_state_log_min_isr),
                    "segment.bytes": str(config.transaction_state_log_segment_bytes),
                },
            ),
            NewTopic(
                SHARE_STATE_TOPIC,
                config.share_coordinator_state_topic_num_partitions,
                {
                    "cleanup.policy": "delete",
                    "compression.type": "producer",
                    "min.insync.replicas": str(
                        config.share_coordinator_state_topic_min_isr
                    ),
                    "retention.ms": "-1",
                    "segment.bytes": str(
                        config.share_coordinator_state_topic_segment_bytes
                    ),
                },
            ),
        )
        return {each.name: each for each in topics}

    # -- authorization, quotas, clients' metrics ---------------------------------------

    def authorization(self, registry: TopicRegistry) -> Authorization | None:
        """Make the object that asks the authorizer; None: all requests are allowed."""
        return make_authorization(self.config, self.memory, self.listeners, registry)

    def senders(self) -> RequestContexts | None:
        """Make the object that finds a request's sender; None: all are anonymous."""
        if all(
            each.endpoint.security_protocol == "PLAINTEXT" for each in self.listeners
        ):
            return None
        return request_contexts(self.memory, self.listeners)

    def client_quotas(self, registry: TopicRegistry) -> ClientQuotas:
        """Make the object that charges clients' quotas for their requests."""
        config, memory = self.config, self.memory
        table = QuotaTable(
            memory.quotas,
            config.quota_window_num,
            config.quota_window_size_seconds * _NS_PER_S,
        )
        return ClientQuotas(
            table,
            registry,
            memory.control.words,
            memory.principals.name,
            mutation_burst_s=(
                config.controller_quota_window_num
                * config.controller_quota_window_size_seconds
            ),
        )

    def telemetry(self, registry: TopicRegistry) -> ClientTelemetry | None:
        """Make the object that takes clients' metrics; None: no receiver is set."""
        if not self.config.has_telemetry_receiver:
            return None
        # Imported here: most brokers have no receiver.
        from mpbroker.broker.telemetry_setup import client_telemetry

        return client_telemetry(self.config, self.memory, self.listeners, registry)


def _now_ms() -> int:
    return time.time_ns() // _NS_PER_MS

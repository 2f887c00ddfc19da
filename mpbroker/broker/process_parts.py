"""Build the parts that processes of several roles have.

Each process has its own view of the metadata log, its own logs, its own objects that
authorize requests and charge clients. All are made from the settings and the shared
memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from mpbroker.base.logger import get_logger
from mpbroker.broker.authorizer_setup import make_authorization
from mpbroker.config import BrokerConfig
from mpbroker.ipc.layout import (
    HEADER,
    HEADER_CLEAN_START,
    HOUSEKEEPER,
    MAX_PARTITIONS,
)
from mpbroker.ipc.tables.quota_table import QuotaTable
from mpbroker.ipc.tables.transaction_table import TransactionTable
from mpbroker.metadata.metadata_log import MetadataLog
from mpbroker.metadata.topic_names import OFFSETS_TOPIC, TRANSACTION_TOPIC
from mpbroker.metadata.topics import NewTopic, RegistryHooks, Topic, TopicRegistry
from mpbroker.server.quotas.client_quotas import ClientQuotas
from mpbroker.storage.log_directory import LogDirectory
from mpbroker.storage.log_manager import LogManager, Syncer
from mpbroker.supervisor.listen_sockets import Listener
from mpbroker.supervisor.memory import BrokerMemory

if TYPE_CHECKING:
    from mpbroker.server.authorization.authorization import Authorization
    from mpbroker.server.telemetry.client_telemetry import ClientTelemetry

_LOG = get_logger(__name__)

_NS_PER_MS: Final = 1_000_000
_NS_PER_S: Final = 1_000_000_000


class ProcessParts:
    """Makes the parts of one process, when that process asks for them.

    Attributes:
        config: the settings for processes that start from now on.
        memory: what all processes share.
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

    # -- metadata and logs -------------------------------------------------------------

    def metadata_log(self) -> MetadataLog:
        """Open the metadata log, which is in the first data directory."""
        return MetadataLog(self.directories[0].path, self.memory.metadata_cell)

    def registry(
        self,
        on_removed: Callable[[Topic], None] | None = None,
        on_broker_config: Callable[[], None] | None = None,
        step: Callable[[], None] = lambda: None,
    ) -> TopicRegistry:
        """Make the process's own view of the metadata log.

        Args:
            on_removed: told of each deleted topic.
            on_broker_config: called when a dynamic config of brokers has changed.
            step: called as reading a long log goes on.
        """
        config = self.config
        return TopicRegistry(
            self.metadata_log(),
            broker_id=config.node_id,
            capacity=MAX_PARTITIONS,
            broker_values=config.broker_values(),
            now_ms=_now_ms,
            hooks=RegistryHooks(
                on_removed, on_broker_config, self.memory.table.initialise_row, step
            ),
        )

    def logs(
        self,
        registry: TopicRegistry,
        is_restored: Callable[[], bool] = lambda: True,
        step: Callable[[], None] = lambda: None,
        process: int = HOUSEKEEPER,
    ) -> LogManager:
        """Make what opens partitions' logs.

        Args:
            is_restored: whether partitions may be opened; see close_until_restored.
            step: called for each log that a request touches.
            process: the process's id as the owner of a log's sync.
        """
        return LogManager(
            self.directories,
            self.memory.table,
            registry,
            producer_id_expiration_ms=self.config.producer_id_expiration_ms,
            is_behind=lambda: self.memory.metadata_cell.end != registry.version,
            is_restored=is_restored,
            step=step,
            syncer=Syncer(process, self._notify),
        )

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
        """Return the coordinator's topics by name, as they are created.

        The coordinator creates them, or a handler whose client asks for one.

        Source: Kafka's AutoTopicCreationManager; GroupCoordinatorConfig,
        TransactionLogConfig.
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
        )
        return {each.name: each for each in topics}

    # -- authorization, quotas, clients' metrics ---------------------------------------

    def authorization(self, registry: TopicRegistry) -> Authorization | None:
        """Make what asks the authorizer; None: there is none, and all is allowed."""
        return make_authorization(self.config, self.memory, self.listeners, registry)

    def client_quotas(self, registry: TopicRegistry) -> ClientQuotas:
        """Make what charges clients for their requests."""
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
        """Make what takes clients' metrics; None: no receiver is configured."""
        if not self.config.has_telemetry_receiver:
            return None
        # Imported here: most brokers have no receiver.
        from mpbroker.broker.telemetry_setup import client_telemetry

        return client_telemetry(self.config, self.memory, self.listeners, registry)


def _now_ms() -> int:
    return time.time_ns() // _NS_PER_MS

"""Compose the coordinator: its logs, its state machines, its loop."""

from __future__ import annotations

import importlib
import os
import uuid
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from mpbroker.coordinator.context import CoordinatorContext
from mpbroker.coordinator.coordinator_logs import StateMachines
from mpbroker.coordinator.coordinator_process import (
    Clock,
    CoordinatorProcess,
    RequestPort,
)
from mpbroker.coordinator.coordinator_topic import CoordinatorTopic
from mpbroker.coordinator.durability import Durability
from mpbroker.coordinator.groups.group_config import GroupConfig
from mpbroker.coordinator.groups.group_coordinator import GroupCoordinator
from mpbroker.coordinator.groups.group_records import KEYS
from mpbroker.coordinator.outbox import Outbox
from mpbroker.coordinator.record_writer import Syncs
from mpbroker.coordinator.timers import Timers
from mpbroker.coordinator.transactions.open_transactions import SharedOpenTransactions
from mpbroker.coordinator.transactions.transaction_coordinator import TransactionConfig
from mpbroker.coordinator.transactions.transaction_markers import MarkerWriter
from mpbroker.coordinator.transactions.transaction_records import (
    VALUE_VERSION,
    TransactionLogKey,
    TransactionLogValue,
)
from mpbroker.coordinator.transactions.transactions import Transactions
from mpbroker.ipc.layout import COORDINATOR, HANDLER_STEPS, handler_row
from mpbroker.ipc.tables.member_sessions import MemberSessions
from mpbroker.ipc.tables.transaction_table import TransactionTable
from mpbroker.metadata.topic_names import OFFSETS_TOPIC, TRANSACTION_TOPIC
from mpbroker.network.request_channel import HandlerEnd
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.records.compression import Codec
from mpbroker.server.api_messages import error_answer
from mpbroker.server.group_commit import GroupCommit
from mpbroker.server.purgatory import Purgatory
from mpbroker.storage.log.disk_sync import DiskSync
from mpbroker.storage.log.own_appends import OwnAppends
from mpbroker.storage.partition_directory import directory_name

if TYPE_CHECKING:
    from mpbroker.broker.process_parts import ProcessParts
    from mpbroker.config import BrokerConfig
    from mpbroker.metadata.topics import Topic, TopicRegistry

_MS_PER_MINUTE: Final = 60_000
# The requests that a successor is asked first; their modules are imported before.
_FIRST_ASKED: Final = (
    ApiKey.OFFSET_COMMIT,
    ApiKey.OFFSET_FETCH,
    ApiKey.JOIN_GROUP,
    ApiKey.SYNC_GROUP,
    ApiKey.HEARTBEAT,
    ApiKey.CONSUMER_GROUP_HEARTBEAT,
    ApiKey.INIT_PRODUCER_ID,
    ApiKey.ADD_PARTITIONS_TO_TXN,
    ApiKey.END_TXN,
)


def warm_up() -> None:
    """Make what a new coordinator would make first: the decoders of its logs."""
    for key_version, (key, value) in KEYS.items():
        key.decoder(key_version)
        value.decoder(value.valid_versions[min(3, len(value.valid_versions) - 1)])
    TransactionLogKey.decoder(0)
    TransactionLogValue.decoder(VALUE_VERSION)
    for api_key in _FIRST_ASKED:
        importlib.import_module(f"mpbroker.protocol.messages.{api_key.name.lower()}")


class RegistryTopics:
    """Answers the coordinator's questions about topics from the registry."""

    def __init__(self, registry: TopicRegistry) -> None:
        self._registry = registry

    def partition_count(self, topic: str) -> int:
        found = self._registry.topic(topic)
        return 0 if found is None else len(found.partitions)

    def topic_name(self, topic_id: bytes) -> str | None:
        found = self._registry.topic_by_id(topic_id)
        return None if found is None else found.name

    def topic_id(self, topic: str) -> bytes | None:
        found = self._registry.topic(topic)
        return None if found is None else found.topic_id

    def topic_names(self) -> Iterable[str]:
        return [topic.name for topic in self._registry.topics()]

    def version(self) -> int:
        return self._registry.version


def group_config(config: BrokerConfig) -> GroupConfig:
    """Return the group coordinator's part of the broker's settings."""
    return GroupConfig(
        group_initial_rebalance_delay_ms=config.group_initial_rebalance_delay_ms,
        group_min_session_timeout_ms=config.group_min_session_timeout_ms,
        group_max_session_timeout_ms=config.group_max_session_timeout_ms,
        group_max_size=config.group_max_size,
        offset_metadata_max_bytes=config.offset_metadata_max_bytes,
        message_max_bytes=min(
            config.message_max_bytes, config.offsets_topic_segment_bytes
        ),
        offsets_retention_ms=config.offsets_retention_minutes * _MS_PER_MINUTE,
        offsets_retention_check_interval_ms=(
            config.offsets_retention_check_interval_ms
        ),
        rebalance_protocols=tuple(config.group_coordinator_rebalance_protocols),
        group_consumer_session_timeout_ms=config.group_consumer_session_timeout_ms,
        group_consumer_heartbeat_interval_ms=(
            config.group_consumer_heartbeat_interval_ms
        ),
        group_consumer_max_size=config.group_consumer_max_size,
        group_consumer_assignors=tuple(config.group_consumer_assignors),
        group_consumer_migration_policy=config.group_consumer_migration_policy,
    )


def transaction_config(config: BrokerConfig) -> TransactionConfig:
    """Return the transaction coordinator's part of the broker's settings."""
    return TransactionConfig(
        config.transaction_max_timeout_ms,
        config.transactional_id_expiration_ms,
        config.transaction_abort_timed_out_transaction_cleanup_interval_ms,
        config.transaction_remove_expired_transaction_cleanup_interval_ms,
        config.transaction_partition_verification_enable,
    )


class CoordinatorRole:
    """The objects of one coordinator process."""

    def __init__(self, parts: ProcessParts) -> None:
        self._parts = parts
        self._process: CoordinatorProcess | None = None
        config, memory = parts.config, parts.memory
        self._words = memory.control.words
        self._registry = parts.registry(self._topic_removed, step=self._note_step)
        self._logs = parts.logs(
            self._registry, step=self._note_step, process=COORDINATOR
        )
        self._made = parts.internal_topics()
        self._own_appends = OwnAppends(memory.table)
        self._context = CoordinatorContext(
            Outbox(),
            Timers(),
            RegistryTopics(self._registry),
            MemberSessions(memory.member_sessions.words),
        )
        self._offsets_topic = self._log_of(
            OFFSETS_TOPIC,
            Codec(config.offsets_topic_compression_codec),
            config.offsets_load_buffer_size,
        )
        self._groups = GroupCoordinator(
            group_config(config),
            self._context,
            self._offsets_topic.num_partitions,
            lambda: str(uuid.uuid4()),
            overrides=self._registry.group_overrides,
        )
        self._channel = HandlerEnd(
            COORDINATOR,
            memory.control,
            memory.arena,
            memory.arena_layout,
            memory.ring,
            memory.responses,
        )
        self._purgatory = Purgatory(COORDINATOR, memory.table, memory.notices)
        self._disk = DiskSync()
        self._commit = GroupCommit(
            COORDINATOR, self._disk, self._sync_ended, memory.control.words
        )
        self._durability = Durability(
            self._commit.want, memory.notices[COORDINATOR], self._commit.sync_at_once
        )

    def run(self) -> None:
        """Serve until the broker stops."""
        self._process = self._coordinator_process()
        self._process.run()

    # -- called by its parts
    # ------------------------------------------------------------

    def _note_step(self) -> None:
        """Show the supervisor's lease that a load or a long turn makes progress."""
        self._words[handler_row(COORDINATOR) + HANDLER_STEPS] += 1

    def _topic_removed(self, topic: Topic) -> None:
        """Forget a deleted topic; start anew if it was one of the coordinator's own."""
        self._logs.forget(topic)
        if self._process is None:
            return  # nothing is loaded yet
        if topic.name in (OFFSETS_TOPIC, TRANSACTION_TOPIC):
            self._process.must_restart = True
        else:
            self._groups.topic_deleted(topic.name)

    def _sync_ended(self, row: int, handlers: int) -> None:
        """Tell our own answers and waiting handlers that a log is on disk."""
        self._durability.sync_ended(row)
        if others := handlers & ~(1 << COORDINATOR):
            self._purgatory.notify(row, others)

    def _exists(self, topic: Topic, partition: int) -> bool:
        name = directory_name(topic.name, partition)
        return any(
            os.path.isdir(f"{directory.path}/{name}")
            for directory in self._parts.directories
        )

    # -- its parts ---------------------------------------------------------------------

    def _log_of(self, name: str, codec: Codec, load_bytes: int) -> CoordinatorTopic:
        """Return the log of one of the coordinator's topics."""
        return CoordinatorTopic(
            self._registry,
            self._logs.log,
            self._exists,
            self._made[name],
            codec=codec,
            load_bytes=load_bytes,
            own_appends=self._own_appends,
        )

    def _transactions(self) -> Transactions:
        config, registry = self._parts.config, self._registry
        markers = MarkerWriter(
            registry,
            self._logs.log,
            self._groups,
            lambda log: self._purgatory.notify_waiters(log.row),
            self._own_appends,
        )
        table = TransactionTable(self._parts.memory.transactions)
        return Transactions(
            transaction_config(config),
            self._context,
            self._log_of(
                TRANSACTION_TOPIC,
                Codec.NONE,
                config.transaction_state_log_load_buffer_size,
            ),
            self._groups,
            markers,
            SharedOpenTransactions(table, registry),
            registry.allocate_producer_id,
            lambda call: self._channel.give_back(call.request.slot),
        )

    def _coordinator_process(self) -> CoordinatorProcess:
        parts, memory = self._parts, self._parts.memory
        bell = memory.handler_bells[COORDINATOR]
        return CoordinatorProcess(
            RequestPort(memory.control, memory.lane, bell, self._channel),
            StateMachines(
                self._context, self._groups, self._offsets_topic, self._transactions()
            ),
            Syncs(self._disk, self._commit, self._durability, self._purgatory),
            Clock(),
            self._registry.catch_up,
            error_answer,
            parts.authorization(self._registry),
            parts.client_quotas(self._registry),
        )

"""Compose the coordinator: its logs, its state machines, its loop."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from mpbroker.base.logger import get_logger
from mpbroker.broker.coordinator_settings import (
    group_config,
    share_settings,
    transaction_config,
)
from mpbroker.coordinator.context import CoordinatorContext
from mpbroker.coordinator.coordinator_logs import ShareGroups, StateMachines
from mpbroker.coordinator.coordinator_process import (
    Clock,
    CoordinatorProcess,
    RequestPort,
)
from mpbroker.coordinator.coordinator_topic import CoordinatorTopic, RecordTopic
from mpbroker.coordinator.durability import Durability
from mpbroker.coordinator.groups.group_coordinator import GroupCoordinator
from mpbroker.coordinator.groups.group_records import KEYS
from mpbroker.coordinator.outbox import Call, Outbox
from mpbroker.coordinator.record_writer import Syncs
from mpbroker.coordinator.share.share_offsets import ShareOffsets
from mpbroker.coordinator.share.share_service import GroupSettings, ShareService
from mpbroker.coordinator.share.share_state_apis import ShareStateApis
from mpbroker.coordinator.share.share_states import ShareStates
from mpbroker.coordinator.share_reader import ShareLogReader
from mpbroker.coordinator.timers import Timers
from mpbroker.coordinator.transactions.open_transactions import SharedOpenTransactions
from mpbroker.coordinator.transactions.transaction_markers import MarkerWriter
from mpbroker.coordinator.transactions.transaction_records import (
    VALUE_VERSION,
    TransactionLogKey,
    TransactionLogValue,
)
from mpbroker.coordinator.transactions.transactions import Transactions
from mpbroker.ipc import pulse
from mpbroker.ipc.layout import (
    CONNECTION_STATE,
    COORDINATOR,
    GENERATION_SHIFT,
    STATE_MASK,
    ConnectionState,
    connection_row,
)
from mpbroker.ipc.tables.member_sessions import MemberSessions
from mpbroker.ipc.tables.transaction_table import TransactionTable
from mpbroker.metadata.features import SHARE_VERSION
from mpbroker.metadata.row_release import RowRelease
from mpbroker.metadata.topic_names import (
    OFFSETS_TOPIC,
    SHARE_STATE_TOPIC,
    TRANSACTION_TOPIC,
)
from mpbroker.metadata.topics import NewTopic
from mpbroker.network.request_channel import HandlerEnd
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.records.compression import Codec
from mpbroker.server.api_messages import error_answer
from mpbroker.server.configs.group_config_def import duration_ms
from mpbroker.server.group_commit import GroupCommit
from mpbroker.server.handlers.metadata import AUTO_CREATION_SPARES
from mpbroker.server.purgatory import Purgatory
from mpbroker.storage.log.disk_sync import DiskSync
from mpbroker.storage.log.own_appends import OwnAppends

if TYPE_CHECKING:
    from mpbroker.broker.process_parts import ProcessParts
    from mpbroker.cluster.groups.group_store import GroupStore
    from mpbroker.coordinator.shard_topic import ShardLog, ShardTopic
    from mpbroker.coordinator.shard_transactions import ShardTransactions
    from mpbroker.coordinator.written_log import WrittenLog
    from mpbroker.metadata.topics import Topic, TopicRegistry
    from mpbroker.server.group_commit import SyncableLog
    from mpbroker.storage.log_manager import LogManager

_LOG = get_logger(__name__)
# A disk with groups that could not be read may be back by then.
_READ_AGAIN_MS: Final = 30_000
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
    """Make the decoders of the coordinator's logs in the process that will fork it.

    A coordinator that replaces a dead one then starts faster.
    """
    for key_version, (key, value) in KEYS.items():
        key.decoder(key_version)
        value.decoder(value.valid_versions[min(3, len(value.valid_versions) - 1)])
    TransactionLogKey.decoder(0)
    TransactionLogValue.decoder(VALUE_VERSION)
    for api_key in _FIRST_ASKED:
        importlib.import_module(f"mpbroker.protocol.messages.{api_key.name.lower()}")


def _new_uuid() -> str:
    import uuid  # imported here: it brings the module platform, 4 ms in all

    return str(uuid.uuid4())


class RegistryTopics:
    """Answers the coordinator's questions about topics from the metadata log."""

    def __init__(self, registry: TopicRegistry, logs: LogManager) -> None:
        self._registry = registry
        self._logs = logs

    def partition_count(self, topic: str) -> int:
        found = self._registry.topic(topic)
        return 0 if found is None else len(found.partitions)

    def has_transactions(self, topic: str) -> bool:
        if topic == OFFSETS_TOPIC and self._logs.node_id is not None:
            return False
        found = self._registry.topic(topic)
        return found is None or not (
            found.config.diskless_enable or self._logs.is_elsewhere(found)
        )

    def topic_name(self, topic_id: bytes) -> str | None:
        found = self._registry.topic_by_id(topic_id)
        return None if found is None else found.name

    def topic_id(self, topic: str) -> bytes | None:
        found = self._registry.topic(topic)
        return None if found is None else found.topic_id

    def topic_names(self) -> Iterable[str]:
        return [topic.name for topic in self._registry.topics()]

    def create(
        self, wanted: Sequence[tuple[str, int, Mapping[str, str]]]
    ) -> Mapping[str, str]:
        spare = self._registry.capacity // AUTO_CREATION_SPARES
        try:
            results = self._registry.create_topics(
                [NewTopic(*each) for each in wanted], spare=spare
            )
        except ApiError as error:
            # Other nodes of the cluster have changed the metadata again and again.
            return {each[0]: error.message or error.error_code.name for each in wanted}
        return {
            each[0]: result.message or result.error_code.name
            for each, result in zip(wanted, results, strict=True)
            if isinstance(result, ApiError)
            and result.error_code is not ErrorCode.TOPIC_ALREADY_EXISTS
        }

    def version(self) -> int:
        return self._registry.version


class ConnectionRows:
    """Says which connections are open, by their entries in shared memory."""

    def __init__(self, words: memoryview) -> None:
        self._words = words

    def identify(self, call: Call) -> tuple[int, int]:
        connection: int = call.request.connection
        state = self._words[connection_row(connection) + CONNECTION_STATE]
        return connection, state >> GENERATION_SHIFT

    def is_open(self, connection: tuple[int, int]) -> bool:
        state = self._words[connection_row(connection[0]) + CONNECTION_STATE]
        return (
            state >> GENERATION_SHIFT == connection[1]
            and state & STATE_MASK != ConnectionState.FREE
        )


# The settings of this many share groups are cached.
_GROUPS_KNOWN: Final = 1000


class CoordinatorRole:
    """Makes and connects the objects of the coordinator process, and runs it."""

    def __init__(self, parts: ProcessParts) -> None:
        self._parts = parts
        self._process: CoordinatorProcess | None = None
        config, memory = parts.config, parts.memory
        self._words = memory.control.words
        pulse.show(memory.control, COORDINATOR)
        self._registry = parts.registry(self._topic_removed, step=pulse.step)
        self._logs = parts.logs(self._registry, step=pulse.step, process=COORDINATOR)
        self._rows = RowRelease(
            self._words,
            COORDINATOR,
            lambda: self._registry,
            self._holds,
            self._forget_rows,
        )
        self._made = parts.internal_topics()
        self._own_appends = OwnAppends(memory.table)
        self._context = CoordinatorContext(
            Outbox(),
            Timers(),
            RegistryTopics(self._registry, self._logs),
            MemberSessions(memory.member_sessions.words),
            self._feature_levels,
        )
        self._clock = Clock()
        self._shard_transactions: ShardTransactions | None = None
        self._shards = self._shard_topic()
        self._offsets_topic: RecordTopic = self._shards or self._local_offsets()
        self._groups = GroupCoordinator(
            group_config(config),
            self._context,
            self._offsets_topic.num_partitions,
            _new_uuid,
            overrides=self._registry.group_overrides,
        )
        if self._shards is not None:
            self._groups.be_sharded()
            self._show_positions()
        self._channel = HandlerEnd(
            COORDINATOR,
            memory.control,
            memory.arena,
            memory.arena_layout,
            memory.ring,
            memory.responses,
        )
        self._purgatory = Purgatory(COORDINATOR, memory.table, memory.notices)
        self._share = self._share_groups()
        self._disk = DiskSync()
        self._commit = GroupCommit(
            COORDINATOR, self._disk, self._sync_ended, memory.control.words
        )
        self._durability = self._make_durability()

    def run(self) -> None:
        """Run the coordinator's loop until the broker stops."""
        self._process = self._coordinator_process()
        self._process.run()

    # -- called by its parts
    # ------------------------------------------------------------

    def _topic_removed(self, topic: Topic) -> None:
        """Forget a deleted topic; restart this process if the topic held its state."""
        self._logs.forget(topic)
        self._rows.removed(topic)
        if self._process is None:
            return  # nothing is loaded yet
        if topic.name in (OFFSETS_TOPIC, TRANSACTION_TOPIC, SHARE_STATE_TOPIC):
            self._process.must_restart = True
        else:
            self._groups.topic_deleted(topic.name)
            self._share.states.topic_deleted(topic.topic_id)

    def _holds(self, rows: Collection[int]) -> bool:
        return self._durability.awaits_any(rows) or self._commit.syncs_any(rows)

    def _forget_rows(self, rows: Collection[int]) -> None:
        self._logs.forget_rows(rows)
        # A dead coordinator may have left entries, too, for rows that were deleted
        # after its death.
        TransactionTable(self._parts.memory.transactions).close_rows(
            lambda row: self._registry.partition_by_row(row) is None
        )

    def _sync_ended(self, row: int, handlers: int) -> None:
        """Note that a log is on disk: send waiting answers, wake waiting processes.

        Args:
            row: the partition's row in shared memory.
            handlers: a bit for each process that waits for the log.
        """
        self._durability.sync_ended(row)
        if others := handlers & ~(1 << COORDINATOR):
            self._purgatory.notify(row, others)

    def _catch_up(self) -> None:
        self._registry.catch_up()
        self._rows.look()

    # -- its parts ---------------------------------------------------------------------

    def _log_of(self, name: str, codec: Codec, load_bytes: int) -> CoordinatorTopic:
        """Return the log of one of the coordinator's topics."""
        return CoordinatorTopic(
            self._registry,
            self._logs.log,
            self._logs.may_have_log,
            self._made[name],
            codec=codec,
            load_bytes=load_bytes,
            own_appends=self._own_appends,
        )

    def _shard_topic(self) -> ShardTopic | None:
        """Return what stands for __consumer_offsets in a cluster; None: no cluster."""
        url = self._parts.config.cluster_database_url
        if not url:
            return None
        # Imported here: most brokers are in no cluster.
        from mpbroker.cluster.groups.group_store import GroupStore
        from mpbroker.coordinator.shard_topic import ShardTopic
        from mpbroker.coordinator.shard_transactions import ShardTransactions
        from mpbroker.metadata.cluster_nodes import node_epoch_path

        store = GroupStore(url, node_epoch_path(self._parts.directories[0].path))
        self._adopt_groups(store)
        self._shard_transactions = ShardTransactions(
            store,
            self._context.timers,
            self._coordinates_transactions,
            self._clock.now_ms,
        )
        return ShardTopic(store)

    def _show_positions(self) -> None:
        """Have the offsets of this node's groups written for the exporter."""
        from mpbroker.coordinator.group_positions import GroupPositions

        home = self._parts.directories[0].path
        timers = self._context.timers
        positions = GroupPositions(home, self._groups.offsets.committed, timers)
        positions.look(self._clock.now_ms())

    def _coordinates_transactions(self) -> bool:
        topic = self._registry.topic(TRANSACTION_TOPIC)
        return topic is not None and not self._logs.is_elsewhere(topic)

    def _adopt_groups(self, store: GroupStore) -> None:
        """Have the groups copied that this broker had before it became a node."""
        from mpbroker.metadata.cluster_nodes import adopted_groups_path

        mark = adopted_groups_path(self._parts.directories[0].path)
        topic = self._registry.topic(OFFSETS_TOPIC)
        if topic is None or self._logs.is_elsewhere(topic) or os.path.exists(mark):
            return
        self._read_groups(store, mark, time.time_ns() // 1_000_000)

    def _read_groups(self, store: GroupStore, mark: str, now_ms: int) -> None:
        """Have the groups of before copied, as soon as they can be read."""
        from mpbroker.coordinator.group_adoption import records_to_adopt

        try:
            records = records_to_adopt(self._local_offsets(), pulse.step)
        except (ApiError, OSError) as error:
            _LOG.error(
                "no group is coordinated here until this broker's own groups can be"
                " read from __consumer_offsets: %s",
                error,
            )
            store.adopt(None, mark)
            self._context.timers.schedule(
                "adoption",
                now_ms + _READ_AGAIN_MS,
                lambda at_ms: self._read_groups(store, mark, at_ms),
            )
        else:
            store.adopt(records, mark)

    def _local_offsets(self) -> CoordinatorTopic:
        config = self._parts.config
        return self._log_of(
            OFFSETS_TOPIC,
            Codec(config.offsets_topic_compression_codec),
            config.offsets_load_buffer_size,
        )

    def _feature_levels(self) -> Mapping[str, int]:
        """Return the levels of features; a cluster has no share groups."""
        levels = self._registry.features.levels
        if self._shards is None:
            return levels
        return {name: level for name, level in levels.items() if name != SHARE_VERSION}

    def _make_durability(self) -> Durability:
        commit, notices = self._commit, self._parts.memory.notices[COORDINATOR]
        if self._shards is None:
            return Durability(commit.want, notices, commit.sync_at_once)
        # Imported here, as above.
        from mpbroker.coordinator.shard_topic import ShardLog

        def want(log: SyncableLog | ShardLog) -> None:
            if not isinstance(log, ShardLog):  # which is written without being asked
                commit.want(log)

        def sync_at_once(logs: list[SyncableLog | ShardLog]) -> None:
            commit.sync_at_once(
                [each for each in logs if not isinstance(each, ShardLog)]
            )

        return Durability(want, notices, sync_at_once)

    def _transactions(self) -> Transactions:
        config, registry = self._parts.config, self._registry
        markers = MarkerWriter(
            registry,
            self._logs.log,
            self._groups,
            self._grown,
            self._own_appends,
            self._shard_transactions,
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

    def _share_groups(self) -> ShareGroups:
        config, registry = self._parts.config, self._registry

        # Each fetch asks several times. By group: its own settings, and all of them.
        known: dict[str, tuple[dict[str, str], GroupSettings]] = {}

        def settings(group_id: str) -> GroupSettings:
            own = registry.group_overrides(group_id)
            found = known.get(group_id)
            if found is None or found[0] != own:
                if len(known) >= _GROUPS_KNOWN:
                    known.clear()
                found = known[group_id] = dict(own), share_settings(config, own)
            return found[1]

        topic = self._log_of(
            SHARE_STATE_TOPIC, Codec.NONE, config.share_coordinator_load_buffer_size
        )
        states = ShareStates(
            self._context,
            topic.num_partitions,
            lambda group_id: settings(group_id).limits,
            config.share_coordinator_snapshot_update_records_per_snapshot,
        )
        states.log_end = lambda number: topic.log_of(number).row.log_end_offset
        states.delete_before = lambda number, offset: topic.log_of(
            number
        ).delete_records(offset)
        reader = ShareLogReader(registry, self._logs.log)
        service = ShareService(
            self._context,
            states,
            reader,
            settings,
            duration_ms,
            ConnectionRows(self._words),
            config.group_share_max_share_sessions,
            config.fetch_max_bytes,
        )
        offsets = ShareOffsets(
            self._context.outbox, self._context.topics, self._groups, states, reader
        )
        self._groups.delete_share_states = offsets.delete_states
        state_apis = ShareStateApis(self._context.outbox, states, reader)
        return ShareGroups(topic, states, service, offsets, state_apis)

    def _grown(self, log: WrittenLog) -> None:
        """Tell waiting fetches that this process has appended to a log."""
        waiters = log.row.take_waiters()
        if waiters & 1 << COORDINATOR:
            self._share.service.has_grown(log.row.index)
        if others := waiters & ~(1 << COORDINATOR):
            self._purgatory.notify(log.row.index, others)

    def _coordinator_process(self) -> CoordinatorProcess:
        parts, memory = self._parts, self._parts.memory
        bell = memory.handler_bells[COORDINATOR]
        return CoordinatorProcess(
            RequestPort(memory.control, memory.lane, bell, self._channel),
            StateMachines(
                self._context,
                self._groups,
                self._offsets_topic,
                self._transactions(),
                self._share,
                self._shards,
                self._shard_transactions,
            ),
            Syncs(self._disk, self._commit, self._durability, self._grown),
            self._clock,
            self._catch_up,
            error_answer,
            parts.authorization(self._registry),
            parts.client_quotas(self._registry),
        )

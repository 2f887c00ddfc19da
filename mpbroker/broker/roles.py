"""Composition root: build each role's objects from plain values, and run them.

Each ``run_*`` is the whole life of one child process, right after its fork.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from mpbroker.base.logger import get_logger
from mpbroker.broker.authorizer_setup import make_authorization
from mpbroker.broker.internal_topics import internal_topics
from mpbroker.broker.quota_setup import client_quotas
from mpbroker.config import BrokerConfig
from mpbroker.config.dynamic_checks import checked_definition
from mpbroker.ipc.counters.error_counts import ErrorCounts
from mpbroker.ipc.layout import (
    HANDLER_STEPS,
    HEADER,
    HEADER_CLEAN_START,
    MAX_PARTITIONS,
    Phase,
    handler_row,
)
from mpbroker.ipc.limits_page import LimitsPage
from mpbroker.ipc.tables.client_software import ClientSoftware
from mpbroker.ipc.tables.transaction_table import TransactionTable
from mpbroker.metadata.metadata_log import MetadataLog
from mpbroker.metadata.topic_names import TRANSACTION_TOPIC
from mpbroker.metadata.topics import Topic, TopicRegistry
from mpbroker.network.acceptor import Acceptor
from mpbroker.network.connection_quotas import ConnectionQuotas
from mpbroker.network.processor import Processor
from mpbroker.network.request_channel import HandlerEnd
from mpbroker.server.apis import ApiTable, forwarded_apis
from mpbroker.server.core_cache import PlainRequests
from mpbroker.server.dispatcher import RequestDispatcher
from mpbroker.server.fetch.fetch_service import FetchService
from mpbroker.server.fetch.fetch_session import FetchSessions
from mpbroker.server.group_commit import GroupCommit
from mpbroker.server.intent import SlotIntent
from mpbroker.server.produce.produce_service import ProduceService
from mpbroker.server.purgatory import Purgatory
from mpbroker.server.request_handler import RequestHandler
from mpbroker.storage.log.disk_sync import DiskSync
from mpbroker.storage.log_directory import LogDirectory
from mpbroker.storage.log_manager import LogManager
from mpbroker.supervisor.become_child import become_child, set_process_title
from mpbroker.supervisor.listen_sockets import Listener
from mpbroker.supervisor.memory import BrokerMemory

if TYPE_CHECKING:
    from mpbroker.server.authorization.authorization import Authorization
    from mpbroker.server.telemetry_apis import TelemetryApis

_LOG = get_logger(__name__)

_MS: Final = 1_000_000
_SNAPSHOT_INTERVAL_MS: Final = 60_000
_REMOVAL_INTERVAL_MS: Final = 10_000


class Roles:
    """Everything a child needs, as it was when the broker started."""

    def __init__(
        self,
        config: BrokerConfig,
        memory: BrokerMemory,
        directories: Sequence[LogDirectory],
        listeners: Sequence[Listener],
        cluster_id: str,
    ) -> None:
        self._config = config
        self._memory = memory
        self._directories = directories
        self._listeners = listeners
        self._cluster_id = cluster_id
        self._secret = os.urandom(16)  # see ScramServer
        self.metrics_socket: socket.socket | None = None  # listening, for the exporter
        self.known: TopicRegistry | None = None  # the parent's: its children copy it

    def use(self, config: BrokerConfig) -> None:
        """Give other settings to all processes that are started from now on."""
        self._config = config

    def registry(
        self,
        on_removed: Callable[[Topic], None] | None = None,
        on_broker_config: Callable[[], None] | None = None,
        step: Callable[[], None] = lambda: None,
    ) -> TopicRegistry:
        """A process's own view of the topics."""
        config, memory = self._config, self._memory
        return TopicRegistry(
            MetadataLog(self._directories[0].path, memory.metadata_cell),
            broker_id=config.node_id,
            capacity=MAX_PARTITIONS,
            broker_values=config.broker_values(),
            now_ms=_now_ms,
            on_removed=on_removed,
            initialise_row=memory.table.initialise_row,
            on_broker_config=on_broker_config,
            step=step,
        )

    def close_until_restored(self, registry: TopicRegistry) -> None:
        """Have no partition opened until the coordinator has loaded; at a start.

        After a clean stop all markers of transactions are on disk, and where there are
        no transactions there are none.
        """
        was_clean = self._memory.control.words[HEADER + HEADER_CLEAN_START]
        if not was_clean and registry.topic(TRANSACTION_TOPIC) is not None:
            TransactionTable(self._memory.transactions).await_restoring()
            _LOG.info(
                "an unclean stop: all partitions are closed until transactions are"
                " loaded, and their ends there that a power cut may have taken"
            )

    def _logs(
        self,
        registry: TopicRegistry,
        is_restored: Callable[[], bool] = lambda: True,
        step: Callable[[], None] = lambda: None,
    ) -> LogManager:
        return LogManager(
            self._directories,
            self._memory.table,
            registry,
            producer_id_expiration_ms=self._config.producer_id_expiration_ms,
            is_behind=lambda: self._memory.metadata_cell.end != registry.version,
            is_restored=is_restored,
            step=step,
        )

    def _authorization(self, registry: TopicRegistry) -> Authorization | None:
        return make_authorization(self._config, self._memory, self._listeners, registry)

    def _telemetry(self, registry: TopicRegistry) -> TelemetryApis | None:
        config, memory = self._config, self._memory
        if not config.has_telemetry_receiver:
            return None
        # Imported here: most brokers have nobody who receives clients' metrics.
        from mpbroker.broker.telemetry_setup import telemetry_apis

        return telemetry_apis(config, memory, self._listeners, registry)

    # -- one process each --------------------------------------------------------------

    def run_acceptor(self, index: int) -> None:
        listener = self._listeners[index]
        name, protocol = listener.endpoint.listener_name, listener.endpoint[3]
        memory, plane = self._memory, self._plane(index)
        place = f"ListenerName({name})-{protocol}-{listener.port}"
        become_child(f"{plane}-kafka-socket-acceptor-{place}", memory)
        guard = f"mpbroker: {plane}-kafka-socket-acceptor-guard-{place}"
        Acceptor(
            index,
            listener.sock,
            memory.control,
            {number: ends[0] for number, ends in enumerate(memory.handovers)},
            memory.keeper_link,
            memory.acceptor_bell,
            ConnectionQuotas(index, memory.limits, memory.control),
            partial(set_process_title, guard),
        ).run()

    def run_processor(self, processor: int, listener_index: int) -> None:
        config, memory = self._config, self._memory
        listener = self._listeners[listener_index]
        name, protocol = listener.endpoint.listener_name, listener.endpoint[3]
        become_child(
            f"{self._plane(listener_index)}-kafka-network-thread-{config.node_id}"
            f"-ListenerName({name})-{protocol}-{processor}",
            memory,
        )
        ring = memory.ring_of(processor)
        if config.control_inject_enable and ring is memory.ring:
            from mpbroker.supervisor.control.control_faults import FullRing

            ring = FullRing(
                memory.control, memory.handler_bells, config.queued_max_requests
            )
        make: Callable[..., Processor] = Processor
        if listener.path is not None:
            from mpbroker.network.unix_processor import UnixProcessor

            make = UnixProcessor
        if protocol != "PLAINTEXT":
            # Imported here: nobody else pays for TLS and SASL.
            from mpbroker.broker.listener_setup import secure_processor

            path, secret = self._directories[0].path, self._secret
            known = self.known or self.registry()
            make = secure_processor(
                config, listener.endpoint, memory, path, secret, known
            )
        serving = make(
            processor,
            memory.control,
            memory.arena,
            memory.arena_layout,
            ring,
            memory.processor_bells[processor],
            memory.handovers,
            memory.keeper_link,
            config.socket_request_max_bytes,
            config.connections_max_idle_ms * _MS,
        )
        serving.limits = LimitsPage(memory.limits)
        serving.run()

    def _plane(self, listener: int) -> str:
        is_control = listener == self._memory.control_plane
        return "control-plane" if is_control else "data-plane"

    def run_handler(self, handler: int, *, is_control: bool = False) -> None:
        config, memory = self._config, self._memory
        plane = "control-plane" if is_control else "data-plane"
        become_child(f"{plane}-kafka-request-handler-{handler}", memory)
        word = handler_row(handler) + HANDLER_STEPS
        step = partial(_count_step, memory.control.words, word)
        registry = self.registry(
            lambda topic: logs.forget(topic), memory.supervisor_bell.ring, step
        )
        transactions = TransactionTable(memory.transactions)
        logs = self._logs(registry, transactions.is_restored, step)
        channel = HandlerEnd(
            handler,
            memory.control,
            memory.arena,
            memory.arena_layout,
            memory.control_ring if is_control else memory.ring,
            memory.responses,
        )
        purgatory = Purgatory(handler, memory.table, memory.notices)
        authorization = self._authorization(registry)
        plain = None
        if not is_control:
            plain = PlainRequests.of(
                channel,
                memory.table,
                registry,
                purgatory,
                authorization,
            )
        quotas = client_quotas(config, memory, registry)
        if plain is not None:
            plain.take_quotas(quotas)
            plain.take_lane(memory.lane, forwarded_apis())
        disk, dispatcher_type = DiskSync(), RequestDispatcher
        if config.control_inject_enable:
            from mpbroker.supervisor.control.control_faults import (
                FailingSync,
                SlowDispatcher,
            )

            plain, disk, dispatcher_type = None, FailingSync(), SlowDispatcher
        commit = GroupCommit(handler, disk, purgatory.notify, memory.control.words)
        errors = ErrorCounts(handler, memory.control.words)
        verify = config.transaction_partition_verification_enable
        if plain is not None and verify:
            plain.take_transactions(transactions, memory.lane.forward)
        produce = ProduceService(
            channel,
            registry,
            logs.log,
            purgatory,
            commit,
            sync_acks_all=True,
            plain=plain,
            is_open=transactions.contains,
            verify=verify,
            forward=memory.lane.forward,
            count_error=errors.count,
            authorization=authorization,
        )
        fetch = FetchService(
            channel,
            registry,
            logs.log,
            FetchSessions(
                memory.sessions,
                memory.session_cell,
                config.max_incremental_fetch_session_cache_slots,
            ),
            purgatory,
            config.fetch_max_bytes,
            authorization,
            handler=handler,
            plain=plain,
            count_error=errors.count,
        )
        fetch.quotas = quotas
        apis = ApiTable(
            definition=checked_definition(config),
            config_texts=config.static_texts(),
            node_id=config.node_id,
            rack=config.broker_rack,
            cluster_id=self._cluster_id,
            num_partitions=config.num_partitions,
            internal_topics=internal_topics(config),
            auto_create_topics=config.auto_create_topics_enable,
            delete_topics=config.delete_topic_enable,
            advertised=[
                config.advertised[listener.endpoint.listener_name]
                for listener in self._listeners
            ],
            log_dirs=[directory.path for directory in self._directories],
            control=memory.control,
            registry=registry,
            table=memory.table,
            logs=logs,
            produce=produce,
            fetch=fetch,
            changed=purgatory.notify_waiters,
            forward=memory.lane.forward,
            note_software=ClientSoftware(handler, memory.control.words).note,
            quotas=quotas,
            authorization=authorization,
            levels=memory.log_levels,
            intent=lambda request: SlotIntent(channel, request.slot),
            telemetry=self._telemetry(registry),
        )
        if is_control:
            apis.serve_no_data()
        dispatcher = dispatcher_type(
            apis.apis,
            apis.advertised_versions,
            apis.error_answer,
            apis.connection_name,
            errors.count,
        )
        RequestHandler(
            handler,
            memory.control,
            channel,
            dispatcher,
            purgatory,
            commit,
            disk,
            memory.handler_bells[handler],
            plain,
            quotas,
        ).run()

    def run_coordinator(self) -> None:
        # Imported here, as the housekeeper's: requests wait on its lane meanwhile.
        from mpbroker.broker.coordinator_role import CoordinatorRole

        become_child("group-coordinator", self._memory)
        # The first that can be done: who dies of memory may do so at any time.
        if not TransactionTable(self._memory.transactions).begin_restoring():
            _LOG.error(
                "transactions could not be loaded: partitions are read and written"
                " though they may lack what a power cut took of transactions' ends"
            )
        role = CoordinatorRole(
            self._config, self._memory, self._directories, self._authorization
        )
        registry = self.registry(lambda topic: role.topic_removed(topic, logs))
        logs = self._logs(registry)
        role.run(registry, logs)

    @staticmethod
    def warm_up() -> None:
        """Import what a coordinator and a keeper need: successors are back at once.

        Not before the first fork: no client should wait for it.
        """
        from mpbroker.broker import coordinator_role

        coordinator_role.warm_up()

    def write_broker_configs(self, texts: Mapping[str, str]) -> None:
        """Set dynamic configs of this broker, on behalf of the supervisor.

        It does not do so itself: whoever holds the log's mutex may have been stopped.
        """
        become_child("config-writer", self._memory)
        self.registry().alter_broker_config(
            str(self._config.node_id), lambda before: {**before, **texts}
        )

    def run_keeper(self) -> None:
        from mpbroker.network.moves.keeper import Keeper

        memory = self._memory
        become_child("socket-keeper", memory)
        Keeper(
            memory.control,
            memory.keeper_pair[1],
            {number: ends[0] for number, ends in enumerate(memory.handovers)},
            memory.keeper_bell,
            memory.processor_bells,
        ).run()

    @property
    def has_exporter(self) -> bool:
        """Whether anybody wants to know what was counted."""
        config = self._config
        return bool(
            config.metrics_listeners or config.request_log_path or config.otlp_endpoint
        )

    def run_exporter(self) -> None:
        # Imported here: most brokers have no such process.
        from mpbroker.exporter.exporter import Exporter

        memory = self._memory
        become_child("metrics-exporter", memory)
        registry = self.registry(lambda topic: logs.forget(topic))
        logs = self._logs(registry)
        names = [listener.endpoint.listener_name for listener in self._listeners]
        Exporter(self._config, memory, self.metrics_socket, registry, logs, names).run()

    def run_housekeeper(self) -> None:
        # Imported here: nobody else needs them, and no client waits for this process.
        from mpbroker.storage.cleaning.compaction import CleaningAbortedError
        from mpbroker.storage.cleaning.housekeeper import Housekeeper
        from mpbroker.storage.cleaning.log_cleaner import LogCleaner
        from mpbroker.storage.cleaning.log_upkeep import LogUpkeep

        memory, config = self._memory, self._config
        become_child("kafka-scheduler-log-housekeeper", memory)
        registry = self.registry(lambda topic: upkeep.forget_topic(topic))

        def catch_up() -> None:
            if registry.catch_up():
                upkeep.note_deletions()

        def stop_cleaning() -> None:
            if memory.phase >= Phase.DRAINING:
                raise CleaningAbortedError("the broker stops")

        cleaner = (
            LogCleaner(
                config.log_cleaner_dedupe_buffer_size,
                stop_cleaning,
                config.log_cleaner_io_max_bytes_per_second,
            )
            if config.log_cleaner_enable
            else None
        )
        restored = TransactionTable(memory.transactions).is_restored
        upkeep = LogUpkeep(self._logs(registry), registry, cleaner, restored)
        Housekeeper(
            memory.control,
            memory.housekeeper_bell,
            catch_up,
            [
                (config.log_retention_check_interval_ms, upkeep.run_retention),
                (config.log_flush_scheduler_interval_ms, upkeep.run_flush),
                (
                    config.log_flush_offset_checkpoint_interval_ms,
                    lambda _: upkeep.write_checkpoints(),
                ),
                (_SNAPSHOT_INTERVAL_MS, lambda _: upkeep.take_snapshots()),
                (_REMOVAL_INTERVAL_MS, upkeep.remove_deleted),
                (config.log_cleaner_backoff_ms, upkeep.run_cleaner),
            ],
            config.log_initial_task_delay_ms,
            upkeep.shut_down,
        ).run()


def _count_step(words: memoryview, word: int) -> None:
    words[word] += 1


def _now_ms() -> int:
    return time.time_ns() // _MS

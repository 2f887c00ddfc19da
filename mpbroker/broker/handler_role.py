"""Compose a handler: its core cache, services, table of APIs and loop."""

from __future__ import annotations

from functools import partial
from importlib import import_module

from mpbroker.broker.process_parts import ProcessParts
from mpbroker.config.dynamic_checks import checked_definition
from mpbroker.ipc.counters.error_counts import ErrorCounts
from mpbroker.ipc.layout import HANDLER_STEPS, handler_row
from mpbroker.ipc.tables.client_software import ClientSoftware
from mpbroker.ipc.tables.transaction_table import TransactionTable
from mpbroker.metadata.topics import Topic
from mpbroker.network.connection_rows import connection_name
from mpbroker.network.request_channel import HandlerEnd
from mpbroker.protocol.api_key import ApiKey
from mpbroker.server.api_messages import error_answer
from mpbroker.server.apis import advertised_versions, forwarded_apis, served
from mpbroker.server.core_cache import CoreCache, Forwarding, NoCoreCache
from mpbroker.server.described_partitions import DescribedPartitions
from mpbroker.server.dispatcher import RequestDispatcher
from mpbroker.server.fetch.fetch_service import FetchService
from mpbroker.server.fetch.fetch_session import FetchSessions
from mpbroker.server.group_commit import GroupCommit
from mpbroker.server.handler_context import Broker
from mpbroker.server.handlers.api_versions import ApiVersionsHandler
from mpbroker.server.intent import SlotIntent
from mpbroker.server.message_apis import served_apis
from mpbroker.server.produce.produce_service import ProduceService
from mpbroker.server.produce_transactions import ProduceTransactions
from mpbroker.server.purgatory import Purgatory
from mpbroker.server.request_handler import RequestHandler
from mpbroker.server.service_parts import ServiceParts
from mpbroker.storage.log.disk_sync import DiskSync

# Every client asks for Metadata first. Imported before the fork, all handlers share it.
import_module("mpbroker.server.handlers.metadata")


class HandlerRole:
    """The objects of one handler process.

    Args:
        handler: its id.
        is_control: it serves the control plane: no Produce, no Fetch.
    """

    def __init__(self, parts: ProcessParts, handler: int, *, is_control: bool) -> None:
        self._parts = parts
        self._handler = handler
        self._is_control = is_control
        memory = parts.memory
        self._words = memory.control.words
        self._steps_word = handler_row(handler) + HANDLER_STEPS
        self._transactions = ProduceTransactions(
            TransactionTable(memory.transactions),
            memory.lane.forward,
            verify=parts.config.transaction_partition_verification_enable,
        )
        self._registry = parts.registry(
            # The logs are made below; no topic is deleted before.
            lambda topic: self._logs.forget(topic),
            memory.supervisor_bell.ring,
            self._note_step,
        )
        self._logs = parts.logs(
            self._registry,
            self._transactions.table.is_restored,
            self._note_step,
            handler,
        )
        self._channel = HandlerEnd(
            handler,
            memory.control,
            memory.arena,
            memory.arena_layout,
            memory.control_ring if is_control else memory.ring,
            memory.responses,
        )
        self._purgatory = Purgatory(handler, memory.table, memory.notices)
        self._authorization = parts.authorization(self._registry)
        self._quotas = parts.client_quotas(self._registry)
        self._errors = ErrorCounts(handler, self._words)
        disk, self._make_dispatcher = self._disk_and_dispatcher()
        self._commit = GroupCommit(handler, disk, self._purgatory.notify, self._words)
        self._core_cache = self._make_core_cache()
        self._service_parts = ServiceParts(
            self._channel,
            self._registry,
            self._logs.log,
            self._purgatory,
            self._core_cache,
            self._errors.count,
            self._authorization,
        )

    def run(self) -> None:
        """Serve until the broker stops, or this handler retires."""
        memory = self._parts.memory
        broker = self._broker()
        rows = served(
            has_receiver=broker.telemetry is not None,
            is_control_plane=self._is_control,
        )
        versions = advertised_versions(rows)
        services = {
            ApiKey.PRODUCE: self._produce_service().handle,
            ApiKey.FETCH: self._fetch_service().handle,
            ApiKey.API_VERSIONS: ApiVersionsHandler(
                versions, ClientSoftware(self._handler, self._words).note
            ).handle,
        }
        dispatcher = self._make_dispatcher(
            served_apis(
                rows, broker, services, memory.lane.forward, self._authorization
            ),
            versions,
            error_answer,
            partial(connection_name, self._words),
            self._errors.count,
            self._quotas,
        )
        RequestHandler(
            self._handler,
            memory.control,
            self._channel,
            dispatcher,
            self._purgatory,
            self._commit,
            memory.handler_bells[self._handler],
            self._core_cache,
        ).run()

    def _note_step(self) -> None:
        """Show the supervisor's lease that a long request makes progress."""
        self._words[self._steps_word] += 1

    def _disk_and_dispatcher(self) -> tuple[DiskSync, type[RequestDispatcher]]:
        """Return what syncs and what dispatches; faults may be injected into both."""
        if not self._parts.config.control_inject_enable:
            return DiskSync(), RequestDispatcher
        from mpbroker.supervisor.control.control_faults import (
            FailingSync,
            SlowDispatcher,
        )

        return FailingSync(), SlowDispatcher

    def _make_core_cache(self) -> CoreCache | NoCoreCache:
        """Let the compiled core execute requests, where it is and where it may.

        The services of Produce and Fetch add, when they are made, how they park.
        """
        config, memory, compiled = (
            self._parts.config,
            self._parts.memory,
            self._channel.compiled,
        )
        # The core would not pass the places at which faults are injected.
        if compiled is None or self._is_control or config.control_inject_enable:
            return NoCoreCache()
        return CoreCache(
            compiled,
            memory.table,
            self._registry,
            self._purgatory,
            self._authorization,
            self._quotas,
            self._transactions,
            Forwarding(memory.lane, forwarded_apis()),
        )

    # -- services ----------------------------------------------------------------------

    def _produce_service(self) -> ProduceService:
        return ProduceService(
            self._service_parts, self._commit, self._transactions, sync_acks_all=True
        )

    def _fetch_service(self) -> FetchService:
        config, memory = self._parts.config, self._parts.memory
        return FetchService(
            self._service_parts,
            FetchSessions(
                memory.sessions,
                memory.session_cell,
                config.max_incremental_fetch_session_cache_slots,
            ),
            config.fetch_max_bytes,
            self._quotas,
            handler=self._handler,
        )

    def _broker(self) -> Broker:
        """Return what this process's handlers know of the broker."""
        parts, config, memory = self._parts, self._parts.config, self._parts.memory
        return Broker(
            node_id=config.node_id,
            cluster_id=parts.cluster_id,
            rack=config.broker_rack,
            advertised=[
                config.advertised[listener.endpoint.listener_name]
                for listener in parts.listeners
            ],
            auto_create_topics=config.auto_create_topics_enable,
            delete_topics=config.delete_topic_enable,
            num_partitions=config.num_partitions,
            internal_topics=parts.internal_topics(),
            log_dirs=[directory.path for directory in parts.directories],
            definition=checked_definition(config),
            static_configs=config.static_texts(),
            words=self._words,
            registry=self._registry,
            logs=self._logs,
            described=DescribedPartitions(config.node_id, self._logs.leader_epoch),
            delete_logs=self._delete_logs,
            intent=lambda request: SlotIntent(self._channel, request.slot),
            quotas=self._quotas,
            levels=memory.log_levels,
            telemetry=parts.telemetry(self._registry),
        )

    def _delete_logs(self, topic: Topic) -> None:
        """Take a deleted topic's partitions off line, and answer their fetches."""
        self._logs.delete_topic(topic)
        for row in topic.partitions:
            self._purgatory.notify_waiters(self._parts.memory.table.row(row))

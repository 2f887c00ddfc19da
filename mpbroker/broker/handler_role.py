"""Make the objects of a handler, the process that executes requests; run its loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from mpbroker.broker.authorizer_setup import token_settings
from mpbroker.broker.process_parts import ProcessParts
from mpbroker.config.dynamic_checks import checked_definition
from mpbroker.ipc import pulse
from mpbroker.ipc.counters.error_counts import ErrorCounts
from mpbroker.ipc.layout import HANDLER_COUNTERS, HandlerCounter, handler_row
from mpbroker.ipc.tables.client_software import ClientSoftware
from mpbroker.ipc.tables.transaction_table import TransactionTable
from mpbroker.metadata.row_release import RowRelease
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
from mpbroker.server.handler_context import Broker, volume
from mpbroker.server.handlers.api_versions import ApiVersionsHandler
from mpbroker.server.intent import SlotIntent
from mpbroker.server.message_apis import served_apis
from mpbroker.server.produce.produce_service import ProduceService
from mpbroker.server.produce_transactions import ProduceTransactions
from mpbroker.server.purgatory import Purgatory
from mpbroker.server.request_handler import RequestHandler
from mpbroker.server.service_parts import ServiceParts
from mpbroker.storage.log.disk_sync import DiskSync

if TYPE_CHECKING:
    from mpbroker.cluster.produce_link import ProduceLink
    from mpbroker.server.produce.shared_produces import SharedProduces
    from mpbroker.server.shared_requests import SharedRequests

# Every client asks for Metadata first. Imported before the fork, all handlers share it.
import_module("mpbroker.server.handlers.metadata")


class HandlerRole:
    """The objects of one handler process, which executes requests.

    Args:
        parts: builds the objects that several roles need.
        handler: the handler's id.
        is_control: whether it takes the requests of the control plane, where Produce
            and Fetch are not served.
    """

    def __init__(self, parts: ProcessParts, handler: int, *, is_control: bool) -> None:
        self._parts = parts
        self._handler = handler
        self._is_control = is_control
        memory = parts.memory
        self._words = memory.control.words
        pulse.show(memory.control, handler)
        self._transactions = ProduceTransactions(
            TransactionTable(memory.transactions),
            memory.lane.forward,
            verify=parts.config.transaction_partition_verification_enable,
        )
        self._registry = parts.registry(
            self._topic_removed,
            memory.supervisor_bell.ring,
            pulse.step,
        )
        self._logs = parts.logs(
            self._registry,
            self._transactions.table.is_restored,
            pulse.step,
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
        self._rows = RowRelease(
            self._words, handler, lambda: self._registry, self._holds, self._forget_rows
        )
        self._core_cache = self._make_core_cache()
        self._link = self._make_link()
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
        """Execute requests until the broker stops, or this handler retires."""
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
                versions,
                lambda: self._registry.features,
                ClientSoftware(self._handler, self._words).note,
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
        loop = RequestHandler(
            self._handler,
            memory.control,
            self._channel,
            dispatcher,
            self._purgatory,
            self._commit,
            memory.handler_bells[self._handler],
            self._core_cache,
        )
        loop.let_go = self._rows.look
        loop.run()

    def _topic_removed(self, topic: Topic) -> None:
        """Close a deleted topic's logs here, and note that its rows are to be released.

        A row is a partition's entry in shared memory. All parts of this role exist by
        then.
        """
        self._logs.forget(topic)
        self._rows.removed(topic)

    def _holds(self, rows: Collection[int]) -> bool:
        return self._purgatory.watches(rows) or self._commit.syncs_any(rows)

    def _forget_rows(self, rows: Collection[int]) -> None:
        self._logs.forget_rows(rows)
        self._purgatory.forget_rows(rows)

    def _count_refused_session(self) -> None:
        row = handler_row(self._handler)
        self._words[row + HANDLER_COUNTERS + HandlerCounter.SESSIONS_REFUSED] += 1

    def _disk_and_dispatcher(self) -> tuple[DiskSync, type[RequestDispatcher]]:
        """Return the object that syncs files, and the class of the request dispatcher.

        In a broker that was started with --enable-inject both can simulate faults.
        """
        if not self._parts.config.control_inject_enable:
            return DiskSync(), RequestDispatcher
        from mpbroker.supervisor.control.control_faults import (
            FailingSync,
            SlowDispatcher,
        )

        return FailingSync(), SlowDispatcher

    def _make_core_cache(self) -> CoreCache | NoCoreCache:
        """Make the tables by which the compiled core executes requests without Python.

        Without a core, in the control plane, and with --enable-inject it is a
        NoCoreCache: then Python executes every request.
        """
        config, memory, compiled = (
            self._parts.config,
            self._parts.memory,
            self._channel.compiled,
        )
        # The core would not run the Python classes that simulate faults.
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
            self._service_parts,
            self._commit,
            self._transactions,
            sync_acks_all=True,
            shared=self._shared_produces(),
        )

    def _make_link(self) -> ProduceLink | None:
        """Make the link to the cluster's writer; None: no cluster."""
        if not self._parts.config.cluster_database_url:
            return None
        # Imported here: most brokers are in no cluster.
        from mpbroker.cluster.produce_link import ProduceLink

        return ProduceLink(self._parts.directories[0].path, self._handler)

    def _shared_produces(self) -> SharedProduces | None:
        if self._link is None:
            return None
        from mpbroker.server.produce.shared_produces import SharedProduces

        return SharedProduces(self._channel, self._purgatory, self._link)

    def _shared_requests(self) -> SharedRequests | None:
        if self._link is None:
            return None
        from mpbroker.server.shared_requests import SharedRequests

        return SharedRequests(self._channel, self._purgatory, self._link)

    def _fetch_service(self) -> FetchService:
        config, memory = self._parts.config, self._parts.memory
        return FetchService(
            self._service_parts,
            FetchSessions(
                memory.sessions,
                memory.session_cell,
                config.max_incremental_fetch_session_cache_slots,
                self._count_refused_session,
            ),
            config.fetch_max_bytes,
            self._quotas,
            handler=self._handler,
            remote_wait_ms=config.remote_fetch_max_wait_ms,
            is_behind=self._is_behind(),
        )

    def _is_behind(self) -> Callable[[int], bool] | None:
        if self._link is None:
            return None
        from mpbroker.cluster.last_look import LastLook

        return LastLook(self._parts.directories[0].path).is_behind

    def _broker(self) -> Broker:
        """Return the description of the broker that the APIs in this process use."""
        parts, config, memory = self._parts, self._parts.config, self._parts.memory
        usable = {directory.path for directory in parts.directories}
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
            log_dirs=[os.path.abspath(path) for path in config.log_dirs],
            definition=checked_definition(config),
            static_configs=config.static_texts(),
            words=self._words,
            registry=self._registry,
            logs=self._logs,
            described=DescribedPartitions(config.node_id, self._logs),
            delete_logs=self._delete_logs,
            intent=lambda request: SlotIntent(self._channel, request.slot),
            quotas=self._quotas,
            levels=memory.log_levels,
            telemetry=parts.telemetry(self._registry),
            tokens=token_settings(config),
            senders=parts.senders(),
            nodes=parts.cluster_nodes(),
            shared_requests=self._shared_requests(),
            volume=lambda path: volume(path) if path in usable else None,
        )

    def _delete_logs(self, topic: Topic) -> None:
        """Take a deleted topic's partitions offline, and wake their parked fetches."""
        self._logs.delete_topic(topic)
        for row in topic.partitions:
            self._purgatory.notify_waiters(self._parts.memory.table.row(row))
        # The housekeeper then lets go of the rows soon, so that they can be used again.
        self._parts.memory.housekeeper_bell.ring()

"""The composition root: the functions that run each role's process after its fork.

Each ``run_*`` is the whole life of one child process: it builds the role's objects from
the settings and the shared memory, and runs them. The larger roles have a module each.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Final

from mpbroker.base.logger import get_logger
from mpbroker.broker.handler_role import HandlerRole
from mpbroker.broker.process_parts import ProcessParts
from mpbroker.config import BrokerConfig
from mpbroker.ipc import pulse
from mpbroker.ipc.layout import (
    ACCEPTOR_PULSES,
    EXPORTER_PULSE,
    HOUSEKEEPER,
    HOUSEKEEPER_PULSE,
    KEEPER_PULSE,
    Phase,
)
from mpbroker.ipc.limits_page import LimitsPage
from mpbroker.ipc.ring import RequestRing
from mpbroker.ipc.tables.row_users import EXPORTER
from mpbroker.ipc.tables.transaction_table import TransactionTable
from mpbroker.metadata.metadata_image import TopicImage
from mpbroker.metadata.row_release import RowRelease
from mpbroker.metadata.topics import Topic
from mpbroker.network.acceptor import Acceptor
from mpbroker.network.connection_quotas import ConnectionQuotas
from mpbroker.network.processor import Processor, ProcessorParts
from mpbroker.supervisor.become_child import become_child, set_process_title
from mpbroker.supervisor.listen_sockets import Listener

if TYPE_CHECKING:  # only one role imports each of them
    import ssl

    from mpbroker.broker.cluster_node import ClusterNode
    from mpbroker.broker.remote_storage import RemoteStorage
    from mpbroker.metadata.topics import TopicRegistry
    from mpbroker.storage.cleaning.log_upkeep import LogUpkeep
    from mpbroker.storage.log_manager import LogManager

_LOG = get_logger(__name__)
_Task = tuple[int, Callable[[int], object]]

_NS_PER_MS: Final = 1_000_000
_SNAPSHOT_INTERVAL_MS: Final = 60_000
_REMOVAL_INTERVAL_MS: Final = 10_000
# How often the metadata log is looked at. It costs a comparison, unless 20,000 records
# or more have come since the last snapshot.
_METADATA_INTERVAL_MS: Final = 60_000
_CONSOLE_TURN_S: Final = 0.2


class _Unreadable:
    """Logs that the metadata log cannot be read, once and not at each retry."""

    def __init__(self) -> None:
        self._is_told = False

    def note(self, error: OSError) -> None:
        if not self._is_told:
            self._is_told = True
            _LOG.error(
                "the metadata log cannot be read; its news is ignored: %s", error
            )


class Roles:
    """The functions that the supervisor's children run, one for each role.

    Attributes:
        parts: builds the objects that several roles need.
        known: the supervisor's view of the metadata log; each child gets a copy.
        metrics_socket: listens for the exporter; None: no metrics.listeners.
        console_socket: listens for the console; None: no console.listeners.
    """

    def __init__(
        self,
        parts: ProcessParts,
        metrics_socket: socket.socket | None,
        console_socket: socket.socket | None,
    ) -> None:
        self.parts = parts
        # For the supervisor, acceptors and processors: if the disk fails, they go on.
        self.known = parts.registry(on_unreadable=_Unreadable().note)
        self.metrics_socket = metrics_socket
        self.console_socket = console_socket
        self._board = None
        if console_socket is not None:
            # Imported here: most brokers have no console.
            from mpbroker.inspect.overview_board import OverviewBoard

            self._board = OverviewBoard()
        self._memory = parts.memory
        self._listeners = parts.listeners
        self._secret = os.urandom(16)  # see ScramServer

    def use(self, config: BrokerConfig) -> None:
        """Give other settings to all processes that are started from now on."""
        self.parts.config = config

    # -- one process each --------------------------------------------------------------

    def run_acceptor(self, index: int) -> None:
        listener = self._listeners[index]
        memory, plane = self._memory, self._plane(index)
        place = f"{_listener_title(listener)}-{listener.port}"
        become_child(f"{plane}-kafka-socket-acceptor-{place}", memory)
        pulse.show_in_header(memory.control, ACCEPTOR_PULSES + index)
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
        config, memory = self.parts.config, self._memory
        listener = self._listeners[listener_index]
        become_child(
            f"{self._plane(listener_index)}-kafka-network-thread-{config.node_id}"
            f"-{_listener_title(listener)}-{processor}",
            memory,
        )
        serving = self._processor_of(listener)(
            processor,
            ProcessorParts(
                memory.control,
                memory.arena,
                memory.arena_layout,
                self._ring_of(processor),
                memory.processor_bells[processor],
                memory.handovers,
                memory.keeper_link,
                memory.notices,
            ),
            config.socket_request_max_bytes,
            config.connections_max_idle_ms * _NS_PER_MS,
        )
        serving.limits = LimitsPage(memory.limits)
        serving.run()

    def _ring_of(self, processor: int) -> RequestRing:
        """Return the queue (ring) into which a processor puts requests for handlers.

        With --enable-inject it can simulate that it is full.
        """
        config, memory = self.parts.config, self._memory
        ring = memory.ring_of(processor)
        if not config.control_inject_enable or ring is not memory.ring:
            return ring
        from mpbroker.supervisor.control.control_faults import FullRing

        return FullRing(
            memory.control, memory.handler_bells, config.queued_max_requests
        )

    def _processor_of(self, listener: Listener) -> Callable[..., Processor]:
        """Return a function that makes a processor for a listener's protocol."""
        if listener.endpoint.security_protocol != "PLAINTEXT":
            # Imported here: a PLAINTEXT listener does not pay for TLS and SASL.
            from mpbroker.broker.listener_setup import secure_processor

            return secure_processor(
                self.parts, listener.endpoint, self._secret, self.known
            )
        if listener.path is not None:
            from mpbroker.network.unix_processor import UnixProcessor

            return UnixProcessor
        return Processor

    def _plane(self, listener: int) -> str:
        is_control = listener == self._memory.control_plane
        return "control-plane" if is_control else "data-plane"

    def run_handler(self, handler: int, *, is_control: bool = False) -> None:
        plane = "control-plane" if is_control else "data-plane"
        become_child(f"{plane}-kafka-request-handler-{handler}", self._memory)
        HandlerRole(self.parts, handler, is_control=is_control).run()

    def run_coordinator(self) -> None:
        # Imported here: only this process needs it, and requests for it wait on the
        # coordinator's lane meanwhile.
        from mpbroker.broker.coordinator_role import CoordinatorRole

        become_child("group-coordinator", self._memory)
        # First of all: a coordinator that lacks memory may die at any later line, and
        # this counts its attempts to load.
        if not TransactionTable(self._memory.transactions).begin_restoring():
            _LOG.error(
                "transactions could not be loaded: partitions are read and written"
                " although a power cut may have taken markers that end transactions"
            )
        CoordinatorRole(self.parts).run()

    @staticmethod
    def import_for_later() -> None:
        """Import what the coordinator and the keeper of sockets need.

        The keeper has a duplicate of each client's socket. Call it when the broker
        serves: no client shall wait for it.
        """
        import_module("mpbroker.network.moves.keeper")
        import_module("mpbroker.broker.coordinator_role")

    @staticmethod
    def prepare_successors() -> None:
        """Make what the coordinator after the present one would have to make first."""
        from mpbroker.broker import coordinator_role

        coordinator_role.warm_up()

    def write_broker_configs(self, texts: Mapping[str, str]) -> None:
        """Set dynamic configs of this broker, in a process of its own.

        The supervisor must not wait for the metadata log's mutex: the process that
        holds it may be stopped (SIGSTOP).
        """
        become_child("config-writer", self._memory)
        self.parts.registry().alter_broker_config(
            str(self.parts.config.node_id), lambda before: {**before, **texts}
        )

    def run_keeper(self) -> None:
        from mpbroker.network.moves.keeper import Keeper
        from mpbroker.network.moves.keeper_guard import KeeperGuard

        memory = self._memory
        become_child("socket-keeper", memory)
        pulse.show_in_header(memory.control, KEEPER_PULSE)
        entitle = partial(set_process_title, "mpbroker: socket-keeper-guard")
        Keeper(
            memory.control,
            memory.keeper_pair[1],
            {number: ends[0] for number, ends in enumerate(memory.handovers)},
            memory.keeper_bell,
            memory.processor_bells,
            KeeperGuard(memory.control, memory.keeper_link, entitle),
        ).run()

    @property
    def has_exporter(self) -> bool:
        """Whether the settings ask for metrics, a request log or the console."""
        config = self.parts.config
        return bool(
            config.metrics_listeners
            or config.request_log_path
            or config.slow_request_log_path
            or config.otlp_endpoint
            or self.has_console
        )

    def run_exporter(self) -> None:
        # Imported here: most brokers have no such process.
        from mpbroker.exporter.exporter import Exporter

        memory = self._memory
        become_child("metrics-exporter", memory)
        pulse.show_in_header(memory.control, EXPORTER_PULSE)

        def removed(topic: Topic) -> None:
            logs.forget(topic)
            rows.removed(topic)

        registry = self.parts.registry(removed, step=pulse.step)
        logs = self.parts.logs(registry, step=pulse.step)
        rows = RowRelease(
            memory.control.words, EXPORTER, lambda: registry, forget=logs.forget_rows
        )
        names = [listener.endpoint.listener_name for listener in self._listeners]
        Exporter(
            self.parts.config,
            memory,
            self.metrics_socket,
            registry,
            logs,
            names,
            rows.look,
            self._board,
        ).run()

    @property
    def has_console(self) -> bool:
        """Whether the settings ask for a console."""
        return self.console_socket is not None

    def run_console(self) -> None:
        # Imported here: most brokers have no such process.
        from mpbroker.config.console_settings import console_endpoint
        from mpbroker.console.access import access_by
        from mpbroker.console.console import Console
        from mpbroker.console.page_server import PageServer
        from mpbroker.console.schemas import schemas_by

        memory, config = self._memory, self.parts.config
        become_child("console", memory)
        assert self.console_socket is not None and self._board is not None
        endpoint = console_endpoint(config)
        (listener,) = (
            each
            for each in self._listeners
            if each.endpoint.listener_name == endpoint.listener_name
        )
        access = access_by(config, endpoint, listener.address)
        console = Console(access, self._board, schemas_by(config))
        PageServer(self.console_socket, console.answer, self._console_tls()).start()
        while memory.phase < Phase.STOPPED:
            time.sleep(_CONSOLE_TURN_S)
            console.expire()

    def _console_tls(self) -> Callable[[], ssl.SSLContext] | None:
        """Return a function that gives the console's SSL context; None: no TLS."""
        from mpbroker.config.listener_security import tls_of_console

        settings = tls_of_console(self.parts.config)
        if settings is None:
            return None
        from mpbroker.network.security.tls import TlsContexts

        return TlsContexts(settings).current

    def run_housekeeper(self) -> None:
        # Imported here: only this process needs them, and no client waits for it.
        from mpbroker.broker.log_cleaners import LogCleaners
        from mpbroker.storage.cleaning.housekeeper import Housekeeper
        from mpbroker.storage.cleaning.log_upkeep import LogUpkeep

        memory, config = self._memory, self.parts.config
        become_child("kafka-scheduler-log-housekeeper", memory)
        pulse.show_in_header(memory.control, HOUSEKEEPER_PULSE)

        def removed(topic: Topic) -> None:
            upkeep.forget_topic(topic)
            rows.removed(topic)

        removed_before: list[TopicImage] = []
        registry = self.parts.registry(
            removed, step=pulse.step, removed_before=removed_before
        )

        def catch_up() -> None:
            if registry.catch_up():
                note_deletions()

        def note_deletions(_: int = 0) -> None:
            upkeep.note_deletions()
            cleaners.noted()

        def replace_dead_records(_: int) -> None:
            # A housekeeper that was killed may have left directories of deleted topics.
            for directory in self.parts.directories:
                directory.finish_removals(removed_before)
            removed_before.clear()
            registry.replace_dead_records()

        restored = TransactionTable(memory.transactions).is_restored
        logs = self.parts.logs(registry, step=pulse.step)
        upkeep = LogUpkeep(logs, registry, is_restored=restored)
        node = self._cluster_node()
        remote = self._remote_storage()
        cleaners = LogCleaners(self.parts, registry)

        def is_held(_: Collection[int]) -> bool:
            # These children use rows under the housekeeper's word; see row_users.py.
            has_node_passed = node is None or node.has_passed(registry.version)
            return not has_node_passed or cleaners.may_hold_rows()

        rows = RowRelease(
            memory.control.words,
            HOUSEKEEPER,
            lambda: registry,
            is_held,
            upkeep.forget_rows,
        )
        if node is not None:
            node.look(0)  # at once: no topic can be created before

        def shut_down() -> None:
            for child in (node, remote):
                if child is not None:
                    child.stop()
            cleaners.stop()
            upkeep.shut_down()

        Housekeeper(
            memory.control,
            memory.housekeeper_bell,
            catch_up,
            [
                *(self._remote_tasks(remote, upkeep) if remote is not None else []),
                *([(node.LOOK_INTERVAL_MS, node.look)] if node is not None else []),
                *self._upkeep_tasks(upkeep, logs, registry),
                (_METADATA_INTERVAL_MS, replace_dead_records),
                # A housekeeper that was killed may not have noted deletions.
                (config.log_cleaner_backoff_ms, note_deletions),
                (cleaners.LOOK_INTERVAL_MS, cleaners.look),
            ],
            config.log_initial_task_delay_ms,
            shut_down,
            rows.look,
        ).run()

    def _cluster_node(self) -> ClusterNode | None:
        """Make the object that starts the cluster's child process; None: no cluster."""
        if not self.parts.config.cluster_database_url:
            return None
        # Imported here: most brokers are in no cluster.
        from mpbroker.broker.cluster_node import ClusterNode

        return ClusterNode(self.parts)

    def _remote_storage(self) -> RemoteStorage | None:
        """Make the object that starts the remote log manager; None: no tiered storage.

        The remote log manager is a child process.
        """
        if not self.parts.config.remote_log_storage_system_enable:
            return None
        # Imported here: most brokers have no remote store.
        from mpbroker.broker.remote_storage import RemoteStorage

        return RemoteStorage(self.parts)

    def _upkeep_tasks(
        self, upkeep: LogUpkeep, logs: LogManager, registry: TopicRegistry
    ) -> list[_Task]:
        """Return the housekeeper's tasks, each with its interval (ms).

        Compaction is not among them.
        """
        from mpbroker.storage.cleaning.log_upkeep import LOAD_INTERVAL_MS
        from mpbroker.storage.full_directories import LOOK_INTERVAL_MS

        config = self.parts.config
        return [
            *([(LOAD_INTERVAL_MS, upkeep.load_logs)] if self.has_exporter else []),
            (config.log_retention_check_interval_ms, upkeep.run_retention),
            (config.log_flush_scheduler_interval_ms, upkeep.run_flush),
            (
                config.log_flush_offset_checkpoint_interval_ms,
                lambda _: upkeep.write_checkpoints(),
            ),
            (_SNAPSHOT_INTERVAL_MS, lambda _: upkeep.take_snapshots()),
            (_REMOVAL_INTERVAL_MS, upkeep.remove_deleted),
            (LOOK_INTERVAL_MS, self.parts.full_directories().look),
            (LOOK_INTERVAL_MS, self.parts.offline_directories().look),
            (
                config.delegation_token_expiry_check_interval_ms,
                lambda _: registry.remove_expired_tokens(),
            ),
            *self._moving_tasks(logs, registry),
        ]

    def _moving_tasks(self, logs: LogManager, registry: TopicRegistry) -> list[_Task]:
        """Return the interval (ms) and task of moves between log directories."""
        if len(self.parts.directories) < 2:
            return []
        # Imported here: most brokers have one log directory.
        from mpbroker.storage.cleaning.replica_moves import (
            LOOK_INTERVAL_MS,
            ReplicaMoves,
        )

        return [(LOOK_INTERVAL_MS, ReplicaMoves(logs, registry).look)]

    def _remote_tasks(self, remote: RemoteStorage, upkeep: LogUpkeep) -> list[_Task]:
        """Return the housekeeper's tasks for tiered storage, with intervals (ms)."""
        return [
            # First: readers wait for its child, and the second task opens every log.
            (remote.LOOK_INTERVAL_MS, remote.look),
            (
                self.parts.config.remote_log_manager_task_interval_ms,
                upkeep.plan_remote_storage,
            ),
        ]


def _listener_title(listener: Listener) -> str:
    """Return a listener's part of a process title, as in Kafka's thread names."""
    endpoint = listener.endpoint
    return f"ListenerName({endpoint.listener_name})-{endpoint.security_protocol}"

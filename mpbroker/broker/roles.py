"""The composition root: what each role's process does, right after its fork.

Each ``run_*`` is the whole life of one child process: it builds the role's objects from
the settings and the shared memory, and runs them. The larger roles have a module each.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Final

from mpbroker.base.logger import get_logger
from mpbroker.broker.handler_role import HandlerRole
from mpbroker.broker.process_parts import ProcessParts
from mpbroker.config import BrokerConfig
from mpbroker.ipc.layout import Phase
from mpbroker.ipc.limits_page import LimitsPage
from mpbroker.ipc.ring import RequestRing
from mpbroker.ipc.tables.transaction_table import TransactionTable
from mpbroker.network.acceptor import Acceptor
from mpbroker.network.connection_quotas import ConnectionQuotas
from mpbroker.network.processor import Processor, ProcessorParts
from mpbroker.supervisor.become_child import become_child, set_process_title
from mpbroker.supervisor.listen_sockets import Listener

_LOG = get_logger(__name__)

_NS_PER_MS: Final = 1_000_000
_SNAPSHOT_INTERVAL_MS: Final = 60_000
_REMOVAL_INTERVAL_MS: Final = 10_000


class Roles:
    """The bodies of all roles' processes, as their supervisor needs them.

    Attributes:
        parts: builds what several roles have.
        known: this process's view of the metadata log, which a child gets a copy of.
        metrics_socket: listens for the exporter; None: no metrics.listeners.
    """

    def __init__(
        self, parts: ProcessParts, metrics_socket: socket.socket | None
    ) -> None:
        self.parts = parts
        self.known = parts.registry()
        self.metrics_socket = metrics_socket
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
            ),
            config.socket_request_max_bytes,
            config.connections_max_idle_ms * _NS_PER_MS,
        )
        serving.limits = LimitsPage(memory.limits)
        serving.run()

    def _ring_of(self, processor: int) -> RequestRing:
        """Return the ring for a processor's requests; a fault may be injected there."""
        config, memory = self.parts.config, self._memory
        ring = memory.ring_of(processor)
        if not config.control_inject_enable or ring is not memory.ring:
            return ring
        from mpbroker.supervisor.control.control_faults import FullRing

        return FullRing(
            memory.control, memory.handler_bells, config.queued_max_requests
        )

    def _processor_of(self, listener: Listener) -> Callable[..., Processor]:
        """Return what makes a processor of a listener, by its protocol and address."""
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
    def warm_up() -> None:
        """Import what a coordinator needs, so that its successors start faster.

        Called after the start: no client should wait for it.
        """
        import_module("mpbroker.network.moves.keeper")
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
        """Whether the settings ask for metrics or a request log."""
        config = self.parts.config
        return bool(
            config.metrics_listeners or config.request_log_path or config.otlp_endpoint
        )

    def run_exporter(self) -> None:
        # Imported here: most brokers have no such process.
        from mpbroker.exporter.exporter import Exporter

        memory = self._memory
        become_child("metrics-exporter", memory)
        registry = self.parts.registry(lambda topic: logs.forget(topic))
        logs = self.parts.logs(registry)
        names = [listener.endpoint.listener_name for listener in self._listeners]
        Exporter(
            self.parts.config, memory, self.metrics_socket, registry, logs, names
        ).run()

    def run_housekeeper(self) -> None:
        # Imported here: only this process needs them, and no client waits for it.
        from mpbroker.storage.cleaning.compaction import CleaningAbortedError
        from mpbroker.storage.cleaning.housekeeper import Housekeeper
        from mpbroker.storage.cleaning.log_cleaner import LogCleaner
        from mpbroker.storage.cleaning.log_upkeep import LogUpkeep

        memory, config = self._memory, self.parts.config
        become_child("kafka-scheduler-log-housekeeper", memory)
        registry = self.parts.registry(lambda topic: upkeep.forget_topic(topic))

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
        upkeep = LogUpkeep(self.parts.logs(registry), registry, cleaner, restored)
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


def _listener_title(listener: Listener) -> str:
    """Return a listener's part of a process title, as in Kafka's thread names."""
    endpoint = listener.endpoint
    return f"ListenerName({endpoint.listener_name})-{endpoint.security_protocol}"

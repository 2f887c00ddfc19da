"""Exporter: the loop that serves pages, pushes metrics and writes the request log.

It also makes the overview (figures of the broker's processes) that the console shows.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

import orjson

from mpbroker.base.logger import get_logger
from mpbroker.exporter.client_ids import ClientIds
from mpbroker.exporter.collector import Collector, why_not_ready
from mpbroker.exporter.exposition import CONTENT_TYPE, Family, render
from mpbroker.exporter.group_lag import CommittedOffsets, GroupLag, NodeGroupLag
from mpbroker.exporter.http_server import HttpError, HttpServer, Page
from mpbroker.exporter.idle import IdleRatios
from mpbroker.exporter.kafka_names import kafka_families
from mpbroker.exporter.overview import Overview
from mpbroker.exporter.partitions import Partitions
from mpbroker.exporter.requests.request_log import LogFiles, RequestLog, RequestNames
from mpbroker.exporter.requests.request_log_counts import RequestLogCounts
from mpbroker.exporter.requests.request_times import RequestTimes
from mpbroker.exporter.selector_names import SelectorNames
from mpbroker.exporter.status import status_of
from mpbroker.ipc import pulse
from mpbroker.ipc.layout import (
    HEADER,
    HEADER_BOOT_ID,
    HEADER_PHASE,
    HEADER_SUPERVISOR_PID,
    Phase,
)
from mpbroker.ipc.named_segment import read_telemetry, start_time
from mpbroker.ipc.tables.transaction_table import TransactionTable
from mpbroker.storage.full_directories import full_directories
from mpbroker.storage.offline_directories import offline_directories

if TYPE_CHECKING:
    from mpbroker.config import BrokerConfig
    from mpbroker.exporter.otlp_push import OtlpPusher
    from mpbroker.inspect.overview_board import OverviewBoard
    from mpbroker.metadata.topics import TopicRegistry
    from mpbroker.storage.log_manager import LogManager
    from mpbroker.supervisor.memory import BrokerMemory

_LOG = get_logger(__name__)

_TURN_S: Final = 0.5
_FULL_TURN_S: Final = 0.05
_IDLE_LOOK_S: Final = 2.0
# Figures are read at most this often, however many clients ask for them.
_FRESH_S: Final = 0.5
_TEXT: Final = "text/plain; charset=utf-8"
_JSON: Final = "application/json"
_HTML: Final = "text/html; charset=utf-8"


class Exporter:
    """One exporter process.

    Args:
        sock: the listening socket for HTTP; None: metrics.listeners is not set.
        registry: the topics, as this process has read them from the metadata log.
        listeners: the names of the broker's listeners, by index.
        let_go: a function that is called in each turn, to stop using deleted
            partitions.
        board: the shared memory in which to put an overview of the broker's processes
            for the console; None: make none.
    """

    def __init__(
        self,
        config: BrokerConfig,
        memory: BrokerMemory,
        sock: socket.socket | None,
        registry: TopicRegistry,
        logs: LogManager,
        listeners: Sequence[str],
        let_go: Callable[[], None] = lambda: None,
        board: OverviewBoard | None = None,
    ) -> None:
        self._let_go = let_go
        self._words = memory.control.words
        self._registry = registry
        self._transactions = TransactionTable(memory.transactions)
        self._idle = IdleRatios(self._words, listeners)
        self._times = RequestTimes(self._words)
        self._selectors = SelectorNames(self._words, listeners)
        self._with_kafka_names = config.metrics_kafka_names_enable
        self._node_id = config.node_id
        has_remote = config.remote_log_storage_system_enable
        self._remote_home = logs.directories[0].path if has_remote else ""
        in_cluster = bool(config.cluster_database_url)
        self._cluster_home = logs.directories[0].path if in_cluster else ""
        self._lag: CommittedOffsets = (
            NodeGroupLag(self._cluster_home) if in_cluster else GroupLag(registry, logs)
        )
        pid = self._words[HEADER + HEADER_SUPERVISOR_PID]
        self._telemetry = f"/mpbroker-{pid}-{start_time(pid)}"
        partitions = Partitions(memory, registry, logs)
        self._collector = Collector(
            memory,
            partitions,
            self._lag,
            self._told,
            listeners,
            (config.quota_window_num, config.quota_window_size_seconds * 10**9),
        )
        self._overview: Overview | None = None
        if board is not None:
            self._overview = Overview(
                memory,
                self._told,
                self._rows_in_use,
                self._collector.handlers_ever,
                listeners,
                config.queued_max_requests,
                board,
            )
        self._families: list[Family] = []
        self._collected = 0.0
        self._next_idle_look = 0.0
        self._request_log: RequestLog | None = None
        files = LogFiles(
            config.request_log_path,
            config.slow_request_log_path,
            config.request_log_max_bytes,
            config.slow_request_log_threshold_ms * 1_000_000,
        )
        if files.path is not None or files.slow_path is not None:
            names = RequestNames(memory.principals, listeners, registry)
            self._request_log = self._open_request_log(files, memory, partitions, names)
        self._push_s = config.otlp_interval_ms / 1e3
        self._next_push = time.monotonic() + self._push_s
        self._otlp = self._make_pusher(config)
        self._epoll = select.epoll(flags=select.EPOLL_CLOEXEC)
        # The eventfd that tells the housekeeper to look at the phase is never read, so
        # it wakes this process as well.
        bell = memory.housekeeper_bell.fd
        self._epoll.register(bell, select.EPOLLIN | select.EPOLLET)
        self._server = None
        if sock is not None:
            self._server = HttpServer(sock, self._epoll, self.page)

    def _make_pusher(self, config: BrokerConfig) -> OtlpPusher | None:
        if not config.otlp_endpoint:
            return None
        # Imported here: HTTP's client and threads, which few brokers need.
        from mpbroker.exporter.otlp_push import OtlpPusher, target_of

        target = target_of(config, self._told())
        return OtlpPusher(target) if target is not None else None

    def _open_request_log(
        self,
        files: LogFiles,
        memory: BrokerMemory,
        partitions: Partitions,
        names: RequestNames,
    ) -> RequestLog:
        counts = RequestLogCounts(
            self._collector.errors, partitions, self._topics, time.monotonic_ns()
        )
        client_ids = ClientIds(self._words, memory.arena)
        return RequestLog(self._words, files, counts, client_ids, names)

    def run(self) -> None:
        """Serve metrics and write the request log until the broker stops."""
        while self._words[HEADER + HEADER_PHASE] < Phase.STOPPED:
            self.turn(_TURN_S)
            pulse.step()
        if self._request_log is not None:
            self._request_log.drain(is_last=True)
        if self._otlp is not None:
            self._families = []  # the last push has the latest figures
            self._push(self._otlp.push_last)

    def turn(self, timeout_s: float) -> None:
        """Wait for HTTP clients, at most ``timeout_s``; then answer them.

        Also write the request log, and push metrics, when these are due.
        """
        if self._otlp is not None:
            timeout_s = min(timeout_s, max(0.0, self._next_push - time.monotonic()))
        if self._server is not None and self._server.is_full:
            timeout_s = min(timeout_s, _FULL_TURN_S)
        for fd, _ in self._epoll.poll(timeout_s):
            if self._server is not None:
                self._server.ready(fd)
        self._let_go()
        now = time.monotonic()
        if self._server is not None:
            self._server.expire(now)
            self._server.resume()
        if now >= self._next_idle_look:
            self._next_idle_look = now + _IDLE_LOOK_S
            self._idle.look(time.monotonic_ns())
            self._selectors.look(time.monotonic_ns())
            self._times.look(time.monotonic_ns())
        if self._overview is not None:
            self._look_at_all(self._overview, now)
        if self._otlp is not None and now >= self._next_push:
            self._next_push = now + self._push_s
            self._push(self._otlp.push)
        if self._request_log is not None:
            self._request_log.drain()

    def _look_at_all(self, overview: Overview, now: float) -> None:
        try:
            overview.look(now)
        except Exception:  # noqa: BLE001 - a bug must not end the loop
            _LOG.exception("the overview could not be made; this is a bug")

    def _push(self, push: Callable[[Sequence[Family], int, int], None]) -> None:
        # The time at which the counters began, not this program's start: an upgrade
        # goes on with the counters of the program before it.
        started = self._words[HEADER + HEADER_BOOT_ID]
        try:
            push(self.families(), started, time.time_ns())
        except Exception:  # noqa: BLE001 - a bug must not end the loop
            _LOG.exception("metrics: nothing could be pushed; this is a bug")

    # -- pages -----------------------------------------------------------------------

    def page(self, path: str) -> Page:
        """Make the HTTP response for the path of a request.

        Raises:
            HttpError: there is no such page.
        """
        if path == "/metrics":
            return Page(200, CONTENT_TYPE, render(self.families()))
        if path == "/api/status":
            return Page(200, _JSON, orjson.dumps(self._status()))
        if path == "/":
            html = files("mpbroker.exporter").joinpath("page.html")
            return Page(200, _HTML, html.read_bytes())
        if path == "/health":
            return Page(200, _TEXT, b"alive\n")
        if path == "/ready":
            reason = why_not_ready(self._words) or str(
                self._transactions.closed() or ""
            )
            # Ready all the same: clients of other partitions, and readers, are served.
            text = reason or "\n".join(["ready", *self._troubles()])
            return Page(503 if reason else 200, _TEXT, f"{text}\n".encode())
        raise HttpError(404, "there are /, /metrics, /health, /ready and /api/status")

    def _troubles(self) -> Iterator[str]:
        told = self._told()
        for path in offline_directories(self._words, told):
            yield f"{path} is offline: its partitions are refused"
        for path in full_directories(self._words, told.get("log_dirs", ())):
            yield f"{path} is full: appends are refused"

    def families(self) -> list[Family]:
        """Return all metrics; collect them again if they are half a second old.

        Each family is one metric with its samples.
        """
        now = time.monotonic()
        if now - self._collected >= _FRESH_S or not self._families:
            self._registry.catch_up()
            self._lag.catch_up()
            found = [*self._collector.collect(), *self._idle.families()]
            if self._remote_home:
                # Imported here: most brokers have no remote store.
                from mpbroker.exporter.remote_storage_metrics import (
                    remote_storage_families,
                )

                found.extend(remote_storage_families(self._remote_home))
            if self._cluster_home:
                from mpbroker.exporter.cluster_metrics import cluster_families

                found.extend(cluster_families(self._cluster_home))
            if self._otlp is not None:
                found.append(self._otlp.family())
            if self._with_kafka_names:
                found.extend(kafka_families(found, self._node_id))
                found.extend(self._selectors.families())
                found.extend(self._times.families())
            self._families, self._collected = found, time.monotonic()
        return self._families

    def _status(self) -> dict[str, Any]:
        return status_of(self.families(), self._told(), time.time())

    def _topics(self) -> list[str]:
        self._registry.catch_up()
        return [each.name for each in self._registry.topics()]

    def _rows_in_use(self) -> int:
        registry = self._registry
        registry.catch_up()
        return registry.capacity if registry.is_behind else registry.row_count

    def _told(self) -> dict[str, Any]:
        return read_telemetry(self._telemetry) or {}

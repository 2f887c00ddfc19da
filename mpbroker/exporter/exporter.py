"""Exporter: the loop that serves pages, pushes metrics and writes the request log."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

import orjson

from mpbroker.base.logger import get_logger
from mpbroker.exporter.client_ids import ClientIds
from mpbroker.exporter.collector import Collector, is_ready
from mpbroker.exporter.exposition import CONTENT_TYPE, Family, render
from mpbroker.exporter.group_lag import GroupLag
from mpbroker.exporter.http_server import HttpError, HttpServer, Page
from mpbroker.exporter.idle import IdleRatios
from mpbroker.exporter.kafka_names import kafka_families
from mpbroker.exporter.partitions import Partitions
from mpbroker.exporter.request_log import RequestLog
from mpbroker.exporter.request_log_counts import RequestLogCounts
from mpbroker.exporter.selector_names import SelectorNames
from mpbroker.exporter.status import status_of
from mpbroker.ipc.layout import (
    HEADER,
    HEADER_BOOT_ID,
    HEADER_PHASE,
    HEADER_SUPERVISOR_PID,
    Phase,
)
from mpbroker.ipc.named_segment import read_telemetry, start_time
from mpbroker.ipc.tables.transaction_table import TransactionTable

if TYPE_CHECKING:
    from mpbroker.config import BrokerConfig
    from mpbroker.exporter.otlp_push import OtlpPusher
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
        sock: listens for HTTP; None: metrics.listeners is not set.
        registry: this process's own.
        listeners: names of the broker's listeners, by index.
    """

    def __init__(
        self,
        config: BrokerConfig,
        memory: BrokerMemory,
        sock: socket.socket | None,
        registry: TopicRegistry,
        logs: LogManager,
        listeners: Sequence[str],
    ) -> None:
        self._words = memory.control.words
        self._registry = registry
        self._transactions = TransactionTable(memory.transactions)
        self._lag = GroupLag(registry, logs)
        self._idle = IdleRatios(self._words)
        self._selectors = SelectorNames(self._words, listeners)
        self._with_kafka_names = config.metrics_kafka_names_enable
        self._node_id = config.node_id
        pid = self._words[HEADER + HEADER_SUPERVISOR_PID]
        self._telemetry = f"/mpbroker-{pid}-{start_time(pid)}"
        partitions = Partitions(
            memory, registry, [each.path for each in logs.directories]
        )
        self._collector = Collector(
            memory,
            partitions,
            self._lag,
            self._told,
            listeners,
            (config.quota_window_num, config.quota_window_size_seconds * 10**9),
        )
        self._families: list[Family] = []
        self._collected = 0.0
        self._next_idle_look = 0.0
        self._request_log: RequestLog | None = None
        if config.request_log_path is not None:
            self._request_log = self._open_request_log(
                config, config.request_log_path, memory, partitions
            )
        self._otlp: OtlpPusher | None = None
        self._push_s = config.otlp_interval_ms / 1e3
        self._next_push = time.monotonic() + self._push_s
        if config.otlp_endpoint:
            # Imported here: HTTP's client and threads, which few brokers need.
            from mpbroker.exporter.otlp_push import OtlpPusher, target_of

            target = target_of(config, self._told())
            self._otlp = OtlpPusher(target) if target is not None else None
        self._epoll = select.epoll(flags=select.EPOLL_CLOEXEC)
        # The eventfd that tells the housekeeper to look at the phase is never read, so
        # it wakes this process as well.
        bell = memory.housekeeper_bell.fd
        self._epoll.register(bell, select.EPOLLIN | select.EPOLLET)
        self._server = None
        if sock is not None:
            self._server = HttpServer(sock, self._epoll, self.page)

    def _open_request_log(
        self,
        config: BrokerConfig,
        path: str,
        memory: BrokerMemory,
        partitions: Partitions,
    ) -> RequestLog:
        counts = RequestLogCounts(
            self._collector.errors, partitions, self._topics, time.monotonic_ns()
        )
        return RequestLog(
            self._words,
            path,
            config.request_log_max_bytes,
            config.slow_request_log_threshold_ms * 1_000_000,
            counts,
            ClientIds(self._words, memory.arena),
        )

    def run(self) -> None:
        """Serve until the broker stops."""
        while self._words[HEADER + HEADER_PHASE] < Phase.STOPPED:
            self.turn(_TURN_S)
        if self._request_log is not None:
            self._request_log.drain(is_last=True)
        if self._otlp is not None:
            self._families = []  # the last push has the latest figures
            self._push(self._otlp.push_last)

    def turn(self, timeout_s: float) -> None:
        """Wait for clients, at most this long, and do what is due."""
        if self._otlp is not None:
            timeout_s = min(timeout_s, max(0.0, self._next_push - time.monotonic()))
        if self._server is not None and self._server.is_full:
            timeout_s = min(timeout_s, _FULL_TURN_S)
        for fd, _ in self._epoll.poll(timeout_s):
            if self._server is not None:
                self._server.ready(fd)
        now = time.monotonic()
        if self._server is not None:
            self._server.expire(now)
            self._server.resume()
        if now >= self._next_idle_look:
            self._next_idle_look = now + _IDLE_LOOK_S
            self._idle.look(time.monotonic_ns())
            self._selectors.look(time.monotonic_ns())
        if self._otlp is not None and now >= self._next_push:
            self._next_push = now + self._push_s
            self._push(self._otlp.push)
        if self._request_log is not None:
            self._request_log.drain()

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
        """Make the page of a path.

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
            reason = is_ready(self._words) or str(self._transactions.closed() or "")
            return Page(
                503 if reason else 200, _TEXT, f"{reason or 'ready'}\n".encode()
            )
        raise HttpError(404, "there are /, /metrics, /health, /ready and /api/status")

    def families(self) -> list[Family]:
        """Return all metrics, as they are now or were half a second ago."""
        now = time.monotonic()
        if now - self._collected >= _FRESH_S or not self._families:
            self._registry.catch_up()
            self._lag.catch_up()
            found = [*self._collector.collect(), self._idle.family()]
            if self._otlp is not None:
                found.append(self._otlp.family())
            if self._with_kafka_names:
                found.extend(kafka_families(found, self._node_id))
                found.extend(self._selectors.families())
            self._families, self._collected = found, time.monotonic()
        return self._families

    def _status(self) -> dict[str, Any]:
        return status_of(self.families(), self._told(), time.time())

    def _topics(self) -> list[str]:
        self._registry.catch_up()
        return [each.name for each in self._registry.topics()]

    def _told(self) -> dict[str, Any]:
        return read_telemetry(self._telemetry) or {}

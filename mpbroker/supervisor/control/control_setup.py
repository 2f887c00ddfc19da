"""Compose the control socket of one broker."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from mpbroker.base.errors import MpbrokerError
from mpbroker.base.logger import get_logger
from mpbroker.config import BrokerConfig
from mpbroker.inspect.control_protocol import ControlSocketError, default_socket_path
from mpbroker.ipc.compiled import DESCRIPTION
from mpbroker.ipc.tables.transaction_table import TransactionTable
from mpbroker.supervisor.child import Child
from mpbroker.supervisor.control.control_server import ControlServer
from mpbroker.supervisor.supervisor import Supervisor
from mpbroker.supervisor.upgrade.running_broker import RunningBroker

if TYPE_CHECKING:
    from mpbroker.supervisor.control.control_commands import ControlCommands

_LOG = get_logger(__name__)

_LOOK_S: Final = 1.0


class BrokerControl:
    """The control socket of ``mpbroker ctl``, and its commands.

    The commands are built when all processes have been started, or earlier if a command
    comes or a process dies, so that the start does not wait for their imports.

    Args:
        use: gives other settings to processes that are started from now on.
        has_news: returns whether a changed setting is still to be applied.
        reloading: runs a reload, and tells the service manager of it.
    """

    def __init__(
        self,
        broker: RunningBroker,
        supervisor: Supervisor,
        use: Callable[[BrokerConfig], None],
        has_news: Callable[[], bool],
        reloading: Callable[[Callable[[], Any]], Any],
    ) -> None:
        config, identity = broker.config, broker.identity
        self._config = config
        self._memory = broker.memory
        self._supervisor = supervisor
        self._registry = broker.registry
        self._identity = identity
        self._use = use
        self._has_news = has_news
        self._reloading = reloading
        self._commands: ControlCommands | None = None
        path = control_socket_path(config, os.environ)
        try:
            self._server: ControlServer | None = ControlServer(
                supervisor, path, self._execute
            )
        except ControlSocketError as error:
            # The file system of a data directory may not support sockets. Without a
            # setting that asks for the socket the broker serves all the same.
            if config.control_socket_path is not None:
                raise
            _LOG.warning("mpbroker ctl cannot reach this broker: %s", error)
            self._server = None
        identity["limits"] = {
            "queued_max_requests": config.queued_max_requests,
            "uid": os.geteuid(),
        }
        identity["python"] = sys.version.split()[0]
        identity["core"] = DESCRIPTION
        identity["control_socket"] = path if self._server is not None else None
        supervisor.on_death = self._record
        supervisor.every(_LOOK_S, self._look)

    def close(self) -> None:
        """Close the control socket and remove its file."""
        if self._server is not None:
            self._server.close()

    def _execute(self, name: str, arguments: dict[str, Any]) -> Any:
        run = partial(self._built().execute, name, arguments)
        return self._reloading(run) if name == "reload" else run()

    def hang_up(self) -> None:
        """Reload the configuration after SIGHUP; log an error instead of raising it."""
        try:
            self._execute("reload", {})
        except MpbrokerError as error:
            _LOG.error("reload: nothing is changed: %s", error)

    def _record(self, child: Child) -> None:
        try:
            deaths = self._built().deaths
            deaths.record(child.role.value, child.number, child.pid, child.last_exit)
            self._identity["deaths"] = deaths.published()
        except Exception:  # noqa: BLE001 - the repair must follow in any case
            _LOG.exception("the black box of the dead cannot be read; this is a bug")

    def _look(self) -> None:
        if not self._supervisor.has_started_all:
            return  # its imports would make a slow start slower
        try:
            self._built().look()
        except MpbrokerError as error:
            _LOG.warning("control socket: %s", error)

    def _built(self) -> ControlCommands:
        if self._commands is None:
            from mpbroker.inspect.broker_view import BrokerView
            from mpbroker.inspect.deaths import DeathRecords
            from mpbroker.supervisor.control.control_actions import ControlActions
            from mpbroker.supervisor.control.control_commands import (
                ControlCommands,
                Sources,
            )

            memory, supervisor = self._memory, self._supervisor
            view = BrokerView(
                memory.control.words, memory.table.segment.words, memory.boxes.words
            )
            actions = ControlActions(self._config, supervisor, view, self._use)
            sources = Sources(
                view=view,
                children=supervisor.children,
                identity=self._identity,
                deaths=DeathRecords(view, memory.arena),
                rows=self._rows,
                name_of_row=self._name_of_row,
                resizing=self._resizing,
                closed=TransactionTable(memory.transactions).closed,
                arena=memory.arena.view,
                topics_of_page_cache=self._topics_of_page_cache,
            )
            self._commands = ControlCommands(sources, actions.commands())
        return self._commands

    def _resizing(self) -> bool:
        # A client that has set a config may ask before the loop's next turn.
        return self._has_news() or self._supervisor.resizing

    def _rows(self) -> int:
        self._registry.catch_up()
        return self._registry.row_count

    def _topics_of_page_cache(self) -> tuple[list[str], bool]:
        self._registry.catch_up()
        names = [
            topic.name
            for topic in self._registry.topics()
            if not topic.config.flush_acks_all
        ]
        return names, not self._registry.default_config.flush_acks_all

    def _name_of_row(self, row: int) -> tuple[str, int] | None:
        partition = self._registry.partition_by_row(row)
        return None if partition is None else (partition.topic.name, partition[1])


def control_socket_path(config: BrokerConfig, environ: Mapping[str, str]) -> str:
    """Return the path of a broker's control socket.

    Args:
        config: the broker's settings.
        environ: environment variables; RUNTIME_DIRECTORY is used if the settings name
            no path.
    """
    if config.control_socket_path is not None:
        return os.path.abspath(os.path.expanduser(config.control_socket_path))
    return default_socket_path(config.log_dirs[0], environ.get("RUNTIME_DIRECTORY", ""))

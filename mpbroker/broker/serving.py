"""Serving: run a composed broker, from its first child to its last."""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from mpbroker.base.logger import get_logger
from mpbroker.base.logger import load as load_logging
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.broker.roles import Roles
from mpbroker.broker.start_errors import explaining
from mpbroker.ipc import compiled
from mpbroker.ipc.layout import (
    MAX_PROCESSORS,
    PROCESSOR_COUNTERS,
    ProcessorCounter,
    processor_row,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from mpbroker.broker.watch import Watch
    from mpbroker.supervisor.live_config import LiveConfig
    from mpbroker.supervisor.supervisor import Supervisor
    from mpbroker.supervisor.systemd import ServiceManager
    from mpbroker.supervisor.upgrade.running_broker import RunningBroker

_LOG = get_logger(__name__)

# After the start, when it delays no client.
_TIDY_UP_S: Final = 1.0
# A broker that lives so long shall have quick successors of processes that die.
_PREPARE_S: Final = 20.0


class Audience(NamedTuple):
    """Who is told that the broker serves: service manager, caller, pid file.

    Attributes:
        manager: the service manager.
        stored_names: the names of the sockets in the manager's store at our start.
        ready_fd: receives a line of JSON and is closed; None: not wanted.
        pid_file: receives our process id.
        is_trial: whether this is an upgrade's trial, which stops as soon as it serves.
    """

    manager: ServiceManager
    stored_names: Sequence[str] = ()
    ready_fd: int | None = None
    pid_file: Path | None = None
    is_trial: bool = False


class Serving:
    """Forks the children, reports that they serve, and supervises them to the end.

    The calls, in order: ``fork_pools`` (not after a takeover), ``begin``, ``run``; and
    ``stop`` after any of them.
    """

    def __init__(
        self,
        broker: RunningBroker,
        supervisor: Supervisor,
        live: LiveConfig,
        audience: Audience,
    ) -> None:
        self._broker = broker
        self._supervisor = supervisor
        self._live = live
        self._audience = audience
        self._watch: Watch | None = None
        if audience.ready_fd is not None:
            supervisor.only_ours.add(audience.ready_fd)
        supervisor.make_upgrade = broker.upgrade
        load_logging()

    @property
    def is_running(self) -> bool:
        """Whether all processes have begun to serve: a later error ends the broker."""
        return self._supervisor.is_running

    def fork_pools(self) -> None:
        """Fork the processes that a first response needs, and do not wait for them."""
        _freeze()
        self._supervisor.fork_pools()

    def begin(self) -> None:
        """Make what only the supervisor needs, while the children get ready."""
        gc.disable()
        from mpbroker.broker.watch import Watch

        audience = self._audience
        self._watch = Watch(
            self._broker,
            self._supervisor,
            audience.manager,
            audience.stored_names,
            self._announce,
            self._figures,
        )
        self._watch.begin(self._live)
        _freeze()

    def run(self, all_serve: Callable[[], None] | None = None) -> int:
        """Supervise the children until told to stop; return the exit code.

        Args:
            all_serve: called once, when all processes serve.
        """
        assert self._watch is not None
        supervisor = self._supervisor
        if supervisor.start():
            self._watch.all_started()
            if all_serve is not None:
                all_serve()
            supervisor.run()
        return 1 if supervisor.failed else 0

    def stop(self) -> None:
        """End all children in order; close the sockets, and remove the pid file."""
        if self._watch is not None:
            self._watch.stopping()
        self._supervisor.stop()
        if self._watch is not None:
            self._watch.close()
        if self._audience.pid_file is not None:
            self._audience.pid_file.unlink(missing_ok=True)
        # The last line of a log: a clean stop and a SIGKILL do not look alike. Of a
        # start that has failed, the error is the only line.
        if self.is_running and not self._audience.is_trial:
            _LOG.info("stopped")

    # -- when a request has come through every stage -----------------------------------

    def _announce(self) -> None:
        """Report that the broker serves; then do the work that could wait until now."""
        supervisor = self._supervisor
        if self._audience.is_trial:
            self._start_rest()
            supervisor.request_stop("")
        if self._audience.pid_file is not None:
            _write_pid_file(self._audience.pid_file)
        _LOG.info("request path: %s", compiled.DESCRIPTION)
        _LOG.info("serving %s", ", ".join(each.told for each in self._broker.listeners))
        if self._audience.ready_fd is not None:
            self._write_ready_line(self._audience.ready_fd)
        if not self._audience.is_trial:
            supervisor.once(0.0, self._start_rest)  # when all who wait have been told
            supervisor.once(_TIDY_UP_S, _remove_left_trials)
            supervisor.once(_PREPARE_S, Roles.prepare_successors)

    def _start_rest(self) -> None:
        """Fork the processes that the first response has not needed.

        This process imports what the coordinator needs before, and shares it. The
        coordinator is there no later than if it did, and a successor is sooner.
        """
        gc.disable()
        # A process without free descriptors cannot import: each coordinator does then.
        with suppress(OSError):
            Roles.import_for_later()
        _freeze()
        self._supervisor.start_rest()

    def _write_ready_line(self, ready_fd: int) -> None:
        import json

        broker = self._broker
        message = {
            "pid": os.getpid(),
            "listeners": {
                each.endpoint.listener_name: each.address for each in broker.listeners
            },
            "data_dir": broker.directories[0].path,
        }
        try:
            os.write(ready_fd, json.dumps(message).encode() + b"\n")
        except OSError as error:  # its reader may have gone
            _LOG.warning("--ready-fd %d: %s", ready_fd, error.strerror)
        os.close(ready_fd)
        self._supervisor.only_ours.discard(ready_fd)  # its number may be used again

    def _figures(self) -> str:
        """Return a few words on how busy the broker is, for the service manager."""
        words = self._broker.memory.control.words
        connections = sum(
            words[
                processor_row(number)
                + PROCESSOR_COUNTERS
                + ProcessorCounter.CONNECTIONS
            ]
            for number in range(MAX_PROCESSORS)
        )
        restarts = sum(child.restarts for child in self._supervisor.children)
        return f"{connections} connections, {restarts} restarts"


def _freeze() -> None:
    """Exempt all objects that exist now from garbage collection.

    Children share their memory pages with this process, and a collection would write to
    each page. There is no garbage worth a collection, which would take a tenth of the
    start.
    """
    gc.freeze()
    gc.enable()


def _write_pid_file(path: Path) -> None:
    with explaining("--pid-file ", path):
        path.write_text(f"{os.getpid()}\n")


def _remove_left_trials() -> None:
    """Remove directories of brokers that were killed in the middle of an upgrade."""
    from mpbroker.supervisor.upgrade.trial_directory import remove_left_directories

    remove_left_directories()

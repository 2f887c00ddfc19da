"""Supervisor: spawn, reap, repair, restart with backoff, drain, stop.

It owns the listen sockets, the segments and the children, and serves no client. The
order of a stop is Kafka's: acceptors and processors first (what is in flight is
answered), then handlers, then the logs.
"""

import logging
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from mpbroker.ipc.layout import (
    HANDLER_ACTIVE,
    HANDLER_INCARNATION,
    HANDLER_PID,
    HANDLER_READY,
    HEADER,
    HEADER_ACTIVE_HANDLERS,
    MAX_HANDLERS,
    MAX_PROCESSORS,
    PROCESSOR_INCARNATION,
    PROCESSOR_LISTENER,
    PROCESSOR_PID,
    PROCESSOR_READY,
    Phase,
    handler_row,
    processor_row,
)
from mpbroker.ipc.telemetry import Telemetry
from mpbroker.supervisor.child import Child, ChildEvent, ChildState, Role
from mpbroker.supervisor.listeners import Listener
from mpbroker.supervisor.memory import BrokerMemory
from mpbroker.supervisor.recovery import Repair
from mpbroker.supervisor.roles import Roles
from mpbroker.supervisor.signals import SignalSocket

_LOG = logging.getLogger(__name__)

_READY_POLL_S: Final = 0.002
_READY_TIMEOUT_S: Final = 60.0
_TICK_S: Final = 1.0
# So long the requests in flight may take at a stop; then their connections are closed.
_DRAIN_S: Final = 10.0
_STOP_S: Final = 20.0
# Deaths in a row without half a second of life: something is wrong for good.
_MAX_FAILURES: Final = 10


class Supervisor:
    """The parent of one broker's processes."""

    def __init__(
        self,
        roles: Roles,
        memory: BrokerMemory,
        listeners: Sequence[Listener],
        num_processors: Sequence[int],
        num_handlers: int,
        partition_rows: Callable[[], int],
        identity: dict[str, Any],
    ) -> None:
        self._memory = memory
        self._words = memory.control.words
        self._listeners = listeners
        self._roles = roles
        self._partition_rows = partition_rows
        self._identity = identity
        self._repair = Repair(memory)
        self._signals = SignalSocket()
        self._epoll = select.epoll(flags=select.EPOLL_CLOEXEC)
        self._epoll.register(self._signals.fileno(), select.EPOLLIN)
        self._by_pidfd: dict[int, Child] = {}
        self._watched: dict[int, Callable[[int], None]] = {}
        self._tasks: list[_Task] = []
        self._stopping = False
        self.failed = False
        # Descriptors that no child may hold: whoever reads the other end waits for us.
        self.only_ours: set[int] = set()
        self.children: list[Child] = []
        self._telemetry = Telemetry()
        self._add_children(num_processors, num_handlers)

    def _add_children(self, num_processors: Sequence[int], num_handlers: int) -> None:
        roles, words = self._roles, self._words
        for handler in range(min(num_handlers, MAX_HANDLERS)):
            words[handler_row(handler) + HANDLER_ACTIVE] = 1
            self._add(Role.HANDLER, handler, partial(roles.run_handler, handler))
        words[HEADER + HEADER_ACTIVE_HANDLERS] = min(num_handlers, MAX_HANDLERS)
        processor = 0
        for listener in self._listeners:
            for _ in range(num_processors[listener.number]):
                if processor == MAX_PROCESSORS:
                    break
                row = processor_row(processor)
                words[row + PROCESSOR_LISTENER] = listener.number + 1
                self._add(
                    Role.PROCESSOR,
                    processor,
                    partial(roles.run_processor, processor, listener.number),
                )
                processor += 1
        self._add(Role.HOUSEKEEPER, 0, roles.run_housekeeper)
        for listener in self._listeners:
            self._add(
                Role.ACCEPTOR,
                listener.number,
                partial(roles.run_acceptor, listener.number),
            )

    def _add(self, role: Role, number: int, run: Callable[[], None]) -> None:
        self.children.append(Child(role, number, run))

    # -- start -----------------------------------------------------------------------

    def start(self) -> bool:
        """Fork all children and wait until they serve; False if they do not."""
        for child in self.children:
            self._spawn(child)
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while not self._all_ready():
            self._turn(_READY_POLL_S)
            if time.monotonic() > deadline:
                _LOG.critical(
                    "not all processes serve after %d s; the broker stops",
                    _READY_TIMEOUT_S,
                )
                self.failed = True
            if self.failed or self._stopping:
                return False
        self._memory.phase = Phase.SERVING
        self._publish()
        return True

    def _spawn(self, child: Child) -> None:
        row = self._row(child)
        child.incarnation += 1
        if row is not None:
            word, (_, incarnation, _) = row
            self._words[word + incarnation] = child.incarnation
        pid = os.fork()
        if pid == 0:
            for fd in self.only_ours:
                os.close(fd)
            _live(child.run)
        child.started(pid)
        self._by_pidfd[child.pidfd] = child
        self._epoll.register(child.pidfd, select.EPOLLIN)
        if row is not None:
            word, (pid_word, _, _) = row
            self._words[word + pid_word] = pid
        else:
            child.happens(ChildEvent.REPORTED_READY)  # its backlog is served already

    def _row(self, child: Child) -> tuple[int, tuple[int, int, int]] | None:
        """The shared row of a processor or handler, and its words."""
        if child.role is Role.HANDLER:
            words = (HANDLER_PID, HANDLER_INCARNATION, HANDLER_READY)
            return handler_row(child.number), words
        if child.role is Role.PROCESSOR:
            words = (PROCESSOR_PID, PROCESSOR_INCARNATION, PROCESSOR_READY)
            return processor_row(child.number), words
        return None

    def _all_ready(self) -> bool:
        changed = False
        for child in self.children:
            row = self._row(child)
            if child.state is ChildState.STARTING and row is not None:
                word, (_, _, ready) = row
                if self._words[word + ready] == child.incarnation:
                    child.happens(ChildEvent.REPORTED_READY)
                    changed = True
        if changed:
            self._publish()
        return all(child.state is ChildState.READY for child in self.children)

    # -- the loop ----------------------------------------------------------------------

    def run(self) -> None:
        """Supervise until told to stop, or until it cannot go on."""
        while not self._stopping and not self.failed:
            self._all_ready()
            self._turn(self._until_restart())

    def _until_restart(self) -> float:
        waiting = [
            child.restart_at
            for child in self.children
            if child.state is ChildState.BACKOFF
        ]
        waiting.extend(task.due for task in self._tasks)
        if not waiting:
            return _TICK_S
        return max(0.0, min(_TICK_S, min(waiting) - time.monotonic()))

    def _turn(self, timeout_s: float) -> None:
        for fd, events in self._epoll.poll(timeout_s):
            if fd == self._signals.fileno():
                for number in self._signals.take():
                    self._signalled(number)
            elif fd in self._by_pidfd:
                self._reap(self._by_pidfd[fd])
            elif fd in self._watched:
                self._watched[fd](events)
        now = time.monotonic()
        for child in self.children:
            if child.state is ChildState.BACKOFF and child.restart_at <= now:
                self._spawn(child)
        for task in self._tasks:
            if task.due <= now:
                task.due = now + task.interval_s
                task.run()

    def watch(self, fd: int, events: int, ready: Callable[[int], None]) -> None:
        """Call ``ready(events)`` in the loop whenever epoll reports the descriptor.

        Watching it again changes the events and what is called.
        """
        if fd in self._watched:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
        self._watched[fd] = ready

    def unwatch(self, fd: int) -> None:
        """Forget a descriptor; before it is closed."""
        del self._watched[fd]
        self._epoll.unregister(fd)

    def every(self, interval_s: float, run: Callable[[], None]) -> None:
        """Call ``run()`` in the loop, first after one interval; it must not block."""
        self._tasks.append(_Task(interval_s, run))

    def _signalled(self, number: int) -> None:
        if number in (signal.SIGTERM, signal.SIGINT):
            self._stopping = True

    def _reap(self, child: Child) -> None:
        pidfd = child.pidfd
        _, status = os.waitpid(child.pid, 0)
        self._epoll.unregister(pidfd)
        del self._by_pidfd[pidfd]
        child.exited(status)
        if child.state is ChildState.ENDED:
            return
        _LOG.warning(
            "%s %d (pid %d) died: %s",
            child.role.value,
            child.number,
            child.pid,
            child.last_exit,
        )
        if child.role is Role.HANDLER:
            self._repair.after_handler(child.number, self._partition_rows())
        elif child.role is Role.PROCESSOR:
            self._repair.after_processor(child.number)
        if child.state is ChildState.FAILED or child.failures >= _MAX_FAILURES:
            _LOG.critical(
                "%s %d cannot be kept running; the broker stops",
                child.role.value,
                child.number,
            )
            self.failed = True
        elif child.restart_at <= time.monotonic():
            self._spawn(child)
        self._publish()

    # -- stop --------------------------------------------------------------------------

    def stop(self) -> None:
        """Drain and stop in order; leave nothing behind."""
        for listener in self._listeners:
            listener.sock.close()
        self._end(Phase.DRAINING, (Role.ACCEPTOR, Role.PROCESSOR), _DRAIN_S)
        self._end(Phase.STOPPED, tuple(Role), _STOP_S)
        self._telemetry.close()
        self._signals.close()

    def _end(self, phase: Phase, roles: tuple[Role, ...], patience_s: float) -> None:
        ending = [child for child in self.children if child.role in roles]
        for child in ending:
            if child.state is not ChildState.DRAINING:
                child.happens(ChildEvent.STOP_REQUESTED)
        self._memory.phase = phase
        self._memory.wake_everybody()
        deadline = time.monotonic() + patience_s
        while any(child.is_alive for child in ending):
            left = deadline - time.monotonic()
            if left <= 0:
                self._kill(ending)
                deadline = time.monotonic() + patience_s
            self._turn(max(0.0, min(left, _TICK_S)))

    def _kill(self, children: list[Child]) -> None:
        for child in children:
            if child.is_alive:
                _LOG.warning(
                    "%s %d (pid %d) did not end in time: killed",
                    child.role.value,
                    child.number,
                    child.pid,
                )
                signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)

    def _publish(self) -> None:
        self._telemetry.publish(
            self._identity
            | {
                "children": [
                    {
                        "role": child.role.value,
                        "id": child.number,
                        "pid": child.pid,
                        "state": child.state.name,
                        "restarts": child.restarts,
                        "last_exit": child.last_exit,
                    }
                    for child in self.children
                ]
            }
        )


class _Task:
    """Something to be done again and again, and when next."""

    __slots__ = ("due", "interval_s", "run")

    def __init__(self, interval_s: float, run: Callable[[], None]) -> None:
        self.interval_s = interval_s
        self.run = run
        self.due = time.monotonic() + interval_s


def _live(run: Callable[[], None]) -> None:
    """A child's whole life; never returns."""
    status = 1
    try:
        run()
        status = 0
    except BaseException:
        logging.getLogger(__name__).exception("a child process failed")
    finally:
        logging.shutdown()
        os._exit(status)

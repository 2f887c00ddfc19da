"""The supervisor's loop: descriptors, the clock, and processes for work that may block.

Every part of the parent process registers its callbacks here. A callback must return at
once: while it runs, no death is handled.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, NoReturn, TypeVar

from mpbroker.base.logger import get_logger, shut_down
from mpbroker.ipc.black_box import note_failure
from mpbroker.ipc.robust_mutex import on_wait
from mpbroker.supervisor.signals import HANDLED, reset_in_child

_LOG = get_logger(__name__)

TICK_S: Final = 1.0

_T = TypeVar("_T")


class Loop:
    """An event loop with one epoll, timers, and callbacks that run in every turn.

    Attributes:
        only_ours: descriptors that a child closes right after its fork. A child's copy
            would keep a connection, a pipe or a lock alive when the supervisor has
            closed its own descriptor.
    """

    def __init__(self) -> None:
        self.only_ours: set[int] = set()
        self._epoll = select.epoll(flags=select.EPOLL_CLOEXEC)
        self._watched: dict[int, Callable[[int], None]] = {}
        self._tasks: list[_Task] = []
        self._turns: list[Callable[[], float | None]] = []
        self._asides: dict[int, int] = {}  # pidfds by process id

    def watch(self, fd: int, events: int, ready: Callable[[int], None]) -> None:
        """Call ``ready(events)`` in the loop whenever epoll reports the descriptor.

        Watching it again changes the events and the callback.
        """
        if fd in self._watched:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
        self._watched[fd] = ready

    def unwatch(self, fd: int) -> None:
        """Forget a descriptor. Call it before the descriptor is closed."""
        del self._watched[fd]
        self._epoll.unregister(fd)

    def every(self, interval_s: float, run: Callable[[], None]) -> None:
        """Call ``run()`` at an interval, which passes first; it must not block."""
        self._tasks.append(_Task(interval_s, run))

    def once(self, delay_s: float, run: Callable[[], None]) -> None:
        """Call ``run()`` in the loop once, after a delay; it must not block."""

        def last() -> None:
            run()
            self._tasks.remove(task)

        task = _Task(delay_s, last)
        self._tasks.append(task)

    def each_turn(self, run: Callable[[], float | None]) -> None:
        """Call ``run()`` in every turn of the loop, before it waits.

        ``run()`` returns the seconds until the next turn at the latest, or None.
        """
        self._turns.append(run)

    def fork_aside(
        self, run: Callable[[], None], ended: Callable[[int], None]
    ) -> Callable[[], None] | None:
        """Call ``run()`` in a forked process; at its end call ``ended(wait status)``.

        Returns:
            A function that kills the process. None: it could not be started, and
            ``ended`` has been called with the wait status of a failure.
        """

        def begin() -> None:
            self.close_ours()
            run()

        try:
            pid = fork(begin)
        except OSError as error:
            _LOG.error("fork: %s", error.strerror)
            ended(1 << 8)
            return None
        pidfd = self._asides[pid] = os.pidfd_open(pid)
        self.only_ours.add(pidfd)

        def reap(_: int) -> None:
            self.unwatch(pidfd)
            self.only_ours.discard(pidfd)
            os.close(pidfd)
            del self._asides[pid]
            ended(os.waitpid(pid, 0)[1])

        self.watch(pidfd, select.EPOLLIN, reap)
        return partial(signal.pidfd_send_signal, pidfd, signal.SIGKILL)

    @property
    def asides(self) -> set[int]:
        """The ids of the processes that ``fork_aside`` has started and that run."""
        return set(self._asides)

    def kill_asides(self) -> None:
        """Kill the processes of ``fork_aside``, and call none of their callbacks."""
        for pid, pidfd in self._asides.items():
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.waitpid(pid, 0)

    def close_ours(self) -> None:
        """Close, in a forked child, the descriptors that only the supervisor uses."""
        for fd in self.only_ours:
            os.close(fd)

    def run_turns(self) -> float:
        """Call the callbacks of ``each_turn``; return the longest wait in seconds."""
        waits = [
            wait for turn in self._turns if (wait := _unless_full(turn)) is not None
        ]
        now = time.monotonic()
        waits.extend(task.due - now for task in self._tasks)
        return max(0.0, min([TICK_S, *waits]))

    def dispatch(self, timeout_s: float) -> None:
        """Wait for events of descriptors and handle them; then run the due tasks."""
        for fd, events in self._epoll.poll(timeout_s):
            ready = self._watched.get(fd)
            if ready is not None:
                ready(events)
        now = time.monotonic()
        if any(task.due <= now for task in self._tasks):
            # Tasks that are due soon run as well: a wake-up costs more than most tasks.
            for task in tuple(self._tasks):
                if task.due - task.interval_s / 4 <= now:
                    task.due = now + task.interval_s
                    _unless_full(task.run)


def _unless_full(run: Callable[[], _T]) -> _T | None:
    """Return the result of a repeated callback; None: it had no file descriptor left.

    The callback is then tried again in its next turn. Descriptors become free when
    connections close, and until then their lack must not end the broker.
    """
    try:
        return run()
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        _LOG.warning("put off: %s", error)
        return None


class _Task:
    """A callback of the loop, and the time at which it is due next."""

    __slots__ = ("due", "interval_s", "run")

    def __init__(self, interval_s: float, run: Callable[[], None]) -> None:
        self.interval_s = interval_s
        self.run = run
        self.due = time.monotonic() + interval_s


def fork(run: Callable[[], None]) -> int:
    """Call ``run()`` in a forked child; return the child's process id.

    One file descriptor is free afterwards, so that the caller can open a pidfd of the
    child.

    Raises:
        OSError: there are too many processes or descriptors; no child was forked.
    """
    # Keeps the place of the pidfd: better no child than one that cannot be watched.
    place = os.pidfd_open(os.getpid())
    # Blocked until the child has begun: from its first line to there, a signal for the
    # child would be written to its parent's wake-up descriptor.
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    pid = -1
    try:
        pid = os.fork()
    finally:
        os.close(place)
        if pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    if pid == 0:
        _live(run, unblocked)
    return pid


def _live(run: Callable[[], None], mask: Iterable[int]) -> NoReturn:
    """Call ``run()`` in the child just forked; exit with 0 if it returns, else 1."""
    status = 1
    try:
        reset_in_child()
        on_wait(None)  # what the supervisor does while it waits for a lock
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        run()
        status = 0
    except BaseException as error:  # noqa: BLE001 - every end is noted
        note_failure(error)
        _LOG.exception("a child process failed")
    finally:
        shut_down()
        os._exit(status)

"""Reap orphans, if the supervisor is process 1, as in a container.

A process that loses its parent becomes a child of process 1, and when it ends no other
process can remove its entry in the process table. `docker exec` may leave such
processes behind.

Source: wait(2), "NOTES"; pid_namespaces(7).
"""

import os
from collections.abc import Callable, Container
from typing import Final, Protocol

from mpbroker.supervisor.child import Child

_INTERVAL_S: Final = 5.0


class Owner(Protocol):
    """A supervisor: its children, its helper processes, and its timers."""

    children: list[Child]

    @property
    def asides(self) -> set[int]: ...

    def every(self, interval_s: float, run: Callable[[], None]) -> None: ...


class Orphans:
    """Reaps the orphans that are left to one supervisor, from ``begin`` on."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner

    def begin(self) -> None:
        """Reap orphans at intervals, if this process has to (it is process 1)."""
        if os.getpid() == 1:
            self._owner.every(_INTERVAL_S, self._reap)

    def _reap(self) -> None:
        reap_orphans({child.pid for child in self._owner.children} | self._owner.asides)


def reap_orphans(ours: Container[int]) -> int:
    """Reap ended processes that the supervisor has not forked; return their number.

    The call ends early if the kernel names one of ``ours`` first.

    Args:
        ours: the ids of the supervisor's own children, which other code reaps.
    """
    reaped = 0
    while True:
        try:
            # WNOWAIT: a child of ours keeps its exit status for the code that waits.
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return reaped
        if ended is None or ended.si_pid in ours:
            return reaped  # one of ours goes first; the rest waits for the next look
        os.waitpid(ended.si_pid, 0)
        reaped += 1

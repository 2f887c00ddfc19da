"""Reap processes that are left to us because we are process 1, as in a container.

Whoever loses its parent becomes a child of process 1, and when it ends nobody else can
remove what is left of it. What `docker exec` starts may leave such processes behind.

Source: wait(2), "NOTES"; pid_namespaces(7).
"""

import os
from collections.abc import Container
from typing import Final

INTERVAL_S: Final = 5.0


def inherits_orphans() -> bool:
    """Whether orphans become ours."""
    return os.getpid() == 1


def reap_orphans(ours: Container[int]) -> int:
    """Reap what has ended and is not ours; return how many there were.

    Args:
        ours: process ids of children that somebody else here waits for.
    """
    reaped = 0
    while True:
        try:
            # A look: who is ours keeps its exit status for whoever waits for it.
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return reaped
        if ended is None or ended.si_pid in ours:
            return reaped  # one of ours goes first; the rest waits for the next look
        os.waitpid(ended.si_pid, 0)
        reaped += 1

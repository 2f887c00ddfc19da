"""Canaries: fences between the blocks of shared memory, and what is done if one fell.

A store that went astray, ours or a library's, does not say so. Between the blocks of
the control segment, and before the entries of every ring, lies a word that nobody ever
writes; the supervisor looks at all of them before each repair, and every few seconds.
If one has changed, nothing in these segments can be trusted, a lock least of all: the
children are killed where they are, and the supervisor executes itself anew. It keeps
its process id and the listening sockets, so that nobody is refused; all else it makes
afresh, as after a crash. The log is the only truth, and it is in files.

Source: LISTEN_FDS as in sd_listen_fds(3).
"""

import contextlib
import fcntl
import os
import signal
from collections.abc import Callable, Sequence
from typing import Final, NoReturn, Protocol

import posix_ipc

from mpbroker.base.logger import get_logger, shut_down
from mpbroker.ipc.layout import (
    FENCE,
    HEADER,
    HEADER_MAGIC,
    HEADER_SUPERVISOR_PID,
    MAGIC,
    fences,
)
from mpbroker.ipc.named_segment import start_time
from mpbroker.supervisor.child import Child
from mpbroker.supervisor.listen_sockets import Listener
from mpbroker.supervisor.own_command import own_command

_LOG = get_logger(__name__)

INTERVAL_S: Final = 5.0
_FIRST_FD: Final = 3  # SD_LISTEN_FDS_START


class Owner(Protocol):
    """The part of the Supervisor that is needed here."""

    children: list[Child]
    on_death: Callable[[Child], None]

    def every(self, interval_s: float, run: Callable[[], None]) -> None:
        """Call ``run()`` again and again."""


class Canaries:
    """The fences of one control segment, from ``begin`` on."""

    def __init__(
        self, owner: Owner, words: memoryview, listeners: Sequence[Listener]
    ) -> None:
        self._owner = owner
        self._words = words
        self._listeners = listeners
        self._fences = fences()

    def begin(self) -> None:
        """Put the fences up; look at intervals, and before every repair."""
        for word in self._fences:
            self._words[word] = FENCE
        owner, then = self._owner, self._owner.on_death

        def on_death(child: Child) -> None:
            self.check()  # first of all: what else looks at this memory may trip
            then(child)

        owner.on_death = on_death
        owner.every(INTERVAL_S, self.check)

    def check(self) -> None:
        """Return if all is well; else this process starts again."""
        found = self.damage()
        if found:
            _LOG.critical(
                "shared memory is damaged (%s): all processes are killed and started"
                " again on fresh segments; connections are lost, acknowledged records"
                " are not",
                found,
            )
            self._start_again()

    def damage(self) -> str:
        """What is not as it must be; nothing if all is well."""
        words = self._words
        for word in self._fences:
            if words[word] != FENCE:
                return f"word {word} holds {words[word]:#x}"
        if words[HEADER + HEADER_MAGIC] != MAGIC:
            return f"the magic number is {words[HEADER + HEADER_MAGIC]:#x}"
        if words[HEADER + HEADER_SUPERVISOR_PID] != os.getpid():
            return f"the supervisor is {words[HEADER + HEADER_SUPERVISOR_PID]}"
        return ""

    def _start_again(self) -> NoReturn:
        for child in self._owner.children:
            if child.is_alive:
                signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
        # Awaited: one that still lived could append to a log that the new program
        # recovers.
        for child in self._owner.children:
            if child.is_alive:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child.pid, 0)
        pid = os.getpid()
        # The name would be our own, and not that of a dead broker.
        with contextlib.suppress(posix_ipc.ExistentialError):
            posix_ipc.unlink_shared_memory(f"/mpbroker-{pid}-{start_time(pid)}")
        environ = dict(os.environ)
        environ["LISTEN_PID"] = str(pid)
        environ["LISTEN_FDS"] = str(len(self._listeners))
        environ["LISTEN_FDNAMES"] = ":".join(
            each.stored_name for each in self._listeners
        )
        # First out of the way, or one would be overwritten by another.
        beyond = _FIRST_FD + len(self._listeners)
        fds = [
            fcntl.fcntl(each.sock.fileno(), fcntl.F_DUPFD_CLOEXEC, beyond)
            for each in self._listeners
        ]
        for number, fd in enumerate(fds):
            os.dup2(fd, _FIRST_FD + number, inheritable=True)
        # In the background it is already, if that is where it was sent.
        command = [each for each in own_command() if each != "--daemon"]
        shut_down()
        os.execve(command[0], command, environ)

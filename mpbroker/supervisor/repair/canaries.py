"""Canaries: detect damage of shared memory, and start the broker again.

A stray store, by our code or a library's, raises no error. So between the blocks of the
control segment, and before the entries of every ring, lies a word that no code writes.
The supervisor compares all of them before each repair, and every few seconds. If one
has changed, no word of these segments can be trusted, least of all a lock: the children
are killed wherever they are, and the supervisor executes itself again. It keeps its
process id and the listening sockets, so that no client is refused; all else is made
anew, as after a crash. The log is the only truth, and it is in files.

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
        """Call ``run()`` at intervals."""


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
        """Store the fences; check them at intervals, and before every repair."""
        for word in self._fences:
            self._words[word] = FENCE
        owner, then = self._owner, self._owner.on_death

        def on_death(child: Child) -> None:
            self.check()  # first: all other code trusts this memory
            then(child)

        owner.on_death = on_death
        owner.every(INTERVAL_S, self.check)

    def check(self) -> None:
        """Return if the memory is intact; otherwise start this process again."""
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
        """Return what is damaged; "": nothing is."""
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
        # By hand: the name has our process id, so the new program would not remove it
        # as a dead broker's.
        with contextlib.suppress(posix_ipc.ExistentialError):
            posix_ipc.unlink_shared_memory(f"/mpbroker-{pid}-{start_time(pid)}")
        environ = dict(os.environ)
        environ["LISTEN_PID"] = str(pid)
        environ["LISTEN_FDS"] = str(len(self._listeners))
        environ["LISTEN_FDNAMES"] = ":".join(
            each.stored_name for each in self._listeners
        )
        # First to numbers beyond, or dup2() could overwrite one that is still needed.
        beyond = _FIRST_FD + len(self._listeners)
        fds = [
            fcntl.fcntl(each.sock.fileno(), fcntl.F_DUPFD_CLOEXEC, beyond)
            for each in self._listeners
        ]
        for number, fd in enumerate(fds):
            os.dup2(fd, _FIRST_FD + number, inheritable=True)
        # A broker with --daemon is in the background already.
        command = [each for each in own_command() if each != "--daemon"]
        shut_down()
        os.execve(command[0], command, environ)

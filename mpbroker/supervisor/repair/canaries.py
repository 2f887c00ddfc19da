"""Canaries: detect damage of shared memory, and start the broker again.

A stray store, by our code or a library's, raises no error. So between the blocks of the
control segment, and before the entries of every ring, lies a word that no code writes.
The supervisor compares all of them after each end of a child, before the repair reads
what it has left, and every few seconds. If one has changed, no word of these segments
can be trusted, least of all a lock: the children are killed wherever they are, and the
supervisor executes itself again. It keeps its process id and the listening sockets, so
that no client is refused; all else is made anew, as after a crash. The log is the only
truth, and it is in files.

Source: LISTEN_FDS as in sd_listen_fds(3).
"""

import contextlib
import fcntl
import os
import signal
from collections.abc import Callable, Sequence
from typing import Final, NoReturn, Protocol

from mpbroker.base.logger import get_logger, shut_down
from mpbroker.ipc.layout import (
    FENCE,
    HEADER,
    HEADER_MAGIC,
    HEADER_SUPERVISOR_PID,
    MAGIC,
    fences,
)
from mpbroker.ipc.named_segment import remove_name, start_time
from mpbroker.supervisor.child import Child
from mpbroker.supervisor.listen_sockets import Listener
from mpbroker.supervisor.own_command import own_command

_LOG = get_logger(__name__)

INTERVAL_S: Final = 5.0
_FIRST_FD: Final = 3  # SD_LISTEN_FDS_START


class Owner(Protocol):
    """A supervisor: its children, timers, and a callback after each death."""

    children: list[Child]
    check_memory: Callable[[], None]

    def every(self, interval_s: float, run: Callable[[], None]) -> None:
        """Call ``run()`` at intervals."""


class Canaries:
    """Checks words in shared memory that no code may change, to detect damage."""

    def __init__(
        self, owner: Owner, words: memoryview, listeners: Sequence[Listener]
    ) -> None:
        self._owner = owner
        self._words = words
        self._listeners = listeners
        self._fences = fences()

    def begin(self) -> None:
        """Store the fences; check them at intervals, and before every repair.

        An end that was asked for is no exception: the process may have stored anywhere
        before, and its end is repaired like a death.
        """
        for word in self._fences:
            self._words[word] = FENCE
        self._owner.check_memory = self.check
        self._owner.every(INTERVAL_S, self.check)

    def check(self) -> None:
        """Check that words which no code may change are unchanged; if not, start again.

        In that case this does not return: the children are killed, and the process
        executes its program again.
        """
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
        """Return as text the first word that changed, though no code may; "": none."""
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
        remove_name(f"/mpbroker-{pid}-{start_time(pid)}")
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

"""What an acceptor holds outlives it: a second process with the same descriptor table.

Between accept(2) and the message to the keeper a connection is in one process's
descriptor table and nowhere else; were that process killed there, the kernel would
close the connection, which the client has made already. So the table has a second
owner, the guard: cloned with CLONE_FILES, it has what the acceptor accepts from the
moment in which the kernel accepts it. It sleeps for all of the acceptor's life. When
that is over it leaves with the keeper whatever connections the table still has, and the
keeper hands on what is in nobody's row.

Those that the acceptor holds for coming too fast are the exception: nobody is to have
them. They are marked, by an FD_CLOEXEC flag that is not set.

Only one of the two is killed at a time; who loses its guard, or finds it stopped, posts
another. It comes of
clone(2) and not of fork(3): the C library knows nothing of it, so it must take no lock
in shared memory, and takes none.

Source: clone(2), "CLONE_FILES"; fcntl(2), "File descriptor flags".
"""

import contextlib
import ctypes
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from typing import Final, NoReturn

from mpbroker.base.logger import get_logger

_LOG = get_logger(__name__)

_CLONE_FILES: Final = 0x400
_SYS_CLONE: Final = {"x86_64": 56, "aarch64": 220, "riscv64": 220}
# Who fails at once, fails again: no more of them than that.
_POST_AGAIN_S: Final = 1.0


class AcceptorGuard:
    """The second owner of this process's descriptors.

    Args:
        like: the listening socket; connections are like it.
        rescue: in the guard, once this process is dead: see to what it had in hand.
        entitle: in the guard: be found in ``ps``.
    """

    def __init__(
        self,
        like: socket.socket,
        rescue: Callable[[list[socket.socket]], None],
        entitle: Callable[[], None],
    ) -> None:
        self._family = like.family
        self._place = _place(like)
        self._rescue = rescue
        self._entitle = entitle
        self._pid = 0
        self._pidfd = -1
        self._ours = -1
        self._posted_at = -_POST_AGAIN_S
        self._is_lacking = False

    def post(self) -> int:
        """Start it, unless it was started just now.

        Returns:
            A descriptor that is readable when it has died; -1: there is none. Without a
            guard all works, but for the one connection that an acceptor dies with.
        """
        now = time.monotonic()
        number = _SYS_CLONE.get(os.uname().machine)
        if number is None or now - self._posted_at < _POST_AGAIN_S:
            return -1
        self._posted_at = now
        try:
            self._clone(number)
        except OSError as error:
            if not self._is_lacking:  # it is tried again, and said once
                _LOG.info("an acceptor has no guard: %s", error.strerror)
            self._is_lacking = True
            return -1
        self._is_lacking = False
        return self._pidfd

    def _clone(self, number: int) -> None:
        """Start it.

        Raises:
            OSError: there are too many processes or descriptors, or it is forbidden.
        """
        ours = os.pidfd_open(os.getpid())
        # Not through fork(3), which never shares descriptors. The lock of the
        # interpreter is kept, for the clone has no use for one that is on its way.
        syscall = ctypes.PyDLL(None, use_errno=True).syscall
        pid = syscall(number, _CLONE_FILES | signal.SIGCHLD, 0, 0, 0, 0)
        if pid == 0:
            self._watch(ours)
        try:
            if pid < 0:
                error = ctypes.get_errno()
                raise OSError(error, f"clone: {os.strerror(error)}")
            self._pidfd = os.pidfd_open(pid)
        except OSError:
            if pid > 0:  # not reaped, so it is nobody else's number
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            os.close(ours)
            raise
        self._pid, self._ours = pid, ours

    def _watch(self, acceptor: int) -> NoReturn:
        """In the guard: wait for the acceptor's end."""
        status = 1
        try:
            self._entitle()
            poll = select.poll()
            poll.register(acceptor, select.POLLIN)
            while not poll.poll():
                continue
            self._rescue(self._found())
            status = 0
        except BaseException:  # noqa: BLE001 - whatever it was is told
            _LOG.exception("an acceptor's guard failed")
        finally:
            os._exit(status)

    def _found(self) -> list[socket.socket]:
        """The connections of the table that somebody shall have."""
        found = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                fd = int(name)
                if os.get_inheritable(fd):
                    continue
                sock = socket.socket(fileno=fd)
                if self._is_client(sock):
                    found.append(sock)
                else:
                    sock.detach()
        return found

    def _is_client(self, sock: socket.socket) -> bool:
        return (
            sock.family == self._family
            and sock.type == socket.SOCK_STREAM
            and not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            and _place(sock) == self._place  # and no client of the supervisor's
        )

    def is_stopped(self) -> bool:
        """Whether it has been stopped since the last look: it would guard nothing.

        Worse, it would outlive everybody, and our listen socket with it.
        """
        if not self._pid:
            return False
        return os.waitid(os.P_PID, self._pid, os.WSTOPPED | os.WNOHANG) is not None

    def bury(self) -> None:
        """It has died, or shall: before this process ends in order, having nothing."""
        if not self._pid:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._pidfd)
        os.close(self._ours)
        self._pid = 0


def _place(sock: socket.socket) -> object:
    """Where its own end is: the port; of a Unix socket, the path."""
    name = sock.getsockname()
    return name[1] if isinstance(name, tuple) else name

"""A guard: a second process with the same descriptor table as the process it guards.

The kernel closes the descriptors of a process that is killed. When it closes the last
descriptor of a socket, it closes the connection. So a process whose descriptors may be
the last ones gets a guard. The guard is cloned with CLONE_FILES and shares the
descriptor table: it has each descriptor from the moment in which the guarded process
has it. The guard sleeps as long as the guarded process lives. After that process's
death the guard calls a function, its duty, and ends.

This protects against the death of one of the two processes at a time. A process whose
guard has died or is stopped starts another. The guard is made by clone(2) and not by
fork(3), so the C library does not know about it. Therefore it must not take locks in
shared memory, and takes none.

Source: clone(2), "CLONE_FILES".
"""

import contextlib
import ctypes
import os
import select
import signal
import time
from collections.abc import Callable
from typing import Final, NoReturn

from mpbroker.base.logger import get_logger

_LOG = get_logger(__name__)

_CLONE_FILES: Final = 0x400
_SYS_CLONE: Final = {"x86_64": 56, "aarch64": 220, "riscv64": 220}
# A guard that fails at once will probably fail again: the next is started after this.
_POST_AGAIN_S: Final = 1.0


class DescriptorGuard:
    """Starts and ends the guard process, which shares this process's descriptors.

    Args:
        whose: names this process in the log: "an acceptor".
        duty: called in the guard when this process has died.
        entitle: called in the guard; sets the process title, for ``ps``.

    Attributes:
        pid: the guard's process id; 0 while there is no guard.
    """

    def __init__(
        self, whose: str, duty: Callable[[], None], entitle: Callable[[], None]
    ) -> None:
        self._whose = whose
        self._duty = duty
        self._entitle = entitle
        self.pid = 0
        self._pidfd = -1
        self._ours = -1
        self._posted_at = -_POST_AGAIN_S
        self._is_lacking = False

    def post(self) -> int:
        """Start the guard, unless the last attempt was less than a second ago.

        Returns:
            A descriptor that is readable once the guard has died. -1 if no guard was
            started; then everything works, but connections may die with this process.
        """
        now = time.monotonic()
        number = _SYS_CLONE.get(os.uname().machine)
        if number is None or now - self._posted_at < _POST_AGAIN_S:
            return -1
        self._posted_at = now
        try:
            self._clone(number)
        except OSError as error:
            if not self._is_lacking:  # it is tried again, but logged once
                _LOG.info("%s has no guard: %s", self._whose, error.strerror)
            self._is_lacking = True
            return -1
        self._is_lacking = False
        return self._pidfd

    def _clone(self, number: int) -> None:
        """Start the guard's process.

        Args:
            number: the number of the system call clone on this kind of machine.

        Raises:
            OSError: there are too many processes or descriptors, or the system forbids
                the call.
        """
        ours = os.pidfd_open(os.getpid())
        # Not through fork(3), which never shares descriptors. The GIL is kept during
        # the call (PyDLL), so that the clone has it too.
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
            if pid > 0:  # not reaped, so no other process has this id
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            os.close(ours)
            raise
        self.pid, self._ours = pid, ours

    def _watch(self, guarded: int) -> NoReturn:
        """Wait until the guarded process ends, call the guard's duty, and exit.

        This runs in the guard.

        Args:
            guarded: a pidfd of the guarded process.
        """
        status = 1
        try:
            self._entitle()
            poll = select.poll()
            poll.register(guarded, select.POLLIN)
            while not poll.poll():
                continue
            self._duty()
            status = 0
        except BaseException:  # noqa: BLE001 - every failure is logged
            _LOG.exception("the guard of %s failed", self._whose)
        finally:
            os._exit(status)

    def is_stopped(self) -> bool:
        """Return whether the guard was stopped (SIGSTOP) since the last call.

        A stopped guard is useless, and it would outlive the broker and keep its sockets
        open.
        """
        if not self.pid:
            return False
        return os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG) is not None

    def bury(self) -> None:
        """Kill the guard, if it lives, and reap it. Do nothing if there is no guard.

        To be called also before this process ends in order.
        """
        if not self.pid:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._pidfd)
        os.close(self._ours)
        self.pid = 0

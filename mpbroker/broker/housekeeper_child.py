"""HousekeeperChild: a process beside the housekeeper, for work that takes long.

The child is forked by the housekeeper (the process that applies retention), and dies
with it: it shares the memory by which handlers are told what it has done. It is a
process of its own because requests to a network hang, because clients' libraries have
threads, or because a compaction takes minutes. The housekeeper looks after it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar, Final, NoReturn

from mpbroker.base.errors import MpbrokerError
from mpbroker.base.logger import get_logger
from mpbroker.ipc import pulse
from mpbroker.supervisor.become_child import set_process_title

if TYPE_CHECKING:
    from mpbroker.broker.process_parts import ProcessParts

_LOG = get_logger(__name__)
_PR_SET_PDEATHSIG: Final = 1
# A child that dies at once is not started again before this.
_RESTART_S: Final = 1.0
RETRY_S: Final = 10.0
# A stop does not wait longer than this for a child.
_LEAVE_S: Final = 4.0


class HousekeeperChild(ABC):
    """Starts a child process of the housekeeper, and starts it again after a death.

    Args:
        parts: the settings and the shared memory.
    """

    LOOK_INTERVAL_MS: Final = 1000
    NAME: ClassVar[str]  # for the log
    TITLE: ClassVar[str]  # of the process
    PASSING: ClassVar[tuple[type[MpbrokerError], ...]]  # logged without a traceback

    def __init__(self, parts: ProcessParts) -> None:
        self._parts = parts
        self._pid = 0
        self._started_at = 0.0

    @abstractmethod
    def _serve(self) -> None:
        """Do the child process's work, in it; when this returns, the child ends."""

    def _before_fork(self) -> None:
        """Prepare a fork of the child process; called in the parent before each one."""
        return

    def _after_death(self) -> None:
        """Undo what a dead child has left in shared memory, such as a claimed fsync."""
        return

    def look(self, now_ms: int) -> None:
        """Start the child process if it does not run; reap it if it has died.

        It is started at most once a second.
        """
        if self._pid:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if not pid:
                return
            _LOG.warning("%s (pid %d) ended: %d", self.NAME, pid, status)
            self._pid = 0
            self._after_death()
        if time.monotonic() - self._started_at < _RESTART_S:
            return
        self._started_at = time.monotonic()
        self._before_fork()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._run(parent)
        self._pid = pid

    def stop(self) -> None:
        """End the child process by SIGTERM; kill it if it has not ended within 4 s."""
        if not self._pid:
            return
        os.kill(self._pid, signal.SIGTERM)
        deadline = time.monotonic() + _LEAVE_S
        while not os.waitpid(self._pid, os.WNOHANG)[0]:
            if time.monotonic() > deadline:
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
                break
            time.sleep(0.01)
        self._pid = 0
        self._after_death()

    def _let_go_of_files(self) -> None:
        """Close the files of the housekeeper, the parent, in the child process.

        A segment that the housekeeper deletes would keep its space for as long as the
        child lives. The numbers stay in use, by /dev/null: objects that the child has
        inherited may close them.
        """
        paths = tuple(f"{each.path}/" for each in self._parts.directories)
        null = os.open(os.devnull, os.O_RDWR)
        for number in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError):  # that of the list itself is closed
                if os.readlink(f"/proc/self/fd/{number}").startswith(paths):
                    os.dup2(null, number, inheritable=False)
        os.close(null)

    def _run(self, parent: int) -> NoReturn:
        """Run the child process from its fork to its end."""
        status = 1
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(0)  # the housekeeper died before prctl() took effect
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # for stop()
            pulse.hide()
            set_process_title(f"mpbroker: {self.TITLE}")
            self._let_go_of_files()
            self._serve()
        except self.PASSING as error:
            _LOG.error("%s stops for %g s: %s", self.NAME, RETRY_S, error)
            time.sleep(RETRY_S)  # in a process of its own: no task waits
        except BaseException:  # noqa: BLE001 - every failure is logged
            _LOG.exception("%s failed", self.NAME)
        finally:
            os._exit(status)

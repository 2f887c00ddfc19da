"""Signals become bytes on a socket pair; all else runs in the loop.

A signal handler may interrupt any line, also one that holds a shared mutex. So ours do
nothing: Python writes the signal's number to the wake-up descriptor, and the supervisor
reads it when it is ready to act.

Source: signal.set_wakeup_fd; signal(7); wait(2), "NOTES" on SIGCHLD.
"""

import contextlib
import os
import signal
import socket
from types import FrameType
from typing import ClassVar, Final

HANDLED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing: Python has written the signal's number to the SignalSocket."""


class SignalSocket:
    """A descriptor that is readable when a signal has come; one for each process."""

    _current: "ClassVar[SignalSocket | None]" = None

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)
        signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        for number in HANDLED:
            signal.signal(number, _ignore)
        # An ignored SIGCHLD is inherited from the program that started us: the kernel
        # would then reap our children itself, and their exit status would be lost.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        SignalSocket._current = self
        # The program before this one has blocked them over the exec, so that none was
        # lost.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)

    def fileno(self) -> int:
        return self._receiver.fileno()

    def take(self) -> list[int]:
        """Return the numbers of the signals that have come since the last call."""
        with contextlib.suppress(BlockingIOError):
            return list(self._receiver.recv(64))
        return []

    @classmethod
    def give_back(cls) -> None:
        """Raise again the signals that have come and were not taken.

        They must be blocked: so they stay pending for the program that this process is
        about to execute.
        """
        if cls._current is not None:
            for number in cls._current.take():
                if number in HANDLED:
                    os.kill(os.getpid(), number)

    def close(self) -> None:
        """Ignore SIGTERM, SIGINT and SIGHUP from now on, because the broker ends.

        Python restores the default action of handled signals when it ends. A second
        SIGTERM would then be the exit status of a broker that has stopped in order.
        """
        for number in HANDLED:
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        SignalSocket._current = None
        self._receiver.close()
        self._sender.close()


def reset_in_child() -> None:
    """Ignore the supervisor's signals, right after a fork.

    A Ctrl-C reaches the whole foreground group, but the supervisor decides in which
    order its children end: they follow the broker's phase (such as STOPPED) in shared
    memory, and SIGKILL.
    """
    signal.set_wakeup_fd(-1)
    for number in HANDLED:
        signal.signal(number, signal.SIG_IGN)

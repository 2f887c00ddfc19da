"""Signals become bytes on a socket pair; all else runs in the loop.

A signal handler may interrupt any line, one that holds a shared mutex too. So none of
ours does anything: Python writes the signal's number to the wake-up descriptor, and
the supervisor reads it when it is ready to act.

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
    """Be called; the wake-up descriptor has the number."""


class SignalSocket:
    """Readable when a signal has come. A process has one."""

    _current: "ClassVar[SignalSocket | None]" = None

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)
        signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        for number in HANDLED:
            signal.signal(number, _ignore)
        # Whoever started us may ignore it, and that is inherited: the kernel would reap
        # our children itself, and nobody could ask how they ended.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        SignalSocket._current = self
        # A program before us may have left them blocked, so that none was lost.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)

    def fileno(self) -> int:
        return self._receiver.fileno()

    def take(self) -> list[int]:
        """The numbers that have come since the last call."""
        with contextlib.suppress(BlockingIOError):
            return list(self._receiver.recv(64))
        return []

    @classmethod
    def give_back(cls) -> None:
        """Let the kernel have again what has come and was not taken.

        They must be blocked: so they wait for the program that we are about to become.
        """
        if cls._current is not None:
            for number in cls._current.take():
                if number in HANDLED:
                    os.kill(os.getpid(), number)

    def close(self) -> None:
        """Hear no more: who ends is not to be ended by another's impatience.

        Python gives signals that it has handlers for back to the kernel when it ends,
        and SIGTERM would then be the exit status of a broker that has stopped.
        """
        for number in HANDLED:
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        SignalSocket._current = None
        self._receiver.close()
        self._sender.close()


def reset_in_child() -> None:
    """Children follow the phase in shared memory, and SIGKILL; nothing else.

    A Ctrl-C reaches the whole foreground group: the supervisor sees to the order in
    which its children end.
    """
    signal.set_wakeup_fd(-1)
    for number in HANDLED:
        signal.signal(number, signal.SIG_IGN)

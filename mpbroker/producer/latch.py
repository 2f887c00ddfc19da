"""An event whose setter never waits for who waits for it."""

from __future__ import annotations

import threading


class Latch:
    """`threading.Event` for threads that a signal's handler may interrupt (Ctrl-C).

    An Event is guarded by a lock that is taken in Python: interrupted just behind that,
    a thread that begins to wait leaves it locked for good, and who sets the event, the
    sender's thread, stands still with all that it holds. Here each waits for a lock of
    its own, which is released.
    """

    __slots__ = ("_is_set", "_locks")

    def __init__(self) -> None:
        self._is_set = False
        self._locks: list[threading.Lock] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """Let all go on that wait, now and later."""
        self._is_set = True
        while self._locks:
            try:
                self._locks.pop().release()
            except IndexError:
                return  # another thread, doing the same, or giving up, was quicker

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is set; return whether it is."""
        if self._is_set:
            return True
        lock = threading.Lock()
        lock.acquire()
        self._locks.append(lock)
        # If it was set before that, nobody may have seen the lock.
        if not self._is_set:
            lock.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s))
            try:
                self._locks.remove(lock)
            except ValueError:
                pass  # released
        return self._is_set

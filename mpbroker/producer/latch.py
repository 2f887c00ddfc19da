"""Latch: an event that can be set even if a waiting thread was interrupted."""

from __future__ import annotations

import threading


class Latch:
    """`threading.Event` for threads that a signal handler may interrupt (Ctrl-C).

    Python code takes the lock of an Event. A thread that is interrupted just after
    that, when it begins to wait, leaves the lock locked for ever. Then the thread that
    sets the event, the sender's, would wait for ever. Here each waiting thread has a
    lock of its own, which `set` releases.
    """

    __slots__ = ("_is_set", "_locks")

    def __init__(self) -> None:
        self._is_set = False
        self._locks: list[threading.Lock] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """Set the latch: all waits end, and later ones return at once."""
        self._is_set = True
        while self._locks:
            try:
                self._locks.pop().release()
            except IndexError:
                return  # another thread was quicker: it sets, too, or gave up waiting

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the latch is set; return False if the time is over."""
        if self._is_set:
            return True
        lock = threading.Lock()
        lock.acquire()
        self._locks.append(lock)
        # `set` may have run before the lock was in the list: look again.
        if not self._is_set:
            lock.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s))
            try:
                self._locks.remove(lock)
            except ValueError:
                pass  # released
        return self._is_set

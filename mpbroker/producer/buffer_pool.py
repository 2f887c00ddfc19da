"""The bytes that batches may hold together: ``buffer.memory``.

Nothing is allocated here; it is an account. Whoever finds it exhausted waits in line,
so that a large request is not overtaken for ever by small ones. Who waits is not woken
for every batch that comes free: while nearly all memory holds batches there is enough
to send, and to change threads costs as much as to fill one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from mpbroker.producer.errors import (
    BufferExhaustedError,
    ProducerClosedError,
    RecordTooLargeError,
)

_PATIENCE_S: Final = 0.005  # then who waits takes what there is
_ENOUGH: Final = 16  # of this part of all memory is told at once


class _Waiter:
    """A thread in line; told when it has its bytes, or that it gets none."""

    __slots__ = ("is_granted", "size", "told")

    def __init__(self, size: int) -> None:
        self.size = size
        self.is_granted = False
        self.told = threading.Event()


class BufferPool:
    """See the module."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.available_bytes = total_bytes
        self.exhausted_count = 0
        self.wait_time_s = 0.0
        self._lock = threading.Lock()
        self._waiters: deque[_Waiter] = deque()
        self._closed = False

    @property
    def waiting(self) -> int:
        """How many threads wait for memory."""
        return len(self._waiters)

    def try_allocate(self, size: int) -> bool:
        """Take bytes if they are there and nobody waits for some; return whether.

        Raises:
            RecordTooLargeError: there will never be so many.
            ProducerClosedError: `close` was called.
        """
        with self._lock:
            self._check(size)
            if self._waiters or size > self.available_bytes:
                return False
            self.available_bytes -= size
            return True

    def allocate(
        self, size: int, timeout_s: float, waits: Callable[[], None] = lambda: None
    ) -> None:
        """Take bytes, waiting for them in line.

        Args:
            waits: called when it is in line: who has bytes to free may look.

        Raises:
            BufferExhaustedError: they were not there in time.
            RecordTooLargeError, ProducerClosedError: see `try_allocate`.
        """
        if self.try_allocate(size):
            return
        waiter = _Waiter(size)
        with self._lock:
            self._waiters.append(waiter)
            self._grant()
        began = time.monotonic()
        is_taken = False
        try:
            if not waiter.is_granted:
                waits()
            self._wait(waiter, began + min(timeout_s, threading.TIMEOUT_MAX))
            is_taken = waiter.is_granted and not self._closed
        finally:
            with self._lock:
                self.wait_time_s += time.monotonic() - began
                if waiter in self._waiters:
                    self._waiters.remove(waiter)  # late, or interrupted
                elif waiter.is_granted and not is_taken:
                    # Granted between the end of the wait and now, to nobody; or the
                    # wait was interrupted just then, or the pool closed.
                    self.available_bytes += size
                self._grant()
        if self._closed:
            raise ProducerClosedError("the producer was closed while send() waited")
        if not is_taken:
            self.exhausted_count += 1
            raise BufferExhaustedError(
                f"no {size} bytes of buffer.memory={self.total_bytes} came free in"
                f" {timeout_s * 1000:.0f} ms (max.block.ms); brokers are slower than"
                " send(): raise buffer.memory, or send less"
            )

    def _wait(self, waiter: _Waiter, deadline: float) -> None:
        while True:
            left_s = deadline - time.monotonic()
            if waiter.told.wait(max(0.0, min(left_s, _PATIENCE_S))) or left_s <= 0:
                return
            with self._lock:
                self._grant()

    def _check(self, size: int) -> None:
        if self._closed:
            raise ProducerClosedError("the producer is closed; make a new one")
        if size > self.total_bytes:
            raise RecordTooLargeError(
                f"a record of up to {size} bytes with buffer.memory={self.total_bytes};"
                " raise that"
            )

    def free(self, size: int) -> None:
        """Give bytes back, to those who wait first."""
        with self._lock:
            self.available_bytes += size
            if self._waiters and self.available_bytes * _ENOUGH >= self.total_bytes:
                self._grant()

    def _grant(self) -> None:
        while self._waiters and self._waiters[0].size <= self.available_bytes:
            waiter = self._waiters.popleft()
            self.available_bytes -= waiter.size
            waiter.is_granted = True
            waiter.told.set()

    def close(self) -> None:
        """Let nobody wait any more, nor allocate."""
        with self._lock:
            self._closed = True
            waiters, self._waiters = self._waiters, deque()
        for waiter in waiters:
            waiter.told.set()

    def metrics(self, age_ms: float) -> dict[str, float]:
        """Return all that is to be told of it, under Kafka's names.

        Args:
            age_ms: of the producer, over which the ratio of waiting is taken.
        """
        return {
            "buffer-total-bytes": float(self.total_bytes),
            "buffer-available-bytes": float(self.available_bytes),
            "bufferpool-wait-time-ns-total": self.wait_time_s * 1e9,
            "bufferpool-wait-ratio": self.wait_time_s * 1000 / max(1.0, age_ms),
            "waiting-threads": float(self.waiting),
        }

"""The bytes that batches may hold together: ``buffer.memory``.

Nothing is allocated here; it is an account. Whoever finds it exhausted waits in line,
so that a large request is not overtaken for ever by small ones.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from mpbroker.producer.errors import (
    BufferExhaustedError,
    ProducerClosedError,
    RecordTooLargeError,
)


class BufferPool:
    """See the module."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.available_bytes = total_bytes
        self.exhausted_count = 0
        self.wait_time_s = 0.0
        self._lock = threading.Lock()
        self._waiters: deque[tuple[int, threading.Event]] = deque()
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

    def allocate(self, size: int, timeout_s: float) -> None:
        """Take bytes, waiting for them in line.

        Raises:
            BufferExhaustedError: they were not there in time.
            RecordTooLargeError, ProducerClosedError: see `try_allocate`.
        """
        if self.try_allocate(size):
            return
        granted = threading.Event()
        entry = size, granted
        with self._lock:
            self._waiters.append(entry)
            self._grant()
        began = time.monotonic()
        try:
            granted.wait(timeout_s)
        finally:
            with self._lock:
                self.wait_time_s += time.monotonic() - began
                if entry in self._waiters:
                    self._waiters.remove(entry)  # late, or interrupted
                    self._grant()
        if self._closed:
            raise ProducerClosedError("the producer was closed while send() waited")
        if not granted.is_set():
            self.exhausted_count += 1
            raise BufferExhaustedError(
                f"no {size} bytes of buffer.memory={self.total_bytes} came free in"
                f" {timeout_s * 1000:.0f} ms (max.block.ms); brokers are slower than"
                " send(): raise buffer.memory, or send less"
            )

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
            if self._waiters:
                self._grant()

    def _grant(self) -> None:
        while self._waiters and self._waiters[0][0] <= self.available_bytes:
            size, granted = self._waiters.popleft()
            self.available_bytes -= size
            granted.set()

    def close(self) -> None:
        """Let nobody wait any more, nor allocate."""
        with self._lock:
            self._closed = True
            waiters, self._waiters = self._waiters, deque()
        for _, granted in waiters:
            granted.set()

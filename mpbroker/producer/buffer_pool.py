"""BufferPool: an account of the bytes that all batches may hold, ``buffer.memory``.

It allocates nothing. A thread that needs more bytes than are free waits in line, so
that small requests do not overtake a large one for ever. A waiting thread is not woken
for every batch that becomes free. While nearly all memory holds batches, there is
enough to send, and to switch threads costs as much as to fill a batch.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Self

from mpbroker.producer.errors import (
    BufferExhaustedError,
    ProducerClosedError,
    RecordTooLargeError,
)
from mpbroker.producer.latch import Latch
from mpbroker.protocol.error_code import ErrorCode

_PATIENCE_S: Final = 0.005  # a waiting thread looks for free bytes this often
_ENOUGH: Final = 16  # waiting threads are woken when 1/16 of the memory is free


class Grant:
    """One thread's request for bytes of the pool.

    ``held`` counts the bytes that the grant has. A batch takes them over; then ``held``
    is set to 0. Bytes that no batch took go back at the end of `with`, and at the end
    of a `take` that failed, wherever the thread was interrupted (Ctrl-C). An interrupt
    comes after a call, never between two stores.
    """

    __slots__ = ("_pool", "held", "size", "told")

    def __init__(self, pool: BufferPool, size: int) -> None:
        self._pool = pool
        self.size = size
        self.held = 0
        self.told: Latch | None = None  # while in line: ends the thread's wait

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.held or self.told is not None:
            self._pool.give_back(self)

    def take(self, timeout_s: float, waits: Callable[[], None] = lambda: None) -> None:
        """Take this grant's bytes; wait in line for them if too few are free.

        Args:
            timeout_s: the longest wait, in seconds.
            waits: called when this grant is in line, so that the sender may free bytes.

        Raises:
            BufferExhaustedError: the bytes did not become free in time.
            RecordTooLargeError, ProducerClosedError: see `BufferPool.try_take`.
        """
        try:
            if not self._pool.try_take(self):
                self._pool.wait_for(self, timeout_s, waits)
        except BaseException:
            self._pool.give_back(self)
            raise

    def overdraw(self) -> None:
        """Take the grant's bytes at once, beyond ``buffer.memory`` if too few are free.

        Raises:
            BufferExhaustedError: as many bytes as ``buffer.memory`` are lent already.
            RecordTooLargeError, ProducerClosedError: see `BufferPool.try_take`.
        """
        self._pool.lend(self)


class BufferPool:
    """Counts the bytes of ``buffer.memory`` that are free, and makes threads wait."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.available_bytes = total_bytes
        self.exhausted_count = 0
        self.wait_time_s = 0.0
        self._lock = threading.Lock()
        self._waiters: deque[Grant] = deque()
        self._closed = False

    @property
    def waiting(self) -> int:
        """The number of threads that wait for memory."""
        return len(self._waiters)

    def grant(self, size: int) -> Grant:
        """Return a request for ``size`` bytes, which holds none yet."""
        return Grant(self, size)

    def try_take(self, grant: Grant) -> bool:
        """Give a grant its bytes if they are free and no thread waits in line.

        Returns:
            Whether the grant got its bytes.

        Raises:
            RecordTooLargeError: the pool will never have so many bytes.
            ProducerClosedError: `close` was called.
        """
        with self._lock:
            self._check(grant.size)
            if self._waiters or grant.size > self.available_bytes:
                return False
            self.available_bytes -= grant.size
            grant.held = grant.size
            return True

    def lend(self, grant: Grant) -> None:
        """Give a grant its bytes at once, free or not; see `Grant.overdraw`."""
        with self._lock:
            self._check(grant.size)
            if self.available_bytes + self.total_bytes < grant.size:
                self.exhausted_count += 1
                raise BufferExhaustedError(
                    f"buffer.memory={self.total_bytes} is overdrawn by as much again,"
                    " and callbacks cannot wait for it; send less in callbacks"
                )
            self.available_bytes -= grant.size
            grant.held = grant.size

    def wait_for(
        self, grant: Grant, timeout_s: float, waits: Callable[[], None]
    ) -> None:
        """Wait in line until a grant has its bytes; see `Grant.take`."""
        told = grant.told = Latch()
        with self._lock:
            self._waiters.append(grant)
            self._grant()
        began = time.monotonic()
        deadline = began + min(timeout_s, threading.TIMEOUT_MAX)
        if not grant.held:
            waits()
        while not (grant.held or self._closed):
            left_s = deadline - time.monotonic()
            if told.wait(max(0.0, min(left_s, _PATIENCE_S))) or left_s <= 0:
                break
            with self._lock:
                self._grant()
        with self._lock:
            self.wait_time_s += time.monotonic() - began
            self.exhausted_count += not (grant.held or self._closed)
        if self._closed:
            raise ProducerClosedError("the producer was closed while send() waited")
        if not grant.held:
            raise BufferExhaustedError(
                f"{grant.size} bytes of buffer.memory={self.total_bytes} did not become"
                f" free in {timeout_s * 1000:.0f} ms (max.block.ms); brokers are slower"
                " than send(): raise buffer.memory, or send less"
            )

    def give_back(self, grant: Grant) -> None:
        """Free the bytes that a grant holds, and remove it from the line of waiters."""
        with self._lock:
            self.available_bytes += grant.held
            grant.held = 0
            grant.told = None
            if grant in self._waiters:
                self._waiters.remove(grant)
            self._grant()

    def _check(self, size: int) -> None:
        if self._closed:
            raise ProducerClosedError("the producer is closed; make a new one")
        if size > self.total_bytes:
            raise RecordTooLargeError(
                f"a record of up to {size} bytes with buffer.memory={self.total_bytes};"
                " raise that",
                ErrorCode.MESSAGE_TOO_LARGE,
            )

    def free(self, size: int) -> None:
        """Give ``size`` bytes back to the pool.

        Threads in line get them before others; they are woken when 1/16 of the memory
        is free.
        """
        with self._lock:
            self.available_bytes += size
            if self._waiters and self.available_bytes * _ENOUGH >= self.total_bytes:
                self._grant()

    def _grant(self) -> None:
        while self._waiters and self._waiters[0].size <= self.available_bytes:
            first = self._waiters[0]
            self.available_bytes -= first.size
            first.held = first.size
            self._waiters.popleft()
            if first.told is not None:
                first.told.set()

    def close(self) -> None:
        """End all waits for bytes with an error; later requests fail, too."""
        with self._lock:
            self._closed = True
            waiters, self._waiters = self._waiters, deque()
        for waiter in waiters:
            if waiter.told is not None:
                waiter.told.set()

    def metrics(self, age_ms: float) -> dict[str, float]:
        """Return the pool's metrics, under Kafka's names.

        Args:
            age_ms: the age of the producer in ms; the wait ratio is taken over it.
        """
        return {
            "buffer-total-bytes": float(self.total_bytes),
            "buffer-available-bytes": float(max(0, self.available_bytes)),
            "bufferpool-wait-time-ns-total": self.wait_time_s * 1e9,
            "bufferpool-wait-ratio": self.wait_time_s * 1000 / max(1.0, age_ms),
            "waiting-threads": float(self.waiting),
        }

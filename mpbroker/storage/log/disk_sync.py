"""DiskSync: force files to disk without blocking the process.

A handler must go on serving while the disk works. So the kernel takes fdatasync
requests, and reports their completion through an eventfd, which the handler polls with
its other descriptors; no thread of this process is needed. The interface is io_uring
(see sync_ring.py). Where that is not available, it is the kernel's older asynchronous
I/O; where neither is (some sandboxes), ``start`` makes a blocking fdatasync.

An asynchronous sync costs two wake-ups: 20 us where the sync itself takes no time, and
60 us where it takes 140 us (measured). So a handler that has no other request waiting
may make a blocking sync, as long as the disk is quick. The time lost by that is
limited by a credit of 0.1 s: a blocking sync of more than 1 ms takes eight times its
duration off the credit, and twice as much for each further one in a row. The credit
comes back as time passes. While it is overdrawn, syncs are asynchronous, for 30 s at
most. So waiting takes at most an eighth of the time, and much less with a slow disk.

Source: io_submit(2), io_getevents(2); <linux/aio_abi.h>.
"""

import ctypes
import errno
import os
import time
from collections.abc import Callable, Sequence
from typing import Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.storage.log.sync_ring import SyncRing

_NUMBERS: Final = {  # io_setup, io_getevents, io_submit
    "x86_64": (206, 208, 209),
    "aarch64": (0, 4, 2),
}
_IOCB_CMD_FDSYNC: Final = 3
_IOCB_FLAG_RESFD: Final = 1
_MAX_EVENTS: Final = 256
# The longest blocking sync that costs no credit; the cost of a longer one, as a
# multiple of its duration; the credit; the longest time without blocking syncs.
_QUICK_NS: Final = 1_000_000
_COST: Final = 8
_CREDIT_NS: Final = 100_000_000
_MAX_PAUSE_NS: Final = 30_000_000_000
# Syncs shorter than this (of a file system in memory) are made one after another; and
# after how many calls their duration is measured again.
_NOTHING_NS: Final = 30_000
_LOOK_EVERY: Final = 64


class _Iocb(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_uint64),
        ("key", ctypes.c_uint32),
        ("rw_flags", ctypes.c_int32),
        ("lio_opcode", ctypes.c_uint16),
        ("reqprio", ctypes.c_int16),
        ("fildes", ctypes.c_uint32),
        ("buf", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("reserved2", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("resfd", ctypes.c_uint32),
    )


class _IoEvent(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_uint64),
        ("obj", ctypes.c_uint64),
        ("res", ctypes.c_int64),
        ("res2", ctypes.c_int64),
    )


class SyncDone(NamedTuple):
    """One finished sync: the token given to ``start``, and the sync's errno or 0."""

    token: int
    error: int


class DiskSync:
    """Starts fdatasync calls for one process, and returns those that have ended.

    Args:
        syscall: the libc function syscall(2), for tests.
        io_uring: whether io_uring may be used.

    Attributes:
        event_fd: becomes readable when a sync has finished; poll it edge-triggered. -1:
            all syncs are blocking, and ``finished`` returns them right after ``start``.
    """

    def __init__(
        self, syscall: Callable[..., int] | None = None, *, io_uring: bool = True
    ) -> None:
        self.event_fd = -1
        self._ring: SyncRing | None = None
        self._context = ctypes.c_uint64(0)
        # By token, an object that must live as long as the sync: with io_uring a
        # duplicate of the descriptor; with the older interface the iocb.
        self._outstanding: dict[int, int | _Iocb] = {}
        self._done: list[SyncDone] = []
        # When the credit will be full again; and how many slow syncs came in a row.
        self._paid_by_ns = 0
        self._slow_in_a_row = 0
        self._is_nothing = False
        self._looks_in = _LOOK_EVERY
        self._events = (_IoEvent * _MAX_EVENTS)()
        self._numbers = _NUMBERS.get(os.uname().machine)
        if syscall is None:
            libc = ctypes.CDLL(None, use_errno=True)
            libc.syscall.restype = ctypes.c_long
            syscall = libc.syscall
        self._syscall = syscall
        if io_uring:
            try:
                self._ring = SyncRing(syscall)
                self.event_fd = self._ring.event_fd
                return
            except OSError:
                pass  # use the older asynchronous I/O
        if self._numbers is not None:
            number = ctypes.c_long(self._numbers[0])
            context = ctypes.byref(self._context)
            if self._syscall(number, ctypes.c_uint(_MAX_EVENTS), context) == 0:
                self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def start(self, token: int, fd: int) -> None:
        """Begin an fdatasync of ``fd``; ``finished`` returns ``token`` after its end.

        A token must not be used again before its sync has finished.
        """
        self.start_all([(token, fd)])

    def start_all(self, syncs: Sequence[tuple[int, int]]) -> None:
        """Begin syncs of (token, descriptor) pairs, in one system call if possible."""
        if self._ring is not None:
            syncs = self._start_in_ring(self._ring, syncs)
        for token, fd in syncs:
            if (
                self._ring is not None
                or self.event_fd < 0
                or not self._submit(token, fd)
            ):
                self._sync(token, fd)

    def _start_in_ring(
        self, ring: SyncRing, syncs: Sequence[tuple[int, int]]
    ) -> Sequence[tuple[int, int]]:
        """Begin as many (token, descriptor) syncs as the ring has room for.

        Recent kernels look the descriptor up only when a kernel thread makes the sync.
        By then the caller may have closed it, and its number may be another file's. So
        each sync uses a duplicate, which is closed when the sync has finished.

        Returns:
            The syncs that were not begun.
        """
        room = max(0, _MAX_EVENTS - len(self._outstanding))
        own, others = [], list(syncs[room:])
        for token, fd in syncs[:room]:
            try:
                own.append((token, os.dup(fd)))
            except OSError:  # no descriptor is left, or it was closed
                others.append((token, fd))
        started = ring.start(own) if own else 0
        self._outstanding.update(own[:started])
        for token, fd in own[started:]:
            self._sync(token, fd)
            os.close(fd)
        return others

    @property
    def is_quick(self) -> bool:
        """Whether no sync is outstanding, and ``sync_now`` is expected to be short."""
        if self._outstanding or self._done:
            return False
        return time.monotonic_ns() >= self._paid_by_ns - _CREDIT_NS

    def sync_now(self, fds: Sequence[int]) -> int:
        """Make a blocking fdatasync of each descriptor, one after another.

        Returns:
            0, or the errno of the first one that failed; the rest is then not made.
        """
        started = time.monotonic_ns()
        try:
            for fd in fds:
                os.fdatasync(fd)
        except OSError as error:
            return error.errno or errno.EIO
        self._note_time(started)
        return 0

    def _note_time(self, started: int) -> None:
        ended = time.monotonic_ns()
        if ended - started <= _QUICK_NS:
            self._slow_in_a_row = 0
            return
        cost = _COST * (ended - started) << min(self._slow_in_a_row, 30)
        paid_by = max(self._paid_by_ns, ended) + cost
        self._paid_by_ns = min(paid_by, ended + _CREDIT_NS + _MAX_PAUSE_NS)
        self._slow_in_a_row += 1

    def sync_side_by_side(self, files: Sequence[Sequence[int]]) -> list[int]:
        """Make blocking fdatasync calls of groups of descriptors, all at the same time.

        All groups together take hardly longer than one: each sync makes the disk flush
        its cache, and syncs at the same time share that flush (three syncs on an idle
        disk: 0.10 to 0.17 ms at the same time, 0.24 to 0.42 ms one after another). But
        where a sync takes less than 30 us, the kernel's threads cost more, so then the
        syncs are made one after another.

        Returns:
            For each group the errno of a sync that failed, or 0.
        """
        ring = self._ring
        syncs = [(number, fd) for number, fds in enumerate(files) for fd in fds]
        if ring is None or len(syncs) < 2:
            return [self.sync_now(fds) for fds in files]
        started = time.monotonic_ns()
        self._looks_in -= 1
        if self._is_nothing or not self._looks_in:
            made = [self.sync_now(fds) for fds in files]
            spent = time.monotonic_ns() - started
            self._is_nothing = spent < len(syncs) * _NOTHING_NS
            self._looks_in = _LOOK_EVERY
            return made
        errors = [0] * len(files)
        done = ring.make(syncs)
        for number, error in done:
            errors[number] = errors[number] or error
        self._note_time(started)
        if len(done) < len(syncs):  # rare; some may be made twice
            for number, fds in enumerate(files):
                errors[number] = errors[number] or self.sync_now(fds)
        return errors

    def _sync(self, token: int, fd: int) -> None:
        try:
            os.fdatasync(fd)
            self._done.append(SyncDone(token, 0))
        except OSError as error:
            self._done.append(SyncDone(token, error.errno or errno.EIO))

    def _submit(self, token: int, fd: int) -> bool:
        """Begin an fdatasync by the kernel's older asynchronous I/O (not io_uring).

        Returns:
            Whether the kernel has accepted it.
        """
        if len(self._outstanding) >= _MAX_EVENTS:
            return False
        assert self._numbers is not None
        iocb = _Iocb(
            data=token,
            lio_opcode=_IOCB_CMD_FDSYNC,
            fildes=fd,
            flags=_IOCB_FLAG_RESFD,
            resfd=self.event_fd,
        )
        pointers = (ctypes.POINTER(_Iocb) * 1)(ctypes.pointer(iocb))
        result = self._syscall(
            ctypes.c_long(self._numbers[2]), self._context, ctypes.c_long(1), pointers
        )
        if result != 1:
            return False
        self._outstanding[token] = iocb
        return True

    @property
    def is_idle(self) -> bool:
        """Whether no sync is outstanding, and ``finished`` has no result to return."""
        return not self._outstanding and not self._done

    def finished(self) -> list[SyncDone]:
        """Return the syncs that have finished since the last call. Never waits."""
        done, self._done = self._done, []
        if self._outstanding and self._ring is not None:
            for token, error in self._ring.ended():
                own = self._outstanding.pop(token, None)
                if isinstance(own, int):
                    os.close(own)
                done.append(SyncDone(token, error))
        elif self._outstanding:
            assert self._numbers is not None
            count = self._syscall(
                ctypes.c_long(self._numbers[1]),
                self._context,
                ctypes.c_long(0),
                ctypes.c_long(_MAX_EVENTS),
                self._events,
                None,
            )
            for event in self._events[: max(0, count)]:
                self._outstanding.pop(event.data, None)
                done.append(SyncDone(event.data, -min(0, event.res)))
        return done

"""Leases: replace a process that lives and makes no progress.

Progress can be seen from outside, at no cost: a handler, a processor and the
coordinator store certain words in each turn, or each second. A process whose words have
not changed for a whole lease hangs. It is killed, and its death is repaired like any
other. These are told apart:

    stopped (SIGSTOP)          it may hold a lock: killed at the second look
    traced (by a debugger)     left alone
    waiting for a disk         left alone: a successor would wait for the same disk
    silent otherwise           an endless loop, or a wait without an end: killed

Samples are counted and not seconds, so that no process is killed because the machine
stood still.

Source: proc_pid_stat(5), proc_pid_syscall(5).
"""

import contextlib
import os
import signal
from collections.abc import Callable, Sequence, Set
from typing import Final, Protocol

from mpbroker.base.logger import get_logger
from mpbroker.inspect.process_state import process_state
from mpbroker.ipc.layout import (
    COORDINATOR,
    HANDLER_BUSY_SLOT,
    HANDLER_COUNTERS,
    HANDLER_READY,
    HANDLER_STEPS,
    PROCESSOR_BEAT,
    PROCESSOR_COUNTERS,
    PROCESSOR_READY,
    HandlerCounter,
    ProcessorCounter,
    handler_row,
    processor_row,
)
from mpbroker.supervisor.child import Child, Role

_LOG = get_logger(__name__)

INTERVAL_S: Final = 1.0
# A healthy handler is silent for longest when it reads the records of a 100 MB request,
# or recovers a log after a crash. A request that touches many logs stores a word for
# each (HANDLER_STEPS). The coordinator loads its logs in steps of some megabytes.
LEASE_SAMPLES: Final = 30
# Two: a stop that is over at once, as of a whole process group, kills no process.
STOPPED_SAMPLES: Final = 2
# A process that sleeps in one of these system calls waits for a file system whose waits
# can be interrupted (NFS, FUSE). By number, as the kernel shows them.
_DISK_CALLS: Final = {
    # read, write, open, fsync, fdatasync, pread64, pwrite64, preadv, pwritev, openat...
    "x86_64": {"0", "1", "2", "74", "75", "76", "77", "17", "18", "40", "82", "87"}
    | {"257", "285", "295", "296", "263", "264"},
    "aarch64": {"63", "64", "82", "83", "46", "67", "68", "69", "70", "71", "56"}
    | {"47", "35", "38", "276"},
}
_DISK: Final = _DISK_CALLS.get(os.uname().machine, set())


class ChildrenOwner(Protocol):
    """The part of the Supervisor that leases need."""

    children: list[Child]
    before_repair: Callable[[], None]

    @property
    def asides(self) -> Set[int]:
        """Processes that run something aside."""

    def every(self, interval_s: float, run: Callable[[], None]) -> None:
        """Call ``run()`` at intervals."""


class _Lease:
    """The samples of one process."""

    __slots__ = ("pid", "pulse", "silent", "stopped", "waits_for_disk")

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.pulse: Sequence[int] | None = ()
        self.silent = 0
        self.stopped = 0
        self.waits_for_disk = 0


class Leases:
    """Watches all children of a supervisor, from ``begin`` on."""

    def __init__(self, owner: ChildrenOwner, words: memoryview) -> None:
        self._owner = owner
        self._words = words
        self._leases: dict[tuple[Role, int], _Lease] = {}
        self._stopped_asides: set[int] = set()

    def begin(self) -> None:
        """Check at intervals; kill stopped processes before every repair."""
        self._owner.before_repair = self.kill_stopped
        self._owner.every(INTERVAL_S, self.check)

    def check(self) -> None:
        """Sample every child; kill those whose lease has run out."""
        seen = {}
        is_one_stopped = may_one_be_stopped()
        for child in self._owner.children:
            if not child.is_alive:
                continue
            key = child.role, child.number
            lease = self._leases.get(key)
            if lease is None or lease.pid != child.pid:
                lease = _Lease(child.pid)
            seen[key] = lease
            self._look(child, lease, is_one_stopped)
        self._leases = seen
        stopped = self._asides_stopped() if is_one_stopped else set()
        for pid in stopped & self._stopped_asides:
            _kill_aside(pid)
        self._stopped_asides = stopped

    def kill_stopped(self) -> None:
        """Kill each process that is stopped now: it may hold a lock of the repair."""
        if not may_one_be_stopped():
            return
        for child in self._owner.children:
            if child.is_alive and process_state(child.pid) == "T":
                _kill(child, "is stopped while another's death is to be repaired")
        for pid in self._asides_stopped():
            _kill_aside(pid)

    def _asides_stopped(self) -> set[int]:
        return {pid for pid in self._owner.asides if process_state(pid) == "T"}

    def _look(self, child: Child, lease: _Lease, is_one_stopped: bool) -> None:
        pulse = self._pulse(child)
        has_moved = pulse != lease.pulse
        lease.pulse = pulse
        if has_moved:
            lease.silent = lease.waits_for_disk = 0
        if (has_moved or pulse is None) and not is_one_stopped:
            lease.stopped = 0
            return
        state = process_state(child.pid)
        if state == "T":
            lease.stopped += 1
            if lease.stopped >= STOPPED_SAMPLES:
                _kill(child, "is stopped")
            return
        lease.stopped = 0
        if has_moved or pulse is None or state in ("t", "Z", ""):
            return
        if state == "D" or _waits_in_file_call(child.pid):
            lease.waits_for_disk += 1
            if lease.waits_for_disk == LEASE_SAMPLES:
                _LOG.warning("%s has waited for the disk for a long time", _name(child))
        else:
            lease.silent += 1
            if lease.silent >= LEASE_SAMPLES:
                _kill(child, f"has not moved in {LEASE_SAMPLES * INTERVAL_S:.0f} s")

    def _pulse(self, child: Child) -> Sequence[int] | None:
        """Return words that change with progress; None: the role has no such words."""
        words = self._words
        if child.role in (Role.HANDLER, Role.COORDINATOR):
            is_handler = child.role is Role.HANDLER
            row = handler_row(child.number if is_handler else COORDINATOR)
            idle = row + HANDLER_COUNTERS + HandlerCounter.IDLE_NS
            busy = row + HANDLER_BUSY_SLOT
            return (
                words[row + HANDLER_READY],
                words[row + HANDLER_STEPS],
                words[idle],
                *words[busy : busy + 3],
            )
        if child.role is Role.PROCESSOR:
            row = processor_row(child.number)
            idle = row + PROCESSOR_COUNTERS + ProcessorCounter.IDLE_NS
            return (
                words[row + PROCESSOR_READY],
                words[idle],
                words[row + PROCESSOR_BEAT],
            )
        return None


def may_one_be_stopped() -> bool:
    """Whether a child may be stopped: one system call, since it is asked often.

    True for as long as a child is stopped: WNOWAIT leaves its status there.
    Source: waitid(2), WNOWAIT.
    """
    options = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
    try:
        return os.waitid(os.P_ALL, 0, options) is not None
    except ChildProcessError:
        return False  # no children


def _waits_in_file_call(pid: int) -> bool:
    """Whether a process sleeps in a system call on files; False: /proc is hidden."""
    try:
        with open(f"/proc/{pid}/syscall") as file:
            return file.read().partition(" ")[0] in _DISK
    except OSError:
        return False


def _name(child: Child) -> str:
    return f"{child.role.value} {child.number} (pid {child.pid})"


def _kill(child: Child, why: str) -> None:
    _LOG.error("%s %s: it is killed and replaced", _name(child), why)
    if child.role is Role.ACCEPTOR:
        _wake_guard(child)
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)


def _kill_aside(pid: int) -> None:
    _LOG.error("process %d, which does something aside, is stopped: it is killed", pid)
    os.kill(pid, signal.SIGKILL)  # not reaped yet, so the number is still its own


def _wake_guard(acceptor: Child) -> None:
    """Continue the guard of a stopped acceptor, which was stopped with it.

    It does its duty when the acceptor dies, and ends. Before the acceptor is killed:
    until then its child cannot have been reaped, and the number is the guard's.
    """
    with contextlib.suppress(OSError):
        with open(f"/proc/{acceptor.pid}/task/{acceptor.pid}/children") as file:
            guards = file.read().split()
        for guard in guards:
            os.kill(int(guard), signal.SIGCONT)

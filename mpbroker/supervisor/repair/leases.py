"""Leases: replace a process that lives and makes no progress.

Progress can be seen from outside, at no cost: each process stores certain words of
shared memory in each turn, or each second. A process whose words have not changed for
a whole lease hangs. It is killed, and its death is repaired like any other. A lease is
30 s; that of the housekeeper and of the exporter 5 min, since a part of their work may
take long, and no client waits for it. These cases are told apart:

    stopped (SIGSTOP)          it may hold a lock: killed at the second look
    traced (by a debugger)     left alone
    waiting for a disk         left alone: a successor would wait for the same disk
    waiting for a lock         left alone: a successor would wait for the same lock, and
                               its owner has a lease of its own, or waits for a disk.
                               Only processes that wait for each other are killed
    silent otherwise           an endless loop, or a wait without an end: killed

A request over which its handler has computed for a lease is not tried again, since the
next handler would compute as long (Child.overran). A request over which its handler has
waited is tried again, since the reason may be gone.

Samples are counted and not seconds, so that no process is killed because the machine
stood still.

The housekeeper's own children (log cleaners, the remote log manager, the node of a
cluster) take locks, too, and have no lease. They are looked for in /proc, and killed if
they are stopped.

The supervisor itself may wait for a lock that guards memory alone, which a process
holds for microseconds. If the lock's owner was stopped just then, the owner is killed
(``let_go``).

Source: proc_pid_stat(5), proc_pid_syscall(5).
"""

import contextlib
import os
import signal
from collections.abc import Callable, Sequence, Set
from typing import Final, Protocol

from mpbroker.base.logger import get_logger
from mpbroker.inspect.process_state import children_of, process_state, waits_for_disk
from mpbroker.ipc.layout import (
    ACCEPTOR_PULSES,
    COORDINATOR,
    EXPORTER_PULSE,
    HANDLER_AWAITS,
    HANDLER_BUSY_SLOT,
    HANDLER_COUNTERS,
    HANDLER_READY,
    HANDLER_STEPS,
    HEADER,
    HEADER_PHASE,
    HOUSEKEEPER_PULSE,
    KEEPER_PULSE,
    PROCESSOR_BEAT,
    PROCESSOR_COUNTERS,
    PROCESSOR_READY,
    PULSE_AWAITS,
    PULSE_PID,
    PULSE_STEPS,
    HandlerCounter,
    Phase,
    ProcessorCounter,
    handler_row,
    processor_row,
    pulse_words,
)
from mpbroker.ipc.robust_mutex import on_wait
from mpbroker.supervisor.child import Child, Role

_LOG = get_logger(__name__)

INTERVAL_S: Final = 1.0
# A healthy handler is silent for longest when it reads the records of a 100 MB request,
# or recovers a log after a crash. A request that touches many logs stores a word for
# each (HANDLER_STEPS). The coordinator loads its logs in steps of some megabytes.
LEASE_SAMPLES: Final = 30
_LONG_LEASES: Final = {Role.HOUSEKEEPER: 300, Role.EXPORTER: 300}
_PULSES: Final = {
    Role.HOUSEKEEPER: HOUSEKEEPER_PULSE,
    Role.KEEPER: KEEPER_PULSE,
    Role.EXPORTER: EXPORTER_PULSE,
}
# Two: a stop that is over at once, as of a whole process group, kills no process.
STOPPED_SAMPLES: Final = 2


class ChildrenOwner(Protocol):
    """A supervisor: its children, timers, and a callback before each repair."""

    children: list[Child]
    before_repair: Callable[[], None]

    @property
    def asides(self) -> Set[int]:
        """The ids of the helper processes that ``Loop.fork_aside`` has started."""

    def every(self, interval_s: float, run: Callable[[], None]) -> None:
        """Call ``run()`` at intervals."""


class _Lease:
    """How often a process was looked at since it last made progress."""

    __slots__ = ("computes", "pid", "pulse", "silent", "stopped", "waits")

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.pulse: Sequence[int] | None = ()
        self.silent = 0
        self.computes = 0  # silent samples in which it ran or was ready to run
        self.stopped = 0
        self.waits = 0


class Leases:
    """Finds and kills children of a supervisor that make no progress any more."""

    def __init__(self, owner: ChildrenOwner, words: memoryview) -> None:
        self._owner = owner
        self._words = words
        self._leases: dict[tuple[Role, int], _Lease] = {}
        self._stopped_asides: set[int] = set()
        # The housekeeper's children that were stopped when check() last looked.
        self._helpers_before: set[int] = set()

    def begin(self) -> None:
        """Begin to check the children at intervals.

        Before each repair after a death, stopped processes are killed.
        """
        self._owner.before_repair = self.kill_stopped
        on_wait(self.let_go)
        self._owner.every(INTERVAL_S, self.check)

    def check(self) -> None:
        """Look at every child; kill those without progress for a lease (30 s)."""
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
        stopped = set(self._stopped_helpers())
        for pid in stopped & self._helpers_before:
            self._kill_helper(pid)
        self._helpers_before = stopped

    def kill_stopped(self) -> None:
        """Kill processes stopped by SIGSTOP, which may hold a lock we need."""
        for pid in self._stopped_helpers():
            self._kill_helper(pid)
        if not may_one_be_stopped():
            return
        for child in self._owner.children:
            if child.is_alive and process_state(child.pid) == "T":
                _kill(child, "is stopped while another's death is to be repaired")
        for pid in self._asides_stopped():
            _kill_aside(pid)

    def let_go(self, owner: int) -> None:
        """Kill the owner of a lock that the supervisor waits for, if it is stopped.

        Do nothing if it runs, or is not a process of this broker.

        Args:
            owner: the process id. It is killed even if it has just released the lock.
        """
        if process_state(owner) != "T":
            return
        for child in self._owner.children:
            if child.is_alive and child.pid == owner:
                _kill(child, "is stopped, and has a lock that a repair needs")
        if owner in self._owner.asides:
            _kill_aside(owner)
        self._kill_helper(owner)

    def _helpers(self) -> list[int]:
        """Return the process ids of the housekeeper's own children, as /proc has them.

        The supervisor is not their parent, so only the housekeeper can reap them.
        """
        for child in self._owner.children:
            if child.role is Role.HOUSEKEEPER and child.is_alive:
                return children_of(child.pid)
        return []

    def _stopped_helpers(self) -> list[int]:
        return [pid for pid in self._helpers() if process_state(pid) == "T"]

    def _kill_helper(self, pid: int) -> None:
        """Kill a child of the housekeeper, unless another process has its id by now."""
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return
        try:
            if pid in self._helpers():
                _LOG.error(
                    "process %d, the housekeeper's, is stopped: it is killed", pid
                )
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass
        finally:
            os.close(pidfd)

    def _asides_stopped(self) -> set[int]:
        return {pid for pid in self._owner.asides if process_state(pid) == "T"}

    def _look(self, child: Child, lease: _Lease, is_one_stopped: bool) -> None:
        pulse = self._pulse(child)
        has_moved = pulse != lease.pulse
        lease.pulse = pulse
        if has_moved:
            lease.silent = lease.computes = lease.waits = 0
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
        if what := self._awaited(child):
            lease.waits += 1
            if lease.waits == LEASE_SAMPLES:
                _LOG.warning("%s has waited for %s for a long time", _name(child), what)
        else:
            lease.silent += 1
            lease.computes += state == "R"
            samples = _LONG_LEASES.get(child.role, LEASE_SAMPLES)
            if lease.silent >= samples:
                child.overran = lease.computes > samples // 2
                _kill(child, f"has not moved in {samples * INTERVAL_S:.0f} s")

    def _awaited(self, child: Child) -> str:
        """Return as text the disk or the lock that a process waits for; "": none.

        The owner of the lock may wait for another lock, and so on. If that chain leads
        back to the process, the text is "" as well: the wait would never end.
        """
        if waits_for_disk(child.pid):
            return "the disk"
        owner = first = self._owner_awaited_by(child.pid)
        seen = set()
        while owner and owner not in seen:
            seen.add(owner)
            owner = self._owner_awaited_by(owner)
        # If it is in the chain, these processes wait for each other, for ever.
        return f"a lock of process {first}" if first and child.pid not in seen else ""

    def _owner_awaited_by(self, pid: int) -> int:
        """Return the process id of the owner of the lock that a process waits for.

        0: it waits for no lock.
        """
        for child in self._owner.children:
            if child.pid == pid and child.is_alive:
                row = _row_of(child)
                if row is not None:
                    return self._words[row + HANDLER_AWAITS]
                shown = self._shown(child)
                return 0 if shown is None else self._words[shown + PULSE_AWAITS]
        return 0

    def _shown(self, child: Child) -> int | None:
        """Return where in the header a process shows its pulse; None: it shows none.

        That may be a process of an earlier version, or one that has just started.
        """
        number = _pulse_of(child)
        if number is None:
            return None
        first = pulse_words(number)
        return first if self._words[first + PULSE_PID] == child.pid else None

    def _pulse(self, child: Child) -> Sequence[int] | None:
        """Return the words of shared memory that change when a child makes progress.

        None: processes of its role store no such words.
        """
        words = self._words
        row = _row_of(child)
        if row is not None:
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
        shown = self._shown(child)
        # A broker that stops has limits of its own for the last work of each process.
        if shown is None or words[HEADER + HEADER_PHASE] >= Phase.DRAINING:
            return None
        return (words[shown + PULSE_STEPS],)


def _row_of(child: Child) -> int | None:
    """Return where in shared memory a handler or the coordinator has its words.

    None: the child is neither.
    """
    if child.role is Role.HANDLER:
        return handler_row(child.number)
    return handler_row(COORDINATOR) if child.role is Role.COORDINATOR else None


def _pulse_of(child: Child) -> int | None:
    """Return the number of the pulse of a process without a row; None: it has none."""
    if child.role is Role.ACCEPTOR:
        return ACCEPTOR_PULSES + child.number
    return _PULSES.get(child.role)


def may_one_be_stopped() -> bool:
    """Whether a child of this process may be stopped (SIGSTOP).

    It is called often, and so makes a single system call. It returns True for as long
    as a child is stopped, because WNOWAIT does not take the child's status away.
    Source: waitid(2), WNOWAIT.
    """
    options = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
    try:
        return os.waitid(os.P_ALL, 0, options) is not None
    except ChildProcessError:
        return False  # no children


def _name(child: Child) -> str:
    return f"{child.role.value} {child.number} (pid {child.pid})"


def _kill(child: Child, why: str) -> None:
    _LOG.error("%s %s: it is killed and replaced", _name(child), why)
    if child.role in (Role.ACCEPTOR, Role.KEEPER):
        _wake_guard(child)
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)


def _kill_aside(pid: int) -> None:
    _LOG.error("process %d, which does something aside, is stopped: it is killed", pid)
    os.kill(pid, signal.SIGKILL)  # not reaped yet, so the number is still its own


def _wake_guard(guarded: Child) -> None:
    """Continue (SIGCONT) the guards of a process, which may be stopped as it is.

    A guard is a child process that acts when its parent dies, and then ends. Call this
    before the parent is killed: until then the guard's process id cannot be another
    process's.
    """
    with contextlib.suppress(OSError):
        for guard in children_of(guarded.pid):
            os.kill(guard, signal.SIGCONT)

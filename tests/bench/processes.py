"""CPU time and memory of a broker: all of its processes and threads together.

Source: proc(5); clock_getcpuclockid(3), whose arithmetic is the kernel's
include/linux/posix-timers_types.h.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

# A process's clock that the scheduler keeps: not in ticks of 10 ms, which need runs of
# many seconds, and not by thread, where what ends takes its time along.
_CPUCLOCK_SCHED: Final = 2


class ProcessTree:
    """A process and all its descendants, looked up afresh at every reading."""

    def __init__(self, root_pid: int) -> None:
        self.root_pid = root_pid

    def pids(self) -> list[int]:
        """Return the root and its living descendants, parents first."""
        children: dict[int, list[int]] = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                parent = parent_of(int(entry))
                if parent is not None:
                    children.setdefault(parent, []).append(int(entry))
        found = [self.root_pid] if os.path.exists(f"/proc/{self.root_pid}") else []
        for pid in found:
            found += children.get(pid, [])
        return found

    def cpu_seconds(self) -> float:
        """Return the CPU time of all processes that live now, to the nanosecond.

        With that of their threads that have ended, the kernel's own among them, which
        come and go with what io_uring is given to do.
        """
        return sum(map(_cpu_ns, self.pids())) / 1e9

    def cpu_seconds_by_title(self) -> dict[str, float]:
        """Return the CPU time so far of every process, by its title."""
        times: dict[str, float] = {}
        for pid in self.pids():
            one = _OneProcess(pid)
            times[f"{title_of(pid)} [{pid}]"] = one.cpu_seconds()
        return times

    def pss_bytes(self) -> int:
        """Return the proportional set size of the tree: shared pages count once."""
        total = 0
        for pid in self.pids():
            try:
                rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            except OSError:
                continue
            for line in rollup.splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
        return total

    def idle_share(self, seconds: float) -> float:
        """Return CPU time over wall time while nobody asks anything."""
        before = self.cpu_seconds()
        time.sleep(seconds)
        return (self.cpu_seconds() - before) / seconds


def _cpu_ns(pid: int) -> int:
    """Return what a process has used: 0 if it is gone."""
    try:
        return time.clock_gettime_ns(~pid << 3 | _CPUCLOCK_SCHED)
    except OSError:
        return 0


class _OneProcess(ProcessTree):
    """A process without its descendants."""

    def pids(self) -> list[int]:
        return [self.root_pid]


class Bystanders:
    """How much CPU time went to processes that are neither ours nor a broker's.

    Figures taken while others compute are no figures; this is how one finds out.
    """

    def __init__(self, trees: Iterable[ProcessTree]) -> None:
        self._trees = [ProcessTree(os.getpid()), *trees]
        self._began = time.monotonic()
        self._before = self._others()

    def cores(self) -> float:
        """Return how many cores they had on average since the beginning."""
        return (self._others() - self._before) / (time.monotonic() - self._began)

    def _others(self) -> float:
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        ours = ended.ru_utime + ended.ru_stime
        pids = {pid for tree in self._trees for pid in tree.pids()}
        ours += sum(_OneProcess(pid).cpu_seconds() for pid in pids)
        return _machine_busy_s() - ours


def _machine_busy_s() -> float:
    with open("/proc/stat") as file:
        user, nice, system, _idle, _wait, irq, softirq, *_ = file.readline().split()[1:]
    ticks = sum(map(int, (user, nice, system, irq, softirq)))
    return ticks / os.sysconf("SC_CLK_TCK")


def parent_of(pid: int) -> int | None:
    """Return a process's parent, or None if the process is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[1])


def title_of(pid: int) -> str:
    """Return a process's title as `ps` shows it, or an empty string."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return raw.replace(b"\0", b" ").decode(errors="replace").strip()[:80]


def listening_pid(port: int) -> int:
    """Return the process that listens on a local TCP port: the topmost if many do.

    Raises:
        ProcessLookupError: nobody does, or we may not look at those who do.
    """
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            listening = fields[3] == "0A"
            if listening and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    owners = {
        int(entry)
        for entry in os.listdir("/proc")
        if entry.isdigit() and _holds(int(entry), inodes)
    }
    for owner in owners:
        if parent_of(owner) not in owners:
            return owner
    raise ProcessLookupError(f"no process of ours listens on port {port}")


def _holds(pid: int, links: set[str]) -> bool:
    try:
        fds = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return False
    for fd in fds:
        try:
            if os.readlink(f"/proc/{pid}/fd/{fd}") in links:
                return True
        except OSError:
            continue
    return False

"""When the machine stood still: a process that looks at the clock, on every core.

A thread pinned to each core sleeps for two milliseconds, again and again, and notes
when it was woken late. It runs at real-time priority where that is allowed: then
nothing of ours, and nobody else's process, can be what kept it; the core itself was
away, as when a hypervisor gives it to others. Elsewhere, or if that is wanted, it has
its parent's priority, and waiting for a core counts as well, whoever had it: others on
a machine that is shared, but the broker's own processes too.

    python -m tests.chaos.stalls FD PARENT REAL_TIME    FD: memory as drawn below

    word 0            1: at real-time priority, -1: not, 0: does not look yet
    then a core each  _CORE_WORDS words: the clock when it last looked, how many stalls
                      it has noted ever, and the last _KEPT of them: begin and end
"""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

_SLEEP_NS: Final = 2_000_000
_LATE_NS: Final = 1_000_000  # less than this is no stall
_KEPT: Final = 512
_CORE_WORDS: Final = 2 + 2 * _KEPT

# A load average, for each core, which limits of several times a promise allow for.
LOADED: Final = 4

Interval = tuple[float, float]  # seconds of time.monotonic(): begin and end


def crowd() -> float:
    """Return how many times more wait for a core than on a machine that is loaded.

    With 28 of them for two cores a supervisor was 2 s late to see a death.
    """
    return max(1.0, os.getloadavg()[0] / (LOADED * (os.cpu_count() or 1)))


def overlap_s(intervals: Iterable[Interval], begin: float, end: float) -> float:
    """How much of the time from `begin` to `end` lies in any of the intervals."""
    total, at = 0.0, begin
    for first, last in sorted(intervals):
        first, last = max(first, at), min(last, end)
        if last > first:
            total += last - first
            at = last
    return total


def latest(intervals: Sequence[Interval], begin: float) -> Iterator[Interval]:
    """Those that end after `begin`, of intervals in the order in which they ended.

    For who asks often: the others are not even looked at.
    """
    for interval in reversed(intervals):
        if interval[1] <= begin:
            return
        yield interval


class Stalls:
    """The watching process, and what it has seen. Close it.

    Args:
        real_time: see nothing but cores that are away, where that is allowed.
    """

    def __init__(self, *, real_time: bool = True) -> None:
        cores = len(os.sched_getaffinity(0))
        size = (1 + cores * _CORE_WORDS) * 8
        fd = os.memfd_create("chaos-stalls")
        os.ftruncate(fd, size)
        self._cores = [1 + core * _CORE_WORDS for core in range(cores)]
        self._words = memoryview(mmap.mmap(fd, size)).cast("q")
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__]
            + [str(number) for number in (fd, os.getpid(), int(real_time))],
            pass_fds=(fd,),
        )
        os.close(fd)
        while self._process.poll() is None and not self.has_looked:
            time.sleep(0.01)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_looked(self) -> bool:
        """Every core has been looked at; before that nothing is seen."""
        return all(self._words[core] for core in self._cores)

    @property
    def are_the_cores_own(self) -> bool:
        """Nobody's waiting for a core is among them."""
        return self._words[0] > 0

    def during(self, begin: float, end: float) -> list[Interval]:
        """The stalls that touch this time, those of all cores."""
        return [
            interval
            for core in self._cores
            for interval in self._of(core, begin, end)
            if interval[1] > begin and interval[0] < end
        ]

    def _of(self, core: int, begin: float, now: float) -> list[Interval]:
        words = self._words
        noted = words[core + 1]
        found = []
        for number in range(noted - 1, max(0, noted - _KEPT) - 1, -1):
            word = core + 2 + number % _KEPT * 2
            if words[word + 1] / 1e9 <= begin:
                break  # as all that were noted before
            found.append((words[word] / 1e9, words[word + 1] / 1e9))
        due = (words[core] + _SLEEP_NS) / 1e9
        if words[core] and now - due > _LATE_NS / 1e9:
            found.append((due, now))  # one that is not over yet
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def _watch(words: memoryview, core: int, cpu: int) -> None:
    os.sched_setaffinity(threading.get_native_id(), {cpu})
    last = time.monotonic_ns()
    while True:
        words[core] = last
        time.sleep(_SLEEP_NS / 1e9)
        now = time.monotonic_ns()
        due = last + _SLEEP_NS
        if now - due > _LATE_NS:
            word = core + 2 + words[core + 1] % _KEPT * 2
            words[word], words[word + 1] = due, now
            words[core + 1] += 1
        last = now


def _main(fd: int, parent: int, real_time: int) -> None:
    words = memoryview(mmap.mmap(fd, 0)).cast("q")
    words[0] = -1
    if real_time:
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
            words[0] = 1
    for number, cpu in enumerate(sorted(os.sched_getaffinity(0))):
        core = 1 + number * _CORE_WORDS
        threading.Thread(target=_watch, args=(words, core, cpu), daemon=True).start()
    while os.getppid() == parent:
        time.sleep(0.5)


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:]))

"""Children for tests: forked, watched, and killed at a chosen line of our code."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final

import mpbroker
from mpbroker.ipc.compiled import core
from tests.support.crashes import check_end
from tests.support.patience import LONGEST_S, PATIENCE_S, Patience

# Between two looks: soon at first, then seldom, since looking takes time from what it
# waits for.
_SHORTEST_PAUSE_S: Final = 0.001
_LONGEST_PAUSE_S: Final = 0.05


class Child:
    """A forked process that runs one function; ``code`` once it has ended."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            _live(work)
        self._pidfd = os.pidfd_open(self.pid)
        self.code: int | None = None

    def wait(self, timeout_s: float = LONGEST_S, *, expected: int = 0) -> int:
        """Return its exit code, or minus the signal that killed it.

        Raises:
            UnforgivableError: it has crashed, by another signal than the expected one.
        """
        if self.code is None:
            if not self._has_ended_within(timeout_s):
                self.kill()
                raise TimeoutError(f"the child was still running after {timeout_s} s")
            self._reap()
        assert self.code is not None
        check_end(self.code, f"child {self.pid}", [expected])
        return self.code

    def kill(self) -> None:
        """SIGKILL it and wait for its end."""
        if self.code is None:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            self._reap()

    @property
    def is_alive(self) -> bool:
        if self.code is None and self._has_ended_within(0):
            self._reap()
        return self.code is None

    def _has_ended_within(self, timeout_s: float) -> bool:
        poll = select.poll()  # select() knows no descriptor above 1023
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def _reap(self) -> None:
        _, status = os.waitpid(self.pid, 0)
        self.code = os.waitstatus_to_exitcode(status)
        os.close(self._pidfd)


def _live(work: Callable[[], object]) -> None:
    status = 1
    try:
        work()
        status = 0
    except BaseException:  # noqa: BLE001 - whatever it is, the parent is told
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def fork(work: Callable[[], object]) -> int:
    """Run ``work`` in a child to its end; return 0, 1, or minus a signal's number."""
    return Child(work).wait()


@contextlib.contextmanager
def running(*works: Callable[[], object]) -> Iterator[list[Child]]:
    """Run each work in a child of its own; all are dead when the block is left."""
    children = [Child(work) for work in works]
    try:
        yield children
    finally:
        for child in children:
            child.kill()


def die() -> None:
    """Be killed here and now."""
    os.kill(os.getpid(), signal.SIGKILL)


def wait_until(condition: Callable[[], Any], timeout_s: float = PATIENCE_S) -> Any:
    """Poll until ``condition`` gives something true, and return that."""
    patience = Patience(timeout_s)
    pause_s = _SHORTEST_PAUSE_S
    while True:
        result = condition()
        if result:
            return result
        patience.check(condition)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


# -- death by line ------------------------------------------------------------------


@functools.cache
def _check_sources(files: tuple[str, ...]) -> None:
    """Refuse a name that no source has: its lines would never be counted."""
    sources = [str(path) for path in Path(mpbroker.__file__).parent.rglob("*.py")]
    for name in files:
        assert any(path.endswith(name) for path in sources), (
            f"no source ends with {name}"
        )


def _counting(files: tuple[str, ...], each_line: Callable[[], None]) -> Any:
    _check_sources(files)

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.endswith(files):
            return None
        if event == "line":
            each_line()
        return trace

    return trace


def kill_at_line(number: int, files: tuple[str, ...]) -> None:
    """Kill this process before it runs its n-th line, from now on, of some files."""
    left = number

    def each_line() -> None:
        nonlocal left
        left -= 1
        if left <= 0:
            die()

    sys.settrace(_counting(files, each_line))


def lines_of(work: Callable[[], object], files: tuple[str, ...]) -> int:
    """Count the lines of some files that ``work`` runs."""
    count = 0

    def each_line() -> None:
        nonlocal count
        count += 1

    previous = sys.gettrace()
    sys.settrace(_counting(files, each_line))
    try:
        work()
    finally:
        sys.settrace(previous)
    return count


def kill_at_step(number: int) -> None:
    """Kill this process at the n-th step, from now on, of the compiled core."""
    assert core is not None
    core.die_at_step(number)


def steps_of(work: Callable[[], object]) -> int:
    """Count the steps of the compiled core that ``work`` takes."""
    assert core is not None
    before = core.steps_done()
    work()
    return core.steps_done() - before


def deaths(total_lines: int, wanted: int, seed: int) -> Iterator[int]:
    """Line numbers to die at: all of them, or some spread over them."""
    if total_lines <= wanted:
        yield from range(1, total_lines + 1)
        return
    picker = random.Random(seed)
    step = total_lines / wanted
    for number in range(wanted):
        yield 1 + int(number * step + picker.random() * step)

"""Children that die: at a line chosen by number, anywhere in the storage package."""

import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_STORAGE = os.sep + os.path.join("mpbroker", "storage") + os.sep


def fork(work: Callable[[], object]) -> int:
    """Run ``work`` in a child; return 0, or minus the signal that killed it."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:  # noqa: BLE001, or pytest would run twice from here on
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def kill_at_line(number: int) -> None:
    """Kill this process before it runs the n-th line of storage code from now on."""
    left = number

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if _STORAGE not in frame.f_code.co_filename:
            return None
        if event == "line":
            left -= 1
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


def lines_of(work: Callable[[], object]) -> int:
    """Return how many lines of storage code ``work`` runs."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        if _STORAGE not in frame.f_code.co_filename:
            return None
        if event == "line":
            count += 1
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(previous)
    return count


def deaths(total_lines: int, wanted: int, seed: int) -> Iterator[int]:
    """Yield line numbers to die at, spread over all of them."""
    picker = random.Random(seed)
    if total_lines <= wanted:
        yield from range(1, total_lines + 1)
        return
    step = total_lines / wanted
    for number in range(wanted):
        yield 1 + int(number * step + picker.random() * step)

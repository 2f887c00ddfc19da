"""Ends of processes that are crashes: a signal that only a fault in the code raises.

No load is the reason of such an end, so it is a broken promise (tests.support.promises)
unless the test says that it expects the signal.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Collection
from typing import Final

from tests.support.promises import UnforgivableError

# Nobody sends these to a process of ours; a fault in code raises them.
CRASHES: Final = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT}
)
# What a supervisor logs about a child; the last group is the signal's number.
_DEATH: Final = re.compile(r"(\S+ \d+ \(pid \d+\)) died: signal (\d+)")


def check_end(code: int, who: str, expected: Collection[int] = ()) -> None:
    """Judge the end of a process.

    Args:
        code: its exit code, or minus the signal that ended it.
        who: the process, for the error.
        expected: signals that the test expects.

    Raises:
        UnforgivableError: the process has crashed.
    """
    if -code in CRASHES and -code not in expected:
        name = signal.Signals(-code).name
        raise UnforgivableError(f"{who} crashed ({name}), though nobody sent it {name}")


def check_deaths(log: str, expected: Collection[int] = ()) -> None:
    """Judge the deaths that a broker has logged of its children, as check_end does."""
    for who, number in _DEATH.findall(log):
        check_end(-int(number), who, expected)

"""The pulse: two words by which a process shows the supervisor that it makes progress.

    steps   +1 with each part of a request, load, task or turn that is done
    awaits  the thread id of the owner of a lock that the process sleeps for; 0: none

Handlers and the coordinator have them in their rows. Housekeeper, keeper, exporter and
acceptors have them in the header (see layout.py). All other processes have no pulse:
what they call here does nothing.
"""

import os

from mpbroker.ipc.layout import (
    HANDLER_AWAITS,
    HANDLER_STEPS,
    PULSE_AWAITS,
    PULSE_PID,
    PULSE_STEPS,
    handler_row,
    pulse_words,
)
from mpbroker.ipc.robust_mutex import show_waits_at
from mpbroker.ipc.segment import Segment

_words: memoryview | None = None
_steps = 0


def show(control: Segment, handler: int) -> None:
    """From now on show this process's progress in its record in shared memory.

    These are the two words of the pulse.

    Args:
        control: the control segment, which has the record.
        handler: the id of this process: a handler or the coordinator.
    """
    row = handler_row(handler)
    _show_at(control, row + HANDLER_STEPS, row + HANDLER_AWAITS)


def show_in_header(control: Segment, number: int) -> None:
    """From now on show the progress of a process that has no record of its own.

    Args:
        control: the control segment, whose header has the pulse.
        number: the number of the pulse, such as HOUSEKEEPER_PULSE.
    """
    first = pulse_words(number)
    _show_at(control, first + PULSE_STEPS, first + PULSE_AWAITS)
    # Last: until now the words are those of a predecessor.
    control.words[first + PULSE_PID] = os.getpid()


def _show_at(control: Segment, steps: int, awaits: int) -> None:
    global _words, _steps
    _words, _steps = control.words, steps
    # A predecessor may have been killed while it slept for a lock.
    control.words[awaits] = 0
    show_waits_at(control.address + awaits * 8)


def hide() -> None:
    """Show nothing from now on: this process was forked from one that has a pulse."""
    global _words
    if _words is not None:
        _words = None
        show_waits_at(0)


def step() -> None:
    """Count one more step of this process, as a sign of progress for the supervisor.

    To be called after each part of the work.
    """
    if _words is not None:
        _words[_steps] += 1

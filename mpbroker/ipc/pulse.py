"""The pulse: two words by which a process shows the supervisor that it makes progress.

    steps   +1 with each part of a request, load or turn that is done
    awaits  the thread id of the owner of a lock that the process sleeps for; 0: none

They are in the row of a handler or of the coordinator (see layout.py). All other
processes have no pulse: what they call here does nothing.
"""

from mpbroker.ipc.layout import HANDLER_AWAITS, HANDLER_STEPS, handler_row
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
    global _words, _steps
    row = handler_row(handler)
    _words, _steps = control.words, row + HANDLER_STEPS
    # A predecessor may have been killed while it slept for a lock.
    control.words[row + HANDLER_AWAITS] = 0
    show_waits_at(control.address + (row + HANDLER_AWAITS) * 8)


def step() -> None:
    """Count one more step of this process, as a sign of progress for the supervisor.

    To be called after each part of the work.
    """
    if _words is not None:
        _words[_steps] += 1

"""A mutex and the committed length of a log that several processes append to.

The log is a file. Its writers take turns with the mutex of this cell, and its readers
compare one word of the cell to find out whether there are new records to replay.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from mpbroker.ipc.layout import CELL_END, CELL_MUTEX, cell
from mpbroker.ipc.robust_mutex import RobustMutex
from mpbroker.ipc.segment import Segment


class SharedLogCell:
    """One cell of the control segment."""

    def __init__(self, control: Segment, number: int) -> None:
        self._words = control.words
        self._base = cell(number)
        self._mutex = RobustMutex(control, self._base + CELL_MUTEX)

    @staticmethod
    def initialise(control: Segment, number: int) -> None:
        RobustMutex.initialise(control, cell(number) + CELL_MUTEX)

    def lock(self) -> None:
        """Take the writers' lock. A dead owner has committed everything or nothing."""
        self._mutex.acquire()

    def unlock(self) -> None:
        self._mutex.release()

    @contextmanager
    def locked(self) -> Iterator[None]:
        self.lock()
        try:
            yield
        finally:
            self.unlock()

    @property
    def end(self) -> int:
        """The committed length of the log, in bytes."""
        return self._words[self._base + CELL_END]

    @end.setter
    def end(self, value: int) -> None:
        # One aligned store: the commit. Under the lock.
        self._words[self._base + CELL_END] = value

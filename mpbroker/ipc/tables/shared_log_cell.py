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
    """The mutex and the committed length of a log, in the control segment."""

    def __init__(self, control: Segment, number: int) -> None:
        self._words = control.words
        self._base = cell(number)
        self._mutex = RobustMutex(control, self._base + CELL_MUTEX)

    @staticmethod
    def initialise(control: Segment, number: int) -> None:
        RobustMutex.initialise(control, cell(number) + CELL_MUTEX)

    def lock(self) -> None:
        """Take the lock of the log's writers.

        A dead owner needs no repair: it has committed all of its append, or nothing.
        """
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
        # One aligned store, which commits an append. The caller holds the lock.
        self._words[self._base + CELL_END] = value

"""Report that a process uses the rows of deleted partitions no longer.

A row is a partition's entry in the shared partition table. It may be given to another
partition when no process uses it for the deleted one any more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from mpbroker.ipc.layout import CELL_END, METADATA_CELL, cell
from mpbroker.ipc.tables.row_users import note_passed
from mpbroker.metadata.topics import Topic, TopicRegistry


class RowRelease:
    """Notes that one process uses the rows of deleted partitions no longer.

    A row is a partition's entry in shared memory.

    The process calls ``look`` between its requests or its tasks, when it uses no
    partition except those that ``is_held`` reports.

    Args:
        words: the control segment of shared memory.
        user: the number of this process in row_users.py.
        registry: returns this process's registry of topics.
        is_held: returns whether a request or task that waits or runs in this process
            still uses one of these rows.
        forget: called with the rows that are let go of, to drop data cached by row. The
            first call may have no rows: the process before this one may have left data
            of rows that were deleted after its death.
    """

    def __init__(
        self,
        words: memoryview,
        user: int,
        registry: Callable[[], TopicRegistry],
        is_held: Callable[[Collection[int]], bool] = lambda rows: False,
        forget: Callable[[Collection[int]], None] = lambda rows: None,
    ) -> None:
        self._words = words
        self._user = user
        self._registry = registry
        self._is_held = is_held
        self._forget = forget
        self._deleted: set[int] = set()
        self._passed = -1
        self._end_word = cell(METADATA_CELL) + CELL_END

    def removed(self, topic: Topic) -> None:
        """Note a deleted topic; ``look`` is to report its rows (entries) as unused."""
        self._deleted.update(topic.partitions)

    def look(self) -> None:
        """Report deleted partitions' rows (entries) as unused, if none is still used.

        When all processes have done so, new partitions may get the rows. This costs one
        comparison if the metadata log has not grown.
        """
        if self._words[self._end_word] == self._passed:
            return
        registry = self._registry()
        try:
            registry.catch_up()
        except OSError:
            return  # the disk fails; only requests that need the metadata get an error
        if self._deleted and self._is_held(self._deleted):
            return
        if self._deleted or self._passed < 0:
            self._forget(self._deleted)
        self._deleted.clear()
        self._passed = registry.version
        note_passed(self._words, self._user, self._passed)

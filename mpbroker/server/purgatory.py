"""Keep the requests that wait for data, for a sync, or for their deadline.

A handler never blocks. It parks here a fetch without enough data, or a produce whose
records are not yet on disk. The request's slot says PARKED, so that another handler
executes it if this process dies. A parked operation watches partition rows. A process
that changes a row sends a notice to every handler whose bit is set in the row's
waiters; that handler then tries only the operations that watch the row. So ten
thousand parked fetches cost nothing while no row changes.

Source: Kafka's DelayedOperationPurgatory.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from mpbroker.ipc.layout import ROW_WAITERS
from mpbroker.ipc.ring import NotificationRing
from mpbroker.ipc.tables.partition_table import PartitionRow, PartitionTable
from mpbroker.server.request import Request

_NEVER: Final = 1 << 62


def sync_key(row: int) -> int:
    """Return the key of operations that wait for a row's sync, not for its data.

    They need no bit in ROW_WAITERS: the process that syncs the log sends its notices
    to the bits in ROW_SYNC_WAITERS (group_commit.py).
    """
    return -1 - row


class DelayedOperation(Protocol):
    """A parked request.

    Attributes:
        keys: the indexes of the partition rows that it watches, or their `sync_key`.
        deadline_ns: when `expire` is called (CLOCK_MONOTONIC).
        done: whether it has left the purgatory.
        may_end_early: whether it is answered at once when the broker stops.
    """

    keys: Iterable[int]
    deadline_ns: int
    done: bool
    may_end_early: bool

    @property
    def request(self) -> Request:
        """The request that waits."""

    def try_complete(self, row: int) -> bool:
        """Answer if the change of a watched row is enough; return whether it was."""

    def expire(self) -> None:
        """Answer with the data there is, since the deadline has passed."""


class Purgatory:
    """The parked operations of one handler process.

    Attributes:
        size: how many operations are parked.
        on_bug: called within ``except`` with an operation that raised; it answers the
            request. None: the exception is raised again.
    """

    def __init__(
        self,
        handler: int,
        table: PartitionTable,
        notices: list[NotificationRing],
    ) -> None:
        self._bit = 1 << handler
        self._table = table
        self._notices = notices
        self._own = notices[handler]
        self._watchers: dict[int, dict[int, DelayedOperation]] = {}
        self._armed: set[int] = set()
        self._timers: list[tuple[int, int, DelayedOperation]] = []
        self._numbers = itertools.count()
        self._keys: dict[int, int] = {}
        self._told: list[int] = []  # rows of the notices to this process itself
        self.size = 0
        self.on_bug: Callable[[DelayedOperation], None] | None = None

    def watch(self, operation: DelayedOperation) -> None:
        """Park an operation until it completes or expires.

        The caller then calls ``try_complete`` once more: a row that changed before
        this process's bit was set has sent no notice.
        """
        number = next(self._numbers)
        self._keys[id(operation)] = number
        for key in operation.keys:
            self._watchers.setdefault(key, {})[number] = operation
            if key >= 0:
                self._arm(key)
        heapq.heappush(self._timers, (operation.deadline_ns, number, operation))
        self.size += 1

    def _arm(self, index: int) -> None:
        """Set this process's bit in a row: its next change sends a notice."""
        if index in self._armed:
            return  # the bit is still set, and no notice has used it up
        row = self._table.row(index)
        word = row.base + ROW_WAITERS
        row.lock()
        row.words[word] |= self._bit
        row.unlock()
        self._armed.add(index)

    def unwatch(self, operation: DelayedOperation) -> None:
        """Remove an operation that is done."""
        operation.done = True
        number = self._keys.pop(id(operation), None)
        if number is None:
            return
        for key in operation.keys:
            watchers = self._watchers.get(key)
            if watchers is not None:
                watchers.pop(number, None)
                if not watchers:
                    del self._watchers[key]
        self.size -= 1
        if len(self._timers) > 2 * self.size + 64:
            self._timers = [entry for entry in self._timers if not entry[2].done]
            heapq.heapify(self._timers)

    @property
    def has_notices(self) -> bool:
        """Whether a notice to this process itself waits; it rings no doorbell."""
        return bool(self._told and self.size)

    def process_notices(self) -> bool:
        """Try the operations that watch the rows of new notices.

        Returns:
            Whether there were notices.
        """
        told, self._told = self._told, []
        if self._own.is_empty():
            rows, look_at_all = told, False
            if not told:
                return False
        else:
            rows, look_at_all = self._own.take()
            rows = told + rows
        if look_at_all:
            # Some notices were lost (a death, or too many at once).
            self._armed.clear()
            rows = [key if key >= 0 else sync_key(key) for key in self._watchers]
        for row in dict.fromkeys(rows):
            self._armed.discard(row)
            if row in self._watchers:
                self._arm(row)  # before looking, or a change in between is missed
                self._try_watchers(row, row)
            if sync_key(row) in self._watchers:
                self._try_watchers(sync_key(row), row)
        return True

    def _try_watchers(self, key: int, row: int) -> None:
        for operation in list(self._watchers[key].values()):
            self.look_at(operation, row)

    def look_at(self, operation: DelayedOperation, row: int) -> None:
        """Try to complete an operation after a change of ``row``; unwatch it if so."""
        if not operation.done and self._try_complete(operation, row):
            self.unwatch(operation)

    def _try_complete(self, operation: DelayedOperation, row: int) -> bool:
        try:
            return operation.try_complete(row)
        except Exception:
            if self.on_bug is None:
                raise
            self.on_bug(operation)
            return True

    def _expire(self, operation: DelayedOperation) -> None:
        self.unwatch(operation)
        try:
            operation.expire()
        except Exception:
            if self.on_bug is None:
                raise
            self.on_bug(operation)

    def expire(self, now_ns: int) -> None:
        """Answer the operations whose deadline has passed."""
        timers = self._timers
        while timers and timers[0][0] <= now_ns:
            operation = heapq.heappop(timers)[2]
            if not operation.done:
                self._expire(operation)

    def end_early(self) -> None:
        """Expire the operations that may end early, because the broker stops."""
        for operation in self.operations():
            if operation.may_end_early:
                self._expire(operation)

    @property
    def next_deadline_ns(self) -> int:
        """The time of the next deadline (CLOCK_MONOTONIC); 2**62 if there is none."""
        timers = self._timers
        while timers and timers[0][2].done:
            heapq.heappop(timers)
        return timers[0][0] if timers else _NEVER

    def operations(self) -> list[DelayedOperation]:
        return [operation for _, _, operation in self._timers if not operation.done]

    # -- sending notices ---------------------------------------------------------------

    def notify_waiters(self, row: PartitionRow) -> None:
        """Send notices of a change of ``row`` to all handlers that wait for it."""
        word = row.base + ROW_WAITERS
        if not row.words[word]:
            return
        row.lock()
        waiters = row.words[word]
        row.words[word] = 0
        row.unlock()
        self.notify(row.index, waiters)

    def notify(self, row: int, handlers: int) -> None:
        """Send a notice about a row to each handler whose bit is set in ``handlers``.

        A notice to this process itself uses no ring and no doorbell: it is processed in
        this turn of the handler's loop, or before the next wait (``has_notices``).
        """
        if handlers & self._bit:
            handlers ^= self._bit
            if self.size:
                self._told.append(row)
            else:
                self._armed.discard(row)  # this notice has used up the bit
        while handlers:
            lowest = handlers & -handlers
            self._notices[lowest.bit_length() - 1].put(row)
            handlers ^= lowest

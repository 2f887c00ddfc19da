"""Purgatory: requests that wait for data, for a sync, or for their deadline.

A handler never blocks. A fetch without enough data, or a produce whose records are
not yet on disk, is parked here, in the care of the handler that took it; its slot
says PARKED, so that it is redelivered if this process dies. What it waits for are
partition rows: whoever changes one sends a notice to every handler whose bit is set
in the row's waiters, and only operations that watch this row are looked at. So ten
thousand parked fetches cost nothing while nothing happens.

Source: Kafka DelayedOperationPurgatory.
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
    """The key of operations that wait for a row's sync, not for its data.

    They need no bit in the row's waiters: the sync's owner tells who asked.
    """
    return -1 - row


class DelayedOperation(Protocol):
    """A parked request."""

    keys: Iterable[int]  # what it watches: partition rows, or sync_key of them
    deadline_ns: int
    done: bool
    may_end_early: bool  # at a stop, answering at once is better than waiting

    @property
    def request(self) -> Request:
        """What was asked."""

    def try_complete(self, row: int) -> bool:
        """A watched row has changed: answer now if that is enough."""

    def expire(self) -> None:
        """The deadline has passed: answer with what there is."""


class Purgatory:
    """The parked operations of one handler process."""

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
        self._told: list[int] = []  # rows of which we have told ourselves
        self.size = 0
        # Called within ``except``, for an operation that met a bug of ours.
        self.on_bug: Callable[[DelayedOperation], None] | None = None

    def watch(self, operation: DelayedOperation) -> None:
        """Park an operation until it completes or expires.

        The caller looks at its rows once more afterwards (``try_complete``): what
        changed before our bit was set sends no notice.
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
        """Ask for a notice of the next change of a row."""
        if index in self._armed:
            return  # not used up yet: a notice is still to come
        row = self._table.row(index)
        word = row.base + ROW_WAITERS
        row.lock()
        row.words[word] |= self._bit
        row.unlock()
        self._armed.add(index)

    def unwatch(self, operation: DelayedOperation) -> None:
        """Forget an operation that is done."""
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
        """Whether there is a notice of our own, for which nothing will wake us."""
        return bool(self._told and self.size)

    def process_notices(self) -> bool:
        """Complete what the notices that have come make complete; say if any came."""
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
        """Complete a watched operation if what it watches allows it."""
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
        """The broker stops: answer what waits for nothing but data."""
        for operation in self.operations():
            if operation.may_end_early:
                self._expire(operation)

    @property
    def next_deadline_ns(self) -> int:
        """When ``expire`` has something to do; far away if never."""
        timers = self._timers
        while timers and timers[0][2].done:
            heapq.heappop(timers)
        return timers[0][0] if timers else _NEVER

    def operations(self) -> list[DelayedOperation]:
        return [operation for _, _, operation in self._timers if not operation.done]

    # -- the other side: telling handlers ---------------------------------------------

    def notify_waiters(self, row: PartitionRow) -> None:
        """After a change of ``row``: wake whoever waits for it, here or elsewhere."""
        word = row.base + ROW_WAITERS
        if not row.words[word]:
            return
        row.lock()
        waiters = row.words[word]
        row.words[word] = 0
        row.unlock()
        self.notify(row.index, waiters)

    def notify(self, row: int, handlers: int) -> None:
        """Send a notice to each handler whose bit is set.

        One to ourselves takes no ring and wakes nobody: it is seen to in this turn, or
        keeps the next wait from beginning (``has_notices``).
        """
        if handlers & self._bit:
            handlers ^= self._bit
            if self.size:
                self._told.append(row)
            else:
                self._armed.discard(row)  # that notice is used up
        while handlers:
            lowest = handlers & -handlers
            self._notices[lowest.bit_length() - 1].put(row)
            handlers ^= lowest

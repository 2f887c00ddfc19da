"""Keep the requests that wait for data, for a sync, or for their deadline.

A handler process never blocks. A fetch without enough data, or a produce whose records
are not yet on disk, is parked: it waits, unanswered, in the handler's purgatory. Its
slot (its entry in shared memory) says PARKED, so that another handler executes it if
this process dies. A parked operation watches rows of the shared partition table. A
process that changes a partition's row sends a notice to every handler whose bit is set
in the row's waiters. That handler tries only the operations that watch the row. So ten
thousand parked fetches cost nothing while no row changes.

Source: Kafka's DelayedOperationPurgatory.
"""

import heapq
import itertools
from collections.abc import Callable, Collection, Iterable
from typing import Final, Protocol

from mpbroker.ipc.masks import lowest_of
from mpbroker.ipc.ring import NotificationRing, slot_notice
from mpbroker.ipc.tables.partition_table import PartitionRow, PartitionTable
from mpbroker.server.request import Request
from mpbroker.server.turns import DelayedTurn, Turns

_NEVER: Final = 1 << 62


def sync_key(row: int) -> int:
    """Return the key of requests that wait until a partition's log is synced to disk.

    The partition's row number is the key of requests that wait for new records.

    Such operations need no bit in ROW_WAITERS: the process that syncs the log sends its
    notices to the bits in ROW_SYNC_WAITERS (group_commit.py).
    """
    return -1 - row


class DelayedOperation(Protocol):
    """Answers one parked (waiting) request, when its data is there or its time is over.

    Attributes:
        slot: the request's slot, which is its entry in shared memory.
        keys: the indexes of the partition rows that the operation watches, or their
            `sync_key`.
        deadline_ns: when `expire` is called (CLOCK_MONOTONIC).
        done: whether the operation has left the purgatory.
        may_end_early: whether the request is answered at once when the broker stops or
            its client has hung up. True for a fetch, False for a produce.
    """

    slot: int
    keys: Iterable[int]
    deadline_ns: int
    done: bool
    may_end_early: bool

    @property
    def request(self) -> Request:
        """The request that waits for data, for the disk or for its deadline."""

    def try_complete(self, row: int) -> bool:
        """Answer the request if the partition with this row now has what it needs.

        Return whether the request is answered.
        """

    def expire(self) -> None:
        """Answer the request now with what there is, because its wait is over."""


class Purgatory:
    """Keeps the waiting requests of one handler process until they can be answered.

    Attributes:
        size: how many operations are parked.
        fetches: how many of these are fetches; the others are produces.
        on_bug: called within ``except`` with an operation that raised; it answers the
            request. None: the exception is raised again.
        must_end: says whether the request in a slot must not wait any longer.
        turns: those requests that wait for their turn to compute for long.
    """

    def __init__(
        self,
        handler: int,
        table: PartitionTable,
        notices: list[NotificationRing],
    ) -> None:
        self._handler = handler
        self._bit = 1 << handler
        self._table = table
        self._notices = notices
        self._own = notices[handler]
        self._watchers: dict[int, dict[int, DelayedOperation]] = {}
        self._armed: set[int] = set()
        self._timers: list[tuple[int, int, DelayedOperation]] = []
        self._numbers = itertools.count()
        self._keys: dict[int, int] = {}
        self._by_slot: dict[int, DelayedOperation] = {}  # the latest of each slot
        self._told: list[int] = []  # rows of the notices to this process itself
        self.size = self.fetches = 0
        self.on_bug: Callable[[DelayedOperation], None] | None = None
        self.must_end: Callable[[int], bool] = lambda slot: False
        self.turns = Turns[DelayedTurn]()

    def watch(self, operation: DelayedOperation) -> None:
        """Keep a request, and try it again whenever one of its partitions changes.

        The caller then calls ``try_complete`` once more: a row that changed before
        this process's bit was set has sent no notice.
        """
        number = next(self._numbers)
        self._keys[id(operation)] = number
        self._by_slot[operation.slot] = operation
        for key in operation.keys:
            self._watchers.setdefault(key, {})[number] = operation
            if key >= 0:
                self._arm(key)
        heapq.heappush(self._timers, (operation.deadline_ns, number, operation))
        self.size += 1
        self.fetches += operation.may_end_early

    def _arm(self, index: int) -> None:
        """Ask for a notice of the next change of a partition: set a bit in its row."""
        if index in self._armed:
            return  # the bit is still set, and no notice has used it up
        self._table.row(index).add_waiter(self._handler)
        self._armed.add(index)

    def unwatch(self, operation: DelayedOperation) -> None:
        """Stop keeping a waiting request: remove its operation, and mark it as done."""
        operation.done = True
        number = self._keys.pop(id(operation), None)
        if number is None:
            return
        if self._by_slot.get(operation.slot) is operation:
            del self._by_slot[operation.slot]
        for key in operation.keys:
            watchers = self._watchers.get(key)
            if watchers is not None:
                watchers.pop(number, None)
                if not watchers:
                    del self._watchers[key]
        self.size -= 1
        self.fetches -= operation.may_end_early
        if len(self._timers) > 2 * self.size + 64:
            self._timers = [entry for entry in self._timers if not entry[2].done]
            heapq.heapify(self._timers)

    @property
    def has_notices(self) -> bool:
        """Whether this process has sent itself a notice that it has not processed.

        Such a notice does not wake the process from its wait for events.
        """
        return bool(self._told and self.size)

    def process_notices(self) -> bool:
        """Take the new notices; try again the requests that wait for their partitions.

        A notice may also name a slot: answer its request if it must not wait any
        longer.

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
            rows = [row for row in rows if row < 0]
            rows += [key if key >= 0 else sync_key(key) for key in self._watchers]
        for row in dict.fromkeys(rows):
            if row < 0:
                self._end(slot_notice(row))
                continue
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
        """Try to answer a waiting request, after a change of the partition ``row``.

        If it is answered, keep it no longer.
        """
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
        """Answer the waiting requests whose deadline has passed."""
        timers = self._timers
        while timers and timers[0][0] <= now_ns:
            operation = heapq.heappop(timers)[2]
            if not operation.done:
                self._expire(operation)

    def _end(self, slot: int) -> None:
        """Answer the waiting request in a slot now, if it must not wait any longer.

        A processor has sent a notice about the slot, for example since the client has
        hung up. The slot (the place of one request in shared memory) may have a later
        request by now, so ask ``must_end`` again.
        """
        operation = self._by_slot.get(slot)
        if operation is not None and operation.may_end_early and self.must_end(slot):
            self._expire(operation)

    def end_early(self) -> None:
        """Answer the waiting requests that may end early, because the broker stops."""
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

    # -- deleted partitions ------------------------------------------------------------

    def watches(self, rows: Collection[int]) -> bool:
        """Return whether a request waits for one of these partitions, given by row."""
        watched = self._watchers
        return any(row in watched or sync_key(row) in watched for row in rows)

    def forget_rows(self, rows: Collection[int]) -> None:
        """Forget for which deleted partitions this process has asked for notices.

        The next partitions with these rows begin without the bit.
        """
        self._armed.difference_update(rows)

    # -- sending notices ---------------------------------------------------------------

    def notify_waiters(self, row: PartitionRow) -> None:
        """Tell all handlers that wait for a partition that its row has changed.

        This takes the handlers' bits out of the row.
        """
        waiters = row.take_waiters()
        if waiters:
            self.notify(row.index, waiters)

    def notify(self, row: int, handlers: int) -> None:
        """Tell each handler whose bit is set that the partition ``row`` has changed.

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
            self._notices[lowest_of(handlers)].put(row)
            handlers &= handlers - 1

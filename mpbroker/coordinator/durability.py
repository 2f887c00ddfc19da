"""Call functions when logs are on disk up to an offset.

A log is synced once for all callbacks that wait for it. If this process makes the sync,
it calls ``sync_ended`` at the end, and needs no wake-up. If another process syncs the
same log, for example a partition of a transaction, the end of its sync comes as a
notice through this process's ring, a queue in shared memory. The other notices of that
ring are passed on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

from mpbroker.coordinator.written_log import WrittenLog
from mpbroker.ipc.layout import RowStatus
from mpbroker.ipc.ring import NotificationRing, slot_notice

DEADLINE_NS: Final = 120 * 1_000_000_000
_NEVER: Final = 1 << 62


Log = TypeVar("Log", bound=WrittenLog, covariant=True)


class Awaited(NamedTuple, Generic[Log]):
    """Names a log that a callback waits for, and the offset up to which to sync it."""

    name: Hashable
    log: Log
    end: int


class _Waiter:
    """A callback, and the number of logs that must still reach the disk before it."""

    __slots__ = ("complete", "deadline_ns", "failed", "left")

    def __init__(
        self,
        complete: Callable[[list[Hashable]], None],
        left: int,
        deadline_ns: int,
    ) -> None:
        self.complete = complete
        self.left = left
        self.failed: list[Hashable] = []
        self.deadline_ns = deadline_ns


class Durability:
    """Keeps callbacks until the logs that they wait for are on disk.

    Args:
        want_sync: requests a sync of a log. The syncs that are requested in a turn of
            the coordinator's loop are started together.
        notices: the notices of syncs that other processes have made.
        sync_at_once: syncs logs before it returns, if no other request waits meanwhile.
    """

    def __init__(
        self,
        want_sync: Callable[[Any], None],
        notices: NotificationRing,
        sync_at_once: Callable[[list[Any]], None] | None = None,
    ) -> None:
        self._want_sync = want_sync
        self._notices = notices
        self._sync_at_once = sync_at_once
        # By the log's row, in the order in which they came.
        self._waiting: dict[int, deque[tuple[Awaited[WrittenLog], _Waiter]]] = {}
        self._ended: list[int] = []
        self._look_at_deadlines_ns = _NEVER
        # Called with the slot of each request that must not wait any longer.
        self.on_slot: Callable[[int], None] = lambda slot: None
        # Called with the row of a log that has been synced or has grown.
        self.on_row: Callable[[int], None] = lambda row: None
        # Called when notices were lost.
        self.on_lost: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def awaits_any(self, rows: Collection[int]) -> bool:
        """Return whether a callback waits for the log of one of these rows.

        A row is the number of a partition's entry in shared memory.
        """
        return not self._waiting.keys().isdisjoint(rows)

    def when(
        self,
        awaited: Sequence[Awaited[WrittenLog]],
        complete: Callable[[list[Hashable]], None],
        now_ns: int,
    ) -> None:
        """Call ``complete`` when each of these logs is on disk or has failed.

        ``complete`` may be called before this method returns.

        Args:
            complete: called with the names of the logs that could not be synced.
        """
        left = [each for each in awaited if each.log.row.durable_end_offset < each.end]
        failed: list[Hashable] = []
        if left and self._sync_at_once is not None:
            self._sync_at_once([each.log for each in left])
            left, failed = _still_to_come(left)
        if not left:
            complete(failed)
            return
        waiter = _Waiter(complete, len(left), now_ns + DEADLINE_NS)
        waiter.failed = failed
        self._look_at_deadlines_ns = min(self._look_at_deadlines_ns, waiter.deadline_ns)
        for each in left:
            index = each.log.row.index
            queue = self._waiting.get(index)
            if queue is None:
                queue = self._waiting[index] = deque()
            queue.append((each, waiter))
            self._want_sync(each.log)

    def sync_ended(self, row: int) -> None:
        """Note that this process's sync of a log has ended or failed.

        Args:
            row: the number of the log's entry in shared memory.
        """
        self._ended.append(row)

    def go_on(self, now_ns: int) -> bool:
        """Call the callbacks whose logs are all on disk by now, or offline.

        Returns:
            Whether there was a notice (of another process's sync) or an expired
                deadline to process. If so, the
            caller starts the requested syncs, and calls this method again.
        """
        rows, self._ended = self._ended, []
        if not self._notices.is_empty():
            told, look_at_all = self._notices.take()
            # Look at all if notices were lost, by a death or because the ring was full.
            rows.extend([*self._waiting, *told] if look_at_all else told)
            if look_at_all:
                self.on_lost()
        looked = False
        for row in rows:
            if row < 0:
                looked = True
                self.on_slot(slot_notice(row))
            else:
                if row in self._waiting:
                    looked = True
                    self._look_at(row)
                self.on_row(row)
        if now_ns > self._look_at_deadlines_ns:
            looked = True
            self._expire(now_ns)
        return looked

    def _look_at(self, row: int) -> None:
        queue = self._waiting[row]
        log = queue[0][0].log
        durable = log.row.durable_end_offset
        online = log.row.status == RowStatus.ONLINE
        done = []
        while queue and (not online or queue[0][0].end <= durable):
            done.append(queue.popleft())
        if queue:
            self._want_sync(log)  # these came too late for the sync that has ended
        else:
            del self._waiting[row]
        for awaited, waiter in done:
            if awaited.end > durable:
                waiter.failed.append(awaited.name)
            waiter.left -= 1
            if not waiter.left:
                waiter.complete(waiter.failed)

    def _expire(self, now_ns: int) -> None:
        """Report failure to callbacks that have waited for longer than DEADLINE_NS."""
        self._look_at_deadlines_ns = _NEVER
        given_up: dict[int, _Waiter] = {}
        for row, queue in list(self._waiting.items()):
            for awaited, waiter in queue:
                if waiter.deadline_ns < now_ns:
                    waiter.failed.append(awaited.name)
                    given_up[id(waiter)] = waiter
            queue = deque(each for each in queue if each[1].deadline_ns >= now_ns)
            if queue:
                self._waiting[row] = queue
                self._look_at_deadlines_ns = min(
                    self._look_at_deadlines_ns, queue[0][1].deadline_ns
                )
            else:
                del self._waiting[row]
        for waiter in given_up.values():
            waiter.complete(waiter.failed)


def _still_to_come(
    awaited: Sequence[Awaited[WrittenLog]],
) -> tuple[list[Awaited[WrittenLog]], list[Hashable]]:
    """Return the logs that are not on disk yet, and the names of those offline."""
    left: list[Awaited[WrittenLog]] = []
    failed: list[Hashable] = []
    for each in awaited:
        row = each.log.row
        if row.durable_end_offset >= each.end:
            continue
        if row.status == RowStatus.ONLINE:
            left.append(each)
        else:
            failed.append(each.name)
    return left, failed

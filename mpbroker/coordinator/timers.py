"""Call functions at their deadlines: named timers for thousands of members.

The deadlines are in a heap. Each heartbeat moves the deadline of its member, always to
a later time. That changes one number and leaves the heap as it is: the entry is put in
its new place when the old deadline comes. So a heartbeat costs the same, however many
members there are.
"""

import heapq
from collections.abc import Callable, Hashable
from typing import Final

NEVER: Final = 1 << 62


class _Timer:
    __slots__ = ("deadline_ms", "entry_ms", "expire", "number")

    def __init__(
        self, deadline_ms: int, number: int, expire: Callable[[int], None]
    ) -> None:
        self.deadline_ms = deadline_ms
        self.entry_ms = deadline_ms  # where its entry is in the heap
        self.number = number
        self.expire = expire


class Timers:
    """Named functions, each of which is called once, at its deadline."""

    def __init__(self) -> None:
        self._timers: dict[Hashable, _Timer] = {}
        self._heap: list[tuple[int, int, Hashable]] = []
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._timers)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._timers

    def schedule(
        self, name: Hashable, deadline_ms: int, expire: Callable[[int], None]
    ) -> None:
        """Set or replace a named timer, which calls ``expire(now_ms)`` when due."""
        timer = self._timers.get(name)
        if timer is not None and timer.entry_ms <= deadline_ms:
            timer.deadline_ms = deadline_ms
            timer.expire = expire
            return
        self._numbers += 1
        self._timers[name] = _Timer(deadline_ms, self._numbers, expire)
        heapq.heappush(self._heap, (deadline_ms, self._numbers, name))

    def cancel(self, name: Hashable) -> None:
        self._timers.pop(name, None)
        if len(self._heap) > 2 * len(self._timers) + 64:
            self._rebuild()

    def _rebuild(self) -> None:
        """Drop the heap's entries of timers that were cancelled or replaced."""
        self._heap = [
            entry
            for entry in self._heap
            if (timer := self._timers.get(entry[2])) is not None
            and timer.number == entry[1]
        ]
        heapq.heapify(self._heap)

    def expire(self, now_ms: int) -> int:
        """Call all functions that are due; return how many there were.

        If one of them schedules a function for ``now_ms`` or earlier, call it, too.
        """
        heap, timers = self._heap, self._timers
        expired = 0
        while heap and heap[0][0] <= now_ms:
            _, number, name = heapq.heappop(heap)
            timer = timers.get(name)
            if timer is None or timer.number != number:
                continue  # cancelled, or replaced by an earlier one
            if timer.deadline_ms > now_ms:
                timer.entry_ms = timer.deadline_ms
                heapq.heappush(heap, (timer.deadline_ms, number, name))
                continue
            del timers[name]
            expired += 1
            timer.expire(now_ms)
            heap = self._heap  # the function may have cancelled timers: see _rebuild
        return expired

    @property
    def next_ms(self) -> int:
        """The time (ms) of the next call of ``expire``; NEVER if there is no timer."""
        heap = self._heap
        while heap:
            deadline_ms, number, name = heap[0]
            timer = self._timers.get(name)
            if timer is not None and timer.number == number:
                return deadline_ms
            heapq.heappop(heap)
        return NEVER

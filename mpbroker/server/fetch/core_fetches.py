"""Keep the fetches for which the compiled core (C code) has found too few records.

The core has found less than min.bytes for such a fetch. Whenever one of its partitions
grows, the core reads the fetch's partitions again. If the core cannot execute it any
more, for example after a change of metadata, ``FetchService`` handles the fetch like a
new request.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from mpbroker.ipc.response_parts import FilePart
from mpbroker.server.request import PARKED, Deferred, Request, parse_request

if TYPE_CHECKING:
    from mpbroker.server.service_parts import ServiceParts


class Fetches(Protocol):
    """The methods of `FetchService`, which handles a fetch in Python."""

    def handle(self, request: Request) -> list[bytes | FilePart] | Deferred:
        """Answer a fetch now, or keep it until there are enough records."""

    def send(self, request: Request, parts: list[bytes | FilePart]) -> None:
        """Send the answer to a fetch."""

    def deadline_ns(self, slot: int, max_wait_ms: int, now_ns: int) -> int:
        """Return the latest time at which a fetch must be answered.

        It is in ns of CLOCK_MONOTONIC.
        """


class CoreFetches:
    """Keeps the waiting fetches of one handler process that the C core may answer.

    Args:
        parts: the objects that the services of Produce and Fetch share.
        service: handles the fetches that the core cannot execute any more.
    """

    def __init__(self, parts: ServiceParts, service: Fetches) -> None:
        self._channel = parts.channel
        self._registry = parts.registry
        self._purgatory = parts.purgatory
        self._core_cache = parts.core_cache
        self._service = service
        self._parked: dict[int, DelayedCoreFetch] = {}  # by slot

    def park(self, slot: int, max_wait_ms: int, rows: tuple[int, ...], /) -> None:
        """Keep a fetch for which the C core has found less than min.bytes.

        Args:
            slot: the fetch's slot, which is its entry in shared memory.
            max_wait_ms: the longest wait.
            rows: the rows of the fetch's partitions in the shared partition table.
        """
        deadline = self._service.deadline_ns(slot, max_wait_ms, time.monotonic_ns())
        operation = DelayedCoreFetch(self, slot, rows, deadline)
        self._channel.park(slot, deadline)
        self._purgatory.watch(operation)
        self._parked[slot] = operation
        self._core_cache.waiting.update(dict.fromkeys(rows, slot))
        # What was appended before our bit was in the row sends no notice.
        self._purgatory.look_at(operation, rows[0])

    def was_answered(self, slot: int, /) -> None:
        """Forget a waiting fetch, because the C core has answered it."""
        operation = self._parked[slot]
        self._forget(slot)
        self._purgatory.unwatch(operation)

    def _forget(self, slot: int) -> None:
        """Forget a fetch that does not wait any more, here and in the C core's table.

        Remove its entries from the core's table too, so that the core does not answer
        it.
        """
        operation = self._parked.pop(slot, None)
        if operation is None:
            return
        waiting = self._core_cache.waiting
        for row in operation.keys:
            if waiting.get(row) == slot:
                del waiting[row]

    def try_answer(self, slot: int, *, must_answer: bool) -> bool:
        """Try to answer a waiting fetch, in the C core or else in Python.

        Args:
            slot: the fetch's slot, which is its entry in shared memory.
            must_answer: answer also if there is less than min.bytes.

        Returns:
            False if the fetch still waits. True if it is answered, or if Python's
            service has parked it again.
        """
        waits = False
        try:
            waits = not self._try_answer(slot, must_answer=must_answer)
        finally:
            # Also after a bug: the request is answered with the error, and its slot
            # becomes free.
            if not waits:
                self._forget(slot)
        return not waits

    def _try_answer(self, slot: int, *, must_answer: bool) -> bool:
        answered = self._core_cache.try_fetch(slot, must_answer=must_answer)
        if answered is not None:
            return answered
        self._registry.catch_up()
        request = self.request(slot)
        parts = self._service.handle(request)
        if parts is PARKED:
            return True  # another operation watches over it now
        self._channel.unpark(slot)
        if isinstance(parts, Deferred):
            self._channel.close_connection(slot)
        else:
            self._service.send(request, parts)
        return True

    def request(self, slot: int) -> Request:
        """Parse and return the request in a slot (its entry in shared memory)."""
        return parse_request(*self._channel.request(slot))


class DelayedCoreFetch:
    """Keeps a fetch, which the C core answers when it finds enough records."""

    may_end_early = True

    def __init__(
        self, fetches: CoreFetches, slot: int, rows: Iterable[int], deadline_ns: int
    ) -> None:
        self._fetches = fetches
        self.slot = slot
        self.keys = rows
        self.deadline_ns = deadline_ns
        self.done = False

    @property
    def request(self) -> Request:
        return self._fetches.request(self.slot)

    def try_complete(self, row: int) -> bool:
        return self._fetches.try_answer(self.slot, must_answer=False)

    def expire(self) -> None:
        self._fetches.try_answer(self.slot, must_answer=True)

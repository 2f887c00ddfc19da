"""Keep fetches that the compiled core may answer, until it has.

The core has found too little for such a fetch. It is read by the core again, whenever
one of its partitions grows, until it is answered. When it is not plain any more,
``FetchService`` handles it as if it had just come.
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
    """What ``FetchService`` does for fetches that the core has parked."""

    def handle(self, request: Request) -> list[bytes | FilePart] | Deferred:
        """Answer a fetch now, or park it."""

    def send(self, request: Request, parts: list[bytes | FilePart]) -> None:
        """Send an answer."""

    def deadline_ns(self, slot: int, max_wait_ms: int, now_ns: int) -> int:
        """Return when to answer at the latest."""


class CoreFetches:
    """The parked fetches of one handler process that the core may answer.

    Args:
        parts: what the services share.
        service: handles the fetches that are not plain any more.
    """

    def __init__(self, parts: ServiceParts, service: Fetches) -> None:
        self._channel = parts.channel
        self._registry = parts.registry
        self._purgatory = parts.purgatory
        self._core_cache = parts.core_cache
        self._service = service
        self._parked: dict[int, DelayedCoreFetch] = {}  # by slot

    def park(self, slot: int, max_wait_ms: int, rows: tuple[int, ...], /) -> None:
        """Keep a fetch for which the core has found too little."""
        deadline = self._service.deadline_ns(slot, max_wait_ms, time.monotonic_ns())
        operation = DelayedCoreFetch(self, slot, rows, deadline)
        self._channel.park(slot, deadline)
        self._purgatory.watch(operation)
        self._parked[slot] = operation
        self._core_cache.waiting.update(dict.fromkeys(rows, slot))
        # What was appended before our bit was in the row sends no notice.
        self._purgatory.look_at(operation, rows[0])

    def was_answered(self, slot: int, /) -> None:
        """Forget a fetch that the core has answered, with what it has appended."""
        operation = self._parked[slot]
        self._forget(slot)
        self._purgatory.unwatch(operation)

    def _forget(self, slot: int) -> None:
        """Keep the core from answering a fetch that is parked no more."""
        operation = self._parked.pop(slot, None)
        if operation is None:
            return
        waiting = self._core_cache.waiting
        for row in operation.keys:
            if waiting.get(row) == slot:
                del waiting[row]

    def try_answer(self, slot: int, *, must_answer: bool) -> bool:
        """Answer a parked fetch by the core, or by Python; False: it waits on."""
        waits = False
        try:
            waits = not self._try_answer(slot, must_answer=must_answer)
        finally:
            # After a bug, too: the error is the answer, and the slot is free after it.
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
        """Return the request in a slot, which Python has not read before."""
        return parse_request(*self._channel.request(slot))


class DelayedCoreFetch:
    """A fetch that waits for more, and that the core may answer."""

    may_end_early = True

    def __init__(
        self, fetches: CoreFetches, slot: int, rows: Iterable[int], deadline_ns: int
    ) -> None:
        self._fetches = fetches
        self._slot = slot
        self.keys = rows
        self.deadline_ns = deadline_ns
        self.done = False

    @property
    def request(self) -> Request:
        return self._fetches.request(self._slot)

    def try_complete(self, row: int) -> bool:
        return self._fetches.try_answer(self._slot, must_answer=False)

    def expire(self) -> None:
        self._fetches.try_answer(self._slot, must_answer=True)

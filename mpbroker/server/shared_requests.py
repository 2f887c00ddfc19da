"""Give what requests want of shared topics to the cluster, and park them meanwhile.

The process that talks to the cluster's database answers when it is done there, and
shown here: the deletions of a DeleteRecords, or a look at the ends of partitions for
ListOffsets. A request whose handler is killed is executed again, which removes the same
records, or more of them if it asked for all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from mpbroker.cluster.produce_link import (
    LinkedDeletion,
    LinkedLook,
    LinkedRequest,
    ProduceLink,
)
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.server.purgatory import Purgatory, sync_key
from mpbroker.server.quotas.client_quotas import with_throttle
from mpbroker.server.request import Request

if TYPE_CHECKING:
    from mpbroker.network.request_channel import HandlerEnd

# Takes the start and the error code of each partition; returns the encoded response.
FinishDeletion = Callable[[Sequence[tuple[int, int]]], bytes]
# Takes whether the log of each partition has all; returns the encoded response.
FinishLook = Callable[[Sequence[bool]], bytes]
_NS_PER_MS: Final = 1_000_000
# As for produces: if the other process runs, it answers before this is over.
_GRACE_MS: Final = 1000
_LOOK_MS: Final = 5000
_NO_START: Final = -1


class Wanted(Protocol):
    """A partition and its new start; a part of a DeleteRecords request."""

    partition_index: int
    offset: int


class SharedRequests:
    """Sends what requests want to the cluster's writer, and parks the requests.

    Args:
        channel: the handler's end of the request channel.
        purgatory: keeps the requests that wait.
        link: to the writer.
    """

    def __init__(
        self, channel: HandlerEnd, purgatory: Purgatory, link: ProduceLink
    ) -> None:
        self._channel = channel
        self._purgatory = purgatory
        self.link = link

    def delete(
        self,
        request: Request,
        timeout_ms: int,
        wanted: Sequence[tuple[bytes, int, Wanted]],
        finish: FinishDeletion,
    ) -> None:
        """Park a request, and ask for its deletions.

        Args:
            request: the request.
            timeout_ms: how long its client waits.
            wanted: of each partition the topic's id, the row, and what is wanted.
            finish: called with the results.
        """
        row = wanted[0][1]
        deletion = LinkedDeletion(
            self._key(request),
            [
                (topic_id, each.partition_index, each.offset)
                for topic_id, _, each in wanted
            ],
            row=row,
            timeout_ms=max(1, timeout_ms),
        )

        def end() -> bytes:
            if deletion.results is None:
                code = int(ErrorCode.REQUEST_TIMED_OUT)
                if deletion.refusal is not None:
                    code = deletion.refusal[0]
                return finish([(_NO_START, code)] * len(wanted))
            return finish([(start, error) for start, error in deletion.results])

        self._park(request, deletion, row, max(1, timeout_ms), end)

    def look(
        self,
        request: Request,
        places: Sequence[tuple[bytes, int, int]],
        finish: FinishLook,
    ) -> None:
        """Park a request until this node's logs have what the cluster has now.

        Args:
            request: the request.
            places: of each partition the topic's id, the row, and the partition.
            finish: called when they have it, or after five seconds.
        """
        row = places[0][1]
        look = LinkedLook(
            self._key(request),
            [(topic_id, partition) for topic_id, _, partition in places],
            row=row,
            timeout_ms=_LOOK_MS,
        )

        def end() -> bytes:
            if look.results is None:
                return finish([False] * len(places))
            return finish([bool(has_all) for (has_all,) in look.results])

        self._park(request, look, row, _LOOK_MS, end)

    def _key(self, request: Request) -> tuple[int, int]:
        return request.slot, self._channel.generation(request.slot)

    def _park(
        self,
        request: Request,
        linked: LinkedRequest,
        row: int,
        timeout_ms: int,
        end: Callable[[], bytes],
    ) -> None:
        deadline = time.monotonic_ns() + (timeout_ms + _GRACE_MS) * _NS_PER_MS
        operation = _DelayedShared(self, request, linked, deadline, end, row)
        self._channel.park(request.slot, deadline)
        self._purgatory.watch(operation)
        self.link.submit(linked)

    def answer(self, request: Request, body: bytes) -> None:
        """Answer a parked request."""
        self._channel.unpark(request.slot)
        body = with_throttle(request, body)
        self._channel.send_bytes(request.slot, request.frame(body))


class _DelayedShared:
    """Keeps a parked request until the cluster has done what it wants."""

    may_end_early = False

    def __init__(
        self,
        requests: SharedRequests,
        request: Request,
        linked: LinkedRequest,
        deadline_ns: int,
        end: Callable[[], bytes],
        row: int,
    ) -> None:
        self._requests = requests
        self._linked = linked
        self._end = end
        self.request = request
        self.slot = request.slot
        self.deadline_ns = deadline_ns
        self.done = False
        # The writer sends a notice whatever the row's waiters are.
        self.keys: Iterable[int] = [sync_key(row)]

    def try_complete(self, row: int) -> bool:
        if not self._linked.is_answered:
            self._requests.link.look()
        if not self._linked.is_answered:
            return False
        self._requests.answer(self.request, self._end())
        return True

    def expire(self) -> None:
        self._requests.link.forget(self._linked)
        self._requests.answer(self.request, self._end())

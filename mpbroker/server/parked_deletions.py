"""Give the deletions of a DeleteRecords on shared topics to the cluster, and park it.

The process that talks to the cluster's database answers when the records are removed
there, and no longer shown here. A request whose handler is killed is executed again,
which removes the same records, or more of them if it asked for all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from mpbroker.cluster.produce_link import LinkedDeletion, ProduceLink
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.server.purgatory import Purgatory, sync_key
from mpbroker.server.quotas.client_quotas import with_throttle
from mpbroker.server.request import Request

if TYPE_CHECKING:
    from mpbroker.network.request_channel import HandlerEnd

# Takes the start and the error code of each partition; returns the encoded response.
Finish = Callable[[Sequence[tuple[int, int]]], bytes]
_NS_PER_MS: Final = 1_000_000
# As for produces: if the other process runs, it answers before this is over.
_GRACE_MS: Final = 1000
_NO_START: Final = -1


class Wanted(Protocol):
    """A partition and its new start; a part of a DeleteRecords request."""

    partition_index: int
    offset: int


class ParkedDeletions:
    """Sends deletions to the cluster's writer, and parks their requests.

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

    def begin(
        self,
        request: Request,
        timeout_ms: int,
        wanted: Sequence[tuple[bytes, int, Wanted]],
        finish: Finish,
    ) -> None:
        """Park a request, and ask for its deletions.

        Args:
            request: the request.
            timeout_ms: how long its client waits.
            wanted: of each partition the topic's id, the row, and what is wanted.
            finish: called with the results.
        """
        timeout_ms = max(1, timeout_ms)
        row = wanted[0][1]
        deletion = LinkedDeletion(
            (request.slot, self._channel.generation(request.slot)),
            [
                (topic_id, each.partition_index, each.offset)
                for topic_id, _, each in wanted
            ],
            row=row,
            timeout_ms=timeout_ms,
        )
        deadline = time.monotonic_ns() + (timeout_ms + _GRACE_MS) * _NS_PER_MS
        operation = _DelayedDeletion(self, request, deletion, deadline, finish, row)
        self._channel.park(request.slot, deadline)
        self._purgatory.watch(operation)
        self.link.submit(deletion)

    def answer(self, request: Request, body: bytes) -> None:
        """Answer a parked request."""
        self._channel.unpark(request.slot)
        body = with_throttle(request, body)
        self._channel.send_bytes(request.slot, request.frame(body))


class _DelayedDeletion:
    """Keeps a parked DeleteRecords until its records are removed."""

    may_end_early = False

    def __init__(
        self,
        deletions: ParkedDeletions,
        request: Request,
        deletion: LinkedDeletion,
        deadline_ns: int,
        finish: Finish,
        row: int,
    ) -> None:
        self._deletions = deletions
        self._deletion = deletion
        self._finish = finish
        self.request = request
        self.slot = request.slot
        self.deadline_ns = deadline_ns
        self.done = False
        # The writer sends a notice whatever the row's waiters are.
        self.keys: Iterable[int] = [sync_key(row)]

    def try_complete(self, row: int) -> bool:
        deletion = self._deletion
        if not deletion.is_answered:
            self._deletions.link.look()
        if not deletion.is_answered:
            return False
        if deletion.refusal is not None:
            self._refuse(deletion.refusal[0])
        else:
            assert deletion.results is not None
            self._answer([(start, error) for start, error in deletion.results])
        return True

    def expire(self) -> None:
        self._deletions.link.forget(self._deletion)
        self._refuse(ErrorCode.REQUEST_TIMED_OUT)

    def _refuse(self, code: int) -> None:
        self._answer([(_NO_START, code)] * len(self._deletion.head["deletions"]))

    def _answer(self, results: Sequence[tuple[int, int]]) -> None:
        self._deletions.answer(self.request, self._finish(results))

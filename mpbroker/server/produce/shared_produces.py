"""Give a Produce's batches of shared topics to the process that writes them.

The records of a shared topic are in the object store; one process of the broker, the
writer, puts them there. The Produce waits meanwhile.

When the writer has answered, it sends the handler a notice about one of the request's
partitions. If the request has also appended to local topics, it waits for the disk
after that.

Before that, when the batches are in the writer's buffer, the client's connection may
send its next Produce: network/pipelining/pipelines.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Final

from mpbroker.cluster.produce_link import LinkedBatch, LinkedProduce, ProduceLink
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.server.produce.produce_handler import ProduceOutcome, refuse
from mpbroker.server.purgatory import Purgatory, sync_key
from mpbroker.server.quotas.client_quotas import with_throttle
from mpbroker.server.request import CLOSE, NO_RESPONSE, Deferred, Request

if TYPE_CHECKING:
    from mpbroker.network.request_channel import HandlerEnd
    from mpbroker.protocol.messages.produce import ProduceRequest

# Returns the answer to a request whose shared batches are done, or parks it once more.
Finish = Callable[[], bytes | Deferred]
_NS_PER_MS: Final = 1_000_000
# Only with acks=all does a client say how long it waits.
_OTHERS_WAIT_MS: Final = 30_000
# If the writer runs, it answers before this is over, and says what took so long.
_GRACE_MS: Final = 1000


class SharedProduces:
    """Sends batches to the writer of shared topics, and keeps their Produce requests.

    Shared topics have their records in the object store; one process of the broker, the
    writer, puts them there.

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
        message: ProduceRequest,
        outcome: ProduceOutcome,
        finish: Finish,
    ) -> None:
        """Give a Produce's batches of shared topics to their writer; keep the request.

        Shared topics have their records in the object store; the writer is the process
        that puts them there.

        Args:
            request: the request.
            message: its decoded body.
            outcome: the response so far, with the shared batches.
            finish: called when the writer has answered. It returns the answer to send,
                or PARKED if the request still waits for the disk.
        """
        assert outcome.shared
        timeout_ms = max(1, message.timeout_ms)
        if message.acks != -1:
            timeout_ms = max(timeout_ms, _OTHERS_WAIT_MS)
        produce = LinkedProduce(
            (request.slot, self._channel.generation(request.slot)),
            [
                LinkedBatch(
                    each.topic_id,
                    each.partition,
                    each.batch.last_offset_delta + 1,
                    each.batch.data,
                )
                for each in outcome.shared
            ],
            connection=request.connection,
            row=outcome.shared[0].row,
            timeout_ms=timeout_ms,
            has_ids=all(each.batch.header.producer_id >= 0 for each in outcome.shared),
            before=self._channel.request_before(request.slot),
            taken=partial(self._channel.read_on, request.slot),
        )
        deadline = time.monotonic_ns() + (timeout_ms + _GRACE_MS) * _NS_PER_MS
        operation = DelayedSharedProduce(
            self, request, outcome, produce, deadline, finish
        )
        self._channel.park(request.slot, deadline)
        self._purgatory.watch(operation)
        self.link.submit(produce)

    def complete(self, operation: DelayedSharedProduce) -> None:
        """Answer a waiting Produce: the object store's writer is done with its batches.

        If the request still waits for the disk, it is not answered yet.
        """
        request, channel = operation.request, self._channel
        slot = request.slot
        answer = operation.finish()
        if isinstance(answer, bytes):
            channel.unpark(slot)
            answer = with_throttle(request, answer)
            channel.send_bytes(slot, request.frame(answer))
        elif answer is NO_RESPONSE:
            channel.unpark(slot)
            channel.send_nothing(slot)
        elif answer is CLOSE:
            channel.unpark(slot)
            channel.close_connection(slot)


class DelayedSharedProduce:
    """Keeps a Produce until its batches are written to the object store, or refused."""

    may_end_early = False

    def __init__(
        self,
        produces: SharedProduces,
        request: Request,
        outcome: ProduceOutcome,
        produce: LinkedProduce,
        deadline_ns: int,
        finish: Finish,
    ) -> None:
        assert outcome.shared
        self._produces = produces
        self.finish = finish
        self.request = request
        self.slot = request.slot
        self.outcome = outcome
        self._produce = produce
        self.deadline_ns = deadline_ns
        self.done = False
        # The writer sends a notice whatever the row's waiters are.
        self.keys: Iterable[int] = [sync_key(outcome.shared[0].row)]

    def try_complete(self, row: int) -> bool:
        produce = self._produce
        if not produce.is_answered:
            self._produces.link.look()
        if not produce.is_answered:
            return False
        if produce.refusal is not None:
            self._refuse(*produce.refusal)
        else:
            assert produce.results is not None and self.outcome.shared
            for each, result in zip(self.outcome.shared, produce.results, strict=True):
                offset, code, time_ms = result
                each.answer.base_offset = offset
                each.answer.log_append_time_ms = time_ms
                if code:
                    self.outcome.failed = True
                    refuse(each.answer, ErrorCode(code), "refused by the cluster")
        self._produces.complete(self)
        return True

    def expire(self) -> None:
        self._produces.link.forget(self._produce)
        self._refuse(
            ErrorCode.REQUEST_TIMED_OUT,
            "the writer of shared topics gives no answer; see the broker's log",
        )
        self._produces.complete(self)

    def _refuse(self, code: int, message: str) -> None:
        assert self.outcome.shared
        self.outcome.failed = True
        for each in self.outcome.shared:
            refuse(each.answer, ErrorCode(code), message)

"""Execute Produce requests: check permissions, forward or append, answer or park.

``ProduceHandler`` judges and appends. The answer to acks=all is sent when the records
are on disk. If no other request waits for this process, the records of a transaction or
of several partitions are synced at once. In all other cases the request is parked until
the group commit has ended.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from mpbroker.ipc.layout import RowStatus
from mpbroker.protocol.acl import AclOperation
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import TooManyElementsError
from mpbroker.protocol.fast_produce import parse_single_produce
from mpbroker.protocol.messages.produce import ProduceRequest
from mpbroker.protocol.records.log_validator import HeavyRequestError
from mpbroker.server.group_commit import GroupCommit
from mpbroker.server.produce.core_produces import (
    NO_ANSWER,
    NOT_WRITTEN,
    SYNC_DEADLINE_NS,
    CoreProduces,
)
from mpbroker.server.produce.produce_handler import (
    Check,
    CheckCopy,
    ProduceHandler,
    ProduceOutcome,
    SingleOutcome,
)
from mpbroker.server.purgatory import sync_key
from mpbroker.server.quotas.client_quotas import with_throttle
from mpbroker.server.request import (
    CLOSE,
    FORWARDED,
    NO_RESPONSE,
    PARKED,
    Deferred,
    Request,
)
from mpbroker.server.turns import PATIENCE_NS, DelayedTurn

if TYPE_CHECKING:
    from mpbroker.network.request_channel import HandlerEnd
    from mpbroker.server.authorization.authorization import Access
    from mpbroker.server.produce.shared_produces import SharedProduces
    from mpbroker.server.produce_transactions import ProduceTransactions
    from mpbroker.server.service_parts import ServiceParts
    from mpbroker.storage.log.partition_log import PartitionLog


class SlotProgress:
    """Reads and stores a Produce's progress in its slot, its entry in shared memory."""

    __slots__ = ("_channel", "slot")

    def __init__(self, channel: HandlerEnd, slot: int) -> None:
        self._channel = channel
        self.slot = slot

    def earlier(self) -> Sequence[int]:
        return self._channel.progress(self.slot)

    def capacity(self) -> int:
        return self._channel.progress_capacity(self.slot)

    def note(self, ordinal: int, word: int) -> None:
        self._channel.note_progress(self.slot, ordinal, word)


class ProduceService:
    """Executes the Produce requests of one handler process.

    Args:
        parts: the objects that it shares with the service of Fetch.
        group_commit: makes logs durable.
        transactions: finds and opens transactions. None: Python forwards no Produce,
            and checks no transaction.
        sync_acks_all: whether acks=all waits for the disk.
        shared: gives batches of shared topics (with records in the object store) to the
            process that writes them; None: the broker is in no cluster.
    """

    def __init__(
        self,
        parts: ServiceParts,
        group_commit: GroupCommit,
        transactions: ProduceTransactions | None = None,
        *,
        sync_acks_all: bool,
        shared: SharedProduces | None = None,
    ) -> None:
        self._shared = shared
        self._parts = parts
        self._channel = channel = parts.channel
        self._purgatory = purgatory = parts.purgatory
        self._group_commit = group_commit
        self._sync_acks_all = sync_acks_all
        self._forward = None if transactions is None else transactions.forward
        core_produces = CoreProduces(channel, purgatory, group_commit)
        parts.core_cache.execute_produces(core_produces.park if sync_acks_all else None)
        self._handler = ProduceHandler(
            parts.registry,
            parts.log,
            lambda log: purgatory.notify_waiters(log.row),
            parts.core_cache.learn_produce,
            transactions,
        )

    def handle(self, request: Request) -> bytes | Deferred:
        """Append a Produce's records; answer now, or later, or forward the request.

        Returns:
            The encoded body of the answer, or a Deferred. CLOSE if the client has
            disconnected, or if a request with acks=0 has failed.
        """
        version, authorization = request.api_version, self._parts.authorization
        access: Access | None = None
        if authorization is not None:
            access = authorization.access(request)
            if access is None:
                return CLOSE  # its client has gone
        progress = SlotProgress(self._channel, request.slot)
        now_ms = time.time_ns() // 1_000_000
        check: Check | None = None if access is None else access.require_write
        single = parse_single_produce(version, request.body)
        is_heavy = False
        if single is not None:
            try:
                done = self._handler.handle_single(
                    single, version, progress, now_ms, check
                )
            except HeavyRequestError:
                done, is_heavy = None, True
            if done is not None:
                self._parts.core_cache.allow(access, AclOperation.WRITE, single.topic)
                return self._answer_single(request, single.acks, done)
        try:
            message = ProduceRequest.decode(version, request.body)
        except TooManyElementsError as error:
            if getattr(error.partial, "acks", 0) == 0:
                return CLOSE  # it must not be answered
            raise
        if access is not None:
            check = access.write_check(message.transactional_id)
        if (
            message.transactional_id is not None
            and self._forward is not None
            and self._handler.begins_elsewhere(message, version, check)
        ):
            self._forward(request.slot)
            return FORWARDED
        if not is_heavy:
            try:
                return self._append(request, message, access, has_turn=False)
            except HeavyRequestError:
                pass  # what it has appended until now is noted in its slot
        return self._wait_for_turn(request, message, access)

    def _append(
        self,
        request: Request,
        message: ProduceRequest,
        access: Access | None,
        *,
        has_turn: bool,
    ) -> bytes | Deferred:
        """Append a decoded Produce's records; answer now, or later.

        Raises:
            HeavyRequestError: as `ProduceHandler.handle`.
        """
        check: Check | None = None
        check_copy: CheckCopy | None = None
        if access is not None:
            check = access.write_check(message.transactional_id)
            check_copy = partial(access.require_cluster, AclOperation.CLUSTER_ACTION)
        outcome = self._handler.handle(
            message,
            request.api_version,
            SlotProgress(self._channel, request.slot),
            time.time_ns() // 1_000_000,
            check,
            check_copy,
            has_turn=has_turn,
        )
        if access is not None:
            self._allow(access, outcome)
        if outcome.shared:
            assert self._shared is not None, "a cluster's node starts as one only"
            self._shared.begin(
                request,
                message,
                outcome,
                partial(self._finish, request, message, outcome),
            )
            return PARKED
        return self._finish(request, message, outcome)

    # -- batches that inflate to much --------------------------------------------------

    def _wait_for_turn(
        self, request: Request, message: ProduceRequest, access: Access | None
    ) -> bytes | Deferred:
        """Park a Produce that takes long to inflate, until it is its turn."""
        if self._channel.must_end(request.slot):
            return self._without_turn(request, message)

        def refuse() -> None:
            self._channel.unpark(request.slot)
            answer = self._without_turn(request, message)
            if isinstance(answer, bytes):
                body = with_throttle(request, answer)
                self._channel.send_bytes(request.slot, request.frame(body))
            else:
                self._channel.close_connection(request.slot)

        def run() -> bytes | Deferred:
            answer = self._append(request, message, access, has_turn=True)
            return (
                with_throttle(request, answer) if isinstance(answer, bytes) else answer
            )

        deadline = time.monotonic_ns() + PATIENCE_NS
        client = self._channel.client_of(request.connection)
        operation = DelayedTurn(request, client, run, refuse, deadline)
        self._channel.park(request.slot, deadline)
        self._purgatory.watch(operation)
        self._purgatory.turns.add(operation)
        return PARKED

    def _without_turn(
        self, request: Request, message: ProduceRequest
    ) -> bytes | Deferred:
        """Answer a Produce that does not get its turn; producers try again."""
        code = ErrorCode.REQUEST_TIMED_OUT
        why = "many batches wait here that inflate to very much"
        return self._finish(request, message, self._handler.refusal(message, code, why))

    def _finish(
        self, request: Request, message: ProduceRequest, outcome: ProduceOutcome
    ) -> bytes | Deferred:
        """Answer a Produce after its appends: now, or when the records are on disk."""
        if outcome.failed:
            for code in outcome.errors():
                self._parts.count_error(request.api_key, code)
        if message.acks == 0:
            # There is no answer in which an error could be told.
            return CLOSE if outcome.failed else NO_RESPONSE
        if outcome.needed and self._sync_acks_all:
            waiting = self._sync(message, outcome)
            if waiting:
                self._park(request, outcome, waiting)
                return PARKED
        return outcome.response.encode(request.api_version)

    def _answer_single(
        self, request: Request, acks: int, outcome: SingleOutcome
    ) -> bytes | Deferred:
        """Answer a Produce of one batch: now, or when the records are on disk."""
        if acks == 0:
            return NO_RESPONSE
        if outcome.needed and self._sync_acks_all:
            waiting = {
                row: (log, offset)
                for row, (log, offset) in outcome.needed.items()
                if log.row.durable_end_offset < offset
            }
            if waiting:
                self._park(request, outcome, waiting)
                return PARKED
        return outcome.encode(request.api_version)

    def _allow(self, access: Access, outcome: ProduceOutcome) -> None:
        """Let the C core execute the sender's next produces to the same topics."""
        registry, allow = self._parts.registry, self._parts.core_cache.allow
        for answer in outcome.response.responses:
            if all(partition.error_code for partition in answer.partition_responses):
                continue
            topic = (
                registry.topic(answer.name)
                if answer.name
                else registry.topic_by_id(answer.topic_id)
            )
            if topic is not None:
                allow(access, AclOperation.WRITE, topic.name, topic.topic_id)

    # -- acks=all ----------------------------------------------------------------------

    def _sync(
        self, message: ProduceRequest, outcome: ProduceOutcome
    ) -> dict[int, tuple[PartitionLog, int]]:
        """Return the logs, by partition row, whose records are not on disk yet.

        First sync the logs, if that is faster than to park the request. If a log goes
        offline by that, put an error into the outcome.
        """
        waiting = {
            row: (log, offset)
            for row, (log, offset) in outcome.needed.items()
            if log.row.durable_end_offset < offset
        }
        # The client of a transaction has nothing else under way. Others may have: their
        # produces to one partition are parked, and one sync makes many durable. The
        # core decides the same.
        if waiting and (
            len(outcome.needed) > 1 or message.transactional_id is not None
        ):
            self._group_commit.sync_at_once([log for log, _ in waiting.values()])
            for row, (log, offset) in list(waiting.items()):
                if log.row.status != RowStatus.ONLINE:
                    outcome.fail(row, ErrorCode.KAFKA_STORAGE_ERROR, NOT_WRITTEN)
                    del waiting[row]
                elif log.row.durable_end_offset >= offset:
                    del waiting[row]
        return waiting

    def _park(
        self,
        request: Request,
        outcome: ProduceOutcome | SingleOutcome,
        waiting: dict[int, tuple[PartitionLog, int]],
    ) -> None:
        deadline = time.monotonic_ns() + SYNC_DEADLINE_NS
        operation = DelayedProduce(self, request, outcome, waiting, deadline)
        self._channel.park(request.slot, deadline)
        # Watch before the sync is wanted: its end is told to operations that watch.
        self._purgatory.watch(operation)
        for log, _ in waiting.values():
            self._group_commit.want(log)

    def want_sync(self, log: PartitionLog) -> None:
        self._group_commit.want(log)

    def complete(self, operation: DelayedProduce) -> None:
        """Send the answer to a Produce that has waited for the disk."""
        request = operation.request
        self._channel.unpark(request.slot)
        body = operation.outcome.encode(request.api_version)
        body = with_throttle(request, body)
        self._channel.send_bytes(request.slot, request.frame(body))


class DelayedProduce:
    """Keeps a Produce until its records are on disk."""

    may_end_early = False

    def __init__(
        self,
        service: ProduceService,
        request: Request,
        outcome: ProduceOutcome | SingleOutcome,
        waiting: dict[int, tuple[PartitionLog, int]],
        deadline_ns: int,
    ) -> None:
        self._service = service
        self.request = request
        self.slot = request.slot
        self.outcome = outcome
        self.deadline_ns = deadline_ns
        self.done = False
        self._waiting = waiting
        self.keys: Iterable[int] = [sync_key(index) for index in waiting]

    def try_complete(self, row: int) -> bool:
        wanted = self._waiting.get(row)
        if wanted is not None:
            log, offset = wanted
            if log.row.status != RowStatus.ONLINE:
                self._fail(row, NOT_WRITTEN)
                del self._waiting[row]
            elif log.row.durable_end_offset >= offset:
                del self._waiting[row]
            else:
                self._service.want_sync(log)  # too late for the last one
        if self._waiting:
            return False
        self._service.complete(self)
        return True

    def expire(self) -> None:
        for row in self._waiting:
            self._fail(row, NO_ANSWER)
        self._service.complete(self)

    def _fail(self, row: int, why: str) -> None:
        self.outcome.fail(row, ErrorCode.KAFKA_STORAGE_ERROR, why)

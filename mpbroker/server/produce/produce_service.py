"""Produces and their waiting: what the handler for Produce does around the appends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from mpbroker.ipc.layout import RowStatus
from mpbroker.protocol.acl import AclOperation
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.produce import ProduceRequest, ProduceResponse
from mpbroker.server.group_commit import GroupCommit
from mpbroker.server.produce.produce_handler import (
    Check,
    IsOpen,
    ProduceHandler,
    ProduceOutcome,
    refuse,
)
from mpbroker.server.purgatory import Purgatory, sync_key
from mpbroker.server.quotas.client_quotas import with_throttle
from mpbroker.server.request import (
    CLOSE,
    FORWARDED,
    NO_RESPONSE,
    PARKED,
    Deferred,
    Request,
    parse_request,
)

if TYPE_CHECKING:
    from mpbroker.metadata.topics import Topic, TopicRegistry
    from mpbroker.network.request_channel import HandlerEnd
    from mpbroker.server.authorization.authorization import Access, Authorization
    from mpbroker.server.core_cache import PlainRequests
    from mpbroker.storage.log.partition_log import PartitionLog

# A sync ends, well or badly; the deadline is only for an orphan nobody answers.
_SYNC_DEADLINE_NS: Final = 120 * 1_000_000_000
_NOT_WRITTEN: Final = "the log could not be written to disk"


class SlotProgress:
    """The progress words of one request's slot."""

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
    """Produces of one handler process."""

    def __init__(
        self,
        channel: HandlerEnd,
        registry: TopicRegistry,
        log: Callable[[Topic, int], PartitionLog],
        purgatory: Purgatory,
        group_commit: GroupCommit,
        *,
        sync_acks_all: bool,
        plain: PlainRequests | None = None,
        is_open: IsOpen | None = None,
        verify: bool = True,
        forward: Callable[[int], None] | None = None,
        count_error: Callable[[int, int], None] | None = None,
        authorization: Authorization | None = None,
    ) -> None:
        """Args:
        is_open: says whether a producer has a transaction open in a partition; None:
            nobody asks, and nobody adds partitions.
        verify: transaction.partition.verification.enable.
        forward: hands a request's slot to the coordinator.
        count_error: told of the API key and the code of each partition's error.
        authorization: says who may write where; None: everybody everywhere.
        """
        self._authorization = authorization
        self._count_error = count_error
        self._forward = forward
        self._channel = channel
        self._registry = registry
        self._purgatory = purgatory
        self._group_commit = group_commit
        self._sync_acks_all = sync_acks_all
        self._plain = plain
        if plain is not None:
            plain.park_produces(self.park_plain if sync_acks_all else None)
        self._handler = ProduceHandler(
            registry,
            log,
            lambda log: purgatory.notify_waiters(log.row),
            None if plain is None else plain.learn,
            is_open,
            verify=verify,
        )

    def handle(self, request: Request) -> bytes | Deferred:
        """Append now; answer now, or when it is on disk."""
        version = request.api_version
        progress = SlotProgress(self._channel, request.slot)
        now_ms = time.time_ns() // 1_000_000
        check: Check | None = None
        access = None
        if self._authorization is not None:
            access = self._authorization.access(request)
            if access is None:
                return CLOSE  # nobody is there to be answered
        message = ProduceRequest.decode(version, request.body)
        if access is not None:
            check = access.write_check(message.transactional_id)
        if (
            message.transactional_id is not None
            and self._forward is not None
            and self._handler.begins_elsewhere(message, version, check)
        ):
            self._forward(request.slot)
            return FORWARDED
        outcome = self._handler.handle(message, version, progress, now_ms, check)
        self._allow(access, outcome)
        if outcome.failed and self._count_error is not None:
            for code in outcome.errors():
                self._count_error(request.api_key, code)
        if message.acks == 0:
            # Nobody reads an answer: a closed connection is how it is noticed.
            return CLOSE if outcome.failed else NO_RESPONSE
        if outcome.needed and self._sync_acks_all:
            waiting = {
                index: (log, offset)
                for index, (log, offset) in outcome.needed.items()
                if log.row.durable_end_offset < offset
            }
            # The client of a transaction has nothing else under way. Others may have:
            # their produces to one partition are parked, and one sync makes many
            # durable. The core decides the same.
            if waiting and (
                len(outcome.needed) > 1 or message.transactional_id is not None
            ):
                self._sync_at_once(outcome, waiting)
            if waiting:
                self._park(request, outcome, waiting)
                return PARKED
        return outcome.response.encode(version)

    def _allow(self, access: Access | None, outcome: ProduceOutcome) -> None:
        """What a sender was let append to, it may append to by the short cut."""
        if self._plain is None or access is None:
            return
        for answer in outcome.response.responses:
            if all(partition.error_code for partition in answer.partition_responses):
                continue
            topic = (
                self._registry.topic(answer.name)
                if answer.name
                else self._registry.topic_by_id(answer.topic_id)
            )
            if topic is not None:
                self._plain.allow(
                    access, AclOperation.WRITE, topic.name, topic.topic_id
                )

    def _sync_at_once(
        self,
        outcome: ProduceOutcome,
        waiting: dict[int, tuple[PartitionLog, int]],
    ) -> None:
        """Take out of ``waiting`` what need not be waited for, or is in vain."""
        self._group_commit.sync_at_once([log for log, _ in waiting.values()])
        for index, (log, offset) in list(waiting.items()):
            if log.row.durable_end_offset >= offset:
                del waiting[index]
            elif log.row.status != RowStatus.ONLINE:
                outcome.fail(index, ErrorCode.KAFKA_STORAGE_ERROR, _NOT_WRITTEN)
                del waiting[index]

    def _park(
        self,
        request: Request,
        outcome: ProduceOutcome,
        waiting: dict[int, tuple[PartitionLog, int]],
    ) -> None:
        deadline = time.monotonic_ns() + _SYNC_DEADLINE_NS
        operation = DelayedProduce(self, request, outcome, waiting, deadline)
        self._channel.park(request.slot, deadline)
        self._purgatory.watch(operation)
        for log, _ in waiting.values():
            self._group_commit.want(log)

    def park_plain(
        self,
        slot: int,
        needed: Sequence[tuple[PartitionLog, int]],
        answer_bytes: int,
        /,
        *,
        at_once: bool = False,
    ) -> None:
        """Hold an answer back that the core has written: until it is on disk.

        Args:
            needed: of each partition of the request, in its order, the log and the
                offset below which all must be on disk.
            at_once: its client has nothing else under way.
        """
        deadline = time.monotonic_ns() + _SYNC_DEADLINE_NS
        operation = DelayedPlainProduce(self, slot, needed, answer_bytes, deadline)
        if at_once or len(needed) > 1:  # as the usual way does
            self._group_commit.sync_at_once([log for log, _ in needed])
        for log, _ in needed:
            if operation.try_complete(log.row.index):
                return
        self._channel.park(slot, deadline)
        self._purgatory.watch(operation)

    def complete_plain(self, slot: int, answer_bytes: int) -> None:
        self._channel.unpark(slot)
        self._channel.send_written(slot, answer_bytes)

    def refuse_plain(
        self, slot: int, answer_bytes: int, failed: Mapping[int, str]
    ) -> None:
        """Answer what was appended and could not all be made durable.

        Args:
            failed: why, by the partition's place in the request.
        """
        request = self.request(slot)
        version = request.api_version
        written = self._channel.written(slot, answer_bytes)
        response = ProduceResponse.decode(version, written[len(request.frame(b"")) :])
        answers = [
            partition
            for topic in response.responses
            for partition in topic.partition_responses
        ]
        for ordinal, why in failed.items():
            refuse(answers[ordinal], ErrorCode.KAFKA_STORAGE_ERROR, why)
        body = response.encode(version)
        self._channel.unpark(slot)
        self._channel.send_bytes(slot, request.frame(body))

    def request(self, slot: int) -> Request:
        """A plain produce's request as all others are seen."""
        return parse_request(*self._channel.request(slot))

    def want_sync(self, log: PartitionLog) -> None:
        self._group_commit.want(log)

    def complete(self, operation: DelayedProduce) -> None:
        request = operation.request
        self._channel.unpark(request.slot)
        body = with_throttle(
            request, operation.outcome.response.encode(request.api_version)
        )
        self._channel.send_bytes(request.slot, request.frame(body))


class DelayedPlainProduce:
    """A produce that the core has appended; its answer is written, and waits."""

    may_end_early = False

    def __init__(
        self,
        service: ProduceService,
        slot: int,
        needed: Sequence[tuple[PartitionLog, int]],
        answer_bytes: int,
        deadline_ns: int,
    ) -> None:
        self._service = service
        self._slot = slot
        # Row -> the partition's place in the request; log, and what must be on disk.
        self._waiting = {
            log.row.index: (ordinal, log, offset)
            for ordinal, (log, offset) in enumerate(needed)
        }
        self._failed: dict[int, str] = {}
        self._answer_bytes = answer_bytes
        self.deadline_ns = deadline_ns
        self.done = False
        self.keys: Iterable[int] = [sync_key(index) for index in self._waiting]

    @property
    def request(self) -> Request:
        return self._service.request(self._slot)

    def try_complete(self, row: int) -> bool:
        wanted = self._waiting.get(row)
        if wanted is not None:
            ordinal, log, offset = wanted
            if log.row.durable_end_offset >= offset:
                del self._waiting[row]
            elif log.row.status != RowStatus.ONLINE:
                self._failed[ordinal] = _NOT_WRITTEN
                del self._waiting[row]
            else:
                self._service.want_sync(log)  # too late for the last one
        if self._waiting:
            return False
        self._complete()
        return True

    def expire(self) -> None:
        for ordinal, _, _ in self._waiting.values():
            self._failed[ordinal] = "the disk has not answered"
        self._complete()

    def _complete(self) -> None:
        service, slot, answer_bytes = self._service, self._slot, self._answer_bytes
        if self._failed:
            service.refuse_plain(slot, answer_bytes, self._failed)
        else:
            service.complete_plain(slot, answer_bytes)


class DelayedProduce:
    """A produce whose records are on their way to the disk."""

    may_end_early = False

    def __init__(
        self,
        service: ProduceService,
        request: Request,
        outcome: ProduceOutcome,
        waiting: dict[int, tuple[PartitionLog, int]],
        deadline_ns: int,
    ) -> None:
        self._service = service
        self.request = request
        self.outcome = outcome
        self.deadline_ns = deadline_ns
        self.done = False
        self._waiting = waiting
        self.keys: Iterable[int] = [sync_key(index) for index in waiting]

    def try_complete(self, row: int) -> bool:
        wanted = self._waiting.get(row)
        if wanted is not None:
            log, offset = wanted
            if log.row.durable_end_offset >= offset:
                del self._waiting[row]
            elif log.row.status != RowStatus.ONLINE:
                self._fail(row, _NOT_WRITTEN)
                del self._waiting[row]
            else:
                self._service.want_sync(log)  # too late for the last one
        if self._waiting:
            return False
        self._service.complete(self)
        return True

    def expire(self) -> None:
        for row in self._waiting:
            self._fail(row, "the disk has not answered")
        self._service.complete(self)

    def _fail(self, row: int, why: str) -> None:
        self.outcome.fail(row, ErrorCode.KAFKA_STORAGE_ERROR, why)

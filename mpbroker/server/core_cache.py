"""Teach the compiled core which requests it may execute by itself.

Most requests of a busy broker are a Produce of plain batches, a Fetch of what has just
been produced, or an ApiVersions that was answered before. The core
(native/server/handler_execute.c) executes these without any Python, by the tables that
``CoreCache`` fills and empties. It leaves a request to Python if it is not exactly
that, if it has no entry for it, or if the metadata log has news. Requests for the
coordinator it forwards, news or not: the coordinator checks them and charges for them.

If you add something that each request must pass, see to it here. The tables of
permissions (verdicts.py) and of quotas (client_quotas.py) are kept beside this one.

handler_role.py makes the cache, once a handler process. The loop asks it to execute
each request, and shows it each that Python has executed. The services of Produce and
Fetch tell it what they have just written or read, and how they park. Where there is no
core, or where it may not be used, ``NoCoreCache`` takes all that and executes nothing.

The tests of tests/server/core_cache compare the core's answers with those of Python.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from mpbroker.ipc.compiled import core
from mpbroker.ipc.layout import CELL_END, METADATA_CELL, cell, handler_row
from mpbroker.protocol.api_key import ApiKey
from mpbroker.storage.files.log_segment import LogSegment
from mpbroker.storage.files.offset_index import OffsetIndex
from mpbroker.storage.files.time_index import TimeIndex
from mpbroker.storage.log.core_plans import AppendPlan, ReadPlan
from mpbroker.storage.producers.producer_state import (
    AppendedBatch,
    ProducerEntry,
    ProducerState,
)

if TYPE_CHECKING:
    from mpbroker.ipc.lane import CoordinatorLane
    from mpbroker.ipc.tables.partition_table import PartitionTable
    from mpbroker.metadata.topics import Topic, TopicRegistry
    from mpbroker.native import _core
    from mpbroker.network.request_channel import HandlerEnd
    from mpbroker.protocol.acl import AclOperation
    from mpbroker.protocol.records.log_validator import ValidationPolicy
    from mpbroker.server.authorization.authorization import Access, Authorization
    from mpbroker.server.authorization.verdicts import Verdicts
    from mpbroker.server.produce_transactions import ProduceTransactions
    from mpbroker.server.purgatory import Purgatory
    from mpbroker.server.quotas.client_quotas import ClientQuotas
    from mpbroker.server.request import Request
    from mpbroker.storage.log.partition_log import PartitionLog


class ParkProduce(Protocol):
    """Hold back the answer to a Produce that the core has executed."""

    def __call__(
        self,
        slot: int,
        needed: Sequence[tuple[PartitionLog, int]],
        answer_bytes: int,
        /,
        *,
        at_once: bool,
    ) -> None:
        """Args:
        needed: each log, in the order of the request, with the offset below which
            all must be on disk.
        answer_bytes: length of the answer, which the core has written.
        at_once: its client has nothing else under way.
        """


class ParkFetches(Protocol):
    """Keep the fetches for which the core has found too little."""

    def park(self, slot: int, max_wait_ms: int, rows: tuple[int, ...], /) -> None:
        """Keep one until one of these partition rows grows."""

    def was_answered(self, slot: int, /) -> None:
        """Forget one: the core has answered it, with what it has appended."""


class Forwarding(NamedTuple):
    """What the core hands to the coordinator.

    Attributes:
        lane: where it goes.
        apis: oldest, newest and first flexible version of each, by API key. Nothing
            may have to be done to these requests here but to read the header.
    """

    lane: CoordinatorLane
    apis: dict[int, tuple[int, int, int]]


_PRODUCE: Final = int(ApiKey.PRODUCE)
_FETCH: Final = int(ApiKey.FETCH)
_API_VERSIONS: Final = int(ApiKey.API_VERSIONS)
# Clients are of few kinds, and their ApiVersions requests are short.
_MAX_REMEMBERED: Final = 100
_MAX_REMEMBERED_BYTES: Final = 500
_MAX_TOPICS: Final = 10_000
_MAX_CLIENTS: Final = 10_000
# What execute() adds to an API's key, or returns in its place; without a core it is not
# called.
if core is not None:
    _NOTIFY: Final[int] = core.RESULT_NOTIFY
    _WAITS: Final[int] = core.RESULT_WAITS
    _AT_ONCE: Final[int] = core.RESULT_AT_ONCE
    _BEGINS: Final[int] = core.RESULT_BEGINS
    _API_KEY: Final[int] = core.RESULT_API_KEY
    _HELD: Final[int] = core.ROW_IS_HELD


class Woken(NamedTuple):
    """What the core has done when it woke up."""

    slots: list[int]  # claimed
    at_ns: int
    has_executed: bool  # the one slot that there is
    result: int | None  # of that, for ``CoreCache.finish``
    fetched: list[int]  # parked slots that are answered, and forgotten


# Sleeps for so many seconds, and then claims so many slots at most.
Wait = Callable[[float, int], Woken]


class NoCoreCache:
    """Stands where no compiled core executes requests: learns and executes nothing."""

    def __init__(self) -> None:
        self.waiting: dict[int, int] = {}

    def execute(self, slot: int) -> int | None:
        return None

    def finish(self, slot: int, result: int | None) -> int | None:
        return None

    def wait_at(self, epoll_fd: int, channel: HandlerEnd, handler: int) -> Wait | None:
        return None

    def execute_produces(self, park: ParkProduce | None) -> None:
        pass

    def execute_fetches(
        self, handler: int, max_bytes: int, parked: ParkFetches
    ) -> None:
        pass

    def try_fetch(self, slot: int, *, must_answer: bool) -> bool | None:
        return None

    def learn_request(
        self, request: Request, frame: memoryview, answer: object
    ) -> None:
        pass

    def learn_produce(
        self, topic: Topic, partition: int, log: PartitionLog, policy: ValidationPolicy
    ) -> None:
        pass

    def learn_fetch(
        self, name: str, topic_id: bytes, partition: int, log: PartitionLog
    ) -> None:
        pass

    def allow(
        self,
        access: Access | None,
        operation: AclOperation,
        name: str,
        topic_id: bytes | None = None,
    ) -> None:
        pass


class CoreCache:
    """The tables of one handler process, and what Python does after the core.

    Args:
        compiled: the core's part of the handler, which holds the tables.
        table: the partitions' rows.
        registry: says which topics there are, and when metadata has changed.
        purgatory: told of rows that have grown.
        authorization: says who may do what; None: every sender may do everything.
        quotas: charge clients for what the core executes; None: nothing is charged.
        transactions: None, or not verified: Python executes every Produce of one.
        forwarding: what the core hands to the coordinator; None: nothing.
    """

    def __init__(
        self,
        compiled: _core.HandlerEnd,
        table: PartitionTable,
        registry: TopicRegistry,
        purgatory: Purgatory,
        authorization: Authorization | None = None,
        quotas: ClientQuotas | None = None,
        transactions: ProduceTransactions | None = None,
        forwarding: Forwarding | None = None,
    ) -> None:
        self._compiled = compiled
        self._execute = compiled.execute
        self._table = table
        self._registry = registry
        self._purgatory = purgatory
        self._verdicts: Verdicts | None = None
        self._has_own_rules = False  # which change without a word in the metadata log
        if authorization is not None:
            from mpbroker.server.authorization.verdicts import (
                Verdicts,  # most brokers need none
            )

            self._verdicts = Verdicts(compiled, authorization)
            self._has_own_rules = self._verdicts.change_any_time
        self._quotas = quotas
        self._park: ParkProduce | None = None
        self._forward: Callable[[int], None] | None = None
        self._parked_fetches: ParkFetches | None = None
        self._logs: dict[int, PartitionLog] = {}  # of the plans, by partition row
        compiled.set_tables(
            table.segment.view,
            cell(METADATA_CELL) + CELL_END,
            AppendPlan,
            LogSegment,
            OffsetIndex,
            TimeIndex,
        )
        compiled.set_producers(AppendPlan, ProducerState, ProducerEntry, AppendedBatch)
        if quotas is not None:
            compiled.set_quotas(*quotas.table)
        if transactions is not None and transactions.verify:
            # The core executes a Produce of an open transaction, and returns _BEGINS
            # for one that the coordinator has to open first.
            self._forward = transactions.forward
            compiled.set_transactions(*transactions.table.place)
        if forwarding is not None and forwarding.lane.compiled is not None:
            compiled.set_lane(forwarding.lane.compiled, forwarding.apis)

    # -- executing ---------------------------------------------------------------------

    def execute(self, slot: int) -> int | None:
        """Answer a claimed slot's request and return its API key; None: not plain."""
        if self._has_own_rules:
            self._see_rules()
        result = self._execute(slot)
        if result is None or 0 <= result < _NOTIFY:
            return result
        return self.finish(slot, result)

    def wait_at(self, epoll_fd: int, channel: HandlerEnd, handler: int) -> Wait | None:
        """Let the core wait for events; return what waits, or None if it cannot.

        Args:
            epoll_fd: what it waits at.
            channel: requests come from its ring.
            handler: this process's id.
        """
        ring = channel.compiled_ring
        if ring is None:
            return None
        self._compiled.set_wait(epoll_fd, ring, handler, handler_row(handler))
        return self.wait

    def wait(self, timeout_s: float, limit: int) -> Woken:
        """Sleep, then claim slots; a single one's request may have been executed."""
        timeout_ms, may_execute = math.ceil(timeout_s * 1e3), not self._has_own_rules
        woken = Woken(*self._compiled.wait(timeout_ms, limit, may_execute))
        for slot in woken.fetched:
            assert self._parked_fetches is not None
            self._parked_fetches.was_answered(slot)
        return woken

    def finish(self, slot: int, result: int | None) -> int | None:
        """Do what is left of a request that the core has executed; return its API key.

        None: it is not executed after all, and Python must.
        """
        if result is None or 0 <= result < _NOTIFY:
            return result
        if result == _WAITS | _FETCH:
            assert self._parked_fetches is not None
            self._parked_fetches.park(slot, *self._compiled.fetch_waits())
            return _FETCH
        compiled = self._compiled
        if result == _BEGINS | _PRODUCE:
            assert self._forward is not None
            self._forward(slot)
            return _PRODUCE
        if result == _HELD:
            # The lock's last owner died, or the write failed. The core still holds the
            # lock: settle the row first. Then Python executes the request, and finds
            # what error there is to answer.
            self._table.row(compiled.row).settle_and_unlock()
            return None
        appended = compiled.appended()
        if result & _NOTIFY:
            for row, _, waiters in appended:
                if waiters:
                    self._purgatory.notify(row, waiters)
        if result & _WAITS:
            park, logs = self._park, self._logs
            assert park is not None
            needed = [(logs[row], next_offset) for row, next_offset, _ in appended]
            at_once = bool(result & _AT_ONCE)
            park(slot, needed, compiled.answer_bytes, at_once=at_once)
        return result & _API_KEY

    def execute_produces(self, park: ParkProduce | None) -> None:
        """Execute produces.

        Args:
            park: holds the answers to acks=all back; None: they need not wait.
        """
        self._park = park
        self._compiled.syncs_acks_all = park is not None

    def execute_fetches(
        self, handler: int, max_bytes: int, parked: ParkFetches
    ) -> None:
        """Execute fetches.

        Args:
            handler: this process's id.
            max_bytes: fetch.max.bytes.
            parked: keeps those that find too little.
        """
        self._parked_fetches = parked
        self._compiled.set_fetches(ReadPlan, LogSegment, handler, max_bytes)

    @property
    def waiting(self) -> dict[int, int]:
        """The parked fetch that the core answers first: a slot, by its partition rows.

        It must be taken out when it is parked no more.
        """
        return self._compiled.waiting

    def try_fetch(self, slot: int, *, must_answer: bool) -> bool | None:
        """Answer a parked fetch; False: it waits on; None: it is not plain any more."""
        if self._has_own_rules:
            self._see_rules()
        return self._compiled.fetch(slot, must_answer)

    # -- learning ----------------------------------------------------------------------

    def learn_request(
        self, request: Request, frame: memoryview, answer: object
    ) -> None:
        """Learn from a request that Python has executed.

        Call this before the answer is sent: until then the slot names the client, and
        the frame is whole.
        """
        quotas = self._quotas
        if quotas is not None and quotas.count_requests:
            self._learn_client(request, quotas)
        if request.api_key == _API_VERSIONS:
            self._remember(request, frame, answer)

    def _learn_client(self, request: Request, quotas: ClientQuotas) -> None:
        """Let the core charge a client for its next requests."""
        self._be_current()
        clients = self._compiled.clients
        if len(clients) >= _MAX_CLIENTS:
            clients.clear()
        key = quotas.client_key(request)
        if key is not None:
            clients[key] = quotas.limits(key, request.client_id)

    def _remember(self, request: Request, frame: memoryview, answer: object) -> None:
        """Let the core answer the next ApiVersions that is the same."""
        if (
            len(frame) > _MAX_REMEMBERED_BYTES
            or not isinstance(answer, bytes)
            or answer[:2] != b"\0\0"  # it says an error
            or request.throttle_ms
        ):
            return
        self._be_current()
        remembered = self._compiled.remembered
        if len(remembered) >= _MAX_REMEMBERED:
            remembered.clear()
        # All but the correlation id.
        remembered[bytes(frame[:4]) + bytes(frame[8:])] = answer

    def learn_produce(
        self, topic: Topic, partition: int, log: PartitionLog, policy: ValidationPolicy
    ) -> None:
        """Let the core execute the next plain produces to this partition."""
        if self._registry.topic(topic.name) is not topic:
            return
        self._be_current()
        topics = self._compiled.topics
        known = topics.get(topic.name)
        if known is None:
            if (
                policy.timestamp_type != "CreateTime"
                or policy.compression_type != "producer"
                or policy.compacted
                or not policy.verify_records
            ):
                return
            if len(topics) >= 2 * _MAX_TOPICS:
                self._forget()
            known = topics[topic.name] = topics[topic.topic_id] = (
                policy.max_message_bytes,
                policy.before_max_ms,
                policy.after_max_ms,
                {},
            )
        plan = log.append_plan()
        if plan is not None and log.view.config is topic.config:
            known[3][partition] = plan
            self._logs[plan.row] = log

    def allow(
        self,
        access: Access | None,
        operation: AclOperation,
        name: str,
        topic_id: bytes | None = None,
    ) -> None:
        """Let the core execute a sender's next requests that do this."""
        if self._verdicts is not None and access is not None:
            self._verdicts.allow(access, operation, name, topic_id)

    def learn_fetch(
        self, name: str, topic_id: bytes, partition: int, log: PartitionLog
    ) -> None:
        """Let the core execute the next plain fetches from this partition."""
        topic = self._registry.topic(name)
        if topic is None or topic.topic_id != topic_id:
            return
        if self._quotas is not None and self._quotas.limit_fetches:
            return  # Python charges a fetch while it makes the answer
        self._be_current()
        readable = self._compiled.readable
        plans = readable.get(name)
        if plans is None:
            if len(readable) >= 2 * _MAX_TOPICS:
                self._forget()
            plans = readable[name] = readable[topic_id] = {}
        plans[partition] = log.reader.plan()

    def _be_current(self) -> None:
        """Forget what was learnt before the last change of metadata.

        The core uses its tables only while ``position`` is that of the metadata log. So
        it is stored last: an error in between leaves the tables unused.
        """
        version = self._registry.version
        if self._compiled.position != version:
            self._forget()
            self._see_rules()
            quotas = self._quotas
            self._compiled.has_quotas = quotas is not None and quotas.count_requests
            self._compiled.position = version

    def _see_rules(self) -> None:
        if self._verdicts is not None:
            self._verdicts.be_current()

    def _forget(self) -> None:
        self._compiled.topics.clear()
        self._compiled.readable.clear()
        self._compiled.remembered.clear()
        self._compiled.clients.clear()
        self._logs.clear()

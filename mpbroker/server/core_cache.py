"""The short cut for requests that are all alike, where the compiled core is.

Most of what a busy broker is asked is a Produce of plain batches, a Fetch of what has
just been produced, and an ApiVersions that it has answered before. The core
(native/server/handler_execute.c) executes these without any Python, by the tables kept
here; it leaves to the usual way whatever is not exactly that, whatever it has no entry
for, and all of it while the metadata log has news. What is the coordinator's it hands
on, news or not: who may, and what it costs, is asked where it is executed. So who adds
to the usual way something that a request must pass has to see to it here. Who may do
what (verdicts.py) and what is charged (quotas.py) are tables of their own.

The tests of tests/server/core_cache hold both ways against each other.
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
    from mpbroker.ipc.tables.transaction_table import TransactionTable
    from mpbroker.metadata.topics import Topic, TopicRegistry
    from mpbroker.native import _core
    from mpbroker.network.request_channel import HandlerEnd
    from mpbroker.protocol.acl import AclOperation
    from mpbroker.protocol.records.log_validator import ValidationPolicy
    from mpbroker.server.authorization.authorization import Access, Authorization
    from mpbroker.server.authorization.verdicts import Verdicts
    from mpbroker.server.purgatory import Purgatory
    from mpbroker.server.quotas.client_quotas import ClientQuotas
    from mpbroker.server.request import Request
    from mpbroker.storage.log.partition_log import PartitionLog


class ParkProduce(Protocol):
    """Holds the answer to a Produce back."""

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
        answer_bytes: of the written answer.
        at_once: its client has nothing else under way.
        """


# Slot, how long it wants to wait in ms, the partition rows that it waits for.
ParkFetch = Callable[[int, int, tuple[int, ...]], None]

_PRODUCE: Final = int(ApiKey.PRODUCE)
_FETCH: Final = int(ApiKey.FETCH)
_API_VERSIONS: Final = int(ApiKey.API_VERSIONS)
# Clients are of few kinds, and say little about themselves.
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
    result: int | None  # of that, for ``PlainRequests.finish``
    fetched: list[int]  # parked slots that are answered, and forgotten


class PlainRequests:
    """The tables of one handler process, and what is left to do after the short cut."""

    def __init__(
        self,
        compiled: _core.HandlerEnd,
        table: PartitionTable,
        registry: TopicRegistry,
        purgatory: Purgatory,
        authorization: Authorization | None = None,
    ) -> None:
        self._verdicts: Verdicts | None = None
        self._has_own_rules = False  # which change without a word in the metadata log
        if authorization is not None:
            from mpbroker.server.authorization.verdicts import (
                Verdicts,  # most brokers need none
            )

            self._verdicts = Verdicts(compiled, authorization)
            self._has_own_rules = self._verdicts.change_any_time
        self._compiled = compiled
        self._execute = compiled.execute
        self._table = table
        self._registry = registry
        self._purgatory = purgatory
        self._park: ParkProduce | None = None
        self._forward: Callable[[int], None] | None = None
        self._quotas: ClientQuotas | None = None
        self._park_fetch: ParkFetch | None = None
        self._forget_fetch: Callable[[int], None] | None = None
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

    @classmethod
    def of(
        cls,
        channel: HandlerEnd,
        table: PartitionTable,
        registry: TopicRegistry,
        purgatory: Purgatory,
        authorization: Authorization | None = None,
    ) -> PlainRequests | None:
        """Return None where there is no compiled core.

        Args:
            authorization: says who may do what; None: everybody everything.
        """
        if channel.compiled is None:
            return None
        return cls(channel.compiled, table, registry, purgatory, authorization)

    def execute(self, slot: int) -> int | None:
        """Answer a claimed slot's request and return its API's key; None: not plain."""
        if self._has_own_rules:
            self._see_rules()
        result = self._execute(slot)
        if result is None or 0 <= result < _NOTIFY:
            return result
        return self.finish(slot, result)

    def wait(self, timeout_s: float, limit: int) -> Woken:
        """Sleep, then claim slots; a single one's request may have been executed."""
        timeout_ms, may_execute = math.ceil(timeout_s * 1e3), not self._has_own_rules
        woken = Woken(*self._compiled.wait(timeout_ms, limit, may_execute))
        for slot in woken.fetched:
            assert self._forget_fetch is not None
            self._forget_fetch(slot)
        return woken

    def finish(self, slot: int, result: int | None) -> int | None:
        """See to what is left of a request that the core has executed."""
        if result is None or 0 <= result < _NOTIFY:
            return result
        if result == _WAITS | _FETCH:
            assert self._park_fetch is not None
            self._park_fetch(slot, *self._compiled.fetch_waits())
            return _FETCH
        compiled = self._compiled
        if result == _BEGINS | _PRODUCE:
            assert self._forward is not None
            self._forward(slot)
            return _PRODUCE
        if result == _HELD:
            # The lock's last owner died, or the write failed: the usual way finds out
            # what there is to say about it.
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

    def wait_at(self, epoll_fd: int, channel: HandlerEnd, handler: int) -> bool:
        """Say where ``wait`` waits; return whether it can.

        Args:
            handler: this process's id.
        """
        ring = channel.compiled_ring
        if ring is None:
            return False
        self._compiled.set_wait(epoll_fd, ring, handler, handler_row(handler))
        return True

    def park_produces(self, park: ParkProduce | None) -> None:
        """Let ``park`` hold the answers to acks=all back; None: they need not wait."""
        self._park = park
        self._compiled.syncs_acks_all = park is not None

    def take_transactions(
        self, table: TransactionTable, forward: Callable[[int], None]
    ) -> None:
        """Execute produces of transactions, too, where they must be open for that.

        Args:
            forward: hands a slot to the coordinator, which opens.
        """
        self._forward = forward
        self._compiled.set_transactions(*table.place)

    def take_lane(
        self, lane: CoordinatorLane, apis: dict[int, tuple[int, int, int]]
    ) -> None:
        """Hand the coordinator's requests on, too, which needs none of the tables.

        Args:
            apis: oldest, newest and first flexible version of each, by API key. Nothing
                may have to be done to their requests here but to read the header.
        """
        if lane.compiled is not None:
            self._compiled.set_lane(lane.compiled, apis)

    def take_fetches(
        self,
        handler: int,
        max_bytes: int,
        park: ParkFetch,
        forget: Callable[[int], None],
    ) -> None:
        """Execute fetches, too.

        Args:
            handler: this process's id.
            max_bytes: fetch.max.bytes.
            park: sees to a fetch that finds too little.
            forget: told of the slots of those that the core has answered by itself.
        """
        self._park_fetch, self._forget_fetch = park, forget
        self._compiled.set_fetches(ReadPlan, LogSegment, handler, max_bytes)

    @property
    def waiting(self) -> dict[int, int]:
        """Which slot's plain fetch, of those parked, to answer first: by its rows.

        What is parked no more has to be taken out.
        """
        return self._compiled.waiting

    def try_fetch(self, slot: int, *, must_answer: bool) -> bool | None:
        """Answer a parked fetch; False: it waits on; None: it is not plain any more."""
        if self._has_own_rules:
            self._see_rules()
        return self._compiled.fetch(slot, must_answer)

    def remember(self, request: Request, frame: memoryview, body: bytes) -> None:
        """Answer the next ApiVersions with the same bytes in the same way."""
        if (
            request.api_key != _API_VERSIONS
            or len(frame) > _MAX_REMEMBERED_BYTES
            or body[:2] != b"\0\0"
        ):
            return
        self._be_current()
        remembered = self._compiled.remembered
        if len(remembered) >= _MAX_REMEMBERED:
            remembered.clear()
        # All but the correlation id.
        remembered[bytes(frame[:4]) + bytes(frame[8:])] = body

    def learn(
        self, topic: Topic, partition: int, log: PartitionLog, policy: ValidationPolicy
    ) -> None:
        """Execute the next plain produces to this partition the short way."""
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
        """Execute the next of a sender's requests that do this the short way."""
        if self._verdicts is not None and access is not None:
            self._verdicts.allow(access, operation, name, topic_id)

    def take_quotas(self, quotas: ClientQuotas) -> None:
        """Charge clients for what is executed here. Who would be over is not plain."""
        self._quotas = quotas
        self._compiled.set_quotas(*quotas.table)

    @property
    def _limits_fetches(self) -> bool:
        return self._quotas is not None and self._quotas.limit_fetches

    def learn_client(self, request: Request) -> None:
        """Charge the next plain requests of a request's client the short way."""
        quotas = self._quotas
        if quotas is None or not quotas.count_requests:
            return
        self._be_current()
        clients = self._compiled.clients
        if len(clients) >= _MAX_CLIENTS:
            clients.clear()
        key = quotas.client_key(request)
        if key is not None:
            clients[key] = quotas.limits(key, request.client_id)

    def learn_fetch(
        self, name: str, topic_id: bytes, partition: int, log: PartitionLog
    ) -> None:
        """Execute the next plain fetches from this partition the short way."""
        topic = self._registry.topic(name)
        if topic is None or topic.topic_id != topic_id or self._limits_fetches:
            return
        self._be_current()
        readable = self._compiled.readable
        plans = readable.get(name)
        if plans is None:
            if len(readable) >= 2 * _MAX_TOPICS:
                self._forget()
            plans = readable[name] = readable[topic_id] = {}
        plans[partition] = log.reader.plan()

    def _be_current(self) -> None:
        """Forget what was learnt before the metadata last changed."""
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

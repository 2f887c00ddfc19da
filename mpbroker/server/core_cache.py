"""Tell the compiled core (C code) which requests it may execute by itself.

Most requests of a busy broker are a Produce of plain batches, a Fetch of what has just
been produced, or equal to one that was answered before (repeated/). The core
(native/server/handler_execute.c) executes these without any Python, by the tables that
``CoreCache`` fills and empties. It leaves all other requests to Python. It also leaves
a request to Python if its tables have no entry for it, or if the metadata log has new
records. There is one exception: it forwards requests for the coordinator even if the
metadata log has new records, since the coordinator checks and charges them itself.

If you add something that each request must pass, see to it in this module. The tables
of permissions (verdicts.py) and of quotas (client_quotas.py) are kept beside this one.

handler_role.py makes one cache in each handler process. The loop asks the cache to
execute each request, and shows it each request that Python has executed. The services
of Produce and Fetch tell it what they have just written or read, and how they park.
Without a core, or if the core may not be used, ``NoCoreCache`` takes these calls and
does nothing.

The tests of tests/server/core_cache compare the core's answers with those of Python.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.ipc.compiled import core
from mpbroker.ipc.layout import CELL_END, METADATA_CELL, cell, handler_row
from mpbroker.protocol.api_key import ApiKey
from mpbroker.server.repeated.repeated_answers import RepeatedAnswers
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
    from mpbroker.server.repeated.repeatable import Repeatable
    from mpbroker.server.request import Request
    from mpbroker.storage.log.partition_log import PartitionLog


class ParkProduce(Protocol):
    """Takes over a Produce whose records the compiled core has appended.

    The compiled core is C code that executes plain requests without Python. The client
    gets the answer when the records are on disk.
    """

    def __call__(
        self,
        slot: int,
        needed: Sequence[tuple[PartitionLog, int]],
        answer_bytes: int,
        /,
        *,
        at_once: bool,
    ) -> None:
        """Send the answer that C code has written, once the records are on disk.

        Args:
            slot: the request's slot, which is its entry in shared memory.
            needed: each log, in the order of the request, with the offset below which
                all records must be on disk.
            answer_bytes: length of the answer that the core has written.
            at_once: whether the client has no other request under way, so that the
                logs may be synced at once.
        """


class ParkFetches(Protocol):
    """Keeps fetches for which the compiled core (C code) has found too few records."""

    def park(self, slot: int, max_wait_ms: int, rows: tuple[int, ...], /) -> None:
        """Keep a fetch unanswered until one of its partitions gets more records.

        Args:
            slot: the fetch's slot, which is its entry in shared memory.
            max_wait_ms: the longest wait.
            rows: the indexes of the fetch's partitions in the shared partition table.
        """

    def was_answered(self, slot: int, /) -> None:
        """Forget a waiting fetch, because C code has answered it after an append."""


class Forwarding(NamedTuple):
    """Says which requests the core (C code) forwards undecoded to the coordinator.

    Attributes:
        lane: the ring in shared memory by which requests reach the coordinator process.
        apis: oldest, newest and first flexible version of each API, by API key. A
            handler needs to read only the header of these APIs' requests.
    """

    lane: CoordinatorLane
    apis: dict[int, tuple[int, int, int]]


_PRODUCE: Final = int(ApiKey.PRODUCE)
_FETCH: Final = int(ApiKey.FETCH)
_API_VERSIONS: Final = int(ApiKey.API_VERSIONS)
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
    """Holds what the core (C code) has done when its wait for events ends.

    Attributes:
        slots: the slots of the requests that it has claimed for this process.
        at_ns: when it woke up (CLOCK_MONOTONIC).
        has_executed: whether it has executed the request in the only claimed slot.
        result: the result of that request, for ``CoreCache.finish``.
        fetched: the slots of waiting fetches that it has answered and forgotten.
    """

    slots: list[int]
    at_ns: int
    has_executed: bool
    result: int | None
    fetched: list[int]


# Sleeps for so many seconds, and then claims so many slots at most.
Wait = Callable[[float, int], Woken]


class NoCoreCache:
    """Takes the place of `CoreCache` if no C code is used, and does nothing."""

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

    def learn_request(self, request: Request, answer: object) -> None:
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
    """Tells the compiled core what it may execute, and finishes what it has executed.

    The core is C code in the same handler process. Tables say for which clients, topics
    and partitions it may execute requests without Python.

    Args:
        compiled: the C object that has these tables.
        table: the shared table with a row for each partition.
        registry: says which topics there are, and when metadata has changed.
        purgatory: tells handlers with waiting fetches which partitions have grown.
        authorization: says who may do what; None: every sender may do everything.
        quotas: charge clients for what the core executes; None: nothing is charged.
        transactions: finds open transactions. If it is None, or does not verify them,
            Python executes every Produce of a transaction.
        forwarding: what the core forwards to the coordinator; None: nothing.
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
        self._answers = RepeatedAnswers(compiled)
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
        """Let the C core execute a request that this process has claimed.

        Returns:
            The API key. None if the core cannot execute the request; then Python must.
        """
        if self._has_own_rules:
            self._see_rules()
        result = self._execute(slot)
        if result is None or 0 <= result < _NOTIFY:
            return result
        return self.finish(slot, result)

    def wait_at(self, epoll_fd: int, channel: HandlerEnd, handler: int) -> Wait | None:
        """Prepare the C core to wait for events in place of Python's epoll.

        Args:
            epoll_fd: the epoll set to wait at.
            channel: has the ring (a queue in shared memory) from which requests come.
            handler: this process's id.

        Returns:
            The function to call in order to wait. None if the core cannot wait, because
            there is no compiled ring.
        """
        ring = channel.compiled_ring
        if ring is None:
            return None
        self._compiled.set_wait(epoll_fd, ring, handler, handler_row(handler))
        return self.wait

    def wait(self, timeout_s: float, limit: int) -> Woken:
        """Wait for events, then claim waiting requests; return what C code has done.

        If there is a single request, the core may have executed it already.

        Args:
            timeout_s: the longest wait, in seconds.
            limit: how many requests to claim at most.
        """
        timeout_ms, may_execute = math.ceil(timeout_s * 1e3), not self._has_own_rules
        woken = Woken(*self._compiled.wait(timeout_ms, limit, may_execute))
        for slot in woken.fetched:
            assert self._parked_fetches is not None
            self._parked_fetches.was_answered(slot)
        return woken

    def finish(self, slot: int, result: int | None) -> int | None:
        """Do in Python what is left of a request after the C core has looked at it.

        According to the result, tell waiting handlers that logs have grown, keep the
        request until its records are on disk or its data is there, or forward it.

        Args:
            slot: the request's slot, which is its entry in shared memory.
            result: what the core has returned for the request.

        Returns:
            The API key. None if the core has not executed the request; then Python
            must.
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
        """Let the C core, instead of Python, execute Produce requests from now on.

        Args:
            park: holds answers to acks=all back until the records are on disk; None:
                these answers need not wait.
        """
        self._park = park
        self._compiled.syncs_acks_all = park is not None

    def execute_fetches(
        self, handler: int, max_bytes: int, parked: ParkFetches
    ) -> None:
        """Let the C core, instead of Python, execute Fetch requests from now on.

        Args:
            handler: this process's id.
            max_bytes: fetch.max.bytes.
            parked: keeps the fetches that find less than min.bytes.
        """
        self._parked_fetches = parked
        self._compiled.set_fetches(ReadPlan, LogSegment, handler, max_bytes)

    @property
    def waiting(self) -> dict[int, int]:
        """The slot of the fetch that waits for a partition, by the partition's row.

        A slot is a request's place in shared memory, a row that of a partition. The
        core (C code) answers the fetch right after it has appended to the partition.
        The caller adds an entry, and removes it when the fetch is not parked any more.
        """
        return self._compiled.waiting

    def try_fetch(self, slot: int, *, must_answer: bool) -> bool | None:
        """Let the C core read a waiting fetch again, and answer it if there is enough.

        Args:
            slot: the fetch's slot, which is its entry in shared memory.
            must_answer: answer also if there is less than min.bytes.

        Returns:
            True if the fetch is answered, False if it still waits. None if the core
            cannot execute it any more; then Python must.
        """
        if self._has_own_rules:
            self._see_rules()
        return self._compiled.fetch(slot, must_answer)

    # -- learning ----------------------------------------------------------------------

    def learn_request(self, request: Request, answer: object) -> None:
        """Learn from a request that Python has executed what the C core may do next.

        It learns the client, so that it can charge it, and the answer, if it may be
        repeated. To be called before the answer is sent: until then the slot names the
        client, and the request in it is whole.

        Args:
            request: the request.
            answer: the answer that Python has made.
        """
        quotas = self._quotas
        if quotas is not None and quotas.count_requests:
            self._learn_client(request, quotas)
        if request.repeatable is not None or request.api_key == _API_VERSIONS:
            self._learn_answer(request, answer)

    def _learn_client(self, request: Request, quotas: ClientQuotas) -> None:
        """Enter a client and its quotas, so that the C core can charge its requests."""
        self._be_current()
        clients = self._compiled.clients
        if len(clients) >= _MAX_CLIENTS:
            clients.clear()
        key = quotas.client_key(request)
        if key is not None:
            clients[key] = quotas.limits(key, request.client_id)

    def _learn_answer(self, request: Request, answer: object) -> None:
        """Let the C core give the same answer to each equal request, if it may.

        Do nothing if the answer is an error or the request was throttled.
        """
        repeatable = request.repeatable
        if not isinstance(answer, bytes) or request.throttle_ms:
            return
        if request.api_key == _API_VERSIONS:
            if answer[:2] != b"\0\0":
                return  # the answer is an error
        elif repeatable is None or not self._still_holds(repeatable):
            return
        self._be_current()
        self._answers.add(request, answer, repeatable)

    def _still_holds(self, repeatable: Repeatable) -> bool:
        """Return whether all that an answer depends on is as it was before."""
        if repeatable.metadata_version != self._registry.version:
            return False
        if repeatable.offline_changes != self._table.offline_changes:
            return False
        return self._verdicts is None or self._verdicts.are_of(repeatable.rules)

    def learn_produce(
        self, topic: Topic, partition: int, log: PartitionLog, policy: ValidationPolicy
    ) -> None:
        """Let the C core, instead of Python, append the next batches to a partition.

        Do nothing if the topic's settings need Python: compaction, recompression or
        LogAppendTime, for example.
        """
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
        """Let the C core execute a sender's next requests to write or read a topic.

        Args:
            access: the sender, who has just been allowed to. None: there is no
                authorizer, and nothing is done.
            operation: WRITE or READ.
            name: the topic's name.
            topic_id: the topic's id, if the sender may also use that.
        """
        if self._verdicts is not None and access is not None:
            self._verdicts.allow(access, operation, name, topic_id)

    def learn_fetch(
        self, name: str, topic_id: bytes, partition: int, log: PartitionLog
    ) -> None:
        """Let the C core, instead of Python, read a partition for the next fetches.

        Do nothing if a quota limits fetches, because only Python charges them.
        """
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
        """Empty the C core's tables if metadata has changed since they were filled.

        They are also emptied if partitions went offline. The core uses its tables only
        while their ``position`` is that of the metadata log, and ``offline_changes`` is
        that of shared memory. The position is stored last, so an error in between
        leaves the tables unused.
        """
        version, compiled = self._registry.version, self._compiled
        offline_changes = self._table.offline_changes
        if (compiled.position, compiled.offline_changes) != (version, offline_changes):
            self._forget()
            self._see_rules()
            quotas = self._quotas
            compiled.has_quotas = quotas is not None and quotas.count_requests
            compiled.offline_changes = offline_changes
            compiled.position = version

    def _see_rules(self) -> None:
        if self._verdicts is not None:
            self._verdicts.be_current()

    def _forget(self) -> None:
        self._compiled.topics.clear()
        self._compiled.readable.clear()
        self._compiled.repeatable.clear()
        self._compiled.clients.clear()
        self._logs.clear()

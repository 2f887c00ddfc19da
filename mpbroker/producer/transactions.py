"""TransactionManager: the state of a producer's transactions.

It decides which call is allowed in which state, and what an error does to the
transaction. Calls of the user come from any thread and add requests. The sender's
thread takes these one at a time, by priority (`TransactionDriver`). Each call waits for
an `Operation`.

In the second version of transactions the coordinator is not told of partitions and
groups beforehand: the leaders and the groups' coordinators tell it, when the first
records and offsets come. And each end of a transaction gives the producer another
epoch, so that a late request of the last one is refused.

Source: KIP-98, KIP-360 (raising the epoch after an error), KIP-447 (offsets by group
member), KIP-890 (abortable errors; part 2: the second version).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Final, NamedTuple, TypeVar

from mpbroker.client.cluster import TopicPartition
from mpbroker.client.group_metadata import GroupMetadata
from mpbroker.producer.batch import ProducerBatch
from mpbroker.producer.errors import (
    AbortableError,
    DeliveryTimeoutError,
    FatalError,
    ProducerError,
    TransactionAbortedError,
    TransactionStateError,
)
from mpbroker.producer.idempotence import Idempotence, Partition
from mpbroker.producer.latch import Latch
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.end_txn import EndTxnResponse
from mpbroker.protocol.messages.init_producer_id import (
    InitProducerIdRequest,
    InitProducerIdResponse,
)


class TransactionState(Enum):
    """The states of a transactional producer: `TRANSITIONS` has the allowed changes."""

    UNINITIALIZED = "not initialised"  # there is no producer id
    INITIALIZING = "initialising"  # the id is asked for, at first or after an abort
    READY = "ready"  # there is no transaction
    IN_TRANSACTION = "in a transaction"  # records may be sent
    COMMITTING = "committing"  # batches in flight are waited for; then EndTxn
    ABORTING = "aborting"  # likewise, but waiting batches are dropped
    PREPARED = "done: others end its transaction"  # no record is sent
    ABORTABLE_ERROR = "in a transaction that must be aborted"
    FATAL_ERROR = "of no use any more"


_S = TransactionState
_T = TypeVar("_T")

# The allowed changes of state: (from, to). A call that needs another one is refused.
TRANSITIONS: Final[frozenset[tuple[TransactionState, TransactionState]]] = frozenset(
    {
        (_S.UNINITIALIZED, _S.INITIALIZING),
        (_S.INITIALIZING, _S.READY),
        (_S.INITIALIZING, _S.UNINITIALIZED),
        (_S.READY, _S.IN_TRANSACTION),
        (_S.IN_TRANSACTION, _S.COMMITTING),
        (_S.IN_TRANSACTION, _S.ABORTING),
        (_S.IN_TRANSACTION, _S.PREPARED),
        (_S.IN_TRANSACTION, _S.ABORTABLE_ERROR),
        (_S.COMMITTING, _S.READY),
        (_S.COMMITTING, _S.ABORTABLE_ERROR),
        (_S.ABORTABLE_ERROR, _S.ABORTING),
        (_S.ABORTABLE_ERROR, _S.ABORTABLE_ERROR),
        (_S.ABORTING, _S.READY),
        (_S.ABORTING, _S.INITIALIZING),
        *((state, _S.FATAL_ERROR) for state in _S),
    }
)


class OffsetAndMetadata(NamedTuple):
    """An offset to commit for a partition.

    Attributes:
        offset: the offset of the next record to read.
        metadata: a text that the user gives, stored with the offset.
        leader_epoch: the leader epoch of the record before that one; -1: not known.
    """

    offset: int
    metadata: str = ""
    leader_epoch: int = -1


class PreparedTransaction(NamedTuple):
    """The ids and the epoch with which another client ends a prepared transaction."""

    transactional_id: str
    producer_id: int
    producer_epoch: int


Offsets = Mapping[TopicPartition, OffsetAndMetadata]


class Operation:
    """A call of the user that waits for coordinators, and its result.

    Attributes:
        what: the call, such as "commit_transaction()".
        trouble: the reason why it takes so long; a timeout's text ends with it.
        error: the error that it failed with; None while it runs, and if it succeeded.
        is_told: whether the user has got the result. If the wait timed out, the
            repeated call gets it.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.trouble = ""
        self.error: ProducerError | None = None
        self.is_told = False
        self._done = Latch()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def finish(self, error: ProducerError | None = None) -> None:
        """End the user's wait, with or without an error; only the first call counts."""
        if not self._done.is_set():
            self.error = error
            self._done.set()

    def wait(self, timeout_ms: float) -> None:
        """Wait until the operation has ended.

        Raises:
            DeliveryTimeoutError: it has not ended in time; the call may be repeated.
            ProducerError: the operation failed.
        """
        if not self._done.wait(min(timeout_ms / 1000, threading.TIMEOUT_MAX)):
            raise DeliveryTimeoutError(
                f"{self.what} is not answered after {timeout_ms:.0f} ms (max.block.ms)"
                f"{self.trouble}; call it again to go on waiting, or close the producer"
            )
        self.is_told = True
        if self.error is not None:
            raise self.error.with_traceback(None)


class Step(Enum):
    """The kinds of a transaction's requests; the lowest number is sent first."""

    INIT = 1
    ADD_PARTITIONS = 2
    ADD_OFFSETS = 3
    COMMIT_OFFSETS = 4
    END = 5
    BUMP = 6


class Pending(NamedTuple):
    """A request of a transaction that waits to be sent to a coordinator."""

    step: Step
    operation: Operation
    committed: bool = False
    offsets: Offsets | None = None
    group: GroupMetadata | None = None


class TransactionManager(Idempotence):
    """Holds the state of a producer's transactions, and queues their requests.

    Attributes:
        new_partitions: the partitions that the coordinator has yet to add to the
            transaction.
        adding: the partitions of the AddPartitionsToTxn request that is in flight.
        partitions: the partitions whose batches may be sent. In the first version, the
            coordinator has added them.
        number: how many transactions were begun, and so the number of the last one.
        has_begun_at_broker: whether the coordinator knows of the transaction, or may
            learn of it from a request that was sent.
        version: the version of the last transaction's protocol, 1 or 2.
    """

    def __init__(self, transactional_id: str, timeout_ms: int) -> None:
        super().__init__()
        self.transactional_id = transactional_id
        self.state = TransactionState.UNINITIALIZED
        self.error: ProducerError | None = None
        self.new_partitions: set[Partition] = set()
        self.adding: set[Partition] = set()
        self.partitions: set[Partition] = set()
        self.number = 0
        self.has_begun_at_broker = False
        self.version = 1
        # Partitions, and a group's offsets, that the coordinator may have added or not:
        # the response was lost, or told to try again.
        self._unsure: set[Partition] = set()
        self._unsure_offsets: Pending | None = None
        self._timeout_ms = timeout_ms
        self._lock = threading.RLock()
        self._pending: list[Pending] = []
        self._operation: Operation | None = None  # of the last call, if it is repeated
        self._operations: list[Operation] = []  # those that calls may wait for
        self._closed: ProducerError | None = None
        self._must_bump = False

    @property
    def is_transactional(self) -> bool:
        return True

    # -- calls of the user -------------------------------------------------------------

    def begin_init(self) -> Operation:
        """Queue the request for a producer id.

        The coordinator then aborts the open transaction of a predecessor.
        """
        with self._lock:
            if (last := self._untold("init_transactions()")) is not None:
                return last
            pending = Pending(Step.INIT, Operation("init_transactions()"))
            return self._enqueue(pending, _S.INITIALIZING)

    def begin(self, version: int = 1) -> None:
        """Open a transaction of the given version of the protocol, 1 or 2."""
        with self._lock:
            self._move(_S.IN_TRANSACTION, "begin_transaction()")
            self.version = version
            self.number += 1
            self._operation = None

    def add_offsets(self, offsets: Offsets, group: GroupMetadata) -> Operation:
        """Make a group's offsets part of the transaction."""
        with self._lock:
            self.check_open("send_offsets_to_transaction()")
            operation = Operation("send_offsets_to_transaction()")
            step = Step.ADD_OFFSETS if self.version == 1 else Step.COMMIT_OFFSETS
            return self._enqueue(Pending(step, operation, offsets=offsets, group=group))

    def prepare_end(self, has_incomplete: Callable[[], bool]) -> bool:
        """Prepare the transaction for another client, if all records are acknowledged.

        Closing this producer then leaves the transaction open.

        Returns:
            False if a record is not acknowledged yet; nothing is changed.
        """
        with self._lock:
            if has_incomplete():
                return False
            self._move(_S.PREPARED, "prepare_transaction()")
            return True

    def begin_commit(self) -> Operation:
        """Queue the commit, which is sent when all records are acknowledged."""
        return self._begin_end(_S.COMMITTING, "commit_transaction()")

    def begin_abort(self) -> Operation:
        """Queue the abort; records that were not sent fail."""
        return self._begin_end(_S.ABORTING, "abort_transaction()")

    def _begin_end(self, target: TransactionState, what: str) -> Operation:
        with self._lock:
            if (last := self._untold(what)) is not None:
                return last
            aborted = target is _S.ABORTING
            end = Pending(Step.END, Operation(what), committed=not aborted)
            self._enqueue(end, target)
            if aborted:
                # If this thread is interrupted here (Ctrl-C), the remaining requests
                # are sent before the end.
                error = TransactionAbortedError("the transaction was aborted")
                for pending in self._pending[:-1]:
                    pending.operation.finish(error)
                self._pending = [end]
                self.new_partitions.clear()
            return end.operation

    def _untold(self, what: str) -> Operation | None:
        """Return the last call's operation if the user repeats a call that timed out.

        Return None if that was another call, or if the user has got its result already.
        """
        last = self._operation
        return last if last and last.what == what and not last.is_told else None

    def check_open(self, what: str) -> int:
        """Return the number of the open transaction.

        Args:
            what: the call that needs the transaction; an error's text begins with it.

        Raises:
            AbortableError: the transaction has failed.
            FatalError: the producer cannot be used any more.
            TransactionStateError: no transaction is open.
        """
        if self.state is _S.IN_TRANSACTION:
            return self.number
        if self.state is _S.ABORTABLE_ERROR:
            raise AbortableError(
                f"{what}: the transaction has failed; call abort_transaction():"
                f" {self.error}",
                getattr(self.error, "error_code", None),
            )
        if self.state is _S.FATAL_ERROR:
            assert self.error is not None
            raise self.error.with_traceback(None)
        raise TransactionStateError(
            f"{what}: the producer is {self.state.value}, not in a transaction; call"
            " begin_transaction() first"
        )

    def _move(self, target: TransactionState, what: str) -> None:
        if (self.state, target) in TRANSITIONS:
            self.state = target
            return
        if self.state in (_S.ABORTABLE_ERROR, _S.FATAL_ERROR):
            self.check_open(what)
        hint = {
            _S.UNINITIALIZED: "; call init_transactions() first",
            _S.IN_TRANSACTION: "; commit or abort that first",
        }.get(self.state, "")
        raise TransactionStateError(
            f"{what} does not fit: the producer is {self.state.value}{hint}"
        )

    def append(self, number: int, partition: Partition, append: Callable[[], _T]) -> _T:
        """Append a record, and make its partition part of the transaction, in one step.

        Args:
            number: the number of the transaction that was open when send() was called.
                Another thread may have ended it and begun the next since.
            partition: the record's partition.
            append: appends the record.

        Raises:
            ProducerError: see `check_open`.
            TransactionStateError: the transaction of that number has ended.
        """
        with self._lock:
            if self.check_open("send()") != number:
                raise TransactionStateError(
                    "send(): its transaction was ended, by another thread, while it"
                    " waited"
                )
            if self.version > 1:
                self.partitions.add(partition)
            elif partition not in self.partitions and partition not in self.adding:
                self.new_partitions.add(partition)
            return append()

    def _enqueue(
        self, pending: Pending, target: TransactionState | None = None
    ) -> Operation:
        """Queue a request, and change the state to ``target`` if that is given.

        Raises:
            ProducerError: the call does not fit the state; nothing is changed.
        """
        operation = pending.operation
        if self._closed is not None:
            operation.finish(self._closed)
        waiting = [each for each in self._operations if not each.is_done]
        if target is not None:
            self._move(target, operation.what)
        # An exception of a signal handler (Ctrl-C) comes when a call begins, or after
        # it. From the new state on, only the last line has a call. Else there could be
        # a new state without its request, in which no call fits any more.
        self._operations = [*waiting, operation]
        self._operation = operation
        self._pending.append(pending)
        return operation

    def close(self, error: ProducerError) -> None:
        """Fail all calls that wait, and all later ones: no more requests are sent."""
        with self._lock:
            self._closed = error
            for operation in self._operations:
                operation.finish(error)

    # -- the sender's side -------------------------------------------------------------

    @property
    def is_completing(self) -> bool:
        return self.state in (_S.COMMITTING, _S.ABORTING)

    @property
    def has_pending(self) -> bool:
        """Whether a request of the transaction has yet to be sent."""
        return bool(self._pending or self.new_partitions)

    def next_pending(self, has_incomplete: Callable[[], bool]) -> Pending | None:
        """Remove and return the request to send now; None if there is none.

        EndTxn waits until no batch is incomplete.

        Args:
            has_incomplete: returns whether a batch is incomplete. It is called only
                when EndTxn is next: an earlier result could miss records.
        """
        with self._lock:
            wanted: set[Partition] = set()
            if self.state in (_S.IN_TRANSACTION, _S.COMMITTING):
                wanted = self.new_partitions
            elif self.state is _S.ABORTING and not self.has_begun_at_broker:
                # The broker may know of it, although the answer was lost. If it stayed
                # open, it would time out, and fence this producer. So add the
                # partitions again, and then end it.
                wanted = self._unsure
                if not wanted and self._unsure_offsets is not None:
                    return self._unsure_offsets
            if wanted:
                self.adding |= wanted
                self.new_partitions.clear()
                return Pending(Step.ADD_PARTITIONS, Operation("adding partitions"))
            if not self._pending:
                return None
            first = min(self._pending, key=lambda pending: pending.step.value)
            if first.step is Step.END and has_incomplete():
                return None
            self._pending.remove(first)
            return first

    def sending(self, pending: Pending) -> None:
        """Note that a request is being sent: it may begin the transaction there."""
        if pending.step is Step.COMMIT_OFFSETS:
            self.has_begun_at_broker = True

    def put_back(self, pending: Pending, *, was_sent: bool = False) -> None:
        """Put a request at the head of the queue again, unless it is of no more use.

        The request is the next one again, without a pause: the caller must wait.

        Args:
            pending: the request that `next_pending` returned.
            was_sent: whether the broker may have executed the request.
        """
        with self._lock:
            if pending.step is Step.ADD_PARTITIONS:
                if self.state in (_S.IN_TRANSACTION, _S.COMMITTING):
                    self.new_partitions |= self.adding
                if was_sent:
                    self._unsure |= self.adding
                self.adding.clear()
                return
            if was_sent and pending.step is Step.ADD_OFFSETS:
                self._unsure_offsets = pending
            if not self._is_dropped(pending):
                self._pending.insert(0, pending)

    def _is_dropped(self, pending: Pending) -> bool:
        """Finish a request if it is of no use any more; return whether it was finished.

        A request for offsets is of no use while the transaction is being aborted, nor
        is any request after a fatal error.
        """
        if self.state is _S.FATAL_ERROR:
            pending.operation.finish(self.error)
            return True
        if self.state is not _S.ABORTING or pending.step is Step.END:
            return False
        pending.operation.finish(TransactionAbortedError("the transaction was aborted"))
        return True

    def note_trouble(self, why: str) -> None:
        """Store the reason why requests wait, for the errors of calls that time out."""
        with self._lock:
            for pending in self._pending:
                pending.operation.trouble = f": {why}"

    def login_refused(self, error: ProducerError) -> None:
        """Handle a refused login, which may succeed when it is tried again.

        init_transactions() fails, and can be called again. Other calls go on waiting:
        their transaction is open, and may yet end as they want it.
        """
        with self._lock:
            self.note_trouble(str(error))
            first = next((p for p in self._pending if p.step is Step.INIT), None)
            if first is not None:
                self._pending.remove(first)
                self.state = _S.UNINITIALIZED
        if first is not None:
            first.operation.finish(error)

    def added_partitions(self) -> None:
        """Note that the coordinator has added the partitions of the last request."""
        with self._lock:
            self.partitions |= self.adding
            self.adding.clear()
            self._unsure.clear()
            self.has_begun_at_broker = True

    def added_offsets(self, pending: Pending) -> None:
        """Handle a successful AddOffsetsToTxn: queue the TxnOffsetCommit request."""
        with self._lock:
            self.has_begun_at_broker = True
            self._unsure_offsets = None
            if not self._is_dropped(pending):
                self._pending.append(pending._replace(step=Step.COMMIT_OFFSETS))

    def ended(self, pending: Pending, response: EndTxnResponse | None = None) -> None:
        """Complete a commit or abort: reset the state, and end the user's wait.

        If an abort has lost sequence numbers, the wait lasts until a new epoch comes.

        Args:
            pending: the request that ended the transaction.
            response: the coordinator's response; None if it never knew the transaction.
        """
        with self._lock:
            if response is not None and response.producer_id >= 0:
                self._take_id(response)
            self.partitions.clear()
            self.adding.clear()
            self.new_partitions.clear()
            self._unsure.clear()
            self._unsure_offsets = None
            self.has_begun_at_broker = False
            self.error = None
            if self._must_bump and self.state is _S.ABORTING:
                # Sequence numbers were lost with records: ask for another epoch.
                self.state = _S.INITIALIZING
                self._enqueue(Pending(Step.BUMP, pending.operation))
                return
            self.state = _S.READY
        pending.operation.finish()

    def init_request(self) -> InitProducerIdRequest:
        """Return the request for a producer id, or for another epoch of it."""
        request = InitProducerIdRequest(
            transactional_id=self.transactional_id,
            transaction_timeout_ms=self._timeout_ms,
        )
        if self._must_bump:
            request.producer_id = self.producer_id
            request.producer_epoch = self.epoch
        return request

    def initialized(self, pending: Pending, response: InitProducerIdResponse) -> None:
        """Store the producer id and epoch of a response, and end the call's wait."""
        with self._lock:
            self._take_id(response)
            self.state = _S.READY
        pending.operation.finish()

    def _take_id(self, response: InitProducerIdResponse | EndTxnResponse) -> None:
        """Store a producer id and epoch, and restart all sequence numbers at 0."""
        self.take_id(response)
        self._must_bump = False
        self._partitions.clear()
        self._unresolved.clear()
        self._bump.clear()

    def fail(self, error: ProducerError, pending: Pending | None = None) -> None:
        """Handle an error, after which the transaction or the producer is of no use.

        While the transaction is being aborted, an abortable error changes nothing.

        Args:
            error: the error.
            pending: the request that was refused, if it was one.
        """
        with self._lock:
            if pending is not None and pending.step is Step.ADD_PARTITIONS:
                self.adding.clear()
            if (
                self.state is _S.ABORTING
                and isinstance(error, AbortableError)
                and (pending is None or pending.step is not Step.END)
            ):
                # The request was sent before the abort, or to make sure what there is
                # to abort. Its refusal means that it has begun nothing. The abort goes
                # on.
                if pending is not None:
                    if pending.step is Step.ADD_PARTITIONS:
                        self._unsure.clear()
                    elif pending.step is Step.ADD_OFFSETS:
                        self._unsure_offsets = None
                    pending.operation.finish(error)
                return
            fatal = not isinstance(error, AbortableError) or self.state in (
                _S.ABORTING,
                _S.INITIALIZING,
                _S.UNINITIALIZED,
                _S.READY,
            )
            if fatal and not isinstance(error, FatalError):
                error = FatalError(
                    f"{error}; close this producer and make a new one", error.error_code
                )
            if self.state is not _S.FATAL_ERROR:
                self.error = error
                self.state = _S.FATAL_ERROR if fatal else _S.ABORTABLE_ERROR
            if fatal:
                self.fatal_error = error
            self.new_partitions.clear()
            waiting, self._pending = self._pending, []
        if pending is not None:
            pending.operation.finish(error)
        for other in waiting:
            other.operation.finish(error)

    # -- the rules of draining ---------------------------------------------------------

    def may_drain(self, batch: ProducerBatch) -> bool:
        """Return whether a batch may be sent now: the transaction has its partition."""
        return (
            self.state in (_S.IN_TRANSACTION, _S.COMMITTING)
            and (batch.topic, batch.partition) in self.partitions
            and super().may_drain(batch)
        )

    def prepare(self, batch: ProducerBatch) -> None:
        """Mark a batch as transactional, and give it its producer id and number."""
        batch.transactional = True
        self.has_begun_at_broker = True
        super().prepare(batch)

    def begin_turn(self) -> None:
        """Find out whether expired batches are written.

        Here the broker raises the epoch; `Idempotence` does it itself.
        """
        self._resolve()

    def _cannot_resolve(self, key: Partition) -> None:
        self._must_bump = True
        if self.state in (_S.IN_TRANSACTION, _S.COMMITTING):
            self.fail(AbortableError(f"records for {key[0]}-{key[1]} are lost"))

    def request_bump(self, batch: ProducerBatch) -> None:
        """Note that the next abort must ask the broker for a new epoch."""
        self._must_bump = True

    def expired(self, batch: ProducerBatch) -> None:
        """Note that a batch expired: the transaction cannot be committed without it."""
        super().expired(batch)
        self._lost(
            DeliveryTimeoutError(
                f"records for {batch.topic}-{batch.partition} were not acknowledged"
                " within delivery.timeout.ms"
            )
        )

    def refused(self, error: ProducerError, number: int) -> None:
        """Fail the transaction because ``send`` could not put a record into a batch.

        As in Kafka, the commit fails then, so that a user notices the error even
        without a look at the futures.
        """
        with self._lock:
            if self.state is _S.IN_TRANSACTION and self.number == number:
                self.fail(
                    AbortableError(f"{error}; abort_transaction()", error.error_code)
                )

    def failed(self, batch: ProducerBatch, error: ProducerError) -> None:
        """Handle a batch that failed for good: the transaction must be aborted."""
        self._remove(self._of(batch), batch)
        self._must_bump |= batch.has_sequence
        if isinstance(error, TransactionAbortedError):
            return
        if isinstance(error, FatalError):
            self.fail(error)
        else:
            self._lost(error)

    def _lost(self, error: ProducerError) -> None:
        self._must_bump = True
        if self.state in (_S.IN_TRANSACTION, _S.COMMITTING):
            self.fail(AbortableError(f"{error}; abort_transaction()", error.error_code))


ABORTABLE_CODES: Final = frozenset(
    {
        ErrorCode.TOPIC_AUTHORIZATION_FAILED,
        ErrorCode.GROUP_AUTHORIZATION_FAILED,
        ErrorCode.TRANSACTION_ABORTABLE,
        ErrorCode.INVALID_TXN_STATE,
        ErrorCode.UNKNOWN_PRODUCER_ID,
        ErrorCode.INVALID_PRODUCER_ID_MAPPING,
        ErrorCode.ILLEGAL_GENERATION,
        ErrorCode.UNKNOWN_MEMBER_ID,
        ErrorCode.FENCED_INSTANCE_ID,
        ErrorCode.OPERATION_NOT_ATTEMPTED,
    }
)

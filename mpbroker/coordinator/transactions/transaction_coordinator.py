"""Execute InitProducerId and EndTxn, and keep all transactional ids.

Sans-IO like GroupCoordinator: methods get requests and the time, and put records,
markers and answers into the outbox, which `record_writer` empties.

    EndTxn ─▶ Prepare in the log ─▶ on disk ─▶ answered; the producer may not write
                                            └▶ a marker per partition ─▶ Complete

Whenever the process is killed, the log says how to go on. A transaction that is Ongoing
there stays open. If a transaction is in a Prepare state there, the next coordinator
carries the decision out, and appends only the markers that are missing.

While markers are written, a request that would begin the next transaction waits for
them. If it were answered CONCURRENT_TRANSACTIONS, its client would come back after 20
ms or more.

Source: Kafka's TransactionCoordinator and TransactionStateManager; KIP-98, KIP-360,
KIP-890.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, Protocol

from mpbroker.base.java_hash import java_hash
from mpbroker.base.logger import get_logger
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.coordinator.context import CoordinatorContext
from mpbroker.coordinator.outbox import (
    NOW,
    Call,
    appended_to,
    transaction_log,
)
from mpbroker.coordinator.transactions.transaction_ends import (
    MarkerPlaces,
    TransactionEnds,
)
from mpbroker.coordinator.transactions.transaction_metadata import (
    COMPLETE,
    EPOCH_BUMPS_SINCE,
    PREPARED,
    TransactionMetadata,
    TransactionState,
)
from mpbroker.coordinator.transactions.transaction_records import TransactionLogValue
from mpbroker.metadata.topic_names import TopicPartition
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.end_txn import EndTxnRequest, EndTxnResponse
from mpbroker.protocol.messages.init_producer_id import (
    InitProducerIdRequest,
    InitProducerIdResponse,
)

_LOG = get_logger(__name__)

S = TransactionState
Again = Callable[[int], None]

# How long a request waits for markers before it gets CONCURRENT_TRANSACTIONS.
_PATIENCE_MS: Final = 500
_END_TXN_V2: Final = 5
_FENCED_SINCE: Final = 2
_INIT_FENCED_SINCE: Final = 4
_NO_PRODUCER: Final = -1


class TransactionConfig(NamedTuple):
    """Limits and times of transactions.

    Names are those of Kafka's settings, with underscores for dots. Times are in
    milliseconds.
    """

    transaction_max_timeout_ms: int
    transactional_id_expiration_ms: int
    transaction_abort_timed_out_transaction_cleanup_interval_ms: int
    transaction_remove_expired_transaction_cleanup_interval_ms: int
    transaction_partition_verification_enable: bool


class OpenTransactions(Protocol):
    """The shared table of open transactions, which each append of a producer reads.

    It says to which partitions a producer may write in a transaction.
    """

    def has_room(self, count: int) -> bool:
        """Return whether ``count`` more partitions fit the table of transactions."""

    def open(
        self, producer_id: int, epoch: int, partitions: Iterable[TopicPartition]
    ) -> bool:
        """Let a producer write to partitions; return False if the table is full."""

    def close(self, producer_id: int, partitions: Iterable[TopicPartition]) -> None:
        """Stop a producer from writing to any partition.

        Args:
            partitions: the partitions of its transaction, which an earlier coordinator
                may have opened.
        """


class TransactionCoordinator:
    """Keeps transactional ids, and decides how their transactions end.

    Args:
        num_partitions: the number of partitions of __transaction_state.
        new_producer_id: returns an id that no producer has had.
        places: finds the offsets of markers in partitions.
    """

    def __init__(
        self,
        config: TransactionConfig,
        context: CoordinatorContext,
        open_transactions: OpenTransactions,
        num_partitions: int,
        new_producer_id: Callable[[], int],
        places: MarkerPlaces,
    ) -> None:
        self._config = config
        self._out = context.outbox
        self._timers = context.timers
        self._open = open_transactions
        self.num_partitions = num_partitions
        self._new_producer_id = new_producer_id
        self._places = places
        self._ends = TransactionEnds(
            context,
            self._is_current,
            self._ended,
            self._write,
            places,
            asks_coordinator=config.transaction_partition_verification_enable,
        )
        self._transactions: dict[str, TransactionMetadata] = {}
        self._ongoing: set[str] = set()
        self._loading: set[int] = set()
        self._failed: set[int] = set()

    def __len__(self) -> int:
        return len(self._transactions)

    def partition_for(self, transactional_id: str) -> int:
        return java_hash(transactional_id) % self.num_partitions

    def log_of(self, transactional_id: str) -> int:
        """Return the number of the log in which a transactional id's records are."""
        return transaction_log(self.partition_for(transactional_id))

    def get(self, transactional_id: str) -> TransactionMetadata | None:
        return self._transactions.get(transactional_id)

    def all(self) -> Iterable[TransactionMetadata]:
        return self._transactions.values()

    @property
    def is_loading(self) -> bool:
        return bool(self._loading)

    def check(self, transactional_id: str) -> None:
        """Raise an error if requests for a transactional id cannot be served now.

        Raises:
            ApiError: INVALID_REQUEST, COORDINATOR_LOAD_IN_PROGRESS,
                COORDINATOR_NOT_AVAILABLE.
        """
        if not transactional_id:
            raise ApiError(ErrorCode.INVALID_REQUEST)
        partition = self.partition_for(transactional_id)
        if partition in self._loading:
            raise ApiError(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
        if partition in self._failed:
            raise ApiError(ErrorCode.COORDINATOR_NOT_AVAILABLE)

    # -- InitProducerId ------------------------------------------------------------

    def init_producer_id(
        self, call: Call, request: InitProducerIdRequest, now_ms: int
    ) -> None:
        if request.transactional_id is None:
            answer = InitProducerIdResponse(
                producer_id=self._new_producer_id(), producer_epoch=0
            )
            self._out.answer(call, answer)
            return
        self._init(call, request, request.transactional_id, now_ms, patient=True)

    def _init(
        self,
        call: Call,
        request: InitProducerIdRequest,
        transactional_id: str,
        now_ms: int,
        *,
        patient: bool,
    ) -> None:
        try:
            self.check(transactional_id)
            timeout = request.transaction_timeout_ms
            if not 0 < timeout <= self._config.transaction_max_timeout_ms:
                raise ApiError(ErrorCode.INVALID_TRANSACTION_TIMEOUT)
            named = request.producer_id != _NO_PRODUCER
            if named != (request.producer_epoch != _NO_PRODUCER):
                raise ApiError(ErrorCode.INVALID_REQUEST)
            transaction = self._transactions.get(transactional_id)
            if transaction is None:
                transaction = TransactionMetadata(
                    transactional_id, self._new_producer_id(), timeout, now_ms
                )
                self._transactions[transactional_id] = transaction
            if named and not transaction.knows(
                request.producer_id, request.producer_epoch
            ):
                raise ApiError(ErrorCode.PRODUCER_FENCED)
            if transaction.state is S.ONGOING:
                self._fence_and_abort(transaction, now_ms)
            if transaction.state in PREPARED:
                if not patient:
                    raise ApiError(ErrorCode.CONCURRENT_TRANSACTIONS)
                self._later(
                    transaction,
                    lambda at_ms: self._init(
                        call, request, transactional_id, at_ms, patient=False
                    ),
                    now_ms,
                )
                return
            wrote = transaction.initialise(
                timeout,
                request.producer_epoch if named else None,
                self._new_producer_id,
                now_ms,
            )
            after = self._write(transaction) if wrote else NOW
            self._out.answer(
                call,
                InitProducerIdResponse(
                    producer_id=transaction.producer_id,
                    producer_epoch=transaction.producer_epoch,
                ),
                after,
            )
        except ApiError as error:
            code = fenced_as_of(error.error_code, call.version, _INIT_FENCED_SINCE)
            refusal = InitProducerIdResponse(error_code=code, producer_epoch=-1)
            self._out.answer(call, refusal)

    # -- partitions ----------------------------------------------------------------

    def find(
        self, transactional_id: str, producer_id: int, epoch: int
    ) -> TransactionMetadata:
        """Return the transaction of a producer, whose id and epoch must be current.

        Raises:
            ApiError: INVALID_PRODUCER_ID_MAPPING, PRODUCER_FENCED.
        """
        transaction = self._transactions.get(transactional_id)
        if transaction is None or transaction.producer_id != producer_id:
            raise ApiError(ErrorCode.INVALID_PRODUCER_ID_MAPPING)
        if transaction.producer_epoch != epoch:
            raise ApiError(ErrorCode.PRODUCER_FENCED)
        return transaction

    def add(
        self,
        transaction: TransactionMetadata,
        partitions: Sequence[TopicPartition],
        client_version: int,
        now_ms: int,
    ) -> tuple[int, ...]:
        """Add partitions to a producer's transaction; begin one if there is none.

        Returns:
            The numbers that the producer's answer waits for: log numbers, or
            appended_to() them if the disk is not waited for. See outbox.py.

        Raises:
            ApiError: CONCURRENT_TRANSACTIONS.
        """
        if transaction.state in PREPARED:
            raise ApiError(ErrorCode.CONCURRENT_TRANSACTIONS)
        if not self._open.has_room(len(partitions)):
            _LOG.error(
                "%s: no partition is added: as many as there can be are in open"
                " transactions; end some, or lower transaction.max.timeout.ms",
                transaction.transactional_id,
            )
            raise ApiError(ErrorCode.CONCURRENT_TRANSACTIONS)
        if transaction.state is S.ONGOING and transaction.partitions.issuperset(
            partitions
        ):
            # Its record may not be on disk yet: a repeated request waits for it, too.
            self._open_once_appended(transaction, partitions)
            return (self.log_of(transaction.transactional_id),)
        # Before `add`, which forgets the partitions that the last records have named.
        unsynced = transaction.may_begin_unsynced(partitions, self._places.topic_id)
        transaction.add(partitions, client_version, now_ms)
        self._ongoing.add(transaction.transactional_id)
        logs = self._write(transaction)
        self._open_once_appended(transaction, partitions)
        return tuple(map(appended_to, logs)) if unsynced else logs

    def _open_once_appended(
        self, transaction: TransactionMetadata, partitions: Sequence[TopicPartition]
    ) -> None:
        """Let the producer write to partitions right after their record is appended.

        If it could write before, and this process were killed in between, no log would
        name the partitions with its records. The marker of the producer's next
        transaction would commit or abort these records.
        """
        wanted = tuple(partitions)

        def open_unless_decided() -> None:
            if transaction.state is S.ONGOING:
                producer = transaction.producer_id, transaction.producer_epoch
                self._open.open(*producer, wanted)

        log = self.log_of(transaction.transactional_id)
        self._out.once_appended(log, open_unless_decided)

    def verify(
        self, transaction: TransactionMetadata, partitions: Sequence[TopicPartition]
    ) -> None:
        """Check that all partitions are in a producer's open transaction.

        Raises:
            ApiError: CONCURRENT_TRANSACTIONS, INVALID_TXN_STATE.
        """
        if transaction.state in PREPARED:
            raise ApiError(ErrorCode.CONCURRENT_TRANSACTIONS)
        if transaction.state is not S.ONGOING or not transaction.partitions.issuperset(
            partitions
        ):
            raise ApiError(ErrorCode.INVALID_TXN_STATE)
        # `add` has opened these partitions. Open them again, because their topic may
        # have been recreated since then.
        self._open_once_appended(transaction, partitions)

    # -- the end -------------------------------------------------------------------

    def end_txn(
        self, call: Call, request: EndTxnRequest, now_ms: int, *, patient: bool = True
    ) -> None:
        try:
            self.check(request.transactional_id)
            transaction = self._transactions.get(request.transactional_id)
            if transaction is None:
                raise ApiError(ErrorCode.INVALID_PRODUCER_ID_MAPPING)
            if call.version >= _END_TXN_V2:
                begins = self._may_end_v2(transaction, request)
            else:
                begins = self._may_end_v1(transaction, request)
            if transaction.state in PREPARED:
                if not patient:
                    raise ApiError(ErrorCode.CONCURRENT_TRANSACTIONS)
                self._later(
                    transaction,
                    lambda at_ms: self.end_txn(call, request, at_ms, patient=False),
                    now_ms,
                )
                return
            after: tuple[int, ...] = (self.log_of(request.transactional_id),)
            if begins:
                version = EPOCH_BUMPS_SINCE if call.version >= _END_TXN_V2 else 0
                after = self._prepare(transaction, request.committed, version, now_ms)
            producer_id, epoch = transaction.next_identity()
            answer = EndTxnResponse(producer_id=producer_id, producer_epoch=epoch)
            self._out.answer(call, answer, after)
        except ApiError as error:
            code = fenced_as_of(error.error_code, call.version, _FENCED_SINCE)
            self._out.answer(call, EndTxnResponse(error_code=code))

    def _may_end_v1(
        self, transaction: TransactionMetadata, request: EndTxnRequest
    ) -> bool:
        """Return whether an EndTxn of version 4 or lower ends the transaction now.

        Return False if the transaction has ended as the request asks: the request is a
        retry.

        Raises:
            ApiError: the producer may not end the transaction, or not in this way.
        """
        if transaction.producer_id != request.producer_id:
            raise ApiError(ErrorCode.INVALID_PRODUCER_ID_MAPPING)
        if transaction.producer_epoch != request.producer_epoch:
            raise ApiError(ErrorCode.PRODUCER_FENCED)
        if transaction.state is S.ONGOING:
            return True
        _require_same_end(transaction.state, commit=request.committed)
        return False

    def _may_end_v2(
        self, transaction: TransactionMetadata, request: EndTxnRequest
    ) -> bool:
        """Return whether an EndTxn of version 5 or higher ends the transaction now.

        From this version on the producer epoch grows with each end (KIP-890), so a
        retry has the epoch before the current one. The rest is as in `_may_end_v1`.
        """
        producer_id, epoch = request.producer_id, request.producer_epoch
        retry = transaction.is_retry(producer_id, epoch)
        if transaction.producer_id != producer_id and not retry:
            raise ApiError(ErrorCode.INVALID_PRODUCER_ID_MAPPING)
        state = transaction.state
        mine = transaction.producer_id, transaction.producer_epoch
        current = (producer_id, epoch) == mine
        if state in PREPARED:
            valid = retry
        elif state in COMPLETE:
            valid = retry or current
        else:
            valid = current
        if not valid:
            raise ApiError(ErrorCode.PRODUCER_FENCED)
        if state is S.ONGOING:
            return True
        if retry:
            _require_same_end(state, commit=request.committed)
            return False
        # The transaction has no partitions: there is nothing to commit. An abort bumps
        # the epoch all the same.
        if request.committed:
            raise ApiError(ErrorCode.INVALID_TXN_STATE)
        return True

    def _prepare(
        self,
        transaction: TransactionMetadata,
        commit: bool,
        client_version: int,
        now_ms: int,
    ) -> tuple[int, ...]:
        transaction.prepare(
            commit=commit,
            client_version=client_version,
            new_producer_id=self._new_producer_id,
            now_ms=now_ms,
        )
        self._ongoing.discard(transaction.transactional_id)
        if not transaction.bumps_epochs:
            # Close the partitions before the ends of their logs are noted. The
            # producer's next transaction has the same epoch. So if a late Produce were
            # appended behind a noted end, a load would take it for the beginning of the
            # next transaction.
            self._open.close(transaction.producer_id, transaction.partitions)
        self._ends.expect_markers(transaction)
        after = self._write(transaction)
        # Markers are appended when the decision is on disk. If they were before, a
        # power cut could take the decision and leave a commit marker in one partition,
        # and the producer could then abort the transaction in the others.
        self._out.then(after, partial(self._decided, transaction))
        return after

    def _fence_and_abort(self, transaction: TransactionMetadata, now_ms: int) -> None:
        """Fence a producer by a higher epoch, and abort its transaction.

        Kafka ends it by the protocol of the cluster, and not by the client's.
        """
        transaction.fence(now_ms)
        self._prepare(transaction, False, EPOCH_BUMPS_SINCE, now_ms)

    def _decided(self, transaction: TransactionMetadata, durable: bool) -> None:
        """Have a transaction's markers appended, if Prepare is on disk by now."""
        if durable and self._is_current(transaction) and transaction.state in PREPARED:
            # First the table, then the markers. Each append looks into the table under
            # the lock of its partition, so it is either in front of the marker or
            # refused. In the other order a record could follow the marker.
            self._open.close(transaction.producer_id, transaction.partitions)
            self._ends.write_markers(transaction, sorted(transaction.partitions))

    def look_again(self, producer_id: int, now_ms: int) -> bool:
        """Go on with a producer's transaction that waits for a marker of another node.

        Return False if it does not.
        """
        return self._ends.look_again(producer_id, now_ms)

    def _is_current(self, transaction: TransactionMetadata) -> bool:
        return self._transactions.get(transaction.transactional_id) is transaction

    def _ended(self, transaction: TransactionMetadata, now_ms: int) -> None:
        """Write Complete for a transaction whose markers are all appended.

        Then execute the requests that waited for its end.
        """
        # No answer waits until this record is on disk. A coordinator that does not find
        # it in the log finds Prepare, and then finds all markers in their places.
        transaction.complete(now_ms)
        self._write(transaction)
        self._wake(transaction, now_ms)

    # -- waiting for the end ---------------------------------------------------------

    def wait_for_end(
        self, transaction: TransactionMetadata, again: Again, now_ms: int
    ) -> bool:
        """Call ``again`` when a transaction's end markers are written, or after 500 ms.

        Return False, and do not call it, if no markers are being written now.
        """
        if transaction.state not in PREPARED:
            return False
        self._later(transaction, again, now_ms)
        return True

    def _later(
        self, transaction: TransactionMetadata, again: Again, now_ms: int
    ) -> None:
        transaction.waiting.append(again)
        name = ("patience", transaction.transactional_id)
        if name not in self._timers:
            self._timers.schedule(
                name,
                now_ms + _PATIENCE_MS,
                lambda at_ms: self._wake(transaction, at_ms),
            )

    def _wake(self, transaction: TransactionMetadata, now_ms: int) -> None:
        waiting, transaction.waiting = transaction.waiting, []
        if waiting:
            self._timers.cancel(("patience", transaction.transactional_id))
        for again in waiting:
            again(now_ms)

    def refuse_waiting(self, now_ms: int) -> None:
        """Answer requests that wait until a transaction ends; the broker stops."""
        for transaction in list(self._transactions.values()):
            self._wake(transaction, now_ms)

    # -- time ------------------------------------------------------------------------

    def start_timers(self, now_ms: int) -> None:
        """Start the timers that abort old transactions and remove unused ids."""
        config = self._config
        self._timers.schedule(
            "transaction timeouts",
            now_ms + config.transaction_abort_timed_out_transaction_cleanup_interval_ms,
            self._abort_timed_out,
        )
        if "transactional id expiry" not in self._timers:
            self._timers.schedule(
                "transactional id expiry",
                now_ms
                + config.transaction_remove_expired_transaction_cleanup_interval_ms,
                self._remove_expired,
            )

    def _abort_timed_out(self, now_ms: int) -> None:
        for transaction in self._whole(self._ongoing):
            if now_ms - transaction.start_ms > transaction.timeout_ms:
                _LOG.info(
                    "%s: its transaction is aborted, it was open for more than %d ms",
                    transaction.transactional_id,
                    transaction.timeout_ms,
                )
                self._fence_and_abort(transaction, now_ms)
        self.start_timers(now_ms)

    def _remove_expired(self, now_ms: int) -> None:
        oldest = now_ms - self._config.transactional_id_expiration_ms
        for transaction in self._whole(self._transactions):
            idle = transaction.state is S.EMPTY or transaction.state in COMPLETE
            if idle and transaction.update_ms <= oldest:
                transaction.forget_synced(self._places.is_on_disk)
                if transaction.unsynced:  # only this id's records name these markers
                    self._ends.settle_later(transaction, now_ms)
                    continue
                transaction.transition_to(S.DEAD, now_ms)
                del self._transactions[transaction.transactional_id]
                log = self.log_of(transaction.transactional_id)
                self._out.write(log, transaction.key, None)
        self.start_timers(now_ms)

    def _whole(self, ids: Iterable[str]) -> list[TransactionMetadata]:
        """Return the transactions of these transactional ids.

        Leave out ids whose logs are still being loaded.
        """
        whole = [each for each in ids if self.partition_for(each) not in self._loading]
        return [self._transactions[transactional_id] for transactional_id in whole]

    # -- the log ---------------------------------------------------------------------

    def _write(self, transaction: TransactionMetadata) -> tuple[int, ...]:
        self._ends.forget_synced(transaction)
        log = self.log_of(transaction.transactional_id)
        self._out.write(log, transaction.key, transaction.value())
        return (log,)

    def begin_loading(self, partitions: Iterable[int]) -> None:
        """Stop serving the transactional ids of these partitions until they are loaded.

        The partitions are those of __transaction_state.
        """
        self._loading.update(partitions)
        self._failed.difference_update(self._loading)

    def replay(self, transactional_id: str, value: TransactionLogValue | None) -> None:
        """Apply a record of __transaction_state; records come in the log's order."""
        before = self._transactions.pop(transactional_id, None)
        self._ongoing.discard(transactional_id)
        if value is None:
            return
        transaction = TransactionMetadata.of_record(transactional_id, value, before)
        self._transactions[transactional_id] = transaction
        if transaction.state is S.ONGOING:
            self._ongoing.add(transactional_id)

    def with_unsynced_markers(self, partition: int) -> list[TransactionMetadata]:
        """Return the transactions with commit or abort markers that may not be on disk.

        Args:
            partition: the partition of __transaction_state that has their records.
        """
        return [each for each in self._of(partition) if each.unsynced]

    def begin_again(
        self,
        transaction: TransactionMetadata,
        partitions: Iterable[TopicPartition],
        now_ms: int,
    ) -> None:
        """Make a transaction Ongoing again whose record was lost in a power cut."""
        transaction.add(partitions, transaction.client_version, now_ms)
        self._ongoing.add(transaction.transactional_id)

    def decided(self, partition: int) -> list[TransactionMetadata]:
        """Return the transactions in PrepareCommit or PrepareAbort: decided to end.

        Some of their markers may not have been written.

        Args:
            partition: the partition of __transaction_state that has their records.
        """
        return [each for each in self._of(partition) if each.state in PREPARED]

    def _of(self, partition: int) -> list[TransactionMetadata]:
        return [
            transaction
            for transactional_id, transaction in self._transactions.items()
            if self.partition_for(transactional_id) == partition
        ]

    def open_partitions(self) -> Iterable[tuple[int, int, TopicPartition]]:
        """Yield producer id, epoch and partition of all open transactions."""
        for transactional_id in self._ongoing:
            transaction = self._transactions[transactional_id]
            for partition in transaction.partitions:
                yield transaction.producer_id, transaction.producer_epoch, partition

    def loaded(self, partition: int, now_ms: int) -> None:
        """Serve the transactional ids of a partition that was loaded.

        Let producers write to the partitions of Ongoing transactions. Write the markers
        of transactions in a Prepare state.

        Args:
            partition: a partition of __transaction_state.
        """
        self._loading.discard(partition)
        for transaction in self._of(partition):
            if transaction.unsynced:
                self._ends.settle_later(transaction, now_ms)
            if transaction.state is S.ONGOING:
                self._open.open(
                    transaction.producer_id,
                    transaction.producer_epoch,
                    transaction.partitions,
                )
            elif transaction.state in PREPARED:
                # The decision is written again, because markers must wait until it is
                # on disk, and the record of the earlier coordinator may not be. The new
                # record names no expected markers, because the logs may have grown
                # behind the ends that were noted.
                transaction.expected = ()
                after = self._write(transaction)
                self._out.then(after, partial(self._decided, transaction))

    def failed(self, partition: int) -> None:
        """Forget the transactions of a partition that cannot be loaded or written.

        Their state in memory may be ahead of the log, and only the log counts.
        """
        self._failed.add(partition)
        for transactional_id, transaction in list(self._transactions.items()):
            if self.partition_for(transactional_id) == partition:
                del self._transactions[transactional_id]
                self._ongoing.discard(transactional_id)
                self._open.close(transaction.producer_id, transaction.partitions)
                self._wake(transaction, transaction.update_ms)
        self._out.records.pop(transaction_log(partition), None)


def fenced_as_of(code: ErrorCode, version: int, since: int) -> ErrorCode:
    """Replace PRODUCER_FENCED by INVALID_PRODUCER_EPOCH for older clients.

    Args:
        since: the first version of the API that has PRODUCER_FENCED.
    """
    if code is ErrorCode.PRODUCER_FENCED and version < since:
        return ErrorCode.INVALID_PRODUCER_EPOCH
    return code


def _require_same_end(state: TransactionState, *, commit: bool) -> None:
    """Raise INVALID_TXN_STATE if a retry asks for the other end of a transaction.

    Args:
        state: the transaction's state.
        commit: whether the retry asks for a commit.
    """
    same = (S.PREPARE_ABORT, S.COMPLETE_ABORT)
    if commit:
        same = (S.PREPARE_COMMIT, S.COMPLETE_COMMIT)
    if state not in same:
        raise ApiError(ErrorCode.INVALID_TXN_STATE)

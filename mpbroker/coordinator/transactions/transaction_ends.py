"""What is left to do when it is decided how a transaction ends: markers, Complete.

    markers in the logs, perhaps not on disk ─▶ Complete, which names them ─▶ Ongoing...

Nobody waits for the markers to be on disk. Mostly the next transaction of a producer
writes to the same partitions, behind them, and its records' syncs are theirs. Until
then each record of __transaction_state names those that may not be on disk: of what a
power cut has taken, the next start knows where it was (MarkerWriter.restore).

So the records name all places that a producer is likely to write to next. Its next
transaction may begin there though nobody has put on disk that it has: Prepare names the
ends of the logs before the markers, Complete the markers, and a load that meets one of
the two as the last record looks behind these places (MarkerWriter.restore).

Of very many markers it is waited for the disk instead, and all is forgotten; and what a
producer has left behind that writes no more is synced and forgotten a moment later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol

from mpbroker.base.logger import get_logger
from mpbroker.coordinator.context import CoordinatorContext
from mpbroker.coordinator.outbox import (
    AppendedMarker,
    Markers,
    TopicPartition,
)
from mpbroker.coordinator.transactions.transaction_metadata import (
    PREPARED,
    TransactionMetadata,
    TransactionState,
)
from mpbroker.protocol.error_code import ErrorCode

_LOG = get_logger(__name__)

S = TransactionState

# One node leads every partition of the log, for ever, at this leader epoch.
COORDINATOR_EPOCH: Final = 0
_RETRY_MS: Final = 1000
_SETTLE_MS: Final = 1000
# So many markers a transactional id's records may name.
_MOST_UNSYNCED: Final = 32
_GONE: Final = frozenset(
    {ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.INVALID_PRODUCER_EPOCH}
)


class MarkerPlaces(Protocol):
    """Where markers are, or will be."""

    def is_on_disk(self, marker: AppendedMarker) -> bool:
        """Whether a marker need not be remembered any more."""

    def expect(
        self,
        producer_id: int,
        epoch: int,
        partitions: Iterable[TopicPartition],
        *,
        commit: bool,
    ) -> tuple[AppendedMarker, ...]:
        """Say where markers would come to be, were they appended now.

        Of what is off line there is none.
        """

    def topic_id(self, topic: str) -> bytes | None:
        """The id of a topic; None: there is none of that name."""


class TransactionEnds:
    """Has markers written, and their disk waited for where that must be.

    Args:
        is_current: whether a transaction is still what the coordinator has.
        ended: told of a transaction whose markers are all written, and the time.
        write: writes what a transaction is now to its log.
        places: where markers are, or will be.
        asks_coordinator: nobody writes to a partition that it has not opened; else some
            might, after a power cut, before the last end of theirs is there again.
    """

    def __init__(
        self,
        context: CoordinatorContext,
        is_current: Callable[[TransactionMetadata], bool],
        ended: Callable[[TransactionMetadata, int], None],
        write: Callable[[TransactionMetadata], object],
        places: MarkerPlaces,
        *,
        asks_coordinator: bool,
    ) -> None:
        self._asks_coordinator = asks_coordinator
        self._out = context.outbox
        self._timers = context.timers
        self._is_current = is_current
        self._ended = ended
        self._write = write
        self._places = places

    def expect_markers(self, transaction: TransactionMetadata) -> None:
        """Note where the markers of a transaction will be, that is being decided on."""
        count = len(transaction.partitions) + len(transaction.unsynced)
        if self._asks_coordinator and count <= _MOST_UNSYNCED:
            transaction.expected = self._places.expect(
                transaction.producer_id,
                transaction.producer_epoch,
                sorted(transaction.partitions),
                commit=transaction.state is S.PREPARE_COMMIT,
            )

    def forget_synced(self, transaction: TransactionMetadata) -> None:
        """Name in its next record what may not be on disk, or is built upon."""
        if transaction.unsynced and not transaction.foreseen:
            transaction.forget_synced(self._places.is_on_disk)

    def write_markers(
        self, transaction: TransactionMetadata, partitions: Sequence[TopicPartition]
    ) -> None:
        """End a transaction that has been decided on, in these partitions."""
        earlier = transaction.unsynced
        count = len(partitions) + len(earlier)
        waits = count > _MOST_UNSYNCED or not self._asks_coordinator
        self._out.write_markers(
            Markers(
                transaction.producer_id,
                transaction.producer_epoch,
                transaction.state is S.PREPARE_COMMIT,
                COORDINATOR_EPOCH,
                partitions,
                lambda results, at_ms, appended: self._marked(
                    transaction, results, appended, at_ms
                ),
                waits,
                earlier if waits else (),
            )
        )

    def _marked(
        self,
        transaction: TransactionMetadata,
        results: Mapping[TopicPartition, ErrorCode],
        appended: Sequence[AppendedMarker],
        now_ms: int,
    ) -> None:
        """Markers are written, or could not be: complete, or try again."""
        if not self._is_current(transaction):
            return
        left = []
        for partition, code in results.items():
            if code and code not in _GONE:
                left.append(partition)
            elif code is ErrorCode.INVALID_PRODUCER_EPOCH:
                _LOG.warning(
                    "%s: %s-%d has a later epoch than the transaction to be ended",
                    transaction.transactional_id,
                    *partition,
                )
        transaction.unsynced += tuple(appended)
        if left:
            self._timers.schedule(
                ("markers", transaction.transactional_id),
                now_ms + _RETRY_MS,
                lambda at_ms: self._try_again(transaction, left, at_ms),
            )
            return
        self._ended(transaction, now_ms)
        if transaction.unsynced:
            self.settle_later(transaction, now_ms)

    def _try_again(
        self,
        transaction: TransactionMetadata,
        partitions: Sequence[TopicPartition],
        now_ms: int,
    ) -> None:
        if self._is_current(transaction) and transaction.state in PREPARED:
            transaction.update_ms = now_ms
            self.write_markers(transaction, partitions)

    # -- what is left behind -----------------------------------------------------------

    def settle_later(self, transaction: TransactionMetadata, now_ms: int) -> None:
        """Put markers on disk and forget them, if nothing else does that for long."""
        name = ("markers on disk", transaction.transactional_id)
        if name not in self._timers:
            self._timers.schedule(
                name,
                now_ms + _SETTLE_MS,
                lambda at_ms: self._settle(transaction, at_ms),
            )

    def _settle(self, transaction: TransactionMetadata, now_ms: int) -> None:
        if not self._is_current(transaction) or not transaction.unsynced:
            return
        if now_ms - transaction.update_ms < _SETTLE_MS or transaction.state in PREPARED:
            self.settle_later(transaction, now_ms)
            return
        earlier = transaction.unsynced

        def settled(
            results: Mapping[TopicPartition, ErrorCode],
            at_ms: int,
            appended: Sequence[AppendedMarker],
        ) -> None:
            if self._is_current(transaction) and transaction.unsynced == earlier:
                transaction.foreseen = {}
                self._write(transaction)

        nothing = transaction.producer_id, transaction.producer_epoch, True
        self._out.write_markers(
            Markers(*nothing, COORDINATOR_EPOCH, (), settled, True, earlier)
        )

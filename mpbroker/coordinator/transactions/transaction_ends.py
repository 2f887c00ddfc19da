"""End decided transactions: have the markers appended, then write Complete.

    markers appended, perhaps not on disk ─▶ Complete, which names them ─▶ Ongoing...

Nothing waits until the markers are on disk. Usually the producer's next transaction
writes to the same partitions, behind the markers, so the syncs of its records put them
on disk as well. Until then each record of the transactional id names the markers that
may not be on disk. If a power cut takes one of these, the next load knows where it was,
and appends it again (MarkerWriter.restore).

The partitions that a record names are also those to which the producer is likely to
write next. Its next transaction may begin there before Ongoing is on disk. Prepare
names the offsets at which the logs ended before the markers, and Complete names the
markers. A load that finds one of these two as the last record looks behind the named
offsets for a transaction that has begun there (MarkerWriter.begun_behind).

In two cases the records name no markers. If there are more than 32 markers, the
coordinator waits until they are on disk. If the producer stops writing, its markers are
synced and forgotten a second later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol

from mpbroker.base.logger import get_logger
from mpbroker.coordinator.context import CoordinatorContext
from mpbroker.coordinator.outbox import (
    AppendedMarker,
    Markers,
)
from mpbroker.coordinator.transactions.transaction_metadata import (
    PREPARED,
    TransactionMetadata,
    TransactionState,
)
from mpbroker.metadata.topic_names import TopicPartition
from mpbroker.protocol.error_code import ErrorCode

_LOG = get_logger(__name__)

S = TransactionState

# The leader epoch of __transaction_state. It never changes: there is only one node.
COORDINATOR_EPOCH: Final = 0
_RETRY_MS: Final = 1000
_SETTLE_MS: Final = 1000
# How many markers the records of a transactional id may name.
_MOST_UNSYNCED: Final = 32
# With these errors a partition needs no marker: it is deleted, or the producer has a
# later epoch there.
_GONE: Final = frozenset(
    {ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.INVALID_PRODUCER_EPOCH}
)


class MarkerPlaces(Protocol):
    """Finds the offsets of markers (records that end transactions) in partitions."""

    def is_on_disk(self, marker: AppendedMarker) -> bool:
        """Return whether a marker (the record that ends a transaction) is on disk.

        Return True also if its partition was deleted, or has flush.acks.all=false.
        """

    def expect(
        self,
        producer_id: int,
        epoch: int,
        partitions: Iterable[TopicPartition],
        *,
        commit: bool,
    ) -> tuple[AppendedMarker, ...]:
        """Return a transaction's markers, each with the offset it would get now.

        Leave out partitions that are offline.
        """

    def topic_id(self, topic: str) -> bytes | None:
        """Return the id of a topic; None if there is no topic of that name."""


class TransactionEnds:
    """Has decided transactions' markers appended, then writes the Complete records.

    Args:
        is_current: returns whether the coordinator still has this transaction.
        ended: called with a transaction whose markers are all appended, and the time.
        write: writes a record of a transaction's state.
        places: finds the offsets of markers in partitions.
        asks_coordinator: whether producers can write only to partitions that the
            coordinator has opened to them. If not, a producer may write after a power
            cut before its lost marker is appended again; so each end of a transaction
            waits until its markers are on disk.
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
        # Decided transactions that lack markers, with the partitions, by producer id.
        self._left: dict[int, tuple[TransactionMetadata, list[TopicPartition]]] = {}

    def expect_markers(self, transaction: TransactionMetadata) -> None:
        """Note, for the Prepare record, the lowest offset each marker can get."""
        count = len(transaction.partitions) + len(transaction.unsynced)
        if self._asks_coordinator and count <= _MOST_UNSYNCED:
            transaction.expected = self._places.expect(
                transaction.producer_id,
                transaction.producer_epoch,
                sorted(transaction.partitions),
                commit=transaction.state is S.PREPARE_COMMIT,
            )

    def forget_synced(self, transaction: TransactionMetadata) -> None:
        """Forget a transaction's markers that are on disk: no later record names them.

        Keep them all while the next transaction may begin before its record is on disk:
        a load after a power cut then needs them.
        """
        if transaction.unsynced and not transaction.foreseen:
            transaction.forget_synced(self._places.is_on_disk)

    def write_markers(
        self, transaction: TransactionMetadata, partitions: Sequence[TopicPartition]
    ) -> None:
        """Have a transaction's markers appended to these partitions."""
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
        """Write Complete after a transaction's markers were appended.

        If some could not be, append these later.
        """
        if not self._is_current(transaction):
            return
        left = []
        for partition, code in results.items():
            if code and code not in _GONE:
                left.append(partition)
            elif code is ErrorCode.INVALID_PRODUCER_EPOCH:
                _LOG.warning(
                    "%s: no marker for %s-%d, where its producer has a later epoch",
                    transaction.transactional_id,
                    *partition,
                )
        transaction.unsynced += tuple(appended)
        self._left.pop(transaction.producer_id, None)
        if left:
            self._left[transaction.producer_id] = transaction, left
            self._timers.schedule(
                ("markers", transaction.transactional_id),
                now_ms + _RETRY_MS,
                lambda at_ms: self._try_again(transaction, left, at_ms),
            )
            return
        self._ended(transaction, now_ms)
        if transaction.unsynced:
            self.settle_later(transaction, now_ms)

    def look_again(self, producer_id: int, now_ms: int) -> bool:
        """Try at once what is to be tried again later; return whether there is any."""
        transaction, left = self._left.pop(producer_id, (None, []))
        if (
            transaction is None
            or not self._is_current(transaction)
            or transaction.state not in PREPARED
        ):
            return False
        self._timers.cancel(("markers", transaction.transactional_id))
        self._try_again(transaction, left, now_ms)
        return True

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
        """Force a transaction's markers to disk once its producer is idle; forget them.

        It is idle when the transaction has not changed for a second.
        """
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
                # The next record names no partition any more, so the next transaction
                # cannot begin before its record is on disk.
                transaction.foreseen = {}
                self._write(transaction)

        nothing = transaction.producer_id, transaction.producer_epoch, True
        self._out.write_markers(
            Markers(*nothing, COORDINATOR_EPOCH, (), settled, True, earlier)
        )

"""ProducerState: the producers of a partition, their sequences and open transactions.

This state follows from the log. Each process has its own copy as of some offset, and
reads the headers of the batches that other processes have appended since. Snapshots
save a start from reading the whole log.

A sequence is an int32, and 0 follows 2147483647. The last five batches of a producer
are kept, so that a retry gets the offset of the batch that is already in the log.

Source: Kafka's ProducerStateManager and ProducerAppendInfo; KIP-98, KIP-360.
"""

from typing import Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.storage.files.txn_index import AbortedTransaction

BATCHES_KEPT: Final = 5
# Some 64 MB in each process that uses the partition. Any client may send batches with
# made-up producer ids.
MAX_PRODUCERS: Final = 65_536
NO_EPOCH: Final = -1
NO_SEQUENCE: Final = -1
SEQUENCE_MASK: Final = 0x7FFF_FFFF
ABORT_MARKER: Final = 0
COMMIT_MARKER: Final = 1


class AppendedBatch(NamedTuple):
    """The sequences and offsets of a batch that a producer has appended lately."""

    first_sequence: int
    last_sequence: int
    base_offset: int
    last_offset: int
    timestamp: int  # ms, largest in the batch


class EndTransactionMarker(NamedTuple):
    """The record in a control batch that ends a transaction, and its offset."""

    control_type: int  # ABORT_MARKER or COMMIT_MARKER
    coordinator_epoch: int
    offset: int
    timestamp: int


class ProducerEntry:
    """One producer's state in a partition: its epoch, last batches and transaction."""

    __slots__ = (
        "batches",
        "coordinator_epoch",
        "epoch",
        "is_from_snapshot",
        "last_timestamp",
        "producer_id",
        "seen_ms",
        "txn_first_offset",
    )

    def __init__(
        self,
        producer_id: int,
        epoch: int = NO_EPOCH,
        coordinator_epoch: int = -1,
        last_timestamp: int = -1,
        txn_first_offset: int = -1,
    ) -> None:
        self.producer_id = producer_id
        self.epoch = epoch
        self.coordinator_epoch = coordinator_epoch
        self.last_timestamp = last_timestamp
        self.txn_first_offset = txn_first_offset  # -1: no transaction is open
        self.seen_ms = 0  # when it wrote last, by the broker's clock; not in snapshots
        self.batches: list[AppendedBatch] = []
        self.is_from_snapshot = False  # the log may have more of its last five batches


def last_sequence_of(base_sequence: int, last_offset_delta: int) -> int:
    """Return a batch's last sequence; NO_SEQUENCE if the batch has no sequences."""
    if base_sequence < 0:
        return NO_SEQUENCE
    return (base_sequence + last_offset_delta) & SEQUENCE_MASK


class ProducerState:
    """The producers of one partition, as of ``end_offset``.

    Attributes:
        end_offset: all batches below this offset are applied.
        entries: the producers, by producer id.
        ongoing: the producer ids of the open transactions, by first offset.
        now_ms: the wall clock when batches are applied.
        aborted: if it is a list, each aborted transaction is added to it, to rebuild
            the index of aborted transactions.
    """

    __slots__ = ("aborted", "end_offset", "entries", "now_ms", "ongoing")

    def __init__(self, end_offset: int = 0) -> None:
        self.end_offset = end_offset
        self.entries: dict[int, ProducerEntry] = {}
        self.ongoing: dict[int, int] = {}
        self.now_ms = 0
        self.aborted: list[AbortedTransaction] | None = None

    @property
    def first_unstable_offset(self) -> int:
        """The first offset of the oldest open transaction; -1 if none is open."""
        return min(self.ongoing) if self.ongoing else -1

    def add(self, entry: ProducerEntry) -> None:
        """Add a producer whose state was read from a snapshot file."""
        self.entries[entry.producer_id] = entry
        if entry.txn_first_offset >= 0:
            self.ongoing[entry.txn_first_offset] = entry.producer_id

    def check(
        self,
        producer_id: int,
        epoch: int,
        base_sequence: int,
        last_sequence: int,
        transactional: int,
    ) -> AppendedBatch | None:
        """Check a client's batch before it is appended. The state is not changed.

        Args:
            producer_id: the producer of the batch.
            epoch: the producer's epoch.
            base_sequence: the first sequence of the batch.
            last_sequence: the last sequence of the batch.
            transactional: 0 unless the batch is part of a transaction.

        Returns:
            The same batch in the log, if this batch is a retry of it; else None.

        Raises:
            ApiError: INVALID_PRODUCER_EPOCH, OUT_OF_ORDER_SEQUENCE_NUMBER or
                INVALID_TXN_STATE.
        """
        entry = self.entries.get(producer_id)
        # An unknown producer may start at any sequence: its records may have been
        # deleted, or it was idle longer than producer.id.expiration.ms (KIP-360).
        if entry is None or entry.epoch == NO_EPOCH:
            return None
        if epoch == entry.epoch:
            batches = entry.batches
            last = batches[-1][1] if batches else NO_SEQUENCE
            expected = (last + 1) & SEQUENCE_MASK
            if base_sequence != expected:
                for batch in batches:
                    if batch[0] == base_sequence and batch[1] == last_sequence:
                        return batch
                raise ApiError(
                    ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
                    f"producer {producer_id} sent sequence {base_sequence},"
                    f" expected {expected}",
                )
        elif epoch < entry.epoch:
            raise ApiError(
                ErrorCode.INVALID_PRODUCER_EPOCH,
                f"producer {producer_id} sent epoch {epoch}, the log has {entry.epoch}",
            )
        elif base_sequence != 0:
            raise ApiError(
                ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
                f"producer {producer_id} starts epoch {epoch} at sequence"
                f" {base_sequence}, not 0",
            )
        if entry.txn_first_offset >= 0 and not transactional:
            raise ApiError(
                ErrorCode.INVALID_TXN_STATE,
                f"producer {producer_id} has a transaction open in this partition",
            )
        return None

    def check_marker(
        self, producer_id: int, epoch: int, coordinator_epoch: int
    ) -> None:
        """Check the epochs of a transaction's end marker before it is appended.

        Raises:
            ApiError: INVALID_PRODUCER_EPOCH or TRANSACTION_COORDINATOR_FENCED.
        """
        entry = self.entries.get(producer_id)
        if entry is None:
            return
        if epoch < entry.epoch:
            raise ApiError(
                ErrorCode.INVALID_PRODUCER_EPOCH,
                f"marker of epoch {epoch}, the log has {entry.epoch}",
            )
        if coordinator_epoch < entry.coordinator_epoch:
            raise ApiError(
                ErrorCode.TRANSACTION_COORDINATOR_FENCED,
                f"coordinator epoch {coordinator_epoch}, the log has"
                f" {entry.coordinator_epoch}",
            )

    def has_ended(self, producer_id: int, epoch: int) -> bool:
        """Whether a producer has this epoch, and no open transaction in this log."""
        entry = self.entries.get(producer_id)
        return entry is not None and entry.epoch == epoch and entry.txn_first_offset < 0

    def apply(
        self,
        producer_id: int,
        epoch: int,
        batch: AppendedBatch,
        transactional: int,
    ) -> None:
        """Add a committed batch to its producer's state; ``end_offset`` stays."""
        entry = self.entries.get(producer_id) or self._begin(producer_id, epoch)
        batches = entry.batches
        if entry.epoch != epoch:
            entry.epoch = epoch
            batches.clear()
        batches.append(batch)
        if len(batches) > BATCHES_KEPT:
            del batches[0]
        entry.last_timestamp = batch.timestamp
        entry.seen_ms = self.now_ms
        if transactional and entry.txn_first_offset < 0:
            entry.txn_first_offset = batch.base_offset
            self.ongoing[batch.base_offset] = producer_id

    def _begin(self, producer_id: int, epoch: int) -> ProducerEntry:
        """Add an unknown producer; if there are too many, forget some others before."""
        if len(self.entries) >= MAX_PRODUCERS:
            self._forget_oldest()
        entry = self.entries[producer_id] = ProducerEntry(producer_id, epoch)
        return entry

    def _forget_oldest(self) -> None:
        """Forget a sixteenth of the producers: those whose last batches are oldest.

        They are treated as if they had expired (see ``check``). A producer with an open
        transaction stays. The order is that of offsets: timestamps are the clients'.
        """

        def last_offset(producer_id: int) -> int:
            batches = self.entries[producer_id].batches
            return batches[-1].last_offset if batches else -1

        idle = [
            producer_id
            for producer_id, entry in self.entries.items()
            if entry.txn_first_offset < 0
        ]
        idle.sort(key=last_offset)
        surplus = len(self.entries) - MAX_PRODUCERS + MAX_PRODUCERS // 16
        for producer_id in idle[:surplus]:
            del self.entries[producer_id]

    def ended_by(
        self, producer_id: int, marker: EndTransactionMarker
    ) -> AbortedTransaction | None:
        """Return the open transaction that an abort marker, not yet applied, would end.

        Returns:
            None if it is a commit marker, or the producer has no open transaction.
        """
        entry = self.entries.get(producer_id)
        if entry is None or entry.txn_first_offset < 0:
            return None
        if marker.control_type != ABORT_MARKER:
            return None
        others = [o for o in self.ongoing if o != entry.txn_first_offset]
        stable = min(others) if others else marker.offset + 1
        return AbortedTransaction(
            producer_id, entry.txn_first_offset, marker.offset, stable
        )

    def unstable_after(self, producer_id: int) -> int:
        """Return the first offset of the oldest open transaction of other producers.

        -1: there is none.
        """
        return min((o for o, p in self.ongoing.items() if p != producer_id), default=-1)

    def apply_marker(
        self, producer_id: int, epoch: int, marker: EndTransactionMarker
    ) -> None:
        """End a producer's open transaction, as a marker in the log says."""
        if self.aborted is not None:
            aborted = self.ended_by(producer_id, marker)
            if aborted is not None:
                self.aborted.append(aborted)
        entry = self.entries.get(producer_id) or self._begin(producer_id, epoch)
        if entry.epoch != epoch:
            entry.epoch = epoch
            entry.batches.clear()
        if entry.txn_first_offset >= 0:
            self.ongoing.pop(entry.txn_first_offset, None)
            entry.txn_first_offset = -1
        entry.coordinator_epoch = marker.coordinator_epoch
        entry.last_timestamp = marker.timestamp
        entry.seen_ms = self.now_ms

    def remove_expired(self, now_ms: int, expiration_ms: int) -> None:
        """Forget producers that wrote nothing for a time and have no open transaction.

        The time of the last write by the broker's clock counts, too, because records
        may have old timestamps: if such a producer were forgotten, a batch that it
        sends again would be appended twice. Kafka looks at timestamps only, and forgets
        the producer.

        Args:
            now_ms: the wall clock.
            expiration_ms: the time, in ms.
        """
        oldest = now_ms - expiration_ms
        expired = [
            producer_id
            for producer_id, entry in self.entries.items()
            if max(entry.last_timestamp, entry.seen_ms) <= oldest
            and entry.txn_first_offset < 0
        ]
        for producer_id in expired:
            del self.entries[producer_id]

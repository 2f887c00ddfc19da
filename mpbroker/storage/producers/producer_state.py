"""What a partition knows of its producers: epochs, sequences, open transactions.

All of it derives from the log. Each process keeps its own copy up to some offset and
reads the headers of what others appended since; snapshots make the start short.

A sequence is an int32 that wraps to 0 after 2147483647. The last five batches of a
producer are kept, so that a resent batch is answered with its first offset.

Source: Kafka's ProducerStateManager and ProducerAppendInfo; KIP-98, KIP-360.
"""

from typing import Final, NamedTuple

from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.storage.files.txn_index import AbortedTransaction

BATCHES_KEPT: Final = 5
NO_EPOCH: Final = -1
NO_SEQUENCE: Final = -1
SEQUENCE_MASK: Final = 0x7FFF_FFFF
ABORT_MARKER: Final = 0
COMMIT_MARKER: Final = 1


class AppendedBatch(NamedTuple):
    """One of the last batches of a producer."""

    first_sequence: int
    last_sequence: int
    base_offset: int
    last_offset: int
    timestamp: int  # ms, largest in the batch


class EndTransactionMarker(NamedTuple):
    """The one record of a control batch that ends a transaction."""

    control_type: int  # ABORT_MARKER or COMMIT_MARKER
    coordinator_epoch: int
    offset: int
    timestamp: int


class ProducerEntry:
    """One producer's state in this partition."""

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
        self.seen_ms = 0  # when it wrote last, by our clock; not in snapshots
        self.batches: list[AppendedBatch] = []
        self.is_from_snapshot = False  # the log may have more of its last batches


def last_sequence_of(base_sequence: int, last_offset_delta: int) -> int:
    """Return a batch's last sequence, wrapped."""
    if base_sequence < 0:
        return NO_SEQUENCE
    return (base_sequence + last_offset_delta) & SEQUENCE_MASK


class ProducerState:
    """The producers of one partition, as of ``end_offset``."""

    __slots__ = ("aborted", "end_offset", "entries", "now_ms", "ongoing")

    def __init__(self, end_offset: int = 0) -> None:
        self.end_offset = end_offset
        self.entries: dict[int, ProducerEntry] = {}
        self.ongoing: dict[int, int] = {}  # first offset of a transaction: producer
        self.now_ms = 0  # what is applied was written by then
        # What the markers that are applied abort, for who rebuilds the index of it.
        self.aborted: list[AbortedTransaction] | None = None

    @property
    def first_unstable_offset(self) -> int:
        """Where the oldest open transaction starts; -1 if none is open."""
        return min(self.ongoing) if self.ongoing else -1

    def add(self, entry: ProducerEntry) -> None:
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
        """Judge a client's batch before it is appended.

        Returns:
            The batch already in the log, if this one repeats it.

        Raises:
            ApiError: INVALID_PRODUCER_EPOCH, OUT_OF_ORDER_SEQUENCE_NUMBER or
                INVALID_TXN_STATE; nothing has changed.
        """
        entry = self.entries.get(producer_id)
        # A producer we know nothing of may start anywhere: its records may have been
        # deleted, or it may have been idle past producer.id.expiration.ms (KIP-360).
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
        """Judge the coordinator's marker before it is appended.

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
        """Say whether a marker of this epoch would end nothing that is not ended."""
        entry = self.entries.get(producer_id)
        return entry is not None and entry.epoch == epoch and entry.txn_first_offset < 0

    def apply(
        self,
        producer_id: int,
        epoch: int,
        batch: AppendedBatch,
        transactional: int,
    ) -> None:
        """Take over a batch that is in the log."""
        entry = self.entries.get(producer_id)
        if entry is None:
            entry = self.entries[producer_id] = ProducerEntry(producer_id, epoch)
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

    def ended_by(
        self, producer_id: int, marker: EndTransactionMarker
    ) -> AbortedTransaction | None:
        """Return what an abort marker, not yet applied, makes invisible."""
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
        """Return ``first_unstable_offset`` as it will be after this producer's end."""
        return min((o for o, p in self.ongoing.items() if p != producer_id), default=-1)

    def apply_marker(
        self, producer_id: int, epoch: int, marker: EndTransactionMarker
    ) -> None:
        """Take over an end-of-transaction marker that is in the log."""
        if self.aborted is not None:
            aborted = self.ended_by(producer_id, marker)
            if aborted is not None:
                self.aborted.append(aborted)
        entry = self.entries.get(producer_id)
        if entry is None:
            entry = self.entries[producer_id] = ProducerEntry(producer_id, epoch)
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
        """Forget producers that wrote nothing for so long and have nothing open.

        By our clock too: what a producer writes may be dated long ago, and forgetting
        it would append again what it sends again. Kafka forgets it.
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

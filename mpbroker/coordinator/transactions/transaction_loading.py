"""How transactions come back from __transaction_state, and their markers with them.

Source: Kafka's TransactionStateManager.loadTransactionMetadata.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator

from mpbroker.base.logger import get_logger
from mpbroker.coordinator.coordinator_topic import CoordinatorTopic, LoadedRecord
from mpbroker.coordinator.durability import Awaited
from mpbroker.coordinator.outbox import AppendedMarker, Markers
from mpbroker.coordinator.transactions.open_transactions import SharedOpenTransactions
from mpbroker.coordinator.transactions.transaction_coordinator import (
    TransactionCoordinator,
)
from mpbroker.coordinator.transactions.transaction_ends import COORDINATOR_EPOCH
from mpbroker.coordinator.transactions.transaction_markers import (
    MarkerWriter,
    sync_logs,
)
from mpbroker.coordinator.transactions.transaction_metadata import (
    COMPLETE,
    TopicPartition,
    TransactionMetadata,
    TransactionState,
)
from mpbroker.coordinator.transactions.transaction_records import (
    read_transaction,
    what_counts,
)
from mpbroker.protocol.errors import ApiError, ProtocolError

_LOG = get_logger(__name__)

# Where transactions have been begun that no record tells of.
Begun = dict[TransactionMetadata, set[TopicPartition]]


class TransactionLoading:
    """Replays partitions of __transaction_state, and repairs what a power cut has left.

    Args:
        topic: __transaction_state.
    """

    def __init__(
        self,
        topic: CoordinatorTopic,
        coordinator: TransactionCoordinator,
        markers: MarkerWriter,
        shared: SharedOpenTransactions,
    ) -> None:
        self._topic = topic
        self._coordinator = coordinator
        self._markers = markers
        self._shared = shared

    def replay(self, partition: int) -> Iterator[int]:
        """Replay a partition of the log, some records at a time.

        Raises:
            ApiError: it cannot be read.
            OSError: as ApiError.
        """
        replayed = 0
        for records in self._topic.load(partition):
            for record in what_counts(records):
                self._replay_record(partition, record)
            replayed += len(records)
            yield replayed
        begun = self._restore_markers(partition)
        begun.update(self._restore_decided(partition))
        self._begin_again(partition, begun)

    def _restore_markers(self, partition: int) -> Begun:
        """Before anybody may write: append what a power cut took of earlier ends.

        Returns:
            What has been begun behind these, with all partitions that it may be in.
        """
        records: list[tuple[bytes, bytes | None]] = []
        now_ms = time.time_ns() // 1_000_000
        begun: Begun = {}
        those = self._coordinator.with_unsynced_markers(partition)
        restored = self._markers.restore([each.unsynced for each in those], now_ms)
        for transaction, (left, moved) in zip(those, restored, strict=True):
            named = transaction.unsynced
            if transaction.state in COMPLETE and any(
                self._begun_behind(transaction, named)
            ):
                begun[transaction] = _places(named)
            transaction.unsynced = tuple(left)
            # Of what is begun the next record says so: until then these names count.
            if moved and transaction not in begun:
                records.append((transaction.key, transaction.value()))
        self._write(partition, records, now_ms)
        return begun

    def _restore_decided(self, partition: int) -> Begun:
        """Before anybody opens a partition: carry out what was decided.

        Where a marker was before a power cut, a reader may have been. It is carried
        out once more, as ever, when everything is loaded, and completed by that; unless
        the producer's next transaction is there, which that would end.

        Raises:
            ApiError: a marker that nobody would write later cannot be written now.
        """
        now_ms = time.time_ns() // 1_000_000
        found: Begun = {}
        appended: list[Awaited] = []
        is_closed = not self._shared.is_restored()
        for transaction in self._coordinator.decided(partition):
            begun, unseen = self._begun_behind(transaction, transaction.expected)
            if not (is_closed or begun):
                continue
            self._topic.log_of(partition).sync()  # what a dead one decided need not be
            markers = Markers(
                transaction.producer_id,
                transaction.producer_epoch,
                transaction.state is TransactionState.PREPARE_COMMIT,
                COORDINATOR_EPOCH,
                sorted(transaction.partitions - begun - unseen),
                lambda *_: None,
            )
            results, awaited, written = self._markers.append(markers, now_ms)
            appended += awaited
            if begun or unseen:
                self._markers.require_ended(results)
                found[transaction] = begun | _places(transaction.expected)
                # What could not be written is named as if it had been.
                there = begun | _places(written)
                transaction.unsynced += written
                transaction.unsynced += tuple(
                    each
                    for each in transaction.expected
                    if (each.topic, each.partition) not in there
                )
                transaction.complete(now_ms)
        with contextlib.suppress(ApiError):  # it is tried again
            sync_logs(appended)
        return found

    def _begun_behind(
        self, transaction: TransactionMetadata, ends: Iterable[AppendedMarker]
    ) -> tuple[set[TopicPartition], set[TopicPartition]]:
        """Say where the next one has been begun, and where that cannot be told.

        Who does not know takes it that it has: what is off line may come back, with
        records that were acknowledged. While memory is what it was, nothing is lost.
        """
        begun, unseen = self._markers.begun_behind(ends, *transaction.next_identity())
        return begun, set() if self._shared.is_restored() else unseen

    def _begin_again(self, partition: int, begun: Begun) -> None:
        """Go on with transactions that a power cut has left in their partitions only.

        Whatever was acknowledged of them is there; clients know nothing of it.
        """
        records: list[tuple[bytes, bytes | None]] = []
        now_ms = time.time_ns() // 1_000_000
        for transaction, partitions in begun.items():
            _LOG.warning(
                "%s: its last transaction is in its partitions, but not in %s any"
                " more; it goes on",
                transaction.transactional_id,
                self._topic.name,
            )
            self._coordinator.begin_again(transaction, partitions, now_ms)
            records.append((transaction.key, transaction.value()))
        self._write(partition, records, now_ms)

    def _write(
        self, partition: int, records: list[tuple[bytes, bytes | None]], now_ms: int
    ) -> None:
        """Put records on disk before anybody may write to the partitions they name."""
        if records:
            log, _ = self._topic.append(partition, records, now_ms)
            log.sync()

    def _replay_record(self, partition: int, record: LoadedRecord) -> None:
        if record.commit is not None:
            return  # a marker, which nobody writes here
        try:
            read = read_transaction(record.key, record.value)
            if read is not None:
                self._coordinator.replay(*read)
        except (ProtocolError, ValueError) as error:
            _LOG.error("an unreadable record of partition %d: %s", partition, error)

    def finish(self) -> None:
        """Let producers write to what the log says is open, and nothing else."""
        self._shared.keep_only(self._coordinator.open_partitions())
        self._shared.all_loaded()


def _places(markers: Iterable[AppendedMarker]) -> set[TopicPartition]:
    return {(marker.topic, marker.partition) for marker in markers}

"""Load transactions from __transaction_state, and repair logs after a power cut.

The death of a process loses no appended record. A power cut may remove the end of each
log, in each log from another time on. Three repairs are made, in this order, before the
transactions of a partition are served:

    1. Lost markers of earlier transactions are appended again, at new offsets
       (_restore_markers).
    2. After an unclean stop the markers of decided transactions are appended at once: a
       consumer may have read behind them before the power cut (_restore_decided).
    3. A transaction that began without waiting for its record is found in its
       partitions, and goes on (_begin_again).

After a power cut no producer can append meanwhile: the partitions are closed, and the
table of open transactions is empty.

Source: Kafka's TransactionStateManager.loadTransactionMetadata.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

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
    TransactionMetadata,
    TransactionState,
)
from mpbroker.coordinator.transactions.transaction_records import (
    read_transaction,
    what_counts,
)
from mpbroker.metadata.topic_names import TopicPartition
from mpbroker.protocol.errors import ApiError, ProtocolError

if TYPE_CHECKING:
    from mpbroker.storage.log.partition_log import PartitionLog

_LOG = get_logger(__name__)

# Transactions that have begun although no record names them, and their partitions.
Begun = dict[TransactionMetadata, set[TopicPartition]]


class TransactionLoading:
    """Loads partitions of __transaction_state.

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
        """Load and repair a partition of __transaction_state; yield the records read.

        Each step reads some megabytes, and yields the number of records so far.

        Raises:
            ApiError: the partition cannot be read or repaired now; a later load may
                succeed.
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
        """Append the lost markers of earlier transactions again.

        Returns:
            The producers' next transactions that have begun behind these markers, with
            all partitions in which they may have records.
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
            # The record without the marker must be on disk before its producer may
            # write to the old offset. For a transaction that has begun, _begin_again
            # writes it; until then the names in the last record are needed.
            if moved and transaction not in begun:
                records.append((transaction.key, transaction.value()))
        self._write(partition, records, now_ms)
        return begun

    def _restore_decided(self, partition: int) -> Begun:
        """Append the markers of decided transactions, before any partition is opened.

        A consumer may have read behind a marker that the power cut has taken. When
        everything is loaded the decision is carried out again, as after a death, which
        completes the transaction. But if the producer's next transaction has begun in
        one of its partitions, a second marker would end that next transaction. So the
        decided transaction is completed here.

        Raises:
            ApiError: a partition that is online lacks its marker, because the disk is
                full, for example. The load fails, and is tried again later.
        """
        now_ms = time.time_ns() // 1_000_000
        found: Begun = {}
        appended: list[Awaited[PartitionLog]] = []
        is_closed = not self._shared.is_restored()
        for transaction in self._coordinator.decided(partition):
            begun, unseen = self._begun_behind(transaction, transaction.expected)
            if not (is_closed or begun):
                continue
            # Sync the decision before a marker is appended: an earlier coordinator may
            # have died before this sync. A power cut could then take the decision and
            # leave a marker.
            self._topic.log_of(partition).sync.flush()
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
                # A marker that could not be appended is named as if it had been, so
                # that a later load restores it.
                there = begun | _places(written)
                transaction.unsynced += written
                transaction.unsynced += tuple(
                    each
                    for each in transaction.expected
                    if (each.topic, each.partition) not in there
                )
                transaction.complete(now_ms)
        with contextlib.suppress(ApiError):  # the markers are synced again later
            sync_logs(appended)
        return found

    def _begun_behind(
        self, transaction: TransactionMetadata, ends: Iterable[AppendedMarker]
    ) -> tuple[set[TopicPartition], set[TopicPartition]]:
        """Find the partitions in which a producer's next transaction has begun.

        Returns:
            The partitions with records of the next transaction, and the offline
            partitions that may have such records. The second set is empty if there was
            no power cut, which is certain if the partitions are still open in shared
            memory: then no record of __transaction_state is missing.
        """
        begun, unseen = self._markers.begun_behind(ends, *transaction.next_identity())
        return begun, set() if self._shared.is_restored() else unseen

    def _begin_again(self, partition: int, begun: Begun) -> None:
        """Make transactions Ongoing again whose records a power cut has removed.

        All acknowledged records of these transactions are in their partitions, so
        clients notice nothing.

        Args:
            partition: the partition of __transaction_state.
            begun: the transactions, and their partitions.
        """
        records: list[tuple[bytes, bytes | None]] = []
        now_ms = time.time_ns() // 1_000_000
        for transaction, partitions in begun.items():
            _LOG.warning(
                "%s: its last transaction was found in its partitions, but not in %s;"
                " it goes on",
                transaction.transactional_id,
                self._topic.name,
            )
            self._coordinator.begin_again(transaction, partitions, now_ms)
            records.append((transaction.key, transaction.value()))
        self._write(partition, records, now_ms)

    def _write(
        self, partition: int, records: list[tuple[bytes, bytes | None]], now_ms: int
    ) -> None:
        """Append records to a partition of __transaction_state and sync it, if any."""
        if records:
            log, _ = self._topic.append(partition, records, now_ms)
            log.sync.flush()

    def _replay_record(self, partition: int, record: LoadedRecord) -> None:
        if record.commit is not None:
            return  # a marker, which this topic never has
        try:
            read = read_transaction(record.key, record.value)
            if read is not None:
                self._coordinator.replay(*read)
        except (ProtocolError, ValueError) as error:
            _LOG.error(
                "a record of %s-%d cannot be read and is skipped: %s",
                self._topic.name,
                partition,
                error,
            )

    def finish(self) -> None:
        """Let producers write again, only to the partitions of open transactions."""
        self._shared.keep_only(self._coordinator.open_partitions())
        self._shared.all_loaded()


def _places(markers: Iterable[AppendedMarker]) -> set[TopicPartition]:
    return {(marker.topic, marker.partition) for marker in markers}

"""Everything of transactions, put together: what the coordinator's process drives."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from mpbroker.coordinator.durability import Awaited
from mpbroker.coordinator.group_coordinator import GroupCoordinator
from mpbroker.coordinator.offset_metadata_manager import Topics
from mpbroker.coordinator.offsets_topic import LoadedRecord, OffsetsTopic
from mpbroker.coordinator.outbox import Call, Markers, Outbox
from mpbroker.coordinator.timers import Timers
from mpbroker.coordinator.transaction_config import TransactionConfig
from mpbroker.coordinator.transaction_coordinator import TransactionCoordinator
from mpbroker.coordinator.transaction_ends import COORDINATOR_EPOCH
from mpbroker.coordinator.transaction_listing import TransactionListing
from mpbroker.coordinator.transaction_markers import (
    FindLog,
    MarkerRequests,
    MarkerWriter,
    SharedOpenTransactions,
    sync_logs,
)
from mpbroker.coordinator.transaction_metadata import TransactionState
from mpbroker.coordinator.transaction_offsets import TransactionOffsets
from mpbroker.coordinator.transaction_partitions import TransactionPartitions
from mpbroker.coordinator.transaction_records import read_transaction, what_counts
from mpbroker.ipc.transaction_table import TransactionTable
from mpbroker.logger import get_logger
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.errors import ApiError, ProtocolError
from mpbroker.storage.own_appends import OwnAppends
from mpbroker.storage.partition_log import PartitionLog
from mpbroker.storage.topics import TopicRegistry

_LOG = get_logger(__name__)

Handle = Callable[[Call, Any, int], None]


class Transactions:
    """The transaction coordinator, its log and its APIs.

    Args:
        topic: __transaction_state.
        put_back: gives a Produce back to the handlers.
        appended: told of every log that has grown by a marker.
    """

    def __init__(
        self,
        config: TransactionConfig,
        topic: OffsetsTopic,
        groups: GroupCoordinator,
        outbox: Outbox,
        timers: Timers,
        topics: Topics,
        registry: TopicRegistry,
        log: FindLog,
        table: TransactionTable,
        put_back: Callable[[Call], None],
        appended: Callable[[PartitionLog], None],
        offset_metadata_max_bytes: int,
        own_appends: OwnAppends,
    ) -> None:
        self.topic = topic
        self._shared = SharedOpenTransactions(table, registry)
        self.markers = MarkerWriter(registry, log, groups, appended, own_appends)
        self.coordinator = TransactionCoordinator(
            config,
            outbox,
            timers,
            self._shared,
            topic.num_partitions,
            registry.allocate_producer_id,
            self.markers.is_on_disk,
        )
        partitions = TransactionPartitions(
            self.coordinator, outbox, topics, groups.partition_for, put_back
        )
        offsets = TransactionOffsets(
            groups, self.coordinator, outbox, topics, offset_metadata_max_bytes
        )
        listing = TransactionListing(self.coordinator, outbox)
        self.handlers: Final[dict[ApiKey, Handle]] = {
            ApiKey.PRODUCE: partitions.produce,
            ApiKey.INIT_PRODUCER_ID: self.coordinator.init_producer_id,
            ApiKey.ADD_PARTITIONS_TO_TXN: partitions.add_partitions_to_txn,
            ApiKey.ADD_OFFSETS_TO_TXN: partitions.add_offsets_to_txn,
            ApiKey.END_TXN: self.coordinator.end_txn,
            ApiKey.TXN_OFFSET_COMMIT: offsets.txn_offset_commit,
            ApiKey.WRITE_TXN_MARKERS: MarkerRequests(outbox).write_txn_markers,
            ApiKey.DESCRIBE_TRANSACTIONS: listing.describe_transactions,
            ApiKey.LIST_TRANSACTIONS: listing.list_transactions,
        }

    def begin_loading(self) -> list[int]:
        """Return the partitions of the log that are to be loaded."""
        partitions = self.topic.partitions_to_load()
        self.coordinator.begin_loading(partitions)
        return partitions

    def replay_partition(self, partition: int) -> Iterator[int]:
        """Replay a partition of the log, some records at a time.

        Raises:
            ApiError: it cannot be read.
            OSError: as ApiError.
        """
        replayed = 0
        for records in self.topic.load(partition):
            for record in what_counts(records):
                self._replay(partition, record)
            replayed += len(records)
            yield replayed
        self._restore_markers(partition)
        if not self._shared.is_restored():
            self._write_markers(partition)

    def _write_markers(self, partition: int) -> None:
        """Before anybody opens a partition: carry out what was decided.

        Where a marker was before a power cut, a reader may have been. It is carried
        out once more, as ever, when everything is loaded, and completed by that.
        """
        decided = self.coordinator.decided(partition)
        if decided:
            self.topic.log_of(partition).sync()  # what a dead one decided need not be
        now_ms = time.time_ns() // 1_000_000
        appended: list[Awaited] = []
        for transaction in decided:
            markers = Markers(
                transaction.producer_id,
                transaction.producer_epoch,
                transaction.state is TransactionState.PREPARE_COMMIT,
                COORDINATOR_EPOCH,
                sorted(transaction.partitions),
                lambda *_: None,
            )
            appended += self.markers.append(markers, now_ms)[1]
        with contextlib.suppress(ApiError):  # it is tried again
            sync_logs(appended)

    def _restore_markers(self, partition: int) -> None:
        """Before anybody may write: append what a power cut took of earlier ends."""
        records: list[tuple[bytes, bytes | None]] = []
        now_ms = time.time_ns() // 1_000_000
        those = self.coordinator.with_unsynced_markers(partition)
        restored = self.markers.restore([each.unsynced for each in those], now_ms)
        for transaction, (left, moved) in zip(those, restored, strict=True):
            transaction.unsynced = tuple(left)
            if moved:
                records.append((transaction.key, transaction.value()))
        if records:
            # What comes where they were is not of the transactions that they ended.
            log, _ = self.topic.append(partition, records, now_ms)
            log.sync()

    def _replay(self, partition: int, record: LoadedRecord) -> None:
        if record.commit is not None:
            return  # a marker, which nobody writes here
        try:
            read = read_transaction(record.key, record.value)
            if read is not None:
                self.coordinator.replay(*read)
        except (ProtocolError, ValueError) as error:
            _LOG.error("an unreadable record of partition %d: %s", partition, error)

    def all_loaded(self) -> None:
        """Let producers write to what the log says is open, and nothing else."""
        self._shared.keep_only(self.coordinator.open_partitions())
        self._shared.all_loaded()

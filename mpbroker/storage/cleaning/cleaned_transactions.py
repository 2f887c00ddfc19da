"""Decide which transactional batches and markers a compaction removes.

Data batches of an aborted transaction are removed. A marker stays until no data of its
transaction is left, and then for delete.retention.ms more, like a tombstone.

Source: Kafka's CleanedTransactionMetadata.
"""

from mpbroker.protocol.records.batch_header import BatchHeader
from mpbroker.storage.files.txn_index import AbortedTransaction
from mpbroker.storage.producers.producer_state import (
    ABORT_MARKER,
    COMMIT_MARKER,
    EndTransactionMarker,
)


class CleanedTransactions:
    """The transactions of a log, followed from its start, batch by batch.

    The caller passes each transactional batch and marker once, in the log's order.

    Args:
        aborted: all aborted transactions of the log.

    Attributes:
        kept: the aborted transactions whose markers stay, for the index of the
            compacted copy.
    """

    def __init__(self, aborted: list[AbortedTransaction]) -> None:
        self._coming = sorted(aborted, key=lambda txn: txn.first_offset, reverse=True)
        self._aborted: dict[int, AbortedTransaction] = {}
        self._seen: set[int] = set()  # producers with data of an aborted transaction
        self._committed: set[int] = set()
        self.kept: list[AbortedTransaction] = []

    def discards_batch(self, batch: BatchHeader) -> bool:
        """Whether a data batch must be removed, because its transaction was aborted."""
        self._advance(batch.last_offset)
        if not batch.is_transactional:
            return False
        if batch.producer_id in self._aborted:
            self._seen.add(batch.producer_id)
            return True
        self._committed.add(batch.producer_id)
        return False

    def discards_marker(
        self, batch: BatchHeader, marker: EndTransactionMarker | None
    ) -> bool:
        """Whether a transaction's end marker can go, as its data has left the log.

        Args:
            batch: the header of a control batch.
            marker: the marker in it; None: an earlier compaction has emptied it.
        """
        self._advance(batch.last_offset)
        if marker is None:
            return True
        producer = batch.producer_id
        if marker.control_type == ABORT_MARKER:
            transaction = self._aborted.pop(producer, None)
            if transaction is not None and producer in self._seen:
                self._seen.discard(producer)
                self.kept.append(transaction)
                return False
            return True
        if marker.control_type == COMMIT_MARKER:
            if producer in self._committed:
                self._committed.discard(producer)
                return False
            return True
        return False

    def _advance(self, offset: int) -> None:
        while self._coming and self._coming[-1].first_offset <= offset:
            transaction = self._coming.pop()
            self._aborted.setdefault(transaction.producer_id, transaction)

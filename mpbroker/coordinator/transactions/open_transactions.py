"""Write the shared table of open transactions, by topic and partition number.

`ipc/tables/transaction_table.py` draws the table, and says which process looks when.
"""

from __future__ import annotations

from collections.abc import Iterable

from mpbroker.base.logger import get_logger
from mpbroker.ipc.tables.transaction_table import TransactionTable
from mpbroker.metadata.topic_names import OFFSETS_TOPIC, TopicPartition
from mpbroker.metadata.topics import TopicRegistry

_LOG = get_logger(__name__)


class SharedOpenTransactions:
    """Opens and closes partitions to producers in the shared table."""

    def __init__(self, table: TransactionTable, registry: TopicRegistry) -> None:
        self._table = table
        self._registry = registry
        self._rows: dict[int, set[int]] = {}  # producer id -> partitions' rows

    def _row(self, topic_partition: TopicPartition) -> int | None:
        name, partition = topic_partition
        topic = self._registry.topic(name)
        # Only this process writes to the topic of offsets, and it does not look.
        if name == OFFSETS_TOPIC or topic is None:
            return None
        if not 0 <= partition < len(topic.partitions):
            return None
        return topic.partitions[partition]

    def has_room(self, count: int) -> bool:
        """Return whether there is room for so many more partitions."""
        return self._table.has_room(count)

    def open(
        self, producer_id: int, epoch: int, partitions: Iterable[TopicPartition]
    ) -> bool:
        rows = self._rows.setdefault(producer_id, set())
        for topic_partition in partitions:
            row = self._row(topic_partition)
            if row is None:
                continue
            if not self._table.open(producer_id, epoch, row):
                return False
            rows.add(row)
        return True

    def close(self, producer_id: int, partitions: Iterable[TopicPartition]) -> None:
        rows: set[int | None] = {*self._rows.pop(producer_id, ())}
        # A predecessor may have opened these: this process knows only its own rows.
        rows.update(map(self._row, partitions))
        for row in rows:
            if row is not None:
                self._table.close(producer_id, row)

    def is_restored(self) -> bool:
        """Return whether the partitions are open to all processes."""
        return self._table.is_restored()

    def all_loaded(self) -> None:
        """Open the partitions to all processes: no marker is missing any more."""
        closed = self._table.closed()
        self._table.restored()
        if closed is not None:
            _LOG.info("all partitions are open, after %.1f s", closed.for_s)

    def keep_only(self, entries: Iterable[tuple[int, int, TopicPartition]]) -> None:
        """Remove what a predecessor has left in the table, after everything is loaded.

        Args:
            entries: producer id, epoch and partition of all open transactions. Those
                that this process has not opened are removed, too: their records are
                still to be appended, and will open them.
        """
        kept = []
        for producer_id, epoch, topic_partition in entries:
            row = self._row(topic_partition)
            if row is not None and row in self._rows.get(producer_id, ()):
                kept.append((producer_id, epoch, row))
        self._table.keep_only(kept)

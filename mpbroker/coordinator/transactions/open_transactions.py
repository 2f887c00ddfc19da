"""Which producer may write to which partition: the shared table, by names.

`ipc/tables/transaction_table.py` draws the table, and says who looks when.
"""

from __future__ import annotations

from collections.abc import Iterable

from mpbroker.base.logger import get_logger
from mpbroker.coordinator.outbox import TopicPartition
from mpbroker.ipc.tables.transaction_table import TransactionTable
from mpbroker.metadata.topic_names import OFFSETS_TOPIC
from mpbroker.metadata.topics import TopicRegistry

_LOG = get_logger(__name__)


class SharedOpenTransactions:
    """The table of open transactions, by the names of partitions."""

    def __init__(self, table: TransactionTable, registry: TopicRegistry) -> None:
        self._table = table
        self._registry = registry
        self._rows: dict[int, set[int]] = {}  # of a producer

    def _row(self, topic_partition: TopicPartition) -> int | None:
        name, partition = topic_partition
        topic = self._registry.topic(name)
        # The offsets' topic is written by ourselves alone.
        if name == OFFSETS_TOPIC or topic is None:
            return None
        if not 0 <= partition < len(topic.partitions):
            return None
        return topic.partitions[partition]

    def has_room(self, count: int) -> bool:
        """Whether so many more partitions may be opened."""
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
        # A dead one's, of which we know nothing until everything is loaded.
        rows.update(map(self._row, partitions))
        for row in rows:
            if row is not None:
                self._table.close(producer_id, row)

    def is_restored(self) -> bool:
        """Whether everybody is let at the partitions."""
        return self._table.is_restored()

    def all_loaded(self) -> None:
        """Let everybody at the partitions: none lacks a marker any more."""
        closed = self._table.closed()
        self._table.restored()
        if closed is not None:
            _LOG.info("all partitions are open, after %.1f s", closed.for_s)

    def keep_only(self, entries: Iterable[tuple[int, int, TopicPartition]]) -> None:
        """After loading: what a dead coordinator left, as the log has it.

        What we have not opened by then is not in the log yet, but will be.
        """
        kept = []
        for producer_id, epoch, topic_partition in entries:
            row = self._row(topic_partition)
            if row is not None and row in self._rows.get(producer_id, ()):
                kept.append((producer_id, epoch, row))
        self._table.keep_only(kept)

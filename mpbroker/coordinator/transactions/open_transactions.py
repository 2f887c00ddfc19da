"""Write the shared table of open transactions, by topic and partition number.

`ipc/tables/transaction_table.py` describes the table, and tells which processes read it
and when.
"""

from __future__ import annotations

from collections.abc import Iterable

from mpbroker.base.logger import get_logger
from mpbroker.ipc.tables.transaction_table import TransactionTable
from mpbroker.metadata.topic_names import OFFSETS_TOPIC, TopicPartition
from mpbroker.metadata.topics import TopicRegistry

_LOG = get_logger(__name__)


class SharedOpenTransactions:
    """Lets producers write to partitions, and ends that, in a table in shared memory.

    The table has the partitions of each open transaction. A transactional batch for
    another partition is not appended.
    """

    def __init__(self, table: TransactionTable, registry: TopicRegistry) -> None:
        self._table = table
        self._registry = registry
        # By producer id, the rows (numbers of partitions' entries in shared memory)
        # that this process has opened.
        self._rows: dict[int, set[int]] = {}

    def _row(self, topic_partition: TopicPartition) -> int | None:
        name, partition = topic_partition
        topic = self._registry.topic(name)
        # Only this process writes to __consumer_offsets, and without the table.
        if name == OFFSETS_TOPIC or topic is None:
            return None
        if not 0 <= partition < len(topic.partitions):
            return None
        return topic.partitions[partition]

    def has_room(self, count: int) -> bool:
        """Return whether ``count`` more partitions fit the table of transactions."""
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
        # An earlier coordinator may have opened these partitions: `_rows` has only the
        # rows that this process has opened.
        rows.update(map(self._row, partitions))
        for row in rows:
            if row is not None:
                self._table.close(producer_id, row)

    def is_restored(self) -> bool:
        """Return whether all processes may append to partitions.

        After an unclean stop they may not until lost markers are appended again.
        """
        return self._table.is_restored()

    def all_loaded(self) -> None:
        """Let all processes append to partitions again.

        After an unclean stop they wait until the transactions' markers that a power cut
        has taken are appended again.
        """
        closed = self._table.closed()
        self._table.restored()
        if closed is not None:
            _LOG.info("all partitions are open, after %.1f s", closed.for_s)

    def keep_only(self, entries: Iterable[tuple[int, int, TopicPartition]]) -> None:
        """Remove all entries from the table except those of open transactions.

        A dead coordinator may have left others. Call this after all logs are loaded.

        Args:
            entries: producer id, epoch and partition of all open transactions. Their
                entries are kept, except for those that this process has not opened yet:
                it opens them when their records are appended.
        """
        kept = []
        for producer_id, epoch, topic_partition in entries:
            row = self._row(topic_partition)
            if row is not None and row in self._rows.get(producer_id, ()):
                kept.append((producer_id, epoch, row))
        self._table.keep_only(kept)

"""Count partitions of topics, and bytes of records in and out, of each topic and all.

A row (a partition's entry in shared memory) keeps its counts when its topic is deleted
and when another partition gets the row, until the broker's memory is made anew. So the
sums over all rows never run backwards. A topic's own counts begin at 0 and end with the
topic: the row also has the counts from before its present partition.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from mpbroker.exporter.exposition import Family, counter, gauge
from mpbroker.ipc.counters.fetched_bytes import read_fetched_bytes
from mpbroker.ipc.layout import (
    ROW_BYTES_IN_BEFORE,
    ROW_BYTES_OUT_BEFORE,
    ROW_COPIES,
    ROW_COPY_WORDS,
    ROW_VERSION,
    ROW_WORDS,
)
from mpbroker.ipc.tables.partition_table import LogState

if TYPE_CHECKING:
    from mpbroker.ipc.tables.partition_table import PartitionTable
    from mpbroker.metadata.topics import TopicRegistry

PRODUCED: Final = "mpbroker_produced_bytes_total"
FETCHED: Final = "mpbroker_fetched_bytes_total"
TOPIC_PRODUCED: Final = "mpbroker_topic_produced_bytes_total"
TOPIC_FETCHED: Final = "mpbroker_topic_fetched_bytes_total"
TOPIC_PARTITIONS: Final = "mpbroker_topic_partitions"
# Further topics are left out, as partitions are: the page would be too large.
MAX_TOPICS_SHOWN: Final = 20_000

_BYTES_IN: Final = LogState._fields.index("bytes_in")


def topic_families(
    table: PartitionTable, registry: TopicRegistry, handlers: Iterable[int]
) -> Sequence[Family]:
    """Return metrics of bytes produced and fetched, and of partitions, by topic.

    Args:
        handlers: the ids of all handlers since the start.
    """
    rows = registry.row_count
    bytes_in = _bytes_in(table, rows)
    bytes_out = read_fetched_bytes(table.segment.words, rows, handlers)
    words, end = table.segment.words, rows * ROW_WORDS
    in_before, out_before = (
        words[first:end:ROW_WORDS].tolist()
        for first in (ROW_BYTES_IN_BEFORE, ROW_BYTES_OUT_BEFORE)
    )
    produced = counter(PRODUCED, "Bytes of record batches appended to logs.")
    fetched = counter(FETCHED, "Bytes of record batches given to consumers.")
    produced.add(sum(bytes_in))
    fetched.add(sum(bytes_out))
    into = counter(TOPIC_PRODUCED, "By topic, while the topic exists.")
    out_of = counter(TOPIC_FETCHED, "By topic, while the topic exists.")
    partitions = gauge(TOPIC_PARTITIONS, "Partitions of each topic.")
    for topic in list(registry.topics())[:MAX_TOPICS_SHOWN]:
        # A row that was added since the counts were read has none yet.
        known = [row for row in topic.partitions if row < rows]
        into.add(sum(bytes_in[row] - in_before[row] for row in known), topic=topic.name)
        taken = sum(bytes_out[row] - out_before[row] for row in known)
        out_of.add(taken, topic=topic.name)
        partitions.add(len(topic.partitions), topic=topic.name)
    return produced, fetched, into, out_of, partitions


def _bytes_in(table: PartitionTable, rows: int) -> list[int]:
    """Return the bytes appended to each partition's log, by row of the partition table.

    The table is read by columns: row by row, many partitions would take too long.
    """
    words, end = table.segment.words, rows * ROW_WORDS
    versions, copy_0, copy_1, again = (
        words[first:end:ROW_WORDS].tolist()
        for first in (
            ROW_VERSION,
            ROW_COPIES + _BYTES_IN,
            ROW_COPIES + ROW_COPY_WORDS + _BYTES_IN,
            ROW_VERSION,
        )
    )
    columns = zip(versions, copy_0, copy_1, again, strict=True)
    return [
        (even, odd)[version & 1]
        # If the version has changed meanwhile, the value may not be committed.
        if version == later
        else table.row(row).snapshot().bytes_in
        for row, (version, even, odd, later) in enumerate(columns)
    ]

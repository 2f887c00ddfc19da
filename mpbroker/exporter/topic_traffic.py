"""Bytes of records in and out of each topic, and of all there ever were.

Of a row that has lost its topic the counts stay until the broker's memory is made anew,
so the sums over all rows never run backwards; a topic's own go with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from mpbroker.exporter.exposition import Family, counter
from mpbroker.ipc.counters.fetched_bytes import read_fetched_bytes
from mpbroker.ipc.layout import ROW_COPIES, ROW_COPY_WORDS, ROW_VERSION, ROW_WORDS
from mpbroker.ipc.tables.partition_table import LogState

if TYPE_CHECKING:
    from mpbroker.ipc.tables.partition_table import PartitionTable
    from mpbroker.metadata.topics import TopicRegistry

PRODUCED: Final = "mpbroker_produced_bytes_total"
FETCHED: Final = "mpbroker_fetched_bytes_total"
TOPIC_PRODUCED: Final = "mpbroker_topic_produced_bytes_total"
TOPIC_FETCHED: Final = "mpbroker_topic_fetched_bytes_total"
# As of partitions: of more nobody reads the page.
MAX_TOPICS_SHOWN: Final = 20_000

_BYTES_IN: Final = LogState._fields.index("bytes_in")


def topic_families(
    table: PartitionTable, registry: TopicRegistry, handlers: Iterable[int]
) -> Sequence[Family]:
    """Read them.

    Args:
        handlers: all that there ever were.
    """
    rows = registry.row_count
    bytes_in = _bytes_in(table, rows)
    bytes_out = read_fetched_bytes(table.segment.words, rows, handlers)
    produced = counter(PRODUCED, "Bytes of record batches appended to logs.")
    fetched = counter(FETCHED, "Bytes of record batches given to consumers.")
    produced.add(sum(bytes_in))
    fetched.add(sum(bytes_out))
    into = counter(TOPIC_PRODUCED, "The same by topic; it goes when the topic goes.")
    out_of = counter(TOPIC_FETCHED, "The same by topic; it goes when the topic goes.")
    for topic in list(registry.topics())[:MAX_TOPICS_SHOWN]:
        # A row that was made since we counted them has seen nothing yet.
        known = [row for row in topic.partitions if row < rows]
        into.add(sum(bytes_in[row] for row in known), topic=topic.name)
        out_of.add(sum(bytes_out[row] for row in known), topic=topic.name)
    return produced, fetched, into, out_of


def _bytes_in(table: PartitionTable, rows: int) -> list[int]:
    """By columns: row by row it would take a page of many partitions too long."""
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
        # Moved meanwhile: what was read may never be committed.
        if version == later
        else table.row(row).snapshot().bytes_in
        for row, (version, even, odd, later) in enumerate(columns)
    ]

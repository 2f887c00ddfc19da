"""Count bytes of records in and out: of each topic, and of all since the start.

A row keeps its counts when its topic is deleted, until the broker's memory is made
anew. So the sums over all rows never run backwards; a topic's own counts end with it.
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
# Further topics are left out, as partitions are: the page would be too large.
MAX_TOPICS_SHOWN: Final = 20_000

_BYTES_IN: Final = LogState._fields.index("bytes_in")


def topic_families(
    table: PartitionTable, registry: TopicRegistry, handlers: Iterable[int]
) -> Sequence[Family]:
    """Read the counts.

    Args:
        handlers: ids of all handlers since the start.
    """
    rows = registry.row_count
    bytes_in = _bytes_in(table, rows)
    bytes_out = read_fetched_bytes(table.segment.words, rows, handlers)
    produced = counter(PRODUCED, "Bytes of record batches appended to logs.")
    fetched = counter(FETCHED, "Bytes of record batches given to consumers.")
    produced.add(sum(bytes_in))
    fetched.add(sum(bytes_out))
    into = counter(TOPIC_PRODUCED, "By topic, while the topic exists.")
    out_of = counter(TOPIC_FETCHED, "By topic, while the topic exists.")
    for topic in list(registry.topics())[:MAX_TOPICS_SHOWN]:
        # A row that was added since the counts were read has none yet.
        known = [row for row in topic.partitions if row < rows]
        into.add(sum(bytes_in[row] for row in known), topic=topic.name)
        out_of.add(sum(bytes_out[row] for row in known), topic=topic.name)
    return produced, fetched, into, out_of


def _bytes_in(table: PartitionTable, rows: int) -> list[int]:
    """Read the bytes by columns: row by row, many partitions take too long."""
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
        # The version has moved meanwhile: what was read may not be committed.
        if version == later
        else table.row(row).snapshot().bytes_in
        for row, (version, even, odd, later) in enumerate(columns)
    ]

"""Find in the log what a snapshot does not tell of a producer.

A snapshot, being Kafka's file, has the last batch of each producer only. Who loads one
knows one batch where those who appended know five, and would call a resent one of the
other four a gap: to its client that is the end. So the log is asked before it is
refused. Kafka, which loads at a start alone, refuses it.
"""

from bisect import bisect_right
from collections.abc import Callable
from typing import Final

from mpbroker.ipc.tables.partition_table import LogState
from mpbroker.storage.files.batch_scan import scan_producer_batches
from mpbroker.storage.files.segment_list import SegmentList
from mpbroker.storage.producers.producer_state import (
    BATCHES_KEPT,
    SEQUENCE_MASK,
    AppendedBatch,
    ProducerEntry,
    last_sequence_of,
)

# How far back from a producer's oldest known batch it is looked for: what a client has
# in flight, which is five batches, of a usual size and among those of others.
RECALL_BYTES: Final = 8 * 1024 * 1024


def may_be_recalled(entry: ProducerEntry, epoch: int, base_sequence: int) -> bool:
    """Whether a batch may be in the log though the entry does not know it.

    It is behind what is known, and not ahead: gaps cost no look at the log.
    """
    batches = entry.batches
    if not (entry.is_from_snapshot and 0 < len(batches) < BATCHES_KEPT):
        return False
    behind = (batches[0].first_sequence - base_sequence) & SEQUENCE_MASK
    return entry.epoch == epoch and 0 < behind <= SEQUENCE_MASK // 2


def recall_batches(
    entry: ProducerEntry, segments: SegmentList, state: LogState
) -> None:
    """Put before the batches of an entry those that the log has of the same epoch.

    Once for an entry: it is looked for again by nobody.

    Raises:
        CorruptLogError, OSError: the log could not be read; nothing has changed.
    """
    below = entry.batches[0].base_offset
    found: list[AppendedBatch] = []
    wanted, left = BATCHES_KEPT - len(entry.batches), RECALL_BYTES
    for base in reversed(segments.below(below)):
        segment = segments.get(base)
        size, entries = segment.extent(state)
        end, _ = segment.find(below, size, entries)
        if end < 0:
            end = size  # the segment ends before that offset
        segment.offset_index.load(entries)
        start = _indexed_before(segment.offset_index.entry, entries, end - left)
        earlier = [
            AppendedBatch(
                batch.base_sequence,
                last_sequence_of(batch.base_sequence, batch.last_offset_delta),
                batch.base_offset,
                batch.last_offset,
                batch.max_timestamp,
            )
            for _, batch in scan_producer_batches(segment.fd, start, end)
            if batch.producer_id == entry.producer_id
            and batch.producer_epoch == entry.epoch
            and not batch.is_control
        ]
        found[:0] = earlier
        left -= end - start
        if len(found) >= wanted or left <= 0:
            break
    entry.batches[:0] = found[-wanted:]
    entry.is_from_snapshot = False


def _indexed_before(
    entry: Callable[[int], tuple[int, int]], entries: int, position: int
) -> int:
    """Return where the last indexed batch at or before a position starts; or 0."""
    slot = bisect_right(range(entries), position, key=lambda slot: entry(slot)[1])
    return entry(slot - 1)[1] if slot else 0

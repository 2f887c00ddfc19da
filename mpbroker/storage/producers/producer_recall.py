"""Read the last batches of a producer from the log, if a snapshot does not have them.

A snapshot is Kafka's file, and has only the last batch of each producer. A process that
has appended the batches itself knows the last five. After loading a snapshot, a retry
of one of the other four would look like a gap, and OUT_OF_ORDER_SEQUENCE_NUMBER is
fatal for the client. So the log is read before such a batch is refused. Kafka, which
loads snapshots only at its start, refuses it.
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

# How many bytes before a producer's oldest known batch are searched: enough for five
# batches in flight, of usual sizes and among the batches of other clients.
RECALL_BYTES: Final = 8 * 1024 * 1024


def may_be_recalled(entry: ProducerEntry, epoch: int, base_sequence: int) -> bool:
    """Return whether a batch that is not in an entry may be in the log.

    Only if its sequence is below the known ones: a gap above them causes no search.
    """
    batches = entry.batches
    if not (entry.is_from_snapshot and 0 < len(batches) < BATCHES_KEPT):
        return False
    behind = (batches[0].first_sequence - base_sequence) & SEQUENCE_MASK
    return entry.epoch == epoch and 0 < behind <= SEQUENCE_MASK // 2


def recall_batches(
    entry: ProducerEntry, segments: SegmentList, state: LogState
) -> None:
    """Add earlier batches of the same epoch from the log to an entry.

    This is done once for an entry: afterwards ``is_from_snapshot`` is False.

    Raises:
        CorruptLogError, OSError: the log cannot be read; the entry is unchanged.
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
    """Return the position of the last indexed batch at or before a position; or 0."""
    slot = bisect_right(range(entries), position, key=lambda slot: entry(slot)[1])
    return entry(slot - 1)[1] if slot else 0

"""Read the last batches of a producer from the log, if a snapshot does not have them.

A snapshot has the format of Kafka's, and only the last batch of each producer. A
process that has appended the batches itself knows the last five. After a snapshot was
loaded, a retry of one of the other four would look like a gap in the sequences, and
OUT_OF_ORDER_SEQUENCE_NUMBER is fatal for the client. So the log is read before such a
batch is refused. Kafka, which loads snapshots only at its start, refuses it.
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
    """Return whether a batch may be in the log, and missing only in ``entry``.

    This is possible if the batch's sequence is below the known ones. A sequence above
    them is a gap, for which the log is not searched.

    Args:
        entry: the state of the batch's producer.
        epoch: the producer epoch of the batch.
        base_sequence: the first sequence of the batch.
    """
    batches = entry.batches
    if not (entry.is_from_snapshot and 0 < len(batches) < BATCHES_KEPT):
        return False
    behind = (batches[0].first_sequence - base_sequence) & SEQUENCE_MASK
    return entry.epoch == epoch and 0 < behind <= SEQUENCE_MASK // 2


def recall_batches(
    entry: ProducerEntry, segments: SegmentList, state: LogState
) -> None:
    """Add a producer's earlier batches of the same epoch from the log to its entry.

    This is done once for an entry: afterwards ``is_from_snapshot`` is False.

    Args:
        entry: the producer's state, which has one batch at least.
        segments: the segments of the partition.
        state: the committed state of the partition.

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
    """Return the position of the last indexed batch at or before ``position``.

    Args:
        entry: returns (last offset, position in bytes) of an index entry by its number.
        entries: the number of entries.
        position: the position, in bytes.

    Returns:
        0 if there is no such batch.
    """
    slot = bisect_right(range(entries), position, key=lambda slot: entry(slot)[1])
    return entry(slot - 1)[1] if slot else 0

"""LogLookup: find offsets by timestamp and by leader epoch, and a log's ends.

It serves ListOffsets and OffsetForLeaderEpoch. Source: Kafka's UnifiedLog
(fetchOffsetByTimestamp) and LogSegment (findOffsetByTimestamp).
"""

from typing import Final

from mpbroker.ipc.tables.partition_table import LogState
from mpbroker.protocol.records.batch_header import TIMESTAMP_TYPE_FLAG, BatchHeader
from mpbroker.protocol.records.record_batch import iter_records
from mpbroker.storage.files.batch_scan import read_batch, scan_batches
from mpbroker.storage.files.leader_epochs import EpochEntry, LeaderEpochs
from mpbroker.storage.files.log_segment import LogSegment
from mpbroker.storage.files.time_index import NO_TIMESTAMP, TimestampOffset
from mpbroker.storage.log.partition_view import PartitionView


class LogLookup:
    """The part of a PartitionLog that finds offsets for clients.

    Every method raises ApiError as ``PartitionView.require_online`` does, and
    KAFKA_STORAGE_ERROR if the files cannot be read.
    """

    __slots__ = ("_view",)

    def __init__(self, view: PartitionView) -> None:
        self._view = view

    @property
    def leader_epoch(self) -> int:
        """The leader epoch of new batches."""
        return self._view.leader_epoch

    @property
    def epochs(self) -> LeaderEpochs:
        """The partition's leader epochs and their start offsets."""
        return self._view.epochs

    def earliest(self) -> int:
        """Return the log start offset."""
        self._view.require_online()
        return self._view.row.log_start_offset

    def latest(self) -> int:
        """Return the log end offset, which on one node is the high watermark."""
        return self._view.state().log_end_offset

    def last_stable_offset(self) -> int:
        """Return the last stable offset: readers of committed data may read below it.

        It is the first offset of the oldest open transaction, but not below the log
        start offset; if no transaction is open, it is the log end offset.
        """
        state = self._view.state()
        unstable = state.first_unstable_offset
        if unstable < 0:
            return state.log_end_offset
        return max(unstable, self._view.row.log_start_offset)

    def end_offset_for_epoch(self, epoch: int) -> EpochEntry:
        """Return the largest epoch not above ``epoch`` and its end offset."""
        return self.epochs.end_offset_for(epoch, self.latest())

    def offset_for_timestamp(self, timestamp: int) -> tuple[int, int] | None:
        """Return (offset, timestamp) of the first record not older than ``timestamp``.

        None if all records are older.
        """
        return self._view.look(lambda state: self._search(timestamp, state))

    def max_timestamp(self) -> tuple[int, int] | None:
        """Return (offset, timestamp) of the first record with the largest timestamp.

        None if no record has a timestamp.
        """
        largest = self._view.look(self._largest_of_all)
        return None if largest < 0 else self.offset_for_timestamp(largest)

    def _largest_of_all(self, state: LogState) -> int:
        view = self._view
        start_offset = view.row.log_start_offset
        largest = NO_TIMESTAMP
        for segment in view.segments.from_offset(start_offset):
            here = _largest(segment, state)
            if segment.base_offset < start_offset:
                here = _largest_from(segment, start_offset, here, state)
            largest = max(largest, here.timestamp)
            view.close_unless_active(segment)
        return largest

    def _search(self, timestamp: int, state: LogState) -> tuple[int, int] | None:
        view = self._view
        start_offset = view.row.log_start_offset
        for segment in view.segments.from_offset(start_offset):
            if _largest(segment, state).timestamp < timestamp:
                view.close_unless_active(segment)
                continue
            if segment.base_offset == state.active_base_offset:
                time_entries = state.time_index_entries
            else:
                time_entries = segment.time_index.file_entries()
            # Records before this entry's offset have smaller timestamps.
            entry = segment.time_index.lookup(timestamp - 1, time_entries)
            end, entries = segment.extent(state)
            position = segment.offset_index.lookup(
                max(entry.offset, start_offset), entries
            )
            for at, batch in scan_batches(segment.fd, position, end):
                if batch.max_timestamp < timestamp or batch.last_offset < start_offset:
                    continue
                body = read_batch(segment.fd, at, batch)
                found = first_record_at(batch, body, timestamp, start_offset)
                if found is not None:
                    return found
        return None


def _largest(segment: LogSegment, state: LogState) -> TimestampOffset:
    """Return the largest timestamp of a segment, and the last offset of its batch."""
    if segment.base_offset == state.active_base_offset:
        return TimestampOffset(state.max_timestamp, state.max_timestamp_offset)
    return segment.largest_timestamp()


def _largest_from(
    segment: LogSegment, start_offset: int, largest: TimestampOffset, state: LogState
) -> TimestampOffset:
    """Return the largest timestamp of a segment's records from an offset on.

    Args:
        segment: the segment that has ``start_offset``.
        start_offset: the log start offset; records below it were deleted.
        largest: the largest timestamp of all records of the segment, and the last
            offset of its batch.
        state: the committed state of the partition.

    Returns:
        The timestamp and the last offset of its batch; a timestamp of -1: no record is
        left, or none has a timestamp.
    """
    end, entries = segment.extent(state)
    position = segment.offset_index.lookup(start_offset, entries)
    left = TimestampOffset(NO_TIMESTAMP, -1)
    for at, batch in scan_batches(segment.fd, position, end):
        if batch.last_offset < start_offset:
            continue
        here = batch.max_timestamp
        if batch.base_offset < start_offset:
            # A deleted record may have the largest timestamp of this batch.
            body = read_batch(segment.fd, at, batch)
            here = newest_from(batch, body, start_offset)
        elif largest.offset >= batch.base_offset:
            return largest if largest.timestamp > left.timestamp else left
        if here > left.timestamp:
            left = TimestampOffset(here, batch.last_offset)
    return left


class EmptyLog:
    """A LogLookup for a partition that has no files yet, with the same answers."""

    leader_epoch: Final = 0
    epochs: Final = LeaderEpochs([])

    def earliest(self) -> int:
        return 0

    def latest(self) -> int:
        return 0

    def last_stable_offset(self) -> int:
        return 0

    def max_timestamp(self) -> tuple[int, int] | None:
        return None

    def offset_for_timestamp(self, timestamp: int) -> tuple[int, int] | None:
        return None


EMPTY_LOG: Final = EmptyLog()


def newest_from(batch: BatchHeader, body: bytes, start_offset: int) -> int:
    """Return the largest timestamp (ms) of a batch's records from an offset on.

    -1 if there is no such record.
    """
    left = [
        batch.max_timestamp
        if batch.attributes & TIMESTAMP_TYPE_FLAG
        else record.timestamp
        for record in iter_records(body)
        if record.offset >= start_offset
    ]
    return max(left, default=NO_TIMESTAMP)


def first_record_at(
    batch: BatchHeader, body: bytes, timestamp: int, start_offset: int
) -> tuple[int, int] | None:
    """Return (offset, timestamp) of a batch's first record with at least a timestamp.

    Args:
        batch: its header.
        body: all bytes of the batch, header included.
        timestamp: the smallest timestamp, in ms.
        start_offset: records below this offset are left out.

    Returns:
        None if there is no such record.
    """
    stamped_by_broker = batch.attributes & TIMESTAMP_TYPE_FLAG
    for record in iter_records(body):
        own = batch.max_timestamp if stamped_by_broker else record.timestamp
        if own >= timestamp and record.offset >= start_offset:
            return record.offset, own
    return None

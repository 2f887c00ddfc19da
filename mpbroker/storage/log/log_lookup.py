"""Offsets by timestamp, by leader epoch, and at either end (ListOffsets)."""

import os
from collections.abc import Callable
from typing import Final, TypeVar

from mpbroker.base.storage_errors import CorruptLogError
from mpbroker.ipc.tables.partition_table import LogState
from mpbroker.protocol.records.record_batch import iter_records
from mpbroker.storage.files.batch_scan import (
    TIMESTAMP_TYPE_MASK,
    StoredBatch,
    scan_batches,
)
from mpbroker.storage.files.leader_epochs import EpochEntry, LeaderEpochs
from mpbroker.storage.files.log_segment import LogSegment
from mpbroker.storage.files.time_index import NO_TIMESTAMP, TimestampOffset
from mpbroker.storage.log.log_reader import LogReader

_T = TypeVar("_T")


class LogLookup(LogReader):
    """The looking-up part of a partition's log."""

    def earliest(self) -> int:
        """Return the log start offset."""
        self.require_online()
        return self._words[self._start_word]

    def latest(self) -> int:
        """Return the log end offset, which on one node is the high watermark."""
        return self.state().log_end_offset

    def last_stable_offset(self) -> int:
        """Return the end of what readers of committed data may see."""
        state = self.state()
        unstable = state.first_unstable_offset
        if unstable < 0:
            return state.log_end_offset
        return max(unstable, self._words[self._start_word])

    def end_offset_for_epoch(self, epoch: int) -> EpochEntry:
        """Return the largest epoch not above ``epoch`` and where it ends."""
        return self.epochs.end_offset_for(epoch, self.latest())

    def offset_for_timestamp(self, timestamp: int) -> tuple[int, int] | None:
        """Return (offset, timestamp) of the first record not older than ``timestamp``.

        Raises:
            ApiError: KAFKA_STORAGE_ERROR...
        """
        return self.look_up(lambda state: self._search(timestamp, state))

    def max_timestamp(self) -> tuple[int, int] | None:
        """Return (offset, timestamp) of the first record with the largest timestamp."""
        largest = self.look_up(self._largest_of_all)
        return None if largest < 0 else self.offset_for_timestamp(largest)

    def look_up(self, look: Callable[[LogState], _T]) -> _T:
        """Look into files that belong together, once they do."""
        made_room = False
        while True:
            state = self.state()
            try:
                self.refresh(state.active_base_offset)
                found = look(state)
            except (FileNotFoundError, CorruptLogError) as error:
                self._structure_moved_or_fail(error)
                continue
            except OSError as error:
                if not made_room and self._descriptors_released(error):
                    made_room = True
                    continue
                self.fail(error, "cannot be read")
            if self._words[self._structure_word] == self._structure:
                return found

    def _largest_of_all(self, state: LogState) -> int:
        start_offset = self._words[self._start_word]
        largest = NO_TIMESTAMP
        for segment in self.segments.from_offset(start_offset):
            here = self._largest(segment, state)
            if segment.base_offset < start_offset:
                here = self._largest_from(segment, start_offset, here, state)
            largest = max(largest, here.timestamp)
            self._close_unless_active(segment)
        return largest

    def _largest(self, segment: LogSegment, state: tuple[int, ...]) -> TimestampOffset:
        if segment.base_offset == state[1]:
            return TimestampOffset(state[6], state[7])
        return segment.largest_timestamp()

    def _largest_from(
        self,
        segment: LogSegment,
        start_offset: int,
        largest: TimestampOffset,
        state: tuple[int, ...],
    ) -> TimestampOffset:
        """As ``_largest``, of a segment whose first records were deleted.

        Args:
            largest: of all of its records; the offset is that of a batch's last.
        """
        active = segment.base_offset == state[1]
        entries = state[3] if active else segment.offset_index.file_entries()
        position = segment.offset_index.lookup(start_offset, entries)
        end = state[2] if active else segment.file_size()
        left = TimestampOffset(NO_TIMESTAMP, -1)
        for batch in scan_batches(segment.fd, position, end):
            if batch.last_offset < start_offset:
                continue
            here = batch.max_timestamp
            if batch.base_offset < start_offset:  # it may be of a deleted one
                here = newest_from(segment.fd, batch, start_offset)
            elif largest.offset >= batch.base_offset:
                return largest if largest.timestamp > left.timestamp else left
            if here > left.timestamp:
                left = TimestampOffset(here, batch.last_offset)
        return left

    def _search(self, timestamp: int, state: tuple[int, ...]) -> tuple[int, int] | None:
        start_offset = self._words[self._start_word]
        for segment in self.segments.from_offset(start_offset):
            if self._largest(segment, state).timestamp < timestamp:
                self._close_unless_active(segment)
                continue
            if segment.base_offset == state[1]:
                end, entries, time_entries = state[2], state[3], state[4]
            else:
                end = segment.file_size()
                entries = segment.offset_index.file_entries()
                time_entries = segment.time_index.file_entries()
            # All before this entry's offset is older than the timestamp.
            entry = segment.time_index.lookup(timestamp - 1, time_entries)
            position = segment.offset_index.lookup(
                max(entry.offset, start_offset), entries
            )
            for batch in scan_batches(segment.fd, position, end):
                if batch.max_timestamp < timestamp or batch.last_offset < start_offset:
                    continue
                found = first_record_at(segment.fd, batch, timestamp, start_offset)
                if found is not None:
                    return found
        return None


class EmptyLog:
    """As LogLookup, of a partition that nobody has touched: it has no files yet."""

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


def newest_from(fd: int, batch: StoredBatch, start_offset: int) -> int:
    """Return the largest timestamp of a batch's records from an offset on."""
    left = [
        batch.max_timestamp
        if batch.attributes & TIMESTAMP_TYPE_MASK
        else record.timestamp
        for record in iter_records(os.pread(fd, batch.size, batch.position))
        if record.offset >= start_offset
    ]
    return max(left, default=NO_TIMESTAMP)


def first_record_at(
    fd: int, batch: StoredBatch, timestamp: int, start_offset: int
) -> tuple[int, int] | None:
    """Return (offset, timestamp) of a batch's first record not older than that."""
    body = os.pread(fd, batch.size, batch.position)
    stamped_by_broker = batch.attributes & TIMESTAMP_TYPE_MASK
    for record in iter_records(body):
        own = batch.max_timestamp if stamped_by_broker else record.timestamp
        if own >= timestamp and record.offset >= start_offset:
            return record.offset, own
    return None

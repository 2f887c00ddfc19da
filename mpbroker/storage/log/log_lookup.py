"""LogLookup: find offsets by timestamp and by leader epoch, and a log's first and last.

It serves ListOffsets and OffsetForLeaderEpoch. Source: Kafka's UnifiedLog
(fetchOffsetByTimestamp) and LogSegment (findOffsetByTimestamp).
"""

from typing import TYPE_CHECKING, Final

from mpbroker.base.storage_errors import LookupLimitError
from mpbroker.ipc import pulse
from mpbroker.ipc.tables.partition_table import LogState
from mpbroker.protocol.records.batch_header import TIMESTAMP_TYPE_FLAG, BatchHeader
from mpbroker.protocol.records.record_batch import RecordBatchError, records_payload
from mpbroker.protocol.records.record_find import NO_RECORDS, find_record
from mpbroker.storage.files.batch_scan import read_batch, scan_batches
from mpbroker.storage.files.leader_epochs import EpochEntry, LeaderEpochs
from mpbroker.storage.files.log_segment import LogSegment
from mpbroker.storage.files.time_index import NO_TIMESTAMP, TimestampOffset
from mpbroker.storage.log.partition_view import PartitionView

if TYPE_CHECKING:
    from mpbroker.storage.remote.remote_manifest import RemoteSegment


# As much as the largest batch can have: its lookup takes 0.2 s.
_LOOKUP_BYTES: Final = 100 * 1024 * 1024
_INT64_MIN: Final = -(1 << 63)
_INT64_MAX: Final = (1 << 63) - 1


class LookupBudget:
    """A limit of the bytes, decompressed, that the lookups of one request look through.

    A batch of 3 KB can inflate to 100 MiB, and a request can ask for a timestamp in
    each of a hundred thousand partitions. The first batch may have any size.

    Args:
        most: how many bytes; further batches are refused when so many were looked
            through.
    """

    __slots__ = ("left",)

    def __init__(self, most: int = _LOOKUP_BYTES) -> None:
        self.left = most

    def check(self) -> None:
        """Raise LookupLimitError if the budget is spent."""
        if self.left <= 0:
            raise LookupLimitError(
                "this request has looked through as many records as one may"
            )


class LogLookup:
    """The part of a PartitionLog that finds offsets for clients.

    Every method raises ApiError as ``PartitionView.require_online`` does, and
    KAFKA_STORAGE_ERROR if the files cannot be read. ``offset_for_timestamp`` and
    ``max_timestamp`` also raise RemotePendingError, and LookupLimitError if they are
    given a budget.
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
        """Return the largest leader epoch up to ``epoch``, and its end offset."""
        return self.epochs.end_offset_for(epoch, self.latest())

    def offset_for_timestamp(
        self, timestamp: int, budget: LookupBudget | None = None
    ) -> tuple[int, int] | None:
        """Return (offset, timestamp in ms) of the first record at or after a timestamp.

        Args:
            timestamp: the timestamp, in ms.
            budget: the request's budget; None: there is no limit.

        Returns:
            None if all records are older.
        """
        return self._view.look(lambda state: self._search(timestamp, state, budget))

    def max_timestamp(
        self, budget: LookupBudget | None = None
    ) -> tuple[int, int] | None:
        """Return (offset, timestamp) of the first record with the largest timestamp.

        The timestamp is in ms.

        Returns:
            None if no record has a timestamp.
        """
        largest = self._view.look(lambda state: self._largest_of_all(state, budget))
        return None if largest < 0 else self.offset_for_timestamp(largest, budget)

    def _largest_of_all(self, state: LogState, budget: LookupBudget | None) -> int:
        view = self._view
        start_offset = view.row.log_start_offset
        largest = max(
            (each.largest_timestamp for each in self._remote(start_offset)),
            default=NO_TIMESTAMP,
        )
        for segment in view.segments.from_offset(start_offset):
            here = _largest(segment, state)
            if segment.base_offset < start_offset:
                here = _largest_from(segment, start_offset, here, state, budget)
            largest = max(largest, here.timestamp)
            view.close_unless_active(segment)
        return largest

    def _remote(self, start_offset: int) -> "list[RemoteSegment]":
        """Return the partition's segments whose records are only in the remote store.

        Segments that end at or below ``start_offset`` are left out.
        """
        view = self._view
        first = view.segments.bases[0]
        if start_offset >= first:
            return []
        return [
            each
            for each in view.remote_segments()
            if start_offset < each.next_base and each.base_offset < first
        ]

    def earliest_local(self) -> int:
        """Return the first offset that is on this machine's disk."""
        return max(self._view.row.log_start_offset, self._view.look(self._first_local))

    def _first_local(self, _: LogState) -> int:
        return self._view.segments.bases[0]

    def latest_tiered(self) -> int:
        """Return the last offset that the remote store has; -1: it has none."""
        segments = self._view.look(lambda _: self._view.remote_segments())
        return segments[-1].next_base - 1 if segments else -1

    def earliest_pending_upload(self) -> int:
        """Return the first offset that the remote store does not have yet.

        If the store has none, it is the log start offset; -1: the segments from there
        on are not known, as their local copies are gone.

        Source: Kafka's UnifiedLog.fetchEarliestPendingUploadOffset.
        """
        tiered, start = self.latest_tiered(), self._view.row.log_start_offset
        if tiered >= 0:
            return max(tiered + 1, start)
        return start if self.earliest_local() == start else -1

    def _search(
        self, timestamp: int, state: LogState, budget: LookupBudget | None
    ) -> tuple[int, int] | None:
        view = self._view
        start_offset = view.row.log_start_offset
        for remote in self._remote(start_offset):
            if remote.largest_timestamp < timestamp:
                continue
            with view.remote.opened(remote) as cached:
                for batch, body in cached.batches_from(timestamp, start_offset):
                    found = first_record_at(
                        batch, body, timestamp, start_offset, budget
                    )
                    if found is not None:
                        return found
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
                found = first_record_at(batch, body, timestamp, start_offset, budget)
                if found is not None:
                    return found
        return None


def _largest(segment: LogSegment, state: LogState) -> TimestampOffset:
    """Return a segment's largest timestamp (ms), and the last offset of its batch."""
    if segment.base_offset == state.active_base_offset:
        return TimestampOffset(state.max_timestamp, state.max_timestamp_offset)
    return segment.largest_timestamp()


def _largest_from(
    segment: LogSegment,
    start_offset: int,
    largest: TimestampOffset,
    state: LogState,
    budget: LookupBudget | None,
) -> TimestampOffset:
    """Return the largest timestamp (ms) of a segment's records from an offset on.

    Args:
        segment: the segment that has ``start_offset``.
        start_offset: the log start offset; records below it were deleted.
        largest: the largest timestamp of all records of the segment, and the last
            offset of the batch with it.
        state: the committed state of the partition.
        budget: the request's budget; None: there is no limit.

    Returns:
        The timestamp, and the last offset of the batch with it; a timestamp of -1: no
        record is left, or no record has a timestamp.
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
            here = newest_from(batch, body, start_offset, budget)
        elif largest.offset >= batch.base_offset:
            return largest if largest.timestamp > left.timestamp else left
        if here > left.timestamp:
            left = TimestampOffset(here, batch.last_offset)
    return left


class EmptyLog:
    """The LogLookup of a partition without files: it answers as for an empty log."""

    leader_epoch: Final = 0
    epochs: Final = LeaderEpochs([])

    def earliest(self) -> int:
        return 0

    def latest(self) -> int:
        return 0

    def earliest_local(self) -> int:
        return 0

    def latest_tiered(self) -> int:
        return -1

    def earliest_pending_upload(self) -> int:
        return 0

    def last_stable_offset(self) -> int:
        return 0

    def max_timestamp(
        self, budget: LookupBudget | None = None
    ) -> tuple[int, int] | None:
        return None

    def offset_for_timestamp(
        self, timestamp: int, budget: LookupBudget | None = None
    ) -> tuple[int, int] | None:
        return None


EMPTY_LOG: Final = EmptyLog()


def newest_from(
    batch: BatchHeader,
    body: bytes,
    start_offset: int,
    budget: LookupBudget | None = None,
) -> int:
    """Return the largest timestamp (ms) of a batch's records from an offset on.

    Args:
        batch: the batch's header.
        body: all bytes of the batch, header included.
        start_offset: records below this offset are left out.
        budget: the request's budget; None: there is no limit.

    Returns:
        The timestamp; -1: the batch has no such record.

    Raises:
        LookupLimitError: the budget is spent.
        RecordBatchError, DecompressionError: the batch is damaged.
    """
    records = _records(batch, body, budget)
    offset_delta = start_offset - batch.base_offset
    found, delta = find_record(records, batch.record_count, _INT64_MAX, offset_delta)
    if found == NO_RECORDS:
        return NO_TIMESTAMP
    if batch.attributes & TIMESTAMP_TYPE_FLAG:
        return batch.max_timestamp
    return batch.base_timestamp + delta


def first_record_at(
    batch: BatchHeader,
    body: bytes,
    timestamp: int,
    start_offset: int,
    budget: LookupBudget | None = None,
) -> tuple[int, int] | None:
    """Return (offset, timestamp) of a batch's first record at or after a timestamp.

    Args:
        batch: the batch's header.
        body: all bytes of the batch, header included.
        timestamp: the smallest timestamp, in ms.
        start_offset: records below this offset are left out.
        budget: the request's budget; None: there is no limit.

    Returns:
        None if there is no such record.

    Raises:
        LookupLimitError: the budget is spent.
        RecordBatchError, DecompressionError: the batch is damaged.
    """
    records = _records(batch, body, budget)
    stamped_by_broker = batch.attributes & TIMESTAMP_TYPE_FLAG
    if stamped_by_broker:
        if batch.max_timestamp < timestamp:
            return None
        least = _INT64_MIN
    else:
        least = timestamp - batch.base_timestamp
    offset_delta = start_offset - batch.base_offset
    found, delta = find_record(records, batch.record_count, least, offset_delta)
    if found < 0:
        return None
    own = batch.max_timestamp if stamped_by_broker else batch.base_timestamp + delta
    return batch.base_offset + found, own


def _records(batch: BatchHeader, body: bytes, budget: LookupBudget | None) -> bytes:
    """Return the records of a batch, decompressed, and charge the budget for them."""
    if budget is not None:
        budget.check()
    pulse.step()
    if len(body) < batch.size_in_bytes or batch.record_count < 0:
        raise RecordBatchError(
            f"batch of {batch.size_in_bytes} bytes and {batch.record_count} records in"
            f" {len(body)} bytes"
        )
    records = records_payload(batch, body)
    if budget is not None:
        budget.left -= len(records)
    return records

"""LogReader: find the file, position and length of the bytes that a fetch reads.

No bytes are copied: the process that owns the connection sends them from the file. They
are only committed bytes, which are those of completed appends, and for clients with
isolation.level=read_committed only those below the last stable offset.

Source: Kafka's UnifiedLog.read, for results and errors.
"""

import os
from typing import Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.base.storage_errors import CorruptLogError
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.storage.files.batch_scan import batch_size_at
from mpbroker.storage.files.log_segment import LogSegment
from mpbroker.storage.files.txn_index import find_aborted
from mpbroker.storage.log.core_plans import ReadPlan
from mpbroker.storage.log.partition_view import (
    ACTIVE_BASE,
    ACTIVE_SIZE,
    END_OFFSET,
    FIRST_UNSTABLE,
    INDEX_ENTRIES,
    ONLINE,
    PartitionView,
)

_ATTEMPTS: Final = 10
_new_tuple: Final = tuple.__new__  # a third of the cost of calling the class


class ReadResult(NamedTuple):
    """The range of bytes ("region") of a segment file that answers a fetch.

    Attributes:
        segment_path: the log file.
        segment_id: the number that identifies the file (base/file_id.py), to find out
            whether ``segment_path`` still names it: compaction replaces files under the
            same name.
        fd: an open descriptor of the file, which belongs to the LogReader's segment;
            -1: the file is not open.
        position: the beginning of the region in the file, in bytes.
        length: the region's length in bytes; 0: there is nothing to read.
        high_watermark: the log end offset.
        last_stable_offset: the first offset of the oldest open transaction, or the log
            end offset.
        log_start_offset: the log start offset.
        aborted_transactions: (producer id, first offset) of the aborted transactions
            with records in the region, in the order of their abort markers; None for
            clients without isolation.level=read_committed.
    """

    segment_path: str
    segment_id: int
    fd: int
    position: int
    length: int
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int
    aborted_transactions: list[tuple[int, int]] | None


class LogReader:
    """The part of a PartitionLog that serves fetches."""

    __slots__ = ("_plan", "_view")

    def __init__(self, view: PartitionView) -> None:
        self._view = view
        self._plan: ReadPlan | None = None

    def plan(self) -> ReadPlan:
        """Update and return what the compiled core must know to read this log's end.

        It is the same ReadPlan object every time. When another segment becomes active,
        the core leaves reads to this class until this method is called again.
        """
        view, plan = self._view, self._plan
        if plan is None:
            plan = self._plan = ReadPlan(view.row.index, view.positions)
        if plan.segment is not view.active:
            plan.txn_index_path = os.fsencode(view.active.txn_index_path)
        plan.segment = view.active
        plan.active_base = view.active_base
        plan.structure = view.structure
        if plan.leader_epoch < 0:
            plan.leader_epoch = view.known_epoch
        return plan

    def read(
        self,
        fetch_offset: int,
        max_bytes: int,
        *,
        min_one_batch: bool,
        read_committed: bool = False,
    ) -> ReadResult:
        """Find the bytes from ``fetch_offset`` on, in one segment.

        The first batch may start below ``fetch_offset``. The last batch may be cut off
        at ``max_bytes``.

        Args:
            fetch_offset: the offset of the first record to read.
            max_bytes: the largest length of the region, but see ``min_one_batch``.
            min_one_batch: if the first batch is larger than ``max_bytes``, return this
                one batch; if false, return a length of 0 instead.
            read_committed: stop at the last stable offset, and name aborted
                transactions.

        Raises:
            ApiError: OFFSET_OUT_OF_RANGE, KAFKA_STORAGE_ERROR,
                UNKNOWN_TOPIC_OR_PARTITION (deleted).
            RemotePendingError: the records are in the remote store.
        """
        view, max_bytes = self._view, max(0, max_bytes)
        words = view.words
        for _ in range(_ATTEMPTS):
            if words[view.status_word] != ONLINE:
                view.require_online()
            try:
                found = self._try_read(
                    fetch_offset, max_bytes, min_one_batch, read_committed
                )
            except (FileNotFoundError, CorruptLogError) as error:
                if fetch_offset >= words[view.start_word]:
                    view.moved_or_fail(error)
                continue  # or the records were deleted during the search
            except OSError as error:
                if view.descriptors_released(error):
                    continue
                view.fail(error, "cannot be read")
            # The version has not moved: all files opened meanwhile belong together.
            if words[view.structure_word] == view.structure:
                return found
        raise ApiError(
            ErrorCode.KAFKA_STORAGE_ERROR,
            f"{view.directory}: its files changed {_ATTEMPTS} times during one read",
        )

    def nothing(self, *, read_committed: bool) -> ReadResult:
        """Return a ReadResult without records, which has the log's current offsets.

        Raises:
            ApiError: as ``PartitionView.require_online``.
        """
        state = self._view.state()
        start, end = self._view.row.log_start_offset, state.log_end_offset
        unstable = state.first_unstable_offset
        stable = max(unstable, start) if unstable >= 0 else end
        aborted: list[tuple[int, int]] | None = [] if read_committed else None
        return ReadResult("", 0, -1, 0, 0, end, stable, start, aborted)

    def _try_read(
        self,
        fetch_offset: int,
        max_bytes: int,
        min_one_batch: bool,
        read_committed: bool,
    ) -> ReadResult:
        """Make one attempt at ``read``, with the arguments of ``read``.

        Other processes may change the files meanwhile. So the caller looks afterwards
        whether the structure version has moved, and tries again if it has.
        """
        view = self._view
        words = view.words
        state = view.committed()
        end_offset, active_base = state[END_OFFSET], state[ACTIVE_BASE]
        start_offset = words[view.start_word]
        if not start_offset <= fetch_offset <= end_offset:
            raise out_of_range(fetch_offset, start_offset, end_offset, view.directory)
        unstable = state[FIRST_UNSTABLE]
        # The first records of an open transaction may have been deleted since.
        stable_offset = max(unstable, start_offset) if unstable >= 0 else end_offset
        upper = stable_offset if read_committed else end_offset
        if (
            active_base != view.active_base
            or words[view.structure_word] != view.structure
        ):
            view.refresh(active_base)
        if fetch_offset < view.segments.bases[0]:
            found = None
            # Read the log start offset again: retention raises it before it removes
            # segments.
            start_offset = words[view.start_word]
            if fetch_offset < start_offset:
                raise out_of_range(
                    fetch_offset, start_offset, end_offset, view.directory
                )
            # Without a remote store these offsets are a gap, as in a log that is
            # mirrored from one whose first records were compacted.
            if view.is_tiered:
                found = self._read_remote(
                    fetch_offset, max_bytes, min_one_batch, read_committed, end_offset
                )
            if found is not None:
                return found._replace(
                    last_stable_offset=stable_offset, log_start_offset=start_offset
                )
            fetch_offset = view.segments.bases[0]
        segment, position, end = self._locate(fetch_offset, upper, state)
        length = end - position
        if length > max_bytes:
            length = _limit(segment, position, max_bytes, min_one_batch)
        elif upper == end_offset and end == state[ACTIVE_SIZE]:
            # The next fetch of this reader begins here.
            view.remember(end_offset, segment, end)
        # The number is that of the descriptor, so the path may be opened later.
        path, fd, number = segment.path, segment.fd, segment.file_id
        aborted: list[tuple[int, int]] | None = [] if read_committed else None
        if read_committed and length:
            stop = position + length if length < end - position else None
            until = self._offset_behind(segment, stop, upper, state)
            aborted = self._aborted(segment, fetch_offset, until, end_offset)
        return _new_tuple(
            ReadResult,
            (
                path,
                number,
                fd,
                position,
                length,
                end_offset,
                stable_offset,
                start_offset,
                aborted,
            ),
        )

    def _read_remote(
        self,
        offset: int,
        max_bytes: int,
        min_one_batch: bool,
        read_committed: bool,
        end_offset: int,
    ) -> ReadResult | None:
        """Find the bytes for a fetch in segments that are only in the remote store.

        The result is None if a local segment has the next records.

        All records in the remote store are below the last stable offset. In the result
        the last stable offset and the log start offset are not set yet.
        """
        region = self._view.remote.read(
            offset,
            max_bytes,
            min_one_batch=min_one_batch,
            aborted_below=end_offset if read_committed else None,
        )
        if region is None:
            return None
        aborted: list[tuple[int, int]] | None = None
        if read_committed:
            found, following = region.aborted, region.following
            if following >= 0:
                self._add_aborted(found, following, offset, region.until, end_offset)
            aborted = list(found)
        return ReadResult(
            region.path,
            region.file_id,
            -1,  # the connection's process opens the file
            region.position,
            region.length,
            end_offset,
            end_offset,
            0,
            aborted,
        )

    def _locate(
        self, offset: int, upper: int, state: tuple[int, ...]
    ) -> tuple[LogSegment, int, int]:
        """Find the position of the batch with ``offset``, or of the next batch.

        Args:
            offset: the offset to read from.
            upper: the offset behind the last readable record.
            state: the committed state, as a plain tuple of LogState's fields.

        Returns:
            The segment, the position in bytes of the batch in it, and the end in bytes
            of the segment's readable part. Both are equal if there is nothing to read.
        """
        view = self._view
        if not view.has_readers:
            view.expect_readers()
        found = view.positions.get(offset)
        if found is not None:
            segment, position = found
            end = self._readable_end(segment, upper, state)
            if position < end or segment is view.active:
                return segment, position, max(position, end)
        segments = view.segments
        if segments.trim():
            view.positions.clear()
        located = segments.floor(offset)
        while located is not None:
            end = self._readable_end(located, upper, state)
            if offset >= upper:
                return located, end, end
            if offset <= located.base_offset:
                position = 0
            else:
                entries = self._entries(located, state)
                position, _ = located.find(offset, end, entries)
            if 0 <= position < end:
                if located is view.active:
                    # Other readers often follow: the compiled core finds this position.
                    view.remember(offset, located, position)
                return located, position, end
            # Compaction can leave a gap between a segment's last batch and the next
            # segment.
            base = segments.next_base(located.base_offset)
            if base is None or base >= upper:
                return located, end, end
            located = segments.get(base)
        raise CorruptLogError(f"{view.directory}: no segment holds offset {offset}")

    def _entries(self, segment: LogSegment, state: tuple[int, ...]) -> int:
        if segment is self._view.active:
            return state[INDEX_ENTRIES]
        return segment.offset_index.file_entries()

    def _readable_end(
        self, segment: LogSegment, upper: int, state: tuple[int, ...]
    ) -> int:
        view = self._view
        size = state[ACTIVE_SIZE] if segment is view.active else segment.file_size()
        if upper < state[END_OFFSET]:
            # Readers of committed data stop before the batch that holds ``upper``.
            following = view.segments.next_base(segment.base_offset)
            if following is None or upper < following:
                if upper <= segment.base_offset:
                    return 0
                position, _ = segment.find(upper, size, self._entries(segment, state))
                return position if position >= 0 else size
        return size

    def _offset_behind(
        self,
        segment: LogSegment,
        position: int | None,
        upper: int,
        state: tuple[int, ...],
    ) -> int:
        """Return an offset above all records before a position of a segment.

        Args:
            segment: the segment.
            position: the position in bytes; None: the end of the readable bytes.
            upper: the offset behind the last readable record, the largest result.
            state: the committed state, as a plain tuple of LogState's fields.
        """
        found = None
        if position is not None:
            entries = self._entries(segment, state)
            found = segment.offset_index.offset_behind(position, entries)
        if found is None:
            found = self._view.segments.next_base(segment.base_offset)
        return upper if found is None else min(found, upper)

    def _aborted(
        self, segment: LogSegment, offset: int, until: int, end_offset: int
    ) -> list[tuple[int, int]]:
        # A transaction's entry is in the segment of its abort marker, which may be a
        # later one than that of its records. A process killed between entry and marker
        # leaves an entry that is then written twice. Clients count entries, so return
        # each only once.
        found: dict[tuple[int, int], None] = {}
        self._add_aborted(found, segment.base_offset, offset, until, end_offset)
        return list(found)

    def _add_aborted(
        self,
        found: dict[tuple[int, int], None],
        from_base: int,
        offset: int,
        until: int,
        end_offset: int,
    ) -> None:
        for later in self._view.segments.from_offset(from_base):
            path = later.txn_index_path
            entries, complete = find_aborted(path, end_offset, offset, until)
            for entry in entries:
                found[entry.producer_id, entry.first_offset] = None
            if complete:
                break


def out_of_range(offset: int, start: int, end: int, directory: str) -> ApiError:
    """Return the error for an offset outside the log's start and end offsets."""
    return ApiError(
        ErrorCode.OFFSET_OUT_OF_RANGE,
        f"offset {offset} is not in {start}..{end} of {directory}",
    )


def _limit(
    segment: LogSegment, position: int, max_bytes: int, min_one_batch: bool
) -> int:
    """Return how many bytes to read where more than ``max_bytes`` follow.

    It is ``max_bytes``. If the first batch is larger, it is the size of that batch, or
    0 if ``min_one_batch`` is false.
    """
    first = batch_size_at(segment.fd, position)
    if first <= max_bytes:
        return max_bytes
    return first if min_one_batch else 0

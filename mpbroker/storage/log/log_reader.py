"""Read a partition: where in which file the bytes of a fetch lie.

Nothing is copied: the answer names a file, a position and a length, and whoever owns
the connection sends it from there. Only what was committed is named, and to readers of
committed data only what lies below the last stable offset.
"""

import os
from typing import Final, NamedTuple

from mpbroker.base.storage_errors import CorruptLogError
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.storage.files.batch_scan import batch_size_at
from mpbroker.storage.files.log_segment import LogSegment
from mpbroker.storage.files.txn_index import find_aborted
from mpbroker.storage.log.partition_view import PartitionView
from mpbroker.storage.log.read_plan import ReadPlan

_POSITIONS_KEPT: Final = 64
_ATTEMPTS: Final = 10
_new_tuple: Final = tuple.__new__  # a third of the cost of calling the class


class ReadResult(NamedTuple):
    """A region of a segment file; ``length`` 0 if there is nothing to read.

    The inode tells whether ``segment_path`` still names the same file: compaction
    replaces files under the same name.
    """

    segment_path: str
    segment_inode: int
    fd: int
    position: int
    length: int
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int
    # (producer id, first offset) in the order of their end; None unless asked for
    # committed data.
    aborted_transactions: list[tuple[int, int]] | None


class LogReader(PartitionView):
    """The reading half of a partition's log."""

    _read_plan: ReadPlan | None = None
    _is_read = False  # here: somebody will ask where the next batch begins

    def read_plan(self) -> ReadPlan:
        """Return what the compiled core may read by, as it is right now.

        The same object every time; when the segment is another one it is of no use
        until this is called again.
        """
        plan = self._read_plan
        if plan is None:
            plan = self._read_plan = ReadPlan(self.row.index, self._positions)
        if plan.segment is not self._active:
            plan.txn_index_path = os.fsencode(self._active.txn_index_path)
        plan.segment = self._active
        plan.active_base = self._active_base
        plan.structure = self._structure
        if self._epochs is not None:
            plan.leader_epoch = self._epochs.latest
        return plan

    def read(
        self,
        fetch_offset: int,
        max_bytes: int,
        *,
        min_one_batch: bool,
        read_committed: bool = False,
    ) -> ReadResult:
        """Find the bytes from ``fetch_offset`` on, of one segment.

        The first batch may start below ``fetch_offset``. The last one may be cut at
        ``max_bytes``; the first is whole, or is not given at all if it is larger than
        ``max_bytes`` and ``min_one_batch`` is false.

        Raises:
            ApiError: OFFSET_OUT_OF_RANGE, KAFKA_STORAGE_ERROR,
                UNKNOWN_TOPIC_OR_PARTITION (deleted).
        """
        words, max_bytes = self._words, max(0, max_bytes)
        for _ in range(_ATTEMPTS):
            if words[self._status_word] != 1:
                self.require_online()
            state = self.committed()
            end_offset, active_base, active_size = state[0], state[1], state[2]
            start_offset = words[self._start_word]
            if not start_offset <= fetch_offset <= end_offset:
                self._out_of_range(fetch_offset, start_offset, end_offset)
            unstable = state[8]
            # What is still open may have begun with records that are deleted since.
            stable_offset = max(unstable, start_offset) if unstable >= 0 else end_offset
            upper = stable_offset if read_committed else end_offset
            try:
                if (
                    active_base != self._active_base
                    or words[self._structure_word] != self._structure
                ):
                    self.refresh(active_base)
                segment, position, end = self._locate(fetch_offset, upper, state)
                length = end - position
                if length > max_bytes:
                    length = self._limit(segment, position, max_bytes, min_one_batch)
                elif upper == end_offset and end == active_size:
                    self._remember(end_offset, segment, end)
                path, fd, inode = segment.path, segment.fd, segment.inode
                aborted: list[tuple[int, int]] | None = [] if read_committed else None
                if read_committed and length:
                    stop = position + length if length < end - position else None
                    until = self._offset_behind(segment, stop, upper, state)
                    aborted = self._aborted(segment, fetch_offset, until, end_offset)
            except (FileNotFoundError, CorruptLogError) as error:
                if fetch_offset >= words[self._start_word]:
                    self._structure_moved_or_fail(error)
                continue  # or records were deleted while we looked for them
            except OSError as error:
                if self._descriptors_released(error):
                    continue
                self.fail(error, "cannot be read")
            # Unmoved: the files that were opened on the way belong together.
            if words[self._structure_word] != self._structure:
                continue
            return _new_tuple(
                ReadResult,
                (
                    path,
                    inode,
                    fd,
                    position,
                    length,
                    end_offset,
                    stable_offset,
                    start_offset,
                    aborted,
                ),
            )
        raise ApiError(
            ErrorCode.KAFKA_STORAGE_ERROR,
            f"{self.directory}: its files changed {_ATTEMPTS} times during one read",
        )

    def _locate(
        self, offset: int, upper: int, state: tuple[int, ...]
    ) -> tuple[LogSegment, int, int]:
        """Return (segment, position of ``offset``, end of what may be read of it)."""
        if not self._is_read:
            self._expect_readers()
        found = self._positions.get(offset)
        if found is not None:
            segment, position = found
            end = self._readable_end(segment, upper, state)
            if position < end or segment is self._active:
                return segment, position, max(position, end)
        if self.segments.trim():
            self._positions.clear()
        located = self.segments.floor(offset)
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
                if located is self._active:
                    # Its reader is seldom the only one: the compiled core finds it.
                    self._remember(offset, located, position)
                return located, position, end
            # Compaction can leave a hole between a segment's last batch and the next.
            base = self.segments.next_base(located.base_offset)
            if base is None or base >= upper:
                return located, end, end
            located = self.segments.get(base)
        raise CorruptLogError(f"{self.directory}: no segment holds offset {offset}")

    def _entries(self, segment: LogSegment, state: tuple[int, ...]) -> int:
        if segment is self._active:
            return state[3]
        return segment.offset_index.file_entries()

    def _readable_end(
        self, segment: LogSegment, upper: int, state: tuple[int, ...]
    ) -> int:
        size = state[2] if segment is self._active else segment.file_size()
        if upper < state[0]:
            # Readers of committed data stop before the batch that holds ``upper``.
            following = self.segments.next_base(segment.base_offset)
            if following is None or upper < following:
                if upper <= segment.base_offset:
                    return 0
                position, _ = segment.find(upper, size, self._entries(segment, state))
                return position if position >= 0 else size
        return size

    def _limit(
        self, segment: LogSegment, position: int, max_bytes: int, min_one_batch: bool
    ) -> int:
        first = batch_size_at(segment.fd, position)
        if first <= max_bytes:
            return max_bytes
        return first if min_one_batch else 0

    def _expect_readers(self) -> None:
        self._is_read = True

    def _remember(self, offset: int, segment: LogSegment, position: int) -> None:
        if len(self._positions) >= _POSITIONS_KEPT:
            self._positions.clear()
        self._positions[offset] = segment, position

    def _offset_behind(
        self,
        segment: LogSegment,
        position: int | None,
        upper: int,
        state: tuple[int, ...],
    ) -> int:
        """Return an offset above all that stands before a position.

        Before the end of what may be read of the segment, if that is None.
        """
        found = None
        if position is not None:
            entries = self._entries(segment, state)
            found = segment.offset_index.offset_behind(position, entries)
        if found is None:
            found = self.segments.next_base(segment.base_offset)
        return upper if found is None else min(found, upper)

    def _aborted(
        self, segment: LogSegment, offset: int, until: int, end_offset: int
    ) -> list[tuple[int, int]]:
        # A transaction's entry stands in the segment of its abort marker, which may be
        # a later one than that of its records. Who died between entry and marker left
        # one that another follows: clients count them, so each goes once.
        found: dict[tuple[int, int], None] = {}
        for later in self.segments.from_offset(segment.base_offset):
            path = later.txn_index_path
            entries, complete = find_aborted(path, end_offset, offset, until)
            for entry in entries:
                found[entry.producer_id, entry.first_offset] = None
            if complete:
                break
        return list(found)

    def _out_of_range(self, offset: int, start: int, end: int) -> None:
        raise ApiError(
            ErrorCode.OFFSET_OUT_OF_RANGE,
            f"offset {offset} is not in {start}..{end} of {self.directory}",
        )

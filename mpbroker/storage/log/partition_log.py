"""Append to a partition that any process may append to.

An append, under the row's lock: load the log if nobody has; catch up with what others
did; judge the producer's sequence; roll if the segment is full, which is a commit of
its own; write the batch, then index entries; publish the new LogState. The publish is
the commit: whoever dies before it has appended nothing, and the bytes past
``active_size`` and the index entries past their counts are overwritten by the next
append, in the same places.

The batch is stored as received. Base offset and leader epoch are patched in place;
they lie outside its checksum, and patching them again after a death is harmless.
"""

import contextlib
import os
import zlib
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from mpbroker.base.config_def import LONG_MAX
from mpbroker.base.storage_errors import CorruptLogError
from mpbroker.ipc.tables.partition_table import LogState, PartitionRow
from mpbroker.metadata.log_config import LogConfig
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.storage.files.batch_scan import CONTROL_MASK, TRANSACTIONAL_MASK
from mpbroker.storage.files.log_files import (
    remove_uncommitted_segments,
    reserve_space,
    write_whole,
)
from mpbroker.storage.files.log_segment import LogSegment
from mpbroker.storage.files.offset_index import ENTRY_BYTES as OFFSET_ENTRY_BYTES
from mpbroker.storage.files.time_index import ENTRY_BYTES as TIME_ENTRY_BYTES
from mpbroker.storage.files.time_index import TimestampOffset
from mpbroker.storage.log.append_plan import AppendPlan
from mpbroker.storage.log.log_loader import LoadHints
from mpbroker.storage.log.log_producers import IsOpen
from mpbroker.storage.log.log_sync import LogSync
from mpbroker.storage.log.partition_view import STATE
from mpbroker.storage.producers.producer_snapshot import write_snapshot
from mpbroker.storage.producers.producer_state import (
    SEQUENCE_MASK,
    EndTransactionMarker,
)

if TYPE_CHECKING:
    from mpbroker.protocol.records.log_validator import ValidatedBatch

_FRONT: Final = Struct(">qii")  # base offset, length, leader epoch
_TXN_OR_CONTROL: Final = TRANSACTIONAL_MASK | CONTROL_MASK
_UNKNOWN: Final = -(1 << 62)
# A third of the cost of calling the class.
_new_tuple: Final = tuple.__new__
_MAX_RELATIVE_OFFSET: Final = 0x7FFF_FFFF


class AppendResult(NamedTuple):
    """Where a batch is in the log, also if it was there already."""

    base_offset: int
    log_append_time_ms: int  # -1: the topic keeps the producer's timestamps
    log_start_offset: int
    duplicate: bool
    last_offset: int


class PartitionLog(LogSync):
    """One process's handle on a partition's log."""

    def __init__(
        self,
        directory: str,
        row: PartitionRow,
        config: LogConfig,
        hints: LoadHints | None = None,
    ) -> None:
        super().__init__(directory, row, config, hints)
        self._limits_of: LogConfig | None = None
        self._flush_messages = LONG_MAX
        self._roll_after = _UNKNOWN  # a batch with a later timestamp starts a segment

    def append_plan(self) -> AppendPlan | None:
        """Return what the compiled core may append by; kept up to date from now on.

        None: appends of this log have to be more than bytes at the end of a file.
        """
        if self._limits_of is not self.config or self._flush_messages < LONG_MAX:
            return None
        if self._plan is None:
            positions = self._positions if self._is_read else None
            self._plan = AppendPlan(self.row.index, positions)
            self._put_limits_into(self._plan)
            self._put_place_into(self._plan)
        # The core leaves an entry of an index that is not open to us, which costs more.
        # But opening makes what is not there: not of a segment that others have left,
        # and retention perhaps removed.
        if self.committed()[1] == self._active_base:
            with contextlib.suppress(OSError):
                self._active.open_indexes()
        return self._plan

    def _expect_readers(self) -> None:
        super()._expect_readers()
        if self._plan is not None:
            self._plan.positions = self._positions

    def append(
        self,
        batch: "ValidatedBatch",
        *,
        slot: int = -1,
        ordinal: int = 0,
        now_ms: int,
        is_open: IsOpen | None = None,
    ) -> AppendResult:
        """Append one batch, or find out that it was appended before.

        Args:
            slot: the request's slot, which remembers a committed append (-1: none).
            ordinal: which of the request's partitions this is.
            now_ms: the wall clock.
            is_open: says whether a producer's transaction is open in a partition; a
                transactional batch that would begin one here is refused unless it is.
                None: append it without asking.

        Raises:
            ApiError: OUT_OF_ORDER_SEQUENCE_NUMBER, INVALID_PRODUCER_EPOCH,
                INVALID_TXN_STATE, RECORD_LIST_TOO_LARGE (larger than a segment),
                KAFKA_STORAGE_ERROR, UNKNOWN_TOPIC_OR_PARTITION. Nothing was appended.
        """
        row = self.row
        self._take_over_from_plan()
        if batch.header.producer_id >= 0:
            self._catch_up_unlocked(now_ms)
        row.lock()
        try:
            result = self._append_locked(batch, slot, ordinal, now_ms, is_open)
        except (ApiError, OSError, CorruptLogError) as error:
            if self._descriptors_released(error):
                result = self._append_locked(batch, slot, ordinal, now_ms, is_open)
            elif isinstance(error, ApiError):
                raise
            else:
                self.fail(error, "cannot be appended to")
        finally:
            row.unlock()
        if (
            self._flush_messages < LONG_MAX
            and result[4] + 1 - row.durable_end_offset >= self._flush_messages
        ):
            self.sync(result[4] + 1)
        return result

    def _append_locked(
        self,
        batch: "ValidatedBatch",
        slot: int,
        ordinal: int,
        now_ms: int,
        is_open: IsOpen | None,
    ) -> AppendResult:
        words, row, header = self._words, self.row, batch.header
        if words[self._status_word] != 1:
            self.require_online_locked()
        version = words[self._version_word]
        (
            end_offset,
            active_base,
            size,
            entries,
            time_entries,
            since_index,
            max_timestamp,
            max_timestamp_offset,
            unstable,
            created_ms,
            bytes_in,
        ) = state = STATE.unpack_from(self._bytes, self._copy_bytes[version & 1])
        if (
            active_base != self._active_base
            or words[self._structure_word] != self._structure
        ):
            self.refresh_locked(active_base)
        producer_id = header.producer_id
        marker: EndTransactionMarker | None = None
        producers = self.producers
        if producer_id >= 0:
            if (
                producers is None
                or producers.end_offset != end_offset
                or now_ms > self._expire_at_ms
            ):
                producers = self._catch_up(state, now_ms)
            producers.now_ms = now_ms
            if header.attributes & CONTROL_MASK:
                marker = self._check_marker(batch, end_offset)
                if marker and producers.has_ended(producer_id, header.producer_epoch):
                    # Its coordinator died after this marker and before it knew.
                    start = words[self._start_word]
                    return AppendResult(end_offset - 1, -1, start, True, end_offset - 1)
            else:
                sequence = header.base_sequence
                if sequence >= 0:  # a coordinator's own records have none
                    last_sequence = sequence + batch.last_offset_delta & SEQUENCE_MASK
                    try:
                        known = producers.check(
                            producer_id,
                            header.producer_epoch,
                            sequence,
                            last_sequence,
                            header.attributes & TRANSACTIONAL_MASK,
                        )
                    except ApiError as refusal:
                        known = self._recall(header, last_sequence, refusal)
                    if known is not None:
                        start = words[self._start_word]
                        return AppendResult(known[2], known[4], start, True, known[3])
                    if is_open is not None and header.attributes & TRANSACTIONAL_MASK:
                        self._require_transaction(header, is_open)
        if self.config is not self._limits_of:
            self._take_limits()
        data = batch.data
        added = len(data)
        if added > self._max_size:
            self._refuse_larger_than_segment(added)
        last_offset = end_offset + batch.last_offset_delta
        timestamp = batch.max_timestamp
        segment = self._active
        if size and (
            size + added > self._max_size
            or last_offset - active_base > _MAX_RELATIVE_OFFSET
            or entries >= self._max_entries
            or time_entries >= self._max_time_entries
            or (
                timestamp > self._roll_after
                and self._is_old(timestamp, size, now_ms - created_ms)
            )
        ):
            self.roll_locked(now_ms)
            return self._append_locked(batch, slot, ordinal, now_ms, is_open)
        try:
            if timestamp > max_timestamp:
                max_timestamp, max_timestamp_offset = timestamp, last_offset
            if slot >= 0:
                row.set_intent(slot, ordinal, end_offset)
            if data.readonly:
                data = memoryview(bytearray(data))
            _FRONT.pack_into(data, 0, end_offset, added - 12, self._epoch)
            if producer_id >= 0 and header.attributes & _TXN_OR_CONTROL:
                # Before the bytes: if all processes are killed behind them, the next
                # start finds a marker, and what it aborts must be in the index.
                unstable = self._unstable_after(segment, header, marker, end_offset)
            if os.pwrite(segment.fd, data, size) != added:
                write_whole(segment.fd, data, size)
            if since_index > self._interval:
                segment.offset_index.write_entry(entries, last_offset, size)
                entries += 1
                since_index = 0
                last = segment.time_index.last_entry(time_entries)
                if max_timestamp > last.timestamp:
                    segment.time_index.write_entry(
                        time_entries, max_timestamp, max_timestamp_offset
                    )
                    time_entries += 1
            STATE.pack_into(
                self._bytes,
                self._copy_bytes[(version + 1) & 1],
                last_offset + 1,
                active_base,
                size + added,
                entries,
                time_entries,
                since_index + added,
                max_timestamp,
                max_timestamp_offset,
                unstable,
                created_ms,
                bytes_in + added,
            )
            # The commit: one aligned store. Before it nothing happened, after it all.
            words[self._version_word] = version + 1
        except BaseException as error:
            self._undo(slot, size, segment, error)
            raise
        if slot >= 0:
            row.clear_intent()
        # Where a waiting fetch of these records will begin to read.
        self._remember(end_offset, segment, size)
        if producers is not None and producers.end_offset == end_offset:
            if producer_id >= 0:
                self._apply(producers, batch, marker, end_offset, last_offset)
            producers.end_offset = last_offset + 1
            self._producers_position = size + added
        if self._plan is not None:
            self._put_place_into(self._plan)
        log_append_time_ms = batch.log_append_time_ms
        start = words[self._start_word]
        fields = (end_offset, log_append_time_ms, start, False, last_offset)
        return _new_tuple(AppendResult, fields)

    # -- deletion ------------------------------------------------------------------

    def delete_records(self, before_offset: int) -> int:
        """Make all below an offset unreadable; -1 stands for the high watermark.

        Whole segments below it are removed by the next retention run.

        Returns:
            The log start offset.

        Raises:
            ApiError: OFFSET_OUT_OF_RANGE, POLICY_VIOLATION (a topic that is only
                compacted).
        """
        self.require_online()
        if "delete" not in self.config.cleanup_policy:
            raise ApiError(
                ErrorCode.POLICY_VIOLATION,
                f"cleanup.policy is {','.join(self.config.cleanup_policy)}: records can"
                " be deleted only where it contains delete",
            )
        row = self.row
        with row.locked():
            self.require_online_locked()
            start, end = row.log_start_offset, self.committed()[0]
            target = end if before_offset == -1 else before_offset
            if not 0 <= target <= end:
                self._out_of_range(target, start, end)
            if target > start:
                row.log_start_offset = start = target
        return start

    # -- rolling -------------------------------------------------------------------

    def roll_locked(self, now_ms: int) -> None:
        """Make a new, empty segment the active one. Under the row's lock.

        Raises:
            OSError: it cannot be made; the old one stays active.
        """
        self._take_over_from_plan()
        state = LogState._make(self.committed())
        base_offset = state.log_end_offset
        if state.active_base_offset != self._active_base:
            self.refresh_locked(state.active_base_offset)
        if not state.active_size:
            return
        largest = TimestampOffset(state.max_timestamp, state.max_timestamp_offset)
        self._active.finish(
            state.active_size, state.index_entries, state.time_index_entries, largest
        )
        producers = self.producers
        if producers is not None and producers.end_offset == base_offset:
            write_snapshot(self.directory, producers, sync=False)
        # A roll that died here left an empty segment, which smaller batches may have
        # passed by since.
        remove_uncommitted_segments(self.directory, state.active_base_offset)
        segment = LogSegment(self.directory, base_offset)
        segment.create()
        if self.config.preallocate:
            reserve_space(segment.fd, self.config.segment_bytes)
        self.row.publish(
            LogState(
                log_end_offset=base_offset,
                active_base_offset=base_offset,
                first_unstable_offset=state.first_unstable_offset,
                segment_created_ms=now_ms,
                bytes_in=state.bytes_in,
            )
        )
        self._active.close_indexes()
        self.segments.add(segment)
        self._active, self._active_base = segment, base_offset
        self._positions.clear()
        self._leave_active()

    def _leave_active(self) -> None:
        super()._leave_active()
        self._roll_after = _UNKNOWN

    def _take_limits(self) -> None:
        """Work out when to roll, once per configuration."""
        config = self.config
        self._max_size = config.segment_bytes
        self._max_entries = config.segment_index_bytes // OFFSET_ENTRY_BYTES
        # One place is kept for the entry that a finished segment ends with.
        self._max_time_entries = config.segment_index_bytes // TIME_ENTRY_BYTES - 1
        self._interval = config.index_interval_bytes
        self._flush_messages = config.flush_messages
        self._segment_ms = config.segment_ms
        if "compact" in config.cleanup_policy and config.max_compaction_lag_ms > 0:
            # Active segments are not compacted: roll in time for the longest lag.
            self._segment_ms = min(config.segment_ms, config.max_compaction_lag_ms)
        if config.preallocate:
            reserve_space(self._active.fd, config.segment_bytes)
        self._epoch = self.leader_epoch
        self._roll_after = _UNKNOWN
        self._limits_of = config
        if self._plan is not None:
            self._put_limits_into(self._plan)

    def _put_place_into(self, plan: AppendPlan) -> None:
        """Right after an append: where the next one goes, if nothing changes."""
        plan.segment = self._active
        plan.active_base = self._active_base
        plan.structure = self._structure
        plan.roll_after = min(self._roll_after, LONG_MAX)
        producers = plan.producers = self.producers
        plan.producers_end = -1 if producers is None else producers.end_offset
        plan.producers_position = self._producers_position

    def _put_limits_into(self, plan: AppendPlan) -> None:
        plan.segment = None  # until the append that asked for them has ended
        plan.max_size = self._max_size
        plan.max_entries = self._max_entries
        plan.max_time_entries = self._max_time_entries
        plan.index_interval = self._interval
        plan.epoch = self._epoch

    def _is_old(self, timestamp: int, size: int, lived_ms: int) -> bool:
        """Say whether a batch comes segment.ms after the first of its segment.

        By the batches' own timestamps; by the clock where they have none, or where the
        first is damaged, for which the log need not fail.
        """
        batch = None
        with contextlib.suppress(CorruptLogError):
            batch = self._active.first_batch(size)
        if batch is None or batch.max_timestamp < 0:
            return lived_ms > self._lifetime_ms()
        self._roll_after = batch.max_timestamp + self._lifetime_ms()
        return timestamp > self._roll_after

    def _lifetime_ms(self) -> int:
        """segment.ms without the active segment's share of segment.jitter.ms.

        Drawn from its name, so that all processes draw the same.
        """
        limit = min(self.config.segment_jitter_ms, self._segment_ms)
        if not limit:
            return self._segment_ms
        name = f"{os.path.basename(self.directory)}/{self._active_base}"
        return self._segment_ms - zlib.crc32(name.encode()) % limit

    def _refuse_larger_than_segment(self, added: int) -> None:
        raise ApiError(
            ErrorCode.RECORD_LIST_TOO_LARGE,
            f"a batch of {added} bytes does not fit segment.bytes"
            f" {self.config.segment_bytes}: send smaller batches or raise it",
        )

    def _undo(
        self, slot: int, size: int, segment: LogSegment, error: BaseException
    ) -> None:
        """Leave the row as it was; answer a failure of the disk as one."""
        if slot >= 0:
            self.row.abandon_intent()
        try:
            # Not needed for what is read, only so that no torn batch stays behind.
            segment.truncate(size)
        except OSError:
            pass
        if isinstance(error, (OSError, CorruptLogError)):
            self.fail(error, "cannot be appended to")

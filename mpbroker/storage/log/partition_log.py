"""A partition's log, which any process may append to.

An append, under the row's lock, is these steps: load the log if no process has; catch
up with what others did; ``judge`` the producer's sequence; ``make_room`` by a roll,
which is a commit of its own, if the segment is full; ``write`` the batch and its index
entries and commit them by a new LogState; ``remember`` where they are. The commit is
one store: a process that dies before it has appended nothing. The bytes that it left
past ``active_size``, and its index entries past their counts, are overwritten by the
next append, in the same places.

The batch is stored as received. Base offset and leader epoch are patched in place;
they lie outside its checksum, and patching them again after a death is harmless.

The compiled core appends by the same steps and stores (native/produce.c), as long as
the AppendPlan that is kept up to date here says enough.
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
from mpbroker.protocol.records.batch_header import CONTROL_FLAG, TRANSACTIONAL_FLAG
from mpbroker.storage.files.log_files import (
    remove_uncommitted_segments,
    reserve_space,
    write_whole,
)
from mpbroker.storage.files.log_segment import LogSegment
from mpbroker.storage.files.offset_index import ENTRY_BYTES as OFFSET_ENTRY_BYTES
from mpbroker.storage.files.time_index import ENTRY_BYTES as TIME_ENTRY_BYTES
from mpbroker.storage.files.time_index import TimestampOffset
from mpbroker.storage.log.core_plans import AppendPlan
from mpbroker.storage.log.log_loader import LoadHints
from mpbroker.storage.log.log_lookup import LogLookup
from mpbroker.storage.log.log_producers import IsOpen, LogProducers
from mpbroker.storage.log.log_reader import LogReader, out_of_range
from mpbroker.storage.log.log_sync import LogSync
from mpbroker.storage.log.partition_view import (
    ACTIVE_BASE,
    ACTIVE_SIZE,
    CREATED_MS,
    END_OFFSET,
    INDEX_ENTRIES,
    ONLINE,
    STATE,
    TIME_INDEX_ENTRIES,
    UNKNOWN_TIME,
    PartitionView,
)
from mpbroker.storage.producers.producer_snapshot import write_snapshot
from mpbroker.storage.producers.producer_state import (
    AppendedBatch,
    EndTransactionMarker,
)

if TYPE_CHECKING:
    from mpbroker.protocol.records.log_validator import ValidatedBatch

_FRONT: Final = Struct(">qii")  # base offset, length, leader epoch
_LENGTH_FROM: Final = 12  # what a batch's length counts from
_TXN_OR_CONTROL: Final = TRANSACTIONAL_FLAG | CONTROL_FLAG
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


class AppendLimits:
    """What a topic's settings say about appends, worked out once for all of them."""

    __slots__ = (
        "config",
        "epoch",
        "flush_messages",
        "index_interval",
        "max_entries",
        "max_size",
        "max_time_entries",
        "segment_ms",
    )

    def __init__(self, config: LogConfig, epoch: int) -> None:
        self.config = config
        self.epoch = epoch  # to write into each batch
        self.max_size = config.segment_bytes
        self.max_entries = config.segment_index_bytes // OFFSET_ENTRY_BYTES
        # One place is kept for the entry that a finished segment ends with.
        self.max_time_entries = config.segment_index_bytes // TIME_ENTRY_BYTES - 1
        self.index_interval = config.index_interval_bytes
        self.flush_messages = config.flush_messages
        self.segment_ms = config.segment_ms
        if "compact" in config.cleanup_policy and config.max_compaction_lag_ms > 0:
            # Active segments are not compacted: roll in time for the longest lag.
            self.segment_ms = min(config.segment_ms, config.max_compaction_lag_ms)

    def tell_core(self, plan: AppendPlan) -> None:
        """Put the limits into a plan, which is of no use until its place is told."""
        plan.segment = None
        plan.max_size = self.max_size
        plan.max_entries = self.max_entries
        plan.max_time_entries = self.max_time_entries
        plan.index_interval = self.index_interval
        plan.epoch = self.epoch


class PartitionLog:
    """One process's handle on a partition's log.

    Args:
        directory: the partition's directory; it exists.
        row: the partition's shared row.
        config: the topic's settings; ``view.config`` may be replaced at any time.
        hints: what the log directory's checkpoint files said at the start.

    Attributes:
        row: the partition's shared row.
        directory: the partition's directory.
        view: the row and the files as this process knows them; what all parts share.
        reader: finds the bytes of a fetch.
        lookup: finds offsets by timestamp, by leader epoch, and at either end.
        producers: judges and follows producers.
        sync: forces the log to disk.
    """

    def __init__(
        self,
        directory: str,
        row: PartitionRow,
        config: LogConfig,
        hints: LoadHints | None = None,
    ) -> None:
        self.row = row
        self.directory = directory
        self.view = view = PartitionView(directory, row, config, hints)
        self.reader = LogReader(view)
        self.lookup = LogLookup(view)
        self.producers = LogProducers(view)
        self.sync = LogSync(view, self.producers)
        self._limits: AppendLimits | None = None  # None: of no append yet

    # -- append ----------------------------------------------------------------------

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
        if batch.header.producer_id >= 0:
            self.producers.catch_up_unlocked(now_ms)
        elif self.view.append_plan is not None:
            self.view.take_over_from_core()
        row.lock()
        try:
            result = self._append_locked(batch, slot, ordinal, now_ms, is_open)
        except (ApiError, OSError, CorruptLogError) as error:
            if self.view.descriptors_released(error):
                result = self._append_locked(batch, slot, ordinal, now_ms, is_open)
            elif isinstance(error, ApiError):
                raise
            else:
                self.view.fail(error, "cannot be appended to")
        finally:
            row.unlock()
        limits = self._limits
        if limits is not None and limits.flush_messages < LONG_MAX:
            end = result.last_offset + 1
            if end - row.durable_end_offset >= limits.flush_messages:
                self.sync.flush(end)
        return result

    def _append_locked(
        self,
        batch: "ValidatedBatch",
        slot: int,
        ordinal: int,
        now_ms: int,
        is_open: IsOpen | None,
    ) -> AppendResult:
        """Append under the row's lock; each step has its name in native/produce.c."""
        view = self.view
        words = view.words
        if words[view.status_word] != ONLINE:
            view.require_online_locked()
        # As ``view.committed``: under the lock nobody replaces what is committed.
        version = words[view.version_word]
        state = STATE.unpack_from(view.bytes, view.copy_bytes[version & 1])
        if (
            state[ACTIVE_BASE] != view.active_base
            or words[view.structure_word] != view.structure
        ):
            view.refresh_locked(state[ACTIVE_BASE])
        marker: EndTransactionMarker | None = None
        has_producer = batch.header.producer_id >= 0
        if has_producer:
            known = self.producers.judge(batch, state, now_ms, is_open)
            if known is not None:
                if isinstance(known, AppendedBatch):
                    return _appended_before(known, words[view.start_word])
                marker = known
        base_offset, added = state[END_OFFSET], len(batch.data)
        last_offset = base_offset + batch.last_offset_delta
        if self._make_room(state, added, last_offset, batch.max_timestamp, now_ms):
            # The same end offset, in a segment that is empty.
            version, state = words[view.version_word], view.committed()
        try:
            if slot >= 0:
                # Before any byte: if we die, the next owner of the lock finds by the
                # log end whether this was committed, and notes it in the slot. So a
                # request that is executed again does not append its batch again.
                self.row.set_intent(slot, ordinal, base_offset)
            self._write(batch, marker, version, state, added, last_offset)
        except BaseException as error:
            self._undo(slot, state[ACTIVE_SIZE], error)
            raise
        if slot >= 0:
            self.row.clear_intent()
        # Nothing of this is shared: if we die in here, only what dies with us is lost.
        if has_producer:
            self.producers.apply(batch, marker, base_offset, last_offset)
        view.remember_append(state, added, last_offset + 1)
        log_append_time_ms = batch.log_append_time_ms
        start = words[view.start_word]
        fields = (base_offset, log_append_time_ms, start, False, last_offset)
        return _new_tuple(AppendResult, fields)

    def _make_room(
        self,
        state: tuple[int, ...],
        added: int,
        last_offset: int,
        timestamp: int,
        now_ms: int,
    ) -> bool:
        """Roll if a batch does not fit the active segment; return whether we did.

        Raises:
            ApiError: RECORD_LIST_TOO_LARGE: it does not fit any segment.
            OSError: a new segment cannot be made.
        """
        view, limits = self.view, self._limits
        if limits is None or limits.config is not view.config:
            limits = self._take_limits()
        max_size, size = limits.max_size, state[ACTIVE_SIZE]
        if added > max_size:
            raise ApiError(
                ErrorCode.RECORD_LIST_TOO_LARGE,
                f"a batch of {added} bytes does not fit segment.bytes {max_size}: send"
                " smaller batches or raise it",
            )
        if size and (
            size + added > max_size
            or last_offset - state[ACTIVE_BASE] > _MAX_RELATIVE_OFFSET
            or state[INDEX_ENTRIES] >= limits.max_entries
            or state[TIME_INDEX_ENTRIES] >= limits.max_time_entries
            or (
                timestamp > view.roll_after
                and self._is_old(limits, timestamp, size, now_ms - state[CREATED_MS])
            )
        ):
            self.roll_locked(now_ms)
            return True
        return False

    def _write(
        self,
        batch: "ValidatedBatch",
        marker: EndTransactionMarker | None,
        version: int,
        state: tuple[int, ...],
        added: int,
        last_offset: int,
    ) -> None:
        """Write a batch behind ``state``, which is committed as ``version``; commit it.

        Nothing that is written here counts before the last line. If we die in here, the
        next append writes over it.
        """
        view, limits = self.view, self._limits
        assert limits is not None
        (
            end_offset,
            active_base,
            position,
            entries,
            time_entries,
            since_index,
            max_timestamp,
            max_timestamp_offset,
            unstable,
            created_ms,
            bytes_in,
        ) = state
        header, segment = batch.header, view.active
        if batch.max_timestamp > max_timestamp:
            max_timestamp, max_timestamp_offset = batch.max_timestamp, last_offset
        data = batch.data
        if data.readonly:
            data = memoryview(bytearray(data))
        _FRONT.pack_into(data, 0, end_offset, added - _LENGTH_FROM, limits.epoch)
        if header.attributes & _TXN_OR_CONTROL and header.producer_id >= 0:
            # Before the bytes: if all processes are killed behind them, the next
            # start finds a marker, and what it aborts must be in the index.
            unstable = self.producers.unstable_after(
                segment, header, marker, end_offset
            )
        if os.pwrite(segment.fd, data, position) != added:
            write_whole(segment.fd, data, position)
        if since_index > limits.index_interval:
            time_entries += _write_indexes(
                segment,
                entries,
                time_entries,
                TimestampOffset(max_timestamp, max_timestamp_offset),
                last_offset,
                position,
            )
            entries += 1
            since_index = 0
        # Into the copy that nobody reads: readers take the one that the version names.
        # (Not a function of its own: with eleven numbers that is 4 % of an append.)
        STATE.pack_into(
            view.bytes,
            view.copy_bytes[(version + 1) & 1],
            last_offset + 1,
            active_base,
            position + added,
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
        view.words[view.version_word] = version + 1

    def _undo(self, slot: int, size: int, error: BaseException) -> None:
        """Leave the row as it was; answer a failure of the disk as one."""
        if slot >= 0:
            self.row.abandon_intent()
        try:
            # Not needed for what is read, only so that no torn batch stays behind.
            self.view.active.truncate(size)
        except OSError:
            pass
        if isinstance(error, (OSError, CorruptLogError)):
            self.view.fail(error, "cannot be appended to")

    def append_plan(self) -> AppendPlan | None:
        """Return what the compiled core may append by; kept up to date from now on.

        None: appends of this log have to be more than bytes at the end of a file.
        """
        view, limits = self.view, self._limits
        if (
            limits is None
            or limits.config is not view.config
            or limits.flush_messages < LONG_MAX
        ):
            return None
        plan = view.append_plan
        if plan is None:
            positions = view.positions if view.has_readers else None
            plan = view.append_plan = AppendPlan(self.row.index, positions)
            limits.tell_core(plan)
            view.tell_core(plan)
        # The core leaves an entry of an index that is not open to us, which costs more.
        # But opening makes what is not there: so it is not done for a segment that
        # others have left, and that retention has perhaps removed.
        if view.committed()[ACTIVE_BASE] == view.active_base:
            with contextlib.suppress(OSError):
                view.active.open_indexes()
        return plan

    # -- rolling -------------------------------------------------------------------

    def roll_locked(self, now_ms: int) -> None:
        """Make a new, empty segment the active one. Under the row's lock.

        Raises:
            OSError: it cannot be made; the old one stays active.
        """
        view = self.view
        view.take_over_from_core()
        state = LogState._make(view.committed())
        base_offset = state.log_end_offset
        if state.active_base_offset != view.active_base:
            view.refresh_locked(state.active_base_offset)
        if not state.active_size:
            return
        # First the old segment's files say what only the row has said until now: from
        # the commit on the row speaks of the new one. If we die in between, the row
        # still counts, and the next roll writes the same once more.
        largest = TimestampOffset(state.max_timestamp, state.max_timestamp_offset)
        view.active.finish(
            state.active_size, state.index_entries, state.time_index_entries, largest
        )
        producers = view.producers
        if producers is not None and producers.end_offset == base_offset:
            write_snapshot(self.directory, producers, sync=False)
        # A roll that died here left an empty segment, which smaller batches may have
        # passed by since.
        remove_uncommitted_segments(self.directory, state.active_base_offset)
        segment = LogSegment(self.directory, base_offset)
        segment.create()
        if view.config.preallocate:
            reserve_space(segment.fd, view.config.segment_bytes)
        # The commit, when the file is there that it names. Whoever lists the directory
        # before it leaves out the segment above the active base offset.
        self.row.publish(
            LogState(
                log_end_offset=base_offset,
                active_base_offset=base_offset,
                first_unstable_offset=state.first_unstable_offset,
                segment_created_ms=now_ms,
                bytes_in=state.bytes_in,
            )
        )
        view.begin_segment(segment)

    def _take_limits(self) -> AppendLimits:
        view = self.view
        config = view.config
        if config.preallocate:
            reserve_space(view.active.fd, config.segment_bytes)
        limits = self._limits = AppendLimits(config, view.leader_epoch)
        view.roll_after = UNKNOWN_TIME
        if view.append_plan is not None:
            limits.tell_core(view.append_plan)
        return limits

    def _is_old(
        self, limits: AppendLimits, timestamp: int, size: int, lived_ms: int
    ) -> bool:
        """Say whether a batch comes segment.ms after the first of its segment.

        The batches' own timestamps decide; the clock does where they have none, or
        where the first batch is damaged, for which the log need not fail.
        """
        view, batch = self.view, None
        with contextlib.suppress(CorruptLogError):
            batch = view.active.first_batch(size)
        lifetime_ms = self._lifetime_ms(limits)
        if batch is None or batch.max_timestamp < 0:
            return lived_ms > lifetime_ms
        view.roll_after = batch.max_timestamp + lifetime_ms
        return timestamp > view.roll_after

    def _lifetime_ms(self, limits: AppendLimits) -> int:
        """segment.ms without the active segment's share of segment.jitter.ms.

        The share is drawn from the segment's name, so that all processes draw the same.
        """
        jitter_ms = min(limits.config.segment_jitter_ms, limits.segment_ms)
        if not jitter_ms:
            return limits.segment_ms
        name = f"{os.path.basename(self.directory)}/{self.view.active_base}"
        return limits.segment_ms - zlib.crc32(name.encode()) % jitter_ms

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
        view, row = self.view, self.row
        view.require_online()
        policy = view.config.cleanup_policy
        if "delete" not in policy:
            raise ApiError(
                ErrorCode.POLICY_VIOLATION,
                f"cleanup.policy is {','.join(policy)}: records can be deleted only"
                " where it contains delete",
            )
        with row.locked():
            view.require_online_locked()
            start, end = row.log_start_offset, row.log_end_offset
            target = end if before_offset == -1 else before_offset
            if not 0 <= target <= end:
                raise out_of_range(target, start, end, self.directory)
            if target > start:
                row.log_start_offset = start = target
        return start

    # -- the end -------------------------------------------------------------------

    def close(self) -> None:
        """Close all files. They open again when needed."""
        self.view.close()
        self.sync.close()

    def close_cleanly(self) -> int:
        """Force everything to disk, cut what was never committed, and close the files.

        For the last process that has the log. It loads the log first if none has, so
        that no mark says "closed cleanly" over a log that was never checked.

        Returns:
            The log end offset.

        Raises:
            ApiError, OSError: the log must be recovered at the next start.
        """
        view = self.view
        state = view.state()
        view.refresh(state.active_base_offset)
        active = view.active
        with self.row.locked():
            remove_uncommitted_segments(self.directory, state.active_base_offset)
            active.truncate(state.active_size)
            active.offset_index.truncate(state.index_entries)
            active.time_index.truncate(state.time_index_entries)
        self.sync.flush()
        self.sync.flush_indexes()
        if state.log_end_offset:
            self.sync.take_snapshot(sync=True)
        self.close()
        return state.log_end_offset


def _appended_before(known: AppendedBatch, log_start_offset: int) -> AppendResult:
    return AppendResult(
        known.base_offset, known.timestamp, log_start_offset, True, known.last_offset
    )


def _write_indexes(
    segment: LogSegment,
    entries: int,
    time_entries: int,
    largest: TimestampOffset,
    last_offset: int,
    position: int,
) -> int:
    """Write an entry of the offset index, and of the time index if it has news.

    They count once the state that is committed says so.

    Returns:
        How many entries of the time index were written: 0 or 1.
    """
    segment.offset_index.write_entry(entries, last_offset, position)
    if largest.timestamp <= segment.time_index.last_entry(time_entries).timestamp:
        return 0
    segment.time_index.write_entry(time_entries, *largest)
    return 1

"""PartitionLog: a partition's log, which any process may append to.

An append has these steps, all under the row's lock:

    1. load the log, if no process has loaded it
    2. catch up with the appends of other processes
    3. judge: check the producer's epoch and sequence
    4. make room: roll if the active segment is full; a roll is a commit of its own
    5. write the batch and its index entries, then commit them by a new LogState
    6. remember the position, for readers in this process

The commit is one aligned store. A process that is killed before it has appended
nothing: the next append overwrites its bytes past ``active_size``, and its index
entries past the committed numbers, at the same positions. After it, the append is
complete for every process. If all processes are killed, the row is lost with them: then
the next start takes every whole batch in the files as appended, also one that was not
committed, and whose client got no answer.

A batch is stored as it was received. Only its base offset and leader epoch are
replaced; its checksum does not cover them.

The compiled core (native/produce.c) makes the same steps and stores, as long as the
AppendPlan, which this class keeps up to date, is enough for it.

Source: Kafka's UnifiedLog (append, roll, maybeIncrementLogStartOffset).
"""

import contextlib
import os
import zlib
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from mpbroker.base.config_def import LONG_MAX
from mpbroker.base.storage_errors import CorruptLogError
from mpbroker.ipc.layout import ROW_SYNC_OWNER
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
_LENGTH_FROM: Final = 12  # a batch's length field counts the bytes from here on
_TXN_OR_CONTROL: Final = TRANSACTIONAL_FLAG | CONTROL_FLAG
# A third of the cost of calling the class.
_new_tuple: Final = tuple.__new__
_MAX_RELATIVE_OFFSET: Final = 0x7FFF_FFFF


class AppendResult(NamedTuple):
    """Where a batch is in the log.

    Attributes:
        base_offset: the offset of its first record.
        log_append_time_ms: the timestamp that the broker gave its records; -1: they
            keep the producer's timestamps.
        log_start_offset: the log start offset at that time.
        duplicate: the batch was in the log before, and was not appended again.
        last_offset: the offset of its last record.
    """

    base_offset: int
    log_append_time_ms: int
    log_start_offset: int
    duplicate: bool
    last_offset: int


class AppendLimits:
    """The limits of appends that follow from a topic's settings, computed once.

    Args:
        config: the topic's settings.
        epoch: the leader epoch to write into each batch.
    """

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
        self.epoch = epoch
        self.max_size = config.segment_bytes
        self.max_entries = config.segment_index_bytes // OFFSET_ENTRY_BYTES
        # Less one: LogSegment.finish adds an entry when the segment is closed.
        self.max_time_entries = config.segment_index_bytes // TIME_ENTRY_BYTES - 1
        self.index_interval = config.index_interval_bytes
        self.flush_messages = config.flush_messages
        self.segment_ms = config.segment_ms
        if "compact" in config.cleanup_policy and config.max_compaction_lag_ms > 0:
            # The active segment is never compacted, so roll before a record in it is
            # older than max.compaction.lag.ms.
            self.segment_ms = min(config.segment_ms, config.max_compaction_lag_ms)

    def tell_core(self, plan: AppendPlan) -> None:
        """Put the limits into a plan; it cannot be used until its place is set, too."""
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
        view: the state that all parts share: the row, and the files as this process
            knows them.
        reader: finds the bytes of a fetch.
        lookup: finds offsets by timestamp and by leader epoch, and the log's ends.
        producers: checks batches of producers, and keeps the producers' state.
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
        self._limits: AppendLimits | None = None  # None: before the first append

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
        """Append one batch, or find it in the log if it is a producer's retry.

        Args:
            batch: a validated batch; its base offset and leader epoch are replaced.
            slot: the slot of the request, where a committed append is noted (-1: there
                is no request). If this process is killed, the request is executed
                again, but a noted append is not repeated.
            ordinal: the index of this partition in the request.
            now_ms: the wall clock.
            is_open: returns whether the coordinator knows of an open transaction, given
                a producer id, its epoch and a partition's row. A transactional batch
                that would begin a transaction in this partition is refused if it
                returns False. None: append without this check.

        Returns:
            The offsets of the batch. The append is committed, and not yet durable
            unless flush.messages forced it to disk.

        Raises:
            ApiError: OUT_OF_ORDER_SEQUENCE_NUMBER, INVALID_PRODUCER_EPOCH,
                INVALID_TXN_STATE, RECORD_LIST_TOO_LARGE (larger than a segment),
                KAFKA_STORAGE_ERROR, UNKNOWN_TOPIC_OR_PARTITION. Nothing was appended,
                unless the error is from the flush that flush.messages demands.
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
        """Append under the row's lock. The steps have the same names in produce.c."""
        view = self.view
        words = view.words
        if words[view.status_word] != ONLINE:
            view.require_online_locked()
        # As ``view.committed``, but without its loop: only a process that holds the
        # lock commits a state.
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
            # The roll has committed a new state: the same end offset, an empty segment.
            version, state = words[view.version_word], view.committed()
        try:
            if slot >= 0:
                # Before the commit. If this process is killed from here on, the next
                # owner of the lock compares the log end offset with this base offset:
                # above it, the append was committed, and that is noted in the slot.
                # So a request that is executed again does not append its batch again.
                self.row.set_intent(slot, ordinal, base_offset)
            self._write(batch, marker, version, state, added, last_offset)
        except BaseException as error:
            self._undo(slot, state[ACTIVE_SIZE], error)
            raise
        # Committed. Killed before the next call, the intent is still set, and the next
        # owner of the lock notes the append in the slot, as this call does.
        if slot >= 0:
            self.row.clear_intent()
        # The rest is in the memory of this process alone.
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
        """Roll if a batch does not fit the active segment, or the segment is too old.

        Args:
            state: the committed state, as a plain tuple of LogState's fields.
            added: the batch's size in bytes.
            last_offset: the offset that its last record will have.
            timestamp: its largest timestamp in ms.
            now_ms: the wall clock.

        Returns:
            Whether there was a roll: then ``state`` is not the committed one any more.

        Raises:
            ApiError: RECORD_LIST_TOO_LARGE: the batch is larger than segment.bytes.
            OSError: a new segment cannot be made; the old one stays active.
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
        """Write a batch and its index entries behind the committed state; commit them.

        The last line is the commit. If this process is killed before it, other
        processes do not read what was written here, and the next append overwrites it.

        Args:
            batch: the batch.
            marker: the marker in it, if it is a control batch that ends a transaction.
            version: the version of the committed state.
            state: the committed state, as a plain tuple of LogState's fields.
            added: the batch's size in bytes.
            last_offset: the offset that its last record will have.

        Raises:
            OSError: a file cannot be written; nothing is committed.
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
            # The entry in the index of aborted transactions comes before the marker.
            # Killed in between, the entry has no marker below the log end: readers skip
            # it, and the next writer of that index cuts it off. In the other order, if
            # all processes are killed in between, the next start finds a marker in the
            # log without its entry, and readers of committed data may get aborted
            # records.
            unstable = self.producers.unstable_after(
                segment, header, marker, end_offset
            )
        # At the committed size, over the bytes of a process that died here earlier.
        # Readers take no byte beyond the committed size, so a torn batch does no harm.
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
        # The row has two copies of the state; the lowest bit of the version tells which
        # one is committed. This fills the other, so readers are not disturbed, and
        # being killed in here changes nothing. (Not a function of its own: with eleven
        # numbers that is 4 % of an append.)
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
        # The commit, last, as one aligned 8-byte store. Killed before it, the log ends
        # where it ended; after it, every process sees the batch and its index entries.
        view.words[view.version_word] = version + 1

    def _undo(self, slot: int, size: int, error: BaseException) -> None:
        """Clean up after an append that failed in a live process.

        Raises:
            ApiError: KAFKA_STORAGE_ERROR, if ``error`` is about files. Else this
                returns, and the caller raises ``error`` itself.
        """
        if slot >= 0:
            self.row.abandon_intent()
        try:
            # Readers stop at the committed size anyway; this gives the space back.
            self.view.active.truncate(size)
        except OSError:
            pass
        if isinstance(error, (OSError, CorruptLogError)):
            self.view.fail(error, "cannot be appended to")

    def append_plan(self) -> AppendPlan | None:
        """Return the plan by which the compiled core appends to this log.

        The plan is kept up to date from now on. None: appends need the Python code,
        because of flush.messages, or because this process has not appended since the
        settings were changed.
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
        # If an index is not open, the core leaves each append with an index entry to
        # the slower Python code. But opening creates a file that is absent, so it is
        # done only for the active segment: retention may have removed another one.
        if view.committed()[ACTIVE_BASE] == view.active_base:
            with contextlib.suppress(OSError):
                view.active.open_indexes()
        return plan

    # -- rolling -------------------------------------------------------------------

    def roll_locked(self, now_ms: int) -> None:
        """Make a new, empty segment the active one. The caller holds the row's lock.

        It has three steps: cut the old segment's files to the committed state; create
        the new segment's files; commit by publishing a state that names it.

        Raises:
            OSError: a file cannot be made or changed; the old segment stays active.
        """
        view = self.view
        view.take_over_from_core()
        state = LogState._make(view.committed())
        base_offset = state.log_end_offset
        if state.active_base_offset != view.active_base:
            view.refresh_locked(state.active_base_offset)
        if not state.active_size:
            return
        # Before the commit: afterwards the row has the numbers of the new segment, and
        # readers take those of the old one from the sizes of its files. Killed before
        # the commit, the row is unchanged: the old segment goes on, the time index
        # entry added here is overwritten, and the next roll does all of this again.
        largest = TimestampOffset(state.max_timestamp, state.max_timestamp_offset)
        view.active.finish(
            state.active_size, state.index_entries, state.time_index_entries, largest
        )
        producers = view.producers
        if producers is not None and producers.end_offset == base_offset:
            write_snapshot(self.directory, producers, sync=False)
        # A process killed in a roll has left an empty segment. Its base offset may be
        # below the one of this roll: batches that fit have been appended since.
        remove_uncommitted_segments(self.directory, state.active_base_offset)
        segment = LogSegment(self.directory, base_offset)
        segment.create()
        if view.config.preallocate:
            reserve_space(segment.fd, view.config.segment_bytes)
        # The commit, after the files exist that it names. Killed before it, an empty
        # segment is left above the active base offset. Other processes leave it out
        # when they list the directory; the next roll or the next start removes it.
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
        """Return whether a batch is segment.ms later than the first of the segment.

        Timestamps of batches decide. If they have none, or if the first batch is
        damaged, the age of the segment by the clock does: an append need not fail for
        an old batch.

        Args:
            limits: the limits of appends.
            timestamp: the batch's largest timestamp in ms.
            size: committed bytes of the active segment.
            lived_ms: the age of the active segment by the clock.
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
        """Return segment.ms less a random part of segment.jitter.ms.

        The random part is computed from the segment's name, so that it is the same in
        all processes.
        """
        jitter_ms = min(limits.config.segment_jitter_ms, limits.segment_ms)
        if not jitter_ms:
            return limits.segment_ms
        name = f"{os.path.basename(self.directory)}/{self.view.active_base}"
        return limits.segment_ms - zlib.crc32(name.encode()) % jitter_ms

    # -- deletion ------------------------------------------------------------------

    def delete_records(self, before_offset: int) -> int:
        """Move the log start offset up, so that records below it cannot be read.

        The next retention run removes segments that are below it as a whole.

        Args:
            before_offset: the new log start offset; -1: the high watermark.

        Returns:
            The log start offset, which may be higher than asked.

        Raises:
            ApiError: OFFSET_OUT_OF_RANGE, POLICY_VIOLATION (cleanup.policy does not
                contain delete), or as ``PartitionView.require_online``.
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
        """Cut off uncommitted bytes, force everything to disk, and close the files.

        Called by the last process that has the log. It loads a log that no process has
        loaded, so that a log which was never checked is not marked as closed cleanly.

        Returns:
            The log end offset.

        Raises:
            ApiError, OSError: it failed; the directory must not be marked as clean, so
                that the log is recovered at the next start.
        """
        view = self.view
        state = view.state()
        view.refresh(state.active_base_offset)
        active = view.active
        # A clean start trusts whole files, so uncommitted bytes go first. Killed in
        # here, the mark of a clean stop is absent, and the next start checks the log.
        with self.row.locked():
            # Its owner was killed, as no other process has the log any more.
            self.row.words[self.row.base + ROW_SYNC_OWNER] = 0
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
    """Write an entry of the offset index, and one of the time index if it is needed.

    The time index needs one if the largest timestamp has grown since its last entry.
    The entries are committed later, with the state.

    Args:
        segment: the active segment.
        entries: committed entries of the offset index.
        time_entries: committed entries of the time index.
        largest: the largest timestamp of the segment, this batch included.
        last_offset: the batch's last offset.
        position: the batch's position in the log file.

    Returns:
        How many entries of the time index were written: 0 or 1.
    """
    segment.offset_index.write_entry(entries, last_offset, position)
    if largest.timestamp <= segment.time_index.last_entry(time_entries).timestamp:
        return 0
    segment.time_index.write_entry(time_entries, *largest)
    return 1

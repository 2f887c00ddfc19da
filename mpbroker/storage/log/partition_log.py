"""PartitionLog: a partition's log, which any process may append to.

An append has these steps, all under the lock of the partition's row (its entry in
shared memory):

    1. load the log, if no process has loaded it
    2. catch up with the appends of other processes
    3. judge: check the producer's epoch and sequence
    4. make room: roll if the active segment is full; a roll is a commit of its own
    5. write the batch and its index entries, then commit them by a new LogState
    6. remember the position, for readers in this process

The commit is one aligned store. If the process is killed before this store, nothing was
appended: the next append overwrites the bytes past ``active_size``, and the index
entries past the committed numbers, at the same positions. After the store the append is
complete for every process. If all processes are killed, the row is lost with them: then
the next start takes every whole batch in the files as appended, also one that was not
committed, and whose client got no answer.

A batch is stored as it was received. Only its base offset and leader epoch are
replaced; its checksum does not cover them.

The compiled core (native/storage/append.c) writes and stores in the same order. It
appends alone while the AppendPlan, which this class keeps up to date, is enough for it.

Source: Kafka's UnifiedLog (append, roll, maybeIncrementLogStartOffset).
"""

import contextlib
import os
import zlib
from struct import Struct
from typing import TYPE_CHECKING, Final

from mpbroker.base.config_def import LONG_MAX
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.base.storage_errors import CorruptLogError
from mpbroker.ipc.layout import ROW_SYNC_OWNER
from mpbroker.ipc.tables.partition_table import LogState, PartitionRow
from mpbroker.metadata.log_config import LogConfig
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.records.batch_header import CONTROL_FLAG, TRANSACTIONAL_FLAG
from mpbroker.storage.files.log_files import (
    remove_segment,
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
    """The result of an append: the place of the batch in the log.

    Attributes:
        base_offset: the offset of the batch's first record.
        log_append_time_ms: the timestamp that the broker gave the records; -1: the
            records keep the producer's timestamps.
        log_start_offset: the log start offset at that time.
        duplicate: the batch was in the log before, and was not appended again.
        last_offset: the offset of the batch's last record.
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
        """Copy the limits to the compiled core's AppendPlan, and clear its segment.

        The core appends nothing by a plan without a segment. The next append by Python
        sets the segment again.
        """
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
        hints: the partition's entries in the log directory's checkpoint files, as they
            were when the broker started.

    Attributes:
        row: the partition's shared row.
        view: the state that all parts share: the row, and the files as this process
            knows them.
        reader: finds the bytes of a fetch.
        lookup: finds offsets by timestamp and by leader epoch, and the log's start and
            end offsets.
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
        self.view = view = PartitionView(directory, row, config, hints)
        self.reader = LogReader(view)
        self.lookup = LogLookup(view)
        self.producers = LogProducers(view)
        self.sync = LogSync(view, self.producers)
        self._limits: AppendLimits | None = None  # None: before the first append

    @property
    def directory(self) -> str:
        """The partition's directory, as this process knows it."""
        return self.view.directory

    # -- append ----------------------------------------------------------------------

    def append(
        self,
        batch: "ValidatedBatch",
        *,
        slot: int = -1,
        ordinal: int = 0,
        now_ms: int,
        is_open: IsOpen | None = None,
        keep_offset: bool = False,
    ) -> AppendResult:
        """Append one batch, or find it in the log if it is a producer's retry.

        Args:
            batch: a validated batch; its base offset and leader epoch are replaced,
                but see ``keep_offset``.
            slot: the slot of the request (its entry in shared memory while it is in
                flight), where a committed append is noted; -1: there is no request. If
                this process is killed, the request is executed again, but a noted
                append is not repeated.
            ordinal: the index of this partition in the request.
            now_ms: the wall clock.
            is_open: returns whether the coordinator knows of an open transaction, given
                a producer id, its epoch and a partition's row. A transactional batch
                that would begin a transaction in this partition is refused if it
                returns False. None: append without this check.
            keep_offset: keep the base offset of a batch that is a copy from another
                cluster. It must not be below the log end offset; it may be above.

        Returns:
            The offsets of the batch. The append is committed, and not yet durable
            unless flush.messages forced it to disk.

        Raises:
            ApiError: OUT_OF_ORDER_SEQUENCE_NUMBER, INVALID_PRODUCER_EPOCH,
                INVALID_TXN_STATE, RECORD_LIST_TOO_LARGE (larger than a segment),
                OFFSET_OUT_OF_RANGE (a kept offset below the log end offset),
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
            result = self._append_locked(
                batch, slot, ordinal, now_ms, is_open, keep_offset
            )
        except (ApiError, OSError, CorruptLogError) as error:
            if self.view.descriptors_released(error):
                result = self._append_locked(
                    batch, slot, ordinal, now_ms, is_open, keep_offset
                )
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
        keep_offset: bool,
    ) -> AppendResult:
        """Append a batch as ``append`` does; the caller holds the partition's lock."""
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
        if keep_offset:
            base_offset = self._kept_offset(batch, state, now_ms)
            version, state = words[view.version_word], view.committed()
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
            self._write(batch, marker, version, state, added, base_offset)
        except BaseException as error:
            self._undo(slot, state[ACTIVE_SIZE], error)
            raise
        # Committed. If this process is killed before the next call, the intent is still
        # set, and the next owner of the lock notes the append in the slot, as this call
        # does.
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

    def _kept_offset(
        self, batch: "ValidatedBatch", state: tuple[int, ...], now_ms: int
    ) -> int:
        """Check and return the base offset that a copied batch keeps.

        If the offset is too far from the active segment's base offset for the 32 bits
        of an index entry, roll to a segment that begins at it.

        Args:
            batch: a copy from another cluster.
            state: the committed state, as a plain tuple; outdated after a roll.
            now_ms: the wall clock.

        Raises:
            ApiError: OFFSET_OUT_OF_RANGE: the offset is below the log end offset.
            OSError: a new segment cannot be made; the old one stays active.
        """
        base_offset = batch.header.base_offset
        if base_offset < state[END_OFFSET]:
            raise ApiError(
                ErrorCode.OFFSET_OUT_OF_RANGE,
                f"a batch with base offset {base_offset}, but {self.directory} ends at"
                f" {state[END_OFFSET]}",
            )
        last_offset = base_offset + batch.last_offset_delta
        # An index has 32 bits for an offset in its segment.
        if (
            base_offset > state[END_OFFSET]
            and last_offset - state[ACTIVE_BASE] > _MAX_RELATIVE_OFFSET
        ):
            self._begin_at_locked(base_offset, state, now_ms)
        return base_offset

    def _begin_at_locked(
        self, base_offset: int, state: tuple[int, ...], now_ms: int
    ) -> None:
        """Roll to a segment whose base offset is above the log end offset.

        The roll moves the log end offset up. If this process is killed after the roll,
        the log ends with a gap of offsets, and the next batch is appended behind it.

        Args:
            base_offset: the base offset of the new segment.
            state: the committed state, as a plain tuple of LogState's fields.
            now_ms: the wall clock.
        """
        view, row = self.view, self.row
        empty = None if state[ACTIVE_SIZE] else state[ACTIVE_BASE]
        self.roll_locked(now_ms, base_offset)
        if empty is not None:
            # Odd: readers wait for the lock. If this process is killed in here, an
            # empty segment is left, which readers skip and retention removes.
            row.structure_version += 1
            view.segments.forget(empty)
            remove_segment(self.directory, empty)
            row.structure_version += 1
            view.refresh_locked(base_offset)

    def _make_room(
        self,
        state: tuple[int, ...],
        added: int,
        last_offset: int,
        timestamp: int,
        now_ms: int,
    ) -> bool:
        """Begin a new segment if a batch does not fit the active one or it is too old.

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
        base_offset: int,
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
            base_offset: the offset that its first record will have.

        Raises:
            OSError: a file cannot be written; nothing is committed.
        """
        view, limits = self.view, self._limits
        assert limits is not None
        last_offset = base_offset + batch.last_offset_delta
        (_, active_base, position, entries, time_entries, since_index, max_timestamp,
         max_timestamp_offset, unstable, created_ms, bytes_in) = state  # fmt: skip
        header, segment = batch.header, view.active
        if batch.max_timestamp > max_timestamp:
            max_timestamp, max_timestamp_offset = batch.max_timestamp, last_offset
        data = batch.data
        if data.readonly:
            data = memoryview(bytearray(data))
        _FRONT.pack_into(data, 0, base_offset, added - _LENGTH_FROM, limits.epoch)
        if header.attributes & _TXN_OR_CONTROL and header.producer_id >= 0:
            # The entry in the index of aborted transactions comes before the marker. If
            # this process is killed in between, the entry has no marker below the log
            # end: readers skip it, and the next writer of that index cuts it off. In
            # the other order, if all processes are killed in between, the next start
            # finds a marker in the log without its entry, and readers of committed data
            # may get aborted records.
            unstable = self.producers.unstable_after(
                segment, header, marker, base_offset
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
            view.bytes, view.copy_bytes[(version + 1) & 1],
            last_offset + 1, active_base, position + added, entries, time_entries,
            since_index + added, max_timestamp, max_timestamp_offset, unstable,
            created_ms, bytes_in + added,
        )  # fmt: skip
        # The commit, last, as one aligned 8-byte store. If this process is killed
        # before it, the log ends where it ended; after it, every process sees the batch
        # and its index entries.
        view.words[view.version_word] = version + 1

    def _undo(self, slot: int, size: int, error: BaseException) -> None:
        """Clean up after an append that has failed with an exception.

        Args:
            slot: the slot of the request, as for ``append``.
            size: committed bytes of the active segment; its file is cut to them.
            error: the exception.

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

    def append_at(
        self, batch: "ValidatedBatch", base_offset: int, *, now_ms: int
    ) -> bool:
        """Append a batch at the offset that the database of a cluster has given it.

        The producer's epoch and sequence are not checked: the database has done so.
        Offsets between the log end offset and ``base_offset`` stay without records.

        Returns:
            Whether the batch was appended; False if the log has these offsets already.

        Raises:
            ApiError: the errors of ``append`` that are not about a producer;
                INVALID_RECORD: the log ends within the batch.
        """
        row = self.row
        row.lock()
        try:
            return self._append_at_locked(batch, base_offset, now_ms)
        except (OSError, CorruptLogError) as error:
            if self.view.descriptors_released(error):
                return self._append_at_locked(batch, base_offset, now_ms)
            self.view.fail(error, "cannot be appended to")
        finally:
            row.unlock()

    def _append_at_locked(
        self, batch: "ValidatedBatch", base_offset: int, now_ms: int
    ) -> bool:
        """Append as ``append_at`` does; the caller holds the partition's lock."""
        view, producers = self.view, self.producers
        view.require_online_locked()
        view.take_over_from_core()
        state = view.committed()
        view.refresh_locked(state[ACTIVE_BASE])
        last_offset = base_offset + batch.last_offset_delta
        end_offset = state[END_OFFSET]
        if last_offset < end_offset:
            return False
        if base_offset < end_offset:
            raise ApiError(
                ErrorCode.INVALID_RECORD,
                f"{self.directory} ends at {end_offset}, within a batch from"
                f" {base_offset} to {last_offset}: it is not a copy of this log",
            )
        if base_offset > end_offset and (
            not state[ACTIVE_SIZE]
            or last_offset - state[ACTIVE_BASE] > _MAX_RELATIVE_OFFSET
        ):
            self._begin_at_locked(base_offset, state, now_ms)
            state = view.committed()
        has_producer = batch.header.producer_id >= 0
        if has_producer:
            producers.catch_up(state, now_ms).end_offset = base_offset
        added = len(batch.data)
        if self._make_room(state, added, last_offset, batch.max_timestamp, now_ms):
            state = view.committed()
        assert END_OFFSET == 0
        state = (base_offset, *state[1:])  # ``remember_append`` takes the offset of it
        version = view.words[view.version_word]
        try:
            self._write(batch, None, version, state, added, base_offset)
        except BaseException as error:
            self._undo(-1, state[ACTIVE_SIZE], error)
            raise
        if has_producer:
            producers.apply(batch, None, base_offset, last_offset)
        view.remember_append(state, added, last_offset + 1)
        return True

    def append_plan(self) -> AppendPlan | None:
        """Return the AppendPlan: how the compiled core may append to this log.

        It is kept up to date from now on. None: the core must not append, because of
        flush.messages, or because this process has not appended since the settings were
        changed. PartitionLog.append does it instead.
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

    def roll_locked(self, now_ms: int, begin_at: int | None = None) -> None:
        """Make a new, empty segment the active one. The caller holds the row's lock.

        The roll has three steps: cut the old segment's files to the committed state;
        create the new segment's files; commit by publishing a state that names it.

        Args:
            now_ms: the wall clock.
            begin_at: the base offset of the new segment, above the log end offset,
                which moves up to it. None: the new segment begins at the log end
                offset, and there is no roll if the active segment is empty.

        Raises:
            OSError: a file cannot be made or changed; the old segment stays active.
        """
        view = self.view
        view.take_over_from_core()
        state = LogState._make(view.committed())
        base_offset = state.log_end_offset
        if state.active_base_offset != view.active_base:
            view.refresh_locked(state.active_base_offset)
        if begin_at is not None:
            base_offset = begin_at
        elif not state.active_size:
            return
        # Before the commit: afterwards the row has the numbers of the new segment, and
        # readers take those of the old one from the sizes of its files. If this process
        # is killed before the commit, the row is unchanged: the old segment goes on,
        # the time index entry added here is overwritten, and the next roll does all of
        # this again.
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
        # The commit, after the files exist that it names. If this process is killed
        # before it, an empty segment is left above the active base offset. Other
        # processes leave it out when they list the directory; the next roll or the next
        # start removes it.
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
        """Whether a batch is too late for the active segment, by segment.ms.

        It is if its timestamp is more than segment.ms after that of the segment's first
        batch. If the first batch has no timestamp or is damaged, the segment's age by
        the clock is compared instead, so that a damaged batch fails no append.

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
        """Return the active segment's segment.ms less a part of segment.jitter.ms.

        The part is a hash of the segment's name, so that it looks random and is the
        same in all processes.
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
            The log start offset, which may be above ``before_offset``.

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

    def raise_log_start(self, offset: int) -> None:
        """Move the log start offset up to ``offset``, or to the log end if it is lower.

        Raises:
            ApiError: as ``PartitionView.require_online``.
        """
        row = self.row
        with row.locked():
            self.view.require_online_locked()
            target = min(offset, row.log_end_offset)
            if target > row.log_start_offset:
                row.log_start_offset = target

    # -- the end -------------------------------------------------------------------

    def close(self) -> None:
        """Close the files of this log. They open again when needed."""
        self.view.close()
        self.sync.close()

    def close_cleanly(self) -> int:
        """Cut off uncommitted bytes, force everything to disk, and close the files.

        The last process that has the log calls this. If no process has loaded the log,
        it is loaded first, because the mark of a clean stop must cover checked logs
        only.

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
        # A start after a clean stop trusts whole files, so uncommitted bytes go first.
        # If this process is killed in here, the mark of a clean stop is absent, and the
        # next start checks the log.
        with self.row.locked():
            # The owner of this sync was killed: no other process has the log any more.
            if owner := self.row.words[self.row.base + ROW_SYNC_OWNER]:
                self.row.forget_sync(owner - 1)
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

    The time index needs an entry if the largest timestamp has grown since its last
    entry. The caller commits the entries later, with the state.

    Args:
        segment: the active segment.
        entries: committed entries of the offset index.
        time_entries: committed entries of the time index.
        largest: the largest timestamp of the segment, this batch included.
        last_offset: the batch's last offset.
        position: the batch's position in the log file.

    Returns:
        The number of entries written to the time index: 0 or 1.
    """
    segment.offset_index.write_entry(entries, last_offset, position)
    if largest.timestamp <= segment.time_index.last_entry(time_entries).timestamp:
        return 0
    segment.time_index.write_entry(time_entries, *largest)
    return 1

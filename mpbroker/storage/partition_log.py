"""Append to a partition that any process may append to.

An append, under the row's lock: load the log if nobody has; catch up with what others
did; judge the producer's sequence; roll if the segment is full; write the batch, then
index entries; publish the new LogState. The publish is the commit: whoever dies before
it has appended nothing, and the bytes past ``active_size`` and the index entries past
their counts are overwritten by the next append, in the same places.

The batch is stored as received. Base offset and leader epoch are patched in place;
they lie outside its checksum, and patching them again after a death is harmless.
"""

import os
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from mpbroker.ipc.layout import RowStatus
from mpbroker.ipc.partition_table import LogState, PartitionRow
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.storage.batch_scan import CONTROL_MASK, TRANSACTIONAL_MASK
from mpbroker.storage.errors import CorruptLogError
from mpbroker.storage.log_config import LogConfig
from mpbroker.storage.log_files import SNAPSHOT_SUFFIX, segment_file, write_whole
from mpbroker.storage.log_loader import LoadHints, load_producers
from mpbroker.storage.log_lookup import LogLookup
from mpbroker.storage.log_segment import LogSegment
from mpbroker.storage.partition_view import STATE
from mpbroker.storage.producer_replay import parse_marker, replay_log, replay_range
from mpbroker.storage.producer_snapshot import (
    remove_needless_snapshots,
    write_snapshot,
)
from mpbroker.storage.producer_state import (
    AppendedBatch,
    EndTransactionMarker,
    ProducerState,
    last_sequence_of,
)
from mpbroker.storage.time_index import TimestampOffset
from mpbroker.storage.txn_index import append_aborted

if TYPE_CHECKING:
    from mpbroker.protocol.batch_header import BatchHeader
    from mpbroker.protocol.log_validator import ValidatedBatch

_FRONT: Final = Struct(">qii")  # base offset, length, leader epoch
_TXN_OR_CONTROL: Final = TRANSACTIONAL_MASK | CONTROL_MASK
_MAX_RELATIVE_OFFSET: Final = 0x7FFF_FFFF
_EXPIRATION_CHECK_MS: Final = 600_000
# Catching up by more than this many offsets starts before the lock is taken.
_LAG_OFFSETS: Final = 1_000


class AppendResult(NamedTuple):
    """Where a batch is in the log, also if it was there already."""

    base_offset: int
    log_append_time_ms: int  # -1: the topic keeps the producer's timestamps
    log_start_offset: int
    duplicate: bool
    last_offset: int


class PartitionLog(LogLookup):
    """One process's handle on a partition's log."""

    def __init__(
        self,
        directory: str,
        row: PartitionRow,
        config: LogConfig,
        hints: LoadHints | None = None,
    ) -> None:
        super().__init__(directory, row, config, hints)
        # Largest timestamp of the active segment's first batch; None: not read yet.
        self._first_timestamp: int | None = None
        # Where ``producers.end_offset`` stands in the active segment; -1: elsewhere.
        self._producers_position = -1
        self._expiration_checked_ms = 0
        self._directories: list[int] = []

    def append(
        self,
        batch: "ValidatedBatch",
        *,
        slot: int = -1,
        ordinal: int = 0,
        now_ms: int,
    ) -> AppendResult:
        """Append one batch, or find out that it was appended before.

        Args:
            slot: the request's slot, which remembers a committed append (-1: none).
            ordinal: which of the request's partitions this is.
            now_ms: the wall clock.

        Raises:
            ApiError: OUT_OF_ORDER_SEQUENCE_NUMBER, INVALID_PRODUCER_EPOCH,
                INVALID_TXN_STATE, RECORD_LIST_TOO_LARGE (larger than a segment),
                KAFKA_STORAGE_ERROR, UNKNOWN_TOPIC_OR_PARTITION. Nothing was appended.
        """
        row = self.row
        if batch.header.producer_id >= 0:
            self._catch_up_unlocked(now_ms)
        row.lock()
        try:
            result = self._append_locked(batch, slot, ordinal, now_ms)
        except ApiError as error:
            if not self._descriptors_released(error.__cause__):
                raise
            result = self._append_locked(batch, slot, ordinal, now_ms)
        finally:
            row.unlock()
        if result[4] - row.durable_end_offset >= self.config.flush_messages:
            self.sync(result[4] + 1)
        return result

    def _append_locked(
        self, batch: "ValidatedBatch", slot: int, ordinal: int, now_ms: int
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
            _,
        ) = state = STATE.unpack_from(self._bytes, self._copy_bytes[version & 1])
        if (
            active_base != self._active_base
            or words[self._structure_word] != self._structure
        ):
            self.refresh_locked(active_base)
        producer_id = header.producer_id
        marker: EndTransactionMarker | None = None
        if producer_id >= 0:
            self._catch_up(state, now_ms)
            if header.attributes & CONTROL_MASK:
                marker = self._check_marker(batch, end_offset)
            else:
                known = self._check_sequence(batch)
                if known is not None:
                    start = words[self._start_word]
                    return AppendResult(known[2], known[4], start, True, known[3])
        data = batch.data
        added = len(data)
        last_offset = end_offset + batch.last_offset_delta
        timestamp = batch.max_timestamp
        segment = self._active
        config = self.config
        rolled = False
        try:
            if (
                size + added > config.segment_bytes
                or last_offset - active_base > _MAX_RELATIVE_OFFSET
                or (entries + 1) * 8 > config.segment_index_bytes
                or (time_entries + 2) * 12 > config.segment_index_bytes
                or self._waited(timestamp, size) > config.segment_ms
            ) and size:
                if added > config.segment_bytes:
                    self._refuse_larger_than_segment(added)
                segment = self._roll(state)
                rolled = True
                active_base, created_ms = end_offset, now_ms
                size = entries = time_entries = since_index = 0
                max_timestamp = max_timestamp_offset = -1
            elif added > config.segment_bytes:
                self._refuse_larger_than_segment(added)
            if timestamp > max_timestamp:
                max_timestamp, max_timestamp_offset = timestamp, last_offset
            if slot >= 0:
                row.set_intent(slot, ordinal, end_offset)
            if data.readonly:
                data = memoryview(bytearray(data))
            _FRONT.pack_into(data, 0, end_offset, added - 12, self.leader_epoch)
            if os.pwrite(segment.fd, data, size) != added:
                write_whole(segment.fd, data, size)
            if since_index > config.index_interval_bytes:
                segment.offset_index.write_entry(entries, last_offset, size)
                entries += 1
                since_index = 0
                last = segment.time_index.last_entry(time_entries)
                if max_timestamp > last.timestamp:
                    segment.time_index.write_entry(
                        time_entries, max_timestamp, max_timestamp_offset
                    )
                    time_entries += 1
            if producer_id >= 0 and header.attributes & _TXN_OR_CONTROL:
                unstable = self._unstable_after(segment, header, marker, end_offset)
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
                0,
            )
            # The commit: one aligned store. Before it nothing happened, after it all.
            words[self._version_word] = version + 1
        except BaseException as error:
            self._undo(slot, state, segment, error)
            raise
        if slot >= 0:
            row.clear_intent()
        if rolled:
            self._take_over_roll(segment, end_offset)
        producers = self.producers
        if producers is not None and producers.end_offset == end_offset:
            if producer_id >= 0:
                self._apply(producers, batch, marker, end_offset, last_offset)
            producers.end_offset = last_offset + 1
            self._producers_position = size + added
        return AppendResult(
            end_offset,
            batch.log_append_time_ms,
            words[self._start_word],
            False,
            last_offset,
        )

    # -- durability ----------------------------------------------------------------

    def segments_to_sync(self, from_offset: int, to_offset: int) -> list[int]:
        """Return descriptors to fdatasync for the offsets in a range to be durable.

        Those of the logs that hold them and, if one of these files may be new, of the
        directories that hold its name. They stay open until the next call.

        Raises:
            OSError: a file cannot be opened.
        """
        while True:
            state = self.committed()
            if (
                state[1] != self._active_base
                or self._words[self._structure_word] != self._structure
            ):
                self.refresh(state[1])
            if from_offset > self._active_base:
                return [self._active.fd]
            try:
                return self._files_to_sync(from_offset, to_offset)
            except FileNotFoundError as error:
                # What retention removed meanwhile needs no forcing.
                self._structure_moved_or_fail(error)

    def _files_to_sync(self, from_offset: int, to_offset: int) -> list[int]:
        fds, new = [], False
        for segment in self.segments.from_offset(from_offset):
            if segment.base_offset >= to_offset:
                break
            fds.append(segment.fd)
            new = new or segment.base_offset >= from_offset
        if new:
            fds += self._directory_fds()
        return fds

    def _directory_fds(self) -> list[int]:
        if not self._directories:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            for path in (self.directory, os.path.dirname(self.directory)):
                self._directories.append(os.open(path, flags))
        return self._directories

    def close(self) -> None:
        """Close all files. They open again when needed."""
        super().close()
        opened, self._directories = self._directories, []
        for fd in opened:
            os.close(fd)

    def sync(self, to_offset: int | None = None) -> int:
        """Force all below ``to_offset`` (the log end if None) to disk.

        Returns:
            The durable end offset.

        Raises:
            ApiError: KAFKA_STORAGE_ERROR; the partition is offline for good, because
                after a failed fsync nobody knows what is on disk.
        """
        row = self.row
        end = self.state().log_end_offset
        durable = row.durable_end_offset
        if durable >= (end if to_offset is None else to_offset):
            return durable
        try:
            for fd in self.segments_to_sync(durable, end):
                os.fdatasync(fd)
        except OSError as error:
            row.status = RowStatus.OFFLINE
            self.fail(error, "cannot be forced to disk")
        with row.locked():
            row.durable_end_offset = max(row.durable_end_offset, end)
        return end

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

    def _roll(self, state: tuple[int, ...]) -> LogSegment:
        """Finish the active segment and make the next; committed with the append."""
        end_offset, _, size, entries, time_entries, _, timestamp, offset, *_ = state
        largest = TimestampOffset(timestamp, offset)
        self._active.finish(size, entries, time_entries, largest)
        producers = self.producers
        if producers is not None and producers.end_offset == end_offset:
            write_snapshot(self.directory, producers, sync=False)
        segment = LogSegment(self.directory, end_offset)
        segment.create()
        return segment

    def _take_over_roll(self, segment: LogSegment, base_offset: int) -> None:
        self._active.close_indexes()
        self.segments.add(segment)
        self._active, self._active_base = segment, base_offset
        self._positions.clear()
        self._leave_active()

    def _leave_active(self) -> None:
        self._first_timestamp = None
        self._producers_position = -1

    def _waited(self, timestamp: int, size: int) -> int:
        """Return how far, in ms, a batch is from the first of its segment."""
        first = self._first_timestamp
        if first is None:
            if not size:
                return 0
            batch = self._active.first_batch(size)
            assert batch is not None
            first = self._first_timestamp = batch.max_timestamp
        return timestamp - first if first >= 0 else 0

    def _refuse_larger_than_segment(self, added: int) -> None:
        raise ApiError(
            ErrorCode.RECORD_LIST_TOO_LARGE,
            f"a batch of {added} bytes does not fit segment.bytes"
            f" {self.config.segment_bytes}: send smaller batches or raise it",
        )

    def _undo(
        self,
        slot: int,
        state: tuple[int, ...],
        segment: LogSegment,
        error: BaseException,
    ) -> None:
        """Leave the row as it was; answer a failure of the disk as one."""
        if slot >= 0:
            self.row.abandon_intent()
        try:
            # Not needed for what is read, only so that no torn batch stays behind.
            segment.truncate(state[2] if segment is self._active else 0)
        except OSError:
            pass
        if isinstance(error, OSError):
            self.fail(error, "cannot be appended to")

    # -- producers -----------------------------------------------------------------

    def _check_sequence(self, batch: "ValidatedBatch") -> AppendedBatch | None:
        header = batch.header
        sequence = header.base_sequence
        if sequence < 0:
            return None  # a coordinator's own records have no sequence
        assert self.producers is not None
        return self.producers.check(
            header.producer_id,
            header.producer_epoch,
            sequence,
            last_sequence_of(sequence, batch.last_offset_delta),
            header.attributes & TRANSACTIONAL_MASK,
        )

    def _check_marker(
        self, batch: "ValidatedBatch", offset: int
    ) -> EndTransactionMarker | None:
        marker = parse_marker(batch.data)
        if marker is None:
            return None
        header = batch.header
        assert self.producers is not None
        self.producers.check_marker(
            header.producer_id, header.producer_epoch, marker.coordinator_epoch
        )
        return marker._replace(offset=offset)

    def _unstable_after(
        self,
        segment: LogSegment,
        header: "BatchHeader",
        marker: EndTransactionMarker | None,
        end_offset: int,
    ) -> int:
        """Return the first unstable offset after this append; index an abort."""
        producers = self.producers
        assert producers is not None
        unstable = producers.first_unstable_offset
        if marker is not None:
            aborted = producers.ended_by(header.producer_id, marker)
            if aborted is not None:
                append_aborted(segment.txn_index_path, aborted, end_offset)
            return producers.unstable_after(header.producer_id)
        if unstable < 0 and header.is_transactional and not header.is_control:
            return end_offset
        return unstable

    def _apply(
        self,
        producers: ProducerState,
        batch: "ValidatedBatch",
        marker: EndTransactionMarker | None,
        base_offset: int,
        last_offset: int,
    ) -> None:
        header = batch.header
        attributes = header.attributes
        if marker is not None:
            producers.apply_marker(header.producer_id, header.producer_epoch, marker)
        elif not attributes & CONTROL_MASK:
            sequence = header.base_sequence
            appended = AppendedBatch(
                sequence,
                last_sequence_of(sequence, batch.last_offset_delta),
                base_offset,
                last_offset,
                batch.max_timestamp,
            )
            transactional = attributes & TRANSACTIONAL_MASK
            producers.apply(
                header.producer_id, header.producer_epoch, appended, transactional
            )

    def take_snapshot(self, *, sync: bool = True) -> None:
        """Write the producers as of the log end, so that the next start is short."""
        state = self.state()
        self.refresh(state.active_base_offset)
        self._catch_up(state, self._expiration_checked_ms)
        assert self.producers is not None
        path = segment_file(self.directory, state.log_end_offset, SNAPSHOT_SUFFIX)
        if not os.path.exists(path):
            write_snapshot(self.directory, self.producers, sync=sync)
            remove_needless_snapshots(self.directory, self.segments.bases)

    def _catch_up_unlocked(self, now_ms: int) -> None:
        """Read most of what others appended before taking the lock."""
        producers = self.producers
        words, version_word = self._words, self._version_word
        # A guess is enough: this word may be one that is being written.
        end_word = self._copy_bytes[words[version_word] & 1] >> 3
        if producers is not None and (
            words[end_word] - producers.end_offset < _LAG_OFFSETS
        ):
            return
        if words[self._status_word] == RowStatus.ONLINE:
            state = self.committed()
            try:
                self.refresh(state[1])
                self._catch_up(state, now_ms)
            except (FileNotFoundError, CorruptLogError, ApiError):
                pass  # files moved under us; it is done again under the lock

    def _catch_up(self, state: tuple[int, ...], now_ms: int) -> None:
        """Make the producers those of the log end in ``state``."""
        producers = self.producers
        try:
            if producers is None:
                log_state = LogState._make(state)
                start = self._words[self._start_word]
                producers = load_producers(
                    self.segments, log_state, self._hints, start, now_ms
                )
                self.producers = producers
            elif producers.end_offset != state[0]:
                if self._producers_position >= 0:
                    fd = self._active.fd
                    replay_range(producers, fd, self._producers_position, state[2])
                    producers.end_offset = state[0]
                else:
                    replay_log(producers, self.segments, LogState._make(state))
        except CorruptLogError as error:
            self.fail(error, "cannot be caught up with")
        self._producers_position = state[2] if state[1] == self._active_base else -1
        if now_ms - self._expiration_checked_ms > _EXPIRATION_CHECK_MS:
            self._expiration_checked_ms = now_ms
            producers.remove_expired(now_ms, self._hints.producer_id_expiration_ms)

"""What a partition's log knows of its producers, and how it keeps up with the log."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from mpbroker.base.storage_errors import CorruptLogError
from mpbroker.ipc.layout import RowStatus
from mpbroker.ipc.tables.partition_table import LogState, PartitionRow
from mpbroker.metadata.log_config import LogConfig
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.storage.files.batch_scan import CONTROL_MASK, TRANSACTIONAL_MASK
from mpbroker.storage.files.log_files import SNAPSHOT_SUFFIX, segment_file
from mpbroker.storage.files.log_segment import LogSegment
from mpbroker.storage.files.txn_index import append_aborted
from mpbroker.storage.log.append_plan import AppendPlan
from mpbroker.storage.log.log_loader import LoadHints, load_producers
from mpbroker.storage.log.log_lookup import LogLookup
from mpbroker.storage.producers.producer_replay import (
    parse_marker,
    replay_log,
    replay_range,
)
from mpbroker.storage.producers.producer_snapshot import (
    remove_needless_snapshots,
    write_snapshot,
)
from mpbroker.storage.producers.producer_state import (
    AppendedBatch,
    EndTransactionMarker,
    ProducerState,
    last_sequence_of,
)

if TYPE_CHECKING:
    from mpbroker.protocol.records.batch_header import BatchHeader
    from mpbroker.protocol.records.log_validator import ValidatedBatch

# Says of a producer id, its epoch and a partition's row whether a transaction is open.
IsOpen = Callable[[int, int, int], bool]

_new_tuple: Final = tuple.__new__
_EXPIRATION_CHECK_MS: Final = 600_000
# Catching up by more than this many offsets starts before the lock is taken.
_LAG_OFFSETS: Final = 1_000


class LogProducers(LogLookup):
    """The part of a partition's log that judges and follows producers.

    Each process has its own copy of their state, as of some offset, and reads what
    others appended since only when a batch with a producer id comes.
    """

    def __init__(
        self,
        directory: str,
        row: PartitionRow,
        config: LogConfig,
        hints: LoadHints | None = None,
    ) -> None:
        super().__init__(directory, row, config, hints)
        # Where ``producers.end_offset`` stands in the active segment; -1: elsewhere.
        self._producers_position = -1
        self._expire_at_ms = 0  # when to look for producers that are to be forgotten
        # Up to this offset; what a start had to check, it has also forced to disk.
        self._indexes_synced = self._hints.recovery_point
        # What the compiled core appends by, once it has been asked for.
        self._plan: AppendPlan | None = None

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

    def _recall(
        self, header: "BatchHeader", last_sequence: int, refusal: ApiError
    ) -> AppendedBatch:
        """Return the batch that a client's repeats, if the log has it after all.

        Raises:
            ApiError: ``refusal``, if it has not.
        """
        # Here, as it is rare: a start has no time for it.
        from mpbroker.storage.producers.producer_recall import (
            may_be_recalled,
            recall_batches,
        )

        producers = self.producers
        assert producers is not None
        entry = producers.entries.get(header.producer_id)
        sequence = header.base_sequence
        if entry is None or not may_be_recalled(entry, header.producer_epoch, sequence):
            raise refusal
        try:
            recall_batches(entry, self.segments, LogState._make(self.committed()))
        except (FileNotFoundError, CorruptLogError):
            raise refusal from None  # old segments went, or were compacted
        for batch in entry.batches:
            if batch[:2] == (sequence, last_sequence):
                return batch
        raise refusal

    def _require_transaction(self, header: "BatchHeader", is_open: IsOpen) -> None:
        """Let a batch begin a transaction here only if its coordinator knows of it.

        A batch that was on its way for longer than its transaction lasted would begin
        one that nobody ever ends (KIP-890). Under the row's lock, as the marker that
        ends it: so it comes before the marker, or not at all.

        Raises:
            ApiError: INVALID_TXN_STATE.
        """
        producer_id, epoch = header.producer_id, header.producer_epoch
        assert self.producers is not None
        entry = self.producers.entries.get(producer_id)
        if entry is not None and entry.txn_first_offset >= 0 and entry.epoch == epoch:
            return
        if not is_open(producer_id, epoch, self.row.index):
            raise ApiError(
                ErrorCode.INVALID_TXN_STATE,
                f"producer {producer_id} has no transaction here at epoch {epoch}",
            )

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
            last_sequence = last_sequence_of(sequence, batch.last_offset_delta)
            timestamp = batch.max_timestamp
            fields = (sequence, last_sequence, base_offset, last_offset, timestamp)
            appended = _new_tuple(AppendedBatch, fields)
            transactional = attributes & TRANSACTIONAL_MASK
            producers.apply(
                header.producer_id, header.producer_epoch, appended, transactional
            )

    def _leave_active(self) -> None:
        self._take_over_from_plan()
        self._producers_position = -1
        if self._plan is not None:
            self._plan.producers_end = -1

    def _take_over_from_plan(self) -> None:
        """Step over what the compiled core has appended, or read of others'.

        It has told ``producers`` of all of it that has a producer.
        """
        plan, producers = self._plan, self.producers
        if (
            plan is not None
            and producers is not None
            and plan.producers_end > producers.end_offset
        ):
            producers.end_offset = plan.producers_end
            self._producers_position = plan.producers_position

    def producers_at(self, state: LogState) -> ProducerState:
        """Return this process's producers, brought up to a committed state."""
        self.refresh(state.active_base_offset)
        return self._catch_up(state, self._expire_at_ms)

    def take_snapshot(self, *, sync: bool = True) -> None:
        """Write the producers as of the log end, so that the next start is short."""
        state = self.state()
        producers = self.producers_at(state)
        path = segment_file(self.directory, state.log_end_offset, SNAPSHOT_SUFFIX)
        if not os.path.exists(path):
            write_snapshot(self.directory, producers, sync=sync)
            bases, point = self.segments.bases, self._indexes_synced
            remove_needless_snapshots(self.directory, bases, point)

    def _catch_up_unlocked(self, now_ms: int) -> None:
        """Read most of what others appended before taking the lock."""
        self._take_over_from_plan()
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
            except (OSError, CorruptLogError, ApiError):
                pass  # files moved under us, say; it is done again under the lock

    def _catch_up(self, state: tuple[int, ...], now_ms: int) -> ProducerState:
        """Make the producers those of the log end in ``state``."""
        self._take_over_from_plan()
        producers = self.producers
        if producers is not None and now_ms > producers.now_ms:
            producers.now_ms = now_ms
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
        if now_ms > self._expire_at_ms:
            self._expire_at_ms = now_ms + _EXPIRATION_CHECK_MS
            producers.remove_expired(now_ms, self._hints.producer_id_expiration_ms)
        return producers

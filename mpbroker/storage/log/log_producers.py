"""LogProducers: check batches of producers, and keep their state up to date.

Source: Kafka's UnifiedLog.analyzeAndValidateProducerState; KIP-890.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from mpbroker.base.storage_errors import CorruptLogError
from mpbroker.ipc.tables.partition_table import LogState
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.records.batch_header import CONTROL_FLAG, TRANSACTIONAL_FLAG
from mpbroker.storage.files.log_segment import LogSegment
from mpbroker.storage.files.txn_index import append_aborted
from mpbroker.storage.log.log_loader import load_producers
from mpbroker.storage.log.partition_view import (
    ACTIVE_BASE,
    ACTIVE_SIZE,
    END_OFFSET,
    ONLINE,
    PartitionView,
)
from mpbroker.storage.producers.producer_replay import (
    parse_marker,
    replay_log,
    replay_range,
)
from mpbroker.storage.producers.producer_state import (
    NO_SEQUENCE,
    SEQUENCE_MASK,
    AppendedBatch,
    EndTransactionMarker,
    ProducerState,
    last_sequence_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpbroker.protocol.records.batch_header import BatchHeader
    from mpbroker.protocol.records.log_validator import ValidatedBatch

# Given a producer id, its epoch and a partition's row, returns whether the coordinator
# knows of an open transaction of the producer in the partition.
IsOpen = Callable[[int, int, int], bool]

_new_tuple: Final = tuple.__new__
_EXPIRATION_CHECK_MS: Final = 600_000
# If this process is so many offsets behind, it reads them before it takes the lock.
_LAG_OFFSETS: Final = 1_000


class LogProducers:
    """The part of a PartitionLog that checks batches of producers.

    Each process has its own copy of the producers' state (``PartitionView.producers``),
    as of some offset. It reads the batches that other processes have appended since
    only when a batch with a producer id arrives. The caller of a method holds the lock
    of the row (the partition's entry in shared memory), unless the method's docstring
    says otherwise.
    """

    __slots__ = ("_expire_at_ms", "_view")

    def __init__(self, view: PartitionView) -> None:
        self._view = view
        self._expire_at_ms = 0  # when to remove expired producers next

    # -- before an append ----------------------------------------------------------

    def judge(
        self,
        batch: "ValidatedBatch",
        state: "Sequence[int]",
        now_ms: int,
        is_open: IsOpen | None,
    ) -> AppendedBatch | EndTransactionMarker | None:
        """Check the epoch and sequence of a producer's batch before it is appended.

        Args:
            batch: the batch to append.
            state: the committed state, as a plain sequence of LogState's fields.
            now_ms: the wall clock.
            is_open: see PartitionLog.append.

        Returns:
            An AppendedBatch if there is nothing to append: for a retry, the same batch
            in the log; for the marker of a transaction that has already ended, the last
            offset of the log. Otherwise the end-of-transaction marker in the batch, or
            None if the batch has none.

        Raises:
            ApiError: INVALID_PRODUCER_EPOCH, OUT_OF_ORDER_SEQUENCE_NUMBER,
                INVALID_TXN_STATE; for a marker TRANSACTION_COORDINATOR_FENCED.
        """
        header, end_offset = batch.header, state[END_OFFSET]
        producers = self._view.producers
        if (
            producers is None
            or producers.end_offset != end_offset
            or now_ms > self._expire_at_ms
        ):
            producers = self.catch_up(state, now_ms)
        producers.now_ms = now_ms
        attributes = header.attributes
        if attributes & CONTROL_FLAG:
            marker = _judge_marker(producers, batch, end_offset)
            if marker is None or not producers.has_ended(
                header.producer_id, header.producer_epoch
            ):
                return marker
            # The coordinator was killed after it had appended this marker and before it
            # had noted the append, and now appends the marker again.
            last = end_offset - 1
            return AppendedBatch(NO_SEQUENCE, NO_SEQUENCE, last, last, -1)
        sequence = header.base_sequence
        if sequence < 0:
            return None  # the coordinator's own records have no sequence
        last_sequence = sequence + batch.last_offset_delta & SEQUENCE_MASK
        transactional = attributes & TRANSACTIONAL_FLAG
        try:
            known = producers.check(
                header.producer_id,
                header.producer_epoch,
                sequence,
                last_sequence,
                transactional,
            )
        except ApiError as refusal:
            known = self._recall(header, last_sequence, refusal)
        if known is None and transactional and is_open is not None:
            self._require_transaction(producers, header, is_open)
        return known

    def _recall(
        self, header: "BatchHeader", last_sequence: int, refusal: ApiError
    ) -> AppendedBatch:
        """Return the batch in the log that a refused batch is a retry of.

        A producers' state that comes from a snapshot has only the last batch of each
        producer, so the earlier ones are read from the log.

        Args:
            header: the header of the refused batch.
            last_sequence: its last sequence.
            refusal: the error with which it was refused.

        Raises:
            ApiError: ``refusal``, if the log does not have the batch.
        """
        # Imported here: it is needed rarely, and a start takes less time without it.
        from mpbroker.storage.producers.producer_recall import (
            may_be_recalled,
            recall_batches,
        )

        view = self._view
        assert view.producers is not None
        entry = view.producers.entries.get(header.producer_id)
        sequence = header.base_sequence
        if entry is None or not may_be_recalled(entry, header.producer_epoch, sequence):
            raise refusal
        try:
            recall_batches(entry, view.segments, LogState._make(view.committed()))
        except (FileNotFoundError, CorruptLogError):
            raise refusal from None  # old segments were removed, or compacted
        for batch in entry.batches:
            if batch[:2] == (sequence, last_sequence):
                return batch
        raise refusal

    def _require_transaction(
        self, producers: ProducerState, header: "BatchHeader", is_open: IsOpen
    ) -> None:
        """Refuse a transactional batch if the coordinator has no such transaction open.

        Only a batch that would begin a transaction in this partition is checked. If it
        arrived after the end of its transaction, it would begin another one, which
        never ends (KIP-890). This check and the append of the marker that ends the
        transaction are both made under the row's lock. So the batch is appended before
        the marker, or refused.

        Raises:
            ApiError: INVALID_TXN_STATE: the coordinator has no such transaction open.
        """
        producer_id, epoch = header.producer_id, header.producer_epoch
        entry = producers.entries.get(producer_id)
        if entry is not None and entry.txn_first_offset >= 0 and entry.epoch == epoch:
            return
        if not is_open(producer_id, epoch, self._view.row.index):
            raise ApiError(
                ErrorCode.INVALID_TXN_STATE,
                f"producer {producer_id} has no transaction here at epoch {epoch}",
            )

    # -- during and after an append ------------------------------------------------

    def unstable_after(
        self,
        segment: LogSegment,
        header: "BatchHeader",
        marker: EndTransactionMarker | None,
        end_offset: int,
    ) -> int:
        """Return the first unstable offset as of after the append of a batch.

        It is the first offset of the oldest open transaction; -1: none is open. For an
        abort marker this also writes the entry of the index of aborted transactions,
        before the marker is appended.

        Args:
            segment: the active segment.
            header: the header of the batch that is being appended.
            marker: the marker in it; None: it has none.
            end_offset: the log end offset, where the batch will be.

        Raises:
            OSError: the index cannot be written.
        """
        producers = self._view.producers
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

    def apply(
        self,
        batch: "ValidatedBatch",
        marker: EndTransactionMarker | None,
        base_offset: int,
        last_offset: int,
    ) -> None:
        """Apply a batch to the producers' state, after it was committed."""
        producers = self._view.producers
        assert producers is not None
        header = batch.header
        attributes = header.attributes
        if marker is not None:
            producers.apply_marker(header.producer_id, header.producer_epoch, marker)
        elif not attributes & CONTROL_FLAG:
            sequence = header.base_sequence
            last_sequence = last_sequence_of(sequence, batch.last_offset_delta)
            timestamp = batch.max_timestamp
            fields = (sequence, last_sequence, base_offset, last_offset, timestamp)
            appended = _new_tuple(AppendedBatch, fields)
            transactional = attributes & TRANSACTIONAL_FLAG
            producers.apply(
                header.producer_id, header.producer_epoch, appended, transactional
            )

    # -- following the log ---------------------------------------------------------

    def at(self, state: LogState) -> ProducerState:
        """Return the producers' state as of the log end in ``state``.

        The caller need not hold the partition's lock.

        Raises:
            ApiError: KAFKA_STORAGE_ERROR: the log is damaged.
            OSError: the log cannot be read.
        """
        self._view.refresh(state.active_base_offset)
        # The caller has no clock. This time is at most some minutes ahead, so producers
        # are kept that much longer.
        return self.catch_up(state, self._expire_at_ms)

    def catch_up_unlocked(self, now_ms: int) -> None:
        """Update the producers' state before the partition's lock is taken.

        This is done only if other processes have appended much. Errors are ignored:
        ``judge`` reads the rest under the lock, and raises them.
        """
        view = self._view
        view.take_over_from_core()
        producers, words = view.producers, view.words
        # An estimate is enough: this word may just be rewritten.
        end_word = view.copy_bytes[words[view.version_word] & 1] >> 3
        if producers is not None and (
            words[end_word] - producers.end_offset < _LAG_OFFSETS
        ):
            return
        if words[view.status_word] == ONLINE:
            state = view.committed()
            try:
                view.refresh(state[ACTIVE_BASE])
                self.catch_up(state, now_ms)
            except (OSError, CorruptLogError, ApiError):
                pass  # files were removed meanwhile, for example

    def catch_up(self, state: "Sequence[int]", now_ms: int) -> ProducerState:
        """Bring the producers' state up to the log end in ``state``, and return it.

        The caller need not hold the partition's lock if the list of segments matches
        ``state``.

        Raises:
            ApiError: KAFKA_STORAGE_ERROR: the log is damaged.
            OSError: the log cannot be read.
        """
        view = self._view
        view.take_over_from_core()
        producers = view.producers
        if producers is not None and now_ms > producers.now_ms:
            producers.now_ms = now_ms
        try:
            if producers is None:
                log_state = LogState._make(state)
                start = view.row.log_start_offset
                producers = load_producers(
                    view.segments, log_state, view.hints, start, now_ms
                )
                view.producers = producers
            elif producers.end_offset != state[END_OFFSET]:
                if view.producers_position >= 0:
                    fd, position = view.active.fd, view.producers_position
                    replay_range(producers, fd, position, state[ACTIVE_SIZE])
                    producers.end_offset = state[END_OFFSET]
                else:
                    replay_log(producers, view.segments, LogState._make(state))
        except CorruptLogError as error:
            view.fail(error, "cannot be replayed")
        is_here = state[ACTIVE_BASE] == view.active_base
        view.producers_position = state[ACTIVE_SIZE] if is_here else -1
        if now_ms > self._expire_at_ms:
            self._expire_at_ms = now_ms + _EXPIRATION_CHECK_MS
            producers.remove_expired(now_ms, view.hints.producer_id_expiration_ms)
        return producers


def _judge_marker(
    producers: ProducerState, batch: "ValidatedBatch", offset: int
) -> EndTransactionMarker | None:
    """Check a control batch, and return the end-of-transaction marker in it.

    Args:
        producers: the producers' state as of the log end.
        batch: the control batch.
        offset: the offset that the marker will have.

    Returns:
        The marker; None if the batch has none.

    Raises:
        ApiError: INVALID_PRODUCER_EPOCH or TRANSACTION_COORDINATOR_FENCED.
    """
    marker = parse_marker(batch.data)
    if marker is None:
        return None
    header = batch.header
    producers.check_marker(
        header.producer_id, header.producer_epoch, marker.coordinator_epoch
    )
    return marker._replace(offset=offset)

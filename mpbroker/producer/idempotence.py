"""Idempotence: producer ids, epochs and sequence numbers of batches.

They make sure that every record is written once, and in order. Each batch carries a
sequence number: how many records this producer wrote to the partition before it. A
broker refuses a batch that is out of order, and recognizes one that it has already. A
batch keeps its number however often it is sent. If a batch fails for good after later
ones were numbered, these numbers are wrong. Then the epoch is raised by one, and the
partition begins again at 0.

Only the sender's thread uses it.

Source: KIP-98; KIP-360 for raising the epoch.
"""

from __future__ import annotations

import logging
from typing import Final

from mpbroker.producer.batch import ProducerBatch
from mpbroker.producer.errors import FatalError, ProducerError
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.end_txn import EndTxnResponse
from mpbroker.protocol.messages.init_producer_id import (
    InitProducerIdRequest,
    InitProducerIdResponse,
)
from mpbroker.protocol.records.batch_header import NO_PRODUCER_EPOCH, NO_PRODUCER_ID
from mpbroker.protocol.records.record_batch import increment_sequence

_log = logging.getLogger(__name__)

_MAX_EPOCH: Final = 0x7FFF
_NONE_ACKED: Final = -1

Partition = tuple[str, int]


class _Sequences:
    """The sequence numbers of the batches of one partition."""

    __slots__ = ("epoch", "in_flight", "last_acked", "last_acked_offset", "next")

    def __init__(self) -> None:
        self.next = 0
        self.last_acked = _NONE_ACKED
        self.last_acked_offset = -1
        self.epoch = (NO_PRODUCER_ID, NO_PRODUCER_EPOCH)
        self.in_flight: list[ProducerBatch] = []  # numbered, not done; in order

    def is_next(self, sequence: int) -> bool:
        """Return whether a sequence number follows the last acknowledged one."""
        if self.last_acked == _NONE_ACKED:
            return sequence == 0
        return sequence == increment_sequence(self.last_acked, 1)

    def is_behind(self, sequence: int) -> bool:
        """Return whether a sequence number is acknowledged already, or older."""
        if self.last_acked == _NONE_ACKED:
            return False
        return (self.last_acked - sequence) & 0x7FFFFFFF < 1 << 30


class Idempotence:
    """Gives batches their producer id, epoch and sequence number.

    These are the `DrainRules` of a producer without transactions.
    """

    def __init__(self) -> None:
        self.producer_id: int = NO_PRODUCER_ID
        self.epoch: int = NO_PRODUCER_EPOCH
        self.fatal_error: ProducerError | None = None
        self._partitions: dict[Partition, _Sequences] = {}
        self._bump: set[Partition] = set()
        # By partition: the sequence number after a batch that expired and may be
        # written. No new batch is numbered before this is known.
        self._unresolved: dict[Partition, int] = {}

    @property
    def has_producer_id(self) -> bool:
        return self.producer_id != NO_PRODUCER_ID

    @property
    def is_transactional(self) -> bool:
        return False

    def _of(self, batch: ProducerBatch) -> _Sequences:
        key = batch.topic, batch.partition
        found = self._partitions.get(key)
        if found is None:
            found = self._partitions[key] = _Sequences()
        return found

    # -- the id ------------------------------------------------------------------------

    def init_request(self) -> InitProducerIdRequest:
        """Return the request for a producer id."""
        return InitProducerIdRequest(
            transactional_id=None, transaction_timeout_ms=0x7FFFFFFF
        )

    def take_id(self, response: InitProducerIdResponse | EndTxnResponse) -> None:
        """Store the producer id and epoch that the broker gave."""
        self.producer_id = response.producer_id
        self.epoch = response.producer_epoch

    def begin_turn(self) -> None:
        """Raise the producer epoch if numbers of batches have to begin anew.

        Called in each turn of the sender's loop.
        """
        self._resolve()
        if not self._bump or not self.has_producer_id:
            return
        if self.epoch >= _MAX_EPOCH:
            self.producer_id, self.epoch = NO_PRODUCER_ID, NO_PRODUCER_EPOCH
            return  # `took_new_id` goes on with a new id
        self.epoch += 1
        self._restart()

    def _restart(self) -> None:
        bumped, self._bump = self._bump, set()
        for key in bumped:
            self._begin_again(key)

    def _begin_again(self, key: Partition) -> None:
        """Number a partition's batches in flight, and all later ones, anew from 0."""
        sequences = self._partitions[key]
        sequences.epoch = self.producer_id, self.epoch
        sequences.next = 0
        sequences.last_acked = _NONE_ACKED
        self._unresolved.pop(key, None)
        for batch in sequences.in_flight:
            batch.was_renumbered = True
            batch.set_producer(self.producer_id, self.epoch, sequences.next)
            sequences.next = increment_sequence(sequences.next, batch.record_count)

    def took_new_id(self) -> None:
        """Number the batches of partitions that waited for a new producer id from 0."""
        if self._bump:
            self._restart()

    def request_bump(self, batch: ProducerBatch) -> None:
        """Have the next turn number the batches of this batch's partition anew.

        The epoch is raised for that.
        """
        self._bump.add((batch.topic, batch.partition))

    # -- draining ----------------------------------------------------------------------

    def may_drain(self, batch: ProducerBatch) -> bool:
        """Return whether a batch may be sent now without a risk for the order."""
        if not self.has_producer_id or self.fatal_error is not None:
            return False
        sequences = self._of(batch)
        if not batch.has_sequence:
            stale = sequences.epoch != (self.producer_id, self.epoch)
            if stale and sequences.in_flight:
                return False  # wait for the batches that have numbers of another epoch
            if sequences.last_acked == _NONE_ACKED and sequences.in_flight:
                # A broker that does not know this producer accepts any first number. If
                # it refuses batch 0, because it is just becoming the leader, and then
                # accepts the next batch, batch 0 can never be written. That happens
                # with Apache Kafka on new topics. So send batch 0 alone.
                return False
            if not self._unresolved and not self._bump:
                return True  # nearly always
            key = batch.topic, batch.partition
            return key not in self._unresolved and key not in self._bump
        # A batch that is sent again: only the first one in flight, to keep the order.
        first = sequences.in_flight[0] if sequences.in_flight else None
        return first is None or first is batch

    def prepare(self, batch: ProducerBatch) -> None:
        """Give a batch that will be sent now its number, unless it has one already."""
        batch.was_renumbered = False
        if batch.has_sequence:
            return
        sequences = self._of(batch)
        if sequences.epoch != (self.producer_id, self.epoch):
            sequences.epoch = self.producer_id, self.epoch
            sequences.next, sequences.last_acked = 0, _NONE_ACKED
        batch.set_producer(self.producer_id, self.epoch, sequences.next)
        sequences.next = increment_sequence(sequences.next, batch.record_count)
        sequences.in_flight.append(batch)

    # -- answers -----------------------------------------------------------------------

    def completed(self, batch: ProducerBatch, base_offset: int) -> None:
        """Note that a batch is written, with its last sequence number and offset."""
        sequences = self._of(batch)
        self._remove(sequences, batch)
        if (batch.producer_id, batch.producer_epoch) != sequences.epoch:
            return
        last = increment_sequence(batch.base_sequence, batch.record_count - 1)
        ahead = (last - sequences.last_acked) & 0x7FFFFFFF
        if sequences.last_acked == _NONE_ACKED or ahead < 1 << 30:
            sequences.last_acked = last
        if base_offset >= 0:
            sequences.last_acked_offset = base_offset + batch.record_count - 1

    def failed(self, batch: ProducerBatch, error: ProducerError) -> None:
        """Handle a batch that failed for good.

        A fatal error is stored in ``fatal_error``. Else, if the batch had a sequence
        number and its partition is not unresolved, its numbers restart in a new epoch.
        """
        self._remove(self._of(batch), batch)
        if isinstance(error, FatalError):
            self.fatal_error = error
        elif batch.has_sequence and not self._is_unresolved(batch):
            self.request_bump(batch)

    @staticmethod
    def _remove(sequences: _Sequences, batch: ProducerBatch) -> None:
        if batch in sequences.in_flight:
            sequences.in_flight.remove(batch)

    def replaced(self, batch: ProducerBatch, children: list[ProducerBatch]) -> None:
        """Put the parts of a split batch in its place among the batches in flight."""
        in_flight = self._of(batch).in_flight
        if batch in in_flight:
            position = in_flight.index(batch)
            in_flight[position : position + 1] = children

    def expired(self, batch: ProducerBatch) -> None:
        """Note that a batch expired; the broker may have written it or not.

        Its partition is unresolved until the batches sent before and after it are
        answered. If the sequence does not continue then, the epoch is raised.
        """
        if not batch.has_sequence:
            return
        sequences = self._of(batch)
        self._remove(sequences, batch)
        key = batch.topic, batch.partition
        after = increment_sequence(batch.base_sequence, batch.record_count)
        known = self._unresolved.get(key)
        if known is None or ((after - known) & 0x7FFFFFFF) < 1 << 30:
            self._unresolved[key] = after

    def _is_unresolved(self, batch: ProducerBatch) -> bool:
        return (batch.topic, batch.partition) in self._unresolved

    def _resolve(self) -> None:
        for key in list(self._unresolved):
            sequences = self._partitions[key]
            if sequences.in_flight:
                continue  # the answers to these will tell
            del self._unresolved[key]
            if not sequences.is_next(sequences.next):
                self._cannot_resolve(key)

    def _cannot_resolve(self, key: Partition) -> None:
        self._bump.add(key)

    def may_retry(
        self, batch: ProducerBatch, code: ErrorCode, log_start_offset: int
    ) -> bool:
        """Return whether to send a refused batch again.

        Args:
            batch: the batch.
            code: the error code of the refusal.
            log_start_offset: the first offset of the partition; -1 if the broker did
                not tell it.
        """
        if not batch.has_sequence:
            return code.retriable
        sequences = self._of(batch)
        if code == ErrorCode.UNKNOWN_PRODUCER_ID:
            # The broker may forget a producer when retention has deleted its records.
            if log_start_offset >= 0:
                self._lost_by_broker(batch, sequences, log_start_offset)
            return (
                not self.is_transactional
                or log_start_offset < 0
                or (sequences.last_acked_offset < log_start_offset)
            )
        if code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER:
            return self._may_retry_out_of_order(batch, sequences)
        return code.retriable

    def _lost_by_broker(
        self, batch: ProducerBatch, sequences: _Sequences, log_start_offset: int
    ) -> None:
        self.request_bump(batch)

    def _may_retry_out_of_order(
        self, batch: ProducerBatch, sequences: _Sequences
    ) -> bool:
        unresolved = self._unresolved.get((batch.topic, batch.partition))
        is_next = sequences.is_next(batch.base_sequence)
        if sequences.is_behind(batch.base_sequence) and not batch.was_renumbered:
            return False  # later batches are written: its place in the order is gone
        if unresolved is None and (batch.was_renumbered or not is_next):
            # The answer is for a number that it had before, or an earlier batch is
            # being retried.
            return True
        if self.is_transactional:
            return False
        if unresolved is None or unresolved == batch.base_sequence:
            self.request_bump(batch)
        return True

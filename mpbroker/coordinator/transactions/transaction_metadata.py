"""Keep the state of one transactional id: its producer and its transaction.

    Empty ──▶ Ongoing ──▶ PrepareCommit ──▶ CompleteCommit ─┐
      ▲          │  └───▶ PrepareAbort ───▶ CompleteAbort ──┤
      │          └▶ PrepareEpochFence ─▶ PrepareAbort       │
      └──────────────── InitProducerId ─────────────────────┘  and on to Ongoing

A change is written to the log before it has an effect outside. Prepare is final: a
coordinator that finds PrepareCommit in the log appends the commit markers that are
missing, whatever the producer requests later.

Source: Kafka's TransactionMetadata and TransactionState; KIP-98, KIP-360, KIP-890.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from typing import Final

from mpbroker.base.errors import MpbrokerError
from mpbroker.coordinator.outbox import AppendedMarker
from mpbroker.coordinator.transactions.transaction_records import (
    TransactionLogValue,
    TransactionSnapshot,
    read_markers,
    state_value,
    transaction_key,
)
from mpbroker.metadata.topic_names import TopicPartition
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError

NO_PRODUCER_ID: Final = -1
NO_EPOCH: Final = -1
MAX_EPOCH: Final = 0x7FFF
# The version of the client's protocol, as records have it. In 2 each end bumps the
# epoch.
EPOCH_BUMPS_SINCE: Final = 2


class TransactionState(IntEnum):
    """The states of a transaction, with Kafka's numbers, which are in the log."""

    EMPTY = 0  # no transaction yet, or a new producer since the last one
    ONGOING = 1  # partitions have been added
    PREPARE_COMMIT = 2  # decided; markers are being written
    PREPARE_ABORT = 3
    COMPLETE_COMMIT = 4  # all markers are in the partitions
    COMPLETE_ABORT = 5
    DEAD = 6  # expired, and about to be forgotten
    PREPARE_EPOCH_FENCE = 7  # its producer is being fenced; never in the log

    @property
    def label(self) -> str:
        """The state's name in Kafka's APIs, for example "PrepareCommit"."""
        return "".join(word.title() for word in self.name.split("_"))


S = TransactionState

# The states that may come before a state. Any other pair is a bug of ours.
PREVIOUS: Final[Mapping[TransactionState, frozenset[TransactionState]]] = {
    S.EMPTY: frozenset({S.EMPTY, S.COMPLETE_COMMIT, S.COMPLETE_ABORT}),
    S.ONGOING: frozenset({S.ONGOING, S.EMPTY, S.COMPLETE_COMMIT, S.COMPLETE_ABORT}),
    S.PREPARE_COMMIT: frozenset({S.ONGOING}),
    # Also from states without a transaction: an abort of nothing bumps the epoch.
    S.PREPARE_ABORT: frozenset(
        {
            S.ONGOING,
            S.PREPARE_EPOCH_FENCE,
            S.EMPTY,
            S.COMPLETE_COMMIT,
            S.COMPLETE_ABORT,
        }
    ),
    S.COMPLETE_COMMIT: frozenset({S.PREPARE_COMMIT}),
    S.COMPLETE_ABORT: frozenset({S.PREPARE_ABORT}),
    S.DEAD: frozenset({S.EMPTY, S.COMPLETE_COMMIT, S.COMPLETE_ABORT}),
    S.PREPARE_EPOCH_FENCE: frozenset({S.ONGOING}),
}
PREPARED: Final = frozenset({S.PREPARE_COMMIT, S.PREPARE_ABORT})
COMPLETE: Final = frozenset({S.COMPLETE_COMMIT, S.COMPLETE_ABORT})


class IllegalTransitionError(MpbrokerError):
    """A transaction was put into a state that cannot follow its last: a bug of ours."""


def is_exhausted(epoch: int) -> bool:
    """Return whether a producer epoch is the last that a client can have.

    The highest epoch is reserved for fencing.
    """
    return epoch >= MAX_EPOCH - 1


class TransactionMetadata:
    """A transactional id with its producer and its current transaction."""

    __slots__ = (
        "_key",
        "client_version",
        "expected",
        "foreseen",
        "last_producer_epoch",
        "next_producer_id",
        "partitions",
        "previous_producer_id",
        "producer_epoch",
        "producer_id",
        "start_ms",
        "state",
        "timeout_ms",
        "transactional_id",
        "unsynced",
        "update_ms",
        "waiting",
    )

    def __init__(
        self, transactional_id: str, producer_id: int, timeout_ms: int, now_ms: int
    ) -> None:
        self.transactional_id = transactional_id
        self._key: bytes | None = None
        self.producer_id = producer_id
        self.previous_producer_id = NO_PRODUCER_ID
        self.next_producer_id = NO_PRODUCER_ID  # the id after the markers are written
        self.producer_epoch = NO_EPOCH
        # The epoch before the last bump: its producer may have missed the answer.
        self.last_producer_epoch = NO_EPOCH
        self.timeout_ms = timeout_ms
        self.state = S.EMPTY
        self.partitions: set[TopicPartition] = set()
        self.start_ms = -1
        self.update_ms = now_ms
        self.client_version = 0
        # Markers of earlier transactions that may not be on disk, in their order.
        self.unsynced: tuple[AppendedMarker, ...] = ()
        # In a Prepare state: its own markers, each with the lowest offset that it can
        # get.
        self.expected: tuple[AppendedMarker, ...] = ()
        # In a Complete state: the partitions that both this record and the record of
        # Prepare name, with the ids of their topics. See may_begin_unsynced.
        self.foreseen: dict[TopicPartition, bytes] = {}
        # Requests that go on when the markers are written.
        self.waiting: list[Callable[[int], None]] = []

    @property
    def bumps_epochs(self) -> bool:
        return self.client_version >= EPOCH_BUMPS_SINCE

    def transition_to(self, state: TransactionState, now_ms: int) -> None:
        """Change the transaction's state.

        Raises:
            IllegalTransitionError: PREVIOUS does not allow the change; the state stays.
        """
        if self.state not in PREVIOUS[state]:
            raise IllegalTransitionError(
                f"{self.transactional_id}: {self.state.label} to {state.label}"
            )
        self.state = state
        self.update_ms = now_ms

    # -- a new producer ------------------------------------------------------------

    def knows(self, producer_id: int, epoch: int) -> bool:
        """Return whether a producer that sends InitProducerId is known by this id.

        The current producer id is known, and the previous one if its epochs were used
        up.
        """
        return (
            self.producer_epoch == NO_EPOCH
            or producer_id == self.producer_id
            or (producer_id == self.previous_producer_id and is_exhausted(epoch))
        )

    def initialise(
        self,
        timeout_ms: int,
        expected_epoch: int | None,
        new_producer_id: Callable[[], int],
        now_ms: int,
    ) -> bool:
        """Raise the producer epoch, as InitProducerId asks.

        A new producer takes the transactional id over, and so fences the producer
        before it. If the epochs of the producer id are used up, a new id begins with
        epoch 0.

        Args:
            expected_epoch: the epoch that the producer believes it has; None: the
                producer is new.

        Returns:
            False if nothing has changed: the request repeats an earlier one, which
            raised the epoch, and whose answer the producer did not receive.

        Raises:
            ApiError: PRODUCER_FENCED: the epoch is neither the current one nor the one
                before it.
        """
        current = self.producer_epoch
        if is_exhausted(current) and expected_epoch in (None, current):
            self.previous_producer_id, self.producer_id = (
                self.producer_id,
                new_producer_id(),
            )
            self.producer_epoch = 0
            self.last_producer_epoch = NO_EPOCH if expected_epoch is None else current
        elif expected_epoch is None:
            self.producer_epoch, self.last_producer_epoch = current + 1, NO_EPOCH
        elif current in (NO_EPOCH, expected_epoch):
            self.producer_epoch, self.last_producer_epoch = current + 1, current
        elif expected_epoch == self.last_producer_epoch:
            return False
        else:
            raise ApiError(
                ErrorCode.PRODUCER_FENCED,
                f"{self.transactional_id} is at epoch {current}, and not at"
                f" {expected_epoch}",
            )
        self.timeout_ms = timeout_ms
        self.partitions.clear()
        self.foreseen = {}
        self.start_ms = -1
        self.transition_to(S.EMPTY, now_ms)
        return True

    # -- its transactions ----------------------------------------------------------

    def may_begin_unsynced(
        self,
        partitions: Iterable[TopicPartition],
        topic_id: Callable[[str], bytes | None],
    ) -> bool:
        """Return whether a transaction may begin before its record is on disk.

        It may if Prepare and Complete of the last transaction both name all of its
        partitions. If a power cut takes the new record, one of these two is the last
        record in the log, and a load looks in the partitions that it names for records
        of the new transaction (MarkerWriter.begun_behind).
        """
        foreseen = self.foreseen
        return bool(foreseen) and all(
            foreseen.get(partition, b"") == topic_id(partition[0])
            for partition in partitions
        )

    def add(
        self, partitions: Iterable[TopicPartition], client_version: int, now_ms: int
    ) -> None:
        """Add partitions to the transaction; begin one if there is none."""
        if self.state is not S.ONGOING:
            self.start_ms = now_ms
            self.partitions = set()
            self.foreseen = {}
        self.transition_to(S.ONGOING, now_ms)
        self.partitions.update(partitions)
        self.client_version = client_version

    def fence(self, now_ms: int) -> None:
        """Begin to fence the transaction's producer.

        The abort that follows raises the epoch, once: as the end of the producer's own
        transaction would have. So a producer whose transaction has timed out may abort
        it late, or ask InitProducerId with its epoch (KIP-588), and goes on.
        """
        self.transition_to(S.PREPARE_EPOCH_FENCE, now_ms)

    def prepare(
        self,
        *,
        commit: bool,
        client_version: int,
        new_producer_id: Callable[[], int],
        now_ms: int,
    ) -> None:
        """Enter PrepareCommit or PrepareAbort, which is final once it is in the log."""
        if self.state is not S.ONGOING and self.state is not S.PREPARE_EPOCH_FENCE:
            self.start_ms = now_ms
            self.partitions = set()
            self.foreseen = {}
        self.client_version = client_version
        self.transition_to(S.PREPARE_COMMIT if commit else S.PREPARE_ABORT, now_ms)
        if not self.bumps_epochs:
            return
        if is_exhausted(self.producer_epoch):
            self.next_producer_id = new_producer_id()
        self.last_producer_epoch = self.producer_epoch
        self.producer_epoch = min(self.producer_epoch + 1, MAX_EPOCH)

    def next_identity(self) -> tuple[int, int]:
        """Return the producer id and epoch that the id's next transaction will have."""
        if self.next_producer_id != NO_PRODUCER_ID:
            return self.next_producer_id, 0
        return self.producer_id, self.producer_epoch

    def complete(self, now_ms: int) -> None:
        """End the transaction, after all its markers were appended."""
        committed = self.state is S.PREPARE_COMMIT
        self.transition_to(S.COMPLETE_COMMIT if committed else S.COMPLETE_ABORT, now_ms)
        self.partitions = set()
        expected, self.expected = self.expected, ()
        if expected and self.next_producer_id == NO_PRODUCER_ID:
            named = {marker[3:6] for marker in self.unsynced}
            self.foreseen = {
                (marker.topic, marker.partition): marker.topic_id
                for marker in expected
                if marker[3:6] in named
            }
        if self.next_producer_id != NO_PRODUCER_ID:
            # The last epoch stays the one that the producer has seen: not MAX_EPOCH.
            self.previous_producer_id = self.producer_id
            self.producer_id, self.producer_epoch = self.next_identity()
            self.next_producer_id = NO_PRODUCER_ID

    def forget_synced(self, is_on_disk: Callable[[AppendedMarker], bool]) -> None:
        """Forget the markers that are on disk: the next records need not name them."""
        left = tuple(marker for marker in self.unsynced if not is_on_disk(marker))
        if len(left) < len(self.unsynced):
            self.unsynced = left

    def is_retry(self, producer_id: int, epoch: int) -> bool:
        """Return whether an EndTxn has the producer epoch before the last end.

        If so, the producer repeats a request whose answer it did not receive.
        """
        if producer_id == self.producer_id:
            return epoch == self.producer_epoch - 1
        return (
            producer_id == self.previous_producer_id
            and is_exhausted(epoch)
            and self.producer_epoch == 0
        )

    # -- the log -------------------------------------------------------------------

    @property
    def key(self) -> bytes:
        """The key of the transactional id's records."""
        key = self._key
        if key is None:
            key = self._key = transaction_key(self.transactional_id)
        return key

    def value(self) -> bytes:
        """Return the value of a record with the transaction's current state."""
        return state_value(
            TransactionSnapshot(
                self.producer_id,
                self.previous_producer_id,
                self.next_producer_id,
                self.producer_epoch,
                self.timeout_ms,
                self.state,
                None if self.state is S.EMPTY else self.partitions,
                self.update_ms,
                self.start_ms,
                self.client_version,
                self.unsynced,
                self.expected,
            )
        )

    @classmethod
    def of_record(
        cls,
        transactional_id: str,
        value: TransactionLogValue,
        before: TransactionMetadata | None,
    ) -> TransactionMetadata:
        """Make the transaction that a record of the log describes.

        Args:
            before: the transaction that the record before this one described. It has
                the epoch before this one, which the record itself does not have. A
                producer that missed an answer repeats its request with that epoch.
        """
        found = cls(
            transactional_id,
            value.producer_id,
            value.transaction_timeout_ms,
            value.transaction_last_update_timestamp_ms,
        )
        found.previous_producer_id = value.previous_producer_id
        found.next_producer_id = value.next_producer_id
        found.producer_epoch = value.producer_epoch
        found.state = S(value.transaction_status)
        found.start_ms = value.transaction_start_timestamp_ms
        found.client_version = value.client_transaction_version
        found.partitions = {
            (row.topic, number)
            for row in value.transaction_partitions or ()
            for number in row.partition_ids
        }
        found.unsynced = read_markers(value.unsynced_markers)
        found.expected = read_markers(value.expected_markers)
        if before is not None:
            changed = before.producer_epoch != found.producer_epoch
            found.last_producer_epoch = (
                min(before.producer_epoch, MAX_EPOCH - 1)
                if changed
                else before.last_producer_epoch
            )
        return found

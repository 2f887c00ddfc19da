"""The transaction coordinator's settings, and small rules that stand alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from mpbroker.coordinator.outbox import AppendedMarker
from mpbroker.coordinator.transactions.transaction_metadata import (
    TopicPartition,
    TransactionState,
)
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError

S = TransactionState


class TransactionConfig(NamedTuple):
    """The coordinator's settings; names as Kafka's, dots as underscores."""

    transaction_max_timeout_ms: int = 900_000
    transactional_id_expiration_ms: int = 604_800_000
    transaction_abort_timed_out_transaction_cleanup_interval_ms: int = 10_000
    transaction_remove_expired_transaction_cleanup_interval_ms: int = 3_600_000
    transaction_partition_verification_enable: bool = True


class OpenTransactions(Protocol):
    """Where appenders look whether a producer's transaction is open."""

    def has_room(self, count: int) -> bool:
        """Whether so many more partitions may be opened."""

    def open(
        self, producer_id: int, epoch: int, partitions: Iterable[TopicPartition]
    ) -> bool:
        """Let a producer write to partitions; False: no room now."""

    def close(self, producer_id: int, partitions: Iterable[TopicPartition]) -> None:
        """Let a producer write to no partition.

        Args:
            partitions: of its transaction, which a predecessor may have opened.
        """


class MarkerPlaces(Protocol):
    """Where markers are, or will be."""

    def is_on_disk(self, marker: AppendedMarker) -> bool:
        """Whether a marker need not be remembered any more."""

    def expect(
        self,
        producer_id: int,
        epoch: int,
        partitions: Iterable[TopicPartition],
        *,
        commit: bool,
    ) -> tuple[AppendedMarker, ...]:
        """Say where markers would come to be, were they appended now.

        Of what is off line there is none.
        """

    def topic_id(self, topic: str) -> bytes | None:
        """The id of a topic; None: there is none of that name."""


def require_same_end(state: TransactionState, *, commit: bool) -> None:
    """Raise unless a transaction that has been decided on ended as it should."""
    same = (
        (S.PREPARE_COMMIT, S.COMPLETE_COMMIT)
        if commit
        else (
            S.PREPARE_ABORT,
            S.COMPLETE_ABORT,
        )
    )
    if state not in same:
        raise ApiError(ErrorCode.INVALID_TXN_STATE)


def fenced_as_of(code: ErrorCode, version: int, since: int) -> ErrorCode:
    """Say INVALID_PRODUCER_EPOCH to clients that do not know PRODUCER_FENCED."""
    if code is ErrorCode.PRODUCER_FENCED and version < since:
        return ErrorCode.INVALID_PRODUCER_EPOCH
    return code

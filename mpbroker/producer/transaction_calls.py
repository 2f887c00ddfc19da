"""The calls of a transactional producer; part of `Producer`."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

from mpbroker.client.cluster import TopicPartition
from mpbroker.producer.queues import PartitionQueue
from mpbroker.producer.transactions import (
    GroupMetadata,
    OffsetAndMetadata,
    Operation,
    TransactionManager,
)

_T = TypeVar("_T")


class PreparedTransaction(NamedTuple):
    """What whoever commits or aborts a transaction later needs to know of it."""

    transactional_id: str
    producer_id: int
    producer_epoch: int


class TransactionCalls(ABC):
    """Each call waits, up to max.block.ms, until the coordinator has answered."""

    _transactions: TransactionManager | None

    @abstractmethod
    def _manager(self) -> TransactionManager:
        """Return the state of the producer's transactions.

        Raises:
            ProducerError: it is closed, or has no transactional.id.
        """

    @abstractmethod
    def _transact(self, metric: str, begin: Callable[[], Operation]) -> None:
        """Begin something and wait for it; its time goes to a metric."""

    @abstractmethod
    def flush(self, timeout: float | None = None) -> None:
        """Wait until all that was sent is acknowledged, or has failed."""

    @abstractmethod
    def _has_incomplete(self) -> bool:
        """Whether something that was sent is neither acknowledged nor has failed."""

    @abstractmethod
    def _spend(self, metric: str, seconds: float) -> None:
        """Add to a metric."""

    def _joined(
        self, queue: PartitionQueue, transaction: int, append: Callable[[], _T]
    ) -> _T:
        """Append within the transaction of that number, if there are transactions."""
        if self._transactions is None:
            return append()
        place = queue.topic, queue.partition
        return self._transactions.append(transaction, place, append)

    def init_transactions(self) -> None:
        """Get ready, once, before the first transaction.

        What an earlier producer of this transactional.id left open is aborted, and that
        one is fenced.

        Raises:
            DeliveryTimeoutError: not within max.block.ms; call it again.
            FatalError: close the producer.
            TransactionStateError: called before, or no transactional.id is set.
        """
        self._transact("txn-init-time-ns", self._manager().begin_init)

    def begin_transaction(self) -> None:
        """Open a transaction; `send` belongs to it until it is committed or aborted.

        Raises:
            TransactionStateError: one is open, or `init_transactions` was not called.
            FatalError: close the producer.
        """
        began = time.monotonic()
        self._manager().begin()
        self._spend("txn-begin-time-ns", time.monotonic() - began)

    def send_offsets_to_transaction(
        self,
        offsets: Mapping[TopicPartition, OffsetAndMetadata | int],
        group: GroupMetadata | str,
    ) -> None:
        """Commit a consumer group's positions if, and when, the transaction commits.

        Args:
            offsets: of the next records to be read.
            group: its id, or better what its consumer says of itself, so that a member
                that was replaced cannot commit.

        Raises:
            AbortableError: abort the transaction.
            DeliveryTimeoutError: not within max.block.ms; call it again, or abort.
            FatalError: close the producer.
        """
        manager = self._manager()
        if not offsets:
            return
        positions = {
            TopicPartition(*partition): (
                OffsetAndMetadata(offset) if isinstance(offset, int) else offset
            )
            for partition, offset in offsets.items()
        }
        member = GroupMetadata(group) if isinstance(group, str) else group
        self._transact(
            "txn-send-offsets-time-ns", lambda: manager.add_offsets(positions, member)
        )

    def prepare_transaction(self) -> PreparedTransaction:
        """Wait until all records are acknowledged; leave it open for others to end.

        The producer is of no use after that: close it. The transaction is aborted by
        the broker if nobody ends it within transaction.timeout.ms.

        Raises:
            AbortableError: a record was lost: abort.
            FatalError: close the producer.
            TransactionStateError: none is open.

        Source: KIP-939's prepareTransaction, which brokers do not know yet.
        """
        manager = self._manager()
        manager.check_open("prepare_transaction()")
        self.flush()
        while not manager.prepare_end(self._has_incomplete):
            self.flush()  # a callback, say, has sent something
        return PreparedTransaction(
            manager.transactional_id, manager.producer_id, manager.epoch
        )

    def commit_transaction(self) -> None:
        """Wait until all records are acknowledged, and make them visible at once.

        Raises:
            AbortableError: a record was lost; nothing is committed: abort.
            DeliveryTimeoutError: not within max.block.ms; call it again to wait on.
            FatalError: close the producer.
        """
        self._transact("txn-commit-time-ns", self._manager().begin_commit)

    def abort_transaction(self) -> None:
        """Drop the transaction: its records are never seen by read_committed readers.

        Raises:
            DeliveryTimeoutError: not within max.block.ms; call it again to wait on.
            FatalError: close the producer.
        """
        self._transact("txn-abort-time-ns", self._manager().begin_abort)

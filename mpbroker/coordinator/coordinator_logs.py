"""Append to the logs of groups and of transactions, by the outbox's log numbers.

For each log CoordinatorLogs knows how far it was written, and whether it is lost. A log
is lost when an append or a sync fails. The state in memory may then say more than is on
disk, so it is forgotten, and the log is loaded again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from mpbroker.coordinator.context import CoordinatorContext
from mpbroker.coordinator.coordinator_topic import CoordinatorTopic
from mpbroker.coordinator.durability import Awaited
from mpbroker.coordinator.groups.group_coordinator import GroupCoordinator
from mpbroker.coordinator.outbox import TransactionalRecord, rests_on, transaction_log
from mpbroker.coordinator.transactions.transaction_coordinator import (
    TransactionCoordinator,
)
from mpbroker.coordinator.transactions.transactions import Transactions
from mpbroker.storage.log.partition_log import PartitionLog


class StateMachines(NamedTuple):
    """Groups and transactions, what both use, and the topic of the groups' records."""

    context: CoordinatorContext
    groups: GroupCoordinator
    offsets_topic: CoordinatorTopic
    transactions: Transactions


class NumberedLog(NamedTuple):
    """A partition of one of the two topics, and the coordinator of what is in it."""

    topic: CoordinatorTopic
    partition: int
    coordinator: GroupCoordinator | TransactionCoordinator

    def __str__(self) -> str:
        return f"{self.topic.name}-{self.partition}"


class CoordinatorLogs:
    """Appends to logs by number, and remembers how far each was written.

    Args:
        grown: called with each log after an append, so that waiting fetches go on.
    """

    def __init__(
        self, state: StateMachines, grown: Callable[[PartitionLog], object]
    ) -> None:
        self._state = state
        self._grown = grown
        # The log of a number, and the offset behind what was last appended to it.
        self._ends: dict[int, tuple[PartitionLog, int]] = {}
        # Lost logs that are not loaded again yet. An answer or a step that rests on one
        # fails, also if it is looked at after the log was lost.
        self._lost: set[int] = set()

    def __getitem__(self, number: int) -> NumberedLog:
        state = self._state
        coordinator: GroupCoordinator | TransactionCoordinator = state.groups
        if number < 0:
            coordinator = state.transactions.coordinator
        return NumberedLog(*self._place(number), coordinator)

    def _place(self, number: int) -> tuple[CoordinatorTopic, int]:
        if number < 0:
            return self._state.transactions.topic, transaction_log(number)
        return self._state.offsets_topic, number

    @property
    def have_changed(self) -> bool:
        """Whether one of the two topics was deleted or recreated."""
        state = self._state
        return state.offsets_topic.has_changed or state.transactions.topic.has_changed

    # -- appends -----------------------------------------------------------------------

    def append(
        self, number: int, records: list[tuple[bytes, bytes | None]], now_ms: int
    ) -> None:
        """Append records of no transaction.

        Raises:
            ApiError: the log cannot be written: it is lost.
        """
        topic, partition = self._place(number)
        self._appended(number, *topic.append(partition, records, now_ms))

    def append_transactional(
        self, number: int, records: Sequence[TransactionalRecord], now_ms: int
    ) -> None:
        """Append records of transactions.

        Raises:
            ApiError: the log cannot be written: it is lost.
        """
        topic, partition = self._place(number)
        self._appended(number, *topic.append_transactional(partition, records, now_ms))

    def _appended(self, number: int, log: PartitionLog, end: int) -> None:
        self._ends[number] = log, end
        self._grown(log)

    def awaited(self, after: tuple[int, ...]) -> list[Awaited] | None:
        """Return the logs to sync and how far; None if one of them is lost.

        Args:
            after: what an answer or a step rests on: see `outbox`.
        """
        awaited = []
        for each in after:
            number, waits_for_disk = rests_on(each)
            if number in self._lost:
                return None
            found = self._ends.get(number) if waits_for_disk else None
            if found is not None:
                awaited.append(Awaited(number, *found))
        return awaited

    # -- lost and loaded ---------------------------------------------------------------

    def is_lost(self, number: int) -> bool:
        return number in self._lost

    def lose(self, number: int) -> None:
        """Forget the groups or transactions of a log that cannot be written."""
        self._lost.add(number)
        self._ends.pop(number, None)
        _, partition, coordinator = self[number]
        coordinator.failed(partition)

    def note_loaded(self, number: int) -> None:
        """Use a log again that was read to its end.

        What was read need not be on disk: a predecessor may have died between an append
        and its sync. Its clients repeat their requests, and the answers to these must
        wait for that sync. So the end that was read counts as appended now.
        """
        topic, partition = self._place(number)
        log = topic.log_of(partition)
        self._lost.discard(number)
        self._ends[number] = log, log.row.log_end_offset

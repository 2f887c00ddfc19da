"""Append to the coordinator's logs, each of which has a number (see outbox.py).

For each log CoordinatorLogs knows the offset up to which it was written, and whether it
is lost. A log is lost when an append or a sync fails. The state in memory may then be
ahead of the log on disk, so this state is forgotten, and the log is loaded again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.coordinator.context import CoordinatorContext
from mpbroker.coordinator.coordinator_topic import CoordinatorTopic, RecordTopic
from mpbroker.coordinator.durability import Awaited
from mpbroker.coordinator.groups.group_coordinator import GroupCoordinator
from mpbroker.coordinator.outbox import (
    TransactionalRecord,
    rests_on,
    share_partition,
    transaction_log,
)
from mpbroker.coordinator.share.share_offsets import ShareOffsets
from mpbroker.coordinator.share.share_service import ShareService
from mpbroker.coordinator.share.share_state_apis import ShareStateApis
from mpbroker.coordinator.share.share_states import ShareStates
from mpbroker.coordinator.transactions.transaction_coordinator import (
    TransactionCoordinator,
)
from mpbroker.coordinator.transactions.transactions import Transactions
from mpbroker.coordinator.written_log import WrittenLog

if TYPE_CHECKING:
    from mpbroker.cluster.groups.transaction_exchange import ShardEnd
    from mpbroker.coordinator.shard_topic import ShardTopic
    from mpbroker.coordinator.shard_transactions import ShardTransactions


class ShareGroups(NamedTuple):
    """Holds the objects that serve share groups, and the topic of their records."""

    topic: CoordinatorTopic
    states: ShareStates
    service: ShareService
    offsets: ShareOffsets
    state_apis: ShareStateApis


class StateMachines(NamedTuple):
    """Holds the coordinators of groups, transactions and share groups.

    Attributes:
        shards: stands for ``offsets_topic`` in a cluster; None: there is no cluster.
        shard_transactions: asks and tells other nodes; None: there is no cluster.
    """

    context: CoordinatorContext
    groups: GroupCoordinator
    offsets_topic: RecordTopic
    transactions: Transactions
    share: ShareGroups
    shards: ShardTopic | None = None
    shard_transactions: ShardTransactions | None = None


class NumberedLog(NamedTuple):
    """A partition of a coordinator's topic, and the coordinator that writes to it."""

    topic: RecordTopic
    partition: int
    coordinator: GroupCoordinator | TransactionCoordinator | ShareStates

    def __str__(self) -> str:
        return f"{self.topic.name}-{self.partition}"


class CoordinatorLogs:
    """Appends to logs by number, and remembers up to which offset each was written.

    Args:
        grown: called with each log after an append, so that waiting fetches go on.
    """

    def __init__(
        self, state: StateMachines, grown: Callable[[WrittenLog], object]
    ) -> None:
        self._state = state
        self._grown = grown
        # The log of a number, and the offset behind what was last appended to it.
        self._ends: dict[int, tuple[WrittenLog, int]] = {}
        # Lost logs that are not loaded again yet. An answer or a step that rests on one
        # fails, also if it is looked at after the log was lost.
        self._lost: set[int] = set()

    def __getitem__(self, number: int) -> NumberedLog:
        state = self._state
        coordinator: GroupCoordinator | TransactionCoordinator | ShareStates
        coordinator = state.groups
        if number < 0:
            coordinator = state.transactions.coordinator
        elif share_partition(number) is not None:
            coordinator = state.share.states
        return NumberedLog(*self._place(number), coordinator)

    def _place(self, number: int) -> tuple[RecordTopic, int]:
        if number < 0:
            return self._state.transactions.topic, transaction_log(number)
        partition = share_partition(number)
        if partition is not None:
            return self._state.share.topic, partition
        return self._state.offsets_topic, number

    @property
    def have_changed(self) -> bool:
        """Whether a topic of the coordinator was deleted, recreated or extended.

        The topics are __consumer_offsets, __transaction_state and __share_group_state.
        """
        state = self._state
        return (
            state.offsets_topic.has_changed
            or state.transactions.topic.has_changed
            or state.share.topic.has_changed
        )

    # -- appends -----------------------------------------------------------------------

    def append(
        self, number: int, records: list[tuple[bytes, bytes | None]], now_ms: int
    ) -> None:
        """Append records that are not part of a transaction to a log.

        Raises:
            ApiError: the log cannot be written; the caller must call lose().
        """
        topic, partition = self._place(number)
        self._appended(number, *topic.append(partition, records, now_ms))

    def append_transactional(
        self, number: int, records: Sequence[TransactionalRecord], now_ms: int
    ) -> None:
        """Append records to a log as parts of their producers' transactions.

        Raises:
            ApiError: the log cannot be written; the caller must call lose().
        """
        topic, partition = self._place(number)
        self._appended(number, *topic.append_transactional(partition, records, now_ms))

    def append_end(self, wanted: ShardEnd) -> None:
        """Have a transaction's offsets in a shard committed, or dropped.

        Raises:
            ApiError: the shard is lost.
        """
        assert self._state.shards is not None
        self._appended(wanted.end.shard, *self._state.shards.append_end(wanted))

    def _appended(self, number: int, log: WrittenLog, end: int) -> None:
        self._ends[number] = log, end
        self._grown(log)

    def awaited(self, after: tuple[int, ...]) -> list[Awaited[WrittenLog]] | None:
        """Return the logs that must be synced before an answer is sent, and how far.

        Return None if one of the logs is lost, so that the answer must be an error.

        Args:
            after: the numbers of the logs that the answer waits for: see outbox.py.
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
        """Stop using a log that cannot be written, until it is loaded again.

        Drop the state of groups, transactions or share groups that it holds.
        """
        self._lost.add(number)
        self._ends.pop(number, None)
        _, partition, coordinator = self[number]
        coordinator.failed(partition)

    def note_loaded(self, number: int) -> None:
        """Use a log again, after all its records were read into memory.

        These records may not be on disk: a coordinator before this one may have died
        between an append and its sync. Clients repeat their requests, and the answers
        must wait for a sync. So remember the log end offset as if the last record had
        been appended just now.
        """
        topic, partition = self._place(number)
        log = topic.log_of(partition)
        self._lost.discard(number)
        self._ends[number] = log, log.row.log_end_offset

"""Load the state of groups and transactions from their logs.

A load is a generator that reads some megabytes in each step. Between two steps the
process serves requests for the logs that are loaded already. Transactions are loaded
first: after an unclean stop no partition of the broker is open until all their markers
are written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final

from mpbroker.base.logger import get_logger
from mpbroker.coordinator.coordinator_logs import CoordinatorLogs, StateMachines
from mpbroker.coordinator.coordinator_topic import LoadedRecord, newest
from mpbroker.coordinator.groups.group_offsets import OffsetAndMetadata
from mpbroker.coordinator.groups.group_records import read_offset, read_record
from mpbroker.coordinator.outbox import transaction_log
from mpbroker.protocol.errors import ApiError, ProtocolError

_LOG = get_logger(__name__)

_LOOK_AGAIN_MS: Final = 2000


class LogLoading:
    """The loads that run or wait; one runs at a time."""

    def __init__(
        self, logs: CoordinatorLogs, state: StateMachines, now_ms: Callable[[], int]
    ) -> None:
        self._logs = logs
        self._groups = state.groups
        self._offsets_topic = state.offsets_topic
        self._transactions = state.transactions
        self._timers = state.context.timers
        self._now_ms = now_ms
        self._loads: list[Iterator[int]] = []  # the last one is under way
        self._numbers: set[int] = set()  # the logs that they load

    def __bool__(self) -> bool:
        return bool(self._loads)

    def begin(self) -> None:
        """Begin to load all logs, when the process starts."""
        of_groups = self._offsets_topic.partitions_to_load()
        of_transactions = self._transactions.topic.partitions_to_load()
        self._groups.begin_loading(of_groups)
        self._transactions.coordinator.begin_loading(of_transactions)
        numbers = list(map(transaction_log, of_transactions))
        self._loads = [
            *map(self._load, numbers),
            self._finish_transactions(),
            *map(self._load, of_groups),
        ]
        self._loads.reverse()
        self._numbers.update(numbers, of_groups)

    def go_on(self, patience_s: float) -> None:
        """Load until the time is over and the step under way has ended."""
        until = time.monotonic() + patience_s
        while self._loads and time.monotonic() < until:
            if next(self._loads[-1], None) is None:
                self._loads.pop()

    def load_again(self, number: int) -> None:
        """Look every two seconds whether a lost log is online again, then load it.

        A disk that was full may have room by then. If a sync has failed, the log stays
        offline until the broker is started anew.
        """
        topic, partition, coordinator = self._logs[number]

        def look(now_ms: int) -> None:
            try:
                topic.log_of(partition).view.require_online()
            except (ApiError, OSError):
                self.load_again(number)
                return
            if number in self._numbers:
                # It was lost again during its load. That load must end first: otherwise
                # a second load would replace what is changed after the first.
                self.load_again(number)
                return
            self._numbers.add(number)
            _LOG.info("%s-%d is loaded again", topic.name, partition)
            coordinator.begin_loading([partition])
            self._loads.insert(0, self._load(number))

        due_ms = self._now_ms() + _LOOK_AGAIN_MS
        self._timers.schedule(("load again", number), due_ms, look)

    # -- one log -----------------------------------------------------------------------

    def _load(self, number: int) -> Iterator[int]:
        log = self._logs[number]
        try:
            if number < 0:
                yield from self._transactions.loading.replay(log.partition)
            else:
                yield from self._replay_groups(log.partition)
            self._logs.note_loaded(number)
        except (ApiError, OSError) as error:
            _LOG.error("%s cannot be loaded: %s", log, error)
            log.coordinator.failed(log.partition)
            self.load_again(number)
        self._numbers.discard(number)
        log.coordinator.loaded(log.partition, self._now_ms())

    def _finish_transactions(self) -> Iterator[int]:
        """Open all partitions, between the loads of transactions and of groups."""
        self._transactions.loading.finish()
        yield from ()

    def _replay_groups(self, partition: int) -> Iterator[int]:
        replayed = 0
        for records in self._offsets_topic.load(partition):
            now_ms = self._now_ms()
            for record in newest(records):
                self.replay(partition, record, now_ms)
            replayed += len(records)
            yield replayed

    def replay(self, partition: int, record: LoadedRecord, now_ms: int) -> None:
        """Apply a record of __consumer_offsets; skip one that cannot be read."""
        groups = self._groups
        if record.commit is not None:
            groups.replay_end_of_transaction(
                partition, record.producer_id, commit=record.commit
            )
            return
        offset = read_offset(record.key, record.value)
        if offset is not None:
            group_id, topic, index, committed = offset
            groups.replay_offset(
                group_id,
                topic,
                index,
                None if committed is None else OffsetAndMetadata._make(committed),
                now_ms,
                record.producer_id,
            )
            return
        try:
            read = read_record(record.key, record.value)
            if read is not None:
                groups.replay(*read, now_ms, record.producer_id)
        except (ProtocolError, ValueError) as error:
            _LOG.error(
                "a record of %s-%d cannot be read and is skipped: %s",
                self._offsets_topic.name,
                partition,
                error,
            )

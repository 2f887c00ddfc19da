"""Load the state of groups, transactions and share groups from their logs.

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
from mpbroker.coordinator.outbox import share_log, share_partition, transaction_log
from mpbroker.protocol.errors import ApiError, ProtocolError

_LOG = get_logger(__name__)

_LOOK_AGAIN_MS: Final = 2000


class LogLoading:
    """Loads the coordinator's logs step by step, one log at a time."""

    def __init__(
        self, logs: CoordinatorLogs, state: StateMachines, now_ms: Callable[[], int]
    ) -> None:
        self._logs = logs
        self._groups = state.groups
        self._offsets_topic = state.offsets_topic
        self._transactions = state.transactions
        self._share = state.share
        self._timers = state.context.timers
        self._now_ms = now_ms
        # By the number of the log; the last one is under way.
        self._loads: list[tuple[int | None, Iterator[int]]] = []
        self._numbers: set[int] = set()  # the logs that they load

    def __bool__(self) -> bool:
        return bool(self._loads)

    def begin(self) -> None:
        """Begin to load the coordinator's logs, when its process starts."""
        of_groups = self._offsets_topic.partitions_to_load()
        of_transactions = self._transactions.topic.partitions_to_load()
        of_share = self._share.topic.partitions_to_load()
        self._groups.begin_loading(of_groups)
        self._share.states.begin_loading(of_share)
        self._transactions.coordinator.begin_loading(of_transactions)
        numbers = list(map(transaction_log, of_transactions))
        others = [*of_groups, *map(share_log, of_share)]
        self._loads = [
            *((number, self._load(number)) for number in numbers),
            (None, self._finish_transactions()),
            *((number, self._load(number)) for number in others),
        ]
        self._loads.reverse()
        self._numbers.update(numbers, others)

    def go_on(self, patience_s: float) -> None:
        """Load logs for ``patience_s`` seconds, and to the end of the last step."""
        until = time.monotonic() + patience_s
        while self._loads and time.monotonic() < until:
            if next(self._loads[-1][1], None) is None:
                self._loads.pop()

    def load(self, number: int) -> None:
        """Load a log behind those that are to be loaded before."""
        self._numbers.add(number)
        self._loads.insert(0, (number, self._load(number)))

    def forget(self, number: int) -> None:
        """End the load of a log that is lost, and that comes back as another one."""
        self._loads = [each for each in self._loads if each[0] != number]
        self._numbers.discard(number)

    def load_again(self, number: int) -> None:
        """Look every two seconds whether a lost log is online again, then load it.

        A disk that was full may have room by then. If a sync has failed, the log stays
        offline until the broker is started anew. A shard of a cluster tells by itself
        when it is back.
        """
        topic, partition, coordinator = self._logs[number]
        if not topic.looks_again:
            return

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
            _LOG.info("%s-%d is loaded again", topic.name, partition)
            coordinator.begin_loading([partition])
            self.load(number)

        due_ms = self._now_ms() + _LOOK_AGAIN_MS
        self._timers.schedule(("load again", number), due_ms, look)

    # -- one log -----------------------------------------------------------------------

    def _load(self, number: int) -> Iterator[int]:
        log = self._logs[number]
        try:
            if number < 0:
                yield from self._transactions.loading.replay(log.partition)
            elif share_partition(number) is not None:
                yield from self._replay_share(log.partition)
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
        """Let producers write again, once all transactions are loaded."""
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

    def _replay_share(self, partition: int) -> Iterator[int]:
        replayed = 0
        for records in self._share.topic.load(partition):
            # Not only the newest record of a key: each tells only what has changed.
            for record in records:
                try:
                    self._share.states.replay(record.key, record.value)
                except (ProtocolError, ValueError) as error:
                    _LOG.error(
                        "a record of %s-%d cannot be read and is skipped: %s",
                        self._share.topic.name,
                        partition,
                        error,
                    )
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

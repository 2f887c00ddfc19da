"""A transaction coordinator without a process: its disk and partitions are lists."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from mpbroker.coordinator.context import CoordinatorContext
from mpbroker.coordinator.groups.group_coordinator import GroupCoordinator
from mpbroker.coordinator.groups.group_records import read_record
from mpbroker.coordinator.outbox import (
    AppendedMarker,
    Call,
    Markers,
    Outbox,
    Step,
    rests_on,
)
from mpbroker.coordinator.timers import Timers
from mpbroker.coordinator.transactions.transaction_coordinator import (
    TransactionCoordinator,
)
from mpbroker.coordinator.transactions.transaction_listing import TransactionListing
from mpbroker.coordinator.transactions.transaction_markers import MarkerRequests
from mpbroker.coordinator.transactions.transaction_offsets import TransactionOffsets
from mpbroker.coordinator.transactions.transaction_partitions import (
    TransactionPartitions,
)
from mpbroker.coordinator.transactions.transaction_records import read_transaction
from mpbroker.metadata.topic_names import TopicPartition
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.message import Message
from tests.coordinator.rig import FakeTopics, no_sessions
from tests.support.coordinator_settings import group_settings, transaction_settings

PARTITIONS = 3
START_MS = 1_000_000


class FakeOpenTransactions:
    """Which partitions may be written to."""

    def __init__(self) -> None:
        self.entries: dict[int, dict[TopicPartition, int]] = {}
        self.is_full = False

    def has_room(self, count: int) -> bool:
        return not self.is_full

    def open(
        self, producer_id: int, epoch: int, partitions: Iterable[TopicPartition]
    ) -> bool:
        if not self.is_full:
            own = self.entries.setdefault(producer_id, {})
            own.update(dict.fromkeys(partitions, epoch))
        return not self.is_full

    def close(self, producer_id: int, partitions: Iterable[TopicPartition]) -> None:
        self.entries.pop(producer_id, None)

    def of(self, producer_id: int) -> dict[TopicPartition, int]:
        return self.entries.get(producer_id, {})


class FakePlaces:
    """Where markers are; every partition's next one comes to the same offset."""

    def __init__(self, rig: TransactionRig) -> None:
        self._rig = rig

    def is_on_disk(self, marker: AppendedMarker) -> bool:
        return marker in self._rig.on_disk

    def expect(
        self,
        producer_id: int,
        epoch: int,
        partitions: Iterable[TopicPartition],
        *,
        commit: bool,
    ) -> tuple[AppendedMarker, ...]:
        next_one = len(self._rig.markers) + 1
        return tuple(
            AppendedMarker(
                producer_id, epoch, commit, topic, bytes(16), partition, next_one
            )
            for topic, partition in partitions
        )

    def topic_id(self, topic: str) -> bytes | None:
        return self._rig.topic_ids.get(topic, bytes(16))


class TransactionRig:
    """One coordinator of transactions and groups, and what they have decided.

    Attributes:
        holds: nothing reaches the disk while this is so.
        log: the records of __transaction_state.
        markers: (topic, partition, producer id, epoch, commit) in their order.
        on_disk: the markers that are.
        refused: partitions that take no marker, by the code they answer.
        topic_ids: of topics that are not the first of their name; None: gone.
        given_back: the calls of Produces that went back to the handlers.
    """

    def __init__(self, **config: Any) -> None:
        self.config = transaction_settings(**config)
        self.now_ms = START_MS
        self.topics = FakeTopics()
        self.holds = False
        self.log: list[tuple[bytes, bytes | None]] = []
        self.offsets_log: list[tuple[int, int, bytes, bytes | None]] = []
        self.markers: list[tuple[str, int, int, int, bool]] = []
        self.on_disk: set[AppendedMarker] = set()
        self.refused: dict[TopicPartition, ErrorCode] = {}
        self.given_back: list[Call] = []
        self.topic_ids: dict[str, bytes | None] = {}
        self.ids = itertools.count(100)
        self._start()

    def _start(self) -> None:
        self.out, self.timers = Outbox(), Timers()
        context = CoordinatorContext(self.out, self.timers, self.topics, no_sessions())
        self.open = self._open_transactions()
        self.groups = GroupCoordinator(
            group_settings(), context, PARTITIONS, lambda: "id"
        )
        self.coordinator = TransactionCoordinator(
            self.config,
            context,
            self.open,
            PARTITIONS,
            lambda: next(self.ids),
            FakePlaces(self),
        )
        self.coordinator.start_timers(self.now_ms)
        self._apis: list[Any] = [
            self.coordinator,
            self.groups,
            TransactionPartitions(
                self.coordinator,
                context,
                self.groups.partition_for,
                self.given_back.append,
            ),
            TransactionOffsets(self.groups, self.coordinator, context),
            TransactionListing(self.coordinator, self.out),
            MarkerRequests(self.out),
        ]

    def _open_transactions(self) -> Any:
        return FakeOpenTransactions()

    def die(self) -> None:
        """Lose all that is not in the logs, and come back."""
        self.forget()
        self.replay(self.log)
        self.loaded()

    def forget(self) -> None:
        """Begin to come back."""
        self._start()
        self.groups.begin_loading(range(PARTITIONS))
        self.coordinator.begin_loading(range(PARTITIONS))

    def replay(self, records: list[tuple[bytes, bytes | None]]) -> None:
        """Go on with coming back."""
        for record in records:
            read = read_transaction(*record)
            assert read is not None
            self.coordinator.replay(*read)

    def loaded(self) -> None:
        """All of transactions is replayed: come back with the groups' too."""
        for _, producer_id, key, value in self.offsets_log:
            found = read_record(key, value)
            assert found is not None
            self.groups.replay(*found, self.now_ms, producer_id)
        for partition in range(PARTITIONS):
            self.groups.loaded(partition, self.now_ms)
            self.coordinator.loaded(partition, self.now_ms)
        self.collect()

    def load(self, partition: int) -> None:
        """Load a partition of the log once more."""
        self.coordinator.begin_loading([partition])
        for record in self.log:
            read = read_transaction(*record)
            assert read is not None
            if self.coordinator.partition_for(read[0]) == partition:
                self.coordinator.replay(*read)
        self.coordinator.loaded(partition, self.now_ms)
        self.collect()

    def collect(self) -> None:
        while self.out:
            if self.holds and any(
                rests_on(each)[1] for step in self.out.steps for each in step.after
            ):
                return
            self._append()
            steps, answers = self.out.take_steps(), self.out.take_answers()
            for answer in answers:
                self._give(answer.call, answer.response)
            for step in steps:
                self._run(step)

    def _append(self) -> None:
        for number, records in self.out.take_records().items():
            if number < 0:
                self.log.extend(records)
            else:
                self.offsets_log.extend((number, -1, *record) for record in records)
        for number, transactional in self.out.take_transactional().items():
            self.offsets_log.extend(
                (number, record.producer_id, record.key, record.value)
                for record in transactional
            )
        for _, run in self.out.take_appended():
            run()
        for markers in self.out.take_markers():
            self._mark(markers)

    def _mark(self, markers: Markers) -> None:
        results = {}
        appended = []
        if markers.waits:
            self.on_disk.update(markers.earlier)
        for topic, partition in markers.partitions:
            code = self.refused.get((topic, partition), ErrorCode.NONE)
            results[topic, partition] = code
            if not code:
                self.markers.append((topic, partition, *markers[:3]))
                where = topic, bytes(16), partition, len(self.markers)
                appended.append(AppendedMarker(*markers[:3], *where))
                if topic == "__consumer_offsets":
                    self.groups.replay_end_of_transaction(
                        partition, markers.producer_id, commit=markers.commit
                    )
        if markers.waits:
            self.on_disk.update(appended)
        markers.done(results, self.now_ms, appended)

    @staticmethod
    def _run(step: Step) -> None:
        step.run(True)

    @staticmethod
    def _give(call: Call, response: Message) -> None:
        assert call.request is None, "answered twice"
        encoded = response.encode(call.version)
        call.request = type(response).decode(call.version, encoded)

    # -- calls -----------------------------------------------------------------------

    def send(self, name: str, request: Message, version: int) -> Call:
        """Make a request; its answer, once there is one, is ``call.request``."""
        call = Call(version, "c", "/host")
        decoded = type(request).decode(version, request.encode(version))
        api = next(each for each in self._apis if hasattr(each, name))
        getattr(api, name)(call, decoded, self.now_ms)
        self.collect()
        return call

    def ask(self, name: str, request: Message, version: int) -> Any:
        call = self.send(name, request, version)
        assert call.request is not None, "not answered yet"
        return call.request

    def advance(self, ms: int) -> None:
        """Let time pass, timer by timer."""
        end = self.now_ms + ms
        while self.timers.next_ms <= end:
            self.now_ms = max(self.now_ms, self.timers.next_ms)
            self.timers.expire(self.now_ms)
            self.collect()
        self.now_ms = end

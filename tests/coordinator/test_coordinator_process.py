"""The coordinator's process: answers that rest on lost logs, loading, refusals."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from mpbroker.cluster.groups.group_store import Event, Held, Loaded, Lost, Taken
from mpbroker.coordinator.context import CoordinatorContext
from mpbroker.coordinator.coordinator_logs import StateMachines
from mpbroker.coordinator.coordinator_process import (
    Clock,
    CoordinatorProcess,
    RequestPort,
)
from mpbroker.coordinator.coordinator_topic import LoadedRecord
from mpbroker.coordinator.durability import Durability
from mpbroker.coordinator.groups.group_coordinator import GroupCoordinator
from mpbroker.coordinator.groups.group_offsets import OffsetAndMetadata
from mpbroker.coordinator.groups.group_records import (
    ConsumerGroupCurrentMemberAssignmentKey,
    ConsumerGroupCurrentMemberAssignmentValue,
    offset_key,
    offset_value,
)
from mpbroker.coordinator.outbox import Call, Outbox, transaction_log
from mpbroker.coordinator.record_writer import Syncs
from mpbroker.coordinator.shard_topic import ShardTopic
from mpbroker.coordinator.timers import Timers
from mpbroker.coordinator.versioned import versioned
from mpbroker.ipc.layout import HEADER, HEADER_PHASE, Phase, RowStatus
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.fields import Struct
from mpbroker.protocol.message import Message
from mpbroker.protocol.messages.delete_groups import (
    DeletableGroupResult,
    DeleteGroupsResponse,
)
from mpbroker.protocol.messages.offset_commit import (
    OffsetCommitResponse,
    OffsetCommitResponsePartition,
    OffsetCommitResponseTopic,
)
from mpbroker.server.api_messages import error_answer
from tests.coordinator.rig import FakeTopics, no_sessions, no_share_groups
from tests.coordinator.test_durability import FakeLog, FakeNotices
from tests.coordinator.test_shard_topic import FIRST, SECOND, FakeStore
from tests.support.coordinator_settings import group_settings

PARTITION = 3


class Stage:
    """A process with fakes around it; only the waiting for the disk is real."""

    def __init__(self, shards: ShardTopic | None = None) -> None:
        self.log = FakeLog(1)
        self.out = Outbox()
        self.sent: list[str] = []
        self.bell = os.eventfd(0)
        self.topic = topic = MagicMock()
        topic.has_changed = False
        topic.append.side_effect = lambda *_: (self.log, 5)
        transactions = MagicMock()
        transactions.topic.has_changed = False
        self.transactions = transactions
        self.disk: Any = SimpleNamespace(event_fd=-1, is_idle=True)
        self.channel = channel = MagicMock()
        channel.send_bytes.side_effect = lambda slot, body: self.sent.append(body)
        self.coordinator = MagicMock()
        context = CoordinatorContext(self.out, Timers(), FakeTopics(), no_sessions())
        sync_at_once: Any = self.fail if shards is None else None
        durability = Durability(lambda log: None, FakeNotices(), sync_at_once)  # type: ignore[arg-type]
        words: Any = SimpleNamespace(words=defaultdict(int))
        bell: Any = SimpleNamespace(fd=self.bell)
        self.process = CoordinatorProcess(
            RequestPort(words, MagicMock(), bell, channel),
            StateMachines(
                context,
                self.coordinator,
                shards or topic,
                transactions,
                no_share_groups(),
                shards,
            ),
            Syncs(self.disk, MagicMock(), durability, MagicMock()),
            Clock(),
            lambda: None,
            lambda request, code: code.name.encode(),
        )

    def fail(self, logs: list[FakeLog]) -> None:
        """Let the sync that is made at once fail."""
        logs[0].row.status = RowStatus.OFFLINE

    def call(self) -> Call:
        request = SimpleNamespace(slot=1, frame=lambda body: body.decode())
        return Call(0, "c", "h", request)


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    os.close(made.bell)


def test_answers_and_steps_that_rest_on_a_log_fail_with_its_sync(stage: Stage) -> None:
    """Also those that come after the log was forgotten."""
    told: list[bool] = []
    stage.out.write(PARTITION, b"k", b"v")
    stage.out.answer(stage.call(), MagicMock(), (PARTITION,))
    stage.out.then((PARTITION,), told.append)
    stage.process._flush()
    assert stage.sent == ["COORDINATOR_NOT_AVAILABLE"]
    assert told == [False]
    stage.coordinator.failed.assert_called_once_with(PARTITION)


def test_answers_do_not_wait_for_the_steps_that_follow(stage: Stage) -> None:
    stage.log.row.durable_end_offset = 5
    told: list[tuple[int, int]] = []

    def step(durable: bool) -> None:
        told.append((len(stage.sent), stage.channel.flush.call_count))

    stage.out.write(PARTITION, b"key", b"value")
    call = stage.call()
    call.request = SimpleNamespace(
        slot=1, api_version=2, throttle_ms=0, frame=lambda body: "answer"
    )
    stage.out.answer(call, DeleteGroupsResponse(), (PARTITION,))
    stage.out.then((PARTITION,), step)
    stage.process._flush()
    assert told == [(1, 1)]


def test_a_log_that_was_loaded_again_is_rested_on_again(stage: Stage) -> None:
    told: list[bool] = []
    stage.out.write(PARTITION, b"k", b"v")
    stage.out.then((PARTITION,), told.append)
    stage.process._flush()
    stage.log.row.status = RowStatus.ONLINE
    stage.log.row.log_end_offset = stage.log.row.durable_end_offset = 5
    stage.topic.log_of.return_value = stage.log
    stage.process._logs.note_loaded(PARTITION)
    stage.out.then((PARTITION,), told.append)
    stage.process._flush()
    assert told == [False, True]


@pytest.mark.parametrize("log", [0, transaction_log(0)])
def test_a_log_that_is_lost_while_it_is_loaded_is_loaded_again_after_that(
    stage: Stage, log: int
) -> None:
    """A second load at once would undo changes made after the first."""
    process, loading = stage.process, stage.process._loading
    now_ms = 0
    loading._now_ms = lambda: now_ms
    stage.topic.load.side_effect = lambda _: iter([[], []])
    stage.transactions.loading.replay.side_effect = lambda _: iter([1, 2])

    def look() -> int:
        nonlocal now_ms
        now_ms += 3_000
        process._timers.expire(now_ms)
        return len(loading._loads)

    process._lose(log)
    assert look() == 1
    next(loading._loads[0][1])
    process._lose(log)
    assert look() == 1
    loading.go_on(60.0)
    assert not loading
    assert look() == 1


def test_partitions_are_opened_before_the_groups_are_loaded(stage: Stage) -> None:
    """Loading groups may take long, and offsets may need restored markers."""
    done: list[str] = []

    def note(what: str) -> Iterator[list[int]]:
        done.append(what)
        yield []

    stage.topic.partitions_to_load.return_value = [5, 6]
    stage.topic.load.side_effect = lambda number: note(f"groups {number}")
    transactions = stage.transactions
    transactions.topic.partitions_to_load.return_value = [0, 1]
    transactions.loading.replay.side_effect = lambda each: note(f"ends {each}")
    transactions.loading.finish.side_effect = lambda: done.append("open")
    stage.process._loading.begin()
    stage.process._loading.go_on(60.0)
    assert done == ["ends 0", "ends 1", "open", "groups 5", "groups 6"]


def test_a_record_with_an_impossible_value_is_skipped(stage: Stage) -> None:
    key = ConsumerGroupCurrentMemberAssignmentKey(group_id="g", member_id="m")
    value = ConsumerGroupCurrentMemberAssignmentValue(state=25)
    made = GroupCoordinator(
        group_settings(),
        CoordinatorContext(stage.out, Timers(), FakeTopics(), no_sessions()),
        1,
        lambda: "id",
    )
    loading = stage.process._loading
    loading._groups = made
    loading.replay(
        PARTITION, LoadedRecord(versioned(key, 8), versioned(value, 0), -1, None), 1
    )
    offset = LoadedRecord(
        offset_key("g", "t", 0), offset_value(5, -1, "", 1, -1), -1, None
    )
    loading.replay(PARTITION, offset, 1)
    offsets = made.offsets.offsets("g")
    assert offsets is not None
    assert offsets.get("t", 0) == OffsetAndMetadata(5, -1, "", 1, -1)


def test_requests_of_a_client_that_computed_for_long_come_after_those_of_others(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, executed = stage.process, list[int]()
    long_one, other = 1, 2
    monkeypatch.setattr(process, "_execute", executed.append)
    monkeypatch.setattr(
        process, "_client_of", lambda slot: long_one if slot < 10 else other
    )
    process._work([1])
    process._turns.charge(long_one, 10**12)
    process._work([2])
    assert executed == [1, 2]  # nobody else waits
    process._work([3, 4, 5, 6, 10])
    assert executed == [1, 2, 10, 3]
    process._turns._next_ns = 1 << 62
    process._work([11])
    assert executed == [1, 2, 10, 3, 11]
    process._work([])
    assert executed == [1, 2, 10, 3, 11, 4]
    process._words[HEADER + HEADER_PHASE] = Phase.DRAINING
    process._work([])
    assert executed == [1, 2, 10, 3, 11, 4, 5, 6]


@pytest.mark.parametrize("name", ["groups", "transactions"])
def test_no_request_is_executed_after_the_topic_was_recreated(
    stage: Stage, name: str
) -> None:
    """The requests stay claimed, and the successor executes them."""
    topic = stage.topic if name == "groups" else stage.transactions.topic

    def catch_up() -> None:
        topic.has_changed = True

    stage.process._catch_up = catch_up
    stage.out.write(PARTITION, b"k", b"v")
    stage.out.answer(stage.call(), MagicMock(), (PARTITION,))
    stage.process._work([1, 2])
    assert stage.process.must_restart
    stage.channel.request.assert_not_called()
    stage.topic.append.assert_not_called()
    assert stage.sent == []


def test_nothing_is_done_once_it_is_known_that_the_topic_was_deleted(
    stage: Stage,
) -> None:
    def catch_up() -> None:
        stage.process.must_restart = True

    stage.process._catch_up = catch_up
    stage.out.write(PARTITION, b"k", b"v")
    stage.process._work([1])
    stage.channel.request.assert_not_called()
    stage.topic.append.assert_not_called()


class ShardStage(Stage):
    """A process whose node has one shard, with a store whose thread is the test."""

    def __init__(self) -> None:
        self.now = 100.0
        self.store = FakeStore()
        self.store.event_fd = os.eventfd(0)
        shards = ShardTopic(self.store, lambda: self.now)  # type: ignore[arg-type]
        super().__init__(shards)
        self.coordinator.lost.side_effect = self.forget
        self.happens(Held(103, frozenset({PARTITION})), Taken(FIRST))
        self.happens(Loaded(FIRST, []))

    def forget(self, number: int) -> None:
        self.out.records.pop(number, None)

    def happens(self, *events: Event) -> None:
        """Let events come, and the process take a turn."""
        self.store.events += events
        self.process._work([])


@pytest.fixture
def sharded() -> Iterator[ShardStage]:
    made = ShardStage()
    yield made
    os.close(made.bell)
    os.close(made.store.event_fd)


def test_an_answer_whose_records_go_with_a_shard_is_refused(
    sharded: ShardStage,
) -> None:
    """Also if the shard is back before the answer is looked at again."""
    sharded.disk.is_idle = False
    sharded.out.write(PARTITION, b"k", b"v")
    sharded.out.answer(sharded.call(), MagicMock(), (PARTITION,))
    sharded.process._flush()
    assert sharded.process._writer.holds_answers
    sharded.happens(Lost(FIRST), Taken(SECOND), Loaded(SECOND, []))
    assert sharded.sent == ["NOT_COORDINATOR"]


def test_nothing_is_answered_from_memory_if_the_lease_ends_within_a_turn(
    sharded: ShardStage,
) -> None:
    def be_slow(now_ms: int) -> None:
        sharded.now += 10
        sharded.out.answer(sharded.call(), MagicMock(), (PARTITION,))

    sharded.process._timers.schedule("slow", 0, be_slow)
    sharded.happens()
    assert sharded.sent == ["NOT_COORDINATOR"]


TWO_COMMITS = [
    OffsetCommitResponsePartition(partition_index=0, error_code=0),
    OffsetCommitResponsePartition(
        partition_index=1, error_code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    ),
]


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (
            OffsetCommitResponse(
                topics=[OffsetCommitResponseTopic(name="t", partitions=TWO_COMMITS)]
            ),
            ["COORDINATOR_NOT_AVAILABLE", "UNKNOWN_TOPIC_OR_PARTITION"],
        ),
        (
            DeleteGroupsResponse(
                results=[DeletableGroupResult(group_id="g", error_code=0)]
            ),
            ["COORDINATOR_NOT_AVAILABLE"],
        ),
    ],
    ids=["OffsetCommit", "DeleteGroups"],
)
def test_a_failed_write_is_told_in_the_rows_of_an_answer_without_an_error_code(
    stage: Stage, response: Message, expected: list[str]
) -> None:
    """As Kafka does: a closed connection would not tell the client the reason."""
    version = response.valid_versions[-1]
    request = SimpleNamespace(
        slot=1,
        api_key=response.api_key,
        api_version=version,
        throttle_ms=0,
        frame=lambda body: body,
    )
    stage.process._writer._replies._answer_error = error_answer
    stage.out.write(PARTITION, b"k", b"v")
    stage.out.answer(Call(version, "c", "h", request), response, (PARTITION,))
    stage.process._flush()
    (sent,) = stage.sent
    told = type(response).decode(version, memoryview(sent))  # type: ignore[arg-type]
    assert [ErrorCode(code).name for code in error_codes(told)] == expected


def error_codes(message: Struct) -> list[int]:
    """Return the error codes of all rows of a message, in order."""
    codes = []
    for field in message.__fields__:
        value = getattr(message, field.name)
        if field.name == "error_code":
            codes.append(value)
        for row in value if isinstance(value, list) else ():
            codes += error_codes(row)
    return codes


def test_the_load_of_a_lost_shard_ends_and_does_not_meet_the_next_one(stage):
    loading = stage.process._loading
    stage.topic.load.side_effect = lambda partition: iter([[], [], []])
    loading.load(PARTITION)
    next(loading._loads[0][1])  # it is under way
    stage.process._lost_shard(PARTITION)
    assert not loading
    loading.load(PARTITION)
    loading.go_on(60)
    assert not loading
    stage.coordinator.loaded.assert_called_once()

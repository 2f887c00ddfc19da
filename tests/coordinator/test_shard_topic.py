"""Shards as the coordinator's logs: taken, served, given away, lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mpbroker.cluster.groups.group_store import (
    Event,
    Held,
    Loaded,
    Lost,
    ShardTerm,
    Spare,
    Taken,
    Written,
)
from mpbroker.cluster.groups.transaction_exchange import (
    Ended,
    Ends,
    OffsetsEnd,
    ShardEnd,
)
from mpbroker.coordinator.coordinator_topic import LoadedRecord
from mpbroker.coordinator.durability import Awaited, Durability
from mpbroker.coordinator.group_adoption import records_to_adopt
from mpbroker.coordinator.groups.group_records import (
    group_metadata_key,
    offset_key,
    offset_value,
)
from mpbroker.coordinator.outbox import Call, TransactionalRecord
from mpbroker.coordinator.shard_topic import ShardTopic
from mpbroker.ipc.layout import RowStatus
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.consumer_group_heartbeat import (
    ConsumerGroupHeartbeatRequest,
)
from mpbroker.protocol.messages.delete_groups import DeleteGroupsRequest
from mpbroker.protocol.messages.heartbeat import HeartbeatRequest
from mpbroker.protocol.messages.leave_group import LeaveGroupRequest, MemberIdentity
from mpbroker.protocol.messages.sync_group import SyncGroupRequest
from tests.coordinator.rig import PARTITIONS, Rig
from tests.coordinator.test_durability import FakeNotices

FIRST = ShardTerm(3, 1)
SECOND = ShardTerm(3, 2)
OTHER = ShardTerm(4, 3)


class FakeStore:
    """A store whose thread is the test."""

    event_fd = -1

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.calls: list[tuple[object, ...]] = []

    def take_events(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: self.calls.append((name, *arguments))


class Stage:
    """Shards, and a coordinator that waits for what it has written."""

    def __init__(self) -> None:
        self.now = 100.0
        self.store = FakeStore()
        self.topic = ShardTopic(self.store, lambda: self.now)  # type: ignore[arg-type]
        self.told: list[tuple[str, int]] = []
        self.durability = Durability(lambda log: None, FakeNotices())  # type: ignore[arg-type]
        for name in ("taken", "loaded", "lost"):
            tell = lambda number, name=name: self.told.append((name, number))  # noqa: E731
            setattr(self.topic, f"on_{name}", tell)
        self.topic.on_written = self.durability.sync_ended

    def happens(self, *events: Event) -> list[tuple[str, int]]:
        """Let events come; return what the coordinator was told."""
        self.told.clear()
        self.store.events += events
        self.topic.go_on()
        self.durability.go_on(0)
        return self.told

    def owns(self, *terms: ShardTerm) -> None:
        self.happens(Held(self.now + 3, frozenset(each.number for each in terms)))
        self.happens(*map(Taken, terms), *(Loaded(each, []) for each in terms))

    def append(self, number: int) -> list[bool]:
        """Append a record; the list gets whether that was written, once it is known."""
        done: list[bool] = []
        log, end = self.topic.append(number, [(b"k", b"v")], 0)
        self.durability.when(
            [Awaited(number, log, end)], lambda failed: done.append(not failed), 0
        )
        return done


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_the_first_word_of_the_database_tells_which_shards_are_elsewhere(stage):
    told = stage.happens(Held(103, frozenset({3, 4})))
    assert {number for _, number in told} == set(range(50)) - {3, 4}
    assert {what for what, _ in told} == {"lost"}
    assert stage.happens(Held(104, frozenset({3, 4}))) == []
    assert stage.happens(Taken(FIRST)) == [("taken", 3)]
    assert stage.happens(Loaded(FIRST, [(b"k", b"v")])) == [("loaded", 3)]
    assert list(stage.topic.load(3)) == [[LoadedRecord(b"k", b"v", -1, None)]]


def test_a_shard_that_goes_to_another_node_before_it_is_taken_is_elsewhere(stage):
    """The node had it, but is not to keep it, or could not begin with it."""
    stage.happens(Held(103, frozenset({3, 4, 5})))
    assert stage.happens(Held(104, frozenset({3, 4}))) == [("lost", 5)]
    stage.happens(Taken(FIRST))
    assert stage.happens(Held(104, frozenset())) == [("lost", 4)]
    assert stage.happens(Held(104, frozenset())) == []


def test_a_database_that_is_silent_from_the_start_makes_all_shards_be_elsewhere(stage):
    stage.topic.start()
    stage.now += 4.9
    assert stage.happens() == []
    stage.now += 0.2
    assert stage.happens() == [("lost", number) for number in range(50)]
    assert stage.happens(Held(stage.now + 3, frozenset({3}))) == []
    assert stage.happens(Taken(FIRST)) == [("taken", 3)]


def test_the_silence_of_a_database_counts_from_its_last_word(stage):
    stage.topic.start()
    stage.now += 4
    stage.happens(Held(stage.now + 3, frozenset({3})))
    stage.now += 4
    assert stage.happens() == []
    stage.now += 1.1
    assert stage.happens() == [("lost", 3)]
    assert stage.happens() == []


def test_answers_wait_for_the_appends_before_them_to_be_written(stage):
    stage.owns(FIRST, OTHER)
    first, second, other = stage.append(3), stage.append(3), stage.append(4)
    stage.happens(Written(FIRST, 1))
    assert (first, second, other) == ([True], [], [])
    stage.happens(Written(OTHER, 1), Written(FIRST, 2))
    assert (first, second, other) == ([True], [True], [True])


def test_what_is_lost_fails_and_cannot_be_written_any_more(stage):
    stage.owns(FIRST)
    done = stage.append(3)
    assert stage.happens(Lost(FIRST)) == [("lost", 3)]
    assert done == [False]
    with pytest.raises(ApiError) as refused:
        stage.append(3)
    assert refused.value.error_code is ErrorCode.NOT_COORDINATOR
    # It comes back in another term, and nothing is mistaken for the former one's.
    stage.happens(Taken(SECOND), Loaded(SECOND, []))
    done = stage.append(3)
    stage.happens(Written(FIRST, 1), Lost(FIRST))
    assert done == []
    stage.happens(Written(SECOND, 1))
    assert done == [True]


def test_a_spare_shard_is_released_when_all_is_written(stage):
    stage.owns(FIRST)
    done = stage.append(3)
    assert stage.happens(Spare(FIRST)) == [("lost", 3)]
    assert stage.store.calls[-1] == ("stop", FIRST)
    assert done == []  # it may still be written
    with pytest.raises(ApiError):
        stage.topic.log_of(3)
    stage.happens(Written(FIRST, 1))
    assert done == [True]


def test_a_spare_shard_may_be_lost_before_all_is_written(stage):
    stage.owns(FIRST)
    done = stage.append(3)
    stage.happens(Spare(FIRST))
    assert stage.happens(Lost(FIRST)) == []
    assert done == [False]


def test_without_a_word_of_the_database_all_shards_are_dropped(stage):
    stage.owns(FIRST, OTHER)
    done = stage.append(3)
    stage.now += 2.9
    assert stage.happens() == []
    stage.now += 0.2
    assert stage.happens() == [("lost", 3), ("lost", 4)]
    assert done == [False]
    assert stage.store.calls[-2:] == [("drop", FIRST), ("drop", OTHER)]


def test_without_a_word_of_the_database_what_is_on_its_way_fails(stage):
    stage.owns(FIRST)
    done = stage.append(3)
    stage.happens(Spare(FIRST))
    stage.now += 3.1
    stage.happens()
    assert done == [False]
    assert stage.store.calls[-1] == ("drop", FIRST)


def test_a_shard_is_dropped_once_and_only_if_it_is_there(stage):
    stage.owns(FIRST)
    log = stage.topic.log_of(3)
    stage.topic.drop(3)
    stage.topic.drop(3)
    stage.topic.drop(-1)  # a log of transactions
    assert stage.store.calls == [("drop", FIRST)]
    assert log.row.status == RowStatus.OFFLINE


def test_a_stop_gives_all_shards_away_also_those_that_come_late(stage):
    stage.owns(FIRST)
    stage.topic.stop_all()
    stage.happens(Taken(OTHER))
    stage.topic.stop_all()
    assert stage.store.calls == [("take_no_more",), ("stop", FIRST), ("stop", OTHER)]


# -- offsets in transactions -----------------------------------------------------------


END = ShardEnd(9, FIRST.serial, OffsetsEnd(3, 1000, 4, True))


def test_offsets_of_a_transaction_are_committed_when_its_end_comes(stage):
    stage.owns(FIRST)
    record = TransactionalRecord(1000, 3, b"k", b"new")
    stage.topic.append_transactional(3, [record], 0)
    ((name, term, records),) = stage.store.calls
    assert (name, term) == ("put", FIRST)
    assert all(key != b"k" for key, _ in records)
    stage.happens(Ends([END]))
    assert stage.topic.ends_to_append() == [END]
    log, end = stage.topic.append_end(END)
    assert (log, end) == (stage.topic.log_of(3), 2)
    name, term, records, serial = stage.store.calls[-1]
    assert (name, term, serial) == ("put", FIRST, 9)
    assert (b"k", b"new") in records


def test_an_end_is_appended_once_in_a_term(stage):
    stage.owns(FIRST)
    stage.happens(Ends([END]))
    stage.topic.append_end(END)
    stage.happens(Ends([END]))  # its row is still there
    assert stage.topic.ends_to_append() == []
    stage.happens(Ends([]))
    assert stage.topic.log_of(3).ends == set()
    # The put was lost, with the shard.
    stage.happens(Lost(FIRST), Taken(SECOND), Loaded(SECOND, []))
    again = END._replace(term=SECOND.serial)
    stage.happens(Ends([again]))
    assert stage.topic.ends_to_append() == [again]


def test_an_end_of_an_earlier_term_counts_no_more(stage):
    """Another node may have written it, and the next transaction may be open."""
    stage.owns(FIRST)
    stage.happens(Ends([END]))
    stage.happens(Lost(FIRST), Taken(SECOND), Loaded(SECOND, []))
    assert stage.topic.ends_to_append() == []
    stage.happens(Ends([END]))
    assert stage.topic.ends_to_append() == []


def test_what_other_nodes_tell_is_passed_on_in_its_order(stage):
    told: list[object] = []
    stage.topic.on_exchange = told.append
    stage.happens(Ended(3, 1), Ended(4, 1))
    assert told == [Ended(3, 1), Ended(4, 1)]


def test_a_later_offset_of_no_transaction_outdoes_a_pending_one(stage):
    stage.owns(FIRST)
    record = TransactionalRecord(1000, 3, b"k", b"pending")
    stage.topic.append_transactional(3, [record], 0)
    stage.topic.append(3, [(b"k", b"later")], 0)
    stage.happens(Ends([END]))
    stage.topic.append_end(END)
    assert all(key != b"k" for key, _ in stage.store.calls[-1][2])


# -- groups that are here, or elsewhere ------------------------------------------------


@pytest.fixture
def rig() -> Rig:
    made = Rig()
    made.coordinator.be_sharded()
    return made


def code_of(rig: Rig, group_id: str) -> ErrorCode:
    try:
        rig.coordinator.check_group(group_id)
    except ApiError as error:
        return error.error_code
    return ErrorCode.NONE


def test_a_sharded_coordinator_serves_what_was_loaded_and_not_lost(rig):
    partition = rig.coordinator.partition_for("team")
    assert code_of(rig, "team") is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    rig.coordinator.lost(partition)
    assert code_of(rig, "team") is ErrorCode.NOT_COORDINATOR
    rig.coordinator.begin_loading([partition])
    assert code_of(rig, "team") is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    rig.coordinator.loaded(partition, rig.now_ms)
    assert code_of(rig, "team") is ErrorCode.NONE
    rig.coordinator.lost(partition)
    assert code_of(rig, "team") is ErrorCode.NOT_COORDINATOR


def test_a_heartbeat_for_a_shard_that_may_be_elsewhere_is_refused(rig):
    """If it were answered, the member would not look for its coordinator."""

    def beat() -> ErrorCode:
        call = Call(4, "client", "/host")
        request = HeartbeatRequest(group_id="team", generation_id=1, member_id="m")
        rig.coordinator.heartbeat(call, request, rig.now_ms)
        (answer,) = rig.out.take_answers()
        return ErrorCode(answer.response.error_code)

    assert beat() is ErrorCode.NOT_COORDINATOR
    rig.coordinator.begin_loading([rig.coordinator.partition_for("team")])
    assert beat() is ErrorCode.NONE


@pytest.mark.parametrize("sharded", [True, False])
def test_in_a_cluster_answers_rest_on_what_was_written_before_them(sharded):
    """An append alone does not outlive the process there."""
    rig = Rig()
    if sharded:
        rig.coordinator.be_sharded()
        rig.coordinator.begin_loading(range(PARTITIONS))
        for each in range(PARTITIONS):
            rig.coordinator.loaded(each, rig.now_ms)
    _, member = rig.stable(2)
    generation = rig.group().generation_id
    sync = SyncGroupRequest(
        group_id="g",
        member_id=member,
        generation_id=generation,
        protocol_type="consumer",
        protocol_name="range",
    )
    heartbeat = ConsumerGroupHeartbeatRequest(
        group_id="new",
        member_id="m",
        rebalance_timeout_ms=1000,
        subscribed_topic_names=["t"],
        topic_partitions=[],
    )
    rig.send("consumer_group_heartbeat", heartbeat, 1)
    again = ConsumerGroupHeartbeatRequest(
        group_id="new", member_id="m", member_epoch=1, subscribed_topic_names=None
    )
    missing = LeaveGroupRequest(group_id="g", members=[MemberIdentity(member_id="x")])
    gone = DeleteGroupsRequest(groups_names=["g"])
    for name, request, version, group in (
        ("sync_group", sync, 5, "g"),
        ("consumer_group_heartbeat", again, 1, "new"),
        ("leave_group", missing, 5, "g"),
        ("delete_groups", gone, 2, "g"),
    ):
        call = Call(version, "c", "/host")
        getattr(rig.coordinator, name)(call, request, rig.now_ms)
        (answer,) = rig.out.take_answers()
        partition = rig.coordinator.partition_for(group)
        assert answer.after == ((partition,) if sharded else ()), name


def test_groups_that_are_elsewhere_do_not_fail_what_is_said_of_others(rig):
    names = [f"group{number}" for number in range(20)]
    here = rig.coordinator.partition_for(names[0])
    for each in range(PARTITIONS):
        rig.coordinator.lost(each)
    rig.coordinator.begin_loading([here])
    rig.coordinator.loaded(here, rig.now_ms)
    call = Call(2, "client", "/host")
    request = DeleteGroupsRequest(groups_names=names)
    rig.coordinator.delete_groups(call, request, rig.now_ms)
    (answer,) = rig.out.take_answers()
    assert answer.after == (here,)


def test_offsets_in_topics_that_are_not_known_yet_are_kept_for_a_while(rig):
    """Another node has made the topic; the copy of the metadata is behind."""
    for partition in range(PARTITIONS):
        rig.coordinator.begin_loading([partition])
    partition = rig.coordinator.partition_for("team")
    rig.coordinator.replay_offset("team", "new", 0, committed(5), rig.now_ms)
    for each in range(PARTITIONS):
        rig.coordinator.loaded(each, rig.now_ms)
    assert rig.coordinator.offsets.offsets("team") is not None
    assert rig.out.records == {}
    rig.timers.expire(rig.now_ms + 3_600_000)
    assert rig.coordinator.offsets.offsets("team") is None
    assert rig.out.records == {partition: [(offset_key("team", "new", 0), None)]}


def committed(offset: int):
    from mpbroker.coordinator.groups.group_offsets import OffsetAndMetadata

    return OffsetAndMetadata(offset, -1, "", 1, -1)


# -- a broker's groups, when it becomes a node -----------------------------------------


class FakeTopic:
    """__consumer_offsets with one partition."""

    def __init__(self, *records: LoadedRecord) -> None:
        self._records = records

    def partitions_to_load(self) -> list[int]:
        return [0]

    def load(self, partition: int):
        for each in self._records:
            yield [each]


def offset(name: str, value: int | None, producer: int = -1) -> LoadedRecord:
    key = offset_key(name, "t", 0)
    text = None if value is None else offset_value(value, -1, "", 1, -1)
    return LoadedRecord(key, text, producer, None)


def marker(producer: int, *, commit: bool) -> LoadedRecord:
    return LoadedRecord(b"", None, producer, commit)


def test_the_newest_committed_records_of_a_broker_are_adopted():
    topic = FakeTopic(
        offset("one", 1),
        offset("two", 1),
        offset("one", 2),
        offset("two", None),
        offset("three", 7, producer=1),
        offset("four", 7, producer=2),
        marker(1, commit=True),
        marker(2, commit=False),
        offset("five", 7, producer=3),  # without an end
        LoadedRecord(b"\xff\xffnonsense", b"x", -1, None),
        LoadedRecord(group_metadata_key("one"), b"\x00", -1, None),  # damaged
    )
    found = records_to_adopt(topic, lambda: None)  # type: ignore[arg-type]
    expected = [offset("one", 2), offset("three", 7)]
    assert [(key, value) for _, key, value in found] == [
        (each.key, each.value) for each in expected
    ]
    assert len({shard for shard, _, _ in found}) == 2

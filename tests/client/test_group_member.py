"""A group's member whose round, heartbeat or commit meets another's."""

from __future__ import annotations

import threading

import pytest

from mpbroker.client.assignor import decode_subscription, encode_assignment
from mpbroker.client.cluster import TopicPartition
from mpbroker.client.consumer.consumer import Consumer, RebalanceListener
from mpbroker.client.consumer.group_member import RebalancedError
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.heartbeat import HeartbeatResponse
from mpbroker.protocol.messages.join_group import JoinGroupRequest, JoinGroupResponse
from mpbroker.protocol.messages.leave_group import LeaveGroupResponse
from mpbroker.protocol.messages.sync_group import SyncGroupRequest, SyncGroupResponse
from tests.client.test_consumer import fill, values

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


@pytest.fixture
def consumer():
    """Return one that is never connected."""
    consumer = Consumer(
        bootstrap_servers="127.0.0.1:1", group_id="g", enable_auto_commit=False
    )
    yield consumer
    assert consumer._member is not None
    consumer._cluster.close()
    consumer._member._cluster.close()


class Coordinator:
    """Answers heartbeats as Kafka's does: for the generation that there is."""

    def __init__(self) -> None:
        self.generation = 1
        self.asked: list[int] = []
        self.left = 0
        self.was_asked = threading.Event()

    def version_for(self, request):
        return request.valid_versions[-1]

    def request(self, request, response_type):
        self.was_asked.set()
        if response_type is LeaveGroupResponse:
            self.left += 1
            return LeaveGroupResponse()
        self.asked.append(request.generation_id)
        known = request.generation_id == self.generation
        return HeartbeatResponse(
            error_code=0 if known else ErrorCode.ILLEGAL_GENERATION
        )


class WatchedLock:
    """Tells when somebody else waits for it."""

    def __init__(self) -> None:
        self.inner = threading.RLock()
        self.wanted = threading.Event()

    def __enter__(self) -> None:
        self.wanted.set()
        self.inner.acquire()

    def __exit__(self, *_) -> None:
        self.inner.release()


@pytest.mark.parametrize("is_joining", [False, True])
def test_a_heartbeat_that_waited_for_a_round_to_end_is_of_the_new_one(
    consumer, monkeypatch, is_joining
):
    member, coordinator = consumer._member, Coordinator()
    monkeypatch.setattr(member, "_find", lambda: coordinator)
    member._lock = lock = WatchedLock()
    member.member_id, member.generation, member._must_join = "m", 1, False
    thread = threading.Thread(target=member._beat_once)
    with lock.inner:
        thread.start()
        assert lock.wanted.wait(60)
        # Meanwhile, the consumer's thread has joined; or is about to sync.
        coordinator.generation = member.generation = 2
        member._is_joining = is_joining
    thread.join(60)
    assert coordinator.asked == ([] if is_joining else [2])
    assert (member.generation, member.must_join) == (2, False)


def test_a_join_that_meets_another_round_is_tried_again(consumer, monkeypatch):
    member = consumer._member
    answers = [
        JoinGroupResponse(error_code=ErrorCode.REBALANCE_IN_PROGRESS, members=[]),
        JoinGroupResponse(
            generation_id=3, protocol_name="range", leader="x", member_id="m"
        ),
        SyncGroupResponse(assignment=encode_assignment([T1])),
    ]
    asked = []

    def ask(request, *_, **options):
        asked.append(type(request))
        return answers.pop(0)

    monkeypatch.setattr(member, "_ask", ask)
    monkeypatch.setattr(member, "_start_heart", lambda: None)
    assert member.join(["t"]) == [T1]
    assert asked == [JoinGroupRequest, JoinGroupRequest, SyncGroupRequest]
    assert (member.member_id, member.generation) == ("m", 3)


class Rounds:
    """A cooperative member whose rounds give what a test says."""

    is_member = is_cooperative = must_join = True

    def __init__(self, *assigned):
        self.assigned = list(assigned)
        self.owned = []

    def join(self, topics, owned):
        self.must_join = False
        self.owned.append(list(owned))
        return self.assigned.pop(0)

    def join_again(self):
        self.must_join = True

    def note_poll(self): ...

    def check_topics(self): ...


class Failing(RebalanceListener):
    """Raises the first time that it is told that partitions go."""

    def __init__(self):
        self.assigned = []
        self.left = 1

    def on_partitions_revoked(self, partitions):
        if self.left:
            self.left -= 1
            raise ValueError("from the listener")

    def on_partitions_assigned(self, partitions):
        self.assigned += partitions


def test_a_listener_that_raises_keeps_no_partition_from_changing_hands(
    consumer, monkeypatch
):
    rounds = Rounds([T1], [T1])
    monkeypatch.setattr(consumer, "_member", rounds)
    consumer._topics, consumer._listener = ["t"], Failing()
    consumer._set_assigned([T0])
    with pytest.raises(ValueError, match="from the listener"):
        consumer._keep_membership()
    assert T0 not in consumer.assignment()
    assert rounds.must_join  # so that T0 can be given to another
    consumer._keep_membership()
    assert consumer.assignment() == [T1]
    assert consumer._listener.assigned == [T1]
    assert rounds.owned == [[T0], []]
    monkeypatch.undo()


@pytest.mark.parametrize("is_member", [False, True])
def test_a_listener_that_always_raises_keeps_nobody_from_joining(
    consumer, monkeypatch, is_member
):
    class Raising(RebalanceListener):
        def on_partitions_revoked(self, partitions):
            raise RebalancedError("from its commit")

    rounds = Rounds([T1])
    rounds.is_member, rounds.is_cooperative = is_member, False
    monkeypatch.setattr(consumer, "_member", rounds)
    consumer._topics, consumer._listener = ["t"], Raising()
    consumer._set_assigned([T0])
    with pytest.raises(RebalancedError):
        consumer._keep_membership()
    consumer._keep_membership()
    assert consumer.assignment() == [T1]
    monkeypatch.undo()


def test_who_comes_back_while_the_heart_waits_is_not_made_to_leave(
    consumer, monkeypatch
):
    member, coordinator = consumer._member, Coordinator()
    monkeypatch.setattr(member, "_find", lambda: coordinator)
    monkeypatch.setattr(
        member, "_settings", member._settings._replace(heartbeat_interval_ms=1)
    )
    member._lock = lock = WatchedLock()
    member.member_id, member.generation, member._must_join = "m", 1, False
    member._last_poll = -1e9
    thread = threading.Thread(target=member._beat, daemon=True)
    with lock.inner:
        thread.start()
        assert lock.wanted.wait(60)
        member.note_poll()
    assert coordinator.was_asked.wait(60)
    member._stop.set()
    thread.join(60)
    assert not coordinator.left
    assert (member.member_id, member.must_join) == ("m", False)


@pytest.mark.parametrize("closes", [False, True])
def test_who_is_no_member_any_more_moves_no_position(bootstrap, topic_name, closes):
    fill(bootstrap, topic_name, range(5))
    settings = {
        "bootstrap_servers": bootstrap,
        "group_id": f"g-{topic_name}",
        "auto_offset_reset": "earliest",
        "heartbeat_interval_ms": 200,
    }
    late = Consumer(**settings, max_poll_records=2, auto_commit_interval_ms=3_600_000)
    with late:
        late.subscribe([topic_name])
        assert values(late, 2) == [0, 1]
        late._member.leave()  # as its thread does after max.poll.interval.ms
        with Consumer(**settings) as other:
            other.assign([(topic_name, 0)])
            assert values(other, 5) == [0, 1, 2, 3, 4]
        if closes:
            late.close()
        else:
            with pytest.raises(RebalancedError):
                late.commit()
        with Consumer(**settings) as reader:
            assert reader.committed((topic_name, 0)) == 5
        if not closes:
            fill(bootstrap, topic_name, range(5, 7))
            assert values(late, 2) == [5, 6]  # a member again
            late.commit()
            assert late.committed((topic_name, 0)) == 7


def test_who_is_forgotten_while_it_joins_goes_on_from_what_is_committed(
    consumer, monkeypatch
):
    told = []

    class Seen(RebalanceListener):
        def on_partitions_lost(self, partitions):
            told.append(("lost", list(partitions)))

        def on_partitions_assigned(self, partitions):
            told.append(("assigned", list(partitions)))

    member = consumer._member
    answers = [
        JoinGroupResponse(error_code=ErrorCode.UNKNOWN_MEMBER_ID, members=[]),
        JoinGroupResponse(
            generation_id=3,
            protocol_name="cooperative-sticky",
            leader="x",
            member_id="n",
        ),
        SyncGroupResponse(assignment=encode_assignment([T0])),
    ]
    owned = []

    def ask(request, *_, **options):
        if isinstance(request, JoinGroupRequest):
            (protocol,) = request.protocols
            owned.append(decode_subscription(protocol.metadata).owned)
        return answers.pop(0)

    monkeypatch.setattr(member, "_ask", ask)
    monkeypatch.setattr(member, "_start_heart", lambda: None)
    monkeypatch.setattr(
        member,
        "_settings",
        member._settings._replace(assignors=("cooperative-sticky",)),
    )
    member.member_id, member.generation = "m", 2
    consumer._topics, consumer._listener = ["t"], Seen()
    consumer._set_assigned([T0])
    consumer.seek(T0, 2)  # others may have read on from there
    consumer._keep_membership()
    assert told == [("lost", [T0]), ("assigned", [T0])]
    assert T0 not in consumer._positions
    assert owned == [[T0], []]
    consumer._topics = []

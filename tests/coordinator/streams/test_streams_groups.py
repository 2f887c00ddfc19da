"""The members of streams groups (KIP-1071), heartbeat by heartbeat."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.coordinator.streams.topology import StatusCode
from mpbroker.protocol.error_code import ErrorCode as E
from mpbroker.protocol.messages.consumer_group_heartbeat import (
    ConsumerGroupHeartbeatRequest,
)
from mpbroker.protocol.messages.delete_groups import DeleteGroupsRequest
from mpbroker.protocol.messages.list_groups import ListGroupsRequest
from mpbroker.protocol.messages.streams_group_describe import (
    StreamsGroupDescribeRequest,
)
from mpbroker.protocol.messages.streams_group_heartbeat import (
    Endpoint,
    KeyValue,
    StreamsGroupHeartbeatRequest,
    Subtopology,
    TaskIds,
    TopicInfo,
    Topology,
)
from tests.coordinator.rig import Rig
from tests.support.coordinator_settings import streams_settings

Tasks = dict[str, list[int]]

CHANGELOG, REPARTITION = "g-counts-changelog", "g-words-repartition"


def topology(epoch: int = 0) -> Topology:
    """Return the topology of a word count over "t", which has four partitions."""
    return Topology(
        epoch=epoch,
        subtopologies=[
            Subtopology(
                subtopology_id="0",
                source_topics=["t"],
                repartition_sink_topics=[REPARTITION],
            ),
            Subtopology(
                subtopology_id="1",
                repartition_source_topics=[TopicInfo(name=REPARTITION)],
                state_changelog_topics=[TopicInfo(name=CHANGELOG)],
            ),
        ],
    )


def new_rig(**config: int) -> Rig:
    return Rig(streams=streams_settings(**{"initial_rebalance_delay_ms": 0, **config}))


class Client:
    """A member as Kafka Streams is one: it reports the tasks that it has."""

    def __init__(
        self, rig: Rig, name: str, process: str = "", group: str = "g"
    ) -> None:
        self.rig, self.name, self.group = rig, name, group
        self.process = process or f"process of {name}"
        self.epoch = 0
        self.active: Tasks = {}
        self.standby: Tasks = {}

    def send(self, **fields: Any) -> Any:
        joins = self.epoch == 0
        values: dict[str, Any] = {
            "group_id": self.group,
            "member_id": self.name,
            "member_epoch": self.epoch,
            "rebalance_timeout_ms": 60_000 if joins else -1,
            "topology": topology() if joins else None,
            "process_id": self.process if joins else None,
            "active_tasks": rows({} if joins else self.active),
            "standby_tasks": rows({} if joins else self.standby),
            "warmup_tasks": [],
        }
        request = StreamsGroupHeartbeatRequest(**{**values, **fields})
        return self.rig.ask("streams_group_heartbeat", request, 0)

    def beat(self, **fields: Any) -> Any:
        """Send a heartbeat; take over what the answer says."""
        answer = self.send(**fields)
        if answer.error_code == E.FENCED_MEMBER_EPOCH:
            self.epoch, self.active, self.standby = 0, {}, {}
        elif answer.error_code == E.NONE:
            self.epoch = answer.member_epoch
            if answer.active_tasks is not None:
                self.active = tasks_in(answer.active_tasks)
                self.standby = tasks_in(answer.standby_tasks)
        return answer

    def leave(self) -> Any:
        return self.send(member_epoch=-1, topology=None)


def rows(tasks: Tasks) -> list[TaskIds]:
    return [TaskIds(subtopology_id=i, partitions=n) for i, n in tasks.items()]


def tasks_in(given_rows: list[TaskIds]) -> Tasks:
    return {row.subtopology_id: list(row.partitions) for row in given_rows}


def codes(answer: Any) -> set[int]:
    return {row.status_code for row in answer.status}


def described(rig: Rig, group: str = "g") -> Any:
    request = StreamsGroupDescribeRequest(group_ids=[group])
    return rig.ask("streams_group_describe", request, 0).groups[0]


def settle(*clients: Client) -> None:
    """Send heartbeats until each client has what the group means it to have."""
    for _ in range(8):
        for client in clients:
            client.beat()


def test_the_first_member_has_all_tasks_and_its_topics_are_created() -> None:
    rig = new_rig()
    one = Client(rig, "one")
    answer = one.beat()
    assert (answer.error_code, answer.member_epoch) == (0, 2)
    assert answer.heartbeat_interval_ms == 5000
    assert (answer.status, answer.warmup_tasks) == ([], [])
    assert one.active == {"0": [0, 1, 2, 3], "1": [0, 1, 2, 3]}
    assert rig.topics.counts[CHANGELOG] == rig.topics.counts[REPARTITION] == 4
    assert one.beat().active_tasks is None  # unchanged
    group = described(rig)
    assert (group.group_state, group.group_epoch) == ("Stable", 2)
    assert [each.subtopology_id for each in group.topology.subtopologies] == ["0", "1"]


def test_a_task_is_given_to_another_only_when_it_was_given_up() -> None:
    rig = new_rig()
    one, two = Client(rig, "one"), Client(rig, "two")
    one.beat()
    had = one.active
    assert two.beat().error_code == 0
    assert two.active == {}
    told = one.beat()  # must give half of its tasks up
    assert (told.member_epoch, one.epoch) == (2, 2)
    assert sum(map(len, one.active.values())) == 4
    assert two.beat().active_tasks is None  # one has not said yet that it did
    one.beat()
    two.beat()
    assert (one.epoch, two.epoch) == (3, 3)
    both = Counter(
        (i, n) for each in (one, two) for i, ns in each.active.items() for n in ns
    )
    assert both == Counter((i, n) for i, ns in had.items() for n in ns)
    assert described(rig).group_state == "Stable"


def test_a_member_that_does_not_give_tasks_up_is_removed() -> None:
    rig = new_rig()
    one, two = Client(rig, "one"), Client(rig, "two")
    one.beat()
    two.beat()
    one.beat()
    had = {"0": [0, 1, 2, 3], "1": [0, 1, 2, 3]}
    for _ in range(7):
        rig.advance(10_000)
        one.send(active_tasks=rows(had))
        two.beat()
    assert one.send().error_code == E.UNKNOWN_MEMBER_ID
    settle(two)
    assert two.active == had


def test_a_silent_member_is_removed_and_a_leaver_at_once() -> None:
    rig = new_rig()
    one, two = Client(rig, "one"), Client(rig, "two")
    one.beat()
    two.beat()
    settle(one, two)
    assert two.leave().member_epoch == -1
    settle(one)
    assert one.active == {"0": [0, 1, 2, 3], "1": [0, 1, 2, 3]}
    rig.advance(45_001)
    assert described(rig).group_state == "Empty"


def test_a_heartbeat_during_a_load_begins_the_session_anew() -> None:
    rig = new_rig()
    clients = [Client(rig, name) for name in ("alive", "heard", "silent")]
    settle(*clients)
    rig.advance(44_000)
    clients[0].beat()
    codes = []
    rig.restart(lambda: codes.append(clients[1].beat().error_code))
    assert codes == [E.COORDINATOR_LOAD_IN_PROGRESS]
    rig.advance(3000)
    assert {row.member_id for row in described(rig).members} == {"alive", "heard"}


def test_an_answer_that_was_lost_is_given_again() -> None:
    rig = new_rig()
    one, two = Client(rig, "one"), Client(rig, "two")
    one.beat()
    two.beat()
    one.beat()
    lost = one.send()  # it gives its tasks up, and is in epoch 3
    assert lost.member_epoch == 3
    assert one.send().error_code == 0
    assert one.send(member_epoch=1).error_code == E.FENCED_MEMBER_EPOCH
    assert one.send(member_epoch=9).error_code == E.FENCED_MEMBER_EPOCH
    everything = rows({"0": [0, 1, 2, 3]})
    answer = one.send(active_tasks=everything)  # the epoch before, but other tasks
    assert answer.error_code == E.FENCED_MEMBER_EPOCH
    again = Client(rig, "one")
    again.beat()
    assert again.epoch == 3


@pytest.mark.parametrize("killed", [False, True])
def test_tasks_that_a_lost_answer_gave_are_told_again(killed: bool) -> None:
    rig = new_rig()
    one, two = Client(rig, "one"), Client(rig, "two")
    one.beat()
    two.beat()
    one.beat()
    one.beat()  # it has given half of its tasks up
    lost = two.send()
    assert lost.member_epoch == two.epoch and lost.active_tasks
    if killed:
        rig.restart()
    two.beat()
    assert two.active == tasks_in(lost.active_tasks)
    assert two.beat().active_tasks is None  # it has them now


def test_a_member_whose_answer_was_lost_is_told_again_what_to_give_up() -> None:
    rig = new_rig()
    one, two = Client(rig, "one"), Client(rig, "two")
    one.beat()
    two.beat()
    lost = one.send()
    everything = one.active
    one.beat()
    assert one.active == tasks_in(lost.active_tasks) != everything
    settle(one, two)
    assert described(rig).group_state == "Stable"
    assert all(one.active.values()) and all(two.active.values())


def test_the_first_assignment_waits_for_more_members() -> None:
    rig = new_rig(initial_rebalance_delay_ms=3000)
    one, two = Client(rig, "one"), Client(rig, "two")
    assert codes(one.beat()) == {StatusCode.ASSIGNMENT_DELAYED}
    rig.advance(1000)
    assert codes(two.beat()) == {StatusCode.ASSIGNMENT_DELAYED}
    assert one.active == two.active == {}
    rig.advance(2000)
    settle(one, two)
    assert [sum(map(len, each.active.values())) for each in (one, two)] == [4, 4]


def test_missing_source_topics_are_told_and_found_when_they_come() -> None:
    rig = new_rig()
    count = rig.topics.counts.pop("t")
    one = Client(rig, "one")
    answer = one.beat()
    assert codes(answer) == {StatusCode.MISSING_SOURCE_TOPICS}
    assert one.active == {}
    assert described(rig).group_state == "NotReady"
    rig.topics.counts["t"] = count
    assert codes(one.beat()) == set()
    assert one.active["0"] == [0, 1, 2, 3]


def test_topics_that_cannot_be_created_are_told_and_tried_again() -> None:
    rig = new_rig()
    rig.topics.refused[CHANGELOG] = "no room"
    one = Client(rig, "one")
    (status,) = one.beat().status
    assert status.status_code == StatusCode.MISSING_INTERNAL_TOPICS
    assert status.status_detail == (
        f"Internal topics are missing: {CHANGELOG};"
        f" Creation failed: {CHANGELOG} (no room)."
    )
    rig.topics.refused.clear()
    assert codes(one.beat()) == {StatusCode.MISSING_INTERNAL_TOPICS}  # not at once
    rig.advance(10_000)
    assert codes(one.beat()) == set()
    assert one.active["1"] == [0, 1, 2, 3]


def test_a_topic_that_grows_brings_more_tasks() -> None:
    rig = new_rig()
    one = Client(rig, "one")
    one.beat()
    for name in ("t", REPARTITION, CHANGELOG):
        rig.topics.counts[name] = 6
    one.beat()
    assert one.active == {"0": [*range(6)], "1": [*range(6)]}


def test_standbys_are_in_other_processes_and_follow_the_groups_setting() -> None:
    rig = new_rig()
    one, two = Client(rig, "one"), Client(rig, "two")
    one.beat()
    two.beat()
    settle(one, two)
    assert one.standby == two.standby == {}
    rig.group_configs["g"] = {"streams.num.standby.replicas": "1"}
    settle(one, two)
    assert set(one.standby.get("1", ())) == set(two.active.get("1", ()))
    assert set(two.standby.get("1", ())) == set(one.active.get("1", ()))
    assert "0" not in one.standby  # it has no state


def test_a_request_to_shut_down_reaches_all_members() -> None:
    rig = new_rig()
    one, two = Client(rig, "one"), Client(rig, "two")
    one.beat()
    two.beat()
    one.beat(shutdown_application=True)
    assert StatusCode.SHUTDOWN_APPLICATION in codes(two.beat())
    one.leave()
    two.leave()
    assert codes(Client(rig, "three").beat()) == set()


def test_endpoints_are_told_with_the_partitions_behind_them() -> None:
    rig = new_rig()
    one = Client(rig, "one")
    answer = one.beat(user_endpoint=Endpoint(host="h", port=1))
    (row,) = answer.partitions_by_user_endpoint
    assert (row.user_endpoint.host, row.user_endpoint.port) == ("h", 1)
    assert {each.topic: each.partitions for each in row.active_partitions} == {
        "t": [0, 1, 2, 3],
        REPARTITION: [0, 1, 2, 3],
    }
    known = answer.endpoint_information_epoch
    assert (
        one.beat(endpoint_information_epoch=known).partitions_by_user_endpoint is None
    )


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"member_id": ""}, E.INVALID_REQUEST),
        ({"group_id": ""}, E.INVALID_REQUEST),
        ({"rack_id": ""}, E.INVALID_REQUEST),
        ({"rebalance_timeout_ms": -1}, E.INVALID_REQUEST),
        ({"topology": None}, E.INVALID_REQUEST),
        ({"active_tasks": rows({"0": [0]})}, E.INVALID_REQUEST),
        ({"active_tasks": None}, E.INVALID_REQUEST),
        ({"instance_id": "i"}, E.INVALID_REQUEST),
        ({"task_offsets": []}, E.INVALID_REQUEST),
        ({"member_epoch": -3, "topology": None}, E.INVALID_REQUEST),
        ({"member_epoch": -2, "topology": None}, E.INVALID_REQUEST),
        ({"member_epoch": 1}, E.INVALID_REQUEST),
        ({"member_epoch": 1, "topology": None}, E.GROUP_ID_NOT_FOUND),
        (
            {
                "topology": Topology(
                    subtopologies=[
                        Subtopology(
                            subtopology_id="0",
                            source_topics=["t"],
                            state_changelog_topics=[TopicInfo(name="c", partitions=3)],
                        )
                    ]
                )
            },
            E.STREAMS_INVALID_TOPOLOGY,
        ),
    ],
)
def test_requests_that_make_no_sense_are_refused(
    fields: dict[str, Any], code: E
) -> None:
    rig = new_rig()
    assert Client(rig, "one").send(**fields).error_code == code
    assert rig.log == []
    assert described(rig).error_code == E.GROUP_ID_NOT_FOUND


def test_a_refused_request_changes_nothing() -> None:
    rig = new_rig()
    one = Client(rig, "one")
    one.beat()
    records = len(rig.log)
    for tasks in ({"9": [0]}, {"0": [4]}, {"0": [-1]}):
        answer = one.send(active_tasks=rows(tasks), rack_id="new")
        assert answer.error_code == E.INVALID_REQUEST
    other = topology()
    other.subtopologies[0].source_topics.append("u")
    late = Client(rig, "two").send(topology=other)
    assert (late.error_code, late.error_message) == (
        E.INVALID_REQUEST,
        "Topology updates are not supported yet.",
    )
    assert len(rig.log) == records


def test_a_member_with_an_older_topology_is_told_so() -> None:
    rig = new_rig()
    Client(rig, "one").beat(topology=topology(epoch=1))
    assert codes(Client(rig, "two").beat()) == {StatusCode.STALE_TOPOLOGY}


def test_a_topology_that_fits_in_no_record_or_names_no_topic_is_refused() -> None:
    rig = new_rig()
    one = Client(rig, "one")
    large = topology()
    large.subtopologies[0].source_topics = [f"{n:0200}" for n in range(6000)]
    assert one.send(topology=large).error_code == E.UNKNOWN_SERVER_ERROR
    tags = [KeyValue(key=f"{n}", value="v" * 30_000) for n in range(60)]
    assert one.send(client_tags=tags).error_code == E.UNKNOWN_SERVER_ERROR
    for name in ("__consumer_offsets", "no/topic", ""):
        named = topology()
        named.subtopologies[0].source_topics = [name]
        assert one.send(topology=named).error_code == E.STREAMS_INVALID_TOPOLOGY
    crowded = topology()
    crowded.subtopologies[0].repartition_sink_topics *= 10_000
    assert one.send(topology=crowded).error_code == E.STREAMS_INVALID_TOPOLOGY
    negative = topology()
    negative.subtopologies[1].repartition_source_topics[0].partitions = -1
    assert one.send(topology=negative).error_code == E.STREAMS_INVALID_TOPOLOGY
    assert rig.log == []
    many = topology()
    many.subtopologies[1].repartition_source_topics[0].partitions = 2_000_000_000
    (status,) = one.send(topology=many).status
    assert "2000000004 tasks, more than 50000" in status.status_detail
    many = topology()
    many.subtopologies[1].repartition_source_topics[0].partitions = 20_000
    (status,) = Client(rig, "two", group="h").send(topology=many).status
    assert "40000 partitions are more than the 10000" in status.status_detail


def test_no_record_is_larger_than_a_batch_may_be() -> None:
    rig = new_rig()
    # The texts alone would fit in the 1,048,588 bytes.
    tags = [KeyValue(key=chr(0x10000 + n), value="") for n in range(262_000)]
    one = Client(rig, "one")
    assert one.send(client_tags=tags).error_code == E.UNKNOWN_SERVER_ERROR
    # The record of tasks to give up has each id twice.
    ids = [f"{n:03}" + "s" * 30_000 for n in range(34)]
    subtopologies = [Subtopology(subtopology_id=i, source_topics=["t"]) for i in ids]
    large = Topology(subtopologies=subtopologies)
    assert one.send(topology=large).error_code == E.UNKNOWN_SERVER_ERROR
    assert rig.log == []


class Denied:
    """Stands for the rights of a client that has none."""

    def may_cluster(self, *args: Any, **options: Any) -> bool:
        return False

    def may_topic(self, *args: Any, **options: Any) -> bool:
        return False


def test_the_texts_of_an_answer_fit_in_strings_of_the_protocol() -> None:
    rig = new_rig()
    rig.access_of = lambda client: Denied()  # type: ignore[assignment,method-assign]
    changelogs = [TopicInfo(name=f"{n:0200}-changelog") for n in range(500)]
    many = Topology(
        subtopologies=[
            Subtopology(
                subtopology_id="0",
                source_topics=["t"],
                state_changelog_topics=changelogs,
            )
        ]
    )
    (status,) = Client(rig, "one").beat(topology=many).status
    assert "Unauthorized to CREATE" in status.status_detail
    assert len(status.status_detail) == 8000


def test_a_group_that_asks_for_more_replicas_is_told_that_there_are_none() -> None:
    rig = new_rig()
    asks = topology()
    asks.subtopologies[1].state_changelog_topics[0].replication_factor = 3
    (status,) = Client(rig, "one").beat(topology=asks).status
    assert f"{CHANGELOG} (replication factor 3" in status.status_detail


def test_each_revocation_has_a_time_of_its_own() -> None:
    rig = new_rig(session_timeout_ms=90_000)
    one, two, three = (Client(rig, name) for name in ("one", "two", "three"))
    one.beat()
    two.beat()
    one.beat()  # must give tasks up
    rig.advance(55_000)
    three.beat()
    one.beat()  # has given them up, and must give up more
    rig.advance(30_000)
    assert one.beat().error_code == E.NONE
    settle(one, two, three)
    assert len({one.epoch, two.epoch, three.epoch}) == 1


@pytest.mark.parametrize("step", ["join", "leave", "expire"])
def test_no_task_is_lost_wherever_the_log_ends(step: str) -> None:
    rig = new_rig()
    one, two = Client(rig, "one"), Client(rig, "two")
    one.beat()
    if step != "join":
        two.beat()
        settle(one, two)
    before = len(rig.log)
    if step == "join":
        two.beat()
    elif step == "leave":
        two.leave()
    else:
        rig.advance(30_000)
        one.beat()
        rig.advance(20_000)
    whole = list(rig.log)
    assert len(whole) > before
    for end in range(before, len(whole) + 1):
        rig.log = whole[:end]
        rig.restart()
        clients = [Client(rig, "one")]
        if "two" in rig.coordinator.group("g").members:
            clients.append(Client(rig, "two"))
        settle(*clients)
        wanted = {(i, n) for i in "01" for n in range(4)}
        reported = {
            (i, n) for each in clients for i, ns in each.active.items() for n in ns
        }
        assert reported == wanted, f"{end - before} of {len(whole) - before} records"


def test_a_full_group_takes_no_more_members() -> None:
    rig = new_rig(max_size=1)
    one = Client(rig, "one")
    one.beat()
    assert Client(rig, "two").send().error_code == E.GROUP_MAX_SIZE_REACHED
    assert Client(rig, "one").send().error_code == E.NONE


def test_members_commit_in_their_epoch_and_offsets_outlive_them() -> None:
    rig = new_rig()
    one = Client(rig, "one")
    one.beat()
    assert rig.commit({("t", 0): 5}, member_id="one", generation=2, version=9) == {
        ("t", 0): 0
    }
    stale = rig.commit({("t", 0): 6}, member_id="one", generation=1, version=9)
    assert stale == {("t", 0): E.STALE_MEMBER_EPOCH}
    unknown = rig.commit({("t", 0): 6}, member_id="two", generation=2, version=9)
    assert unknown == {("t", 0): E.UNKNOWN_MEMBER_ID}
    old = rig.commit({("t", 0): 6}, member_id="one", generation=2, version=8)
    assert old == {("t", 0): E.UNSUPPORTED_VERSION}
    one.leave()
    rig.restart()
    assert rig.fetch() == {("t", 0): 5}


def test_a_commit_of_the_epoch_before_counts_for_tasks_that_the_member_had() -> None:
    rig = new_rig()
    one, two = Client(rig, "one"), Client(rig, "two")
    one.beat()
    two.beat()
    settle(one, two)
    assert (one.epoch, two.epoch) == (3, 3)

    def commit(number: int, member: str, epoch: int, version: int = 9) -> int:
        where = ("t", number)
        found = rig.commit(
            {where: 7}, member_id=member, generation=epoch, version=version
        )
        return found[where]

    kept, gained = one.active["0"][0], two.active["0"][0]
    for version in (9, 10):
        assert commit(kept, "one", 2, version) == E.NONE
        assert commit(gained, "one", 2, version) == E.STALE_MEMBER_EPOCH
        assert commit(gained, "two", 3, version) == E.NONE
        assert commit(gained, "two", 2, version) == E.STALE_MEMBER_EPOCH
        assert commit(kept, "one", 4, version) == E.STALE_MEMBER_EPOCH


def test_an_id_belongs_to_one_kind_of_group() -> None:
    rig = new_rig()
    one = Client(rig, "one")
    one.beat()
    request = ConsumerGroupHeartbeatRequest(
        group_id="g",
        member_id="c",
        rebalance_timeout_ms=1000,
        subscribed_topic_names=["t"],
        topic_partitions=[],
    )
    answer = rig.ask("consumer_group_heartbeat", request, 1)
    assert answer.error_code == E.GROUP_ID_NOT_FOUND
    joined = rig.answer(rig.join("m", group="g"))
    assert joined.error_code == E.INCONSISTENT_GROUP_PROTOCOL
    assert rig.heartbeat("one", 2) == E.UNKNOWN_MEMBER_ID
    (listed,) = rig.ask("list_groups", ListGroupsRequest(), 5).groups
    assert (listed.group_type, listed.protocol_type) == ("streams", "streams")
    delete = DeleteGroupsRequest(groups_names=["g"])
    (row,) = rig.ask("delete_groups", delete, 2).results
    assert row.error_code == E.NON_EMPTY_GROUP
    one.leave()
    (row,) = rig.ask("delete_groups", delete, 2).results
    assert row.error_code == E.NONE
    rig.restart()
    assert described(rig).error_code == E.GROUP_ID_NOT_FOUND


def test_an_empty_classic_group_becomes_a_streams_group_and_back() -> None:
    rig = new_rig()
    assert rig.commit({("t", 1): 9}) == {("t", 1): 0}
    one = Client(rig, "one")
    one.beat()
    assert rig.fetch() == {("t", 1): 9}
    rig.restart()
    assert described(rig).group_state == "Stable"
    one.beat()
    one.leave()
    (member,) = rig.stable(1)
    assert rig.heartbeat(member, rig.group().generation_id) == 0
    rig.restart()
    assert rig.fetch() == {("t", 1): 9}
    assert rig.group().type_name == "classic"


def owners(rig: Rig) -> Counter[tuple[str, int]]:
    """Count the members that have each active task, or have not given it up."""
    group = rig.coordinator.group("g")
    if group is None:
        return Counter()
    return Counter(
        (i, n)
        for member in group.members.values()
        for tasks in (member.assigned.active, member.pending_revocation.active)
        for i, numbers in tasks.items()
        for n in numbers
    )


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["beat", "beat", "beat", "leave", "restart", "standbys"]),
            st.integers(0, 3),
        ),
        max_size=40,
    )
)
def test_no_task_is_with_two_members_whatever_they_do(
    steps: list[tuple[str, int]],
) -> None:
    rig = new_rig()
    clients: dict[int, Client] = {}
    for step, number in steps:
        if step == "beat":
            client = clients.setdefault(
                number, Client(rig, f"m{number}", f"p{number % 2}")
            )
            assert client.beat().error_code == E.NONE
        elif step == "leave" and number in clients:
            clients.pop(number).leave()
        elif step == "restart":
            rig.restart()
        elif step == "standbys":
            rig.group_configs["g"] = {"streams.num.standby.replicas": str(number % 2)}
        assert set(owners(rig).values()) <= {1}
    settle(*clients.values())
    if clients:
        wanted = {(i, n) for i in "01" for n in range(4)}
        assert set(owners(rig)) == wanted
        assert described(rig).group_state == "Stable"
        reported = Counter(
            (i, n)
            for each in clients.values()
            for i, numbers in each.active.items()
            for n in numbers
        )
        assert reported == Counter(wanted)

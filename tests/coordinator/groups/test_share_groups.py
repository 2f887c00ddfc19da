"""The members of share groups (KIP-932), heartbeat by heartbeat."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.coordinator.groups.assignors import MemberSpec, assign_simple
from mpbroker.protocol.error_code import ErrorCode as E
from mpbroker.protocol.messages.consumer_group_heartbeat import (
    ConsumerGroupHeartbeatRequest,
)
from mpbroker.protocol.messages.delete_groups import DeleteGroupsRequest
from mpbroker.protocol.messages.list_groups import ListGroupsRequest
from mpbroker.protocol.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
)
from mpbroker.protocol.messages.share_group_describe import ShareGroupDescribeRequest
from mpbroker.protocol.messages.share_group_heartbeat import (
    ShareGroupHeartbeatRequest,
)
from tests.coordinator.rig import Rig

T, U = b"t".ljust(16, b"\0"), b"u".ljust(16, b"\0")


def beat(rig: Rig, member: str, epoch: int, *topics: str, group: str = "g") -> Any:
    request = ShareGroupHeartbeatRequest(
        group_id=group,
        member_id=member,
        member_epoch=epoch,
        subscribed_topic_names=list(topics) if topics or epoch == 0 else None,
    )
    return rig.ask("share_group_heartbeat", request, 1)


def given_to(answer: Any) -> dict[bytes, list[int]] | None:
    if answer.assignment is None:
        return None
    return {row.topic_id: row.partitions for row in answer.assignment.topic_partitions}


def described(rig: Rig, group: str = "g") -> Any:
    request = ShareGroupDescribeRequest(group_ids=[group])
    return rig.ask("share_group_describe", request, 1).groups[0]


def test_members_share_the_partitions_and_are_told_of_changes() -> None:
    rig = Rig()
    first = beat(rig, "a", 0, "t")
    assert (first.error_code, first.member_epoch) == (0, 1)
    assert first.heartbeat_interval_ms == 5000
    assert given_to(first) == {T: [0, 1, 2, 3]}
    second = beat(rig, "b", 0, "t")
    assert given_to(second) == {T: [1, 3]}
    told = beat(rig, "a", 1)
    assert (told.member_epoch, given_to(told)) == (2, {T: [0, 2]})
    assert given_to(beat(rig, "a", 2)) is None
    assert beat(rig, "b", -1).member_epoch == -1
    assert given_to(beat(rig, "a", 2)) == {T: [0, 1, 2, 3]}
    rig.topics.counts["t"] = 5
    assert given_to(beat(rig, "a", 3)) == {T: [0, 1, 2, 3, 4]}


def test_an_answer_that_was_lost_is_given_again() -> None:
    rig = Rig()
    beat(rig, "a", 0, "t")
    beat(rig, "b", 0, "t")
    assert beat(rig, "a", 1).member_epoch == 2
    assert beat(rig, "a", 1).error_code == 0  # its epoch before
    beat(rig, "b", -1)
    beat(rig, "a", 2)
    assert beat(rig, "a", 1).error_code == E.FENCED_MEMBER_EPOCH
    assert beat(rig, "a", 9).error_code == E.FENCED_MEMBER_EPOCH
    again = beat(rig, "a", 0, "t")
    assert (again.member_epoch, given_to(again)) == (3, {T: [0, 1, 2, 3]})


@pytest.mark.parametrize(
    ("member", "epoch", "topics"), [("", 0, ("t",)), ("a", 0, ()), ("a", -2, ())]
)
def test_requests_that_say_too_little_are_refused(
    member: str, epoch: int, topics: tuple[str, ...]
) -> None:
    assert beat(Rig(), member, epoch, *topics).error_code == E.INVALID_REQUEST


def test_unknown_members_and_groups_are_told() -> None:
    rig = Rig(group_share_max_size=1)
    assert beat(rig, "a", 1).error_code == E.GROUP_ID_NOT_FOUND
    beat(rig, "a", 0, "t")
    assert beat(rig, "b", 1).error_code == E.UNKNOWN_MEMBER_ID
    assert beat(rig, "b", -1).error_code == E.UNKNOWN_MEMBER_ID
    assert beat(rig, "b", 0, "t").error_code == E.GROUP_MAX_SIZE_REACHED
    assert described(rig, "no").error_code == E.GROUP_ID_NOT_FOUND


def test_a_silent_member_is_removed_and_sessions_outlive_a_death() -> None:
    rig = Rig(group_share_session_timeout_ms=10_000)
    beat(rig, "a", 0, "t")
    beat(rig, "b", 0, "t")
    rig.advance(6000)
    beat(rig, "a", 1)
    rig.restart()
    assert {row.member_id for row in described(rig).members} == {"a", "b"}
    rig.advance(4001)
    assert [row.member_id for row in described(rig).members] == ["a"]
    rig.advance(6000)
    assert described(rig).group_state == "Empty"
    rig.restart()
    assert (described(rig).group_state, described(rig).members) == ("Empty", [])


def test_a_heartbeat_during_a_load_begins_the_session_anew() -> None:
    rig = Rig(group_share_session_timeout_ms=10_000)
    for member in ("alive", "heard", "silent"):
        beat(rig, member, 0, "t")
    rig.advance(9000)
    beat(rig, "alive", 1)
    codes = []
    rig.restart(lambda: codes.append(beat(rig, "heard", 2).error_code))
    assert codes == [E.COORDINATOR_LOAD_IN_PROGRESS]
    rig.advance(3000)
    assert {row.member_id for row in described(rig).members} == {"alive", "heard"}


def test_a_successor_knows_groups_members_and_assignments() -> None:
    rig = Rig()
    beat(rig, "a", 0, "t", "u")
    beat(rig, "b", 0, "u")
    beat(rig, "a", 1)
    before = described(rig)
    assert before.assignor_name == "simple"
    rig.restart()
    assert described(rig) == before
    assert beat(rig, "a", 2).error_code == 0
    group = rig.coordinator.share_group("g")
    assert group.initialized == {T: ("t", {0, 1, 2, 3}), U: ("u", {0, 1})}


def test_an_id_is_of_one_kind_of_group() -> None:
    rig = Rig()
    beat(rig, "a", 0, "t")
    consumer = ConsumerGroupHeartbeatRequest(
        group_id="g",
        member_id="c",
        member_epoch=0,
        rebalance_timeout_ms=1000,
        subscribed_topic_names=["t"],
        topic_partitions=[],
    )
    refused = rig.ask("consumer_group_heartbeat", consumer, 1)
    assert refused.error_code == E.GROUP_ID_NOT_FOUND
    joined = rig.answer(rig.join())
    assert joined.error_code == E.INCONSISTENT_GROUP_PROTOCOL
    fetch = OffsetFetchRequest(
        groups=[OffsetFetchRequestGroup(group_id="g", topics=None)]
    )
    offsets = rig.ask("offset_fetch", fetch, 8)
    assert offsets.groups[0].error_code == E.GROUP_ID_NOT_FOUND
    rig.answer(rig.join(group="classic", member_id=""))
    assert beat(rig, "a", 0, "t", group="classic").error_code in (
        0,  # no member was kept: it was only given an id
        E.GROUP_ID_NOT_FOUND,
    )


def test_share_groups_are_listed_by_type_and_deleted_when_empty() -> None:
    rig = Rig()
    deleted: list[str] = []

    def delete_states(group_id: str) -> tuple[int, ...]:
        deleted.append(group_id)
        return ()

    rig.coordinator.delete_share_states = delete_states
    beat(rig, "a", 0, "t")
    request = ListGroupsRequest(states_filter=[], types_filter=["share"])
    (row,) = rig.ask("list_groups", request, 5).groups
    assert (row.group_id, row.group_type, row.group_state) == ("g", "share", "Stable")
    assert row.protocol_type == "share"
    request = ListGroupsRequest(states_filter=[], types_filter=["classic"])
    assert rig.ask("list_groups", request, 5).groups == []
    delete = DeleteGroupsRequest(groups_names=["g"])
    assert rig.ask("delete_groups", delete, 2).results[0].error_code == (
        E.NON_EMPTY_GROUP
    )
    beat(rig, "a", -1)
    assert rig.ask("delete_groups", delete, 2).results[0].error_code == 0
    assert deleted == ["g"]
    rig.restart()
    assert described(rig).error_code == E.GROUP_ID_NOT_FOUND


@given(
    wanted=st.lists(
        st.frozensets(st.sampled_from([b"1", b"2", b"3"])), min_size=1, max_size=7
    ),
    counts=st.fixed_dictionaries({each: st.integers(1, 6) for each in (b"1", b"2")}),
)
def test_each_partition_has_a_member_and_members_have_what_they_want(
    wanted: list[frozenset[bytes]], counts: dict[bytes, int]
) -> None:
    members = [
        MemberSpec(f"m{number}", None, topics & frozenset(counts), {})
        for number, topics in enumerate(wanted)
    ]
    shares = assign_simple(members, counts)
    for member in members:
        assert shares[member.member_id].keys() <= member.topics
        if member.topics:
            assert shares[member.member_id]
    for topic, count in counts.items():
        if any(topic in member.topics for member in members):
            given_out = [share.get(topic, set()) for share in shares.values()]
            assert set().union(*given_out) == set(range(count))
    if len({member.topics for member in members}) == 1:
        sizes = [sum(map(len, share.values())) for share in shares.values()]
        assert max(sizes) - min(sizes) <= 1

"""The classic protocol, request by request: it answers as Kafka does.

A refused request changes nothing."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest

from mpbroker.coordinator.groups import pending_members
from mpbroker.coordinator.groups.classic_group import (
    PREVIOUS_STATES,
    ClassicGroup,
    ClassicGroupState,
    IllegalGroupTransitionError,
)
from mpbroker.coordinator.groups.group_records import GroupMetadataValue, read_record
from mpbroker.coordinator.outbox import Call, appended_to
from mpbroker.coordinator.waiting_calls import WaitingCalls
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.join_group import (
    JoinGroupRequest,
    JoinGroupRequestProtocol,
)
from mpbroker.protocol.messages.leave_group import LeaveGroupRequest, MemberIdentity
from tests.coordinator.rig import Rig, subscription

S = ClassicGroupState


@pytest.mark.parametrize(("before", "after"), list(product(S, S)))
def test_only_the_listed_transitions_exist(before, after):
    group = ClassicGroup("g", 0, before)
    if before in PREVIOUS_STATES[after]:
        group.transition_to(after, 5)
        assert (group.state, group.previous_state) == (after, before)
        assert group.state_timestamp_ms == 5
    else:
        with pytest.raises(IllegalGroupTransitionError):
            group.transition_to(after, 5)
        assert group.state is before


# -- joining ---------------------------------------------------------------------------


def test_a_new_member_is_given_an_id_and_joins_with_it(rig):
    member_id = rig.new_id(client="me")
    assert member_id.startswith("me-")
    joined = rig.answer(rig.join(member_id))
    assert joined.error_code == 0
    assert joined.generation_id == 1
    assert joined.leader == joined.member_id == member_id
    assert joined.protocol_name == "range"
    assert [(m.member_id, m.metadata) for m in joined.members] == [
        (member_id, subscription("t"))
    ]
    assert rig.group().is_in(S.COMPLETING_REBALANCE)


def test_an_old_client_joins_without_an_id(rig):
    joined = rig.answer(rig.join(version=3))
    assert joined.error_code == 0
    assert joined.member_id == joined.leader


@pytest.mark.parametrize(
    ("version", "is_static"), [(3, False), (5, False), (5, True), (9, True)]
)
@pytest.mark.parametrize("name", ["x" * 32767, "ö" * 16383], ids=["x", "ö"])
def test_the_id_of_a_member_with_a_very_long_name_can_be_answered(
    rig, version, name, is_static
):
    instance = name if is_static else None
    first = rig.answer(rig.join(version=version, client=name, instance=instance))
    joined = first
    if first.error_code == ErrorCode.MEMBER_ID_REQUIRED:
        joined = rig.answer(rig.join(first.member_id, version=version, client=name))
    assert joined.error_code == 0
    assert first.member_id.startswith(name[:8000])
    assert joined.encode(5)  # in the versions with the shortest strings
    assert rig.answer(rig.sync(joined.member_id, 1, {})).error_code == 0  # in the log


def test_a_member_that_never_comes_back_with_its_id_is_forgotten(rig):
    member_id = rig.new_id(session_ms=6000)
    assert rig.group().pending_join_members == {member_id}
    rig.advance(6000)
    assert rig.group() is None  # nobody else has ever known of it
    assert rig.answer(rig.join(member_id)).error_code == ErrorCode.UNKNOWN_MEMBER_ID


def test_a_group_of_members_stays_when_a_pending_one_is_forgotten(rig):
    rig.stable(1, session_ms=30_000)
    rig.new_id(session_ms=6000)
    rig.advance(6000)
    assert not rig.group().pending_join_members
    assert rig.group().is_in(S.STABLE)
    rig.commit({("t", 0): 1}, group="simple")
    rig.new_id(group="simple", session_ms=6000)
    rig.advance(6000)
    assert rig.fetch("simple") == {("t", 0): 1}


def test_pending_members_of_all_groups_are_limited(rig, monkeypatch):
    """A client could have millions for half an hour, each with a group of its own."""
    monkeypatch.setattr(pending_members, "MAX_PENDING_MEMBERS", 3)
    ids = [rig.new_id(group=f"g{number}") for number in range(5)]
    assert [rig.group(f"g{number}") is None for number in range(5)] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert len(rig.timers) == 3
    late = rig.answer(rig.join(ids[0], group="g0"))
    assert late.error_code == ErrorCode.UNKNOWN_MEMBER_ID
    assert rig.answer(rig.join(ids[4], group="g4")).error_code == 0


def test_the_bytes_of_pending_members_are_limited(rig, monkeypatch):
    monkeypatch.setattr(pending_members, "_MAX_BYTES", 10_000)
    for number in range(5):
        rig.new_id(group=f"g{number}", client="c" * 4000)
    left = [rig.group(f"g{number}") is not None for number in range(5)]
    assert left == [False, False, False, True, True]


def test_pending_members_count_for_group_max_size():
    rig = Rig(group_max_size=2)
    first, second = rig.new_id(), rig.new_id()
    refused = rig.answer(rig.join())
    assert refused.error_code == ErrorCode.GROUP_MAX_SIZE_REACHED
    rig.join(first)
    refused = rig.answer(rig.join())
    assert refused.error_code == ErrorCode.GROUP_MAX_SIZE_REACHED
    rig.leave(second)
    rig.new_id()


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"group": ""}, ErrorCode.INVALID_GROUP_ID),
        ({"session_ms": 5999}, ErrorCode.INVALID_SESSION_TIMEOUT),
        ({"session_ms": 1_800_001}, ErrorCode.INVALID_SESSION_TIMEOUT),
        ({"member_id": "stranger"}, ErrorCode.UNKNOWN_MEMBER_ID),
        ({"protocols": {}}, ErrorCode.INCONSISTENT_GROUP_PROTOCOL),
        ({"protocol_type": ""}, ErrorCode.INCONSISTENT_GROUP_PROTOCOL),
    ],
)
@pytest.mark.parametrize("version", range(10))
def test_a_join_that_cannot_be_is_refused_and_leaves_no_group(
    rig, version, wrong, code
):
    answer = rig.answer(rig.join(**wrong, version=version))
    assert answer.error_code == code
    assert answer.generation_id == -1
    assert len(rig.coordinator) == 0
    assert not rig.log


@pytest.mark.parametrize(
    "wrong", [{"protocols": {"other": b""}}, {"protocol_type": "connect"}]
)
def test_a_member_with_nothing_in_common_is_refused(rig, wrong):
    rig.stable(2)
    answer = rig.answer(rig.join(**wrong))
    assert answer.error_code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    assert rig.group().is_in(S.STABLE)


def test_the_protocol_is_the_one_that_most_members_prefer(rig):
    rig = Rig(group_initial_rebalance_delay_ms=100)
    both = {"a": b"1", "b": b"2"}
    calls = [
        rig.join(rig.new_id(protocols=each), protocols=each)
        for each in (both, {"b": b"", "a": b""}, {"b": b"", "a": b"", "c": b""})
    ]
    rig.advance(200)
    assert {rig.answer(call).protocol_name for call in calls} == {"b"}


def test_a_second_member_makes_the_first_join_again(rig):
    (first,) = rig.stable(1)
    second = rig.new_id()
    waits = rig.join(second)
    assert not waits.answered
    assert rig.group().is_in(S.PREPARING_REBALANCE)
    assert rig.heartbeat(first, 1) == ErrorCode.REBALANCE_IN_PROGRESS
    again = rig.answer(rig.join(first))
    joined = rig.answer(waits)
    assert again.generation_id == joined.generation_id == 2
    assert again.leader == joined.leader == first
    assert {m.member_id for m in again.members} == {first, second}
    assert joined.members == []


def test_a_member_that_does_not_join_again_in_time_is_removed(rig):
    first, second = rig.stable(2, rebalance_ms=20_000, session_ms=60_000)
    waits = rig.join(rig.new_id(session_ms=60_000), session_ms=60_000)
    again = rig.join(second, session_ms=60_000)
    rig.advance(19_999)
    assert not waits.answered
    rig.advance(1)
    assert first not in rig.group().members
    assert rig.answer(again).leader == second  # the leader was not among them
    assert len(rig.answer(again).members) == 2
    assert rig.answer(waits).error_code == 0
    assert rig.heartbeat(first, 2) == ErrorCode.UNKNOWN_MEMBER_ID


def test_the_first_members_of_a_group_wait_for_each_other():
    rig = Rig(group_initial_rebalance_delay_ms=3000)
    calls = [rig.join(rig.new_id())]
    rig.advance(2000)
    calls.append(rig.join(rig.new_id()))  # makes the delay start again
    rig.advance(2999)
    assert not any(call.answered for call in calls)
    calls.append(rig.join(rig.new_id()))
    rig.advance(3001)
    rig.advance(3000)
    answers = [rig.answer(call) for call in calls]
    assert {each.generation_id for each in answers} == {1}
    assert len(answers[0].members) == 3


def test_the_delay_has_an_end_however_many_come():
    rig = Rig(group_initial_rebalance_delay_ms=3000)
    calls = [rig.join(rig.new_id(), rebalance_ms=10_000)]
    for _ in range(11):
        rig.advance(1000)
        calls.append(rig.join(rig.new_id(), rebalance_ms=10_000))
    assert calls[0].answered
    assert rig.answer(calls[0]).generation_id == 1


def test_a_stable_follower_that_joins_unchanged_gets_the_same_generation(rig):
    leader, follower = rig.stable(2)
    answer = rig.answer(rig.join(follower))
    assert (answer.generation_id, answer.leader) == (2, leader)
    assert rig.group().is_in(S.STABLE)


@pytest.mark.parametrize("who", ["leader", "changed follower"])
def test_a_join_of_the_leader_or_with_new_metadata_starts_a_rebalance(rig, who):
    leader, follower = rig.stable(2)
    if who == "leader":
        rig.join(leader)
    else:
        rig.join(follower, protocols={"range": subscription("t", "u")})
    assert rig.group().is_in(S.PREPARING_REBALANCE)


def test_no_more_members_than_group_max_size():
    rig = Rig(group_max_size=2)
    rig.stable(2)
    answer = rig.answer(rig.join())
    assert answer.error_code == ErrorCode.GROUP_MAX_SIZE_REACHED
    assert answer.member_id == ""
    assert rig.group().is_in(S.STABLE)


# -- syncing ---------------------------------------------------------------------------


def test_each_member_gets_the_assignment_that_the_leader_sent(rig):
    leader, follower = rig.stable(2)
    sync = rig.answer(rig.sync(follower, 2))
    assert bytes(sync.assignment) == f"for {follower}".encode()
    assert (sync.protocol_type, sync.protocol_name) == ("consumer", "range")
    assert bytes(rig.answer(rig.sync(leader, 2)).assignment).endswith(leader.encode())


def test_followers_wait_for_the_leaders_assignment(rig):
    rig.stable(2)
    leader, follower = rig.group().members
    rig.join(leader)
    rig.join(follower)
    waits = rig.sync(follower, 3)
    assert not waits.answered
    rig.sync(leader, 3, {follower: b"x"})
    assert bytes(rig.answer(waits).assignment) == b"x"
    assert rig.group().is_in(S.STABLE)


def test_a_member_whose_sync_may_not_wait_expires_unless_it_comes_back(rig):
    rig.stable(3)
    leader, gone, back = rig.group().members
    for member in (leader, gone, back):
        rig.join(member)
    assert rig.group().is_in(S.COMPLETING_REBALANCE)
    generation = rig.group().generation_id
    waits = [rig.sync(member, generation) for member in (gone, back)]
    for call in waits:
        call.end_wait()  # its client has hung up, or others need the slot
    rig.advance(1)
    for call in waits:
        assert rig.answer(call).error_code == ErrorCode.REBALANCE_IN_PROGRESS
    rig.advance(5_000)
    again = rig.sync(back, generation)
    rig.heartbeat(leader, generation)
    assert not again.answered
    rig.advance(5_000)
    assert set(rig.group().members) == {leader, back}
    assert rig.answer(again).error_code == ErrorCode.REBALANCE_IN_PROGRESS


def test_a_rebalance_answers_the_members_that_wait_for_an_assignment(rig):
    leader, follower = rig.stable(2)
    rig.join(leader)
    rig.join(follower)
    waits = rig.sync(follower, 3)
    rig.leave(leader)
    assert rig.answer(waits).error_code == ErrorCode.REBALANCE_IN_PROGRESS


def test_a_member_that_joined_and_never_syncs_is_removed(rig):
    leader, follower = rig.stable(2, session_ms=60_000)
    rig.join(leader, session_ms=60_000)
    rig.join(follower, session_ms=60_000)
    rig.sync(leader, 3, {})
    rig.advance(20_000)
    assert follower not in rig.group().members
    assert rig.group().is_in(S.PREPARING_REBALANCE)


LONGEST_MS = 0x7FFF_FFFF  # 24.8 days, which some clients ask for
HALF_AN_HOUR_MS = 1_800_000


def heartbeats(rig: Rig, member_id: str, generation: int, ms: int) -> None:
    """Let time pass while a member sends its heartbeats."""
    for _ in range(ms // 5000):
        rig.advance(5000)
        rig.heartbeat(member_id, generation)


@pytest.mark.parametrize(
    ("sessions", "longest"),
    [({}, HALF_AN_HOUR_MS), ({"group_max_session_timeout_ms": 2_000_000}, 2_000_000)],
)
def test_a_follower_does_not_wait_for_ever_for_a_leader_that_never_syncs(
    sessions, longest
):
    rig = Rig(**sessions)
    leader, follower = rig.stable(2, rebalance_ms=LONGEST_MS)
    rig.join(leader, rebalance_ms=LONGEST_MS)
    rig.join(follower, rebalance_ms=LONGEST_MS)
    waits = rig.sync(follower, 3)
    heartbeats(rig, leader, 3, longest - 5000)
    assert not waits.answered
    heartbeats(rig, leader, 3, 5000)
    assert rig.answer(waits).error_code == ErrorCode.REBALANCE_IN_PROGRESS
    assert list(rig.group().members) == [follower]
    rig.advance(10_000)  # it has gone, too, and its session runs again
    assert rig.group().is_in(S.EMPTY)


def test_a_join_does_not_wait_for_ever_for_a_member_that_never_joins_again(rig):
    (mine,) = rig.stable(1, rebalance_ms=LONGEST_MS)
    other = rig.new_id()
    rig.join(other)
    rig.join(mine, rebalance_ms=LONGEST_MS)
    rig.sync(mine, 2)
    waits = rig.join(mine, rebalance_ms=LONGEST_MS)
    heartbeats(rig, other, 2, HALF_AN_HOUR_MS - 5000)
    assert not waits.answered
    heartbeats(rig, other, 2, 5000)
    assert rig.answer(waits).error_code == 0
    assert list(rig.group().members) == [mine]


# -- requests whose wait was ended: coordinator/waiting_calls.py -----------------------


def test_a_member_whose_join_was_ended_joins_again_and_is_one_member(rig):
    leader, follower = rig.stable(2)
    ended = rig.join(follower, protocols={"range": subscription("u")})
    ended.answered = True
    again = rig.join(follower, protocols={"range": subscription("u")})
    assert not again.answered
    leads = rig.join(leader)
    assert rig.answer(leads).generation_id == rig.answer(again).generation_id
    assert sorted(rig.group().members) == sorted([leader, follower])
    assert ended.request is None  # no second answer


def end_wait(rig, call) -> None:
    """End the wait of a request as the coordinator does."""
    slots = SimpleNamespace(has_claimed=lambda slot: True, must_end=lambda slot: True)
    call.request = SimpleNamespace(slot=1, api_key=int(ApiKey.JOIN_GROUP))
    WaitingCalls(slots, rig.out).executed(1, call)
    call.request = None
    rig.collect()
    rig.advance(0)


@pytest.mark.parametrize("others", [0, 1])
def test_an_old_client_whose_join_was_ended_joins_again_and_is_one_member(rig, others):
    """It has no id yet, with which it could join again."""
    known = rig.stable(others) if others else []
    if not others:
        rig = Rig(group_initial_rebalance_delay_ms=3000)
    ended = rig.join(version=3)
    end_wait(rig, ended)
    assert rig.answer(ended).error_code == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    assert list(rig.group().members) == known
    again = rig.join(version=3)
    for member_id in known:
        rig.join(member_id)
    rig.advance(6000)
    joined = rig.answer(again)
    assert joined.error_code == 0
    assert sorted(rig.group().members) == sorted([*known, joined.member_id])


def test_the_wait_of_an_old_client_that_is_answered_ends_nothing(rig):
    joined = rig.join(version=3)
    member_id = rig.answer(joined).member_id
    joined.end_wait()
    rig.advance(0)
    assert list(rig.group().members) == [member_id]


def test_a_member_whose_sync_was_ended_gets_its_assignment_when_it_asks_again(rig):
    leader, follower = rig.stable(2)
    rig.join(leader, protocols={"range": subscription("u")})
    rig.join(follower)
    ended = rig.sync(follower, 3)
    ended.answered = True
    assert rig.answer(rig.join(follower)).generation_id == 3  # REBALANCE_IN_PROGRESS
    again = rig.sync(follower, 3)
    rig.sync(leader, 3, {follower: b"mine"})
    assert rig.answer(again).assignment == b"mine"
    assert ended.request is None


def test_a_member_that_hung_up_in_its_sync_is_out_after_its_session(rig):
    leader, follower = rig.stable(2)
    rig.join(leader, protocols={"range": subscription("u")})
    rig.join(follower)
    rig.sync(follower, 3).answered = True
    rig.sync(leader, 3, {follower: b"lost"})
    assert follower in rig.group().members
    heartbeats(rig, leader, 3, 10_000)
    assert list(rig.group().members) == [leader]


@pytest.mark.parametrize(
    ("member", "generation", "protocol", "code"),
    [
        ("stranger", 1, "range", ErrorCode.UNKNOWN_MEMBER_ID),
        ("mine", 0, "range", ErrorCode.ILLEGAL_GENERATION),
        ("mine", 2, "range", ErrorCode.ILLEGAL_GENERATION),
        ("mine", 1, "roundrobin", ErrorCode.INCONSISTENT_GROUP_PROTOCOL),
        ("mine", 1, None, ErrorCode.INCONSISTENT_GROUP_PROTOCOL),
    ],
)
def test_a_sync_with_a_wrong_member_generation_or_protocol_is_refused(
    rig, member, generation, protocol, code
):
    (mine,) = rig.stable(1)
    member_id = mine if member == "mine" else member
    call = rig.sync(member_id, generation, {mine: b"stolen"}, protocol=protocol)
    assert rig.answer(call).error_code == code
    assert rig.group().members[mine].assignment != b"stolen"


def test_a_sync_to_no_group_and_during_a_rebalance(rig):
    assert rig.answer(rig.sync("m", 1)).error_code == ErrorCode.UNKNOWN_MEMBER_ID
    (mine,) = rig.stable(1)
    rig.join(rig.new_id())
    call = rig.sync(mine, 1)
    assert rig.answer(call).error_code == ErrorCode.REBALANCE_IN_PROGRESS


# -- heartbeats and sessions -----------------------------------------------------------


def test_a_member_that_is_silent_for_its_session_is_out(rig):
    alive, silent = rig.stable(2, session_ms=10_000)
    for _ in range(4):
        rig.advance(2500)
        code = rig.heartbeat(alive, 2)
    assert silent not in rig.group().members
    assert code == ErrorCode.REBALANCE_IN_PROGRESS
    answer = rig.answer(rig.join(alive))
    assert (answer.generation_id, len(answer.members)) == (3, 1)


def test_the_last_silent_member_leaves_an_empty_group(rig):
    rig.stable(1)
    rig.advance(10_000)
    assert rig.group().is_in(S.EMPTY)
    rig.restart()
    assert rig.group().is_in(S.EMPTY)
    assert rig.group().generation_id == 2


def test_a_member_whose_join_waits_does_not_time_out(rig):
    rig.stable(1, session_ms=60_000, rebalance_ms=50_000)
    (mine,) = rig.group().members
    other = rig.join(rig.new_id(session_ms=6000), session_ms=6000)
    rig.advance(45_000)
    assert not other.answered
    rig.join(mine, session_ms=60_000)
    assert rig.answer(other).error_code == 0


@pytest.mark.parametrize(
    ("member", "generation", "code"),
    [
        ("stranger", 1, ErrorCode.UNKNOWN_MEMBER_ID),
        ("mine", 0, ErrorCode.ILLEGAL_GENERATION),
        ("mine", 7, ErrorCode.ILLEGAL_GENERATION),
        ("mine", 1, ErrorCode.NONE),
    ],
)
def test_a_heartbeat_is_of_a_member_and_its_generation(rig, member, generation, code):
    (mine,) = rig.stable(1)
    assert rig.heartbeat(mine if member == "mine" else member, generation) == code


def test_heartbeats_to_no_group(rig):
    assert rig.heartbeat("m", 1) == ErrorCode.UNKNOWN_MEMBER_ID
    assert rig.heartbeat("m", 1, group="") == ErrorCode.INVALID_GROUP_ID


# -- leaving ---------------------------------------------------------------------------


def test_members_that_leave_are_gone_at_once(rig):
    first, second, third = rig.stable(3)
    answer = rig.leave(first, "stranger", second)
    assert [row.error_code for row in answer.members] == [
        0,
        ErrorCode.UNKNOWN_MEMBER_ID,
        0,
    ]
    assert list(rig.group().members) == [third]
    assert rig.group().leader_id == third


def test_a_leave_before_version_3_has_one_error(rig):
    (mine,) = rig.stable(1)
    for member_id, code in (
        ("stranger", ErrorCode.UNKNOWN_MEMBER_ID),
        (mine, ErrorCode.NONE),
        (mine, ErrorCode.UNKNOWN_MEMBER_ID),
    ):
        request = LeaveGroupRequest(group_id="g", member_id=member_id)
        assert rig.ask("leave_group", request, 2).error_code == code
    assert rig.group().is_in(S.EMPTY)


def test_a_pending_member_that_leaves_is_not_waited_for(rig):
    member_id = rig.new_id()
    assert rig.leave(member_id).members[0].error_code == 0
    assert not rig.group().pending_join_members


@pytest.mark.parametrize("version", [2, 5])
def test_the_leave_of_an_unknown_member_changes_nothing(rig, version):
    ids = rig.stable(2)
    if version < 3:
        request = LeaveGroupRequest(group_id="g", member_id="stranger")
        code = rig.ask("leave_group", request, version).error_code
    else:
        (code,) = (row.error_code for row in rig.leave("stranger").members)
    assert code == ErrorCode.UNKNOWN_MEMBER_ID
    assert rig.group().is_in(S.STABLE)
    for member_id in ids:
        assert rig.heartbeat(member_id, rig.group().generation_id) == ErrorCode.NONE


def test_a_leave_of_no_group(rig):
    answer = rig.leave("m", group="none")
    assert answer.error_code == 0
    assert answer.members[0].error_code == ErrorCode.UNKNOWN_MEMBER_ID


# -- static members --------------------------------------------------------------------


def static_pair(rig):
    """A stable group of two static members: (instance a's id, instance b's id)."""
    one = rig.answer(rig.join(instance="a")).member_id
    waits = rig.join(instance="b")
    rig.join(one, instance="a")
    two = rig.answer(waits).member_id
    rig.sync(two, 2, instance="b")
    rig.sync(one, 2, {one: b"1", two: b"2"}, instance="a")
    assert rig.group().is_in(S.STABLE)
    return one, two


def test_a_static_member_that_comes_back_keeps_its_assignment(rig):
    _, old = static_pair(rig)
    answer = rig.answer(rig.join(instance="b"))
    assert answer.error_code == 0
    assert answer.generation_id == 2
    new = answer.member_id
    assert new != old
    assert new.startswith("b-")
    assert rig.group().is_in(S.STABLE)
    assert bytes(rig.answer(rig.sync(new, 2, instance="b")).assignment) == b"2"
    rig.restart()
    assert rig.heartbeat(new, 2, instance="b") == 0


def test_the_answer_to_a_returning_static_leader_says_to_skip_the_assignment(rig):
    old, _ = static_pair(rig)
    answer = rig.answer(rig.join(instance="a", version=9))
    assert answer.skip_assignment
    assert answer.leader == answer.member_id != old
    assert len(answer.members) == 2


def test_an_old_static_leader_is_not_told_that_it_leads(rig):
    old, _ = static_pair(rig)
    answer = rig.answer(rig.join(instance="a", version=8))
    assert answer.leader == old
    assert answer.members == []


def test_a_member_that_uses_a_replaced_id_is_fenced(rig):
    _, old = static_pair(rig)
    rig.join(instance="b")
    assert rig.heartbeat(old, 2, instance="b") == ErrorCode.FENCED_INSTANCE_ID
    sync = rig.sync(old, 2, instance="b")
    assert rig.answer(sync).error_code == ErrorCode.FENCED_INSTANCE_ID
    codes = rig.commit({("t", 0): 1}, member_id=old, generation=2, instance="b")
    assert codes == {("t", 0): ErrorCode.FENCED_INSTANCE_ID}
    join = rig.join(old, instance="b")
    assert rig.answer(join).error_code == ErrorCode.FENCED_INSTANCE_ID


def test_a_parked_join_of_a_replaced_static_member_is_fenced(rig):
    static_pair(rig)
    waits = rig.join(instance="c")
    new = rig.join(instance="c")
    assert rig.answer(waits).error_code == ErrorCode.FENCED_INSTANCE_ID
    assert not new.answered


def test_static_members_stay_through_a_rebalance_until_their_session_ends(rig):
    one, two = static_pair(rig)
    waits = rig.join(rig.new_id())
    again = rig.join(one, instance="a", session_ms=60_000)
    rig.advance(5000)
    rig.heartbeat(two, 2, instance="b")
    rig.advance(9000)
    assert not waits.answered
    rig.advance(6500)  # the rebalance timeout; and two's session is over too
    assert rig.answer(again).error_code == 0
    assert rig.answer(waits).error_code == 0


def test_an_admin_removes_a_static_member_by_its_instance(rig):
    one, two = static_pair(rig)
    answer = rig.leave(MemberIdentity(member_id="", group_instance_id="b"))
    assert answer.members[0].error_code == 0
    assert list(rig.group().members) == [one]
    answer = rig.leave(MemberIdentity(member_id=two, group_instance_id="a"))
    assert answer.members[0].error_code == ErrorCode.FENCED_INSTANCE_ID


# -- after a restart -------------------------------------------------------------------


def test_a_restart_keeps_members_generation_and_assignments(rig):
    leader, follower = rig.stable(2)
    rig.restart()
    assert rig.heartbeat(follower, 2) == 0
    assert bytes(rig.answer(rig.sync(leader, 2)).assignment).endswith(leader.encode())
    rig.advance(10_000)  # sessions run again
    assert rig.group().is_in(S.EMPTY)


@pytest.mark.parametrize("restarts", [(0,), (1,), (2,), (0, 1, 2)])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_join_that_was_answered_outlives_a_restart(restarts, is_first):
    """Wherever between the answers to the joins and the last sync it happens."""
    rig = Rig(group_initial_rebalance_delay_ms=3000 if is_first else 0)

    def maybe_restart(step):
        if step in restarts:
            rig.restart()

    if is_first:
        leader, follower = rig.new_id(), rig.new_id()
        generation = 1
    else:
        leader, follower = rig.stable(2)
        generation = 3
    joins = [rig.join(leader), rig.join(follower)]
    rig.advance(6000 if is_first else 0)
    answers = {rig.answer(join).generation_id for join in joins}
    assert answers == {generation}
    maybe_restart(0)
    sync = rig.sync(follower, generation)
    maybe_restart(1)
    if not sync.answered and 1 in restarts:
        sync = rig.sync(follower, generation)  # it was parked, and is executed again
    first = rig.sync(leader, generation, {leader: b"x", follower: b"y"})
    assert bytes(rig.answer(first).assignment) == b"x"
    maybe_restart(2)
    assert bytes(rig.answer(sync).assignment) == b"y"
    for member in (leader, follower):
        assert rig.heartbeat(member, generation) == ErrorCode.NONE


def test_joins_are_answered_once_the_generation_is_in_the_log(rig):
    leader, follower = rig.stable(2)
    rig.join(leader)
    call = Call(9, "c", "/host")
    request = JoinGroupRequest(
        group_id="g",
        session_timeout_ms=10_000,
        rebalance_timeout_ms=20_000,
        member_id=follower,
        protocol_type="consumer",
        protocols=[JoinGroupRequestProtocol(name="range", metadata=subscription("t"))],
    )
    rig.coordinator.join_group(call, request, rig.now_ms)
    log = rig.coordinator.partition_for("g")
    assert list(rig.out.records) == [log]
    assert [answer.after for answer in rig.out.answers] == [(appended_to(log),)] * 2


def test_a_join_whose_coordinator_dies_before_the_answer_is_of_its_generation():
    rig = Rig(group_initial_rebalance_delay_ms=3000)
    both = {"range": subscription("t"), "sticky": subscription("t", "u")}
    leader, follower = rig.new_id(), rig.new_id()
    for member in (leader, follower):
        rig.join(member, protocols=both)
    rig.advance(6000)
    rig.restart()
    for member in (leader, follower):
        answer = rig.answer(rig.join(member, protocols=both, parked_ms=5))
        assert (answer.error_code, answer.generation_id) == (ErrorCode.NONE, 1)
    assert rig.group().is_in(S.COMPLETING_REBALANCE)
    other = rig.join(leader, protocols={"range": subscription("u")}, parked_ms=5)
    assert not other.answered  # it subscribes to something else
    assert rig.group().is_in(S.PREPARING_REBALANCE)


def test_a_member_that_sends_no_sync_after_a_restart_is_out(rig):
    leader, follower = rig.stable(2, session_ms=60_000)
    rig.join(leader, session_ms=60_000)
    rig.join(follower, session_ms=60_000)
    rig.restart()
    rig.sync(leader, 3, {leader: b"x"})
    rig.advance(20_000)
    assert list(rig.group().members) == [leader]
    assert rig.heartbeat(leader, 3) == ErrorCode.REBALANCE_IN_PROGRESS


def test_the_record_of_a_generation_without_an_assignment_begins_a_rebalance_in_kafka(
    rig,
):
    """It names a member whose session is over, and that Kafka removes."""
    leader, follower = rig.stable(2)
    rig.join(leader)
    rig.join(follower)
    record = last_record(rig)
    assert (record.generation, record.leader) == (3, leader)
    rows = {row.member_id: row.session_timeout for row in record.members}
    assert rows == {leader: 10_000, follower: 10_000, "": 0}
    assert all(not row.assignment for row in record.members)


# -- ids that were given out, after a restart ------------------------------------------


def test_an_id_that_was_given_out_outlives_a_restart(rig):
    new = rig.new_id()
    rig.advance(1000)
    rig.restart()
    assert rig.answer(rig.join("stranger")).error_code == ErrorCode.UNKNOWN_MEMBER_ID
    answer = rig.answer(rig.join(new))
    assert (answer.error_code, answer.member_id) == (ErrorCode.NONE, new)


@pytest.mark.parametrize("restarts", [1, 2])
def test_an_id_that_has_ended_is_unknown_after_a_restart(rig, restarts):
    mine, left = rig.stable(2)
    expired, returned = rig.new_id(session_ms=10_000), rig.new_id()
    rig.leave(left)
    rig.leave(returned)
    rig.advance(10_000)
    for _ in range(restarts):
        rig.restart(lambda: rig.heartbeat(left, 2))
    for member_id in (mine, left, expired, returned):
        answer = rig.answer(rig.join(member_id))
        assert answer.error_code == ErrorCode.UNKNOWN_MEMBER_ID


# -- members that have gone, after a restart -------------------------------------------


def last_record(rig: Rig) -> GroupMetadataValue:
    read = read_record(*rig.log[-1][1:])
    assert read is not None
    assert isinstance(read[1], GroupMetadataValue)
    return read[1]


def test_a_member_that_has_left_stays_away_after_a_restart(rig):
    leader, second, third = rig.stable(3)
    rig.leave(leader)
    rig.restart()
    assert list(rig.group().members) == [second, third]
    assert rig.heartbeat(leader, 2) == ErrorCode.UNKNOWN_MEMBER_ID
    # The others are told to join again, as if the coordinator had lived.
    assert rig.heartbeat(second, 2) == ErrorCode.REBALANCE_IN_PROGRESS
    codes = rig.commit({("t", 0): 1}, member_id=third, generation=2)
    assert codes == {("t", 0): ErrorCode.NONE}
    waits = rig.join(second)
    assert rig.answer(rig.join(third)).generation_id == 3
    assert {row.member_id for row in rig.answer(waits).members} == {second, third}


def test_the_answer_to_a_leave_waits_for_the_groups_record(rig):
    leader, _ = rig.stable(2)
    request = LeaveGroupRequest(
        group_id="g", members=[MemberIdentity(member_id=leader)]
    )
    rig.coordinator.leave_group(Call(5, "c", "/host"), request, rig.now_ms)
    (answer,) = rig.out.answers
    assert (
        answer.after == tuple(rig.out.records) == (rig.coordinator.partition_for("g"),)
    )


def test_members_that_leave_one_after_another_stay_away_after_a_restart(rig):
    first, second, third = rig.stable(3)
    rig.leave(second)
    waits = rig.join(third)
    rig.restart()
    rig.leave(first)
    rig.restart()
    assert not waits.answered
    again = rig.answer(rig.join(third))
    assert (again.generation_id, len(again.members)) == (3, 1)


def test_a_leave_during_a_rebalance_is_in_the_record_and_new_members_are_not(rig):
    leader, follower, leaves = rig.stable(3)
    new = rig.new_id()
    rig.join(new)
    rig.leave(leaves)
    rows = {row.member_id: row.session_timeout for row in last_record(rig).members}
    assert rows == {leader: 10_000, follower: 10_000, leaves: 0}


def test_a_leave_from_a_generation_without_an_assignment_outlives_a_restart(rig):
    leader, follower = rig.stable(2)
    rig.join(leader)
    rig.join(follower)
    rig.sync(follower, 3)
    rig.leave(leader)
    rig.restart()
    sync = rig.sync(follower, 3)
    assert rig.answer(sync).error_code == ErrorCode.REBALANCE_IN_PROGRESS
    assert rig.answer(rig.join(follower)).generation_id == 4


def test_a_member_whose_session_has_ended_stays_away_after_a_restart(rig):
    alive, silent = rig.stable(2, session_ms=10_000)
    rig.advance(9_999)
    rig.heartbeat(alive, 2)
    rig.advance(1)
    rig.restart()
    assert rig.heartbeat(silent, 2) == ErrorCode.UNKNOWN_MEMBER_ID
    assert rig.heartbeat(alive, 2) == ErrorCode.REBALANCE_IN_PROGRESS


def test_a_heartbeat_during_a_load_begins_the_session_anew(rig):
    """Or the member would be out before its next one is due."""
    alive, member, silent = rig.stable(3, session_ms=10_000)
    rig.advance(9000)
    generation = rig.group().generation_id
    codes = [rig.heartbeat(alive, generation)]
    rig.restart(lambda: codes.append(rig.heartbeat(member, generation)))
    assert codes == [ErrorCode.NONE] * 2
    rig.advance(3000)
    assert set(rig.group().members) == {alive, member}
    assert silent not in rig.group().members
    rig.advance(7000)
    assert not rig.group().members


def test_a_member_that_never_synced_stays_away_after_a_restart(rig):
    leader, follower = rig.stable(2, session_ms=60_000)
    rig.join(leader, session_ms=60_000)
    rig.join(follower, session_ms=60_000)
    rig.sync(leader, 3, {})
    rig.advance(20_000)
    rig.restart()
    assert list(rig.group().members) == [leader]
    assert rig.heartbeat(leader, 3) == ErrorCode.REBALANCE_IN_PROGRESS


def test_a_static_member_that_was_replaced_and_removed_stays_away(rig):
    one, _ = static_pair(rig)
    rig.join(rig.new_id())
    rig.join(instance="b")  # under a new id, while the group rebalances
    rig.leave(MemberIdentity(member_id="", group_instance_id="b"))
    gone = last_record(rig).members[-1]
    assert (gone.session_timeout, gone.group_instance_id) == (0, None)
    rig.restart()
    assert rig.group().static_members == {"a": one}


def test_a_group_whose_members_have_all_left_is_empty_after_a_restart(rig):
    (mine,) = rig.stable(1)
    waits = rig.join(rig.new_id())
    rig.new_id()  # it has to come back with this, and the others wait for it
    rig.leave(mine)
    rig.restart()
    assert not waits.answered
    assert rig.group().is_in(S.EMPTY)
    assert rig.answer(rig.join(version=3)).generation_id == 2


# -- joins that were parked when the coordinator was killed ----------------------------


def test_the_first_members_wait_once_however_often_the_coordinator_is_killed():
    rig = Rig(group_initial_rebalance_delay_ms=3000)
    first, second = rig.new_id(), rig.new_id()
    for waited_ms in (500, 1500, 2500, 3500, 4500):
        rig.restart()
        calls = [
            rig.join(first, parked_ms=waited_ms + 500),
            rig.join(second, parked_ms=waited_ms),
        ]
        rig.advance(999)
        # 3 s, and 3 s more because the second has come meanwhile: as without a death.
        assert not any(call.answered for call in calls)
    rig.advance(1)
    joined = [rig.answer(call) for call in calls]
    assert [answer.member_id for answer in joined] == [first, second]
    assert [answer.generation_id for answer in joined] == [1, 1]


def test_a_new_member_keeps_its_id_if_its_join_was_parked(rig):
    (mine,) = rig.stable(1)
    new = rig.new_id()
    rig.join(new)
    rig.restart()
    waits = rig.join(new, parked_ms=1)
    assert rig.heartbeat(mine, 1) == ErrorCode.REBALANCE_IN_PROGRESS
    rig.join(mine)
    assert rig.answer(waits).member_id == new


def test_a_static_member_with_an_unknown_id_is_refused_though_it_was_parked(rig):
    static_pair(rig)
    for group in ("g", "other"):
        answer = rig.answer(rig.join("b-1", instance="b", parked_ms=1, group=group))
        assert answer.error_code in (
            ErrorCode.FENCED_INSTANCE_ID,
            ErrorCode.UNKNOWN_MEMBER_ID,
        )
    assert len(rig.coordinator) == 1


# -- sessions go on --------------------------------------------------------------------


def test_a_dead_member_goes_though_the_coordinator_is_killed_more_often(rig):
    alive, dead = rig.stable(2, session_ms=10_000)
    for _ in range(3):
        rig.advance(3000)
        assert rig.heartbeat(alive, 2) == ErrorCode.NONE
        rig.restart()
    rig.advance(1999)
    assert rig.heartbeat(alive, 2) == ErrorCode.NONE
    rig.advance(1)  # requests that wait for a successor have that long at least
    assert rig.heartbeat(alive, 2) == ErrorCode.REBALANCE_IN_PROGRESS
    assert rig.heartbeat(dead, 2) == ErrorCode.UNKNOWN_MEMBER_ID


def test_the_time_without_a_coordinator_is_no_members_silence(rig):
    one, two = rig.stable(2, session_ms=10_000)
    rig.advance(4000)
    rig.heartbeat(one, 2)
    rig.now_ms += 60_000
    rig.restart()
    rig.advance(5999)
    assert rig.heartbeat(one, 2) == ErrorCode.NONE
    rig.advance(1)
    assert list(rig.group().members) == [one]
    assert rig.heartbeat(two, 2) == ErrorCode.UNKNOWN_MEMBER_ID


def test_a_member_whose_request_was_parked_for_long_has_its_whole_session(rig):
    leader, follower = rig.stable(2, session_ms=10_000, rebalance_ms=60_000)
    rig.join(leader, rebalance_ms=60_000)
    for _ in range(4):
        rig.advance(5000)
        assert rig.heartbeat(follower, 2) == ErrorCode.REBALANCE_IN_PROGRESS
    rig.restart()
    rig.advance(9999)
    assert leader in rig.group().members
    rig.advance(1)
    assert leader not in rig.group().members

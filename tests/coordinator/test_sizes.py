"""Many groups, many members, much metadata: one group does not harm another."""

from __future__ import annotations

import os

from mpbroker.protocol.error_code import ErrorCode
from tests.coordinator.groups.test_consumer_protocol import Consumer, numbers, settle
from tests.coordinator.rig import Rig, subscription

# The broker shall bear 10,000; they take ten seconds and more.
GROUPS = int(os.environ.get("MPBROKER_TEST_GROUPS", "1500"))
MEMBERS = 1_000
# Before MEMBER_ID_REQUIRED: a join each, and not two.
JOIN = 3


def test_thousands_of_groups_live_beside_each_other_and_through_a_death():
    rig = Rig()
    names = [f"g{number}" for number in range(GROUPS)]
    members = {}
    for name in names:
        joined = rig.answer(rig.join(group=name, version=JOIN))
        members[name] = joined.member_id
        rig.sync(joined.member_id, 1, {joined.member_id: b"all"}, group=name, version=3)
    assert rig.commit({("t", 0): 5}, group=names[7], member_id=members[names[7]],
                      generation=1) == {("t", 0): 0}  # fmt: skip
    rig.restart()
    assert len(rig.coordinator) == GROUPS
    rig.advance(6_000)
    for name in names[1:]:
        assert rig.heartbeat(members[name], 1, group=name) == 0
    rig.advance(6_000)  # the first one's session ends, and no other
    assert rig.group(names[0]).state.value == "Empty"
    assert all(rig.group(name).state.value == "Stable" for name in names[1:])
    assert rig.fetch(names[7]) == {("t", 0): 5}


def test_a_thousand_members_share_one_group():
    rig = Rig(group_initial_rebalance_delay_ms=3_000)
    joins = [rig.join(version=JOIN) for _ in range(MEMBERS)]
    rig.advance(10_000)
    answers = [rig.answer(join) for join in joins]
    assert {answer.generation_id for answer in answers} == {1}
    (leader,) = (each for each in answers if each.members)
    assert len(leader.members) == MEMBERS
    ids = [answer.member_id for answer in answers]
    shares = {member_id: member_id.encode() for member_id in ids}
    syncs = {
        member_id: rig.sync(
            member_id, 1, shares if member_id == leader.leader else {}, version=3
        )
        for member_id in ids
    }
    for member_id, sync in syncs.items():
        assert rig.answer(sync).assignment == member_id.encode()
    # One leaves: the others hear of it, and only they are in the next generation.
    gone = ids[MEMBERS // 2]
    assert rig.leave(gone).members[0].error_code == 0
    left = [member_id for member_id in ids if member_id != gone]
    assert rig.heartbeat(left[0], 1) == 27
    again = {"range": subscription("t", "u")}
    joins = [rig.join(member_id, version=JOIN, protocols=again) for member_id in left]
    assert {rig.answer(join).generation_id for join in joins} == {2}
    assert set(rig.group().members) == set(left)


# -- more than a record may be ---------------------------------------------------------


def completing(**config):
    """A group of two whose leader is to say who gets what."""
    rig = Rig(**config)
    ids = [rig.new_id() for _ in range(2)]
    joins = [rig.join(member_id) for member_id in ids]
    joins[0] = rig.join(ids[0])
    answers = [rig.answer(join) for join in joins]
    assert {answer.generation_id for answer in answers} == {2}
    leader = answers[0].leader
    (follower,) = set(ids) - {leader}
    return rig, leader, follower


def test_an_assignment_larger_than_a_record_is_refused_to_all():
    rig, leader, follower = completing()
    written = len(rig.log)
    waits = rig.sync(follower, 2)
    huge = {follower: bytes(rig.config.message_max_bytes)}
    for sync in (rig.sync(leader, 2, huge), waits):
        assert rig.answer(sync).error_code == ErrorCode.UNKNOWN_SERVER_ERROR
        assert rig.answer(sync).assignment == b""
    assert len(rig.log) == written
    assert rig.group().state.value == "PreparingRebalance"
    # And with something smaller all is well.
    joins = [rig.join(leader), rig.join(follower)]
    assert {rig.answer(join).generation_id for join in joins} == {3}
    waits = rig.sync(follower, 3)
    assert rig.answer(rig.sync(leader, 3, {follower: b"a"})).error_code == 0
    assert rig.answer(waits).assignment == b"a"


def test_an_assignment_may_be_as_large_as_a_record():
    rig, leader, follower = completing(message_max_bytes=2_000)
    waits = rig.sync(follower, 2)
    assert rig.answer(rig.sync(leader, 2, {follower: bytes(1_000)})).error_code == 0
    assert rig.answer(waits).assignment == bytes(1_000)
    assert len(rig.log[-1][1]) + len(rig.log[-1][2]) > 1_000


def test_the_longest_names_fit_in_records():
    """Requests have no longer ones: a string is of at most 32,767 bytes."""
    longest = "m" * 32_767
    rig = Rig()
    member = rig.new_id(client=longest)
    assert rig.answer(rig.join(member, client=longest)).generation_id == 1
    assert rig.answer(rig.sync(member, 1, {member: b"all"})).error_code == 0
    assert rig.commit({("t", 0): 5}, group=longest) == {("t", 0): 0}
    rig.restart()
    assert rig.heartbeat(member, 1) == 0


def test_the_longest_member_id_takes_part():
    rig = Rig()
    consumers = [Consumer(rig, name) for name in ("one", "m" * 32_767)]
    settle(*consumers)
    rig.restart()
    settle(*consumers)
    assert sum(len(numbers(each)) for each in consumers) == rig.topics.counts["t"]


def test_a_static_member_that_comes_back_with_more_makes_all_join_again():
    rig = Rig(message_max_bytes=2_000)
    joined = rig.answer(rig.join(instance="i"))
    member = joined.member_id
    sync = rig.sync(member, 1, {member: b"all"}, instance="i")
    assert rig.answer(sync).error_code == 0
    written = len(rig.log)
    huge = {"range": subscription("t") + bytes(3_000)}
    again = rig.answer(rig.join(instance="i", protocols=huge))
    assert (again.error_code, again.generation_id) == (0, 2)
    sync = rig.sync(again.member_id, 2, {again.member_id: b"all"}, instance="i")
    assert rig.answer(sync).error_code == ErrorCode.UNKNOWN_SERVER_ERROR
    assert len(rig.log) == written

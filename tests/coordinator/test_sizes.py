"""Many groups, many members: nothing in one group is paid for by another."""

from __future__ import annotations

import os

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

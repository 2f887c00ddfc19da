"""Groups that change their protocol while their members live (KIP-848, migration)."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mpbroker.coordinator.groups.classic_group import ClassicGroup, ClassicGroupState
from mpbroker.coordinator.groups.consumer_group import ConsumerGroup
from mpbroker.coordinator.groups.consumer_protocol import (
    read_assignment,
    write_assignment,
)
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.consumer_group_describe import (
    ConsumerGroupDescribeRequest,
)
from mpbroker.protocol.messages.leave_group import MemberIdentity
from tests.coordinator.groups.test_consumer_protocol import Consumer, beat, numbers
from tests.coordinator.rig import Rig, subscription

PARTITIONS = 4  # of topic "t"


def joining(owned: list[int], *, cooperative: bool) -> bytes:
    """Return the metadata of a joining consumer: version 1, with its partitions."""
    data = b"\0\1" + subscription("t")[2:]
    if not cooperative:
        return data + bytes(4)
    # An assignment's bytes are a version, owned partitions, user data.
    return data + write_assignment({"t": owned} if owned else {})[2:-4]


class Classic:
    """A consumer of the classic protocol, as in clients, turn by turn."""

    def __init__(self, rig, *, cooperative=False, instance=None):
        self.rig, self.cooperative, self.instance = rig, cooperative, instance
        self.member_id, self.generation = "", -1
        self.owned: set[int] = set()
        self.join_call = self.sync_call = None
        self.must_join = True

    @property
    def protocol(self):
        return "cooperative-sticky" if self.cooperative else "range"

    def turn(self):
        """Send the next request of this client."""
        if self.join_call is not None:
            self._joined()
        elif self.sync_call is not None:
            self._synced()
        elif self.must_join:
            self._join()
        else:
            self._heed(
                self.rig.heartbeat(
                    self.member_id, self.generation, instance=self.instance
                )
            )

    def _join(self):
        if not self.cooperative:
            self.owned = set()  # eager: gives up all before it joins
        said = joining(sorted(self.owned), cooperative=self.cooperative)
        self.join_call = self.rig.join(
            self.member_id, instance=self.instance, protocols={self.protocol: said}
        )
        self._joined()

    def _joined(self):
        if not self.join_call.answered:
            return
        answer, self.join_call = self.rig.answer(self.join_call), None
        if answer.error_code == ErrorCode.MEMBER_ID_REQUIRED:
            self.member_id = answer.member_id
        elif answer.error_code:
            self._heed(answer.error_code)
        else:
            self.member_id, self.generation = answer.member_id, answer.generation_id
            given = {}
            if answer.leader == self.member_id:
                given = self._share_out([row.member_id for row in answer.members])
            self.sync_call = self.rig.sync(
                self.member_id,
                self.generation,
                given,
                instance=self.instance,
                protocol=self.protocol,
            )
            self._synced()

    def _share_out(self, members):
        """Assign as the leader does: only partitions that it knows to be free."""
        if self.cooperative:
            return {}
        shares = {
            member: list(range(PARTITIONS))[rank :: len(members)]
            for rank, member in enumerate(members)
        }
        return {m: write_assignment({"t": share}, 1) for m, share in shares.items()}

    def _synced(self):
        if not self.sync_call.answered:
            return
        answer, self.sync_call = self.rig.answer(self.sync_call), None
        if answer.error_code:
            self._heed(answer.error_code)
            return
        given = set((read_assignment(answer.assignment) or {}).get("t", ()))
        self.must_join = self.cooperative and bool(self.owned - given)
        self.owned = given

    def _heed(self, code):
        if code == ErrorCode.REBALANCE_IN_PROGRESS:
            self.must_join = True
        elif code:
            self.owned, self.must_join, self.generation = set(), True, -1
            if code in (ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.FENCED_INSTANCE_ID):
                self.member_id = ""

    def leave(self):
        self.rig.leave(
            MemberIdentity(member_id=self.member_id, group_instance_id=self.instance)
        )
        self.owned = set()


def turns(*members, count=8):
    for _ in range(count):
        for member in members:
            if isinstance(member, Classic):
                member.turn()
            else:
                member.beat()


def held(member):
    return member.owned if isinstance(member, Classic) else numbers(member)


def shares(*members):
    """Return the partitions of each member; check that each is assigned once."""
    found = [held(member) for member in members]
    assert sorted(n for share in found for n in share) == list(range(PARTITIONS))
    return [len(share) for share in found]


def test_a_new_consumer_upgrades_a_living_classic_group(rig):
    old = Classic(rig)
    turns(old)
    generation = old.generation
    assert rig.commit(
        {("t", 0): 7}, member_id=old.member_id, generation=generation
    ) == {("t", 0): 0}
    new = Consumer(rig, "new")
    assert new.beat().error_code == 0
    group = rig.group()
    assert isinstance(group, ConsumerGroup)
    assert set(group.members) == {"new", old.member_id}
    # The old one has it all, and may still commit, until it has joined again.
    assert numbers(new) == set()
    assert rig.commit(
        {("t", 0): 8}, member_id=old.member_id, generation=generation
    ) == {("t", 0): 0}
    assert rig.heartbeat(old.member_id, generation) == ErrorCode.REBALANCE_IN_PROGRESS
    turns(old, new)
    assert shares(old, new) == [2, 2]
    assert rig.fetch() == {("t", 0): 8}


@pytest.mark.parametrize("cooperative", [True, False])
def test_classic_members_come_into_a_consumer_group(rig, cooperative):
    new = Consumer(rig, "new")
    new.beat()
    old = Classic(rig, cooperative=cooperative)
    turns(old, new)
    assert shares(old, new) == [2, 2]
    another = Classic(rig, cooperative=cooperative)
    turns(old, new, another)
    assert sorted(shares(old, new, another)) == [1, 1, 2]


@pytest.mark.parametrize("dies", [False, True])
def test_the_group_is_classic_again_without_its_last_new_member(rig, dies):
    old, new = Classic(rig), Consumer(rig, "new")
    turns(old)
    turns(old, new)
    epoch = rig.group().group_epoch
    if dies:
        for _ in range(10):
            rig.advance(5_000)
            turns(old, count=2)
    else:
        beat(rig, "new", -1)
        assert rig.group().state is ClassicGroupState.PREPARING_REBALANCE
        assert rig.group().generation_id == epoch
    assert isinstance(rig.group(), ClassicGroup)
    turns(old)
    assert shares(old) == [PARTITIONS]
    rig.restart()
    assert isinstance(rig.group(), ClassicGroup)
    assert rig.heartbeat(old.member_id, old.generation) == 0


def test_an_upgraded_group_is_upgraded_after_a_restart(rig):
    old, new = Classic(rig), Consumer(rig, "new")
    turns(old)
    turns(old, new)
    before = rig.group()
    rig.restart()
    after = rig.group()
    assert isinstance(after, ConsumerGroup)
    assert after.members.keys() == before.members.keys()
    for member_id, member in before.members.items():
        assert after.members[member_id].position() == member.position()
        assert after.members[member_id].metadata() == member.metadata()
    assert rig.heartbeat(old.member_id, old.generation) == 0
    assert beat(rig, "new", new.epoch).error_code == 0


def test_members_that_wait_in_a_rebalance_are_asked_to_join_again(rig):
    one, two = rig.stable(2)
    parked = rig.join(one, protocols={"other": subscription("t"), "range": b""})
    assert not parked.answered
    rig.join(two, protocols={"range": b"no consumer"})
    # Two has said something that no consumer says: the group stays as it is.
    assert beat(rig, "new", 0).error_code == ErrorCode.GROUP_ID_NOT_FOUND
    assert isinstance(rig.group(), ClassicGroup)


def test_a_parked_join_hears_of_the_upgrade(rig):
    old, other = Classic(rig), Classic(rig)
    turns(old)
    other.turn()
    other.turn()
    assert other.join_call is not None
    new = Consumer(rig, "new")
    assert new.beat().error_code == 0
    assert rig.answer(other.join_call).error_code == ErrorCode.REBALANCE_IN_PROGRESS
    turns(old, other, new)
    assert sorted(shares(old, other, new)) == [1, 1, 2]


@pytest.mark.parametrize(
    ("policy", "upgrades", "downgrades"),
    [
        ("bidirectional", True, True),
        ("upgrade", True, False),
        ("downgrade", False, True),
        ("disabled", False, False),
    ],
)
def test_the_policy_says_which_way_groups_may_go(policy, upgrades, downgrades):
    rig = Rig(group_consumer_migration_policy=policy)
    old, new = Classic(rig), Consumer(rig, "new")
    turns(old)
    code = new.beat().error_code
    assert code == (0 if upgrades else ErrorCode.GROUP_ID_NOT_FOUND)
    assert isinstance(rig.group(), ConsumerGroup) is upgrades
    rig = Rig(group_consumer_migration_policy=policy)
    old, new = Classic(rig), Consumer(rig, "new")
    new.beat()
    turns(old, new)
    beat(rig, "new", -1)
    assert isinstance(rig.group(), ClassicGroup) is downgrades
    turns(old)
    assert shares(old) == [PARTITIONS]


def test_after_a_downgrade_a_successor_asks_the_others_to_join_again(rig):
    old, new = Classic(rig), Consumer(rig, "new")
    new.beat()
    turns(old, new)
    beat(rig, "new", -1)
    rig.restart()
    assert list(rig.group().members) == [old.member_id]
    turns(old)
    assert shares(old) == [PARTITIONS]


def test_a_group_of_something_else_than_consumers_is_not_upgraded(rig):
    rig.join(version=3, protocol_type="connect", protocols={"a": b""})
    assert beat(rig, "new", 0).error_code == ErrorCode.GROUP_ID_NOT_FOUND


def test_a_refused_member_does_not_upgrade_the_group():
    rig = Rig(group_consumer_max_size=1)
    old = Classic(rig)
    turns(old)
    assert beat(rig, "new", 0).error_code == ErrorCode.GROUP_MAX_SIZE_REACHED
    assert isinstance(rig.group(), ClassicGroup)
    assert rig.heartbeat(old.member_id, old.generation) == 0
    rig = Rig()
    static = Classic(rig, instance="i")
    turns(static)
    code = beat(rig, "new", 0, instance_id="i").error_code
    assert code == ErrorCode.UNRELEASED_INSTANCE_ID
    assert isinstance(rig.group(), ClassicGroup)


def test_a_static_member_goes_back_to_the_classic_protocol_and_the_group_with_it(rig):
    new = Consumer(rig, "new", instance_id="i")
    new.beat()
    old = Classic(rig)
    turns(old, new)
    beat(rig, "new", -2, instance_id="i")
    back = Classic(rig, instance="i")
    turns(back, count=1)
    assert isinstance(rig.group(), ClassicGroup)
    assert rig.group().static_members == {"i": back.member_id}
    turns(old, back)
    assert shares(old, back) == [2, 2]


def test_a_classic_member_is_fenced_as_in_its_own_protocol(rig):
    new, old = Consumer(rig, "new"), Classic(rig)
    new.beat()
    turns(old, new)
    member_id, generation = old.member_id, old.generation
    assert rig.heartbeat("nobody", 1) == ErrorCode.UNKNOWN_MEMBER_ID
    assert rig.heartbeat("new", new.epoch) == ErrorCode.UNKNOWN_MEMBER_ID
    assert rig.heartbeat(member_id, generation + 1) == ErrorCode.ILLEGAL_GENERATION
    assert rig.heartbeat(member_id, generation, instance="i") == (
        ErrorCode.UNKNOWN_MEMBER_ID
    )
    answer = rig.answer(rig.sync(member_id, generation, protocol="roundrobin"))
    assert answer.error_code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    answer = rig.answer(rig.join(protocols={"other": subscription("t")}))
    assert answer.error_code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    answer = rig.answer(rig.join(protocols={"range": b"\0"}))
    assert answer.error_code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    (row,) = rig.leave("nobody").members
    assert row.error_code == ErrorCode.UNKNOWN_MEMBER_ID
    codes = rig.commit({("t", 0): 1}, member_id=member_id, generation=generation - 1)
    assert set(codes.values()) == {ErrorCode.ILLEGAL_GENERATION}
    (row,) = rig.leave(member_id).members
    assert row.error_code == 0
    assert set(rig.group().members) == {"new"}


@pytest.mark.parametrize("step", ["join", "sync"])
def test_a_classic_member_that_does_not_take_its_next_step_is_out(rig, step):
    new, old = Consumer(rig, "new"), Classic(rig)
    new.beat()
    turns(old, new)
    if step == "join":
        another = Consumer(rig, "another")
        another.beat()
    else:
        assert rig.answer(rig.join(old.member_id)).error_code == 0
    for _ in range(6):
        rig.advance(4_000)  # the rebalance timeout is 20 s
        rig.heartbeat(old.member_id, old.generation)
        turns(new, count=1)
    assert old.member_id not in rig.group().members


def test_a_description_says_which_protocol_a_member_speaks(rig):
    new, old = Consumer(rig, "new"), Classic(rig)
    new.beat()
    turns(old, new)
    request = ConsumerGroupDescribeRequest(group_ids=["g"])
    (row,) = rig.ask("consumer_group_describe", request, 1).groups
    assert {m.member_id: m.member_type for m in row.members} == {
        "new": 1,
        old.member_id: 0,
    }


class Migrations(RuleBasedStateMachine):
    """Clients of both kinds join, leave and die; no partition ever has two owners."""

    def __init__(self):
        super().__init__()
        self.members = []
        self.made = 0

    @initialize(policy=st.sampled_from(["bidirectional", "upgrade"]))
    def begin(self, policy):
        self.rig = Rig(group_consumer_migration_policy=policy)

    @rule(kind=st.sampled_from(["classic", "consumer"]))
    def come(self, kind):
        if len(self.members) == 4:
            return
        self.made += 1
        if kind == "classic":
            self.members.append(Classic(self.rig))
        else:
            self.members.append(Consumer(self.rig, f"new{self.made}"))

    @rule(number=st.integers(0, 3))
    def act(self, number):
        if number < len(self.members):
            turns(self.members[number], count=1)

    @rule(number=st.integers(0, 3))
    def go(self, number):
        if number >= len(self.members):
            return
        member = self.members.pop(number)
        if isinstance(member, Classic):
            member.leave()
        elif member.epoch > 0:
            beat(self.rig, member.member_id, -1)

    @rule(number=st.integers(0, 3))
    def die(self, number):
        if number < len(self.members):
            self.members.pop(number)

    @rule()
    def restart(self):
        before = self.rig.group()
        self.rig.restart()
        after = self.rig.group()
        if isinstance(before, ConsumerGroup):
            assert isinstance(after, ConsumerGroup)
            for member_id, member in before.members.items():
                assert after.members[member_id].position() == member.position()
        for member in self.members:
            if isinstance(member, Classic):
                member.join_call = member.sync_call = None
                member.must_join = True

    @invariant()
    def nobody_has_what_another_has(self):
        """No two live members have one partition."""
        group = self.rig.group() if hasattr(self, "rig") else None
        if group is None:
            return
        found = [
            number
            for member in self.members
            if member.member_id in group.members
            and (
                not isinstance(member, Classic)
                or (not member.must_join and member.join_call is None)
            )
            for number in held(member)
        ]
        assert len(found) == len(set(found))

    def teardown(self):
        """Without further events, the members share all partitions."""
        if not hasattr(self, "rig") or not self.members:
            return
        for _ in range(40):
            self.rig.advance(3_000)
            turns(*self.members, count=1)
        assert sum(shares(*self.members)) == PARTITIONS


Migrations.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None
)
TestMigrations = Migrations.TestCase

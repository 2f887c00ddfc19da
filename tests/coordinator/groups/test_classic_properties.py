"""The invariants of a classic group, for any requests of its members, in any order.

Members here behave like clients (they join again when an answer asks them to) and
unlike clients (they vanish, send wrong generations, join twice); sometimes the
coordinator dies.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from mpbroker.coordinator.groups.classic_group import ClassicGroup
from mpbroker.coordinator.groups.classic_group import ClassicGroupState as S
from mpbroker.coordinator.outbox import Call
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.leave_group import MemberIdentity
from tests.coordinator.rig import Rig

FINE = {
    ErrorCode.NONE,
    ErrorCode.UNKNOWN_MEMBER_ID,
    ErrorCode.ILLEGAL_GENERATION,
    ErrorCode.REBALANCE_IN_PROGRESS,
    ErrorCode.MEMBER_ID_REQUIRED,
    ErrorCode.FENCED_INSTANCE_ID,
    ErrorCode.GROUP_MAX_SIZE_REACHED,
    ErrorCode.INCONSISTENT_GROUP_PROTOCOL,
}
SIZE = 4
clients = st.integers(0, 5)


class Client:
    """One client: its last answer, and the request that it waits for."""

    def __init__(self, instance: str | None) -> None:
        self.instance = instance
        self.member_id = ""
        self.generation = -1
        self.leads = False
        self.others: list[str] = []
        self.call: Call | None = None
        self.kind = ""


class Groups(RuleBasedStateMachine):
    """The rules are events; the invariants hold after each event."""

    def __init__(self) -> None:
        super().__init__()
        self.clients = [
            Client(f"i{number % 2}" if number < 3 else None) for number in range(6)
        ]
        self.calls: list[Call] = []
        self.generation = 0
        self.left: set[str] = set()
        self.assigned: dict[tuple[int, str], bytes] = {}

    @initialize(delay=st.sampled_from([0, 500]))
    def begin(self, delay: int) -> None:
        self.rig = Rig(group_initial_rebalance_delay_ms=delay, group_max_size=SIZE)

    def group(self) -> ClassicGroup | None:
        return self.rig.group()

    # -- what clients do -----------------------------------------------------------

    def hear(self, client: Client) -> None:
        """Read an answer that has come."""
        call = client.call
        if call is None or not call.answered:
            return
        client.call = None
        answer = self.rig.answer(call)
        assert answer.error_code in FINE
        if client.kind == "join":
            if answer.error_code == ErrorCode.MEMBER_ID_REQUIRED:
                client.member_id = answer.member_id
            elif answer.error_code == ErrorCode.NONE:
                client.member_id = answer.member_id
                client.generation = answer.generation_id
                client.leads = answer.leader == answer.member_id
                client.others = [row.member_id for row in answer.members]
                if client.leads and not answer.skip_assignment and client.others:
                    assert client.member_id in client.others
            else:
                client.member_id = ""
        elif answer.error_code == ErrorCode.NONE:
            given = self.assigned.get((client.generation, client.member_id))
            if given is not None:
                assert bytes(answer.assignment) == given

    @rule(number=clients, protocol=st.sampled_from(["a", "b"]))
    def join(self, number: int, protocol: str) -> None:
        client = self.clients[number]
        self.hear(client)
        client.kind = "join"
        client.call = self.rig.join(
            client.member_id,
            instance=client.instance,
            protocols={"both": b"", protocol: b""},
            session_ms=6000,
            rebalance_ms=4000,
        )
        self.calls.append(client.call)
        self.hear(client)

    @rule(number=clients, lie=st.sampled_from([0, 0, 0, 1, -1]))
    def sync(self, number: int, lie: int) -> None:
        client = self.clients[number]
        self.hear(client)
        if client.call is not None:
            return
        generation = client.generation + lie
        given = {}
        if client.leads:
            given = {m: f"{generation}/{m}".encode() for m in client.others}
        group = self.group()
        before = group.state if group else None
        client.kind = "sync"
        client.call = self.rig.sync(
            client.member_id,
            generation,
            given,
            instance=client.instance,
            version=4,  # without the name of a protocol
        )
        self.calls.append(client.call)
        if (
            before is S.COMPLETING_REBALANCE
            and group is not None
            and group.state is S.STABLE
        ):
            for member_id in group.members:
                given_to = given.get(member_id, b"")
                self.assigned[group.generation_id, member_id] = given_to
        self.hear(client)

    @rule(number=clients, lie=st.sampled_from([0, 0, 0, 1]))
    def heartbeat(self, number: int, lie: int) -> None:
        client = self.clients[number]
        self.hear(client)
        code = self.rig.heartbeat(
            client.member_id, client.generation + lie, instance=client.instance
        )
        assert code in FINE
        if code == ErrorCode.NONE:
            group = self.group()
            assert group is not None
            assert group.state in (S.STABLE, S.COMPLETING_REBALANCE)
            assert lie == 0

    @rule(number=clients)
    def leave(self, number: int) -> None:
        client = self.clients[number]
        self.hear(client)
        identity = MemberIdentity(
            member_id=client.member_id, group_instance_id=client.instance
        )
        if self.rig.leave(identity).members[0].error_code == ErrorCode.NONE:
            self.left.add(client.member_id)
        group = self.group()
        assert group is None or client.member_id not in group.members

    @rule(number=clients)
    def forget(self, number: int) -> None:
        """End the client's process, and start another in its place."""
        client = self.clients[number]
        client.member_id, client.generation, client.call = "", -1, None

    @rule(number=clients, offset=st.integers(0, 9))
    def commit(self, number: int, offset: int) -> None:
        client = self.clients[number]
        self.hear(client)
        before = self.rig.fetch()
        (code,) = self.rig.commit(
            {("t", 0): offset},
            member_id=client.member_id,
            generation=client.generation,
            instance=client.instance,
        ).values()
        after = self.rig.fetch()
        assert after == ({("t", 0): offset} if code == 0 else before)

    # -- what else happens ---------------------------------------------------------

    @rule(ms=st.sampled_from([1, 100, 1000, 3999, 7000]))
    def wait(self, ms: int) -> None:
        self.rig.advance(ms)

    @rule()
    def restart(self) -> None:
        offsets = self.rig.fetch()
        group = self.group()
        self.rig.restart()
        assert self.rig.fetch() == offsets
        if group is not None and group.is_in(S.STABLE):
            again = self.group()
            assert again is not None
            assert again.metadata_value() == group.metadata_value()
        again = self.group()
        assert again is None or not self.left & again.members.keys()
        # Its clients wait for answers that will not come, and ask again.
        for client in self.clients:
            client.call = None
        self.calls = [call for call in self.calls if call.answered]
        self.generation = 0

    # -- what is always true -------------------------------------------------------

    @invariant()
    def members_and_counts_agree(self) -> None:
        group = self.group() if hasattr(self, "rig") else None
        if group is None:
            return
        members = group.members.values()
        # Members that have not joined again yet do not count.
        assert group.num_awaiting_join <= SIZE
        assert group.num_awaiting_join == sum(
            member.awaiting_join is not None for member in members
        )
        assert group.static_members == {
            member.group_instance_id: member.member_id
            for member in members
            if member.group_instance_id is not None
        }
        assert group.pending_sync_members <= set(group.members)
        assert not group.pending_join_members & set(group.members)
        if group.members:
            assert group.leader_id in group.members
        else:
            assert group.state in (S.EMPTY, S.PREPARING_REBALANCE)
        for member in members:
            assert member.awaiting_join is None or member.awaiting_sync is None
            if member.awaiting_join is not None:
                assert group.state is S.PREPARING_REBALANCE
            if member.awaiting_sync is not None:
                assert group.state is S.COMPLETING_REBALANCE

    @invariant()
    def generations_only_grow(self) -> None:
        group = self.group() if hasattr(self, "rig") else None
        if group is not None:
            assert group.generation_id >= self.generation
            self.generation = group.generation_id

    @invariant()
    def who_waits_is_waited_for(self) -> None:
        """Each parked request is in a member, and each member has a timer."""
        group = self.group() if hasattr(self, "rig") else None
        if group is None:
            return
        parked = {
            id(call)
            for member in group.members.values()
            for call in (member.awaiting_join, member.awaiting_sync)
            if call is not None
        }
        waiting = {id(call) for call in self.calls if not call.answered}
        assert parked == waiting
        for member_id, member in group.members.items():
            name = ("session", "g", member_id)
            waits = member.awaiting_join or member.awaiting_sync
            assert waits is not None or name in self.rig.timers
        if group.state is S.PREPARING_REBALANCE:
            assert ("join", "g") in self.rig.timers
        if group.state is S.COMPLETING_REBALANCE:
            assert ("sync", "g") in self.rig.timers

    def teardown(self) -> None:
        """Let time pass: all requests are answered, and no member is left."""
        if not hasattr(self, "rig"):
            return
        self.rig.advance(10 * 60_000)
        assert all(call.answered for call in self.calls)
        group = self.group()
        assert group is None or (group.is_in(S.EMPTY) and not group.members)
        assert len(self.rig.timers) == 0


Groups.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
TestGroups = Groups.TestCase

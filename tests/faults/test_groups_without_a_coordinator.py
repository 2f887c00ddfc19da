"""SIGKILL for the coordinator while classic groups change their members.

The members speak the protocol by themselves, so that no library's retries or timeouts
hide what the broker answers. Their sessions are longer than any test, but for one.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.message import Message
from mpbroker.protocol.messages.heartbeat import HeartbeatRequest
from mpbroker.protocol.messages.join_group import (
    JoinGroupRequest,
    JoinGroupRequestProtocol,
)
from mpbroker.protocol.messages.leave_group import LeaveGroupRequest, MemberIdentity
from mpbroker.protocol.messages.sync_group import (
    SyncGroupRequest,
    SyncGroupRequestAssignment,
)
from mpbroker.server.api_messages import response_class
from tests.bench import wire
from tests.faults.test_kill_one_process import pids_with
from tests.faults.test_kill_the_whole_tree import address_of
from tests.support.broker import Broker
from tests.support.children import wait_until
from tests.support.patience import LONGEST_S

GROUP = "group"
SESSION_MS = 1_800_000
# Not ready yet: ask again.
_LOADS = {
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_COORDINATOR,
}
VERSIONS = {
    ApiKey.JOIN_GROUP: 7,
    ApiKey.SYNC_GROUP: 5,
    ApiKey.HEARTBEAT: 4,
    ApiKey.LEAVE_GROUP: 4,
}


class Member:
    """A member of the group, on a connection of its own."""

    def __init__(self, broker: Broker, session_ms: int = SESSION_MS) -> None:
        self.session_ms = session_ms
        self._connection = wire.Connection(address_of(broker), 90.0)
        self._sent: tuple[ApiKey, Message] | None = None
        self.member_id = ""
        self.generation = -1
        self.others: list[str] = []  # the leader knows all members

    def close(self) -> None:
        self._connection.close()

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, api_key: ApiKey, message: Message) -> None:
        self._sent = api_key, message
        version = VERSIONS[api_key]
        self._connection.send(wire.request((api_key, version), message.encode(version)))

    def receive(self) -> Any:
        """Return the answer to what was sent, which is sent again while groups load."""
        while True:
            assert self._sent is not None
            api_key, message = self._sent
            payload = self._connection.receive()
            version = VERSIONS[api_key]
            response = response_class(api_key)
            head = 4 + (version >= response.flexible_from)
            answer: Any = response.decode(version, payload[head:])
            if answer.error_code not in _LOADS:
                return answer
            self.send(api_key, message)

    def ask(self, api_key: ApiKey, message: Message) -> Any:
        self.send(api_key, message)
        return self.receive()

    # -- what a member says ----------------------------------------------------------

    def send_join(self) -> None:
        request = JoinGroupRequest(
            group_id=GROUP,
            session_timeout_ms=self.session_ms,
            rebalance_timeout_ms=SESSION_MS,
            member_id=self.member_id,
            protocol_type="consumer",
            protocols=[JoinGroupRequestProtocol(name="range", metadata=b"m")],
        )
        self.send(ApiKey.JOIN_GROUP, request)

    def end_join(self) -> ErrorCode:
        answer = self.receive()
        code = ErrorCode(answer.error_code)
        if code is ErrorCode.UNKNOWN_MEMBER_ID:
            self.member_id = ""
        elif code in (ErrorCode.NONE, ErrorCode.MEMBER_ID_REQUIRED):
            self.member_id, self.generation = answer.member_id, answer.generation_id
            self.others = [row.member_id for row in answer.members]
        return code

    def send_sync(self) -> None:
        request = SyncGroupRequest(
            group_id=GROUP,
            generation_id=self.generation,
            member_id=self.member_id,
            protocol_type="consumer",
            protocol_name="range",
            assignments=[
                SyncGroupRequestAssignment(member_id=each, assignment=b"a")
                for each in self.others
            ],
        )
        self.send(ApiKey.SYNC_GROUP, request)

    def heartbeat(self) -> ErrorCode:
        request = HeartbeatRequest(
            group_id=GROUP, generation_id=self.generation, member_id=self.member_id
        )
        return ErrorCode(self.ask(ApiKey.HEARTBEAT, request).error_code)

    def leave(self) -> ErrorCode:
        members = [MemberIdentity(member_id=self.member_id)]
        request = LeaveGroupRequest(group_id=GROUP, members=members)
        (row,) = self.ask(ApiKey.LEAVE_GROUP, request).members
        return ErrorCode(row.error_code)


def kill_coordinator(broker: Broker) -> None:
    (victim,) = pids_with(broker, "coordinator")
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: pids_with(broker, "coordinator") - {victim})


@pytest.fixture
def members() -> Iterator[list[Member]]:
    made: list[Member] = []
    yield made
    for member in made:
        member.close()


def join_all(members: list[Member]) -> None:
    """Let members join, again and again until they are in one generation; then sync."""
    joined: list[Member] = []
    while len(joined) < len(members):
        for member in members:
            if member not in joined:
                member.send_join()
        joined = [
            member
            for member in members
            if member in joined or member.end_join() is ErrorCode.NONE
        ]
    assert len({member.generation for member in members}) == 1
    for member in members:
        member.send_sync()
    assert {member.receive().error_code for member in members} == {ErrorCode.NONE}


@pytest.mark.parametrize("round_", range(3))
def test_a_leave_that_was_answered_is_known_to_the_next_coordinator(
    make_broker: Callable[..., Broker], members: list[Member], round_: int
) -> None:
    broker = make_broker({"group.initial.rebalance.delay.ms": 300})
    members.extend(Member(broker) for _ in range(3))
    join_all(members)
    leaver = members[round_]
    stays = [member for member in members if member is not leaver]
    assert leaver.leave() is ErrorCode.NONE
    kill_coordinator(broker)
    # Without waiting for the session of the one that has left.
    wait_until(
        lambda: (
            {member.heartbeat() for member in stays}
            == {ErrorCode.REBALANCE_IN_PROGRESS}
        )
    )
    assert leaver.heartbeat() is ErrorCode.UNKNOWN_MEMBER_ID
    join_all(stays)
    leaders = [member for member in stays if member.others]
    assert [len(member.others) for member in leaders] == [2]


def test_a_group_forms_though_the_coordinator_is_killed_again_and_again(
    make_broker: Callable[..., Broker], members: list[Member]
) -> None:
    """Each coordinator lives for less than the first members wait for each other."""
    broker = make_broker({"group.initial.rebalance.delay.ms": 4000})
    members.extend(Member(broker) for _ in range(3))
    for member in members:
        member.send_join()
        assert member.end_join() is ErrorCode.MEMBER_ID_REQUIRED
    ids = [member.member_id for member in members]
    for member in members:
        member.send_join()
    kills = 0
    deadline = time.monotonic() + LONGEST_S
    while not select.select(members, [], [], 1.0)[0]:
        assert time.monotonic() < deadline
        kill_coordinator(broker)
        kills += 1
    assert kills
    assert [member.end_join() for member in members] == [ErrorCode.NONE] * 3
    assert [member.member_id for member in members] == ids
    for member in members:
        member.send_sync()
    assert {member.receive().error_code for member in members} == {ErrorCode.NONE}


@pytest.mark.parametrize("after", ["the ids", "the joins", "a sync"])
def test_what_members_were_answered_in_a_rebalance_holds_for_the_next_coordinator(
    make_broker: Callable[..., Broker], members: list[Member], after: str
) -> None:
    """No member is sent back to begin again, whatever it was answered last."""
    broker = make_broker({"group.initial.rebalance.delay.ms": 3000})
    members.extend(Member(broker) for _ in range(3))
    for member in members:
        member.send_join()
        assert member.end_join() is ErrorCode.MEMBER_ID_REQUIRED
    if after == "the ids":
        kill_coordinator(broker)
    for member in members:
        member.send_join()
    assert [member.end_join() for member in members] == [ErrorCode.NONE] * 3
    assert len({member.generation for member in members}) == 1
    if after == "the joins":
        kill_coordinator(broker)
    followers = [member for member in members if not member.others]
    (leader,) = (member for member in members if member.others)
    for member in followers:
        member.send_sync()
    if after == "a sync":
        kill_coordinator(broker)
    leader.send_sync()
    assert [member.receive().error_code for member in members] == [ErrorCode.NONE] * 3
    assert [member.heartbeat() for member in members] == [ErrorCode.NONE] * 3


def test_a_dead_member_goes_though_no_coordinator_lives_for_a_session(
    make_broker: Callable[..., Broker], members: list[Member]
) -> None:
    broker = make_broker({"group.initial.rebalance.delay.ms": 300})
    members.extend(Member(broker, session_ms=9000) for _ in range(2))
    join_all(members)
    alive, dead = members
    dead.close()
    kills = 0
    deadline = time.monotonic() + LONGEST_S
    while kills < 2 or alive.heartbeat() is not ErrorCode.REBALANCE_IN_PROGRESS:
        assert time.monotonic() < deadline
        next_kill = time.monotonic() + 3
        wait_until(
            lambda next_kill=next_kill: (
                alive.heartbeat() is ErrorCode.REBALANCE_IN_PROGRESS
                or time.monotonic() > next_kill
            )
        )
        kill_coordinator(broker)
        kills += 1

"""Clients hang up while their requests wait, and processes die: all are let go soon."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any, Final

import pytest

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.describe_groups import (
    DescribeGroupsRequest,
    DescribeGroupsResponse,
)
from mpbroker.protocol.messages.join_group import (
    JoinGroupRequest,
    JoinGroupRequestProtocol,
    JoinGroupResponse,
)
from mpbroker.protocol.messages.leave_group import LeaveGroupRequest
from tests.broker.load import (
    api_versions,
    ask,
    create_topic,
    dial,
    frame,
    kill,
)
from tests.chaos.peek import Peek
from tests.supervisor.test_kills import fetch_body
from tests.support.broker import Broker
from tests.support.children import wait_until

KILLS: Final = int(os.environ.get("MPBROKER_TEST_KILLS", "4"))
CLIENTS: Final = 30
LONGEST_MS: Final = 0x7FFF_FFFF
GROUP: Final = "waits"
JOIN_VERSION: Final = 3
ID_VERSION: Final = 5  # a new member gets its id before it joins
LEAVE_VERSION: Final = 2
DESCRIBE_VERSION: Final = 4


@pytest.fixture
def broker(make_broker: Callable[..., Broker]) -> Broker:
    broker = make_broker(
        {
            "num.network.threads": 1,
            "num.io.threads": 2,
            # Longer than a test may take.
            "group.initial.rebalance.delay.ms": 600_000,
        }
    )
    create_topic(broker)
    return broker


def fetch() -> bytes:
    return frame(ApiKey.FETCH, 11, fetch_body(LONGEST_MS))


def join_body(member_id: str = "", version: int = ID_VERSION) -> bytes:
    protocol = JoinGroupRequestProtocol(name="range", metadata=b"m")
    request = JoinGroupRequest(
        group_id=GROUP,
        session_timeout_ms=600_000,
        rebalance_timeout_ms=600_000,
        member_id=member_id,
        protocol_type="consumer",
        protocols=[protocol],
    )
    return request.encode(version)


def join() -> bytes:
    body = join_body(version=JOIN_VERSION)
    return frame(ApiKey.JOIN_GROUP, JOIN_VERSION, body)


def receive_end(sock: socket.socket) -> bytes:
    """Return what came until the broker closed the connection.

    A processor resets a connection if it dies between the last bytes and the end.
    """
    sock.settimeout(20)  # less than a fetch waits
    received = b""
    try:
        while data := sock.recv(1 << 16):
            received += data
    except ConnectionResetError:
        pass
    return received


@pytest.mark.parametrize("role", ["processor", "handler", "coordinator", "keeper"])
@pytest.mark.parametrize("asked", [fetch, join])
def test_all_are_let_go_whatever_dies(broker: Broker, role: str, asked: Any) -> None:
    framed = asked()
    for _ in range(KILLS):
        with ExitStack() as stack:
            clients = [stack.enter_context(dial(broker)) for _ in range(CLIENTS)]
            for number, client in enumerate(clients):
                client.sendall(framed)
                if number % 3 == 2:
                    client.shutdown(socket.SHUT_WR)  # it may be read before it waits
            for number, client in enumerate(clients):
                if number == CLIENTS // 2:
                    kill(broker, role, 0)
                if number % 3 != 2:
                    client.shutdown(socket.SHUT_WR)
            for client in clients:
                received = receive_end(client)
                # Behind the length and the correlation id.
                if asked is fetch:
                    assert received[8:12] == bytes(4)  # not throttled
                elif received:  # none: it was with the coordinator when that died
                    [code] = struct.unpack_from(">h", received, 12)
                    assert code == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    with closing(Peek(broker.pid)) as peek:
        wait_until(lambda: not peek.in_use())
    with dial(broker) as sock:
        assert api_versions(sock)


def test_a_member_that_leaves_and_hangs_up_while_it_joins_is_gone(
    make_broker: Callable[..., Broker],
) -> None:
    """Its LeaveGroup lies behind the JoinGroup that waits for the other member."""
    broker = make_broker({"group.initial.rebalance.delay.ms": 0})
    with dial(broker) as stays, dial(broker) as leaves, dial(broker) as sock:
        first, code = joined(stays, member_id_for(stays))
        assert (members(sock), code) == ([first], ErrorCode.NONE)
        second = member_id_for(leaves)
        leave = LeaveGroupRequest(group_id=GROUP, member_id=second)
        body = leave.encode(LEAVE_VERSION)
        leaves.sendall(
            frame(ApiKey.JOIN_GROUP, ID_VERSION, join_body(second))
            + frame(ApiKey.LEAVE_GROUP, LEAVE_VERSION, body)
        )
        wait_until(lambda: members(sock) == sorted([first, second]))
        leaves.close()
        wait_until(lambda: members(sock) == [first])
        # The group goes on without it.
        assert joined(stays, first) == (first, ErrorCode.NONE)


def joined(sock: socket.socket, member_id: str) -> tuple[str, int]:
    """Return a member's id, and the error code of its JoinGroup."""
    body = join_body(member_id)
    answer = JoinGroupResponse.decode(
        ID_VERSION, ask(sock, ApiKey.JOIN_GROUP, ID_VERSION, body)
    )
    return answer.member_id, answer.error_code


def member_id_for(sock: socket.socket) -> str:
    """Return the id that the group gives to a new member."""
    member_id, code = joined(sock, "")
    assert code == ErrorCode.MEMBER_ID_REQUIRED
    return member_id


def members(sock: socket.socket) -> list[str]:
    """Return the ids of the group's members."""
    body = DescribeGroupsRequest(groups=[GROUP]).encode(DESCRIBE_VERSION)
    answer = ask(sock, ApiKey.DESCRIBE_GROUPS, DESCRIBE_VERSION, body)
    [group] = DescribeGroupsResponse.decode(DESCRIBE_VERSION, answer).groups
    return sorted(member.member_id for member in group.members)

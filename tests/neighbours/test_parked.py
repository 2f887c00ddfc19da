"""Requests that wait keep no other client waiting, whether their clients stay or go."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import pytest

from mpbroker.ipc.layout import SLOTS_PER_PROCESSOR
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.join_group import (
    JoinGroupRequest,
    JoinGroupRequestProtocol,
    JoinGroupResponse,
)
from mpbroker.protocol.messages.sync_group import (
    SyncGroupRequest,
    SyncGroupRequestAssignment,
    SyncGroupResponse,
)
from tests.bench import wire
from tests.broker.load import frame, receive_frame
from tests.faults.test_kill_the_whole_tree import address_of
from tests.neighbours.clients import LONGEST_WAIT_S, Attack, Client, hostile
from tests.support.broker import Broker

TOPIC: Final = "quiet"
MANY: Final = SLOTS_PER_PROCESSOR + 108  # more than a processor has slots
A_SECOND: Final = 137  # connections that keep the slots of a processor in use for 60 s
LONGEST_MS: Final = 0x7FFF_FFFF
SESSION_MS: Final = 6000
JOIN_VERSION: Final = 3  # a member needs no id before it may wait
SYNC_VERSION: Final = 3
HOSTILE_ADDRESS: Final = "127.0.0.2"
# How many more connections the attacks may make with each answer that the well-behaved
# client gets. Otherwise, on a busy machine, thousands are in the listening socket's
# queue, and the client waits for its turn there, as it would with any server.
AT_A_TIME: Final = 200


@pytest.fixture
def address(make_broker: Callable[..., Broker]) -> tuple[str, int]:
    """A broker with one processor, and an empty topic."""
    broker = make_broker(
        {
            "num.network.threads": 1,
            "num.io.threads": 2,
            "group.initial.rebalance.delay.ms": 60_000,
        }
    )
    with wire.Connection(address_of(broker)) as connection:
        connection.create_topic(TOPIC)
    return address_of(broker)


def waiting_fetch(max_wait_ms: int = LONGEST_MS) -> bytes:
    return wire.fetch(
        TOPIC, 0, 0, max_bytes=1 << 20, max_wait_ms=max_wait_ms, min_bytes=1 << 20
    )


def join(group: str, member_id: str = "") -> bytes:
    request = JoinGroupRequest(
        group_id=group,
        session_timeout_ms=SESSION_MS,
        rebalance_timeout_ms=LONGEST_MS,
        member_id=member_id,
        protocol_type="consumer",
        protocols=[JoinGroupRequestProtocol(name="range", metadata=b"m")],
    )
    return frame(ApiKey.JOIN_GROUP, JOIN_VERSION, request.encode(JOIN_VERSION))


def dial(address: tuple[str, int]) -> socket.socket:
    """Connect from an address that no well-behaved client has."""
    return socket.create_connection(
        address, LONGEST_WAIT_S, source_address=(HOSTILE_ADDRESS, 0)
    )


class Count:
    """How many requests the attacks have sent, and how many they may send by now."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.sent = 0
        self.allowed = AT_A_TIME
        self.waiting: list[socket.socket] = []  # by clients that stay

    def add(self) -> int:
        with self._lock:
            self.sent += 1
            return self.sent

    def has_turn(self, end: threading.Event) -> bool:
        """Wait until another may be sent; False: the attack is over."""
        while self.sent >= self.allowed and not end.is_set():
            end.wait(0.001)
        return not end.is_set()


def leaving_at_once(address: tuple[str, int], count: Count) -> Attack:
    def attack(end: threading.Event) -> None:
        if not count.has_turn(end):
            return
        with dial(address) as sock:
            sock.sendall(waiting_fetch())
        if count.add() > MANY:
            end.wait(1 / A_SECOND)

    return attack


def leaving_later(address: tuple[str, int], count: Count) -> Attack:
    def attack(end: threading.Event) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(200):
                if not count.has_turn(end):
                    return
                stack.enter_context(dial(address)).sendall(waiting_fetch())
                count.add()
            end.wait(0.2)

    return attack


def staying(address: tuple[str, int], count: Count, framed: bytes) -> Attack:
    def attack(end: threading.Event) -> None:
        with contextlib.ExitStack() as stack:
            while count.has_turn(end):
                if count.sent >= MANY:
                    end.wait(0.1)
                    continue
                sock = stack.enter_context(dial(address))
                sock.sendall(framed)
                count.waiting.append(sock)
                count.add()

    return attack


def answered(socks: list[socket.socket]) -> list[socket.socket]:
    poll = select.poll()
    for sock in socks:
        poll.register(sock, select.POLLIN)
    fds = dict(poll.poll(0))
    return [sock for sock in socks if sock.fileno() in fds]


def decoded(response: type[Any], version: int, sock: socket.socket) -> Any:
    return response.decode(version, memoryview(receive_frame(sock))[4:])


def ask_until(client: Client, count: Count, sent: int, at_least: int) -> None:
    """Ask until the attacks have sent so many requests, and some times after."""
    while count.sent < sent:
        client.ask(wire.api_versions())
        count.allowed = count.sent + AT_A_TIME
        time.sleep(0.01)  # most of the processor's time is the others'
    for _ in range(at_least):
        client.ask(wire.api_versions())


@pytest.mark.parametrize("leaving", [leaving_at_once, leaving_later])
def test_fetches_of_clients_that_leave(address, leaving):
    count, client = Count(), Client(address)
    with hostile(*(leaving(address, count) for _ in range(2))):
        ask_until(client, count, MANY + 3 * A_SECOND, at_least=50)
    assert client.longest_s < LONGEST_WAIT_S


def test_fetches_of_clients_that_stay(address):
    count, client = Count(), Client(address)
    with hostile(*(staying(address, count, waiting_fetch()) for _ in range(2))):
        ask_until(client, count, MANY, at_least=50)
        # It has its share: its own fetches may wait.
        for _ in range(3):
            with client.waiting() as connection:
                began = time.monotonic()
                fetched = wire.parse_fetch(connection.ask(waiting_fetch(500)))
                assert time.monotonic() - began >= 0.5
                assert fetched.error_code == 0
    assert client.longest_s < LONGEST_WAIT_S


def test_joins_of_clients_that_stay(address):
    count, client = Count(), Client(address)
    with hostile(*(staying(address, count, join("crowd")) for _ in range(2))):
        ask_until(client, count, MANY, at_least=50)
        # As many as are too many have been told to try again.
        refused = answered(count.waiting)
        assert len(refused) >= MANY - SLOTS_PER_PROCESSOR
        for sock in refused:
            answer = decoded(JoinGroupResponse, JOIN_VERSION, sock)
            assert answer.error_code == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    assert client.longest_s < LONGEST_WAIT_S


class Member:
    """A member of a classic group, on a connection of its own."""

    def __init__(self, address: tuple[str, int], group: str) -> None:
        self.sock = dial(address)
        self.group = group
        self.sock.sendall(join(group))

    def end_join(self) -> None:
        answer = decoded(JoinGroupResponse, JOIN_VERSION, self.sock)
        assert answer.error_code == 0
        self.member_id, self.generation = answer.member_id, answer.generation_id
        self.leads = answer.leader == answer.member_id

    def send_sync(self, *assigned: str) -> None:
        request = SyncGroupRequest(
            group_id=self.group,
            generation_id=self.generation,
            member_id=self.member_id,
            assignments=[
                SyncGroupRequestAssignment(member_id=each, assignment=b"a")
                for each in assigned
            ],
        )
        body = request.encode(SYNC_VERSION)
        self.sock.sendall(frame(ApiKey.SYNC_GROUP, SYNC_VERSION, body))


def test_followers_of_a_leader_that_never_syncs(make_broker):
    """Those that hang up are let go; the others are in the group all the same."""
    broker = make_broker({"group.initial.rebalance.delay.ms": 300})
    with contextlib.ExitStack() as stack:
        members = [Member(address_of(broker), "stuck") for _ in range(60)]
        for member in members:
            stack.enter_context(member.sock)
        for member in members:
            member.end_join()
        (leader,) = (member for member in members if member.leads)
        gone, staying = [], []
        for number, member in enumerate(each for each in members if not each.leads):
            member.send_sync()
            (gone if number % 2 else staying).append(member)
        for member in gone:
            member.sock.shutdown(socket.SHUT_WR)
        for member in gone:  # soon: see dial()
            answer = decoded(SyncGroupResponse, SYNC_VERSION, member.sock)
            assert answer.error_code == ErrorCode.REBALANCE_IN_PROGRESS
            assert member.sock.recv(1) == b""
        leader.send_sync(*(member.member_id for member in members))
        for member in [leader, *staying]:
            answer = decoded(SyncGroupResponse, SYNC_VERSION, member.sock)
            assert (answer.error_code, bytes(answer.assignment)) == (0, b"a")


def test_a_client_that_ends_its_own_direction_has_its_answer(address):
    with dial(address) as sock:
        sock.sendall(waiting_fetch())
        sock.shutdown(socket.SHUT_WR)
        answer = wire.parse_fetch(receive_frame(sock))
        assert (answer.error_code, answer.high_watermark) == (0, 0)
        assert sock.recv(1) == b""

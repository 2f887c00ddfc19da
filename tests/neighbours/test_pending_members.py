"""Clients that ask for member ids and never join keep no other from its group."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from typing import Final

import pytest

from mpbroker.coordinator.groups import pending_members
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.headers import encode_request_header
from mpbroker.protocol.messages.join_group import (
    JoinGroupRequest,
    JoinGroupRequestProtocol,
    JoinGroupResponse,
)
from tests.bench import wire
from tests.faults.test_kill_the_whole_tree import address_of
from tests.neighbours.clients import LONGEST_WAIT_S, Attack, Client, hostile
from tests.support.broker import Broker

VERSION: Final = 5
LONGEST_MS: Final = 1_800_000
CLIENT_ID: Final = "c" * 30_000  # a member id begins with it
MORE_THAN_FIT: Final = pending_members._MAX_BYTES // len(CLIENT_ID) + 100


@pytest.fixture
def address(make_broker: Callable[..., Broker]) -> tuple[str, int]:
    broker = make_broker(
        {
            "num.network.threads": 1,
            "num.io.threads": 2,
            "group.initial.rebalance.delay.ms": 0,
        }
    )
    return address_of(broker)


def join(group: str, member_id: str = "", client_id: str = CLIENT_ID) -> bytes:
    request = JoinGroupRequest(
        group_id=group,
        session_timeout_ms=LONGEST_MS,
        rebalance_timeout_ms=LONGEST_MS,
        member_id=member_id,
        protocol_type="consumer",
        protocols=[JoinGroupRequestProtocol(name="range", metadata=b"m")],
    )
    header = encode_request_header(ApiKey.JOIN_GROUP, VERSION, 0, client_id)
    body = header + request.encode(VERSION)
    return len(body).to_bytes(4, "big") + body


def answer_of(body: bytes) -> JoinGroupResponse:
    return JoinGroupResponse.decode(VERSION, memoryview(body)[4:])


def asking_for_ids(address: tuple[str, int], given: list[tuple[str, str]]) -> Attack:
    """Return an attack: ask for ids in groups that exist for them alone."""

    def attack(end: threading.Event) -> None:
        with wire.Connection(address) as connection:
            while not end.is_set():
                group = str(uuid.uuid4())
                answer = answer_of(connection.ask(join(group)))
                if answer.error_code == ErrorCode.MEMBER_ID_REQUIRED:
                    given.append((group, answer.member_id))

    return attack


def test_ids_that_nobody_joins_with_are_forgotten_before_those_of_others(address):
    given: list[tuple[str, str]] = []
    client, number = Client(address), 0
    with hostile(*(asking_for_ids(address, given) for _ in range(2))):
        while len(given) < MORE_THAN_FIT or number < 20:
            number += 1
            group = f"g-{number}"
            with client.waiting() as connection:
                first = answer_of(connection.ask(join(group, client_id="good")))
                if first.error_code == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS:
                    continue
                assert first.error_code == ErrorCode.MEMBER_ID_REQUIRED
                joined = answer_of(
                    connection.ask(join(group, first.member_id, client_id="good"))
                )
                assert (joined.error_code, joined.leader) == (0, first.member_id)
    assert client.longest_s < LONGEST_WAIT_S
    with wire.Connection(address) as connection:
        late = answer_of(connection.ask(join(*given[0])))
    assert late.error_code == ErrorCode.UNKNOWN_MEMBER_ID

"""A client whose requests compute for long keeps no other waiting, on any listener."""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Final

import pytest

from mpbroker.ipc.compiled import PURE_PYTHON_VARIABLE
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.messages.describe_groups import DescribeGroupsRequest
from tests.bench import wire
from tests.broker.load import frame
from tests.faults.test_kill_the_whole_tree import address_of
from tests.neighbours.clients import LONGEST_WAIT_S, Attack, Client, hostile
from tests.support.broker import Broker
from tests.support.patience import LONGEST_S

HOSTILE_ADDRESS: Final = "127.0.0.2"
# As many requests at a time, each of which takes a process some 20 ms or more.
CONNECTIONS: Final = 400
MANY: Final = [f"none-{number}" for number in range(2500)]
VERSION: Final = 5  # of DescribeGroups
ROUNDS: Final = 10


@pytest.fixture
def broker(
    request: pytest.FixtureRequest,
    make_broker: Callable[..., Broker],
    monkeypatch: pytest.MonkeyPatch,
) -> Broker:
    """A broker with two listeners, and the topic ``kept``."""
    if request.param == "Python":
        monkeypatch.setenv(PURE_PYTHON_VARIABLE, "1")
    broker = make_broker(
        {
            "listeners": "PLAINTEXT://127.0.0.1:0,OTHER://127.0.0.1:0",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,OTHER:PLAINTEXT",
            "num.network.threads": 1,
            "num.io.threads": 2,
        }
    )
    with wire.Connection(address_of(broker)) as connection:
        connection.create_topic("kept")
    return broker


def describe_groups(names: Iterable[str]) -> bytes:
    request = DescribeGroupsRequest(groups=list(names))
    return frame(ApiKey.DESCRIBE_GROUPS, VERSION, request.encode(VERSION))


def asking_for_much(
    address: tuple[str, int], framed: bytes, answered: threading.Semaphore
) -> Attack:
    """Return an attack: many connections, each of which asks whenever it may."""

    def attack(end: threading.Event) -> None:
        with contextlib.ExitStack() as stack:
            left: dict[socket.socket, int] = {}  # bytes of its answer; 0: of its size
            for _ in range(CONNECTIONS):
                sock = socket.create_connection(
                    address, LONGEST_S, source_address=(HOSTILE_ADDRESS, 0)
                )
                stack.enter_context(sock)
                sock.sendall(framed)
                left[sock] = 0
            while not end.is_set():
                for sock in select.select(list(left), [], [], 0.1)[0]:
                    data = sock.recv(left[sock] or 4, socket.MSG_WAITALL)
                    if not data:
                        raise ConnectionError
                    if not left[sock]:
                        left[sock] = int.from_bytes(data, "big")
                        continue
                    left[sock] -= len(data)
                    if not left[sock]:
                        answered.release()
                        sock.sendall(framed)

    return attack


def addresses_of(broker: Broker) -> list[tuple[str, int]]:
    """Return the addresses of both listeners; clients of both are to be served."""
    pairs = (each.rpartition(":") for each in broker.listeners.values())
    addresses = [(host, int(port)) for host, _, port in pairs]
    assert len(addresses) == 2
    return addresses


def check_beside(
    broker: Broker, attack: bytes, requests: Callable[[int], Iterable[bytes]]
) -> None:
    """Judge the waits of others, while one client sends a request again and again.

    Args:
        broker: both use its first listener, the others its second, too.
        attack: the request.
        requests: what the others ask for, from a number on.
    """
    answered = threading.Semaphore(0)
    addresses = addresses_of(broker)
    clients = [Client(address) for address in addresses]
    with (
        wire.Connection(addresses[0], LONGEST_S) as old,
        hostile(asking_for_much(addresses[0], attack, answered)),
    ):
        assert answered.acquire(timeout=LONGEST_S)
        for number, client in zip(range(2 * ROUNDS), itertools.cycle(clients)):
            for request in requests(2 * number):
                client.ask(request)
            for request in requests(2 * number + 1):
                with client.timed():
                    old.ask(request)
            assert client.longest_s < LONGEST_WAIT_S
        # The attack goes on, too.
        assert answered.acquire(timeout=LONGEST_S)


@pytest.mark.parametrize("broker", ["core", "Python"], indirect=True)
def test_requests_that_compute_for_long_keep_no_other_client_waiting(broker):
    produce = wire.produce("kept", 0, wire.batch_of_size(1000))

    def requests(number: int) -> tuple[bytes, ...]:
        # A name that was not asked for before: the core has no answer for it.
        return wire.metadata([f"other-{number}"]), produce

    check_beside(broker, wire.metadata(MANY), requests)
    with wire.Connection(addresses_of(broker)[0]) as connection:
        assert connection.end_offset("kept", 0) == 4 * ROUNDS


@pytest.mark.parametrize("broker", ["core"], indirect=True)
def test_requests_that_keep_the_coordinator_busy_keep_no_other_client_waiting(broker):
    def requests(number: int) -> tuple[bytes, ...]:
        return (describe_groups([f"other-{number}"]),)

    check_beside(broker, describe_groups(MANY), requests)

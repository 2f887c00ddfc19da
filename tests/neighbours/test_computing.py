"""A client whose requests compute for long keeps no other waiting, on any listener."""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import threading
from collections.abc import Callable
from typing import Final

import pytest

from mpbroker.ipc.compiled import PURE_PYTHON_VARIABLE
from tests.bench import wire
from tests.faults.test_kill_the_whole_tree import address_of
from tests.neighbours.clients import LONGEST_WAIT_S, Attack, Client, hostile
from tests.support.broker import Broker
from tests.support.patience import LONGEST_S

HOSTILE_ADDRESS: Final = "127.0.0.2"
# As many requests at a time, each of which takes a handler some 50 ms or more.
CONNECTIONS: Final = 400
NAMES: Final = 2500
ROUNDS: Final = 10


@pytest.fixture(params=["core", "Python"])
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


def asking_for_much(address: tuple[str, int], answered: threading.Semaphore) -> Attack:
    """Return an attack: many connections, each of which asks whenever it may."""
    framed = wire.metadata([f"none-{number}" for number in range(NAMES)])

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


def test_requests_that_compute_for_long_keep_no_other_client_waiting(broker):
    answered = threading.Semaphore(0)
    produce = wire.produce("kept", 0, wire.batch_of_size(1000))
    addresses = [
        (host, int(port))
        for host, _, port in (
            each.rpartition(":") for each in broker.listeners.values()
        )
    ]
    assert len(addresses) == 2
    clients = [Client(address) for address in addresses]
    with hostile(asking_for_much(addresses[0], answered)):
        assert answered.acquire(timeout=LONGEST_S)
        for number, client in zip(range(2 * ROUNDS), itertools.cycle(clients)):
            # A name that was not asked for before: the core has no answer for it.
            client.ask(wire.metadata([f"other-{number}"]))
            assert wire.parse_produce(client.ask(produce)).error_code == 0
            assert client.longest_s < LONGEST_WAIT_S
        # The attack goes on, too.
        assert answered.acquire(timeout=LONGEST_S)

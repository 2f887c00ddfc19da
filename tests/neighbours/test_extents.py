"""Clients that never end the requests they begin keep no other from being read."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from functools import partial
from typing import Final

import pytest

from mpbroker.ipc.arena import REQUEST_PART_BYTES
from tests.bench import wire
from tests.faults.test_kill_the_whole_tree import address_of
from tests.neighbours.clients import LONGEST_WAIT_S, Attack, Client, hostile
from tests.support.broker import Broker

TOPIC: Final = "wanted"
LARGEST: Final = 100 * 1024 * 1024
BATCH_BYTES: Final = 900_000
SENT: Final = 20_000
ROUNDS: Final = 40


@pytest.fixture
def address(make_broker: Callable[..., Broker]) -> tuple[str, int]:
    """A broker with one processor, and a topic."""
    broker = make_broker({"num.network.threads": 1})
    with wire.Connection(address_of(broker)) as connection:
        connection.create_topic(TOPIC, 4)
    return address_of(broker)


def announcing(
    address: tuple[str, int], size: int, begun: threading.Semaphore
) -> Attack:
    """Return an attack: begin a request, and send a byte now and then."""

    def attack(end: threading.Event) -> None:
        with socket.create_connection(address) as sock:
            sock.sendall(wire.api_versions())
            sock.recv(4096)  # so the processor has the connection, and reads it next
            sock.sendall(struct.pack(">i", size) + bytes(SENT))
            begun.release()
            while not end.wait(1.0):
                sock.sendall(b"\0")

    return attack


def ask_all_the_while(client: Client, framed: bytes, rounds: int = ROUNDS) -> None:
    for _ in range(rounds):
        for produced in wire.parse_produce_to_several(client.ask(framed)):
            assert produced.error_code == 0


SMALL = wire.produce(TOPIC, 0, wire.batch_of_size(20 * 1024))
assert len(SMALL) > REQUEST_PART_BYTES
MEDIUM = wire.produce(TOPIC, 0, wire.batch_of_size(BATCH_BYTES))
LARGE = wire.produce_to_several(
    TOPIC, [(number, wire.batch_of_size(BATCH_BYTES)) for number in range(4)]
)
assert len(LARGE) > 2 * 1024 * 1024  # more than any producer sends by default


@pytest.mark.parametrize("framed", [SMALL, LARGE], ids=["small", "large"])
def test_three_senders_of_the_largest_requests(address, framed):
    begun = threading.Semaphore(0)
    announce = partial(announcing, address, begun=begun)
    client = Client(address)
    with hostile(announce(LARGEST), announce(LARGEST), announce(65_994_676)):
        for _ in range(3):
            begun.acquire()
        ask_all_the_while(client, framed)
    assert client.longest_s < LONGEST_WAIT_S


def test_many_senders_of_requests_as_producers_send_them(address):
    begun = threading.Semaphore(0)
    announce = partial(announcing, address, 1 << 20, begun)
    client = Client(address)
    count = 300  # more than fit the memory of a processor, which is 264 MiB
    with hostile(*(announce() for _ in range(count))):
        for _ in range(count):
            begun.acquire()
        ask_all_the_while(client, MEDIUM, rounds=8)
    assert client.longest_s < LONGEST_WAIT_S

"""Connections that announce requests and send no more keep no other from its slot."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from typing import Final

import pytest

from mpbroker.ipc.layout import SLOTS_PER_PROCESSOR
from tests.bench import wire
from tests.faults.test_kill_the_whole_tree import address_of
from tests.neighbours.clients import LONGEST_WAIT_S, Attack, Client, hostile
from tests.support.broker import Broker

MANY: Final = SLOTS_PER_PROCESSOR + 108  # more than a processor has slots
LARGEST: Final = 100 * 1024 * 1024
ROUNDS: Final = 40
TOPIC: Final = "wanted"
SMALL: Final = wire.produce(TOPIC, 0, wire.batch_of_size(20 * 1024))
HOSTILE_ADDRESS: Final = "127.0.0.2"


@pytest.fixture
def address(make_broker: Callable[..., Broker]) -> tuple[str, int]:
    """A broker with one processor, and a topic."""
    broker = make_broker({"num.network.threads": 1})
    with wire.Connection(address_of(broker)) as connection:
        connection.create_topic(TOPIC)
    return address_of(broker)


def announcing(
    address: tuple[str, int], begun: threading.Event, count: int, size: int
) -> Attack:
    """Return an attack: say on each of many connections that much is to come."""

    def attack(end: threading.Event) -> None:
        with contextlib.ExitStack() as stack:
            for number in range(count):
                if end.is_set():
                    return
                sock = socket.create_connection(
                    address, LONGEST_WAIT_S, source_address=(HOSTILE_ADDRESS, 0)
                )
                stack.enter_context(sock)
                if number % 100 == 0 and number < SLOTS_PER_PROCESSOR - 100:
                    sock.sendall(wire.api_versions())
                    sock.recv(4096)  # so that no queue of sockets overflows
                sock.sendall(struct.pack(">i", size))
            begun.set()
            end.wait()

    return attack


@pytest.mark.parametrize("size", [LARGEST, 1 << 20], ids=["largest", "small"])
def test_many_that_announce_requests_keep_their_slots_from_nobody(address, size):
    begun = threading.Event()
    client = Client(address)
    with hostile(announcing(address, begun, MANY, size)):
        assert begun.wait(120)
        for _ in range(ROUNDS):
            client.ask(wire.api_versions())
    assert client.longest_s < LONGEST_WAIT_S


def test_a_client_that_announces_many_requests_has_but_its_turn(address):
    """In the order in which they came, the memory went to 2,500 before the next."""
    begun = threading.Event()
    client = Client(address)
    with hostile(announcing(address, begun, 2500, 1 << 20)):
        assert begun.wait(120)
        for _ in range(3):
            produced = wire.parse_produce_to_several(client.ask(SMALL))
            assert [each.error_code for each in produced] == [0]
    assert client.longest_s < LONGEST_WAIT_S

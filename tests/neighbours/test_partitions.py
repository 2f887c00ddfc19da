"""A client that asks for more topics than fit keeps no other from creating its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import pytest

from tests.bench import wire
from tests.faults.test_kill_the_whole_tree import address_of
from tests.neighbours.clients import LONGEST_WAIT_S, Attack, Client, hostile
from tests.support.broker import Broker

CAPACITY: Final = 1000
NAMES: Final = 2000


@pytest.fixture
def address(make_broker: Callable[..., Broker]) -> tuple[str, int]:
    broker = make_broker({"max.partitions": CAPACITY, "num.partitions": 1})
    with wire.Connection(address_of(broker)) as connection:
        connection.create_topic("kept")
    return address_of(broker)


def asking(address: tuple[str, int], is_full: threading.Event) -> Attack:
    """Return an attack: ask for names that do not exist, and so create them."""

    def attack(end: threading.Event) -> None:
        names = [f"hostile-{number}" for number in range(NAMES)]
        with wire.Connection(address) as connection:
            while not end.is_set():
                connection.ask(wire.metadata(names, creates=True))
                is_full.set()

    return attack


def test_names_that_are_asked_for_leave_room_for_topics_that_are_created(address):
    is_full = threading.Event()
    produce = wire.produce("kept", 0, wire.batch_of_size(1000))
    with hostile(asking(address, is_full)):
        assert is_full.wait(60)
        client = Client(address)
        for number in range(20):
            with client.waiting() as connection:
                assert connection.create_topic(f"wanted-{number}", 10)
            answer = wire.parse_produce(client.ask(produce))
            assert answer.error_code == 0
    assert client.longest_s < LONGEST_WAIT_S
    with wire.Connection(address) as connection:
        with pytest.raises(wire.AnswerError, match=r"max\.partitions"):
            connection.create_topic("too-many", CAPACITY // 4)
        assert wire.parse_produce(connection.ask(produce)).error_code == 0

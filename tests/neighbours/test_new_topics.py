"""A client that makes and deletes 10,000 topics at a time keeps no other waiting."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Final

import pytest

from tests.bench import wire
from tests.faults.test_kill_the_whole_tree import address_of
from tests.neighbours.clients import LONGEST_WAIT_S, Attack, Client, hostile
from tests.support.broker import Broker
from tests.support.patience import LONGEST_S

TOPIC: Final = "kept"
TOPICS: Final = 10_000  # as many as one request may make
ROUNDS: Final = 10


@pytest.fixture
def address(make_broker: Callable[..., Broker]) -> tuple[str, int]:
    broker = make_broker({"num.network.threads": 1, "num.io.threads": 2})
    with wire.Connection(address_of(broker)) as connection:
        connection.create_topic(TOPIC)
    return address_of(broker)


def making(address: tuple[str, int], made: threading.Semaphore) -> Attack:
    """Return an attack: make 10,000 topics and delete them, again and again."""

    def attack(end: threading.Event) -> None:
        names = [f"hostile-{number}" for number in range(TOPICS)]
        with wire.Connection(address, LONGEST_S) as connection:
            while not end.is_set():
                connection.ask(wire.create_topics(names))
                assert connection.end_offset(names[-1], 0) == 0
                made.release()
                connection.ask(wire.delete_topics(names))

    return attack


def test_thousands_of_new_topics_keep_no_other_client_waiting(address):
    made = threading.Semaphore(0)
    batch = wire.batch_of_size(1000)
    produce = wire.produce(TOPIC, 0, batch)
    client = Client(address)
    with wire.Connection(address, LONGEST_S) as old, hostile(making(address, made)):
        is_over = False
        for number in itertools.count():
            with client.timed():
                assert wire.parse_produce(old.ask(produce)).error_code == 0
            with client.waiting() as new:
                fetched = new.ask(wire.fetch(TOPIC, 0, number, max_bytes=1))
                assert wire.parse_fetch(fetched).error_code == 0
            with client.timed():
                assert old.create_topic(f"wanted-{number}")
            is_over = is_over or made.acquire(blocking=False)
            if number >= ROUNDS and is_over:
                break
    with wire.Connection(address) as connection:
        assert connection.end_offset(TOPIC, 0) == number + 1
    assert client.longest_s < LONGEST_WAIT_S

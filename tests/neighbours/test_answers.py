"""Clients that do not read their answers keep no other from getting its own."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from typing import Final

import pytest

from tests.bench import wire
from tests.broker.resizing import resize, wait_for_sizes
from tests.faults.test_kill_the_whole_tree import address_of
from tests.neighbours.clients import LONGEST_WAIT_S, Attack, Client, hostile
from tests.support.broker import Broker

TOPIC: Final = "wanted"
HANDLERS: Final = 2
# Small enough that records are copied into the answer. The answer for all partitions
# has 4 MiB to the page, so that 16 fill the memory of a handler and leave no gap.
BATCH: Final = wire.batch_of_size(30 * 1024)
PARTITION_BYTES: Final = len(BATCH) + 39
LARGE_BYTES: Final = 4 * 1024 * 1024
WHOLE, REST = divmod(LARGE_BYTES - 2000, PARTITION_BYTES)
PARTITIONS: Final = WHOLE + 1
ROUNDS: Final = 30


def fetch(partitions: int) -> bytes:
    """Ask for the batch of each of some partitions."""
    asked = [
        struct.pack(">iiqiqi", number, -1, 0, -1, -1, 1 << 20) + wire.NO_TAGS
        for number in range(partitions)
    ]
    topic = wire.compact(TOPIC.encode()) + wire.array(asked) + wire.NO_TAGS
    head = struct.pack(">iiiibii", -1, 0, 1, 8 << 20, 0, 0, -1)
    end = wire.array([]) + wire.compact(b"") + wire.NO_TAGS
    return wire.request(wire.FETCH, head + wire.array([topic]) + end)


@pytest.fixture
def broker(make_broker: Callable[..., Broker]) -> Broker:
    """A broker with two handlers, and a topic of 4 MiB."""
    broker = make_broker({"num.network.threads": 1, "num.io.threads": HANDLERS})
    with wire.Connection(address_of(broker)) as connection:
        connection.create_topic(TOPIC, PARTITIONS)
        batches = [(number, BATCH) for number in range(WHOLE)]
        last = wire.record_batch([wire.RecordSpec(bytes(REST))])
        connection.ask(wire.produce_to_several(TOPIC, [*batches, (WHOLE, last)]))
        length = len(connection.ask(fetch(PARTITIONS)))
    assert LARGE_BYTES - 4096 < length <= LARGE_BYTES - 4
    return broker


def not_reading(address: tuple[str, int], answered: threading.Semaphore) -> Attack:
    """Return an attack: ask for a large answer, and read no more than its beginning."""

    def attack(end: threading.Event) -> None:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(address)
            sock.sendall(fetch(PARTITIONS))
            sock.settimeout(1.0)
            while not end.is_set():
                try:
                    if not sock.recv(1):
                        return
                    break
                except TimeoutError:
                    continue  # others that do not read came first
            answered.release()
            while not end.wait(1.0):
                if not sock.recv(1):
                    return

    return attack


def test_many_that_do_not_read_large_answers(broker):
    address, answered = address_of(broker), threading.Semaphore(0)
    client = Client(address)
    with hostile(*(not_reading(address, answered) for _ in range(70))):
        for _ in range(16 * HANDLERS - 4):
            answered.acquire()
        for _ in range(ROUNDS):
            assert len(client.ask(fetch(1))) > len(BATCH)
        assert len(client.ask(fetch(20))) > 20 * len(BATCH)
    assert client.longest_s < LONGEST_WAIT_S


def test_handlers_retire_while_clients_do_not_read(broker):
    address, answered = address_of(broker), threading.Semaphore(0)
    client = Client(address)
    with hostile(*(not_reading(address, answered) for _ in range(70))):
        for _ in range(16 * HANDLERS - 4):
            answered.acquire()
        resize(broker, handlers=1)
        for _ in range(ROUNDS):
            assert len(client.ask(fetch(1))) > len(BATCH)
        wait_for_sizes(broker, 1, 1)
    assert client.longest_s < LONGEST_WAIT_S
    assert "did not retire" not in broker.log_path.read_text()

"""A client that writes to a disk that hangs keeps handlers, and no other client.

As long as it has fewer requests than there are handlers, that is: each keeps one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from mpbroker.inspect.process_state import process_state
from tests.bench import wire
from tests.broker.load import children
from tests.faults.test_kill_the_whole_tree import address_of
from tests.neighbours.clients import LONGEST_WAIT_S, Client
from tests.support.broker import Broker
from tests.support.children import wait_until
from tests.support.own_disk import freezable_disk, frozen
from tests.support.patience import LONGEST_S

HANDLERS: Final = 4
ROUNDS: Final = 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with freezable_disk(tmp_path) as path:
        yield path


def topic_on(folder: Path) -> str:
    (found,) = folder.glob("topic-*-0")
    return found.name.removesuffix("-0")


def test_a_disk_that_hangs_keeps_those_waiting_that_use_it(
    disk: Path, make_broker: Callable[..., Broker], tmp_path: Path
) -> None:
    good, bad = tmp_path / "good", disk / "bad"
    broker = make_broker({"num.io.threads": HANDLERS, "log.dirs": f"{good},{bad}"})
    address = address_of(broker)
    batch = wire.batch_of_size(1000)
    client = Client(address)
    with contextlib.ExitStack() as stack:
        old = stack.enter_context(wire.Connection(address, LONGEST_S))
        for number in range(2):  # one on each disk
            old.create_topic(f"topic-{number}")
            answer = old.ask(wire.produce(f"topic-{number}", 0, batch))
            assert wire.parse_produce(answer).error_code == 0
        kept, hung = topic_on(good), topic_on(bad)
        produce = wire.produce(kept, 0, batch)
        writers = [
            stack.enter_context(wire.Connection(address, LONGEST_S))
            for _ in range(HANDLERS - 1)
        ]
        with frozen(disk):
            for writer in writers:
                writer.send(wire.produce(hung, 0, batch))
            wait_until(lambda: "D" in map(process_state, children(broker).values()))
            for number in range(1, ROUNDS):
                with client.timed():
                    assert wire.parse_produce(old.ask(produce)).error_code == 0
                with client.waiting() as new:
                    fetch = wire.fetch(kept, 0, number, max_bytes=1 << 20)
                    assert wire.parse_fetch(new.ask(fetch)).records
                client.ask(wire.metadata([f"other-{number}"]))
        for writer in writers:
            assert wire.parse_produce(writer.receive()).error_code == 0
    assert client.longest_s < LONGEST_WAIT_S

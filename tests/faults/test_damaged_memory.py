"""A stray store into shared memory is noticed, and nobody trusts that memory again."""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Callable

import pytest

from mpbroker.ipc.layout import (
    CONTROL_WORDS,
    FENCE,
    HEADER,
    HEADER_MAGIC,
    RESPONSE_RINGS,
    RING_FENCE,
    fences,
    response_ring,
)
from tests.bench import wire
from tests.broker.load import children
from tests.faults.test_kill_one_process import wait_until
from tests.faults.test_kill_the_whole_tree import address_of
from tests.support.broker import Broker
from tests.support.patience import LONGEST_S


def scribble(broker: Broker, word: int) -> None:
    """Overwrite a word of the control segment, from outside."""
    folder = f"/proc/{broker.pid}/fd"
    for fd in os.listdir(folder):
        if os.readlink(f"{folder}/{fd}").startswith("/memfd:mpbroker-control"):
            opened = os.open(f"{folder}/{fd}", os.O_RDWR)
            with mmap.mmap(opened, os.fstat(opened).st_size) as mapped:
                mapped[word * 8 : word * 8 + 8] = b"scribble"
            os.close(opened)
            return
    pytest.fail("no control segment")


@pytest.mark.parametrize(
    "word",
    [RESPONSE_RINGS - 1, response_ring(0) + RING_FENCE, HEADER + HEADER_MAGIC],
    ids=["behind the request ring", "before a ring's entries", "the magic number"],
)
def test_all_processes_start_again_on_fresh_memory_and_nothing_is_lost(
    make_broker: Callable[..., Broker], word: int
) -> None:
    broker = make_broker()
    pid, before = broker.pid, set(children(broker).values())
    with wire.Connection(address_of(broker)) as connection:
        connection.create_topic("kept")
        batch = wire.record_batch([wire.RecordSpec(b"acknowledged")])
        request = wire.produce("kept", 0, batch, acks=-1)
        assert wire.parse_produce(connection.ask(request)) == (wire.ERROR_NONE, 0)
    scribble(broker, word)
    # A death makes the supervisor look at once; without one it takes some seconds.
    os.kill(min(before), signal.SIGKILL)
    wait_for_new_children(broker, before)
    assert broker.pid == pid and broker.is_running
    # Where it was, though the port was any: the sockets are the same.
    with wire.Connection(address_of(broker), LONGEST_S) as connection:
        stored = connection.read_all("kept", 0)
        assert [record.value for record in stored] == [b"acknowledged"]
        assert wire.parse_produce(connection.ask(request)) == (wire.ERROR_NONE, 1)
    assert "shared memory is damaged" in broker.log_tail()


def test_damage_is_noticed_without_any_death(
    make_broker: Callable[..., Broker],
) -> None:
    broker = make_broker()
    before = set(children(broker).values())
    scribble(broker, CONTROL_WORDS - 1)
    said = "shared memory is damaged"
    wait_until("it is noticed", lambda: said in broker.log_tail())
    wait_for_new_children(broker, before)  # the old ones take connections with them
    with wire.Connection(address_of(broker), LONGEST_S) as connection:
        connection.ask(wire.api_versions())


def wait_for_new_children(broker: Broker, before: set[int]) -> None:
    """Until there are some, and none of those before."""

    def all_new() -> bool:
        # Not by its telemetry, which may not be there just now.
        now = broker.processes().keys() - {broker.pid}
        return bool(now) and not now & before

    wait_until("all children are new", all_new)


def test_fences_are_words_of_the_segment_each_with_a_place_of_its_own() -> None:
    assert len(set(fences())) == len(fences())
    assert all(0 < word < CONTROL_WORDS for word in fences())
    assert 0 < FENCE < 1 << 63

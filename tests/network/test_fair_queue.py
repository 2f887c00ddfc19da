"""Who waits is served client by client, however many connections a client has."""

from __future__ import annotations

import mmap
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mpbroker.ipc.layout import (
    CONNECTION_PEER_ADDRESS,
    CONTROL_WORDS,
    connection_row,
)
from mpbroker.network.fair_queue import FairQueue

WORDS = memoryview(mmap.mmap(-1, CONTROL_WORDS * 8)).cast("q")


class Waiting:
    """The part of a channel that the queue looks at."""

    def __init__(self, connection: int, client: int) -> None:
        self.row = connection_row(connection)
        self.client = client
        WORDS[self.row + CONNECTION_PEER_ADDRESS + 1] = client


def waiting(clients: str) -> list[Any]:
    return [Waiting(number, ord(client)) for number, client in enumerate(clients)]


def served(queue: FairQueue) -> str:
    return "".join(chr(queue.popleft().client) for _ in range(len(queue)))  # type: ignore[attr-defined]


def test_each_client_has_its_turn():
    queue = FairQueue(WORDS)
    for each in waiting("aaaaabca"):
        queue.append(each)
    assert len(list(queue)) == len(queue) == 8
    assert served(queue) == "abcaaaaa"
    assert not queue


def test_one_that_is_put_back_is_the_next():
    queue = FairQueue(WORDS)
    first, *others = waiting("abab")
    for each in (first, *others):
        queue.append(each)
    assert queue.popleft() is first
    queue.appendleft(first)
    assert queue.popleft() is first
    assert served(queue) == "bab"


@given(st.text("abc", max_size=30), st.data())
def test_those_of_a_client_keep_their_order_and_none_is_lost(clients, data):
    queue, left = FairQueue(WORDS), waiting(clients)
    coming, gone = list(left), []
    while coming or queue:
        if coming and (not queue or data.draw(st.booleans())):
            queue.append(coming.pop(0))
        else:
            gone.append(queue.popleft())
    assert sorted(map(id, gone)) == sorted(map(id, left))
    for client in set(clients):
        mine = [each for each in left if each.client == ord(client)]
        assert [each for each in gone if each.client == ord(client)] == mine

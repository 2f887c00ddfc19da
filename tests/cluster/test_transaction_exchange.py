"""What nodes tell each other about offsets in transactions, in a real database."""

from __future__ import annotations

import asyncio
import os
import select
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mpbroker.cluster.database import ClusterDatabase, Connection
from mpbroker.cluster.groups.group_store import (
    Event,
    GroupStore,
    Loaded,
    Lost,
    ShardTerm,
)
from mpbroker.cluster.groups.transaction_exchange import (
    Answered,
    Asked,
    Ended,
    Ends,
    OffsetsEnd,
    Question,
    ShardEnd,
)
from mpbroker.cluster.migrations import create_cluster
from mpbroker.metadata.cluster_nodes import NodeEpoch, write_node_epoch
from tests.cluster.conftest import execute
from tests.cluster.test_membership import Site

PATIENCE_S = 60.0
ENDS = (
    "SELECT shard, producer_id, producer_epoch, is_commit FROM mpbroker.transaction_end"
)
EPOCH = "SELECT epoch FROM mpbroker.transaction_coordinator"
END = OffsetsEnd(7, 1000, 3, True)


class Node:
    """A node that has joined, and what its thread has told."""

    def __init__(self, site: Site, path: Path) -> None:
        self.site = site
        self.path = path
        self.member = site.node()
        self.terms: dict[int, ShardTerm] = {}
        self.ends: list[ShardEnd] = []
        self.told: list[Event] = []
        self.start()

    def start(self) -> None:
        epoch = NodeEpoch(self.member.node_id, self.member.epoch)
        write_node_epoch(str(self.path), epoch)
        self.store = GroupStore(self.site.url, str(self.path))
        self._poll = select.epoll()
        self._poll.register(self.store.event_fd, select.EPOLLIN | select.EPOLLET)
        self.store.start()

    def close(self) -> None:
        self.store.end()
        self._poll.close()
        os.close(self.store.event_fd)

    def until(self, condition: Callable[[], object]) -> None:
        """Take events until a condition is true."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            left_s = deadline - time.monotonic()
            assert left_s > 0
            self._poll.poll(min(left_s, 0.1))
            for event in self.store.take_events():
                match event:
                    case Loaded(term, _):
                        self.terms[term.number] = term
                    case Lost(term):
                        self.terms.pop(term.number, None)
                    case Ends(ends):
                        self.ends = list(ends)
                    case Asked() | Answered() | Ended():
                        self.told.append(event)

    def until_told(self, *events: Event) -> None:
        self.until(lambda: all(each in self.told for each in events))

    def question(self, **changed: object) -> Question:
        asked = Question(uuid.uuid4(), "id\0é", 1000, 3, 7, True)._replace(**changed)  # type: ignore[arg-type]
        self.store.ask(asked)
        return asked


@pytest.fixture
def site(cluster_url: str) -> Iterator[Site]:
    made = Site(cluster_url)
    yield made
    made.close()


@pytest.fixture
def node(site: Site, tmp_path: Path) -> Iterator[Callable[[], Node]]:
    """Return a function that starts a node."""
    nodes: list[Node] = []

    def start() -> Node:
        nodes.append(Node(site, tmp_path / f"epoch{len(nodes)}"))
        return nodes[-1]

    yield start
    for each in nodes:
        each.close()


def coordinating(node: Callable[[], Node]) -> Node:
    made = node()
    made.store.coordinate(True)
    return made


def ends(site: Site) -> list[OffsetsEnd]:
    return [OffsetsEnd(*row) for row in execute(site.url, ENDS)]


def test_a_question_is_answered_by_the_node_that_coordinates(site, node):
    one, two, three = node(), coordinating(node), node()
    asked = one.question()
    two.until_told(Asked([asked]))
    two.store.answer(asked.id, 51)
    one.until_told(Answered(asked.id, 51))
    assert not any(isinstance(each, Asked) for each in [*one.told, *three.told])
    one.until(
        lambda: not execute(site.url, "SELECT 1 FROM mpbroker.transaction_question")
    )


def test_questions_are_told_once_while_they_wait_for_their_answers(node):
    one, two = node(), coordinating(node)
    first = one.question()
    two.until_told(Asked([first]))
    second = one.question(adds=False)
    two.until_told(Asked([second]))
    two.store.answer(second.id, 0)
    two.store.answer(first.id, 0)
    one.until_told(Answered(first.id, 0), Answered(second.id, 0))
    assert len(two.told) == 2


def test_an_answer_that_nobody_waits_for_is_not_told(node):
    one, two = node(), coordinating(node)
    first = one.question()
    two.until_told(Asked([first]))
    one.store.forget(first.id)
    two.store.answer(first.id, 0)
    second = one.question()
    two.until_told(Asked([second]))
    two.store.answer(second.id, 0)
    one.until_told(Answered(second.id, 0))
    assert len(one.told) == 1


def test_an_old_question_is_forgotten(site, node):
    one = node()
    one.question()
    one.until(
        lambda: execute(
            site.url,
            "UPDATE mpbroker.transaction_question"
            " SET asked_at = asked_at - interval '61 seconds' RETURNING 1",
        )
    )
    two = coordinating(node)
    two.until(
        lambda: not execute(site.url, "SELECT 1 FROM mpbroker.transaction_question")
    )
    assert two.told == []


def test_an_end_stays_until_its_shard_has_written_it(site, node):
    home = coordinating(node)
    home.until(lambda: 7 in home.terms)
    home.store.end_offsets(END)
    home.until(lambda: [each.end for each in home.ends] == [END])
    (found,) = home.ends
    assert found.term == home.terms[7].serial
    assert ends(site) == [END]
    assert home.told == []
    home.store.put(home.terms[7], [(b"k", b"v")], found.serial)
    home.until_told(Ended(7, 1000))
    home.until(lambda: not home.ends)
    assert ends(site) == []
    assert execute(site.url, "SELECT value FROM mpbroker.group_record") == [(b"v",)]


def test_an_end_waits_for_the_next_owner_of_its_shard(site, node):
    """The first owner has not written what the end means."""
    one = node()
    one.until(lambda: 7 in one.terms)
    home = coordinating(node)
    home.store.end_offsets(END)
    one.until(lambda: one.ends)
    one.store.take_no_more()
    one.store.stop(one.terms[7])
    home.until(lambda: 7 in home.terms and home.ends)
    assert [(each.serial, each.end) for each in home.ends] == [
        (one.ends[0].serial, END)
    ]
    home.store.put(home.terms[7], [(b"k", b"v")], home.ends[0].serial)
    home.until_told(Ended(7, 1000))
    one.until(lambda: not one.ends)
    assert ends(site) == []


def test_an_end_that_is_told_again_by_the_next_process_is_there_once(site, node):
    home = coordinating(node)
    home.until(lambda: 7 in home.terms)
    home.store.end_offsets(END)
    home.until(lambda: home.ends)
    home.close()
    home.start()
    home.store.coordinate(True)
    home.store.end_offsets(END)
    home.until(lambda: execute(site.url, EPOCH) == [(2,)])
    home.until(lambda: 7 in home.terms and home.ends)
    assert ends(site) == [END]
    assert home.told == []


PUT = "SELECT mpbroker.put_transaction_ends_v1($1, '{7}', '{1000}', '{3}', '{true}')"
FENCE = "SELECT mpbroker.fence_transaction_ends_v1($1, $2)"


def test_an_end_of_an_earlier_process_that_comes_late_is_refused(site):
    member = site.node()
    own = member.node_id, member.epoch
    (((first,),), ((second,),)) = [execute(site.url, FENCE, *own) for _ in range(2)]
    assert first < second
    assert execute(site.url, PUT, first) == [(False,)]
    assert ends(site) == []
    assert execute(site.url, PUT, second) == [(True,)]
    assert ends(site) == [END]
    # A node that was started anew does not fence what its successor has begun.
    assert execute(site.url, FENCE, own[0], own[1] - 1) == [(None,)]
    assert execute(site.url, PUT, second) == [(True,)]


def test_a_write_whose_answer_is_lost_is_fenced_before_it_is_repeated(
    site, node, monkeypatch
):
    """The first write may come late, and would end the producer's next transaction."""
    real = ClusterDatabase.run
    lost: list[object] = []

    async def run(self, work, *, timeout_s=None):
        async def losing(connection: Connection) -> object:
            result = await work(connection)
            if work.__qualname__.startswith("TransactionExchange") and not lost:
                lost.append(result)
                raise ConnectionError("the answer is lost")
            return result

        return await real(self, losing, timeout_s=timeout_s)

    monkeypatch.setattr(ClusterDatabase, "run", run)
    home = coordinating(node)
    home.until(lambda: 7 in home.terms)
    home.store.end_offsets(END)
    home.until(lambda: home.ends and execute(site.url, EPOCH) == [(2,)])
    assert len(lost) == 1
    assert ends(site) == [END]


def test_what_is_told_while_the_database_is_away_comes_later(own_server, tmp_path):
    url = own_server.url("postgres")

    async def make() -> None:
        async with ClusterDatabase(url) as database:
            await create_cluster(database, "here", "s3://bucket/prefix")

    asyncio.run(make())
    site = Site(url)
    home = Node(site, tmp_path / "epoch")
    try:
        home.store.coordinate(True)
        home.until(lambda: 7 in home.terms)
        own_server.stop()
        asked = home.question()
        home.store.end_offsets(END)
        own_server.start()
        home.until_told(Asked([asked]))
        home.until(lambda: 7 in home.terms and home.ends)
        assert ends(site) == [END]
    finally:
        home.close()
        site.close()

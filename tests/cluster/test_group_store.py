"""The thread that keeps a node's shards of groups, with a real database."""

from __future__ import annotations

import asyncio
import os
import select
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mpbroker.cluster.database import ClusterDatabase
from mpbroker.cluster.groups import group_store
from mpbroker.cluster.groups.group_shards import GroupShards, adopt_records
from mpbroker.cluster.groups.group_store import (
    Event,
    GroupStore,
    Held,
    Loaded,
    Lost,
    ShardTerm,
    Spare,
    Taken,
    Written,
)
from mpbroker.cluster.membership import boot_time
from mpbroker.cluster.migrations import create_cluster
from mpbroker.metadata.cluster_nodes import (
    GROUP_SHARD_COUNT,
    NodeEpoch,
    write_node_epoch,
)
from tests.cluster.conftest import execute
from tests.cluster.test_membership import END_LEASES, Site

PATIENCE_S = 60.0
ALL = set(range(GROUP_SHARD_COUNT))


class Node:
    """A node that has joined, with its store, which runs."""

    def __init__(
        self,
        site: Site,
        path: Path,
        prepare: Callable[[GroupStore], object] = lambda store: None,
    ) -> None:
        self.site = site
        self.path = path
        self.member = site.node()
        self.join_again(first=True)
        self.store = GroupStore(site.url, str(path))
        self.terms: dict[int, ShardTerm] = {}
        self.loaded: dict[int, dict[bytes, bytes]] = {}
        self.written: dict[int, int] = {}
        self.lost: set[ShardTerm] = set()
        self.spare: set[int] = set()
        self.held_until_s = 0.0
        self._poll = select.epoll()
        self._poll.register(self.store.event_fd, select.EPOLLIN | select.EPOLLET)
        prepare(self.store)
        self.store.start()

    def join_again(self, *, first: bool = False) -> None:
        if not first:
            self.site.do(self.member.join)
        epoch = NodeEpoch(self.member.node_id, self.member.epoch)
        write_node_epoch(str(self.path), epoch)

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
            self._poll.poll(left_s)
            for event in self.store.take_events():
                self._take(event)

    def _take(self, event: Event) -> None:
        match event:
            case Taken(term):
                self.terms[term.number] = term
                self.written[term.number] = 0
            case Loaded(term, records):
                assert self.terms[term.number] == term
                self.loaded[term.number] = dict(records)
            case Written(term, puts):
                if self.terms.get(term.number) == term:
                    assert puts > self.written[term.number]
                    self.written[term.number] = puts
            case Spare(term):
                self.spare.add(term.number)
            case Lost(term):
                self.lost.add(term)
                if self.terms.get(term.number) == term:
                    self.forget(term.number)
            case Held(until_s, _):
                self.held_until_s = max(until_s, self.held_until_s)

    def forget(self, number: int) -> None:
        del self.terms[number]
        self.loaded.pop(number, None)

    def has(self, numbers: set[int]) -> bool:
        return self.loaded.keys() == numbers

    def put(self, number: int, **records: bytes | None) -> None:
        pairs = [(key.encode(), value) for key, value in records.items()]
        self.store.put(self.terms[number], pairs)


@pytest.fixture
def site(cluster_url: str) -> Iterator[Site]:
    made = Site(cluster_url)
    yield made
    made.close()


@pytest.fixture
def node(site: Site, tmp_path: Path) -> Iterator[Callable[..., Node]]:
    """Return a function that starts a node."""
    nodes: list[Node] = []

    def start(*arguments: Callable[[GroupStore], object]) -> Node:
        nodes.append(Node(site, tmp_path / f"epoch{len(nodes)}", *arguments))
        return nodes[-1]

    yield start
    for each in nodes:
        each.close()


def stored(site: Site, number: int) -> dict[bytes, bytes]:
    shards = GroupShards(site.database, NodeEpoch(0, 0))
    return dict(site.do(shards.records, number))


def test_a_node_takes_all_shards_and_writes_in_order(site, node):
    one = node()
    one.until(lambda: one.has(ALL))
    assert one.held_until_s > boot_time()
    for number in range(100):
        one.put(3, k=b"%d" % number, **{f"k{number}": b"v"})
    one.put(3, k1=None)
    one.put(4, k=b"other")
    one.until(lambda: one.written[3] == 101 and one.written[4] == 1)
    assert stored(site, 3)[b"k"] == b"99"
    assert len(stored(site, 3)) == 100
    assert stored(site, 4) == {b"k": b"other"}


def test_what_one_has_written_the_next_owner_loads(site, node):
    one = node()
    one.until(lambda: one.has(ALL))
    one.put(3, k=b"v")
    one.until(lambda: one.written[3] == 1)
    execute(site.url, END_LEASES)
    two = node()
    two.until(lambda: two.has(ALL))
    assert two.loaded[3] == {b"k": b"v"}
    one.until(lambda: not one.terms)  # it is told


def test_spare_shards_go_to_another_node_when_they_are_stopped(site, node):
    one = node()
    one.until(lambda: one.has(ALL))
    two = node()
    one.until(lambda: len(one.spare) == GROUP_SHARD_COUNT // 2)
    for number in list(one.spare):
        one.put(number, k=b"last")
        one.store.stop(one.terms[number])
        one.forget(number)
    two.until(lambda: two.has(one.spare))
    assert {each[b"k"] for each in two.loaded.values()} == {b"last"}
    assert one.has(ALL - one.spare)
    assert not one.lost


def test_a_shard_that_was_dropped_is_taken_again_in_a_higher_epoch(site, node):
    one = node()
    one.until(lambda: one.has(ALL))
    one.put(3, k=b"v")
    one.until(lambda: one.written[3] == 1)
    before = one.terms[3]
    one.store.drop(before)
    one.forget(3)
    one.store.put(before, [(b"k", b"late")])
    one.until(lambda: 3 in one.loaded)
    assert one.loaded[3] == {b"k": b"v"}
    assert one.terms[3].serial > before.serial
    (epoch,) = execute(site.url, "SELECT epoch FROM mpbroker.shard WHERE n = 3")
    assert epoch[0] == 3  # taken, begun, begun again


def test_a_node_that_joins_again_begins_anew_with_its_shards(site, node):
    one = node()
    one.until(lambda: one.has(ALL))
    terms = dict(one.terms)
    one.join_again()
    one.until(lambda: one.lost == set(terms.values()))
    one.until(lambda: one.has(ALL))
    one.put(3, k=b"v")
    one.until(lambda: one.written[3] == 1)


def test_groups_are_adopted_while_no_other_node_can_have_their_shards(
    site, node, tmp_path, monkeypatch
):
    """Also if the mark that says so cannot be made at first."""
    mark = tmp_path / "later" / "mark"
    owned: list[int] = []

    async def adopt(database: ClusterDatabase, records: Sequence[Any]) -> None:
        query = "SELECT n FROM mpbroker.shard WHERE node IS NOT NULL"
        owned.append(len(await database.rows(query)))
        await adopt_records(database, records)
        if len(owned) > 1:
            mark.parent.mkdir()

    monkeypatch.setattr(group_store, "adopt_records", adopt)
    records = [(3, b"k", b"v")]
    one = node(lambda store: store.adopt(records, str(mark)))
    one.until(lambda: one.has(ALL))
    assert owned == [len(ALL)] * 2
    assert one.loaded[3] == {b"k": b"v"}
    assert mark.exists()


def test_a_node_that_had_the_shards_earlier_reads_what_is_adopted(node, tmp_path):
    other = node()
    other.until(lambda: other.has(ALL))
    assert other.loaded[3] == {}
    before = other.terms[3]
    node(lambda store: store.adopt([(3, b"k", b"v")], str(tmp_path / "mark")))
    other.until(lambda: len(other.spare) == len(ALL) // 2)
    for number in other.spare:
        other.store.stop(other.terms[number])
    other.until(lambda: before in other.lost)
    other.until(lambda: other.loaded.get(3) == {b"k": b"v"})


def test_no_shard_is_loaded_until_the_groups_of_before_can_be_read(
    site, node, tmp_path
):
    """Nor can another node load it."""
    mark = str(tmp_path / "mark")
    one = node(lambda store: store.adopt(None, mark))
    deadline = time.monotonic() + PATIENCE_S
    owned: list[Any] = []
    while len(owned) < len(ALL):
        assert time.monotonic() < deadline
        query = "SELECT n FROM mpbroker.shard WHERE node IS NOT NULL"
        owned = execute(site.url, query)
    two = node()
    two.until(lambda: two.held_until_s)
    assert one.store.take_events() == []
    assert two.terms == {}
    one.store.adopt([(3, b"k", b"v")], mark)
    one.until(lambda: one.loaded.get(3) == {b"k": b"v"})


def test_a_record_that_the_database_refuses_loses_its_shard_only(site, node):
    one = node()
    one.until(lambda: one.has(ALL))
    before = one.terms[3]
    execute(
        site.url,
        "ALTER TABLE mpbroker.group_record ADD CHECK (value <> 'bad'::bytea)",
    )
    one.put(3, k=b"bad")
    one.until(lambda: before in one.lost)
    one.until(lambda: one.has(ALL))
    assert one.lost == {before}
    one.put(3, k=b"good")
    one.until(lambda: one.written[3] == 1)


def test_an_end_writes_what_was_given_and_releases_all(site, node):
    one = node()
    one.until(lambda: one.has(ALL))
    one.put(3, k=b"v")
    one.store.end()
    assert stored(site, 3) == {b"k": b"v"}
    owned = execute(site.url, "SELECT n FROM mpbroker.shard WHERE node IS NOT NULL")
    assert owned == []


def test_writes_wait_for_a_database_that_is_away(own_server, tmp_path):
    url = own_server.url("postgres")

    async def make() -> None:
        async with ClusterDatabase(url) as database:
            await create_cluster(database, "here", "s3://bucket/prefix")

    asyncio.run(make())
    site = Site(url)
    one = Node(site, tmp_path / "epoch")
    try:
        one.until(lambda: one.has(ALL))
        own_server.stop()
        for number in range(10):
            one.put(3, k=b"%d" % number)
        own_server.start()
        one.until(lambda: one.written[3] == 10)
        assert stored(site, 3) == {b"k": b"9"}
    finally:
        one.close()
        site.close()

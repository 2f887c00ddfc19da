"""Leases, node ids and shards, in a real database."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable, Iterator

import pytest

from mpbroker.cluster.database import ClusterDatabase
from mpbroker.cluster.errors import ClusterError, NodeFencedError
from mpbroker.cluster.groups.group_shards import GroupShards, HeldShard
from mpbroker.cluster.live_nodes import LiveNodes
from mpbroker.cluster.membership import (
    GIVE_UP_S,
    LEASE_S,
    Membership,
    NodeDescription,
    read_nodes,
)
from mpbroker.metadata.cluster_nodes import ClusterNodes, NodeEpoch
from tests.cluster.conftest import execute

SHARDS = 50
LONG_LEASE_S = 3600.0  # tests end leases themselves
END_LEASES = "UPDATE mpbroker.node SET lease_until = clock_timestamp()"


class Site:
    """A database and nodes, called without await."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.runner = asyncio.Runner()
        self.database = ClusterDatabase(url)
        self.now = 100.0

    def close(self) -> None:
        self.database.close()
        self.runner.close()

    def node(self, directory: uuid.UUID | None = None, **said: object) -> Membership:
        """Return a node that has joined."""
        description = NodeDescription(
            directory or uuid.uuid4(), ["PLAINTEXT://here:9092"], "1.0"
        )
        node = Membership(
            self.database,
            description._replace(**said),
            clock=lambda: self.now,
            lease_s=LONG_LEASE_S,
        )
        self.do(node.join)
        return node

    def do(self, call: Callable[..., Awaitable[object]], *arguments: object):
        return self.runner.run(call(*arguments))

    def take(self, node: Membership) -> list[HeldShard]:
        """Let a node take shards; return all that it has."""
        return self.do(shards_of(node).hold)

    def release(self, node: Membership, numbers: list[int]) -> None:
        self.do(shards_of(node).release, numbers)

    def balance(self, *nodes: Membership) -> list[dict[int, int]]:
        """Let nodes take and release until nothing changes; return their shards."""
        before = None
        while True:
            taken = []
            for node in nodes:
                shards = self.take(node)
                self.release(node, [s.number for s in shards if not s.keep])
                taken.append({s.number: s.epoch for s in shards if s.keep})
            if taken == before:
                return taken
            before = taken


def shards_of(node: Membership) -> GroupShards:
    return GroupShards(node._database, NodeEpoch(node.node_id, node.epoch))


@pytest.fixture
def site(cluster_url: str) -> Iterator[Site]:
    made = Site(cluster_url)
    yield made
    made.close()


def test_ids_are_given_out_asked_for_and_kept(site):
    directory = uuid.uuid4()
    first, asked, second = site.node(directory), site.node(node_id=7), site.node()
    assert [node.node_id for node in (first, asked, second)] == [1001, 7, 1002]
    again = site.node(directory)
    assert again.node_id == first.node_id
    assert again.epoch > second.epoch > asked.epoch > first.epoch


def test_two_nodes_with_one_id_are_refused_until_the_first_one_s_lease_ends(site):
    site.node(node_id=7)
    with pytest.raises(ClusterError, match=r"node 7 is running .*set another node.id"):
        site.node(node_id=7)
    execute(site.url, END_LEASES)
    assert site.node(node_id=7).node_id == 7


def test_a_directory_of_another_node_is_refused(site):
    directory = uuid.uuid4()
    site.node(directory, node_id=7)
    with pytest.raises(ClusterError, match=r"belong to node 7, not 8: set node.id=7"):
        site.node(directory, node_id=8)


def test_a_node_gives_up_before_the_database_does(site):
    assert GIVE_UP_S < LEASE_S
    node = site.node()
    site.now += GIVE_UP_S - 0.1
    assert node.holds_lease()
    site.do(node.renew)
    site.now += GIVE_UP_S - 0.1
    assert node.holds_lease()
    site.now += 0.2
    assert not node.holds_lease()
    site.do(node.renew)  # nobody has taken its id
    assert node.holds_lease()


def test_the_time_that_a_renewal_takes_counts_against_the_node(site):
    node = site.node()
    rows = site.database.row

    async def slow(*arguments: object, **options: object):
        site.now += GIVE_UP_S
        return await rows(*arguments, **options)

    site.database.row = slow
    site.do(node.renew)
    assert not node.holds_lease()


def test_a_node_that_was_started_again_fences_its_former_process(site):
    directory = uuid.uuid4()
    former, now = site.node(directory), site.node(directory)
    with pytest.raises(NodeFencedError):
        site.do(former.renew)
    assert not former.holds_lease()
    site.do(former.leave)
    assert site.take(former) == []
    site.do(now.renew)
    assert [node.is_live for node in site.do(read_nodes, site.database)] == [True]


def test_a_lease_is_kept_until_the_node_is_fenced(site):
    directory = uuid.uuid4()
    former = site.node(directory)

    async def keep() -> None:
        task = asyncio.ensure_future(former.keep(every_s=0.001))
        await site.database.rows(END_LEASES)
        while not (await read_nodes(site.database))[0].is_live:
            assert not task.done()
        await Membership(site.database, NodeDescription(directory, [], "1.0")).join()
        with pytest.raises(NodeFencedError):
            await task

    site.runner.run(keep())


def test_nodes_know_each_other(site):
    site.node(node_id=2, rack="b")
    site.do(site.node(node_id=1).leave)
    one, two = site.do(read_nodes, site.database)
    assert (one.id, one.is_live, one.rack) == (1, False, None)
    assert (two.id, two.is_live, two.rack, two.version) == (2, True, "b", "1.0")
    assert two.listeners == ["PLAINTEXT://here:9092"]


def test_offline_partitions_are_those_that_a_node_told_of_since_it_joined(
    site, tmp_path
):
    one, two, three = (bytes([n]) * 16 for n in (1, 2, 3))
    (tmp_path / "__cluster_metadata-0").mkdir()
    look = LiveNodes(site.database, str(tmp_path)).look
    told = ClusterNodes(str(tmp_path), 99, ["PLAINTEXT"])
    directory = uuid.uuid4()
    former, other = site.node(directory), site.node()

    def tell(node: Membership, **partitions: list[int]) -> None:
        content = json.dumps(partitions) if partitions else ""
        tells = "SELECT mpbroker.tell_offline_v1($1, $2, $3)"
        site.do(site.database.rows, tells, node.node_id, node.epoch, content)
        site.do(look)

    site.do(look)
    assert told.offline() == {}
    tell(former, **{one.hex(): [0], two.hex(): [3]})
    assert told.offline() == {one: {0}, two: {3}}
    tell(other, **{three.hex(): [1, 2]})
    assert told.offline() == {one: {0}, two: {3}, three: {1, 2}}
    tell(former, **{one.hex(): [0]})
    assert told.offline() == {one: {0}, three: {1, 2}}
    now = site.node(directory)
    tell(former, **{two.hex(): [0]})  # too late
    assert told.offline() == {three: {1, 2}}
    tell(now, **{one.hex(): [4]})
    tell(other)
    assert told.offline() == {one: {4}}


def test_shards_are_spread_over_live_nodes_and_each_has_one_owner(site):
    one = site.node()
    (alone,) = site.balance(one)
    assert alone == dict.fromkeys(range(SHARDS), 1)
    two, three = site.node(), site.node()
    spread = site.balance(one, two, three)
    assert sorted(len(shards) for shards in spread) == [16, 17, 17]
    assert sorted(n for shards in spread for n in shards) == list(range(SHARDS))
    assert set(spread[0].values()) == {1}
    assert set(spread[1].values()) | set(spread[2].values()) == {2}


def test_shards_of_a_node_without_a_lease_go_on_elsewhere_with_a_higher_epoch(site):
    directory = uuid.uuid4()
    one, two = site.node(directory), site.node()
    site.balance(one, two)
    execute(site.url, f"{END_LEASES} WHERE id = $1", one.node_id)
    (taken,) = site.balance(two)
    assert len(taken) == SHARDS
    assert site.take(one) == []
    site.do(one.renew)  # it comes back, and has nothing left
    site.release(one, list(range(SHARDS)))
    assert site.balance(two) and len(site.take(one)) <= SHARDS // 2


def test_nodes_that_take_shards_at_once_never_share_one(site):
    nodes = [site.node() for _ in range(4)]

    async def all_at_once() -> list[int]:
        async def take(node: Membership) -> list[int]:
            async with ClusterDatabase(site.url) as database:
                node._database = database
                return [shard.number for shard in await shards_of(node).hold()]

        taken = await asyncio.gather(*map(take, nodes * 3))
        return [n for each in taken[-len(nodes) :] for n in each]

    numbers = site.runner.run(all_at_once())
    assert len(numbers) == len(set(numbers))

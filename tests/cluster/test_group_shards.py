"""The records of groups in a real database: only the owner of a shard writes them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import asyncpg
import pytest

from mpbroker.cluster.groups import group_shards
from mpbroker.cluster.groups.group_shards import GroupShards, OwnedShard
from mpbroker.cluster.membership import Membership
from mpbroker.metadata.cluster_nodes import GROUP_SHARD_COUNT, NodeEpoch
from tests.cluster.conftest import execute
from tests.cluster.test_membership import END_LEASES, Site, shards_of

ALL = range(GROUP_SHARD_COUNT)


@pytest.fixture
def site(cluster_url: str) -> Iterator[Site]:
    made = Site(cluster_url)
    yield made
    made.close()


class Owner:
    """A node with all the shards that it was given."""

    def __init__(self, site: Site, node: Membership) -> None:
        self.site = site
        self.node = node
        self.shards: GroupShards = shards_of(node)
        self.owned = {
            each.number: OwnedShard(each.number, each.epoch) for each in site.take(node)
        }

    def put(self, number: int, **records: bytes | None) -> set[int]:
        """Write records; return the shards that the node has lost."""
        return self.put_all({number: records})

    def put_all(self, records: dict[int, dict[str, bytes | None]]) -> set[int]:
        given = {
            self.owned[number]: {key.encode(): value for key, value in pairs.items()}
            for number, pairs in records.items()
        }
        return self.site.runner.run(self.shards.put(given))


def stored(site: Site, number: int) -> dict[bytes, bytes]:
    """Return what a shard has, whoever asks."""
    shards = GroupShards(site.database, NodeEpoch(0, 0))
    return dict(site.do(shards.records, number))


def test_the_owner_writes_replaces_and_deletes(site):
    owner = Owner(site, site.node())
    assert owner.put_all({0: {"a": b"1", "b": b"2"}, 1: {"a": b"3"}}) == set()
    assert stored(site, 0) == {b"a": b"1", b"b": b"2"}
    assert stored(site, 1) == {b"a": b"3"}
    assert owner.put(0, a=b"4", b=None, c=None) == set()
    assert stored(site, 0) == {b"a": b"4"}
    assert stored(site, 1) == {b"a": b"3"}


def test_a_key_may_be_longer_than_an_index_takes(site):
    owner = Owner(site, site.node())
    key = "k" * 40_000
    assert owner.put(0, **{key: b"1"}) == set()
    assert owner.put(0, **{key: b"2"}) == set()
    assert stored(site, 0) == {key.encode(): b"2"}


def test_a_shard_is_read_in_pages_and_sorted(site, monkeypatch):
    owner = Owner(site, site.node())
    records = {f"{number:03}": b"%d" % number for number in range(100)}
    owner.put(7, **records)
    expected = [(key.encode(), value) for key, value in records.items()]
    assert site.do(owner.shards.records, 7) == expected
    monkeypatch.setattr(group_shards, "_PAGE_ROWS", 7)
    assert site.do(owner.shards.records, 7) == expected
    monkeypatch.setattr(group_shards, "_PAGE_BYTES", 1)
    assert site.do(owner.shards.records, 7) == expected


def test_what_is_lost_is_refused_and_the_rest_is_written(site):
    one = Owner(site, site.node())
    site.release(one.node, [3])
    two = Owner(site, site.node())
    assert set(two.owned) == {3}
    assert one.put_all({3: {"k": b"one"}, 4: {"k": b"one"}}) == {3}
    assert two.put(3, k=b"two") == set()
    assert stored(site, 3) == {b"k": b"two"}
    assert stored(site, 4) == {b"k": b"one"}


def test_an_epoch_that_was_raised_is_refused(site):
    owner = Owner(site, site.node())
    epochs = site.do(owner.shards.fence, [1, 2])
    assert epochs == {1: owner.owned[1].epoch + 1, 2: owner.owned[2].epoch + 1}
    assert owner.put_all({1: {"k": b"v"}, 5: {"k": b"v"}}) == {1}
    owner.owned[1].epoch += 1
    assert owner.put(1, k=b"v") == set()


def test_a_write_is_not_repeated_in_an_epoch_that_somebody_else_has_raised(site):
    """Another node may have had the shard meanwhile."""
    owner = Owner(site, site.node())
    site.do(owner.shards.fence, [1])
    given = {owner.owned[number]: {b"k": b"v"} for number in (1, 2)}
    put = owner.shards.put(given, is_repeated=True)
    assert owner.site.runner.run(put) == {1}
    assert (stored(site, 1), stored(site, 2)) == ({}, {b"k": b"v"})


@pytest.mark.parametrize("is_repeated", [False, True])
def test_a_dropped_shard_is_left_out_of_a_write(site, is_repeated):
    owner = Owner(site, site.node())
    given = {owner.owned[number]: {b"k": b"v"} for number in (1, 2)}
    owner.owned[1].is_dropped = True
    put = owner.shards.put(given, is_repeated=is_repeated)
    assert owner.site.runner.run(put) == set()
    assert (stored(site, 1), stored(site, 2)) == ({}, {b"k": b"v"})


def test_shards_of_others_are_not_fenced(site):
    one = Owner(site, site.node())
    site.release(one.node, [3])
    two = Owner(site, site.node())
    assert site.do(one.shards.fence, [3, 4]).keys() == {4}
    assert two.put(3, k=b"v") == set()


def test_without_a_lease_nothing_is_written(site):
    owner = Owner(site, site.node())
    execute(site.url, END_LEASES)
    assert owner.put_all({1: {"k": b"v"}, 2: {"k": b"v"}}) == {1, 2}
    assert site.take(owner.node) == []
    site.do(owner.node.renew)  # no other node has taken them
    assert owner.put(1, k=b"v") == set()
    assert [each.number for each in site.take(owner.node)] == list(ALL)


def test_a_node_that_joins_again_keeps_its_shards_in_higher_epochs(site):
    former = Owner(site, site.node())
    other = site.node()
    site.do(former.node.join)
    # They are not free for others: the former epoch may still answer from its memory.
    assert site.take(other) == []
    now = Owner(site, former.node)
    assert set(now.owned) == set(ALL)
    assert {each.epoch for each in now.owned.values()} == {2}
    assert former.put(1, k=b"former") == {1}
    assert now.put(1, k=b"now") == set()


def test_the_lease_that_is_left_is_told(site):
    node = site.node()
    assert {0 < each.lease_left_s <= 3600 for each in site.take(node)} == {True}


def test_a_write_on_its_way_keeps_the_shard_until_it_is_committed(site):
    """Another node that takes the shard then, reads what it has written."""
    one, other = Owner(site, site.node()), site.node()

    async def race() -> tuple[list[int], list[int]]:
        connection = await asyncpg.connect(site.url)
        try:
            transaction = connection.transaction()
            await transaction.start()
            arguments = group_shards._arguments(
                one.shards._node, {one.owned[3]: {b"k": b"v"}}
            )
            assert await connection.fetchval(group_shards._PUT, *arguments) == []
            await site.database.rows(f"{END_LEASES} WHERE id = {one.node.node_id}")
            before = [each.number for each in await shards_of(other).hold()]
            await transaction.commit()
            after = [each.number for each in await shards_of(other).hold()]
            return before, after
        finally:
            await connection.close()

    before, after = site.runner.run(race())
    assert before == [number for number in ALL if number != 3]
    assert after == list(ALL)
    assert stored(site, 3) == {b"k": b"v"}


def test_a_late_write_is_waited_for_before_it_is_repeated(site):
    """A write whose answer was lost must not undo what is written after it."""
    owner = Owner(site, site.node())
    shard = owner.owned[3]

    async def put(value: bytes, *, is_repeated: bool = False) -> set[int]:
        return await owner.shards.put({shard: {b"k": value}}, is_repeated=is_repeated)

    async def race() -> None:
        connection = await asyncpg.connect(site.url)
        late = group_shards._arguments(owner.shards._node, {shard: {b"k": b"1"}})
        try:
            assert await put(b"1", is_repeated=True) == set()  # before the late one
            assert await put(b"2") == set()
            assert await connection.fetchval(group_shards._PUT, *late) == [3]
        finally:
            await connection.close()

    site.runner.run(race())
    assert stored(site, 3) == {b"k": b"2"}


def test_of_two_owners_that_race_the_one_with_the_shard_writes_last(site):
    nodes = [site.node() for _ in range(2)]

    async def write(node: Membership, value: bytes) -> set[int]:
        """Take all shards and write; return those that were written."""
        shards = shards_of(node)
        held = await shards.hold()
        owned = {OwnedShard(each.number, each.epoch): {b"k": value} for each in held}
        lost = await shards.put(owned)
        return {shard.number for shard in owned} - lost

    async def take_over(node: Membership, former: Membership) -> None:
        await site.database.rows(f"{END_LEASES} WHERE id = {former.node_id}")
        await write(node, b"new")

    async def race() -> None:
        for turn in range(20):
            old, new = nodes if turn % 2 else nodes[::-1]
            await old.renew()
            await site.database.rows(f"{END_LEASES} WHERE id = {new.node_id}")
            held = [OwnedShard(*each[:2]) for each in await shards_of(old).hold()]
            await new.renew()
            put = shards_of(old).put({shard: {b"k": b"old"} for shard in held})
            await asyncio.gather(put, take_over(new, old))
            # A shard that was locked by the write could not be taken at once.
            assert await write(new, b"new") == set(ALL)
            for number in ALL:
                assert await shards_of(new).records(number) == [(b"k", b"new")]
            assert await shards_of(old).put({held[0]: {b"k": b"old"}}) == {0}

    site.runner.run(race())

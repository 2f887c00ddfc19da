"""What a node counts of its calls, and how others read it."""

from __future__ import annotations

import asyncio
import uuid
from types import SimpleNamespace

import pytest

from mpbroker.base.storage_errors import RemoteStorageError
from mpbroker.cluster.database import ClusterDatabase
from mpbroker.cluster.membership import Membership, NodeDescription
from mpbroker.cluster.stats.cluster_stats import ClusterStats, read_stats
from mpbroker.cluster.stats.counted_calls import (
    CountedSequencer,
    CountedStore,
    StatsWriter,
)
from mpbroker.exporter.cluster_metrics import cluster_families, cluster_status
from mpbroker.inspect.cluster_figures import cluster_figures

PATIENCE_S = 60


class FakeStore:
    """A store that is there, or fails."""

    def __init__(self):
        self.fails = False

    async def put_async(self, key, content):
        if self.fails:
            raise RemoteStorageError("away")

    async def get_ranges_async(self, key, ranges):
        if self.fails:
            raise RemoteStorageError("away")
        return [memoryview(bytes(size)) for _, size in ranges]


def test_calls_of_the_store_are_counted():
    async def test():
        stats = ClusterStats()
        inner = FakeStore()
        store = CountedStore(inner, stats)
        await store.put_async("a", b"12345")
        await store.get_ranges_async("a", [(0, 2), (3, 1)])
        inner.fails = True
        with pytest.raises(RemoteStorageError):
            await store.put_async("b", b"1")
        with pytest.raises(RemoteStorageError):
            await store.get_ranges_async("a", [(0, 2)])
        assert stats == ClusterStats(
            puts=1, put_bytes=5, reads=1, read_bytes=3, store_errors=2
        )

    asyncio.run(test())


def test_a_node_s_numbers_are_read_by_the_exporter_and_by_status(cluster_url, tmp_path):
    home = str(tmp_path)
    assert read_stats(home) == ClusterStats()
    writer = SimpleNamespace(held_bytes=7)
    copied = SimpleNamespace(extents=3, lag_records=4, partitions=2)

    async def test():
        async with ClusterDatabase(cluster_url, timeout_s=PATIENCE_S) as database:
            node = NodeDescription(uuid.uuid4(), [], "1", 1)
            membership = Membership(database, node)
            stats = ClusterStats()
            numbers = StatsWriter(home, stats, database, membership)
            numbers.write(writer, copied)
            assert not read_stats(home).lease_until_ms
            await membership.join()
            sequencer = CountedSequencer(database, stats)
            (key,) = await sequencer.register_objects(1, 1)
            await sequencer.commit_object(key, 0, [])
            with pytest.raises(Exception, match="function"):
                await database.rows("SELECT mpbroker.no_such_function()")
            numbers.write(writer, copied)

    asyncio.run(test())
    stats = read_stats(home)
    assert (stats.commits, stats.database_errors) == (1, 1)
    assert stats.commit_us > 0
    assert (stats.buffered_bytes, stats.extents) == (7, 3)
    assert (stats.lag_records, stats.partitions) == (4, 2)
    families = {family.name: family for family in cluster_families(home)}
    shown = cluster_status(families)
    assert shown["commits"] == 1
    assert shown["commit_seconds"] == stats.commit_us / 1_000_000
    assert shown["lag_records"] == 4
    assert cluster_status({}) is None
    told = {"log_dirs": [home], "cluster_node": {"id": 1, "storage": "s3://a"}}
    figures = cluster_figures(told)
    assert (figures["id"], figures["commits"]) == (1, 1)
    assert cluster_figures({"log_dirs": [home], "cluster_node": None}) is None


def test_the_lease_of_a_node_that_has_stopped_runs_out():
    assert ClusterStats(lease_until_ms=1).lease_s() == 0
    assert ClusterStats(lease_until_ms=1 << 50).lease_s() > 0

"""Commits of several nodes at once, whose connections and writers die at any step.

Nodes commit batches of idempotent producers. A node's writer dies before the commit is
sent, while it is on its way, or before its answer is passed on; the server ends
sessions, too. Then each acknowledged batch must be in its partition once, at the offset
that was acknowledged, in the order of its producer; no offset may be without a batch.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections import defaultdict
from contextlib import suppress

import asyncpg
import pytest

from mpbroker.cluster.database import ClusterDatabase
from mpbroker.cluster.errors import ObjectGivenUpError
from mpbroker.cluster.sequencer import ObjectBatch, ObjectCommit, Sequencer

NODES = 3
PRODUCERS = 6
PARTITIONS = 3
BATCHES = 10  # of each producer in each partition
RECORDS = 2
SIZE = 10
KILL = (
    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
    " WHERE datname = current_database() AND application_name = 'mpbroker'"
    " AND pid % 3 = $1"
)


async def kill_sessions(url: str, rest: int) -> None:
    """End about a third of the sessions of all nodes."""
    connection = await asyncpg.connect(url)
    try:
        await connection.fetch(KILL, rest)
    finally:
        await connection.close()


class Site:
    """Nodes, what their objects hold, and what was acknowledged."""

    def __init__(self, url: str, seed: int) -> None:
        self.url = url
        self.random = random.Random(seed)
        self.topic = uuid.uuid4()
        self.nodes = [ClusterDatabase(url, connections=2) for _ in range(NODES)]
        self.objects: dict[uuid.UUID, list[ObjectBatch]] = {}
        self.acknowledged: dict[tuple[int, int, int], int] = {}
        self.deaths = 0

    def batches(self, producer: int, sequence: int) -> list[ObjectBatch]:
        """Return one object's batches: in each partition the producer's next one."""
        return [
            ObjectBatch(
                self.topic, part, RECORDS, part * SIZE, SIZE, 1, producer, 0, sequence
            )
            for part in range(PARTITIONS)
        ]

    async def write(self, batches: list[ObjectBatch]) -> ObjectCommit | None:
        """Do as a node's writer does, which may die; None: the client has to retry."""
        sequencer = Sequencer(self.random.choice(self.nodes))
        (key,) = await sequencer.register_objects(1, 1)
        self.objects[key] = batches
        call = sequencer.commit_object(key, SIZE * len(batches), batches)
        step = self.random.choice(["lives", "on its way", "successor", "given up"])
        if step == "given up":
            # A slow writer's object is settled by its successor, and commits late.
            settled, committed = await asyncio.gather(
                Sequencer(self.random.choice(self.nodes)).settle_object(key),
                call,
                return_exceptions=True,
            )
            if isinstance(committed, ObjectGivenUpError):
                assert settled is False
                return None
            assert settled is True and isinstance(committed, ObjectCommit)
            return committed
        if step == "lives":
            return await call
        self.deaths += 1
        task = asyncio.ensure_future(call)
        for _ in range(self.random.randrange(6)):
            await asyncio.sleep(0)  # how far it gets
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        if step == "on its way":
            return None
        sequencer = Sequencer(self.random.choice(self.nodes))
        if not await sequencer.settle_object(key):
            return None
        return await sequencer.commit_object(key, SIZE * len(batches), batches)

    async def produce(self, producer: int) -> None:
        """Send batches one after the other, each until it is acknowledged."""
        for number in range(BATCHES):
            done = None
            while done is None:
                done = await self.write(self.batches(producer, number * RECORDS))
            # By progress and not by time: on a slow machine nothing would get through.
            if self.random.random() < 0.5:
                await kill_sessions(self.url, number % 3)
            assert list(done.errors) == [0] * PARTITIONS
            for part, offset in enumerate(done.base_offsets):
                self.acknowledged[producer, part, number] = offset

    async def run(self) -> None:
        await Sequencer(self.nodes[0]).create_partitions(self.topic, PARTITIONS)
        await asyncio.gather(*map(self.produce, range(PRODUCERS)))
        for part in range(PARTITIONS):
            await self.check(part)
        for node in self.nodes:
            node.close()

    async def check(self, part: int) -> None:
        """Check one partition from its first to its last offset."""
        sequencer = Sequencer(self.nodes[0])
        (extents,) = await sequencer.find_extents(
            [(self.topic, part, 0)], max_extents=10**6, max_bytes=10**9
        )
        end = 0
        there: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for extent in extents:
            assert extent.base_offset == end
            assert extent.size == SIZE and extent.position == part * SIZE
            batch = self.objects[extent.object_key][part]
            there[batch.producer_id].append((batch.base_sequence // RECORDS, end))
            end += RECORDS
            assert extent.last_offset == end - 1
        for producer in range(PRODUCERS):
            assert there[producer] == [
                (number, self.acknowledged[producer, part, number])
                for number in range(BATCHES)
            ]
        (ends,) = await sequencer.ends([(self.topic, part)])
        assert ends.high_watermark == end == PRODUCERS * BATCHES * RECORDS


@pytest.mark.parametrize("seed", range(2))
def test_nothing_is_lost_or_doubled_and_no_offset_is_left_out(cluster_url, seed):
    site = Site(cluster_url, seed)
    asyncio.run(site.run())
    assert site.deaths > PRODUCERS

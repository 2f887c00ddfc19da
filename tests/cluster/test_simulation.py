"""Seeds of the simulated cluster; its model of the database beside the real one."""

from __future__ import annotations

import asyncio
import random
import uuid
from datetime import timedelta

import pytest

from mpbroker.cluster.database import ClusterDatabase
from mpbroker.cluster.errors import ObjectGivenUpError
from mpbroker.cluster.object_writer import ObjectWriter
from mpbroker.cluster.sequencer import ObjectBatch, ObjectCommit, Sequencer
from tests.cluster import simulation
from tests.cluster.sequencer_model import SequencerModel

SEEDS = 100  # more: python -m tests.cluster.simulation 0 10000
CALLS = 150


def run_seeds(count: int) -> None:
    for seed in range(count):
        simulation.run(seed)


def test_what_was_acknowledged_is_there_once_and_in_order():
    run_seeds(SEEDS)


def test_a_seed_repeats_everything():
    def told(seed: int) -> tuple[object, float]:
        async def main() -> tuple[object, float]:
            site = simulation.Site(seed)
            await site.run()
            return site.acknowledged, asyncio.get_running_loop().time()

        with simulation.simulated() as loop:
            return loop.run_until_complete(main())

    assert [told(seed) for seed in range(3)] == [told(seed) for seed in range(3)]


def test_a_writer_that_forgets_its_intent_is_found_out(monkeypatch):
    async def forget(self: ObjectWriter, *_: object) -> None:
        return None

    monkeypatch.setattr(ObjectWriter, "recall", forget)
    with pytest.raises(AssertionError, match="doubled"):
        run_seeds(1000)


class Pair:
    """The model and the database, which get the same calls."""

    def __init__(self, database: ClusterDatabase, seed: int) -> None:
        self.random = random.Random(seed)
        self.sequencer = Sequencer(database)
        self.model = SequencerModel(lambda: 0.0)
        self.topics = [uuid.UUID(int=self.random.getrandbits(128)) for _ in range(2)]
        self.keys: list[uuid.UUID] = []

    def batches(self) -> list[ObjectBatch]:
        """Return batches that repeat, leave out and begin sequences anew."""
        chance, found, position = self.random, [], 0
        for _ in range(chance.randrange(6)):
            producer = chance.choice([-1, -1, 3, 4])
            epoch = chance.choice([0, 0, 0, 1]) if producer >= 0 else -1
            sequence = chance.choice([0, 2, 4, 6, 8, 2**31 - 2])
            position += chance.choice([0, 0, 5])  # a gap ends an extent
            found.append(
                ObjectBatch(
                    chance.choice(self.topics),
                    chance.randrange(3),  # one more than there are
                    chance.choice([2, 2, 2, 1]),
                    position,
                    10,
                    chance.randrange(5),
                    producer,
                    epoch,
                    sequence if producer >= 0 else -1,
                )
            )
            position += 10
        found.sort(key=lambda each: (*each[:2], each.producer_id))
        return found

    async def commit(self) -> None:
        key = self.random.choice(self.keys)
        batches = self.batches()
        expected: ObjectCommit | None = None
        try:
            expected = self.model.commit_object(key, batches)
        except ObjectGivenUpError:
            with pytest.raises(ObjectGivenUpError):
                await self.sequencer.commit_object(key, 100, batches)
            return
        done = await self.sequencer.commit_object(key, 100, batches)
        assert list(done.base_offsets) == list(expected.base_offsets), batches
        assert list(done.errors) == list(expected.errors), batches

    async def look(self) -> None:
        places = [
            (topic, part, self.random.randrange(20), self.random.randrange(20))
            for topic in self.topics
            for part in range(2)
        ]
        real = await self.sequencer.look(places, max_extents=5, max_bytes=10**6)
        assert len(real) == len(places)
        for one, other in zip(real, self.model.look(places, 5), strict=True):
            assert one.log_start == other.log_start
            assert [each[:-1] for each in one.extents] == [
                each[:-1]
                for each in other.extents  # but the time of the commit
            ]

    async def step(self) -> None:
        match self.random.randrange(10):
            case 0 | 1:
                self.keys += await self.sequencer.register_objects(1, 1)
                self.model.register_objects(self.keys[-1:])
            case 2:
                key = self.random.choice([*self.keys, uuid.uuid4()])
                settled = await self.sequencer.settle_object(key)
                assert settled == self.model.settle_object(key)
            case 3:
                topic, part = self.random.choice(self.topics), self.random.randrange(2)
                self.model.trim(topic, part)
                await self.sequencer.delete_records(topic, part, -1)
                while await self.sequencer.trim_extents(topic, part):
                    pass
            case 4:
                places = [(topic, part) for topic in self.topics for part in range(3)]
                real = await self.sequencer.ends(places)
                assert real == self.model.ends(places)
            case 5 | 6:
                await self.look()
            case _:
                await self.commit()

    async def run(self) -> None:
        for topic in self.topics:
            await self.sequencer.create_partitions(topic, 2)
            self.model.create_partitions(topic, 2)
        self.keys += await self.sequencer.register_objects(1, 3)
        self.model.register_objects(self.keys)
        for _ in range(CALLS):
            await self.step()
        # Whatever nothing refers to: the same objects.
        await self.sequencer.give_up_objects(timedelta())
        self.model.give_up_objects(-1.0)
        dead = await self.sequencer.dead_objects(timedelta())
        assert set(dead) == set(self.model.dead_objects(-1.0))


@pytest.mark.parametrize("seed", range(3))
def test_the_model_answers_as_the_database_does(cluster_url, seed):
    async def main() -> None:
        async with ClusterDatabase(cluster_url) as database:
            await Pair(database, seed).run()

    asyncio.run(main())

"""The partitions of shared topics in the database, as a node makes and removes them."""

from __future__ import annotations

import asyncio
import uuid
from types import SimpleNamespace
from typing import Any

import pytest

from mpbroker.cluster import shared_topics
from mpbroker.cluster.database import ClusterDatabase
from mpbroker.cluster.sequencer import Sequencer
from mpbroker.cluster.shared_topics import SharedTopics
from mpbroker.protocol.errors import ApiError


class NotedSequencer(Sequencer):
    """A sequencer that notes the topics whose partitions are made."""

    def __init__(self, database: ClusterDatabase) -> None:
        super().__init__(database)
        self.made: list[uuid.UUID] = []

    async def create_partitions(self, topic_id: uuid.UUID, count: int) -> None:
        self.made.append(topic_id)
        await super().create_partitions(topic_id, count)


def topic(topic_id: uuid.UUID, partitions: int) -> Any:
    return SimpleNamespace(
        name=str(topic_id),
        topic_id=topic_id.bytes,
        partitions=range(partitions),
        config=SimpleNamespace(diskless_enable=True),
    )


def registry_of(ids: list[uuid.UUID]) -> Any:
    """A view of the metadata log, whose topics the list has."""
    return SimpleNamespace(
        version=1,
        catch_up=lambda: None,
        topics=lambda: [topic(each, 3) for each in ids],
    )


def node_topics(sequencer: Sequencer, registry: Any) -> SharedTopics:
    return SharedTopics(
        *(sequencer, registry, None),  # type: ignore[arg-type]
        lambda _: None,
        lambda _: None,
    )


def test_a_topic_that_is_deleted_while_it_is_made_goes_again(cluster_url):
    ids = [uuid.uuid4()]
    registry = registry_of(ids)

    class LateSequencer(Sequencer):
        """Another node deletes the topic before this one has made it."""

        async def create_partitions(self, topic_id: uuid.UUID, count: int) -> None:
            ids.clear()
            registry.version += 1
            await self.delete_topic(topic_id)
            await self.remove_partitions(topic_id)
            await super().create_partitions(topic_id, count)

    async def main() -> None:
        async with ClusterDatabase(cluster_url, connections=2) as database:
            sequencer = LateSequencer(database)
            topics = node_topics(sequencer, registry)
            (topic_id,) = ids
            with pytest.raises(ApiError):
                await topics.ready(topic_id)
            task = asyncio.ensure_future(topics.run())
            while len(await sequencer.deleted_partitions()) < 3:
                assert not task.done(), task
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())


def test_a_start_makes_only_what_is_not_there(cluster_url, monkeypatch):
    monkeypatch.setattr(shared_topics, "_PLACES_AT_ONCE", 2)
    ids = [uuid.uuid4() for _ in range(3)]

    async def main() -> None:
        async with ClusterDatabase(cluster_url) as database:
            sequencer = NotedSequencer(database)
            await sequencer.create_partitions(ids[0], 3)
            await sequencer.create_partitions(ids[1], 1)
            sequencer.made.clear()
            topics = node_topics(sequencer, registry_of(ids))
            task = asyncio.ensure_future(topics.run())
            while len(list(topics.partitions())) < 9:
                assert not task.done(), task
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert sequencer.made == ids[1:]
            ends = await sequencer.ends([(each, 2) for each in ids])
            assert [end.high_watermark for end in ends] == [0, 0, 0]

    asyncio.run(main())

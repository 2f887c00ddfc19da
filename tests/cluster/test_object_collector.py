"""What writers and retention leave behind, in the database and in the store."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from mpbroker.base.storage_errors import RemoteStorageError, RemoteUnreachableError
from mpbroker.cluster.database import ClusterDatabase
from mpbroker.cluster.errors import ObjectGivenUpError
from mpbroker.cluster.object_collector import CollectorSettings, ObjectCollector
from mpbroker.cluster.object_writer import object_path
from mpbroker.cluster.sequencer import ObjectBatch, Sequencer
from mpbroker.storage.remote.object_store import ObjectStore

NOW, LATER = timedelta(0), timedelta(days=1)
EAGER = CollectorSettings(0, NOW, NOW, NOW)


class Site:
    def __init__(self, database: ClusterDatabase, directory: Path) -> None:
        self.database = database
        self.sequencer = Sequencer(database)
        self.directory = directory
        self.store = ObjectStore(f"file://{directory}", retry_s=1)
        self.topic = uuid.uuid4()

    def collector(self, **settings: Any) -> ObjectCollector:
        return ObjectCollector(self.sequencer, self.store, EAGER._replace(**settings))

    async def put(self) -> uuid.UUID:
        (key,) = await self.sequencer.register_objects(1, 1)
        await self.store.put_async(object_path(key), b"bytes")
        return key

    async def commit(self, key: uuid.UUID, producer: int = -1) -> None:
        sent = ObjectBatch(self.topic, 0, 1, 0, 5, 1, producer, 0, 0)
        await self.sequencer.commit_object(key, 5, [sent])

    def is_stored(self, key: uuid.UUID) -> bool:
        return (self.directory / object_path(key)).exists()

    async def count(self, table: str) -> int:
        (count,) = await self.database.row(f"SELECT count(*) FROM mpbroker.{table}")
        return int(count)


@pytest.fixture
def run(cluster_url: str, tmp_path: Path) -> Callable[..., None]:
    def run_it(test: Callable[[Site], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            async with ClusterDatabase(cluster_url) as database:
                site = Site(database, tmp_path)
                await site.sequencer.create_partitions(site.topic, 1)
                await test(site)

        asyncio.run(main())

    return run_it


def test_what_was_never_committed_is_deleted_and_forgotten(run):
    async def test(site: Site) -> None:
        live, left = await site.put(), await site.put()
        (unwritten,) = await site.sequencer.register_objects(1, 1)
        await site.commit(live)
        assert not await site.collector(give_up_after=LATER).collect()
        await site.collector(delete_after=LATER).collect()
        assert site.is_stored(left)
        with pytest.raises(ObjectGivenUpError):
            await site.commit(left)
        await site.collector().collect()
        assert (site.is_stored(live), site.is_stored(left)) == (True, False)
        assert await site.count("object") == 1
        with pytest.raises(ObjectGivenUpError):
            await site.commit(unwritten)

    run(test)


def test_an_object_goes_with_its_last_records_and_a_silent_producer_goes(run):
    async def test(site: Site) -> None:
        key = await site.put()
        await site.commit(key, producer=7)
        await site.collector(producers_after=LATER).collect()
        assert site.is_stored(key) and await site.count("producer") == 1
        await site.sequencer.delete_records(site.topic, 0, -1)
        await site.sequencer.trim_extents(site.topic, 0)
        await site.collector().collect()
        assert not site.is_stored(key)
        assert await site.count("object") == await site.count("producer") == 0

    run(test)


def test_a_key_is_kept_until_its_bytes_are_deleted(run):
    async def test(site: Site) -> None:
        key = await site.put()
        delete = site.store.delete

        def fail(keys: object) -> None:
            raise RemoteUnreachableError("away")

        site.store.delete = fail  # type: ignore[method-assign]
        with pytest.raises(RemoteStorageError):
            await site.collector().collect()
        assert await site.count("object") == 1
        # And it goes on by itself when the store is back.
        task = asyncio.ensure_future(site.collector().run())
        await asyncio.sleep(0)
        site.store.delete = delete  # type: ignore[method-assign]
        while await site.count("object"):
            assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert not site.is_stored(key)

    run(test)

"""Delete unused objects from the store, without listing the store.

An object's key is in the database before its bytes are in the store. So objects that a
dead writer has left are known: a key that was never committed is given up after some
minutes, and a later commit of it is refused. An object is also given up when all its
records were removed. Its bytes are deleted a while later, because a reader may be about
to read them. Then the key is forgotten. Any number of nodes may do this at once.

If a put arrives after the deletion, its bytes stay in the store for ever. So the
deletion comes later than a writer's last try.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final, NamedTuple, Protocol

from mpbroker.base.logger import get_logger
from mpbroker.base.storage_errors import RemoteStorageError
from mpbroker.cluster.errors import ClusterError
from mpbroker.cluster.object_writer import object_path
from mpbroker.cluster.sequencer import Sequencer

logger = get_logger(__name__)
_AT_ONCE: Final = 1000


class Store(Protocol):
    """The store from which objects are deleted, such as ``ObjectStore``."""

    @property
    def delete(self) -> Callable[[Sequence[str]], None]: ...


class CollectorSettings(NamedTuple):
    """The intervals and the ages by which unused objects are deleted.

    Attributes:
        every_s: the pause in seconds when no more work is due.
        give_up_after: the age at which an object is given up that was not committed, or
            that is not used any more.
        delete_after: the time from then until the object's bytes are deleted.
        producers_after: the time without a commit after which a producer is forgotten.
    """

    every_s: float = 30.0
    give_up_after: timedelta = timedelta(minutes=10)
    delete_after: timedelta = timedelta(minutes=5)
    producers_after: timedelta = timedelta(days=1)


class ObjectCollector:
    """Deletes the unused objects of a cluster, as one of its nodes.

    Args:
        sequencer: finds the keys of unused objects in the database.
        store: has the objects' bytes.
        settings: the intervals and ages.
    """

    def __init__(
        self,
        sequencer: Sequencer,
        store: Store,
        settings: CollectorSettings = CollectorSettings(),  # noqa: B008 - constant
    ) -> None:
        self._sequencer = sequencer
        self._store = store
        self._settings = settings

    async def run(self) -> None:
        """Delete unused objects until this is cancelled; go on after errors."""
        while True:
            try:
                if await self.collect():
                    continue
            except (ClusterError, RemoteStorageError) as error:
                logger.warning("objects cannot be collected now: %s", error)
            await asyncio.sleep(self._settings.every_s)

    async def collect(self) -> bool:
        """Give up, delete and forget unused objects, and forget silent producers.

        Each step takes up to 1000 of them. Return whether more work may be due.

        Raises:
            ClusterError: the database does not answer.
            RemoteStorageError: some bytes may not be deleted; their keys are kept.
        """
        settings = self._settings
        given_up = await self._sequencer.give_up_objects(
            settings.give_up_after, _AT_ONCE
        )
        silent = await self._sequencer.expire_producers(
            settings.producers_after, _AT_ONCE
        )
        keys = await self._sequencer.dead_objects(settings.delete_after, _AT_ONCE)
        if keys:
            paths = [object_path(key) for key in keys]
            await asyncio.to_thread(self._store.delete, paths)
            # Only after the bytes are deleted: if the process is killed in between,
            # the next round deletes them once more. In the other order the store would
            # keep bytes whose key no node knows.
            await self._sequencer.forget_objects(keys)
        return _AT_ONCE in (given_up, silent, len(keys))

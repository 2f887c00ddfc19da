"""Count the calls of a node to its cluster's store and database, and publish them.

All of it is in one process and one event loop, so each count is a plain addition.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import Final, Protocol
from uuid import UUID

from mpbroker.base.logger import get_logger
from mpbroker.base.storage_errors import RemoteStorageError
from mpbroker.cluster.database import ClusterDatabase
from mpbroker.cluster.materialiser import Materialiser
from mpbroker.cluster.membership import Membership
from mpbroker.cluster.object_writer import ObjectWriter
from mpbroker.cluster.sequencer import ObjectBatch, ObjectCommit, Sequencer
from mpbroker.cluster.stats.cluster_stats import ClusterStats, write_stats

logger = get_logger(__name__)
_EVERY_S: Final = 1.0


class Store(Protocol):
    """Where objects are; ``ObjectStore`` is one."""

    def put_async(self, key: str, content: bytes) -> Awaitable[None]: ...

    def get_ranges_async(
        self, key: str, ranges: Sequence[tuple[int, int]]
    ) -> Awaitable[list[memoryview]]: ...


class CountedStore:
    """A store whose puts and reads are counted.

    Args:
        store: has the objects.
        stats: get the counts.
    """

    def __init__(self, store: Store, stats: ClusterStats) -> None:
        self._store = store
        self._stats = stats

    async def put_async(self, key: str, content: bytes) -> None:
        """Put an object; raises as the store does."""
        try:
            await self._store.put_async(key, content)
        except RemoteStorageError:
            self._stats.store_errors += 1
            raise
        self._stats.puts += 1
        self._stats.put_bytes += len(content)

    async def get_ranges_async(
        self, key: str, ranges: Sequence[tuple[int, int]]
    ) -> list[memoryview]:
        """Return some ranges of an object; raises as the store does."""
        try:
            found = await self._store.get_ranges_async(key, ranges)
        except RemoteStorageError:
            self._stats.store_errors += 1
            raise
        self._stats.reads += 1
        self._stats.read_bytes += sum(map(len, found))
        return found


class CountedSequencer(Sequencer):
    """A sequencer whose commits are counted, and their time.

    Args:
        database: as ``Sequencer``.
        stats: get the counts.
    """

    def __init__(self, database: ClusterDatabase, stats: ClusterStats) -> None:
        super().__init__(database)
        self._stats = stats

    async def commit_object(
        self, key: UUID, size: int, batches: Sequence[ObjectBatch]
    ) -> ObjectCommit:
        """Commit an object; as ``Sequencer.commit_object``."""
        began_ns = time.monotonic_ns()
        done = await super().commit_object(key, size, batches)
        self._stats.commits += 1
        self._stats.commit_us += (time.monotonic_ns() - began_ns) // 1000
        return done


class StatsWriter:
    """Writes a node's numbers into their file.

    Args:
        home: the first log directory.
        stats: what is counted elsewhere; the rest is asked for here.
        database: counts its failures.
        membership: has the lease.
    """

    def __init__(
        self,
        home: str,
        stats: ClusterStats,
        database: ClusterDatabase,
        membership: Membership,
    ) -> None:
        self._home = home
        self._stats = stats
        self._database = database
        self._membership = membership
        self._written: ClusterStats | None = None

    async def run(self, writer: ObjectWriter, materialiser: Materialiser) -> None:
        """Write the numbers, until this is cancelled."""
        while True:
            self.write(writer, materialiser)
            await asyncio.sleep(_EVERY_S)

    def write(self, writer: ObjectWriter, materialiser: Materialiser) -> None:
        """Replace the file, if a number has changed."""
        stats = self._stats
        stats.database_errors = self._database.failures
        stats.buffered_bytes = writer.held_bytes
        stats.extents = materialiser.extents
        stats.lag_records = materialiser.lag_records
        stats.partitions = materialiser.partitions
        stats.lease_until_ms = max(0, int(self._membership.held_until * 1000))
        if stats == self._written:
            return
        try:
            write_stats(self._home, stats)
            self._written = replace(stats)
        except OSError as error:
            logger.warning("the numbers of this node cannot be written: %s", error)

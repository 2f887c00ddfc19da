"""Call the database functions that give all records of a cluster their offsets.

The functions are in schema/. The records of an object get their offsets when the object
is committed. Each call may be repeated after a lost answer: a repeated commit returns
the answer of the first one.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple
from uuid import UUID

from mpbroker.cluster.database import ClusterDatabase

NO_PRODUCER_ID: Final = -1
LOG_APPEND_TIME: Final = -1  # as a batch's max_timestamp: the time of the commit


class ObjectBatch(NamedTuple):
    """A record batch, and its place in an object of the store.

    Attributes:
        records: the number of its offsets: its last offset delta + 1.
        position: the position of its first byte in the object.
        size: its size in bytes.
        max_timestamp: ms; LOG_APPEND_TIME if the topic's timestamps are the broker's.
    """

    topic_id: UUID
    partition: int
    records: int
    position: int
    size: int
    max_timestamp: int
    producer_id: int = NO_PRODUCER_ID
    producer_epoch: int = -1
    base_sequence: int = -1


class ObjectCommit(NamedTuple):
    """The result of a commit: the offsets and errors of an object's batches.

    Attributes:
        base_offsets: the base offset of each batch; -1 if the batch was refused.
        errors: Kafka's error code for each batch; 0 also for a duplicate, whose base
            offset is that of the batch that it repeats.
        committed_ms: the time of the commit by the database's clock.
    """

    base_offsets: Sequence[int]
    errors: Sequence[int]
    committed_ms: int


class Extent(NamedTuple):
    """A run of batches that belong to one partition and lie together in an object."""

    base_offset: int
    last_offset: int
    object_key: UUID
    position: int
    size: int
    max_timestamp: int
    committed_ms: int


class PartitionEnds(NamedTuple):
    """The start offset, the end offset and the size in bytes of a shared partition.

    All values are -1 if the partition does not exist.
    """

    log_start: int
    high_watermark: int
    size: int


class PartitionNews(NamedTuple):
    """What a reader does not know of a partition yet.

    Attributes:
        extents: the next ones.
        log_start: above the one that it knows; None: there is none.
    """

    extents: list[Extent]
    log_start: int | None


class Sequencer:
    """Commits, looks up and removes shared topics' records in a cluster's database."""

    def __init__(self, database: ClusterDatabase) -> None:
        self._database = database

    @property
    def sessions(self) -> int:
        """The number of connections to the database that were made; see there."""
        return self._database.sessions

    async def create_partitions(self, topic_id: UUID, count: int) -> None:
        """Make the partitions of a topic in the database, so that it has ``count``.

        Existing partitions stay as they are.
        """
        await self._do("create_partitions_v1($1, $2)", topic_id, count)

    async def register_objects(self, node_id: int, count: int) -> list[UUID]:
        """Register new objects in the database; return their keys.

        Their bytes may be written to the store from now on.
        """
        keys = [uuid.uuid4() for _ in range(count)]
        await self._do("register_objects_v1($1, $2)", node_id, keys)
        return keys

    async def commit_object(
        self, key: UUID, size: int, batches: Sequence[ObjectBatch]
    ) -> ObjectCommit:
        """Give offsets to an object's batches, whose bytes are in the store.

        Args:
            key: the key of a registered object.
            size: the object's size in bytes.
            batches: the object's batches. If they are sorted by topic, partition and
                producer, the batches of each partition are one extent.

        Raises:
            ObjectGivenUpError: the caller writes the bytes again, under a new key.
            ClusterError: as `ClusterDatabase.rows`. The outcome is unknown: call
                `settle_object`, or this method again.
        """
        columns = list(zip(*batches, strict=True)) if batches else [()] * 9
        row = await self._database.row(_COMMIT, key, size, *columns)
        return ObjectCommit(row["base_offsets"], row["errors"], row["committed_ms"])

    async def settle_object(self, key: UUID) -> bool:
        """Find out whether an object was committed; if not, see that it never will be.

        It is then given up, and its commit is refused. Return whether it was committed.
        """
        return bool(await self._do("settle_object_v1($1)", key))

    async def ends(self, partitions: Sequence[tuple[UUID, int]]) -> list[PartitionEnds]:
        """Return the start offset, end offset and size of some shared partitions."""
        topics, numbers = _columns(partitions)
        rows = await self._database.rows(
            "SELECT * FROM mpbroker.heads_v1($1, $2)", topics, numbers
        )
        return [PartitionEnds(*row) for row in rows]

    async def find_extents(
        self,
        places: Sequence[tuple[UUID, int, int]],
        *,
        max_extents: int,
        max_bytes: int,
    ) -> list[list[Extent]]:
        """Return where the records of partitions are in the store, from offsets on.

        An extent is a run of batches of one partition in an object.

        Args:
            places: the topic id, the partition and the offset to begin with.
            max_extents: the most extents of each partition.
            max_bytes: the most bytes of each partition; its first extent may be larger.
        """
        columns = list(zip(*places, strict=True)) if places else [()] * 3
        rows = await self._database.rows(
            "SELECT * FROM mpbroker.find_extents_v1($1, $2, $3, $4, $5)",
            *columns,
            max_extents,
            max_bytes,
        )
        found: list[list[Extent]] = [[] for _ in places]
        for number, *extent in rows:
            found[number - 1].append(Extent(*extent))
        return found

    async def look(
        self,
        places: Sequence[tuple[UUID, int, int, int]],
        *,
        max_extents: int,
        max_bytes: int,
    ) -> list[PartitionNews]:
        """Return what is new in partitions, as of one moment.

        Args:
            places: topic, partition, the offset to begin with, and the known start.
            max_extents: of each partition.
            max_bytes: of each partition; the first extent may have more.
        """
        columns = list(zip(*places, strict=True)) if places else [()] * 4
        rows = await self._database.rows(_LOOK, *columns, max_extents, max_bytes)
        found = [PartitionNews([], None) for _ in places]
        for number, log_start, *extent in rows:
            if log_start is None:
                found[number - 1].extents.append(Extent(*extent))
            else:
                found[number - 1] = found[number - 1]._replace(log_start=log_start)
        return found

    async def delete_records(self, topic_id: UUID, partition: int, before: int) -> int:
        """Remove records below an offset (-1: all); return the new start of the log."""
        return int(
            await self._do("delete_records_v1($1, $2, $3)", topic_id, partition, before)
        )

    async def expire_records(
        self,
        topic_id: UUID,
        partition: int,
        *,
        retention_ms: int,
        retention_bytes: int,
        max_extents: int = 1000,
    ) -> bool:
        """Remove a partition's records by age and size; return whether there were any.

        Call it again while it returns True.

        Args:
            retention_ms: the highest age of a record; -1: there is no limit.
            retention_bytes: the largest size of the partition; -1: there is no limit.
            max_extents: the most extents that one call looks at.
        """
        before = await self._do(
            "expired_to_v1($1, $2, $3, $4, $5)",
            *(topic_id, partition, retention_ms, retention_bytes, max_extents),
        )
        if before < 0:
            return False
        await self.delete_records(topic_id, partition, int(before))
        return True

    async def trim_extents(
        self, topic_id: UUID, partition: int, max_extents: int = 1000
    ) -> int:
        """Delete the database's entries that say where removed records were stored.

        Return the number of deleted extents (runs of batches in objects).
        """
        return int(
            await self._do(
                "trim_extents_v1($1, $2, $3)", topic_id, partition, max_extents
            )
        )

    async def delete_topic(self, topic_id: UUID) -> None:
        """Mark a topic as deleted: commits to it are refused from now on.

        The caller trims and removes its partitions afterwards.
        """
        await self._do("delete_topic_v1($1)", topic_id)

    async def deleted_partitions(self, limit: int = 1000) -> list[tuple[UUID, int]]:
        """Return partitions of deleted topics that are still in the database."""
        rows = await self._database.rows(
            "SELECT topic_id, part FROM mpbroker.partition_head WHERE deleted LIMIT $1",
            limit,
        )
        return [(row["topic_id"], row["part"]) for row in rows]

    async def remove_partitions(self, topic_id: UUID, limit: int = 1000) -> int:
        """Remove a deleted topic's partitions of which the database has no records.

        Return how many were removed.
        """
        return int(await self._do("remove_partitions_v1($1, $2)", topic_id, limit))

    async def give_up_objects(self, age: timedelta, limit: int = 1000) -> int:
        """Mark objects as dead that were uncommitted or unused for ``age``.

        They cannot be committed from then on.

        Return how many were given up.
        """
        return int(await self._do("give_up_objects_v1($1, $2)", age, limit))

    async def dead_objects(self, age: timedelta, limit: int = 1000) -> list[UUID]:
        """Return objects that were given up ``age`` ago; their bytes may be deleted."""
        rows = await self._database.rows(
            "SELECT key FROM mpbroker.dead_objects_v1($1, $2)", age, limit
        )
        return [row["key"] for row in rows]

    async def forget_objects(self, keys: Sequence[UUID]) -> None:
        """Remove given-up objects, whose bytes were deleted, from the database."""
        await self._do("forget_objects_v1($1)", list(keys))

    async def expire_producers(self, age: timedelta, limit: int = 1000) -> int:
        """Forget producers without a commit for ``age``; return how many."""
        return int(await self._do("expire_producers_v1($1, $2)", age, limit))

    async def _do(self, call: str, *arguments: object) -> Any:
        (found,) = await self._database.row(f"SELECT mpbroker.{call}", *arguments)
        return found


_COMMIT: Final = (
    "SELECT * FROM mpbroker.commit_object_v1"
    "($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)"
)
# One statement, so that a start and the extents are those of one moment.
_LOOK: Final = """
    SELECT e.n, NULL::bigint AS log_start, e.base_offset, e.last_offset, e.object_key,
        e.position, e.bytes, e.max_timestamp, e.committed_ms
    FROM mpbroker.find_extents_v1($1, $2, $3, $5, $6) AS e
    UNION ALL
    SELECT h.n, h.log_start, NULL, NULL, NULL, NULL, NULL, NULL, NULL
    FROM mpbroker.heads_v1($1, $2) WITH ORDINALITY
        AS h (log_start, high_watermark, bytes, n)
    JOIN unnest($4::bigint[]) WITH ORDINALITY AS k (log_start, n) ON k.n = h.n
    WHERE h.log_start > k.log_start
    ORDER BY 1, 4
"""


def _columns(pairs: Sequence[tuple[UUID, int]]) -> tuple[list[UUID], list[int]]:
    return [topic for topic, _ in pairs], [number for _, number in pairs]

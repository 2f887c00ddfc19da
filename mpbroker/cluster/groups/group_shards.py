"""GroupShards: the shards of a cluster's groups that one node has, and their records.

The work is done by the functions in schema/; this is their face in Python. The database
gives each shard to one node at a time, and raises the shard's epoch with every owner.
Records are written only by the owner, in the shard's epoch.

A write whose answer is lost is made again. The first one may still be on its way then,
and would undo what is written after the second. So the epochs are raised before a write
is repeated: the first one is done by then, or is refused for ever.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

import asyncpg

from mpbroker.cluster.database import ClusterDatabase, Connection
from mpbroker.metadata.cluster_nodes import NodeEpoch

GROUP_SHARDS: Final = "group"
_PAGE_ROWS: Final = 5000
_PAGE_BYTES: Final = 4 * 1024 * 1024
_ADOPTED_AT_ONCE: Final = 1000
_FENCE: Final = "SELECT * FROM mpbroker.fence_shards_v1($1, $2, $3, $4)"
_PUT: Final = "SELECT mpbroker.put_group_records_v1($1, $2, $3, $4, $5, $6, $7)"


class HeldShard(NamedTuple):
    """A shard that a node has.

    Attributes:
        keep: whether it is within the node's share; if not, the node is to release it.
        lease_left_s: for how long the node has its lease, from when it was asked.
    """

    number: int
    epoch: int
    keep: bool
    lease_left_s: float


class OwnedShard:
    """A shard in an epoch, which `GroupShards.put` may raise.

    Attributes:
        is_dropped: set to True when the shard is not this node's any more, or has begun
            anew: `GroupShards.put` then leaves it out when it tries again.
    """

    __slots__ = ("epoch", "is_dropped", "number")

    def __init__(self, number: int, epoch: int) -> None:
        self.number = number
        self.epoch = epoch
        self.is_dropped = False


class GroupShards:
    """The shards of a node, in one of the node's epochs.

    All methods raise ClusterError, as `ClusterDatabase.rows`.
    """

    def __init__(
        self, database: ClusterDatabase, node: NodeEpoch, kind: str = GROUP_SHARDS
    ) -> None:
        self._database = database
        self._node = node
        self._kind = kind

    async def hold(self, timeout_s: float | None = None) -> list[HeldShard]:
        """Take shards that no live node has, up to the node's share; return all it has.

        If a shard's epoch is higher than before, another node may have had the shard in
        between. The list is empty if the node has no lease.
        """
        rows = await self._rows(
            "SELECT * FROM mpbroker.hold_shards_v1($1, $2, $3)",
            *(self._kind, *self._node),
            timeout_s=timeout_s,
        )
        return [
            HeldShard(number, epoch, keep, left.total_seconds())
            for number, epoch, keep, left in rows
        ]

    async def fence(self, numbers: Collection[int]) -> dict[int, int]:
        """Raise the epochs of shards; return them by number, without shards of others.

        What was sent for earlier epochs is committed by then, or is refused.
        """
        rows = await self._rows(_FENCE, self._kind, list(numbers), *self._node)
        return {row["n"]: row["epoch"] for row in rows}

    async def release(self, numbers: Collection[int]) -> None:
        """Release shards whose work this node has stopped."""
        await self._rows(
            "SELECT mpbroker.release_shards_v1($1, $2, $3, $4)",
            *(self._kind, list(numbers), *self._node),
        )

    async def put(
        self,
        records: Mapping[OwnedShard, Mapping[bytes, bytes | None]],
        *,
        is_repeated: bool = False,
        timeout_s: float | None = None,
    ) -> set[int]:
        """Write records of shards in one transaction; None as value deletes the key.

        Args:
            is_repeated: these records were given to an earlier call, which has raised
                an error, so that they may be written already.

        Returns:
            The shards that this node has lost, or whose epochs were raised by others:
            nothing of theirs was written, unless by the earlier call. Dropped ones are
            not among them.
        """
        must_fence = is_repeated

        async def write(connection: Connection) -> set[int]:
            nonlocal must_fence
            kept = [each for each in records if not each.is_dropped]
            lost: set[int] = set()
            if must_fence:
                kept, lost = await self._fence_again(connection, kept)
            must_fence = True
            given = {each: records[each] for each in kept}
            return lost.union(
                await connection.fetchval(_PUT, *_arguments(self._node, given))
            )

        return await self._database.run(write, timeout_s=timeout_s)

    async def _fence_again(
        self, connection: Connection, shards: Sequence[OwnedShard]
    ) -> tuple[list[OwnedShard], set[int]]:
        """Raise the epochs of shards; return those that this node still owns, and lost.

        If an epoch was raised by somebody else, another node may have had the shard in
        between, and what is to be written may be older than what that has written.
        """
        numbers = [each.number for each in shards]
        rows = await connection.fetch(_FENCE, self._kind, numbers, *self._node)
        epochs = {row["n"]: row["epoch"] for row in rows}
        kept: list[OwnedShard] = []
        lost: set[int] = set()
        for each in shards:
            if each.is_dropped:
                continue  # while the epochs were raised
            if epochs.get(each.number) == each.epoch + 1:
                each.epoch += 1
                kept.append(each)
            else:
                lost.add(each.number)
        return kept, lost

    async def records(self, shard: int) -> list[tuple[bytes, bytes]]:
        """Return all records of a shard, sorted by key.

        Keys begin with the type of the record: a group comes before its members.
        """
        found: list[tuple[bytes, bytes]] = []
        after = b""
        while True:
            rows = await self._rows(
                "SELECT * FROM mpbroker.group_records_v1($1, $2, $3, $4)",
                *(shard, after, _PAGE_ROWS, _PAGE_BYTES),
            )
            if not rows:
                found.sort()
                return found
            found += [(key, value) for _, key, value in rows]
            after = rows[-1]["key_hash"]

    async def _rows(
        self, statement: str, *arguments: object, timeout_s: float | None = None
    ) -> Sequence[asyncpg.Record]:
        return await self._database.rows(statement, *arguments, timeout_s=timeout_s)


async def adopt_records(
    database: ClusterDatabase, records: Sequence[tuple[int, bytes, bytes]]
) -> None:
    """Copy records of groups, each with its shard, into the database.

    Those whose keys are there already are left out. The copy may be made again. Nodes
    that have such a shard already, without these records, read it again.

    Raises:
        ClusterError: as the methods of `GroupShards`.
    """
    for start in range(0, len(records), _ADOPTED_AT_ONCE):
        part = records[start : start + _ADOPTED_AT_ONCE]
        await database.rows(
            "SELECT mpbroker.adopt_group_records_v1($1, $2, $3)",
            *([row[column] for row in part] for column in range(3)),
        )
    await database.rows(
        "SELECT mpbroker.reload_shards_v1($1, $2)",
        GROUP_SHARDS,
        sorted({shard for shard, _, _ in records}),
    )


def _arguments(
    node: NodeEpoch, records: Mapping[OwnedShard, Mapping[bytes, bytes | None]]
) -> Sequence[object]:
    rows = [
        (shard.number, key, value)
        for shard, pairs in records.items()
        for key, value in pairs.items()
    ]
    return (
        *node,
        [shard.number for shard in records],
        [shard.epoch for shard in records],
        *([row[column] for row in rows] for column in range(3)),
    )

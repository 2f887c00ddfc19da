"""Keep a node's membership in its cluster, which ends with the node's lease.

The database's clock decides when a lease ends. A node measures the time from before it
asks for a renewal, and stops all work that needs the lease two seconds before the
database gives the work to another node. It measures by CLOCK_BOOTTIME, which goes on
while a machine sleeps. Clocks of different machines are never compared.

Commits need no lease: a node that was stopped or cut off commits late, or not at all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final, NamedTuple
from uuid import UUID

from mpbroker.cluster.database import ClusterDatabase
from mpbroker.cluster.errors import DatabaseUnavailableError, NodeFencedError

LEASE_S: Final = 6.0
GIVE_UP_S: Final = 4.0
RENEW_EVERY_S: Final = 1.0


def boot_time() -> float:
    """Return seconds by a clock that does not stop while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Node(NamedTuple):
    """A node of the cluster, as the database knows it.

    Attributes:
        epoch: grows with each start of the node.
        shards: the number of shards (parts of the cluster's work) that the node has.
    """

    id: int
    epoch: int
    rack: str | None
    listeners: Sequence[str]
    version: str
    is_live: bool
    shards: int


class NodeDescription(NamedTuple):
    """The description of a node that it gives to the cluster.

    Attributes:
        directory: an id in the node's log.dirs, by which the cluster recognizes it.
        node_id: None: the cluster chooses an id; the same directory gets the same id.
    """

    directory: UUID
    listeners: Sequence[str]
    version: str
    node_id: int | None = None
    rack: str | None = None


class Membership:
    """Joins a node to its cluster, renews its lease, and takes and releases shards.

    A lease is the time for which the database counts the node as live. Shards are parts
    of the cluster's work.

    Args:
        clock: returns a time in seconds; tests replace it.
        lease_s: how long the database waits for a renewal; longer than GIVE_UP_S.

    Attributes:
        node_id, epoch: of this start; -1 before ``join``.
        held_until: when the lease is given up, by the clock; -1: there is none.
    """

    def __init__(
        self,
        database: ClusterDatabase,
        description: NodeDescription,
        *,
        clock: Callable[[], float] = boot_time,
        lease_s: float = LEASE_S,
    ) -> None:
        self._database = database
        self._description = description
        self._clock = clock
        self._lease = timedelta(seconds=lease_s)
        self.held_until = -1.0
        self.node_id = -1
        self.epoch = -1

    def holds_lease(self) -> bool:
        """Return whether the node has its lease, and may do the work that needs it."""
        return self._clock() < self.held_until

    async def join(self) -> None:
        """Enter the cluster as a live node, with an epoch that no start had before.

        Raises:
            ClusterError: the id belongs to another node; the text says what to do.
        """
        asked = self._clock()
        said = self._description
        self.node_id, self.epoch = await self._database.row(
            "SELECT * FROM mpbroker.join_node_v1($1, $2, $3, $4, $5, $6)",
            *(said.directory, said.node_id, said.rack, list(said.listeners)),
            *(said.version, self._lease),
        )
        self.held_until = asked + GIVE_UP_S

    async def renew(self) -> None:
        """Renew this node's lease in the cluster's database.

        Raises:
            NodeFencedError: the node was started again elsewhere; this process must
                stop.
            DatabaseUnavailableError: the caller may try again.
        """
        asked = self._clock()
        (renewed,) = await self._database.row(
            "SELECT mpbroker.renew_node_v1($1, $2, $3)",
            *(self.node_id, self.epoch, self._lease),
            timeout_s=GIVE_UP_S / 2,
        )
        if not renewed:
            self.held_until = -1.0
            raise NodeFencedError(
                f"node {self.node_id} was started again, or its id given to another"
                f" node: epoch {self.epoch} has ended"
            )
        self.held_until = asked + GIVE_UP_S

    async def keep(self, every_s: float = RENEW_EVERY_S) -> None:
        """Renew this node's lease in the database at intervals.

        If the database is unavailable, go on trying. This ends only with an error: when
        the node was started elsewhere.

        Raises:
            NodeFencedError: as ``renew``.
        """
        while True:
            await asyncio.sleep(every_s)
            try:
                await self.renew()
            except DatabaseUnavailableError:
                continue  # holds_lease() tells when the lease has ended

    async def leave(self) -> None:
        """End the lease, so that others need not wait for its end."""
        self.held_until = -1.0
        await self._database.rows(
            "SELECT mpbroker.leave_node_v1($1, $2)", self.node_id, self.epoch
        )


async def read_nodes(database: ClusterDatabase) -> list[Node]:
    """Return all nodes that the cluster has ever had, live or not, by their ids."""
    rows = await database.rows("SELECT * FROM mpbroker.nodes_v1()")
    return [Node(*row) for row in rows]

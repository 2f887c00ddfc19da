"""Follow which nodes of a cluster are live, and which groups they coordinate.

Also which of their partitions are offline. Files tell the other processes of this node.
"""

from __future__ import annotations

import asyncio
import json
from typing import Final

from mpbroker.base.logger import get_logger
from mpbroker.cluster.database import ClusterDatabase
from mpbroker.cluster.errors import DatabaseUnavailableError
from mpbroker.cluster.groups.group_shards import GROUP_SHARDS
from mpbroker.metadata.cluster_nodes import (
    LiveNode,
    cluster_nodes_path,
    offline_partitions_path,
    write_nodes,
    write_offline,
)

_EVERY_S: Final = 0.5
# By then all nodes have seen one that has joined.
SEEN_AFTER_S: Final = 2 * _EVERY_S
_LOG = get_logger(__name__)


class LiveNodes:
    """Knows the live nodes of a cluster, and writes them to files of this node.

    Args:
        database: the cluster's database.
        log_dir: the node's first data directory, which has the files.
    """

    def __init__(self, database: ClusterDatabase, log_dir: str) -> None:
        self._database = database
        self._path = cluster_nodes_path(log_dir)
        self._offline_path = offline_partitions_path(log_dir)
        self._written: list[LiveNode] | None = None
        self._offline_versions: dict[int, int] | None = None

    async def look(self) -> None:
        """Read what has changed since the last look, and write it to the files.

        Raises:
            ClusterError: the database does not answer, or refuses.
            OSError: a file cannot be written.
        """
        nodes, versions = await _live_nodes(self._database)
        # First: a node that comes back may have fewer partitions than it had.
        if versions != self._offline_versions:
            write_offline(self._offline_path, await self._offline(list(versions)))
            self._offline_versions = versions
        if nodes != self._written:
            write_nodes(self._path, nodes)
            self._written = nodes

    async def _offline(self, node_ids: list[int]) -> dict[str, list[int]]:
        """Return the offline partitions of some nodes, by topic id."""
        found: dict[str, list[int]] = {}
        if node_ids:
            for row in await self._database.rows(
                "SELECT * FROM mpbroker.offline_v1($1)", node_ids
            ):
                found.update(json.loads(row["offline"] or "{}"))
        return found

    async def follow(self) -> None:
        """Look again and again, until this is cancelled.

        While the database is unavailable, the files have what was read last.

        Raises:
            ClusterError: the database refuses.
        """
        while True:
            try:
                await self.look()
            except DatabaseUnavailableError:
                pass  # the process that keeps the copy of the metadata logs this
            except OSError as error:
                _LOG.error("the live nodes cannot be written to a file: %s", error)
            await asyncio.sleep(_EVERY_S)


async def live_nodes(database: ClusterDatabase) -> list[LiveNode]:
    """Return the nodes of the cluster that are live now.

    Raises:
        ClusterError: the database does not answer, or refuses.
    """
    return (await _live_nodes(database))[0]


async def _live_nodes(
    database: ClusterDatabase,
) -> tuple[list[LiveNode], dict[int, int]]:
    """Return the live nodes, and a version for each that has offline partitions.

    Another version says that other partitions are offline than before.
    """
    rows = await database.rows("SELECT * FROM mpbroker.live_nodes_v2($1)", GROUP_SHARDS)
    nodes = [LiveNode(*row[:4]) for row in rows]
    return nodes, {row[0]: row[4] for row in rows if row[4]}

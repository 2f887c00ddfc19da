"""Follow which nodes of a cluster are live, and which groups they coordinate.

A file tells the other processes of this node.
"""

from __future__ import annotations

import asyncio
from typing import Final

from mpbroker.base.logger import get_logger
from mpbroker.cluster.database import ClusterDatabase
from mpbroker.cluster.errors import DatabaseUnavailableError
from mpbroker.cluster.groups.group_shards import GROUP_SHARDS
from mpbroker.metadata.cluster_nodes import LiveNode, write_nodes

_EVERY_S: Final = 0.5
# By then all nodes have seen one that has joined.
SEEN_AFTER_S: Final = 2 * _EVERY_S
_LOG = get_logger(__name__)


async def live_nodes(database: ClusterDatabase) -> list[LiveNode]:
    """Return the nodes of the cluster that are live now.

    Raises:
        ClusterError: the database does not answer, or refuses.
    """
    rows = await database.rows("SELECT * FROM mpbroker.live_nodes_v1($1)", GROUP_SHARDS)
    return [LiveNode(*row) for row in rows]


async def follow_live_nodes(database: ClusterDatabase, path: str) -> None:
    """Write the live nodes to a file whenever they change, until this is cancelled.

    While the database is unavailable, the file has the nodes that were live last.

    Raises:
        ClusterError: the database refuses.
    """
    written: list[LiveNode] | None = None
    while True:
        try:
            nodes = await live_nodes(database)
            if nodes != written:
                write_nodes(path, nodes)
                written = nodes
        except DatabaseUnavailableError:
            pass  # the process that keeps the copy of the metadata logs this
        except OSError as error:
            _LOG.error("%s cannot be written: %s", path, error)
        await asyncio.sleep(_EVERY_S)

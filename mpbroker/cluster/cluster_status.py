"""Report a cluster's nodes, and how durable a commit in its database is."""

from __future__ import annotations

from typing import Any, Final

from mpbroker.cluster.database import ClusterDatabase
from mpbroker.cluster.membership import read_nodes
from mpbroker.cluster.migrations import load_migrations, read_cluster

_PROMISES: Final = (
    "SELECT current_setting('server_version') AS version,"
    " current_setting('fsync')::boolean AS fsync,"
    " current_setting('full_page_writes')::boolean AS full_page_writes,"
    " current_setting('synchronous_standby_names') <> '' AS has_standby"
)


async def read_status(database: ClusterDatabase) -> dict[str, Any]:
    """Return the data that `mpbroker cluster status --format json` prints."""
    info = await read_cluster(database)
    newest = load_migrations()[-1].version
    promises = await database.row(_PROMISES)
    warnings = []
    if info.schema < newest:
        warnings.append("the schema is old: run 'mpbroker cluster migrate'")
    if not promises["has_standby"]:
        warnings.append(
            "the database has no synchronous standby: if its machine is lost, so are"
            " acknowledged records"
        )
    for name in ("fsync", "full_page_writes"):
        if not promises[name]:
            warnings.append(
                f"the database runs with {name}=off: a power cut loses or damages it"
            )
    # A schema from before there were nodes has no function to ask.
    nodes = await read_nodes(database) if info.schema >= newest else []
    return {
        "cluster": info.cluster_id,
        "storage": info.storage_url,
        "schema": info.schema,
        "newest_schema": newest,
        "server": f"PostgreSQL {promises['version']}",
        "synchronous_standby": promises["has_standby"],
        "warnings": warnings,
        "nodes": [
            {**node._asdict(), "listeners": list(node.listeners)} for node in nodes
        ],
    }

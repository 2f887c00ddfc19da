"""What a broker has done for its cluster, for those who look from outside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any


def cluster_figures(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the node's id, its store, its lease, and the numbers of ClusterStats.

    Args:
        state: what the broker has published.

    Returns:
        None if the broker is in no cluster.
    """
    node = state.get("cluster_node")
    if not node:
        return None
    # Imported here: most brokers are in no cluster.
    from mpbroker.cluster.stats.cluster_stats import read_stats

    stats = read_stats(state["log_dirs"][0])
    return {**node, "lease_s": round(stats.lease_s(), 3), **asdict(stats)}

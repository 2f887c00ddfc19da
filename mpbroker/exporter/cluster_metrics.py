"""Families of a cluster's node: what it puts, reads and orders, and its lease."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from mpbroker.cluster.stats.cluster_stats import ClusterStats, read_stats
from mpbroker.exporter.exposition import Family, figure_families, figure_status

_US_PER_S: Final = 1_000_000
_FAMILIES: Final = {
    "mpbroker_cluster_put_bytes_total": "Bytes of objects put into the store.",
    "mpbroker_cluster_puts_total": "Objects put into the store.",
    "mpbroker_cluster_read_bytes_total": "Bytes of records read from the store.",
    "mpbroker_cluster_reads_total": "Requests for parts of objects.",
    "mpbroker_cluster_store_errors_total": "Puts and reads of objects that failed.",
    "mpbroker_cluster_commits_total": "Objects whose records got their offsets.",
    "mpbroker_cluster_commit_seconds_total": "Time that these commits took.",
    "mpbroker_cluster_database_errors_total": "Calls to the database that failed.",
    "mpbroker_cluster_buffered_bytes": "Bytes of produces that wait for a commit.",
    "mpbroker_cluster_extents_total": "Runs of batches copied into local logs.",
    "mpbroker_cluster_lag_records": "Committed records that local logs lack.",
    "mpbroker_cluster_partitions": "Shared partitions with a log on this node.",
    "mpbroker_cluster_lease_seconds": "What is left of the node's lease.",
}


def cluster_families(home: str) -> list[Family]:
    """Return the families.

    Args:
        home: the first log directory.
    """
    stats = read_stats(home)
    return figure_families(_FAMILIES, lambda figure: _value(stats, figure))


def cluster_status(by_name: Mapping[str, Family]) -> dict[str, float] | None:
    """Return the figures by name, for the status page; None: there is no cluster."""
    return figure_status(_FAMILIES, by_name)


def _value(stats: ClusterStats, figure: str) -> float:
    if figure == "commit_seconds":
        return stats.commit_us / _US_PER_S
    if figure == "lease_seconds":
        return stats.lease_s()
    return float(getattr(stats, figure))

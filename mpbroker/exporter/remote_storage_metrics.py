"""Make metrics of tiered storage: copies to the remote store, and reads from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from mpbroker.exporter.exposition import Family, figure_families, figure_status
from mpbroker.storage.remote.remote_stats import read_stats

_FAMILIES: Final = {
    "mpbroker_remote_copied_bytes_total": "Bytes copied to the remote store.",
    "mpbroker_remote_copied_segments_total": "Segments copied to the store.",
    "mpbroker_remote_copy_errors_total": "Passes over a partition that failed.",
    "mpbroker_remote_copy_success_time_seconds": "When copies last succeeded.",
    "mpbroker_remote_metadata_success_time_seconds": "The same for the metadata.",
    "mpbroker_remote_lag_bytes": "Bytes of closed segments that are to be copied.",
    "mpbroker_remote_lag_segments": "Closed segments that are to be copied.",
    "mpbroker_remote_stored_bytes": "Bytes of segments in the remote store.",
    "mpbroker_remote_stored_segments": "Segments in the remote store.",
    "mpbroker_remote_fetched_bytes_total": "Bytes read from the remote store.",
    "mpbroker_remote_fetched_chunks_total": "Pieces read from the remote store.",
    "mpbroker_remote_fetch_errors_total": "Reads from the remote store that failed.",
    "mpbroker_remote_cache_bytes": "Bytes of the files with what was read last.",
    "mpbroker_remote_cache_hits_total": "Fetches of remote records from the cache.",
    "mpbroker_remote_cache_misses_total": "Pieces that fetches had to wait for.",
}


def remote_storage_families(home: str) -> list[Family]:
    """Return the metrics of tiered storage.

    Args:
        home: the first log directory, in which the broker keeps these figures.
    """
    stats = read_stats(home)
    return figure_families(_FAMILIES, lambda figure: getattr(stats, figure))


def remote_storage_status(by_name: Mapping[str, Family]) -> dict[str, float] | None:
    """Return the figures of tiered storage by name; None: there is no remote store."""
    return figure_status(_FAMILIES, by_name)

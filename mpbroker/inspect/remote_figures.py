"""Statistics of a broker's remote log manager, read from outside the broker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any


def remote_figures(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the URL of the remote store (tiered storage), and statistics of its use.

    Args:
        state: the broker's published properties.

    Returns:
        None if the broker has no remote store.
    """
    url = state.get("remote_storage_url")
    if not url:
        return None
    # Imported here: most brokers have no remote store.
    from mpbroker.storage.remote.remote_stats import read_stats

    return {"url": url, **asdict(read_stats(state["log_dirs"][0]))}

"""What became of those who connected: accepted, or refused and why, by listener."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from mpbroker.exporter.exposition import Family, counter
from mpbroker.ipc.layout import ACCEPTOR_COUNTERS, METRICS, METRICS_CONNECTIONS
from mpbroker.network.connection_quotas import AcceptorCounter

_REASONS: Final = {
    AcceptorCounter.TOO_MANY_OF_ADDRESS: "address_count",
    AcceptorCounter.TOO_FAST_OF_ADDRESS: "address_rate",
    AcceptorCounter.NO_FILES: "no_files",
}


def new_connections(words: memoryview, listeners: Sequence[str]) -> Iterable[Family]:
    """The acceptors' words."""
    accepted = counter("mpbroker_connections_accepted_total", "Connections accepted.")
    refused = counter(
        "mpbroker_connections_refused_total", "Connections closed unserved, and why."
    )
    for index, name in enumerate(listeners):
        first = METRICS + METRICS_CONNECTIONS + index * ACCEPTOR_COUNTERS
        accepted.add(words[first + AcceptorCounter.ACCEPTED], listener=name)
        for each, reason in _REASONS.items():
            refused.add(words[first + each], listener=name, reason=reason)
    return accepted, refused

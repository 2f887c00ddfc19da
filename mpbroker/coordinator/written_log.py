"""What the coordinator needs of a log that it has written to.

A log is a partition of a topic; in a cluster, that of groups is a shard instead, whose
records are in the cluster's database.
"""

from __future__ import annotations

from typing import Protocol

from mpbroker.metadata.log_config import LogConfig


class WrittenRow(Protocol):
    """How far a log is written. An offset counts records, or what else grows."""

    @property
    def index(self) -> int:
        """A number that no other log has."""

    @property
    def log_end_offset(self) -> int: ...

    @property
    def durable_end_offset(self) -> int: ...

    @property
    def status(self) -> int: ...

    def take_waiters(self) -> int:
        """Return the processes that wait until the log grows, as bits."""


class WrittenView(Protocol):
    """A log's settings, and whether it can be used."""

    @property
    def config(self) -> LogConfig: ...

    def require_online(self) -> object:
        """Raise ApiError if the log cannot be read or written."""


class WrittenLog(Protocol):
    """A log of the coordinator's records."""

    @property
    def row(self) -> WrittenRow: ...

    @property
    def view(self) -> WrittenView: ...

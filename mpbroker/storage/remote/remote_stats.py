"""RemoteStats: numbers of the remote log manager, in a file that the exporter reads.

The numbers begin with 0 when that process begins; a counter of metrics may do so. The
times of the last successes are kept. The file has a line `name number` for each number.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from threading import Lock
from typing import Final

from mpbroker.storage.files.log_files import write_file

_FILE: Final = "remote-log-stats"


@dataclass
class RemoteStats:
    """Counters and sizes of the remote log manager.

    Attributes:
        copied_segments: segments copied to the store since the process began.
        copied_bytes: bytes of the `.log` files of these segments.
        copy_errors: failed passes over a partition or over the metadata.
        lag_segments: closed segments that are to be copied, as of the last pass.
        lag_bytes: bytes of the `.log` files of these segments.
        stored_segments: segments in the store, by the partitions' manifests.
        stored_bytes: bytes of the `.log` files of these segments.
        fetched_bytes: bytes of the chunks that came into the cache.
        fetched_chunks: number of the chunks that came into the cache.
        fetch_errors: requests for a chunk that failed.
        cache_bytes: the present size of all caches.
        cache_hits: fetches that found their records in the cache. Each handler sends
            its own number at most once a second.
        cache_misses: chunks and indexes that a fetch had to wait for.
        copy_success_time_seconds: when a segment was copied last, or a pass over all
            partitions has ended without an error, in seconds since 1970; 0: never.
        metadata_success_time_seconds: the same for the copy of the metadata, also if
            nothing had changed.
    """

    copied_segments: int = 0
    copied_bytes: int = 0
    copy_errors: int = 0
    lag_segments: int = 0
    lag_bytes: int = 0
    stored_segments: int = 0
    stored_bytes: int = 0
    fetched_bytes: int = 0
    fetched_chunks: int = 0
    fetch_errors: int = 0
    cache_bytes: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    copy_success_time_seconds: int = 0
    metadata_success_time_seconds: int = 0


class SharedStats:
    """A RemoteStats that several threads may change, and the file it is written to.

    Args:
        home: the first log directory.
    """

    def __init__(self, home: str) -> None:
        self._path = f"{home}/{_FILE}"
        self._lock = Lock()
        before = read_stats(home)
        self._now = RemoteStats(
            copy_success_time_seconds=before.copy_success_time_seconds,
            metadata_success_time_seconds=before.metadata_success_time_seconds,
        )
        self._written: dict[str, int] = {}

    def add(self, **numbers: int) -> None:
        """Add to some numbers, given by their names in RemoteStats."""
        with self._lock:
            for name, number in numbers.items():
                setattr(self._now, name, getattr(self._now, name) + number)

    def set(self, **numbers: int) -> None:
        """Replace some numbers, given by their names in RemoteStats."""
        with self._lock:
            for name, number in numbers.items():
                setattr(self._now, name, number)

    def write(self) -> None:
        """Write the numbers to their file if one has changed; raises OSError."""
        with self._lock:
            now = asdict(self._now)
        if now != self._written:
            text = "".join(f"{name} {number}\n" for name, number in now.items())
            write_file(self._path, text.encode(), sync=False)
            self._written = now


def read_stats(home: str) -> RemoteStats:
    """Read the numbers of the remote log manager from their file.

    All are 0 if there is no file yet, or if it is damaged.

    Args:
        home: the first log directory.
    """
    try:
        with open(f"{home}/{_FILE}", encoding="ascii") as file:
            numbers = {name: int(number) for name, number in map(str.split, file)}
    except (OSError, ValueError):
        return RemoteStats()
    known = {each.name for each in fields(RemoteStats)}
    return RemoteStats(**{name: n for name, n in numbers.items() if name in known})

"""ClusterStats: what a node has done for its cluster, in a file that others read.

The process that talks to the cluster writes the file once a second; the exporter and
`ctl status` read it. The numbers begin with 0 when that process begins; a counter of
metrics may do so. The file has a line for each, `name number`.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, fields
from typing import Final

from mpbroker.storage.files.log_files import write_file

_FILE: Final = "cluster-node-stats"


@dataclass
class ClusterStats:
    """Counters and sizes of the process that talks to the cluster.

    Attributes:
        put_bytes: of objects that were put into the store.
        puts: their number.
        read_bytes: of records that were read from the store.
        reads: requests for parts of an object.
        store_errors: puts and reads that failed, also when they were repeated.
        commits: objects that got their offsets.
        commit_us: the time that these commits took, in microseconds.
        database_errors: calls to the database that failed, also if repeated.
        buffered_bytes: of produces without an answer, at present.
        extents: runs of batches that were copied into local logs.
        lag_records: that are committed, and were not in the local logs a second ago.
        partitions: shared ones that have a local log here.
        lease_until_ms: when this node has to stop what needs the lease, on the clock
            of ``boot_time``; 0: it has none.
    """

    put_bytes: int = 0
    puts: int = 0
    read_bytes: int = 0
    reads: int = 0
    store_errors: int = 0
    commits: int = 0
    commit_us: int = 0
    database_errors: int = 0
    buffered_bytes: int = 0
    extents: int = 0
    lag_records: int = 0
    partitions: int = 0
    lease_until_ms: int = 0

    def lease_s(self) -> float:
        """Return the seconds that are left of the node's lease."""
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        return max(0.0, self.lease_until_ms / 1000 - now)


def write_stats(home: str, stats: ClusterStats) -> None:
    """Replace the file.

    Args:
        home: the first log directory.

    Raises:
        OSError: it cannot be written.
    """
    lines = [f"{name} {number}\n" for name, number in asdict(stats).items()]
    write_file(f"{home}/{_FILE}", "".join(lines).encode(), sync=False)


def read_stats(home: str) -> ClusterStats:
    """Read the numbers; all are 0 if there are none yet, or the file is damaged."""
    try:
        with open(f"{home}/{_FILE}", encoding="ascii") as file:
            numbers = {name: int(number) for name, number in map(str.split, file)}
    except (OSError, ValueError):
        return ClusterStats()
    known = {each.name for each in fields(ClusterStats)}
    return ClusterStats(**{name: n for name, n in numbers.items() if name in known})

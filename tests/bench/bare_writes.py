"""What the kernel takes for a produce's writes to few files and to many.

A small append costs the file system more where the file was not written a moment ago:
each write moves the file's time of modification on, once in a tick of the clock, and
takes its inode, pages and blocks from further away. No broker can have that for
nothing; so the same writes are made here with nothing around them, as often a second,
by a loop that costs the same whatever it writes to.
"""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Final, NamedTuple, Self

INDEX_INTERVAL_BYTES: Final = 4096  # Kafka's index.interval.bytes
_BURST: Final = 1000  # writes between two looks at the clock
# So often each file is written to before that counts: its first pages are there then,
# and an entry in each of its indexes.
_TOUCHES: Final = 60
_INDEX_ENTRY: Final = bytes(8)
_TIME_ENTRY: Final = bytes(12)


class _Files(NamedTuple):
    """A partition's descriptors."""

    log: int
    index: int
    time_index: int


class BareWrites:
    """A log and two indexes for each of so many partitions, as a broker writes them.

    Args:
        directory: where the partitions' directories are made.
        partitions: how many.
        record: the bytes of one append.
    """

    def __init__(self, directory: Path, partitions: int, record: bytes) -> None:
        self._record = record
        self._files = []
        for number in range(partitions):
            parent = directory / f"bare-{partitions}-{number}"
            parent.mkdir()
            self._files.append(_open_in(parent))
        self._appends = 0

    def __enter__(self) -> Self:
        self.write(_TOUCHES * len(self._files))
        return self

    def __exit__(self, *_: object) -> None:
        for fd in itertools.chain(*self._files):
            os.close(fd)

    def write(self, count: int) -> None:
        """Append so many times, to one partition after the other.

        Nothing is remembered of a partition: only what the kernel has to look up for it
        is to be further away where there are many.
        """
        files, record = self._files, self._record
        between = INDEX_INTERVAL_BYTES // len(record) + 1
        for number in range(self._appends, self._appends + count):
            turn, partition = divmod(number, len(files))
            log, index, time_index = files[partition]
            os.pwrite(log, record, turn * len(record))
            # Not all of them in the same turn.
            entry, rest = divmod(turn + partition % between, between)
            if not rest:
                os.pwrite(index, _INDEX_ENTRY, entry * len(_INDEX_ENTRY))
                os.pread(time_index, len(_TIME_ENTRY), 0)
        self._appends += count

    def cpu_us(self, per_s: float, seconds: float) -> float:
        """Return what an append costs in microseconds, at so many a second."""
        count, spent, began = 0, 0, time.monotonic()
        while (past := time.monotonic() - began) < seconds:
            time.sleep(max(0.0, count / per_s - past))
            before = time.thread_time_ns()
            self.write(_BURST)
            spent += time.thread_time_ns() - before
            count += _BURST
        return spent / count / 1e3


def _open_in(directory: Path) -> _Files:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    names = ("0.log", "0.index", "0.timeindex")
    files = _Files(*(os.open(directory / name, flags) for name in names))
    os.pwrite(files.time_index, _TIME_ENTRY, 0)  # no record is newer than the first
    return files

"""A segment: one `.log` file and its indexes, opened when first needed."""

import os

from mpbroker.ipc.tables.partition_table import LogState
from mpbroker.protocol.records.batch_header import BatchHeader
from mpbroker.storage.files.batch_scan import find_batch, scan_batches
from mpbroker.storage.files.log_files import (
    INDEX_SUFFIX,
    LOG_SUFFIX,
    TIME_INDEX_SUFFIX,
    TXN_INDEX_SUFFIX,
    create_file,
    segment_file,
)
from mpbroker.storage.files.offset_index import OffsetIndex
from mpbroker.storage.files.time_index import TimeIndex, TimestampOffset
from mpbroker.storage.files.txn_index import sync_aborted


class LogSegment:
    """One segment as one process sees it.

    ``size``, ``index_entries`` and ``time_index_entries`` of the active segment are in
    the partition's row; methods take them as arguments. A segment that is no longer
    active never changes, so its files say it.
    """

    __slots__ = (
        "_fd",
        "_inode",
        "base_offset",
        "directory",
        "offset_index",
        "path",
        "suffix",
        "time_index",
    )

    def __init__(self, directory: str, base_offset: int, suffix: str = "") -> None:
        self.directory = directory
        self.base_offset = base_offset
        self.suffix = suffix
        self.path = self.file(LOG_SUFFIX)
        self.offset_index = OffsetIndex(self.file(INDEX_SUFFIX), base_offset)
        self.time_index = TimeIndex(self.file(TIME_INDEX_SUFFIX), base_offset)
        self._fd = -1
        self._inode = 0

    def file(self, suffix: str) -> str:
        return segment_file(self.directory, self.base_offset, suffix + self.suffix)

    @property
    def txn_index_path(self) -> str:
        return self.file(TXN_INDEX_SUFFIX)

    @property
    def fd(self) -> int:
        """The open `.log` file.

        Raises:
            FileNotFoundError: removed by retention or by a compaction meanwhile.
        """
        if self._fd < 0:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            self._inode = os.fstat(self._fd).st_ino
        return self._fd

    @property
    def inode(self) -> int:
        return self._inode if self._fd >= 0 else os.fstat(self.fd).st_ino

    def create(self) -> None:
        """Make the files, empty. What a dead creator left in them is dropped."""
        if self._fd < 0:
            self._fd = create_file(self.path)
            self._inode = os.fstat(self._fd).st_ino
        os.ftruncate(self._fd, 0)
        self.offset_index.truncate(0)
        self.time_index.truncate(0)

    def truncate(self, size: int) -> None:
        """Cut the log to ``size`` bytes."""
        os.ftruncate(self.fd, size)

    def file_size(self) -> int:
        return os.fstat(self.fd).st_size

    def extent(self, state: LogState) -> tuple[int, int]:
        """Return how many bytes and offset index entries of the segment are committed.

        Args:
            state: what is committed of the partition; it knows the active segment.
        """
        if self.base_offset == state.active_base_offset:
            return state.active_size, state.index_entries
        return self.file_size(), self.offset_index.file_entries()

    def find(self, offset: int, end: int, entries: int) -> tuple[int, int]:
        """Return (position, size) of the first batch that ends at or after ``offset``.

        (-1, 0) if none does below the position ``end``.
        """
        start = self.offset_index.lookup(offset, entries)
        return find_batch(self.fd, start, end, offset)

    def first_batch(self, end: int) -> BatchHeader | None:
        """Return the header of the first batch, if there is one below ``end``."""
        for _, header in scan_batches(self.fd, 0, end):
            return header
        return None

    def largest_timestamp(self) -> TimestampOffset:
        """Return the last time index entry of a segment that is not active."""
        return self.time_index.last_entry(self.time_index.file_entries())

    def finish(
        self, size: int, entries: int, time_entries: int, largest: TimestampOffset
    ) -> None:
        """Make the files say what the row said, as the segment stops being active.

        Idempotent: a roll that died before its commit is done again.
        """
        last = self.time_index.last_entry(time_entries)
        if largest.timestamp > last.timestamp:
            self.time_index.write_entry(time_entries, *largest)
            time_entries += 1
        self.time_index.truncate(time_entries)
        self.offset_index.truncate(entries)
        os.ftruncate(self.fd, size)

    def sync(self) -> None:
        """Force the log and both indexes to disk."""
        os.fdatasync(self.fd)
        self.sync_indexes()

    def sync_indexes(self) -> None:
        self.offset_index.sync()
        self.time_index.sync()
        sync_aborted(self.txn_index_path)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        self.close_indexes()

    def open_indexes(self) -> None:
        """Open what an append needs every few KiB. Raises OSError."""
        self.offset_index.open()
        self.time_index.open()

    def close_indexes(self) -> None:
        """Give the index descriptors back; they open again when needed."""
        self.offset_index.close()
        self.time_index.close()

"""LogSegment: one `.log` file and its indexes, opened when first needed.

Source: Kafka's LogSegment.
"""

import os

from mpbroker.base.file_id import file_id
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
    """One segment of a log, as one process sees it.

    The row (the partition's entry in shared memory) has the numbers of committed bytes
    and index entries of the active segment; methods take these numbers as arguments. A
    segment that is no longer active does not change, so its numbers follow from the
    sizes of its files.

    Args:
        directory: the partition's directory.
        base_offset: the offset of the first record, and the name of the files.
        suffix: added to the names of the files, such as `.cleaned`.
    """

    __slots__ = (
        "_fd",
        "_file_id",
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
        self._file_id = 0

    def file(self, suffix: str) -> str:
        """Return the path of the segment's file with a suffix, such as `.index`."""
        return segment_file(self.directory, self.base_offset, suffix + self.suffix)

    @property
    def txn_index_path(self) -> str:
        """The path of this segment's index of aborted transactions, if there is one."""
        return self.file(TXN_INDEX_SUFFIX)

    @property
    def fd(self) -> int:
        """The descriptor of the `.log` file, opened if it is not open.

        Raises:
            FileNotFoundError: retention or compaction has removed the file.
            OSError: it cannot be opened.
        """
        if self._fd < 0:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            self._file_id = file_id(self._fd)
        return self._fd

    @property
    def file_id(self) -> int:
        """The number that identifies the open `.log` file: see base/file_id.py."""
        return self._file_id if self._fd >= 0 else file_id(self.fd)

    def create(self) -> None:
        """Create the `.log` file and both indexes of a new segment.

        Files that a killed process has left are emptied.

        Raises:
            OSError: a file cannot be created.
        """
        if self._fd < 0:
            self._fd = create_file(self.path)
            self._file_id = file_id(self._fd)
        os.ftruncate(self._fd, 0)
        self.offset_index.truncate(0)
        self.time_index.truncate(0)

    def truncate(self, size: int) -> None:
        """Cut the segment's `.log` to ``size`` bytes; the indexes stay as they are."""
        os.ftruncate(self.fd, size)

    def file_size(self) -> int:
        """Return the size of the `.log` file in bytes, committed or not."""
        return os.fstat(self.fd).st_size

    def extent(self, state: LogState) -> tuple[int, int]:
        """Return the number of committed bytes, and of committed offset index entries.

        Args:
            state: the committed state of the partition.
        """
        if self.base_offset == state.active_base_offset:
            return state.active_size, state.index_entries
        return self.file_size(), self.offset_index.file_entries()

    def find(self, offset: int, end: int, entries: int) -> tuple[int, int]:
        """Return (position, size) of the first batch that ends at or after ``offset``.

        Args:
            offset: the offset to look for.
            end: the position of the end of the committed bytes.
            entries: the number of committed entries of the offset index.

        Returns:
            Position and size in bytes; (-1, 0) if there is no such batch before
            ``end``.

        Raises:
            CorruptLogError: there are bytes that are not a batch.
            OSError: the files cannot be read.
        """
        start = self.offset_index.lookup(offset, entries)
        return find_batch(self.fd, start, end, offset)

    def first_batch(self, end: int) -> BatchHeader | None:
        """Return the header of the segment's first batch; None: ``end`` (bytes) is 0.

        Raises:
            CorruptLogError: there are bytes that are not a batch.
        """
        for _, header in scan_batches(self.fd, 0, end):
            return header
        return None

    def largest_timestamp(self) -> TimestampOffset:
        """Return a segment's largest timestamp (ms), and the last offset of its batch.

        This is the last entry of the time index. The segment must not be active.
        """
        return self.time_index.last_entry(self.time_index.file_entries())

    def finish(
        self, size: int, entries: int, time_entries: int, largest: TimestampOffset
    ) -> None:
        """Cut the files to the committed state, before the segment stops being active.

        The last entry of the time index is added before. The call may be repeated: a
        process killed in here has not committed its roll, so the row still has these
        numbers for the next roll.

        Args:
            size: committed bytes of the log.
            entries: committed entries of the offset index.
            time_entries: committed entries of the time index.
            largest: the largest timestamp and its offset; the time index of a segment
                that is not active ends with it.

        Raises:
            OSError: a file cannot be changed.
        """
        last = self.time_index.last_entry(time_entries)
        if largest.timestamp > last.timestamp:
            self.time_index.write_entry(time_entries, *largest)
            time_entries += 1
        self.time_index.truncate(time_entries)
        self.offset_index.truncate(entries)
        os.ftruncate(self.fd, size)

    def sync(self) -> None:
        """Force the segment's `.log` and its indexes to disk.

        Raises:
            OSError: the disk failed.
        """
        os.fdatasync(self.fd)
        self.sync_indexes()

    def sync_indexes(self) -> None:
        """Force the segment's indexes to disk, also that of aborted transactions."""
        self.offset_index.sync()
        self.time_index.sync()
        sync_aborted(self.txn_index_path)

    def close(self) -> None:
        """Close the segment's files. They open again when needed."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        self.close_indexes()

    def open_indexes(self) -> None:
        """Open the offset index and the time index, before appends write to them.

        Raises:
            OSError: a file cannot be opened or created.
        """
        self.offset_index.open()
        self.time_index.open()

    def close_indexes(self) -> None:
        """Close the offset index and the time index. They open again when needed."""
        self.offset_index.close()
        self.time_index.close()

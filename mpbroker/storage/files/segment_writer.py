"""SegmentWriter: write the copy of a segment that compaction makes.

The files have the suffix `.cleaned` while they are written. Index entries follow the
same rules as those of an append: one entry every index.interval.bytes.
"""

import os
from typing import Final

from mpbroker.storage.files.log_files import (
    CLEANED_SUFFIX,
    SEGMENT_SUFFIXES,
    SWAP_SUFFIX,
    remove_if_exists,
    segment_file,
    sync_directory,
    write_file,
    write_whole,
)
from mpbroker.storage.files.log_segment import LogSegment
from mpbroker.storage.files.time_index import TimestampOffset
from mpbroker.storage.files.txn_index import AbortedTransaction, encode_aborted

_BUFFER_BYTES: Final = 1024 * 1024


class SegmentWriter:
    """One segment being written; no reader sees it until ``install`` renames it.

    Args:
        directory: the partition's directory.
        base_offset: the base offset in the names of the files.
        index_interval_bytes: bytes of log between two entries of the offset index.

    Raises:
        OSError: the files cannot be made. The other methods raise it, too.
    """

    def __init__(
        self, directory: str, base_offset: int, index_interval_bytes: int
    ) -> None:
        self._segment = LogSegment(directory, base_offset, CLEANED_SUFFIX)
        self._segment.create()
        self._interval = index_interval_bytes
        self._buffer = bytearray()
        self._written = 0
        self._since_index = 0
        self._entries = 0
        self._time_entries = 0
        self._largest = TimestampOffset(-1, base_offset)
        self._last_time = -1

    @property
    def size(self) -> int:
        """Bytes of batches added so far, those in memory included."""
        return self._written + len(self._buffer)

    def write(self, batch: bytes, last_offset: int, timestamp: int) -> None:
        """Add a batch.

        Args:
            batch: all of its bytes, header included.
            last_offset: the offset of its last record.
            timestamp: the largest timestamp in it (ms); -1 for a batch without
                records, so that a lookup by timestamp does not find it.
        """
        position = self.size
        if timestamp > self._largest.timestamp:
            self._largest = TimestampOffset(timestamp, last_offset)
        if self._since_index > self._interval:
            index, time_index = self._segment.offset_index, self._segment.time_index
            index.write_entry(self._entries, last_offset, position)
            self._entries += 1
            self._since_index = 0
            if self._largest.timestamp > self._last_time:
                time_index.write_entry(self._time_entries, *self._largest)
                self._time_entries += 1
                self._last_time = self._largest.timestamp
        self._since_index += len(batch)
        self._buffer += batch
        if len(self._buffer) >= _BUFFER_BYTES:
            self._flush()

    def finish(
        self, aborted: list[AbortedTransaction] | None, modified_s: float
    ) -> None:
        """Write what is in memory, and force all files and their names to disk.

        Args:
            aborted: the entries of the transaction index; None: make no such index.
            modified_s: the modification time for the log file, in seconds since 1970:
                that of the newest segment that it replaces.
        """
        self._flush()
        segment = self._segment
        segment.finish(self._written, self._entries, self._time_entries, self._largest)
        segment.sync()
        segment.close()
        if aborted is not None:
            write_file(segment.txn_index_path, encode_aborted(aborted))
        os.utime(segment.path, (modified_s, modified_s))
        sync_directory(segment.directory)

    def install(self) -> None:
        """Rename the files from `.cleaned` to `.swap`, under the partition's lock.

        A process that finds a `.log.swap` file takes the copy as complete, and puts it
        in the place of the originals: see ``finish_swap`` in log_loader.py.
        """
        segment = self._segment
        # The log last. Killed before its rename, the originals stay in use, and the
        # files of this copy are removed at the next start. Killed after it, the next
        # owner of the lock, or the next start, finishes the replacement.
        for suffix in reversed(SEGMENT_SUFFIXES):
            path = segment_file(segment.directory, segment.base_offset, suffix)
            try:
                os.rename(path + CLEANED_SUFFIX, path + SWAP_SUFFIX)
            except FileNotFoundError:
                continue

    def abandon(self) -> None:
        """Close and remove the files."""
        segment = self._segment
        segment.close()
        for suffix in SEGMENT_SUFFIXES:
            remove_if_exists(segment.file(suffix))

    def _flush(self) -> None:
        if self._buffer:
            write_whole(self._segment.fd, bytes(self._buffer), self._written)
            self._written += len(self._buffer)
            self._buffer.clear()

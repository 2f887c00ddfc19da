"""Write a `.cleaned` segment, with indexes by the same rules as an append."""

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
    """One segment being written; nobody sees it until ``complete`` renames it."""

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
        return self._written + len(self._buffer)

    def write(self, batch: bytes, last_offset: int, timestamp: int) -> None:
        """Add a batch.

        Args:
            timestamp: the largest in it, in ms; -1 for a batch without records, which
                no look-up by timestamp may end at.
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
        """Force everything to disk. Nothing but ``install`` is left to do.

        Args:
            aborted: content of the transaction index; None if it is to have none.
            modified_s: the time that the log is given, that of the newest replaced.
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
        """Give the files their final names, under the partition's lock.

        First `.swap`, the log last: a loader, or whoever takes over the lock of one who
        died in here, takes a `.log.swap` for complete and goes on from it.
        """
        segment = self._segment
        for suffix in reversed(SEGMENT_SUFFIXES):
            path = segment_file(segment.directory, segment.base_offset, suffix)
            try:
                os.rename(path + CLEANED_SUFFIX, path + SWAP_SUFFIX)
            except FileNotFoundError:
                continue

    def abandon(self) -> None:
        """Remove what was written."""
        segment = self._segment
        segment.close()
        for suffix in SEGMENT_SUFFIXES:
            remove_if_exists(segment.file(suffix))

    def _flush(self) -> None:
        if self._buffer:
            write_whole(self._segment.fd, bytes(self._buffer), self._written)
            self._written += len(self._buffer)
            self._buffer.clear()

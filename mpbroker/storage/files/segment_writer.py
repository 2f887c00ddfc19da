"""SegmentWriter: write the copy of a segment that compaction makes.

The files have the suffix `.cleaned` while they are written. Index entries follow the
same rules as those of an append: one entry every index.interval.bytes.
"""

import os
from collections.abc import Iterable
from typing import Final

from mpbroker.base.directories import sync_directory
from mpbroker.storage.files.log_files import (
    CLEANED_SUFFIX,
    SEGMENT_SUFFIXES,
    SWAP_SUFFIX,
    remove_if_exists,
    segment_file,
    write_file,
    write_whole,
)
from mpbroker.storage.files.log_segment import LogSegment
from mpbroker.storage.files.time_index import TimestampOffset
from mpbroker.storage.files.txn_index import AbortedTransaction, encode_aborted

_BUFFER_BYTES: Final = 1024 * 1024


class SegmentWriter:
    """The copy of a segment while it is written; ``install`` shows it to readers.

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
        """The bytes of all batches added so far, in the file or in memory."""
        return self._written + len(self._buffer)

    def write(self, batch: bytes, last_offset: int, timestamp: int) -> None:
        """Append a batch to the compacted copy, with an index entry if one is due.

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

    def write_batches(
        self, batches: bytes, spans: Iterable[tuple[int, int, int]]
    ) -> None:
        """Append many batches, which lie one behind the other, to the compacted copy.

        Args:
            batches: the bytes of all batches.
            spans: (size in bytes, last offset, timestamp) of each batch; the timestamp
                is as for ``write``.
        """
        at = 0
        for size, last_offset, timestamp in spans:
            self.write(batches[at : at + size], last_offset, timestamp)
            at += size

    def finish(
        self, aborted: list[AbortedTransaction] | None, modified_s: float
    ) -> None:
        """Write the batches that are still in memory; force the copy's files to disk.

        Args:
            aborted: the entries of the transaction index; None: make no such index.
            modified_s: the modification time for the log file, in seconds since 1970;
                it is that of the newest segment that the copy replaces.
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
        """Rename the files from `.cleaned` to `.swap`.

        The caller holds the lock of the partition's row (its entry in shared memory).

        A process that finds a `.log.swap` file takes the copy as complete, and puts it
        in the place of the originals: see ``finish_swap`` in log_loader.py.
        """
        segment = self._segment
        # The log last. If this process is killed before the log's rename, the originals
        # stay in use, and the files of this copy are removed at the next start. If it
        # is killed after that rename, the next owner of the lock, or the next start,
        # finishes the replacement.
        for suffix in reversed(SEGMENT_SUFFIXES):
            path = segment_file(segment.directory, segment.base_offset, suffix)
            try:
                os.rename(path + CLEANED_SUFFIX, path + SWAP_SUFFIX)
            except FileNotFoundError:
                continue

    def abandon(self) -> None:
        """Close and remove the files of this copy, as the compaction was given up."""
        segment = self._segment
        segment.close()
        for suffix in SEGMENT_SUFFIXES:
            remove_if_exists(segment.file(suffix))

    def _flush(self) -> None:
        if self._buffer:
            write_whole(self._segment.fd, bytes(self._buffer), self._written)
            self._written += len(self._buffer)
            self._buffer.clear()


def remove_unfinished_copies(directory: str) -> None:
    """Remove the files of copies whose compaction was killed before it replaced a log.

    The process that compacts calls this when no change of files is under way (the
    partition's structure version in shared memory is even). Then each copy that was
    renamed to `.swap` is in its place already.
    """
    for name in os.listdir(directory):
        if name.endswith((CLEANED_SUFFIX, SWAP_SUFFIX)):
            remove_if_exists(f"{directory}/{name}")

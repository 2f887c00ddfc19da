"""The cache of remote segments: chunks of 4 MiB, in files beside the partitions.

    <log.dir>/remote-log-cache/
      reader.sock                    the reader process takes requests for chunks here
      <segment id>/
        <base>.<number>.log          sparse: only cached chunks have bytes
        <base>.index .timeindex .txnindex
        <base>.chunks                the list of chunks, see below
        failed-<chunk>               the error with which the store refused a chunk

Only the remote log manager, which fetches the chunks, writes. `.chunks` has the number
in the name of the `.log` file, then for each chunk its CRC-32C and whether it is
cached. A chunk's bytes are checked and written before it is marked as cached, so the
death of that process leaves no wrong mark.
The number is new, by chance, each time that a segment is brought. A connection whose
client is slow opens a `.log`, by its name, long after it was found. The file may have
been removed meanwhile, and another one may have its inode number, and other chunks.
The files are not forced to disk, because
a start empties the cache.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator
from struct import Struct
from typing import Final

from mpbroker.base.file_id import file_id
from mpbroker.base.storage_errors import CorruptLogError, StorageError
from mpbroker.protocol.records.batch_header import LOG_OVERHEAD, BatchHeader
from mpbroker.protocol.records.record_batch import parse_batch_header
from mpbroker.storage.files.batch_scan import batch_size_at, find_batch
from mpbroker.storage.files.log_files import (
    INDEX_SUFFIX,
    LOG_SUFFIX,
    REMOTE_CACHE_DIRECTORY,
    TIME_INDEX_SUFFIX,
    segment_file,
)
from mpbroker.storage.files.time_index import TimeIndex
from mpbroker.storage.remote.remote_manifest import CHUNK_BYTES, RemoteSegment

CACHE_DIRECTORY: Final = REMOTE_CACHE_DIRECTORY
SOCKET_FILE: Final = "reader.sock"
CHUNKS_SUFFIX: Final = ".chunks"
# In the place of a chunk's number: only the segment's indexes are asked for.
INDEXES_ONLY: Final = -1
CHUNKS_HEAD: Final = Struct(">Q")  # the number in the name of the `.log`
CHUNK: Final = Struct(">II")  # CRC-32C, 1 if the chunk is cached
_INDEX_ENTRY: Final = Struct(">ii")  # offset less the base offset, position


class ChunkMissingError(StorageError):
    """A chunk (4 MiB) of a remote segment, or its indexes, are not in the local cache.

    Attributes:
        segment: the segment.
        chunk: the number of the chunk; INDEXES_ONLY: the indexes.
    """

    def __init__(self, segment: RemoteSegment, chunk: int) -> None:
        super().__init__(f"chunk {chunk} of segment {segment.base_offset} is remote")
        self.segment = segment
        self.chunk = chunk


def cache_of(partition_directory: str) -> str:
    """Return the cache directory for a partition, which is in its log directory."""
    return f"{os.path.dirname(partition_directory)}/{CACHE_DIRECTORY}"


def segment_cache(cache: str, segment: RemoteSegment) -> str:
    """Return the path of a remote segment's directory in the local cache."""
    return f"{cache}/{segment.segment_id}"


def cached_log(directory: str, segment: RemoteSegment, number: int) -> str:
    """Return the path of the `.log` of a segment in its directory in the cache.

    Args:
        directory: the segment's directory in the cache.
        segment: the segment.
        number: the number in the head of `.chunks`.
    """
    return segment_file(directory, segment.base_offset, f".{number:016x}{LOG_SUFFIX}")


def failed_file(cache: str, segment: RemoteSegment, chunk: int) -> str:
    """Return the path of the file that says why a chunk could not be fetched."""
    return f"{segment_cache(cache, segment)}/failed-{chunk}"


class CachedSegment:
    """A remote segment in the cache, opened for one search.

    Chunks that come into the cache afterwards are not seen.

    Raises:
        ChunkMissingError: the segment is not in the cache.
        OSError: a file cannot be opened.
    """

    def __init__(self, cache: str, segment: RemoteSegment) -> None:
        self._segment = segment
        directory = segment_cache(cache, segment)
        base = segment.base_offset
        self._index_path = segment_file(directory, base, INDEX_SUFFIX)
        self._time_index_path = segment_file(directory, base, TIME_INDEX_SUFFIX)
        self.fd = -1
        try:
            with open(segment_file(directory, base, CHUNKS_SUFFIX), "rb") as file:
                chunks = file.read()
            (number,) = CHUNKS_HEAD.unpack_from(chunks)
            self.path = cached_log(directory, segment, number)
            self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise ChunkMissingError(segment, INDEXES_ONLY) from None
        self.file_id = file_id(self.fd)
        states = CHUNK.iter_unpack(chunks[CHUNKS_HEAD.size :])
        self._there = [is_there for _, is_there in states]

    def __enter__(self) -> CachedSegment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the `.log` file of this cached segment."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def readable_end(self, position: int) -> int:
        """Return the position of the end of the cached bytes from ``position`` on.

        It is ``position`` itself if the byte there is not cached.
        """
        chunk = position // CHUNK_BYTES
        while chunk < len(self._there) and self._there[chunk]:
            chunk += 1
        return max(position, min(chunk * CHUNK_BYTES, self._segment.size))

    def lookup(self, offset: int) -> int:
        """Return the position (in bytes) from which to look for an offset's batch.

        It is that of the last indexed batch that ends up to ``offset``.
        """
        slot, entry = self._slot(0, offset - self._segment.base_offset)
        return entry[1] if slot >= 0 else 0

    def offset_behind(self, position: int) -> int:
        """Return an offset that is above all records before a position (in bytes)."""
        _, entry = self._slot(1, position - 1, following=True)
        if not entry:
            return self._segment.next_base
        return min(self._segment.base_offset + entry[0], self._segment.next_base)

    def _slot(
        self, field: int, value: int, *, following: bool = False
    ) -> tuple[int, tuple[int, ...]]:
        """Return the last entry of the offset index that is not above a value.

        Args:
            field: the field to compare: 0: the offset, less the segment's base offset;
                1: the position.
            value: the value.
            following: return the entry after that one instead.

        Returns:
            The number of the entry, from 0, and the entry: () if there is none.
        """
        try:
            fd = os.open(self._index_path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise self._evicted() from None
        try:

            def entry(slot: int) -> tuple[int, ...]:
                found = os.pread(fd, _INDEX_ENTRY.size, slot * _INDEX_ENTRY.size)
                return _INDEX_ENTRY.unpack(found)

            slots = range(os.fstat(fd).st_size // _INDEX_ENTRY.size)
            slot = bisect_right(slots, value, key=lambda each: entry(each)[field]) - 1
            slot += following
            return slot, entry(slot) if 0 <= slot < len(slots) else ()
        finally:
            os.close(fd)

    def batches_from(
        self, timestamp: int, offset: int
    ) -> Iterator[tuple[BatchHeader, bytes]]:
        """Yield the batches that may have the first record at or after a timestamp.

        Args:
            timestamp: in ms.
            offset: batches that end below it are left out.

        Raises:
            As ``find``.
        """
        position = self.lookup(max(offset, self._offset_before(timestamp)))
        while position < self._segment.size:
            end = self.readable_end(position)
            if position + LOG_OVERHEAD > end:
                raise self.missing(end)
            size = batch_size_at(self.fd, position)
            if position + size > end:
                raise self.missing(end)
            body = os.pread(self.fd, size, position)
            batch = parse_batch_header(body)
            if batch.max_timestamp >= timestamp and batch.last_offset >= offset:
                yield batch, body
            position += size

    def _offset_before(self, timestamp: int) -> int:
        """Return an offset below which all records are older than a timestamp."""
        if not os.path.exists(self._time_index_path):
            raise self._evicted()
        index = TimeIndex(self._time_index_path, self._segment.base_offset)
        try:
            return index.lookup(timestamp - 1, index.file_entries()).offset
        except FileNotFoundError:
            raise self._evicted() from None
        finally:
            index.close()

    def find(self, offset: int) -> tuple[int, int]:
        """Return (position, size) of the first batch that ends at or after an offset.

        Returns:
            Position and size in bytes; (-1, 0) if the segment has no such batch.

        Raises:
            ChunkMissingError: a chunk that must be read is not in the cache.
            CorruptLogError: there are bytes that are not a batch.
        """
        position = self.lookup(offset)
        end = self.readable_end(position)
        try:
            found, size = find_batch(self.fd, position, end, offset)
        except CorruptLogError:
            if end == self._segment.size:
                raise
            found, size = -1, 0  # the end of what is there cuts a header
        if found < 0 and end < self._segment.size:
            raise self.missing(end)
        return found, size

    def region(self, offset: int, max_bytes: int, *, min_one: bool) -> tuple[int, int]:
        """Return (position, length) of the cached batches from an offset on.

        The last batch may be cut off.

        Args:
            offset: the offset of the first record.
            max_bytes: the largest length, in bytes.
            min_one: if the first batch is larger, return this one batch.

        Returns:
            Position and length in bytes; a length of 0: the first batch is larger than
            ``max_bytes``; (-1, 0): the segment has no such batch.

        Raises:
            As ``find``.
        """
        position, size = self.find(offset)
        if position < 0:
            return -1, 0
        end = self.readable_end(position)
        wanted = size if min_one else min(size, max_bytes)
        if position + wanted > end:
            raise self.missing(end)
        if size > max_bytes:
            return position, size if min_one else 0
        return position, min(max_bytes, end - position)

    def _evicted(self) -> ChunkMissingError:
        """Return the error for a segment that was evicted after it was opened here."""
        return ChunkMissingError(self._segment, INDEXES_ONLY)

    def missing(self, position: int) -> ChunkMissingError:
        """Return an error that names the chunk at a position, which is not cached."""
        return ChunkMissingError(self._segment, position // CHUNK_BYTES)


def is_cached(cache: str, segment: RemoteSegment, chunk: int) -> bool:
    """Return whether a chunk of a remote segment, or its indexes, are in the cache."""
    directory = segment_cache(cache, segment)
    path = segment_file(directory, segment.base_offset, CHUNKS_SUFFIX)
    try:
        with open(path, "rb", buffering=0) as file:
            if chunk == INDEXES_ONLY:
                return True
            file.seek(CHUNKS_HEAD.size + chunk * CHUNK.size)
            found = file.read(CHUNK.size)
    except FileNotFoundError:
        return False
    return len(found) == CHUNK.size and CHUNK.unpack(found)[1] == 1

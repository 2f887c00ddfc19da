"""RemoteLog: find records of a partition in its remote segments, by the cache.

Handlers use it, so nothing here waits for the store. If the cache lacks a chunk of a
segment, RemotePendingError is raised, and the handler asks the reader process (the
remote log manager) for the chunk by a datagram. A datagram that is lost, because the
reader is being started again, is sent again with the next try.

Source: KIP-405; Kafka's RemoteLogManager (read, findOffsetByTimestamp,
addAbortedTransactions).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

import msgpack

from mpbroker.base.storage_errors import CorruptLogError, RemotePendingError
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.storage.files.log_files import (
    REMOTE_MANIFEST_FILE,
    TXN_INDEX_SUFFIX,
    segment_file,
)
from mpbroker.storage.files.txn_index import AbortedTransaction, search_aborted
from mpbroker.storage.remote.remote_cache import (
    INDEXES_ONLY,
    SOCKET_FILE,
    CachedSegment,
    ChunkMissingError,
    cache_of,
    failed_file,
    is_cached,
    segment_cache,
)
from mpbroker.storage.remote.remote_manifest import (
    ManifestError,
    RemoteManifest,
    RemoteSegment,
    floor,
)

_TELL_S: Final = 1.0


class RemoteRegion(NamedTuple):
    """A range of a `.log` file in the cache of remote segments, which answers a fetch.

    Attributes:
        path: the file.
        file_id: the number that identifies the file.
        position: the beginning of the range, in bytes.
        length: the length of the range in bytes; 0: the first batch does not fit.
        aborted: (producer id, first offset) of the aborted transactions with records in
            the range, as far as the indexes of remote segments have them.
        until: an offset above all records in the range.
        following: the base offset of the first local segment, whose index of aborted
            transactions must be read, too; -1: ``aborted`` is complete.
    """

    path: str
    file_id: int
    position: int
    length: int
    aborted: dict[tuple[int, int], None]
    until: int
    following: int


class ChunkWait:
    """A chunk of a remote segment that is not in the local cache; a fetch waits for it.

    RemotePendingError carries it to the handler.

    Args:
        cache: the cache directory.
        prefix: the prefix of the partition's keys in the store.
        segment: the remote segment.
        chunk: the number of the chunk, from 0; INDEXES_ONLY: the segment's indexes.
    """

    def __init__(
        self, cache: str, prefix: str, segment: RemoteSegment, chunk: int
    ) -> None:
        self._cache = cache
        self._prefix = prefix
        self._segment = segment
        self._chunk = chunk
        self._failure = ""

    def ask(self, row: int) -> None:
        """Ask the remote log manager, by a datagram, to fetch the chunk into the cache.

        Args:
            row: the index of the partition's row, by which the waiting handlers are
                told when the chunk has come.
        """
        try:
            _send(self._cache, (row, self._prefix, self._segment, self._chunk))
            self._failure = ""
        except BlockingIOError:
            pass  # it is busy: the next try asks again
        except OSError as error:  # it is being started again, or there is to be none
            self._failure = f"no process reads from the remote store: {error}"

    def is_over(self) -> bool:
        return is_cached(self._cache, self._segment, self._chunk)

    def failure(self) -> str:
        path = failed_file(self._cache, self._segment, self._chunk)
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                return file.read()
        except FileNotFoundError:
            return self._failure


def _send(cache: str, message: object) -> None:
    """Send a message to the remote log manager, which fills a cache.

    Raises:
        BlockingIOError: the reader is busy.
        OSError: there is no reader.
    """
    # By the directory's descriptor: a socket's path has 107 bytes at most.
    parent = os.open(cache, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            place = f"/proc/self/fd/{parent}/{SOCKET_FILE}"
            sender.sendto(msgpack.packb(message), place)
    finally:
        os.close(parent)


class CacheHits:
    """Counts the fetches of this process that found their records in a cache.

    The number is sent to the reader process at most once a second, so that its socket
    has room for requests.
    """

    def __init__(self, cache: str) -> None:
        self._cache = cache
        self._untold = 0
        self._next_s = 0.0

    def add(self) -> None:
        """Count a fetch from the cache; send the number at most once a second."""
        self._untold += 1
        now = time.monotonic()
        if now < self._next_s:
            return
        self._next_s = now + _TELL_S
        try:
            _send(self._cache, self._untold)
            self._untold = 0
        except OSError:
            pass  # it is busy, or being started again: with the next fetch


_hits: dict[str, CacheHits] = {}  # by cache


class RemoteLog:
    """The remote segments of one partition, as one process knows them.

    Args:
        directory: the partition's directory.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._cache = cache_of(directory)
        self._hits = _hits.setdefault(self._cache, CacheHits(self._cache))
        self._manifest = RemoteManifest()
        self._segments: list[RemoteSegment] = []
        self._version: tuple[int, ...] = ()

    def segments(self) -> list[RemoteSegment]:
        """Return the segments that can be read from the store, by ascending offsets.

        Raises:
            ApiError: KAFKA_STORAGE_ERROR: the manifest is damaged.
            OSError: the manifest cannot be read.
        """
        try:
            found = os.stat(f"{self._directory}/{REMOTE_MANIFEST_FILE}")
        except FileNotFoundError:
            return []
        version = (found.st_ino, found.st_mtime_ns, found.st_size)
        if version != self._version:
            try:
                self._manifest = RemoteManifest.of_directory(self._directory)
            except ManifestError as error:
                raise ApiError(
                    ErrorCode.KAFKA_STORAGE_ERROR, f"{self._directory}: {error}"
                ) from error
            self._segments = self._manifest.copied()
            self._version = version
        return self._segments

    def read(
        self,
        offset: int,
        max_bytes: int,
        *,
        min_one_batch: bool,
        aborted_below: int | None = None,
    ) -> RemoteRegion | None:
        """Find the records from an offset on in the cached remote segments.

        Args:
            offset: an offset below the first local segment, and not below the log start
                offset.
            max_bytes: the largest length of the result in bytes.
            min_one_batch: if the first batch is larger, return this one batch.
            aborted_below: also return the aborted transactions whose markers are below
                this offset; None: leave them out.

        Returns:
            The records' place in the cache; None if the first local segment has the
            next records.

        Raises:
            RemotePendingError: the cache lacks a chunk or indexes. The caller asks for
                them, and tries again.
            ApiError: as ``segments``.
            CorruptLogError: no segment holds the offset, or the segment is damaged.
            OSError: the cache cannot be read.
        """
        segments = self.segments()
        first = floor(segments, offset)
        if first < 0 or offset >= segments[first].next_base:
            raise CorruptLogError(
                f"{self._directory}: no segment holds offset {offset}"
            )
        for slot in range(first, len(segments)):
            try:
                with CachedSegment(self._cache, segments[slot]) as cached:
                    position, length = cached.region(
                        offset, max_bytes, min_one=min_one_batch
                    )
                    if position < 0:
                        continue
                    region = RemoteRegion(
                        cached.path,
                        cached.file_id,
                        position,
                        length,
                        {},
                        cached.offset_behind(position + length),
                        -1,
                    )
                if aborted_below is not None and length:
                    later = segments[slot:]
                    region = self._with_aborted(region, later, offset, aborted_below)
                self._hits.add()
                return region
            except ChunkMissingError as error:
                raise self._pending(error) from None
        return None

    def _with_aborted(
        self,
        region: RemoteRegion,
        segments: list[RemoteSegment],
        offset: int,
        end_offset: int,
    ) -> RemoteRegion:
        """Return a result with the aborted transactions in its range added to it.

        They are those whose markers are in the remote store.

        Args:
            region: the result.
            segments: its segment, and all later ones in the store.
            offset: the offset that is read from.
            end_offset: markers from this offset on are left out.
        """
        found = region.aborted
        for later in segments:
            if not later.has_aborted:
                continue
            entries, complete = self._aborted(later, end_offset, offset, region.until)
            for entry in entries:
                found[entry.producer_id, entry.first_offset] = None
            if complete:
                return region
        return region._replace(following=segments[-1].next_base)

    def _aborted(
        self, segment: RemoteSegment, end_offset: int, offset: int, until: int
    ) -> tuple[list[AbortedTransaction], bool]:
        """Search the index of aborted transactions of a segment that has one.

        Retention may remove the local file at any time, and the reader process the
        cached one. A file that is missing is not an empty one: without its entries,
        records of aborted transactions would be delivered.
        """
        for directory in (self._directory, segment_cache(self._cache, segment)):
            path = segment_file(directory, segment.base_offset, TXN_INDEX_SUFFIX)
            try:
                return search_aborted(path, end_offset, offset, until)
            except FileNotFoundError:
                continue
        raise ChunkMissingError(segment, INDEXES_ONLY)

    @contextmanager
    def opened(self, segment: RemoteSegment) -> Iterator[CachedSegment]:
        """Open a remote segment in the local cache; close it when the caller is done.

        Raises:
            RemotePendingError: the cache lacks a chunk that the caller reads.
        """
        try:
            with CachedSegment(self._cache, segment) as cached:
                yield cached
        except ChunkMissingError as error:
            raise self._pending(error) from None

    def _pending(self, error: ChunkMissingError) -> RemotePendingError:
        prefix = self._manifest.prefix
        wait = ChunkWait(self._cache, prefix, error.segment, error.chunk)
        return RemotePendingError(wait)

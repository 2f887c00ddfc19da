"""ChunkFetcher: fetch chunks (4 MiB) of remote segments into the cache on local disk.

It also bounds the size of the cache. Only the remote log manager, the process that
talks to the remote store, uses it. Several of its threads may call the methods, but
only one at a time for the same segment.
"""

from __future__ import annotations

import os
import shutil
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING, Final

from mpbroker.base.errors import MpbrokerError
from mpbroker.base.logger import get_logger
from mpbroker.base.storage_errors import RemoteStorageError
from mpbroker.protocol.records.crc32c import crc32c
from mpbroker.storage.files.log_files import (
    DELETED_SUFFIX,
    INDEX_SUFFIX,
    LOG_SUFFIX,
    TIME_INDEX_SUFFIX,
    TXN_INDEX_SUFFIX,
    create_file,
    remove_if_exists,
    segment_file,
    write_file,
    write_whole,
)
from mpbroker.storage.remote.fetch_failures import FetchFailures
from mpbroker.storage.remote.remote_cache import (
    CHUNK,
    CHUNKS_HEAD,
    CHUNKS_SUFFIX,
    INDEXES_ONLY,
    cached_log,
    failed_file,
    segment_cache,
)
from mpbroker.storage.remote.remote_manifest import (
    CHUNK_BYTES,
    RemoteSegment,
    SegmentIndexes,
    indexes_key,
    log_key,
)

if TYPE_CHECKING:
    from mpbroker.storage.remote.object_store import ObjectStore
    from mpbroker.storage.remote.remote_stats import SharedStats

logger = get_logger(__name__)
_CACHED_INDEXES: Final = (INDEX_SUFFIX, TIME_INDEX_SUFFIX, TXN_INDEX_SUFFIX)
_DIRECTORY_MODE: Final = 0o750


class ChunkFetcher:
    """Fetches chunks from the remote store into a cache directory; removes old ones.

    Args:
        store: the store.
        cache: the cache directory; files in it are removed.
        limit_bytes: the largest size of the cache; the segment that was fetched last
            stays, even if it is larger.
        stats: counts fetches and cached bytes, for metrics.
        throttle: called with the size of each chunk before it is fetched; may sleep.
        failures: the failed fetches of all caches of the store; None: there is no other
            cache.
    """

    def __init__(
        self,
        store: ObjectStore,
        cache: str,
        limit_bytes: int,
        stats: SharedStats,
        throttle: Callable[[int], object] = int,
        failures: FetchFailures | None = None,
    ) -> None:
        self._failures = failures or FetchFailures()
        self._throttle = throttle
        self._stats = stats
        self._store = store
        self._cache = cache
        self._limit = limit_bytes
        # Bytes by segment id, of the segments that have a `.chunks`.
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._evicted: set[str] = set()
        self._going: set[str] = set()
        self._lock = Lock()  # over these
        shutil.rmtree(cache, ignore_errors=True)
        os.makedirs(cache, _DIRECTORY_MODE)

    def fetch(self, prefix: str, segment: RemoteSegment, chunk: int) -> bool:
        """Fetch a chunk (4 MiB) of a segment, or its indexes, from the store.

        They are put into the cache on local disk.

        A failure is logged, and noted in the cache for the handlers that wait. Until
        its backoff has passed, the store is not asked again.

        Args:
            prefix: the prefix of the partition's keys in the store.
            segment: the segment.
            chunk: the number of the chunk; INDEXES_ONLY: only the indexes.

        Returns:
            Whether the chunk is in the cache.
        """
        if not self._failures.may_ask(segment.segment_id, chunk):
            return False
        directory = segment_cache(self._cache, segment)
        failed = failed_file(self._cache, segment, chunk)
        try:
            try:
                self._fetch(prefix, segment, chunk, directory)
            except FileNotFoundError:  # it was evicted meanwhile
                self._fetch(prefix, segment, chunk, directory)
            remove_if_exists(failed)
        except (MpbrokerError, OSError) as error:
            self._stats.add(fetch_errors=1)
            what = f"segment {segment.base_offset} of {prefix}"
            self._failures.failed(segment.segment_id, chunk, what, error)
            try:
                write_file(failed, str(error).encode(), sync=False)
            except OSError as worse:
                logger.error("%s: %s", failed, worse)
            return False
        self._failures.worked(segment.segment_id, chunk)
        self._evict(segment.segment_id)
        return True

    def _fetch(
        self, prefix: str, segment: RemoteSegment, chunk: int, directory: str
    ) -> None:
        os.makedirs(directory, _DIRECTORY_MODE, exist_ok=True)
        path = segment_file(directory, segment.base_offset, CHUNKS_SUFFIX)
        if not os.path.exists(path):
            self._fetch_indexes(prefix, segment, directory)
        if chunk != INDEXES_ONLY:
            self._fetch_chunk(prefix, segment, chunk, directory)

    def _fetch_indexes(
        self, prefix: str, segment: RemoteSegment, directory: str
    ) -> None:
        content = self._store.get(indexes_key(prefix, segment), segment.indexes_size)
        if crc32c(content) != segment.indexes_crc:
            raise RemoteStorageError(
                f"{indexes_key(prefix, segment)} has other bytes than were written"
            )
        indexes = SegmentIndexes.decode(content)
        base = segment.base_offset
        size = 0
        for suffix in _CACHED_INDEXES:
            content = indexes.files.get(suffix, b"")
            if content or suffix != TXN_INDEX_SUFFIX:
                # If it was missing at the copy, readers search all of the segment.
                path = segment_file(directory, base, suffix)
                write_file(path, content, sync=False)
                size += len(content)
        for name in os.listdir(directory):
            if name.endswith(LOG_SUFFIX):  # of a fetch that has failed
                remove_if_exists(f"{directory}/{name}")
        head = os.urandom(CHUNKS_HEAD.size)
        fd = create_file(cached_log(directory, segment, *CHUNKS_HEAD.unpack(head)))
        try:
            os.ftruncate(fd, segment.size)
        finally:
            os.close(fd)
        chunks = b"".join(CHUNK.pack(crc, 0) for crc in indexes.chunks)
        # Last: from here on other processes see the segment in the cache.
        path = segment_file(directory, base, CHUNKS_SUFFIX)
        write_file(path, head + chunks, sync=False)
        # What is not counted is not evicted: otherwise another thread could remove the
        # other files before `.chunks` is there, and nobody would bring them again.
        with self._lock:
            self._sizes[segment.segment_id] = size

    def _fetch_chunk(
        self, prefix: str, segment: RemoteSegment, chunk: int, directory: str
    ) -> None:
        path = segment_file(directory, segment.base_offset, CHUNKS_SUFFIX)
        chunks = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            place = CHUNKS_HEAD.size + chunk * CHUNK.size
            found = os.pread(chunks, CHUNK.size, place)
            if chunk < 0 or len(found) != CHUNK.size:
                raise RemoteStorageError(f"there is no chunk {chunk} of {path}")
            crc, is_there = CHUNK.unpack(found)
            if is_there:
                return
            start = chunk * CHUNK_BYTES
            key = log_key(prefix, segment)
            size = min(CHUNK_BYTES, segment.size - start)
            self._throttle(size)
            content = self._store.get_range(key, start, size)
            if crc32c(content) != crc:
                raise RemoteStorageError(
                    f"{key} has other bytes at {start} than were written"
                )
            (number,) = CHUNKS_HEAD.unpack(os.pread(chunks, CHUNKS_HEAD.size, 0))
            path = cached_log(directory, segment, number)
            log = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                write_whole(log, content, start)
            finally:
                os.close(log)
            with self._lock:
                if segment.segment_id in self._sizes:  # it was not evicted meanwhile
                    self._sizes[segment.segment_id] += len(content)
            self._stats.add(fetched_bytes=len(content), fetched_chunks=1)
            # Last: if this process is killed before this write, the chunk does not
            # count; after it, all bytes of the chunk are in the file.
            os.pwrite(chunks, CHUNK.pack(crc, 1), place)
        finally:
            os.close(chunks)

    # -- the bound ---------------------------------------------------------------------

    @property
    def size(self) -> int:
        """The number of bytes of remote segments that the cache has."""
        with self._lock:
            return sum(self._sizes.values())

    def _evict(self, newest: str) -> None:
        """Remove segments until the cache is within its limit.

        The first ones to go are those from which nothing was fetched for the longest
        time. Connections may still send from a `.log`: it keeps its bytes, under the
        name by which they find it, until ``remove_evicted`` is called.

        Args:
            newest: the id of the segment that was fetched last, which stays.
        """
        with self._lock:
            if newest in self._sizes:
                self._sizes.move_to_end(newest)
            while sum(self._sizes.values()) > self._limit and len(self._sizes) > 1:
                segment_id, _ = self._sizes.popitem(last=False)
                directory = f"{self._cache}/{segment_id}"
                names = os.listdir(directory)
                # The chunks first: without them the segment is not in the cache.
                for name in sorted(names, key=lambda n: not n.endswith(CHUNKS_SUFFIX)):
                    path = f"{directory}/{name}"
                    if name.endswith(LOG_SUFFIX):
                        os.rename(path, path + DELETED_SUFFIX)
                    elif not name.endswith(DELETED_SUFFIX):
                        remove_if_exists(path)
                self._evicted.add(directory)

    def remove_evicted(self) -> None:
        """Remove the `.log` files of segments that were evicted before the last call.

        Callers leave as much time between two calls as a connection may need to open a
        file whose path it has got.
        """
        with self._lock:
            # A segment that was evicted once more since then waits for the next call.
            going = self._going - self._evicted
            self._going, self._evicted = self._evicted, set()
        for directory in going:
            for name in os.listdir(directory):
                if name.endswith(DELETED_SUFFIX):
                    remove_if_exists(f"{directory}/{name}")
            try:
                os.rmdir(directory)
            except OSError:
                pass  # it was fetched again

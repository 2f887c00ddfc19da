"""Drop what the disk has not stored of a partition for which it has failed.

When Linux cannot write a page back it marks the page clean, and keeps it in the page
cache: reads return it, the next fdatasync succeeds, and a power cut or memory pressure
brings the old content back. So shared memory says "offline", and the file
`partition.offline` in the partition's directory says it to the next start. That start
compares the log with the disk, read with O_DIRECT past the cache, and cuts it off where
they differ. Only a load of such a partition imports this module.

Source: fsync(2); Linux's Documentation/core-api/errseq, "PostgreSQL's fsync() surprise"
(LWN 752063).
"""

import contextlib
import errno
import mmap
import os
from typing import Final

from mpbroker.base.logger import get_logger
from mpbroker.storage.files.log_files import (
    INDEX_SUFFIX,
    LOG_SUFFIX,
    SEGMENT_SUFFIXES,
    TIME_INDEX_SUFFIX,
    TXN_INDEX_SUFFIX,
    base_offsets,
    remove_if_exists,
    segment_file,
    sync_directory,
    write_file,
)

logger = get_logger(__name__)

_CHUNK_BYTES: Final = 1 << 20  # a multiple of every disk's block


def drop_lost_writes(directory: str, recovery_point: int) -> None:
    """Cut a log off where the disk lacks what the page cache has.

    Indexes of the segments that are compared are removed, to be rebuilt from the log.
    This may be interrupted and repeated.

    Args:
        directory: the partition's directory; no process uses the log.
        recovery_point: segments that end below it were forced to disk before the disk
            failed, and are not compared.

    Raises:
        OSError: the disk still fails; the partition stays offline.
    """
    bases = base_offsets(directory, LOG_SUFFIX)
    for slot, base in enumerate(bases):
        later = bases[slot + 1 :]
        if later and later[0] <= recovery_point:
            continue
        path = segment_file(directory, base, LOG_SUFFIX)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # Write the pages that are still dirty. An error may be of a write before,
            # of which no process was told yet; what is lost shows in the comparison.
            with contextlib.suppress(OSError):
                os.fdatasync(fd)
            size = os.fstat(fd).st_size
            same = _same_on_disk(path, fd, size)
            if same < size:
                # The later segments first, newest first. Killed in between, the file
                # still differs from the disk, and the next start goes on from here.
                lost = size - same + sum(_log_bytes(directory, each) for each in later)
                logger.error(
                    "%s: its disk had failed, and lacks %d bytes of the log, which"
                    " is cut off at byte %d of segment %d",
                    directory,
                    lost,
                    same,
                    base,
                )
                _remove_segments(directory, later)
                os.ftruncate(fd, same)
                os.fdatasync(fd)
        finally:
            os.close(fd)
        _renew_indexes(directory, base)
        if same < size:
            break
    sync_directory(directory)


def _same_on_disk(path: str, fd: int, size: int) -> int:
    """Return how many of a file's first bytes are the same on the disk.

    Args:
        path: the file.
        fd: a descriptor of it, through which the page cache is read.
        size: the file's size; none of its pages is dirty.

    Raises:
        OSError: the disk cannot be read.
    """
    try:
        direct = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # The file system knows no O_DIRECT. Clean pages, which the lost ones are, leave
        # the cache by this, so that from here on the disk is read.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        logger.warning("%s is checked without O_DIRECT", path)
        return size
    try:
        with mmap.mmap(-1, _CHUNK_BYTES) as buffer:  # aligned, as O_DIRECT demands
            for position in range(0, size, _CHUNK_BYTES):
                cached = os.pread(fd, _CHUNK_BYTES, position)
                found = buffer[: read_past_cache(direct, buffer, position)]
                if found != cached:
                    return position + _common_prefix(found, cached)
    finally:
        os.close(direct)
    return size


def read_past_cache(direct: int, buffer: mmap.mmap, position: int) -> int:
    """Fill a buffer from a descriptor opened with O_DIRECT; return the bytes read."""
    return os.preadv(direct, [buffer], position)


def _common_prefix(first: bytes, second: bytes) -> int:
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    low, high = 0, length  # first[:low] is the same, first[:high] is not
    while high - low > 1:
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _log_bytes(directory: str, base_offset: int) -> int:
    return os.path.getsize(segment_file(directory, base_offset, LOG_SUFFIX))


def _remove_segments(directory: str, bases: list[int]) -> None:
    """Remove segments, newest first."""
    for base in reversed(bases):
        # The log last: without it the others are left over, and are removed.
        for suffix in reversed(SEGMENT_SUFFIXES):
            remove_if_exists(segment_file(directory, base, suffix))


def _renew_indexes(directory: str, base_offset: int) -> None:
    """Put new files in the place of a segment's indexes, whose pages may be lost.

    The offset and the time index are rebuilt when the log is recovered. So are the
    aborted transactions from the recovery point on; those below are in this file only.
    """
    for suffix in (INDEX_SUFFIX, TIME_INDEX_SUFFIX):
        remove_if_exists(segment_file(directory, base_offset, suffix))
    path = segment_file(directory, base_offset, TXN_INDEX_SUFFIX)
    try:
        with open(path, "rb") as file:
            content = file.read()
    except FileNotFoundError:
        return
    write_file(path, content)

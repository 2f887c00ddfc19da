"""Cut off the records of a partition that its failed disk has not stored.

When Linux cannot write a page back it marks the page clean, and keeps it in the page
cache: reads return it, the next fdatasync succeeds, and a power cut or memory pressure
brings the old content back. So shared memory says "offline", and the file
`partition.offline` in the partition's directory says it to the next start. That start
compares the log with the disk, read with O_DIRECT past the cache, and cuts it off where
they differ. LogSync compares with the disk, too, after a process was killed in a sync.
This module is imported only in these two cases.

Source: fsync(2); Linux's Documentation/core-api/errseq, "PostgreSQL's fsync() surprise"
(LWN 752063).
"""

import contextlib
import errno
import mmap
import os
from typing import Final

from mpbroker.base.directories import sync_directory
from mpbroker.base.logger import get_logger
from mpbroker.ipc import pulse
from mpbroker.storage.files.log_files import (
    INDEX_SUFFIX,
    LOG_SUFFIX,
    SEGMENT_SUFFIXES,
    TIME_INDEX_SUFFIX,
    TXN_INDEX_SUFFIX,
    base_offsets,
    remove_if_exists,
    segment_file,
    write_file,
)

logger = get_logger(__name__)

_CHUNK_BYTES: Final = 1 << 20  # a multiple of every disk's block


def drop_lost_writes(directory: str, recovery_point: int) -> None:
    """Cut a log off where the disk differs from the page cache.

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
            # Write the pages that are still dirty. An error may belong to an earlier
            # write, of which no process was told yet; the comparison shows what is
            # lost.
            with contextlib.suppress(OSError):
                os.fdatasync(fd)
            size = os.fstat(fd).st_size
            same = same_on_disk(path, fd, size)
            if same < size:
                # The later segments first, newest first. If this process is killed in
                # between, the file still differs from the disk, and the next start goes
                # on from here.
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


def same_on_disk(path: str, fd: int, size: int, start: int = 0) -> int:
    """Return the position of the first byte that the disk and the page cache differ in.

    Args:
        path: the file.
        fd: a descriptor of the file, through which the page cache is read.
        size: compare the first ``size`` bytes; none of their pages is dirty. It is also
            the result if there is no difference.
        start: the bytes before this position need not be compared.

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
            for position in range(start - start % _CHUNK_BYTES, size, _CHUNK_BYTES):
                pulse.step()
                wanted = min(_CHUNK_BYTES, size - position)
                cached = os.pread(fd, wanted, position)
                found = buffer[: min(wanted, read_past_cache(direct, buffer, position))]
                if found != cached:
                    return position + _common_prefix(found, cached)
    finally:
        os.close(direct)
    return size


def is_on_disk(path: str, size: int) -> bool:
    """Return whether a file's first ``size`` bytes are the same on disk and in memory.

    Memory is the kernel's page cache.

    Raises:
        OSError: the file or the disk cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return same_on_disk(path, fd, size) == size
    finally:
        os.close(fd)


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
        # The log last: while it exists, the next start lists the segment, and comes
        # here again.
        for suffix in reversed(SEGMENT_SUFFIXES):
            remove_if_exists(segment_file(directory, base, suffix))


def _renew_indexes(directory: str, base_offset: int) -> None:
    """Remove or rewrite a segment's indexes, whose pages the disk may lack.

    The offset index and the time index are removed, and rebuilt when the log is
    recovered. The index of aborted transactions is written to a new file: recovery
    rebuilds only its entries from the recovery point on.
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

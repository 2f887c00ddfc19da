"""Names of the files in a partition's directory, and writes of whole files.

`00000000000000000042.log` is the log of the segment that starts at offset 42.

Source: Kafka's directory layout (LogFileUtils).
"""

import ctypes
import errno
import os
from typing import Final

from mpbroker.base.directories import sync_directory
from mpbroker.base.logger import get_logger

logger = get_logger(__name__)

LOG_SUFFIX: Final = ".log"
INDEX_SUFFIX: Final = ".index"
TIME_INDEX_SUFFIX: Final = ".timeindex"
SNAPSHOT_SUFFIX: Final = ".snapshot"
TXN_INDEX_SUFFIX: Final = ".txnindex"
# Added to a whole name. `.deleted`: will be removed after a delay. `.cleaned`: is
# being written. `.swap`: is complete, and replaces the files of the plain names.
DELETED_SUFFIX: Final = ".deleted"
CLEANED_SUFFIX: Final = ".cleaned"
SWAP_SUFFIX: Final = ".swap"
# At the end of a directory's name: <topic>-<partition>.<32 hex digits><suffix>
DELETE_DIRECTORY_SUFFIX: Final = "-delete"
STRAY_DIRECTORY_SUFFIX: Final = "-stray"
FUTURE_DIRECTORY_SUFFIX: Final = "-future"
# In a partition's directory: the disk has failed for it; see lost_writes.py.
OFFLINE_FILE: Final = "partition.offline"
# In a partition's directory: the path of the directory whose place this one takes; see
# replica_directories.py.
LOG_DIRECTORIES_FILE: Final = "log-directories"
MOVED_FILE: Final = "partition.moved"
# In a partition's directory: the list of the segments in the remote store; see
# remote/remote_manifest.py.
REMOTE_MANIFEST_FILE: Final = "remote-log-manifest"
# In a log directory: the cache of what was read from the remote store.
REMOTE_CACHE_DIRECTORY: Final = "remote-log-cache"

SEGMENT_SUFFIXES: Final = (
    LOG_SUFFIX,
    INDEX_SUFFIX,
    TIME_INDEX_SUFFIX,
    TXN_INDEX_SUFFIX,
)
_DIGITS: Final = 20
_FILE_MODE: Final = 0o640  # records: for the user and group of the broker alone
_FALLOC_FL_KEEP_SIZE: Final = 1


def segment_file(directory: str, base_offset: int, suffix: str) -> str:
    """Return the path of a segment's file, by base offset and suffix."""
    return f"{directory}/{base_offset:020d}{suffix}"


def base_offset_of(name: str, suffix: str) -> int | None:
    """Return the offset in a file name of 20 digits and ``suffix``; else None."""
    digits = name.removesuffix(suffix)
    if len(digits) != _DIGITS or len(name) != _DIGITS + len(suffix):
        return None
    return int(digits) if digits.isascii() and digits.isdigit() else None


def base_offsets(directory: str, suffix: str) -> list[int]:
    """Return the sorted offsets of a directory's files with this suffix."""
    found = (base_offset_of(name, suffix) for name in os.listdir(directory))
    return sorted(offset for offset in found if offset is not None)


def write_whole(fd: int, content: bytes | memoryview, position: int) -> None:
    """Write all of ``content`` at ``position``, in several calls if one is not enough.

    Raises:
        OSError: ENOSPC, EDQUOT, EIO... A part may have been written. Callers write
            where no reader looks yet.
    """
    written = os.pwrite(fd, content, position)
    size = len(content)
    while written < size:
        part = os.pwrite(fd, memoryview(content)[written:], position + written)
        if part == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written += part


def write_file(path: str, content: bytes, *, sync: bool = True) -> None:
    """Replace a file: readers see all of the old content or all of the new.

    The temporary name has the writer's pid, so that two processes which replace the
    same file cannot mix their bytes.

    Args:
        path: the file.
        content: its new content.
        sync: whether to force content and name to disk. Without it a power cut may
            leave an empty file, so False is only for content that has a checksum or
            that can be made again.

    Raises:
        OSError: the new content cannot be written; the old file is still there.
    """
    temporary = f"{path}.{os.getpid()}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    fd = os.open(temporary, flags, _FILE_MODE)
    try:
        write_whole(fd, content, 0)
        if sync:
            os.fsync(fd)
    except BaseException:
        os.close(fd)
        os.unlink(temporary)
        raise
    os.close(fd)
    # The content is on disk before the name leads to it. If this process is killed
    # before the rename, the old file stays in use, and a `.tmp` file is left behind.
    os.rename(temporary, path)
    if sync:
        sync_directory(os.path.dirname(path))


def create_file(path: str) -> int:
    """Open a file for reading and writing; create it if absent.

    Returns:
        The descriptor.
    """
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _FILE_MODE)


def reserve_space(fd: int, size: int) -> None:
    """Reserve disk blocks for a file of ``size`` bytes without changing its length.

    Appends then need no new blocks, and the log still ends where the file ends. Where
    the file system does not support this, nothing happens.

    Raises:
        OSError: ENOSPC.

    Source: fallocate(2), FALLOC_FL_KEEP_SIZE.
    """
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate64
    lengths = ctypes.c_int64(0), ctypes.c_int64(size)
    if fallocate(fd, _FALLOC_FL_KEEP_SIZE, *lengths) == 0:
        return
    number = ctypes.get_errno()
    if number not in (errno.EOPNOTSUPP, errno.ENOSYS):
        raise OSError(number, os.strerror(number))


def remove_if_exists(path: str) -> None:
    """Remove a file, unless it is gone already."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def remove_uncommitted_segments(directory: str, active_base_offset: int) -> None:
    """Remove segments that killed processes had begun, and never made the active one.

    Their files are above the active segment. The caller holds the lock of the
    partition's row (its entry in shared memory), so no process is just making a new
    segment.
    """
    for base in base_offsets(directory, LOG_SUFFIX):
        if base > active_base_offset:
            remove_segment(directory, base)


def remove_segment(directory: str, base_offset: int) -> None:
    """Remove all files of a segment."""
    for suffix in SEGMENT_SUFFIXES:
        remove_if_exists(segment_file(directory, base_offset, suffix))


def file_size(path: str) -> int:
    """Return a file's size in bytes, 0 if it does not exist."""
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def mark_offline(directory: str, why: str) -> None:
    """Make the file `partition.offline`, which tells the next start of a failed disk.

    The file's existence counts, not its content. If the disk does not take it, it is in
    the page cache only, as is the data that the next start must not trust. So an error
    is only logged.

    Args:
        directory: the partition's directory.
        why: the error, for people who read the file.
    """
    path = f"{directory}/{OFFLINE_FILE}"
    try:
        fd = create_file(path)
        try:
            write_whole(fd, f"version: 0\nerror: {why}\n".encode(), 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        sync_directory(directory)
        sync_directory(os.path.dirname(directory))
    except OSError as error:
        logger.error("%s cannot be forced to disk: %s", path, error)


def is_marked_offline(directory: str) -> bool:
    """Return whether a partition's directory has the mark of a failed disk.

    What the page cache has of the log's files may then differ from the disk, and must
    be compared with it before the log is used.
    """
    return os.path.exists(f"{directory}/{OFFLINE_FILE}")


def remove_mark(directory: str) -> None:
    """Remove the mark of a failed disk, after the log was compared with the disk.

    The caller has forced the partition's files to disk before.

    Raises:
        OSError: the mark cannot be removed; the next start checks the log again.
    """
    os.unlink(f"{directory}/{OFFLINE_FILE}")
    sync_directory(directory)

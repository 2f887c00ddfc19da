"""Errors of storage about files that are damaged or cannot be used.

They are for the process, its log and its exit code. A client is told an ApiError.
"""

from mpbroker.base.errors import MpbrokerError


class StorageError(MpbrokerError):
    """Root of the errors about files and directories."""


class CorruptLogError(StorageError):
    """A segment has bytes that are no record batch; names the file and the position."""


class CorruptIndexError(StorageError):
    """An index contradicts its segment: rebuild it from the segment."""


class CorruptSnapshotError(StorageError):
    """A producer snapshot is damaged: use an older one, or the log."""


class CheckpointError(StorageError):
    """A checkpoint file has another version, or lines that are no entries."""


class LogDirectoryError(StorageError):
    """A directory of ``log.dirs`` cannot be used; the text is one line."""


class LogDirectoryLockedError(LogDirectoryError):
    """A broker that runs has the directory."""

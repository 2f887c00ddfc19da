"""Errors of storage about files that are damaged or cannot be used.

They are for the process, its log and its exit code. Clients get an ApiError instead.
"""

from mpbroker.base.errors import MpbrokerError


class StorageError(MpbrokerError):
    """Root of the errors about files and directories."""


class CorruptLogError(StorageError):
    """A log has bytes that are not a record batch; the text names file and position."""


class CorruptIndexError(StorageError):
    """An index contradicts its segment: rebuild it from the log."""


class CorruptSnapshotError(StorageError):
    """A producer snapshot is damaged: use an older one, or the log."""


class CheckpointError(StorageError):
    """A checkpoint file has another version, or malformed lines."""


class LogDirectoryError(StorageError):
    """A directory of ``log.dirs`` cannot be used; the text is one line."""


class LogDirectoryLockedError(LogDirectoryError):
    """A running broker has locked the directory."""

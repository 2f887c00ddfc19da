"""What storage raises when files are not what they should be.

Errors that a client is told are ApiError; these are for the process itself, its log
and its exit code.
"""

from mpbroker.base.errors import MpbrokerError


class StorageError(MpbrokerError):
    """Root of the errors about files and directories."""


class CorruptLogError(StorageError):
    """A segment's bytes are not record batches; says the file and the position."""


class CorruptIndexError(StorageError):
    """An index file contradicts its segment; it is rebuilt from the segment."""


class CorruptSnapshotError(StorageError):
    """A producer snapshot cannot be trusted; an older one or the log is used."""


class CheckpointError(StorageError):
    """A checkpoint file has another version, or lines that are not entries."""


class LogDirectoryError(StorageError):
    """A directory of ``log.dirs`` cannot be used; one line for the operator."""


class LogDirectoryLockedError(LogDirectoryError):
    """A live broker owns the directory."""

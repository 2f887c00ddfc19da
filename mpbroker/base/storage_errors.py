"""Errors of storage about files that are damaged or cannot be used.

They are for the process, its log and its exit code. Clients get an ApiError instead.
"""

from typing import Protocol

from mpbroker.base.errors import MpbrokerError


class StorageError(MpbrokerError):
    """Root of the errors about files and directories."""


class CorruptLogError(StorageError):
    """A log has bytes that are not a record batch; the text names file and position."""


class LogReplacedError(CorruptLogError):
    """A snapshot has replaced records of a log that this process still had to read."""


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


class RemoteStorageError(StorageError):
    """The remote store refused or did not answer; the text is one line."""


class RemoteObjectMissingError(RemoteStorageError):
    """The remote store has no object of this name."""


class RemoteUnreachableError(RemoteStorageError):
    """The remote store gave no answer, or has failed itself; it may answer later."""


class UnconditionalStoreError(RemoteStorageError):
    """The remote store would let two brokers create the same object."""

    def __init__(self, url: str) -> None:
        super().__init__(
            f"{url} has no conditional writes (If-None-Match: *), so two brokers could"
            " write below one prefix: use a store that has them, or a newer version"
        )


class RemoteWait(Protocol):
    """Bytes in the remote store (tiered storage) for which a request has to wait."""

    def ask(self, row: int) -> None:
        """Ask for the bytes, and have handlers woken when they come.

        Woken are the handlers that wait for the partition with this row.
        """

    def is_over(self) -> bool:
        """Return whether the bytes have come, or are not needed any more."""

    def failure(self) -> str:
        """Return why the last request to the store failed; "": it did not."""


class RemotePendingError(StorageError):
    """Records are in the remote store only: ask for them, and try again.

    Attributes:
        wait: the missing bytes.
    """

    def __init__(self, wait: RemoteWait) -> None:
        super().__init__("the records are in the remote store")
        self.wait = wait


class LookupLimitError(StorageError):
    """A request has looked through as many records as one request may.

    What it has not found can be asked for in another request.
    """

"""Group commit: make one fdatasync of a log serve all requests that wait for it.

acks=all means that the records are on disk. A handler that has appended such records
looks at the partition's row, its entry in a table that all processes share. If no
process syncs this log, the handler becomes the owner of a sync, remembers the log end
offset as its target and starts the sync. If another process syncs it, the handler sets
its bit in the row's word ROW_SYNC_WAITERS. When the sync ends, its owner publishes the
target as the durable end offset and sends a notice to the waiting handlers. A handler
whose records lie behind the target starts the next sync. So each log has at most one
sync at a time, and each sync covers all records that were appended while the one before
it ran.

If a process has only one request to execute, and its disk is fast, it makes the sync at
once instead (``sync_at_once``). It is the owner of this sync, too.

If the owner of a sync dies, the supervisor's repair clears the ownership and sends a
notice to every handler.
"""

import errno
import os
from collections.abc import Callable, Collection, Sequence
from typing import Final, Protocol

from mpbroker.base.logger import get_logger
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.ipc.layout import (
    HANDLER_COUNTERS,
    RowStatus,
    handler_row,
)
from mpbroker.ipc.layout import HandlerCounter as C
from mpbroker.ipc.tables.partition_table import PartitionRow
from mpbroker.protocol.errors import ApiError
from mpbroker.storage.log.disk_sync import DiskSync

_LOG = get_logger(__name__)

# Syncs of more logs than this are started in the background.
_MOST_AT_ONCE: Final = 8
# After so many syncs another request may be waiting: a timer may end many
# transactions, and one WriteTxnMarkers request may name many partitions.
_MOST_IN_A_ROW: Final = 24


class LogFiles(Protocol):
    """The methods for one log's files that a sync (fdatasync) needs: see LogSync."""

    def segments_to_sync(self, from_offset: int, to_offset: int) -> list[int]:
        """Return descriptors of the files that hold these offsets, for fdatasync.

        Args:
            from_offset: the first offset.
            to_offset: the offset behind the last one.
        """

    def make_room(self) -> None:
        """Close the files of all logs of this process, to free file descriptors."""

    def mark_offline(self, why: str) -> None:
        """Note on the disk that a sync failed, so that the log stays unusable."""


class SyncableLog(Protocol):
    """The members of a partition's log that a sync (fdatasync) needs."""

    row: PartitionRow

    @property
    def sync(self) -> LogFiles: ...


# Errors of open() that pass, and that say nothing about the file's content.
_PASSING: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


def _number_of(error: OSError | ApiError) -> int:
    """Return the errno of an error in opening a log's files; EIO if it has none."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return (isinstance(cause, OSError) and cause.errno) or errno.EIO


class _Sync(NamedTuple):
    log: SyncableLog
    target: int


class GroupCommit:
    """Starts and ends the syncs (fdatasync) of logs for one handler process.

    Attributes:
        disk: executes the syncs.
        syncs: how many this process has finished.

    Args:
        handler: this process's id.
        disk: executes the syncs.
        notify: sends a notice about a partition's row (index) to handlers (a bit set).
        words: the control segment, where syncs are counted for metrics, too. None: only
            ``syncs`` counts them.
    """

    def __init__(
        self,
        handler: int,
        disk: DiskSync,
        notify: Callable[[int, int], None],
        words: memoryview | None = None,
    ) -> None:
        self._words = words
        self._count_word = handler_row(handler) + HANDLER_COUNTERS + C.SYNCS
        self._handler = handler
        self._bit = 1 << handler
        self.disk = disk
        self._notify = notify
        self._wanted: dict[int, SyncableLog] = {}
        self._running: dict[int, _Sync] = {}
        self._files_left: dict[int, set[int]] = {}
        self._failed: dict[int, int] = {}
        self._tokens: dict[int, int] = {}
        self._next_token = 0
        self.syncs = 0
        self._left_at_once = 0

    @property
    def is_alone(self) -> bool:
        """Whether `sync_at_once` may wait for the disk: no other request waits.

        The process's loop sets it to True if there is only one request to execute. It
        becomes False after 24 syncs.
        """
        return self._left_at_once > 0

    @is_alone.setter
    def is_alone(self, alone: bool) -> None:
        self._left_at_once = _MOST_IN_A_ROW if alone else 0

    @property
    def is_idle(self) -> bool:
        return not self._wanted and not self._running

    @property
    def is_syncing(self) -> bool:
        """Whether this process runs a sync, for whose end other handlers may wait."""
        return bool(self._running)

    def syncs_any(self, rows: Collection[int]) -> bool:
        """Return whether this process syncs, or will sync, a log of one of these rows.

        A row is a partition's entry in the shared partition table.
        """
        busy = self._running.keys() | self._wanted.keys()
        return not busy.isdisjoint(rows)

    def want(self, log: SyncableLog) -> None:
        """Remember that a log must be synced to disk; ``start`` starts the sync."""
        self._wanted[log.row.index] = log

    def start(self) -> None:
        """Start a sync of each log given to ``want``. Call it once after many requests.

        A log that this process syncs already stays wanted until that sync has ended.
        """
        if not self._wanted:
            return
        wanted, self._wanted = self._wanted, {}
        syncs: list[tuple[int, int]] = []
        for index, log in wanted.items():
            if index not in self._running:
                self._start(log, syncs)
            else:
                self._wanted[index] = log  # started when the running sync has ended
        if syncs:
            self.disk.start_all(syncs)

    def sync_at_once(self, logs: Sequence[SyncableLog]) -> None:
        """Sync logs before this method returns, if this delays no other request.

        The method may do nothing, or sync only some of the logs. It leaves out a log
        that another process syncs. So callers check each log afterwards: they wait if
        its records are not durable yet, and answer an error if it is offline.
        """
        disk = self.disk
        if not self.is_alone or len(logs) > _MOST_AT_ONCE or not disk.is_quick:
            return
        found: list[tuple[_Sync, list[int]]] = []
        owned: dict[int, SyncableLog] = {}

        def end(sync: _Sync, error: int) -> None:
            del owned[sync.log.row.index]
            self._end_at_once(sync, error)

        def make() -> None:
            errors = disk.sync_side_by_side([fds for _, fds in found])
            for (sync, _), error in zip(found, errors, strict=True):
                end(sync, error)
            found.clear()

        try:
            for log in logs:
                if log.row.status != RowStatus.ONLINE:
                    continue
                # No bit is set. A caller that has to wait calls `want`; that sets it.
                target = log.row.begin_sync(self._handler)
                if target is None:
                    continue
                owned[log.row.index] = log
                self._left_at_once -= 1
                sync = _Sync(log, target)
                try:
                    found.append((sync, self._files_to_sync(log, target, make)))
                except (OSError, ApiError) as caught:
                    if _number_of(caught) not in _PASSING:
                        end(sync, _number_of(caught))
            if found:
                make()
        finally:
            # Their files could not be opened, or there was a bug: they need no owner.
            for log in owned.values():
                self._tell(log.row.index, log.row.end_sync(0))

    def _end_at_once(self, sync: _Sync, error: int) -> None:
        row = sync.log.row
        waiters = row.end_sync(sync.target, failed=bool(error))
        self._count()
        self._tell(row.index, waiters)
        if error:
            self._complain(sync.log, error)

    def _tell(self, index: int, waiters: int) -> None:
        if waiters:
            self._notify(index, waiters)

    def _files_to_sync(
        self, log: SyncableLog, target: int, sync_others: Callable[[], None]
    ) -> list[int]:
        """Return descriptors of the files to sync.

        If the process has no descriptor left, close files and try once more.

        Args:
            log: the log.
            target: sync the records below this offset.
            sync_others: starts the syncs of other logs whose files were found before.
                It is called before files are closed, since theirs are closed, too.
        """
        durable = log.row.durable_end_offset
        try:
            return log.sync.segments_to_sync(durable, target)
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
        sync_others()
        log.sync.make_room()
        return log.sync.segments_to_sync(durable, target)

    def _start(self, log: SyncableLog, syncs: list[tuple[int, int]]) -> None:
        """Make this process the one that syncs a log, and add its files to ``syncs``.

        If another process syncs the log, mark in the log's row that this process waits.

        Args:
            log: the log.
            syncs: gets pairs of a token and a descriptor.
        """
        row = log.row
        target = row.begin_sync(self._handler, self._bit)
        if target is None:
            return
        self._running[row.index] = _Sync(log, target)

        def start_others() -> None:
            self.disk.start_all(syncs)
            syncs.clear()

        try:
            fds = self._files_to_sync(log, target, start_others)
        except (OSError, ApiError) as error:
            if _number_of(error) in _PASSING:
                self._put_off(log)
                return
            self._files_left[row.index] = set()
            self._finish(row.index, _number_of(error))
            return
        left = self._files_left[row.index] = set()
        for fd in fds:
            token = self._next_token = self._next_token + 1
            self._tokens[token] = row.index
            syncs.append((token, fd))
            left.add(token)
        if not left:
            self._finish(row.index, 0)

    def _put_off(self, log: SyncableLog) -> None:
        """Give up a sync because files cannot be opened now, and try it again later.

        No sync has failed, so no record is lost. The waiting handlers get a notice:
        they may have file descriptors left, and can sync the log themselves.
        """
        index = log.row.index
        del self._running[index]
        self._wanted[index] = log
        self._tell(index, log.row.end_sync(0) & ~self._bit)

    def process_finished(self) -> bool:
        """Tell waiting handlers the results of syncs that ended; return if any has.

        The new durable end offset, or the failure, is stored in the partition's row.
        """
        done = self.disk.finished()
        for token, error in done:
            index = self._tokens.pop(token)
            left = self._files_left[index]
            left.discard(token)
            if error:
                self._failed[index] = error
            if not left:
                self._finish(index, self._failed.pop(index, 0))
        return bool(done)

    def _finish(self, index: int, error: int) -> None:
        log, target = self._running.pop(index)
        del self._files_left[index]
        row = log.row
        waiters = row.end_sync(target, failed=bool(error)) | self._bit
        self._count()
        self._notify(index, waiters)
        if error:
            self._complain(log, error)

    def _count(self) -> None:
        self.syncs += 1
        if self._words is not None:
            self._words[self._count_word] += 1

    @staticmethod
    def _complain(log: SyncableLog, error: int) -> None:
        row = log.row
        if row.status == RowStatus.OFFLINE:  # not if it was deleted
            _LOG.error(
                "partition row %d is offline: its log cannot be synced: %s",
                row.index,
                os.strerror(error),
            )
            log.sync.mark_offline(os.strerror(error))

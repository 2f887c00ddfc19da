"""Group commit: one fdatasync for all that wait on a log, whoever appended it.

acks=all means on disk. A handler that has appended such records looks at the
partition's row: if nobody syncs this log, it becomes the sync's owner, notes the log
end as its target and starts the sync; if somebody does, it asks to be told of its end.
When a sync ends, its owner publishes the target as the durable end and tells those
who asked; whose records came too late for it start the next. So a log has one sync
under way at a time, and each covers all that was appended while the last one ran.

A process that has one request in hand, and no other that would have to wait for it,
makes its syncs at once instead, on a disk that is quick (``sync_at_once``).

An owner that dies is replaced by the supervisor's repair, which clears the ownership
and makes every handler look again.
"""

import errno
import os
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

from mpbroker.base.logger import get_logger
from mpbroker.ipc.layout import (
    HANDLER_COUNTERS,
    ROW_SYNC_OWNER,
    ROW_SYNC_WAITERS,
    RowStatus,
    handler_row,
)
from mpbroker.ipc.layout import HandlerCounter as C
from mpbroker.ipc.tables.partition_table import PartitionRow
from mpbroker.protocol.errors import ApiError
from mpbroker.storage.log.disk_sync import DiskSync

_LOG = get_logger(__name__)

# More logs than these are better waited for by the event.
_MOST_AT_ONCE: Final = 8
# So many syncs in a row, and somebody may have come meanwhile: a timer may end any
# number of transactions, and an administrator ask for any number of markers.
_MOST_IN_A_ROW: Final = 24


class LogFiles(Protocol):
    """The part of a log's LogSync that a sync needs."""

    def segments_to_sync(self, from_offset: int, to_offset: int) -> list[int]:
        """The files that hold these offsets: descriptors to fdatasync."""

    def make_room(self) -> None:
        """Close the files of all logs of this process: no descriptor is left."""


class SyncableLog(Protocol):
    """The part of a PartitionLog that a sync needs."""

    row: PartitionRow

    @property
    def sync(self) -> LogFiles: ...


# What keeps files from being opened just now, and says nothing of what is in them.
_PASSING: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


def _number_of(error: OSError | ApiError) -> int:
    """The errno of what kept a log's files from being opened."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return (isinstance(cause, OSError) and cause.errno) or errno.EIO


class _Sync(NamedTuple):
    log: SyncableLog
    target: int


class GroupCommit:
    """The syncs that one handler process has under way.

    Attributes:
        disk: makes the syncs.

    Args:
        words: the control segment's, where they are counted; None: here alone.
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
        self._owner = handler + 1
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
        """Whether nobody else waits for this process; said by its loop every turn."""
        return self._left_at_once > 0

    @is_alone.setter
    def is_alone(self, alone: bool) -> None:
        self._left_at_once = _MOST_IN_A_ROW if alone else 0

    @property
    def is_idle(self) -> bool:
        return not self._wanted and not self._running

    @property
    def is_syncing(self) -> bool:
        """Whether syncs of ours are under way, of whose end others are to be told."""
        return bool(self._running)

    def want(self, log: SyncableLog) -> None:
        """Some records of this log must become durable; ``start`` sees to it."""
        self._wanted[log.row.index] = log

    def start(self) -> None:
        """Start the syncs that are wanted: once for a whole batch of requests."""
        if not self._wanted:
            return
        wanted, self._wanted = self._wanted, {}
        syncs: list[tuple[int, int]] = []
        for index, log in wanted.items():
            if index not in self._running:
                self._start(log, syncs)
            else:
                self._wanted[index] = log  # the next one, when this one has ended
        if syncs:
            self.disk.start_all(syncs)

    def sync_at_once(self, logs: Sequence[SyncableLog]) -> None:
        """Make logs durable before this returns, if that holds up nobody.

        Callers look at the rows afterwards: at what is not durable yet, as if they had
        not called; at what is offline, which is never to be synced again.
        """
        disk = self.disk
        if not self.is_alone or len(logs) > _MOST_AT_ONCE or not disk.is_quick:
            return
        found: list[tuple[_Sync, list[int]]] = []

        def make() -> None:
            errors = disk.sync_side_by_side([fds for _, fds in found])
            for (sync, _), error in zip(found, errors, strict=True):
                self._made_at_once(sync, error)
            found.clear()

        for log in logs:
            if log.row.status != RowStatus.ONLINE:
                continue
            self._left_at_once -= 1
            # Whoever owns a sync of this log goes on with it; so nobody need be told.
            sync = _Sync(log, log.row.log_end_offset)
            try:
                found.append((sync, self._files_to_sync(log, sync.target, make)))
            except (OSError, ApiError) as caught:
                if _number_of(caught) not in _PASSING:
                    self._made_at_once(sync, _number_of(caught))
        if found:
            make()

    def _made_at_once(self, sync: _Sync, error: int) -> None:
        row = sync.log.row
        row.lock()
        try:
            self._publish(row, sync.target, error)
        finally:
            row.unlock()
        self._count()
        if error:
            self._complain(row, error)

    def _files_to_sync(
        self, log: SyncableLog, target: int, sync_others: Callable[[], None]
    ) -> list[int]:
        """Return what makes a log durable; where it cannot be opened, make room once.

        Args:
            sync_others: begins what was found before; its files are closed then.
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
        """Take over the syncing of a log; add tokens and files to what is to begin."""
        row = log.row
        words = row.words
        row.lock()  # not ``locked``: twice a sync, of each partition of each produce
        try:
            if words[row.base + ROW_SYNC_OWNER]:
                words[row.base + ROW_SYNC_WAITERS] |= self._bit
                return
            words[row.base + ROW_SYNC_OWNER] = self._owner
            target = row.log_end_offset
        finally:
            row.unlock()
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
        """Its files cannot be opened just now: try again in a later turn.

        Nothing was written in vain, so nothing is lost by that; and whoever else wants
        this sync may have what we lack.
        """
        row = log.row
        del self._running[row.index]
        self._wanted[row.index] = log
        words = row.words
        row.lock()
        try:
            waiters = words[row.base + ROW_SYNC_WAITERS] & ~self._bit
            words[row.base + ROW_SYNC_WAITERS] = 0
            words[row.base + ROW_SYNC_OWNER] = 0
        finally:
            row.unlock()
        if waiters:
            self._notify(row.index, waiters)

    def process_finished(self) -> bool:
        """Publish what syncs that have ended made durable; say if any has."""
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
        words = row.words
        row.lock()
        try:
            self._publish(row, target, error)
            waiters = words[row.base + ROW_SYNC_WAITERS] | self._bit
            words[row.base + ROW_SYNC_WAITERS] = 0
            words[row.base + ROW_SYNC_OWNER] = 0
        finally:
            row.unlock()
        self._count()
        if error:
            self._complain(row, error)
        self._notify(index, waiters)

    def _count(self) -> None:
        self.syncs += 1
        if self._words is not None:
            self._words[self._count_word] += 1

    @staticmethod
    def _publish(row: PartitionRow, target: int, error: int) -> None:
        """Say how far a log is on disk. Under the row's lock."""
        if error:
            # What an fsync has failed to write may be lost although the next one
            # says success: never try again (fsyncgate). Offline for good.
            if row.status != RowStatus.DELETED:
                row.status = RowStatus.OFFLINE
        elif row.status == RowStatus.OFFLINE:
            return  # another's sync has failed meanwhile: ours may say so no more
        elif target > row.durable_end_offset:
            row.durable_end_offset = target

    @staticmethod
    def _complain(row: PartitionRow, error: int) -> None:
        if row.status == RowStatus.OFFLINE:  # and not just deleted
            _LOG.error(
                "partition row %d is offline: its log cannot be synced: %s",
                row.index,
                os.strerror(error),
            )

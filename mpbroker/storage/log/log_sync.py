"""LogSync: force a partition's log to disk, for commits and for recovery points.

Source: Kafka's UnifiedLog.flush and LogManager.checkpointLogRecoveryOffsets, for what
a recovery point promises.
"""

import errno
import os
import time
from collections.abc import Callable
from typing import Final

from mpbroker.ipc.layout import HOUSEKEEPER
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.storage.files.log_files import (
    SNAPSHOT_SUFFIX,
    segment_file,
)
from mpbroker.storage.files.log_segment import LogSegment
from mpbroker.storage.log.log_producers import LogProducers
from mpbroker.storage.log.partition_view import ACTIVE_BASE, PartitionView
from mpbroker.storage.producers.producer_snapshot import (
    remove_needless_snapshots,
    write_snapshot,
)

# Errors of open() that pass, and that say nothing about the file's content.
_NOT_OPENED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_LOOK_AGAIN_S: Final = 0.001
_MOST_WAITING_NS: Final = 10_000_000_000


class LogSync:
    """The part of a PartitionLog that forces it to disk.

    Attributes:
        process: this process's id as the owner of a sync.
        notify: sends a notice about a row (index) to handlers (bit set); None: no
            handler is there.
    """

    __slots__ = (
        "_directories",
        "_indexes_flushed",
        "_producers",
        "_view",
        "notify",
        "process",
    )

    def __init__(self, view: PartitionView, producers: LogProducers) -> None:
        self.process = HOUSEKEEPER
        self.notify: Callable[[int, int], None] | None = None
        self._view = view
        self._producers = producers
        self._directories: tuple[int, ...] = ()
        # Indexes below this offset are on disk. When a log is loaded, the indexes that
        # are rebuilt are also forced to disk.
        self._indexes_flushed = view.hints.recovery_point

    def segments_to_sync(self, from_offset: int, to_offset: int) -> list[int]:
        """Return the descriptors to fdatasync to make a range of offsets durable.

        They are of the log files with these offsets and, if one of the files may be
        new, of the partition's directory and its parent, which hold the names. They
        stay open until the next call.

        Args:
            from_offset: the durable end offset: all below it is on disk.
            to_offset: the offset behind the range.

        Raises:
            OSError: a file cannot be opened.
            ApiError: as ``PartitionView.moved_or_fail``.
        """
        view = self._view
        while True:
            active_base = view.committed()[ACTIVE_BASE]
            if (
                active_base != view.active_base
                or view.words[view.structure_word] != view.structure
            ):
                view.refresh(active_base)
            if from_offset > view.active_base:
                return [view.active.fd]
            try:
                return self._files_to_sync(from_offset, to_offset)
            except FileNotFoundError as error:
                # Retention has removed the file: it need not be on disk any more.
                view.moved_or_fail(error)

    def _files_to_sync(self, from_offset: int, to_offset: int) -> list[int]:
        segments = self._view.segments
        segments.trim()  # only here: files opened from here on stay open for the caller
        fds, new = [], False
        for segment in segments.from_offset(from_offset):
            if segment.base_offset >= to_offset:
                break
            fds.append(segment.fd)
            new = new or segment.base_offset >= from_offset
        if new:
            fds += self._directory_fds()
        return fds

    def _directory_fds(self) -> tuple[int, ...]:
        paths = self._view.directory, os.path.dirname(self._view.directory)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        # One of the two may be open already, from a call that failed at the other.
        for path in paths[len(self._directories) :]:
            self._directories += (os.open(path, flags),)
        return self._directories

    def mark_offline(self, why: str) -> None:
        """Note for the next start that a sync has failed; the row says so already."""
        self._view.mark_offline(why)

    def make_room(self) -> None:
        """Close the files of all logs of this process, to free file descriptors."""
        self._view.make_room()

    def flush(self, to_offset: int | None = None) -> int:
        """Force the log below ``to_offset`` (the log end offset if None) to disk.

        If another process syncs the log, this waits for the end of that sync. If this
        process itself has a sync under way, the files are forced to disk as well, but
        the durable end offset moves only when that sync has ended.

        Returns:
            The durable end offset.

        Raises:
            ApiError: KAFKA_STORAGE_ERROR. If fdatasync failed, the partition is offline
                until the next start: the kernel may have dropped the pages that it
                could not write, so another fdatasync would prove nothing. Or another
                process's sync has not ended within 10 s; the partition stays online.
        """
        view, row = self._view, self._view.row
        give_up_ns = 0
        while True:
            state = view.state()  # raises if the sync that was waited for has failed
            end = state.log_end_offset
            if to_offset is not None and to_offset <= state.active_base_offset:
                end = to_offset  # the active segment need not be touched
            durable = row.durable_end_offset
            if durable >= (end if to_offset is None else to_offset):
                return durable
            if row.begin_sync(self.process) is not None:
                self._flush_as_owner(end)
                return row.durable_end_offset
            if row.owns_sync(self.process):
                self._sync_files(durable, end)
                return row.durable_end_offset
            now_ns = time.monotonic_ns()
            give_up_ns = give_up_ns or now_ns + _MOST_WAITING_NS
            if now_ns >= give_up_ns:
                raise ApiError(
                    ErrorCode.KAFKA_STORAGE_ERROR,
                    f"{view.directory}: another process's sync of it does not end",
                )
            self._let_owner_go_on()

    def _flush_as_owner(self, end: int) -> None:
        """Force the log below ``end`` to disk, and end the sync of this process.

        Raises:
            ApiError: as ``flush``.
        """
        view, row, durable_end = self._view, self._view.row, 0
        try:
            view.require_online()  # the owner before this one may have failed just now
            self._sync_files(row.durable_end_offset, end)
            durable_end = end
        finally:
            # After the sync: other processes answer acks=all requests by this offset.
            # If this process is killed in between, the offset is too low, and the next
            # sync covers the range again.
            waiters = row.end_sync(durable_end)
            if waiters and self.notify is not None:
                self.notify(row.index, waiters)
        view.require_online()  # or the end was not published

    def _sync_files(self, durable: int, end: int) -> None:
        """Force the files with a range of offsets to disk.

        Raises:
            ApiError: as ``flush``.
        """
        view = self._view
        try:
            fds = self.segments_to_sync(durable, end)
        except OSError as error:
            view.fail(error, "cannot be opened to be forced to disk")
        try:
            for fd in fds:
                os.fdatasync(fd)
        except OSError as error:
            # Before the sync is ended: from then on another process may sync the log,
            # which the kernel no longer tells of the error.
            view.fail(error, "cannot be forced to disk", is_lost=True)

    @staticmethod
    def _let_owner_go_on() -> None:
        time.sleep(_LOOK_AGAIN_S)

    def flush_indexes(self) -> int:
        """Force the indexes below the durable end offset to disk, too.

        Returns:
            The durable end offset. It may be written as a recovery point, below which a
            start after a crash checks nothing.

        Raises:
            ApiError: KAFKA_STORAGE_ERROR: an index could not be forced to disk, and the
                partition is offline. Another attempt would succeed and prove nothing,
                as with the log. The next start rebuilds the index.
            OSError: an index cannot be opened.
        """
        view = self._view
        view.require_online()
        durable = view.row.durable_end_offset
        if durable == self._indexes_flushed:
            return durable
        view.refresh(view.committed()[ACTIVE_BASE])
        for segment in view.segments.from_offset(self._indexes_flushed):
            if segment.base_offset < durable:
                self._sync_indexes(segment)
        # Only now: the caller writes this offset as a recovery point, and a start
        # trusts all index entries below that.
        self._indexes_flushed = durable
        return durable

    def _sync_indexes(self, segment: LogSegment) -> None:
        try:
            segment.sync_indexes()
        except OSError as error:
            if error.errno in _NOT_OPENED:
                raise
            self._view.fail(error, "cannot force an index to disk", is_lost=True)
        finally:
            segment.close_indexes()

    def take_snapshot(self, *, sync: bool = True) -> None:
        """Write a producer snapshot of the log end, so that the next load reads less.

        Args:
            sync: whether to force it to disk; its checksum reveals a torn file.

        Raises:
            ApiError, OSError: the log cannot be read, or the snapshot not be written.
        """
        view = self._view
        state = view.state()
        producers = self._producers.at(state)
        path = segment_file(view.directory, state.log_end_offset, SNAPSHOT_SUFFIX)
        if not os.path.exists(path):
            write_snapshot(view.directory, producers, sync=sync)
            # After the write: a process killed in between leaves too many snapshots.
            bases, point = view.segments.bases, self._indexes_flushed
            remove_needless_snapshots(view.directory, bases, point)

    def close(self) -> None:
        """Close the descriptors of directories. They open again when needed."""
        opened, self._directories = self._directories, ()
        for fd in opened:
            os.close(fd)

"""LogSync: force a partition's log to disk, for commits and for recovery points.

Source: Kafka's UnifiedLog.flush and LogManager.checkpointLogRecoveryOffsets, for what
a recovery point promises.
"""

import errno
import os
import time
from collections.abc import Callable
from typing import Final

from mpbroker.ipc import pulse
from mpbroker.ipc.layout import HOUSEKEEPER, ROW_INDEX_SYNC, ROW_SYNC_IN_DOUBT
from mpbroker.ipc.tables.partition_table import LogState
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.storage.files import offset_index, time_index, txn_index
from mpbroker.storage.files.log_files import (
    SNAPSHOT_SUFFIX,
    segment_file,
)
from mpbroker.storage.files.log_segment import LogSegment
from mpbroker.storage.files.txn_index import read_aborted
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
        process: this process's number. While it forces the log to disk, the partition's
            row (its entry in shared memory) names it as the owner of the sync.
        notify: called with the index of a row and a set of handlers (one bit each);
            tells these handlers that a sync has ended. None: there are no handlers.
    """

    __slots__ = (
        "_directories",
        "_directories_of",
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
        # The directory that they are of, and the structure version then: a partition
        # may move to another log directory and back.
        self._directories_of = view.directory, view.structure
        # Indexes below this offset are on disk. When a log is loaded, the indexes that
        # are rebuilt are also forced to disk.
        self._indexes_flushed = view.hints.recovery_point

    def segments_to_sync(self, from_offset: int, to_offset: int) -> list[int]:
        """Return the descriptors to fdatasync to make a range of offsets durable.

        These are the descriptors of the log files with these offsets. If one of the
        files may be new, the partition's directory and its parent, which hold the
        names, are among them. All stay open until the next call.

        Args:
            from_offset: the durable end offset: the log below it is on disk.
            to_offset: the offset behind the range.

        Raises:
            OSError: a file cannot be opened. EIO: the process that made the sync before
                was killed, and the disk lacks bytes of the log.
            ApiError: as ``PartitionView.moved_or_fail``.
        """
        view = self._view
        if view.words[view.row.base + ROW_SYNC_IN_DOUBT]:
            self._read_back(from_offset)
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

    def _read_back(self, from_offset: int) -> None:
        """Force the log to disk, and check that the disk has what the page cache has.

        This is needed after a process that was syncing the log was killed. The kernel
        may have told that process of a failed write. If this process opened the file
        later, its own fdatasync does not report that error. The partition's row in
        shared memory names this process as the one that makes the sync.

        Args:
            from_offset: the log below this offset is on disk, and is not compared.

        Raises:
            OSError: EIO: the disk lacks records; or a file cannot be read.
        """
        from mpbroker.storage.files.lost_writes import same_on_disk

        view = self._view
        state = LogState._make(view.committed())
        view.refresh(state.active_base_offset)
        for segment in view.segments.from_offset(from_offset):
            size, entries = segment.extent(state)
            start = segment.offset_index.lookup(from_offset, entries)
            os.fdatasync(segment.fd)
            if same_on_disk(segment.path, segment.fd, size, start) < size:
                raise OSError(errno.EIO, f"the disk lacks a part of {segment.path}")
        # Last: if this process is killed before this store, the next owner of the sync
        # compares the log again.
        view.words[view.row.base + ROW_SYNC_IN_DOUBT] = 0

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
        now = paths[0], self._view.structure
        if self._directories_of != now:  # files have changed: perhaps it was moved
            self.close()
            self._directories_of = now
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        # One of the two may be open already, from a call that failed at the other.
        for path in paths[len(self._directories) :]:
            self._directories += (os.open(path, flags),)
        return self._directories

    def mark_offline(self, why: str) -> None:
        """Leave a file that tells the next start that a sync of the log has failed.

        The partition's status in shared memory must be offline before.
        """
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

    def flush_owned(self, end: int) -> None:
        """Force the log below ``end`` to disk for a caller that holds the row's lock.

        The caller also owns the sync. The durable end offset moves when it ends that.

        Raises:
            ApiError: as ``flush``.
        """
        durable = self._view.row.durable_end_offset
        if durable < end:
            self._sync_files(durable, end)

    def _flush_as_owner(self, end: int) -> None:
        """Force the log below ``end`` to disk; then another process may make a sync.

        Raises:
            ApiError: as ``flush``.
        """
        view, row, durable_end = self._view, self._view.row, 0
        try:
            view.require_online()  # the owner before this one may have failed just now
            self._sync_files(row.durable_end_offset, end)
            durable_end = end
        finally:
            # After the files were forced to disk: other processes answer acks=all
            # requests by this offset. If this process is killed in between, the offset
            # is too low, and the next sync covers the range again.
            waiters = row.end_sync(durable_end)
            if waiters and self.notify is not None:
                self.notify(row.index, waiters)
        view.require_online()  # end_sync publishes no end for a row that is offline

    def _sync_files(self, durable: int, end: int) -> None:
        """Force the `.log` files with offsets from ``durable`` to ``end`` to disk.

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
            # and the kernel does not tell that process of the error.
            view.fail(error, "cannot be forced to disk", is_lost=True)

    @staticmethod
    def _let_owner_go_on() -> None:
        pulse.step()  # the time is limited, and the owner has a lease of its own
        time.sleep(_LOOK_AGAIN_S)

    def flush_indexes(self) -> int:
        """Force the indexes of all segments below the durable end offset to disk.

        Returns:
            The durable end offset. It may be written as a recovery point, below which a
            start after a crash checks nothing.

        Raises:
            ApiError: KAFKA_STORAGE_ERROR: an index could not be forced to disk, and the
                partition is offline. Another attempt would prove nothing: the kernel
                reports a failed write only once. The next start rebuilds the index.
            OSError: an index cannot be opened, or the partition was moved meanwhile:
                another attempt may succeed.
        """
        view = self._view
        view.require_online()
        durable = view.row.durable_end_offset
        if durable == self._indexes_flushed:
            return durable
        view.refresh(view.committed()[ACTIVE_BASE])
        words, under_way = view.words, view.row.base + ROW_INDEX_SYNC
        # The kernel reports a failed write once, and never to a file that is opened
        # later. If this process is killed in here, it may have got such a report. Then
        # this word is still 1, and the next process compares the indexes with the disk.
        was_killed = bool(words[under_way])
        words[under_way] = 1
        # Begin with the segment that ends at the last flushed offset, if there is one:
        # a roll adds the last entry to its time index, perhaps after the last sync.
        for segment in view.segments.from_offset(max(self._indexes_flushed - 1, 0)):
            if segment.base_offset < durable:
                self._sync_indexes(segment, durable, read_back=was_killed)
        words[under_way] = 0
        # Only now: the caller writes this offset as a recovery point, and a start
        # trusts all index entries below that.
        self._indexes_flushed = durable
        return durable

    def _sync_indexes(
        self, segment: LogSegment, durable: int, *, read_back: bool
    ) -> None:
        try:
            segment.sync_indexes()
            if read_back:
                self._read_indexes_back(segment, durable)
        except OSError as error:
            if error.errno in _NOT_OPENED:
                raise
            if isinstance(error, FileNotFoundError) and self._view.is_outdated:
                raise  # the partition has just been moved, or deleted
            self._view.fail(error, "cannot force an index to disk", is_lost=True)
        finally:
            segment.close_indexes()

    def _read_indexes_back(self, segment: LogSegment, durable: int) -> None:
        """Compare the indexes of a segment with the disk, after they were synced.

        Only committed entries are compared: processes that append may write behind them
        meanwhile.

        Args:
            segment: the segment.
            durable: the durable end offset; later aborted transactions are left out.

        Raises:
            OSError: EIO: the disk lacks entries; or a file cannot be read.
        """
        from mpbroker.storage.files.lost_writes import is_on_disk

        state = self._view.state()
        if segment.base_offset == state.active_base_offset:
            entries, times = state.index_entries, state.time_index_entries
        else:
            entries = segment.offset_index.file_entries()
            times = segment.time_index.file_entries()
        aborted = read_aborted(segment.txn_index_path, durable)
        for path, size in (
            (segment.offset_index.path, entries * offset_index.ENTRY_BYTES),
            (segment.time_index.path, times * time_index.ENTRY_BYTES),
            (segment.txn_index_path, len(aborted) * txn_index.ENTRY_BYTES),
        ):
            if size and not is_on_disk(path, size):
                raise OSError(errno.EIO, f"the disk lacks a part of {path}")

    def take_snapshot(self, *, sync: bool = True) -> None:
        """Write a file with the producers' state (epochs, sequences) at the log end.

        A process that loads the partition then reads less of the log. Older snapshots
        that no load needs are removed.

        Args:
            sync: whether to force the snapshot to disk. If not, a power cut may leave a
                torn file, which its checksum reveals.

        Raises:
            ApiError, OSError: the log cannot be read, or the snapshot cannot be
                written.
        """
        view = self._view
        state = view.state()
        producers = self._producers.at(state)
        path = segment_file(view.directory, state.log_end_offset, SNAPSHOT_SUFFIX)
        if not os.path.exists(path):
            write_snapshot(view.directory, producers, sync=sync)
            # After the write: a process that is killed in between leaves too many
            # snapshots; in the other order it would leave too few.
            bases, point = view.segments.bases, self._indexes_flushed
            remove_needless_snapshots(view.directory, bases, point)

    def close(self) -> None:
        """Close the descriptors of the directories that were forced to disk.

        They open again when needed.
        """
        opened, self._directories = self._directories, ()
        for fd in opened:
            os.close(fd)

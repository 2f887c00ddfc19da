"""ReplicaMoves: copy partitions to other log directories, and put the copies in place.

The housekeeper's task behind AlterReplicaLogDirs. A `-future` directory says that a
partition is to move; see replica_directories.py. A copy has the same files with the
same bytes as the partition's directory, so that positions, indexes and producer
snapshots stay valid for all processes.

Segments that are not active do not change meanwhile: the flock that cleaners and
retention take of a directory is held until the move ends, as Kafka pauses the cleaning
of a partition that moves. The committed part of the active segment does not change
either, and is copied again and again as it grows. When little is missing, the rest is
copied under the partition's lock, so that nothing can be appended in between.

A housekeeper that is killed has left an incomplete copy. The next one begins it anew.

Source: Kafka's ReplicaAlterLogDirsThread; KIP-113.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from mpbroker.base.directories import sync_directory
from mpbroker.base.errors import MpbrokerError
from mpbroker.base.logger import get_logger
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.ipc import pulse
from mpbroker.ipc.layout import RowStatus
from mpbroker.ipc.tables.partition_table import LogState
from mpbroker.protocol.errors import ApiError
from mpbroker.storage.files.leader_epochs import FILE_NAME as LEADER_EPOCHS
from mpbroker.storage.files.log_files import (
    DELETE_DIRECTORY_SUFFIX,
    INDEX_SUFFIX,
    LOG_SUFFIX,
    SNAPSHOT_SUFFIX,
    TIME_INDEX_SUFFIX,
    TXN_INDEX_SUFFIX,
    base_offsets,
    create_file,
    file_size,
    remove_segment,
    remove_uncommitted_segments,
    segment_file,
    write_file,
    write_whole,
)
from mpbroker.storage.files.log_segment import LogSegment
from mpbroker.storage.files.offset_index import ENTRY_BYTES as OFFSET_ENTRY_BYTES
from mpbroker.storage.files.time_index import ENTRY_BYTES as TIME_ENTRY_BYTES
from mpbroker.storage.log.partition_log import PartitionLog
from mpbroker.storage.log_directory import LogDirectory
from mpbroker.storage.log_manager import LogManager, TopicView, says_deleted
from mpbroker.storage.partition_directory import (
    PARTITION_METADATA,
    complete_directory,
    read_topic_id,
    remove_flat,
    rename_away,
)
from mpbroker.storage.replica_directories import (
    FutureReplica,
    future_replicas,
    put_in_place,
)
from mpbroker.storage.used_directories import note_use

if TYPE_CHECKING:
    from mpbroker.storage.cleaning.log_upkeep import AllTopics

logger = get_logger(__name__)

LOOK_INTERVAL_MS: Final = 500
# The housekeeper's other tasks wait for at most this and one chunk.
SLICE_S: Final = 0.5
# Copied and forced to disk at once.
CHUNK_BYTES: Final = 4 * 1024 * 1024
# At most so much of the log is copied under the partition's lock: 10 ms at 100 MB/s.
LAST_BYTES: Final = 1024 * 1024
# A log directory's names are read again if it has changed. A change within this time
# of the last look may have the same timestamp as that look.
_SAME_TIME_S: Final = 1.0
_LOOK_AGAIN_S: Final = 0.0002
# Errors that are not a disk's: the move begins anew at the next look.
_PASSING: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


class ReplicaMoves:
    """Makes the moves that clients have asked for, a part at each call.

    Args:
        manager: the LogManager of this process.
        topics: the registry of this process.
    """

    def __init__(self, manager: LogManager, topics: AllTopics) -> None:
        self._manager = manager
        self._topics = topics
        self._moves: dict[str, _Move] = {}  # by the copy's path
        # Of each log directory: its time of change (ns) and the time (s) when its names
        # were read last, and the errno of the failure since.
        self._looked: dict[str, tuple[int, float]] = {}
        self._errors: dict[str, int | None] = {}

    def look(self, now_ms: int) -> None:
        """Go on with the moves for SLICE_S. Due every LOOK_INTERVAL_MS."""
        until = time.monotonic() + SLICE_S
        self._find()
        for path, move in list(self._moves.items()):
            if time.monotonic() >= until:
                break
            # One that does not end must not keep the others waiting.
            self._moves[path] = self._moves.pop(path)
            if self._go_on(move, until):
                self._moves.pop(path).close()

    def _find(self) -> None:
        """Note moves that were asked for since the last call, and forget cancelled."""
        for path in [path for path in self._moves if not os.path.isdir(path)]:
            self._moves.pop(path).close()
        for directory in self._manager.directories:
            path = directory.path
            try:
                self._find_in(directory)
                self._errors.pop(path, None)
            except OSError as error:
                self._looked.pop(path, None)
                # A disk that has failed would fill the log, twice a second.
                if self._errors.get(path) != error.errno:
                    logger.error("%s cannot be read: %s", path, error)
                self._errors[path] = error.errno

    def _find_in(self, directory: LogDirectory) -> None:
        """Note new moves to a log directory, unless it has not changed meanwhile.

        Raises:
            OSError: the directory cannot be read.
        """
        path = directory.path
        modified_ns, looked_s = os.stat(path).st_mtime_ns, time.time()
        before = self._looked.get(path)
        if before is not None and (
            before[0] == modified_ns and before[1] - modified_ns / 1e9 >= _SAME_TIME_S
        ):
            return
        for future in future_replicas(path):
            if future.path not in self._moves:
                home = self._manager.directories[0].path
                self._moves[future.path] = _Move(future, directory, home)
        self._looked[path] = modified_ns, looked_s

    def _go_on(self, move: _Move, until: float) -> bool:
        """Go on with a move until a time (s, monotonic); return whether it ended."""
        future = move.future
        topic = self._topic_of(future)
        try:
            if topic is None:
                if not move.is_unknown:
                    move.is_unknown = True  # its topic may be newer than our registry
                    return False
                move.abandon()
                return True
            log = self._manager.log_in_place(topic, future.partition)
            if not move.go_on(log, topic, self._topics.topics(), until):
                return False
            self._take_cleaner_offset(future)
            return True
        except (OSError, MpbrokerError) as error:
            # Not if the move was cancelled, or the topic deleted.
            is_wanted = os.path.isdir(future.path) and not says_deleted(error)
            will_pass = is_wanted and _errno_of(error) in _PASSING
            if is_wanted and not (will_pass and move.is_put_off):
                logger.error(
                    "%s-%d cannot be moved to %s%s: %s",
                    *(future.topic, future.partition, future.log_directory),
                    *(" yet" if will_pass else "", error),
                )
            move.is_put_off = will_pass
            if will_pass:
                move.close()
                return False
            move.abandon()
            return True

    def _take_cleaner_offset(self, future: FutureReplica) -> None:
        """Move the cleaner's checkpoint of a partition to its new log directory.

        Killed before this, the cleaner begins at the log's start.
        """
        which, offset = (future.topic, future.partition), None
        for directory in self._manager.directories:
            with suppress(OSError):  # another disk, which has failed
                if which in directory.cleaner_offsets():
                    with directory.cleaner_offsets_locked() as offsets:
                        offset = offsets.pop(which, offset)
        for directory in self._manager.directories:
            if directory.path == future.log_directory and offset is not None:
                with directory.cleaner_offsets_locked() as offsets:
                    offsets[which] = offset

    def _topic_of(self, future: FutureReplica) -> TopicView | None:
        """Return the topic of a copy; None: it does not exist any more."""
        for topic in self._topics.topics():
            if topic.name == future.topic:
                is_ours = (
                    future.partition < len(topic.partitions)
                    and not self._manager.is_elsewhere(topic)
                    and read_topic_id(future.path) in (None, topic.topic_id)
                )
                return topic if is_ours else None
        return None


class _Sizes(NamedTuple):
    """How many bytes of a segment's files are committed, or copied."""

    log: int
    offset_index: int
    time_index: int


_NOTHING: Final = _Sizes(0, 0, 0)
_SUFFIXES: Final = (LOG_SUFFIX, INDEX_SUFFIX, TIME_INDEX_SUFFIX)


class _OutOfTimeError(Exception):
    """The slice has ended; the rest is copied in the next one."""


class _Move:
    """One partition on its way to another log directory.

    Args:
        future: the copy.
        destination: the log directory that it is in.
        home: the path of the first log directory.

    Attributes:
        is_unknown: whether the topic was not known at the last look.
        is_put_off: whether an error that will pass has been logged.
    """

    def __init__(
        self, future: FutureReplica, destination: LogDirectory, home: str
    ) -> None:
        self.future = future
        self.is_unknown = False
        self.is_put_off = False
        self._destination = destination
        self._home = home
        self._lock_fd = -1  # of the flock
        self._copied: dict[int, _Sizes] = {}
        self._finished: set[int] = set()

    def go_on(
        self,
        log: PartitionLog,
        topic: TopicView,
        topics: Iterable[TopicView],
        until: float,
    ) -> bool:
        """Copy until a time, or until the copy is in place; return whether it is.

        Raises:
            FileNotFoundError: the copy was removed, or the topic is being deleted.
            ApiError, OSError: the move cannot be made.
        """
        if log.row.status == RowStatus.OFFLINE:
            return False  # the next start may bring it back
        log.view.state()
        log.view.follow()
        if os.path.dirname(log.directory) == self._destination.path:
            self.abandon()
            return True
        if not self._begin(log, topic.topic_id):
            return False
        try:
            while True:
                if not _is_flushed(log):
                    return False
                state = self._copy(log, until)
                self._copy_small_files(log)
                self._prepare_checkpoints(log, state, topics)
                if self._finish(log, until):
                    return True
                self._require_time(until)
        except _OutOfTimeError:
            return False
        finally:
            log.close()

    def _begin(self, log: PartitionLog, topic_id: bytes) -> bool:
        """Take the flock and empty the copy, unless this was done; False: not yet."""
        if self._lock_fd >= 0:
            return True
        fd = os.open(log.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        self._lock_fd = fd
        self._copied.clear()
        self._finished.clear()
        path = self.future.path
        # What a housekeeper before this one has copied takes the disk long to remove.
        for name in os.listdir(path):
            if name.endswith(_SUFFIXES):
                os.unlink(f"{path}/{name}")
        # Under the lock: a handler that was asked for the move may be making the
        # directory's files just now.
        with log.row.locked():
            for name in os.listdir(path):
                os.unlink(f"{path}/{name}")
            complete_directory(path, topic_id)
        logger.info("moving %s to %s", log.directory, self.future.log_directory)
        return True

    # -- the copy -------------------------------------------------------------------

    def _copy(self, log: PartitionLog, until: float) -> LogState:
        """Copy until at most LAST_BYTES are missing; return the state that is copied.

        Raises:
            _OutOfTimeError: the time is over.
        """
        view = log.view
        while True:
            state = view.state()
            view.refresh(state.active_base_offset)
            missing = self._extend(log, state, until)
            if missing <= LAST_BYTES:
                return state

    def _extend(self, log: PartitionLog, state: LogState, until: float | None) -> int:
        """Copy the log up to a committed state.

        Args:
            log: the partition; its list of segments is that of the state.
            state: the committed state.
            until: when to stop (s, monotonic); None: not before all is copied.

        Returns:
            How many bytes of the log were copied.

        Raises:
            _OutOfTimeError: the time is over.
        """
        added = 0
        bases = log.view.segments.bases
        for base in [base for base in self._copied if base not in bases]:
            # An empty one, which had no records when the log went on at a later offset.
            remove_segment(self.future.path, base)
            self._copied.pop(base)
            self._finished.discard(base)
        for base in bases:
            if base in self._finished:
                continue
            is_active = base == state.active_base_offset
            wanted = _active(state) if is_active else _closed(log.directory, base)
            before = self._copied.get(base, _NOTHING)
            self._extend_segment(log.directory, base, wanted, until)
            added += wanted.log - before.log
            self._copy_aborted(log.directory, base)
            if not is_active:
                self._keep_time(log.directory, base)
                self._finished.add(base)
        return added

    def _extend_segment(
        self, directory: str, base: int, wanted: _Sizes, until: float | None
    ) -> None:
        """Copy the parts of a segment's files that are not copied yet."""
        if base not in self._copied:
            segment = LogSegment(self.future.path, base)
            segment.create()
            segment.close()
            self._copied[base] = _NOTHING
        for number, suffix in enumerate(_SUFFIXES):
            done = self._copied[base]
            if done[number] == wanted[number]:
                continue
            source = segment_file(directory, base, suffix)
            copy = create_file(segment_file(self.future.path, base, suffix))
            try:
                at = done[number]
                while at < wanted[number]:
                    at = _copy_chunk(source, copy, at, wanted[number])
                    self._copied[base] = done = _with(done, number, at)
                    pulse.step()
                    if until is not None:
                        self._require_time(until)
            finally:
                os.close(copy)

    def _require_time(self, until: float) -> None:
        if time.monotonic() >= until:
            raise _OutOfTimeError
        if not os.path.isdir(self.future.path):
            raise FileNotFoundError(errno.ENOENT, "the move was cancelled")

    def _copy_aborted(self, directory: str, base: int) -> None:
        """Copy the index of aborted transactions: a few entries, if there is one."""
        source = segment_file(directory, base, TXN_INDEX_SUFFIX)
        if os.path.exists(source):
            _copy_file(source, segment_file(self.future.path, base, TXN_INDEX_SUFFIX))

    def _keep_time(self, directory: str, base: int) -> None:
        """Give a segment's copy the time by which retention and cleaners go."""
        found = os.stat(segment_file(directory, base, LOG_SUFFIX))
        times = found.st_atime_ns, found.st_mtime_ns
        os.utime(segment_file(self.future.path, base, LOG_SUFFIX), ns=times)

    def _copy_small_files(self, log: PartitionLog) -> None:
        """Copy producer snapshots, leader epochs and topic id; force all to disk."""
        path = self.future.path
        have = set(base_offsets(path, SNAPSHOT_SUFFIX))
        for offset in base_offsets(log.directory, SNAPSHOT_SUFFIX):
            if offset not in have:
                source = segment_file(log.directory, offset, SNAPSHOT_SUFFIX)
                _copy_file(source, segment_file(path, offset, SNAPSHOT_SUFFIX))
        for name in (LEADER_EPOCHS, PARTITION_METADATA):
            source = f"{log.directory}/{name}"
            if os.path.exists(source):
                _copy_file(source, f"{path}/{name}")
        sync_directory(path)

    # -- the end --------------------------------------------------------------------

    def _prepare_checkpoints(
        self, log: PartitionLog, state: LogState, topics: Iterable[TopicView]
    ) -> None:
        """Write the destination's checkpoints with this partition.

        Before the move: killed after it, the next start reads them. Killed before it,
        they have entries of a partition that is not there, which nobody reads.
        """
        note_use(self._home, self._destination.path)
        start, first = log.row.log_start_offset, log.view.segments.bases[0]
        self._destination.take_in(
            (self.future.topic, self.future.partition),
            state.log_end_offset,
            start if start != first else None,
            {topic.name: topic.topic_id for topic in topics},
        )

    def _finish(self, log: PartitionLog, until: float) -> bool:
        """Copy what is missing under the partition's lock, and put the copy in place.

        Returns:
            False: too much was appended meanwhile.

        Raises:
            _OutOfTimeError: another process syncs the log all the time.
            FileNotFoundError, ApiError, OSError: as ``go_on``.
        """
        view, row = log.view, log.row
        # No process may sync the old files while the new ones take their place: it
        # would call records durable that are on disk in the old ones only.
        while row.begin_sync(log.sync.process) is None:
            self._require_time(until)
            time.sleep(_LOOK_AGAIN_S)
        durable_end = 0
        try:
            with row.locked():
                view.require_online_locked()
                state = LogState._make(view.committed())
                view.refresh_locked(state.active_base_offset)
                if self._missing(log, state) > LAST_BYTES:
                    return False
                self._extend(log, state, None)
                # What was copied came from the page cache. It counts as durable from
                # here on, so the disk must not have refused it: an error that the old
                # files' sync would show is lost with them.
                log.sync.flush_owned(state.log_end_offset)
                self._copy_small_files(log)
                self._require_same_files(log)
                # Uncommitted bytes, which the copy does not have, must not make the
                # old log look longer.
                remove_uncommitted_segments(log.directory, state.active_base_offset)
                view.active.truncate(state.active_size)
                self._swap(log)
                durable_end = state.log_end_offset
        finally:
            waiters = row.end_sync(durable_end)
            if waiters and log.sync.notify is not None:
                log.sync.notify(row.index, waiters)
        logger.info("%s is in place, up to offset %d", log.directory, durable_end)
        return True

    def _missing(self, log: PartitionLog, state: LogState) -> int:
        """Return how many bytes of the log are not copied yet."""
        missing = 0
        for base in log.view.segments.bases:
            if base not in self._finished:
                is_active = base == state.active_base_offset
                wanted = _active(state) if is_active else _closed(log.directory, base)
                missing += wanted.log - self._copied.get(base, _NOTHING).log
        return missing

    def _require_same_files(self, log: PartitionLog) -> None:
        """Raise an error if the copy has not the segments that the log has.

        Raises:
            OSError: it has not, which is a bug; or a tiered log cannot be moved.
        """
        bases = base_offsets(self.future.path, LOG_SUFFIX)
        if bases != log.view.segments.bases or log.view.is_tiered:
            raise OSError(errno.EINVAL, f"{self.future.path} is no copy of it")

    def _swap(self, log: PartitionLog) -> None:
        """Put the copy in place. The caller has the lock, and owns the log's sync.

        Raises:
            OSError: a directory cannot be renamed; the partition is where it was.
        """
        row = log.row
        # Odd from here on: readers wait for the lock. If this process is killed, the
        # next owner of the lock finishes the move if the copy has the plain name.
        row.structure_version += 1
        try:
            put_in_place(self.future.path, log.directory)
        except OSError:
            if os.path.isdir(self.future.path):
                row.structure_version += 1
            raise
        # Even, and another version: all processes find the directory again.
        row.structure_version += 1
        log.view.follow()

    def abandon(self) -> None:
        """Remove the copy; the partition stays where it is."""
        path = self.future.path
        try:
            gone = rename_away(path, DELETE_DIRECTORY_SUFFIX)
        except FileNotFoundError:
            pass
        except OSError as error:
            logger.error("%s cannot be removed: %s", path, error)
        else:
            remove_flat(gone)  # at once: perhaps the disk is full
        self.close()

    def close(self) -> None:
        """Let cleaners and retention have the partition again.

        If the move goes on, it begins anew.
        """
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            # A child may have the descriptor, too.
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)


def _errno_of(error: OSError | MpbrokerError) -> int | None:
    cause = error if isinstance(error, OSError) else error.__cause__
    return cause.errno if isinstance(cause, OSError) else None


def _is_flushed(log: PartitionLog) -> bool:
    """Force a log to disk, so that little is left to force under its lock.

    Return False if another process's sync of it does not end: look again later.

    Raises:
        ApiError: the disk has refused a part of the log, which is offline now.
    """
    try:
        log.sync.flush()
    except ApiError:
        log.view.require_online()
        return False
    return True


def _active(state: LogState) -> _Sizes:
    """Return the committed bytes of the active segment's files."""
    return _Sizes(
        state.active_size,
        state.index_entries * OFFSET_ENTRY_BYTES,
        state.time_index_entries * TIME_ENTRY_BYTES,
    )


def _closed(directory: str, base: int) -> _Sizes:
    """Return the bytes of the files of a segment that is not active."""
    return _Sizes(*(file_size(segment_file(directory, base, s)) for s in _SUFFIXES))


def _with(sizes: _Sizes, number: int, size: int) -> _Sizes:
    return _Sizes(*(size if n == number else old for n, old in enumerate(sizes)))


def _copy_chunk(source: str, copy: int, at: int, end: int) -> int:
    """Copy some bytes of a file to the same place, and force them to disk.

    Args:
        source: the file.
        copy: the descriptor of the copy.
        at: where to begin.
        end: where to end at the latest.

    Returns:
        The position behind the last byte.
    """
    fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.pread(fd, min(CHUNK_BYTES, end - at), at)
    finally:
        os.close(fd)
    if not data:
        raise OSError(errno.EIO, f"{source} is shorter than {end} bytes")
    write_whole(copy, data, at)
    os.fdatasync(copy)
    return at + len(data)


def _copy_file(source: str, copy: str) -> None:
    with open(source, "rb") as file:
        write_file(copy, file.read())

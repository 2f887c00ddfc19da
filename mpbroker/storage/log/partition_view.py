"""PartitionView: a partition's shared row and segment files, as one process knows them.

The row (the partition's entry in shared memory) has the committed state: what all
processes take as appended. The list of segments is read from the directory and
kept. It is outdated when the row names another active segment (some process has
rolled), or another structure version (retention or compaction has removed or replaced
files).

The structure version is odd while files are being changed, under the row's lock. A
process that sees an odd version waits for the lock. If the version is still odd then,
the process that changed the files was killed, and the new owner finishes the change.
"""

import errno
import os
import time
from collections.abc import Callable, Sequence
from struct import Struct
from typing import TYPE_CHECKING, Final, NoReturn, TypeVar

from mpbroker.base.config_def import LONG_MAX
from mpbroker.base.logger import get_logger
from mpbroker.base.storage_errors import CorruptLogError
from mpbroker.ipc.layout import (
    ROW_COPIES,
    ROW_COPY_WORDS,
    ROW_LOG_START_OFFSET,
    ROW_STATUS,
    ROW_STRUCTURE,
    ROW_VERSION,
    RowStatus,
)
from mpbroker.ipc.tables.partition_table import LogState, PartitionRow
from mpbroker.metadata.log_config import LogConfig
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.storage.files.leader_epochs import LeaderEpochs, read_leader_epochs
from mpbroker.storage.files.log_files import (
    LOG_SUFFIX,
    REMOTE_MANIFEST_FILE,
    SWAP_SUFFIX,
    base_offsets,
    mark_offline,
)
from mpbroker.storage.files.log_segment import LogSegment
from mpbroker.storage.files.segment_list import SegmentList
from mpbroker.storage.full_directories import NO_ROOM
from mpbroker.storage.log.core_plans import AppendPlan, Positions
from mpbroker.storage.log.log_loader import LoadHints, finish_swap, load_log
from mpbroker.storage.producers.producer_state import ProducerState

if TYPE_CHECKING:
    from mpbroker.storage.remote.remote_log import RemoteLog
    from mpbroker.storage.remote.remote_manifest import RemoteSegment

logger = get_logger(__name__)
_T = TypeVar("_T")

STATE: Final = Struct(f"{len(LogState._fields)}q")
# Indexes of LogState's fields in a plain tuple of them. Appends and reads use such
# tuples: an index costs a third of an attribute. The compiled core has the same names
# (enum state_word).
END_OFFSET: Final = LogState._fields.index("log_end_offset")
ACTIVE_BASE: Final = LogState._fields.index("active_base_offset")
ACTIVE_SIZE: Final = LogState._fields.index("active_size")
INDEX_ENTRIES: Final = LogState._fields.index("index_entries")
TIME_INDEX_ENTRIES: Final = LogState._fields.index("time_index_entries")
BYTES_SINCE_INDEX: Final = LogState._fields.index("bytes_since_index")
MAX_TIMESTAMP: Final = LogState._fields.index("max_timestamp")
MAX_TIMESTAMP_OFFSET: Final = LogState._fields.index("max_timestamp_offset")
FIRST_UNSTABLE: Final = LogState._fields.index("first_unstable_offset")
CREATED_MS: Final = LogState._fields.index("segment_created_ms")
BYTES_IN: Final = LogState._fields.index("bytes_in")

ONLINE: Final = int(RowStatus.ONLINE)  # a member costs more to compare
UNKNOWN_TIME: Final = -(1 << 62)
_POSITIONS_KEPT: Final = 64
# Errors that may pass, such as a full disk: the partition stays online.
_PASSING: Final = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.ENOENT,
    }
)


class PartitionView:
    """The state that all parts of a PartitionLog share, and code to keep it current.

    Attributes:
        directory: the partition's directory; it exists.
        row: the partition's shared row.
        config: the topic's settings; a new object takes its place when they change.
        hints: the partition's entries in the log directory's checkpoint files, as they
            were when the broker started.
        segments: the partition's segments, as of ``structure`` and ``active_base``.
        active: the active segment; ``active_base`` is its base offset.
        structure: the row's structure version that ``segments`` was read at.
        positions: segment and position (in bytes) by offset, for the offsets that
            sequential readers will ask for next. The compiled core has a reference to
            this dict, so it is cleared, and never replaced by another one.
        has_readers: a fetch in this process has read the partition.
        producers: this process's copy of the producers' state; None: not read yet.
        producers_position: the position of ``producers.end_offset`` in the active
            segment; -1: it is in another segment, or not known.
        roll_after: a batch with a later timestamp (ms) starts a new segment;
            UNKNOWN_TIME: the active segment's first batch has not been read yet.
        append_plan: the compiled core's plan of appends; None: it has none yet.
        locate: returns the directory that the partition is in now, given the one that
            it was in, and whether the caller has the row's lock: a move to another log
            directory whose process was killed is then finished first. None: there is
            one log directory.
        release_descriptors: called when this process has no free file descriptor;
            closes the files of all logs.
        note_full: called with ``directory`` when its file system has no room; returns
            whether the housekeeper will say so in the log. None: nobody will.
    """

    def __init__(
        self,
        directory: str,
        row: PartitionRow,
        config: LogConfig,
        hints: LoadHints | None = None,
    ) -> None:
        self.directory = directory
        self.row = row
        self.config = config
        self.hints = hints or LoadHints()
        self.words = row.words
        self.bytes = row.words.cast("B")
        self.version_word = row.base + ROW_VERSION
        self.status_word = row.base + ROW_STATUS
        self.start_word = row.base + ROW_LOG_START_OFFSET
        self.structure_word = row.base + ROW_STRUCTURE
        copies = (row.base + ROW_COPIES) * 8
        self.copy_bytes = (copies, copies + ROW_COPY_WORDS * 8)
        self.segments = SegmentList(directory)
        self.structure = -1
        # The row's structure version before the last listing, also if that failed.
        self._listed_at = -1
        self.active_base = -1
        self.active: LogSegment = self.segments.get(0)
        self.positions: Positions = {}
        self.has_readers = False
        self.producers: ProducerState | None = None
        self.producers_position = -1
        self.roll_after = UNKNOWN_TIME
        self.append_plan: AppendPlan | None = None
        self.release_descriptors: Callable[[], None] | None = None
        self.locate: Callable[[str, bool], str] | None = None
        self.note_full: Callable[[str], bool] | None = None
        self._epochs: LeaderEpochs | None = None
        self._remote: RemoteLog | None = None

    # -- the row -----------------------------------------------------------------

    def committed(self) -> tuple[int, ...]:
        """Return the committed LogState as a plain tuple. This needs no lock."""
        words, version_word = self.words, self.version_word
        while True:
            version = words[version_word]
            state = STATE.unpack_from(self.bytes, self.copy_bytes[version & 1])
            # A commit writes the other copy. This one is rewritten only after the
            # version has moved: if it has not, all fields belong together.
            if words[version_word] == version:
                return state

    def state(self) -> LogState:
        """Return the log's committed state (its end offset...), from shared memory.

        The partition is loaded first if no process has done so.

        Raises:
            ApiError: as ``require_online``.
        """
        self.require_online()
        return LogState._make(self.committed())

    def require_online(self) -> None:
        """Load the partition if no process has done so; raise an error if it failed.

        Raises:
            ApiError: KAFKA_STORAGE_ERROR if its storage failed,
                UNKNOWN_TOPIC_OR_PARTITION if it was deleted.
        """
        if self.words[self.status_word] != ONLINE:
            with self.row.locked():
                self.require_online_locked()

    def require_online_locked(self) -> None:
        """Do as ``require_online`` does; the caller holds the partition's lock."""
        status = self.words[self.status_word]
        if status == RowStatus.UNLOADED:
            self._load_locked()
        elif status == RowStatus.OFFLINE:
            raise ApiError(
                ErrorCode.KAFKA_STORAGE_ERROR, f"{self.directory} is offline"
            )
        elif status == RowStatus.DELETED:
            raise ApiError(
                ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"{self.directory} was deleted"
            )

    def _load_locked(self) -> None:
        row = self.row
        try:
            loaded = self.with_room(
                lambda: load_log(
                    self.directory,
                    self.hints,
                    index_interval_bytes=self.config.index_interval_bytes,
                    now_ms=time.time_ns() // 1_000_000,
                )
            )
        except CorruptLogError as error:
            row.status = RowStatus.OFFLINE
            self.fail(error, "cannot be loaded")
        except OSError as error:
            self.fail(error, "cannot be loaded")
        if loaded.truncated_bytes:
            logger.warning(
                "%s: cut off %d bytes that are not whole batches; the log now ends at"
                " offset %d",
                self.directory,
                loaded.truncated_bytes,
                loaded.state.log_end_offset,
            )
        row.publish(loaded.state._replace(bytes_in=row.snapshot().bytes_in))
        row.log_start_offset = loaded.log_start_offset
        row.durable_end_offset = loaded.state.log_end_offset
        # Even, and not the same as before: loading may have removed or replaced files
        # that another process has listed.
        row.structure_version = (row.structure_version | 1) + 1
        # Last: until here the partition is unloaded for all other processes, and they
        # wait for the lock. If this process is killed before this store, the next owner
        # of the lock loads the partition again, from the files.
        row.status = RowStatus.ONLINE
        self.producers = loaded.producers

    @property
    def leader_epoch(self) -> int:
        """The leader epoch of new batches. Reading it raises what ``epochs`` raises."""
        return self.epochs.latest

    @property
    def epochs(self) -> LeaderEpochs:
        """The partition's leader epochs, read from their file at the first use.

        Raises:
            ApiError: KAFKA_STORAGE_ERROR: the file cannot be read. The partition stays
                online, because its log may be in order.
        """
        if self._epochs is None:
            try:
                self._epochs = self.with_room(
                    lambda: read_leader_epochs(self.directory)
                )
            except OSError as error:
                raise ApiError(
                    ErrorCode.KAFKA_STORAGE_ERROR,
                    f"{self.directory}: its leader epochs cannot be read: {error}",
                ) from error
        return self._epochs

    @property
    def known_epoch(self) -> int:
        """The leader epoch of new batches; -1 if its file has not been read yet."""
        return -1 if self._epochs is None else self._epochs.latest

    @property
    def remote(self) -> "RemoteLog":
        """The partition's segments in the remote store."""
        if self._remote is None:
            # Imported here: most partitions have none.
            from mpbroker.storage.remote.remote_log import RemoteLog

            self._remote = RemoteLog(self.directory)
        return self._remote

    def remote_segments(self) -> "list[RemoteSegment]":
        """Return the partition's segments in the remote store, by ascending offsets.

        The list is empty for a partition without remote segments.

        Raises:
            ApiError: KAFKA_STORAGE_ERROR: the manifest is damaged.
            OSError: the manifest cannot be read.
        """
        return self.remote.segments() if self.is_tiered else []

    @property
    def is_tiered(self) -> bool:
        """Whether segments of the partition were ever copied to the remote store."""
        return os.path.exists(f"{self.directory}/{REMOTE_MANIFEST_FILE}")

    # -- failures ----------------------------------------------------------------

    def fail(self, error: Exception, what: str, *, is_lost: bool = False) -> NoReturn:
        """Log a storage failure, and raise it as the error that the client gets.

        An error of the disk takes the partition offline. A missing or damaged file
        does not: this process may have looked at an outdated file, and the rest of the
        partition can still be served.

        Args:
            error: the failure.
            what: the end of the sentence "<directory> ...", such as "cannot be read".
            is_lost: whether the disk may lack bytes that were written. If so, the
                partition goes offline, whatever the error is.

        Raises:
            ApiError: KAFKA_STORAGE_ERROR, always.
        """
        if is_lost or (isinstance(error, OSError) and error.errno not in _PASSING):
            # Without the lock, which this process may hold.
            if self.row.status != RowStatus.DELETED:
                self.row.status = RowStatus.OFFLINE
            logger.error("%s %s and is now offline: %s", self.directory, what, error)
            self.mark_offline(error)
        elif not self._is_noted_as_full(error):
            logger.error("%s %s: %s", self.directory, what, error)
        raise ApiError(
            ErrorCode.KAFKA_STORAGE_ERROR, f"{self.directory} {what}: {error}"
        ) from error

    def _is_noted_as_full(self, error: Exception) -> bool:
        """Note a full file system; return whether the housekeeper tells of it, once.

        Producers try again many times a second: a line for each attempt would fill the
        log, and perhaps the same disk.
        """
        return (
            isinstance(error, OSError)
            and error.errno in NO_ROOM
            and self.note_full is not None
            and self.note_full(self.directory)
        )

    def mark_offline(self, why: object) -> None:
        """Note in the directory, for the next start, that the disk has failed.

        The partition's status in shared memory must be OFFLINE before: writing the file
        may take long, and no request may succeed meanwhile.
        """
        if self.row.status == RowStatus.OFFLINE:  # not if it was deleted
            mark_offline(self.directory, str(why))

    @property
    def is_outdated(self) -> bool:
        """Whether files were changed since this process listed them, or all removed."""
        return (
            self.words[self.structure_word] != self.structure
            or self.row.status == RowStatus.DELETED
        )

    def moved_or_fail(self, error: Exception) -> None:
        """Return if files were changed meanwhile; else raise ``error`` as a failure.

        The caller has found a file missing or damaged. If this returns, another process
        has removed or replaced files since they were listed, and the caller tries
        again.

        Raises:
            ApiError: KAFKA_STORAGE_ERROR: no file was changed, so this one is damaged;
                UNKNOWN_TOPIC_OR_PARTITION: the partition was deleted.
        """
        self.require_online()
        structure = self.words[self.structure_word]
        # Odd: files were being changed when the listing began.
        if structure == self.structure or (
            structure == self._listed_at and not structure & 1
        ):
            self.fail(error, "cannot be read")

    def descriptors_released(self, error: BaseException) -> bool:
        """Close the files of all logs if ``error`` is EMFILE: no descriptor is free.

        Returns:
            Whether files were closed, so that another attempt may succeed.
        """
        release = self.release_descriptors
        cause = error.__cause__ if isinstance(error, ApiError) else error
        if release is None or not isinstance(cause, OSError):
            return False
        if cause.errno != errno.EMFILE:
            return False
        release()
        return True

    def with_room(self, run: Callable[[], _T]) -> _T:
        """Call ``run``; if no descriptor was free, close files and call it again."""
        try:
            return run()
        except (OSError, ApiError) as error:
            if not self.descriptors_released(error):
                raise
        return run()

    def make_room(self) -> None:
        """Close the files of all logs of this process, to free file descriptors."""
        if self.release_descriptors is not None:
            self.release_descriptors()

    # -- the segments --------------------------------------------------------------

    def refresh(self, active_base: int) -> None:
        """Read the partition's segments from its directory again, without its lock.

        Args:
            active_base: the active segment's base offset, from the committed state.
        """
        while True:
            while self.words[self.structure_word] & 1:
                with self.row.locked():
                    self.repair_structure()
            self._reload(active_base)
            # Odd: another change has begun in between, and the files that were listed
            # may be those of both sides of it.
            if not self.structure & 1:
                return

    def refresh_locked(self, active_base: int) -> None:
        """Do as ``refresh`` does; the caller holds the partition's lock."""
        self.repair_structure()
        self._reload(active_base)

    def repair_structure(self) -> None:
        """Finish a change of files whose process was killed. The caller holds the lock.

        A live process holds the lock as long as the structure version is odd. So if the
        version is odd while this process holds the lock, the other process is dead. A
        compaction that has a complete copy (`.log.swap`) is finished, and so is a move
        to another log directory. A deletion is left to the next retention run. Then the
        version is made even.
        """
        row = self.row
        if not row.structure_version & 1:
            return
        self._follow(is_locked=True)
        for base in base_offsets(self.directory, LOG_SUFFIX + SWAP_SUFFIX):
            finish_swap(self.directory, base)
        # Last. If this process is killed before this store, the version is still odd,
        # and the next owner of the lock does the rest.
        row.structure_version += 1

    def _reload(self, active_base: int) -> None:
        # Read the version first. If files are replaced while the directory is listed,
        # the version moves, and the reader sees that when it compares it afterwards.
        structure = self._listed_at = self.words[self.structure_word]
        if structure != self.structure:
            self._follow()
        self.segments.reload(active_base, keep_open=structure == self.structure)
        self.structure = structure
        if active_base != self.active_base:
            self._leave_active()
        self.active_base = active_base
        self.active = self.segments.get(active_base)
        self.positions.clear()

    def follow(self) -> None:
        """Find the directory again if files were changed since they were listed.

        Raises:
            ApiError: KAFKA_STORAGE_ERROR: a log directory cannot be read.
        """
        if self.words[self.structure_word] != self.structure:
            try:
                self._follow()
            except OSError as error:
                raise ApiError(
                    ErrorCode.KAFKA_STORAGE_ERROR,
                    f"{self.directory} cannot be found: {error}",
                ) from error

    def _follow(self, *, is_locked: bool = False) -> None:
        """Go on in the log directory that the partition was moved to, if it was."""
        if self.locate is None:
            return
        directory = self.locate(self.directory, is_locked)
        if directory != self.directory:
            # The copy has the same bytes at the same positions.
            self.close()
            self.directory = self.segments.directory = directory
            self._remote = None

    def look(self, look: Callable[[LogState], _T]) -> _T:
        """Call the function ``look`` with the committed state, on files that match it.

        The call is repeated if other processes have changed the files meanwhile.

        Returns:
            The result of the last call.

        Raises:
            ApiError: as ``require_online``; KAFKA_STORAGE_ERROR if a file is damaged or
                missing, or the disk fails.
        """
        made_room = False
        while True:
            state = self.state()
            try:
                self.refresh(state.active_base_offset)
                found = look(state)
            except (FileNotFoundError, CorruptLogError) as error:
                self.moved_or_fail(error)
                continue
            except OSError as error:
                if not made_room and self.descriptors_released(error):
                    made_room = True
                    continue
                self.fail(error, "cannot be read")
            if self.words[self.structure_word] == self.structure:
                return found

    def begin_segment(self, segment: LogSegment) -> None:
        """Use a segment that this process has just made as the active one.

        The indexes of the segment before it are closed.
        """
        self.active.close_indexes()
        self.segments.add(segment)
        self.active, self.active_base = segment, segment.base_offset
        self.positions.clear()
        self._leave_active()

    def _leave_active(self) -> None:
        """Forget what holds for the active segment only; another one takes its place.

        This is the position of the producers' state, and the time of the next roll.
        """
        self.take_over_from_core()
        self.producers_position = -1
        self.roll_after = UNKNOWN_TIME
        if self.append_plan is not None:
            self.append_plan.producers_end = -1

    def close_unless_active(self, segment: LogSegment) -> None:
        """Close a segment's files after use, unless it is the active segment."""
        if segment is not self.active:
            segment.close()

    def close(self) -> None:
        """Close the segments' files. They open again when needed."""
        self.segments.close()
        self.positions.clear()
        self.structure = -1
        self.active_base = -1

    def size_in_bytes(self) -> int:
        """Return the sum of the committed bytes of all segments' `.log` files.

        Raises:
            ApiError: as ``look``.
        """
        return self.look(
            lambda state: self.segments.sizes(
                state.active_base_offset, state.active_size
            )
        )

    def first_base_offset(self) -> int:
        """Return the base offset of the oldest segment on this machine's disk."""
        self.refresh(self.committed()[ACTIVE_BASE])
        return self.segments.bases[0]

    # -- state that the compiled core shares ---------------------------------------

    def remember(self, offset: int, segment: LogSegment, position: int) -> None:
        """Note at which position (in bytes) a batch begins, for the next fetch.

        ``offset`` may be the end of the log, where the next batch will be appended.
        """
        positions = self.positions
        if len(positions) >= _POSITIONS_KEPT:
            positions.clear()
        positions[offset] = segment, position

    def remember_append(
        self, state: Sequence[int], added: int, end_offset: int
    ) -> None:
        """Note the position of a batch that this process has just appended.

        If the producers' state is complete up to the batch, it is moved behind it.

        Args:
            state: the state that was committed before; the batch begins at its end.
            added: the batch's size in bytes.
            end_offset: the offset after the batch.
        """
        base_offset, position = state[END_OFFSET], state[ACTIVE_SIZE]
        # A waiting fetch will begin to read here. The same code as ``remember``: a call
        # would cost more.
        positions = self.positions
        if len(positions) >= _POSITIONS_KEPT:
            positions.clear()
        positions[base_offset] = self.active, position
        producers = self.producers
        if producers is not None and producers.end_offset == base_offset:
            producers.end_offset = end_offset
            self.producers_position = position + added
        if self.append_plan is not None:
            self.tell_core(self.append_plan)

    def expect_readers(self) -> None:
        """Have the compiled core note the positions of its appends from now on.

        A fetch has read the partition: waiting fetches will begin at these positions.
        """
        self.has_readers = True
        if self.append_plan is not None:
            self.append_plan.positions = self.positions

    def take_over_from_core(self) -> None:
        """Note up to which offset the compiled core has updated the producers' state.

        The core has appended batches, or read those of other processes, and has applied
        all of them to ``producers``. But it has noted the new end only in its plan.
        """
        plan, producers = self.append_plan, self.producers
        if (
            plan is not None
            and producers is not None
            and plan.producers_end > producers.end_offset
        ):
            producers.end_offset = plan.producers_end
            self.producers_position = plan.producers_position

    def tell_core(self, plan: AppendPlan) -> None:
        """Fill in an AppendPlan, so that the compiled core can make the next append.

        It gets the active segment and the producers' state.
        """
        plan.segment = self.active
        plan.active_base = self.active_base
        plan.structure = self.structure
        plan.roll_after = min(self.roll_after, LONG_MAX)
        producers = plan.producers = self.producers
        plan.producers_end = -1 if producers is None else producers.end_offset
        plan.producers_position = self.producers_position

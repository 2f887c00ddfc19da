"""PartitionView: a partition's shared row and segment files, as one process knows them.

The row has the committed state. The list of segments is read from the directory and
kept. It is outdated when the row names another active segment (some process has
rolled), or another structure version (retention or compaction has removed or replaced
files).

The structure version is odd while files are being changed, under the row's lock. A
process that sees an odd version waits for the lock. If it is still odd then, the
process that changed the files was killed, and the new owner finishes the change.
"""

import errno
import time
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Final, NoReturn, TypeVar

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
    SWAP_SUFFIX,
    base_offsets,
    mark_offline,
)
from mpbroker.storage.files.log_segment import LogSegment
from mpbroker.storage.files.segment_list import SegmentList
from mpbroker.storage.log.core_plans import AppendPlan, Positions
from mpbroker.storage.log.log_loader import LoadHints, finish_swap, load_log
from mpbroker.storage.producers.producer_state import ProducerState

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
        hints: what the log directory's checkpoint files said at the start.
        segments: the partition's segments, as of ``structure`` and ``active_base``.
        active: the active segment; ``active_base`` is its base offset.
        structure: the row's structure version that ``segments`` was read at.
        positions: segment and position by offset, for the offsets that sequential
            readers will ask for next. The compiled core has a reference to this dict,
            so it is cleared, and never replaced by another one.
        has_readers: a fetch in this process has read the partition.
        producers: this process's copy of the producers' state; None: not read yet.
        producers_position: the position of ``producers.end_offset`` in the active
            segment; -1: it is in another segment, or not known.
        roll_after: a batch with a later timestamp (ms) starts a new segment;
            UNKNOWN_TIME: the active segment's first batch has not been read yet.
        append_plan: the compiled core's plan of appends; None: it has none yet.
        release_descriptors: called when this process has no free file descriptor;
            closes the files of all logs.
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
        self.active_base = -1
        self.active: LogSegment = self.segments.get(0)
        self.positions: Positions = {}
        self.has_readers = False
        self.producers: ProducerState | None = None
        self.producers_position = -1
        self.roll_after = UNKNOWN_TIME
        self.append_plan: AppendPlan | None = None
        self.release_descriptors: Callable[[], None] | None = None
        self._epochs: LeaderEpochs | None = None

    # -- the row -----------------------------------------------------------------

    def committed(self) -> tuple[int, ...]:
        """Return the committed LogState as a plain tuple, without the lock."""
        words, version_word = self.words, self.version_word
        while True:
            version = words[version_word]
            state = STATE.unpack_from(self.bytes, self.copy_bytes[version & 1])
            # A commit writes the other copy. This one is rewritten only after the
            # version has moved: if it has not, all fields belong together.
            if words[version_word] == version:
                return state

    def state(self) -> LogState:
        """Return the committed state; load the partition first if no process has.

        Raises:
            ApiError: as ``require_online``.
        """
        self.require_online()
        return LogState._make(self.committed())

    def require_online(self) -> None:
        """Load the partition if no process has done so yet.

        Raises:
            ApiError: KAFKA_STORAGE_ERROR if its storage failed,
                UNKNOWN_TOPIC_OR_PARTITION if it was deleted.
        """
        if self.words[self.status_word] != ONLINE:
            with self.row.locked():
                self.require_online_locked()

    def require_online_locked(self) -> None:
        """Do as ``require_online``, for a caller that has the row's lock."""
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
        """The leader epoch of new batches; raises as ``epochs``."""
        return self.epochs.latest

    @property
    def epochs(self) -> LeaderEpochs:
        """The partition's leader epochs, read once.

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
        """The leader epoch if it has been read; -1 if not."""
        return -1 if self._epochs is None else self._epochs.latest

    # -- failures ----------------------------------------------------------------

    def fail(self, error: Exception, what: str, *, is_lost: bool = False) -> NoReturn:
        """Log a storage failure, and raise it as an answer to the client.

        An error of the disk takes the partition offline. A missing or damaged file
        does not: this process may have looked at an outdated file, and the rest of the
        partition can still be served.

        Args:
            error: the failure.
            what: the end of the sentence "<directory> ...", such as "cannot be read".
            is_lost: the disk may lack what was written, whatever the error is.

        Raises:
            ApiError: KAFKA_STORAGE_ERROR, always.
        """
        if is_lost or (isinstance(error, OSError) and error.errno not in _PASSING):
            # Without the lock, which this process may hold.
            if self.row.status != RowStatus.DELETED:
                self.row.status = RowStatus.OFFLINE
            logger.error("%s %s and is now offline: %s", self.directory, what, error)
            self.mark_offline(error)
        else:
            logger.error("%s %s: %s", self.directory, what, error)
        raise ApiError(
            ErrorCode.KAFKA_STORAGE_ERROR, f"{self.directory} {what}: {error}"
        ) from error

    def mark_offline(self, why: object) -> None:
        """Note for the next start that the disk has failed, after the row says so.

        In this order: the mark may take long, and nothing more may be answered.
        """
        if self.row.status == RowStatus.OFFLINE:  # not if it was deleted
            mark_offline(self.directory, str(why))

    def moved_or_fail(self, error: Exception) -> None:
        """Decide whether a file is missing or damaged only because files were changed.

        If this returns, another process has removed or replaced files: try again.

        Raises:
            ApiError: KAFKA_STORAGE_ERROR: no file was changed, so this one is damaged;
                UNKNOWN_TOPIC_OR_PARTITION: the partition was deleted.
        """
        self.require_online()
        if self.words[self.structure_word] == self.structure:
            self.fail(error, "cannot be read")

    def descriptors_released(self, error: BaseException) -> bool:
        """Close files if an error was for want of file descriptors.

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
        """Read the list of segments again, without the lock.

        Args:
            active_base: the active segment's base offset, from the committed state.
        """
        while self.words[self.structure_word] & 1:
            with self.row.locked():
                self.repair_structure()
        self._reload(active_base)

    def refresh_locked(self, active_base: int) -> None:
        """Read the list of segments again. The caller holds the lock."""
        self.repair_structure()
        self._reload(active_base)

    def repair_structure(self) -> None:
        """Finish a change of files whose process was killed. The caller holds the lock.

        A live process holds the lock as long as the version is odd. So if it is odd
        while this process holds the lock, the other one is dead. A deletion needs no
        more than an even version: the next retention run goes on with it. A compaction
        that has a complete copy (`.log.swap`) is finished.
        """
        row = self.row
        if not row.structure_version & 1:
            return
        for base in base_offsets(self.directory, LOG_SUFFIX + SWAP_SUFFIX):
            finish_swap(self.directory, base)
        # Last. If this process is killed before this store, the version is still odd,
        # and the next owner of the lock does the rest.
        row.structure_version += 1

    def _reload(self, active_base: int) -> None:
        # Read the version first. If files are replaced while the directory is listed,
        # the version moves, and the reader sees that when it compares it afterwards.
        structure = self.words[self.structure_word]
        self.segments.reload(active_base, keep_open=structure == self.structure)
        self.structure = structure
        if active_base != self.active_base:
            self._leave_active()
        self.active_base = active_base
        self.active = self.segments.get(active_base)
        self.positions.clear()

    def look(self, look: Callable[[LogState], _T]) -> _T:
        """Call ``look`` with the committed state, on files that match it.

        It is called again if other processes have changed the files meanwhile.

        Returns:
            The result of ``look``.

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
        """Continue in a segment that this process has just made the active one."""
        self.active.close_indexes()
        self.segments.add(segment)
        self.active, self.active_base = segment, segment.base_offset
        self.positions.clear()
        self._leave_active()

    def _leave_active(self) -> None:
        """Forget all that applies only to the segment that was active until now."""
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
        """Return the committed bytes of all segments' logs.

        Raises:
            ApiError: as ``require_online``; KAFKA_STORAGE_ERROR if a file is missing.
        """
        while True:
            state = self.state()
            self.refresh(state.active_base_offset)
            try:
                return self.segments.sizes(state.active_base_offset, state.active_size)
            except FileNotFoundError as error:
                self.moved_or_fail(error)

    def first_base_offset(self) -> int:
        """Return the base offset of the oldest segment."""
        self.refresh(self.committed()[ACTIVE_BASE])
        return self.segments.bases[0]

    # -- state that the compiled core shares ---------------------------------------

    def remember(self, offset: int, segment: LogSegment, position: int) -> None:
        """Note the position of the batch at an offset, or where it will be appended."""
        positions = self.positions
        if len(positions) >= _POSITIONS_KEPT:
            positions.clear()
        positions[offset] = segment, position

    def remember_append(
        self, state: Sequence[int], added: int, end_offset: int
    ) -> None:
        """Note the position of a batch that this process has just appended.

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
        """Have the core note the positions of its appends, from now on, for readers."""
        self.has_readers = True
        if self.append_plan is not None:
            self.append_plan.positions = self.positions

    def take_over_from_core(self) -> None:
        """Move the end of the producers' state to where the compiled core has it.

        The core has appended batches, or read those of other processes. It has already
        applied all batches of producers among them to ``producers``.
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
        """Put the position of the next append into a plan, after an append."""
        plan.segment = self.active
        plan.active_base = self.active_base
        plan.structure = self.structure
        plan.roll_after = min(self.roll_after, LONG_MAX)
        producers = plan.producers = self.producers
        plan.producers_end = -1 if producers is None else producers.end_offset
        plan.producers_position = self.producers_position

"""One process's view of a partition: its shared row and its segment files.

The row says what is committed. The list of segments is read from the directory and
kept. It is stale when the row names another active segment (some process has rolled) or
another structure version (retention or compaction has removed or replaced files). The
structure version is odd while files are being changed: a process that sees that waits
for the row's lock, and finishes the change if the process that began it has died.
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
from mpbroker.storage.files.log_files import LOG_SUFFIX, SWAP_SUFFIX, base_offsets
from mpbroker.storage.files.log_segment import LogSegment
from mpbroker.storage.files.segment_list import SegmentList
from mpbroker.storage.log.core_plans import AppendPlan, Positions
from mpbroker.storage.log.log_loader import LoadHints, finish_swap, load_log
from mpbroker.storage.producers.producer_state import ProducerState

logger = get_logger(__name__)
_T = TypeVar("_T")

STATE: Final = Struct(f"{len(LogState._fields)}q")
# Where LogState's fields are in the plain tuples and lists of it that an append and a
# read work on: to index one costs a third of an attribute. The names are those of the
# compiled core (enum state_word).
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
# Errors that a later attempt may not meet: the partition stays online.
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
    """The state that all parts of a PartitionLog share, and what keeps it current.

    Attributes:
        directory: the partition's directory; it exists.
        row: the partition's shared row.
        config: the topic's settings; a new object takes its place when they change.
        hints: what the log directory's checkpoint files said at the start.
        segments: the partition's segments, as of ``structure`` and ``active_base``.
        active: the active segment; ``active_base`` is its base offset.
        structure: the row's structure version that ``segments`` was read at.
        positions: where the batches stand that sequential readers will ask for next.
            The compiled core has the same dict: it is cleared, and never replaced.
        has_readers: some fetch of this process has read the partition.
        producers: this process's copy of the producers' state; None: not read yet.
        producers_position: where ``producers.end_offset`` is in the active segment;
            -1: in another segment, or not known.
        roll_after: a batch with a later timestamp (ms) starts a segment; UNKNOWN_TIME:
            the active segment has not been asked yet.
        append_plan: what the compiled core appends by; None: it has not asked for it.
        release_descriptors: called when this process has no descriptor left; closes
            the files of other logs.
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
            # Unmoved version: nobody was rewriting this copy while we read it.
            if words[version_word] == version:
                return state

    def state(self) -> LogState:
        """Return the committed state; load the partition first if that is left to do.

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
                "%s: cut %d bytes that are no whole batches; it ends at offset %d",
                self.directory,
                loaded.truncated_bytes,
                loaded.state.log_end_offset,
            )
        row.publish(loaded.state._replace(bytes_in=row.snapshot().bytes_in))
        row.log_start_offset = loaded.log_start_offset
        row.durable_end_offset = loaded.state.log_end_offset
        # Even, and another one than before: the files are not those that some process
        # may have listed.
        row.structure_version = (row.structure_version | 1) + 1
        # Last: until here every other process takes the partition for unloaded, and
        # comes for the lock. If we die before this store, the next one loads again.
        row.status = RowStatus.ONLINE
        self.producers = loaded.producers

    @property
    def leader_epoch(self) -> int:
        """The epoch that new batches are of; raises as ``epochs``."""
        return self.epochs.latest

    @property
    def epochs(self) -> LeaderEpochs:
        """The partition's leader epochs, read once.

        Raises:
            ApiError: KAFKA_STORAGE_ERROR: the file cannot be read. The partition stays
                online, because that says nothing about the log.
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

    def fail(self, error: Exception, what: str) -> NoReturn:
        """Answer a storage failure; take the partition offline if the disk fails.

        A file that is missing or odd does not take it offline: perhaps this process
        looks at the wrong one, and to serve the rest makes nothing worse.

        Raises:
            ApiError: KAFKA_STORAGE_ERROR, always.
        """
        if isinstance(error, OSError) and error.errno not in _PASSING:
            self.row.status = RowStatus.OFFLINE
            logger.error("%s %s and is now offline: %s", self.directory, what, error)
        else:
            logger.error("%s %s: %s", self.directory, what, error)
        raise ApiError(
            ErrorCode.KAFKA_STORAGE_ERROR, f"{self.directory} {what}: {error}"
        ) from error

    def moved_or_fail(self, error: Exception) -> None:
        """Judge a file that is missing or is not what it was.

        Returns if other processes have changed the files meanwhile: try again.

        Raises:
            ApiError: they have not, so the file is damaged; or the partition was
                deleted, and its files are gone for good.
        """
        self.require_online()
        if self.words[self.structure_word] == self.structure:
            self.fail(error, "cannot be read")

    def descriptors_released(self, error: BaseException) -> bool:
        """Close files if descriptors were lacking; return whether to try again."""
        release = self.release_descriptors
        cause = error.__cause__ if isinstance(error, ApiError) else error
        if release is None or not isinstance(cause, OSError):
            return False
        if cause.errno != errno.EMFILE:
            return False
        release()
        return True

    def with_room(self, run: Callable[[], _T]) -> _T:
        """Run what needs descriptors; run it again if it failed for lack of them."""
        try:
            return run()
        except (OSError, ApiError) as error:
            if not self.descriptors_released(error):
                raise
        return run()

    def make_room(self) -> None:
        """Close the files of all logs of this process: no descriptor is left."""
        if self.release_descriptors is not None:
            self.release_descriptors()

    # -- the segments --------------------------------------------------------------

    def refresh(self, active_base: int) -> None:
        """Make the segment list fit the row, without the lock."""
        while self.words[self.structure_word] & 1:
            with self.row.locked():
                self.repair_structure()
        self._reload(active_base)

    def refresh_locked(self, active_base: int) -> None:
        """Make the segment list fit the row, under the lock."""
        self.repair_structure()
        self._reload(active_base)

    def repair_structure(self) -> None:
        """Finish a change of files whose process died in it. Under the lock.

        To see the odd version under the lock is to know of that death: a live process
        holds the lock while the version is odd.
        """
        row = self.row
        if not row.structure_version & 1:
            return
        for base in base_offsets(self.directory, LOG_SUFFIX + SWAP_SUFFIX):
            finish_swap(self.directory, base)
        # Last: if we die before this store, the next owner finds it odd and goes on.
        row.structure_version += 1

    def _reload(self, active_base: int) -> None:
        # The version first: if files are replaced while they are listed, it has moved
        # by the time that a reader looks at it again.
        structure = self.words[self.structure_word]
        self.segments.reload(active_base, keep_open=structure == self.structure)
        self.structure = structure
        if active_base != self.active_base:
            self._leave_active()
        self.active_base = active_base
        self.active = self.segments.get(active_base)
        self.positions.clear()

    def look(self, look: Callable[[LogState], _T]) -> _T:
        """Return what ``look`` finds in files that belong together.

        It is called again if other processes have changed the files meanwhile.

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
        """Go on in a segment that this process has just made the active one."""
        self.active.close_indexes()
        self.segments.add(segment)
        self.active, self.active_base = segment, segment.base_offset
        self.positions.clear()
        self._leave_active()

    def _leave_active(self) -> None:
        """Forget what holds for the segment that was active until now."""
        self.take_over_from_core()
        self.producers_position = -1
        self.roll_after = UNKNOWN_TIME
        if self.append_plan is not None:
            self.append_plan.producers_end = -1

    def close_unless_active(self, segment: LogSegment) -> None:
        """Give back the files of a segment that a walk over all of them has passed."""
        if segment is not self.active:
            segment.close()

    def close(self) -> None:
        """Close the segments' files. They open again when needed."""
        self.segments.close()
        self.positions.clear()
        self.structure = -1
        self.active_base = -1

    def size_in_bytes(self) -> int:
        """Return the size of all segments' logs.

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
        """Return where the oldest segment starts."""
        self.refresh(self.committed()[ACTIVE_BASE])
        return self.segments.bases[0]

    # -- what the compiled core shares ---------------------------------------------

    def remember(self, offset: int, segment: LogSegment, position: int) -> None:
        """Note where the batch that starts at an offset stands, or will stand."""
        positions = self.positions
        if len(positions) >= _POSITIONS_KEPT:
            positions.clear()
        positions[offset] = segment, position

    def remember_append(
        self, state: Sequence[int], added: int, end_offset: int
    ) -> None:
        """Note where the batch is that this process has just appended.

        Args:
            state: what was committed before it; the batch begins at the end of that.
            added: the batch's size in bytes.
            end_offset: the offset behind it.
        """
        base_offset, position = state[END_OFFSET], state[ACTIVE_SIZE]
        # Here a waiting fetch will begin to read. As ``remember``, which would be a
        # call more for each append.
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
        """From now on, have the core note where its appends begin, for readers."""
        self.has_readers = True
        if self.append_plan is not None:
            self.append_plan.positions = self.positions

    def take_over_from_core(self) -> None:
        """Step over what the core has appended, or has read of others' appends.

        The core has told ``producers`` of every batch in there that has a producer.
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
        """Say where the next append goes, right after one, if nothing changes."""
        plan.segment = self.active
        plan.active_base = self.active_base
        plan.structure = self.structure
        plan.roll_after = min(self.roll_after, LONG_MAX)
        producers = plan.producers = self.producers
        plan.producers_end = -1 if producers is None else producers.end_offset
        plan.producers_position = self.producers_position

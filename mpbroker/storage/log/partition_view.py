"""One process's view of a partition: its shared row and its segment files.

The row says what is committed. The list of segments is read from the directory and
kept; it is stale when the row names another active segment (somebody rolled) or
another structure version (retention or compaction removed or replaced files). That
version is odd while files are being changed: whoever sees it waits for the lock, and
if the one who changed them died, finishes for it.
"""

import errno
import time
from collections.abc import Callable
from struct import Struct
from typing import Final, NoReturn, TypeVar

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
from mpbroker.storage.log.log_loader import LoadHints, finish_swap, load_log
from mpbroker.storage.producers.producer_state import ProducerState

logger = get_logger(__name__)
_T = TypeVar("_T")

STATE: Final = Struct(f"{len(LogState._fields)}q")
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
    """What readers and the appender of a partition share.

    Args:
        directory: the partition's directory; it exists.
        row: the partition's shared row.
        config: the topic's settings; ``config`` may be replaced at any time.
        hints: what the log directory's checkpoint files said at start.
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
        self.segments = SegmentList(directory)
        self.producers: ProducerState | None = None  # None: not read yet
        self._hints = hints or LoadHints()
        self._epochs: LeaderEpochs | None = None
        self._words = row.words
        self._bytes = row.words.cast("B")
        self._version_word = row.base + ROW_VERSION
        self._status_word = row.base + ROW_STATUS
        self._start_word = row.base + ROW_LOG_START_OFFSET
        self._structure_word = row.base + ROW_STRUCTURE
        copies = (row.base + ROW_COPIES) * 8
        self._copy_bytes = (copies, copies + ROW_COPY_WORDS * 8)
        # Called when this process has no descriptor left; closes files of other logs.
        self.release_descriptors: Callable[[], None] | None = None
        self._structure = -1
        self._active_base = -1
        self._active: LogSegment = self.segments.get(0)
        # Where the batch that starts at an offset stands: what sequential readers ask.
        self._positions: dict[int, tuple[LogSegment, int]] = {}

    # -- the row -----------------------------------------------------------------

    def committed(self) -> tuple[int, ...]:
        """Return the committed LogState as a plain tuple, without the lock."""
        words, version_word = self._words, self._version_word
        while True:
            version = words[version_word]
            state = STATE.unpack_from(self._bytes, self._copy_bytes[version & 1])
            # Unmoved version: nobody was rewriting this copy while we read it.
            if words[version_word] == version:
                return state

    def state(self) -> LogState:
        """Return the committed state, loading the partition if nobody has yet."""
        self.require_online()
        return LogState._make(self.committed())

    @property
    def leader_epoch(self) -> int:
        return self.epochs.latest

    @property
    def epochs(self) -> LeaderEpochs:
        """Raises:
        ApiError: KAFKA_STORAGE_ERROR; that says nothing of what the log holds.
        """
        if self._epochs is None:
            try:
                self._epochs = self._with_room(
                    lambda: read_leader_epochs(self.directory)
                )
            except OSError as error:
                raise ApiError(
                    ErrorCode.KAFKA_STORAGE_ERROR,
                    f"{self.directory}: its leader epochs cannot be read: {error}",
                ) from error
        return self._epochs

    def require_online(self) -> None:
        """Load the partition if nobody has yet.

        Raises:
            ApiError: KAFKA_STORAGE_ERROR if its storage failed,
                UNKNOWN_TOPIC_OR_PARTITION if it was deleted.
        """
        if self._words[self._status_word] != RowStatus.ONLINE:
            with self.row.locked():
                self.require_online_locked()

    def require_online_locked(self) -> None:
        """As ``require_online``, for a caller who has the row's lock."""
        status = self._words[self._status_word]
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
            loaded = self._with_room(
                lambda: load_log(
                    self.directory,
                    self._hints,
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
        row.structure_version = (row.structure_version | 1) + 1
        row.status = RowStatus.ONLINE
        self.producers = loaded.producers

    def fail(self, error: Exception, what: str) -> NoReturn:
        """Answer a storage failure; a disk that fails takes the partition offline.

        A file that is gone or odd does not: it may be this process that looks at the
        wrong one, and nothing gets worse by serving the rest.

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

    def _descriptors_released(self, error: BaseException) -> bool:
        """Make room if it was descriptors that lacked; say whether to try again."""
        release = self.release_descriptors
        cause = error.__cause__ if isinstance(error, ApiError) else error
        if release is None or not isinstance(cause, OSError):
            return False
        if cause.errno != errno.EMFILE:
            return False
        release()
        return True

    def _with_room(self, run: Callable[[], _T]) -> _T:
        """Do what needs descriptors; and once more, if it was those that lacked."""
        try:
            return run()
        except (OSError, ApiError) as error:
            if not self._descriptors_released(error):
                raise
        return run()

    def make_room(self) -> None:
        """Close the files of all logs of this process: no descriptor is left."""
        if self.release_descriptors is not None:
            self.release_descriptors()

    # -- the segments --------------------------------------------------------------

    def refresh(self, active_base: int) -> None:
        """Make the segment list fit the row, without the lock."""
        while self._words[self._structure_word] & 1:
            with self.row.locked():
                self.repair_structure()
        self._reload(active_base)

    def refresh_locked(self, active_base: int) -> None:
        """Make the segment list fit the row, under the lock."""
        self.repair_structure()
        self._reload(active_base)

    def repair_structure(self) -> None:
        """Finish, under the lock, a change of files whose author died in it."""
        row = self.row
        if not row.structure_version & 1:
            return
        for base in base_offsets(self.directory, LOG_SUFFIX + SWAP_SUFFIX):
            finish_swap(self.directory, base)
        row.structure_version += 1

    def _reload(self, active_base: int) -> None:
        structure = self._words[self._structure_word]
        self.segments.reload(active_base, keep_open=structure == self._structure)
        self._structure = structure
        if active_base != self._active_base:
            self._leave_active()
        self._active_base = active_base
        self._active = self.segments.get(active_base)
        self._positions.clear()

    def _close_unless_active(self, segment: LogSegment) -> None:
        """Give back the files of a segment that a walk over all of them has passed."""
        if segment is not self._active:
            segment.close()

    def _leave_active(self) -> None:
        """The active segment is another one now."""

    def close(self) -> None:
        """Close all files. They open again when needed."""
        self.segments.close()
        self._positions.clear()
        self._structure = -1
        self._active_base = -1

    def size_in_bytes(self) -> int:
        """Return the size of all segments' logs."""
        while True:
            state = self.state()
            self.refresh(state.active_base_offset)
            try:
                return self.segments.sizes(state.active_base_offset, state.active_size)
            except FileNotFoundError as error:
                self._structure_moved_or_fail(error)

    def _structure_moved_or_fail(self, error: Exception) -> None:
        """Judge a file that is not there or is not what it was: try again, or fail."""
        self.require_online()  # a deleted partition's files are gone for good
        if self._words[self._structure_word] == self._structure:
            self.fail(error, "cannot be read")

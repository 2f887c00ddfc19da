"""LogCleaner: choose the log to compact next, and note up to where each is compacted.

A log has a clean part, which was compacted before, and a dirty part, which was appended
since. Its dirty ratio is dirty bytes / (clean + dirty bytes). The log with the highest
ratio is first, if the ratio is above min.cleanable.dirty.ratio, or if a dirty record is
older than max.compaction.lag.ms.

Some segments are never cleaned, and count for neither part: the active segment, those
past the last stable offset, and those with records younger than min.compaction.lag.ms.

Source: Kafka's LogCleanerManager; `cleaner-offset-checkpoint`.
"""

import math
import os
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from mpbroker.base.errors import MpbrokerError
from mpbroker.base.logger import get_logger
from mpbroker.base.storage_errors import StorageError
from mpbroker.ipc.tables.partition_table import LogState
from mpbroker.metadata.topic_names import TopicPartition
from mpbroker.protocol.errors import ApiError
from mpbroker.storage.cleaning.compaction import (
    CleaningAbortedError,
    CleanResult,
    Compaction,
)
from mpbroker.storage.cleaning.key_map import BYTES_PER_KEY
from mpbroker.storage.cleaning.throttler import Throttler
from mpbroker.storage.files.log_segment import LogSegment
from mpbroker.storage.log.partition_log import PartitionLog
from mpbroker.storage.log.partition_view import PartitionView
from mpbroker.storage.log_directory import LogDirectory
from mpbroker.storage.log_manager import LogManager, TopicView

logger = get_logger(__name__)

_DEFAULT_DEDUPE_BUFFER_BYTES: Final = 128 * 1024 * 1024
Later = Callable[[int, str], None]


class LogToClean(NamedTuple):
    """The parts of a log, as the choice of the next log needs them.

    Attributes:
        first_dirty: the log below this offset is compacted.
        first_uncleanable: the base offset of the first segment to leave alone.
        clean_bytes: bytes of the segments below ``first_dirty``.
        cleanable_bytes: bytes of the segments from there to ``first_uncleanable``.
        overdue: a record there is older than max.compaction.lag.ms.
    """

    first_dirty: int
    first_uncleanable: int
    clean_bytes: int
    cleanable_bytes: int
    overdue: bool

    @property
    def ratio(self) -> float:
        """The dirty ratio, from 0 to 1."""
        total = self.clean_bytes + self.cleanable_bytes
        return self.cleanable_bytes / total if total else 0.0

    def is_due(self, min_cleanable_dirty_ratio: float) -> bool:
        """Return whether the log should be compacted."""
        if not self.cleanable_bytes:
            return False
        return self.overdue or self.ratio > min_cleanable_dirty_ratio


class LogCleaner:
    """Compacts logs, one at a time.

    Args:
        dedupe_buffer_bytes: log.cleaner.dedupe.buffer.size, memory for the keys of one
            compaction; a log with more dirty keys is cleaned in several rounds.
        beat: called at each batch, and while sleeping; may raise CleaningAbortedError.
        io_max_bytes_per_second: log.cleaner.io.max.bytes.per.second; it limits the sum
            of bytes read and written.
    """

    def __init__(
        self,
        dedupe_buffer_bytes: int = _DEFAULT_DEDUPE_BUFFER_BYTES,
        beat: Callable[[], None] = lambda: None,
        io_max_bytes_per_second: float = math.inf,
    ) -> None:
        self._max_keys = dedupe_buffer_bytes // BYTES_PER_KEY
        self._throttler = Throttler(io_max_bytes_per_second, beat)
        self._uncleanable: set[int] = set()  # rows, which are never used twice

    def clean_filthiest(
        self,
        manager: LogManager,
        candidates: Iterable[tuple[TopicView, int]],
        now_ms: int,
        delete_later: Later,
    ) -> int:
        """Compact the log with the highest dirty ratio among those that are due.

        Args:
            manager: finds the logs and their directories.
            candidates: (topic, partition) of all compacted topics.
            now_ms: the wall clock.
            delete_later: called with a time (ms) and a path, to remove the file then.

        Returns:
            1 if a log was compacted; 0 if none is due, or if it failed.
        """
        directories = {directory.path: directory for directory in manager.directories}
        offsets = {path: each.cleaner_offsets() for path, each in directories.items()}
        best: tuple[float, PartitionLog, LogToClean, TopicPartition] | None = None
        for topic, partition in candidates:
            try:
                log = manager.log(topic, partition)
                if log.row.index in self._uncleanable:
                    continue
                clean = offsets[os.path.dirname(log.directory)]
                chosen = assess(log, clean.get((topic.name, partition)), now_ms)
            except (OSError, ApiError, StorageError) as error:
                logger.error("cleaning of %s-%d: %s", topic.name, partition, error)
                continue
            if chosen.is_due(log.view.config.min_cleanable_dirty_ratio) and (
                best is None or chosen.ratio > best[0]
            ):
                best = chosen.ratio, log, chosen, (topic.name, partition)
        if best is None:
            return 0
        _, log, chosen, name = best
        directory = directories[os.path.dirname(log.directory)]
        return self._clean(log, chosen, directory, name, now_ms, delete_later)

    def _clean(
        self,
        log: PartitionLog,
        chosen: LogToClean,
        directory: LogDirectory,
        name: TopicPartition,
        now_ms: int,
        delete_later: Later,
    ) -> int:
        try:
            result = self.clean(log, chosen, now_ms)
            due_ms = now_ms + log.view.config.file_delete_delay_ms
            for path in result.deleted_files:
                delete_later(due_ms, path)
            offsets = directory.cleaner_offsets()
            offsets[name] = result.clean_offset
            directory.write_cleaner_offsets(offsets)
        except (CleaningAbortedError, ApiError) as error:
            logger.info("cleaning stopped: %s", error)
            return 0
        except (OSError, MpbrokerError) as error:
            # Leave it alone until the next start, as Kafka does: another attempt would
            # fail again, and keep the other logs waiting.
            self._uncleanable.add(log.row.index)
            logger.error("%s cannot be cleaned: %s", log.directory, error)
            return 0
        finally:
            log.close()
        logger.info(
            "%s compacted up to offset %d: %d bytes became %d",
            log.directory,
            result.clean_offset,
            result.bytes_before,
            result.bytes_after,
        )
        return 1

    def clean(self, log: PartitionLog, chosen: LogToClean, now_ms: int) -> CleanResult:
        """Compact one log; raises as Compaction.run()."""
        compaction = Compaction(log, now_ms, self._max_keys, self._throttler.done)
        return compaction.run(chosen.first_dirty, chosen.first_uncleanable)


def assess(log: PartitionLog, clean_offset: int | None, now_ms: int) -> LogToClean:
    """Find out which part of a log is dirty, and may be compacted.

    Args:
        log: the log.
        clean_offset: the log below it was compacted before; None: never.
        now_ms: the wall clock.

    Raises:
        ApiError, OSError: it cannot be read.
    """
    view = log.view
    state = view.state()
    view.refresh(state.active_base_offset)
    start = log.row.log_start_offset
    first_dirty = start if clean_offset is None else clean_offset
    if not start <= first_dirty <= state.log_end_offset:
        first_dirty = start  # records were deleted, or the log was cut: begin again
    first_uncleanable = _first_uncleanable(view, state, first_dirty, now_ms)
    clean_bytes = cleanable_bytes = 0
    earliest: int | None = None
    for segment in view.segments.from_offset(0):
        if segment.base_offset >= first_uncleanable:
            break
        size = os.stat(segment.path).st_size
        # A segment counts as dirty if its last record is.
        if _next(view, segment) <= first_dirty:
            clean_bytes += size
            continue
        cleanable_bytes += size
        batch = segment.first_batch(size)
        if batch is not None and batch.max_timestamp > 0:
            earliest = min(earliest or batch.max_timestamp, batch.max_timestamp)
        segment.close()
    overdue = (
        earliest is not None and earliest < now_ms - view.config.max_compaction_lag_ms
    )
    return LogToClean(
        first_dirty, first_uncleanable, clean_bytes, cleanable_bytes, overdue
    )


def _first_uncleanable(
    view: PartitionView, state: LogState, first_dirty: int, now_ms: int
) -> int:
    """Return the base offset of the first segment that must be left alone."""
    limit = state.active_base_offset
    if state.first_unstable_offset >= 0:
        limit = min(limit, state.first_unstable_offset)
    lag_ms = view.config.min_compaction_lag_ms
    for segment in view.segments.from_offset(first_dirty):
        if segment.base_offset >= limit:
            break
        if _next(view, segment) > limit:
            return segment.base_offset
        if lag_ms > 0:
            newest = segment.largest_timestamp().timestamp
            segment.close()
            if newest > now_ms - lag_ms:
                return segment.base_offset
    return limit


def _next(view: PartitionView, segment: LogSegment) -> int:
    """Return the base offset of the segment after one that is not active."""
    following = view.segments.next_base(segment.base_offset)
    assert following is not None
    return following

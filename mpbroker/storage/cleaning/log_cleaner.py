"""LogCleaner: choose the log to compact next, and note how far each is compacted.

A log has a clean part, which was compacted before, and a dirty part, which was appended
since. Its dirty ratio is dirty bytes / (clean + dirty bytes). The log with the highest
ratio is first, if the ratio is above min.cleanable.dirty.ratio, or if a dirty record is
older than max.compaction.lag.ms.

Some segments are not cleaned, and belong to neither part: the active segment, segments
past the last stable offset, and segments with records younger than
min.compaction.lag.ms.

Source: Kafka's LogCleanerManager; `cleaner-offset-checkpoint`.
"""

import math
import os
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Final

from mpbroker.base.errors import MpbrokerError
from mpbroker.base.logger import get_logger
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.base.storage_errors import StorageError
from mpbroker.ipc.layout import RowStatus
from mpbroker.ipc.tables.partition_table import LogState
from mpbroker.metadata.topic_names import TopicPartition
from mpbroker.protocol.errors import ApiError
from mpbroker.storage.cleaning.compaction import (
    CleaningAbortedError,
    CleanResult,
    Compaction,
)
from mpbroker.storage.cleaning.key_map import BYTES_PER_KEY
from mpbroker.storage.files.log_segment import LogSegment
from mpbroker.storage.files.throttler import Throttler
from mpbroker.storage.log.partition_log import PartitionLog
from mpbroker.storage.log.partition_view import PartitionView
from mpbroker.storage.log_directory import LogDirectory
from mpbroker.storage.log_manager import LogManager, TopicView, says_deleted
from mpbroker.storage.partition_directory import exclusive

logger = get_logger(__name__)

_DEFAULT_DEDUPE_BUFFER_BYTES: Final = 128 * 1024 * 1024
Later = Callable[[int, str], None]


class LogToClean(NamedTuple):
    """How much of a log is compacted and how much is not: decides which log is next.

    Attributes:
        first_dirty: the log below this offset is compacted.
        first_uncleanable: the offset from which on segments are left alone.
        clean_bytes: bytes of the segments below ``first_dirty``.
        cleanable_bytes: bytes of the segments from ``first_dirty`` to
            ``first_uncleanable``.
        overdue: a record in these segments is older than max.compaction.lag.ms.
    """

    first_dirty: int
    first_uncleanable: int
    clean_bytes: int
    cleanable_bytes: int
    overdue: bool

    @property
    def ratio(self) -> float:
        """The dirty ratio, from 0 to 1.

        It is the bytes not yet compacted / all bytes that could be compacted.
        """
        total = self.clean_bytes + self.cleanable_bytes
        return self.cleanable_bytes / total if total else 0.0

    def is_due(self, min_cleanable_dirty_ratio: float) -> bool:
        """Return whether enough is to be compacted, or a record waits too long."""
        if not self.cleanable_bytes:
            return False
        return self.overdue or self.ratio > min_cleanable_dirty_ratio


class LogCleaner:
    """Compacts logs, one at a time. Several processes may each have one.

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
        self._uncleanable: set[int] = set()  # rows of logs that could not be cleaned

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
            delete_later: called with a time (ms of the wall clock) and the path of a
                file, which is to be removed at that time.

        Returns:
            The number of logs that were compacted: 1; or 0 if no log is due, or the
            compaction of all due ones failed.
        """
        directories = {directory.path: directory for directory in manager.directories}
        offsets: dict[str, dict[TopicPartition, int]] = {
            path: {} for path in directories
        }
        for path, each in directories.items():
            # If a disk has failed its logs cannot be read either, as is logged below.
            with suppress(OSError):
                offsets[path] = each.cleaner_offsets()
        due: list[tuple[float, PartitionLog, TopicPartition]] = []
        for topic, partition in candidates:
            name = (topic.name, partition)
            try:
                log = manager.log_in_place(*name)
                if log.row.index in self._uncleanable:
                    continue
                clean = offsets[os.path.dirname(log.directory)].get(name)
                chosen = assess(log, clean, now_ms)
            except (OSError, ApiError, StorageError) as error:
                if not says_deleted(error):
                    logger.error("cleaning of %s-%d: %s", *name, error)
                continue
            if chosen.is_due(log.view.config.min_cleanable_dirty_ratio):
                due.append((chosen.ratio, log, name))
        due.sort(key=lambda each: each[0], reverse=True)
        for _, log, name in due:
            directory = directories[os.path.dirname(log.directory)]
            if self._clean(log, directory, name, now_ms, delete_later):
                return 1
        return 0

    def _clean(
        self,
        log: PartitionLog,
        directory: LogDirectory,
        name: TopicPartition,
        now_ms: int,
        delete_later: Later,
    ) -> bool:
        """Compact a log if it is due; write to `cleaner-offset-checkpoint` how far.

        Returns:
            Whether the log was compacted; False if that failed, or if another process
            is compacting the log.
        """
        try:
            with exclusive(log.directory) as is_free:
                clean = directory.cleaner_offsets().get(name)
                chosen = assess(log, clean, now_ms) if is_free else None
                ratio = log.view.config.min_cleanable_dirty_ratio
                if chosen is None or not chosen.is_due(ratio):
                    return False
                result = self.clean(log, chosen, now_ms)
                due_ms = now_ms + log.view.config.file_delete_delay_ms
                for path in result.deleted_files:
                    delete_later(due_ms, path)
                with directory.cleaner_offsets_locked() as offsets:
                    # Not after the topic was deleted: a new topic may get its name.
                    if log.row.status == RowStatus.ONLINE:
                        offsets[name] = result.clean_offset
        except (CleaningAbortedError, ApiError) as error:
            logger.info("cleaning stopped: %s", error)
            return False
        except (OSError, MpbrokerError) as error:
            if log.row.status == RowStatus.DELETED:
                return False
            # Leave it alone until the next start, as Kafka does: another attempt would
            # fail again, and keep the other logs waiting.
            self._uncleanable.add(log.row.index)
            logger.error("%s cannot be cleaned: %s", log.directory, error)
            return False
        finally:
            log.close()
        logger.info(
            "%s compacted up to offset %d: %d bytes became %d",
            log.directory,
            result.clean_offset,
            result.bytes_before,
            result.bytes_after,
        )
        return True

    def forget_rows(self, rows: Collection[int]) -> None:
        """Forget which logs cannot be compacted, for deleted partitions.

        Args:
            rows: the indexes of their rows (entries in shared memory), which new
                partitions will get.
        """
        self._uncleanable.difference_update(rows)

    def clean(self, log: PartitionLog, chosen: LogToClean, now_ms: int) -> CleanResult:
        """Compact a log's dirty part (what was appended since the last compaction).

        Raises:
            As Compaction.run().
        """
        compaction = Compaction(log, now_ms, self._max_keys, self._throttler.done)
        return compaction.run(chosen.first_dirty, chosen.first_uncleanable)


def assess(log: PartitionLog, clean_offset: int | None, now_ms: int) -> LogToClean:
    """Find the bounds and sizes of a log's clean part and of its cleanable dirty part.

    Args:
        log: the log.
        clean_offset: the log below this offset was compacted before; None: the log was
            never compacted.
        now_ms: the wall clock.

    Raises:
        ApiError, OSError: the log cannot be read.
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
    """Return the first offset that compaction must leave alone: see the module."""
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
    """Return the base offset of the segment that comes after a closed segment."""
    following = view.segments.next_base(segment.base_offset)
    assert following is not None
    return following

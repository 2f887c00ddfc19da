"""Remove old segments: by age, by total size, and below the log start offset.

The segments are chosen without the lock; the lock is held for the renames only. The
log start offset moves before files are renamed, so that readers below it get an error.
The oldest files are renamed first, so that a process killed in between leaves a log
without a gap. Files are renamed to `.deleted` and removed later, because readers may
still have them open.

Source: Kafka's UnifiedLog.deleteOldSegments.
"""

import os
from typing import NamedTuple

from mpbroker.ipc.layout import RowStatus
from mpbroker.ipc.tables.partition_table import LogState
from mpbroker.metadata.log_config import LogConfig
from mpbroker.storage.files.log_files import (
    DELETED_SUFFIX,
    SEGMENT_SUFFIXES,
    SNAPSHOT_SUFFIX,
    base_offsets,
    remove_if_exists,
    segment_file,
)
from mpbroker.storage.log.partition_log import PartitionLog
from mpbroker.storage.log.partition_view import PartitionView


class SegmentAge(NamedTuple):
    """The properties of a segment that retention decides by.

    Attributes:
        base_offset: where it begins.
        next_base: where the next segment begins; the log end offset for the active one.
        size: its committed bytes.
        largest_timestamp: in ms; if its records have no timestamps, the modification
            time of the file.
    """

    base_offset: int
    next_base: int
    size: int
    largest_timestamp: int


def expired_segments(
    segments: list[SegmentAge], config: LogConfig, log_start_offset: int, now_ms: int
) -> int:
    """Return how many segments are to be removed, from the oldest on.

    If all are too old these are all of them, the active segment included; but an empty
    active segment stays.

    Args:
        segments: all segments, oldest first; the last is the active one.
        config: the topic's settings.
        log_start_offset: segments below it are removed, whatever cleanup.policy says.
        now_ms: the wall clock.
    """
    if segments and not segments[-1].size:
        segments = segments[:-1]
    # Each rule starts at the first segment that the rule before it has left.
    count = 0
    while count < len(segments) and segments[count].next_base <= log_start_offset:
        count += 1
    if "delete" not in config.cleanup_policy:
        return count
    if config.retention_bytes >= 0:
        excess = sum(each.size for each in segments[count:]) - config.retention_bytes
        while count < len(segments) and excess >= segments[count].size:
            excess -= segments[count].size
            count += 1
    if config.retention_ms >= 0:
        oldest_ms = now_ms - config.retention_ms
        while count < len(segments) and segments[count].largest_timestamp < oldest_ms:
            count += 1
    return count


def apply_retention(log: PartitionLog, now_ms: int) -> list[str]:
    """Rename the files of segments that are to be removed.

    Returns:
        The `.deleted` files, which the caller removes after file.delete.delay.ms.

    Raises:
        ApiError: the partition is offline or was deleted.
        OSError: its directory cannot be read or changed.
    """
    view = log.view
    state = view.state()
    view.refresh(state.active_base_offset)
    start_offset = log.row.log_start_offset
    ages = _ages(view, state)
    count = expired_segments(ages, view.config, start_offset, now_ms)
    if not count:
        return []
    row = log.row
    with row.locked():
        if row.status != RowStatus.ONLINE:
            return []
        view.repair_structure()
        current = LogState._make(view.committed())
        if count == len(ages):
            if current.log_end_offset != state.log_end_offset:
                count -= 1  # another process has appended to the active segment
            else:
                log.roll_locked(now_ms)
        going = ages[:count]
        if not going:
            return []
        new_start = going[-1].next_base
        # Odd from here on: readers wait for the lock. If this process is killed, the
        # next owner of the lock makes it even again. Killed before the next store,
        # nothing has changed; killed after it, segments below the log start offset are
        # left, and the next retention run removes them.
        row.structure_version += 1
        row.log_start_offset = max(row.log_start_offset, new_start)
        deleted: list[str] = []
        for segment in going:
            deleted += rename_deleted(log.directory, segment.base_offset)
        row.structure_version += 1
    remove_old_snapshots(log.directory, new_start)
    return deleted


def rename_deleted(directory: str, base_offset: int) -> list[str]:
    """Rename a segment's files to `.deleted`, the log first; return the new paths."""
    renamed = []
    for suffix in SEGMENT_SUFFIXES:
        path = segment_file(directory, base_offset, suffix)
        try:
            os.rename(path, path + DELETED_SUFFIX)
        except FileNotFoundError:
            continue
        renamed.append(path + DELETED_SUFFIX)
    return renamed


def remove_old_snapshots(directory: str, log_start_offset: int) -> None:
    """Remove the producer snapshots below the log start offset, except the newest.

    A producer's state is kept longer than its records, so the newest snapshot may have
    state that is not in the log any more.
    """
    for offset in base_offsets(directory, SNAPSHOT_SUFFIX)[:-1]:
        if offset < log_start_offset:
            remove_if_exists(segment_file(directory, offset, SNAPSHOT_SUFFIX))


def _ages(view: PartitionView, state: LogState) -> list[SegmentAge]:
    ages = []
    for segment in view.segments.from_offset(0):
        next_base = view.segments.next_base(segment.base_offset)
        if next_base is None:
            size, largest = state.active_size, state.max_timestamp
            next_base = state.log_end_offset
        else:
            size, largest = segment.file_size(), segment.largest_timestamp().timestamp
            segment.close()
        if largest < 0:
            largest = int(os.stat(segment.path).st_mtime * 1000)
        ages.append(SegmentAge(segment.base_offset, next_base, size, largest))
    return ages

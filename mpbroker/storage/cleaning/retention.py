"""Remove old segments: by age, by total size, and below the log start offset.

What is to go is decided without the lock; the lock is held for the renames only. The
log start offset moves first, so that readers are refused before files go, and oldest
files go first, so that a death in between leaves a log without a hole. The files are
renamed to `.deleted` and removed later, for readers still in them.

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
    """What retention looks at."""

    base_offset: int
    next_base: int  # the log end offset for the active segment
    size: int
    largest_timestamp: int  # ms; of a segment without timestamps, its file's time


def expired_segments(
    segments: list[SegmentAge], config: LogConfig, log_start_offset: int, now_ms: int
) -> int:
    """Return how many segments, from the oldest on, are to go.

    All of them, the active one included, if all are too old; an empty active one stays.
    """
    if segments and not segments[-1].size:
        segments = segments[:-1]
    # One rule goes on where the one before it stopped.
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
    """Remove what is to go; return the `.deleted` files, to be removed later.

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
                count -= 1  # somebody appended to it meanwhile
            else:
                log.roll_locked(now_ms)
        going = ages[:count]
        if not going:
            return []
        new_start = going[-1].next_base
        row.structure_version += 1
        row.log_start_offset = max(row.log_start_offset, new_start)
        deleted: list[str] = []
        for segment in going:
            deleted += rename_deleted(log.directory, segment.base_offset)
        row.structure_version += 1
    remove_old_snapshots(log.directory, new_start)
    return deleted


def rename_deleted(directory: str, base_offset: int) -> list[str]:
    """Rename a segment's files to be deleted; return their new names."""
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
    """Remove the snapshots below the log start, but never the newest of all.

    A producer outlives its records, so the newest says what the log cannot any more.
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

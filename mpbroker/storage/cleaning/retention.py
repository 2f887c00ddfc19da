"""Remove old segments: by age, by total size, and below the log start offset.

A topic with remote storage has two limits: retention.* for all of its log, which moves
the log start offset, and local.retention.* for the segments on this machine's disk. The
second removes only segments that the partition's manifest (the list of its segments in
the remote store) names as copied. The manifest was forced to disk before, so these
segments can be found after any crash. The remote log manager removes remote segments
below the log start offset.

The segments are chosen without the partition's lock, which only the renames need. The
log start offset moves before files are renamed, so that readers below it get an error.
The oldest files are renamed first, so that a process killed in between leaves a log
without a gap. Files are renamed to `.deleted` and removed later, because readers may
still have them open.

Source: Kafka's UnifiedLog.deleteOldSegments.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from mpbroker.base.named_tuple import NamedTuple
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

if TYPE_CHECKING:
    from mpbroker.storage.remote.remote_manifest import RemoteSegment

_AS_A_WHOLE: Final = -2  # this value of local.retention.* means that of retention.*
_AS_LOCAL: Final = -1  # this value of remote.copy.lag.* means that of local.retention.*


class SegmentAge(NamedTuple):
    """The size and age of a segment, by which retention decides whether to remove it.

    Attributes:
        base_offset: the segment's base offset.
        next_base: the base offset of the next segment; for the active segment the log
            end offset.
        size: the segment's committed bytes.
        largest_timestamp: the largest timestamp in ms; if the records have no
            timestamps, the modification time of the file.
    """

    base_offset: int
    next_base: int
    size: int
    largest_timestamp: int


def expired_segments(
    segments: list[SegmentAge], config: LogConfig, log_start_offset: int, now_ms: int
) -> int:
    """Return the number of segments that are to be removed, from the oldest on.

    If all segments are too old, the active one is included, unless it is empty.

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
    # The cluster's database judges the age and size of a shared topic. Then it raises
    # the start of the log.
    if config.diskless_enable or "delete" not in config.cleanup_policy:
        return count
    left = segments[count:]
    return count + _breaching(left, config.retention_bytes, config.retention_ms, now_ms)


def _breaching(
    segments: list[SegmentAge], max_bytes: int, max_ms: int, now_ms: int
) -> int:
    """Return the number of segments, from the oldest on, that exceed a limit.

    Args:
        segments: the segments, oldest first.
        max_bytes: the largest size of all segments together; -1: no limit.
        max_ms: the largest age of a segment in ms; -1: no limit.
        now_ms: the wall clock.
    """
    count = 0
    if max_bytes >= 0:
        excess = sum(each.size for each in segments) - max_bytes
        while count < len(segments) and excess >= segments[count].size:
            excess -= segments[count].size
            count += 1
    if max_ms >= 0:
        oldest_ms = now_ms - max_ms
        while count < len(segments) and segments[count].largest_timestamp < oldest_ms:
            count += 1
    return count


def tiered_segments(
    segments: list[SegmentAge],
    config: LogConfig,
    remote: list[RemoteSegment],
    now_ms: int,
) -> int:
    """Return the number of local segments that may go, as the remote store has them.

    These are the oldest segments, as far as they exceed local.retention.*. A segment
    counts only if the store has it with the same offsets and size: after a restore by
    hand, the store may have other records at these offsets.

    Args:
        segments: the local segments, oldest first; the last is the active one.
        config: the topic's settings.
        remote: the segments in the store.
        now_ms: the wall clock.
    """
    if not remote or not config.remote_storage_enable:
        return 0
    breaching = _breaching(segments, *_local_limits(config), now_ms)
    known = {(each.base_offset, each.next_base, each.size) for each in remote}
    count = 0
    for segment in segments[: min(breaching, len(segments) - 1)]:
        if segment[:3] not in known:
            break
        count += 1
    return count


def _local_limits(config: LogConfig) -> tuple[int, int]:
    """Return local.retention.bytes and local.retention.ms; -1: no limit."""
    max_bytes, max_ms = config.local_retention_bytes, config.local_retention_ms
    return (
        config.retention_bytes if max_bytes == _AS_A_WHOLE else max_bytes,
        config.retention_ms if max_ms == _AS_A_WHOLE else max_ms,
    )


def due_copies(
    segments: list[SegmentAge], config: LogConfig, copied_to: int, now_ms: int
) -> int:
    """Return the offset below which closed segments may be copied to the remote store.

    A segment waits until it is old enough (remote.copy.lag.ms), or until enough bytes
    are behind it (remote.copy.lag.bytes), and those behind it wait with it.

    Args:
        segments: the local segments, oldest first; the last is the active one.
        config: the topic's settings.
        copied_to: the segments below it are in the store; -1: there are none.
        now_ms: the wall clock. A segment from the future does not wait.

    Source: KIP-1241; Kafka's RLMCopyTask.candidateLogSegments.
    """
    local_bytes, local_ms = _local_limits(config)
    lag_bytes, lag_ms = config.remote_copy_lag_bytes, config.remote_copy_lag_ms
    lag_bytes = local_bytes if lag_bytes == _AS_LOCAL else lag_bytes
    lag_ms = local_ms if lag_ms == _AS_LOCAL else lag_ms
    if not lag_bytes or not lag_ms:
        return segments[-1].base_offset
    below = segments[0].base_offset
    behind = sum(each.size for each in segments)
    for segment in segments[:-1]:
        behind -= segment.size
        is_old = lag_ms > 0 and not 0 <= now_ms - segment.largest_timestamp < lag_ms
        is_far = 0 < lag_bytes <= behind
        if segment.next_base > copied_to and not is_old and not is_far:
            break
        below = segment.next_base
    return below


def copy_limit(log: PartitionLog, now_ms: int) -> int:
    """Return the offset of a log below which ``due_copies`` lets segments be copied.

    Raises:
        ApiError: the partition is offline or was deleted.
        OSError: its directory cannot be read.
    """
    view = log.view
    state = view.state()
    if not view.config.remote_copy_lag_ms or not view.config.remote_copy_lag_bytes:
        return state.active_base_offset  # without a look at each segment
    view.refresh(state.active_base_offset)
    remote = view.remote_segments()
    copied_to = remote[-1].next_base if remote else -1
    left = _ages(
        view, state, max(0, copied_to)
    )  # not of all segments, which may be many
    return due_copies(left, view.config, copied_to, now_ms)


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
    remote = _remote_ages(view, start_offset, ages[0].base_offset)
    expired = expired_segments([*remote, *ages], view.config, start_offset, now_ms)
    new_start = [*remote, *ages][expired - 1].next_base if expired else 0
    count = max(0, expired - len(remote))
    in_store = view.remote_segments()
    copied = tiered_segments(ages[count:], view.config, in_store, now_ms)
    if not expired and not copied:
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
                new_start = ages[-1].base_offset
            else:
                log.roll_locked(now_ms)
        going = ages[: count + copied]
        if not going and new_start <= row.log_start_offset:
            return []
        # Odd from here on: readers wait for the lock. If this process is killed, the
        # next owner of the lock makes it even again. If it is killed before the next
        # store, nothing has changed; after that store, segments below the log start
        # offset are left, and the next retention run removes them.
        row.structure_version += 1
        row.log_start_offset = max(row.log_start_offset, new_start)
        deleted: list[str] = []
        for segment in going:
            deleted += rename_deleted(log.directory, segment.base_offset)
        row.structure_version += 1
    if going:
        remove_old_snapshots(log.directory, going[-1].next_base)
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


def _remote_ages(
    view: PartitionView, start_offset: int, first_local: int
) -> list[SegmentAge]:
    """Return the segments that are only in the remote store, oldest first.

    Args:
        view: the partition.
        start_offset: the log start offset; segments that end below it are left out.
        first_local: the base offset of the oldest local segment.
    """
    return [
        SegmentAge(each.base_offset, each.next_base, each.size, each.largest_timestamp)
        for each in view.remote_segments()
        if each.base_offset < first_local and each.next_base > start_offset
    ]


def _ages(view: PartitionView, state: LogState, offset: int = 0) -> list[SegmentAge]:
    """Return the local segments from the one that has an offset on, oldest first."""
    ages = []
    for segment in view.segments.from_offset(offset):
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

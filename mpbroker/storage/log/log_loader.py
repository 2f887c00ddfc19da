"""Load a partition from its directory: recover its files, and find where it ends.

The first process that uses a partition loads it, under the partition's lock. The steps
are: remove leftovers, finish swaps, rebuild indexes, cut off bytes that are no whole
batches. The row (the partition's entry in shared memory) is published only after all of
them. So a process may be killed at any point: the partition is still unloaded, and the
next process does all steps again.

After a clean stop only the active segment is opened, and only the part after its last
index entry is read. Otherwise everything from the recovery point on is checked.

Source: Kafka's LogLoader.
"""

import mmap
import os
from bisect import bisect_left
from itertools import pairwise
from operator import attrgetter
from typing import Final

from mpbroker.base.directories import sync_directory
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.base.storage_errors import CorruptLogError
from mpbroker.ipc.tables.partition_table import LogState
from mpbroker.storage.files.batch_scan import old_magic_at
from mpbroker.storage.files.log_files import (
    CLEANED_SUFFIX,
    DELETED_SUFFIX,
    INDEX_SUFFIX,
    LOG_SUFFIX,
    REMOTE_MANIFEST_FILE,
    SEGMENT_SUFFIXES,
    SWAP_SUFFIX,
    TIME_INDEX_SUFFIX,
    base_offsets,
    is_marked_offline,
    mark_offline,
    remove_if_exists,
    remove_mark,
    segment_file,
)
from mpbroker.storage.files.log_segment import LogSegment
from mpbroker.storage.files.segment_list import SegmentList
from mpbroker.storage.files.segment_recovery import (
    TRUST_ALL,
    TRUST_NOTHING,
    SegmentTail,
    recover_segment,
)
from mpbroker.storage.files.txn_index import AbortedTransaction, restore_aborted
from mpbroker.storage.producers.producer_replay import replay_log
from mpbroker.storage.producers.producer_snapshot import (
    load_newest_snapshot,
    remove_snapshots,
)
from mpbroker.storage.producers.producer_state import ProducerState

_TEMPORARY_SUFFIX: Final = ".tmp"
_last_offset: Final = attrgetter("last_offset")


class LoadHints(NamedTuple):
    """What the checkpoint files say of a partition, for the process that loads its log.

    Attributes:
        clean: the last broker that used the directory stopped cleanly.
        recovery_point: the log below this offset was checked once, and is on disk.
        log_start_offset: the log start offset.
        producer_id_expiration_ms: the setting producer.id.expiration.ms.
        checked_end: in an upgrade of the running broker, the log end offset that the
            old program had committed: the log below it was checked, and is at least in
            the page cache. 0: this start is no upgrade.
        closed_end: the log end offset at that clean stop; -1: not known.
    """

    clean: bool = False
    recovery_point: int = 0
    log_start_offset: int = 0
    producer_id_expiration_ms: int = 86_400_000
    checked_end: int = 0
    closed_end: int = -1


class LoadedLog(NamedTuple):
    """The result of loading a partition.

    Attributes:
        state: the state to publish in the row.
        log_start_offset: the log start offset to publish.
        producers: the producers' state as of the log end.
        truncated_bytes: bytes that were cut off, because they are no whole batches.
    """

    state: LogState
    log_start_offset: int
    producers: ProducerState
    truncated_bytes: int


def load_log(
    directory: str, hints: LoadHints, *, index_interval_bytes: int, now_ms: int
) -> LoadedLog:
    """Make a partition's directory consistent, and return the log's state.

    If the directory has the mark of a failed disk (`partition.offline`), the log is cut
    off where the disk lacks bytes that the page cache has, and is checked from its
    recovery point on.

    Args:
        directory: the partition's directory; it exists.
        hints: the partition's entries in the log directory's checkpoint files.
        index_interval_bytes: bytes of log between two entries of a rebuilt index.
        now_ms: the wall clock.

    Raises:
        CorruptLogError: segments overlap, or have messages of an old format; the files
            are left as they are.
        OSError: the directory or a file cannot be read or written.
    """
    is_marked = is_marked_offline(directory)
    if is_marked:  # what was checked since the recovery point was in the page cache
        hints = hints._replace(clean=False, checked_end=0)
    on_disk = hints.recovery_point
    if hints.checked_end > on_disk:
        hints = hints._replace(recovery_point=hints.checked_end)
    remove_leftovers(directory)
    if is_marked:
        from mpbroker.storage.files.lost_writes import drop_lost_writes

        drop_lost_writes(directory, on_disk)
    bases = base_offsets(directory, LOG_SUFFIX)
    is_new = not bases
    remote_start, copied_to = _remote_bounds(directory)
    if is_new:
        # The directory is new, or its segments were lost: then the log goes on where
        # the remote store ends.
        segment = LogSegment(directory, max(hints.log_start_offset, copied_to))
        segment.create()
        segment.close()
        sync_directory(directory)
        bases = [segment.base_offset]
    segments = SegmentList(directory)
    segments.reload(bases[-1], keep_open=False)
    try:
        tail = _recover(segments, hints, on_disk, index_interval_bytes)
        truncated = tail.truncated_bytes
        if tail.next_offset < hints.recovery_point:
            # The log ends below its recovery point, so these are other files than those
            # that the point was written for: trust none of them.
            hints = hints._replace(clean=False, recovery_point=0)
            tail = _recover(segments, hints, on_disk, index_interval_bytes)
            truncated += tail.truncated_bytes
        if tail.next_offset < hints.log_start_offset:
            # Segment files were removed by hand: the log start offset says that all
            # records that are left were deleted.
            tail = _start_again(segments, hints.log_start_offset)
        state = _state_of(tail, segments.bases[-1], now_ms)
        start = max(hints.log_start_offset, segments.bases[0])
        remove_snapshots(directory, above=state.log_end_offset)
        if hints.clean or (is_new and copied_to >= 0):  # a snapshot came from there
            producers = load_producers(segments, state, hints, start, now_ms)
        else:
            producers = _recover_producers(segments, state, hints, start, now_ms)
        state = state._replace(first_unstable_offset=producers.first_unstable_offset)
        if not hints.clean and not is_new:
            # The contents are on disk; now the names, too, which may be those of files
            # made just before a crash. No later sync does this: it takes files that
            # begin below the durable end offset for old ones.
            sync_directory(directory)
            sync_directory(os.path.dirname(directory))
        if is_marked:
            remove_mark(directory)
        if 0 <= remote_start < segments.bases[0] <= copied_to:
            start = max(hints.log_start_offset, remote_start)
        return LoadedLog(state, start, producers, truncated)
    finally:
        segments.close()


def _remote_bounds(directory: str) -> tuple[int, int]:
    """Return the first offset in the remote store, and the offset after its last one.

    Returns:
        The two offsets; (-1, -1) if no segment was copied to the store.

    Raises:
        CorruptLogError: the manifest (the list of remote segments in the partition's
            directory) is damaged.
        OSError: the manifest cannot be read.
    """
    if not os.path.exists(f"{directory}/{REMOTE_MANIFEST_FILE}"):
        return -1, -1
    # Imported here: most partitions have none.
    from mpbroker.storage.remote.remote_manifest import ManifestError, RemoteManifest

    try:
        segments = RemoteManifest.of_directory(directory).copied()
    except ManifestError as error:
        raise CorruptLogError(f"{directory}: {error}") from error
    return (segments[0].base_offset, segments[-1].next_base) if segments else (-1, -1)


def _state_of(tail: SegmentTail, active_base_offset: int, now_ms: int) -> LogState:
    """Return the state to publish in shared memory, once a log has been loaded.

    Args:
        tail: the end of the active segment, as recovery found it.
        active_base_offset: the base offset of the active segment.
        now_ms: the wall clock.
    """
    return LogState(
        log_end_offset=tail.next_offset,
        active_base_offset=active_base_offset,
        active_size=tail.size,
        index_entries=tail.index_entries,
        time_index_entries=tail.time_index_entries,
        bytes_since_index=tail.bytes_since_index,
        max_timestamp=tail.largest.timestamp,
        max_timestamp_offset=tail.largest.offset,
        segment_created_ms=now_ms,
    )


def load_producers(
    segments: SegmentList,
    state: LogState,
    hints: LoadHints,
    log_start_offset: int,
    now_ms: int,
) -> ProducerState:
    """Return the producers' state as of the log end.

    It is read from the newest snapshot, and from the log after that snapshot.

    Raises:
        CorruptLogError, OSError: the log cannot be read.
    """
    end = state.log_end_offset
    producers = load_newest_snapshot(segments.directory, end)
    if producers is None:
        # A clean stop writes a snapshot, so a log that was closed without one had no
        # producers, and need not be read below the end that it had then. Behind that
        # end other processes may have appended since.
        known = hints.clean and log_start_offset <= hints.closed_end <= end
        producers = ProducerState(hints.closed_end if known else log_start_offset)
    producers.remove_expired(now_ms, hints.producer_id_expiration_ms)
    producers.now_ms = now_ms
    replay_log(producers, segments, state)
    return producers


def _recover_producers(
    segments: SegmentList,
    state: LogState,
    hints: LoadHints,
    log_start_offset: int,
    now_ms: int,
) -> ProducerState:
    """Return the producers' state after a crash, and rebuild the transaction indexes.

    A snapshot above the recovery point is not used: the log from that point on must be
    read anyway, for the abort markers in it.
    """
    end, point = state.log_end_offset, hints.recovery_point
    producers = load_newest_snapshot(segments.directory, min(point, end))
    if producers is None:
        producers = ProducerState(log_start_offset)
    producers.remove_expired(now_ms, hints.producer_id_expiration_ms)
    producers.now_ms = now_ms
    aborted: list[AbortedTransaction] = []
    producers.aborted = aborted
    replay_log(producers, segments, state)
    producers.aborted = None
    for segment, following in pairwise([*segments.from_offset(point), None]):
        assert segment is not None
        until = end if following is None else following.base_offset
        first = bisect_left(aborted, segment.base_offset, key=_last_offset)
        here = aborted[first : bisect_left(aborted, until, key=_last_offset)]
        restore_aborted(segment.txn_index_path, here, point)
    return producers


def remove_leftovers(directory: str) -> None:
    """Remove temporary and deleted files, and finish an interrupted compaction.

    Raises:
        OSError: the directory cannot be read or changed.
    """
    names = sorted(os.listdir(directory))
    logs = {name[: -len(LOG_SUFFIX)] for name in names if name.endswith(LOG_SUFFIX)}
    for name in names:
        # An index without its log is left from a deletion that was interrupted.
        stem, dot, suffix = name.partition(".")
        orphan = dot + suffix in SEGMENT_SUFFIXES and stem not in logs
        if orphan or name.endswith((CLEANED_SUFFIX, DELETED_SUFFIX, _TEMPORARY_SUFFIX)):
            remove_if_exists(f"{directory}/{name}")
    for base in base_offsets(directory, LOG_SUFFIX + SWAP_SUFFIX):
        finish_swap(directory, base)
    for name in os.listdir(directory):
        if name.endswith(SWAP_SUFFIX):
            remove_if_exists(f"{directory}/{name}")


def finish_swap(directory: str, base_offset: int) -> None:
    """Put a compacted copy (`.swap` files) in the place of the segments it replaces.

    The replaced segments are those that start within the copy's range of offsets. The
    `.log.swap` file is complete and on disk, because it gets that name last (see
    SegmentWriter.install); if it is damaged nevertheless, nothing is replaced. This
    may be interrupted and repeated until ``install_swap`` has renamed that file.

    Raises:
        OSError: a file cannot be read, renamed or removed.
    """
    swap = LogSegment(directory, base_offset, SWAP_SUFFIX)
    try:
        tail = recover_segment(swap, trusted_below=TRUST_ALL, index_interval_bytes=4096)
    finally:
        swap.close()
    if tail.truncated_bytes:
        return
    for base in base_offsets(directory, LOG_SUFFIX):
        if base_offset < base < tail.next_offset:
            for suffix in SEGMENT_SUFFIXES:
                remove_if_exists(segment_file(directory, base, suffix))
    install_swap(directory, base_offset)
    sync_directory(directory)


def install_swap(directory: str, base_offset: int) -> None:
    """Rename a `.swap` segment's files to their final names.

    The log file is the last one. If the process is killed before that, `.log.swap`
    still exists, and the next owner of the row's lock, or the next start, renames the
    rest.
    """
    for suffix in reversed(SEGMENT_SUFFIXES):
        final = segment_file(directory, base_offset, suffix)
        try:
            os.rename(final + SWAP_SUFFIX, final)
        except FileNotFoundError:
            continue


def _recover(
    segments: SegmentList, hints: LoadHints, on_disk: int, index_interval_bytes: int
) -> SegmentTail:
    """Recover segments that may be damaged, oldest first, and cut the log if needed.

    Args:
        segments: all segments of the partition.
        hints: the partition's checkpoint entries; batches below their recovery point
            are not checked.
        on_disk: the log below this offset is on disk; after a crash the rest is forced
            to disk.
        index_interval_bytes: bytes of log between two entries of a rebuilt index.

    Returns:
        The tail of the last segment that is left, which is the active one.

    Raises:
        CorruptLogError: segments overlap, or have an old message format.
        OSError: a file cannot be read or written.
    """
    if not hints.clean:
        _remove_uncommitted_roll(segments, hints, index_interval_bytes)
    names = set(os.listdir(segments.directory))
    bases = list(segments.bases)
    for slot, base in enumerate(bases):
        active = slot == len(bases) - 1
        end = bases[slot + 1] if not active else None
        indexed = {
            f"{base:020d}{INDEX_SUFFIX}",
            f"{base:020d}{TIME_INDEX_SUFFIX}",
        } <= names
        # Not a segment that ends at the recovery point: it may have been active when
        # its indexes were forced to disk, and have got its last entry afterwards.
        checked = hints.clean or (end is not None and end < hints.recovery_point)
        if checked and indexed and not active:
            if not hints.clean and end is not None and end > on_disk:
                _force_to_disk(segments.get(base), indexes=False)
            continue
        if not indexed:
            trusted = TRUST_NOTHING
        else:
            trusted = TRUST_ALL if hints.clean else hints.recovery_point
        segment = segments.get(base)
        tail = recover_segment(
            segment,
            trusted_below=trusted,
            index_interval_bytes=index_interval_bytes,
            # In an upgrade clients wait; what is in doubt has no end that was checked.
            prepare=None if hints.clean or hints.checked_end else _drop_from_cache,
        )
        if tail.truncated_bytes:
            _refuse_old_format(segment, tail.size)
        overlaps = end is not None and tail.next_offset > end
        if tail.truncated_bytes or overlaps or active:
            if overlaps:
                raise CorruptLogError(
                    f"{segment.path} ends at offset {tail.next_offset}, the next"
                    f" segment starts at {end}"
                )
            # Remove the later segments before the cut, newest first. If this process is
            # killed in between, the damaged end is still there, and the next load finds
            # it and goes on. After the cut the segment looks complete: a later segment
            # would then count as valid, with a gap of offsets before it.
            for later in reversed(bases[slot + 1 :]):
                _remove_segment(segments, later)
            segment.truncate(tail.size)
            if not hints.clean or tail.truncated_bytes:
                _force_to_disk(segment)
            return tail
        segment.finish(
            tail.size, tail.index_entries, tail.time_index_entries, tail.largest
        )
        _force_to_disk(segment)
        segment.close()
    raise AssertionError("a log has an active segment")


def _drop_from_cache(segment: LogSegment, position: int) -> None:
    """Drop a segment from the page cache, so that it is read from the disk.

    The disk may lack bytes that the cache has: a process may have been told of a failed
    write, and been killed with all others before any of them could note it. The kernel
    marks such lost pages as clean, so the cache can drop them.

    Args:
        segment: the segment.
        position: all bytes before this position are on disk.

    Raises:
        OSError: the disk failed.
    """
    _force_to_disk(segment, indexes=False)
    whole_pages = position - position % mmap.PAGESIZE
    os.posix_fadvise(segment.fd, whole_pages, 0, os.POSIX_FADV_DONTNEED)


def _force_to_disk(segment: LogSegment, *, indexes: bool = True) -> None:
    """Force a segment to disk. If that fails, note it in `partition.offline`.

    Whatever the error is, the next load must not believe the page cache: after the
    error of a full disk, for example, the partition is loaded again at once.

    Args:
        segment: the segment.
        indexes: whether to force the indexes to disk, too.

    Raises:
        OSError: the disk failed.
    """
    try:
        if indexes:
            segment.sync()
        else:
            os.fdatasync(segment.fd)
    except OSError as error:
        mark_offline(segment.directory, str(error))
        raise


def _remove_uncommitted_roll(
    segments: SegmentList, hints: LoadHints, index_interval_bytes: int
) -> None:
    """Remove an empty last segment if the segment before it ends above its base offset.

    The process that made the empty segment was killed before its roll was committed,
    and other processes went on appending to the segment before it.
    """
    while len(segments.bases) > 1:
        *_, ahead, last = segments.bases
        if segments.get(last).file_size():
            return
        tail = recover_segment(
            segments.get(ahead),
            trusted_below=hints.recovery_point,
            index_interval_bytes=index_interval_bytes,
        )
        if tail.next_offset <= last:
            return
        _remove_segment(segments, last)


def _start_again(segments: SegmentList, offset: int) -> SegmentTail:
    """Remove all segments, make an empty one at an offset, and return its end."""
    for base in list(segments.bases):
        _remove_segment(segments, base)
    segment = LogSegment(segments.directory, offset)
    segment.create()
    segment.close()
    sync_directory(segments.directory)
    segments.reload(offset, keep_open=False)
    return recover_segment(
        segment, trusted_below=TRUST_NOTHING, index_interval_bytes=4096
    )


def _refuse_old_format(segment: LogSegment, position: int) -> None:
    """Refuse to load a segment that would be cut off at a message of an old format.

    Raises:
        CorruptLogError: there is a message of format 0 or 1 at this position.
    """
    magic = old_magic_at(segment.fd, position)
    if magic is not None:
        raise CorruptLogError(
            f"{segment.path} holds message format {magic} at position {position}, which"
            " is not supported: let Apache Kafka rewrite it in format 2"
        )


def _remove_segment(segments: SegmentList, base_offset: int) -> None:
    segments.forget(base_offset)
    for suffix in SEGMENT_SUFFIXES:
        remove_if_exists(segment_file(segments.directory, base_offset, suffix))

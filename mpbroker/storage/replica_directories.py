"""Find a partition in several log directories, also while it moves to another one.

A partition that is to move has a second directory in the log directory that it moves
to, `<topic>-<partition>.<32 hex digits>-future`, into which its files are copied. That
directory is all that is known of the move: it is made by the request, lasts over
restarts, and is renamed to `-delete` if the move is cancelled.

The end of a move is two renames, which no file system makes as one:

    1. the copy, which is complete and on disk, gets the partition's plain name
    2. the old directory is renamed to `-delete`

Killed between the two, both log directories have a directory of that name. The copy has
a file `partition.moved`, which names the old directory, so that the next process which
takes the partition's lock makes the second rename. No process has appended meanwhile:
the row's structure version is odd.

Source: Kafka's LogManager.replaceCurrentWithFutureLog; KIP-113.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mpbroker.base.directories import sync_directory
from mpbroker.base.logger import get_logger
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.storage.files.batch_scan import scan_batches
from mpbroker.storage.files.log_files import (
    DELETE_DIRECTORY_SUFFIX,
    FUTURE_DIRECTORY_SUFFIX,
    LOG_SUFFIX,
    MOVED_FILE,
    STRAY_DIRECTORY_SUFFIX,
    base_offsets,
    file_size,
    remove_if_exists,
    segment_file,
    write_file,
)
from mpbroker.storage.partition_directory import (
    DIRECTORY_MODE,
    complete_directory,
    directory_name,
    future_name,
    parse_future_name,
    rename_away,
)

if TYPE_CHECKING:
    from mpbroker.ipc.tables.partition_table import LogState
    from mpbroker.storage.log.partition_view import PartitionView

logger = get_logger(__name__)


class FutureReplica(NamedTuple):
    """The copy of a partition that moves to another log directory.

    Attributes:
        topic: the topic's name.
        partition: the partition number.
        log_directory: the path of the log directory that it moves to.
        path: the copy's directory.
    """

    topic: str
    partition: int
    log_directory: str
    path: str


def future_replicas(log_directory: str) -> Iterator[FutureReplica]:
    """Yield the copies that a log directory has.

    Raises:
        OSError: it cannot be read.
    """
    for name in os.listdir(log_directory):
        if name.endswith(FUTURE_DIRECTORY_SUFFIX):
            found = parse_future_name(name)
            if found is not None:
                yield FutureReplica(*found, log_directory, f"{log_directory}/{name}")


def begin_move(
    log_directories: Sequence[str],
    current: str,
    destination: str,
    partition: tuple[str, int],
    topic_id: bytes,
) -> None:
    """Begin to move a partition. A move to any other log directory is cancelled.

    The caller has the row's lock. It may be killed at any point, and do all again.

    Args:
        log_directories: the paths of all that can be used.
        current: the one that the partition is in.
        destination: the one that it is to be in.
        partition: topic name and partition number.
        topic_id: the topic's id.

    Raises:
        OSError: one of the two cannot be read, or a directory cannot be renamed or
            made.
    """
    is_under_way = False
    for log_directory in log_directories:
        try:
            futures = list(future_replicas(log_directory))
        except OSError:
            if log_directory in (current, destination):
                raise
            # A disk that has failed and has no part in this. If it has a copy of the
            # partition, that one moves after all should the disk come back.
            continue
        for future in futures:
            if (future.topic, future.partition) != partition:
                continue
            if log_directory == destination != current and not is_under_way:
                is_under_way = True
            else:
                rename_away(future.path, DELETE_DIRECTORY_SUFFIX)
    if destination != current and not is_under_way:
        path = f"{destination}/{future_name(directory_name(*partition))}"
        os.mkdir(path, DIRECTORY_MODE)
        complete_directory(path, topic_id)


def put_in_place(future: str, current: str) -> str:
    """Put a copy in the place of a partition's directory; return its new path.

    The caller has the row's lock, the structure version is odd, and the copy is
    complete and on disk.

    Raises:
        OSError: a directory cannot be renamed. Then the partition is where it was, if
            that is possible; else the next owner of the lock tries to go on.
    """
    parent = os.path.dirname(future)
    placed = f"{parent}/{os.path.basename(current)}"
    write_file(f"{future}/{MOVED_FILE}", f"version: 0\nfrom: {current}\n".encode())
    # Killed before this, the partition is where it was, and the copy is begun anew.
    # Killed after it, `settle_move` does the rest.
    os.rename(future, placed)
    try:
        sync_directory(parent)
        rename_away(current, DELETE_DIRECTORY_SUFFIX)
    except OSError:
        os.rename(placed, future)
        raise
    _remove_mark(placed, current)
    return placed


def _remove_mark(placed: str, current: str) -> None:
    """Remove the mark of a move, after its second rename is on disk.

    If that cannot be known the mark stays: both directories may be there after a power
    cut, and it says which one has the records since the move.
    """
    try:
        sync_directory(os.path.dirname(current))
    except OSError as error:
        logger.error("%s: the names in it are not on disk: %s", current, error)
        return
    remove_if_exists(f"{placed}/{MOVED_FILE}")


def settle_move(paths: Sequence[str], log_directories: Sequence[str]) -> str:
    """Finish a move that was interrupted between its two renames; return the directory.

    The caller has the row's lock.

    Args:
        paths: all directories of the partition, at least one; more than one only if a
            move was interrupted, or if somebody has copied one.
        log_directories: the log directories that can be used now. While the one that
            the partition has left cannot, the mark of the move stays: the old directory
            may still be there when it comes back.

    Raises:
        OSError: a directory cannot be read or renamed.
    """
    marked = [path for path in paths if os.path.exists(f"{path}/{MOVED_FILE}")]
    if len(marked) != 1:
        return max(paths, key=_extent)  # the first of those that are equally long
    (placed,) = marked
    current = _moved_from(placed)
    if current in paths and current != placed:
        if _extent(current) > _extent(placed):
            # The copy's log directory was away for a while, and the old directory was
            # appended to.
            gone = rename_away(placed, STRAY_DIRECTORY_SUFFIX)
            logger.warning("%s has more records than %s", current, gone)
            return current
        sync_directory(os.path.dirname(placed))
        rename_away(current, DELETE_DIRECTORY_SUFFIX)
        logger.info("%s was moved to %s", current, placed)
    elif len(paths) > 1:
        return max(paths, key=_extent)
    elif os.path.dirname(current) not in log_directories:
        return placed
    _remove_mark(placed, current)
    return placed


def _moved_from(placed: str) -> str:
    with open(f"{placed}/{MOVED_FILE}", encoding="utf-8") as file:
        return file.read().partition("from: ")[2].rstrip("\n")


def _extent(directory: str) -> tuple[int, int]:
    """Return base offset and size of a log's last segment, which tell which is longer.

    The two logs have the same bytes as far as they go.
    """
    bases = base_offsets(directory, LOG_SUFFIX)
    if not bases:
        return -1, 0
    return bases[-1], file_size(segment_file(directory, bases[-1], LOG_SUFFIX))


def copied_size(path: str) -> int:
    """Return the bytes of a copy's `.log` files; 0: it was removed meanwhile."""
    try:
        bases = base_offsets(path, LOG_SUFFIX)
    except FileNotFoundError:
        return 0
    return sum(file_size(segment_file(path, base, LOG_SUFFIX)) for base in bases)


def copied_end(view: PartitionView, path: str) -> int:
    """Return the offset behind the last whole batch in a copy of a partition's log.

    Only committed batches count. If the copy has no segment, or was removed meanwhile,
    this is the base offset of the log's first segment.

    Args:
        view: the partition.
        path: the copy's directory.

    Raises:
        ApiError: the partition cannot be read.
    """
    try:
        bases = base_offsets(path, LOG_SUFFIX)
    except FileNotFoundError:
        bases = []
    if not bases:
        return view.first_base_offset()
    base = bases[-1]
    size = file_size(segment_file(path, base, LOG_SUFFIX))

    def look(state: LogState) -> int:
        end = base
        if base not in view.segments.bases:
            return end
        segment = view.segments.get(base)
        committed, entries = segment.extent(state)
        until = min(size, committed)
        start = segment.offset_index.position_at(until, entries)
        for position, header in scan_batches(segment.fd, start, committed):
            if position + header.size_in_bytes > until:
                break
            end = header.last_offset + 1
        view.close_unless_active(segment)
        return end

    return view.look(look)

"""Check the end of a segment, and rebuild its indexes to fit.

This is done when a log is loaded. The part of a segment below some offset is trusted:
all of it after a clean stop; the part below the recovery point after a crash; none of
it if an index file is missing. From the last index entry below that offset on, every
batch is checked. The first batch that is not whole, or has a wrong checksum, ends the
log.

Source: Kafka's LogSegment.recover.
"""

from collections.abc import Callable
from typing import Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.base.storage_errors import CorruptIndexError, CorruptLogError
from mpbroker.storage.files.batch_scan import scan_valid_batches
from mpbroker.storage.files.log_segment import LogSegment
from mpbroker.storage.files.time_index import TimestampOffset

TRUST_ALL: Final = 1 << 62
TRUST_NOTHING: Final = -1
_MAX_RELATIVE_OFFSET: Final = 0x7FFF_FFFF


class SegmentTail(NamedTuple):
    """How far a segment is valid, and its index sizes, as recovery found them.

    Attributes:
        next_offset: the offset after the last valid batch.
        size: bytes of the log file up to the end of the last valid batch.
        index_entries: number of entries in the offset index.
        time_index_entries: number of entries in the time index.
        bytes_since_index: bytes of log since the last index entry was made.
        largest: the largest timestamp (ms), and the last offset of the batch with it.
        truncated_bytes: bytes of the log file behind ``size``, to be cut off.
    """

    next_offset: int
    size: int
    index_entries: int
    time_index_entries: int
    bytes_since_index: int
    largest: TimestampOffset
    truncated_bytes: int


def recover_segment(
    segment: LogSegment,
    *,
    trusted_below: int,
    index_interval_bytes: int,
    prepare: Callable[[LogSegment, int], None] | None = None,
) -> SegmentTail:
    """Check a segment's batches from the last trusted index entry on.

    The indexes are rewritten to fit. The log file is not cut: the caller first removes
    all later segments, and then cuts it to ``size``.

    A process that is killed in here leaves an index with fewer entries. The partition
    is still unloaded, so the next process runs the same recovery again.

    Args:
        segment: the segment; its log file exists, and a missing index is made.
        trusted_below: index entries of offsets below this one are trusted, if they are
            in ascending order and the last of them points at its batch.
        index_interval_bytes: bytes of log between two entries of the offset index.
        prepare: called before batches are checked, with the segment and the position in
            its log file (in bytes) from which on they are checked.

    Raises:
        OSError: the files cannot be read or cut, or ``prepare`` has raised it.
    """
    fd, file_size = segment.fd, segment.file_size()
    entries, time_entries, position = _trusted_entries(
        segment, trusted_below, file_size
    )
    if prepare is not None:
        prepare(segment, position)
    max_timestamp, max_offset = segment.time_index.last_entry(time_entries)
    indexed_timestamp = max_timestamp
    found: list[tuple[int, int]] = []
    found_times: list[TimestampOffset] = []
    base_offset = next_offset = segment.base_offset
    end, since_index = position, 0
    for here, batch_end, base, last, timestamp, count in scan_valid_batches(
        fd, position, file_size
    ):
        if base < next_offset or last - base_offset > _MAX_RELATIVE_OFFSET:
            break  # these bytes are from an append that was never committed
        if timestamp > max_timestamp and count:
            max_timestamp, max_offset = timestamp, last
        if since_index > index_interval_bytes:
            found.append((last, here))
            since_index = 0
            if max_timestamp > indexed_timestamp:
                found_times.append(TimestampOffset(max_timestamp, max_offset))
                indexed_timestamp = max_timestamp
        since_index += batch_end - here
        next_offset, end = last + 1, batch_end
    if position and end == position:
        # The batch at the last index entry is damaged, so the offset of what follows
        # is not known: check the segment from its beginning.
        segment.offset_index.forget()
        return recover_segment(
            segment,
            trusted_below=TRUST_NOTHING,
            index_interval_bytes=index_interval_bytes,
            prepare=prepare,
        )
    # Cut first: entries beyond the trusted ones may point at bytes that are not valid.
    segment.offset_index.truncate(entries)
    segment.time_index.truncate(time_entries)
    segment.offset_index.write_entries(entries, found)
    segment.time_index.write_entries(time_entries, found_times)
    entries += len(found)
    time_entries += len(found_times)
    return SegmentTail(
        next_offset,
        end,
        entries,
        time_entries,
        since_index,
        TimestampOffset(max_timestamp, max_offset),
        file_size - end,
    )


def _trusted_entries(
    segment: LogSegment, trusted_below: int, file_size: int
) -> tuple[int, int, int]:
    """Return the number of index entries that can be trusted, and where to check on.

    Args:
        segment: the segment.
        trusted_below: as for ``recover_segment``.
        file_size: the size of the log file in bytes.

    Returns:
        The number of entries of the offset index, the number of entries of the time
        index, and the position in bytes from which on batches must be checked.
        (0, 0, 0): no entry can be trusted.
    """
    if trusted_below <= segment.base_offset:
        return 0, 0, 0
    index, time_index = segment.offset_index, segment.time_index
    try:
        entries = index.entries_below(trusted_below, index.file_entries())
        if not entries:
            return 0, 0, 0
        index.check(entries, file_size)
        last_offset, position = index.entry(entries - 1)
        # The entry must point at the batch that it names.
        if segment.find(last_offset, file_size, entries)[0] != position:
            raise CorruptIndexError(
                f"{index.path}: the last entry does not point at its batch"
            )
        time_entries = time_index.entries_below(
            last_offset + 1, time_index.file_entries()
        )
        time_index.check(time_entries)
    except (CorruptIndexError, CorruptLogError):
        index.forget()
        return 0, 0, 0
    return entries, time_entries, position

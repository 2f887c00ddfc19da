"""Find out what of a segment can be trusted, and rebuild the rest of its indexes.

Used when a log is loaded. A segment is believed up to some offset: all of it after a
clean stop, up to the recovery point after a crash, nothing of it without indexes. From
the last index entry below that offset on, every batch is checked, and the first that
is torn ends the log.

Source: Kafka's LogSegment.recover.
"""

from typing import Final, NamedTuple

from mpbroker.base.storage_errors import CorruptIndexError, CorruptLogError
from mpbroker.storage.files.batch_scan import scan_valid_batches
from mpbroker.storage.files.log_segment import LogSegment
from mpbroker.storage.files.time_index import TimestampOffset

TRUST_ALL: Final = 1 << 62
TRUST_NOTHING: Final = -1
_MAX_RELATIVE_OFFSET: Final = 0x7FFF_FFFF


class SegmentTail(NamedTuple):
    """What a segment holds after its recovery."""

    next_offset: int
    size: int
    index_entries: int
    time_index_entries: int
    bytes_since_index: int
    largest: TimestampOffset
    truncated_bytes: int


def recover_segment(
    segment: LogSegment, *, trusted_below: int, index_interval_bytes: int
) -> SegmentTail:
    """Check a segment's batches from the last trusted index entry on.

    The indexes are made to fit; cutting the log to ``size`` is left to the caller, who
    first removes the segments after it.

    Args:
        trusted_below: index entries of offsets below this one are believed, if they
            rise and the last of them points at its batch.

    Raises:
        OSError: the files cannot be read or cut.
    """
    fd, file_size = segment.fd, segment.file_size()
    entries, time_entries, position = _trusted_entries(
        segment, trusted_below, file_size
    )
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
            break  # bytes of an append that was never committed
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
        # The batch that was to say which offset comes here is not right itself.
        segment.offset_index.forget()
        return recover_segment(
            segment,
            trusted_below=TRUST_NOTHING,
            index_interval_bytes=index_interval_bytes,
        )
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
    """Return (index entries, time index entries, position of the last entry)."""
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
            raise CorruptIndexError(f"{index.path}: the last entry points elsewhere")
        time_entries = time_index.entries_below(
            last_offset + 1, time_index.file_entries()
        )
        time_index.check(time_entries)
    except (CorruptIndexError, CorruptLogError):
        index.forget()
        return 0, 0, 0
    return entries, time_entries, position

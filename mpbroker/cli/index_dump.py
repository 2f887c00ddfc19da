"""Read a segment's index files, and compare every entry with the segment."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

from mpbroker.cli.segment_dump import iter_segment, open_bytes
from mpbroker.protocol.errors import ProtocolError
from mpbroker.protocol.records.record_batch import (
    BatchHeader,
    iter_records,
    parse_batch_header,
)

_OFFSET_ENTRY: Final = Struct(">ii")
_TIME_ENTRY: Final = Struct(">qi")
_NO_TIMESTAMP: Final = -1


class OffsetEntry(NamedTuple):
    """An entry of a `.index` file.

    The batch at byte ``position`` of the segment ends with ``offset``.
    """

    offset: int
    position: int


class TimeEntry(NamedTuple):
    """An entry of a `.timeindex` file.

    ``timestamp`` (ms since 1970) is the largest one of all batches up to the batch that
    ends with ``offset``.
    """

    timestamp: int
    offset: int


def _whole_entries(view: memoryview, entry: Struct) -> memoryview:
    return view[: len(view) - len(view) % entry.size]


def read_offset_index(view: memoryview, base_offset: int) -> list[OffsetEntry]:
    """Return the entries of a `.index` file.

    A file may be longer than its entries: Kafka creates it at its full size, and the
    part that is not used yet is zero.
    """
    entries: list[OffsetEntry] = []
    for relative, position in _OFFSET_ENTRY.iter_unpack(
        _whole_entries(view, _OFFSET_ENTRY)
    ):
        if not relative and entries:
            break
        entries.append(OffsetEntry(base_offset + relative, position))
    if entries == [OffsetEntry(base_offset, 0)] and len(view) > _OFFSET_ENTRY.size:
        return []  # nothing but zeros
    return entries


def read_time_index(view: memoryview, base_offset: int) -> list[TimeEntry]:
    """Return the entries of a `.timeindex` file; see `read_offset_index`."""
    entries: list[TimeEntry] = []
    for timestamp, relative in _TIME_ENTRY.iter_unpack(
        _whole_entries(view, _TIME_ENTRY)
    ):
        if not relative and (entries or not timestamp):
            break
        entries.append(TimeEntry(timestamp, base_offset + relative))
    return entries


def check_sizes(path: Path, view: memoryview, *, time_index: bool) -> list[str]:
    """Return a line of text if an index file ends within an entry, otherwise none.

    A broker rebuilds such an index.
    """
    entry = _TIME_ENTRY if time_index else _OFFSET_ENTRY
    extra = len(view) % entry.size
    if extra:
        return [f"{path}: {len(view)} bytes are not a multiple of {entry.size}"]
    return []


def check_offset_index(
    path: Path, entries: list[OffsetEntry], segment: memoryview
) -> list[str]:
    """Return a line of text for each `.index` entry that contradicts the segment."""
    problems = []
    for entry in entries:
        header = _header_at(segment, entry.position)
        if header is None:
            problems.append(
                f"  Index offset: {entry.offset}, no batch at position {entry.position}"
            )
        elif header.last_offset != entry.offset:
            problems.append(
                f"  Index offset: {entry.offset}, log offset: {header.last_offset}"
            )
    for before, after in pairwise(entries):
        if after.offset <= before.offset or after.position <= before.position:
            problems.append(
                f"  Index offset: {after.offset} comes after {before.offset}"
            )
    return [f"Mismatches in :{path}", *problems] if problems else []


def _header_at(segment: memoryview, position: int) -> BatchHeader | None:
    if position < 0:
        return None
    try:
        return parse_batch_header(segment, position)
    except ProtocolError:
        return None


def check_time_index(
    path: Path,
    entries: list[TimeEntry],
    offset_entries: list[OffsetEntry],
    segment: memoryview,
) -> list[str]:
    """Return lines of text about `.timeindex` entries that contradict the segment."""
    mismatches, disorder, missing = [], [], []
    before = _NO_TIMESTAMP
    for entry in entries:
        found, largest = _find(entry.offset, offset_entries, segment)
        if found != entry.offset:
            missing.append(f"Indexed offset: {entry.offset}, found log offset: {found}")
        else:
            if largest != entry.timestamp:
                mismatches.append(
                    f"  Index timestamp: {entry.timestamp}, log timestamp: {largest}"
                )
            if before >= entry.timestamp:
                disorder.append(
                    f"  Index timestamp: {entry.timestamp}, Previously indexed"
                    f" timestamp: {before}"
                )
        before = entry.timestamp
    problems = []
    if mismatches:
        problems += [f"Found timestamp mismatch in :{path}", *mismatches]
    if disorder:
        problems += [f"Found out of order timestamp in :{path}", *disorder]
    if missing:
        problems += [
            "The following indexed offsets are not found in the log.",
            *missing,
        ]
    return problems


def _find(
    offset: int, offset_entries: list[OffsetEntry], segment: memoryview
) -> tuple[int, int]:
    """Find the batch with an offset; return its last offset and largest timestamp.

    Both are -1 if the segment has no such batch.
    """
    slot = bisect_right(offset_entries, (offset, 1 << 62)) - 1
    start = offset_entries[slot].position if slot >= 0 else 0
    for batch in iter_segment(segment[start:] if start <= len(segment) else segment):
        if batch.header.last_offset >= offset:
            return batch.header.last_offset, _largest_timestamp(batch.data)
    return -1, _NO_TIMESTAMP


def _largest_timestamp(data: memoryview) -> int:
    try:
        return max(_timestamps(data), default=_NO_TIMESTAMP)
    except ProtocolError:
        return parse_batch_header(data).max_timestamp


def _timestamps(data: memoryview) -> Iterator[int]:
    return (record.timestamp for record in iter_records(data))


def sibling(path: Path, suffix: str) -> memoryview:
    """Map the file of the same segment that has another suffix, such as .log.

    Raises:
        OSError: the file cannot be read.
    """
    return open_bytes(path.with_suffix(suffix))

"""Read a log to its end though parts of it may be damaged.

Who reads for clients believes what was committed, and stops where that is odd. Who must
know all that a log says, and writes behind it, cannot stop: here every batch is
checked, and what is not whole is passed over.

A batch is whole if its checksum is right, whatever its base offset says, which is not
under it: the place in the file says as much. Behind one that is not, every position is
tried, up to the next batch that an index entry points at, or the segment's end. Records
may hold anything, also bytes that look like a batch, put there by a client. So what is
found counts only if whole batches lead from it to that known place; or if it is where
the damaged batch's length says, or where its checksum is right.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from mpbroker.protocol.records.batch_header import (
    ATTRIBUTES_POSITION,
    BATCH_HEADER_SIZE,
    HEADER,
    LOG_OVERHEAD,
    MAGIC,
    MIN_BATCH_LENGTH,
    BatchHeader,
)
from mpbroker.protocol.records.crc32c import crc32c

if TYPE_CHECKING:
    from mpbroker.ipc.tables.partition_table import LogState
    from mpbroker.storage.files.log_segment import LogSegment
    from mpbroker.storage.log.partition_view import PartitionView

# What is tried byte by byte for one damaged batch; index entries come every few KiB.
_MAX_SEARCHED: Final = 128 * 1024 * 1024
# Bytes under checksums while trying: records may be full of what looks like headers.
_MAX_CHECKED: Final = 1 << 30
T = TypeVar("T")


class Damage(NamedTuple):
    """What is wrong in a log, and where."""

    offset: int  # that comes here, or as far as is known a lower one
    what: str


class _Place(NamedTuple):
    structure: int  # of the files that it is in
    segment: int  # its base offset
    position: int
    floor: int  # the lowest offset that may come
    is_damaged: bool = False  # there


class _Piece(NamedTuple):
    """Bytes of a segment, and what their offsets may be."""

    place: _Place
    path: str
    data: bytes
    below: int  # all offsets are


def walk_log(
    view: PartitionView,
    from_offset: int,
    max_bytes: int,
    take: Callable[[BatchHeader, memoryview], Sequence[T]],
) -> Iterator[tuple[list[T], list[Damage]]]:
    """Yield what is made of all whole batches from an offset on, some at a time.

    Beside it what is wrong in the log there. The first may start below the offset.

    Args:
        max_bytes: to read at once, except of a batch that is larger.
        take: makes it of a batch.

    Raises:
        ApiError: KAFKA_STORAGE_ERROR, UNKNOWN_TOPIC_OR_PARTITION.
    """
    walk = _Walk(view, from_offset, max_bytes)
    damage: list[Damage] = []
    while (found := view.look(walk.read)) is not None:
        taken: list[T] = []
        if isinstance(found, _Piece):
            damage += walk.parse(found, take, taken)
        else:
            walk.place, behind = found
            damage += behind
        if taken:
            yield taken, damage
            damage = []
    if damage:
        yield [], damage


class _Walk:
    def __init__(self, view: PartitionView, from_offset: int, max_bytes: int) -> None:
        self._view = view
        self._from_offset = from_offset
        self._max_bytes = max(max_bytes, BATCH_HEADER_SIZE)
        self.place: _Place | None = None

    def read(self, state: LogState) -> _Piece | tuple[_Place, list[Damage]] | None:
        """Read on from the place, which stays as it is: this may be done again.

        Returns:
            What was read; or the place to go on from, behind a segment's end or what is
            wrong there; None: there is no more.
        """
        structure = self._view.row.structure_version
        place = self.place
        if place is None or place.structure != structure:
            place = self._locate(state, structure)
        segments = self._view.segments
        segment = segments.get(place.segment)
        following = segments.next_base(place.segment)
        end, entries = segment.extent(state)
        position = place.position
        if position >= end:
            if following is None:
                return None
            segment.close()
            return _Place(structure, following, 0, following), []
        below = state.log_end_offset if following is None else following
        if place.is_damaged:
            behind = _find_behind(segment, place, end, entries, below)
            what = (
                f"from position {position} to {behind} of {segment.path} there is no"
                " whole batch"
            )
            damage = Damage(max(place.floor, self._from_offset), what)
            return place._replace(position=behind, is_damaged=False), [damage]
        fd = segment.fd
        data = os.pread(fd, min(self._max_bytes, end - position), position)
        if len(data) >= BATCH_HEADER_SIZE:
            first = HEADER.unpack_from(data)[1] + LOG_OVERHEAD
            if len(data) < first <= end - position:
                data = os.pread(fd, first, position)
        return _Piece(place, segment.path, data, below)

    def _locate(self, state: LogState, structure: int) -> _Place:
        """Find where to begin, or to go on in files that are others by now."""
        if self.place is not None:
            self._from_offset = max(self._from_offset, self.place.floor)
        offset, segments = self._from_offset, self._view.segments
        segment = segments.floor(offset) or segments.get(segments.bases[0])
        _, entries = segment.extent(state)
        position = segment.offset_index.lookup(offset, entries)
        return _Place(structure, segment.base_offset, position, segment.base_offset)

    def parse(
        self,
        piece: _Piece,
        take: Callable[[BatchHeader, memoryview], Sequence[T]],
        taken: list[T],
    ) -> list[Damage]:
        """Take the whole batches that a piece begins with, and go behind them."""
        place, path, data, below = piece
        _, lowest, position, floor, _ = place
        view = memoryview(data)
        have, at, from_offset = len(data), 0, self._from_offset
        unpack, checksum, new = HEADER.unpack_from, crc32c, tuple.__new__
        damage: list[Damage] = []
        while have - at >= BATCH_HEADER_SIZE:
            fields = unpack(data, at)
            base, length, _, magic, crc, _, delta, _, _, _, _, _, _ = fields
            behind = at + length + LOG_OVERHEAD
            if length < MIN_BATCH_LENGTH or magic != MAGIC:
                break
            if behind > have or delta < 0:
                break
            batch = view[at:behind]
            if checksum(batch[ATTRIBUTES_POSITION:]) != crc:
                break
            header = new(BatchHeader, fields)
            last = base + delta
            if base < floor or last >= below:
                what = (
                    f"the batch at position {position + at} of {path} says that it is"
                    f" at offset {base}; it is used"
                )
                damage.append(Damage(max(floor, from_offset), what))
                header = header._replace(base_offset=floor)
                # Below what came before, it may be that which was wrong: the next one
                # is held to this. It is named itself, if not.
                last = max(lowest, min(base, floor)) + delta
            if header.base_offset + delta >= from_offset:
                taken += take(header, batch)
            floor = last + 1
            at = behind
        self.place = place._replace(
            position=position + at, floor=floor, is_damaged=at == 0
        )
        return damage


def _is_whole(data: memoryview, at: int) -> int:
    """Return the size of the whole batch that is there; 0: none is."""
    if len(data) - at < BATCH_HEADER_SIZE:
        return 0
    _, length, _, magic, crc, _, delta = HEADER.unpack_from(data, at)[:7]
    end = at + length + LOG_OVERHEAD
    if length < MIN_BATCH_LENGTH or magic != MAGIC or end > len(data) or delta < 0:
        return 0
    return end - at if crc32c(data[at + ATTRIBUTES_POSITION : end]) == crc else 0


def _is_whole_at(fd: int, position: int, end: int) -> bool:
    """Say whether a whole batch is at a position of a file."""
    if end - position < BATCH_HEADER_SIZE:
        return False
    head = os.pread(fd, LOG_OVERHEAD, position)
    size = int.from_bytes(head[8:], "big", signed=True) + LOG_OVERHEAD
    if not BATCH_HEADER_SIZE <= size <= end - position:
        return False
    return _is_whole(memoryview(os.pread(fd, size, position)), 0) > 0


def _find_behind(
    segment: LogSegment, place: _Place, end: int, entries: int, below: int
) -> int:
    """Return where whole batches go on behind a damaged one; the end: nowhere."""
    fd, position = segment.fd, place.position
    known = end
    for entry in segment.offset_index.positions_above(position, entries):
        if _is_whole_at(fd, entry, end):
            known = entry
            break
    if known - position > _MAX_SEARCHED:
        return known
    return position + _search(
        os.pread(fd, known - position, position), place.floor, below
    )


def _search(data: bytes, floor: int, below: int) -> int:
    """Return where, behind a damaged batch, a whole one is; the end: nowhere.

    Args:
        data: from the damaged batch to a place where one is known to begin, or to the
            segment's end.
    """
    view, left = memoryview(data), _MAX_CHECKED
    # All offsets that may come begin with the same bytes; the magic follows them.
    first, last = floor.to_bytes(8, "big"), below.to_bytes(8, "big")
    same = next((i for i in range(8) if first[i] != last[i]), 8)
    pattern = re.compile(
        re.escape(first[:same]) + b".{%d}\\x02" % (16 - same), re.DOTALL
    )
    stated = int.from_bytes(data[8:LOG_OVERHEAD], "big", signed=True) + LOG_OVERHEAD
    crc = int.from_bytes(data[17:ATTRIBUTES_POSITION], "big")
    summed, so_far = ATTRIBUTES_POSITION, 0
    found = pattern.search(data, 1)
    while found is not None and left > 0:
        at = found.start()
        if len(data) - at < BATCH_HEADER_SIZE:
            break
        found = pattern.search(data, at + 1)
        base, length, *_, delta = HEADER.unpack_from(data, at)[:7]
        if not floor <= base < below - delta:
            continue
        left -= max(length, 0)
        size = _is_whole(view, at)
        if not size:
            continue
        if at >= BATCH_HEADER_SIZE:
            so_far = crc32c(view[summed:at], so_far)
            summed = at
            if at == stated or so_far == crc:
                return at
        behind = at + size
        while behind < len(data) and (size := _is_whole(view, behind)):
            behind += size
            left -= size
        if behind == len(data):
            return at
    return len(data)

"""Read all whole batches of a log to its end, and skip damaged parts.

A fetch trusts committed bytes, and fails where they are damaged. The coordinator has to
know all records of its log, and appends behind them, so it cannot stop at damage: here
every batch is checked, and parts that are not whole batches are skipped.

A batch is whole if its checksum is right. The checksum does not cover the base offset:
if that is wrong, the offset is taken from the place in the file.

Behind a damaged batch every position is tried up to the next known place: the next
whole batch that an index entry points at, or the segment's end. Records may contain
bytes that look like a batch, even put there by a client on purpose. So a batch that is
found counts only in one of these cases: whole batches follow it, one after another, up
to the known place; or it begins where the damaged batch ends by its length field; or
the bytes before it have the damaged batch's checksum.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from mpbroker.base.named_tuple import NamedTuple
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

# Bytes searched for the end of one damaged batch; index entries come every few KiB.
_MAX_SEARCHED: Final = 128 * 1024 * 1024
# Bytes checksummed in one search: records may be full of bytes that look like headers.
_MAX_CHECKED: Final = 1 << 30
T = TypeVar("T")


class Damage(NamedTuple):
    """One damaged part of a log.

    Attributes:
        offset: the first damaged offset, or a lower one if that is not known.
        what: a description, with file and position.
    """

    offset: int
    what: str


class _Place(NamedTuple):
    """A position in a log at which the walk over its batches is, or goes on.

    Attributes:
        structure: the structure version at which the files were listed.
        segment: the segment's base offset.
        position: the position in its log file, in bytes.
        floor: the lowest base offset that a batch at this position may have.
        is_damaged: the bytes at this position are not a whole batch.
    """

    structure: int
    segment: int
    position: int
    floor: int
    is_damaged: bool = False


class _Piece(NamedTuple):
    """Bytes that the walk over a log has read from a segment, and not parsed yet.

    Attributes:
        place: the place of the first byte.
        path: the log file.
        data: the bytes.
        below: the next segment's base offset, or the log end offset in the last
            segment; all offsets in the segment are below it.
    """

    place: _Place
    path: str
    data: bytes
    below: int


def walk_log(
    view: PartitionView,
    from_offset: int,
    max_bytes: int,
    take: Callable[[BatchHeader, memoryview], Sequence[T]],
) -> Iterator[tuple[list[T], list[Damage]]]:
    """Call ``take`` for all whole batches from an offset on; yield its results.

    Args:
        view: the partition.
        from_offset: the first offset to read; the first batch may start below it.
        max_bytes: bytes to read at once; a larger batch is read as a whole.
        take: returns a sequence of results for one batch, given its header and all its
            bytes, which are valid only during the call.

    Yields:
        The results of some batches, and the damage that was found among them.

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
        """Read the next bytes of the log, from ``self.place`` on.

        This does not change ``place``, so the call may be repeated.

        Returns:
            The bytes read. At a segment's end or at a damaged batch: the place behind
            it, where the walk goes on, and the damage. At the end of the log: None.
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
        """Return the place where the walk begins, or goes on when files have changed.

        The batch there may end below the first offset to read.
        """
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
        """Call ``take`` for each whole batch at the start of some bytes, and move on.

        Args:
            piece: bytes that ``read`` returned.
            take: see ``walk_log``.
            taken: the results are added to this list.

        Returns:
            A Damage for each batch with a wrong base offset. Such a batch is taken
            nevertheless, with the offset that follows from its place.
        """
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
                # If this base offset is too low, perhaps those of earlier batches were
                # too high. So the next batch need only be above this one; if it is not,
                # it is reported in turn.
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
    """Return the size in bytes of the whole batch at index ``at`` of ``data``.

    0: no whole batch with a right checksum is there.
    """
    if len(data) - at < BATCH_HEADER_SIZE:
        return 0
    _, length, _, magic, crc, _, delta = HEADER.unpack_from(data, at)[:7]
    end = at + length + LOG_OVERHEAD
    if length < MIN_BATCH_LENGTH or magic != MAGIC or end > len(data) or delta < 0:
        return 0
    return end - at if crc32c(data[at + ATTRIBUTES_POSITION : end]) == crc else 0


def _is_whole_at(fd: int, position: int, end: int) -> bool:
    """Return whether a whole batch is at a position of a file, before ``end``."""
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
    """Return the position of the next whole batch behind a damaged one.

    Args:
        segment: the segment.
        place: the place of the damaged batch.
        end: the end of the segment's committed bytes.
        entries: committed entries of the offset index.
        below: all offsets in the segment are below this one.

    Returns:
        The position; ``end`` if there is no whole batch.
    """
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
    """Return the index in ``data`` of the next batch that can be trusted.

    ``data`` begins with a damaged batch. Bytes behind it that look like a whole batch
    may be a part of a record: they count only in the cases that the module's docstring
    names.

    Args:
        data: the bytes from the damaged batch to the next known batch, or to the
            segment's end.
        floor: the lowest base offset that the next batch may have.
        below: all offsets in the segment are below this one.

    Returns:
        The index; the length of ``data`` if no batch can be trusted, or if more than
        1 GiB would have to be checked.
    """
    view, left = memoryview(data), _MAX_CHECKED
    # The base offsets that are possible have their first bytes in common; the magic is
    # 16 bytes behind the beginning of a base offset.
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

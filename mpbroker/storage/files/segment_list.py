"""The segments of a partition, in order, as one process knows them."""

import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Final

from mpbroker.storage.files.log_files import LOG_SUFFIX, base_offsets
from mpbroker.storage.files.log_segment import LogSegment

_OPEN_SEGMENTS: Final = 16  # of one partition; up to three descriptors each


class SegmentList:
    """Base offsets from the directory, and segment objects made when asked for.

    A `.log` file above the active base offset belongs to a roll that was not
    committed; it is not a segment.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.bases: list[int] = []
        self._open: dict[int, LogSegment] = {}

    def reload(self, active_base_offset: int, *, keep_open: bool) -> None:
        """Read the directory again.

        Args:
            keep_open: the change was only a roll, so that files already open are
                still those of the same names.
        """
        names = base_offsets(self.directory, LOG_SUFFIX)
        self.bases = names[: bisect_right(names, active_base_offset)]
        if not keep_open:
            self.close()
            return
        kept = set(self.bases)
        for base in [base for base in self._open if base not in kept]:
            self._open.pop(base).close()

    def get(self, base_offset: int) -> LogSegment:
        segment = self._open.get(base_offset)
        if segment is None:
            segment = LogSegment(self.directory, base_offset)
            self._open[base_offset] = segment
        return segment

    def add(self, segment: LogSegment) -> None:
        """Take over a segment that this process made: it is the last one now."""
        self.bases.append(segment.base_offset)
        self._open[segment.base_offset] = segment

    def floor(self, offset: int) -> LogSegment | None:
        """Return the last segment that starts at or below ``offset``."""
        slot = bisect_right(self.bases, offset) - 1
        return self.get(self.bases[slot]) if slot >= 0 else None

    def next_base(self, base_offset: int) -> int | None:
        """Return where the segment after this one starts; None after the active."""
        slot = bisect_right(self.bases, base_offset)
        return self.bases[slot] if slot < len(self.bases) else None

    def from_offset(self, offset: int) -> Iterator[LogSegment]:
        """Yield the segment that holds ``offset``, if any, and all after it."""
        start = max(0, bisect_right(self.bases, offset) - 1)
        for base in self.bases[start:]:
            yield self.get(base)

    def below(self, offset: int) -> list[int]:
        """Return the bases of the segments that start below ``offset``."""
        return self.bases[: bisect_left(self.bases, offset)]

    def forget(self, base_offset: int) -> None:
        segment = self._open.pop(base_offset, None)
        if segment is not None:
            segment.close()
        if base_offset in self.bases:
            self.bases.remove(base_offset)

    def trim(self) -> bool:
        """Close all but the last segment if too many are open; say whether.

        A reader may walk through thousands of them.
        """
        if len(self._open) <= _OPEN_SEGMENTS:
            return False
        last = self.bases[-1] if self.bases else -1
        for base in [base for base in self._open if base != last]:
            self._open.pop(base).close()
        return True

    def close(self) -> None:
        """Close every file; the list of bases stays."""
        opened, self._open = self._open, {}
        for segment in opened.values():
            segment.close()

    def sizes(self, active_base_offset: int, active_size: int) -> int:
        """Return the bytes of all `.log` files."""
        total = active_size
        for base in self.bases:
            if base < active_base_offset:
                total += os.stat(self.get(base).path).st_size
        return total

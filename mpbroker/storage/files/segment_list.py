"""SegmentList: the segments of a partition, in order, as one process knows them."""

import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Final

from mpbroker.storage.files.log_files import LOG_SUFFIX, base_offsets
from mpbroker.storage.files.log_segment import LogSegment

_OPEN_SEGMENTS: Final = 16  # of one partition; up to three descriptors each


class SegmentList:
    """The base offsets found in a directory, and LogSegments for those in use.

    A `.log` file above the active base offset was made by a roll that was not
    committed (yet), and is left out.

    Attributes:
        directory: the partition's directory.
        bases: the base offsets, ascending; the last is that of the active segment.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.bases: list[int] = []
        self._open: dict[int, LogSegment] = {}

    def reload(self, active_base_offset: int, *, keep_open: bool) -> None:
        """Read the base offsets of the segments from the directory again.

        Args:
            active_base_offset: the base offset of the active segment, from the
                committed state.
            keep_open: keep the files of segments open that are still there. Use this
                only after a roll: compaction puts other files under the same names.

        Raises:
            OSError: the directory cannot be read.
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
        """Return the segment with this base offset; its files open when first used."""
        segment = self._open.get(base_offset)
        if segment is None:
            segment = LogSegment(self.directory, base_offset)
            self._open[base_offset] = segment
        return segment

    def add(self, segment: LogSegment) -> None:
        """Add a segment that this process has made, as the last one."""
        self.bases.append(segment.base_offset)
        self._open[segment.base_offset] = segment

    def floor(self, offset: int) -> LogSegment | None:
        """Return the last segment whose base offset is at or below ``offset``.

        None: all segments start above it.
        """
        slot = bisect_right(self.bases, offset) - 1
        return self.get(self.bases[slot]) if slot >= 0 else None

    def next_base(self, base_offset: int) -> int | None:
        """Return the base offset of the next segment; None after the active one."""
        slot = bisect_right(self.bases, base_offset)
        return self.bases[slot] if slot < len(self.bases) else None

    def from_offset(self, offset: int) -> Iterator[LogSegment]:
        """Yield the segment whose range has ``offset``, if any, and all after it."""
        start = max(0, bisect_right(self.bases, offset) - 1)
        for base in self.bases[start:]:
            yield self.get(base)

    def below(self, offset: int) -> list[int]:
        """Return the base offsets of the segments that start below ``offset``."""
        return self.bases[: bisect_left(self.bases, offset)]

    def forget(self, base_offset: int) -> None:
        """Close the files of a segment that was removed, and drop it from the list."""
        segment = self._open.pop(base_offset, None)
        if segment is not None:
            segment.close()
        if base_offset in self.bases:
            self.bases.remove(base_offset)

    def trim(self) -> bool:
        """Close the files of all but the last segment if more than 16 are open.

        A reader may walk through thousands of segments.

        Returns:
            Whether segments were closed.
        """
        if len(self._open) <= _OPEN_SEGMENTS:
            return False
        last = self.bases[-1] if self.bases else -1
        for base in [base for base in self._open if base != last]:
            self._open.pop(base).close()
        return True

    def close(self) -> None:
        """Close the files of all segments; the list of base offsets stays as it is."""
        opened, self._open = self._open, {}
        for segment in opened.values():
            segment.close()

    def sizes(self, active_base_offset: int, active_size: int) -> int:
        """Return the sum of the committed bytes of all `.log` files.

        Args:
            active_base_offset: the base offset of the active segment.
            active_size: committed bytes of the active segment.

        Raises:
            FileNotFoundError: a segment was removed since the directory was read.
        """
        total = active_size
        for base in self.bases:
            if base < active_base_offset:
                total += os.stat(self.get(base).path).st_size
        return total

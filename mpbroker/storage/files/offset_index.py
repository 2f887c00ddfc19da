"""OffsetIndex: where in a segment to start looking for an offset.

The index is sparse. An entry has 8 bytes, big-endian:

    int32  last offset of a batch, less the segment's base offset
    int32  position of that batch in the log file

The caller knows how many entries are committed. For the active segment the number is
in the partition's row; entries behind them are from an append that died before its
commit, and the next append overwrites them. For other segments the size of the file
says it.

Source: Kafka's OffsetIndex; `kafka-dump-log --index-sanity-check` checks the meaning.
"""

import os
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from operator import lt
from struct import Struct
from typing import Final

from mpbroker.base.storage_errors import CorruptIndexError
from mpbroker.storage.files.log_files import create_file, write_whole

ENTRY_BYTES: Final = 8
_ENTRY: Final = Struct(">ii")
_SWAP: Final = sys.byteorder == "little"


class OffsetIndex:
    """One `.index` file.

    Committed entries never change, so they are read once and kept in two arrays: a
    lookup is one bisect in C. Methods that read or write raise OSError.

    Args:
        path: the file, created when it is first used.
        base_offset: the segment's base offset.
    """

    __slots__ = ("_fd", "_offsets", "_positions", "base_offset", "path")

    def __init__(self, path: str, base_offset: int) -> None:
        self.path = path
        self.base_offset = base_offset
        self._fd = -1
        self._offsets = array("i")
        self._positions = array("i")

    def write_entry(self, slot: int, last_offset: int, position: int) -> None:
        """Write entry number ``slot``, counted from 0, behind the committed entries.

        It is not committed by this: an append commits it with the row's state, a
        compaction by renaming the file.
        """
        entry = _ENTRY.pack(last_offset - self.base_offset, position)
        write_whole(self._descriptor(), entry, slot * ENTRY_BYTES)

    def write_entries(self, slot: int, entries: list[tuple[int, int]]) -> None:
        """Write many (last offset, position) entries from number ``slot`` on."""
        base = self.base_offset
        content = b"".join(_ENTRY.pack(o - base, p) for o, p in entries)
        write_whole(self._descriptor(), content, slot * ENTRY_BYTES)

    def load(self, entries: int) -> None:
        """Make sure that the first ``entries`` entries are in memory.

        A file that is shorter gives fewer; ``check`` finds that out.
        """
        have = len(self._offsets)
        if entries <= have:
            return
        fd = self._descriptor()
        content = os.pread(fd, (entries - have) * ENTRY_BYTES, have * ENTRY_BYTES)
        words = array("i")
        words.frombytes(content[: len(content) // ENTRY_BYTES * ENTRY_BYTES])
        if _SWAP:
            words.byteswap()
        self._offsets.extend(words[0::2])
        self._positions.extend(words[1::2])

    def forget(self) -> None:
        """Drop the entries in memory: the file was rewritten, or memory is short."""
        self._offsets = array("i")
        self._positions = array("i")

    def lookup(self, offset: int, entries: int) -> int:
        """Return the position of an indexed batch at or before the one with ``offset``.

        0, where the first batch is, if there is no such entry.

        Args:
            offset: the offset to look for.
            entries: how many entries are committed.
        """
        if entries > len(self._offsets):
            self.load(entries)
        slot = bisect_right(self._offsets, offset - self.base_offset) - 1
        return self._positions[slot] if slot >= 0 else 0

    def offset_behind(self, position: int, entries: int) -> int | None:
        """Return an offset larger than all offsets before a position.

        It is that of the first entry at or behind the position; None: there is none.
        """
        self.load(entries)
        slot = bisect_left(self._positions, position)
        if slot >= min(entries, len(self._positions)):
            return None
        return self.base_offset + self._offsets[slot]

    def positions_above(self, position: int, entries: int) -> Iterator[int]:
        """Yield the positions behind ``position`` that the first ``entries`` have."""
        self.load(entries)
        slot = bisect_right(self._positions, position)
        yield from self._positions[slot:entries]

    def entry(self, slot: int) -> tuple[int, int]:
        """Return (last offset of the batch, its position) of an entry in memory."""
        return self.base_offset + self._offsets[slot], self._positions[slot]

    def entries_below(self, offset: int, entries: int) -> int:
        """Return how many of the first ``entries`` have offsets below this one."""
        self.load(entries)
        relative = offset - self.base_offset - 1
        return min(entries, bisect_right(self._offsets, relative))

    def check(self, entries: int, log_size: int) -> None:
        """Check that offsets and positions are ascending, and within the log.

        Raises:
            CorruptIndexError: they are not, or the file has fewer entries.
        """
        self.load(entries)
        offsets, positions = self._offsets[:entries], self._positions[:entries]
        if len(offsets) < entries:
            raise CorruptIndexError(f"{self.path}: {len(offsets)} of {entries} entries")
        rising = all(map(lt, offsets, offsets[1:])) and all(
            map(lt, positions, positions[1:])
        )
        if not rising or (entries and not 0 <= positions[-1] < log_size):
            raise CorruptIndexError(
                f"{self.path}: entries are not ascending, or are beyond the log's end"
            )

    def file_entries(self) -> int:
        """Return the number of whole entries in the file, committed or not."""
        return os.fstat(self._descriptor()).st_size // ENTRY_BYTES

    def truncate(self, entries: int) -> None:
        """Cut the file to ``entries`` entries; the others were never committed."""
        os.ftruncate(self._descriptor(), entries * ENTRY_BYTES)
        if len(self._offsets) > entries:
            del self._offsets[entries:]
            del self._positions[entries:]

    def sync(self) -> None:
        """Force the file to disk."""
        os.fsync(self._descriptor())

    def open(self) -> None:
        """Open the file now; create it if absent."""
        self._descriptor()

    def close(self) -> None:
        """Close the file. It opens again when needed."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _descriptor(self) -> int:
        if self._fd < 0:
            self._fd = create_file(self.path)
        return self._fd

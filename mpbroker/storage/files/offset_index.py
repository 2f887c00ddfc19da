"""OffsetIndex: from an offset to the position at which a search for it can start.

The index is sparse. An entry has 8 bytes, big-endian:

    int32  last offset of a batch, less the segment's base offset
    int32  position of that batch in the log file

The caller knows how many entries are committed. For the active segment the number is
in the row (the partition's entry in shared memory); entries behind them are from an
append that died before its commit, and the next append overwrites them. For other
segments the number follows from the size of the file.

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

        This does not commit the entry: an append commits it with the state in the row
        (the partition's entry in shared memory), a compaction by renaming the file.
        """
        entry = _ENTRY.pack(last_offset - self.base_offset, position)
        write_whole(self._descriptor(), entry, slot * ENTRY_BYTES)

    def write_entries(self, slot: int, entries: list[tuple[int, int]]) -> None:
        """Write many (last offset, position) entries, the first as number ``slot``."""
        base = self.base_offset
        content = b"".join(_ENTRY.pack(o - base, p) for o, p in entries)
        write_whole(self._descriptor(), content, slot * ENTRY_BYTES)

    def load(self, entries: int) -> None:
        """Read the first ``entries`` entries into memory, unless they are there.

        If the file is shorter, fewer are read; ``check`` finds that out.
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
        """Drop the index entries in memory; the next use reads the file again."""
        self._offsets = array("i")
        self._positions = array("i")

    def lookup(self, offset: int, entries: int) -> int:
        """Return the position of the last indexed batch that ends up to ``offset``.

        A search for the batch with ``offset`` can start there.

        Args:
            offset: the offset to look for.
            entries: the number of committed entries.

        Returns:
            The position in bytes; 0, that of the first batch, if there is no such
            entry.
        """
        if entries > len(self._offsets):
            self.load(entries)
        slot = bisect_right(self._offsets, offset - self.base_offset) - 1
        return self._positions[slot] if slot >= 0 else 0

    def offset_behind(self, position: int, entries: int) -> int | None:
        """Return an offset above those of all batches before a position (in bytes).

        It is the offset of the first entry at or behind the position; None: there is no
        such entry.
        """
        self.load(entries)
        slot = bisect_left(self._positions, position)
        if slot >= min(entries, len(self._positions)):
            return None
        return self.base_offset + self._offsets[slot]

    def position_at(self, position: int, entries: int) -> int:
        """Return the indexed position at or before a position; 0: there is none."""
        self.load(entries)
        slot = min(entries, bisect_right(self._positions, position)) - 1
        return self._positions[slot] if slot >= 0 else 0

    def positions_above(self, position: int, entries: int) -> Iterator[int]:
        """Yield the positions of indexed batches that are above ``position``.

        Only the first ``entries`` entries are looked at.
        """
        self.load(entries)
        slot = bisect_right(self._positions, position)
        yield from self._positions[slot:entries]

    def entry(self, slot: int) -> tuple[int, int]:
        """Return (last offset, position) of the batch of entry number ``slot``.

        The entry must be in memory.
        """
        return self.base_offset + self._offsets[slot], self._positions[slot]

    def entries_below(self, offset: int, entries: int) -> int:
        """Return how many of the first ``entries`` entries have a lower offset."""
        self.load(entries)
        relative = offset - self.base_offset - 1
        return min(entries, bisect_right(self._offsets, relative))

    def check(self, entries: int, log_size: int) -> None:
        """Check that offsets and positions are ascending, and within the log.

        Args:
            entries: the number of entries to check, from the first on.
            log_size: the size of the log file in bytes.

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
        """Return the number of whole entries in the index file, committed or not."""
        return os.fstat(self._descriptor()).st_size // ENTRY_BYTES

    def truncate(self, entries: int) -> None:
        """Cut the index file to ``entries`` entries; no others were committed."""
        os.ftruncate(self._descriptor(), entries * ENTRY_BYTES)
        if len(self._offsets) > entries:
            del self._offsets[entries:]
            del self._positions[entries:]

    def sync(self) -> None:
        """Force the index file to disk."""
        os.fsync(self._descriptor())

    def open(self) -> None:
        """Open the index file now; create it if absent."""
        self._descriptor()

    def close(self) -> None:
        """Close the index file. It opens again when needed."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _descriptor(self) -> int:
        if self._fd < 0:
            self._fd = create_file(self.path)
        return self._fd

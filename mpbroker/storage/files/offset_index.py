"""The sparse offset index of a segment: where to start looking for an offset.

An entry is an int32 relative offset and an int32 position, big-endian: "the batch at
this position ends with this offset". How many entries count is the caller's to say:
for the active segment it is in the partition's row, and what lies behind is a dead
writer's, to be overwritten; for the others it is the file's size.

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

    Entries that were committed never change, so they are read once and kept as two
    native arrays: a look-up is one bisect in C.
    """

    __slots__ = ("_fd", "_offsets", "_positions", "base_offset", "path")

    def __init__(self, path: str, base_offset: int) -> None:
        self.path = path
        self.base_offset = base_offset
        self._fd = -1
        self._offsets = array("i")
        self._positions = array("i")

    def write_entry(self, slot: int, last_offset: int, position: int) -> None:
        """Write entry number ``slot``; it counts once the row or a rename says so."""
        entry = _ENTRY.pack(last_offset - self.base_offset, position)
        write_whole(self._descriptor(), entry, slot * ENTRY_BYTES)

    def write_entries(self, slot: int, entries: list[tuple[int, int]]) -> None:
        """Write many (last offset, position) entries from number ``slot`` on."""
        base = self.base_offset
        content = b"".join(_ENTRY.pack(o - base, p) for o, p in entries)
        write_whole(self._descriptor(), content, slot * ENTRY_BYTES)

    def load(self, entries: int) -> None:
        """Read up to ``entries`` committed entries into memory."""
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
        """Drop what was read, after the file was rewritten or to save memory."""
        self._offsets = array("i")
        self._positions = array("i")

    def lookup(self, offset: int, entries: int) -> int:
        """Return a position at or before the batch that holds ``offset``."""
        if entries > len(self._offsets):
            self.load(entries)
        slot = bisect_right(self._offsets, offset - self.base_offset) - 1
        return self._positions[slot] if slot >= 0 else 0

    def offset_behind(self, position: int, entries: int) -> int | None:
        """Return an offset that no batch below a position reaches; None: not known."""
        self.load(entries)
        slot = bisect_left(self._positions, position)
        if slot >= min(entries, len(self._positions)):
            return None
        return self.base_offset + self._offsets[slot]

    def positions_above(self, position: int, entries: int) -> Iterator[int]:
        """Yield where, behind a position, entries say that batches begin."""
        self.load(entries)
        slot = bisect_right(self._positions, position)
        yield from self._positions[slot:entries]

    def entry(self, slot: int) -> tuple[int, int]:
        """Return (last offset of the batch, its position) of a loaded entry."""
        return self.base_offset + self._offsets[slot], self._positions[slot]

    def entries_below(self, offset: int, entries: int) -> int:
        """Return how many of the first ``entries`` speak of offsets below this."""
        self.load(entries)
        relative = offset - self.base_offset - 1
        return min(entries, bisect_right(self._offsets, relative))

    def check(self, entries: int, log_size: int) -> None:
        """Raise CorruptIndexError unless offsets and positions rise within the log."""
        self.load(entries)
        offsets, positions = self._offsets[:entries], self._positions[:entries]
        if len(offsets) < entries:
            raise CorruptIndexError(f"{self.path}: {len(offsets)} of {entries} entries")
        rising = all(map(lt, offsets, offsets[1:])) and all(
            map(lt, positions, positions[1:])
        )
        if not rising or (entries and not 0 <= positions[-1] < log_size):
            raise CorruptIndexError(f"{self.path}: entries do not rise within the log")

    def file_entries(self) -> int:
        """Return the number of whole entries in the file."""
        return os.fstat(self._descriptor()).st_size // ENTRY_BYTES

    def truncate(self, entries: int) -> None:
        """Cut the file to ``entries``: what follows was never committed."""
        os.ftruncate(self._descriptor(), entries * ENTRY_BYTES)
        if len(self._offsets) > entries:
            del self._offsets[entries:]
            del self._positions[entries:]

    def sync(self) -> None:
        os.fsync(self._descriptor())

    def open(self) -> None:
        self._descriptor()

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _descriptor(self) -> int:
        if self._fd < 0:
            self._fd = create_file(self.path)
        return self._fd

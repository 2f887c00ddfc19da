"""TimeIndex: from an offset in a segment to the largest timestamp up to it.

The index is sparse. An entry has 12 bytes, big-endian:

    int64  timestamp in ms, the largest of all batches up to that of the next field
    int32  last offset of the batch with that timestamp, less the segment's base offset

Timestamps and offsets are both ascending. The last entry of a segment that is not
active is its largest timestamp.

Source: Kafka's TimeIndex.
"""

import os
from bisect import bisect_right
from struct import Struct
from typing import Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.base.storage_errors import CorruptIndexError
from mpbroker.storage.files.log_files import create_file, write_whole

ENTRY_BYTES: Final = 12
_ENTRY: Final = Struct(">qi")
NO_TIMESTAMP: Final = -1


class TimestampOffset(NamedTuple):
    """A timestamp in ms, and the last offset of the batch that has it."""

    timestamp: int
    offset: int


class TimeIndex:
    """One `.timeindex` file.

    Lookups are rare, so each reads the entries from the file. Methods that read or
    write raise OSError.

    Args:
        path: the file, created when it is first used.
        base_offset: the segment's base offset.
    """

    __slots__ = ("_fd", "base_offset", "path")

    def __init__(self, path: str, base_offset: int) -> None:
        self.path = path
        self.base_offset = base_offset
        self._fd = -1

    def write_entry(self, slot: int, timestamp: int, offset: int) -> None:
        """Write entry number ``slot``, counted from 0, behind the committed entries.

        This does not commit the entry: an append commits it with the state in the row
        (the partition's entry in shared memory), a compaction by renaming the file.
        """
        entry = _ENTRY.pack(timestamp, offset - self.base_offset)
        write_whole(self._descriptor(), entry, slot * ENTRY_BYTES)

    def write_entries(self, slot: int, entries: list[TimestampOffset]) -> None:
        """Write many (timestamp, last offset) entries, the first as number ``slot``."""
        base = self.base_offset
        content = b"".join(_ENTRY.pack(e.timestamp, e.offset - base) for e in entries)
        write_whole(self._descriptor(), content, slot * ENTRY_BYTES)

    def last_entry(self, entries: int) -> TimestampOffset:
        """Return the last one of the first ``entries`` entries.

        (-1, base offset): ``entries`` is 0, or the file is shorter.
        """
        if entries:
            start = (entries - 1) * ENTRY_BYTES
            content = os.pread(self._descriptor(), ENTRY_BYTES, start)
            if len(content) == ENTRY_BYTES:
                timestamp, relative = _ENTRY.unpack(content)
                return TimestampOffset(timestamp, self.base_offset + relative)
        return TimestampOffset(NO_TIMESTAMP, self.base_offset)

    def lookup(self, timestamp: int, entries: int) -> TimestampOffset:
        """Return the last entry with a timestamp (ms) up to ``timestamp``.

        Args:
            timestamp: the timestamp, in ms.
            entries: the number of committed entries.

        Returns:
            (-1, base offset) if there is no such entry.
        """
        loaded = self._load(entries)
        slot = bisect_right(loaded, timestamp, key=lambda entry: entry[0]) - 1
        if slot < 0:
            return TimestampOffset(NO_TIMESTAMP, self.base_offset)
        return TimestampOffset(loaded[slot][0], self.base_offset + loaded[slot][1])

    def entries_below(self, offset: int, entries: int) -> int:
        """Return how many of the first ``entries`` entries have a lower offset."""
        relative = offset - self.base_offset
        loaded = self._load(entries)
        return bisect_right(loaded, relative - 1, key=lambda entry: entry[1])

    def check(self, entries: int) -> None:
        """Check that timestamps and offsets of the first ``entries`` are ascending.

        Raises:
            CorruptIndexError: they are not, or the file has fewer entries.
        """
        loaded = self._load(entries)
        if len(loaded) < entries:
            raise CorruptIndexError(f"{self.path}: {len(loaded)} of {entries} entries")
        last_timestamp, last_offset = NO_TIMESTAMP, -1
        for slot, (timestamp, offset) in enumerate(loaded):
            if timestamp <= last_timestamp or offset <= last_offset:
                raise CorruptIndexError(
                    f"{self.path}: entry {slot} is not above the one before it"
                )
            last_timestamp, last_offset = timestamp, offset

    def file_entries(self) -> int:
        """Return the number of whole entries in the index file, committed or not."""
        return os.fstat(self._descriptor()).st_size // ENTRY_BYTES

    def truncate(self, entries: int) -> None:
        """Cut the index file to ``entries`` entries; no others were committed."""
        os.ftruncate(self._descriptor(), entries * ENTRY_BYTES)

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

    def _load(self, entries: int) -> list[tuple[int, int]]:
        content = os.pread(self._descriptor(), entries * ENTRY_BYTES, 0)
        whole = len(content) // ENTRY_BYTES * ENTRY_BYTES
        return list(_ENTRY.iter_unpack(content[:whole]))

    def _descriptor(self) -> int:
        if self._fd < 0:
            self._fd = create_file(self.path)
        return self._fd

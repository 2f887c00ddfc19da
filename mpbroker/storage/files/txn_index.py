"""The index of aborted transactions of a segment, for readers of committed data.

An entry is int16 version 0, then int64 producer id, first offset, last offset (of the
abort marker) and last stable offset at that time. It is written before the marker
is, and so is there wherever a process died. Entries whose marker is not below the log
end offset belong to nobody yet: readers skip them and the next writer cuts them off.

It is forced to disk with the other indexes, when a recovery point is noted. From that
point on a power cut may have taken any entry, or left one whose marker is gone: a start
after a crash makes them anew, by the markers that it finds.

Source: Kafka's AbortedTxn, TransactionIndex and LogSegment.recover.
"""

import os
from bisect import bisect_left
from struct import Struct
from typing import Final, NamedTuple

from mpbroker.storage.files.log_files import (
    create_file,
    sync_directory,
    write_file,
    write_whole,
)

_ENTRY: Final = Struct(">hqqqq")
ENTRY_BYTES: Final = _ENTRY.size
_VERSION: Final = 0
_READ_ENTRIES: Final = 128
_NEVER: Final = 1 << 63


class AbortedTransaction(NamedTuple):
    """What a producer wrote from first to last offset must not be delivered."""

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int


def read_aborted(path: str, log_end_offset: int) -> list[AbortedTransaction]:
    """Return a segment's committed entries; no file means none."""
    try:
        with open(path, "rb") as file:
            content = file.read()
    except FileNotFoundError:
        return []
    whole = len(content) // ENTRY_BYTES * ENTRY_BYTES
    found = []
    for version, *fields in _ENTRY.iter_unpack(content[:whole]):
        entry = AbortedTransaction(*fields)
        if version != _VERSION or entry.last_offset >= log_end_offset:
            break
        found.append(entry)
    return found


def find_aborted(
    path: str, log_end_offset: int, from_offset: int, until_offset: int
) -> tuple[list[AbortedTransaction], bool]:
    """Return the committed entries that concern a range of offsets.

    Also whether all are found: entries that follow, here and in later segments, are of
    transactions that began behind the range.
    """
    found: list[AbortedTransaction] = []
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return found, False
    try:
        slot = _slot_of(fd, from_offset)
        while True:
            content = os.pread(fd, _READ_ENTRIES * ENTRY_BYTES, slot * ENTRY_BYTES)
            whole = len(content) // ENTRY_BYTES
            for version, *fields in _ENTRY.iter_unpack(content[: whole * ENTRY_BYTES]):
                entry = AbortedTransaction(*fields)
                if version != _VERSION or entry.last_offset >= log_end_offset:
                    return found, False
                if entry.first_offset < until_offset:
                    found.append(entry)
                # Not where they are equal: behind an entry whose marker was never
                # written, another transaction may begin at the marker's offset.
                if entry.last_stable_offset > until_offset:
                    return found, True
            if not whole:
                return found, False
            slot += whole
    finally:
        os.close(fd)


def _slot_of(fd: int, offset: int) -> int:
    """Return the number of the first entry whose marker is not below an offset."""

    def last_offset(slot: int) -> int:
        content = os.pread(fd, ENTRY_BYTES, slot * ENTRY_BYTES)
        if len(content) < ENTRY_BYTES:
            return _NEVER  # cut off meanwhile
        return int(_ENTRY.unpack(content)[3])

    entries = os.fstat(fd).st_size // ENTRY_BYTES
    return bisect_left(range(entries), offset, key=last_offset)


def append_aborted(path: str, entry: AbortedTransaction, log_end_offset: int) -> None:
    """Add an entry behind those that are committed below ``log_end_offset``."""
    fd = create_file(path)
    try:
        committed = _slot_of(fd, log_end_offset)
        os.ftruncate(fd, committed * ENTRY_BYTES)
        write_whole(fd, _ENTRY.pack(_VERSION, *entry), committed * ENTRY_BYTES)
    finally:
        os.close(fd)


def restore_aborted(
    path: str, found: list[AbortedTransaction], from_offset: int
) -> None:
    """Make a segment's index say what the log does from an offset on.

    Args:
        found: what the segment's markers abort, in their order; those below
            ``from_offset`` count as little as the index does above it.

    Raises:
        OSError: the file cannot be read or replaced.
    """
    entries = read_aborted(path, from_offset)
    entries += (each for each in found if each.last_offset >= from_offset)
    content = encode_aborted(entries)
    try:
        with open(path, "rb") as file:
            if file.read() == content:
                return
    except FileNotFoundError:
        if not content:
            return
    write_file(path, content)


def sync_aborted(path: str) -> None:
    """Force a segment's index, if it has one, and its name to disk."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    sync_directory(os.path.dirname(path))


def encode_aborted(entries: list[AbortedTransaction]) -> bytes:
    """Return a whole index file's content."""
    return b"".join(_ENTRY.pack(_VERSION, *entry) for entry in entries)

"""Read and write a segment's index of aborted transactions.

Readers with isolation.level=read_committed need it. The file exists only if a
transaction was aborted in the segment. An entry has 34 bytes, big-endian:

    int16  version, 0
    int64  producer id
    int64  first offset of the transaction
    int64  last offset, that of the abort marker
    int64  last stable offset once the marker is appended

An entry is written before its marker is appended, and is committed with the marker:
readers skip entries whose last offset is not below the log end offset, and the next
writer cuts them off. So a process killed between the two leaves no entry that readers
see, and no marker without its entry.

The file is forced to disk with the other indexes, before a recovery point is written.
A power cut may take newer entries, or leave entries whose markers it took. So a start
after a crash writes the entries from the recovery point on again, from the markers in
the log.

Source: Kafka's AbortedTxn, TransactionIndex and LogSegment.recover.
"""

import os
from bisect import bisect_left
from struct import Struct
from typing import Final

from mpbroker.base.directories import sync_directory
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.storage.files.log_files import (
    create_file,
    write_file,
    write_whole,
)

_ENTRY: Final = Struct(">hqqqq")
ENTRY_BYTES: Final = _ENTRY.size
_VERSION: Final = 0
_READ_ENTRIES: Final = 128
_NEVER: Final = 1 << 63


class AbortedTransaction(NamedTuple):
    """An aborted transaction: between its offsets the producer's records are dropped.

    Attributes:
        producer_id: the producer.
        first_offset: the offset of the transaction's first record.
        last_offset: the offset of the abort marker.
        last_stable_offset: the last stable offset once the marker is appended.
    """

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int


def read_aborted(path: str, log_end_offset: int) -> list[AbortedTransaction]:
    """Return the committed entries of a segment's index of aborted transactions.

    The entries end before the first one that is not in ascending order: after a power
    cut the file may have its size, and zeros in the place of lost entries. If there is
    no file, the list is empty.

    Args:
        path: the index file.
        log_end_offset: the end of the committed log.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            content = file.read()
    except FileNotFoundError:
        return []
    whole = len(content) // ENTRY_BYTES * ENTRY_BYTES
    found: list[AbortedTransaction] = []
    before = 0  # a marker is behind a record that it aborts: none is at offset 0
    for version, *fields in _ENTRY.iter_unpack(content[:whole]):
        entry = AbortedTransaction(*fields)
        if version != _VERSION or not before < entry.last_offset < log_end_offset:
            break
        before = entry.last_offset
        found.append(entry)
    return found


def find_aborted(
    path: str, log_end_offset: int, from_offset: int, until_offset: int
) -> tuple[list[AbortedTransaction], bool]:
    """Return the committed entries of transactions with records in a range of offsets.

    If there is no file, the segment has no markers of aborted transactions.

    Args:
        path: the index file of one segment; it need not exist.
        log_end_offset: the end of the committed log.
        from_offset: the first offset of the range.
        until_offset: the offset behind the range.

    Returns:
        The entries, and whether the search is complete: True if all entries that
        follow, in this segment and in later ones, are of transactions that began behind
        the range.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        return search_aborted(path, log_end_offset, from_offset, until_offset)
    except FileNotFoundError:
        return [], False


def search_aborted(
    path: str, log_end_offset: int, from_offset: int, until_offset: int
) -> tuple[list[AbortedTransaction], bool]:
    """Do the same as ``find_aborted`` for an index file that is known to exist.

    Raises:
        FileNotFoundError: another process has removed it meanwhile.
        OSError: the file cannot be read.
    """
    found: list[AbortedTransaction] = []
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
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
                # If both are equal, go on: a transaction may begin at the offset of a
                # marker that was never written, and its entry comes later.
                if entry.last_stable_offset > until_offset:
                    return found, True
            if not whole:
                return found, False
            slot += whole
    finally:
        os.close(fd)


def _slot_of(fd: int, offset: int) -> int:
    """Return the number (from 0) of the first entry with an abort marker at ``offset``.

    An entry whose marker has a higher offset counts, too.
    """

    def last_offset(slot: int) -> int:
        content = os.pread(fd, ENTRY_BYTES, slot * ENTRY_BYTES)
        if len(content) < ENTRY_BYTES:
            return _NEVER  # another process has cut it off
        return int(_ENTRY.unpack(content)[3])

    entries = os.fstat(fd).st_size // ENTRY_BYTES
    return bisect_left(range(entries), offset, key=last_offset)


def append_aborted(path: str, entry: AbortedTransaction, log_end_offset: int) -> None:
    """Add an entry behind the committed ones of an index of aborted transactions.

    The caller holds the lock of the partition's row (its entry in shared memory).

    Args:
        path: the index file, created if absent.
        entry: the entry, whose abort marker will be appended at ``log_end_offset``.
        log_end_offset: the end of the committed log.

    Raises:
        OSError: the file cannot be written.
    """
    fd = create_file(path)
    try:
        # Entries of markers that were never committed go first. If this process is
        # killed between the two calls, the file has just the committed entries.
        committed = _slot_of(fd, log_end_offset)
        os.ftruncate(fd, committed * ENTRY_BYTES)
        write_whole(fd, _ENTRY.pack(_VERSION, *entry), committed * ENTRY_BYTES)
    finally:
        os.close(fd)


def restore_aborted(
    path: str, found: list[AbortedTransaction], from_offset: int
) -> None:
    """Rewrite a segment's index of aborted transactions, from an offset on.

    Args:
        path: the index file; it is replaced as a whole, unless it has just the entries
            below ``from_offset``, and there are no new ones.
        found: the transactions that the segment's markers abort, in the order of the
            markers.
        from_offset: entries whose markers are below it are kept from the file; the
            others are taken from ``found``.

    Raises:
        OSError: the file cannot be read or replaced.
    """
    entries = read_aborted(path, from_offset)
    new = [each for each in found if each.last_offset >= from_offset]
    content = encode_aborted(entries + new)
    # With new entries the file is replaced even if it has them: it may have them in the
    # page cache only, if a process was killed that had been told of a failed write.
    if not new:
        try:
            with open(path, "rb") as file:
                if file.read() == content:
                    return
        except FileNotFoundError:
            return
    write_file(path, content)


def sync_aborted(path: str) -> None:
    """Force an index of aborted transactions and its name to disk, if it exists."""
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
    """Return the bytes of an index of aborted transactions: 34 for each entry."""
    return b"".join(_ENTRY.pack(_VERSION, *entry) for entry in entries)

"""The index of aborted transactions of a segment, for readers of committed data.

An entry is int16 version 0, then int64 producer id, first offset, last offset (of the
abort marker) and last stable offset at that time. It is written before the marker
is: a start after a kill of everything takes whatever batches it finds, and looks for no
index. So entries whose marker is not below the log end offset belong to nobody yet:
readers skip them and the next writer cuts them off. One that other batches have
overtaken is true all the same; its marker comes again, with an entry of its own.

Source: Kafka's AbortedTxn and TransactionIndex.
"""

import os
from struct import Struct
from typing import Final, NamedTuple

from mpbroker.storage.log_files import create_file, write_whole

_ENTRY: Final = Struct(">hqqqq")
ENTRY_BYTES: Final = _ENTRY.size
_VERSION: Final = 0


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


def append_aborted(path: str, entry: AbortedTransaction, log_end_offset: int) -> None:
    """Add an entry behind those that are committed below ``log_end_offset``."""
    committed = len(read_aborted(path, log_end_offset))
    fd = create_file(path)
    try:
        os.ftruncate(fd, committed * ENTRY_BYTES)
        write_whole(fd, _ENTRY.pack(_VERSION, *entry), committed * ENTRY_BYTES)
    finally:
        os.close(fd)


def encode_aborted(entries: list[AbortedTransaction]) -> bytes:
    """Return a whole index file's content."""
    return b"".join(_ENTRY.pack(_VERSION, *entry) for entry in entries)

"""Parse the files beside a segment: its indexes, producer snapshots, checkpoints.

The functions take bytes and return values; the caller reads the files. The formats are
Kafka's, so archives of Apache Kafka's segments can be read, too.

    .index      int32 relative offset (a batch's last), int32 its position
    .timeindex  int64 largest timestamp so far (ms), int32 relative offset
    .txnindex   int16 version 0, int64 producer id, first, last and last stable offset
    .snapshot   int16 version 1, uint32 CRC-32C, int32 count, entries: the producers

An incomplete entry at the end is ignored. From the first index entry that does not
rise, all entries are ignored: a writer that was killed may have left them.

Source: Kafka's OffsetIndex, TimeIndex, AbortedTxn, ProducerSnapshot.json and
OffsetCheckpointFile.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

from mpbroker.protocol.records.crc32c import crc32c

_OFFSET_ENTRY: Final = Struct(">ii")
_TIME_ENTRY: Final = Struct(">qi")
_ABORTED_ENTRY: Final = Struct(">hqqqq")
_SNAPSHOT_HEAD: Final = Struct(">hIi")
_SNAPSHOT_CRC_FROM: Final = 6
# producer id, epoch, last sequence, last offset, offset delta, timestamp,
# coordinator epoch, first offset of the open transaction
_SNAPSHOT_ENTRY: Final = Struct(">qhiqiqiq")


class IndexEntry(NamedTuple):
    """An offset index's entry: ``offset`` is the last one of the batch at ``position``.

    The position is in bytes from the beginning of the segment's `.log` file.
    """

    offset: int
    position: int


class TimeEntry(NamedTuple):
    """A time index's entry: no record up to ``offset`` is later than ``timestamp``.

    The timestamp is in ms since 1970.
    """

    timestamp: int
    offset: int


class AbortedRange(NamedTuple):
    """An aborted transaction: its producer, and its first and last offset."""

    producer_id: int
    first_offset: int
    last_offset: int


def parse_offset_index(content: bytes, base_offset: int) -> list[IndexEntry]:
    """Return the entries of an offset index, from its bytes.

    Stop before the first entry whose offset or position does not rise.
    """
    found: list[IndexEntry] = []
    last = IndexEntry(base_offset - 1, -1)
    for relative, position in _OFFSET_ENTRY.iter_unpack(_whole(content, _OFFSET_ENTRY)):
        entry = IndexEntry(base_offset + relative, position)
        # Kafka fills the index of an active segment with zeros behind the entries.
        if entry.offset <= last.offset or position <= last.position:
            break
        found.append(entry)
        last = entry
    return found


def parse_time_index(content: bytes, base_offset: int) -> list[TimeEntry]:
    """Return the entries of a time index, from its bytes.

    Stop before the first entry whose timestamp or offset falls.
    """
    found: list[TimeEntry] = []
    last = TimeEntry(-1, base_offset - 1)
    for timestamp, relative in _TIME_ENTRY.iter_unpack(_whole(content, _TIME_ENTRY)):
        entry = TimeEntry(timestamp, base_offset + relative)
        if timestamp < last.timestamp or entry.offset < last.offset:
            break
        found.append(entry)
        last = entry
    return found


def parse_aborted(content: bytes) -> list[AbortedRange]:
    """Return the aborted transactions in a segment's transaction index."""
    found = []
    for fields in _ABORTED_ENTRY.iter_unpack(_whole(content, _ABORTED_ENTRY)):
        version, producer_id, first, last, _ = fields
        if version != 0 or not 0 <= first <= last:
            break
        found.append(AbortedRange(producer_id, first, last))
    return found


def parse_open_transactions(content: bytes) -> dict[int, int] | None:
    """Return the first offsets of open transactions in a snapshot, by producer id.

    Return None if the snapshot is incomplete or of another version: the caller tries an
    older one.
    """
    if len(content) < _SNAPSHOT_HEAD.size:
        return None
    version, crc, count = _SNAPSHOT_HEAD.unpack_from(content)
    entries = memoryview(content)[_SNAPSHOT_HEAD.size :]
    if version != 1 or crc32c(memoryview(content)[_SNAPSHOT_CRC_FROM:]) != crc:
        return None
    if len(entries) != count * _SNAPSHOT_ENTRY.size:
        return None
    return {
        fields[0]: fields[-1]
        for fields in _SNAPSHOT_ENTRY.iter_unpack(entries)
        if fields[-1] >= 0
    }


def parse_offset_checkpoint(text: str) -> dict[tuple[str, int], int]:
    """Parse the broker's checkpoint file of offsets; return them by partition.

    Raises:
        ValueError: the text is not a whole checkpoint of version 0.
    """
    lines = text.splitlines()
    if not lines:
        return {}
    if lines[0] != "0" or len(lines) < 2 or int(lines[1]) != len(lines) - 2:
        raise ValueError("not a checkpoint of version 0, or a truncated one")
    found = {}
    for line in lines[2:]:
        topic, partition, offset = line.split()
        found[topic, int(partition)] = int(offset)
    return found


def _whole(content: bytes, entry: Struct) -> memoryview:
    return memoryview(content)[: len(content) // entry.size * entry.size]

"""What lies beside a segment, read: its indexes, snapshots and checkpoints.

Bytes in, values out; whoever has the files reads them. These are Kafka's own formats,
so archives of Apache Kafka's segments are read as well.

    .index      int32 relative offset (a batch's last), int32 its position
    .timeindex  int64 largest timestamp so far (ms), int32 relative offset
    .txnindex   int16 version 0, int64 producer id, first, last and last stable offset
    .snapshot   int16 version 1, uint32 CRC-32C, int32 count, entries: the producers

All are hints or proofs beside the log. A torn tail is left out; so is an index entry
that does not rise, since everything from there on may be a dead writer's.

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
    """The batch at ``position`` ends with ``offset``."""

    offset: int
    position: int


class TimeEntry(NamedTuple):
    """No record up to ``offset`` is later than ``timestamp`` (ms)."""

    timestamp: int
    offset: int


class AbortedRange(NamedTuple):
    """What a producer wrote in a transaction from first to last offset is void."""

    producer_id: int
    first_offset: int
    last_offset: int


def parse_offset_index(content: bytes, base_offset: int) -> list[IndexEntry]:
    """Return the entries that rise in both offset and position."""
    found: list[IndexEntry] = []
    last = IndexEntry(base_offset - 1, -1)
    for relative, position in _OFFSET_ENTRY.iter_unpack(_whole(content, _OFFSET_ENTRY)):
        entry = IndexEntry(base_offset + relative, position)
        # Kafka reserves an active segment's index with zeros behind the entries.
        if entry.offset <= last.offset or position <= last.position:
            break
        found.append(entry)
        last = entry
    return found


def parse_time_index(content: bytes, base_offset: int) -> list[TimeEntry]:
    """Return the entries, of which neither part ever falls."""
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
    """Return the aborted transactions that a segment's abort markers ended."""
    found = []
    for fields in _ABORTED_ENTRY.iter_unpack(_whole(content, _ABORTED_ENTRY)):
        version, producer_id, first, last, _ = fields
        if version != 0 or not 0 <= first <= last:
            break
        found.append(AbortedRange(producer_id, first, last))
    return found


def parse_open_transactions(content: bytes) -> dict[int, int] | None:
    """Return first offsets of open transactions by producer id, as a snapshot has them.

    None if it is torn or of another version: an older one serves as well.
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
    """Return offsets by topic and partition.

    Raises:
        ValueError: this is no version 0 checkpoint.
    """
    lines = text.splitlines()
    if not lines:
        return {}
    if lines[0] != "0" or len(lines) < 2 or int(lines[1]) != len(lines) - 2:
        raise ValueError("no version 0 checkpoint, or one that was cut off")
    found = {}
    for line in lines[2:]:
        topic, partition, offset = line.split()
        found[topic, int(partition)] = int(offset)
    return found


def _whole(content: bytes, entry: Struct) -> memoryview:
    return memoryview(content)[: len(content) // entry.size * entry.size]

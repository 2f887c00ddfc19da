"""Producer snapshots: `<offset>.snapshot`, the producers as of that offset.

int16 version 1, uint32 CRC-32C of what follows, int32 number of entries, entries. Only
a producer's last batch is kept, as in Kafka.

Source: Kafka's ProducerSnapshot.json.
"""

import os
from struct import Struct
from typing import Final

from mpbroker.base.storage_errors import CorruptSnapshotError
from mpbroker.protocol.records.crc32c import crc32c
from mpbroker.storage.files.log_files import (
    SNAPSHOT_SUFFIX,
    base_offsets,
    remove_if_exists,
    segment_file,
    write_file,
)
from mpbroker.storage.producers.producer_state import (
    NO_SEQUENCE,
    AppendedBatch,
    ProducerEntry,
    ProducerState,
)

_HEAD: Final = Struct(">hI")
_COUNT: Final = Struct(">i")
# producer id, epoch, last sequence, last offset, offset delta, timestamp,
# coordinator epoch, first offset of the open transaction
_ENTRY: Final = Struct(">qhiqiqiq")
_VERSION: Final = 1
_SEQUENCE_MASK: Final = 0x7FFF_FFFF


def encode_snapshot(state: ProducerState) -> bytes:
    """Return the file's content."""
    parts = [_COUNT.pack(len(state.entries))]
    for entry in state.entries.values():
        sequence, offset, delta = NO_SEQUENCE, -1, 0
        if entry.batches:
            last = entry.batches[-1]
            sequence, offset = last.last_sequence, last.last_offset
            delta = last.last_offset - last.base_offset
        parts.append(
            _ENTRY.pack(
                entry.producer_id,
                entry.epoch,
                sequence,
                offset,
                delta,
                entry.last_timestamp,
                entry.coordinator_epoch,
                entry.txn_first_offset,
            )
        )
    body = b"".join(parts)
    return _HEAD.pack(_VERSION, crc32c(body)) + body


def decode_snapshot(content: bytes, offset: int) -> ProducerState:
    """Return the producers as of ``offset``.

    Raises:
        CorruptSnapshotError: version, length or checksum are wrong.
    """
    if len(content) < _HEAD.size + _COUNT.size:
        raise CorruptSnapshotError(f"{len(content)} bytes are too few")
    version, crc = _HEAD.unpack_from(content)
    if version != _VERSION:
        raise CorruptSnapshotError(f"version {version}, not {_VERSION}")
    body = memoryview(content)[_HEAD.size :]
    if crc32c(body) != crc:
        raise CorruptSnapshotError("the checksum is wrong")
    (count,) = _COUNT.unpack_from(body)
    entries = body[_COUNT.size :]
    if len(entries) != count * _ENTRY.size:
        raise CorruptSnapshotError(f"{len(entries)} bytes for {count} entries")
    state = ProducerState(offset)
    for fields in _ENTRY.iter_unpack(entries):
        producer_id, epoch, sequence, last, delta, timestamp, coordinator, txn = fields
        entry = ProducerEntry(producer_id, epoch, coordinator, timestamp, txn)
        if last >= 0:
            first = NO_SEQUENCE
            if sequence >= 0:
                first = (sequence - delta) & _SEQUENCE_MASK
            batch = AppendedBatch(first, sequence, last - delta, last, timestamp)
            entry.batches.append(batch)
            entry.is_from_snapshot = True
        state.add(entry)
    return state


def write_snapshot(directory: str, state: ProducerState, *, sync: bool) -> None:
    """Write the snapshot of ``state.end_offset``; its checksum allows not to sync."""
    path = segment_file(directory, state.end_offset, SNAPSHOT_SUFFIX)
    write_file(path, encode_snapshot(state), sync=sync)


def load_newest_snapshot(directory: str, at_most: int) -> ProducerState | None:
    """Return the newest snapshot not above an offset that can be trusted."""
    for offset in reversed(base_offsets(directory, SNAPSHOT_SUFFIX)):
        if offset > at_most:
            continue
        try:
            path = segment_file(directory, offset, SNAPSHOT_SUFFIX)
            with open(path, "rb") as file:
                state = decode_snapshot(file.read(), offset)
                written_ms = os.fstat(file.fileno()).st_mtime_ns // 1_000_000
            for entry in state.entries.values():
                entry.seen_ms = written_ms  # or earlier
            return state
        except (FileNotFoundError, CorruptSnapshotError):
            continue
    return None


def remove_snapshots(directory: str, *, above: int) -> None:
    """Remove snapshots of offsets that the log, cut by recovery, does not reach."""
    for offset in base_offsets(directory, SNAPSHOT_SUFFIX):
        if offset > above:
            remove_if_exists(segment_file(directory, offset, SNAPSHOT_SUFFIX))


def remove_needless_snapshots(
    directory: str, segment_bases: list[int], recovery_point: int
) -> None:
    """Keep the snapshots of segment starts and the two newest others.

    Two: the newest may turn out torn after a power cut. And the newest that is not
    above the recovery point, where a start after a crash begins to read: rolls leave
    none where nobody knew of a producer, and it would read the log as a whole.
    """
    offsets = base_offsets(directory, SNAPSHOT_SUFFIX)
    kept = {*segment_bases, *[o for o in offsets if o <= recovery_point][-1:]}
    others = [o for o in offsets if o not in segment_bases]
    for offset in others[:-2]:
        if offset not in kept:
            remove_if_exists(segment_file(directory, offset, SNAPSHOT_SUFFIX))

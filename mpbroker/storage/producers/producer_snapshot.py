"""Read, write and remove producer snapshots: the producers' state as of an offset.

The file is `<offset>.snapshot`. It is big-endian:

    int16   version, 1
    uint32  CRC-32C of the bytes that follow
    int32   number of entries
    entries of 46 bytes; see _ENTRY

As in Kafka, an entry has only the last batch of its producer.

Source: Kafka's ProducerSnapshot.json and ProducerStateManager.
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
    """Encode the state of a partition's producers as the content of a snapshot file."""
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
    """Return the producers' state in a snapshot file.

    Args:
        content: the content of the file.
        offset: the offset in the file's name; the state is as of this offset.

    Raises:
        CorruptSnapshotError: the version, the length or the checksum is wrong.
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
    """Write the snapshot file of a producers' state, named by ``state.end_offset``.

    Args:
        directory: the partition's directory.
        state: the producers' state.
        sync: whether to force the file to disk. If not, a power cut may leave a torn
            file, which its checksum reveals.

    Raises:
        OSError: the file cannot be written.
    """
    path = segment_file(directory, state.end_offset, SNAPSHOT_SUFFIX)
    write_file(path, encode_snapshot(state), sync=sync)


def load_newest_snapshot(directory: str, at_most: int) -> ProducerState | None:
    """Return the producers' state in the newest valid snapshot up to an offset.

    None: there is no such snapshot.
    """
    for offset in reversed(base_offsets(directory, SNAPSHOT_SUFFIX)):
        if offset > at_most:
            continue
        try:
            path = segment_file(directory, offset, SNAPSHOT_SUFFIX)
            with open(path, "rb") as file:
                state = decode_snapshot(file.read(), offset)
                written_ms = os.fstat(file.fileno()).st_mtime_ns // 1_000_000
            for entry in state.entries.values():
                entry.seen_ms = written_ms  # at the latest
            return state
        except (FileNotFoundError, CorruptSnapshotError):
            continue
    return None


def remove_snapshots(directory: str, *, above: int) -> None:
    """Remove producer snapshots above the log end, which recovery has moved down."""
    for offset in base_offsets(directory, SNAPSHOT_SUFFIX):
        if offset > above:
            remove_if_exists(segment_file(directory, offset, SNAPSHOT_SUFFIX))


def remove_needless_snapshots(
    directory: str, segment_bases: list[int], recovery_point: int
) -> None:
    """Remove producer snapshots that no later load needs.

    These are kept:

    - the snapshots at the base offset of a segment
    - the two newest of the others: after a power cut the newest may be torn
    - the newest one at or below the recovery point: a start after a crash begins to
      read there. Without it, that start might have to read the whole log, because a
      roll writes no snapshot in a process that does not know the producers' state.
    """
    offsets = base_offsets(directory, SNAPSHOT_SUFFIX)
    kept = {*segment_bases, *[o for o in offsets if o <= recovery_point][-1:]}
    others = [o for o in offsets if o not in segment_bases]
    for offset in others[:-2]:
        if offset not in kept:
            remove_if_exists(segment_file(directory, offset, SNAPSHOT_SUFFIX))

"""Write a snapshot of the metadata log, in Kafka's form, and remove what it replaces.

    header: a control record     the time at which the snapshot was made
    the voters of the quorum, if the log has them
    the records of the image
    footer: a control record     it shows that the end is not cut off

The snapshot gets its name when it is whole and on disk; from then on it counts. Before
that the segment behind it is made, and after that the files before it are removed. If
the process is killed before the rename, the next start reads the old files; if it is
killed after that, the next start removes them.

Source: KIP-630.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from struct import Struct
from typing import Any, Final

from mpbroker.base.directories import sync_directory
from mpbroker.metadata.kraft_records import encode_control
from mpbroker.metadata.kraft_schema import SNAPSHOT_FOOTER, SNAPSHOT_HEADER
from mpbroker.metadata.metadata_batches import MetadataBatches
from mpbroker.metadata.metadata_files import (
    MetadataFiles,
    find_files,
    is_replaced,
    segment_name,
    snapshot_name,
)
from mpbroker.metadata.metadata_image import MetadataRecord
from mpbroker.protocol.records.record_batch import RecordBatchBuilder

# Kafka's name of a snapshot that is being written; it removes such files at its start.
PART_SUFFIX: Final = ".part"
MODE: Final = 0o600  # configs in it may be passwords, which are not encrypted

_CONTROL_KEY: Final = Struct(">hh")  # version 0, type

# KRaft's readers take batches of 8 MiB at most; a record has some 100 bytes.
_RECORDS_PER_BATCH: Final = 1000


def write_snapshot(
    directory: str,
    groups: Iterable[Sequence[MetadataRecord]],
    log: MetadataBatches,
    now_ms: int,
    *,
    keeps_last: bool = False,
) -> MetadataFiles:
    """Replace a log by a snapshot at its end, and an empty segment behind it.

    Args:
        directory: the directory `__cluster_metadata-0`.
        groups: records that give the state of the whole log.
        log: the log, decoded to its end.
        now_ms: the wall clock, for the timestamps in the snapshot.
        keeps_last: keep the segments behind the snapshot before this one, since other
            processes may not have read them to their end.

    Returns:
        The files of the log from now on.

    Raises:
        OSError: the files cannot be written; the old ones count.
    """
    end = log.next_offset
    before = find_files(directory).snapshot
    path = os.path.join(directory, snapshot_name(end, log.epoch))
    with open(path + PART_SUFFIX, "wb") as file:
        os.fchmod(file.fileno(), MODE)
        for batch in _batches(groups, log, now_ms):
            file.write(batch)
        file.flush()
        os.fsync(file.fileno())
    segment = os.path.join(directory, segment_name(end))
    os.close(os.open(segment, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, MODE))
    os.rename(path + PART_SUFFIX, path)
    sync_directory(directory)
    if keeps_last:
        remove_replaced(directory, before.end_offset if before else 0)
    else:
        remove_replaced(directory)
    return find_files(directory)


def remove_replaced(directory: str, keep_from: int | None = None) -> None:
    """Remove files that the newest snapshot replaces, and unfinished snapshots.

    Args:
        directory: the directory `__cluster_metadata-0`.
        keep_from: keep segments that begin with this offset or a later one.
    """
    files = find_files(directory)
    for name in os.listdir(directory):
        if name.endswith(PART_SUFFIX) or is_replaced(name, files, keep_from):
            os.unlink(os.path.join(directory, name))


def _batches(
    groups: Iterable[Sequence[MetadataRecord]], log: MetadataBatches, now_ms: int
) -> Iterator[bytes]:
    out = MetadataBatches(MetadataFiles(None, ()))
    out.epoch = log.epoch
    controls: list[tuple[int, Mapping[str, Any]]] = [
        (SNAPSHOT_HEADER, {"lastContainedLogTimestamp": now_ms}),
        *sorted(log.quorum.items()),
    ]
    for control in controls:
        yield _control_batch(*control, out, now_ms)
    for group in groups:
        for first in range(0, len(group), _RECORDS_PER_BATCH):
            records = group[first : first + _RECORDS_PER_BATCH]
            yield out.encode(records, now_ms)
            out.next_offset += len(records)
    yield _control_batch(SNAPSHOT_FOOTER, {}, out, now_ms)


def _control_batch(
    kind: int, fields: Mapping[str, Any], out: MetadataBatches, now_ms: int
) -> bytes:
    builder = RecordBatchBuilder(control=True)
    value = encode_control(kind, dict(fields))
    builder.append(now_ms, _CONTROL_KEY.pack(0, kind), value)
    batch = builder.build(base_offset=out.next_offset, partition_leader_epoch=out.epoch)
    out.next_offset += 1
    return batch

"""Find the files of a metadata log: its newest snapshot, and the segments behind it.

    __cluster_metadata-0/00000000000000000000.log                  a segment
    __cluster_metadata-0/00000000000000000042-0000000003.checkpoint
        the state of all records before offset 42, of epoch 3
    __cluster_metadata-0/00000000000000000042.log

A segment's name is the offset of its first record. Records that the snapshot contains
are not read. Together the files are one sequence of bytes: a position in the log counts
those of the snapshot and of the segments that are read.

Source: KIP-630; Kafka's Snapshots and KafkaMetadataLog.
"""

from __future__ import annotations

import os
import re
from typing import Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.base.storage_errors import CorruptLogError

SNAPSHOT_SUFFIX: Final = ".checkpoint"
_SEGMENT: Final = re.compile(r"([0-9]{20})\.log")
_OF_SEGMENT: Final = re.compile(r"([0-9]{20})\.(?:log|index|timeindex|txnindex)")
_SNAPSHOT: Final = re.compile(r"([0-9]{20})-([0-9]{10})\.checkpoint")


class Snapshot(NamedTuple):
    """A snapshot: its path, the offset behind its last record, that record's epoch."""

    path: str
    end_offset: int
    epoch: int


class MetadataFiles(NamedTuple):
    """The files of a metadata log that are read; there may be none.

    Attributes:
        snapshot: the newest snapshot; None: there is none.
        segments: the paths of the segments that have records behind it, by ascending
            offsets.
    """

    snapshot: Snapshot | None
    segments: tuple[str, ...]

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the snapshot and the segments, in the order of reading."""
        return (self.snapshot.path, *self.segments) if self.snapshot else self.segments


def segment_name(base_offset: int) -> str:
    """Return the file name of the segment that begins with this offset."""
    return f"{base_offset:020}.log"


def snapshot_name(end_offset: int, epoch: int) -> str:
    """Return the file name of a snapshot of all records before an offset."""
    return f"{end_offset:020}-{epoch:010}{SNAPSHOT_SUFFIX}"


def is_replaced(name: str, files: MetadataFiles, keep_from: int | None = None) -> bool:
    """Return whether the newest snapshot has all records of a file.

    Args:
        name: the file's name in the log's directory. A segment's index files, which an
            Apache Kafka has made, count as the segment.
        files: the files of the log that are read.
        keep_from: return False for segments that begin at or above this offset; None:
            there is no such exception.
    """
    if files.snapshot is None or name in map(os.path.basename, files.paths):
        return False
    if found := _SNAPSHOT.fullmatch(name):
        return (int(found[1]), int(found[2])) < files.snapshot[1:]
    found = _OF_SEGMENT.fullmatch(name)
    if found is None or (keep_from is not None and int(found[1]) >= keep_from):
        return False
    return not any(
        os.path.basename(path).startswith(found[1]) for path in files.segments
    )


def find_files(directory: str) -> MetadataFiles:
    """Return the files to read in a metadata log's directory.

    Raises:
        CorruptLogError: records between the snapshot and the segments are missing.
        OSError: the directory cannot be read.
    """
    names = os.listdir(directory)
    snapshots = [
        Snapshot(os.path.join(directory, name), int(found[1]), int(found[2]))
        for name in names
        if (found := _SNAPSHOT.fullmatch(name))
    ]
    newest = max(snapshots, key=lambda each: each[1:], default=None)
    begin = newest.end_offset if newest else 0
    bases = sorted(
        int(found[1]) for name in names if (found := _SEGMENT.fullmatch(name))
    )
    needed = [base for base in bases if base > begin]
    # The last segment before the snapshot's end may go on behind it.
    needed[:0] = [base for base in bases if base <= begin][-1:]
    if needed and needed[0] > begin:
        raise CorruptLogError(
            f"{directory}: the records from offset {begin} to {needed[0]} are missing:"
            f" there is no snapshot that ends at {needed[0]} or later; restore the"
            " directory from a backup"
        )
    segments = tuple(os.path.join(directory, segment_name(base)) for base in needed)
    return MetadataFiles(newest, segments)

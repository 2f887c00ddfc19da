"""List and read the segments of a broker's data directory or a copy of it.

The directory may be local or in an object store.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import pyarrow as pa
from pyarrow import fs

from mpbroker.base.errors import MpbrokerError
from mpbroker.client.cluster import TopicPartition
from mpbroker.protocol.records.batch_header import (
    BATCH_HEADER_SIZE,
    BatchHeader,
    RecordBatchError,
    parse_batch_header,
)
from mpbroker.spark.file_systems import find
from mpbroker.spark.segment_index import parse_offset_checkpoint

LOG: Final = ".log"
INDEX: Final = ".index"
TIME_INDEX: Final = ".timeindex"
TXN_INDEX: Final = ".txnindex"
SNAPSHOT: Final = ".snapshot"
OFFSET_DIGITS: Final = 20  # a file's name begins with its first offset

_PARTITION: Final = re.compile(r"([A-Za-z0-9._-]{1,249})-(\d{1,10})")
_FILE: Final = re.compile(r"(\d{20})(\.log|\.index|\.timeindex|\.txnindex|\.snapshot)")
_LOG_START: Final = "log-start-offset-checkpoint"
# How much is read at once: each read of an object store is a request.
_CHUNK_BYTES: Final = 8 * 1024 * 1024


class SegmentError(MpbrokerError):
    """Segments are missing or damaged; the text names the path.

    The user gives another directory, or runs the query again if a file was deleted.
    """


@dataclass(frozen=True)
class Segment:
    """A `.log` file with the offsets from ``base_offset`` to ``end`` - 1.

    Attributes:
        end: the next segment's base offset; None for the last segment of a directory,
            to which a broker may write.
        size: in bytes, at the time of listing.
        largest_timestamp: the upper limit of its timestamps, in ms; None: not known.
        has_aborted: whether it contains a marker that aborts a transaction; None: not
            known.
        indexes_crc: CRC-32C of the object that has its indexes in a remote store; None:
            the indexes are files in the same directory.
    """

    partition: TopicPartition
    path: str
    base_offset: int
    end: int | None
    size: int
    largest_timestamp: int | None = None
    has_aborted: bool | None = None
    indexes_crc: int | None = None


class PartitionFiles:
    """The files of one partition in a directory.

    Attributes:
        partition: the partition's topic and number.
        files: the file system that has the files.
        segments: in order of their offsets; the last one is the active segment.
        log_start_offset: records below it are deleted, even if their bytes remain.
        paths: the paths of all files, at the time of listing.
    """

    def __init__(self, partition: TopicPartition, files: fs.FileSystem) -> None:
        self.partition = partition
        self.files = files
        self.segments: list[Segment] = []
        self.log_start_offset = 0
        self.paths: set[str] = set()

    def beside(self, segment: Segment, suffix: str) -> bytes | None:
        """Return an index or the producer snapshot of a segment; None if there is none.

        Args:
            suffix: the file's suffix, such as ".index".
        """
        path = segment.path.removesuffix(LOG) + suffix
        return read_file(self.files, path) if path in self.paths else None

    def snapshots(self) -> Iterator[tuple[int, bytes]]:
        """Yield the offset and content of each producer snapshot, the newest first."""
        found = (path for path in self.paths if path.endswith(SNAPSHOT))
        for path in sorted(found, reverse=True):
            offset = int(path.rpartition("/")[2].removesuffix(SNAPSHOT))
            yield offset, read_file(self.files, path)


def open_path(path: str) -> tuple[fs.FileSystem, str]:
    """Return the file system of a directory, and the directory's path inside it.

    Args:
        path: a local path or a URI.

    Raises:
        SegmentError: there is no such directory, or pyarrow cannot use the URI.
    """
    try:
        found, inside = find(path)
        info = found.get_file_info(inside)
    except (pa.ArrowInvalid, OSError, NotImplementedError) as error:
        raise SegmentError(f"path={path!r} cannot be read: {error}") from error
    if info.type != fs.FileType.Directory:
        raise SegmentError(
            f"path={path!r} is not a directory; give a broker's log.dirs, or a copy of"
            " it in a file system that pyarrow knows (file, s3, gs, abfs, hdfs URIs)"
        )
    return found, inside


def list_partitions(
    files: fs.FileSystem, root: str
) -> dict[TopicPartition, PartitionFiles]:
    """Return the files of each partition that has segments in a data directory.

    Files under other names, such as those being deleted or written, are not listed.

    Raises:
        SegmentError: the checkpoint of log start offsets is damaged.
        OSError: the directory cannot be read.
    """
    found: dict[TopicPartition, PartitionFiles] = {}
    for info in files.get_file_info(fs.FileSelector(root, recursive=True)):
        directory, _, name = info.path.rpartition("/")
        if info.type != fs.FileType.File or directory.rpartition("/")[0] != root:
            continue
        match = _PARTITION.fullmatch(directory.rpartition("/")[2])
        parts = _FILE.fullmatch(name)
        if match is None or parts is None:
            continue
        partition = TopicPartition(match[1], int(match[2]))
        here = found.setdefault(partition, PartitionFiles(partition, files))
        here.paths.add(info.path)
        if parts[2] == LOG:
            base = int(parts[1])
            here.segments.append(Segment(partition, info.path, base, None, info.size))
    starts = _log_starts(files, root)
    for partition, here in found.items():
        here.segments = _with_ends(here.segments)
        here.log_start_offset = starts.get((partition.topic, partition.partition), 0)
    return {each: here for each, here in sorted(found.items()) if here.segments}


def _with_ends(segments: Iterable[Segment]) -> list[Segment]:
    ordered = sorted(segments, key=lambda each: each.base_offset)
    ends = [each.base_offset for each in ordered[1:]]
    return [
        replace(each, end=end) for each, end in zip(ordered, [*ends, None], strict=True)
    ]


def _log_starts(files: fs.FileSystem, root: str) -> dict[tuple[str, int], int]:
    path = f"{root}/{_LOG_START}"
    if files.get_file_info(path).type != fs.FileType.File:
        return {}
    try:
        return parse_offset_checkpoint(read_file(files, path).decode())
    except ValueError as error:
        raise SegmentError(f"{path}: {error}") from None


def read_file(files: fs.FileSystem, path: str) -> bytes:
    """Return a small file's content."""
    with files.open_input_stream(path) as stream:
        content: bytes = stream.read()
        return content


class SegmentReader:
    """Reads one `.log` file in large pieces, batch by batch."""

    def __init__(self, files: fs.FileSystem, path: str) -> None:
        self._file = files.open_input_file(path)
        self.size: int = self._file.size()
        self._chunk = memoryview(b"")
        self._chunk_at = 0

    def close(self) -> None:
        self._file.close()

    def header(self, position: int) -> BatchHeader | None:
        """Return the batch header at a byte position; None if the file ends inside it.

        Raises:
            RecordBatchError: the bytes are not a batch header.
        """
        if self.size - position < BATCH_HEADER_SIZE:
            return None
        return parse_batch_header(self._bytes(position, BATCH_HEADER_SIZE))

    def batch(self, position: int, header: BatchHeader) -> memoryview | None:
        """Return a whole batch at a byte position; None if the file ends inside it."""
        if self.size - position < header.size_in_bytes:
            return None
        return self._bytes(position, header.size_in_bytes)

    def headers(self, position: int) -> Iterator[tuple[int, BatchHeader]]:
        """Yield the byte position and header of each whole batch from a position on.

        Stop at the first batch that is cut off, and at bytes that are not a batch.
        """
        while True:
            try:
                header = self.header(position)
            except RecordBatchError:
                return
            if header is None or self.size - position < header.size_in_bytes:
                return
            yield position, header
            position += header.size_in_bytes

    def _bytes(self, position: int, size: int) -> memoryview:
        start = position - self._chunk_at
        if start < 0 or start + size > len(self._chunk):
            wanted = min(max(size, _CHUNK_BYTES), self.size - position)
            self._chunk = memoryview(self._file.read_at(wanted, position))
            self._chunk_at, start = position, 0
            if len(self._chunk) < size:
                # The file was truncated after it was opened: read zeros, which no
                # header and no CRC accepts.
                self._chunk = memoryview(bytes(self._chunk) + bytes(size))
        return self._chunk[start : start + size]

"""MetadataCopy: the metadata log and the coordinators' topics, in the remote store.

With them `mpbroker restore` makes a broker on a new machine. The objects are:

    metadata/index         the list of the pieces; replaced as a whole, last
    metadata/<random>      a piece: some bytes of one file

A copy counts when the index names its pieces, each with its size and CRC-32C. If a
process is killed before that, the copy in the store is unchanged; the next process
removes the new pieces. So a copy that is cut off is never taken for a whole one.

The files of the metadata log are small, and are copied as a whole when they have
changed. A segment of a coordinator's topic only grows until the cleaner replaces it, so
mostly one piece is added: the batches behind those that are in the store. The
housekeeper's plan lists the segments as of a moment at which none is being cleaned, and
the offset up to which they are on disk. Records on disk are never taken back. Bytes
behind that offset may be those of a killed writer, which other bytes replace later.

The metadata log is copied after the other logs, so it has the topics that they name.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

import msgpack

from mpbroker.base.file_id import file_id
from mpbroker.base.storage_errors import (
    CorruptLogError,
    RemoteObjectMissingError,
    RemoteStorageError,
)
from mpbroker.metadata.metadata_files import find_files
from mpbroker.metadata.topic_names import CLUSTER_METADATA_TOPIC
from mpbroker.protocol.records.crc32c import crc32c
from mpbroker.storage.files.batch_scan import scan_valid_batches
from mpbroker.storage.files.log_files import LOG_SUFFIX, segment_file
from mpbroker.storage.remote.remote_manifest import ManifestError, seal, unseal

if TYPE_CHECKING:
    from mpbroker.storage.remote.object_store import ObjectStore
    from mpbroker.storage.remote.remote_plan import RemotePlan, StateLogPlan

METADATA_PREFIX: Final = "metadata"
INDEX_KEY: Final = f"{METADATA_PREFIX}/index"
_VERSION: Final = 1
_PIECE_BYTES: Final = 8 * 1024 * 1024
# A segment with more pieces is copied anew: a restore makes a GET for each piece.
_MAX_PIECES: Final = 64
_READ_ATTEMPTS: Final = 5


class Piece(NamedTuple):
    """An object in the store that has some bytes of a file.

    Attributes:
        key: the object's key.
        size: the number of bytes.
        crc: the CRC-32C of the bytes.
    """

    key: str
    size: int
    crc: int


class StateSegment(NamedTuple):
    """The copy in the store of a segment of a topic such as __consumer_offsets.

    Attributes:
        base_offset: the offset in the segment's name.
        file_id: the number that identifies the local `.log`; a cleaned segment has a
            new one.
        next_offset: the offset behind the last batch in ``pieces``.
        pieces: the segment's bytes, in their order.
    """

    base_offset: int
    file_id: int
    next_offset: int
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)


class StateLog(NamedTuple):
    """The copy in the store of a partition of a topic such as __consumer_offsets."""

    topic: str
    topic_id: bytes
    partition: int
    segments: tuple[StateSegment, ...]


class LogEnd(NamedTuple):
    """The start and end offsets of a log with remote storage, at the time of a copy."""

    topic_id: bytes
    partition: int
    start_offset: int
    end_offset: int


class MetadataIndex(NamedTuple):
    """The content of the object `metadata/index`: the list of all pieces of a copy.

    Attributes:
        cluster_id: the id of the broker's cluster.
        node_id: the broker's node.id.
        time_ms: the wall clock when the index was written.
        files: name and pieces of each file of the metadata log.
        state: the partitions of the coordinators' topics.
        ends: the bounds of the logs with remote storage; a restore compares them with
            the segments in the store, to tell how much was lost.
    """

    cluster_id: str
    node_id: int
    time_ms: int = 0
    files: tuple[tuple[str, tuple[Piece, ...]], ...] = ()
    state: tuple[StateLog, ...] = ()
    ends: tuple[LogEnd, ...] = ()

    def keys(self) -> set[str]:
        """Return the keys in the store of all pieces that the index names."""
        of_files = (piece.key for _, pieces in self.files for piece in pieces)
        of_state = (
            piece.key
            for log in self.state
            for segment in log.segments
            for piece in segment.pieces
        )
        return {*of_files, *of_state}

    def encode(self) -> bytes:
        """Encode this list of pieces, with a CRC-32C of all bytes in front."""
        return seal(msgpack.packb([_VERSION, *self]))

    @classmethod
    def decode(cls, content: bytes) -> MetadataIndex:
        """Return the list of pieces in the bytes that ``encode`` has made.

        Raises:
            ManifestError: they are damaged, or a newer mpbroker has written them.
        """
        found = msgpack.unpackb(unseal(content, "the index of the metadata"))
        if found[0] != _VERSION:
            raise ManifestError(f"an index of the metadata of version {found[0]}")
        _, cluster_id, node_id, time_ms, files, state, ends = found
        return cls(
            cluster_id,
            node_id,
            time_ms,
            tuple((name, _pieces(rows)) for name, rows in files),
            tuple(
                StateLog(
                    topic,
                    topic_id,
                    partition,
                    tuple(
                        StateSegment(base, number, following, _pieces(rows))
                        for base, number, following, rows in segments
                    ),
                )
                for topic, topic_id, partition, segments in state
            ),
            tuple(LogEnd(*row) for row in ends),
        )


def _pieces(rows: list[list[object]]) -> tuple[Piece, ...]:
    return tuple(map(Piece._make, rows))


def read_piece(store: ObjectStore, piece: Piece) -> bytes:
    """Read an object with a part of a file from the store; return its bytes.

    Raises:
        RemoteStorageError: the store lacks the piece, or gives other bytes than were
            written.
    """
    content = store.get(piece.key, piece.size)
    if len(content) != piece.size or crc32c(content) != piece.crc:
        raise RemoteStorageError(
            f"{store.url}: {piece.key} has other bytes than were written"
        )
    return content


class MetadataCopy:
    """Copies the metadata log and the coordinators' topics to the store.

    Only the one process that writes to the store uses it.

    Args:
        store: the store.
        home: the first log directory.
        cluster_id: the id of the broker's cluster.
        node_id: the broker's node.id.
        fence: raises NotOwnerError if the store belongs to another broker by now.
    """

    def __init__(
        self,
        store: ObjectStore,
        home: str,
        cluster_id: str,
        node_id: int,
        fence: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._directory = f"{home}/{CLUSTER_METADATA_TOPIC}-0"
        self._empty = MetadataIndex(cluster_id, node_id)
        self._fence = fence
        self._index: MetadataIndex | None = None
        self._signature: tuple[tuple[str, int, int, int], ...] = ()

    def run(self, plan: RemotePlan) -> bool:
        """Copy the records and files that have changed; return whether there were any.

        Args:
            plan: the housekeeper's plan.

        Raises:
            MpbrokerError: the store failed, or files are damaged; the store has either
                the copy before this one, or this one.
            OSError: the local files cannot be read.
        """
        before = self._index if self._index is not None else self._read_index()
        self._index = None  # read again if this fails
        planned = {each[:3] for each in plan.state}
        state = (
            *(self._state_log(each, before) for each in plan.state),
            # Offline partitions keep the copy that they have.
            *(
                log
                for log in before.state
                if log.topic_id in plan.topic_ids and log[:3] not in planned
            ),
        )
        files = self._files(before)
        ends = tuple(
            LogEnd(
                each.topic_id, each.partition, each.log_start_offset, each.end_offset
            )
            for each in plan.partitions
            if not each.remove_all
        )
        index = before._replace(files=files, state=state, ends=ends)
        changed = index != before
        if changed:
            index = index._replace(time_ms=time.time_ns() // 1_000_000)
            self._fence()
            self._store.put(INDEX_KEY, index.encode())
            # From here on a restore reads the new pieces alone.
            if before is self._empty:
                self._remove_others(index)
            else:
                self._store.delete(sorted(before.keys() - index.keys()))
        self._index = index
        return changed

    def _read_index(self) -> MetadataIndex:
        """Read the list of the copy's objects from the store; remove all others.

        If the store says that there is no list, nothing is removed before a new one is
        there: a store that is wrong in this would lose its only copy.
        """
        self._signature = ()
        self._fence()
        try:
            index = MetadataIndex.decode(self._store.get(INDEX_KEY))
        except RemoteObjectMissingError:
            return self._empty
        self._remove_others(index)
        return index

    def _remove_others(self, index: MetadataIndex) -> None:
        """Remove the objects that a list does not name.

        A process that was killed before it wrote its list has left such objects.
        """
        known = index.keys() | {INDEX_KEY}
        # A listing of some hundred objects, once in the life of the process.
        left = [key for key in self._store.list(METADATA_PREFIX) if key not in known]
        self._store.delete(left)

    def _put(self, content: bytes) -> Piece:
        key = f"{METADATA_PREFIX}/{os.urandom(16).hex()}"
        self._store.put(key, content)
        return Piece(key, len(content), crc32c(content))

    # -- the metadata log --------------------------------------------------------------

    def _files(
        self, before: MetadataIndex
    ) -> tuple[tuple[str, tuple[Piece, ...]], ...]:
        """Copy the metadata log; return each file's name and the objects with it.

        All files are copied to the store if one of them has changed since the last
        copy, the one that ``before`` describes.
        """
        for _ in range(_READ_ATTEMPTS):
            try:
                signature = self._look()
                if signature == self._signature:
                    return before.files
                contents = {}
                for name, *_ in signature:
                    with open(f"{self._directory}/{name}", "rb") as file:
                        contents[name] = file.read()
                if signature != self._look():
                    continue  # a change was written, or a snapshot, while we read
            except FileNotFoundError:
                continue
            files = tuple(
                (name, tuple(map(self._put, _cut(content))))
                for name, content in contents.items()
            )
            self._signature = signature
            return files
        raise CorruptLogError(f"{self._directory}: it changes while it is being read")

    def _look(self) -> tuple[tuple[str, int, int, int], ...]:
        found = []
        for path in find_files(self._directory).paths:
            stat = os.stat(path)
            name = os.path.basename(path)
            found.append((name, stat.st_ino, stat.st_size, stat.st_mtime_ns))
        return tuple(found)

    # -- the coordinators' topics ------------------------------------------------------

    def _state_log(self, plan: StateLogPlan, before: MetadataIndex) -> StateLog:
        """Copy a partition's new records; return the description of its copy.

        If the cleaner has replaced a segment since the plan was made, the partition
        keeps the copy that ``before`` describes until the next plan.
        """
        empty = StateLog(plan.topic, plan.topic_id, plan.partition, ())
        known = next((log for log in before.state if log[:3] == empty[:3]), empty)
        by_id = {(each.base_offset, each.file_id): each for each in known.segments}
        segments = []
        for base, number in plan.segments:
            path = segment_file(plan.directory, base, LOG_SUFFIX)
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return known  # cleaned since the plan was made: at the next one
            try:
                if file_id(fd) != number:
                    return known
                segment = by_id.get((base, number))
                if segment is not None and not _goes_on(fd, segment):
                    segment = None
                segment = segment or StateSegment(base, number, base, ())
                segments.append(self._grow(fd, segment, plan.end_offset))
            finally:
                os.close(fd)
        return empty._replace(segments=tuple(segments))

    def _grow(self, fd: int, segment: StateSegment, end_offset: int) -> StateSegment:
        pieces = list(segment.pieces)
        for content, next_offset in _pieces_of(fd, segment.size, end_offset):
            pieces.append(self._put(content))
            segment = segment._replace(next_offset=next_offset)
        return segment._replace(pieces=tuple(pieces))


def _goes_on(fd: int, segment: StateSegment) -> bool:
    """Return whether a copied segment can be continued with the file's next records.

    It cannot if the file is shorter than the copy, if its next batch does not begin at
    the offset at which the copy ends, or if the copy has too many pieces.

    Args:
        fd: the local `.log` file.
        segment: the copy of the segment.
    """
    size = os.fstat(fd).st_size
    if len(segment.pieces) > _MAX_PIECES or size < segment.size:
        return False
    if size == segment.size:
        return True
    batch = next(scan_valid_batches(fd, segment.size, size), None)
    return batch is None or batch[2] == segment.next_offset


def _pieces_of(fd: int, position: int, end_offset: int) -> Iterator[tuple[bytes, int]]:
    """Yield parts of a `.log` file, each of whole batches, with the offset behind it.

    Args:
        fd: the `.log` file.
        position: the position in bytes of the first batch.
        end_offset: batches that begin at or above this offset are left out.

    Yields:
        Bytes, 8 MiB at most unless one batch is larger, and the offset behind them.
    """
    begin = end = position
    following = -1
    for _, next_end, base, last, _, _ in scan_valid_batches(
        fd, position, os.fstat(fd).st_size
    ):
        if base >= end_offset:
            break
        if end > begin and next_end - begin > _PIECE_BYTES:
            yield os.pread(fd, end - begin, begin), following
            begin = end
        end, following = next_end, last + 1
    if end > begin:
        yield os.pread(fd, end - begin, begin), following


def _cut(content: bytes) -> Iterator[bytes]:
    for first in range(0, len(content), _PIECE_BYTES):
        yield content[first : first + _PIECE_BYTES]

"""MetadataLog: a log of record batches that all processes replay.

    <log.dir>/__cluster_metadata-0/00000000000000000000.log

A directory that Apache Kafka wrote may have a snapshot and further segments, which
metadata_files.py finds; records are appended to the last segment. Their form is that of
the records before them: see metadata_batches.py.

Any process may append, one at a time, under the mutex of the log's cell in shared
memory. The cell's `end` is the number of committed bytes of all files. Readers compare
this one word with their own position, and replay the bytes between.

A running broker may replace the records by a snapshot, too: see MetadataLog.replace().
The snapshot does not change positions: the next record's position is the one that it
would have without the snapshot. But it is written to a new segment. A reader or writer
that has come to the end of a segment opens the one whose name is the next offset.

An append has these steps: lock, catch up, validate, cut off what a killed writer left
past `end`, write, fdatasync, set `end`, unlock. If the process is killed before `end`
is set, no other process sees a change.

If all processes of a broker are killed, the cell is lost with its shared memory. So
recover_metadata_log() is called once, before any other process reads the log. It takes
every whole batch in the files as committed. The last batch may be from a request that
was never answered; then that request has been executed nevertheless.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar, Final, Protocol

from mpbroker.base.directories import sync_directory
from mpbroker.base.errors import MpbrokerError
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.base.storage_errors import (
    CorruptLogError,
    LogDirectoryError,
    LogReplacedError,
)
from mpbroker.ipc.layout import MAX_PARTITIONS
from mpbroker.metadata.kraft_node import SingleNodeCheck
from mpbroker.metadata.kraft_schema import KRAFT_VERSION, KRAFT_VOTERS
from mpbroker.metadata.meta_properties import uuid_of_text
from mpbroker.metadata.metadata_batches import (
    MetadataBatches,
    abort_transaction_record,
    end_of_snapshot,
    next_offset,
)
from mpbroker.metadata.metadata_files import MetadataFiles, find_files, segment_name
from mpbroker.metadata.metadata_image import (
    MetadataImage,
    MetadataRecord,
    TopicImage,
    first_records,
)
from mpbroker.metadata.metadata_snapshot import MODE, remove_replaced, write_snapshot
from mpbroker.metadata.topic_names import CLUSTER_METADATA_TOPIC
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.records.batch_header import MAGIC_POSITION
from mpbroker.protocol.records.record_batch import (
    RecordBatchError,
    compute_crc,
    iter_batches,
    parse_batch_header,
)

_LOG_SUFFIX: Final = ".log"
_SWAP_SUFFIX: Final = ".swap"
JSON_COPY_SUFFIX: Final = ".json"
# The name of an empty file beside the log: the log is a copy of a cluster's log.
COPY_MARK: Final = "copy-of-cluster"

# A snapshot costs a start two fsyncs. With fewer records, to read them all is cheaper,
# even if most have no effect any more (1,000 take 15 ms).
_COMPACT_FROM_RECORDS: Final = 1000


# The files may be replaced while they are opened. Snapshots are seconds apart at least,
# and so the second attempt finds all of them.
_OPEN_ATTEMPTS: Final = 5

# Bytes of a file, the file's path, and the position in it at which the bytes begin.
_Piece = tuple[bytes, str, int]


class _File(NamedTuple):
    """An open file of the metadata log: its path and its descriptor."""

    path: str
    fd: int


class MetadataEnd(NamedTuple):
    """The end of the metadata log, as far as a process has read it.

    Attributes:
        offset: the offset behind the last record.
        epoch: the leader epoch of the last batch.
        directory_id: the id (16 bytes) of the directory in which the log's KRaft voter
            keeps it; zeros if the log has no record of its voters.
        kraft_version: the level of the feature kraft.version.
    """

    offset: int
    epoch: int
    directory_id: bytes
    kraft_version: int


class LogCell(Protocol):
    """The end and the mutex of a metadata log, in shared memory.

    See mpbroker.ipc.tables.shared_log_cell.

    Attributes:
        end: the number of committed bytes of all files.
    """

    end: int

    def locked(self) -> AbstractContextManager[None]:
        """Return a context that holds the log's mutex, which one process can have."""


class MetadataMovedError(MpbrokerError):
    """A change was not committed, as the log has records that its writer had not read.

    The writer reads them, and decides again.
    """


def metadata_log_path(log_dir: str) -> str:
    """Return the path of the log's first segment in a data directory."""
    return os.path.join(log_dir, f"{CLUSTER_METADATA_TOPIC}-0", segment_name(0))


def is_copy(log_dir: str) -> bool:
    """Return whether a data directory's metadata log is a copy of a cluster's log."""
    return os.path.exists(os.path.join(_directory(log_dir), COPY_MARK))


class MetadataLog:
    """The metadata log, as one process reads it and appends to it.

    Only one thread may use it.

    Attributes:
        position: the number of bytes that this process has read; the same as the end in
            the log's cell (in shared memory) if this process is up to date.
        is_shared: whether several nodes have this log: see cluster_metadata_log.py.
    """

    is_shared: ClassVar = False

    def __init__(self, log_dir: str, cell: LogCell) -> None:
        """Open the log of a data directory, after recover_metadata_log().

        Args:
            log_dir: the first directory of ``log.dirs``.
            cell: the log's cell in shared memory.

        Raises:
            CorruptLogError: files are missing.
            OSError: a file cannot be opened.
        """
        self._directory = _directory(log_dir)
        files, opened = _open_files(self._directory)
        self._snapshot = files.snapshot
        # The files that are not read to their end, and the position up to which the
        # first of them is read.
        self._files = opened
        self._at = 0
        self._batches = MetadataBatches(files)
        self._cell = cell
        self.position = 0

    @property
    def has_news(self) -> bool:
        """Whether the log has records that this process has not read yet.

        It costs one comparison.
        """
        return self._cell.end != self.position

    def locked(self) -> AbstractContextManager[None]:
        """Return a context in which no other process writes to the log's files.

        In it the caller calls read_new() first.
        """
        return self._cell.locked()

    def turn(self) -> AbstractContextManager[None]:
        """Return a context for one change: no other process can change the metadata.

        In it the caller calls read_new(), decides on the change, and calls append().
        """
        return self._cell.locked()

    def read_new(self) -> list[MetadataRecord]:
        """Return the committed records that were not returned before.

        Raises:
            CorruptLogError: a file is damaged, or shorter than the committed bytes.
            LogDirectoryError: a record is of a newer version of Kafka.
        """
        end = self._cell.end
        if end == self.position:
            return []
        pieces, files, at, position = self._read_to(end)
        records: list[MetadataRecord] = []
        for data, path, start in pieces:
            records += self._batches.decode(data, path, start)
        for file in set(self._files) - set(files):
            os.close(file.fd)
        self._files, self._at, self.position = files, at, position
        return records

    def _read_to(self, end: int) -> tuple[list[_Piece], list[_File], int, int]:
        """Read the metadata log's committed bytes up to the position ``end``.

        The state of this object is not changed, because the disk may fail meanwhile.

        Returns:
            The bytes, in pieces; the files that are left; the position up to which the
            first of these is read; and the position in the log, which is ``end``.
        """
        pieces: list[_Piece] = []
        files, at, position = list(self._files), self._at, self.position
        offset = self._batches.next_offset
        while True:
            path, fd = files[0]
            is_last = len(files) == 1
            wanted = max(0, end - position) if is_last else os.fstat(fd).st_size - at
            data = _read_at(fd, wanted, at)
            pieces.append((data, path, at))
            if self._snapshot is not None and path == self._snapshot.path:
                position = end_of_snapshot(data, path)
                offset = self._snapshot.end_offset
            else:
                position += len(data)
                offset = next_offset(data, offset)
            at += len(data)
            if is_last:
                if position >= end:
                    return pieces, files, at, position
                # The segment ends here: a snapshot was made, and another one follows.
                files.append(self._open_segment(offset, path, at, end - position))
            files.pop(0)
            at = 0

    def _open_segment(self, offset: int, before: str, at: int, missing: int) -> _File:
        path = os.path.join(self._directory, segment_name(offset))
        if path != before:
            with contextlib.suppress(FileNotFoundError):
                return _File(path, os.open(path, os.O_RDWR | os.O_CLOEXEC))
            newest = find_files(self._directory).snapshot
            if newest is not None and newest.end_offset > offset:
                raise LogReplacedError(
                    f"{self._directory}: the records from offset {offset} on were"
                    " replaced by a snapshot before this process read them"
                )
        raise CorruptLogError(
            f"{before}: ends at byte {at}, but {missing} more are committed"
        )

    def replay_new(self, replay: Callable[[MetadataRecord], None]) -> bool:
        """Call ``replay`` with each record that read_new() returns.

        If ``replay`` fails between two records, this process knows only a part of a
        change. It would then give the next partition a row (entry in shared memory)
        that is another partition's in all other processes. So the process must end at
        once; it must not even answer the request with an error.

        Returns:
            Whether there were records.

        Raises:
            CorruptLogError: as read_new().
            SystemExit: ``replay`` has failed. At the very first call this method raises
                the error of ``replay`` itself, because the process serves nothing yet.
        """
        is_first = self.position == 0
        # This moves ``position`` to the end before anything is replayed. So after a
        # failure in the loop the records cannot be read again, and the process ends.
        try:
            records = self.read_new()
        except (LogDirectoryError, LogReplacedError) as error:
            # A newer program has written the records, or they do not exist any more.
            if is_first:
                raise
            raise SystemExit(str(error)) from error
        try:
            for record in records:
                replay(record)
        except Exception as error:
            if is_first:
                raise
            raise SystemExit(
                f"{self._directory}: cannot be replayed: {error!r}; this process knows"
                " only a part of the topics, and ends"
            ) from error
        return bool(records)

    def append(self, records: Sequence[MetadataRecord], now_ms: int) -> None:
        """Commit metadata records as one batch, all or none of them.

        When this returns, they are on disk. The caller is within turn(), and has read
        all committed records. The next read_new() returns the new records, too.

        Args:
            records: the records, as dicts; see metadata_image.py.
            now_ms: the wall clock, for the records' timestamps.

        Raises:
            ApiError: KAFKA_STORAGE_ERROR: the file cannot be written; nothing is
                committed.
        """
        end = self.position
        assert end == self._cell.end, "catch up before appending"
        batch = self._batches.encode(records, now_ms)
        try:
            self._follow_snapshot()
            self._write(batch, self._at)
        except OSError as error:
            # Another attempt is safe after a failed fdatasync, unlike in a partition's
            # log: the next append cuts off these bytes, and writes its own.
            raise ApiError(
                ErrorCode.KAFKA_STORAGE_ERROR,
                f"cannot write {len(batch)} bytes to {self._files[0].path}:"
                f" {error.strerror}",
            ) from None
        # The batch is on disk before other processes see it. If this process is killed
        # in between, the next writer cuts the batch off; if all processes are killed,
        # recovery keeps it.
        self._publish(end + len(batch))

    @property
    def end(self) -> MetadataEnd:
        """The offset and epoch up to which this process has read the log."""
        batches = self._batches
        voters = batches.quorum.get(KRAFT_VOTERS, {}).get("voters")
        directory_id = voters[0]["voterDirectoryId"] if voters else None
        return MetadataEnd(
            batches.next_offset,
            batches.epoch,
            uuid_of_text(directory_id) if directory_id else bytes(16),
            batches.quorum.get(KRAFT_VERSION, {}).get("kRaftVersion", 0),
        )

    @property
    def is_json(self) -> bool:
        """Whether the records are JSON; no snapshot can be made of such a log."""
        return self._batches.is_json

    def replace(self, groups: Iterable[Sequence[MetadataRecord]], now_ms: int) -> None:
        """Replace all records so far by a snapshot; later records follow behind it.

        The caller is within locked(), and has read all committed records. Other
        processes go on where they are; processes that open the log from now on read the
        snapshot.

        Args:
            groups: records that give the same state as the log, one of them with a
                "logPosition" of ``position``.
            now_ms: the wall clock, for the snapshot's records.

        Raises:
            OSError: the snapshot cannot be written; the log is unchanged.
        """
        assert self.position == self._cell.end, "catch up before a snapshot"
        if os.fstat(self._fd).st_size != self._at:
            # Cut off a killed writer's bytes: readers read a segment to the end of its
            # file before they go on to the next one.
            os.ftruncate(self._fd, self._at)
            os.fsync(self._fd)
        write_snapshot(self._directory, groups, self._batches, now_ms, keeps_last=True)
        self._follow_snapshot()

    def close(self) -> None:
        """Close the files of the metadata log."""
        for file in self._files:
            os.close(file.fd)

    @property
    def _fd(self) -> int:
        """The descriptor of the last segment, to which records are appended.

        All committed records must have been read.
        """
        return self._files[0].fd

    def _follow_snapshot(self) -> None:
        """Go over to the next segment, if another process has made a snapshot.

        The snapshot replaces all records so far; new records follow in that segment.
        """
        path = os.path.join(self._directory, segment_name(self._batches.next_offset))
        if path == self._files[0].path or not os.path.exists(path):
            return
        following = _File(path, os.open(path, os.O_RDWR | os.O_CLOEXEC))
        os.close(self._fd)
        self._files, self._at = [following], 0

    def _write(self, batch: bytes, end: int) -> None:
        """Write a batch at byte ``end`` of the last segment, and force it to disk."""
        # Cut first: a killed writer may have left a longer batch here, and its last
        # bytes must not follow this batch in the file.
        if os.fstat(self._fd).st_size != end:
            os.ftruncate(self._fd, end)
        written = 0
        while written < len(batch):
            written += os.pwrite(self._fd, batch[written:], end + written)
        os.fdatasync(self._fd)

    def _publish(self, end: int) -> None:
        # The commit: one store. Before it no other process reads these bytes.
        self._cell.end = end


def recover_metadata_log(
    log_dir: str,
    cell: LogCell,
    now_ms: int,
    *,
    node_id: int | None = None,
    may_rewrite: bool = True,
    news: bytes = b"",
    see_off: Callable[[Sequence[TopicImage]], None] = lambda _: None,
) -> MetadataImage:
    """Make the metadata log ready for use, and set its end in shared memory.

    The first process calls this once. A log is created if there is none, and a batch
    that is not whole is cut off. If more than half of 1,000 or more records have no
    effect any more, a snapshot takes their place. A log of JSON, which an earlier
    version of mpbroker wrote, is rewritten once in Kafka's form; the old file is kept
    beside it.

    Args:
        log_dir: the first directory of ``log.dirs``.
        cell: the log's cell in shared memory; its end is set last, when the files are
            ready.
        now_ms: the wall clock, for the timestamps of new records.
        node_id: the setting node.id. The log of an Apache Kafka must name no other
            node, unless it is a copy of a cluster's log; None: this is not checked.
        may_rewrite: whether the log may be rewritten. It must be False if the old
            program may go on with the files, and a cell of its own, after a failed
            upgrade: the end in its cell would be wrong, and so would its rows of
            partitions, which follow from all records.
        news: batches to append, if the log ends at the offset of the first one: what
            the cluster's log has behind this copy of it.
        see_off: called with the topics that were removed, before the log is rewritten
            without them. It may be called again for the same topics.

    Returns:
        The state that the records give.

    Raises:
        CorruptLogError: a batch in the middle is damaged, or a record is unknown; the
            files are left as they are.
        LogDirectoryError: the directory cannot be read or written, is that of a newer
            Kafka, or of one node of several.
    """
    directory = _directory(log_dir)
    try:
        files = _find_or_create(directory, now_ms)
        pieces, torn = _read_whole(files)
        path = pieces[-1][0]
        batches = MetadataBatches(files)
        check = None
        if node_id is not None and not is_copy(log_dir):
            check = SingleNodeCheck(directory, node_id)
        news = _matching(news, files, pieces)
        image, removed, rows = _replay_all([*pieces, (path, news)], batches, check)
        end = len(pieces[-1][1])
        # From here on files are changed.
        if torn:
            _truncate(path, end)
        if batches.in_transaction:
            end += _append(path, batches.encode([abort_transaction_record()], now_ms))
        if news:
            end += _append(path, news)
        # The last writer may have been killed before it forced its records to disk.
        # From here on requests are answered by them: a produce to a topic that a power
        # cut then takes away would be lost.
        _sync(path)
        if removed:
            see_off(removed)
        end += _position_of_last(files, pieces)
        if may_rewrite:
            end = _rewrite(directory, image, batches, now_ms, rows=rows) or end
    except OSError as error:
        raise LogDirectoryError(
            f"log.dirs: cannot use {directory}: {error.strerror}; make it readable and"
            " writable for this user, or free some space"
        ) from None
    cell.end = end
    return image


def read_metadata_image(log_dir: str) -> MetadataImage:
    """Return the state that a data directory's metadata log gives; change no file.

    The state is empty if there is no log yet. This may be called before
    ``recover_metadata_log``.

    Args:
        log_dir: the first directory of ``log.dirs``.

    Raises:
        CorruptLogError: a batch in the middle is damaged, or a record is unknown.
        OSError: the directory cannot be read.
    """
    try:
        files = find_files(_directory(log_dir))
    except FileNotFoundError:
        return MetadataImage()
    if not files.paths:
        return MetadataImage()
    pieces, _ = _read_whole(files)
    return _replay_all(pieces, MetadataBatches(files), None)[0]


def metadata_log_end(log_dir: str) -> int:
    """Return the offset behind the last record in a data directory's metadata log.

    This changes no file, and may be called before ``recover_metadata_log``.

    Args:
        log_dir: the first directory of ``log.dirs``, which has a log.

    Raises:
        CorruptLogError: a batch in the middle is damaged.
        OSError: the directory cannot be read.
    """
    files = find_files(_directory(log_dir))
    return _end_of(files, _read_whole(files)[0]) if files.paths else 0


def _matching(
    news: bytes, files: MetadataFiles, pieces: Sequence[tuple[str, bytes]]
) -> bytes:
    """Return the batches in ``news`` if the log ends at their offset; else none."""
    if news and parse_batch_header(news).base_offset != _end_of(files, pieces):
        return b""
    return news


def _end_of(files: MetadataFiles, pieces: Sequence[tuple[str, bytes]]) -> int:
    """Return the offset behind the last record in the files of a metadata log.

    Args:
        files: the files.
        pieces: path and whole batches of each.
    """
    offset = files.snapshot.end_offset if files.snapshot else 0
    for path, data in pieces:
        if files.snapshot is None or path != files.snapshot.path:
            offset = max(offset, next_offset(data, offset))
    return offset


def _read_whole(files: MetadataFiles) -> tuple[list[tuple[str, bytes]], int]:
    """Read all files of the metadata log; see which bytes are whole batches.

    Returns:
        Path and whole batches of each file, and the number of bytes at the end of the
        last file that are not a whole batch.

    Raises:
        CorruptLogError: another file than the last one does not end with a batch.
    """
    pieces = [(path, _read(path)) for path in files.paths]
    for earlier, its_data in pieces[:-1]:
        _require_whole(its_data, earlier)
    path, data = pieces[-1]
    end = _whole_batches(data, path)
    pieces[-1] = path, data[:end]
    return pieces, len(data) - end


def _replay_all(
    pieces: Sequence[tuple[str, bytes]],
    batches: MetadataBatches,
    check: SingleNodeCheck | None,
) -> tuple[MetadataImage, list[TopicImage], int]:
    """Return the state that the records give, and the topics that they have deleted.

    The third value is the number of rows (entries of the partition table) that are in
    use, as in TopicRegistry: those of deleted partitions are among them.

    Args:
        pieces: path and bytes of each file of the log.
        batches: decodes them.
        check: checks that the log is that of a single node; None: no check.
    """
    image = MetadataImage()
    removed = []
    rows = 0
    for path, data in pieces:
        for record in batches.decode(data, path, 0):
            rows = _rows_after(rows, record)
            topic = image.removed_by(record)
            image.replay(record)
            if topic is not None:
                removed.append(topic)
            if check is not None and not batches.is_json:
                check.replay(record)
    if check is not None:
        check.finish(image, batches.quorum)
    return image, removed, rows


def _rows_after(rows: int, record: MetadataRecord) -> int:
    """Return how many rows are in use behind a record; ``rows`` were before it."""
    if "rows" in record:
        import json  # only snapshots of running brokers have this

        return int(json.loads(record["rows"])["used"])
    if record.get("type") == "PartitionRecord":
        return rows + ("row" not in record and "ownRow" not in record)
    return rows


def _rewrite(
    directory: str,
    image: MetadataImage,
    batches: MetadataBatches,
    now_ms: int,
    *,
    rows: int,
) -> int | None:
    """Rewrite the metadata log if its form is old, or most records have no effect.

    Args:
        rows: the number of rows in use. Above MAX_PARTITIONS the log is rewritten
            anyway, so that partitions get rows anew, from the first on: those in the
            news of a cluster got theirs without a check of how many are left.

    Returns:
        The bytes of the new files; None: the log was not replaced.
    """
    remove_replaced(directory)
    if batches.is_json:
        path = os.path.join(directory, segment_name(0))
        copy = path + JSON_COPY_SUFFIX
        if not os.path.exists(copy):
            os.link(path, copy)
        return write_log(path, image.records(), now_ms)
    dead = image.record_count - image.live_record_count()
    is_worth_it = (
        image.record_count >= _COMPACT_FROM_RECORDS and dead * 2 > image.record_count
    )
    if rows <= MAX_PARTITIONS and not is_worth_it:
        return None
    files = write_snapshot(directory, image.records(), batches, now_ms)
    return sum(map(os.path.getsize, files.paths))


def _position_of_last(files: MetadataFiles, pieces: Sequence[tuple[str, bytes]]) -> int:
    """Return how many bytes of the log are before its last file."""
    position = 0
    for path, data in pieces[:-1]:
        if files.snapshot is not None and path == files.snapshot.path:
            position = end_of_snapshot(data, path)
        else:
            position += len(data)
    return position


def _directory(log_dir: str) -> str:
    return os.path.dirname(metadata_log_path(log_dir))


def _find_or_create(directory: str, now_ms: int) -> MetadataFiles:
    if not os.path.isdir(directory):
        os.mkdir(directory)
        sync_directory(os.path.dirname(directory))
    for name in os.listdir(directory):
        if name.endswith(_LOG_SUFFIX + _SWAP_SUFFIX):
            # A process was killed while it rewrote the log; the old file is complete.
            os.unlink(os.path.join(directory, name))
    files = find_files(directory)
    if files.segments:
        return files
    if files.snapshot is None:
        path = os.path.join(directory, segment_name(0))
        write_log(path, [first_records()], now_ms)
    else:
        path = os.path.join(directory, segment_name(files.snapshot.end_offset))
        write_log(path, [], now_ms)
    return find_files(directory)


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        with contextlib.suppress(PermissionError):  # another user owns the file
            os.fchmod(file.fileno(), MODE)  # an older version may have created it
        return file.read()


def _append(path: str, batch: bytes) -> int:
    with open(path, "ab") as file:
        return file.write(batch)


def _require_whole(data: bytes, path: str) -> None:
    """Raise CorruptLogError if a file that others follow has a damaged batch."""
    end = _whole_batches(data, path)
    if end != len(data):
        raise CorruptLogError(
            f"{path}: the batch at byte {end} is damaged, and other files follow;"
            " restore the file from a backup"
        )


def write_log(
    path: str, groups: Iterable[Sequence[MetadataRecord]], now_ms: int
) -> int:
    """Replace a log's only segment by a new one; return its length in bytes.

    Args:
        path: the segment.
        groups: the records of each batch.
        now_ms: the wall clock, for the records' timestamps.
    """
    with open(path + _SWAP_SUFFIX, "wb") as file:
        os.fchmod(file.fileno(), MODE)
        batches = MetadataBatches(MetadataFiles(None, ()))
        for records in groups:
            file.write(batches.encode(records, now_ms))
            batches.next_offset += len(records)
        file.flush()
        os.fsync(file.fileno())
        length = file.tell()
    # The new content is on disk before it gets the name. If this process is killed
    # before the rename, the old log is used again, and the next start removes the
    # `.swap` file.
    os.replace(path + _SWAP_SUFFIX, path)
    sync_directory(os.path.dirname(path))
    return length


def _truncate(path: str, end: int) -> None:
    with open(path, "r+b") as file:
        file.truncate(end)
        os.fsync(file.fileno())


def _sync(path: str) -> None:
    """Force the metadata log to disk, and the directory entries that lead to it."""
    with open(path, "rb") as file:
        os.fdatasync(file.fileno())
    directory = os.path.dirname(path)
    sync_directory(directory)
    sync_directory(os.path.dirname(directory))


def _whole_batches(data: bytes, path: str) -> int:
    """Return the number of bytes, from the first on, that are whole, intact batches.

    Raises:
        CorruptLogError: a whole batch follows the damage, so that it is not the torn
            end of the last write.
    """
    end = 0
    view = memoryview(data)
    try:
        for _, batch in iter_batches(data):
            if not _is_intact(batch):
                break
            end += len(batch)
    except RecordBatchError:
        pass  # torn or damaged: decided below
    if _holds_a_whole_batch(view[end:]):
        raise CorruptLogError(
            f"{path}: the batch at byte {end} is damaged, and a whole one follows;"
            f" restore the file from a backup, or truncate it to {end} bytes and lose"
            " the changes from there on"
        )
    return end


def _holds_a_whole_batch(rest: memoryview) -> bool:
    """Return whether a whole batch is somewhere behind the first one, which is damaged.

    If there is none, the bytes are those of the last write, a part of which never
    reached the disk. Any part may be missing or be zeros, so no other check is
    possible.
    """
    data = bytes(rest)
    magic = data.find(2, MAGIC_POSITION)
    while magic >= 0:
        start = magic - MAGIC_POSITION
        try:
            size = parse_batch_header(rest, start).size_in_bytes
        except RecordBatchError:
            size = 0
        batch = rest[start : start + size]
        if size == len(batch) > 0 and _is_intact(batch):
            return True
        magic = data.find(2, magic + 1)
    return False


def _is_intact(batch: memoryview) -> bool:
    return compute_crc(batch) == parse_batch_header(batch).crc


def _read_at(fd: int, length: int, position: int) -> bytes:
    """Return ``length`` bytes of a file at a position; fewer if it ends before."""
    parts = []
    while length and (part := os.pread(fd, length, position)):
        parts.append(part)
        position += len(part)
        length -= len(part)
    return b"".join(parts)


def _open_files(directory: str) -> tuple[MetadataFiles, list[_File]]:
    """Open all files of the metadata log that must be read.

    Another process may replace them by a snapshot meanwhile; then this tries again.

    Raises:
        CorruptLogError: files are missing.
        OSError: a file cannot be opened.
    """
    for attempt in range(_OPEN_ATTEMPTS):
        opened: list[_File] = []
        try:
            files = find_files(directory)
            for path in files.paths:
                opened.append(_File(path, os.open(path, os.O_RDWR | os.O_CLOEXEC)))
        except (FileNotFoundError, CorruptLogError):
            for file in opened:
                os.close(file.fd)
            if attempt == _OPEN_ATTEMPTS - 1:
                raise
        else:
            return files, opened
    raise AssertionError("unreachable")

"""MetadataLog: one file of record batches that all processes replay.

    <log.dir>/__cluster_metadata-0/00000000000000000000.log

The batches are Kafka's, and the value of each record is a JSON object (see
metadata_image.py). Any process may append, one at a time, under the mutex of a shared
cell. The cell's `end` is the number of committed bytes of the file. Readers compare
this one word with their own position, and replay the bytes between.

An append has these steps: lock, catch up, validate, cut off what a killed writer left
past `end`, write, fdatasync, set `end`, unlock. If the process is killed before `end`
is set, no other process sees a change.

If all processes of a broker are killed, the cell is lost with its shared memory. So
recover_metadata_log() is called once, before any other process reads the log. It takes
every whole batch in the file as committed. The last one may be from a request that was
never answered; then that request has been executed nevertheless.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

from mpbroker.base.storage_errors import CorruptLogError, LogDirectoryError
from mpbroker.metadata.meta_properties import sync_directory
from mpbroker.metadata.metadata_image import (
    MetadataImage,
    MetadataRecord,
    TopicImage,
    feature_level_record,
)
from mpbroker.metadata.topic_names import CLUSTER_METADATA_TOPIC
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.records.batch_header import MAGIC_POSITION
from mpbroker.protocol.records.record_batch import (
    RecordBatchBuilder,
    RecordBatchError,
    compute_crc,
    iter_batches,
    iter_records,
    parse_batch_header,
)

_LOG_NAME: Final = "00000000000000000000.log"
_SWAP_SUFFIX: Final = ".swap"
_MODE: Final = 0o600  # configs in it may be passwords, which are not encrypted

# Rewriting the log costs a start two fsyncs. With fewer records, to read them all is
# cheaper, even if most have no effect any more (1,000 take 15 ms).
_COMPACT_FROM_RECORDS: Final = 1000


class LogCell(Protocol):
    """The shared cell of a log: see mpbroker.ipc.tables.shared_log_cell.

    Attributes:
        end: the number of committed bytes of the file.
    """

    end: int

    def locked(self) -> AbstractContextManager[None]:
        """Hold the mutex that only one writer can have."""


def metadata_log_path(log_dir: str) -> str:
    """Return the path of the log in a data directory."""
    return os.path.join(log_dir, f"{CLUSTER_METADATA_TOPIC}-0", _LOG_NAME)


class MetadataLog:
    """The log as one process reads and appends to it. Not for several threads.

    Attributes:
        position: bytes that this process has read; the same as the cell's end if this
            process is up to date.
    """

    def __init__(self, log_dir: str, cell: LogCell) -> None:
        """Open the log of a data directory, after recover_metadata_log().

        Args:
            log_dir: the first directory of ``log.dirs``.
            cell: the shared cell.

        Raises:
            OSError: the file cannot be opened.
        """
        self._path = metadata_log_path(log_dir)
        self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        self._cell = cell
        self._next_offset = 0
        self.position = 0

    @property
    def has_news(self) -> bool:
        """Whether read_new() would return records. It costs one comparison."""
        return self._cell.end != self.position

    def locked(self) -> AbstractContextManager[None]:
        """Hold the writers' mutex. Then read_new() first, before any decision."""
        return self._cell.locked()

    def read_new(self) -> list[MetadataRecord]:
        """Return the committed records that were not returned before.

        Raises:
            CorruptLogError: the file is damaged, or shorter than the committed bytes.
        """
        end = self._cell.end
        if end == self.position:
            return []
        data = _read_exactly(self._fd, end - self.position, self.position, self._path)
        records = _decode(data, self._path, self.position)
        self._next_offset += len(records)
        self.position = end
        return records

    def replay_new(self, replay: Callable[[MetadataRecord], None]) -> bool:
        """Call ``replay`` with each record that read_new() returns.

        If ``replay`` fails between two records, this process knows only a part of a
        change. It would then give the next partition a row that is another partition's
        in all other processes. So the process must end at once; it must not even
        answer the request with an error.

        Returns:
            Whether there were records.

        Raises:
            CorruptLogError: as read_new().
            SystemExit: ``replay`` has failed. At the very first call this method raises
                the error of ``replay`` itself, because the process serves nothing yet.
        """
        is_first = self.position == 0
        # This moves ``position`` to the end before anything is replayed. A failure in
        # the loop therefore cannot be repeated, which is why it ends the process.
        records = self.read_new()
        try:
            for record in records:
                replay(record)
        except Exception as error:
            if is_first:
                raise
            raise SystemExit(
                f"{self._path}: cannot be replayed: {error!r}; this process knows only"
                " a part of the topics, and ends"
            ) from error
        return bool(records)

    def append(self, records: Sequence[MetadataRecord], now_ms: int) -> None:
        """Commit records as one batch, all or none of them. They are on disk then.

        The caller holds locked(), and has read all committed records. The next
        read_new() returns these records, too.

        Args:
            records: JSON objects; see metadata_image.py.
            now_ms: the wall clock, for the records' timestamps.

        Raises:
            ApiError: KAFKA_STORAGE_ERROR: the file cannot be written; nothing is
                committed.
        """
        end = self.position
        assert end == self._cell.end, "catch up before appending"
        batch = _encode(records, self._next_offset, now_ms)
        try:
            self._write(batch, end)
        except OSError as error:
            # Another attempt is safe after a failed fdatasync, unlike in a partition's
            # log: the next append cuts off these bytes, and writes its own.
            raise ApiError(
                ErrorCode.KAFKA_STORAGE_ERROR,
                f"cannot write {len(batch)} bytes to {self._path}: {error.strerror}",
            ) from None
        # The batch is on disk before other processes see it. Killed in between, the
        # next writer cuts it off; if all processes are killed, recovery keeps it.
        self._publish(end + len(batch))

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _write(self, batch: bytes, end: int) -> None:
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
    may_rewrite: bool = True,
    see_off: Callable[[Sequence[TopicImage]], None] = lambda _: None,
) -> MetadataImage:
    """Make the log ready for use, and set the cell's end. Once, by the first process.

    It creates the log if there is none, and cuts off a batch that is not whole. It
    rewrites the log if more than half of 1,000 or more records have no effect any more.

    Args:
        log_dir: the first directory of ``log.dirs``.
        cell: the shared cell; its end is set last, when the file is ready.
        now_ms: the wall clock, for the timestamps of new records.
        may_rewrite: whether the log may be rewritten. It must not be if another program
            may go on with the file and a cell of its own, as the old one after an
            upgrade that fails: its end would be wrong, and so would the rows of
            partitions, which follow from all records.
        see_off: called with the topics that were removed, before the log is rewritten
            without them. It may be called again for the same topics.

    Returns:
        The state that the records give.

    Raises:
        CorruptLogError: a batch in the middle is damaged, or a record is unknown; the
            file is left as it is.
        LogDirectoryError: the directory cannot be read or written.
    """
    path = metadata_log_path(log_dir)
    try:
        data = _read_or_create(path, now_ms)
        end = _whole_batches(data, path)
        if end != len(data):
            _truncate(path, end)
        # The last writer may have been killed before it forced its records to disk.
        # From here on requests are answered by them: a produce to a topic that a power
        # cut then takes away would be lost.
        _sync(path)
        image = MetadataImage()
        removed = []
        for record in _decode(data[:end], path, 0):
            topic = image.removed_by(record)
            image.replay(record)
            if topic is not None:
                removed.append(topic)
        if removed:
            see_off(removed)
        dead = image.record_count - image.live_record_count()
        if (
            may_rewrite
            and image.record_count >= _COMPACT_FROM_RECORDS
            and dead * 2 > image.record_count
        ):
            end = _write_file(path, image.records(), now_ms)
    except OSError as error:
        raise LogDirectoryError(
            f"log.dirs: cannot use {path}: {error.strerror}; make it readable and"
            " writable for this user, or free some space"
        ) from None
    cell.end = end
    return image


def _read_or_create(path: str, now_ms: int) -> bytes:
    directory = os.path.dirname(path)
    if not os.path.isdir(directory):
        os.mkdir(directory)
        sync_directory(os.path.dirname(directory))
    if os.path.exists(path + _SWAP_SUFFIX):
        # A process was killed while it rewrote the log; the old file is complete.
        os.unlink(path + _SWAP_SUFFIX)
    if not os.path.exists(path):
        _write_file(path, [[feature_level_record()]], now_ms)
    with open(path, "rb") as file:
        with contextlib.suppress(PermissionError):  # another user owns the file
            os.fchmod(file.fileno(), _MODE)  # an older version may have created it
        return file.read()


def _write_file(
    path: str, groups: Iterable[Sequence[MetadataRecord]], now_ms: int
) -> int:
    """Replace the log by a new one; return its length in bytes.

    Args:
        path: the log.
        groups: the records of each batch.
        now_ms: the wall clock, for the records' timestamps.
    """
    with open(path + _SWAP_SUFFIX, "wb") as file:
        os.fchmod(file.fileno(), _MODE)
        offset = 0
        for records in groups:
            file.write(_encode(records, offset, now_ms))
            offset += len(records)
        file.flush()
        os.fsync(file.fileno())
        length = file.tell()
    # The new content is on disk before it gets the name. Killed before the rename, the
    # old log is used again, and the next start removes the `.swap` file.
    os.replace(path + _SWAP_SUFFIX, path)
    sync_directory(os.path.dirname(path))
    return length


def _truncate(path: str, end: int) -> None:
    with open(path, "r+b") as file:
        file.truncate(end)
        os.fsync(file.fileno())


def _sync(path: str) -> None:
    """Force the log to disk, and the names that lead to it."""
    with open(path, "rb") as file:
        os.fdatasync(file.fileno())
    directory = os.path.dirname(path)
    sync_directory(directory)
    sync_directory(os.path.dirname(directory))


def _whole_batches(data: bytes, path: str) -> int:
    """Return how many bytes, from the beginning on, are whole and undamaged batches.

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
    """Return whether bytes that do not begin with a whole batch have one further on.

    If none is, these bytes are the last write, and a part of it never reached the disk.
    Any part may be missing or read as zeros, so no other check is possible.
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


def _encode(records: Sequence[MetadataRecord], base_offset: int, now_ms: int) -> bytes:
    import json

    builder = RecordBatchBuilder()
    for record in records:
        text = json.dumps(record, separators=(",", ":"))
        builder.append(now_ms, None, text.encode("ascii"))
    return builder.build(base_offset=base_offset, partition_leader_epoch=0)


def _decode(data: bytes, path: str, position: int) -> list[MetadataRecord]:
    records: list[MetadataRecord] = []
    end = position + len(data)
    try:
        for _, batch in iter_batches(data):
            for record in iter_records(batch):
                records.append(_json_object(record.value))
            position += len(batch)
        if position != end:
            raise RecordBatchError(f"cut off after {end - position} bytes")
    except (RecordBatchError, ValueError) as error:
        raise CorruptLogError(f"{path}: batch at byte {position}: {error}") from None
    return records


def _json_object(value: bytes | None) -> MetadataRecord:
    # Not orjson: its import takes 18 ms of a start, that of json 2 ms. It is imported
    # here because a start with an empty log needs neither.
    import json

    record: Any = json.loads(value or b"")
    if not isinstance(record, dict):
        raise ValueError(f"a record's value is {value!r}, not a JSON object")
    return record


def _read_exactly(fd: int, length: int, position: int, path: str) -> bytes:
    parts = []
    while length:
        part = os.pread(fd, length, position)
        if not part:
            raise CorruptLogError(
                f"{path}: ends at byte {position}, but {length} more are committed"
            )
        parts.append(part)
        position += len(part)
        length -= len(part)
    return b"".join(parts)

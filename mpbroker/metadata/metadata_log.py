"""The metadata log: one file of record batches that all processes replay.

    <log.dir>/__cluster_metadata-0/00000000000000000000.log

Any process may append, one at a time, under the mutex of a shared cell; the cell's
`end` is how many bytes of the file are committed. Readers compare that one word with
where they are and replay the difference. An append is: lock, catch up, validate,
truncate what a dead writer left past `end`, write, fdatasync, set `end`, unlock.
Whoever dies before `end` is set has changed nothing that anybody sees.

A broker that dies as a whole takes the cell with it. recover_metadata_log(), called
once before any other process looks, takes every whole batch in the file as committed:
at worst a request that nobody got an answer to was carried out.
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
_MODE: Final = 0o600  # passwords that are configs are in it as they are

# Rewriting costs two fsyncs at the start; below this many records reading them is
# cheaper than that, dead or not (1,000 take 15 ms).
_COMPACT_FROM_RECORDS: Final = 1000


class LogCell(Protocol):
    """The shared cell of a log: see mpbroker.ipc.tables.shared_log_cell."""

    end: int

    def locked(self) -> AbstractContextManager[None]:
        """Hold the writers' mutex."""


def metadata_log_path(log_dir: str) -> str:
    """Return where the log of a data directory is."""
    return os.path.join(log_dir, f"{CLUSTER_METADATA_TOPIC}-0", _LOG_NAME)


class MetadataLog:
    """One process's place in the log. Not for several threads.

    Attributes:
        position: bytes that this process has read; equal to the cell's end when it is
            up to date.
    """

    def __init__(self, log_dir: str, cell: LogCell) -> None:
        """Open the log of a data directory that recover_metadata_log() has seen."""
        self._path = metadata_log_path(log_dir)
        self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        self._cell = cell
        self._next_offset = 0
        self.position = 0

    @property
    def has_news(self) -> bool:
        """Whether there is something to read_new(): one comparison."""
        return self._cell.end != self.position

    def locked(self) -> AbstractContextManager[None]:
        """Hold the writers' mutex; with it held, catch up before deciding anything."""
        return self._cell.locked()

    def read_new(self) -> list[MetadataRecord]:
        """Return the committed records that were not returned before.

        Raises:
            CorruptLogError: the file is not what its writers wrote.
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
        """Give ``replay`` what read_new() returns; return whether there was any.

        Whoever fails between two records knows a part of a change, and gives the next
        partition a row that is another's in all other processes. Nothing may go on
        with that, as it might after any other bug: so not even an error is answered.

        Raises:
            CorruptLogError: as read_new().
            SystemExit: ``replay`` has failed. If nothing was read before, what it
                raises itself: there is nobody yet who could go on.
        """
        is_first = self.position == 0
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
        """Commit records as one batch: all or none. Durable when this returns.

        The caller holds locked() and has read everything; read_new() will return these
        records too.

        Raises:
            ApiError: KAFKA_STORAGE_ERROR; the disk refused and nothing is committed.
        """
        end = self.position
        assert end == self._cell.end, "catch up before appending"
        batch = _encode(records, self._next_offset, now_ms)
        try:
            self._write(batch, end)
        except OSError as error:
            # Safe to try again after a failed fdatasync, unlike in a partition's log:
            # the next append truncates and writes all of these bytes anew.
            raise ApiError(
                ErrorCode.KAFKA_STORAGE_ERROR,
                f"cannot write {len(batch)} bytes to {self._path}: {error.strerror}",
            ) from None
        self._publish(end + len(batch))

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _write(self, batch: bytes, end: int) -> None:
        # First: a dead writer's longer batch must not show its tail behind ours.
        if os.fstat(self._fd).st_size != end:
            os.ftruncate(self._fd, end)
        written = 0
        while written < len(batch):
            written += os.pwrite(self._fd, batch[written:], end + written)
        os.fdatasync(self._fd)

    def _publish(self, end: int) -> None:
        # Last, and one store: until here no process reads these bytes.
        self._cell.end = end


def recover_metadata_log(
    log_dir: str,
    cell: LogCell,
    now_ms: int,
    *,
    may_rewrite: bool = True,
    see_off: Callable[[Sequence[TopicImage]], None] = lambda _: None,
) -> MetadataImage:
    """Make the log ready for use and set the cell's end. Once, by the first process.

    Creates the log if there is none, truncates what a dead writer left half written,
    and rewrites a log that mostly carries records without effect.

    Args:
        may_rewrite: nobody else's cell speaks of the file; its end would be wrong, and
            the numbers of partitions' rows, which follow from dead records too.
        see_off: told which topics were removed, before the file may forget them.

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
        image = MetadataImage()
        removed = []
        for record in _decode(data[:end], path, 0):
            topic = image.removed_by(record)
            image.replay(record)
            if topic is not None:
                removed.append(topic)
        if removed:
            _sync(path)  # a dead one's last record may be in memory only
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
        os.unlink(path + _SWAP_SUFFIX)
    if not os.path.exists(path):
        _write_file(path, [[feature_level_record()]], now_ms)
    with open(path, "rb") as file:
        with contextlib.suppress(PermissionError):  # it is another user's to change
            os.fchmod(file.fileno(), _MODE)  # also of one that an older version made
        return file.read()


def _write_file(
    path: str, groups: Iterable[Sequence[MetadataRecord]], now_ms: int
) -> int:
    """Put a new log in the old one's place, all or nothing; return its length."""
    with open(path + _SWAP_SUFFIX, "wb") as file:
        os.fchmod(file.fileno(), _MODE)
        offset = 0
        for records in groups:
            file.write(_encode(records, offset, now_ms))
            offset += len(records)
        file.flush()
        os.fsync(file.fileno())
        length = file.tell()
    os.replace(path + _SWAP_SUFFIX, path)
    sync_directory(os.path.dirname(path))
    return length


def _truncate(path: str, end: int) -> None:
    with open(path, "r+b") as file:
        file.truncate(end)
        os.fsync(file.fileno())


def _sync(path: str) -> None:
    with open(path, "rb") as file:
        os.fdatasync(file.fileno())


def _whole_batches(data: bytes, path: str) -> int:
    """Return how many bytes of the file are whole, undamaged batches.

    Raises:
        CorruptLogError: damage that is not the torn end of the last write.
    """
    end = 0
    view = memoryview(data)
    try:
        for _, batch in iter_batches(data):
            if not _is_intact(batch):
                break
            end += len(batch)
    except RecordBatchError:
        pass  # judged below: torn, or damaged
    if _holds_a_whole_batch(view[end:]):
        raise CorruptLogError(
            f"{path}: the batch at byte {end} is damaged and good ones follow; restore"
            f" the file from a backup, or truncate it to {end} bytes and lose the"
            " changes from there on"
        )
    return end


def _holds_a_whole_batch(rest: memoryview) -> bool:
    """Whether an undamaged batch lies anywhere in bytes that do not begin with one.

    If not, they are the last write, of which some never reached the disk; which part
    of it is missing or reads as zeros says nothing.
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
    # Not orjson, whose import (18 ms against 2) a start would pay for; and a start with
    # an empty log pays for neither.
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
                f"{path}: ends at byte {position}, {length} committed bytes short"
            )
        parts.append(part)
        position += len(part)
        length -= len(part)
    return b"".join(parts)

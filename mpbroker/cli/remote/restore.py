"""Make a broker's data directory from the remote store alone, after a machine is lost.

In this order:

    meta.properties says that the directory is incomplete: no broker starts there
    the owner object gets a new token: the lost broker may not write there any more
    the metadata log is copied
    for each partition that has segments in the store: its manifest, leader epochs and
        producers; the segments stay in the store, and are read when clients read them
    the coordinators' topics are copied
    meta.properties gets the ids of the cluster, the node and the directory

If a run is killed before the last step, the next one removes its files, and begins
again. The records behind the last copied segment of a log are lost. So a group may have
committed an offset that its partition does not have any more; records that are written
later would get the lost offsets, and the group would never read them. Such groups are
set back to the end of the restored log.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Final, NamedTuple

from mpbroker.base.directories import sync_directory
from mpbroker.base.storage_errors import (
    RemoteObjectMissingError,
    StorageError,
)
from mpbroker.coordinator.coordinator_topic import records_of
from mpbroker.coordinator.groups.group_records import offset_value, read_offset
from mpbroker.metadata.meta_properties import (
    FILE_NAME,
    UNFINISHED,
    MetaProperties,
    is_unfinished,
    random_uuid,
    uuid_to_text,
    write_meta_properties,
)
from mpbroker.metadata.metadata_image import (
    MetadataImage,
    TopicImage,
    producer_ids_record,
)
from mpbroker.metadata.metadata_log import MetadataLog, recover_metadata_log
from mpbroker.metadata.topic_names import (
    CLUSTER_METADATA_TOPIC,
    INTERNAL_TOPICS,
    OFFSETS_TOPIC,
    TopicPartition,
)
from mpbroker.protocol.records.record_batch import (
    RecordBatchBuilder,
    iter_batches,
    set_base_offset,
)
from mpbroker.storage.files.checkpoints import LOG_START_OFFSET, write_offsets
from mpbroker.storage.files.log_files import (
    LOG_SUFFIX,
    create_file,
    segment_file,
    write_file,
    write_whole,
)
from mpbroker.storage.log_directory import LOCK_FILE
from mpbroker.storage.partition_directory import complete_directory, directory_name
from mpbroker.storage.remote.metadata_copy import (
    INDEX_KEY,
    LogEnd,
    MetadataIndex,
    Piece,
    StateLog,
    read_piece,
)
from mpbroker.storage.remote.remote_manifest import (
    RemoteManifest,
    manifest_key,
    partition_prefix,
)
from mpbroker.storage.remote.remote_plan import KnownPartition, write_known
from mpbroker.storage.remote.store_owner import (
    OWNER_KEY,
    TOKEN_FILE,
    StoreOwner,
    make_directory,
    read_owner,
)

if TYPE_CHECKING:
    from mpbroker.storage.remote.object_store import ObjectStore

_AT_ONCE: Final = 16  # partitions; each waits for two responses of the store
# Producers may have got ids since the copy, and other producers may not get these ids
# again. Ids are given in blocks of 1,000.
_SKIPPED_PRODUCER_IDS: Final = 1_000_000
_PRIVATE: Final = 0o600  # the metadata log has passwords
# Names in a directory that counts as empty: each run makes the first two before others.
_OWN_FILES: Final = frozenset((LOCK_FILE, FILE_NAME, "lost+found"))


class RestoreError(StorageError):
    """An error: a restore cannot begin or go on. The text says what to do."""


class RestoredLog(NamedTuple):
    """A restored partition, with its offsets now and before the loss.

    Attributes:
        topic: the topic's name.
        partition: the partition number.
        start_offset: the offset of its first record.
        end_offset: the offset that the next record will get.
        lost_to: the log end offset when the metadata was last copied; -1: not known,
            because the partition had no remote storage.
    """

    topic: str
    partition: int
    start_offset: int
    end_offset: int
    lost_to: int


class SetBack(NamedTuple):
    """A group whose committed offset was lowered to the end of a restored log."""

    group: str
    topic: str
    partition: int
    committed: int
    end_offset: int


class Report(NamedTuple):
    """The result of a restore.

    Attributes:
        owner: the identity of the broker that the new data directory belongs to.
        time_ms: when the restored metadata was copied to the store, in ms since 1970.
        logs: the partitions of all topics except the coordinators' topics.
        set_back: the groups whose committed offsets were lowered, by partition.
    """

    owner: StoreOwner
    time_ms: int
    logs: tuple[RestoredLog, ...]
    set_back: tuple[SetBack, ...]


class _Cell:
    """Stands in for the shared cell (end and mutex) of the metadata log.

    It is enough for a log that no other process has open.
    """

    end = 0

    def locked(self) -> AbstractContextManager[None]:
        return nullcontext()


def restore(store: ObjectStore, directory: str, *, take_over: bool) -> Report:
    """Make a broker's data directory from a remote store.

    Args:
        store: the store.
        directory: a path that does not exist, or a directory that is empty or has the
            files of an unfinished restore.
        take_over: whether the new broker may take the store from the broker that owns
            it; False always fails.

    Raises:
        RestoreError: ``take_over`` is False, the directory is in use or has other
            files, or the store has no copy of a broker's metadata.
        StorageError: the store cannot be read, or its content is damaged.
        OSError: the directory cannot be written.
    """
    index = _read_index(store)
    if not take_over:
        raise RestoreError(
            f"{store.url} belongs to a broker ({read_owner(store)}): make sure that it"
            " does not run and never will again, then repeat the command with"
            " --take-over"
        )
    with _prepared(directory):
        token = os.urandom(16).hex()
        owner = StoreOwner(index.cluster_id, index.node_id, token)
        store.put(OWNER_KEY, owner.encode())
        write_file(f"{directory}/{TOKEN_FILE}", token.encode() + b"\n")
        # The lost broker may have written another index before it lost the store.
        index = _read_index(store)
        _write_metadata(store, directory, index)
        image = _recover(directory, index.node_id)
        logs = _restore_logs(store, directory, index, image)
        ends = {(log.topic, log.partition): log.end_offset for log in logs}
        set_back = [
            back
            for log in index.state
            if _is_of(image, log)
            for back in _restore_state_log(store, directory, log, ends)
        ]
        sync_directory(directory)
        # Last, after the sync: until now no broker starts here, and a run begins again.
        directory_id = uuid_to_text(random_uuid())
        properties = MetaProperties(index.cluster_id, index.node_id, directory_id)
        write_meta_properties(directory, properties)
    return Report(owner, index.time_ms, tuple(logs), tuple(set_back))


def _read_index(store: ObjectStore) -> MetadataIndex:
    try:
        return MetadataIndex.decode(store.get(INDEX_KEY))
    except RemoteObjectMissingError as error:
        raise RestoreError(
            f"{store.url} has no copy of a broker's metadata: is it the right place?"
        ) from error


@contextmanager
def _prepared(directory: str) -> Iterator[None]:
    """Lock a directory for a restore, and remove the files of an unfinished restore.

    Raises:
        RestoreError: the directory has other files, or another process uses it.
    """
    os.makedirs(directory, 0o750, exist_ok=True)
    names = set(os.listdir(directory)) - _OWN_FILES
    unfinished = is_unfinished(directory)
    has_owner = os.path.exists(f"{directory}/{FILE_NAME}")
    if not unfinished and (names or has_owner):
        raise RestoreError(
            f"{directory} is not empty: name another directory, so that nothing is lost"
        )
    lock = create_file(f"{directory}/{LOCK_FILE}")
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RestoreError(f"{directory} is in use by another process") from error
        write_file(f"{directory}/{FILE_NAME}", f"version={UNFINISHED}\n".encode())
        for name in names:
            path = f"{directory}/{name}"
            if os.path.isdir(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)
        yield
    finally:
        os.close(lock)


# -- the metadata log ------------------------------------------------------------------


def _write_metadata(store: ObjectStore, directory: str, index: MetadataIndex) -> None:
    made = f"{directory}/{CLUSTER_METADATA_TOPIC}-0"
    os.mkdir(made, 0o750)
    for name, pieces in index.files:
        _write_pieces(store, f"{made}/{os.path.basename(name)}", pieces)
    sync_directory(made)


def _write_pieces(store: ObjectStore, path: str, pieces: Sequence[Piece]) -> None:
    """Create a file from pieces in the store; hold one piece in memory at a time."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _PRIVATE)
    try:
        position = 0
        for piece in pieces:
            write_whole(fd, read_piece(store, piece), position)
            position += piece.size
        os.fsync(fd)
    finally:
        os.close(fd)


def _recover(directory: str, node_id: int) -> MetadataImage:
    """Recover the copied metadata log, and return the state that it describes.

    Append a record that skips 1,000,000 producer ids, since the lost broker may have
    given out some after the copy.
    """
    cell = _Cell()
    now_ms = time.time_ns() // 1_000_000
    image = recover_metadata_log(
        directory, cell, now_ms, node_id=node_id, may_rewrite=False
    )
    log = MetadataLog(directory, cell)
    log.read_new()
    following = image.next_producer_id + _SKIPPED_PRODUCER_IDS
    log.append([producer_ids_record(node_id, following)], now_ms)
    log.close()
    return image


# -- partitions with segments in the store ---------------------------------------------


def _restore_logs(
    store: ObjectStore, directory: str, index: MetadataIndex, image: MetadataImage
) -> list[RestoredLog]:
    """Make the directories of all partitions that have segments in the store.

    Returns:
        An entry for each partition, also if it has no segments in the store.
    """
    bounds = {(end.topic_id, end.partition): end for end in index.ends}
    wanted = [
        KnownPartition(topic.name, topic.topic_id, partition)
        for topic in sorted(image.topics.values(), key=lambda each: each.name)
        if topic.name not in INTERNAL_TOPICS
        for partition in range(topic.partition_count)
    ]

    def make(known: KnownPartition) -> tuple[RestoredLog, bool]:
        return _restore_log(store, directory, known, bounds.get(known[1:]))

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = list(pool.map(make, wanted))
    made = [known for known, (_, has) in zip(wanted, found, strict=True) if has]
    write_known(directory, made)
    starts = {
        (log.topic, log.partition): log.start_offset
        for log, has in found
        if has and log.start_offset
    }
    write_offsets(f"{directory}/{LOG_START_OFFSET}", starts)
    return [log for log, _ in found]


def _restore_log(
    store: ObjectStore, directory: str, known: KnownPartition, bound: LogEnd | None
) -> tuple[RestoredLog, bool]:
    """Make a partition's directory from its manifest in the store.

    Args:
        store: the store.
        directory: the data directory.
        known: the partition.
        bound: the partition's offsets when the metadata was copied; None: not known.

    Returns:
        The restored log, and whether the store has a manifest; without one, no
        directory is made.
    """
    lost_to = bound.end_offset if bound else -1
    key = manifest_key(partition_prefix(known.topic_id, known.partition))
    try:
        content = store.get(key)
    except RemoteObjectMissingError:
        return RestoredLog(known.topic, known.partition, 0, 0, lost_to), False
    copied = RemoteManifest.decode(content).copied()
    make_directory(store, known, content, directory)
    start = bound.start_offset if bound else 0
    if copied:
        start = max(start, copied[0].base_offset)
    end = max(start, copied[-1].next_base) if copied else start
    return RestoredLog(known.topic, known.partition, start, end, lost_to), True


# -- the coordinators' topics ----------------------------------------------------------


def _is_of(image: MetadataImage, log: StateLog) -> bool:
    topic: TopicImage | None = image.topics.get(log.topic)
    return topic is not None and topic.topic_id == log.topic_id


def _restore_state_log(
    store: ObjectStore, directory: str, log: StateLog, ends: dict[TopicPartition, int]
) -> list[SetBack]:
    """Write the segments of a coordinator's partition; return groups that are set back.

    The lowered offsets of these groups are appended as a batch to the last segment.

    Args:
        store: the store.
        directory: the data directory.
        log: the partition's copy in the store.
        ends: the log end offset of each restored partition.
    """
    made = f"{directory}/{directory_name(log.topic, log.partition)}"
    complete_directory(made, log.topic_id)
    for segment in log.segments:
        path = segment_file(made, segment.base_offset, LOG_SUFFIX)
        _write_pieces(store, path, segment.pieces)
    set_back: list[SetBack] = []
    if log.topic == OFFSETS_TOPIC and log.segments:
        offsets = _CommittedOffsets()
        for segment in log.segments:
            path = segment_file(made, segment.base_offset, LOG_SUFFIX)
            for piece in _read_pieces(path, segment.pieces):
                offsets.replay(piece)
        set_back, batch = offsets.above(ends)
        last = log.segments[-1]
        if batch:
            set_base_offset(memoryview(batch), last.next_offset, 0)
            path = segment_file(made, last.base_offset, LOG_SUFFIX)
            with open(path, "ab") as file:
                file.write(batch)
                file.flush()
                os.fsync(file.fileno())
    sync_directory(made)
    return set_back


def _read_pieces(path: str, pieces: Sequence[Piece]) -> Iterator[bytes]:
    with open(path, "rb") as file:
        for piece in pieces:
            yield file.read(piece.size)


class _CommittedOffsets:
    """The newest committed offsets of a partition of __consumer_offsets."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes | None] = {}
        self._pending: dict[int, dict[bytes, bytes | None]] = {}

    def replay(self, batches: bytes) -> None:
        """Take in the offset commits of a copied part of __consumer_offsets.

        Args:
            batches: the part's record batches, in the order of the log.
        """
        for header, batch in iter_batches(batches):
            for record in records_of(header, batch, 0):
                if record.commit is not None:
                    ended = self._pending.pop(record.producer_id, {})
                    if record.commit:
                        self._values.update(ended)
                elif record.producer_id >= 0:
                    pending = self._pending.setdefault(record.producer_id, {})
                    pending[record.key] = record.value
                else:
                    self._values[record.key] = record.value

    def above(self, ends: dict[TopicPartition, int]) -> tuple[list[SetBack], bytearray]:
        """Find committed offsets above the end of a restored log.

        Args:
            ends: the log end offset, by partition.

        Returns:
            The groups, and a batch that commits the log ends for them. The batch is
            empty if there is no such group.
        """
        found: list[SetBack] = []
        builder = RecordBatchBuilder()
        now_ms = time.time_ns() // 1_000_000
        for key, value in self._values.items():
            read = read_offset(key, value)
            if read is None:
                continue
            group, topic, partition, committed = read
            if committed is None:
                continue
            offset, _, metadata, timestamp, expiry = committed
            end = ends.get((topic, partition), offset)
            if offset > end:
                found.append(SetBack(group, topic, partition, offset, end))
                lowered = offset_value(end, -1, metadata, timestamp, expiry)
                builder.append(now_ms, key, lowered)
        return found, bytearray(builder.build()) if found else bytearray()

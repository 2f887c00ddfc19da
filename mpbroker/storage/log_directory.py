"""LogDirectory: a directory of ``log.dirs``, with its lock and its checkpoint files.

The process that starts the broker opens it once, before any other process uses it. The
lock is an flock, which forked children share. The kernel releases it when the last
process of the broker has ended, also if it was killed.

Source: Kafka's LogManager; `.lock`, `.kafka_cleanshutdown` and the checkpoint files.
"""

import errno
import fcntl
import os
import stat
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from mpbroker.base.directories import sync_directory
from mpbroker.base.logger import get_logger
from mpbroker.base.storage_errors import (
    CheckpointError,
    LogDirectoryError,
    LogDirectoryLockedError,
)
from mpbroker.metadata.metadata_image import TopicImage
from mpbroker.metadata.metadata_log import LogCell, recover_metadata_log
from mpbroker.metadata.topic_names import CLUSTER_METADATA_TOPIC, TopicPartition
from mpbroker.storage.files.checkpoints import (
    CLEANER_OFFSET,
    LOG_START_OFFSET,
    RECOVERY_POINT,
    TOPIC_IDS,
    checkpoints_locked,
    read_offsets,
    read_topic_ids,
    write_offsets,
    write_topic_ids,
)
from mpbroker.storage.files.log_files import (
    DELETE_DIRECTORY_SUFFIX,
    LOG_DIRECTORIES_FILE,
    create_file,
    write_file,
)
from mpbroker.storage.log.log_loader import LoadHints
from mpbroker.storage.partition_directory import (
    directory_name,
    encode_topic_id,
    parse_directory_name,
    partition_directories,
    read_topic_id,
    rename_away,
)

LOCK_FILE: Final = ".lock"
CLEAN_SHUTDOWN_FILE: Final = ".kafka_cleanshutdown"
_DIRECTORY_MODE: Final = 0o750

logger = get_logger(__name__)


class LogDirectory:
    """One directory of ``log.dirs``: its lock, and its checkpoint files.

    Attributes:
        path: the absolute path.
        clean: the last broker that used the directory stopped cleanly.
        has_failed: its disk had failed when this program took it over.
    """

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self.clean = False
        self.has_failed = False
        self._lock_fd = -1
        self._device: int | None = None  # st_dev, since it was opened
        self._recovery_points: dict[TopicPartition, int] = {}
        self._start_offsets: dict[TopicPartition, int] = {}
        self._ends: dict[TopicPartition, int] = {}
        self._closed_ends: dict[TopicPartition, int] = {}
        # The ids, by name, of the topics that the offsets above belong to. None: not
        # known; use an offset for the topic that has the name.
        self._topic_ids: dict[str, str] | None = None

    def open(self) -> None:
        """Create the directory if absent, lock it, and read its checkpoint files.

        Raises:
            LogDirectoryLockedError: a running broker uses the directory.
            LogDirectoryError: the directory cannot be created or written.
        """
        try:
            os.makedirs(self.path, _DIRECTORY_MODE, exist_ok=True)
            self._device = os.stat(self.path).st_dev
            self._lock()
            marker = f"{self.path}/{CLEAN_SHUTDOWN_FILE}"
            self._recovery_points = self._read(RECOVERY_POINT)
            self._start_offsets = self._read(LOG_START_OFFSET)
            self.clean = os.path.exists(marker)
            if self.clean:
                self._closed_ends = dict(self._recovery_points)
                # Remove the mark before any log is changed, and force that to disk: if
                # the broker crashes from here on, the next start must recover the logs.
                os.unlink(marker)
                sync_directory(self.path)
        except OSError as error:
            self.close()
            raise LogDirectoryError(
                f"log.dirs={self.path} cannot be used: {error.strerror}; name a"
                " directory that this user may write"
            ) from error

    def check_there(self) -> None:
        """Raise an error if the directory is not at its path.

        If it was unmounted, there may be an empty one, on another device.

        Raises:
            OSError: it is not there, or cannot be looked at.
        """
        found = os.stat(self.path)
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if self._device not in (None, found.st_dev):
            raise OSError(errno.ENODEV, "it was unmounted: another device is there")

    def failure(self) -> OSError | None:
        """Return why the directory cannot be read; None if it can be."""
        try:
            self.check_there()
            with os.scandir(self.path) as entries:
                next(entries, None)
        except OSError as error:
            return error
        return None

    @property
    def lock_fd(self) -> int:
        """The descriptor that holds the lock, which an upgrade leaves open.

        The program that runs next in this process takes it over with the lock.
        """
        return self._lock_fd

    @classmethod
    def taken_over(cls, path: str, lock_fd: int, *, clean: bool) -> "LogDirectory":
        """Return a directory that this process had open before an upgrade.

        In an upgrade the process runs a new program, which keeps the old one's lock.

        Args:
            path: the directory.
            lock_fd: the descriptor that holds the lock; this object closes it.
            clean: ``clean`` of the old program's LogDirectory.
        """
        directory = cls(path)
        directory._lock_fd = lock_fd
        directory.clean = clean
        try:
            directory._device = os.stat(path).st_dev
            directory._recovery_points = directory._read(RECOVERY_POINT)
            directory._start_offsets = directory._read(LOG_START_OFFSET)
        except OSError as error:
            # Its disk has failed. No program could start if this one did not: the old
            # one reads it, too, when it goes on.
            logger.error("log.dirs=%s cannot be used: %s", path, error.strerror)
            directory.has_failed = True
        return directory

    def know_logs(self, logs: Iterable[tuple[str, int, int, int]]) -> None:
        """Take the log ends from the old program, when an upgrade replaces it.

        The checkpoint files may have older offsets. The machine has not restarted since
        the old program committed these, so the logs are complete up to them, at least
        in the page cache.

        Args:
            logs: (topic, partition, log start offset, log end offset) of each log.
        """
        for topic, partition, start, end in logs:
            name = f"{self.path}/{directory_name(topic, partition)}"
            if not os.path.isdir(name):
                continue
            self._ends[topic, partition] = end
            # Also a start offset that is not above the first local segment's base: the
            # segments of a tiered log that lie below it are in the remote store.
            self._start_offsets[topic, partition] = start

    def know_topics(self, topic_ids: Mapping[str, bytes]) -> None:
        """Forget the checkpointed offsets of topics that do not exist any more.

        The caller calls this after ``open`` and ``know_logs``, which fill in offsets.

        Args:
            topic_ids: the id (16 bytes) of each topic at this start, by name. An offset
                is kept only if it belongs to the topic of this id.
        """
        known = _texts(topic_ids)
        noted = None if self.has_failed else self._read_topic_ids()
        if noted is not None:
            same = _same(known, noted)
            self._recovery_points = _of(self._recovery_points, same)
            self._closed_ends = _of(self._closed_ends, same)
            told = {p: o for p, o in self._start_offsets.items() if p in self._ends}
            self._start_offsets = {**_of(self._start_offsets, same), **told}
        self._topic_ids = known

    def knew(self, topic: str, topic_id: bytes) -> bool:
        """Return whether a topic existed when the broker started.

        In a process that writes checkpoints: when it wrote the last ones. If
        ``know_topics`` was not called, this is true of all topics.
        """
        ids = self._topic_ids
        return ids is None or ids.get(topic) == encode_topic_id(topic_id)

    def finish_removals(self, removed: Sequence[TopicImage]) -> None:
        """Rename the directories that deleted topics have left to `-delete`.

        A deletion is committed in the metadata log before directories are renamed. A
        process killed in between leaves directories of topics that do not exist.
        Errors are only logged.

        Args:
            removed: the deleted topics.
        """
        try:
            names = set(os.listdir(self.path)) if removed else set()
        except OSError as error:
            logger.error("%s cannot be read: %s", self.path, error)
            return
        for topic in removed:
            for partition in range(topic.partition_count):
                name = directory_name(topic.name, partition)
                if name not in names:
                    continue
                directory = f"{self.path}/{name}"
                try:
                    if read_topic_id(directory) == topic.topic_id:
                        rename_away(directory, DELETE_DIRECTORY_SUFFIX)
                except OSError as error:
                    logger.error("%s cannot be removed: %s", directory, error)

    def warn_of_unknown(self, topics: Collection[str]) -> None:
        """Log the number of partitions' directories whose topics do not exist.

        The directories are left as they are. The setting ``metadata.log.dir`` of an
        Apache Kafka that used them may have put its metadata log elsewhere; the broker
        would then serve none of its topics.

        Args:
            topics: the names of all topics.
        """
        try:
            names = partition_directories(self.path)
        except OSError as error:
            logger.error("%s cannot be read: %s", self.path, error)
            return
        known = {*topics, CLUSTER_METADATA_TOPIC}
        unknown = sorted(
            name
            for name in names
            if (found := parse_directory_name(name)) and found[0] not in known
        )
        if unknown:
            logger.warning(
                "%s: %d partition(s), such as %s, are of topics that the metadata log"
                " does not have; they are left as they are. The metadata log of a Kafka"
                " must be in the first directory of log.dirs, as %s-0; look for it in"
                " Kafka's metadata.log.dir",
                self.path,
                len(unknown),
                unknown[0],
                CLUSTER_METADATA_TOPIC,
            )

    def _lock(self) -> None:
        self._lock_fd = create_file(f"{self.path}/{LOCK_FILE}")
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            self.close()
            raise LogDirectoryLockedError(
                f"log.dirs={self.path} is in use by a running broker; stop it, or name"
                " another directory"
            ) from error

    def _read(self, name: str) -> dict[TopicPartition, int]:
        try:
            return read_offsets(f"{self.path}/{name}")
        except CheckpointError as error:
            # Without it all logs are checked from their first segment on.
            logger.warning("ignored: %s", error)
            return {}

    def _read_topic_ids(self) -> dict[str, str] | None:
        try:
            return read_topic_ids(f"{self.path}/{TOPIC_IDS}")
        except CheckpointError as error:
            logger.warning("ignored: %s", error)
            return {}

    def hints(
        self,
        partition: TopicPartition,
        topic_id: bytes,
        producer_id_expiration_ms: int,
    ) -> LoadHints:
        """Return a partition's entries in this directory's checkpoint files.

        Args:
            partition: topic name and partition number.
            topic_id: the topic's id; entries of another topic of that name are ignored.
            producer_id_expiration_ms: the setting producer.id.expiration.ms.
        """
        if not self.knew(partition[0], topic_id):
            # The topic was created after this start; the entries, if there are any, are
            # those of a deleted topic of the same name.
            return LoadHints(
                self.clean, producer_id_expiration_ms=producer_id_expiration_ms
            )
        return LoadHints(
            self.clean,
            self._recovery_points.get(partition, 0),
            self._start_offsets.get(partition, 0),
            producer_id_expiration_ms,
            self._ends.get(partition, 0),
            self._closed_ends.get(partition, -1),
        )

    def write_checkpoints(
        self,
        recovery_points: Mapping[TopicPartition, int],
        start_offsets: Mapping[TopicPartition, int],
        known: Collection[TopicPartition],
        topic_ids: Mapping[str, bytes],
    ) -> None:
        """Write recovery points and log start offsets to the checkpoint files.

        Entries of deleted topics are removed, in the cleaner's checkpoint, too.

        Args:
            recovery_points: the new recovery points. The logs and indexes below them
                are on disk.
            start_offsets: the log start offsets that the segments' names do not tell.
            known: all partitions in this directory. A partition without a new recovery
                point was not used, and keeps its entries. Entries of other partitions
                are removed.
            topic_ids: the id (16 bytes) of each topic, by name.

        Raises:
            OSError: a file cannot be written; it has its old content.
        """
        ids, before = _texts(topic_ids), self._topic_ids
        same = set(ids) if before is None else _same(ids, before)
        points = {
            p: o for p, o in _of(self._recovery_points, same).items() if p in known
        }
        starts = {
            p: o
            for p, o in _of(self._start_offsets, same).items()
            if p in known and p not in recovery_points
        }
        self._recovery_points = {**points, **recovery_points}
        self._start_offsets = {**starts, **start_offsets}
        write_offsets(f"{self.path}/{RECOVERY_POINT}", self._recovery_points)
        write_offsets(f"{self.path}/{LOG_START_OFFSET}", self._start_offsets)
        # The ids last. If this process is killed before that, a new topic that has the
        # name of a deleted one has new offsets and another id than the file: the next
        # start ignores the offsets, and checks the topic's logs from the beginning.
        self._topic_ids = ids
        noted = self._read_topic_ids()
        with self.cleaner_offsets_locked() as cleaned:
            kept = _of(cleaned, ids if noted is None else _same(ids, noted))
            for partition in cleaned.keys() - kept.keys():
                del cleaned[partition]
        if ids != noted:
            write_topic_ids(f"{self.path}/{TOPIC_IDS}", ids)

    def read_again(self, topic_ids: Mapping[str, bytes]) -> None:
        """Read the checkpoint files again, which another process may have written.

        That is the housekeeper before this one, which was killed: this object has what
        was in the files when the broker started.

        Args:
            topic_ids: the id (16 bytes) of each topic, by name.

        Raises:
            OSError: a file cannot be read.
        """
        ids, before = _texts(topic_ids), self._topic_ids
        noted = self._read_topic_ids()
        own = set(ids) if before is None else _same(ids, before)
        filed = own if noted is None else _same(ids, noted)
        # The topics in neither of the two are new. Those that no file has yet keep the
        # offsets that this object has.
        self._ends = _of(self._ends, own)
        self._closed_ends = _of(self._closed_ends, own)
        points = _of(self._recovery_points, own - filed)
        self._recovery_points = points | _of(self._read(RECOVERY_POINT), filed)
        starts = _of(self._read(LOG_START_OFFSET), filed)
        for partition, offset in _of(self._start_offsets, own).items():
            # What `know_logs` has told may be in no file, too.
            if partition[0] not in filed or partition in self._ends:
                starts[partition] = max(offset, starts.get(partition, offset))
        self._start_offsets = starts
        self._topic_ids = ids

    def take_in(
        self,
        partition: TopicPartition,
        recovery_point: int,
        start_offset: int | None,
        topic_ids: Mapping[str, bytes],
    ) -> None:
        """Write the checkpoints with a partition that is about to be moved here.

        The checkpoint of the log start offset above all: without it records that were
        deleted would come back after a crash.

        Args:
            partition: topic name and partition number.
            recovery_point: as in ``write_checkpoints``.
            start_offset: the log start offset; None: it is the first segment's base.
            topic_ids: as in ``write_checkpoints``.

        Raises:
            OSError: a file cannot be written.
        """
        self.read_again(topic_ids)
        self.write_checkpoints(
            {partition: recovery_point},
            {} if start_offset is None else {partition: start_offset},
            {partition, *self._recovery_points, *self._start_offsets},
            topic_ids,
        )

    def cleaner_offsets(self) -> dict[TopicPartition, int]:
        """Read the cleaner's checkpoint: the offset below which each log is compacted.

        A file that is damaged counts as empty.
        """
        return self._read(CLEANER_OFFSET)

    @contextmanager
    def cleaner_offsets_locked(self) -> Iterator[dict[TopicPartition, int]]:
        """Yield the cleaner's checkpoint, and write it when the caller has changed it.

        A lock keeps out other processes: cleaners and the housekeeper.

        Raises:
            OSError: the file cannot be read or written.
        """
        with checkpoints_locked(self.path):
            offsets = self.cleaner_offsets()
            before = dict(offsets)
            yield offsets
            if offsets != before:
                write_offsets(f"{self.path}/{CLEANER_OFFSET}", offsets)

    def mark_clean(self, broker_epoch: int) -> None:
        """Write the mark of a clean stop. It must be the last write to the directory.

        The mark promises that all logs, indexes and checkpoints are on disk and
        consistent.

        Args:
            broker_epoch: the epoch of the last registration with the controller of an
                Apache Kafka; -1: there was none. If a Kafka goes on with this directory
                and finds another epoch, it takes the stop for an unclean one.

        Raises:
            OSError: the mark cannot be written.
        """
        content = b'{"version":0,"brokerEpoch":%d}' % broker_epoch
        write_file(f"{self.path}/{CLEAN_SHUTDOWN_FILE}", content)

    def close(self) -> None:
        """Close this process's descriptor of the lock; children keep the lock held."""
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)


def _of(
    offsets: Mapping[TopicPartition, int], names: Collection[str]
) -> dict[TopicPartition, int]:
    return {p: offset for p, offset in offsets.items() if p[0] in names}


def _same(ids: Mapping[str, str], before: Mapping[str, str]) -> set[str]:
    """Return the topics that have the same topic id in both mappings (name to id)."""
    return {name for name, topic_id in ids.items() if before.get(name) == topic_id}


def _texts(topic_ids: Mapping[str, bytes]) -> dict[str, str]:
    return {name: encode_topic_id(its_id) for name, its_id in topic_ids.items()}


def open_log_directories(paths: Sequence[str]) -> list[LogDirectory]:
    """Open all directories of ``log.dirs``; log and leave out unusable ones.

    Raises:
        LogDirectoryLockedError: a running broker uses one of them.
        LogDirectoryError: all of them are unusable.
    """
    opened: list[LogDirectory] = []
    failures: list[LogDirectoryError] = []
    for path in paths:
        directory = LogDirectory(path)
        try:
            directory.open()
        except LogDirectoryLockedError:
            for other in opened:
                other.close()
            raise
        except LogDirectoryError as error:
            failures.append(error)
            continue
        opened.append(directory)
    if not opened:
        # Raised and not logged, so that the user reads one line and not two.
        if failures:
            raise failures[0]
        raise LogDirectoryError("log.dirs is empty: name a directory")
    for failure in failures:
        logger.error("%s", failure)
    return opened


def know_of_each_other(paths: Sequence[str]) -> bool:
    """Return whether there are several log directories, or were at an earlier start.

    Most brokers have one, and need no code of used_directories.py.

    Args:
        paths: the directories of ``log.dirs`` that can be used.
    """
    return len(paths) > 1 or os.path.exists(f"{paths[0]}/{LOG_DIRECTORIES_FILE}")


def recover_metadata(
    directories: Sequence[LogDirectory],
    cell: LogCell,
    node_id: int,
    *,
    is_alone: bool,
    news: bytes = b"",
) -> None:
    """Recover the metadata log in the first directory; finish deletions in all.

    Args:
        directories: all directories of ``log.dirs``, open.
        cell: the end of the metadata log and its mutex, in shared memory.
        node_id: the setting node.id.
        is_alone: False if the old program may go on after a failed upgrade: then the
            log is not rewritten, and directories are not renamed.
        news: batches to append; see recover_metadata_log().

    Raises:
        CorruptLogError, LogDirectoryError: as recover_metadata_log().
    """

    def see_off(removed: Sequence[TopicImage]) -> None:
        for directory in directories if is_alone else ():
            directory.finish_removals(removed)

    image = recover_metadata_log(
        directories[0].path,
        cell,
        time.time_ns() // 1_000_000,
        node_id=node_id,
        may_rewrite=is_alone,
        news=news,
        see_off=see_off,
    )
    for directory in directories if is_alone else ():
        directory.warn_of_unknown(image.topics)

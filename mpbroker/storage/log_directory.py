"""LogDirectory: a directory of ``log.dirs``, with its lock and its checkpoint files.

The process that starts the broker opens it once, before any other process uses it. The
lock is an flock, which forked children share. The kernel releases it when the last
process of the broker has ended, also if it was killed.

Source: Kafka's LogManager; `.lock`, `.kafka_cleanshutdown` and the checkpoint files.
"""

import errno
import fcntl
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from mpbroker.base.logger import get_logger
from mpbroker.base.storage_errors import (
    CheckpointError,
    LogDirectoryError,
    LogDirectoryLockedError,
)
from mpbroker.metadata.metadata_image import TopicImage
from mpbroker.metadata.metadata_log import LogCell, recover_metadata_log
from mpbroker.metadata.topic_names import TopicPartition
from mpbroker.storage.files.checkpoints import (
    CLEANER_OFFSET,
    LOG_START_OFFSET,
    RECOVERY_POINT,
    TOPIC_IDS,
    read_offsets,
    read_topic_ids,
    write_offsets,
    write_topic_ids,
)
from mpbroker.storage.files.log_files import (
    DELETE_DIRECTORY_SUFFIX,
    LOG_SUFFIX,
    base_offsets,
    create_file,
    sync_directory,
    write_file,
)
from mpbroker.storage.log.log_loader import LoadHints
from mpbroker.storage.partition_directory import (
    directory_name,
    encode_topic_id,
    read_topic_id,
    rename_away,
)

LOCK_FILE: Final = ".lock"
CLEAN_SHUTDOWN_FILE: Final = ".kafka_cleanshutdown"
_DIRECTORY_MODE: Final = 0o750

logger = get_logger(__name__)


class LogDirectory:
    """One directory, and its files that are about many partitions.

    Attributes:
        path: the absolute path.
        clean: the last broker that used it stopped cleanly.
    """

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self.clean = False
        self._lock_fd = -1
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
            LogDirectoryLockedError: a running broker has it.
            LogDirectoryError: it cannot be created or written.
        """
        try:
            os.makedirs(self.path, _DIRECTORY_MODE, exist_ok=True)
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

    @property
    def lock_fd(self) -> int:
        """The descriptor that holds the lock, to hand over to the next program."""
        return self._lock_fd

    @classmethod
    def taken_over(cls, path: str, lock_fd: int, *, clean: bool) -> "LogDirectory":
        """Return a directory that this process had open before it ran this program.

        Args:
            path: the directory.
            lock_fd: the descriptor that holds the lock; this object closes it.
            clean: ``clean`` of the earlier program's LogDirectory.
        """
        directory = cls(path)
        directory._lock_fd = lock_fd
        directory.clean = clean
        directory._recovery_points = directory._read(RECOVERY_POINT)
        directory._start_offsets = directory._read(LOG_START_OFFSET)
        return directory

    def know_logs(self, logs: Iterable[tuple[str, int, int, int]]) -> None:
        """Use the offsets that the old program's processes committed, in an upgrade.

        The machine has not restarted since, so the logs are complete at least in the
        page cache.

        Args:
            logs: topic, partition, log start offset, log end offset.
        """
        for topic, partition, start, end in logs:
            name = f"{self.path}/{directory_name(topic, partition)}"
            if not os.path.isdir(name):
                continue
            self._ends[topic, partition] = end
            # As in the checkpoint, only a start offset above the first segment's base.
            if start > min(base_offsets(name, LOG_SUFFIX), default=0):
                self._start_offsets[topic, partition] = start
            else:  # the checkpoint may have that of an earlier topic of that name
                self._start_offsets.pop((topic, partition), None)

    def know_topics(self, topic_ids: Mapping[str, bytes]) -> None:
        """Forget the checkpointed offsets of topics that do not exist any more.

        Called last, after ``open`` and ``know_logs``.

        Args:
            topic_ids: the id (16 bytes) of each topic at this start, by name. An offset
                is kept only if it belongs to the topic of this id.
        """
        known = _texts(topic_ids)
        noted = self._read_topic_ids()
        if noted is not None:
            same = _same(known, noted)
            self._recovery_points = _of(self._recovery_points, same)
            self._closed_ends = _of(self._closed_ends, same)
            told = {p: o for p, o in self._start_offsets.items() if p in self._ends}
            self._start_offsets = {**_of(self._start_offsets, same), **told}
        self._topic_ids = known

    def finish_removals(self, removed: Sequence[TopicImage]) -> None:
        """Rename the directories that deleted topics have left.

        A deletion is committed in the metadata log before directories are renamed. A
        process killed in between leaves directories of topics that do not exist.

        Args:
            removed: the deleted topics. Errors are logged.
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
        """Return the content of this directory's files that is about a partition.

        Args:
            partition: topic name and partition number.
            topic_id: the topic's id; entries of another topic of that name are ignored.
            producer_id_expiration_ms: the setting producer.id.expiration.ms.
        """
        ids = self._topic_ids
        if ids is not None and ids.get(partition[0]) != encode_topic_id(topic_id):
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
        """Write recovery points and log start offsets; forget deleted topics.

        Entries of deleted topics are removed from the cleaner's checkpoint, too.

        Args:
            recovery_points: the new recovery points. The logs and indexes below them
                are on disk.
            start_offsets: the log start offsets that are above their first segment's
                base offset.
            known: all partitions in this directory. Those without a new recovery point
                were not used, and keep their entries. Entries of other partitions are
                removed.
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
        # The ids last. Killed before that, a new topic that has the name of a deleted
        # one has new offsets and another id than the file: the next start ignores the
        # offsets, and checks the topic's logs from the beginning.
        self._topic_ids = ids
        noted = self._read_topic_ids()
        cleaned = self.cleaner_offsets()
        kept = _of(cleaned, ids if noted is None else _same(ids, noted))
        if kept != cleaned:
            self.write_cleaner_offsets(kept)
        if ids != noted:
            write_topic_ids(f"{self.path}/{TOPIC_IDS}", ids)

    def cleaner_offsets(self) -> dict[TopicPartition, int]:
        """Read the offsets below which logs are compacted."""
        return self._read(CLEANER_OFFSET)

    def write_cleaner_offsets(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Replace the cleaner's checkpoint; raises OSError."""
        write_offsets(f"{self.path}/{CLEANER_OFFSET}", offsets)

    def mark_clean(self) -> None:
        """Write the mark of a clean stop. It must be the last write to the directory.

        It promises that all logs, indexes and checkpoints are on disk and consistent.

        Raises:
            OSError: it cannot be written.
        """
        content = b'{"version":0,"brokerEpoch":-1}'
        write_file(f"{self.path}/{CLEAN_SHUTDOWN_FILE}", content)

    def close(self) -> None:
        """Close the lock's descriptor; the lock stays while a child has it open."""
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)


def _of(
    offsets: Mapping[TopicPartition, int], names: Collection[str]
) -> dict[TopicPartition, int]:
    return {p: offset for p, offset in offsets.items() if p[0] in names}


def _same(ids: Mapping[str, str], before: Mapping[str, str]) -> set[str]:
    """Return the names that have the same id in both."""
    return {name for name, topic_id in ids.items() if before.get(name) == topic_id}


def _texts(topic_ids: Mapping[str, bytes]) -> dict[str, str]:
    return {name: encode_topic_id(its_id) for name, its_id in topic_ids.items()}


def open_log_directories(paths: Sequence[str]) -> list[LogDirectory]:
    """Open all directories of ``log.dirs``; log and leave out those that are unusable.

    Raises:
        LogDirectoryLockedError: a running broker has one of them.
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


def recover_metadata(
    directories: Sequence[LogDirectory], cell: LogCell, *, is_alone: bool
) -> None:
    """Recover the metadata log of the first directory; finish deletions in all.

    Args:
        directories: all directories, open.
        cell: the shared cell of the metadata log.
        is_alone: False if the old program may go on after an upgrade that fails: then
            neither the log is rewritten, nor are directories renamed.

    Raises:
        CorruptLogError, LogDirectoryError: as recover_metadata_log().
    """

    def see_off(removed: Sequence[TopicImage]) -> None:
        for directory in directories if is_alone else ():
            directory.finish_removals(removed)

    recover_metadata_log(
        directories[0].path,
        cell,
        time.time_ns() // 1_000_000,
        may_rewrite=is_alone,
        see_off=see_off,
    )

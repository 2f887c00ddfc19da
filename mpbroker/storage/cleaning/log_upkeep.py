"""LogUpkeep: the housekeeper's tasks on the logs, and their clean close.

Each task walks over all partitions, and has the files of one partition open at a time.
A failure of a partition is logged, and the task goes on with the next one.

Source: Kafka's LogManager.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Protocol

from mpbroker.base.logger import get_logger
from mpbroker.base.storage_errors import StorageError
from mpbroker.ipc.layout import RowStatus
from mpbroker.metadata.log_config import LogConfig
from mpbroker.metadata.topic_names import TopicPartition
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.storage.cleaning.log_cleaner import LogCleaner
from mpbroker.storage.cleaning.retention import apply_retention
from mpbroker.storage.files.log_files import DELETED_SUFFIX, remove_if_exists
from mpbroker.storage.log.partition_log import PartitionLog
from mpbroker.storage.log_directory import LogDirectory
from mpbroker.storage.log_manager import LogManager, TopicView
from mpbroker.storage.partition_directory import (
    partition_directories,
    remove_deleted_directories,
)

logger = get_logger(__name__)

# With a snapshot every few MiB, a process that uses a log first reads less of it.
SNAPSHOT_INTERVAL_BYTES: Final = 4 * 1024 * 1024


class AllTopics(Protocol):
    """The part of the TopicRegistry that the housekeeper needs."""

    def topics(self) -> Iterable[TopicView]: ...

    @property
    def default_config(self) -> LogConfig: ...


class LogUpkeep:
    """Retention, compaction, flushing, checkpoints, snapshots and the clean stop.

    Args:
        manager: the LogManager of this process.
        topics: the registry of this process.
        cleaner: compacts logs; None: log.cleaner.enable is false.
        is_restored: returns whether the logs have the markers of all decided
            transactions. After a power cut some may be missing.
    """

    def __init__(
        self,
        manager: LogManager,
        topics: AllTopics,
        cleaner: LogCleaner | None = None,
        is_restored: Callable[[], bool] = lambda: True,
    ) -> None:
        self._manager = manager
        self._topics = topics
        self._cleaner = cleaner
        self._is_restored = is_restored
        self._deleted: list[tuple[int, str]] = []  # when to remove (ms), path
        self._searched = False
        self._noted = False  # whether the checkpoints have only topics that exist
        self._flushed_ms: dict[int, int] = {}
        self._snapshot_sizes: dict[int, int] = {}

    # -- periodic work ---------------------------------------------------------------

    def run_retention(self, now_ms: int) -> int:
        """Remove segments that are too old or take too many bytes.

        Due every log.retention.check.interval.ms.

        Returns:
            The number of files that were renamed to `.deleted`.
        """
        count = 0

        def retain(log: PartitionLog) -> None:
            nonlocal count
            due_ms = now_ms + log.view.config.file_delete_delay_ms
            for path in apply_retention(log, now_ms):
                self._deleted.append((due_ms, path))
                count += 1

        self._for_each(retain, "retention")
        return count

    def run_cleaner(self, now_ms: int) -> int:
        """Compact the logs that are due, the dirtiest first; return how many.

        Due every log.cleaner.backoff.ms.
        """
        if self._cleaner is None:
            return 0
        # The housekeeper before this one may have died before it noted a deletion.
        self.note_deletions()
        candidates = [
            (topic, partition)
            for topic, partition in self._partitions()
            if "compact" in topic.config.cleanup_policy
        ]
        count = 0
        # At most one turn for each log: one that is soon dirty again must not keep the
        # other tasks waiting.
        while candidates and count < len(candidates):
            cleaned = self._cleaner.clean_filthiest(
                self._manager, candidates, now_ms, self._later
            )
            if not cleaned:
                break
            count += 1
        return count

    def _later(self, due_ms: int, path: str) -> None:
        self._deleted.append((due_ms, path))

    def remove_deleted(self, now_ms: int) -> None:
        """Remove files and directories whose delay has passed."""
        if not self._searched:
            self._searched = True
            self._find_deleted(now_ms)
        due = {path for due_ms, path in self._deleted if due_ms <= now_ms}
        self._deleted = [entry for entry in self._deleted if entry[0] > now_ms]
        for path in due:
            remove_if_exists(path)
        for directory in self._manager.directories:
            before_s = (now_ms - self._delay_ms) / 1000
            remove_deleted_directories(directory.path, before_s)

    @property
    def _delay_ms(self) -> int:
        """The broker's file.delete.delay.ms, for deleted topics too, as in Kafka."""
        return self._topics.default_config.file_delete_delay_ms

    def _find_deleted(self, now_ms: int) -> None:
        """Find the `.deleted` files that an earlier housekeeper has left."""
        for directory in self._manager.directories:
            for name in partition_directories(directory.path):
                path = f"{directory.path}/{name}"
                for file in os.listdir(path):
                    if file.endswith(DELETED_SUFFIX):
                        due_ms = now_ms + self._delay_ms
                        self._deleted.append((due_ms, f"{path}/{file}"))

    def run_flush(self, now_ms: int) -> int:
        """Force logs to disk whose flush.ms has passed; return how many were.

        Due every log.flush.scheduler.interval.ms.
        """
        count = 0

        def flush(log: PartitionLog) -> None:
            nonlocal count
            row, index = log.row, log.row.index
            if row.status != RowStatus.ONLINE:
                return
            last_ms = self._flushed_ms.setdefault(index, now_ms)
            if row.durable_end_offset >= row.log_end_offset:
                self._flushed_ms[index] = now_ms
            elif now_ms - last_ms >= log.view.config.flush_ms:
                log.sync.flush()
                self._flushed_ms[index] = now_ms
                count += 1

        self._for_each(flush, "flush")
        return count

    def take_snapshots(self) -> int:
        """Write producer snapshots of logs that have grown by 4 MiB or rolled.

        Returns:
            The number of snapshots.
        """
        count = 0

        def snapshot(log: PartitionLog) -> None:
            nonlocal count
            if log.row.status != RowStatus.ONLINE:
                return
            index, size = log.row.index, log.row.snapshot().active_size
            grown = size - self._snapshot_sizes.get(index, 0)
            if grown < 0 or grown >= SNAPSHOT_INTERVAL_BYTES:
                log.sync.take_snapshot(sync=False)
                self._snapshot_sizes[index] = size
                count += 1

        self._for_each(snapshot, "a producer snapshot")
        return count

    def write_checkpoints(self) -> None:
        """Write the checkpoint files of all directories.

        Due every log.flush.offset.checkpoint.interval.ms. A recovery point is an offset
        below which the log and its indexes are on disk: so these are forced to disk
        before the file is written. Killed in between, the old file has lower recovery
        points, and the next start checks more than it had to.
        """
        self._noted = True
        for directory, logs in self._by_directory().items():
            points: dict[TopicPartition, int] = {}
            starts: dict[TopicPartition, int] = {}
            for partition, log in logs.items():
                if log.row.status != RowStatus.ONLINE:
                    continue
                try:
                    # Segments that are not active are forced to disk here, as in Kafka,
                    # so that recovery checks little more than the active segment.
                    log.sync.flush(log.row.snapshot().active_base_offset)
                    points[partition] = log.sync.flush_indexes()
                except (OSError, ApiError) as error:
                    logger.error("checkpoint of %s: %s", log.directory, error)
                    continue
                start = log.row.log_start_offset
                if start > log.view.first_base_offset():
                    starts[partition] = start
                log.close()
            try:
                directory.write_checkpoints(
                    points, starts, set(logs), self._topic_ids()
                )
            except OSError as error:
                logger.error("checkpoints of %s: %s", directory.path, error)

    def forget_topic(self, topic: TopicView) -> None:
        """Close a deleted topic's logs, and mark their directories for removal.

        After all deleted topics, the caller calls ``note_deletions``.
        """
        self._manager.delete_topic(topic)
        self._noted = False

    def note_deletions(self) -> None:
        """Write the checkpoints without deleted topics, unless that was done.

        A new topic may get the name of a deleted one. If the broker is then killed
        before the next checkpoint, the new topic must not get the old recovery points.
        """
        if not self._noted:
            self.write_checkpoints()

    # -- the stop --------------------------------------------------------------------

    def shut_down(self) -> None:
        """Force everything to disk, and mark the directories as clean.

        Called by the last process that has the logs. A directory is not marked if
        anything in it fails, so that the next start checks its logs. No directory is
        marked while markers of transactions are missing, so that the next start writes
        them before it opens logs.
        """
        restored = self._is_restored()
        for directory, logs in self._by_directory().items():
            clean = restored
            points: dict[TopicPartition, int] = {}
            starts: dict[TopicPartition, int] = {}
            for partition, log in logs.items():
                try:
                    if log.row.status == RowStatus.UNLOADED and directory.clean:
                        continue  # untouched since it was last closed cleanly
                    points[partition] = log.close_cleanly()
                    if log.row.log_start_offset > log.view.first_base_offset():
                        starts[partition] = log.row.log_start_offset
                except (OSError, ApiError, StorageError) as error:
                    logger.error("%s is not closed cleanly: %s", log.directory, error)
                    clean = False
            try:
                directory.write_checkpoints(
                    points, starts, set(logs), self._topic_ids()
                )
                # The mark is the last write: killed before it, the next start checks
                # the logs from the recovery points on.
                if clean:
                    directory.mark_clean()
            except OSError as error:
                logger.error("%s is not closed cleanly: %s", directory.path, error)
        self._manager.close()

    def _topic_ids(self) -> dict[str, bytes]:
        return {topic.name: topic.topic_id for topic in self._topics.topics()}

    # -- walking -----------------------------------------------------------------------

    def _partitions(self) -> Iterator[tuple[TopicView, int]]:
        """Yield the partitions that have a directory, so that no task creates one."""
        for topic in list(self._topics.topics()):
            for partition in range(len(topic.partitions)):
                if not self._manager.is_untouched(topic, partition):
                    yield topic, partition

    def _for_each(self, work: Callable[[PartitionLog], None], what: str) -> None:
        for topic, partition in self._partitions():
            try:
                log = self._manager.log(topic, partition)
                work(log)
                log.close()
            except (OSError, ApiError, StorageError) as error:
                if not _says_deleted(error):
                    logger.error("%s of %s-%d: %s", what, topic.name, partition, error)

    def _by_directory(self) -> dict[LogDirectory, dict[TopicPartition, PartitionLog]]:
        found: dict[LogDirectory, dict[TopicPartition, PartitionLog]] = {
            directory: {} for directory in self._manager.directories
        }
        by_path = {directory.path: directory for directory in found}
        for topic, partition in self._partitions():
            try:
                log = self._manager.log(topic, partition)
            except ApiError as error:
                if not _says_deleted(error):
                    logger.error("%s-%d: %s", topic.name, partition, error)
                continue
            directory = by_path[os.path.dirname(log.directory)]
            found[directory][topic.name, partition] = log
        return found


def _says_deleted(error: Exception) -> bool:
    """Return whether the error is that the topic is being deleted: nothing to log."""
    gone = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    return isinstance(error, ApiError) and error.error_code == gone

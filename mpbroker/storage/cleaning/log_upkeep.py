"""What the housekeeper does for the logs, and how they are closed for good.

Each run walks all partitions and opens no more files than one partition's at a time. A
partition that fails is reported and does not stop the others.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Protocol

from mpbroker.base.logger import get_logger
from mpbroker.base.storage_errors import StorageError
from mpbroker.ipc.layout import RowStatus
from mpbroker.metadata.log_config import LogConfig
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.storage.cleaning.log_cleaner import LogCleaner
from mpbroker.storage.cleaning.retention import apply_retention
from mpbroker.storage.files.checkpoints import TopicPartition
from mpbroker.storage.files.log_files import DELETED_SUFFIX, remove_if_exists
from mpbroker.storage.log.partition_log import PartitionLog
from mpbroker.storage.log_directory import LogDirectory
from mpbroker.storage.log_manager import LogManager, TopicView
from mpbroker.storage.partition_directory import (
    partition_directories,
    remove_deleted_directories,
)

logger = get_logger(__name__)

# A snapshot a few MiB after the last one keeps the next first touch short.
SNAPSHOT_INTERVAL_BYTES: Final = 4 * 1024 * 1024


class AllTopics(Protocol):
    """The registry, as far as the housekeeper needs it."""

    def topics(self) -> Iterable[TopicView]: ...

    @property
    def default_config(self) -> LogConfig: ...


class LogUpkeep:
    """Retention, compaction, flushing, checkpoints, snapshots and the clean stop.

    Args:
        manager: this process's own.
        topics: the registry of this process.
        cleaner: compacts; None where log.cleaner.enable is false.
        is_restored: says whether logs have all that their transactions wrote.
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
        self._noted = False  # of which topics the checkpoints speak
        self._flushed_ms: dict[int, int] = {}
        self._snapshot_sizes: dict[int, int] = {}

    # -- periodic work ---------------------------------------------------------------

    def run_retention(self, now_ms: int) -> int:
        """Remove segments that are too old or too many; return how many files went.

        Due every log.retention.check.interval.ms.
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
        """Compact every log that is due, dirtiest first; return how many.

        Due every log.cleaner.backoff.ms.
        """
        if self._cleaner is None:
            return 0
        # The one before us may have died before it took note of a deletion.
        self.note_deletions()
        candidates = [
            (topic, partition)
            for topic, partition in self._partitions()
            if "compact" in topic.config.cleanup_policy
        ]
        count = 0
        # A log that is dirty again at once must not keep the others waiting for ever.
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
        """What is left of topics that are gone goes by the broker's, as in Kafka."""
        return self._topics.default_config.file_delete_delay_ms

    def _find_deleted(self, now_ms: int) -> None:
        """Take over the `.deleted` files of a housekeeper that died."""
        for directory in self._manager.directories:
            for name in partition_directories(directory.path):
                path = f"{directory.path}/{name}"
                for file in os.listdir(path):
                    if file.endswith(DELETED_SUFFIX):
                        due_ms = now_ms + self._delay_ms
                        self._deleted.append((due_ms, f"{path}/{file}"))

    def run_flush(self, now_ms: int) -> int:
        """Force logs to disk whose flush.ms has passed; return how many.

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
        """Write producer snapshots of logs that have grown; return how many."""
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
        """Write recovery points and log start offsets.

        Due every log.flush.offset.checkpoint.interval.ms. A recovery point is what is
        known to be on disk, with the indexes below it.
        """
        self._noted = True
        for directory, logs in self._by_directory().items():
            points: dict[TopicPartition, int] = {}
            starts: dict[TopicPartition, int] = {}
            for partition, log in logs.items():
                if log.row.status != RowStatus.ONLINE:
                    continue
                try:
                    # A segment that was rolled is forced without being asked, as in
                    # Kafka, so that recovery has little more to check than the last.
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
        """Take note that a topic was deleted, whoever deleted it.

        Whoever has told us of all that were deleted calls ``note_deletions``.
        """
        self._manager.delete_topic(topic)
        self._noted = False

    def note_deletions(self) -> None:
        """Forget in the checkpoints whom they should not speak of any more.

        A name must not find the old recovery points if it comes back and the broker
        is killed before the next checkpoint.
        """
        if not self._noted:
            self.write_checkpoints()

    # -- the stop --------------------------------------------------------------------

    def shut_down(self) -> None:
        """Force everything to disk and mark the directories clean.

        Called by the last process that has the logs. A directory in which anything
        fails is not marked, so that its logs are checked at the next start; and none is
        while ends of transactions lack, so that the next start keeps logs closed again.
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
                if clean:
                    directory.mark_clean()
            except OSError as error:
                logger.error("%s is not closed cleanly: %s", directory.path, error)
        self._manager.close()

    def _topic_ids(self) -> dict[str, bytes]:
        return {topic.name: topic.topic_id for topic in self._topics.topics()}

    # -- walking -----------------------------------------------------------------------

    def _partitions(self) -> Iterator[tuple[TopicView, int]]:
        """Yield all that there is something of: to look after nothing makes nothing."""
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
    """Whether somebody deletes the topic just now: no trouble, and nothing to do."""
    gone = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    return isinstance(error, ApiError) and error.error_code == gone

"""LogUpkeep: the housekeeper's tasks on the logs, and their clean close.

Each task walks over all partitions, and has the files of one partition open at a time.
A failure of a partition is logged, and the task goes on with the next one.

Source: Kafka's LogManager.
"""

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final, Protocol

from mpbroker.base.file_id import file_id
from mpbroker.base.logger import get_logger
from mpbroker.base.storage_errors import StorageError
from mpbroker.ipc import pulse
from mpbroker.ipc.layout import RowStatus
from mpbroker.metadata.log_config import LogConfig
from mpbroker.metadata.topic_names import INTERNAL_TOPICS, TopicPartition
from mpbroker.protocol.errors import ApiError
from mpbroker.storage.cleaning.retention import apply_retention, copy_limit
from mpbroker.storage.files.log_files import (
    DELETED_SUFFIX,
    LOG_SUFFIX,
    base_offsets,
    remove_if_exists,
    segment_file,
)
from mpbroker.storage.log.partition_log import PartitionLog
from mpbroker.storage.log_directory import LogDirectory
from mpbroker.storage.log_manager import LogManager, TopicView, says_deleted
from mpbroker.storage.partition_directory import (
    exclusive,
    partition_directories,
    remove_deleted_directories,
)
from mpbroker.storage.used_directories import refresh

if TYPE_CHECKING:
    from mpbroker.storage.cleaning.log_cleaner import LogCleaner
    from mpbroker.storage.remote.remote_plan import PartitionPlan

logger = get_logger(__name__)

# With a snapshot every few MiB, a process that uses a log first reads less of it.
SNAPSHOT_INTERVAL_BYTES: Final = 4 * 1024 * 1024
LOAD_INTERVAL_MS: Final = 500
LOAD_SLICE_S: Final = 0.1


class AllTopics(Protocol):
    """An object that knows all topics and their default settings: a TopicRegistry."""

    def topics(self) -> Iterable[TopicView]: ...

    @property
    def default_config(self) -> LogConfig: ...

    @property
    def broker_epoch(self) -> int: ...


class LogUpkeep:
    """The housekeeper's tasks: retention, compaction, flushes, checkpoints, the stop.

    Args:
        manager: the LogManager of this process.
        topics: this process's registry of topics.
        cleaner: compacts logs; None: this process compacts no logs.
        is_restored: returns whether the logs have the markers of all decided
            transactions. After a power cut some may be missing.
        may_clean: returns whether the logs of a topic may be compacted now.
    """

    def __init__(
        self,
        manager: LogManager,
        topics: AllTopics,
        cleaner: "LogCleaner | None" = None,
        is_restored: Callable[[], bool] = lambda: True,
        may_clean: Callable[[str], bool] = lambda topic: True,
    ) -> None:
        self._manager = manager
        self._topics = topics
        self._cleaner = cleaner
        self._is_restored = is_restored
        self._may_clean = may_clean
        self._deleted: list[tuple[int, str]] = []  # time of removal (ms), path
        self._searched = False
        self._noted = False  # whether the checkpoints have only topics that exist
        # The log directories whose checkpoint files this process has read itself.
        self._read_again: set[str] = set()
        self._flushed_ms: dict[int, int] = {}
        self._snapshot_sizes: dict[int, int] = {}
        self._all_loaded = False
        self._looked_at: set[int] = set()  # rows of logs that were loaded, or cannot be

    # -- periodic work ---------------------------------------------------------------

    def load_logs(self, now_ms: int) -> None:
        """Load logs that no process has used since the start, for metrics to show them.

        This is due every 500 ms, until all partitions were tried. A call ends after
        0.1 s, because other tasks wait meanwhile.
        """
        if self._all_loaded or not self._is_restored():
            return
        until = time.monotonic() + LOAD_SLICE_S
        for topic in list(self._topics.topics()):
            for partition, row in enumerate(topic.partitions):
                if row in self._looked_at:
                    continue
                if time.monotonic() >= until:
                    return
                self._looked_at.add(row)
                if not self._manager.is_untouched(topic, partition):
                    self._load(topic, partition)
        self._all_loaded = True
        self._looked_at.clear()

    def _load(self, topic: TopicView, partition: int) -> None:
        try:
            log = self._manager.log(topic, partition)
            log.view.state()
            log.close()
        except (OSError, ApiError, StorageError) as error:
            if not says_deleted(error):
                logger.error("loading %s-%d: %s", topic.name, partition, error)

    def run_retention(self, now_ms: int) -> int:
        """Remove segments that exceed a limit of retention.

        This is due every log.retention.check.interval.ms.

        Returns:
            The number of files that were renamed to `.deleted`.
        """
        count = 0

        def retain(log: PartitionLog) -> None:
            nonlocal count
            due_ms = now_ms + log.view.config.file_delete_delay_ms
            with exclusive(log.directory) as is_free:
                # If the log is being compacted, retention waits for the next run.
                deleted = apply_retention(log, now_ms) if is_free else ()
            for path in deleted:
                self._deleted.append((due_ms, path))
                count += 1

        self._for_each(retain, "retention")
        return count

    def plan_remote_storage(self, now_ms: int) -> None:
        """Write the file that tells the remote log manager what to copy and to remove.

        This is due every remote.log.manager.task.interval.ms. Only records on disk may
        be copied: otherwise a power cut could take them here, and other records would
        get their offsets. As in Kafka, they must be below the last stable offset, too.
        """
        # Imported here: most brokers have no remote store.
        from mpbroker.storage.remote.remote_plan import (
            PartitionPlan,
            RemotePlan,
            StateLogPlan,
            write_plan,
        )

        plans: list[PartitionPlan] = []
        state: list[StateLogPlan] = []
        for topic, partition in self._partitions():
            try:
                log = self._manager.log_in_place(topic, partition)
                if topic.name in INTERNAL_TOPICS:
                    end = log.sync.flush()
                    with log.row.locked():  # no cleaner replaces segments meanwhile
                        segments = _segment_ids(log.directory)
                    state.append(
                        StateLogPlan(
                            topic.name,
                            topic.topic_id,
                            partition,
                            log.directory,
                            end,
                            segments,
                        )
                    )
                    log.close()
                    continue
                plan = _partition_plan(log, topic, partition, now_ms)
                log.close()
                if plan is not None:
                    plans.append(plan)
            except (OSError, ApiError, StorageError) as error:
                if not says_deleted(error):
                    logger.error("%s-%d: %s", topic.name, partition, error)
                continue
        topic_ids = frozenset(topic.topic_id for topic in self._topics.topics())
        home = self._manager.directories[0].path
        write_plan(home, RemotePlan(topic_ids, tuple(plans), tuple(state)))

    def run_cleaner(self, now_ms: int) -> int:
        """Compact the logs that are due, the dirtiest first; return their number.

        This is due every log.cleaner.backoff.ms. Before, ``note_deletions`` must have
        removed deleted topics from the checkpoints.
        """
        if self._cleaner is None:
            return 0
        candidates = [
            (topic, partition)
            for topic, partition in self._partitions()
            if "compact" in topic.config.cleanup_policy and self._may_clean(topic.name)
        ]
        count = 0
        # At most one turn for each log: a log that is soon dirty again must not keep
        # the other tasks waiting.
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
        """Remove what deletions have left, once file.delete.delay.ms has passed.

        These are the `.deleted` files of segments, and directories of deleted topics.
        """
        self.remove_files(now_ms)
        before_s = (now_ms - self._delay_ms) / 1000
        for directory in self._manager.directories:
            try:
                remove_deleted_directories(directory.path, before_s)
            except OSError as error:
                logger.error("%s cannot be read: %s", directory.path, error)

    def remove_files(self, now_ms: int) -> None:
        """Remove `.deleted` files of segments, once file.delete.delay.ms has passed."""
        if not self._searched:
            self._searched = True
            self._find_deleted(now_ms)
        due = {path for due_ms, path in self._deleted if due_ms <= now_ms}
        self._deleted = [entry for entry in self._deleted if entry[0] > now_ms]
        for path in due:
            try:
                remove_if_exists(path)
            except OSError as error:
                logger.error("%s cannot be removed: %s", path, error)

    @property
    def _delay_ms(self) -> int:
        """The time (ms) after which found `.deleted` files and directories are removed.

        They are of deleted topics, or an earlier housekeeper has left them. It is the
        broker's file.delete.delay.ms, as in Kafka. A segment that this housekeeper
        deletes waits for that of its topic.
        """
        return self._topics.default_config.file_delete_delay_ms

    def _find_deleted(self, now_ms: int) -> None:
        """Find the `.deleted` files that an earlier housekeeper has left."""
        for directory in self._manager.directories:
            try:
                paths = self._deleted_files(directory.path)
            except OSError as error:
                logger.error("%s cannot be read: %s", directory.path, error)
                continue
            due_ms = now_ms + self._delay_ms
            self._deleted += [(due_ms, path) for path in paths]

    def _deleted_files(self, log_directory: str) -> list[str]:
        return [
            f"{log_directory}/{name}/{file}"
            for name in partition_directories(log_directory)
            for file in os.listdir(f"{log_directory}/{name}")
            if file.endswith(DELETED_SUFFIX)
        ]

    def run_flush(self, now_ms: int) -> int:
        """Force the logs to disk whose last flush is flush.ms ago; return their number.

        This is due every log.flush.scheduler.interval.ms.
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
        """Write producer snapshots of logs that grew by 4 MiB or have a new segment.

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

        This is due every log.flush.offset.checkpoint.interval.ms. A recovery point is
        an offset below which the log and its indexes are on disk: so these are forced
        to disk before the file is written. If this process is killed in between, the
        old file has lower recovery points, and the next start checks more than it had
        to.
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
                    point = log.sync.flush_indexes()
                    is_noted = _is_start_noted(log)
                except (OSError, ApiError) as error:
                    if log.row.status != RowStatus.DELETED:  # just now
                        logger.error("checkpoint of %s: %s", log.directory, error)
                    continue
                points[partition] = point
                if is_noted:
                    starts[partition] = log.row.log_start_offset
                log.close()
            try:
                self._write_checkpoints(directory, points, starts, set(logs))
            except OSError as error:
                logger.error("checkpoints of %s: %s", directory.path, error)
        self._note_used()

    def _note_used(self) -> None:
        """Note which log directories have partitions: some may be taken away later."""
        paths = [directory.path for directory in self._manager.directories]
        try:
            refresh(paths)
        except OSError as error:
            logger.error("%s: %s", paths[0], error)

    def _write_checkpoints(
        self,
        directory: LogDirectory,
        points: Mapping[TopicPartition, int],
        starts: Mapping[TopicPartition, int],
        known: Collection[TopicPartition],
    ) -> None:
        """Do as LogDirectory.write_checkpoints does; read the files before, once.

        A partition that is offline keeps its entries: they are those that the
        housekeeper before this one has written, and not those of the broker's start.
        """
        topic_ids = self._topic_ids()
        if directory.path not in self._read_again:
            directory.read_again(topic_ids)
            self._read_again.add(directory.path)
        directory.write_checkpoints(points, starts, known, topic_ids)

    def forget_topic(self, topic: TopicView) -> None:
        """Close a deleted topic's logs, and mark their directories for removal.

        When the caller has done this for all deleted topics, it calls
        ``note_deletions``.
        """
        self._manager.delete_topic(topic)
        self._noted = False

    def forget_rows(self, rows: Collection[int]) -> None:
        """Forget deleted partitions, whose rows new partitions will get.

        Args:
            rows: the indexes of the rows (the partitions' entries in shared memory).
        """
        self._manager.forget_rows(rows)
        if self._cleaner is not None:
            self._cleaner.forget_rows(rows)
        for row in rows:
            self._flushed_ms.pop(row, None)
            self._looked_at.discard(row)
            self._snapshot_sizes.pop(row, None)

    def note_deletions(self) -> None:
        """Remove deleted topics from the checkpoint files, unless that was done.

        A new topic may get the name of a deleted one. If the broker is then killed
        before the next checkpoint, the new topic must not get the old recovery points.
        """
        if not self._noted:
            self.write_checkpoints()

    # -- the stop --------------------------------------------------------------------

    def shut_down(self) -> None:
        """Force everything to disk, and mark the directories as clean.

        The last process that has the logs calls this. A directory is not marked if
        anything in it fails, so that the next start checks its logs. No directory is
        marked while markers of transactions are missing, so that the next start writes
        the markers before it opens logs.
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
                    if _is_start_noted(log):
                        starts[partition] = log.row.log_start_offset
                except (OSError, ApiError, StorageError) as error:
                    logger.error("%s is not closed cleanly: %s", log.directory, error)
                    clean = False
            try:
                self._write_checkpoints(directory, points, starts, set(logs))
                # The mark is the last write: if this process is killed before it, the
                # next start checks the logs from the recovery points on.
                if clean:
                    directory.mark_clean(self._topics.broker_epoch)
            except OSError as error:
                logger.error("%s is not closed cleanly: %s", directory.path, error)
        self._note_used()
        self._manager.close()

    def _topic_ids(self) -> dict[str, bytes]:
        return {topic.name: topic.topic_id for topic in self._topics.topics()}

    # -- walking -----------------------------------------------------------------------

    def _partitions(self) -> Iterator[tuple[TopicView, int]]:
        """Yield (topic, partition number) of the partitions on this node's disk.

        Partitions that were never used are left out, so that no task creates a
        directory.
        """
        for topic in list(self._topics.topics()):
            if self._manager.is_elsewhere(topic):
                continue
            for partition in range(len(topic.partitions)):
                pulse.step()
                if not self._manager.is_untouched(topic, partition):
                    yield topic, partition

    def _for_each(self, work: Callable[[PartitionLog], None], what: str) -> None:
        for topic, partition in self._partitions():
            try:
                log = self._manager.log_in_place(topic, partition)
                work(log)
                log.close()
            except (OSError, ApiError, StorageError) as error:
                if not says_deleted(error):
                    logger.error("%s of %s-%d: %s", what, topic.name, partition, error)

    def _by_directory(self) -> dict[LogDirectory, dict[TopicPartition, PartitionLog]]:
        found: dict[LogDirectory, dict[TopicPartition, PartitionLog]] = {
            directory: {} for directory in self._manager.directories
        }
        by_path = {directory.path: directory for directory in found}
        for topic, partition in self._partitions():
            try:
                log = self._manager.log_in_place(topic, partition)
            except (OSError, ApiError) as error:
                if not says_deleted(error):
                    logger.error("%s-%d: %s", topic.name, partition, error)
                continue
            directory = by_path[os.path.dirname(log.directory)]
            found[directory][topic.name, partition] = log
        return found


def _is_start_noted(log: PartitionLog) -> bool:
    """Return whether the checkpoint files must have the partition's log start offset.

    A log is loaded from the base offset of its first segment on if they do not have it.
    For a tiered log that segment is the first one in the remote store. So they have the
    start offset of each tiered log, also if it is the base offset of the first local
    segment: the remote segments below it are deleted some time later.

    Raises:
        ApiError: the partition is offline or was deleted.
        OSError: the directory cannot be read.
    """
    view = log.view
    return view.is_tiered or log.row.log_start_offset != view.first_base_offset()


def _partition_plan(
    log: PartitionLog, topic: TopicView, partition: int, now_ms: int
) -> "PartitionPlan | None":
    """Return what the remote log manager is to copy and remove of one partition.

    Returns:
        None if the log has no remote storage, and had none before.

    Raises:
        ApiError: the partition is offline or was deleted.
        StorageError: a file of the partition is damaged.
        OSError: the directory cannot be read, or cannot be forced to disk.
    """
    from mpbroker.storage.remote.remote_plan import PartitionPlan

    config = log.view.config
    if not config.remote_storage_enable and not log.view.is_tiered:
        return None
    below = -1
    if config.remote_storage_enable and not config.remote_log_copy_disable:
        active_base = log.view.state().active_base_offset
        log.sync.flush(active_base)
        stable = log.lookup.last_stable_offset()
        durable = log.row.durable_end_offset
        below = min(active_base, stable, durable, copy_limit(log, now_ms))
    remove_all = (
        not config.remote_storage_enable and config.remote_log_delete_on_disable
    )
    if remove_all:  # first: readers must not look for records that are being removed
        log.raise_log_start(log.view.first_base_offset())
    return PartitionPlan(
        topic.name,
        topic.topic_id,
        partition,
        log.directory,
        below,
        log.lookup.earliest(),
        log.view.state().log_end_offset,
        remove_all,
    )


def _segment_ids(directory: str) -> tuple[tuple[int, int], ...]:
    """Return the base offset and the file's number of each segment of a log."""
    found = []
    for base in base_offsets(directory, LOG_SUFFIX):
        fd = os.open(segment_file(directory, base, LOG_SUFFIX), os.O_RDONLY)
        try:
            found.append((base, file_id(fd)))
        finally:
            os.close(fd)
    return tuple(found)

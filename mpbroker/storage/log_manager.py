"""LogManager: find, create and remove the partition logs of a broker.

Each process has its own LogManager. Handlers call ``log``; the housekeeper's tasks are
in log_upkeep.py.

Source: Kafka's LogManager.
"""

import errno
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from mpbroker.base.logger import get_logger
from mpbroker.ipc.layout import HOUSEKEEPER, RowStatus
from mpbroker.ipc.tables.partition_table import PartitionRow, PartitionTable
from mpbroker.metadata.log_config import LogConfig
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.storage.files.leader_epochs import UNDEFINED, read_leader_epochs
from mpbroker.storage.files.log_files import (
    DELETE_DIRECTORY_SUFFIX,
    STRAY_DIRECTORY_SUFFIX,
)
from mpbroker.storage.log.log_lookup import EMPTY_LOG, EmptyLog, LogLookup
from mpbroker.storage.log.partition_log import PartitionLog
from mpbroker.storage.log_directory import LogDirectory
from mpbroker.storage.partition_directory import (
    DIRECTORY_MODE,
    complete_directory,
    directory_name,
    partition_directories,
    read_topic_id,
    rename_away,
)

logger = get_logger(__name__)
_PRODUCER_ID_EXPIRATION_MS = 86_400_000


class TopicView(Protocol):
    """The part of a Topic that logs need."""

    @property
    def name(self) -> str: ...

    @property
    def topic_id(self) -> bytes: ...

    @property
    def partitions(self) -> Sequence[int]:
        """The rows of the partitions, by partition number."""

    @property
    def config(self) -> LogConfig: ...


class TopicSource(Protocol):
    """The part of the TopicRegistry that finds topics by name."""

    def topic(self, name: str) -> TopicView | None: ...


class Syncer(NamedTuple):
    """A process that owns a log's sync while it makes one.

    Attributes:
        process: its id.
        notify: sends a notice about a row (index) to handlers (bit set), which wait for
            a sync that the process has made; None: no handler waits.
    """

    process: int = HOUSEKEEPER
    notify: Callable[[int, int], None] | None = None


class LogManager:
    """The logs of all partitions, as one process uses them.

    Args:
        directories: opened once, by the process that all others are forked from.
        table: the shared rows.
        topics: the registry of this process.
        producer_id_expiration_ms: the setting producer.id.expiration.ms.
        is_behind: returns whether the metadata log has records that the registry has
            not replayed.
        is_restored: returns whether the logs have the markers of all decided
            transactions. No log is opened before that.
        step: called at each log that is opened or deleted, as a sign of progress.
        syncer: this process as the owner of logs' syncs.
    """

    def __init__(
        self,
        directories: Sequence[LogDirectory],
        table: PartitionTable,
        topics: TopicSource,
        *,
        producer_id_expiration_ms: int = _PRODUCER_ID_EXPIRATION_MS,
        is_behind: Callable[[], bool] = lambda: False,
        is_restored: Callable[[], bool] = lambda: True,
        step: Callable[[], None] = lambda: None,
        syncer: Syncer = Syncer(),  # noqa: B008 - it cannot be changed
    ) -> None:
        self.directories = directories
        self._table = table
        self._topics = topics
        self._expiration_ms = producer_id_expiration_ms
        self._is_behind = is_behind
        self._is_restored = is_restored
        self._step = step
        self._process, self._notify = syncer
        self._logs: dict[int, PartitionLog] = {}

    def log(self, topic: TopicView | str, partition: int) -> PartitionLog:
        """Return a partition's log. Its directory is created if it does not exist.

        Its files are loaded or created by the first read or append, not here.

        Args:
            topic: the topic or its name.
            partition: the partition number.

        Raises:
            ApiError: UNKNOWN_TOPIC_OR_PARTITION; KAFKA_STORAGE_ERROR if its directory
                cannot be created; NOT_LEADER_OR_FOLLOWER while markers of transactions
                may be missing.
        """
        found = self._topics.topic(topic) if isinstance(topic, str) else topic
        if found is None or not 0 <= partition < len(found.partitions):
            raise ApiError(
                ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                f"there is no partition {partition} of topic {topic}",
            )
        log = self._logs.get(found.partitions[partition])
        if log is None:
            log = self._open(found, partition)
        elif log.view.config is not found.config:
            log.view.config = found.config
        return log

    def look(self, topic: TopicView, partition: int) -> LogLookup | EmptyLog:
        """Return the lookup of a partition's offsets.

        This creates no directory for a partition that was never used: otherwise a
        client that asks for the offsets of 100,000 partitions would create 100,000.

        Raises:
            ApiError: as ``log``.
        """
        if self._has_no_log(topic, partition):
            return EMPTY_LOG
        return self.log(topic, partition).lookup

    def place_and_size(self, topic: TopicView, partition: int) -> tuple[str, int]:
        """Return the log directory that a partition is in, and its log's bytes.

        This creates no directory for a partition that was never used; the answer is
        then the first log directory and 0.

        Raises:
            ApiError: as ``log``.
        """
        if self._has_no_log(topic, partition):
            return self.directories[0].path, 0
        log = self.log(topic, partition)
        return os.path.dirname(log.directory), log.view.size_in_bytes()

    def _has_no_log(self, topic: TopicView, partition: int) -> bool:
        return (
            topic.partitions[partition] not in self._logs
            and self._is_restored()
            and self.is_untouched(topic, partition)
        )

    def is_untouched(self, topic: TopicView, partition: int) -> bool:
        """Return whether a partition was never used, so that it has no directory."""
        # The row first: if it is unloaded, and the directory does not exist afterwards,
        # then no process had appended when the row was read.
        if self._table.status(topic.partitions[partition]) != RowStatus.UNLOADED:
            return False
        name = directory_name(topic.name, partition)
        return not any(
            os.path.exists(f"{parent.path}/{name}") for parent in self.directories
        )

    def _open(self, topic: TopicView, partition: int) -> PartitionLog:
        index = topic.partitions[partition]
        row = self._table.row(index)
        name = directory_name(topic.name, partition)
        if not self._is_restored():
            # A consumer may have read past a marker that a power cut has taken. Its
            # offset is now out of range; and if other records were appended first, it
            # would miss those at the offsets that it has already passed.
            raise ApiError(
                ErrorCode.NOT_LEADER_OR_FOLLOWER,
                f"{name} is not served yet: transaction markers that a power cut took"
                " have to be written again first",
            )
        parent = self._place(row, name, topic.topic_id)
        hints = parent.hints(
            (topic.name, partition), topic.topic_id, self._expiration_ms
        )
        log = PartitionLog(f"{parent.path}/{name}", row, topic.config, hints)
        log.view.release_descriptors = self.close_files
        log.sync.process, log.sync.notify = self._process, self._notify
        self._logs[index] = log
        self._step()
        return log

    def _place(
        self, row: PartitionRow, name: str, topic_id: bytes, *, may_retry: bool = True
    ) -> LogDirectory:
        """Return the log directory of a partition; create the partition's if needed.

        Raises:
            ApiError: as ``log``.
        """
        try:
            # Under the lock: otherwise two processes could create the partition in two
            # log directories.
            with row.locked():
                self._refuse_deleted(row, name)
                parent = self._find(name, topic_id) or self._make(name)
                complete_directory(f"{parent.path}/{name}", topic_id)
        except OSError as error:
            if error.errno == errno.EMFILE and may_retry:
                self.close_files()
                return self._place(row, name, topic_id, may_retry=False)
            raise ApiError(
                ErrorCode.KAFKA_STORAGE_ERROR,
                f"the directory of {name} cannot be made: {error}",
            ) from error
        return parent

    def _find(self, name: str, topic_id: bytes) -> LogDirectory | None:
        """Return the log directory that has a partition's directory; None: none has.

        A directory of this name that belongs to another topic is renamed to `-stray`.
        """
        for candidate in self.directories:
            directory = f"{candidate.path}/{name}"
            if not os.path.isdir(directory):
                continue
            found_id = read_topic_id(directory)
            if found_id != topic_id and self._is_behind():
                # The registry is behind: perhaps this topic was deleted, and this is
                # the directory of a newer topic of the same name.
                raise ApiError(
                    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                    f"{name} may belong to another topic",
                )
            if found_id is None or found_id == topic_id:
                return candidate
            gone = rename_away(directory, STRAY_DIRECTORY_SUFFIX)
            logger.warning(
                "%s belongs to another topic of that name; moved to %s", directory, gone
            )
        return None

    def _make(self, name: str) -> LogDirectory:
        """Choose the log directory with the fewest partitions for a new one.

        If a directory cannot be created there, it tries the others in order.

        Raises:
            OSError: it cannot be created in any of them.
        """
        if len(self.directories) == 1:
            return self.directories[0]
        counted: list[tuple[int, int]] = []
        failure: OSError | None = None
        for number, each in enumerate(self.directories):
            try:
                counted.append((len(partition_directories(each.path)), number))
            except OSError as error:
                failure = error
        for _, number in sorted(counted):
            chosen = self.directories[number]
            try:
                os.mkdir(f"{chosen.path}/{name}", DIRECTORY_MODE)
            except OSError as error:
                logger.error("%s: cannot create a partition: %s", chosen.path, error)
                failure = error
            else:
                return chosen
        raise failure or OSError(errno.ENOENT, "there is no log directory")

    def _refuse_deleted(self, row: PartitionRow, name: str) -> None:
        if row.status == RowStatus.DELETED:
            raise ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"{name} was deleted")

    def leader_epoch(self, topic: TopicView, partition: int) -> int:
        """Return a partition's leader epoch; -1 if it cannot be read at the moment.

        The partition is neither created nor loaded.
        """
        log = self._logs.get(topic.partitions[partition])
        name = directory_name(topic.name, partition)
        for _ in range(2):
            try:
                if log is not None:
                    return log.view.leader_epoch
                return self._read_leader_epoch(name, topic.topic_id)
            except ApiError:  # closing files, if that can help, was tried already
                break
            except OSError as error:
                if error.errno != errno.EMFILE:
                    break
            self.close_files()
        return UNDEFINED

    def _read_leader_epoch(self, name: str, topic_id: bytes) -> int:
        for parent in self.directories:
            directory = f"{parent.path}/{name}"
            latest = read_leader_epochs(directory).latest
            # Nearly all partitions have epoch 0; for these the id is not compared.
            if latest and read_topic_id(directory) in (None, topic_id):
                return latest
        return 0

    def delete_topic(self, topic: TopicView) -> None:
        """Close a deleted topic's partitions, and mark their directories for removal.

        Called after the deletion is committed in the metadata log; it may be repeated.
        The housekeeper removes the directories after file.delete.delay.ms.
        """
        for partition, index in enumerate(topic.partitions):
            row = self._table.row(index)
            name = directory_name(topic.name, partition)
            # The status first: from here on all processes refuse the partition. Killed
            # before the rename, the housekeeper or the next start renames the
            # directory: both see the deletion in the metadata log.
            with row.locked():
                row.status = RowStatus.DELETED
                row.structure_version += 2  # readers look again, and see the status
                self._rename_deleted(name, topic.topic_id)
            log = self._logs.pop(index, None)
            if log is not None:
                log.close()
            self._step()

    def _rename_deleted(self, name: str, topic_id: bytes) -> None:
        for parent in self.directories:
            directory = f"{parent.path}/{name}"
            if read_topic_id(directory) == topic_id:
                try:
                    rename_away(directory, DELETE_DIRECTORY_SUFFIX)
                except OSError as error:
                    logger.error("%s cannot be removed: %s", directory, error)

    def forget(self, topic: TopicView) -> None:
        """Close the files of a topic that has been deleted."""
        for index in topic.partitions:
            log = self._logs.pop(index, None)
            if log is not None:
                log.close()

    def close_files(self) -> None:
        """Close the files of all logs; they open again when needed."""
        for log in self._logs.values():
            log.close()

    def close(self) -> None:
        """Close the files and forget the logs of this process."""
        self.close_files()
        self._logs.clear()

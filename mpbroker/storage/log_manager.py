"""All partition logs of a broker, as one process reaches them.

Handlers call ``log``. The housekeeper also calls what lies in ``log_upkeep``.
"""

import errno
import os
from collections.abc import Callable, Sequence
from typing import Protocol

from mpbroker.base.logger import get_logger
from mpbroker.ipc.layout import RowStatus
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
    """What of a topic the logs need."""

    @property
    def name(self) -> str: ...

    @property
    def topic_id(self) -> bytes: ...

    @property
    def partitions(self) -> Sequence[int]:
        """Row indexes, by partition number."""

    @property
    def config(self) -> LogConfig: ...


class TopicSource(Protocol):
    """Where topics are found: the registry."""

    def topic(self, name: str) -> TopicView | None: ...


class LogManager:
    """Finds, makes and removes the logs of partitions.

    Args:
        directories: opened once by the process that all others are forked from.
        table: the shared rows.
        topics: the registry of this process.
        is_behind: says whether there are changes of topics that it does not know.
        is_restored: says whether logs have all that their transactions wrote; until
            then none is opened.
        step: called at each log that is opened or deleted: whoever sees to many at a
            time shows by it that it moves.
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
    ) -> None:
        self.directories = directories
        self._table = table
        self._topics = topics
        self._expiration_ms = producer_id_expiration_ms
        self._is_behind = is_behind
        self._is_restored = is_restored
        self._step = step
        self._logs: dict[int, PartitionLog] = {}

    def log(self, topic: TopicView | str, partition: int) -> PartitionLog:
        """Return a partition's log; its files are made or loaded when first touched.

        Raises:
            ApiError: UNKNOWN_TOPIC_OR_PARTITION; KAFKA_STORAGE_ERROR if its directory
                cannot be made; NOT_LEADER_OR_FOLLOWER while it may lack markers.
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
        """Return what answers questions about a partition's offsets.

        A partition that no process has touched yet gets no directory for that: a client
        that asks for the offsets of 100,000 of them would make as many.

        Raises:
            ApiError: as ``log``.
        """
        if self._has_no_log(topic, partition):
            return EMPTY_LOG
        return self.log(topic, partition).lookup

    def place_and_size(self, topic: TopicView, partition: int) -> tuple[str, int]:
        """Return which log directory a partition is in, and its log's bytes.

        A partition that no process has touched yet gets no directory for that; the
        answer is an empty one in the first log directory.

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
        """Whether a partition is empty because nobody has made anything of it."""
        # In this order: a directory that is not there after the row said so had not
        # been appended to by then.
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
            # Who had read behind a marker that is lost would be out of range; and what
            # came in its place would never be read by them.
            raise ApiError(
                ErrorCode.NOT_LEADER_OR_FOLLOWER,
                f"{name}: ends of transactions that a power cut took come first",
            )
        parent = self._place(row, name, topic.topic_id)
        hints = parent.hints(
            (topic.name, partition), topic.topic_id, self._expiration_ms
        )
        log = PartitionLog(f"{parent.path}/{name}", row, topic.config, hints)
        log.view.release_descriptors = self.close_files
        self._logs[index] = log
        self._step()
        return log

    def _place(
        self, row: PartitionRow, name: str, topic_id: bytes, *, may_retry: bool = True
    ) -> LogDirectory:
        """Return where a partition is, or now is.

        Raises:
            ApiError: as ``log``.
        """
        try:
            # Under the lock: two processes must not make one partition in two places.
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
        """Return where a partition is."""
        for candidate in self.directories:
            directory = f"{candidate.path}/{name}"
            if not os.path.isdir(directory):
                continue
            found_id = read_topic_id(directory)
            if found_id != topic_id and self._is_behind():
                # Ours may be deleted, and this the directory of the next of that name.
                raise ApiError(
                    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"{name} may be another's"
                )
            if found_id is None or found_id == topic_id:
                return candidate
            gone = rename_away(directory, STRAY_DIRECTORY_SUFFIX)
            logger.warning(
                "%s is of another topic with that name; moved to %s", directory, gone
            )
        return None

    def _make(self, name: str) -> LogDirectory:
        """Make a partition where there are fewest, or in the next that works."""
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
                logger.error("%s takes no new partition: %s", chosen.path, error)
                failure = error
            else:
                return chosen
        raise failure or OSError(errno.ENOENT, "there is no log directory")

    def _refuse_deleted(self, row: PartitionRow, name: str) -> None:
        if row.status == RowStatus.DELETED:
            raise ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"{name} was deleted")

    def leader_epoch(self, topic: TopicView, partition: int) -> int:
        """Return a partition's epoch, -1 if it cannot be read just now.

        Nothing is made or loaded for it.
        """
        log = self._logs.get(topic.partitions[partition])
        name = directory_name(topic.name, partition)
        for _ in range(2):
            try:
                if log is not None:
                    return log.view.leader_epoch
                return self._read_leader_epoch(name, topic.topic_id)
            except ApiError:  # the log has made room itself, if that was it
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
            # What it is for nearly all of them needs no second look.
            if latest and read_topic_id(directory) in (None, topic_id):
                return latest
        return 0

    def delete_topic(self, topic: TopicView) -> None:
        """Take a topic's partitions off line and mark their directories for removal.

        Called once the metadata log says that the topic is gone; calling it again does
        no harm. The bytes go when file.delete.delay.ms has passed.
        """
        for partition, index in enumerate(topic.partitions):
            row = self._table.row(index)
            name = directory_name(topic.name, partition)
            with row.locked():
                row.status = RowStatus.DELETED
                row.structure_version += 2
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

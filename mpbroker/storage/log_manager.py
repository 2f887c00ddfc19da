"""LogManager: find, create and remove the partition logs of a broker.

Each process has its own LogManager. Handlers call ``log``; the housekeeper's tasks are
in log_upkeep.py.

Source: Kafka's LogManager.
"""

import errno
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Protocol

from mpbroker.base.logger import get_logger
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.ipc.layout import HOUSEKEEPER, MASK_BITS, RowStatus
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

if TYPE_CHECKING:  # most brokers have one log directory
    from mpbroker.storage.replica_directories import FutureReplica

logger = get_logger(__name__)
_PRODUCER_ID_EXPIRATION_MS = 86_400_000


class TopicView(Protocol):
    """The attributes of a topic that logs need: name, id, rows, settings, leader."""

    @property
    def name(self) -> str: ...

    @property
    def topic_id(self) -> bytes: ...

    @property
    def partitions(self) -> Sequence[int]:
        """The index of each partition's row (its entry in shared memory).

        The list is in the order of the partition numbers.
        """

    @property
    def config(self) -> LogConfig: ...

    @property
    def leader(self) -> int:
        """The id of the cluster's node on whose disk the topic's logs are."""


class TopicSource(Protocol):
    """An object that finds a topic by its name, such as the TopicRegistry."""

    def topic(self, name: str) -> TopicView | None: ...


class Syncer(NamedTuple):
    """A process that forces logs to disk; the log's row names it meanwhile.

    A row is a partition's entry in shared memory. While it names an owner of the sync,
    other processes wait for that sync.

    Attributes:
        process: the id by which rows name this process.
        notify: called with the index of a row and a set of handlers (one bit each);
            tells these handlers that a sync has ended. None: there are no handlers.
    """

    process: int = HOUSEKEEPER
    notify: Callable[[int, int], None] | None = None


class LogManager:
    """The logs of all partitions, as one process uses them.

    Args:
        directories: the directories of log.dirs, opened once, by the process that all
            others are forked from.
        table: the rows (the partitions' entries in shared memory).
        topics: this process's registry of topics.
        producer_id_expiration_ms: the setting producer.id.expiration.ms.
        is_behind: returns whether the metadata log has records that the registry has
            not replayed.
        is_restored: returns whether the logs have the markers of all decided
            transactions. No log is opened before that.
        step: called at each log that is used or deleted, as a sign of progress.
        syncer: the id by which rows name this process while it forces a log to disk.

    Attributes:
        node_id: the id of this node in a cluster: topics with another leader have no
            log here. None: all topics have their logs here.
        lacks_directory: returns whether a directory of log.dirs could not be used at
            the start, or is lost; it is not among ``directories``.
    """

    node_id: int | None = None
    lacks_directory: Callable[[], bool] = staticmethod(lambda: False)

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
        self.note_full: Callable[[str], bool] | None = None

    def log(self, topic: TopicView | str, partition: int) -> PartitionLog:
        """Return a partition's log, and create the directory if it does not exist.

        The first read or append loads or creates the files; this does not.

        Args:
            topic: the topic or its name.
            partition: the partition number.

        Raises:
            ApiError: UNKNOWN_TOPIC_OR_PARTITION; KAFKA_STORAGE_ERROR if the directory
                cannot be created, or may be in a log directory that has failed;
                NOT_LEADER_OR_FOLLOWER while markers of transactions may be missing, if
                the partition is on another node, or if it may be in a log directory
                that was not there at the start.
        """
        self._step()
        found = self._topics.topic(topic) if isinstance(topic, str) else topic
        if found is None or not 0 <= partition < len(found.partitions):
            raise ApiError(
                ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                f"there is no partition {partition} of topic {topic}",
            )
        log = self._logs.get(found.partitions[partition])
        if log is None:
            self._require_leader(found)
            log = self._open(found, partition)
        elif log.view.config is not found.config:
            log.view.config = found.config
        return log

    def log_in_place(self, topic: TopicView | str, partition: int) -> PartitionLog:
        """Return a partition's log, whose ``directory`` is where it is now.

        Other users of a log need not know: they find a directory that was moved when
        they open its files.

        Raises:
            ApiError: as ``log``.
        """
        log = self.log(topic, partition)
        log.view.follow()
        return log

    def move(self, topic: TopicView, partition: int, log_directory: str) -> None:
        """Begin to move a partition to another log directory.

        Any other move of it is cancelled. The housekeeper copies the files.

        Args:
            topic: the topic.
            partition: the partition number.
            log_directory: the path of one of ``directories``; if the partition is in
                it, it stays there.

        Raises:
            ApiError: as ``log``; KAFKA_STORAGE_ERROR if the partition is offline or a
                directory cannot be made; INVALID_REQUEST if the topic is tiered.
        """
        from mpbroker.storage.replica_directories import begin_move

        log = self.log(topic, partition)
        log.view.require_online()
        if topic.config.remote_storage_enable or log.view.is_tiered:
            # The remote log manager holds no lock, and knows the old directory.
            raise ApiError(
                ErrorCode.INVALID_REQUEST,
                f"{topic.name} has tiered storage: its partitions cannot be moved",
            )
        name = directory_name(topic.name, partition)
        try:
            with log.row.locked():
                log.view.require_online_locked()
                current = self._find(name, topic.topic_id)
                if current is None:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
                paths = [each.path for each in self.directories]
                which = topic.name, partition
                begin_move(paths, current.path, log_directory, which, topic.topic_id)
        except OSError as error:
            raise ApiError(
                ErrorCode.KAFKA_STORAGE_ERROR,
                f"{name} cannot be moved to {log_directory}: {error}",
            ) from error

    def future_replicas(self) -> "list[FutureReplica]":
        """Return the copies of partitions that move."""
        found: list[FutureReplica] = []
        if len(self.directories) < 2:
            return found
        from mpbroker.storage.replica_directories import future_replicas

        for directory in self.directories:
            with suppress(OSError):
                found += future_replicas(directory.path)
        return found

    def progress(self, topic: TopicView, future: "FutureReplica") -> tuple[int, int]:
        """Return the bytes of a copy's log, and how many offsets it lags behind.

        Raises:
            ApiError: as ``log``; UNKNOWN_TOPIC_OR_PARTITION: it is another topic's;
                KAFKA_STORAGE_ERROR: the copy or the partition cannot be read.
        """
        from mpbroker.storage.replica_directories import copied_end, copied_size

        log = self.log(topic, future.partition)
        end = log.view.state().log_end_offset
        try:
            found_id = read_topic_id(future.path)
            lag = max(0, end - copied_end(log.view, future.path))
            size = copied_size(future.path)
        except OSError as error:
            raise ApiError(
                ErrorCode.KAFKA_STORAGE_ERROR, f"{future.path} cannot be read: {error}"
            ) from error
        if found_id not in (None, topic.topic_id):
            raise ApiError(
                ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                f"{future.path} belongs to another topic of that name",
            )
        return size, lag

    def look(self, topic: TopicView, partition: int) -> LogLookup | EmptyLog:
        """Return the LogLookup that answers requests for a partition's offsets.

        This creates no directory for a partition that was never used: otherwise a
        client that asks for the offsets of 100,000 partitions would create 100,000
        directories.

        Raises:
            ApiError: as ``log``.
        """
        self._require_leader(topic)
        if self._has_no_log(topic, partition):
            return EMPTY_LOG
        return self.log(topic, partition).lookup

    def place_and_size(self, topic: TopicView, partition: int) -> tuple[str, int]:
        """Return the log directory of a partition, and the size of its log in bytes.

        This creates no directory for a partition that was never used; then the first
        log directory and 0 are returned.

        Raises:
            ApiError: as ``log``; KAFKA_STORAGE_ERROR if its files cannot be read.
        """
        self._require_leader(topic)
        if self._has_no_log(topic, partition):
            return self.directories[0].path, 0
        log = self.log_in_place(topic, partition)
        return os.path.dirname(log.directory), log.view.size_in_bytes()

    def _has_no_log(self, topic: TopicView, partition: int) -> bool:
        self._step()
        if (
            topic.partitions[partition] in self._logs
            or not self._is_restored()
            or not self.is_untouched(topic, partition)
        ):
            return False
        self._refuse_lost(topic, directory_name(topic.name, partition))
        return True

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

    def may_have_log(self, topic: TopicView, partition: int) -> bool:
        """Return whether a partition has a directory, or may have one on a dead disk.

        To open a partition of the second kind is refused; see ``log``.
        """
        name = directory_name(topic.name, partition)
        if any(os.path.isdir(f"{parent.path}/{name}") for parent in self.directories):
            return True
        try:
            self._refuse_lost(
                topic, name, self._table.status(topic.partitions[partition])
            )
        except ApiError:
            return True
        return False

    def is_elsewhere(self, topic: TopicView) -> bool:
        """Return whether a topic's partitions are on another node of the cluster."""
        return self.node_id is not None and topic.leader != self.node_id

    def _require_leader(self, topic: TopicView) -> None:
        if self.is_elsewhere(topic):
            raise ApiError(
                ErrorCode.NOT_LEADER_OR_FOLLOWER,
                f"the partitions of {topic.name} are on node {topic.leader}",
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
        parent = self._place(row, name, topic)
        hints = parent.hints(
            (topic.name, partition), topic.topic_id, self._expiration_ms
        )
        log = PartitionLog(f"{parent.path}/{name}", row, topic.config, hints)
        log.view.release_descriptors = self.close_files
        log.view.note_full = self.note_full
        if len(self.directories) > 1:
            log.view.locate = partial(self._locate, topic.topic_id)
        log.sync.process, log.sync.notify = self._process, self._notify
        self._logs[index] = log
        return log

    def _place(
        self, row: PartitionRow, name: str, topic: TopicView, *, may_retry: bool = True
    ) -> LogDirectory:
        """Return a partition's log directory; if it has none, make its directory.

        Raises:
            ApiError: as ``log``.
        """
        try:
            # Under the lock: otherwise two processes could create the partition in two
            # log directories.
            with row.locked():
                self._refuse_deleted(row, name)
                parent = self._find(name, topic.topic_id)
                if parent is None:
                    self._refuse_lost(topic, name, row.status)
                    parent = self._make(name)
                complete_directory(f"{parent.path}/{name}", topic.topic_id)
        except OSError as error:
            if error.errno == errno.EMFILE and may_retry:
                self.close_files()
                return self._place(row, name, topic, may_retry=False)
            raise ApiError(
                ErrorCode.KAFKA_STORAGE_ERROR,
                f"the directory of {name} cannot be made: {error}",
            ) from error
        return parent

    def _refuse_lost(
        self, topic: TopicView, name: str, status: int = RowStatus.UNLOADED
    ) -> None:
        """Refuse a partition without a directory if it may have one on a dead disk.

        An empty log in its place would take records at offsets that the partition has
        already given to others. Whichever of the two were kept later, acknowledged
        records would be lost.

        Args:
            topic: the topic.
            name: the name of the partition's directory, which was not found.
            status: the status of the partition's row.

        Raises:
            ApiError: as Kafka answers, which has not opened such a partition since its
                start: NOT_LEADER_OR_FOLLOWER if a directory was not there at the start;
                KAFKA_STORAGE_ERROR if one has failed since.
        """
        code = ErrorCode.KAFKA_STORAGE_ERROR
        if status == RowStatus.UNLOADED:
            # No process has used the partition since the start. A topic that is newer
            # than the start has no records, then.
            if not self.directories[0].knew(topic.name, topic.topic_id):
                return
            if self.lacks_directory():
                code = ErrorCode.NOT_LEADER_OR_FOLLOWER
            elif not any(self._unreadable(name)):
                return
        raise ApiError(code, f"{name} may be in a log directory that cannot be used")

    def _unreadable(self, name: str) -> Iterator[str]:
        """Yield the log directories that cannot tell whether they have a directory.

        Args:
            name: the name of the directory.
        """
        for directory in self.directories:
            try:
                os.stat(f"{directory.path}/{name}")
            except FileNotFoundError:
                try:
                    directory.check_there()
                except OSError:
                    yield directory.path
            except OSError:
                yield directory.path

    def _find(self, name: str, topic_id: bytes) -> LogDirectory | None:
        """Return the log directory in which a partition's directory is.

        The caller has the row's lock. A move that was interrupted is finished. A
        directory of this name that belongs to another topic is renamed to `-stray`.

        Args:
            name: the name of the partition's directory.
            topic_id: the topic's id, 16 bytes.

        Returns:
            None if the partition has no directory.

        Raises:
            ApiError: UNKNOWN_TOPIC_OR_PARTITION: the registry is behind the metadata
                log, and cannot tell to which topic a directory of this name belongs.
            OSError: a directory cannot be read or renamed.
        """
        by_path: dict[str, LogDirectory] = {}
        for candidate in self.directories:
            directory = f"{candidate.path}/{name}"
            if not os.path.isdir(directory):
                continue
            found_id = read_topic_id(directory)
            if by_path:
                if found_id == topic_id:
                    by_path[directory] = candidate
                continue
            if found_id != topic_id and self._is_behind():
                # The registry is behind: perhaps this topic was deleted, and this is
                # the directory of a newer topic of the same name.
                raise ApiError(
                    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                    f"{name} may belong to another topic",
                )
            if found_id is None or found_id == topic_id:
                by_path[directory] = candidate
                continue
            gone = rename_away(directory, STRAY_DIRECTORY_SUFFIX)
            logger.warning(
                "%s belongs to another topic of that name; moved to %s", directory, gone
            )
        if len(self.directories) > 1 and by_path:
            from mpbroker.storage.replica_directories import settle_move

            usable = [each.path for each in self.directories]
            return by_path[settle_move(list(by_path), usable)]
        return next(iter(by_path.values()), None)

    def _locate(self, topic_id: bytes, directory: str, is_locked: bool) -> str:
        """Return where a partition's directory is now; see PartitionView.locate."""
        if not is_locked and os.path.isdir(directory):
            return directory
        usable = [each.path for each in self.directories]
        paths = [f"{path}/{os.path.basename(directory)}" for path in usable]
        # A disk that has failed cannot be read, and has no directory.
        there = [path for path in paths if os.path.isdir(path)]
        # Only the topic's own: by now the row may be that of a deleted topic, and
        # another topic may have the name.
        own = [path for path in there if read_topic_id(path) == topic_id]
        if not own:
            return directory
        if not is_locked:
            return own[0]
        from mpbroker.storage.replica_directories import settle_move

        return settle_move(own, usable)

    def _make(self, name: str) -> LogDirectory:
        """Choose the log directory with the fewest partitions for a new partition.

        If the partition's directory cannot be created there, the other log directories
        are tried in the order of their numbers of partitions.

        Args:
            name: the name of the partition's directory.

        Raises:
            OSError: the directory cannot be created in any of them.
        """
        if len(self.directories) == 1:
            return self.directories[0]
        counted: list[tuple[int, int]] = []
        failure: OSError | None = None
        for number, each in enumerate(self.directories):
            try:
                each.check_there()
                counted.append((len(partition_directories(each.path)), number))
            except OSError as error:
                failure = error
        # Imported here: most brokers have one log directory.
        from mpbroker.storage.used_directories import use_noted

        home = self.directories[0].path
        for count, number in sorted(counted):
            chosen = self.directories[number]
            noted = nullcontext() if count else use_noted(home, chosen.path)
            try:
                with noted:
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

    def offline_version(self) -> tuple[int, bool]:
        """Return a value that changes when other partitions are offline than before."""
        return self._table.offline_changes, self.lacks_directory()

    def is_offline(self, topic: TopicView, partition: int) -> bool:
        """Return whether a partition of this node is offline, so that it has no leader.

        Its disk has failed, or its log directory is not there.
        """
        status = self._table.status(topic.partitions[partition])
        if status == RowStatus.OFFLINE:
            return True
        failed = self._table.offline_directories
        if not (failed or self.lacks_directory()):
            return False
        name = directory_name(topic.name, partition)
        if any(
            os.path.isdir(f"{directory.path}/{name}")
            for number, directory in enumerate(self.directories)
            if number >= MASK_BITS or not failed >> number & 1
        ):
            return False
        # As _refuse_lost: a topic that is newer than the start has no records, unless
        # a process has used the partition.
        knew = self.directories[0].knew(topic.name, topic.topic_id)
        return knew or status != RowStatus.UNLOADED

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
            # A disk that has failed must not hide what is on the next one.
            if len(self.directories) > 1 and not os.path.isdir(directory):
                continue
            latest = read_leader_epochs(directory).latest
            # Nearly all partitions have epoch 0; for these the id is not compared.
            if latest and read_topic_id(directory) in (None, topic_id):
                return latest
        return 0

    def delete_topic(self, topic: TopicView) -> None:
        """Close a deleted topic's partitions, and mark their directories for removal.

        The caller has committed the deletion in the metadata log before. The call may
        be repeated. The housekeeper removes the directories after file.delete.delay.ms.
        """
        for partition, index in enumerate(topic.partitions):
            row = self._table.row(index)
            name = directory_name(topic.name, partition)
            # The status first: from here on all processes refuse the partition. If this
            # process is killed before the rename, the housekeeper or the next start
            # renames the directory: both see the deletion in the metadata log.
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
            try:
                if read_topic_id(directory) == topic_id:
                    rename_away(directory, DELETE_DIRECTORY_SUFFIX)
            except OSError as error:
                logger.error("%s cannot be removed: %s", directory, error)

    def forget(self, topic: TopicView) -> None:
        """Close a deleted topic's logs, and drop them from this process."""
        for index in topic.partitions:
            log = self._logs.pop(index, None)
            if log is not None:
                log.close()

    def forget_rows(self, rows: Collection[int]) -> None:
        """Drop the logs of deleted partitions, whose rows other partitions will get.

        A row is a partition's entry in shared memory. ``forget`` dropped the logs when
        this process saw the deletion. But a request that was being executed at that
        time may have opened one of them again.

        Args:
            rows: the indexes of the rows.
        """
        for index in rows:
            log = self._logs.pop(index, None)
            if log is not None:
                log.close()

    def close_files(self) -> None:
        """Close the files of all logs that this process has open, to free descriptors.

        They open again when needed.
        """
        for log in self._logs.values():
            log.close()

    def close(self) -> None:
        """Close the files of all logs, and drop the logs from this process."""
        self.close_files()
        self._logs.clear()


def says_deleted(error: Exception) -> bool:
    """Return whether an error says that the topic was deleted; it is not logged."""
    gone = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    return isinstance(error, ApiError) and error.error_code == gone

"""TopicRegistry: the topics as one process knows them, and changes of the metadata.

Each process has its own registry, which replays the same metadata log. A call to
catch_up() compares one shared word. Only if it has moved, the call replays the records
that other processes have appended.

A change has these steps: take the log's mutex, catch up, decide, append, and replay the
new records as all other processes do. So a process does not see its own changes earlier
or differently.

Each partition has a row, its entry in the shared partition table. Row numbers follow
from the log alone, so that they are the same in every process. A partition gets the
row that its record names: those of deleted topics are used again, in the order of their
deletion, as soon as every process has seen the deletion and uses the row no longer
(ipc/tables/row_users.py). Otherwise it gets the next row that has never been used: each
of these takes a KiB of shared memory.

A snapshot that a running broker makes has the rows of all partitions, and the rows of
deleted ones in their order, so that a process which begins with the snapshot gives the
same rows as the processes that have read the records before. A start without other
processes makes snapshots without rows, and gives rows anew.

Source: Kafka's ReplicationControlManager and ConfigurationControlManager, for errors
and their messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from typing import (
    TYPE_CHECKING,
    Concatenate,
    Final,
    ParamSpec,
    Protocol,
    TypeVar,
)

from mpbroker.base.config_def import ConfigValue
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.base.storage_errors import CorruptLogError
from mpbroker.ipc.layout import MAX_PARTITIONS
from mpbroker.metadata.features import FeatureLevels, finalized
from mpbroker.metadata.log_config import (
    LogConfig,
    check_alteration,
    check_still_shared,
    defaults_of_broker,
)
from mpbroker.metadata.log_config_def import broker_log_value
from mpbroker.metadata.meta_properties import random_uuid, uuid_of_text
from mpbroker.metadata.metadata_budget import MetadataBudget
from mpbroker.metadata.metadata_image import (
    BROKER_RESOURCE,
    GROUP_RESOURCE,
    PRODUCER_ID_BLOCK,
    TOPIC_RESOURCE,
    MetadataImage,
    MetadataRecord,
    TopicImage,
    config_record,
    partition_record,
    producer_ids_record,
    remove_topic_record,
    topic_record,
)
from mpbroker.metadata.metadata_log import (
    MetadataEnd,
    MetadataLog,
    MetadataMovedError,
)
from mpbroker.metadata.quota_records import ClientQuotasImage
from mpbroker.metadata.scram_credentials import ScramCredentials
from mpbroker.metadata.topic_names import (
    CLUSTER_METADATA_TOPIC,
    INTERNAL_TOPICS,
    check_topic_name,
    collision_key,
)
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError

if TYPE_CHECKING:
    from mpbroker.metadata.delegation_tokens import DelegationToken

# The most partitions that one request may add: each costs a record and a row, and other
# requests wait meanwhile. Kafka's ReplicationControlManager has the same limit.
MAX_PARTITIONS_PER_BATCH: Final = 10_000

# The most records that one change of anything else may commit, as in Kafka's
# QuorumController (MAX_RECORDS_PER_USER_OP).
MAX_RECORDS_PER_CHANGE: Final = 10_000

# If fewer records have no effect, reading them (some 5 us each) costs a new process
# less than a snapshot costs the broker.
_SNAPSHOT_FROM_DEAD_RECORDS: Final = 20_000

_ROW_BITS: Final = 32

# The number of times that a change is decided, if other nodes of the cluster have
# changed the log first each time; then it fails. Two nodes that do nothing but change
# the log need three decisions at most.
_DECISIONS: Final = 50

_P = ParamSpec("_P")
_T = TypeVar("_T")

# Given the current overrides of a resource, returns the new ones; may raise ApiError.
ConfigChange = Callable[[dict[str, str]], Mapping[str, str]]


class Topic:
    """One topic, as a process knows it.

    The TopicRegistry (one process's view of all topics) adds to ``partitions``, and
    replaces ``config``.

    Attributes:
        name: the name.
        topic_id: the id, 16 bytes.
        is_internal: whether the topic is one of INTERNAL_TOPICS.
        partitions: the row of each partition in the shared partition table, by the
            number of the partition.
        config: the settings, with the broker's defaults.
        leader: the id of the node that has the partitions.
    """

    __slots__ = (
        "config",
        "is_internal",
        "leader",
        "name",
        "partitions",
        "topic_id",
    )

    def __init__(self, name: str, topic_id: bytes, config: LogConfig) -> None:
        self.name: Final = name
        self.topic_id: Final = topic_id
        self.is_internal: Final = name in INTERNAL_TOPICS
        self.partitions: list[int] = []
        self.config = config
        self.leader = -1

    def __repr__(self) -> str:
        return f"Topic({self.name!r}, partitions={self.partitions})"


class Partition(NamedTuple):
    """One partition of a topic, and its row (entry) in the shared memory."""

    topic: Topic
    partition_id: int
    row: int


class NewTopic(NamedTuple):
    """A topic to create: its name, number of partitions, and configs by key."""

    name: str
    num_partitions: int
    overrides: Mapping[str, str] = {}


class MorePartitions(NamedTuple):
    """A topic that is to have more partitions: its name, and their number then."""

    name: str
    total: int


class Alteration(NamedTuple):
    """A change of the configs that are set on one resource.

    Attributes:
        resource_type: such as TOPIC_RESOURCE.
        resource_name: the topic, the broker's id ("": all brokers), the group, ...
        change: returns the new configs, given the present ones. It checks keys and
            values, except for those of a topic; it may raise ApiError.
    """

    resource_type: int
    resource_name: str
    change: ConfigChange


def _decided_again(
    change: Callable[Concatenate[TopicRegistry, _P], _T],
) -> Callable[Concatenate[TopicRegistry, _P], _T]:
    """Decorate a method that changes metadata: repeat it if another node was faster."""

    @wraps(change)
    def repeat(registry: TopicRegistry, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        for _ in range(_DECISIONS):
            try:
                return change(registry, *args, **kwargs)
            except MetadataMovedError:
                continue
        raise ApiError(
            ErrorCode.REQUEST_TIMED_OUT,
            f"other nodes changed the metadata {_DECISIONS} times meanwhile; try again",
        )

    return repeat


def _no_step() -> None:
    """Do nothing, as the default of RegistryHooks.step."""


class RowMaker(Protocol):
    """Prepares rows (partitions' entries in shared memory): a PartitionTable."""

    def initialise_row(self, index: int, /) -> None:
        """Prepare a row of the shared partition table that was never used before."""

    def reuse_row(self, index: int, /) -> None:
        """Clear the row of a deleted partition, so that another one can have it."""


class RegistryHooks(NamedTuple):
    """The callbacks of a TopicRegistry, and a list that it fills.

    A TopicRegistry is one process's view of the metadata log.

    Attributes:
        on_removed: called with every topic that catch_up() finds deleted, after the
            topic is removed from the registry; not called for topics that were deleted
            before the registry was made.
        on_broker_config: called when catch_up() finds changed broker configs or quotas.
        rows: initialises the row of each new partition in the partition table, or makes
            a deleted partition's row ready to be used again; called before the record
            that creates the partition is written.
        step: called for each record replayed and each row made usable, as a sign of
            progress.
        passed: returns a position in the log; the rows of partitions that were deleted
            before it are used by no process, and may be given to new partitions.
        removed_before: a list, to which the first replay adds each topic that was
            deleted before the registry was made.
        on_unreadable: called by catch_up() with the error if the disk of the log fails.
            The process goes on with the records that it has read, and tries again at
            the next call. None: catch_up() raises the error.
    """

    on_removed: Callable[[Topic], None] | None = None
    on_broker_config: Callable[[], None] | None = None
    rows: RowMaker | None = None
    step: Callable[[], None] = _no_step
    passed: Callable[[], int] = lambda: -1
    removed_before: list[TopicImage] | None = None
    on_unreadable: Callable[[OSError], None] | None = None


class TopicRegistry:
    """One process's copy of the metadata: topics, configs, features, users, quotas.

    It is as new as the last ``catch_up``. A change is appended to the metadata log and
    then replayed from there. Only one thread may use it.

    Attributes:
        now_ms: returns the wall clock.
    """

    def __init__(
        self,
        log: MetadataLog,
        *,
        broker_id: int,
        capacity: int,
        broker_values: Mapping[str, ConfigValue] | None = None,
        now_ms: Callable[[], int],
        hooks: RegistryHooks = RegistryHooks(),  # noqa: B008 - it cannot be changed
    ) -> None:
        """Replay the records that the metadata log has so far.

        Args:
            log: the metadata log, as this process has it open.
            broker_id: the setting node.id; outside of a cluster this node is the leader
                of every partition.
            capacity: the number of rows of the shared partition table.
            broker_values: the broker's static values by key; some are the defaults of
                topics.
            now_ms: returns the wall clock, for the timestamps in the log.
            hooks: the callbacks for changes that the log brings.

        Raises:
            CorruptLogError: the log cannot be read or replayed.
        """
        self._step = hooks.step
        self._row_maker = hooks.rows
        self._passed = hooks.passed
        self._log = log
        self._broker_id = broker_id
        self._capacity = capacity
        self._static = dict(broker_values or {})
        self.now_ms = now_ms
        self._image = MetadataImage()
        self._budget = MetadataBudget()
        self._topics: dict[str, Topic] = {}
        self._by_id: dict[bytes, Topic] = {}
        self._rows: list[Partition] = []  # of deleted ones: `_no_partition`
        # The rows of deleted partitions, oldest first; how many rows were ever deleted
        # up to a position; and how many of them were ever used again.
        self._deleted_rows: deque[int] = deque()
        self._deletions: deque[tuple[int, int]] = deque()
        self._ever_deleted = self._ever_reused = 0
        self._reuses: dict[int, int] = {}  # how often a row was used again
        self._collisions: dict[str, list[str]] = {}  # names, by collision_key()
        self._set_defaults(defaults_of_broker(self._static))
        self._no_partition = Partition(Topic("", b"", self.default_config), 0, -1)
        self._producer_ids = iter(range(0))
        self._features: FeatureLevels | None = None
        self._look_from = 0  # how many records there may be before the next snapshot
        self._on_removed: Callable[[Topic], None] | None = None
        self._on_broker_config: Callable[[], None] | None = None
        self._on_unreadable: Callable[[OSError], None] | None = None
        self._removed_before = hooks.removed_before
        self.catch_up()
        self._removed_before = None
        self._on_unreadable = hooks.on_unreadable
        self._on_removed = hooks.on_removed
        self._on_broker_config = hooks.on_broker_config

    # -- reading ----------------------------------------------------------------------

    @property
    def version(self) -> int:
        """A number that changes with every change of the metadata, for caches."""
        return self._log.position

    @property
    def is_behind(self) -> bool:
        """Whether there are committed records that catch_up() has not replayed."""
        return self._log.has_news

    def catch_up(self) -> bool:
        """Replay the metadata records that were committed since the last call.

        Returns:
            Whether there were such records, and they could be read.

        Raises:
            CorruptLogError: the log is damaged.
            OSError: the disk fails, and there is no ``on_unreadable``.
            SystemExit: a record cannot be replayed; this process must end.
        """
        if not self._log.has_news:
            return False
        deleted = self._ever_deleted
        try:
            had_news = self._log.replay_new(self._replay)
        except OSError as error:
            if self._on_unreadable is None:
                raise
            self._on_unreadable(error)
            return False
        if self._ever_deleted != deleted:
            self._deletions.append((self._log.position, self._ever_deleted))
        return had_news

    def topic(self, name: str) -> Topic | None:
        """Return the topic with this name, or None."""
        return self._topics.get(name)

    def topic_by_id(self, topic_id: bytes) -> Topic | None:
        """Return the topic with this id (16 bytes), or None."""
        return self._by_id.get(topic_id)

    def topics(self) -> list[Topic]:
        """Return all topics, oldest first."""
        return list(self._topics.values())

    def partition(self, name: str, index: int) -> Partition | None:
        """Return a partition, or None if there is no such topic or partition."""
        topic = self._topics.get(name)
        if topic is None or not 0 <= index < len(topic.partitions):
            return None
        return self._rows[topic.partitions[index]]

    def partition_by_row(self, row: int) -> Partition | None:
        """Return the partition that has a row of the shared partition table.

        None: there is none, or it was deleted.
        """
        if not 0 <= row < len(self._rows):
            return None
        partition = self._rows[row]
        alive = self._by_id.get(partition.topic.topic_id) is partition.topic
        return partition if alive else None

    def row_id(self, row: int) -> int:
        """Return a number that identifies the partition that has a row now.

        A row is an entry in the shared partition table.

        A later partition in the same row gets another number.
        """
        return self._reuses.get(row, 0) << _ROW_BITS | row

    def partition_by_row_id(self, row_id: int) -> Partition | None:
        """Return the partition for which row_id() gave a number; None: deleted."""
        row = row_id & (1 << _ROW_BITS) - 1
        return self.partition_by_row(row) if self.row_id(row) == row_id else None

    @property
    def row_count(self) -> int:
        """The number of rows of the shared partition table that were ever used."""
        return len(self._rows)

    @property
    def capacity(self) -> int:
        """The largest number of partitions that can exist."""
        return self._capacity

    @property
    def partition_count(self) -> int:
        """The number of partitions that exist."""
        return len(self._rows) - len(self._deleted_rows)

    @property
    def broker_epoch(self) -> int:
        """The epoch of this broker's last registration with a controller of Kafka.

        -1: the log has no such registration.
        """
        epoch = self._image.broker_epoch(self._broker_id)
        return -1 if epoch is None else epoch

    @property
    def features(self) -> FeatureLevels:
        """The finalized levels of features; the same object until a level changes."""
        if self._features is None:
            end = self._log.end
            levels = finalized(self._image.kafka_features(), end.kraft_version)
            self._features = FeatureLevels(end.offset, levels)
        return self._features

    def metadata_end(self) -> MetadataEnd:
        """Return the end of the part of the metadata log that this process has read."""
        return self._log.end

    def broker_overrides(self, resource_name: str) -> Mapping[str, str]:
        """Return the dynamic configs set on a broker.

        Args:
            resource_name: the broker's id; "": the configs that all brokers share.
        """
        return self._image.config(BROKER_RESOURCE, resource_name)

    def group_overrides(self, group_id: str) -> Mapping[str, str]:
        """Return the configs set on a group."""
        return self._image.config(GROUP_RESOURCE, group_id)

    def configured_groups(self) -> list[str]:
        """Return the ids of the groups that have configs."""
        return [name for kind, name in self._image.configs if kind == GROUP_RESOURCE]

    @property
    def scram_credentials(self) -> ScramCredentials:
        """The SCRAM credentials of users."""
        return self._image.scram

    def delegation_tokens(self) -> list[DelegationToken]:
        """Return all delegation tokens."""
        return self._image.delegation_tokens()

    def remove_expired_tokens(self) -> None:
        """Remove the delegation tokens that have expired.

        Raises:
            ApiError: KAFKA_STORAGE_ERROR.
        """
        now_ms = self.now_ms()
        if any(each.has_expired(now_ms) for each in self.delegation_tokens()):
            self.change(
                lambda image: [
                    each.removal()
                    for each in image.delegation_tokens()
                    if each.has_expired(now_ms)
                ][:MAX_RECORDS_PER_CHANGE]
            )

    @property
    def client_quotas(self) -> ClientQuotasImage:
        """The quotas of users, client ids and IP addresses."""
        return self._image.client_quotas

    # -- changing topics --------------------------------------------------------------

    def create_topic(
        self, name: str, num_partitions: int, overrides: Mapping[str, str] | None = None
    ) -> Topic:
        """Create a topic. It is on disk when this returns.

        Raises:
            ApiError: as create_topics().
        """
        (created,) = self.create_topics(
            [NewTopic(name, num_partitions, overrides or {})]
        )
        if isinstance(created, ApiError):
            raise created
        return created

    @_decided_again
    def create_topics(
        self,
        wanted: Sequence[NewTopic],
        *,
        validate_only: bool = False,
        about_to: Callable[[list[Topic | ApiError]], None] = lambda _: None,
        spare: int = 0,
    ) -> list[Topic | ApiError]:
        """Create topics with one write to disk.

        Args:
            wanted: the topics to create.
            validate_only: check the topics, and write nothing.
            about_to: called with the results before anything is written.
            spare: the number of rows (entries for partitions) that must stay free;
                internal topics may use them.

        Returns:
            For each of ``wanted`` the new topic, or an ApiError: INVALID_REQUEST (the
            metadata log's name), INVALID_TOPIC_EXCEPTION (an illegal name, or one that
            collides with another), TOPIC_ALREADY_EXISTS, INVALID_PARTITIONS (less than
            1, or no room in the partition table), INVALID_CONFIG, or
            KAFKA_STORAGE_ERROR, with which nothing was created.
        """
        with self._log.turn():
            self.catch_up()
            draft = _Draft(self, spare)
            results = [draft.create(new) for new in wanted]
            if validate_only or not draft.records:
                return results
            about_to(results)
            try:
                self._commit(draft.records)
            except ApiError as error:
                return [
                    result if isinstance(result, ApiError) else error
                    for result in results
                ]
            return [
                result if isinstance(result, ApiError) else self._topics[result.name]
                for result in results
            ]

    @_decided_again
    def delete_topics(self, topics: Iterable[Topic]) -> list[ApiError | None]:
        """Delete topics with one write to disk.

        Returns:
            For each topic None, or an ApiError: UNKNOWN_TOPIC_OR_PARTITION if another
            request has deleted it first, or KAFKA_STORAGE_ERROR, with which nothing
            was deleted.
        """
        with self._log.turn():
            self.catch_up()
            results: list[ApiError | None] = []
            records: dict[bytes, MetadataRecord] = {}
            for topic in topics:
                known = topic.topic_id in self._by_id and topic.topic_id not in records
                results.append(None if known else _unknown(topic.name))
                if known:
                    records[topic.topic_id] = remove_topic_record(topic.topic_id)
            return self._committed(list(records.values()), results)

    def delete_topic(self, name: str) -> Topic:
        """Delete a topic by name, and return the deleted topic.

        Raises:
            ApiError: UNKNOWN_TOPIC_OR_PARTITION or KAFKA_STORAGE_ERROR.
        """
        self.catch_up()
        topic = self._topics.get(name)
        if topic is None:
            raise _unknown(name)
        (error,) = self.delete_topics([topic])
        if error is not None:
            raise error
        return topic

    @_decided_again
    def create_partitions(
        self,
        wanted: Sequence[MorePartitions],
        *,
        validate_only: bool = False,
        about_to: Callable[[list[ApiError | None]], None] = lambda _: None,
    ) -> list[ApiError | None]:
        """Raise topics' numbers of partitions with one write to disk.

        Args:
            wanted: the topics, each of them once.
            validate_only: check the numbers, and write nothing.
            about_to: called with the results before anything is written.

        Returns:
            For each of ``wanted`` None, or an ApiError: UNKNOWN_TOPIC_OR_PARTITION,
            INVALID_PARTITIONS (the number is not above the present one, or there is no
            room in the partition table), or KAFKA_STORAGE_ERROR, with which no topic
            was changed.
        """
        with self._log.turn():
            self.catch_up()
            rows = _NewRows(self)
            results: list[ApiError | None] = []
            records: list[MetadataRecord] = []
            for each in wanted:
                self._step()
                try:
                    records += self._more_partitions(each, rows)
                    results.append(None)
                except ApiError as error:
                    results.append(error)
            if validate_only or not records:
                return results
            about_to(results)
            return self._committed(records, results)

    def _more_partitions(
        self, wanted: MorePartitions, rows: _NewRows
    ) -> list[MetadataRecord]:
        name, total = wanted
        topic = self._topics.get(name)
        if topic is None:
            raise _unknown(name)
        present = len(topic.partitions)
        if total <= present:
            raise ApiError(
                ErrorCode.INVALID_PARTITIONS, _not_an_increase(name, present, total)
            )
        rows.check_room(total - present)
        return [
            partition_record(topic.topic_id, index, topic.leader, rows.take()[1])
            for index in range(present, total)
        ]

    # -- changing configs -------------------------------------------------------------

    @_decided_again
    def alter_configs(
        self, wanted: Sequence[Alteration], *, validate_only: bool = False
    ) -> list[ApiError | None]:
        """Replace the configs set on resources with one write to disk.

        A group need not exist.

        Args:
            wanted: the changes, at most one of each resource. None of them sees the
                others, so those that depend on each other need a call each.
            validate_only: check the new configs, and write nothing.

        Returns:
            For each of ``wanted`` None, or an ApiError: UNKNOWN_TOPIC_OR_PARTITION,
            INVALID_CONFIG, an error of its ``change``, or KAFKA_STORAGE_ERROR, with
            which nothing was changed.

        Raises:
            ApiError: POLICY_VIOLATION: too many records, or too much metadata; nothing
                was changed.
        """
        with self._log.turn():
            self.catch_up()
            results: list[ApiError | None] = []
            records: list[MetadataRecord] = []
            for each in wanted:
                self._step()
                try:
                    records += self._altered(each)
                    results.append(None)
                except ApiError as error:
                    results.append(error)
                _check_count(records)
            self._budget.check(records, self._image)
            return self._committed(() if validate_only else records, results)

    def _altered(self, wanted: Alteration) -> list[MetadataRecord]:
        """Return the records that change the configs of a resource."""
        kind, name, change = wanted
        if kind == TOPIC_RESOURCE and name not in self._topics:
            raise _unknown(name)
        before = self._image.config(kind, name)
        after = dict(change(dict(before)))
        if kind == TOPIC_RESOURCE:
            config = LogConfig.from_overrides(self._defaults, after)
            check_still_shared(self._topics[name].config, config)
            check_alteration(LogConfig.from_accepted(self._defaults, before), config)
        return [
            config_record(kind, name, key, after.get(key))
            for key in sorted({*before, *after})
            if before.get(key) != after.get(key)
        ]

    def alter_topic_config(self, name: str, change: ConfigChange) -> None:
        """Replace the configs set on a topic.

        Raises:
            ApiError: as alter_configs() returns and raises them.
        """
        self._alter(Alteration(TOPIC_RESOURCE, name, change))

    def alter_broker_config(self, resource_name: str, change: ConfigChange) -> None:
        """Replace the dynamic configs of a broker; "": of all brokers.

        Raises:
            ApiError: as alter_configs() returns and raises them.
        """
        self._alter(Alteration(BROKER_RESOURCE, resource_name, change))

    def _alter(self, wanted: Alteration) -> None:
        (error,) = self.alter_configs([wanted])
        if error is not None:
            raise error

    # -- changing the rest ------------------------------------------------------------

    @property
    def metadata_bytes(self) -> int:
        """About how many bytes of memory the metadata takes that is not about topics.

        See metadata_budget.py.
        """
        return self._budget.used(self._image)

    @property
    def image(self) -> MetadataImage:
        """The state that the metadata log gives, as of the last catch_up()."""
        return self._image

    @_decided_again
    def change(
        self, decide: Callable[[MetadataImage], Sequence[MetadataRecord]]
    ) -> None:
        """Commit the records that ``decide`` returns for the present metadata (image).

        ``decide`` is called with the log's mutex held, so no other process changes the
        metadata between the decision and the commit.

        Raises:
            ApiError: KAFKA_STORAGE_ERROR; POLICY_VIOLATION: too many records, or too
                much metadata; or an error of ``decide``.
        """
        with self._log.turn():
            self.catch_up()
            records = decide(self._image)
            _check_count(records)
            self._budget.check(records, self._image)
            if records:
                self._commit(records)

    def copy_records(self, offset: int, records: Sequence[MetadataRecord]) -> None:
        """Append records of the cluster's log to this node's copy of it.

        Partitions get rows of this broker's table. If all of them are taken, they get
        those above the limit that new topics have to keep. If the table has no more,
        the records before are appended: they may delete partitions.

        Args:
            offset: the offset of the first record. If the copy does not end there by
                now, nothing is appended: another process has copied the same records.
            records: the records, as the cluster's log has them.

        Raises:
            ApiError: KAFKA_STORAGE_ERROR, or INVALID_PARTITIONS: there is no row for a
                partition now; try again when deleted ones have been removed.
        """
        with self._log.locked():
            self.catch_up()
            if self.metadata_end().offset != offset:
                return
            rows = _NewRows(self)
            placed: list[MetadataRecord] = []
            for record in records:
                if record["type"] != "PartitionRecord":
                    placed.append(record)
                elif rows.has_row_left:
                    placed.append(rows.placed(record))
                else:
                    if before := placed[: _begin_of_topic(placed, record)]:
                        self._commit(before)
                    raise self._does_not_fit(record, placed)
            self._commit(placed)

    def _does_not_fit(
        self, record: MetadataRecord, before: Sequence[MetadataRecord]
    ) -> ApiError:
        topic_id = record["topicId"]
        names = [r["name"] for r in before if _is_topic(r, topic_id)]
        names += [each.name for each in (self._topic_of(record),) if each is not None]
        return ApiError(
            ErrorCode.INVALID_PARTITIONS,
            f"partition {record['partitionId']} of topic {''.join(names[:1])} does not"
            f" fit: this node has room for {MAX_PARTITIONS} partitions;"
            f" {self.partition_count} exist, and {len(self._deleted_rows)} that were"
            " deleted are still being removed",
        )

    # -- the log's length -------------------------------------------------------------

    def replace_dead_records(self, dead: int = _SNAPSHOT_FROM_DEAD_RECORDS) -> bool:
        """Call replace_records() if most of the metadata log's records have no effect.

        Args:
            dead: the smallest number of records without effect for which this is done.

        Returns:
            Whether the records were replaced.

        Raises:
            OSError: as replace_records().
        """
        self.catch_up()
        image = self._image
        if self._log.is_json or image.record_count < self._look_from:
            return False
        live = image.live_record_count()
        self._look_from = live + max(live, dead)
        if image.record_count < self._look_from:
            return False
        self.replace_records()
        return True

    def replace_records(self) -> None:
        """Replace the metadata log by a snapshot, which is shorter.

        Other processes that change the metadata wait meanwhile. The directories of
        deleted topics must have been renamed before: the next start does not know of
        these topics.

        Raises:
            OSError: the snapshot cannot be written; the log is unchanged.
        """
        with self._log.locked():
            self.catch_up()
            self._log.replace(self._records_with_rows(), self.now_ms())
        self._image.record_count = self._image.live_record_count()

    def _records_with_rows(self) -> Iterator[list[MetadataRecord]]:
        import json  # few processes need it

        rows = {
            "used": len(self._rows),
            "deleted": list(self._deleted_rows),
            "ever": [self._ever_deleted, self._ever_reused],
            "reuses": list(self._reuses.items()),
        }
        state = {"logPosition": self._log.position, "rows": json.dumps(rows)}
        for group in self._image.records():
            for record in group:
                self._step()
                if record["type"] == "PartitionRecord":
                    topic = self._by_id[uuid_of_text(record["topicId"])]
                    record["ownRow"] = topic.partitions[record["partitionId"]]
                elif state and record["type"] == "FeatureLevelRecord":
                    record.update(state)
                    state = {}
            yield group

    def _restore_rows(self, text: str) -> None:
        """Restore partitions' rows from a snapshot: how many were used, and deleted.

        The rows of existing partitions follow, in their PartitionRecords.

        Args:
            text: JSON, as _records_with_rows() has written it.
        """
        import json

        rows = json.loads(text)
        self._rows = [self._no_partition] * rows["used"]
        self._deleted_rows = deque(rows["deleted"])
        self._ever_deleted, self._ever_reused = rows["ever"]
        self._reuses = dict(rows["reuses"])

    # -- producer ids -----------------------------------------------------------------

    @_decided_again
    def allocate_producer_id(self) -> int:
        """Return a producer id that is never returned again, by any process.

        This process reserves blocks of 1,000 ids in the log, and takes ids from its
        block. If it dies, the rest of its block is never used.

        Raises:
            ApiError: KAFKA_STORAGE_ERROR.
        """
        for producer_id in self._producer_ids:
            return producer_id
        with self._log.turn():
            self.catch_up()
            first = self._image.next_producer_id
            end = first + PRODUCER_ID_BLOCK
            self._commit([producer_ids_record(self._broker_id, end)])
        self._producer_ids = iter(range(first + 1, end))
        return first

    # -- replay -----------------------------------------------------------------------

    def _commit(self, records: Sequence[MetadataRecord]) -> None:
        # Rows before the commit: from then on other processes use them. If this process
        # is killed in between, the next creation of partitions makes the same rows
        # usable again.
        if self._row_maker is not None:
            new = len(self._rows)
            for record in records:
                if record["type"] != "PartitionRecord":
                    continue
                if "row" in record:
                    self._row_maker.reuse_row(record["row"])
                else:
                    self._row_maker.initialise_row(new)
                    new += 1
                self._step()
        self._log.append(records, self.now_ms())
        self.catch_up()

    def _committed(
        self, records: Sequence[MetadataRecord], results: list[ApiError | None]
    ) -> list[ApiError | None]:
        """Commit the records of several changes; return the result of each.

        Args:
            records: the records of all changes.
            results: the error of each change, or None. If the records cannot be
                written, that is the error of all others.
        """
        try:
            if records:
                self._commit(records)
        except ApiError as error:
            return [result or error for result in results]
        return results

    def _replay(self, record: MetadataRecord) -> None:
        self._step()
        removed = None
        if record.get("type") == "RemoveTopicRecord":
            removed = self._topic_of(record)
            topic = self._image.removed_by(record)
            if self._removed_before is not None and topic is not None:
                self._removed_before.append(topic)
        self._image.replay(record)
        kind = record["type"]
        self._budget.add(record)
        if kind == "TopicRecord":
            self._replay_topic(record["name"])
        elif kind == "PartitionRecord":
            self._replay_partition(self._topic_of(record), record)
        elif kind == "FeatureLevelRecord":
            self._features = None
            if "rows" in record:
                self._restore_rows(record["rows"])
        elif kind == "ConfigRecord":
            self._replay_config(record["resourceType"], record["resourceName"])
        elif kind == "ClientQuotaRecord" and self._on_broker_config is not None:
            self._on_broker_config()  # acceptors apply the quotas of IP addresses
        elif removed is not None:
            self._replay_removal(removed)

    def _topic_of(self, record: MetadataRecord) -> Topic | None:
        return self._by_id.get(uuid_of_text(record["topicId"]))

    def _replay_topic(self, name: str) -> None:
        topic_id = self._image.topics[name].topic_id
        topic = Topic(name, topic_id, self._resolve(name))
        self._topics[name] = self._by_id[topic_id] = topic
        self._collisions.setdefault(collision_key(name), []).append(name)

    def _replay_partition(self, topic: Topic | None, record: MetadataRecord) -> None:
        assert topic is not None, "the image refuses partitions of unknown topics"
        topic.leader = self._leader_of(topic.name, record["replicas"])
        if "ownRow" in record:
            row = record["ownRow"]
            self._rows[row] = Partition(topic, len(topic.partitions), row)
            topic.partitions.append(row)
            return
        reused = record.get("row")
        row = len(self._rows) if reused is None else reused
        partition = Partition(topic, len(topic.partitions), row)
        if reused is None:
            self._rows.append(partition)
        else:
            if not self._deleted_rows or self._deleted_rows.popleft() != row:
                raise CorruptLogError(f"row {row} is not the one to be used again next")
            self._ever_reused += 1
            self._reuses[row] = self._reuses.get(row, 0) + 1
            self._rows[row] = partition
        topic.partitions.append(row)

    def _leader_of(self, name: str, replicas: Sequence[int]) -> int:
        """Return the id of the node that serves a topic.

        Outside of a cluster it is this node.
        """
        if not self._log.is_shared:
            return self._broker_id
        # Each node serves the topics whose records are in the cluster's store.
        diskless = self._image.config(TOPIC_RESOURCE, name).get("diskless.enable", "")
        return self._broker_id if diskless.lower() == "true" else replicas[0]

    def _replay_removal(self, topic: Topic) -> None:
        del self._topics[topic.name]
        del self._by_id[topic.topic_id]
        key = collision_key(topic.name)
        self._collisions[key].remove(topic.name)
        if not self._collisions[key]:
            del self._collisions[key]
        # The topic itself must not stay in memory until its rows are used again.
        for row in topic.partitions:
            self._rows[row] = self._no_partition
        self._deleted_rows.extend(topic.partitions)
        self._ever_deleted += len(topic.partitions)
        if self._on_removed is not None:
            self._on_removed(topic)

    def _replay_config(self, resource_type: int, resource_name: str) -> None:
        if resource_type == TOPIC_RESOURCE:
            topic = self._topics.get(resource_name)
            if topic is not None:
                topic.config = self._resolve(resource_name)
        elif resource_type == BROKER_RESOURCE:
            self._replay_broker_config()
            if self._on_broker_config is not None:
                self._on_broker_config()

    def _replay_broker_config(self) -> None:
        values = dict(self._static)
        for resource_name in ("", str(self._broker_id)):
            for name, text in self.broker_overrides(resource_name).items():
                value = broker_log_value(name, text)
                if value is not None:
                    values[name] = value
        defaults = defaults_of_broker(values)
        if defaults != self._defaults:
            self._set_defaults(defaults)
            for topic in self._topics.values():
                topic.config = self._resolve(topic.name)

    def _set_defaults(self, defaults: dict[str, ConfigValue]) -> None:
        self._defaults = defaults
        self.default_config = LogConfig(defaults)  # of topics without settings

    def _resolve(self, name: str) -> LogConfig:
        overrides = self._image.config(TOPIC_RESOURCE, name)
        if not overrides:
            return self.default_config  # one object for all topics without settings
        return LogConfig.from_accepted(self._defaults, overrides)

    def _reusable_rows(self) -> int:
        """Return how many deleted partitions' rows new partitions may get now.

        No process uses these rows for the deleted partitions any more.
        """
        deletions, passed = self._deletions, self._passed()
        while len(deletions) > 1 and deletions[1][0] <= passed:
            deletions.popleft()
        if not deletions or deletions[0][0] > passed:
            return 0
        return max(0, deletions[0][1] - self._ever_reused)


class _NewRows:
    """Chooses rows of the shared partition table for new partitions.

    It takes them in the order in which the replay of the log will assign them. The
    caller holds the log's mutex.
    """

    def __init__(self, registry: TopicRegistry) -> None:
        self._registry = registry
        self._first_new = len(registry._rows)
        # After a start with a smaller max.partitions there may be more rows than that.
        self._new = max(0, registry._capacity - self._first_new)
        self._reusable = registry._reusable_rows()
        self._taken = 0

    def check_room(self, wanted: int, spare: int = 0) -> None:
        """Raise an ApiError if there is no room for ``wanted`` more partitions.

        Args:
            wanted: the number of new partitions.
            spare: the number of rows (entries for partitions) that must stay free.
        """
        registry = self._registry
        present = registry.partition_count
        room = min(self._new + self._reusable, registry._capacity - present)
        if wanted <= room - self._taken - spare:
            return
        deleted = len(registry._deleted_rows)
        raise ApiError(
            ErrorCode.INVALID_PARTITIONS,
            f"{wanted} more partition(s) do not fit: the limit is {registry._capacity}"
            f" partitions (max.partitions), {present + self._taken}"
            f" exist, and {max(0, deleted - self._reusable)} that were deleted are"
            " still being removed."
            + (
                f" {spare} of them are kept for topics that CreateTopics creates."
                if spare
                else ""
            ),
        )

    def take(self) -> tuple[int, int | None]:
        """Take a row of the shared partition table for the next new partition.

        Returns:
            The row; and what the partition's record says: the row again if a deleted
            partition had it, None if no partition has used it.
        """
        number = self._taken
        self._taken += 1
        if number < self._reusable:
            row = self._registry._deleted_rows[number]
            return row, row
        return self._first_new + number - self._reusable, None

    @property
    def has_row_left(self) -> bool:
        """Whether the table has a row for the next partition, above the limit maybe."""
        fresh = max(0, self._taken - self._reusable)
        return self._taken < self._reusable or self._first_new + fresh < MAX_PARTITIONS

    def placed(self, record: MetadataRecord) -> MetadataRecord:
        """Take a row of the partition table for a record's partition.

        Return the record.

        If a deleted partition had the row, the returned record names it.
        """
        if self._taken >= self._reusable:
            self._taken += 1
            return record
        return {**record, "row": self.take()[1]}


class _Draft:
    """The topics that one request is about to create, and the records for them.

    Each topic is checked against those before it, too.
    """

    def __init__(self, registry: TopicRegistry, spare: int) -> None:
        self._registry = registry
        self._names: set[str] = set()
        # Thousands of topics may have the same settings, or none of their own.
        self._configs: dict[tuple[tuple[str, str], ...], LogConfig] = {}
        self._rows = _NewRows(registry)
        self._spare = spare
        self.records: list[MetadataRecord] = []

    def create(self, new: NewTopic) -> Topic | ApiError:
        self._registry._step()
        try:
            return self._create(new)
        except ApiError as error:
            return error

    def _create(self, new: NewTopic) -> Topic:
        registry = self._registry
        self._check_name(new.name)
        if new.num_partitions < 1:
            raise ApiError(
                ErrorCode.INVALID_PARTITIONS,
                "Number of partitions was set to an invalid non-positive value.",
            )
        spare = 0 if new.name in INTERNAL_TOPICS else self._spare
        self._rows.check_room(new.num_partitions, spare)
        topic = Topic(new.name, self._new_id(), self._config(new.overrides))
        broker_id = registry._broker_id
        rows = [self._rows.take() for _ in range(new.num_partitions)]
        self.records += [
            topic_record(topic.name, topic.topic_id),
            *(
                config_record(TOPIC_RESOURCE, topic.name, name, value)
                for name, value in new.overrides.items()
            ),
            *(
                partition_record(topic.topic_id, index, broker_id, reused)
                for index, (_, reused) in enumerate(rows)
            ),
        ]
        self._names.add(topic.name)
        topic.partitions.extend(row for row, _ in rows)
        return topic

    def _config(self, overrides: Mapping[str, str]) -> LogConfig:
        same = tuple(overrides.items())
        config = self._configs.get(same)
        if config is None:
            config = LogConfig.from_overrides(self._registry._defaults, overrides)
            self._configs[same] = config
        return config

    def _check_name(self, name: str) -> None:
        check_topic_name(name)
        if name == CLUSTER_METADATA_TOPIC:
            raise ApiError(
                ErrorCode.INVALID_REQUEST,
                f"Creation of internal topic {name} is prohibited.",
            )
        if name in self._names or name in self._registry._topics:
            raise ApiError(
                ErrorCode.TOPIC_ALREADY_EXISTS, f"Topic '{name}' already exists."
            )
        # As Kafka, of the topics that exist: two of one request are both created.
        others = self._registry._collisions.get(collision_key(name))
        if others:
            raise ApiError(
                ErrorCode.INVALID_TOPIC_EXCEPTION,
                f"Topic '{name}' collides with existing topic: {others[0]}",
            )

    def _new_id(self) -> bytes:
        while (topic_id := random_uuid()) in self._registry._by_id:
            pass
        return topic_id


def _check_count(records: Sequence[MetadataRecord]) -> None:
    """Raise ApiError POLICY_VIOLATION if a change has too many records."""
    if len(records) > MAX_RECORDS_PER_CHANGE:
        raise ApiError(
            ErrorCode.POLICY_VIOLATION,
            "Unable to perform excessively large batch operation: one request may make"
            f" {MAX_RECORDS_PER_CHANGE} changes; send several requests.",
        )


def _is_topic(record: MetadataRecord, topic_id: str) -> bool:
    return bool(record["type"] == "TopicRecord" and record["topicId"] == topic_id)


def _begin_of_topic(
    records: Sequence[MetadataRecord], partition: MetadataRecord
) -> int:
    """Return where the records begin that make the topic of a partition behind them.

    Return their number if the topic was made before.
    """
    for index, record in enumerate(records):
        if _is_topic(record, partition["topicId"]):
            return index
    return len(records)


def require_partition(topic: Topic | None, name: str, index: int) -> Topic:
    """Return ``topic`` if it has a partition of this index.

    Args:
        topic: the topic that was found; None: there is none.
        name: the name by which it was looked up, for the error.
        index: the number of the partition.

    Raises:
        ApiError: UNKNOWN_TOPIC_OR_PARTITION: the topic or the partition does not exist.
    """
    if topic is None or not 0 <= index < len(topic.partitions):
        raise ApiError(
            ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            # A topic's name has 249 characters; a request may repeat one of 32,767.
            f"there is no partition {index} of topic {name[:249]}",
        )
    return topic


def _unknown(name: str) -> ApiError:
    return ApiError(
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"The topic '{name}' does not exist."
    )


def _not_an_increase(name: str, present: int, count: int) -> str:
    if count == present:
        return f"Topic already has {present} partition(s)."
    return (
        f"The topic {name} currently has {present} partition(s); {count} would not be"
        " an increase."
    )

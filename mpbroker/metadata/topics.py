"""TopicRegistry: the topics as one process knows them, and changes of the metadata.

Each process has its own registry, which replays the same metadata log. A call to
catch_up() compares one shared word. Only if it has moved, the call replays the records
that other processes have appended.

A change has these steps: take the log's mutex, catch up, decide, append, and replay the
new records as all other processes do. So a process does not see its own changes earlier
or differently.

Row numbers in the shared partition table follow from the log alone: the n-th partition
that the log creates has row n in every process, and keeps it until the broker stops.
Rows of deleted topics are not used again before that.

Source: Kafka's ReplicationControlManager and ConfigurationControlManager, for errors
and their messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from mpbroker.base.config_def import ConfigValue
from mpbroker.metadata.log_config import LogConfig, defaults_of_broker
from mpbroker.metadata.log_config_def import broker_log_value
from mpbroker.metadata.meta_properties import random_uuid, uuid_of_text
from mpbroker.metadata.metadata_image import (
    BROKER_RESOURCE,
    GROUP_RESOURCE,
    PRODUCER_ID_BLOCK,
    TOPIC_RESOURCE,
    MetadataImage,
    MetadataRecord,
    config_record,
    partition_record,
    producer_ids_record,
    remove_topic_record,
    topic_record,
)
from mpbroker.metadata.metadata_log import MetadataLog
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

# The most partitions that one request may add: each costs a record and a row, and other
# requests wait meanwhile. Kafka's ReplicationControlManager has the same limit.
MAX_PARTITIONS_PER_BATCH: Final = 10_000

# Given the current overrides of a resource, returns the new ones; may raise ApiError.
ConfigChange = Callable[[dict[str, str]], Mapping[str, str]]


class Topic:
    """One topic. The registry adds to ``partitions``, and replaces ``config``.

    Attributes:
        name: the name.
        topic_id: the id, 16 bytes.
        is_internal: whether it is one of INTERNAL_TOPICS.
        partitions: the row of each partition in the shared partition table, by number.
        config: the settings, with the broker's defaults.
    """

    __slots__ = ("config", "is_internal", "name", "partitions", "topic_id")

    def __init__(self, name: str, topic_id: bytes, config: LogConfig) -> None:
        self.name: Final = name
        self.topic_id: Final = topic_id
        self.is_internal: Final = name in INTERNAL_TOPICS
        self.partitions: list[int] = []
        self.config = config

    def __repr__(self) -> str:
        return f"Topic({self.name!r}, partitions={self.partitions})"


class Partition(NamedTuple):
    """One partition of a topic and its row in the shared partition table."""

    topic: Topic
    partition_id: int
    row: int


class NewTopic(NamedTuple):
    """A topic to create."""

    name: str
    num_partitions: int
    overrides: Mapping[str, str] = {}


def _no_step() -> None:
    """Ignore a step."""


class RegistryHooks(NamedTuple):
    """What a registry calls as it replays the log.

    Attributes:
        on_removed: called for every topic that catch_up() finds deleted, after it is
            removed from the registry; not called for topics that were deleted before
            the registry was made.
        on_broker_config: called when catch_up() finds changed broker configs or quotas.
        initialise_row: makes a row of the partition table usable. It is called before
            the record that creates the partition is committed.
        step: called for each record replayed and each row made usable, as a sign of
            progress.
    """

    on_removed: Callable[[Topic], None] | None = None
    on_broker_config: Callable[[], None] | None = None
    initialise_row: Callable[[int], None] | None = None
    step: Callable[[], None] = _no_step


class TopicRegistry:
    """The topics and dynamic configs of the broker. Not for several threads."""

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
        """Replay the log so far.

        Args:
            log: the metadata log, as this process has it open.
            broker_id: node.id; the leader of every partition.
            capacity: the number of rows of the shared partition table.
            broker_values: the broker's static values by key; some are the defaults of
                topics.
            now_ms: returns the wall clock, for the timestamps in the log.
            hooks: called as the log is replayed.

        Raises:
            CorruptLogError: the log cannot be read or replayed.
        """
        self._step = hooks.step
        self._initialise_row = hooks.initialise_row
        self._log = log
        self._broker_id = broker_id
        self._capacity = capacity
        self._static = dict(broker_values or {})
        self._now_ms = now_ms
        self._image = MetadataImage()
        self._topics: dict[str, Topic] = {}
        self._by_id: dict[bytes, Topic] = {}
        self._rows: list[Partition] = []
        self._collisions: dict[str, str] = {}
        self._set_defaults(defaults_of_broker(self._static))
        self._producer_ids = iter(range(0))
        self._on_removed: Callable[[Topic], None] | None = None
        self._on_broker_config: Callable[[], None] | None = None
        self.catch_up()
        self._on_removed = hooks.on_removed
        self._on_broker_config = hooks.on_broker_config

    # -- reading ----------------------------------------------------------------------

    @property
    def version(self) -> int:
        """A number that changes with every change, so that caches see it."""
        return self._log.position

    def catch_up(self) -> bool:
        """Replay the records committed since the last call.

        Returns:
            Whether there were any.

        Raises:
            CorruptLogError: the log cannot be read.
            SystemExit: a record cannot be replayed; this process must end.
        """
        return self._log.has_news and self._log.replay_new(self._replay)

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
        """Return the partition of a row; None: there is none, or it was deleted."""
        if not 0 <= row < len(self._rows):
            return None
        partition = self._rows[row]
        alive = self._by_id.get(partition.topic.topic_id) is partition.topic
        return partition if alive else None

    @property
    def row_count(self) -> int:
        """The number of rows in use, those of deleted topics included."""
        return len(self._rows)

    def broker_overrides(self, resource_name: str) -> Mapping[str, str]:
        """Return the dynamic configs of a broker by its id, or of all brokers by ""."""
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

    def create_topics(
        self,
        wanted: Sequence[NewTopic],
        *,
        validate_only: bool = False,
        about_to: Callable[[list[Topic | ApiError]], None] = lambda _: None,
    ) -> list[Topic | ApiError]:
        """Create topics with one write to disk.

        Args:
            wanted: the topics to create.
            validate_only: check the topics, and write nothing.
            about_to: called with the results before anything is written.

        Returns:
            For each of ``wanted`` the new topic, or an ApiError: INVALID_REQUEST (the
            metadata log's name), INVALID_TOPIC_EXCEPTION (an illegal name, or one that
            collides with another), TOPIC_ALREADY_EXISTS, INVALID_PARTITIONS (less than
            1, or no room in the partition table) or INVALID_CONFIG.

        Raises:
            ApiError: KAFKA_STORAGE_ERROR; nothing was created.
        """
        with self._log.locked():
            self.catch_up()
            draft = _Draft(self)
            results = [draft.create(new) for new in wanted]
            if validate_only or not draft.records:
                return results
            about_to(results)
            self._commit(draft.records)
            return [
                result if isinstance(result, ApiError) else self._topics[result.name]
                for result in results
            ]

    def delete_topics(self, topics: Iterable[Topic]) -> list[ApiError | None]:
        """Delete topics with one write to disk.

        Returns:
            For each topic None, or an ApiError: UNKNOWN_TOPIC_OR_PARTITION if another
            request has deleted it first.

        Raises:
            ApiError: KAFKA_STORAGE_ERROR; nothing was deleted.
        """
        with self._log.locked():
            self.catch_up()
            results: list[ApiError | None] = []
            records: dict[bytes, MetadataRecord] = {}
            for topic in topics:
                known = topic.topic_id in self._by_id and topic.topic_id not in records
                results.append(None if known else _unknown(topic.name))
                if known:
                    records[topic.topic_id] = remove_topic_record(topic.topic_id)
            if records:
                self._commit(list(records.values()))
            return results

    def delete_topic(self, name: str) -> Topic:
        """Delete a topic; return its last state.

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

    def create_partitions(
        self, name: str, count: int, *, validate_only: bool = False
    ) -> None:
        """Raise a topic's number of partitions to ``count``.

        Raises:
            ApiError: UNKNOWN_TOPIC_OR_PARTITION, INVALID_PARTITIONS (``count`` is not
                above the present number, or there is no room in the partition table)
                or KAFKA_STORAGE_ERROR.
        """
        with self._log.locked():
            self.catch_up()
            topic = self._topics.get(name)
            if topic is None:
                raise _unknown(name)
            present = len(topic.partitions)
            if count <= present:
                raise ApiError(
                    ErrorCode.INVALID_PARTITIONS, _not_an_increase(name, present, count)
                )
            self._check_room(count - present, 0)
            if not validate_only:
                self._commit(
                    [
                        partition_record(topic.topic_id, index, self._broker_id)
                        for index in range(present, count)
                    ]
                )

    # -- changing configs -------------------------------------------------------------

    def alter_topic_config(
        self, name: str, change: ConfigChange, *, validate_only: bool = False
    ) -> None:
        """Replace the configs set on a topic.

        Args:
            name: the topic.
            change: returns the new configs, given the present ones.
            validate_only: check the new configs, and write nothing.

        Raises:
            ApiError: UNKNOWN_TOPIC_OR_PARTITION, INVALID_CONFIG, KAFKA_STORAGE_ERROR,
                or an error of ``change``.
        """
        with self._log.locked():
            self.catch_up()
            if name not in self._topics:
                raise _unknown(name)
            before = dict(self._image.config(TOPIC_RESOURCE, name))
            after = dict(change(dict(before)))
            LogConfig.from_overrides(self._defaults, after)
            if not validate_only:
                self._commit_configs(TOPIC_RESOURCE, name, before, after)

    def alter_broker_config(
        self, resource_name: str, change: ConfigChange, *, validate_only: bool = False
    ) -> None:
        """Replace the dynamic configs of a broker, or of all brokers.

        Args:
            resource_name: the broker's id; "": all brokers.
            change: returns the new configs, given the present ones. It also checks
                keys and values.
            validate_only: call ``change``, and write nothing.

        Raises:
            ApiError: KAFKA_STORAGE_ERROR, or an error of ``change``.
        """
        with self._log.locked():
            self.catch_up()
            before = dict(self._image.config(BROKER_RESOURCE, resource_name))
            after = dict(change(dict(before)))
            if not validate_only:
                self._commit_configs(BROKER_RESOURCE, resource_name, before, after)

    def alter_group_config(
        self, group_id: str, change: ConfigChange, *, validate_only: bool = False
    ) -> None:
        """Replace the configs set on a group, as alter_broker_config() does.

        The group need not exist.
        """
        with self._log.locked():
            self.catch_up()
            before = dict(self._image.config(GROUP_RESOURCE, group_id))
            after = dict(change(dict(before)))
            if not validate_only:
                self._commit_configs(GROUP_RESOURCE, group_id, before, after)

    # -- changing the rest ------------------------------------------------------------

    @property
    def image(self) -> MetadataImage:
        """The state of the whole log, as of the last catch_up()."""
        return self._image

    def change(
        self, decide: Callable[[MetadataImage], Sequence[MetadataRecord]]
    ) -> None:
        """Commit the records that ``decide`` returns for the current image.

        ``decide`` is called with the log's mutex held, so no other process changes the
        metadata between the decision and the commit.

        Raises:
            ApiError: KAFKA_STORAGE_ERROR, or an error of ``decide``.
        """
        with self._log.locked():
            self.catch_up()
            records = decide(self._image)
            if records:
                self._commit(records)

    # -- producer ids -----------------------------------------------------------------

    def allocate_producer_id(self) -> int:
        """Return a producer id that is never returned again, by any process.

        This process reserves blocks of 1,000 ids in the log, and takes ids from its
        block. If it dies, the rest of its block is never used.

        Raises:
            ApiError: KAFKA_STORAGE_ERROR.
        """
        for producer_id in self._producer_ids:
            return producer_id
        with self._log.locked():
            self.catch_up()
            first = self._image.next_producer_id
            end = first + PRODUCER_ID_BLOCK
            self._commit([producer_ids_record(self._broker_id, end)])
        self._producer_ids = iter(range(first + 1, end))
        return first

    # -- replay -----------------------------------------------------------------------

    def _commit(self, records: Sequence[MetadataRecord]) -> None:
        # Rows before the commit: from then on other processes use them. Killed in
        # between, the next creation of partitions makes the same rows usable again.
        if self._initialise_row is not None:
            created = sum(record["type"] == "PartitionRecord" for record in records)
            for row in range(len(self._rows), len(self._rows) + created):
                self._initialise_row(row)
                self._step()
        self._log.append(records, self._now_ms())
        self.catch_up()

    def _commit_configs(
        self,
        resource_type: int,
        resource_name: str,
        before: Mapping[str, str],
        after: Mapping[str, str],
    ) -> None:
        records = [
            config_record(resource_type, resource_name, name, after.get(name))
            for name in sorted({*before, *after})
            if before.get(name) != after.get(name)
        ]
        if records:
            self._commit(records)

    def _replay(self, record: MetadataRecord) -> None:
        self._step()
        removed = None
        if record.get("type") == "RemoveTopicRecord":
            removed = self._topic_of(record)
        self._image.replay(record)
        kind = record["type"]
        if kind == "TopicRecord":
            self._replay_topic(record["name"])
        elif kind == "PartitionRecord":
            self._replay_partition(self._topic_of(record))
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
        self._collisions[collision_key(name)] = name

    def _replay_partition(self, topic: Topic | None) -> None:
        assert topic is not None, "the image refuses partitions of unknown topics"
        row = len(self._rows)
        self._rows.append(Partition(topic, len(topic.partitions), row))
        topic.partitions.append(row)

    def _replay_removal(self, topic: Topic) -> None:
        del self._topics[topic.name]
        del self._by_id[topic.topic_id]
        self._collisions.pop(collision_key(topic.name), None)
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

    def _check_room(self, wanted: int, drafted: int) -> None:
        used = len(self._rows) + drafted
        if used + wanted > self._capacity:
            dead = len(self._rows) - sum(
                len(topic.partitions) for topic in self._topics.values()
            )
            raise ApiError(
                ErrorCode.INVALID_PARTITIONS,
                f"{wanted} more partition(s) do not fit: {used} of {self._capacity} are"
                f" in use, {dead} of them by deleted topics until the broker restarts.",
            )


class _Draft:
    """Topics that are created together; each is checked against those before it."""

    def __init__(self, registry: TopicRegistry) -> None:
        self._registry = registry
        self._names: dict[str, str] = {}
        self._partitions = 0
        self.records: list[MetadataRecord] = []

    def create(self, new: NewTopic) -> Topic | ApiError:
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
        registry._check_room(new.num_partitions, self._partitions)
        config = LogConfig.from_overrides(registry._defaults, new.overrides)
        topic = Topic(new.name, self._new_id(), config)
        broker_id = registry._broker_id
        self.records += [
            topic_record(topic.name, topic.topic_id),
            *(
                config_record(TOPIC_RESOURCE, topic.name, name, value)
                for name, value in new.overrides.items()
            ),
            *(
                partition_record(topic.topic_id, index, broker_id)
                for index in range(new.num_partitions)
            ),
        ]
        self._names[collision_key(topic.name)] = topic.name
        first = len(registry._rows) + self._partitions
        topic.partitions.extend(range(first, first + new.num_partitions))
        self._partitions += new.num_partitions
        return topic

    def _check_name(self, name: str) -> None:
        check_topic_name(name)
        if name == CLUSTER_METADATA_TOPIC:
            raise ApiError(
                ErrorCode.INVALID_REQUEST,
                f"Creation of internal topic {name} is prohibited.",
            )
        key = collision_key(name)
        other = self._names.get(key) or self._registry._collisions.get(key)
        if other == name:
            raise ApiError(
                ErrorCode.TOPIC_ALREADY_EXISTS, f"Topic '{name}' already exists."
            )
        if other is not None:
            raise ApiError(
                ErrorCode.INVALID_TOPIC_EXCEPTION,
                f"Topic '{name}' collides with existing topic: {other}",
            )

    def _new_id(self) -> bytes:
        while (topic_id := random_uuid()) in self._registry._by_id:
            pass
        return topic_id


def require_partition(topic: Topic | None, name: str, index: int) -> Topic:
    """Return a topic that has a partition of this index.

    Args:
        topic: the topic that was looked up; None: there is none.
        name: the name that it was looked up by.

    Raises:
        ApiError: UNKNOWN_TOPIC_OR_PARTITION: the topic or the partition does not exist.
    """
    if topic is None or not 0 <= index < len(topic.partitions):
        raise ApiError(
            ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            f"there is no partition {index} of topic {name}",
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

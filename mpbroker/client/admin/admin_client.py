"""`AdminClient` manages a cluster's topics, configs, groups, ACLs, quotas and users.

    with AdminClient(bootstrap_servers="localhost:9092") as admin:
        admin.create_topic("events", partitions=8)
        events = ConfigResource(ConfigResourceType.TOPIC, "events")
        admin.alter_configs(events, {"retention.ms": "3600000"})

A method returns when the brokers have answered. It waits for each connection and each
answer for up to request.timeout.ms. If no broker can be reached, as during a restart,
it tries again to connect for up to default.api.timeout.ms, a minute. One thread uses an
AdminClient, in the process that made it.

Every method may raise:

- ApiError: the broker refused. `error_code` says why; the text has the broker's words.
- BrokerUnavailableError: no broker answered. After a RequestTimeoutError, a subclass,
  the broker may have done what was asked, or may still do it.
- AuthenticationError: the broker refused the client's credentials, or the client
  refused the broker's certificate.
- UnsupportedVersionError: the broker is too old for the request.
- ClientError: the client is closed, or was made before a fork.

Source: org.apache.kafka.clients.admin.Admin, for most names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Final, NamedTuple, Self

from mpbroker.base.config_def import ConfigDef, ConfigKey, ConfigType, at_least
from mpbroker.client.addresses import Address
from mpbroker.client.admin import (
    acl_admin,
    config_admin,
    group_admin,
    log_dir_admin,
    quota_admin,
    scram_admin,
    topic_admin,
)
from mpbroker.client.admin.config_admin import ConfigResource, ConfigResourceType
from mpbroker.client.admin.group_admin import GroupDescription, GroupMemberDescription
from mpbroker.client.admin.log_dir_admin import FeatureDescription, LogDirDescription
from mpbroker.client.admin.quota_admin import QuotaDescription
from mpbroker.client.admin.scram_admin import ScramUser
from mpbroker.client.admin.topic_admin import (
    EARLIEST,
    LATEST,
    MAX_TIMESTAMP,
    OffsetAndTimestamp,
)
from mpbroker.client.cluster import Cluster, TopicPartition
from mpbroker.client.ownership import Ownership
from mpbroker.client.settings import (
    COMMON_KEYS,
    ClientSettings,
    integer,
    parse_settings,
    settings_together,
)
from mpbroker.protocol.acl import (
    AclBinding,
    AclFilter,
    AclOperation,
    AclPermissionType,
    PatternType,
    ResourceType,
)
from mpbroker.protocol.config_source import ConfigSource
from mpbroker.protocol.messages.metadata import (
    MetadataResponsePartition,
    MetadataResponseTopic,
)
from mpbroker.protocol.primitives import Buffer

_CONFIG: Final = ConfigDef(
    "client setting",
    (
        *COMMON_KEYS,
        ConfigKey(
            "default.api.timeout.ms",
            ConfigType.INT,
            60_000,
            "How long a call tries to connect while no broker can be reached.",
            validator=at_least(0),
        ),
    ),
)


class ClusterDescription(NamedTuple):
    """The id, the controller and the brokers of a cluster.

    Attributes:
        cluster_id: the cluster's id; None if the brokers are too old to have one.
        controller_id: the id of the broker that changes topics and configs.
        brokers: the address of each broker, by its id.
    """

    cluster_id: str | None
    controller_id: int
    brokers: dict[int, Address]


class TopicListing(NamedTuple):
    """A topic's name, id and number of partitions, as `list_topics` returns them.

    Attributes:
        topic_id: the topic's id in Kafka's text form; None if the broker did not tell
            it, or if the topic was not created.
        partitions: the number of partitions; None if the broker did not tell it.
        is_internal: whether the topic is the broker's own, such as __consumer_offsets.
    """

    name: str
    topic_id: str | None
    partitions: int | None
    is_internal: bool


class PartitionDescription(NamedTuple):
    """A partition and the ids of its brokers.

    Attributes:
        partition: the partition's number.
        leader: the id of the leader; None while there is none.
    """

    partition: int
    leader: int | None
    replicas: list[int]
    in_sync_replicas: list[int]


class TopicDescription(NamedTuple):
    """A topic and its partitions, in the order of their numbers."""

    name: str
    topic_id: str | None
    is_internal: bool
    partitions: list[PartitionDescription]


class ConfigEntry(NamedTuple):
    """One config of a resource.

    Attributes:
        value: the config's value; None if it is a password, or has no value.
        source: the place where the value was set, such as the topic or the default.
    """

    name: str
    value: str | None
    source: ConfigSource
    is_read_only: bool
    is_sensitive: bool


class GroupListing(NamedTuple):
    """A group's id, protocol, state and type, as `list_groups` returns them.

    Attributes:
        protocol_type: "consumer" for consumer groups of either protocol.
        state: the group's state, such as Stable or Empty; "" if the broker is too old
            to tell it.
        type: classic, consumer or share, in the broker's spelling; "" if the broker is
            too old to tell it.
    """

    group_id: str
    protocol_type: str
    state: str
    type: str


class AdminClient:
    """Describes and changes topics, configs, groups, ACLs, quotas and users.

    The module's docstring says how to use it, and which errors a call may raise.
    """

    def __init__(
        self, config: Mapping[str, object] | None = None, **settings: object
    ) -> None:
        """Make a client; it connects when a call needs a broker.

        Args:
            config: Kafka's settings of clients by name, with dots or underscores.
            settings: more settings, as keyword arguments.

        Raises:
            ConfigError: a setting is wrong or missing; the text says which.
            AddressError: bootstrap.servers cannot be read.
        """
        values = parse_settings(_CONFIG, settings_together(config, settings))
        client = ClientSettings.of(values, max_in_flight=1)
        timeout_s = client.request_timeout_ms / 1000
        self._brokers = Cluster(client.bootstrap, timeout_s, client)
        self._ownership = Ownership("admin client")
        self._api_timeout_s = integer(values, "default.api.timeout.ms") / 1000

    def _cluster(self) -> Cluster:
        self._ownership.check()
        self._brokers.await_broker(self._api_timeout_s)
        return self._brokers

    def close(self) -> None:
        """Close all connections. A call in a forked child does nothing."""
        if self._ownership.close():
            self._brokers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def describe_cluster(self) -> ClusterDescription:
        """Return the cluster's id, its controller, and the addresses of its brokers."""
        answer = self._cluster().metadata([])
        brokers = {
            broker.node_id: Address(broker.host, broker.port)
            for broker in answer.brokers
        }
        return ClusterDescription(answer.cluster_id, answer.controller_id, brokers)

    def describe_features(self) -> dict[str, FeatureDescription]:
        """Return the cluster's features, such as transaction.version, by name."""
        return log_dir_admin.describe_features(self._cluster())

    def describe_log_dirs(self, brokers: Iterable[int] = ()) -> list[LogDirDescription]:
        """Return the log directories of brokers, and the partitions in them.

        Args:
            brokers: the ids of some brokers; () means all.

        Raises:
            ApiError: CLUSTER_AUTHORIZATION_FAILED, or another refusal.
        """
        wanted = list(brokers) or sorted(self.describe_cluster().brokers)
        return log_dir_admin.describe_log_dirs(self._cluster(), wanted)

    # -- topics ------------------------------------------------------------------------

    def create_topic(
        self,
        name: str,
        *,
        partitions: int = -1,
        replication_factor: int = -1,
        configs: Mapping[str, str] | None = None,
        validate_only: bool = False,
    ) -> TopicListing:
        """Create a topic.

        Args:
            name: the new topic's name.
            partitions: the number of partitions; -1 asks for the broker's default.
            replication_factor: the number of replicas; -1 asks for the broker's
                default.
            configs: the topic's own configs, such as {"retention.ms": "3600000"}.
            validate_only: whether the broker only checks the request.

        Raises:
            ApiError: TOPIC_ALREADY_EXISTS, or another refusal.
        """
        created = topic_admin.create_topic(
            self._cluster(),
            name,
            partitions=partitions,
            replication_factor=replication_factor,
            configs=configs,
            validate_only=validate_only,
        )
        count = created.num_partitions
        return TopicListing(
            name,
            None if validate_only else _text_of(created.topic_id),
            count if count >= 0 else None,
            is_internal=False,
        )

    def list_topics(self, *, list_internal: bool = False) -> list[TopicListing]:
        """Return the topics that the client may see, by name.

        Args:
            list_internal: whether to return the broker's own topics, too.
        """
        found = [
            TopicListing(
                topic.name or "",
                _text_of(topic.topic_id),
                len(topic.partitions),
                topic.is_internal,
            )
            for topic in self._cluster().metadata(None).topics
            if list_internal or not topic.is_internal
        ]
        return sorted(found, key=_name_of)

    def describe_topic(self, name: str) -> TopicDescription:
        """Return a topic's partitions, and the brokers that have them.

        Raises:
            ApiError: UNKNOWN_TOPIC_OR_PARTITION, if there is no such topic.
        """
        return _described(self._cluster().topic(name, wait=False))

    def create_partitions(self, name: str, count: int) -> None:
        """Raise a topic's number of partitions to ``count``."""
        topic_admin.create_partitions(self._cluster(), name, count)

    def delete_topic(self, name: str) -> None:
        """Delete a topic and its records.

        Raises:
            ApiError: UNKNOWN_TOPIC_OR_PARTITION, if there is no such topic.
        """
        topic_admin.delete_topic(self._cluster(), name)

    def list_offsets(
        self,
        questions: Mapping[tuple[str, int], int],
        *,
        read_committed: bool = False,
    ) -> dict[TopicPartition, OffsetAndTimestamp]:
        """Return the first offset at or after a time, for each partition.

        Args:
            questions: by partition: a time in ms since 1970, EARLIEST (the first
                offset), LATEST (the offset after the last record) or MAX_TIMESTAMP (the
                first record with the highest timestamp).
            read_committed: whether LATEST is the end of the records that read_committed
                readers see.

        Returns:
            The offsets and their timestamps, by partition. The offset is -1 where no
            record is that late.

        Raises:
            ApiError: UNKNOWN_TOPIC_OR_PARTITION, if there is no such topic.
            UnsupportedVersionError: a broker is too old for MAX_TIMESTAMP.
        """
        wanted = {TopicPartition(*where): time for where, time in questions.items()}
        return topic_admin.list_offsets(
            self._cluster(),
            wanted,
            self._leaders(wanted),
            read_committed=read_committed,
        )

    def delete_records(
        self, before: Mapping[tuple[str, int], int]
    ) -> dict[TopicPartition, int]:
        """Delete the records below an offset; return each partition's first offset.

        Args:
            before: the offset, by partition; -1 deletes all records there are.

        Raises:
            ApiError: OFFSET_OUT_OF_RANGE, if an offset is beyond the partition's end.
        """
        wanted = {TopicPartition(*where): at for where, at in before.items()}
        return topic_admin.delete_records(
            self._cluster(), wanted, self._leaders(wanted)
        )

    def _leaders(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, int]:
        topics = dict.fromkeys(where.topic for where in partitions)
        return group_admin.partitions_of(self._cluster(), list(topics))

    # -- configs -----------------------------------------------------------------------

    def describe_configs(
        self, resource: ConfigResource, keys: Sequence[str] = ()
    ) -> list[ConfigEntry]:
        """Return the configs of a topic, broker, group or other resource, by name.

        Args:
            resource: the resource that has the configs.
            keys: the names of the configs to return; () means all.
        """
        entries = config_admin.describe_configs(self._cluster(), resource, keys)
        found = [
            ConfigEntry(
                entry.name,
                entry.value,
                _source_of(entry.config_source),
                entry.read_only,
                entry.is_sensitive,
            )
            for entry in entries
        ]
        return sorted(found, key=_name_of)

    def alter_configs(
        self,
        resource: ConfigResource,
        put: Mapping[str, str],
        delete: Iterable[str] = (),
    ) -> None:
        """Change some configs of a resource, all of them or none; others stay.

        Args:
            resource: the resource that has the configs.
            put: new values, by the config's name.
            delete: the names of configs that go back to the value that they inherit.

        Raises:
            ApiError: INVALID_CONFIG, or another refusal; nothing is changed.
        """
        config_admin.alter_configs(self._cluster(), resource, put, delete)

    # -- groups ------------------------------------------------------------------------

    def list_groups(
        self, states: Iterable[str] = (), types: Iterable[str] = ()
    ) -> list[GroupListing]:
        """Return the groups of all brokers, by id.

        Args:
            states: return only groups in one of these states; () means all.
            types: return only groups of these types, classic, consumer or share; ()
                means all.
        """
        return [
            GroupListing(
                group.group_id,
                group.protocol_type,
                group.group_state,
                group.group_type,
            )
            for group in group_admin.list_groups(self._cluster(), states, types)
        ]

    def describe_group(self, group_id: str) -> GroupDescription:
        """Return a group's state and its members, with the partitions that each reads.

        Raises:
            ApiError: GROUP_ID_NOT_FOUND, if there is no such group.
        """
        return group_admin.describe_group(self._cluster(), group_id)

    def delete_group(self, group_id: str) -> None:
        """Delete a group that has no members, and its committed offsets.

        Raises:
            ApiError: NON_EMPTY_GROUP, or GROUP_ID_NOT_FOUND.
        """
        group_admin.delete_group(self._cluster(), group_id)

    def list_group_offsets(self, group_id: str) -> dict[TopicPartition, int]:
        """Return the offsets that a group has committed; {} for an unknown group."""
        return group_admin.committed_offsets(self._cluster(), group_id)

    def alter_group_offsets(
        self, group_id: str, offsets: Mapping[tuple[str, int], int]
    ) -> None:
        """Commit offsets for a group that has no members.

        Raises:
            ApiError: UNKNOWN_MEMBER_ID, if the group has members.
        """
        wanted = {TopicPartition(*where): at for where, at in offsets.items()}
        group_admin.alter_offsets(self._cluster(), group_id, wanted)

    def reset_group_offsets(
        self, group_id: str, topics: Iterable[str], to: int = EARLIEST
    ) -> dict[TopicPartition, int]:
        """Commit new offsets in some topics for a group that has no members.

        Args:
            group_id: the group's id, which may be a new one.
            topics: the topics; offsets are committed for all their partitions.
            to: EARLIEST, LATEST, or a time in ms since 1970. A partition that has no
                record at or after that time goes to its end.

        Returns:
            The offsets that were committed.

        Raises:
            ApiError: UNKNOWN_MEMBER_ID, if the group has members.
        """
        cluster = self._cluster()
        leaders = group_admin.partitions_of(cluster, list(topics))
        found = topic_admin.list_offsets(cluster, dict.fromkeys(leaders, to), leaders)
        too_early = [where for where, at in found.items() if at.offset < 0]
        found |= topic_admin.list_offsets(
            cluster, dict.fromkeys(too_early, LATEST), leaders
        )
        offsets = {where: at.offset for where, at in found.items()}
        group_admin.alter_offsets(cluster, group_id, offsets)
        return offsets

    def delete_group_offsets(
        self, group_id: str, partitions: Iterable[tuple[str, int]]
    ) -> None:
        """Delete the offsets that a group has committed for some partitions.

        Raises:
            ApiError: GROUP_SUBSCRIBED_TO_TOPIC, if members read the topic; or
                GROUP_ID_NOT_FOUND.
        """
        wanted = [TopicPartition(*where) for where in partitions]
        group_admin.delete_offsets(self._cluster(), group_id, wanted)

    # -- ACLs --------------------------------------------------------------------------

    def describe_acls(self, wanted: AclFilter | None = None) -> list[AclBinding]:
        """Return the ACLs that match a filter; all of them without a filter.

        Raises:
            ApiError: SECURITY_DISABLED, if the broker has no authorizer.
        """
        return acl_admin.describe_acls(self._cluster(), wanted or AclFilter())

    def create_acls(self, acls: Sequence[AclBinding]) -> None:
        """Add ACLs; ACLs that exist already stay.

        Raises:
            ApiError: SECURITY_DISABLED, if the broker has no authorizer.
        """
        acl_admin.create_acls(self._cluster(), acls)

    def delete_acls(self, wanted: AclFilter) -> list[AclBinding]:
        """Delete the ACLs that match a filter; return them.

        Raises:
            ApiError: SECURITY_DISABLED, if the broker has no authorizer.
        """
        return acl_admin.delete_acls(self._cluster(), wanted)

    # -- quotas ------------------------------------------------------------------------

    def describe_quotas(
        self, entity: Mapping[str, str | None] | None = None
    ) -> list[QuotaDescription]:
        """Return the quotas that are set.

        Args:
            entity: return only quotas of entities with these names, by type: "user",
                "client-id" or "ip". The name None stands for the type's default; no
                entity means all.
        """
        return quota_admin.describe_quotas(self._cluster(), entity or {})

    def alter_quotas(
        self, entity: Mapping[str, str | None], changes: Mapping[str, float | None]
    ) -> None:
        """Set quotas of one entity, such as {"client-id": "loader"}.

        Args:
            entity: names by type, as for `describe_quotas`.
            changes: the new values by quota, such as {"producer_byte_rate": 1048576};
                None removes a quota.

        Raises:
            ApiError: the broker refused; nothing is changed.
        """
        quota_admin.alter_quotas(self._cluster(), entity, changes)

    # -- users of SCRAM ----------------------------------------------------------------

    def list_scram_users(self, names: Sequence[str] = ()) -> list[ScramUser]:
        """Return the users that have SCRAM credentials, by name.

        Args:
            names: the names of the users to return; () means all.

        Raises:
            ApiError: RESOURCE_NOT_FOUND, if one of the names has no credentials.
        """
        return scram_admin.list_users(self._cluster(), names)

    def set_scram_password(
        self, name: str, mechanism: str, password: str, *, iterations: int = 4096
    ) -> None:
        """Create a user's credential for one mechanism, or replace it.

        The password itself is not sent; the broker gets a salted hash to check it by.

        Args:
            name: the user's name.
            mechanism: SCRAM-SHA-256 or SCRAM-SHA-512.
            password: the password, which is encoded in UTF-8.
            iterations: 4096 to 16384; more make a login slower, and guessing a password
                harder.
        """
        scram_admin.set_password(self._cluster(), name, mechanism, password, iterations)

    def delete_scram_credential(self, name: str, mechanism: str) -> None:
        """Delete a user's credential for one mechanism.

        Raises:
            ApiError: RESOURCE_NOT_FOUND, if there is no such credential.
        """
        scram_admin.remove_credential(self._cluster(), name, mechanism)


def _text_of(topic_id: Buffer) -> str | None:
    """Return a topic's id as Kafka's tools print it; None if all its bytes are 0."""
    return topic_admin.topic_id_text(topic_id) if any(topic_id) else None


def _name_of(named: TopicListing | ConfigEntry) -> str:
    return named.name


def _described(topic: MetadataResponseTopic) -> TopicDescription:
    partitions = [_partition(each) for each in topic.partitions]
    partitions.sort(key=lambda each: each.partition)
    return TopicDescription(
        topic.name or "", _text_of(topic.topic_id), topic.is_internal, partitions
    )


def _partition(partition: MetadataResponsePartition) -> PartitionDescription:
    leader = partition.leader_id
    return PartitionDescription(
        partition.partition_index,
        leader if leader >= 0 else None,
        list(partition.replica_nodes),
        list(partition.isr_nodes),
    )


def _source_of(number: int) -> ConfigSource:
    try:
        return ConfigSource(number)
    except ValueError:
        return ConfigSource.UNKNOWN


__all__ = [
    "EARLIEST",
    "LATEST",
    "MAX_TIMESTAMP",
    "AclBinding",
    "AclFilter",
    "AclOperation",
    "AclPermissionType",
    "Address",
    "AdminClient",
    "ClusterDescription",
    "ConfigEntry",
    "ConfigResource",
    "ConfigResourceType",
    "ConfigSource",
    "FeatureDescription",
    "GroupDescription",
    "GroupListing",
    "GroupMemberDescription",
    "LogDirDescription",
    "OffsetAndTimestamp",
    "PartitionDescription",
    "PatternType",
    "QuotaDescription",
    "ResourceType",
    "ScramUser",
    "TopicDescription",
    "TopicListing",
    "TopicPartition",
]

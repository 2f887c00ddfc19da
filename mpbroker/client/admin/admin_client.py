"""`AdminClient`: topics, configs, groups, ACLs, quotas and users of any Kafka broker.

    with AdminClient(bootstrap_servers="localhost:9092") as admin:
        admin.create_topic("events", partitions=8)
        events = ConfigResource(ConfigResourceType.TOPIC, "events")
        admin.alter_configs(events, {"retention.ms": "3600000"})

A method returns when the brokers have answered. It waits for each connection and each
answer for up to request.timeout.ms. One thread uses an AdminClient, in the process that
made it.

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
from typing import NamedTuple, Self

from mpbroker.client.addresses import Address
from mpbroker.client.admin import (
    acl_admin,
    config_admin,
    group_admin,
    quota_admin,
    scram_admin,
    topic_admin,
)
from mpbroker.client.admin.config_admin import ConfigResource, ConfigResourceType
from mpbroker.client.admin.group_admin import GroupDescription, GroupMemberDescription
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
from mpbroker.client.settings import ADMIN_CONFIG, ClientSettings, parse_settings
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


class ClusterDescription(NamedTuple):
    """The brokers there are.

    Attributes:
        cluster_id: None if the brokers are too old to have one.
        controller_id: the id of the broker that changes topics and configs.
        brokers: the address of each broker, by its id.
    """

    cluster_id: str | None
    controller_id: int
    brokers: dict[int, Address]


class TopicListing(NamedTuple):
    """A topic in few words.

    Attributes:
        topic_id: in Kafka's text form; None if the broker did not tell it, or if the
            topic was not created.
        partitions: how many there are; None if the broker did not tell it.
        is_internal: whether the topic is the broker's own, such as __consumer_offsets.
    """

    name: str
    topic_id: str | None
    partitions: int | None
    is_internal: bool


class PartitionDescription(NamedTuple):
    """A partition and the ids of its brokers.

    Attributes:
        leader: None while the partition has no leader.
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
        value: None if the config is a password, or has no value.
        source: where the value was set.
    """

    name: str
    value: str | None
    source: ConfigSource
    is_read_only: bool
    is_sensitive: bool


class GroupListing(NamedTuple):
    """A group in few words.

    Attributes:
        protocol_type: "consumer" for consumer groups of either protocol.
        state: such as Stable or Empty; "" if the broker is too old to tell it.
        type: classic or consumer, in the broker's spelling; "" likewise.
    """

    group_id: str
    protocol_type: str
    state: str
    type: str


class AdminClient:
    """Asks brokers for what there is, and changes it. The module has the rules."""

    def __init__(
        self, config: Mapping[str, object] | None = None, **settings: object
    ) -> None:
        """Connect to nothing yet.

        Args:
            config: Kafka's settings of clients by name, with dots or underscores.
            settings: more of them, as keyword arguments.

        Raises:
            ConfigError: a setting is wrong or missing; the text says which.
            AddressError: bootstrap.servers cannot be read.
        """
        values = parse_settings(ADMIN_CONFIG, {**(config or {}), **settings})
        client = ClientSettings.of(values, max_in_flight=1)
        timeout_s = client.request_timeout_ms / 1000
        self._brokers = Cluster(client.bootstrap, timeout_s, client)
        self._ownership = Ownership("admin client")

    def _cluster(self) -> Cluster:
        self._ownership.check()
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
        """Return the brokers and their addresses."""
        answer = self._cluster().metadata([])
        brokers = {
            broker.node_id: Address(broker.host, broker.port)
            for broker in answer.brokers
        }
        return ClusterDescription(answer.cluster_id, answer.controller_id, brokers)

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
            partitions: -1 asks for the broker's default.
            replication_factor: -1 asks for the broker's default.
            configs: such as {"retention.ms": "3600000"}.
            validate_only: check the request, and create nothing.

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
            list_internal: return the broker's own topics, too.
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
            read_committed: LATEST is the end of what read_committed readers see.

        Returns:
            An offset of -1 where no record is that late.

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
            resource: what has the configs.
            keys: return only these configs; none means all.
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
            resource: what has the configs.
            put: new values.
            delete: configs that go back to the value that they inherit.

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
            states: return only groups in one of these states; none means all.
            types: return only groups of these types, classic or consumer; likewise.
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
        """Return a group's state and its members, with what each of them reads.

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
        """Return the offsets that a group has committed; none for an unknown group."""
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
        """Have a group without members read some topics from another place on.

        Args:
            group_id: the group, which may be a new one.
            topics: all their partitions are meant.
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

    # -- ACLs --------------------------------------------------------------------------

    def describe_acls(self, wanted: AclFilter | None = None) -> list[AclBinding]:
        """Return the ACLs that a filter lets pass; all of them without a filter.

        Raises:
            ApiError: SECURITY_DISABLED, if the broker has no authorizer.
        """
        return acl_admin.describe_acls(self._cluster(), wanted or AclFilter())

    def create_acls(self, acls: Sequence[AclBinding]) -> None:
        """Add ACLs; those that are there already stay.

        Raises:
            ApiError: SECURITY_DISABLED, if the broker has no authorizer.
        """
        acl_admin.create_acls(self._cluster(), acls)

    def delete_acls(self, wanted: AclFilter) -> list[AclBinding]:
        """Delete the ACLs that a filter lets pass; return them.

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
                "client-id" or "ip". The name None stands for the default of a type.
        """
        return quota_admin.describe_quotas(self._cluster(), entity or {})

    def alter_quotas(
        self, entity: Mapping[str, str | None], changes: Mapping[str, float | None]
    ) -> None:
        """Set quotas of one entity, such as {"client-id": "loader"}.

        Args:
            entity: names by type, as for `describe_quotas`.
            changes: such as {"producer_byte_rate": 1048576}; None removes a quota.

        Raises:
            ApiError: the broker refused; nothing is changed.
        """
        quota_admin.alter_quotas(self._cluster(), entity, changes)

    # -- users of SCRAM ----------------------------------------------------------------

    def list_scram_users(self, names: Sequence[str] = ()) -> list[ScramUser]:
        """Return the users that have SCRAM credentials, by name.

        Args:
            names: return only these; none means all.

        Raises:
            ApiError: RESOURCE_NOT_FOUND, if one of the names has no credentials.
        """
        return scram_admin.list_users(self._cluster(), names)

    def set_scram_password(
        self, name: str, mechanism: str, password: str, *, iterations: int = 4096
    ) -> None:
        """Create a user's credential for one mechanism, or replace it.

        The password itself is not sent; the broker gets what it needs to check it.

        Args:
            name: the user's name.
            mechanism: SCRAM-SHA-256 or SCRAM-SHA-512.
            password: the password, which is encoded in UTF-8.
            iterations: the work of a login, and of guessing a password: 4096 to 16384.
        """
        scram_admin.set_password(self._cluster(), name, mechanism, password, iterations)

    def delete_scram_credential(self, name: str, mechanism: str) -> None:
        """Delete a user's credential for one mechanism.

        Raises:
            ApiError: RESOURCE_NOT_FOUND, if there is no such credential.
        """
        scram_admin.remove_credential(self._cluster(), name, mechanism)


def _text_of(topic_id: Buffer) -> str | None:
    """Return a topic's id as Kafka's tools print it; None for the id of no topic."""
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
    "GroupDescription",
    "GroupListing",
    "GroupMemberDescription",
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

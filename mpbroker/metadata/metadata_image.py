"""MetadataImage: the state that the records of the metadata log add up to.

A record is a dict. Its "type" is the name of one of Kafka's metadata records, and its
other members have the names of that record's fields. Ids are in their text form. (In
logs of earlier versions the same dicts are written as JSON.) Replaying all records in
order gives the image; records() returns a shortest list of records that gives the same
image.

Source: Apache Kafka, metadata/src/main/resources/common/metadata/*.json; MetadataImage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import starmap
from typing import TYPE_CHECKING, Any, Final

from mpbroker.base.storage_errors import CorruptLogError
from mpbroker.metadata.acl_records import AclImage
from mpbroker.metadata.features import (
    KNOWN_FEATURES,
    METADATA_VERSION,
    NEW_FEATURES,
)
from mpbroker.metadata.meta_properties import uuid_of_text, uuid_to_text
from mpbroker.metadata.quota_records import ClientQuotasImage
from mpbroker.metadata.scram_credentials import ScramCredentials

if TYPE_CHECKING:
    from mpbroker.metadata.delegation_tokens import DelegationToken

MetadataRecord = dict[str, Any]

TOPIC_RESOURCE: Final = 2
BROKER_RESOURCE: Final = 4
GROUP_RESOURCE: Final = 32

# In a PartitionChangeRecord that leaves the leader as it is.
_SAME_LEADER: Final = -2

# The level in logs whose records are JSON, which earlier versions of mpbroker wrote.
_LEVEL_OF_JSON: Final = 1

PRODUCER_ID_BLOCK: Final = 1000


def feature_level_record(name: str, level: int) -> MetadataRecord:
    """Make the record that sets the level of a feature."""
    return {"type": "FeatureLevelRecord", "name": name, "featureLevel": level}


def first_records() -> list[MetadataRecord]:
    """Make the first records of a new log: the levels of features."""
    return [feature_level_record(*each) for each in NEW_FEATURES.items()]


def topic_record(name: str, topic_id: bytes) -> MetadataRecord:
    """Make the record that creates a topic, without partitions."""
    return {"type": "TopicRecord", "name": name, "topicId": uuid_to_text(topic_id)}


def partition_record(
    topic_id: bytes,
    partition: int,
    leader: int,
    row: int | None = None,
    epochs: tuple[int, int] = (0, 0),
) -> MetadataRecord:
    """Make the record that adds the next partition to a topic.

    Args:
        topic_id: the topic's id, 16 bytes.
        partition: the number of the partition.
        leader: the id of the node that has the partition.
        row: the row (entry in the shared partition table) of a deleted partition, which
            the new one gets; None: a row that has never been used.
        epochs: the partition's leader epoch and partition epoch.
    """
    of_row = {} if row is None else {"row": row}
    return {
        "type": "PartitionRecord",
        "partitionId": partition,
        "topicId": uuid_to_text(topic_id),
        "replicas": [leader],
        "isr": [leader],
        "leader": leader,
        "leaderEpoch": epochs[0],
        "partitionEpoch": epochs[1],
        **of_row,
    }


def remove_topic_record(topic_id: bytes) -> MetadataRecord:
    """Make the record that deletes a topic, its partitions and its configs."""
    return {"type": "RemoveTopicRecord", "topicId": uuid_to_text(topic_id)}


def config_record(
    resource_type: int, resource_name: str, name: str, value: str | None
) -> MetadataRecord:
    """Make the record that sets one config of a resource, or removes it.

    Args:
        resource_type: such as TOPIC_RESOURCE.
        resource_name: the topic, the broker id ("": all brokers) or the group.
        name: the config's key.
        value: its text; None: remove the config.
    """
    return {
        "type": "ConfigRecord",
        "resourceType": resource_type,
        "resourceName": resource_name,
        "name": name,
        "value": value,
    }


def producer_ids_record(broker_id: int, next_producer_id: int) -> MetadataRecord:
    """Make the record that reserves all producer ids below ``next_producer_id``."""
    return {
        "type": "ProducerIdsRecord",
        "brokerId": broker_id,
        "brokerEpoch": 0,
        "nextProducerId": next_producer_id,
    }


def unregister_broker_record(broker_id: int, epoch: int) -> MetadataRecord:
    """Make the record that removes a broker's registration of this epoch."""
    return {
        "type": "UnregisterBrokerRecord",
        "brokerId": broker_id,
        "brokerEpoch": epoch,
    }


class TopicImage:
    """One topic in a MetadataImage.

    Attributes:
        name: the name.
        topic_id: the id, 16 bytes.
        partition_count: the number of partitions.
        leader: the id of the node that has all partitions.
        epochs: leader epoch and partition epoch of a partition, by its number, if they
            are not (0, 0). An Apache Kafka raises them. They are kept, because a Kafka
            that goes on with this log must not begin again at an epoch that batches
            have already.
    """

    __slots__ = ("epochs", "leader", "name", "partition_count", "topic_id")

    def __init__(self, name: str, topic_id: bytes) -> None:
        self.name = name
        self.topic_id = topic_id
        self.partition_count = 0
        self.leader = 0
        self.epochs: dict[int, tuple[int, int]] = {}

    @property
    def id_text(self) -> str:
        """The id as text, as records have it: 22 characters of URL-safe base64."""
        return uuid_to_text(self.topic_id)


class MetadataImage:
    """The state of the metadata after the records that were replayed so far.

    Attributes:
        topics: the topics by name.
        configs: by (resource type, resource name), the texts of configs by key; only
            resources that have configs.
        acls: the access control entries.
        next_producer_id: the first producer id that is not reserved.
        client_quotas: the quotas of users, client ids and IP addresses.
        scram: the SCRAM credentials of users.
        features: the level of each feature, by its name.
        kept: records that are kept as they are: those of delegation tokens, and the
            registrations of an Apache Kafka's brokers, which only a Kafka needs that
            goes on with this log.
        record_count: the number of records replayed.
    """

    def __init__(self) -> None:
        self.topics: dict[str, TopicImage] = {}
        self.configs: dict[tuple[int, str], dict[str, str]] = {}
        self.acls = AclImage()
        self.next_producer_id = 0
        self.client_quotas = ClientQuotasImage()
        self.scram = ScramCredentials()
        self.features: dict[str, int] = {}
        self.kept: dict[tuple[str, object], MetadataRecord] = {}
        self.record_count = 0
        self._by_id: dict[bytes, TopicImage] = {}

    def replay(self, record: MetadataRecord) -> None:
        """Apply one record of the metadata log to this state.

        Raises:
            CorruptLogError: this release does not know the record's type or fields, or
                the record contradicts those before it.
        """
        try:
            replay = _REPLAY[record["type"]]
        except (KeyError, TypeError):
            raise CorruptLogError(
                f"metadata record {_shown(record)}: unknown type; was it written by a"
                " newer mpbroker?"
            ) from None
        try:
            replay(self, record)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptLogError(
                f"metadata record {_shown(record)}: {error!r}"
            ) from None
        self.record_count += 1

    def topic_by_id(self, topic_id: bytes) -> TopicImage | None:
        """Return the topic with this id (16 bytes), or None."""
        return self._by_id.get(topic_id)

    def removed_by(self, record: MetadataRecord) -> TopicImage | None:
        """Return the topic that a record will delete, once it is applied.

        Returns:
            None if it is a record of another type, or if there is no such topic.
        """
        if record.get("type") != "RemoveTopicRecord":
            return None
        try:
            return self._by_id.get(uuid_of_text(record["topicId"]))
        except (KeyError, TypeError, ValueError, AttributeError):
            return None  # `replay` raises the error

    def broker_epoch(self, broker_id: int) -> int | None:
        """Return the epoch of a broker's registration; None: it is not registered."""
        registration = self.kept.get(("broker", broker_id))
        return None if registration is None else int(registration["brokerEpoch"])

    def delegation_tokens(self) -> list[DelegationToken]:
        """Return all delegation tokens."""
        records = [each for (kind, _), each in self.kept.items() if kind == "token"]
        if not records:
            return []
        # Imported here: few logs have tokens.
        from mpbroker.metadata.delegation_tokens import token_of_record

        return [token_of_record(each) for each in records]

    def config(self, resource_type: int, resource_name: str) -> Mapping[str, str]:
        """Return the configs set on a resource: the texts by key."""
        return self.configs.get((resource_type, resource_name), {})

    def records(self) -> Iterator[list[MetadataRecord]]:
        """Yield records that add up to this state; each group of them is one batch."""
        yield from self.records_without_topics()
        for topic in self.topics.values():
            yield [
                topic_record(topic.name, topic.topic_id),
                *(
                    config_record(TOPIC_RESOURCE, topic.name, name, value)
                    for name, value in self.config(TOPIC_RESOURCE, topic.name).items()
                ),
                *(
                    partition_record(
                        topic.topic_id,
                        partition,
                        topic.leader,
                        epochs=topic.epochs.get(partition, (0, 0)),
                    )
                    for partition in range(topic.partition_count)
                ),
            ]

    def records_without_topics(self) -> Iterator[list[MetadataRecord]]:
        """Yield those groups of records() that are about no topic."""
        yield [
            *starmap(feature_level_record, self.kafka_features().items()),
            *self.kept.values(),
            *(
                config_record(resource_type, resource_name, name, value)
                for (resource_type, resource_name), values in self.configs.items()
                if resource_type != TOPIC_RESOURCE
                for name, value in values.items()
            ),
        ]
        if self.next_producer_id:
            yield [producer_ids_record(0, self.next_producer_id)]
        if self.client_quotas:
            yield list(self.client_quotas.records())
        if self.acls:
            yield self.acls.records()
        if self.scram:
            yield list(self.scram.records())

    def live_record_count(self) -> int:
        """Return how many records it takes to give this state.

        The others of the log have no effect any more.
        """
        return (
            len(self.kafka_features())
            + len(self.kept)
            + bool(self.next_producer_id)
            + len(self.client_quotas)
            + len(self.acls)
            + len(self.scram)
            + sum(len(values) for values in self.configs.values())
            + sum(1 + topic.partition_count for topic in self.topics.values())
        )

    @property
    def is_json(self) -> bool:
        """Whether the log's records are JSON (an old form, without feature levels)."""
        return self.features.get(METADATA_VERSION, 0) <= _LEVEL_OF_JSON

    def kafka_features(self) -> Mapping[str, int]:
        """Return the level of each feature that a record has set.

        For a log of JSON these are the levels of a new log.
        """
        return NEW_FEATURES if self.is_json else self.features

    def _replay_feature_level(self, record: MetadataRecord) -> None:
        name, level = str(record["name"]), int(record["featureLevel"])
        known = KNOWN_FEATURES.get(name, 0)
        if level > known:
            raise ValueError(
                f"feature {name} level {level}; this release knows it up to level"
                f" {known}. Downgrade the feature with kafka-features, or use a newer"
                " mpbroker"
            )
        self.features[name] = level

    def _replay_topic(self, record: MetadataRecord) -> None:
        topic = TopicImage(str(record["name"]), uuid_of_text(record["topicId"]))
        if topic.name in self.topics:
            raise ValueError("the topic exists already")
        self.topics[topic.name] = topic
        self._by_id[topic.topic_id] = topic

    def _replay_partition(self, record: MetadataRecord) -> None:
        topic = self._by_id[uuid_of_text(record["topicId"])]
        if record["partitionId"] != topic.partition_count:
            raise ValueError(f"the next partition is {topic.partition_count}")
        # A Kafka that has stopped has left its partitions without a leader.
        topic.leader = int(record["replicas"][0])
        epochs = int(record["leaderEpoch"]), int(record["partitionEpoch"])
        if epochs != (0, 0):
            topic.epochs[topic.partition_count] = epochs
        topic.partition_count += 1

    def _replay_partition_change(self, record: MetadataRecord) -> None:
        topic = self._by_id[uuid_of_text(record["topicId"])]
        partition = int(record["partitionId"])
        leader_epoch, partition_epoch = topic.epochs.get(partition, (0, 0))
        if record.get("leader", _SAME_LEADER) != _SAME_LEADER:
            leader_epoch += 1
        topic.epochs[partition] = leader_epoch, partition_epoch + 1

    def _replay_remove_topic(self, record: MetadataRecord) -> None:
        topic = self._by_id.pop(uuid_of_text(record["topicId"]))
        del self.topics[topic.name]
        self.configs.pop((TOPIC_RESOURCE, topic.name), None)

    def _replay_config(self, record: MetadataRecord) -> None:
        resource = int(record["resourceType"]), str(record["resourceName"])
        name, value = str(record["name"]), record["value"]
        if value is not None:
            self.configs.setdefault(resource, {})[name] = str(value)
            return
        values = self.configs.get(resource, {})
        values.pop(name, None)
        if not values:
            self.configs.pop(resource, None)

    def _replay_client_quota(self, record: MetadataRecord) -> None:
        self.client_quotas.replay(record)

    def _replay_producer_ids(self, record: MetadataRecord) -> None:
        self.next_producer_id = int(record["nextProducerId"])

    def _replay_scram(self, record: MetadataRecord) -> None:
        self.scram.replay(record)

    def _replay_acl(self, record: MetadataRecord) -> None:
        self.acls.replay_entry(record)

    def _replay_acl_removal(self, record: MetadataRecord) -> None:
        self.acls.replay_removal(record)

    def _replay_registration(self, record: MetadataRecord) -> None:
        # Fenced, because that broker does not run while we do.
        broker = int(record["brokerId"])
        self.kept["broker", broker] = {**record, "fenced": True}

    def _replay_unregistration(self, record: MetadataRecord) -> None:
        self.kept.pop(("broker", int(record["brokerId"])), None)

    def _replay_token(self, record: MetadataRecord) -> None:
        self.kept["token", record["tokenId"]] = record

    def _replay_token_removal(self, record: MetadataRecord) -> None:
        self.kept.pop(("token", record["tokenId"]), None)

    def _ignore(self, record: MetadataRecord) -> None:
        """Ignore a record of a type that a single node does not need."""


_REPLAY: Final = {
    "FeatureLevelRecord": MetadataImage._replay_feature_level,
    "TopicRecord": MetadataImage._replay_topic,
    "PartitionRecord": MetadataImage._replay_partition,
    "RemoveTopicRecord": MetadataImage._replay_remove_topic,
    "ConfigRecord": MetadataImage._replay_config,
    "ProducerIdsRecord": MetadataImage._replay_producer_ids,
    "ClientQuotaRecord": MetadataImage._replay_client_quota,
    "UserScramCredentialRecord": MetadataImage._replay_scram,
    "RemoveUserScramCredentialRecord": MetadataImage._replay_scram,
    "AccessControlEntryRecord": MetadataImage._replay_acl,
    "RemoveAccessControlEntryRecord": MetadataImage._replay_acl_removal,
    # Kafka's.
    "PartitionChangeRecord": MetadataImage._replay_partition_change,
    "RegisterBrokerRecord": MetadataImage._replay_registration,
    "UnregisterBrokerRecord": MetadataImage._replay_unregistration,
    "DelegationTokenRecord": MetadataImage._replay_token,
    "RemoveDelegationTokenRecord": MetadataImage._replay_token_removal,
    "FenceBrokerRecord": MetadataImage._ignore,
    "UnfenceBrokerRecord": MetadataImage._ignore,
    "BrokerRegistrationChangeRecord": MetadataImage._ignore,
    "RegisterControllerRecord": MetadataImage._ignore,
    "UnregisterControllerRecord": MetadataImage._ignore,
    "ZkMigrationStateRecord": MetadataImage._ignore,
    "ClearElrRecord": MetadataImage._ignore,
    "NoOpRecord": MetadataImage._ignore,
}


def _shown(record: object) -> str:
    text = repr(record)
    return text if len(text) <= 200 else text[:200] + "..."

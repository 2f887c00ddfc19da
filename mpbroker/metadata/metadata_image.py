"""MetadataImage: the state that the records of the metadata log add up to.

A record is a JSON object. Its "type" is the name of one of Kafka's metadata records,
and its other members have the names of that record's fields. Ids are in their text
form. Replaying all records in order gives the image; records() returns a shortest list
of records that gives the same image.

Source: Apache Kafka, metadata/src/main/resources/common/metadata/*.json; MetadataImage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from mpbroker.base.storage_errors import CorruptLogError
from mpbroker.metadata.acl_records import AclImage
from mpbroker.metadata.meta_properties import uuid_of_text, uuid_to_text
from mpbroker.metadata.quota_records import ClientQuotasImage
from mpbroker.metadata.scram_credentials import ScramCredentials

MetadataRecord = dict[str, Any]

TOPIC_RESOURCE: Final = 2
BROKER_RESOURCE: Final = 4
GROUP_RESOURCE: Final = 32

FEATURE_NAME: Final = "metadata.version"
FEATURE_LEVEL: Final = 1
PRODUCER_ID_BLOCK: Final = 1000


def feature_level_record() -> MetadataRecord:
    """Make the first record of every log: the version of the records that follow."""
    return {
        "type": "FeatureLevelRecord",
        "name": FEATURE_NAME,
        "featureLevel": FEATURE_LEVEL,
    }


def topic_record(name: str, topic_id: bytes) -> MetadataRecord:
    """Make the record that creates a topic, without partitions."""
    return {"type": "TopicRecord", "name": name, "topicId": uuid_to_text(topic_id)}


def partition_record(topic_id: bytes, partition: int, leader: int) -> MetadataRecord:
    """Make the record that adds the next partition to a topic."""
    return {
        "type": "PartitionRecord",
        "partitionId": partition,
        "topicId": uuid_to_text(topic_id),
        "replicas": [leader],
        "isr": [leader],
        "leader": leader,
        "leaderEpoch": 0,
        "partitionEpoch": 0,
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


class TopicImage:
    """One topic: its name, id (16 bytes), number of partitions, and leader."""

    __slots__ = ("leader", "name", "partition_count", "topic_id")

    def __init__(self, name: str, topic_id: bytes) -> None:
        self.name = name
        self.topic_id = topic_id
        self.partition_count = 0
        self.leader = 0


class MetadataImage:
    """The state after the records that were replayed so far.

    Attributes:
        topics: the topics by name.
        configs: texts by key, by (resource type, resource name); only resources that
            have configs.
        acls: the access control entries.
        next_producer_id: the first producer id that is not reserved.
        client_quotas: the quotas of users, client ids and IP addresses.
        scram: the SCRAM credentials of users.
        record_count: the number of records replayed.
    """

    def __init__(self) -> None:
        self.topics: dict[str, TopicImage] = {}
        self.configs: dict[tuple[int, str], dict[str, str]] = {}
        self.acls = AclImage()
        self.next_producer_id = 0
        self.client_quotas = ClientQuotasImage()
        self.scram = ScramCredentials()
        self.record_count = 0
        self._by_id: dict[bytes, TopicImage] = {}

    def replay(self, record: MetadataRecord) -> None:
        """Apply one record.

        Raises:
            CorruptLogError: this release does not know its type or its fields, or it
                contradicts the records before it.
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
        """Return the topic that a record, not replayed yet, will delete.

        None: it is another record, or there is no such topic.
        """
        if record.get("type") != "RemoveTopicRecord":
            return None
        try:
            return self._by_id.get(uuid_of_text(record["topicId"]))
        except (KeyError, TypeError, ValueError, AttributeError):
            return None  # `replay` raises the error

    def config(self, resource_type: int, resource_name: str) -> Mapping[str, str]:
        """Return the configs set on a resource."""
        return self.configs.get((resource_type, resource_name), {})

    def records(self) -> Iterator[list[MetadataRecord]]:
        """Yield records that replay to this image, in groups: one batch each."""
        yield [
            feature_level_record(),
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
        for topic in self.topics.values():
            yield [
                topic_record(topic.name, topic.topic_id),
                *(
                    config_record(TOPIC_RESOURCE, topic.name, name, value)
                    for name, value in self.config(TOPIC_RESOURCE, topic.name).items()
                ),
                *(
                    partition_record(topic.topic_id, partition, topic.leader)
                    for partition in range(topic.partition_count)
                ),
            ]

    def live_record_count(self) -> int:
        """Return how many records records() yields."""
        return (
            1
            + bool(self.next_producer_id)
            + len(self.client_quotas)
            + len(self.acls)
            + len(self.scram)
            + sum(len(values) for values in self.configs.values())
            + sum(1 + topic.partition_count for topic in self.topics.values())
        )

    def _replay_feature_level(self, record: MetadataRecord) -> None:
        name, level = record["name"], record["featureLevel"]
        if name != FEATURE_NAME or level > FEATURE_LEVEL:
            raise ValueError(
                f"feature {name} level {level}; this release knows {FEATURE_NAME} up"
                f" to {FEATURE_LEVEL}"
            )

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
        topic.leader = int(record["leader"])
        topic.partition_count += 1

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
}


def _shown(record: object) -> str:
    text = repr(record)
    return text if len(text) <= 200 else text[:200] + "..."

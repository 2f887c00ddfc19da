"""Create, delete and grow topics of a `Cluster`; list offsets and delete records.

Every function raises ApiError, with the broker's words, if a broker refuses, and
BrokerUnavailableError if no broker answers.
"""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections.abc import Mapping
from typing import Final, NamedTuple

from mpbroker.client.cluster import Cluster, TopicPartition, only
from mpbroker.client.errors import UnsupportedVersionError, check_error
from mpbroker.protocol.errors import ProtocolError
from mpbroker.protocol.messages.create_partitions import (
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreatePartitionsTopic,
)
from mpbroker.protocol.messages.create_topics import (
    CreatableTopic,
    CreatableTopicConfig,
    CreatableTopicResult,
    CreateTopicsRequest,
    CreateTopicsResponse,
)
from mpbroker.protocol.messages.delete_records import (
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteRecordsTopic,
)
from mpbroker.protocol.messages.delete_topics import (
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    DeleteTopicState,
)
from mpbroker.protocol.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopic,
)
from mpbroker.protocol.primitives import Buffer

LATEST: Final = -1
EARLIEST: Final = -2
MAX_TIMESTAMP: Final = -3  # the first record with the highest timestamp (KIP-734)
EARLIEST_LOCAL: Final = -4  # the first record on the broker's disk (KIP-405)
LATEST_TIERED: Final = -5  # the last record in the remote store, -1: none (KIP-1005)
# The versions of ListOffsets, and of Kafka, from which on a broker knows each of these.
# Older brokers take it for a time before 1970.
_SINCE: Final = {
    MAX_TIMESTAMP: (7, "look for the highest timestamp", "3.0"),
    EARLIEST_LOCAL: (8, "tell what of a log is on its disk", "3.5"),
    LATEST_TIERED: (9, "tell what of a log is in its remote store", "3.9"),
}


def create_topic(
    cluster: Cluster,
    name: str,
    *,
    partitions: int = -1,
    replication_factor: int = -1,
    configs: Mapping[str, str] | None = None,
    validate_only: bool = False,
) -> CreatableTopicResult:
    """Create a topic, or only check whether it could be created.

    Args:
        cluster: the brokers.
        name: the new topic's name.
        partitions: the number of partitions; -1 asks for the broker's default.
        replication_factor: the number of replicas; -1 asks for the broker's default.
        configs: the topic's own configs, by name.
        validate_only: whether the broker only checks the request.
    """
    request = CreateTopicsRequest(
        topics=[
            CreatableTopic(
                name=name,
                num_partitions=partitions,
                replication_factor=replication_factor,
                configs=[
                    CreatableTopicConfig(name=key, value=value)
                    for key, value in (configs or {}).items()
                ],
            )
        ],
        timeout_ms=int(cluster.timeout_s * 1000),
        validate_only=validate_only,
    )
    broker = cluster.controller()
    result = only(broker.request(request, CreateTopicsResponse).topics, broker.address)
    check_error(result.error_code, f"topic {name!r}", result.error_message)
    return result


def delete_topic(cluster: Cluster, name: str) -> None:
    """Delete a topic and its records."""
    request = DeleteTopicsRequest(timeout_ms=int(cluster.timeout_s * 1000))
    broker = cluster.controller()
    if broker.version_for(DeleteTopicsRequest) >= 6:
        request.topics = [DeleteTopicState(name=name)]
    else:
        request.topic_names = [name]
    result = only(
        broker.request(request, DeleteTopicsResponse).responses, broker.address
    )
    check_error(result.error_code, f"topic {name!r}", result.error_message)


def create_partitions(cluster: Cluster, name: str, count: int) -> None:
    """Raise a topic's number of partitions to ``count``."""
    request = CreatePartitionsRequest(
        topics=[CreatePartitionsTopic(name=name, count=count, assignments=None)],
        timeout_ms=int(cluster.timeout_s * 1000),
    )
    broker = cluster.controller()
    result = only(
        broker.request(request, CreatePartitionsResponse).results, broker.address
    )
    check_error(result.error_code, f"topic {name!r}", result.error_message)


def topic_id_text(topic_id: Buffer) -> str:
    """Return a topic's id as Kafka's tools and files spell it."""
    return urlsafe_b64encode(topic_id)[:22].decode()


class OffsetAndTimestamp(NamedTuple):
    """An offset, and the timestamp of its record in ms since 1970.

    Both are -1 if no record matches. The timestamp is -1, too, for the offset at the
    end of a partition.
    """

    offset: int
    timestamp: int


def list_offsets(
    cluster: Cluster,
    questions: Mapping[TopicPartition, int],
    leaders: Mapping[TopicPartition, int],
    *,
    read_committed: bool = False,
    epochs: Mapping[TopicPartition, int] | None = None,
) -> dict[TopicPartition, OffsetAndTimestamp]:
    """Return the first offset at or after a timestamp, for each partition.

    Args:
        cluster: the brokers.
        questions: by partition: a timestamp in ms, LATEST, EARLIEST, MAX_TIMESTAMP,
            EARLIEST_LOCAL or LATEST_TIERED.
        leaders: the id of the broker to ask, by partition.
        read_committed: whether LATEST is the offset up to which all transactions are
            decided.
        epochs: the leader epoch, by partition, where it is known.

    Raises:
        UnsupportedVersionError: a broker is too old for one of the questions.
        ProtocolError: a response left out a partition.
    """
    by_leader: dict[int, dict[str, list[ListOffsetsPartition]]] = {}
    for partition, timestamp in questions.items():
        topics = by_leader.setdefault(leaders[partition], {})
        topics.setdefault(partition.topic, []).append(
            ListOffsetsPartition(
                partition_index=partition.partition,
                current_leader_epoch=(epochs or {}).get(partition, -1),
                timestamp=timestamp,
            )
        )
    answers = {}
    for leader, topics in by_leader.items():
        request = ListOffsetsRequest(
            replica_id=-1,
            isolation_level=int(read_committed),
            topics=[
                ListOffsetsTopic(name=name, partitions=partitions)
                for name, partitions in topics.items()
            ],
            timeout_ms=int(cluster.timeout_s * 1000),
        )
        broker = cluster.broker(leader)
        version = broker.version_for(ListOffsetsRequest)
        for question in sorted(set(questions.values()) & _SINCE.keys()):
            since, what, release = _SINCE[question]
            if version < since:
                raise UnsupportedVersionError(
                    f"{broker.address} cannot {what}; that needs Apache Kafka"
                    f" {release} or newer"
                )
        for topic in broker.request(request, ListOffsetsResponse).topics:
            for entry in topic.partitions:
                partition = TopicPartition(topic.name, entry.partition_index)
                check_error(entry.error_code, f"offsets of {partition}")
                answers[partition] = OffsetAndTimestamp(entry.offset, entry.timestamp)
        for partition in questions:
            if leaders[partition] == leader and partition not in answers:
                raise ProtocolError(f"the answer of {broker.address} lacks {partition}")
    return answers


def delete_records(
    cluster: Cluster,
    before: Mapping[TopicPartition, int],
    leaders: Mapping[TopicPartition, int],
) -> dict[TopicPartition, int]:
    """Delete the records below an offset; return each partition's new first offset.

    Args:
        cluster: the brokers.
        before: the offset, by partition; -1 deletes all records there are.
        leaders: the id of the broker to ask, by partition.
    """
    by_leader: dict[int, dict[str, list[DeleteRecordsPartition]]] = {}
    for partition, offset in before.items():
        topics = by_leader.setdefault(leaders[partition], {})
        topics.setdefault(partition.topic, []).append(
            DeleteRecordsPartition(partition_index=partition.partition, offset=offset)
        )
    found = {}
    for leader, topics in by_leader.items():
        request = DeleteRecordsRequest(
            topics=[
                DeleteRecordsTopic(name=name, partitions=partitions)
                for name, partitions in topics.items()
            ],
            timeout_ms=int(cluster.timeout_s * 1000),
        )
        response = cluster.broker(leader).request(request, DeleteRecordsResponse)
        for topic in response.topics:
            for entry in topic.partitions:
                partition = TopicPartition(topic.name, entry.partition_index)
                check_error(entry.error_code, f"records of {partition}")
                found[partition] = entry.low_watermark
    return found

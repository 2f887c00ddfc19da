"""Find truncated logs: ask new leaders whether they have the records that were read.

Source: KIP-320; Kafka's OffsetsForLeaderEpochUtils and
SubscriptionState.maybeCompleteValidation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from mpbroker.client.cluster import Broker, Cluster, TopicPartition
from mpbroker.client.consumer.fetcher import LogTruncationError
from mpbroker.client.consumer.position_epochs import PositionEpochs
from mpbroker.client.errors import (
    BrokerUnavailableError,
    UnsupportedVersionError,
    error_code_of,
)
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.offset_for_leader_epoch import (
    EpochEndOffset,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochResponse,
    OffsetForLeaderPartition,
    OffsetForLeaderTopic,
)

# Older versions of OffsetForLeaderEpoch are for brokers; consumers may not send them.
_FOR_CONSUMERS_SINCE: Final = 3
_CONSUMER: Final = -1


class Doubts(NamedTuple):
    """The partitions whose leader did not confirm that it has the records read.

    Attributes:
        lost: an error for each partition whose leader lacks records that were read.
        open: partitions whose leader has not answered yet; do not read them until it
            has.
    """

    lost: list[LogTruncationError]
    open: list[TopicPartition]


def find_truncations(
    cluster: Cluster,
    epochs: PositionEpochs,
    leaders: Mapping[TopicPartition, int],
    positions: Mapping[TopicPartition, int],
) -> Doubts:
    """Ask new leaders whether they have the records before each position.

    A leader that is too old for the request, or refuses it for good, is taken to have
    them.

    Args:
        cluster: the brokers.
        epochs: the epochs of the leaders and of the records read; it stores which
            leader has confirmed these records.
        leaders: the leader's node id, by partition.
        positions: the offset to be read next, by partition.

    Raises:
        BrokerUnavailableError: no leader of any partition can be asked now.
    """
    by_leader: dict[int, list[TopicPartition]] = {}
    for partition, leader in leaders.items():
        if epochs.is_in_doubt(partition, positions[partition]):
            by_leader.setdefault(leader, []).append(partition)
    found: list[LogTruncationError] = []
    waiting: list[TopicPartition] = []
    failure: BrokerUnavailableError | None = None
    for leader, partitions in by_leader.items():
        try:
            if not cluster.is_reachable(leader):
                raise BrokerUnavailableError(f"broker {leader} cannot be reached")
            answers = _ask(cluster.broker(leader), epochs, positions, partitions)
        except BrokerUnavailableError as error:
            failure = error
            waiting += partitions
            continue
        for partition, end in answers:
            position = positions[partition]
            code = error_code_of(end.error_code)
            if code:
                if code == ErrorCode.UNKNOWN_LEADER_EPOCH:
                    epochs.refuse(partition)
                if code.retriable:
                    waiting.append(partition)
            elif end.end_offset < 0 or end.leader_epoch < 0:
                found.append(LogTruncationError(partition, position))
            elif end.end_offset < position:
                found.append(
                    LogTruncationError(
                        partition, position, end.end_offset, end.leader_epoch
                    )
                )
            else:
                epochs.confirm(partition)
    if failure is not None and len(waiting) == len(leaders):
        raise failure
    return Doubts(found, waiting)


def _ask(
    broker: Broker,
    epochs: PositionEpochs,
    positions: Mapping[TopicPartition, int],
    partitions: list[TopicPartition],
) -> list[tuple[TopicPartition, EpochEndOffset]]:
    topics: dict[str, list[OffsetForLeaderPartition]] = {}
    for partition in partitions:
        topics.setdefault(partition.topic, []).append(
            OffsetForLeaderPartition(
                partition=partition.partition,
                current_leader_epoch=epochs.leader_epoch(partition),
                leader_epoch=epochs.before(partition, positions[partition]),
            )
        )
    request = OffsetForLeaderEpochRequest(
        replica_id=_CONSUMER,
        topics=[
            OffsetForLeaderTopic(topic=name, partitions=asked)
            for name, asked in topics.items()
        ],
    )
    try:
        if broker.version_for(OffsetForLeaderEpochRequest) < _FOR_CONSUMERS_SINCE:
            return []
    except UnsupportedVersionError:
        return []
    response = broker.request(request, OffsetForLeaderEpochResponse)
    return [
        (TopicPartition(topic.topic, entry.partition), entry)
        for topic in response.topics
        for entry in topic.partitions
        if TopicPartition(topic.topic, entry.partition) in partitions
    ]

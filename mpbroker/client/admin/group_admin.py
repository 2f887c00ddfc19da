"""List, describe and delete the groups of a `Cluster`, and move their offsets.

Every function raises ApiError, with the broker's words, if a broker refuses.

Source: Kafka protocol guide; KIP-848 for groups of the consumer protocol.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from mpbroker.client.assignor import decode_assignment
from mpbroker.client.cluster import Broker, Cluster, TopicPartition
from mpbroker.client.errors import (
    UnsupportedVersionError,
    check_error,
    error_code_of,
)
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError, ProtocolError
from mpbroker.protocol.messages.consumer_group_describe import (
    ConsumerGroupDescribeRequest,
    ConsumerGroupDescribeResponse,
    Member,
)
from mpbroker.protocol.messages.delete_groups import (
    DeleteGroupsRequest,
    DeleteGroupsResponse,
)
from mpbroker.protocol.messages.describe_groups import (
    DescribedGroupMember,
    DescribeGroupsRequest,
    DescribeGroupsResponse,
)
from mpbroker.protocol.messages.find_coordinator import (
    FindCoordinatorRequest,
    FindCoordinatorResponse,
)
from mpbroker.protocol.messages.list_groups import (
    ListedGroup,
    ListGroupsRequest,
    ListGroupsResponse,
)
from mpbroker.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetCommitResponse,
)
from mpbroker.protocol.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchResponse,
)

_RETRY_INTERVAL_S: Final = 0.1  # Kafka's retry.backoff.ms
# Later versions ask for several keys or groups, or name topics by id.
_ONE_COORDINATOR_MAX_VERSION: Final = 3  # of FindCoordinator
_ONE_GROUP_MAX_VERSION: Final = 7  # of OffsetFetch
_NAMED_TOPICS_MAX_VERSION: Final = 9  # of OffsetCommit
_CLASSIC_MEMBER: Final = 0
_NOT_YET: Final = frozenset(
    {ErrorCode.COORDINATOR_NOT_AVAILABLE, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS}
)


class GroupMemberDescription(NamedTuple):
    """A member of a group, and the partitions that it reads.

    Attributes:
        instance_id: group.instance.id of a static member; None for others.
        protocol: classic or consumer.
        epoch: the member epoch of the consumer protocol; None in a classic group.
    """

    member_id: str
    instance_id: str | None
    client_id: str
    host: str
    protocol: str
    epoch: int | None
    partitions: list[TopicPartition]


class GroupDescription(NamedTuple):
    """A group and its members.

    Attributes:
        type: classic or consumer.
        state: such as Stable; Empty for a group that has only committed offsets.
        epoch: the group epoch of the consumer protocol; None for a classic group.
    """

    group_id: str
    type: str
    state: str
    assignor: str
    epoch: int | None
    members: list[GroupMemberDescription]


def list_groups(
    cluster: Cluster, states: Iterable[str] = (), types: Iterable[str] = ()
) -> list[ListedGroup]:
    """Return the groups of all brokers, sorted by id.

    Args:
        cluster: the brokers.
        states: return only groups in one of these states, in upper or lower case; none
            means all.
        types: return only groups of these types, classic or consumer; none means both.
    """
    request = ListGroupsRequest(states_filter=list(states), types_filter=list(types))
    found: list[ListedGroup] = []
    for node in cluster.metadata([]).brokers:
        broker = cluster.broker(node.node_id)
        response = broker.request(request, ListGroupsResponse)
        check_error(response.error_code, f"groups of broker {node.node_id}")
        found.extend(response.groups)
    return sorted(found, key=lambda group: group.group_id)


def describe_group(cluster: Cluster, group_id: str) -> GroupDescription:
    """Return a group and its members, whichever protocol the group uses.

    Raises:
        ApiError: GROUP_ID_NOT_FOUND, or another refusal.
    """
    broker = _coordinator(cluster, group_id)
    try:
        return _describe_consumer(broker, group_id)
    except UnsupportedVersionError:
        pass
    except ApiError as error:
        if error.error_code is not ErrorCode.GROUP_ID_NOT_FOUND:
            raise
    return _describe_classic(broker, group_id)


def _describe_consumer(broker: Broker, group_id: str) -> GroupDescription:
    request = ConsumerGroupDescribeRequest(group_ids=[group_id])
    (group,) = broker.request(request, ConsumerGroupDescribeResponse).groups
    check_error(group.error_code, f"group {group_id!r}", group.error_message)
    return GroupDescription(
        group_id,
        "consumer",
        group.group_state,
        group.assignor_name,
        group.group_epoch,
        [_consumer_member(member) for member in group.members],
    )


def _consumer_member(member: Member) -> GroupMemberDescription:
    is_classic = member.member_type == _CLASSIC_MEMBER
    return GroupMemberDescription(
        member.member_id,
        member.instance_id,
        member.client_id,
        member.client_host,
        "classic" if is_classic else "consumer",
        member.member_epoch,
        sorted(
            TopicPartition(row.topic_name, number)
            for row in member.assignment.topic_partitions
            for number in row.partitions
        ),
    )


def _describe_classic(broker: Broker, group_id: str) -> GroupDescription:
    request = DescribeGroupsRequest(groups=[group_id])
    (group,) = broker.request(request, DescribeGroupsResponse).groups
    check_error(group.error_code, f"group {group_id!r}", group.error_message)
    if group.group_state == "Dead":
        check_error(ErrorCode.GROUP_ID_NOT_FOUND, f"group {group_id!r}")
    return GroupDescription(
        group_id,
        "classic",
        group.group_state,
        group.protocol_data,
        None,
        [_classic_member(member) for member in group.members],
    )


def _classic_member(member: DescribedGroupMember) -> GroupMemberDescription:
    try:
        partitions = sorted(decode_assignment(member.member_assignment))
    except ProtocolError:
        partitions = []  # not a consumer group (Connect, say): its members decide
    return GroupMemberDescription(
        member.member_id,
        member.group_instance_id,
        member.client_id,
        member.client_host,
        "classic",
        None,
        partitions,
    )


def committed_offsets(cluster: Cluster, group_id: str) -> dict[TopicPartition, int]:
    """Return all offsets that a group has committed."""
    request = OffsetFetchRequest(group_id=group_id, topics=None)
    response = _coordinator(cluster, group_id).request(
        request, OffsetFetchResponse, max_version=_ONE_GROUP_MAX_VERSION
    )
    check_error(response.error_code, f"offsets of group {group_id!r}")
    found = {}
    for topic in response.topics:
        for part in topic.partitions:
            where = TopicPartition(topic.name, part.partition_index)
            check_error(part.error_code, f"offset of group {group_id!r} in {where}")
            if part.committed_offset >= 0:
                found[where] = part.committed_offset
    return found


def alter_offsets(
    cluster: Cluster, group_id: str, offsets: Mapping[TopicPartition, int]
) -> None:
    """Commit offsets for a group that has no members.

    Raises:
        ApiError: UNKNOWN_MEMBER_ID, if the group has members.
    """
    topics: dict[str, list[OffsetCommitRequestPartition]] = {}
    for where, offset in offsets.items():
        topics.setdefault(where.topic, []).append(
            OffsetCommitRequestPartition(
                partition_index=where.partition,
                committed_offset=offset,
                committed_metadata="",
            )
        )
    request = OffsetCommitRequest(
        group_id=group_id,
        topics=[
            OffsetCommitRequestTopic(name=name, partitions=parts)
            for name, parts in topics.items()
        ],
    )
    response = _coordinator(cluster, group_id).request(
        request, OffsetCommitResponse, max_version=_NAMED_TOPICS_MAX_VERSION
    )
    for topic in response.topics:
        for part in topic.partitions:
            where = TopicPartition(topic.name, part.partition_index)
            check_error(part.error_code, f"offset of group {group_id!r} in {where}")


def delete_group(cluster: Cluster, group_id: str) -> None:
    """Delete a group that has no members, and its committed offsets.

    Raises:
        ApiError: NON_EMPTY_GROUP, GROUP_ID_NOT_FOUND, or another refusal.
    """
    request = DeleteGroupsRequest(groups_names=[group_id])
    broker = _coordinator(cluster, group_id)
    (result,) = broker.request(request, DeleteGroupsResponse).results
    check_error(result.error_code, f"group {group_id!r}")


def _coordinator(cluster: Cluster, group_id: str) -> Broker:
    """Return the broker that coordinates a group; wait while no broker does.

    Raises:
        ApiError: COORDINATOR_NOT_AVAILABLE after the cluster's timeout, or another
            refusal.
    """
    deadline = time.monotonic() + cluster.timeout_s
    request = FindCoordinatorRequest(key=group_id)
    while True:
        found = cluster.request(
            request, FindCoordinatorResponse, max_version=_ONE_COORDINATOR_MAX_VERSION
        )
        code = error_code_of(found.error_code)
        if code not in _NOT_YET or time.monotonic() > deadline:
            break
        time.sleep(_RETRY_INTERVAL_S)
    what = f"coordinator of group {group_id!r}"
    check_error(found.error_code, what, found.error_message)
    cluster.metadata([])
    return cluster.broker(found.node_id)


def partitions_of(cluster: Cluster, topics: Sequence[str]) -> dict[TopicPartition, int]:
    """Return the leader's id for every partition of some topics.

    Raises:
        ApiError: UNKNOWN_TOPIC_OR_PARTITION, if a topic does not exist.
    """
    return {
        TopicPartition(name, partition.partition_index): partition.leader_id
        for name in topics
        for partition in cluster.topic(name).partitions
    }

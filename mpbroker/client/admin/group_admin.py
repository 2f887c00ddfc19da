"""List, describe and delete the groups of a `Cluster`, and move their offsets.

Every function raises ApiError, with the broker's words, if a broker refuses.

Source: Kafka protocol guide; KIP-848 for groups of the consumer protocol, KIP-932 for
share groups.
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
from mpbroker.protocol.messages.alter_share_group_offsets import (
    AlterShareGroupOffsetsRequest,
    AlterShareGroupOffsetsRequestPartition,
    AlterShareGroupOffsetsRequestTopic,
    AlterShareGroupOffsetsResponse,
)
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
from mpbroker.protocol.messages.describe_share_group_offsets import (
    DescribeShareGroupOffsetsRequest,
    DescribeShareGroupOffsetsRequestGroup,
    DescribeShareGroupOffsetsResponse,
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
from mpbroker.protocol.messages.offset_delete import (
    OffsetDeleteRequest,
    OffsetDeleteRequestPartition,
    OffsetDeleteRequestTopic,
    OffsetDeleteResponse,
)
from mpbroker.protocol.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchResponse,
)
from mpbroker.protocol.messages.share_group_describe import (
    ShareGroupDescribeRequest,
    ShareGroupDescribeResponse,
)
from mpbroker.protocol.messages.streams_group_describe import (
    StreamsGroupDescribeRequest,
    StreamsGroupDescribeResponse,
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
        instance_id: the group.instance.id of a static member; None for others.
        protocol: the member's protocol: classic, consumer or share.
        epoch: the member epoch; None in a classic group, which has no such epochs.
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
        type: classic, consumer, share or streams.
        state: the group's state, such as Stable; Empty for a group that has only
            committed offsets.
        epoch: the group epoch; None for a classic group, which has none.
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
        states: return only groups in one of these states, in upper or lower case; ()
            means all.
        types: return only groups of these types, classic, consumer, share or
            streams; () means all.
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
    """Describe a group of any type, with its members.

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
    for describe in (_describe_share, _describe_streams):
        try:
            return describe(broker, group_id)
        except UnsupportedVersionError:
            pass
        except ApiError as error:
            if error.error_code is not ErrorCode.GROUP_ID_NOT_FOUND:
                raise
    return _describe_classic(broker, group_id)


def _describe_streams(broker: Broker, group_id: str) -> GroupDescription:
    """Describe a streams group; a member's partitions are those of its active tasks."""
    request = StreamsGroupDescribeRequest(group_ids=[group_id])
    (group,) = broker.request(request, StreamsGroupDescribeResponse).groups
    check_error(group.error_code, f"group {group_id!r}", group.error_message)
    subtopologies = (group.topology.subtopologies if group.topology else None) or ()
    inputs = {
        each.subtopology_id: sorted(
            {
                *each.source_topics,
                *(topic.name for topic in each.repartition_source_topics),
            }
        )
        for each in subtopologies
    }
    members = [
        GroupMemberDescription(
            member.member_id,
            member.instance_id,
            member.client_id,
            member.client_host,
            "streams",
            member.member_epoch,
            sorted(
                TopicPartition(topic, number)
                for row in member.assignment.active_tasks
                for topic in inputs.get(row.subtopology_id, ())
                for number in row.partitions
            ),
        )
        for member in group.members
    ]
    return GroupDescription(
        group_id, "streams", group.group_state, "sticky", group.group_epoch, members
    )


def _describe_share(broker: Broker, group_id: str) -> GroupDescription:
    request = ShareGroupDescribeRequest(group_ids=[group_id])
    (group,) = broker.request(request, ShareGroupDescribeResponse).groups
    check_error(group.error_code, f"group {group_id!r}", group.error_message)
    members = [
        GroupMemberDescription(
            member.member_id,
            None,
            member.client_id,
            member.client_host,
            "share",
            member.member_epoch,
            sorted(
                TopicPartition(row.topic_name, number)
                for row in member.assignment.topic_partitions
                for number in row.partitions
            ),
        )
        for member in group.members
    ]
    return GroupDescription(
        group_id,
        "share",
        group.group_state,
        group.assignor_name,
        group.group_epoch,
        members,
    )


class ShareOffset(NamedTuple):
    """The start offset and the lag of a share group in a partition.

    Attributes:
        start_offset: the first offset that the group has yet to accept or reject; None:
            the group has read nothing of the partition.
        lag: how many records are still to be finished; None: the broker does not say.
    """

    start_offset: int | None
    lag: int | None


def share_offsets(cluster: Cluster, group_id: str) -> dict[TopicPartition, ShareOffset]:
    """Return the start offset and the lag of a share group, by partition.

    Raises:
        ApiError: GROUP_ID_NOT_FOUND, or another refusal.
    """
    asked = DescribeShareGroupOffsetsRequestGroup(group_id=group_id, topics=None)
    broker = _coordinator(cluster, group_id)
    (group,) = broker.request(
        DescribeShareGroupOffsetsRequest(groups=[asked]),
        DescribeShareGroupOffsetsResponse,
    ).groups
    check_error(group.error_code, f"group {group_id!r}", group.error_message)
    return {
        TopicPartition(topic.topic_name, row.partition_index): ShareOffset(
            row.start_offset if row.start_offset >= 0 else None,
            row.lag if row.lag >= 0 else None,
        )
        for topic in group.topics
        for row in topic.partitions
        if not row.error_code
    }


def alter_share_offsets(
    cluster: Cluster, group_id: str, offsets: Mapping[TopicPartition, int]
) -> None:
    """Set the start offsets of a share group that has no members.

    Raises:
        ApiError: NON_EMPTY_GROUP, if the group has members; or another refusal.
    """
    topics: dict[str, list[AlterShareGroupOffsetsRequestPartition]] = {}
    for where, offset in offsets.items():
        topics.setdefault(where.topic, []).append(
            AlterShareGroupOffsetsRequestPartition(
                partition_index=where.partition, start_offset=offset
            )
        )
    request = AlterShareGroupOffsetsRequest(
        group_id=group_id,
        topics=[
            AlterShareGroupOffsetsRequestTopic(topic_name=name, partitions=parts)
            for name, parts in topics.items()
        ],
    )
    response = _coordinator(cluster, group_id).request(
        request, AlterShareGroupOffsetsResponse
    )
    check_error(response.error_code, f"group {group_id!r}", response.error_message)
    for topic in response.responses:
        for part in topic.partitions:
            where = TopicPartition(topic.topic_name, part.partition_index)
            what = f"start offset of group {group_id!r} in {where}"
            check_error(part.error_code, what, part.error_message)


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


class Commit(NamedTuple):
    """A committed offset, and the metadata string that is stored with it."""

    offset: int
    metadata: str = ""


def committed_offsets(cluster: Cluster, group_id: str) -> dict[TopicPartition, int]:
    """Return all offsets that a group has committed, by partition."""
    return {where: each.offset for where, each in commits(cluster, group_id).items()}


def commits(cluster: Cluster, group_id: str) -> dict[TopicPartition, Commit]:
    """Return a group's committed offsets with their metadata, by partition."""
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
                found[where] = Commit(part.committed_offset, part.metadata or "")
    return found


def alter_offsets(
    cluster: Cluster, group_id: str, offsets: Mapping[TopicPartition, int]
) -> None:
    """Commit offsets for a group that has no members.

    Raises:
        ApiError: UNKNOWN_MEMBER_ID, if the group has members.
    """
    commit(cluster, group_id, {where: Commit(at) for where, at in offsets.items()})


def commit(
    cluster: Cluster, group_id: str, wanted: Mapping[TopicPartition, Commit]
) -> None:
    """Commit offsets with their metadata for a group that has no members.

    Raises:
        ApiError: UNKNOWN_MEMBER_ID, if the group has members.
    """
    topics: dict[str, list[OffsetCommitRequestPartition]] = {}
    for where, each in wanted.items():
        topics.setdefault(where.topic, []).append(
            OffsetCommitRequestPartition(
                partition_index=where.partition,
                committed_offset=each.offset,
                committed_metadata=each.metadata,
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


def delete_offsets(
    cluster: Cluster, group_id: str, partitions: Iterable[TopicPartition]
) -> None:
    """Delete a group's committed offsets of some partitions.

    Raises:
        ApiError: GROUP_SUBSCRIBED_TO_TOPIC, GROUP_ID_NOT_FOUND, or another refusal.
    """
    topics: dict[str, list[OffsetDeleteRequestPartition]] = {}
    for topic, partition in partitions:
        topics.setdefault(topic, []).append(
            OffsetDeleteRequestPartition(partition_index=partition)
        )
    request = OffsetDeleteRequest(
        group_id=group_id,
        topics=[
            OffsetDeleteRequestTopic(name=name, partitions=indexes)
            for name, indexes in topics.items()
        ],
    )
    response = _coordinator(cluster, group_id).request(request, OffsetDeleteResponse)
    check_error(response.error_code, f"group {group_id!r}")
    for found in response.topics:
        for entry in found.partitions:
            where = TopicPartition(found.name, entry.partition_index)
            check_error(entry.error_code, f"offset of group {group_id!r} in {where}")


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
    """Return the broker that coordinates a group; wait while there is none.

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

"""Define the authorization rules of the APIs about consumer groups.

A rule takes the sender's access, the request and the version of the API. It removes the
parts of the request that are denied, and returns a function that adds their refusals to
the response (rulings.py). If all is denied, it may return the whole answer. apis.py
names the rule of each API.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final

from mpbroker.protocol.acl import AclOperation, ResourceType
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages import consumer_group_describe as consumer_messages
from mpbroker.protocol.messages import describe_groups as classic_messages
from mpbroker.protocol.messages import share_group_describe as share_messages
from mpbroker.protocol.messages import streams_group_describe as streams_messages
from mpbroker.protocol.messages.consumer_group_heartbeat import (
    ConsumerGroupHeartbeatRequest,
)
from mpbroker.protocol.messages.delete_groups import (
    DeletableGroupResult,
    DeleteGroupsRequest,
)
from mpbroker.protocol.messages.describe_share_group_offsets import (
    DescribeShareGroupOffsetsRequest,
    DescribeShareGroupOffsetsResponseGroup,
)
from mpbroker.protocol.messages.find_coordinator import (
    Coordinator,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
)
from mpbroker.protocol.messages.list_groups import ListGroupsRequest, ListGroupsResponse
from mpbroker.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetCommitResponsePartition,
    OffsetCommitResponseTopic,
)
from mpbroker.protocol.messages.offset_delete import (
    OffsetDeleteRequest,
    OffsetDeleteResponse,
    OffsetDeleteResponsePartition,
    OffsetDeleteResponseTopic,
)
from mpbroker.protocol.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchResponse,
    OffsetFetchResponseGroup,
    OffsetFetchResponsePartition,
    OffsetFetchResponsePartitions,
    OffsetFetchResponseTopic,
    OffsetFetchResponseTopics,
)
from mpbroker.protocol.messages.share_group_heartbeat import (
    ShareGroupHeartbeatRequest,
)
from mpbroker.protocol.messages.streams_group_heartbeat import (
    StreamsGroupHeartbeatRequest,
)
from mpbroker.protocol.messages.streams_group_heartbeat import (
    Subtopology as StreamsSubtopology,
)
from mpbroker.server.authorization.authorization import (
    GROUP_DENIED,
    TOPIC_DENIED,
    TRANSACTIONAL_ID_DENIED,
    Access,
)
from mpbroker.server.authorization.rulings import Amend, Ruling, append_to, take_denied

_O = AclOperation
_TOPIC_DENIED: Final = ErrorCode.TOPIC_AUTHORIZATION_FAILED
_GROUP_DENIED: Final = ErrorCode.GROUP_AUTHORIZATION_FAILED
_MEMBERS_TOPIC_DENIED: Final = (
    "The group has described topic(s) that the client is not authorized to describe."
)
_IDS_SINCE: Final = 10  # of OffsetCommit and OffsetFetch
_SEVERAL_COORDINATORS_SINCE: Final = 4
_SEVERAL_GROUPS_SINCE: Final = 8
_CODES_OF_OFFSET_FETCH_SINCE: Final = 2

_TRANSACTION_KEY: Final = 1
_SHARE_KEY: Final = 2


# -- members --------------------------------------------------------------------------


def read_group(access: Access, request: Any, version: int) -> None:
    """Require READ permission for the group, as most requests of its members do.

    Raises:
        ApiError: GROUP_AUTHORIZATION_FAILED.
    """
    access.require_group(_O.READ, request.group_id)


def consumer_group_heartbeat(
    access: Access,
    request: ConsumerGroupHeartbeatRequest | ShareGroupHeartbeatRequest,
    version: int,
) -> None:
    """Require READ for the group, and DESCRIBE for all topics subscribed to by name.

    Raises:
        ApiError: GROUP_AUTHORIZATION_FAILED if the group is denied,
            TOPIC_AUTHORIZATION_FAILED if a topic is denied.
    """
    access.require_group(_O.READ, request.group_id)
    names = dict.fromkeys(request.subscribed_topic_names or ())
    if not all(access.may_topic(_O.DESCRIBE, name) for name in names):
        raise ApiError(_TOPIC_DENIED, TOPIC_DENIED)


def streams_group_heartbeat(
    access: Access, request: StreamsGroupHeartbeatRequest, version: int
) -> None:
    """Require READ of the group, and DESCRIBE of all topics of the topology.

    Raises:
        ApiError: GROUP_AUTHORIZATION_FAILED if the group is denied,
            TOPIC_AUTHORIZATION_FAILED if a topic is denied.
    """
    access.require_group(_O.READ, request.group_id)
    if request.topology is None:
        return
    names = {
        name
        for each in request.topology.subtopologies
        for name in _topics_of_subtopology(each)
    }
    if not all(access.may_topic(_O.DESCRIBE, name) for name in names):
        raise ApiError(_TOPIC_DENIED, TOPIC_DENIED)


def _topics_of_subtopology(
    subtopology: StreamsSubtopology | streams_messages.Subtopology,
) -> list[str]:
    """Return the names of all topics that a subtopology reads or writes."""
    return [
        *subtopology.source_topics,
        *subtopology.repartition_sink_topics,
        *(topic.name for topic in subtopology.repartition_source_topics),
        *(topic.name for topic in subtopology.state_changelog_topics),
    ]


def find_coordinator(
    access: Access, request: FindCoordinatorRequest, version: int
) -> Ruling:
    """Require DESCRIBE permission for each group or transactional id.

    For the coordinators of share groups require CLUSTER_ACTION, which only brokers
    have.

    Raises:
        ApiError: CLUSTER_AUTHORIZATION_FAILED: the sender lacks CLUSTER_ACTION.
    """
    if request.key_type == _SHARE_KEY:
        access.require_cluster(_O.CLUSTER_ACTION)
        return None
    if request.key_type == _TRANSACTION_KEY:
        kind = ResourceType.TRANSACTIONAL_ID
        code = ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
        text = TRANSACTIONAL_ID_DENIED
    else:
        kind, code, text = ResourceType.GROUP, _GROUP_DENIED, GROUP_DENIED
    if version < _SEVERAL_COORDINATORS_SINCE:
        if access.may(_O.DESCRIBE, kind, request.key):
            return None
        return FindCoordinatorResponse(
            error_code=code, error_message=text, node_id=-1, port=-1
        )
    denied = take_denied(
        request, "coordinator_keys", lambda key: access.may(_O.DESCRIBE, kind, key)
    )
    return append_to(
        "coordinators",
        [
            Coordinator(
                key=key, node_id=-1, port=-1, error_code=code, error_message=text
            )
            for key in denied
        ],
    )


# -- offsets --------------------------------------------------------------------------


def _may_topic_of(
    access: Access, operation: AclOperation, row: Any, version: int, *, log: bool = True
) -> bool:
    """Return whether the sender may do an operation on a topic of a request.

    Return True for a topic id that does not exist: the coordinator then answers that
    there is no such topic.

    Args:
        access: the sender's access.
        operation: the operation.
        row: a topic of OffsetCommit or OffsetFetch.
        version: the version of the API; from 10 on rows have topic ids.
        log: whether to log a denial.
    """
    if version < _IDS_SINCE:
        return access.may_topic(operation, row.name, log=log)
    topic = access.topics.topic_by_id(row.topic_id)
    return topic is None or access.may_topic(operation, topic.name, log=log)


def offset_commit(access: Access, request: OffsetCommitRequest, version: int) -> Ruling:
    """Require READ permission for the group, and READ for each topic."""
    if not access.may_group(_O.READ, request.group_id):
        return OffsetCommitResponse(
            topics=[_refused_commit(row, _GROUP_DENIED) for row in request.topics]
        )
    denied = take_denied(
        request, "topics", lambda row: _may_topic_of(access, _O.READ, row, version)
    )
    refusals = [_refused_commit(row, _TOPIC_DENIED) for row in denied]
    if refusals and not request.topics:
        return OffsetCommitResponse(topics=refusals)
    return append_to("topics", refusals)


def _refused_commit(row: Any, code: ErrorCode) -> OffsetCommitResponseTopic:
    return OffsetCommitResponseTopic(
        name=row.name,
        topic_id=row.topic_id,
        partitions=[
            OffsetCommitResponsePartition(
                partition_index=each.partition_index, error_code=code
            )
            for each in row.partitions
        ],
    )


def offset_fetch(access: Access, request: OffsetFetchRequest, version: int) -> Ruling:
    """Require DESCRIBE permission for each group, and DESCRIBE for each topic.

    If a request wants all topics of a group, the denied topics are left out of the
    response without a refusal.
    """
    if version < _SEVERAL_GROUPS_SINCE:
        return _offset_fetch_of_one(access, request, version)
    denied = take_denied(
        request,
        "groups",
        lambda group: access.may_group(_O.DESCRIBE, group.group_id),
    )
    all_of = {group.group_id for group in request.groups if group.topics is None}
    refusals: dict[str, list[OffsetFetchResponseTopics]] = {}
    for group in request.groups:
        if group.topics is None:
            continue
        others = take_denied(
            group,
            "topics",
            lambda row: _may_topic_of(access, _O.DESCRIBE, row, version),
        )
        if others:
            refusals.setdefault(group.group_id, []).extend(map(_refused_topic, others))
    if not (denied or refusals or all_of):
        return None

    def amend(response: OffsetFetchResponse) -> None:
        for group in response.groups:
            if group.group_id in all_of:
                group.topics = [
                    row
                    for row in group.topics
                    if _may_topic_of(access, _O.DESCRIBE, row, version, log=False)
                ]
            if not group.error_code:
                group.topics += refusals.pop(group.group_id, [])
        response.groups += [
            OffsetFetchResponseGroup(group_id=group.group_id, error_code=_GROUP_DENIED)
            for group in denied
        ]

    return amend


def _refused_topic(row: Any) -> OffsetFetchResponseTopics:
    return OffsetFetchResponseTopics(
        name=row.name,
        topic_id=row.topic_id,
        partitions=[
            OffsetFetchResponsePartitions(
                partition_index=index,
                committed_offset=-1,
                metadata="",
                error_code=_TOPIC_DENIED,
            )
            for index in row.partition_indexes
        ],
    )


def _offset_fetch_of_one(
    access: Access, request: OffsetFetchRequest, version: int
) -> Ruling:
    """Apply the rule of OffsetFetch to versions 0 to 7, which have one group."""
    if not access.may_group(_O.DESCRIBE, request.group_id):
        has_code = version >= _CODES_OF_OFFSET_FETCH_SINCE
        rows = [] if has_code else request.topics or []
        return OffsetFetchResponse(
            error_code=_GROUP_DENIED,
            topics=[_refused_topic_of_one(row, _GROUP_DENIED) for row in rows],
        )
    if request.topics is None:

        def leave_out(response: OffsetFetchResponse) -> None:
            response.topics = [
                row
                for row in response.topics
                if access.may_topic(_O.DESCRIBE, row.name, log=False)
            ]

        return leave_out
    denied = take_denied(
        request, "topics", lambda row: access.may_topic(_O.DESCRIBE, row.name)
    )
    if not denied:
        return None

    def amend(response: OffsetFetchResponse) -> None:
        if not response.error_code:
            response.topics += [
                _refused_topic_of_one(row, _TOPIC_DENIED) for row in denied
            ]

    return amend


def _refused_topic_of_one(row: Any, code: ErrorCode) -> OffsetFetchResponseTopic:
    return OffsetFetchResponseTopic(
        name=row.name,
        partitions=[
            OffsetFetchResponsePartition(
                partition_index=index, committed_offset=-1, metadata="", error_code=code
            )
            for index in row.partition_indexes
        ],
    )


def offset_delete(
    access: Access, request: OffsetDeleteRequest, version: int
) -> Amend | None:
    """Require DELETE permission for the group, and READ for each topic.

    Raises:
        ApiError: GROUP_AUTHORIZATION_FAILED: the group is denied.
    """
    access.require_group(_O.DELETE, request.group_id)
    denied = take_denied(
        request, "topics", lambda topic: access.may_topic(_O.READ, topic.name)
    )
    if not denied:
        return None

    def amend(response: OffsetDeleteResponse) -> None:
        if response.error_code:
            return
        response.topics += [
            OffsetDeleteResponseTopic(
                name=topic.name,
                partitions=[
                    OffsetDeleteResponsePartition(
                        partition_index=each.partition_index, error_code=_TOPIC_DENIED
                    )
                    for each in topic.partitions
                ],
            )
            for topic in denied
        ]

    return amend


# -- requests of administrators -------------------------------------------------------


def list_groups(
    access: Access, request: ListGroupsRequest, version: int
) -> Amend | None:
    """Require DESCRIBE for the cluster, or DESCRIBE for each group that is listed.

    Groups that are denied are left out of the response.
    """
    if access.may_cluster(_O.DESCRIBE, log=False):
        return None

    def amend(response: ListGroupsResponse) -> None:
        response.groups = [
            group
            for group in response.groups
            if access.may_group(_O.DESCRIBE, group.group_id, log=False)
        ]

    return amend


def describe_groups(
    access: Access, request: classic_messages.DescribeGroupsRequest, version: int
) -> Amend | None:
    """Require DESCRIBE permission for each group.

    Show the sender's operations on the groups if the request wants them.
    """
    denied = take_denied(
        request, "groups", lambda group_id: access.may_group(_O.DESCRIBE, group_id)
    )
    shows_operations = version >= 3 and request.include_authorized_operations
    if not denied and not shows_operations:
        return None

    def amend(response: classic_messages.DescribeGroupsResponse) -> None:
        if shows_operations:
            _show_operations(access, response.groups)
        response.groups += [
            classic_messages.DescribedGroup(group_id=group_id, error_code=_GROUP_DENIED)
            for group_id in denied
        ]

    return amend


def consumer_group_describe(
    access: Access,
    request: consumer_messages.ConsumerGroupDescribeRequest,
    version: int,
) -> Amend:
    """Require DESCRIBE permission for each group and all topics of its members.

    Topics of a member are those assigned to it and those it subscribes to by name. A
    group with a denied topic is replaced by a refusal.
    """
    return _describe(
        access,
        request,
        consumer_messages.DescribedGroup,
        _topics_of,
        _MEMBERS_TOPIC_DENIED,
    )


def share_group_describe(
    access: Access, request: share_messages.ShareGroupDescribeRequest, version: int
) -> Amend:
    """Require DESCRIBE of each group and of all topics assigned to its members.

    A group with a denied topic is replaced by a refusal.
    """
    return _describe(
        access,
        request,
        share_messages.DescribedGroup,
        _topics_of_share_group,
        _MEMBERS_TOPIC_DENIED,
    )


def streams_group_describe(
    access: Access, request: streams_messages.StreamsGroupDescribeRequest, version: int
) -> Amend:
    """Require DESCRIBE of each group and of all topics of its topology.

    A group with a denied topic is replaced by a refusal.
    """
    return _describe(
        access,
        request,
        streams_messages.DescribedGroup,
        _topics_of_streams_group,
        "The described group uses topics that the client is not authorized to"
        " describe.",
    )


def describe_share_group_offsets(
    access: Access, request: DescribeShareGroupOffsetsRequest, version: int
) -> Amend | None:
    """Require DESCRIBE permission for each group.

    The coordinator requires DESCRIBE of each topic.
    """
    denied = take_denied(
        request, "groups", lambda row: access.may_group(_O.DESCRIBE, row.group_id)
    )
    return append_to(
        "groups",
        [
            DescribeShareGroupOffsetsResponseGroup(
                group_id=row.group_id,
                topics=[],
                error_code=_GROUP_DENIED,
                error_message=GROUP_DENIED,
            )
            for row in denied
        ],
    )


def delete_share_group_offsets(access: Access, request: Any, version: int) -> None:
    """Require DELETE for the group. The coordinator requires READ for the topics.

    Raises:
        ApiError: GROUP_AUTHORIZATION_FAILED.
    """
    access.require_group(_O.DELETE, request.group_id)


def _topics_of(group: consumer_messages.DescribedGroup) -> set[str]:
    return {
        row.topic_name
        for member in group.members
        for assignment in (member.assignment, member.target_assignment)
        for row in assignment.topic_partitions
    } | {name for member in group.members for name in member.subscribed_topic_names}


def _describe(
    access: Access,
    request: Any,
    described_group: type[Any],
    topics_of: Callable[[Any], Collection[str]],
    topic_denied: str,
) -> Amend:
    """Require DESCRIBE of each group and of all its topics.

    A group that is denied, or has a denied topic, is replaced by a refusal.

    Args:
        access: what the sender may do.
        request: the request; denied groups are taken out of it.
        described_group: the class of a group in the response.
        topics_of: gives the names of a described group's topics.
        topic_denied: the error message for a group with a denied topic.
    """
    denied = take_denied(
        request, "group_ids", lambda group_id: access.may_group(_O.DESCRIBE, group_id)
    )

    def amend(response: Any) -> None:
        if request.include_authorized_operations:
            _show_operations(access, response.groups)
        for index, group in enumerate(response.groups):
            if not all(
                access.may_topic(_O.DESCRIBE, name) for name in topics_of(group)
            ):
                response.groups[index] = described_group(
                    group_id=group.group_id,
                    error_code=_TOPIC_DENIED,
                    error_message=topic_denied,
                )
        response.groups += [
            described_group(
                group_id=group_id, error_code=_GROUP_DENIED, error_message=GROUP_DENIED
            )
            for group_id in denied
        ]

    return amend


def _topics_of_share_group(group: share_messages.DescribedGroup) -> set[str]:
    return {
        row.topic_name
        for member in group.members
        for row in member.assignment.topic_partitions
    }


def _topics_of_streams_group(group: streams_messages.DescribedGroup) -> set[str]:
    subtopologies = (group.topology.subtopologies if group.topology else None) or ()
    return {name for each in subtopologies for name in _topics_of_subtopology(each)}


def _show_operations(access: Access, described: list[Any]) -> None:
    """Store in each group of a response which operations the sender may do on it."""
    for group in described:
        if not group.error_code:
            group.authorized_operations = access.operations(
                ResourceType.GROUP, group.group_id
            )


def delete_groups(
    access: Access, request: DeleteGroupsRequest, version: int
) -> Amend | None:
    """Require DELETE permission for each group."""
    denied = take_denied(
        request, "groups_names", lambda group_id: access.may_group(_O.DELETE, group_id)
    )
    return append_to(
        "results",
        [
            DeletableGroupResult(group_id=group_id, error_code=_GROUP_DENIED)
            for group_id in denied
        ],
    )

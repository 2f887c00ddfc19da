"""The rules of APIs about consumer groups: see apis.py."""

from __future__ import annotations

from typing import Any

from mpbroker.protocol.acl import AclOperation, ResourceType
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages import consumer_group_describe as consumer_messages
from mpbroker.protocol.messages import delete_groups as delete_groups_messages
from mpbroker.protocol.messages import describe_groups as describe_groups_messages
from mpbroker.protocol.messages import find_coordinator as find_coordinator_messages
from mpbroker.protocol.messages import offset_commit as offset_commit_messages
from mpbroker.protocol.messages import offset_delete as offset_delete_messages
from mpbroker.protocol.messages import offset_fetch as offset_fetch_messages
from mpbroker.server.authorization.authorization import (
    GROUP_DENIED,
    TOPIC_DENIED,
    TRANSACTIONAL_ID_DENIED,
    Access,
    Verdict,
    refused,
)
from mpbroker.server.authorization.topic_rules import split

_O = AclOperation
_TOPIC_DENIED = ErrorCode.TOPIC_AUTHORIZATION_FAILED
_GROUP_DENIED = ErrorCode.GROUP_AUTHORIZATION_FAILED
_IDS_SINCE = 10  # of OffsetCommit and OffsetFetch
_SEVERAL_COORDINATORS_SINCE = 4
_SEVERAL_GROUPS_SINCE = 8

_TRANSACTION_KEY = 1
_SHARE_KEY = 2


def may_group(
    access: Access, operation: AclOperation, group_id: str, *, log: bool = True
) -> bool:
    return access.may(operation, ResourceType.GROUP, group_id, log=log)


def read_group(access: Access, request: Any, version: int) -> Verdict | None:
    """For members: the whole answer is an error.

    Raises:
        ApiError: GROUP_AUTHORIZATION_FAILED.
    """
    if not may_group(access, _O.READ, request.group_id):
        raise ApiError(_GROUP_DENIED, GROUP_DENIED)
    return None


def consumer_group_heartbeat(
    access: Access, request: Any, version: int
) -> Verdict | None:
    """READ of the group, and DESCRIBE of all topics that are subscribed to by name."""
    read_group(access, request, version)
    names = dict.fromkeys(request.subscribed_topic_names or ())
    if not all(access.may_topic(_O.DESCRIBE, name) for name in names):
        raise ApiError(_TOPIC_DENIED, TOPIC_DENIED)
    return None


def find_coordinator(access: Access, request: Any, version: int) -> Verdict | None:
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
        return refused(
            find_coordinator_messages.FindCoordinatorResponse(
                error_code=code, error_message=text, node_id=-1, port=-1
            )
        )
    request.coordinator_keys, denied = split(
        request.coordinator_keys, lambda key: access.may(_O.DESCRIBE, kind, key)
    )
    if not denied:
        return None

    def amend(response: Any) -> None:
        response.coordinators += [
            find_coordinator_messages.Coordinator(
                key=key, node_id=-1, port=-1, error_code=code, error_message=text
            )
            for key in denied
        ]

    return Verdict(request, amend)


# -- offsets ------------------------------------------------------------------------


def _topic_name(access: Access, row: Any, version: int) -> str | None:
    """The name of a row's topic; None: of no topic that there is."""
    if version < _IDS_SINCE:
        name: str = row.name
        return name
    topic = access.topics.topic_by_id(row.topic_id)
    return None if topic is None else topic.name


def _may_topic_of(
    access: Access, operation: AclOperation, row: Any, version: int, *, log: bool = True
) -> bool:
    name = _topic_name(access, row, version)
    return name is None or access.may_topic(operation, name, log=log)


def _refused_commit(row: Any, code: ErrorCode) -> Any:
    return offset_commit_messages.OffsetCommitResponseTopic(
        name=row.name,
        topic_id=row.topic_id,
        partitions=[
            offset_commit_messages.OffsetCommitResponsePartition(
                partition_index=each.partition_index, error_code=code
            )
            for each in row.partitions
        ],
    )


def offset_commit(access: Access, request: Any, version: int) -> Verdict | None:
    if not may_group(access, _O.READ, request.group_id):
        return refused(
            offset_commit_messages.OffsetCommitResponse(
                topics=[_refused_commit(row, _GROUP_DENIED) for row in request.topics]
            )
        )
    request.topics, denied = split(
        request.topics, lambda row: _may_topic_of(access, _O.READ, row, version)
    )
    if not denied:
        return None
    refusals = [_refused_commit(row, _TOPIC_DENIED) for row in denied]
    if not request.topics:
        return refused(offset_commit_messages.OffsetCommitResponse(topics=refusals))

    def amend(response: Any) -> None:
        response.topics += refusals

    return Verdict(request, amend)


def offset_fetch(access: Access, request: Any, version: int) -> Verdict | None:
    if version < _SEVERAL_GROUPS_SINCE:
        return _offset_fetch_of_one(access, request, version)
    response_group = offset_fetch_messages.OffsetFetchResponseGroup
    request.groups, denied = split(
        request.groups,
        lambda group: may_group(access, _O.DESCRIBE, group.group_id),
    )
    refusals: dict[str, list[Any]] = {}
    hidden = False
    for group in request.groups:
        if group.topics is None:
            hidden = True  # which topics there are is seen in the answer
            continue
        group.topics, others = split(
            group.topics,
            lambda row: _may_topic_of(access, _O.DESCRIBE, row, version),
        )
        if others:
            refusals.setdefault(group.group_id, []).extend(
                _refused_offsets(
                    offset_fetch_messages.OffsetFetchResponseTopics(
                        name=row.name, topic_id=row.topic_id
                    ),
                    offset_fetch_messages.OffsetFetchResponsePartitions,
                    row,
                    _TOPIC_DENIED,
                )
                for row in others
            )
    if not (denied or refusals or hidden):
        return None
    all_of = {group.group_id for group in request.groups if group.topics is None}

    def amend(response: Any) -> None:
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
            response_group(group_id=group.group_id, error_code=_GROUP_DENIED)
            for group in denied
        ]

    return Verdict(request, amend)


def _offset_fetch_of_one(access: Access, request: Any, version: int) -> Verdict | None:
    def refusal(row: Any, code: ErrorCode) -> Any:
        return _refused_offsets(
            offset_fetch_messages.OffsetFetchResponseTopic(name=row.name),
            offset_fetch_messages.OffsetFetchResponsePartition,
            row,
            code,
        )

    if not may_group(access, _O.DESCRIBE, request.group_id):
        topics = request.topics or []
        return refused(
            offset_fetch_messages.OffsetFetchResponse(
                error_code=_GROUP_DENIED,
                # Version 1 has no place for an error but there.
                topics=[refusal(row, _GROUP_DENIED) for row in topics]
                if version < 2
                else [],
            )
        )
    is_all = request.topics is None
    denied: list[Any] = []
    if not is_all:
        request.topics, denied = split(
            request.topics, lambda row: access.may_topic(_O.DESCRIBE, row.name)
        )
        if not denied:
            return None

    def amend(response: Any) -> None:
        if is_all:
            response.topics = [
                row
                for row in response.topics
                if access.may_topic(_O.DESCRIBE, row.name, log=False)
            ]
        if not response.error_code:
            response.topics += [refusal(row, _TOPIC_DENIED) for row in denied]

    return Verdict(request, amend)


def _refused_offsets(answer: Any, partition: Any, row: Any, code: ErrorCode) -> Any:
    answer.partitions = [
        partition(
            partition_index=index, committed_offset=-1, metadata="", error_code=code
        )
        for index in row.partition_indexes
    ]
    return answer


def offset_delete(access: Access, request: Any, version: int) -> Verdict | None:
    if not may_group(access, _O.DELETE, request.group_id):
        raise ApiError(_GROUP_DENIED, GROUP_DENIED)
    request.topics, denied = split(
        request.topics, lambda topic: access.may_topic(_O.READ, topic.name)
    )
    if not denied:
        return None

    def amend(response: Any) -> None:
        if response.error_code:
            return
        response.topics += [
            offset_delete_messages.OffsetDeleteResponseTopic(
                name=topic.name,
                partitions=[
                    offset_delete_messages.OffsetDeleteResponsePartition(
                        partition_index=each.partition_index, error_code=_TOPIC_DENIED
                    )
                    for each in topic.partitions
                ],
            )
            for topic in denied
        ]

    return Verdict(request, amend)


# -- what administrators ask ----------------------------------------------------------


def list_groups(access: Access, request: Any, version: int) -> Verdict | None:
    """All with DESCRIBE of the cluster; else those with DESCRIBE of the group."""
    if access.may_cluster(_O.DESCRIBE, log=False):
        return None

    def amend(response: Any) -> None:
        response.groups = [
            group
            for group in response.groups
            if may_group(access, _O.DESCRIBE, group.group_id, log=False)
        ]

    return Verdict(request, amend)


def describe_groups(access: Access, request: Any, version: int) -> Verdict | None:
    request.groups, denied = split(
        request.groups, lambda group_id: may_group(access, _O.DESCRIBE, group_id)
    )
    shows_operations = version >= 3 and request.include_authorized_operations
    if not denied and not shows_operations:
        return None

    def amend(response: Any) -> None:
        if shows_operations:
            _show_operations(access, response.groups)
        response.groups += [
            describe_groups_messages.DescribedGroup(
                group_id=group_id, error_code=_GROUP_DENIED
            )
            for group_id in denied
        ]

    return Verdict(request, amend)


def consumer_group_describe(
    access: Access, request: Any, version: int
) -> Verdict | None:
    """DESCRIBE of the group and of all topics that its members have."""
    request.group_ids, denied = split(
        request.group_ids, lambda group_id: may_group(access, _O.DESCRIBE, group_id)
    )

    def amend(response: Any) -> None:
        if request.include_authorized_operations:
            _show_operations(access, response.groups)
        for index, group in enumerate(response.groups):
            if not all(
                access.may_topic(_O.DESCRIBE, name) for name in _topics_of(group)
            ):
                response.groups[index] = consumer_messages.DescribedGroup(
                    group_id=group.group_id,
                    error_code=_TOPIC_DENIED,
                    error_message="The group has described topic(s) that the client"
                    " is not authorized to describe.",
                )
        response.groups += [
            consumer_messages.DescribedGroup(
                group_id=group_id, error_code=_GROUP_DENIED, error_message=GROUP_DENIED
            )
            for group_id in denied
        ]

    return Verdict(request, amend)


def _topics_of(group: Any) -> set[str]:
    return {
        row.topic_name
        for member in group.members
        for assignment in (member.assignment, member.target_assignment)
        for row in assignment.topic_partitions
    } | {name for member in group.members for name in member.subscribed_topic_names}


def _show_operations(access: Access, described: list[Any]) -> None:
    for group in described:
        if not group.error_code:
            group.authorized_operations = access.operations(
                ResourceType.GROUP, group.group_id
            )


def delete_groups(access: Access, request: Any, version: int) -> Verdict | None:
    request.groups_names, denied = split(
        request.groups_names, lambda group_id: may_group(access, _O.DELETE, group_id)
    )
    if not denied:
        return None

    def amend(response: Any) -> None:
        response.results += [
            delete_groups_messages.DeletableGroupResult(
                group_id=group_id, error_code=_GROUP_DENIED
            )
            for group_id in denied
        ]

    return Verdict(request, amend)

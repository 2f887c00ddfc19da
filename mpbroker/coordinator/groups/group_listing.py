"""Serve ListGroups, DescribeGroups and ConsumerGroupDescribe.

Source: Kafka protocol guide; GroupMetadataManager.listGroups and describeGroups;
KIP-518 and KIP-848 for the filters, KIP-1043 for GROUP_ID_NOT_FOUND.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

from mpbroker.coordinator.context import Topics
from mpbroker.coordinator.groups.classic_group import ClassicGroup, ClassicGroupState
from mpbroker.coordinator.groups.consumer_group import ConsumerGroup, ConsumerMember
from mpbroker.coordinator.outbox import Call
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.consumer_group_describe import (
    Assignment,
    ConsumerGroupDescribeResponse,
    TopicPartitions,
)
from mpbroker.protocol.messages.consumer_group_describe import (
    DescribedGroup as DescribedConsumerGroup,
)
from mpbroker.protocol.messages.consumer_group_describe import (
    Member as DescribedConsumer,
)
from mpbroker.protocol.messages.describe_groups import (
    DescribedGroup,
    DescribedGroupMember,
    DescribeGroupsResponse,
)
from mpbroker.protocol.messages.list_groups import ListedGroup, ListGroupsResponse

S = ClassicGroupState

_NOT_FOUND_SINCE: Final = 6
_AUTHORIZED_OPERATIONS_SINCE: Final = 3
# READ, DELETE, DESCRIBE, DESCRIBE_CONFIGS, ALTER_CONFIGS: Kafka's bits for groups.
_ALL_OPERATIONS: Final = 1 << 3 | 1 << 6 | 1 << 8 | 1 << 10 | 1 << 11
_NOT_ASKED: Final = -(1 << 31)
# The protocol that a member of a consumer group speaks, as ConsumerGroupDescribe has
# it.
_CLASSIC_MEMBER: Final = 0
_CONSUMER_MEMBER: Final = 1


class GroupListing:
    """Lists and describes the coordinator's groups."""

    def __init__(
        self,
        groups: Mapping[str, ClassicGroup | ConsumerGroup],
        check_group: Callable[..., None],
        topics: Topics,
    ) -> None:
        self._groups = groups
        self._topics = topics
        self._check_group = check_group

    def list(self, request: Any, *, loading: bool) -> ListGroupsResponse:
        """List the groups that pass the filters; an empty filter lets all pass."""
        states = {state.casefold() for state in request.states_filter}
        types = {name.casefold() for name in request.types_filter}
        found = []
        for group in self._groups.values():
            if states and group.state.value.casefold() not in states:
                continue
            if types and group.type_name not in types:
                continue
            try:
                self._check_group(group.group_id, empty_id=True)
            except ApiError:
                continue
            found.append(
                ListedGroup(
                    group_id=group.group_id,
                    protocol_type=group.protocol_type or "",
                    group_state=group.state.value,
                    group_type=group.type_name.capitalize(),
                )
            )
        code = ErrorCode.NONE
        if loading:
            code = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
        return ListGroupsResponse(error_code=code, groups=found)

    def describe(self, call: Call, request: Any) -> DescribeGroupsResponse:
        """Describe classic groups."""
        operations = _NOT_ASKED
        if (
            call.version >= _AUTHORIZED_OPERATIONS_SINCE
            and request.include_authorized_operations
        ):
            operations = _ALL_OPERATIONS
        described = []
        for group_id in request.groups:
            try:
                self._check_group(group_id, empty_id=True)
                row = self._describe(call, group_id)
                row.authorized_operations = operations
            except ApiError as error:
                row = DescribedGroup(group_id=group_id, error_code=error.error_code)
            described.append(row)
        return DescribeGroupsResponse(groups=described)

    def _describe(self, call: Call, group_id: str) -> DescribedGroup:
        group = self._groups.get(group_id)
        if not isinstance(group, ClassicGroup):
            row = DescribedGroup(group_id=group_id, group_state=S.DEAD.value)
            if call.version >= _NOT_FOUND_SINCE:
                row.error_code = ErrorCode.GROUP_ID_NOT_FOUND
                row.error_message = f"Group {group_id} not found."
            return row
        stable = group.is_in(S.STABLE)
        protocol = group.protocol_name or ""
        return DescribedGroup(
            group_id=group_id,
            group_state=group.state.value,
            protocol_type=group.protocol_type or "",
            protocol_data=protocol if stable else "",
            members=[
                DescribedGroupMember(
                    member_id=member.member_id,
                    group_instance_id=member.group_instance_id,
                    client_id=member.client_id,
                    client_host=member.client_host,
                    member_metadata=member.metadata(protocol) if stable else b"",
                    member_assignment=member.assignment if stable else b"",
                )
                for member in group.members.values()
            ],
        )

    def describe_consumer(
        self, call: Call, request: Any
    ) -> ConsumerGroupDescribeResponse:
        """Describe consumer groups."""
        operations = _NOT_ASKED
        if request.include_authorized_operations:
            operations = _ALL_OPERATIONS
        described = []
        for group_id in request.group_ids:
            try:
                self._check_group(group_id)
                group = self._groups.get(group_id)
                if group is None:
                    _not_found(f"Group {group_id} not found.")
                if not isinstance(group, ConsumerGroup):
                    _not_found(f"Group {group_id} is not a consumer group.")
                row = self._describe_consumer_group(group)
                row.authorized_operations = operations
            except ApiError as error:
                row = DescribedConsumerGroup(
                    group_id=group_id,
                    error_code=error.error_code,
                    error_message=error.message or None,
                )
            described.append(row)
        return ConsumerGroupDescribeResponse(groups=described)

    def _describe_consumer_group(self, group: ConsumerGroup) -> DescribedConsumerGroup:
        return DescribedConsumerGroup(
            group_id=group.group_id,
            group_state=group.state.value,
            group_epoch=group.group_epoch,
            assignment_epoch=group.assignment_epoch,
            assignor_name=group.assignor_name,
            members=[
                self._describe_consumer_member(group, member)
                for member in group.members.values()
            ],
        )

    def _describe_consumer_member(
        self, group: ConsumerGroup, member: ConsumerMember
    ) -> DescribedConsumer:
        return DescribedConsumer(
            member_id=member.member_id,
            instance_id=member.instance_id,
            rack_id=member.rack_id,
            member_epoch=member.member_epoch,
            client_id=member.client_id,
            client_host=member.client_host,
            subscribed_topic_names=list(member.topic_names),
            subscribed_topic_regex=member.topic_regex,
            assignment=self._named(member.assigned),
            target_assignment=self._named(group.target.get(member.member_id, {})),
            member_type=_CLASSIC_MEMBER if member.classic else _CONSUMER_MEMBER,
        )

    def _named(self, partitions: Mapping[bytes, set[int]]) -> Assignment:
        return Assignment(
            topic_partitions=[
                TopicPartitions(
                    topic_id=topic_id, topic_name=name, partitions=sorted(numbers)
                )
                for topic_id, numbers in sorted(partitions.items())
                if (name := self._topics.topic_name(topic_id)) is not None
            ]
        )


def _not_found(message: str) -> NoReturn:
    raise ApiError(ErrorCode.GROUP_ID_NOT_FOUND, message)


def is_empty(group: ClassicGroup | ConsumerGroup) -> bool:
    """Return whether a group has no members and none that is about to join."""
    if isinstance(group, ConsumerGroup):
        return group.is_empty
    return group.is_in(S.EMPTY) and not group.pending_join_members

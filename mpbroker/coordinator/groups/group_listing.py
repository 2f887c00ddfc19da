"""Serve ListGroups, and the requests that describe groups of the four kinds.

Source: Kafka protocol guide; GroupMetadataManager.listGroups and describeGroups;
KIP-518 and KIP-848 for the filters, KIP-1043 for GROUP_ID_NOT_FOUND.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

from mpbroker.coordinator.context import Topics
from mpbroker.coordinator.groups.classic_group import ClassicGroup, ClassicGroupState
from mpbroker.coordinator.groups.consumer_group import ConsumerGroup, ConsumerMember
from mpbroker.coordinator.groups.share_group import ShareGroup
from mpbroker.coordinator.outbox import Call
from mpbroker.coordinator.streams.streams_describe import (
    describe as describe_streams_group,
)
from mpbroker.coordinator.streams.streams_group import StreamsGroup
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages import share_group_describe as share_messages
from mpbroker.protocol.messages import streams_group_describe as streams_messages
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
from mpbroker.protocol.messages.share_group_describe import ShareGroupDescribeResponse
from mpbroker.server.answer_budget import AnswerBudget

S = ClassicGroupState

_NOT_FOUND_SINCE: Final = 6
_AUTHORIZED_OPERATIONS_SINCE: Final = 3
# READ, DELETE, DESCRIBE, DESCRIBE_CONFIGS, ALTER_CONFIGS: Kafka's bits for groups.
_ALL_OPERATIONS: Final = 1 << 3 | 1 << 6 | 1 << 8 | 1 << 10 | 1 << 11
_NOT_ASKED: Final = -(1 << 31)
_SHARE_ASSIGNOR: Final = "simple"
# ConsumerGroupDescribe's codes for the protocol that a member speaks.
_CLASSIC_MEMBER: Final = 0
_CONSUMER_MEMBER: Final = 1


class GroupListing:
    """Lists and describes the coordinator's groups."""

    def __init__(
        self,
        groups: Mapping[str, ClassicGroup | ConsumerGroup | StreamsGroup],
        shares: Mapping[str, ShareGroup],
        check_group: Callable[..., None],
        topics: Topics,
    ) -> None:
        self._groups = groups
        self._shares = shares
        self._topics = topics
        self._check_group = check_group

    def list(self, request: Any, *, loading: bool) -> ListGroupsResponse:
        """List the groups that pass the request's filters for state and type.

        An empty filter lets all groups pass.

        Args:
            loading: whether some groups are not loaded yet, which is answered with
                COORDINATOR_LOAD_IN_PROGRESS.
        """
        states = {state.casefold() for state in request.states_filter}
        types = {name.casefold() for name in request.types_filter}
        found = []
        for group in (*self._groups.values(), *self._shares.values()):
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
                    group_type=group.type_name,
                )
            )
        code = ErrorCode.NONE
        if loading:
            code = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
        return ListGroupsResponse(error_code=code, groups=found)

    def describe(self, call: Call, request: Any) -> DescribeGroupsResponse:
        """Return the response to DescribeGroups, which describes classic groups."""
        operations = _NOT_ASKED
        if (
            call.version >= _AUTHORIZED_OPERATIONS_SINCE
            and request.include_authorized_operations
        ):
            operations = _ALL_OPERATIONS
        described = []
        budget = AnswerBudget()
        # Describe each group once, even if the request repeats it: 5,000 descriptions
        # of a group whose member had long names took 328 MB.
        for group_id in dict.fromkeys(request.groups):
            try:
                budget.check()
                self._check_group(group_id, empty_id=True)
                row = self._describe(call, group_id)
                row.authorized_operations = operations
                budget.spend(row)
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
        """Return the response to ConsumerGroupDescribe."""
        operations = _NOT_ASKED
        if request.include_authorized_operations:
            operations = _ALL_OPERATIONS
        described = []
        budget = AnswerBudget()
        for group_id in dict.fromkeys(request.group_ids):
            try:
                budget.check()
                self._check_group(group_id)
                group = self._groups.get(group_id)
                if group is None:
                    _not_found(f"Group {group_id} not found.")
                if not isinstance(group, ConsumerGroup):
                    _not_found(f"Group {group_id} is not a consumer group.")
                row = self._describe_consumer_group(group)
                row.authorized_operations = operations
                budget.spend(row)
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

    def describe_share(self, call: Call, request: Any) -> ShareGroupDescribeResponse:
        """Return the response to ShareGroupDescribe."""
        operations = _NOT_ASKED
        if request.include_authorized_operations:
            operations = _ALL_OPERATIONS
        described = []
        budget = AnswerBudget()
        for group_id in dict.fromkeys(request.group_ids):
            try:
                budget.check()
                self._check_group(group_id)
                group = self._shares.get(group_id)
                if group is None:
                    if group_id in self._groups:
                        _not_found(f"Group {group_id} is not a share group.")
                    _not_found(f"Share group {group_id} not found.")
                row = self._describe_share_group(group)
                row.authorized_operations = operations
                budget.spend(row)
            except ApiError as error:
                row = share_messages.DescribedGroup(
                    group_id=group_id,
                    error_code=error.error_code,
                    error_message=error.message or None,
                )
            described.append(row)
        return ShareGroupDescribeResponse(groups=described)

    def _describe_share_group(self, group: ShareGroup) -> share_messages.DescribedGroup:
        return share_messages.DescribedGroup(
            group_id=group.group_id,
            group_state=group.state.value,
            group_epoch=group.group_epoch,
            assignment_epoch=group.assignment_epoch,
            assignor_name=_SHARE_ASSIGNOR,
            members=[
                share_messages.Member(
                    member_id=member.member_id,
                    rack_id=member.rack_id,
                    member_epoch=member.member_epoch,
                    client_id=member.client_id,
                    client_host=member.client_host,
                    subscribed_topic_names=list(member.topic_names),
                    assignment=share_messages.Assignment(
                        topic_partitions=[
                            share_messages.TopicPartitions(
                                topic_id=topic_id,
                                topic_name=name,
                                partitions=sorted(numbers),
                            )
                            for topic_id, numbers in sorted(member.assigned.items())
                            if (name := self._topics.topic_name(topic_id)) is not None
                        ]
                    ),
                )
                for member in group.members.values()
            ],
        )

    def describe_streams(
        self, call: Call, request: Any
    ) -> streams_messages.StreamsGroupDescribeResponse:
        """Describe streams groups."""
        operations = _NOT_ASKED
        if request.include_authorized_operations:
            operations = _ALL_OPERATIONS
        described = []
        budget = AnswerBudget()
        for group_id in dict.fromkeys(request.group_ids):
            try:
                budget.check()
                self._check_group(group_id)
                group = self._groups.get(group_id)
                if group is None and group_id not in self._shares:
                    _not_found(f"Group {group_id} not found.")
                if not isinstance(group, StreamsGroup):
                    _not_found(f"Group {group_id} is not a streams group.")
                row = describe_streams_group(group)
                row.authorized_operations = operations
                budget.spend(row)
            except ApiError as error:
                row = streams_messages.DescribedGroup(
                    group_id=group_id,
                    error_code=error.error_code,
                    error_message=error.message or None,
                )
            described.append(row)
        return streams_messages.StreamsGroupDescribeResponse(groups=described)

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


def is_empty(group: ClassicGroup | ConsumerGroup | StreamsGroup) -> bool:
    """Return whether a group has no members, and no client is about to join it."""
    if isinstance(group, (ConsumerGroup, StreamsGroup)):
        return group.is_empty
    return group.is_in(S.EMPTY) and not group.pending_join_members

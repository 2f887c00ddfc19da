"""Serve the classic protocol's requests to members of consumer groups.

When a consumer that speaks KIP-848 joins a classic group with members, the group
becomes a consumer group. The other members keep the classic protocol. For them the
member epoch is the generation. A JoinGroup takes a member a step nearer to its target
assignment, and the answer to a SyncGroup has its partitions. REBALANCE_IN_PROGRESS, as
the answer to a Heartbeat, asks it to join again. The group has no leader, and members
do not wait for each other.

Source: KIP-848; Kafka's GroupMetadataManager (classicGroupJoinToConsumerGroup and what
belongs to it).
"""

from __future__ import annotations

from collections.abc import Callable

from mpbroker.coordinator.context import CoordinatorContext
from mpbroker.coordinator.groups.classic_group import (
    Membership,
)
from mpbroker.coordinator.groups.classic_protocol import (
    LEAVE_SEVERAL_SINCE,
    MEMBER_ID_REQUIRED_SINCE,
)
from mpbroker.coordinator.groups.classic_rebalance import refused_join
from mpbroker.coordinator.groups.consumer_group import (
    ConsumerGroup,
    ConsumerMember,
    MemberState,
)
from mpbroker.coordinator.groups.consumer_group_rebalance import (
    ConsumerGroupRebalance,
)
from mpbroker.coordinator.groups.consumer_group_records import (
    current_record,
    member_record,
)
from mpbroker.coordinator.groups.consumer_protocol import (
    CONSUMER_PROTOCOL,
    Subscription,
    read_subscription,
)
from mpbroker.coordinator.groups.group_config import GroupConfig
from mpbroker.coordinator.groups.group_conversion import (
    assignment_of,
    by_id,
    subscribe,
)
from mpbroker.coordinator.outbox import Call
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.heartbeat import HeartbeatRequest, HeartbeatResponse
from mpbroker.protocol.messages.join_group import JoinGroupRequest, JoinGroupResponse
from mpbroker.protocol.messages.leave_group import (
    LeaveGroupRequest,
    LeaveGroupResponse,
    MemberIdentity,
    MemberResponse,
)
from mpbroker.protocol.messages.sync_group import SyncGroupRequest, SyncGroupResponse


class MixedProtocol:
    """Serves the classic protocol to members of consumer groups.

    Args:
        new_id: makes the id of a member that joins without one.
    """

    def __init__(
        self,
        config: GroupConfig,
        context: CoordinatorContext,
        rebalance: ConsumerGroupRebalance,
        new_id: Callable[[], str],
    ) -> None:
        self._config = config
        self._out = context.outbox
        self._topics = context.topics
        self._rebalance = rebalance
        self._new_id = new_id

    # -- JoinGroup -----------------------------------------------------------------

    def join(
        self, call: Call, group: ConsumerGroup, request: JoinGroupRequest, now_ms: int
    ) -> None:
        """Bring a member a step nearer to its target assignment; answer its JoinGroup.

        Raises:
            ApiError: the error to answer with.
        """
        member_id, instance = request.member_id, request.group_instance_id
        most = self._config.group_consumer_max_size
        if member_id not in group.members and len(group.members) >= most:
            raise ApiError(ErrorCode.GROUP_MAX_SIZE_REACHED)
        subscription = _subscription(group, request)
        if not member_id and instance is None:
            member_id = self._new_id()
            if call.version >= MEMBER_ID_REQUIRED_SINCE:
                code = ErrorCode.MEMBER_ID_REQUIRED
                self._out.answer(call, refused_join(call, code, member_id))
                return
        old_id = group.static_members.get(instance or "")
        was_classic = group.all_are_classic()
        member = self._joining(group, member_id, instance)
        self._take_in_classic(call, group, member, request, subscription, now_ms)
        self._answer_join(call, group, member)
        if (
            old_id not in (None, member.member_id)
            and not was_classic
            and self._rebalance.may_downgrade(group, [])
        ):
            # It has replaced the last member that spoke KIP-848.
            self._rebalance.downgrade(group, [], now_ms)

    def _joining(
        self, group: ConsumerGroup, member_id: str, instance: str | None
    ) -> ConsumerMember:
        """Return the member that joins; the caller adds it if it is new."""
        if instance is not None and not member_id:
            member_id = self._new_id()
            known = group.static_members.get(instance)
            if known is not None:
                member = self._rebalance.replace_static(group, known, member_id)
                member.member_epoch = member.previous_epoch = group.assignment_epoch
                return member
        elif instance is not None:
            group.validate_instance(member_id, instance)
        found = group.members.get(member_id)
        return ConsumerMember(member_id, instance) if found is None else found

    def _take_in_classic(
        self,
        call: Call,
        group: ConsumerGroup,
        member: ConsumerMember,
        request: JoinGroupRequest,
        subscription: Subscription,
        now_ms: int,
    ) -> None:
        group_id, member_id = group.group_id, member.member_id
        is_new = member_id not in group.members
        before = member.position(), member.metadata(), member.subscription()
        if is_new:
            group.add(member)
        member.client_id, member.client_host = call.client_id, call.client_host
        membership = Membership.of_request(request)
        member.rebalance_timeout_ms = membership.rebalance_timeout_ms
        subscribe(
            member, subscription, membership.session_timeout_ms, membership.protocols
        )
        if is_new or member.metadata() != before[1]:
            self._rebalance.write(group, member_record(group_id, member_id, member))
        changed = is_new or member.subscription() != before[2]
        self._rebalance.refresh(group, changed=changed, now_ms=now_ms)
        group.reconcile(member, by_id(subscription.owned, self._topics))
        if is_new or member.position() != before[0]:
            self._rebalance.write(group, current_record(group_id, member_id, member))
        self._rebalance.schedule(group, member, now_ms)
        self._rebalance.expect_sync(group, member, now_ms)

    def _answer_join(
        self, call: Call, group: ConsumerGroup, member: ConsumerMember
    ) -> None:
        assert member.classic is not None
        response = JoinGroupResponse(
            error_code=ErrorCode.NONE,
            generation_id=member.member_epoch,
            protocol_type=CONSUMER_PROTOCOL,
            protocol_name=member.classic.protocols[0][0],
            member_id=member.member_id,
        )
        self._out.answer(call, response, self._rebalance.after(group))

    # -- SyncGroup and Heartbeat -----------------------------------------------------

    def sync(
        self, call: Call, group: ConsumerGroup, request: SyncGroupRequest, now_ms: int
    ) -> None:
        """Answer the SyncGroup of a classic member with the partitions it now has.

        Raises:
            ApiError: the error to answer with.
        """
        member = self._sender(group, request)
        assert member.classic is not None
        protocol = member.classic.protocols[0][0]
        if request.protocol_type not in (None, CONSUMER_PROTOCOL) or (
            request.protocol_name not in (None, protocol)
        ):
            raise ApiError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
        if (
            member.member_epoch < group.group_epoch
            and member.state is not MemberState.UNREVOKED_PARTITIONS
        ):
            self._rebalance.expect_rejoin(group, member, now_ms)
            raise ApiError(ErrorCode.REBALANCE_IN_PROGRESS)
        self._rebalance.synced(group, member, now_ms)
        response = SyncGroupResponse(
            error_code=ErrorCode.NONE,
            protocol_type=CONSUMER_PROTOCOL,
            protocol_name=protocol,
            assignment=assignment_of(member, self._topics),
        )
        self._out.answer(call, response, self._rebalance.after(group))

    def heartbeat(
        self, call: Call, group: ConsumerGroup, request: HeartbeatRequest, now_ms: int
    ) -> None:
        """Restart a classic member's session timer; answer whether it must join again.

        Raises:
            ApiError: the error to answer with.
        """
        member = self._sender(group, request)
        self._rebalance.schedule_session(group, member.member_id, now_ms)
        code = ErrorCode.NONE
        if (
            member.member_epoch < group.group_epoch
            or member.state is MemberState.UNREVOKED_PARTITIONS
            or (
                member.state is MemberState.UNRELEASED_PARTITIONS
                and not group.waits_for_others(member)
            )
        ):
            code = ErrorCode.REBALANCE_IN_PROGRESS
            self._rebalance.expect_rejoin(group, member, now_ms)
        self._out.answer(call, HeartbeatResponse(error_code=code))

    def _sender(
        self, group: ConsumerGroup, request: SyncGroupRequest | HeartbeatRequest
    ) -> ConsumerMember:
        """Return the classic member that sent a request.

        Raises:
            ApiError: UNKNOWN_MEMBER_ID, FENCED_INSTANCE_ID, ILLEGAL_GENERATION.
        """
        member = _classic_member(group, request.member_id, request.group_instance_id)
        if request.generation_id != member.member_epoch:
            raise ApiError(ErrorCode.ILLEGAL_GENERATION)
        return member

    # -- LeaveGroup ------------------------------------------------------------------

    def leave(
        self, call: Call, group: ConsumerGroup, request: LeaveGroupRequest, now_ms: int
    ) -> None:
        """Remove members of either protocol; answer with an error code for each.

        An admin client removes any member so. It names a static one by its instance id
        alone. A member that is named twice is removed once, and both get NONE, as by
        Kafka.
        """
        leaving = request.members
        if call.version < LEAVE_SEVERAL_SINCE:
            leaving = [MemberIdentity(member_id=request.member_id)]
        gone: dict[str, None] = {}  # in their order
        answers = []
        for identity in leaving:
            member_id, instance = identity.member_id, identity.group_instance_id
            code = ErrorCode.NONE
            try:
                if not member_id and instance is not None:
                    member_id = group.static_members.get(instance, "")
                _member(group, member_id, instance)
                gone[member_id] = None
            except ApiError as error:
                code = error.error_code
            answers.append(
                MemberResponse(
                    member_id=identity.member_id,
                    group_instance_id=instance,
                    error_code=code,
                )
            )
        if gone:
            self._rebalance.remove_members(group, list(gone), now_ms)
        if call.version < LEAVE_SEVERAL_SINCE:
            response = LeaveGroupResponse(error_code=answers[0].error_code)
        else:
            response = LeaveGroupResponse(members=answers)
        self._out.answer(call, response, self._rebalance.after(group))


def _member(
    group: ConsumerGroup, member_id: str, instance: str | None
) -> ConsumerMember:
    if instance is not None:
        group.validate_instance(member_id, instance)
    return group.member(member_id)


def _classic_member(
    group: ConsumerGroup, member_id: str, instance: str | None
) -> ConsumerMember:
    member = _member(group, member_id, instance)
    if member.classic is None:
        raise ApiError(ErrorCode.UNKNOWN_MEMBER_ID)
    return member


def _subscription(group: ConsumerGroup, request: JoinGroupRequest) -> Subscription:
    """Return the subscription in a member's JoinGroup.

    Raises:
        ApiError: INCONSISTENT_GROUP_PROTOCOL: the member is not a consumer, or has no
            protocol in common with the other members.
    """
    names = [protocol.name for protocol in request.protocols]
    subscription = None
    if group.supports_classic_protocols(request.protocol_type, names):
        subscription = read_subscription(request.protocols[0].metadata)
    if subscription is None:
        raise ApiError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
    return subscription

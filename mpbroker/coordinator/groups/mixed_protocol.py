"""Members of both protocols in one group, and groups that change from one to the other.

A consumer that speaks KIP-848 and joins a living classic group makes a consumer group
of it (upgrade). The others go on as they are: their generation is their member epoch,
JoinGroup takes them a step nearer to their target, SyncGroup tells them what they have
got, a heartbeat's REBALANCE_IN_PROGRESS asks them to join again. There is no leader and
nobody waits for others. When the last one that speaks KIP-848 has gone, the rest are a
classic group again (downgrade) and rebalance.

    group.consumer.migration.policy   bidirectional, upgrade, downgrade, disabled

Source: KIP-848; Kafka's GroupMetadataManager (convertToConsumerGroup and -ClassicGroup,
classicGroupJoinToConsumerGroup and what belongs to it).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from mpbroker.coordinator.context import CoordinatorContext
from mpbroker.coordinator.groups.classic_group import (
    ClassicGroup,
    ClassicGroupState,
    Membership,
)
from mpbroker.coordinator.groups.classic_protocol import (
    LEAVE_SEVERAL_SINCE,
    MEMBER_ID_REQUIRED_SINCE,
)
from mpbroker.coordinator.groups.classic_rebalance import ClassicRebalance
from mpbroker.coordinator.groups.consumer_group import (
    ConsumerGroup,
    ConsumerMember,
    MemberState,
)
from mpbroker.coordinator.groups.consumer_group_heartbeat import ConsumerGroupProtocol
from mpbroker.coordinator.groups.consumer_group_records import (
    current_record,
    member_record,
    tombstones,
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
    classic_group_of,
    consumer_group_of,
    creation_records,
    subscribe,
)
from mpbroker.coordinator.groups.group_records import fits_a_key, group_metadata_key
from mpbroker.coordinator.outbox import Call
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.consumer_group_heartbeat import (
    ConsumerGroupHeartbeatRequest,
)
from mpbroker.protocol.messages.heartbeat import HeartbeatRequest, HeartbeatResponse
from mpbroker.protocol.messages.join_group import JoinGroupRequest, JoinGroupResponse
from mpbroker.protocol.messages.leave_group import (
    LeaveGroupRequest,
    LeaveGroupResponse,
    MemberIdentity,
    MemberResponse,
)
from mpbroker.protocol.messages.sync_group import SyncGroupRequest, SyncGroupResponse

S = ClassicGroupState

_UPGRADES: Final = frozenset({"bidirectional", "upgrade"})
_DOWNGRADES: Final = frozenset({"bidirectional", "downgrade"})


class MixedProtocol(ConsumerGroupProtocol):
    """The consumer protocol, and the classic one for members of consumer groups.

    Args:
        rebalance: of the groups that are classic again.
        replaced: told of the group that is in the place of another.
    """

    def __init__(
        self,
        config: GroupConfig,
        context: CoordinatorContext,
        partition_of: Callable[[str], int],
        new_id: Callable[[], str],
        overrides: Callable[[str], Mapping[str, str]],
        rebalance: ClassicRebalance,
        replaced: Callable[[ClassicGroup | ConsumerGroup], None],
    ) -> None:
        super().__init__(config, context, partition_of, new_id, overrides)
        self._rebalance = rebalance
        self._replaced = replaced

    # -- from one to the other -----------------------------------------------------

    def upgrade(
        self, classic: ClassicGroup, request: ConsumerGroupHeartbeatRequest, now_ms: int
    ) -> ConsumerGroup:
        """Make a consumer group of a classic one that a new kind of member joins.

        Raises:
            ApiError: what the joining member is told; the group stays as it is.
        """
        group_id = classic.group_id
        if (
            self._config.group_consumer_migration_policy not in _UPGRADES
            or classic.protocol_type != CONSUMER_PROTOCOL
            or len(classic.members) > self._config.group_consumer_max_size
        ):
            raise ApiError(
                ErrorCode.GROUP_ID_NOT_FOUND,
                f"Group {group_id} is not a consumer group.",
            )
        group = consumer_group_of(classic, self._topics)
        self.check_join(group, request)
        self._rebalance.refuse_waiting(classic, ErrorCode.REBALANCE_IN_PROGRESS)
        self._rebalance.forget(classic, ErrorCode.REBALANCE_IN_PROGRESS)
        classic.transition_to(S.DEAD, now_ms)
        self._write(group, (group_metadata_key(group_id), None))
        for record in creation_records(group):
            self._write(group, record)
        self._replaced(group)
        self.loaded(group, now_ms)
        return group

    def remove_members(
        self, group: ConsumerGroup, member_ids: list[str], now_ms: int
    ) -> None:
        """Members have left or are fenced; perhaps the last of the new protocol."""
        if self._may_downgrade(group, member_ids):
            classic = self._downgrade(group, member_ids, now_ms)
            self._rebalance.maybe_prepare_rebalance(classic, now_ms)
        else:
            super().remove_members(group, member_ids, now_ms)

    def _may_downgrade(self, group: ConsumerGroup, leaving: list[str]) -> bool:
        left = len(group.members) - sum(each in group.members for each in leaving)
        return (
            self._config.group_consumer_migration_policy in _DOWNGRADES
            and 0 < left <= self._config.group_max_size
            and group.all_are_classic(but=leaving)
        )

    def _downgrade(
        self, group: ConsumerGroup, leaving: list[str], now_ms: int
    ) -> ClassicGroup:
        classic = classic_group_of(group, leaving, self._topics, now_ms)
        for record in tombstones(group):
            self._write(group, record)
        self.forget(group)
        group.is_dead = True
        self._replaced(classic)
        self._rebalance.write_group(classic)
        for member in classic.members.values():
            self._rebalance.schedule_session(classic, member, now_ms)
        return classic

    # -- JoinGroup -----------------------------------------------------------------

    def join(
        self, call: Call, group: ConsumerGroup, request: JoinGroupRequest, now_ms: int
    ) -> None:
        """Take a classic member a step nearer to its share of the group's target.

        Raises:
            ApiError: what the answer says instead.
        """
        member_id, instance = request.member_id, request.group_instance_id
        most = self._config.group_consumer_max_size
        if member_id not in group.members and len(group.members) >= most:
            raise ApiError(ErrorCode.GROUP_MAX_SIZE_REACHED)
        if not fits_a_key(member_id):
            raise ApiError(ErrorCode.UNKNOWN_MEMBER_ID)
        subscription = _subscription(group, request)
        if not member_id and instance is None:
            member_id = self._new_id()
            if call.version >= MEMBER_ID_REQUIRED_SINCE:
                code = ErrorCode.MEMBER_ID_REQUIRED
                self._rebalance.refuse_join(call, code, member_id)
                return
        old_id = group.static_members.get(instance or "")
        was_classic = group.all_are_classic()
        member = self._joining(group, member_id, instance)
        self._take_in_classic(call, group, member, request, subscription, now_ms)
        self._answer_join(call, group, member)
        if (
            old_id not in (None, member.member_id)
            and not was_classic
            and self._may_downgrade(group, [])
        ):
            # It has taken the place of the last one that spoke the other protocol.
            self._downgrade(group, [], now_ms)

    def _joining(
        self, group: ConsumerGroup, member_id: str, instance: str | None
    ) -> ConsumerMember:
        """Find who joins, or make it a member (which the caller adds)."""
        if instance is not None:
            known = group.static_members.get(instance)
            if not member_id:
                member_id = self._new_id()
                if known is not None:
                    member = self.replace_static(group, known, member_id)
                    member.member_epoch = member.previous_epoch = group.assignment_epoch
                    return member
            elif known is None:
                raise ApiError(ErrorCode.UNKNOWN_MEMBER_ID)
            elif known != member_id:
                raise ApiError(ErrorCode.FENCED_INSTANCE_ID)
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
            self._write(group, member_record(group_id, member_id, member))
        changed = is_new or member.subscription() != before[2]
        self.refresh(group, changed=changed, now_ms=now_ms)
        group.reconcile(member, by_id(subscription.owned, self._topics))
        if is_new or member.position() != before[0]:
            self._write(group, current_record(group_id, member_id, member))
        self._schedule(group, member, now_ms)
        self._timers.cancel(("rejoin", group_id, member_id))
        self._expect(group, member, "member sync", now_ms)

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
        self._out.answer(call, response, self._after(group))

    # -- SyncGroup and Heartbeat -----------------------------------------------------

    def sync(
        self, call: Call, group: ConsumerGroup, request: SyncGroupRequest, now_ms: int
    ) -> None:
        """Tell a classic member what it may read.

        Raises:
            ApiError: what the answer says instead.
        """
        member = self._speaker(group, request)
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
            self._expect(group, member, "rejoin", now_ms)
            raise ApiError(ErrorCode.REBALANCE_IN_PROGRESS)
        self._timers.cancel(("member sync", group.group_id, member.member_id))
        self.schedule_session(group, member.member_id, now_ms)
        response = SyncGroupResponse(
            error_code=ErrorCode.NONE,
            protocol_type=CONSUMER_PROTOCOL,
            protocol_name=protocol,
            assignment=assignment_of(member, self._topics),
        )
        self._out.answer(call, response, self._after(group))

    def classic_heartbeat(
        self, call: Call, group: ConsumerGroup, request: HeartbeatRequest, now_ms: int
    ) -> None:
        """Note that a classic member lives; say whether it should join again.

        Raises:
            ApiError: what the answer says instead.
        """
        member = self._speaker(group, request)
        self.schedule_session(group, member.member_id, now_ms)
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
            self._expect(group, member, "rejoin", now_ms)
        self._out.answer(call, HeartbeatResponse(error_code=code))

    def _speaker(
        self, group: ConsumerGroup, request: SyncGroupRequest | HeartbeatRequest
    ) -> ConsumerMember:
        """Return the classic member that speaks.

        Raises:
            ApiError: UNKNOWN_MEMBER_ID, FENCED_INSTANCE_ID, ILLEGAL_GENERATION.
        """
        member = _classic_member(group, request.member_id, request.group_instance_id)
        if request.generation_id != member.member_epoch:
            raise ApiError(ErrorCode.ILLEGAL_GENERATION)
        return member

    def _expect(
        self, group: ConsumerGroup, member: ConsumerMember, step: str, now_ms: int
    ) -> None:
        """Give a classic member its rebalance timeout for its next step."""
        name = step, group.group_id, member.member_id
        if name in self._timers and step == "rejoin":
            return  # it was told before, and has only what is left

        def expire(at_ms: int) -> None:
            if group.members.get(member.member_id) is member and member.classic:
                self.remove_members(group, [member.member_id], at_ms)

        self._timers.schedule(name, now_ms + member.rebalance_timeout_ms, expire)

    def _cancel(self, group: ConsumerGroup, member_id: str) -> None:
        super()._cancel(group, member_id)
        for step in ("rejoin", "member sync"):
            self._timers.cancel((step, group.group_id, member_id))

    # -- LeaveGroup ------------------------------------------------------------------

    def leave(
        self, call: Call, group: ConsumerGroup, request: LeaveGroupRequest, now_ms: int
    ) -> None:
        """Let classic members go; an admin names static ones by their instance."""
        leaving = request.members
        if call.version < LEAVE_SEVERAL_SINCE:
            leaving = [MemberIdentity(member_id=request.member_id)]
        gone: list[str] = []
        answers = []
        for identity in leaving:
            member_id, instance = identity.member_id, identity.group_instance_id
            code = ErrorCode.NONE
            try:
                if not member_id and instance is not None:
                    member_id = group.static_members.get(instance, "")
                _classic_member(group, member_id, instance)
                if member_id in gone:
                    raise ApiError(ErrorCode.UNKNOWN_MEMBER_ID)
                gone.append(member_id)
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
            self.remove_members(group, gone, now_ms)
        if call.version < LEAVE_SEVERAL_SINCE:
            response = LeaveGroupResponse(error_code=answers[0].error_code)
        else:
            response = LeaveGroupResponse(members=answers)
        self._out.answer(call, response, self._after(group))


def _classic_member(
    group: ConsumerGroup, member_id: str, instance: str | None
) -> ConsumerMember:
    if instance is not None:
        known = group.static_members.get(instance)
        if known is None:
            raise ApiError(ErrorCode.UNKNOWN_MEMBER_ID)
        if known != member_id:
            raise ApiError(ErrorCode.FENCED_INSTANCE_ID)
    member = group.member(member_id)
    if member.classic is None:
        raise ApiError(ErrorCode.UNKNOWN_MEMBER_ID)
    return member


def _subscription(group: ConsumerGroup, request: JoinGroupRequest) -> Subscription:
    """Read what a member joins with.

    Raises:
        ApiError: INCONSISTENT_GROUP_PROTOCOL: it cannot take part here.
    """
    names = [protocol.name for protocol in request.protocols]
    subscription = None
    if group.supports_classic_protocols(request.protocol_type, names):
        subscription = read_subscription(request.protocols[0].metadata)
    if subscription is None:
        raise ApiError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
    return subscription

"""Serve the classic protocol: JoinGroup, SyncGroup, Heartbeat and LeaveGroup.

The caller has looked up the group. Each method answers its request, or parks it in its
member until a later step of the rebalance.

Source: Kafka protocol guide; GroupMetadataManager (classicGroupJoin, -Sync, -Heartbeat,
-Leave); KIP-345 for static members, KIP-394 for MEMBER_ID_REQUIRED.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from mpbroker.coordinator.context import CoordinatorContext
from mpbroker.coordinator.groups.classic_group import (
    ClassicGroup,
    ClassicGroupState,
    ClassicMember,
    Membership,
)
from mpbroker.coordinator.groups.classic_rebalance import (
    NEW_MEMBER_JOIN_TIMEOUT_MS,
    ClassicRebalance,
)
from mpbroker.coordinator.groups.group_config import GroupConfig
from mpbroker.coordinator.groups.pending_members import PendingMembers
from mpbroker.coordinator.outbox import NOW, Call
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.heartbeat import HeartbeatRequest, HeartbeatResponse
from mpbroker.protocol.messages.join_group import JoinGroupRequest
from mpbroker.protocol.messages.leave_group import (
    LeaveGroupRequest,
    LeaveGroupResponse,
    MemberIdentity,
    MemberResponse,
)
from mpbroker.protocol.messages.sync_group import SyncGroupRequest

S = ClassicGroupState

MEMBER_ID_REQUIRED_SINCE: Final = 4
_SKIP_ASSIGNMENT_SINCE: Final = 9
LEAVE_SEVERAL_SINCE: Final = 3
_MAX_STRING: Final = 0x7FFF  # bytes, in all versions


class ClassicProtocol:
    """Serves the requests of classic groups' members.

    Args:
        new_id: makes the random part of a member id.
        emptied: called with a group and the time in ms when it has lost its last
            pending member, and may have no other members.
    """

    def __init__(
        self,
        config: GroupConfig,
        context: CoordinatorContext,
        rebalance: ClassicRebalance,
        new_id: Callable[[], str],
        emptied: Callable[[ClassicGroup, int], None],
    ) -> None:
        self._config = config
        self._out = context.outbox
        self._timers = context.timers
        self._sessions = context.sessions
        self._rebalance = rebalance
        self._new_id = new_id
        self._emptied = emptied
        self._pending = PendingMembers(context.timers, self._forgotten)

    # -- JoinGroup -----------------------------------------------------------------

    def join(
        self, call: Call, group: ClassicGroup, request: JoinGroupRequest, now_ms: int
    ) -> None:
        """Answer or park a JoinGroup, with which a member joins the next generation.

        Raises:
            ApiError: the error to answer with.
        """
        member_id = request.member_id
        if not self._accepts_joining_member(group, request):
            group.remove(member_id)
            raise ApiError(ErrorCode.GROUP_MAX_SIZE_REACHED)
        if group.is_in(S.DEAD):
            raise ApiError(ErrorCode.COORDINATOR_NOT_AVAILABLE)
        names = [protocol.name for protocol in request.protocols]
        if not group.supports_protocols(request.protocol_type, names):
            raise ApiError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
        membership = Membership.of_request(request)
        if member_id:
            self._join_existing_member(call, group, request, membership, now_ms)
        else:
            self._join_new_member(call, group, request, membership, now_ms)
        self._rebalance.maybe_complete_join(group, now_ms)

    def _accepts_joining_member(
        self, group: ClassicGroup, request: JoinGroupRequest
    ) -> bool:
        most = self._config.group_max_size
        member = group.members.get(request.member_id)
        if not request.member_id and request.group_instance_id is None:
            # Kafka counts no clients that have an id and did not join yet.
            most -= len(group.pending_join_members)
        if group.is_in(S.EMPTY, S.DEAD):
            return most > 0
        if group.is_in(S.PREPARING_REBALANCE):
            if member is not None and member.awaiting_join is not None:
                return True
            return group.num_awaiting_join < most
        return member is not None or len(group.members) < most

    def _join_new_member(
        self,
        call: Call,
        group: ClassicGroup,
        request: JoinGroupRequest,
        membership: Membership,
        now_ms: int,
    ) -> None:
        instance = request.group_instance_id
        prefix = call.client_id if instance is None else instance
        new_id = _member_id(prefix, self._new_id())
        if instance is not None:
            old_id = group.static_members.get(instance)
            if old_id is not None:
                self._rejoin_static_member(
                    call, group, old_id, new_id, membership, now_ms
                )
                return
        elif call.version >= MEMBER_ID_REQUIRED_SINCE:
            # The client has to join again with this id, within its session timeout. So
            # a client that repeats its first request is not counted twice (KIP-394).
            self._pending.add(group, new_id, now_ms, request.session_timeout_ms)
            self._sessions.heard(new_id, now_ms)
            self._rebalance.refuse_join(call, ErrorCode.MEMBER_ID_REQUIRED, new_id)
            return
        self._add_member(call, group, new_id, instance, membership, now_ms)
        if instance is None:
            self._forget_if_ended(call, group, new_id)

    def _forget_if_ended(self, call: Call, group: ClassicGroup, member_id: str) -> None:
        """Have a new member removed if its first JoinGroup is answered early.

        Before version 4 the client does not know its member id yet, and joins again as
        another member. So the group would wait for a member without a client.
        """

        def forget(now_ms: int) -> None:
            member = group.members.get(member_id)
            if member is not None and member.awaiting_join is call:
                code = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS  # as in waiting_calls.py
                self._rebalance.drop(group, member, code)
                self._rebalance.after_removal(group, now_ms)

        # Not at once: the caller may be in the middle of a request.
        name = ("forget", group.group_id, member_id)
        call.end_wait = lambda: self._timers.schedule(name, 0, forget)

    def _forgotten(self, group: ClassicGroup, member_id: str, now_ms: int) -> None:
        """Go on without a member that has got an id and did not join."""
        self._sessions.forget(member_id)
        self._rebalance.maybe_complete_join(group, now_ms)
        if not group.pending_join_members:
            self._emptied(group, now_ms)

    def _add_member(
        self,
        call: Call,
        group: ClassicGroup,
        member_id: str,
        instance: str | None,
        membership: Membership,
        now_ms: int,
    ) -> None:
        member = ClassicMember(
            member_id, instance, call.client_id, call.client_host, membership
        )
        member.is_new = True
        if group.is_in(S.PREPARING_REBALANCE) and group.previous_state is S.EMPTY:
            group.new_member_added = True
        self._pending.ended(group, member_id)
        group.add(member, call)
        self._rebalance.schedule_session(
            group, member, now_ms, NEW_MEMBER_JOIN_TIMEOUT_MS
        )
        self._rebalance.maybe_prepare_rebalance(group, now_ms, call.waited_ms)

    def _join_existing_member(
        self,
        call: Call,
        group: ClassicGroup,
        request: JoinGroupRequest,
        membership: Membership,
        now_ms: int,
    ) -> None:
        member_id = request.member_id
        is_known = member_id in group.members
        if not is_known and self.may_know_its_id(call, request):
            group.pending_join_members.add(member_id)
        if member_id in group.pending_join_members:
            if request.group_instance_id is not None:
                # A static member is never told to join again with a new id.
                raise ApiError(ErrorCode.UNKNOWN_MEMBER_ID)
            self._add_member(call, group, member_id, None, membership, now_ms)
            return
        group.validate_member(member_id, request.group_instance_id)
        member = group.members[member_id]
        if group.is_in(S.EMPTY):
            raise ApiError(ErrorCode.UNKNOWN_MEMBER_ID)
        if (
            call.is_older
            and group.is_in(S.COMPLETING_REBALANCE)
            and group.protocol_name is not None
            and (group.protocol_name, member.metadata(group.protocol_name))
            in membership.protocols
        ):
            # A predecessor was killed between the record and this answer. The record
            # has only one of the protocols.
            self._update_member(None, group, member, membership, now_ms)
        if member.matches(membership.protocols) and (
            group.is_in(S.COMPLETING_REBALANCE)
            or (group.is_in(S.STABLE) and member_id != group.leader_id)
        ):
            # The answer was lost, or the member joined without a reason: answer again.
            self._rebalance.answer_join(
                call,
                group,
                member,
                after=self._out.logged(self._rebalance.log_of(group)),
            )
            return
        self._update_member(call, group, member, membership, now_ms)
        self._rebalance.maybe_prepare_rebalance(group, now_ms, call.waited_ms)

    def _update_member(
        self,
        call: Call | None,
        group: ClassicGroup,
        member: ClassicMember,
        membership: Membership,
        now_ms: int,
    ) -> None:
        waiting = member.awaiting_join
        if waiting is not None and call is not None:
            # Two connections use this member id: the request of the newer one counts.
            self._rebalance.refuse_join(
                waiting, ErrorCode.UNKNOWN_MEMBER_ID, member.member_id
            )
        group.update(member, membership, call)
        self._rebalance.schedule_session(group, member, now_ms)

    def _rejoin_static_member(
        self,
        call: Call,
        group: ClassicGroup,
        old_id: str,
        new_id: str,
        membership: Membership,
        now_ms: int,
    ) -> None:
        """Let a static member rejoin under a new id; its old id is fenced."""
        leader_before = group.leader_id
        member = group.members[old_id]
        self._fence(group, member)
        self._timers.cancel(("session", group.group_id, old_id))
        group.replace_static_member(old_id, new_id)
        member.client_id, member.client_host = call.client_id, call.client_host
        waits = not group.is_in(S.STABLE)
        self._update_member(call if waits else None, group, member, membership, now_ms)
        if waits:
            self._rebalance.maybe_prepare_rebalance(group, now_ms)
        elif (
            group.select_protocol() != group.protocol_name
            or not self._rebalance.write_group(group)
        ):
            group.set_awaiting_join(member, call)
            self._rebalance.maybe_prepare_rebalance(group, now_ms)
        else:
            # No rebalance: the member goes on with the assignment it had. Older clients
            # would compute a new one if the answer named them as the leader.
            skips = call.version >= _SKIP_ASSIGNMENT_SINCE
            leads = new_id == group.leader_id
            self._rebalance.answer_join(
                call,
                group,
                member,
                members=group.members.values() if skips and leads else (),
                leader_id=group.leader_id if skips else leader_before,
                skip_assignment=skips and leads,
                after=(self._rebalance.log_of(group),),
            )

    def _fence(self, group: ClassicGroup, member: ClassicMember) -> None:
        if member.awaiting_join is not None:
            join = member.awaiting_join
            group.set_awaiting_join(member, None)
            self._rebalance.refuse_join(
                join, ErrorCode.FENCED_INSTANCE_ID, member.member_id
            )
        if member.awaiting_sync is not None:
            sync, member.awaiting_sync = member.awaiting_sync, None
            self._rebalance.refuse_sync(sync, ErrorCode.FENCED_INSTANCE_ID)

    def may_know_its_id(self, call: Call, request: JoinGroupRequest) -> bool:
        """Return whether the sender of a JoinGroup may have its id of a predecessor.

        No log has the ids that are given out with MEMBER_ID_REQUIRED. Either the
        JoinGroup was parked when the predecessor was killed, or it was not sent yet.
        Static members join without an id.
        """
        member_id = request.member_id
        if not member_id or request.group_instance_id:
            return False
        return call.is_older or self._sessions.had_heard(member_id)

    # -- SyncGroup -----------------------------------------------------------------

    def sync(
        self, call: Call, group: ClassicGroup, request: SyncGroupRequest, now_ms: int
    ) -> None:
        """Answer a SyncGroup with the member's assignment, or park it.

        It is parked until the leader has sent the assignment.

        Raises:
            ApiError: the error to answer with.
        """
        if group.is_in(S.DEAD):
            raise ApiError(ErrorCode.COORDINATOR_NOT_AVAILABLE)
        member_id = request.member_id
        group.validate_member(member_id, request.group_instance_id)
        if request.generation_id != group.generation_id:
            raise ApiError(ErrorCode.ILLEGAL_GENERATION)
        if request.protocol_type not in (None, group.protocol_type) or (
            request.protocol_name not in (None, group.protocol_name)
        ):
            raise ApiError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
        if group.is_in(S.EMPTY):
            raise ApiError(ErrorCode.UNKNOWN_MEMBER_ID)
        if group.is_in(S.PREPARING_REBALANCE):
            raise ApiError(ErrorCode.REBALANCE_IN_PROGRESS)
        member = group.members[member_id]
        group.pending_sync_members.discard(member_id)
        if group.is_in(S.STABLE):
            after = self._out.logged(self._rebalance.log_of(group))
            self._rebalance.answer_sync(call, group, member, after)
            self._rebalance.schedule_session(group, member, now_ms)
            self._rebalance.maybe_end_pending_sync(group)
            return
        if member.awaiting_sync is not None:
            self._rebalance.refuse_sync(
                member.awaiting_sync, ErrorCode.UNKNOWN_MEMBER_ID
            )
        member.awaiting_sync = call
        self._end_wait_if_must(call, group, member)
        if member_id == group.leader_id:
            assignments = {
                row.member_id: bytes(row.assignment) for row in request.assignments
            }
            self._rebalance.complete_sync(group, assignments, now_ms)

    def _end_wait_if_must(
        self, call: Call, group: ClassicGroup, member: ClassicMember
    ) -> None:
        """Have a parked SyncGroup refused if it must not wait any longer.

        From then on the member's session runs. If its client has gone, it expires; if
        not, the client joins again.
        """

        def end(now_ms: int) -> None:
            if member.awaiting_sync is call:
                member.awaiting_sync = None
                group.pending_sync_members.add(member.member_id)
                self._rebalance.refuse_sync(call, ErrorCode.REBALANCE_IN_PROGRESS)
                self._rebalance.schedule_session(group, member, now_ms)

        # Not at once: the caller may be in the middle of a request.
        name = ("end sync", group.group_id, member.member_id)
        call.end_wait = lambda: self._timers.schedule(name, 0, end)

    # -- Heartbeat -----------------------------------------------------------------

    def heartbeat(
        self, call: Call, group: ClassicGroup, request: HeartbeatRequest, now_ms: int
    ) -> None:
        """Restart a member's session timer; answer whether it must join again.

        Raises:
            ApiError: the error to answer with.
        """
        code = self.beat(group, request, now_ms)
        self._out.answer(call, HeartbeatResponse(error_code=code))

    def beat(
        self, group: ClassicGroup, request: HeartbeatRequest, now_ms: int
    ) -> ErrorCode:
        """Restart a member's session timer; return REBALANCE_IN_PROGRESS or NONE.

        Raises:
            ApiError: the error to answer with.
        """
        if group.is_in(S.DEAD):
            raise ApiError(ErrorCode.COORDINATOR_NOT_AVAILABLE)
        group.validate_member(request.member_id, request.group_instance_id)
        if request.generation_id != group.generation_id:
            raise ApiError(ErrorCode.ILLEGAL_GENERATION)
        if group.is_in(S.EMPTY):
            raise ApiError(ErrorCode.UNKNOWN_MEMBER_ID)
        self.touch(group, request.member_id, now_ms)
        rebalances = group.is_in(S.PREPARING_REBALANCE)
        return ErrorCode.REBALANCE_IN_PROGRESS if rebalances else ErrorCode.NONE

    def touch(self, group: ClassicGroup, member_id: str, now_ms: int) -> None:
        """Restart the session timer of a member that has sent a request."""
        member = group.members.get(member_id)
        if member is not None and not member.is_new:
            self._rebalance.schedule_session(group, member, now_ms)

    # -- LeaveGroup ----------------------------------------------------------------

    def leave(
        self,
        call: Call,
        group: ClassicGroup | None,
        request: LeaveGroupRequest,
        now_ms: int,
    ) -> None:
        """Remove members at once; answer with an error code for each.

        Raises:
            ApiError: COORDINATOR_NOT_AVAILABLE.
        """
        if group is not None and group.is_in(S.DEAD):
            raise ApiError(ErrorCode.COORDINATOR_NOT_AVAILABLE)
        leaving = request.members
        if call.version < LEAVE_SEVERAL_SINCE:
            leaving = [MemberIdentity(member_id=request.member_id)]
        answers = []
        removed = False
        for identity in leaving:
            code = ErrorCode.UNKNOWN_MEMBER_ID
            if group is not None:
                try:
                    removed |= self._leave_one(group, identity)
                    code = ErrorCode.NONE
                except ApiError as error:
                    code = error.error_code
            answers.append(
                MemberResponse(
                    member_id=identity.member_id,
                    group_instance_id=identity.group_instance_id,
                    error_code=code,
                )
            )
        if removed and group is not None:
            self._rebalance.after_removal(group, now_ms)
        elif group is not None:
            self._rebalance.maybe_complete_join(group, now_ms)
        if call.version < LEAVE_SEVERAL_SINCE:
            response = LeaveGroupResponse(error_code=answers[0].error_code)
        else:
            response = LeaveGroupResponse(members=answers)
        # The answer waits until the group's record is on disk. From it a coordinator
        # that replaces this one learns that the member has left.
        after = NOW if group is None else self._rebalance.written(group)
        self._out.answer(call, response, after)

    def _leave_one(self, group: ClassicGroup, identity: MemberIdentity) -> bool:
        """Remove a member; return False if it had got an id but had not joined yet."""
        member_id, instance = identity.member_id, identity.group_instance_id
        if not member_id and instance is not None:
            # An admin client removes a static member by its instance id alone.
            member_id = group.static_members.get(instance, "")
        if member_id in group.pending_join_members:
            if instance is not None:
                raise ApiError(ErrorCode.UNKNOWN_MEMBER_ID)
            group.pending_join_members.discard(member_id)
            self._sessions.forget(member_id)
            self._pending.ended(group, member_id)
            return False
        group.validate_member(member_id, instance)
        self._rebalance.drop(group, group.members[member_id])
        return True


def _member_id(prefix: str, random_part: str) -> str:
    """Return ``prefix-random_part`` as a member id; cut off a very long prefix."""
    longest = _MAX_STRING - len(random_part) - 1
    if len(prefix) > longest // 4:  # a character has 4 bytes at most
        prefix = prefix.encode()[:longest].decode(errors="ignore")
    return f"{prefix}-{random_part}"

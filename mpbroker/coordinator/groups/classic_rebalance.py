"""Rebalance classic groups: bring a group from one generation to the next.

    PreparingRebalance    JoinGroups are parked until all members have sent one, or
                          until the rebalance timeout. The first members of an empty
                          group wait for group.initial.rebalance.delay.ms, and again for
                          as long if others have come meanwhile.
    CompletingRebalance   The generation is in the log without an assignment, and the
                          JoinGroups are answered. SyncGroups are parked until the
                          leader has sent its own, which has the assignment, or until
                          the rebalance timeout. Then a leader that has sent none is
                          removed, and the others are answered REBALANCE_IN_PROGRESS.
    Stable                The assignment is in the log, and SyncGroups are answered.

A member's session timer runs while none of its requests is parked.

A group's record is written before the JoinGroups are answered, when the leader's
SyncGroup has come, when the group has become empty, and when a member that is in the
record has gone: by LeaveGroup, at the end of its session, or because it sent no
SyncGroup. The record that is written when a member has gone says that a rebalance is
under way, see ClassicGroup.metadata_value().
So if the coordinator is killed after a LeaveGroup was answered, its successor tells the
other members to join again, and does not wait for the one that has gone.

If the coordinator is killed in PreparingRebalance, the log has the last generation. The
successor begins with it, in the state in which it was written, and executes the
members' parked requests again. A parked JoinGroup has waited since its processor
received it, and its member keeps its id, also if no record has it. If the coordinator
is killed in CompletingRebalance, the successor goes on there: it takes the SyncGroups
of the members whose JoinGroups were answered. An id that was given out with
MEMBER_ID_REQUIRED is in shared memory, see Sessions.had_heard().

Source: Kafka's GroupMetadataManager (prepareRebalance, completeClassicGroupJoin and
what belongs to them), with its names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from mpbroker.coordinator.context import CoordinatorContext
from mpbroker.coordinator.groups.classic_group import (
    ClassicGroup,
    ClassicGroupState,
    ClassicMember,
)
from mpbroker.coordinator.groups.group_config import GroupConfig
from mpbroker.coordinator.groups.group_records import (
    group_metadata_key,
    group_metadata_value,
)
from mpbroker.coordinator.outbox import NOW, Call
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ProtocolError
from mpbroker.protocol.messages.join_group import (
    JoinGroupResponse,
    JoinGroupResponseMember,
)
from mpbroker.protocol.messages.sync_group import SyncGroupResponse
from mpbroker.protocol.records.batch_header import BATCH_HEADER_SIZE

S = ClassicGroupState

# How long a JoinGroup may be parked if its member has never been in a generation. Its
# client may have ended, and the group must not wait for it for ever. Kafka's
# NewMemberJoinTimeoutMs.
NEW_MEMBER_JOIN_TIMEOUT_MS: Final = 5 * 60 * 1000
# The least time that is left of a member's session when its group is loaded: in it the
# requests are executed that came while no coordinator lived.
LEAST_SESSION_LEFT_MS: Final = 2000
_NULLABLE_PROTOCOL_SINCE: Final = 7
# A record's bytes beside its key and value, as Kafka estimates them at most.
_RECORD_OVERHEAD: Final = 21


class ClassicRebalance:
    """Moves groups of the classic protocol through rebalances; answers their members.

    Args:
        partition_of: returns the partition of __consumer_offsets that has the records
            of a group.
    """

    def __init__(
        self,
        config: GroupConfig,
        context: CoordinatorContext,
        partition_of: Callable[[str], int],
    ) -> None:
        self._config = config
        self._out = context.outbox
        self._timers = context.timers
        self._sessions = context.sessions
        self._partition_of = partition_of

    # -- into PreparingRebalance ---------------------------------------------------

    def maybe_prepare_rebalance(
        self, group: ClassicGroup, now_ms: int, waited_ms: int = 0
    ) -> None:
        """Begin a rebalance unless the group is in PreparingRebalance already.

        Args:
            waited_ms: how long the JoinGroup that causes the rebalance has waited,
                perhaps while an earlier coordinator was alive. In an empty group this
                time counts as a part of group.initial.rebalance.delay.ms.
        """
        if group.is_in(S.STABLE, S.COMPLETING_REBALANCE, S.EMPTY):
            self._prepare_rebalance(group, now_ms, waited_ms)

    def _timeout_ms(self, group: ClassicGroup) -> int:
        """Return how many ms each phase of a rebalance waits for the members."""
        most = self._config.max_rebalance_timeout_ms
        return min(group.rebalance_timeout_ms, most)

    def _prepare_rebalance(
        self, group: ClassicGroup, now_ms: int, waited_ms: int
    ) -> None:
        if group.is_in(S.COMPLETING_REBALANCE):
            self._reset_and_propagate_assignment_error(
                group, ErrorCode.REBALANCE_IN_PROGRESS, now_ms
            )
        self._timers.cancel(("sync", group.group_id))
        is_initial = group.is_in(S.EMPTY)
        group.transition_to(S.PREPARING_REBALANCE, now_ms)
        if is_initial:
            delay = self._config.group_initial_rebalance_delay_ms
            remaining = max(self._timeout_ms(group) - delay, 0)
            if delay:
                began_ms = now_ms - waited_ms
                self._schedule_initial(group, delay, remaining, began_ms)
            else:
                self._complete_join(group, now_ms)
        else:
            self._maybe_complete_join_else_schedule(group, now_ms)

    def _schedule_initial(
        self, group: ClassicGroup, delay_ms: int, remaining_ms: int, began_ms: int
    ) -> None:
        end_ms = began_ms + delay_ms

        def expire(at_ms: int) -> None:
            if group.new_member_added and remaining_ms:
                # Another member has come: there may be more of them.
                group.new_member_added = False
                delay = min(self._config.group_initial_rebalance_delay_ms, remaining_ms)
                remaining = max(remaining_ms - delay_ms, 0)
                self._schedule_initial(group, delay, remaining, end_ms)
            else:
                self._complete_join(group, at_ms)

        self._timers.schedule(("join", group.group_id), end_ms, expire)

    def _maybe_complete_join_else_schedule(
        self, group: ClassicGroup, now_ms: int
    ) -> None:
        if group.has_all_members_joined:
            self._complete_join(group, now_ms)
        else:
            self._timers.schedule(
                ("join", group.group_id),
                now_ms + self._timeout_ms(group),
                lambda at_ms: self._complete_join(group, at_ms),
            )

    def maybe_complete_join(self, group: ClassicGroup, now_ms: int) -> None:
        """Begin the next generation if all members have joined for it."""
        if (
            group.is_in(S.PREPARING_REBALANCE)
            and group.has_all_members_joined
            and group.previous_state is not S.EMPTY
        ):
            self._complete_join(group, now_ms)

    # -- into CompletingRebalance --------------------------------------------------

    def _complete_join(self, group: ClassicGroup, now_ms: int) -> None:
        group_id = group.group_id
        self._timers.cancel(("join", group_id))
        if not group.is_in(S.PREPARING_REBALANCE):
            return  # the group was removed meanwhile
        gone = [
            member
            for member in group.members.values()
            if member.awaiting_join is None and not member.is_static
        ]
        for member in gone:
            self._forget_session(group, member)
            group.remove(member.member_id)
        if group.members and not group.maybe_elect_new_joined_leader():
            # Only static members are left, and none has joined. They stay until their
            # sessions end: wait once more.
            self._timers.schedule(
                ("join", group_id),
                now_ms + self._timeout_ms(group),
                lambda at_ms: self._complete_join(group, at_ms),
            )
            return
        group.init_next_generation(now_ms)
        if group.is_in(S.EMPTY):
            self.write_group(group)
            return
        joins = []
        for member in group.members.values():
            if member.awaiting_join is not None:
                joins.append((member.awaiting_join, member))
            group.set_awaiting_join(member, None)
            member.is_new = False
            self.schedule_session(group, member, now_ms)
        # The record comes before the answers: if the coordinator is killed, the members
        # send their SyncGroups to its successor. A power cut may take the record, for
        # it ends the connections, too, and the members join again.
        self.write_group(group)
        after = self._out.logged(self.log_of(group))
        for call, member in joins:
            self.answer_join(call, group, member, after=after)
        self._wait_for_syncs(group, now_ms)

    def _wait_for_syncs(self, group: ClassicGroup, now_ms: int) -> None:
        """Give all members of a new generation the time to send their SyncGroups."""
        group.pending_sync_members.update(group.members)
        generation = group.generation_id
        self._timers.schedule(
            ("sync", group.group_id),
            now_ms + self._timeout_ms(group),
            lambda at_ms: self._expire_pending_sync(group, generation, at_ms),
        )

    def _expire_pending_sync(
        self, group: ClassicGroup, generation_id: int, now_ms: int
    ) -> None:
        """Remove the members that have joined a generation but sent no SyncGroup."""
        if generation_id != group.generation_id or not group.is_in(
            S.COMPLETING_REBALANCE, S.STABLE
        ):
            return
        pending = [
            group.members[member_id]
            for member_id in group.pending_sync_members
            if member_id in group.members
        ]
        if pending:
            for member in pending:
                self.drop(group, member)
            self.after_removal(group, now_ms)

    # -- into Stable ---------------------------------------------------------------

    def complete_sync(
        self, group: ClassicGroup, assignments: dict[str, bytes], now_ms: int
    ) -> None:
        """Store the leader's assignment, and answer all parked SyncGroups.

        If the assignment is too large for a record, all members are answered with an
        error, and join again.

        Args:
            assignments: the encoded assignment of each member, by member id.
        """
        for member in group.members.values():
            member.assignment = assignments.get(member.member_id, b"")
        group.transition_to(S.STABLE, now_ms)
        if not self.write_group(group):
            error_code = ErrorCode.UNKNOWN_SERVER_ERROR
            self._reset_and_propagate_assignment_error(group, error_code, now_ms)
            self.maybe_prepare_rebalance(group, now_ms)
            return
        # The answers wait until the group's record is on disk. Otherwise a member could
        # work in a generation that a successor does not find in the log.
        after = (self.log_of(group),)
        for member in group.members.values():
            self._propagate(group, member, ErrorCode.NONE, after, now_ms)
        self.maybe_end_pending_sync(group)

    def maybe_end_pending_sync(self, group: ClassicGroup) -> None:
        if not group.pending_sync_members:
            self._timers.cancel(("sync", group.group_id))

    def _reset_and_propagate_assignment_error(
        self, group: ClassicGroup, error_code: ErrorCode, now_ms: int
    ) -> None:
        for member in group.members.values():
            member.assignment = b""
            self._propagate(group, member, error_code, NOW, now_ms)

    def _propagate(
        self,
        group: ClassicGroup,
        member: ClassicMember,
        error_code: ErrorCode,
        after: tuple[int, ...],
        now_ms: int,
    ) -> None:
        call = member.awaiting_sync
        if call is None:
            return
        member.awaiting_sync = None
        group.pending_sync_members.discard(member.member_id)
        if error_code is ErrorCode.NONE:
            self.answer_sync(call, group, member, after)
        else:
            self.refuse_sync(call, error_code)
        self.schedule_session(group, member, now_ms)

    # -- members that go -------------------------------------------------------------

    def remove_member(
        self, group: ClassicGroup, member: ClassicMember, now_ms: int
    ) -> None:
        """Remove a member that has left or timed out, and rebalance the others."""
        self.drop(group, member)
        self.after_removal(group, now_ms)

    def after_removal(self, group: ClassicGroup, now_ms: int) -> None:
        """Rebalance a group after members were removed from it.

        Write the group's record if the latest record has such a member.
        """
        if group.is_in(S.STABLE, S.COMPLETING_REBALANCE):
            self.maybe_prepare_rebalance(group, now_ms)
        else:
            self.maybe_complete_join(group, now_ms)
        if group.has_logged_members_that_are_gone:
            self.write_group(group)

    def drop(
        self,
        group: ClassicGroup,
        member: ClassicMember,
        error_code: ErrorCode = ErrorCode.UNKNOWN_MEMBER_ID,
    ) -> None:
        self._forget_session(group, member)
        join, sync = member.awaiting_join, member.awaiting_sync
        group.remove(member.member_id)
        member.awaiting_join = member.awaiting_sync = None
        if join is not None:
            self.refuse_join(join, error_code, member.member_id)
        if sync is not None:
            self.refuse_sync(sync, error_code)

    def schedule_session(
        self,
        group: ClassicGroup,
        member: ClassicMember,
        now_ms: int,
        timeout_ms: int = 0,
    ) -> None:
        """Start or restart a member's session timer.

        Args:
            timeout_ms: the time until the session ends; 0: its session timeout.
        """
        self._sessions.heard(member.member_id, now_ms)
        left_ms = timeout_ms or member.session_timeout_ms
        self._schedule_session(group, member, now_ms + left_ms)

    def _forget_session(self, group: ClassicGroup, member: ClassicMember) -> None:
        self._timers.cancel(("session", group.group_id, member.member_id))
        self._sessions.forget(member.member_id)

    def _schedule_session(
        self, group: ClassicGroup, member: ClassicMember, end_ms: int
    ) -> None:
        member_id = member.member_id
        self._timers.schedule(
            ("session", group.group_id, member_id),
            end_ms,
            lambda at_ms: self._expire_session(group, member_id, at_ms),
        )

    def _expire_session(self, group: ClassicGroup, member_id: str, now_ms: int) -> None:
        member = group.members.get(member_id)
        if group.is_in(S.DEAD) or member is None:
            return
        waits = member.awaiting_join is not None or member.awaiting_sync is not None
        if member.is_new or not waits:
            self.remove_member(group, member, now_ms)
        else:
            # The member's request is parked: its timer starts with the answer.
            self._sessions.forget(member_id)

    def refuse_waiting(self, group: ClassicGroup, error_code: ErrorCode) -> None:
        """Answer all parked requests of members with an error."""
        for member in group.members.values():
            join, sync = member.awaiting_join, member.awaiting_sync
            if join is not None:
                group.set_awaiting_join(member, None)
                self.refuse_join(join, error_code, member.member_id)
            if sync is not None:
                member.awaiting_sync = None
                self.refuse_sync(sync, error_code)

    def forget(self, group: ClassicGroup, error_code: ErrorCode) -> None:
        """Remove a group's members: answer their parked requests, cancel all timers."""
        for member in list(group.members.values()):
            self.drop(group, member, error_code)
        for member_id in group.pending_join_members:
            self._timers.cancel(("pending", group.group_id, member_id))
        self._timers.cancel(("join", group.group_id))
        self._timers.cancel(("sync", group.group_id))

    # -- records and answers -----------------------------------------------------------

    def log_of(self, group: ClassicGroup) -> int:
        """Return the partition of __consumer_offsets that has the group's records."""
        return self._partition_of(group.group_id)

    def written(self, group: ClassicGroup) -> tuple[int, ...]:
        """Return the logs that must be on disk before an answer is sent.

        This is the group's log, or NOW (none): see `Outbox.written`.
        """
        return self._out.written(self.log_of(group))

    def write_group(self, group: ClassicGroup) -> bool:
        """Write the group's record to the log; return False if it is too large."""
        key = group_metadata_key(group.group_id)
        try:
            value = group_metadata_value(group.metadata_value())
        except ProtocolError:  # a member id, made of a long client id, does not fit
            return False
        size = BATCH_HEADER_SIZE + _RECORD_OVERHEAD + len(key) + len(value)
        if size > self._config.message_max_bytes:
            return False
        self._out.write(self.log_of(group), key, value)
        group.note_logged()
        return True

    def loaded(self, group: ClassicGroup, now_ms: int) -> None:
        """Start the session timers of a loaded group; continue its rebalance, if any.

        The time since a member's last request, as the previous coordinator has stored
        it, counts as a part of its session timeout.
        """
        for member in group.members.values():
            silence_ms = self._sessions.take_over(member.member_id, now_ms)
            left_ms = member.session_timeout_ms
            if silence_ms:
                left_ms = max(left_ms - silence_ms, LEAST_SESSION_LEFT_MS)
            self._schedule_session(group, member, now_ms + left_ms)
        if group.is_in(S.COMPLETING_REBALANCE):
            self._wait_for_syncs(group, now_ms)
        if group.departed is not None:
            self.after_removal(group, now_ms)

    def answer_join(
        self,
        call: Call,
        group: ClassicGroup,
        member: ClassicMember,
        *,
        members: Iterable[ClassicMember] | None = None,
        leader_id: str | None = None,
        skip_assignment: bool = False,
        after: tuple[int, ...] = NOW,
    ) -> None:
        """Answer a member's JoinGroup with the group's generation.

        Args:
            members: the members that the answer names. By default these are all members
                if the answer is for the leader, else none.
            leader_id: the leader that the answer names; by default the group's leader.
        """
        if members is None:
            leads = member.member_id == group.leader_id
            members = group.members.values() if leads else ()
        protocol = group.protocol_name or ""
        response = JoinGroupResponse(
            error_code=ErrorCode.NONE,
            generation_id=group.generation_id,
            protocol_type=group.protocol_type,
            protocol_name=protocol,
            leader=leader_id or group.leader_id or "",
            skip_assignment=skip_assignment,
            member_id=member.member_id,
            members=[
                JoinGroupResponseMember(
                    member_id=other.member_id,
                    group_instance_id=other.group_instance_id,
                    metadata=other.metadata(protocol),
                )
                for other in members
            ],
        )
        self._out.answer(call, response, after)

    def refuse_join(self, call: Call, error_code: ErrorCode, member_id: str) -> None:
        self._out.answer(call, refused_join(call, error_code, member_id))

    def answer_sync(
        self,
        call: Call,
        group: ClassicGroup,
        member: ClassicMember,
        after: tuple[int, ...] = NOW,
    ) -> None:
        """Answer a member's SyncGroup with its assignment."""
        response = SyncGroupResponse(
            error_code=ErrorCode.NONE,
            protocol_type=group.protocol_type,
            protocol_name=group.protocol_name,
            assignment=member.assignment,
        )
        self._out.answer(call, response, after)

    def refuse_sync(self, call: Call, error_code: ErrorCode) -> None:
        self._out.answer(call, SyncGroupResponse(error_code=error_code))


def refused_join(
    call: Call, error_code: ErrorCode, member_id: str = ""
) -> JoinGroupResponse:
    """Return a response that answers a JoinGroup with an error."""
    nameless = None if call.version >= _NULLABLE_PROTOCOL_SINCE else ""
    return JoinGroupResponse(
        error_code=error_code, protocol_name=nameless, member_id=member_id
    )

"""Keep the state of a classic group: its members, its generation, its state.

This module makes no decisions. `classic_protocol` and `classic_rebalance` decide what a
member may do, and when it gets which answer.

Source: Kafka's ClassicGroup and ClassicGroupState.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Final

from mpbroker.base.errors import MpbrokerError
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.coordinator.groups.consumer_protocol import (
    CONSUMER_PROTOCOL,
    subscribed_topics,
)
from mpbroker.coordinator.groups.group_records import GroupMetadataValue, MemberMetadata
from mpbroker.coordinator.outbox import Call
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.join_group import JoinGroupRequest

# Name and metadata of each protocol (assignor) that a member can use, best first.
Protocols = Sequence[tuple[str, bytes]]


class ClassicGroupState(Enum):
    """The states of a group; the values are the names that clients see."""

    EMPTY = "Empty"  # no members; it may have offsets
    PREPARING_REBALANCE = "PreparingRebalance"  # waits for members to join again
    COMPLETING_REBALANCE = "CompletingRebalance"  # waits for the leader's assignment
    STABLE = "Stable"  # every member can have its assignment
    DEAD = "Dead"  # the group was removed; a caller that still has it looks again


S = ClassicGroupState

# The states that may come before each state; a pair that is absent is illegal.
PREVIOUS_STATES: Final[Mapping[ClassicGroupState, frozenset[ClassicGroupState]]] = {
    S.EMPTY: frozenset({S.PREPARING_REBALANCE}),
    S.PREPARING_REBALANCE: frozenset({S.STABLE, S.COMPLETING_REBALANCE, S.EMPTY}),
    S.COMPLETING_REBALANCE: frozenset({S.PREPARING_REBALANCE}),
    S.STABLE: frozenset({S.COMPLETING_REBALANCE}),
    S.DEAD: frozenset(S),
}

# The session timeout that a group's record has for a member that has gone.
_SESSION_IS_OVER: Final = 0
# The id of a member that was never there: with a session that is over, it says that the
# record's generation has no assignment yet.
_NO_ASSIGNMENT_YET: Final = ""


class IllegalGroupTransitionError(MpbrokerError):
    """The group was put into a state that cannot follow its state: a bug of ours."""


class Membership(NamedTuple):
    """The protocols that a member supports, and its timeouts, from its JoinGroup."""

    protocol_type: str
    protocols: Protocols
    rebalance_timeout_ms: int
    session_timeout_ms: int

    @classmethod
    def of_request(cls, request: JoinGroupRequest) -> Membership:
        timeout_ms = request.rebalance_timeout_ms
        if timeout_ms < 0:  # version 0 has none: the session timeout stands for it
            timeout_ms = request.session_timeout_ms
        return cls(
            request.protocol_type,
            [(row.name, bytes(row.metadata)) for row in request.protocols],
            timeout_ms,
            request.session_timeout_ms,
        )


class ClassicMember:
    """A member of a classic group."""

    __slots__ = (
        "assignment",
        "awaiting_join",
        "awaiting_sync",
        "client_host",
        "client_id",
        "group_instance_id",
        "is_new",
        "member_id",
        "protocol_type",
        "protocols",
        "rebalance_timeout_ms",
        "session_timeout_ms",
    )

    def __init__(
        self,
        member_id: str,
        group_instance_id: str | None,
        client_id: str,
        client_host: str,
        membership: Membership,
        assignment: bytes = b"",
    ) -> None:
        self.member_id = member_id
        self.group_instance_id = group_instance_id
        self.client_id = client_id
        self.client_host = client_host
        self.take(membership)
        self.assignment = assignment
        # Its parked JoinGroup or SyncGroup; never both.
        self.awaiting_join: Call | None = None
        self.awaiting_sync: Call | None = None
        # True until the member is in a generation: until then its session may end while
        # its JoinGroup waits.
        self.is_new = False

    def take(self, membership: Membership) -> None:
        """Store the protocols and the timeouts of the member's latest JoinGroup."""
        self.protocol_type = membership.protocol_type
        self.protocols = membership.protocols
        self.rebalance_timeout_ms = membership.rebalance_timeout_ms
        self.session_timeout_ms = membership.session_timeout_ms

    @property
    def is_static(self) -> bool:
        return self.group_instance_id is not None

    def metadata(self, protocol: str) -> bytes:
        """Return the metadata that the member sent for a protocol.

        Return b"" if the member does not support the protocol.
        """
        for name, metadata in self.protocols:
            if name == protocol:
                return metadata
        return b""

    def matches(self, protocols: Protocols) -> bool:
        """Return whether the member's latest JoinGroup had exactly these protocols."""
        return list(self.protocols) == list(protocols)

    def vote(self, candidates: frozenset[str] | set[str]) -> str:
        """Return the protocol that the member prefers among the candidates."""
        for name, _ in self.protocols:
            if name in candidates:
                return name
        raise AssertionError(f"{self.member_id} has none of {sorted(candidates)}")


class ClassicGroup:
    """A group of the classic protocol, or one that only has committed offsets."""

    type_name: Final = "classic"

    def __init__(
        self,
        group_id: str,
        now_ms: int,
        state: ClassicGroupState = ClassicGroupState.EMPTY,
    ) -> None:
        self.group_id = group_id
        self.state = state
        self.previous_state = ClassicGroupState.DEAD
        self.state_timestamp_ms = now_ms  # when the state last changed
        self.protocol_type: str | None = None
        self.protocol_name: str | None = None
        self.generation_id = 0
        self.leader_id: str | None = None
        self.members: dict[str, ClassicMember] = {}
        self.static_members: dict[str, str] = {}  # instance id -> member id
        # Ids that were given out with MEMBER_ID_REQUIRED and have not joined yet.
        self.pending_join_members: set[str] = set()
        # Members whose JoinGroup is answered and that have sent no SyncGroup yet.
        self.pending_sync_members: set[str] = set()
        # The ids of the members in the group's latest record, and the last member that
        # has left after it was in a record; see metadata_value().
        self.logged_members: frozenset[str] = frozenset()
        self.departed: ClassicMember | None = None
        self.new_member_added = False
        self.num_awaiting_join = 0
        self._supported: Counter[str] = Counter()

    # -- state ---------------------------------------------------------------------

    def is_in(self, *states: ClassicGroupState) -> bool:
        return self.state in states

    def transition_to(self, state: ClassicGroupState, now_ms: int) -> None:
        """Change the group's state.

        Raises:
            IllegalGroupTransitionError: PREVIOUS_STATES does not allow the change.
        """
        if self.state not in PREVIOUS_STATES[state]:
            raise IllegalGroupTransitionError(
                f"group {self.group_id}: {state.name} after {self.state.name}"
            )
        self.previous_state, self.state = self.state, state
        self.state_timestamp_ms = now_ms

    @property
    def rebalance_timeout_ms(self) -> int:
        """The longest rebalance timeout of the members in ms; 0 if there are none."""
        return max(
            (member.rebalance_timeout_ms for member in self.members.values()), default=0
        )

    @property
    def has_all_members_joined(self) -> bool:
        return (
            len(self.members) == self.num_awaiting_join
            and not self.pending_join_members
        )

    def init_next_generation(self, now_ms: int) -> None:
        """Begin the next generation; without members the group becomes Empty."""
        self.generation_id = (self.generation_id + 1) & 0x7FFF_FFFF
        self.pending_sync_members.clear()
        if self.members:
            self.protocol_name = self.select_protocol()
            self.transition_to(S.COMPLETING_REBALANCE, now_ms)
        else:
            self.protocol_name = None
            self.transition_to(S.EMPTY, now_ms)

    # -- members -------------------------------------------------------------------

    def add(self, member: ClassicMember, join: Call | None = None) -> None:
        """Add a member; the first member is the leader and sets the protocol type.

        Args:
            join: the member's JoinGroup, if it is parked.
        """
        if not self.members:
            self.protocol_type = member.protocol_type
        if self.leader_id is None:
            self.leader_id = member.member_id
        self.members[member.member_id] = member
        self._supported.update({name for name, _ in member.protocols})
        if member.group_instance_id is not None:
            self.static_members[member.group_instance_id] = member.member_id
        self.set_awaiting_join(member, join)
        self.pending_join_members.discard(member.member_id)

    def remove(self, member_id: str) -> ClassicMember | None:
        """Remove a member; the caller answers its parked requests."""
        member = self.members.pop(member_id, None)
        if member is not None:
            if member_id in self.logged_members:
                self.departed = member
            self._forget_protocols(member)
            if member.awaiting_join is not None:
                self.num_awaiting_join -= 1
            instance = member.group_instance_id
            if instance is not None and self.static_members.get(instance) == member_id:
                del self.static_members[instance]
        if self.leader_id == member_id:
            self.leader_id = next(iter(self.members), None)
        self.pending_join_members.discard(member_id)
        self.pending_sync_members.discard(member_id)
        return member

    def update(
        self,
        member: ClassicMember,
        membership: Membership,
        join: Call | None,
    ) -> None:
        """Store the new protocols and timeouts of a member that joins again.

        Args:
            join: the member's JoinGroup, if it is parked.
        """
        self._forget_protocols(member)
        member.take(membership)
        self._supported.update({name for name, _ in member.protocols})
        self.set_awaiting_join(member, join)

    def replace_static_member(self, old_member_id: str, new_member_id: str) -> None:
        """Replace the member id of a static member that has joined again."""
        member = self.members.pop(old_member_id)
        assert member.group_instance_id is not None
        member.member_id = new_member_id
        self.members[new_member_id] = member
        self.static_members[member.group_instance_id] = new_member_id
        if self.leader_id == old_member_id:
            self.leader_id = new_member_id
        if old_member_id in self.logged_members:
            self.logged_members = self.logged_members - {old_member_id} | {
                new_member_id
            }
        if old_member_id in self.pending_sync_members:
            self.pending_sync_members.discard(old_member_id)
            self.pending_sync_members.add(new_member_id)

    def set_awaiting_join(self, member: ClassicMember, join: Call | None) -> None:
        """Store a member's parked JoinGroup, or None when it is answered."""
        self.num_awaiting_join += (join is not None) - (
            member.awaiting_join is not None
        )
        member.awaiting_join = join

    def _forget_protocols(self, member: ClassicMember) -> None:
        self._supported.subtract({name for name, _ in member.protocols})
        self._supported += Counter()  # drops the protocols that are left at 0

    def maybe_elect_new_joined_leader(self) -> bool:
        """Elect another leader if the leader has not joined for the next generation.

        Return False if no member has joined.
        """
        leader = self.members.get(self.leader_id or "")
        if leader is not None and leader.awaiting_join is not None:
            return True
        for member in self.members.values():
            if member.awaiting_join is not None:
                self.leader_id = member.member_id
                return True
        return False

    # -- protocols -----------------------------------------------------------------

    def supports_protocols(self, protocol_type: str, names: Iterable[str]) -> bool:
        """Return whether a new member's protocols fit those of all other members.

        At least one protocol must be common to all, and the protocol type must be the
        same. In an empty group any protocols are valid.
        """
        if self.state is S.EMPTY or not self.members:
            return bool(protocol_type) and any(True for _ in names)
        total = len(self.members)
        return self.protocol_type == protocol_type and any(
            self._supported[name] == total for name in names
        )

    def select_protocol(self) -> str:
        """Return the protocol with most votes among those that all members support."""
        total = len(self.members)
        candidates = {name for name, n in self._supported.items() if n == total}
        votes = Counter(member.vote(candidates) for member in self.members.values())
        return votes.most_common(1)[0][0]

    def is_subscribed_to(self, topic: str) -> bool:
        """Return whether a member subscribes to a topic.

        Return True also if the subscriptions are not known (`subscribed_topics`).
        """
        topics = self.subscribed_topics()
        return topics is None or topic in topics

    def subscribed_topics(self) -> set[str] | None:
        """Return the topics to which the members subscribe.

        Return None if the members are not consumers, or if the metadata that one of
        them has sent cannot be read.
        """
        if self.protocol_type != CONSUMER_PROTOCOL:
            return None
        if not self.members:
            return set()
        if self.protocol_name is None:
            return None
        wanted: set[str] = set()
        for member in self.members.values():
            topics = subscribed_topics(member.metadata(self.protocol_name))
            if topics is None:
                return None
            wanted.update(topics)
        return wanted

    # -- checks ----------------------------------------------------------------------

    def validate_member(self, member_id: str, group_instance_id: str | None) -> None:
        """Check that a member id is known, and is the latest one of its instance id.

        Raises:
            ApiError: UNKNOWN_MEMBER_ID, FENCED_INSTANCE_ID.
        """
        if group_instance_id is not None:
            known = self.static_members.get(group_instance_id)
            if known is None:
                raise ApiError(ErrorCode.UNKNOWN_MEMBER_ID)
            if known != member_id:
                raise ApiError(ErrorCode.FENCED_INSTANCE_ID)
        if member_id not in self.members:
            raise ApiError(ErrorCode.UNKNOWN_MEMBER_ID)

    def validate_offset_commit(
        self,
        member_id: str,
        group_instance_id: str | None,
        generation_id: int,
        *,
        transactional: bool = False,
    ) -> None:
        """Raise an error if a member may not commit offsets now.

        Raises:
            ApiError: COORDINATOR_NOT_AVAILABLE, UNKNOWN_MEMBER_ID, FENCED_INSTANCE_ID,
                ILLEGAL_GENERATION, REBALANCE_IN_PROGRESS.
        """
        if self.state is S.DEAD:
            raise ApiError(ErrorCode.COORDINATOR_NOT_AVAILABLE)
        if generation_id < 0 and self.state is S.EMPTY:
            return  # a consumer without group management, or an admin client
        if generation_id >= 0 or member_id or group_instance_id is not None:
            self.validate_member(member_id, group_instance_id)
            if generation_id != self.generation_id:
                raise ApiError(ErrorCode.ILLEGAL_GENERATION)
        elif not transactional and self.state is not S.EMPTY:
            raise ApiError(ErrorCode.UNKNOWN_MEMBER_ID)
        if not transactional and self.state is S.COMPLETING_REBALANCE:
            raise ApiError(ErrorCode.REBALANCE_IN_PROGRESS)

    # -- the log -----------------------------------------------------------------------

    @property
    def has_logged_members_that_are_gone(self) -> bool:
        return not self.logged_members <= self.members.keys()

    def note_logged(self) -> None:
        """Note that a record with the group's present members was written."""
        self.logged_members = frozenset(
            member.member_id for member in self.members.values() if not member.is_new
        )

    def metadata_value(self) -> GroupMetadataValue:
        """Return the value of the group's record in __consumer_offsets.

        If a member has left during a rebalance, the record still names it, with a
        session timeout of 0. For a coordinator that loads the record (of this broker or
        of Kafka) the member's session has ended, so it begins the rebalance again. A
        member that joins for the first time is left out: the next coordinator gets its
        parked JoinGroup.

        The record of a generation without an assignment names a member that was never
        there, in the same way. A coordinator of this broker goes on with the
        generation; Kafka, which does not write such records, begins the rebalance
        again.
        """
        protocol = self.protocol_name
        value = GroupMetadataValue(
            protocol_type=self.protocol_type or "",
            generation=self.generation_id,
            protocol=protocol,
            leader=self.leader_id,
            current_state_timestamp=self.state_timestamp_ms,
            members=[
                _row(member, protocol)
                for member in self.members.values()
                if not member.is_new
            ],
        )
        gone = self.departed
        if self.is_in(S.COMPLETING_REBALANCE):
            for row in value.members:
                row.assignment = b""
            gone = next(iter(self.members.values()))
        if gone is not None and not self.is_in(S.STABLE, S.EMPTY):
            row = _row(gone, protocol)
            if self.is_in(S.COMPLETING_REBALANCE):
                row.member_id, row.assignment = _NO_ASSIGNMENT_YET, b""
            row.session_timeout = _SESSION_IS_OVER
            row.group_instance_id = None  # another member may have it by now
            value.members.append(row)
        return value

    @classmethod
    def of_record(
        cls, group_id: str, value: GroupMetadataValue, now_ms: int
    ) -> ClassicGroup:
        """Make a group from its record: Empty if it has no members, otherwise Stable.

        If the record's generation has no assignment yet, the group is in
        CompletingRebalance, and the caller waits for the SyncGroups. If the record
        names a member that has left during a rebalance, ``departed`` is this member,
        and the caller begins the rebalance again.
        """
        lives = any(row.session_timeout > _SESSION_IS_OVER for row in value.members)
        completes = any(row.member_id == _NO_ASSIGNMENT_YET for row in value.members)
        state = S.COMPLETING_REBALANCE if completes else S.STABLE
        state = state if lives else S.EMPTY
        group = cls(group_id, now_ms, state)
        group.generation_id = value.generation
        group.protocol_type = value.protocol_type or None
        group.protocol_name = value.protocol
        group.leader_id = value.leader
        if value.current_state_timestamp >= 0:
            group.state_timestamp_ms = value.current_state_timestamp
        for row in value.members:
            timeout = row.rebalance_timeout
            membership = Membership(
                value.protocol_type,
                ((value.protocol or "", bytes(row.subscription)),),
                timeout if timeout > 0 else row.session_timeout,
                row.session_timeout,
            )
            member = ClassicMember(
                row.member_id,
                row.group_instance_id,
                row.client_id,
                row.client_host,
                membership,
                bytes(row.assignment),
            )
            if row.session_timeout > _SESSION_IS_OVER:
                group.add(member)
            elif row.member_id != _NO_ASSIGNMENT_YET:
                group.departed = member
        group.note_logged()
        if group.leader_id not in group.members:
            group.leader_id = next(iter(group.members), None)
        return group


def _row(member: ClassicMember, protocol: str | None) -> MemberMetadata:
    return MemberMetadata(
        member_id=member.member_id,
        group_instance_id=member.group_instance_id,
        client_id=member.client_id,
        client_host=member.client_host,
        rebalance_timeout=member.rebalance_timeout_ms,
        session_timeout=member.session_timeout_ms,
        subscription=member.metadata(protocol or ""),
        assignment=member.assignment,
    )

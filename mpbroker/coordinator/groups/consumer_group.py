"""Keep the state of a consumer group (KIP-848): epochs, target assignment, members.

    group epoch       grows with every change of members, subscriptions or topics
    assignment epoch  the group epoch that the target assignment was made for
    member epoch      the assignment epoch whose share the member has reached

A member is not given a partition that another member still holds. The holder gives it
up first, at its own heartbeat, so no member waits for all the others.

`consumer_group_rebalance` decides which records are written;
`consumer_group_heartbeat` and `mixed_protocol` decide the answers.

Source: KIP-848; Kafka's ConsumerGroup, ConsumerGroupMember, CurrentAssignmentBuilder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from enum import Enum, IntEnum
from math import inf
from typing import Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.coordinator.groups.assignors import Partitions, TopicId
from mpbroker.coordinator.groups.consumer_protocol import CONSUMER_PROTOCOL
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError

LEAVE_STATIC_EPOCH: Final = -2
_MEMBER_EPOCH_SINCE: Final = 9


class ConsumerGroupState(Enum):
    """The states of a group; the values are the names that clients see."""

    EMPTY = "Empty"
    ASSIGNING = "Assigning"  # the target assignment is older than the group epoch
    RECONCILING = "Reconciling"  # a member has not reached the target yet
    STABLE = "Stable"
    DEAD = "Dead"


class MemberState(IntEnum):
    """A member's progress to its target assignment; the log has the same numbers."""

    STABLE = 0  # it has its share of the target assignment of its epoch
    UNREVOKED_PARTITIONS = 1  # it must give partitions up before it goes on
    UNRELEASED_PARTITIONS = 2  # it waits for partitions that others still hold


class ClassicSide(NamedTuple):
    """The additional state of a member that speaks the classic protocol."""

    session_timeout_ms: int
    protocols: tuple[tuple[str, bytes], ...]  # name and metadata, best first


class ConsumerMember:
    """A member of a consumer group."""

    __slots__ = (
        "assigned",
        "assigned_since",
        "classic",
        "client_host",
        "client_id",
        "instance_id",
        "member_epoch",
        "member_id",
        "pending_revocation",
        "previous_epoch",
        "rack_id",
        "rebalance_timeout_ms",
        "seen_by",
        "sees",
        "server_assignor",
        "state",
        "topic_names",
        "topic_regex",
    )

    def __init__(self, member_id: str, instance_id: str | None = None) -> None:
        self.member_id = member_id
        self.instance_id = instance_id
        self.rack_id: str | None = None
        self.client_id = ""
        self.client_host = ""
        self.rebalance_timeout_ms = -1
        self.server_assignor: str | None = None
        self.topic_names: tuple[str, ...] = ()
        self.topic_regex: str | None = None
        # The topics that match its pattern and that it may describe, if there is an
        # authorizer; and the pattern and the versions with which they were looked up
        # (see patterns.py). Not in the log.
        self.sees: frozenset[str] | None = None
        self.seen_by: tuple[str, int, int | None] | None = None
        self.classic: ClassicSide | None = None
        self.member_epoch = 0
        self.previous_epoch = -1
        self.state = MemberState.STABLE
        self.assigned: Partitions = {}
        self.pending_revocation: Partitions = {}
        # The member epoch with which it was given each of these partitions
        # (KIP-1251).
        # The epoch of a partition that is not here is not known.
        self.assigned_since: dict[TopicId, dict[int, int]] = {}

    def subscription(self) -> tuple[object, ...]:
        """Return the member's values on which an assignment depends."""
        return (self.topic_names, self.topic_regex, self.server_assignor)

    def metadata(self) -> tuple[object, ...]:
        """Return the member's subscription, client and timeout, as for its record."""
        return (
            self.instance_id,
            self.rack_id,
            self.client_id,
            self.client_host,
            self.rebalance_timeout_ms,
            self.classic,
            *self.subscription(),
        )

    def position(self) -> tuple[object, ...]:
        """Return the member's epochs and partitions, as its record has them."""
        return (
            self.member_epoch,
            self.previous_epoch,
            self.state,
            _copy(self.assigned),
            _copy(self.pending_revocation),
        )

    def keep_epochs(self) -> None:
        """Note the member's epoch as that of partitions that it has been given."""
        before, self.assigned_since = self.assigned_since, {}
        for partitions in (self.assigned, self.pending_revocation):
            for topic, numbers in partitions.items():
                known = before.get(topic, {})
                self.assigned_since.setdefault(topic, {}).update(
                    (number, known.get(number, self.member_epoch)) for number in numbers
                )


class ConsumerGroup:
    """One group of the consumer protocol."""

    type_name: Final = "consumer"
    protocol_type: Final = CONSUMER_PROTOCOL

    def __init__(self, group_id: str) -> None:
        self.group_id = group_id
        self.group_epoch = 0
        self.assignment_epoch = 0
        self.assignor_name = ""
        self.members: dict[str, ConsumerMember] = {}
        self.static_members: dict[str, str] = {}
        self.target: dict[str, Partitions] = {}
        # The topics that match each pattern of its members.
        self.patterns: dict[str, frozenset[str]] = {}
        # The existing topics of all subscriptions, and their numbers of partitions.
        self.topics: dict[str, int] = {}
        self.metadata_hash = 0  # of these topics, when the group epoch began
        self.topics_version = -1  # Topics.version() when they were looked up
        # By topic id and partition, the member that has a partition or has not revoked
        # it yet.
        self._holders: dict[TopicId, dict[int, str]] = {}
        self.is_dead = False

    # -- state ---------------------------------------------------------------------

    @property
    def state(self) -> ConsumerGroupState:
        if self.is_dead:
            return ConsumerGroupState.DEAD
        if not self.members:
            return ConsumerGroupState.EMPTY
        if self.group_epoch > self.assignment_epoch:
            return ConsumerGroupState.ASSIGNING
        if all(
            member.member_epoch == self.assignment_epoch
            and member.state is MemberState.STABLE
            for member in self.members.values()
        ):
            return ConsumerGroupState.STABLE
        return ConsumerGroupState.RECONCILING

    @property
    def is_empty(self) -> bool:
        return not self.members

    # -- members -------------------------------------------------------------------

    def add(self, member: ConsumerMember) -> None:
        self.members[member.member_id] = member
        if member.instance_id is not None:
            self.static_members[member.instance_id] = member.member_id
        self._hold(member)

    def remove(self, member_id: str) -> ConsumerMember | None:
        """Remove and return a member, its partitions and its target assignment.

        Return None if the member is unknown.
        """
        member = self.members.pop(member_id, None)
        if member is None:
            return None
        self._release(member)
        instance = member.instance_id
        if instance is not None and self.static_members.get(instance) == member_id:
            del self.static_members[instance]
        self.target.pop(member_id, None)
        return member

    def member(self, member_id: str) -> ConsumerMember:
        """Return the group's member that has this id.

        Raises:
            ApiError: UNKNOWN_MEMBER_ID.
        """
        found = self.members.get(member_id)
        if found is None:
            raise ApiError(
                ErrorCode.UNKNOWN_MEMBER_ID,
                f"Member {member_id} is not a member of group {self.group_id}.",
            )
        return found

    def validate_instance(self, member_id: str, instance_id: str) -> None:
        """Check that an instance id is known, and belongs to the member id.

        Raises:
            ApiError: UNKNOWN_MEMBER_ID, FENCED_INSTANCE_ID.
        """
        known = self.static_members.get(instance_id)
        if known is None:
            raise ApiError(ErrorCode.UNKNOWN_MEMBER_ID)
        if known != member_id:
            raise ApiError(ErrorCode.FENCED_INSTANCE_ID)

    def wanted_topics(self, member: ConsumerMember) -> set[str]:
        wanted = set(member.topic_names)
        if member.topic_regex:
            seen = member.sees
            if seen is None:
                seen = self.patterns.get(member.topic_regex, frozenset())
            wanted |= seen
        return wanted

    def is_subscribed_to(self, topic: str) -> bool:
        return any(
            topic in self.wanted_topics(member) for member in self.members.values()
        )

    def supports_classic_protocols(
        self, protocol_type: str, names: Collection[str]
    ) -> bool:
        """Return whether a classic member with these protocols could join.

        All other classic members must support at least one of the protocols.
        """
        others = [m.classic for m in self.members.values() if m.classic is not None]
        supported = Counter(
            name for each in others for name in {name for name, _ in each.protocols}
        )
        return protocol_type == CONSUMER_PROTOCOL and any(
            supported[name] == len(others) for name in names
        )

    def all_are_classic(self, but: Collection[str] = ()) -> bool:
        """Return whether all members except ``but`` speak the classic protocol."""
        return all(
            member.classic is not None
            for member_id, member in self.members.items()
            if member_id not in but
        )

    def waits_for_others(self, member: ConsumerMember) -> bool:
        """Return whether other members still have partitions of a member's target."""
        return any(
            number not in member.assigned.get(topic, ())
            and self.holder(topic, number) is not None
            for topic, numbers in self.target.get(member.member_id, {}).items()
            for number in numbers
        )

    def is_settled(self, member: ConsumerMember) -> bool:
        """Return whether a member has its share of a target that is up to date.

        A heartbeat without news then changes nothing but timers.
        """
        return (
            member.member_epoch == self.assignment_epoch == self.group_epoch
            and member.state is MemberState.STABLE
            and member.classic is None
        )

    def preferred_assignor(self, default: str) -> str:
        """Return the assignor that most members have requested, else ``default``."""
        votes = Counter(
            member.server_assignor
            for member in self.members.values()
            if member.server_assignor
        )
        return votes.most_common(1)[0][0] if votes else default

    def validate_offset_commit(
        self,
        member_id: str,
        generation_or_epoch: int,
        version: int,
        partitions: Iterable[tuple[TopicId | None, int]],
    ) -> None:
        """Raise an error if a member may not commit offsets with this epoch.

        A commit may be under way while the member gets a new epoch. So an older epoch
        will do for partitions that the member was given by then and has not lost since.

        Args:
            generation_or_epoch: the member epoch, or a classic member's generation.
            version: the version of the OffsetCommit request.
            partitions: the topic id (None: no such topic) and number of each partition
                whose offset is committed.

        Raises:
            ApiError: UNKNOWN_MEMBER_ID; UNSUPPORTED_VERSION for a member that speaks
                KIP-848 in a version without member epochs; for a stale epoch
                STALE_MEMBER_EPOCH, or ILLEGAL_GENERATION for a member that speaks the
                classic protocol.
        """
        if generation_or_epoch < 0 and not self.members:
            return
        member = self.member(member_id)
        is_classic = member.classic is not None
        if not is_classic and version < _MEMBER_EPOCH_SINCE:
            raise ApiError(
                ErrorCode.UNSUPPORTED_VERSION,
                "OffsetCommit version 9 or above must be used by members using the"
                " modern group protocol",
            )
        if generation_or_epoch == member.member_epoch or (
            generation_or_epoch < member.member_epoch
            and all(generation_or_epoch >= _since(member, *each) for each in partitions)
        ):
            return
        stale = ErrorCode.STALE_MEMBER_EPOCH
        if is_classic:
            stale = ErrorCode.ILLEGAL_GENERATION
        raise ApiError(
            stale,
            f"The received member epoch {generation_or_epoch} does not match the"
            f" expected member epoch {member.member_epoch}.",
        )

    def validate_offset_fetch(self, member_id: str | None, member_epoch: int) -> None:
        """Raise an error if a member may not fetch offsets.

        An admin client names no member, and may always fetch them.

        Raises:
            ApiError: UNKNOWN_MEMBER_ID, STALE_MEMBER_EPOCH, ILLEGAL_GENERATION.
        """
        if not member_id and member_epoch < 0:
            return
        member = self.member(member_id or "")
        if member.member_epoch != member_epoch:
            is_classic = member.classic is not None
            raise ApiError(
                ErrorCode.ILLEGAL_GENERATION
                if is_classic
                else ErrorCode.STALE_MEMBER_EPOCH
            )

    # -- the holders of partitions -------------------------------------------------

    def _hold(self, member: ConsumerMember) -> None:
        for partitions in (member.assigned, member.pending_revocation):
            for topic, numbers in partitions.items():
                holders = self._holders.setdefault(topic, {})
                for number in numbers:
                    holders[number] = member.member_id

    def _release(self, member: ConsumerMember) -> None:
        for partitions in (member.assigned, member.pending_revocation):
            for topic, numbers in partitions.items():
                holders = self._holders.get(topic, {})
                for number in numbers:
                    if holders.get(number) == member.member_id:
                        del holders[number]

    def give_up_pending(self, member: ConsumerMember) -> None:
        """Free the partitions that a static member still had to revoke when it left.

        The member keeps its other partitions, since it will come back. It will then get
        them with a new epoch: a commit from before is not valid any more.
        """
        self._release(member)
        member.pending_revocation = {}
        member.assigned_since = {}
        self._hold(member)

    def holder(self, topic: TopicId, partition: int) -> str | None:
        """Return the member that has a partition or has not revoked it yet; or None."""
        return self._holders.get(topic, {}).get(partition)

    # -- the way to the target -----------------------------------------------------

    def reconcile(
        self, member: ConsumerMember, owned: Mapping[TopicId, set[int]] | None
    ) -> bool:
        """Bring a member's partitions one step nearer to its target assignment.

        Args:
            owned: the partitions that the member reports; None: as it last reported.

        Returns:
            Whether its state, epoch or partitions have changed.
        """
        if member.state is MemberState.STABLE:
            if member.member_epoch == self.assignment_epoch:
                return False
        elif member.state is MemberState.UNREVOKED_PARTITIONS and _owns_any(
            owned, member.pending_revocation
        ):
            return False
        before = member.position()
        self._release(member)
        self._step(member, owned)
        self._hold(member)
        return member.position() != before

    def _step(
        self, member: ConsumerMember, owned: Mapping[TopicId, set[int]] | None
    ) -> None:
        target = self.target.get(member.member_id, {})
        kept: Partitions = {}
        revoked: Partitions = {}
        gained: Partitions = {}
        unreleased = False
        for topic in target.keys() | member.assigned.keys():
            want = target.get(topic, set())
            have = member.assigned.get(topic, set())
            if have & want:
                kept[topic] = have & want
            if have - want:
                revoked[topic] = have - want
            free = {n for n in want - have if self.holder(topic, n) is None}
            if free:
                gained[topic] = free
            unreleased |= free != want - have
        if revoked and _owns_any(owned, revoked):
            # The member has to revoke partitions first. It keeps its epoch until it
            # reports that it has revoked them. Only then may others get them: `holder`
            # counts pending revocations, too.
            member.state = MemberState.UNREVOKED_PARTITIONS
            member.assigned, member.pending_revocation = kept, revoked
            member.keep_epochs()
            return
        for topic, numbers in gained.items():
            kept[topic] = kept.get(topic, set()) | numbers
        member.assigned, member.pending_revocation = kept, {}
        self._advance_epoch(member)
        member.keep_epochs()
        member.state = (
            MemberState.UNRELEASED_PARTITIONS if unreleased else MemberState.STABLE
        )

    def _advance_epoch(self, member: ConsumerMember) -> None:
        if member.member_epoch != self.assignment_epoch:
            member.previous_epoch = member.member_epoch
            member.member_epoch = self.assignment_epoch


def _since(member: ConsumerMember, topic: TopicId | None, partition: int) -> float:
    """Return the epoch with which a member was given a partition that it still has.

    Return infinity if it does not have the partition, or the epoch is not known.
    """
    epochs = member.assigned_since.get(topic, {}) if topic is not None else {}
    return epochs.get(partition, inf)


def _owns_any(
    owned: Mapping[TopicId, set[int]] | None, partitions: Mapping[TopicId, set[int]]
) -> bool:
    """Return whether a member may still have some of these partitions.

    Return True if the member does not report its partitions (``owned`` is None).
    """
    if owned is None:
        return True
    return any(owned.get(topic, set()) & each for topic, each in partitions.items())


def _copy(partitions: Partitions) -> dict[TopicId, frozenset[int]]:
    return {topic: frozenset(numbers) for topic, numbers in partitions.items()}

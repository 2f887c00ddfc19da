"""Keep the state of a streams group (KIP-1071): topology, epochs, tasks of members.

    group epoch       grows with every change of members, topology, topics or settings
    assignment epoch  the group epoch that the target assignment was made for
    member epoch      the assignment epoch whose share the member has reached

A member is not given an active task that another member still has, nor a task of which
its own process still has another copy. The holder gives it up first, at its own
heartbeat, so no member waits for all the others.

Source: KIP-1071; Kafka's StreamsGroup, StreamsGroupMember, CurrentAssignmentBuilder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum, IntEnum
from typing import Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.coordinator.streams.record_types import StreamsGroupTopologyValue
from mpbroker.coordinator.streams.topology import (
    ConfiguredTopology,
    subtopology_by_input,
)
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError

_FIRST_EPOCH: Final = 1
_MEMBER_EPOCH_SINCE: Final = 9  # of OffsetCommit

# Partition numbers by subtopology; of active tasks, with the epochs in which the member
# was given them.
Tasks = dict[str, "set[int]"]
ActiveTasks = dict[str, "dict[int, int]"]
_Task = tuple[str, int]


class StreamsGroupState(Enum):
    """The states of a group; the values are the names that clients see."""

    EMPTY = "Empty"
    NOT_READY = "NotReady"  # topics are missing, or do not fit the topology
    ASSIGNING = "Assigning"  # the target is older than the group
    RECONCILING = "Reconciling"  # a member has not reached the target yet
    STABLE = "Stable"
    DEAD = "Dead"


class StreamsMemberState(IntEnum):
    """How far a member is; the numbers are those in its record."""

    STABLE = 1  # it has its share of the target of its epoch
    UNREVOKED_TASKS = 2  # it must give tasks up before it goes on
    UNRELEASED_TASKS = 3  # it waits for tasks that others still have


class TargetTasks(NamedTuple):
    """The tasks that a member is to have."""

    active: Tasks
    standby: Tasks


class CurrentTasks(NamedTuple):
    """The tasks that a member has, or has to give up."""

    active: ActiveTasks
    standby: Tasks

    def __bool__(self) -> bool:
        return bool(self.active or self.standby)

    def has_any_of(self, others: CurrentTasks) -> bool:
        """Return whether a task of ``others`` is among these."""
        return _intersect(self.active, others.active) or _intersect(
            self.standby, others.standby
        )


NO_TARGET: Final = TargetTasks({}, {})


class StreamsMember:
    """A member of a streams group: one stream thread of the application."""

    __slots__ = (
        "assigned",
        "client_host",
        "client_id",
        "client_tags",
        "member_epoch",
        "member_id",
        "pending_revocation",
        "previous_epoch",
        "process_id",
        "rack_id",
        "rebalance_timeout_ms",
        "state",
        "topology_epoch",
        "user_endpoint",
    )

    def __init__(self, member_id: str) -> None:
        self.member_id = member_id
        self.rack_id: str | None = None
        self.client_id = ""
        self.client_host = ""
        self.rebalance_timeout_ms = -1
        self.topology_epoch = -1
        self.process_id = ""
        self.user_endpoint: tuple[str, int] | None = None
        self.client_tags: tuple[tuple[str, str], ...] = ()
        self.member_epoch = 0
        self.previous_epoch = -1
        self.state = StreamsMemberState.STABLE
        self.assigned = CurrentTasks({}, {})
        self.pending_revocation = CurrentTasks({}, {})

    def metadata(self) -> tuple[object, ...]:
        """The values that its metadata record has."""
        return (
            self.rack_id,
            self.client_id,
            self.client_host,
            self.rebalance_timeout_ms,
            self.topology_epoch,
            self.process_id,
            self.user_endpoint,
            self.client_tags,
        )

    def is_reconciled_to(self, epoch: int) -> bool:
        return self.state is StreamsMemberState.STABLE and self.member_epoch == epoch


class StreamsGroup:
    """One streams group.

    Attributes:
        topology: as the first member has sent it; None: there is none yet.
        configured: the topology with the existing topics; None: not looked at yet.
        validated_topology_epoch: the epoch of the topology whose topics all exist; -1:
            some do not.
        assignment_configs: the settings with which the group epoch began.
        delayed_until_ms: the first assignment is not made before; 0: no delay.
        endpoint_epoch: grows when partitions behind the members' endpoints change.
        shutdown_by: the member that has asked all others to stop.
    """

    type_name: Final = "streams"
    protocol_type: Final = "streams"

    def __init__(self, group_id: str) -> None:
        self.group_id = group_id
        self.group_epoch = _FIRST_EPOCH
        self.assignment_epoch = _FIRST_EPOCH
        self.members: dict[str, StreamsMember] = {}
        self.target: dict[str, TargetTasks] = {}
        self.topology: StreamsGroupTopologyValue | None = None
        self._reads: dict[str, str] = {}  # the subtopology that reads a topic
        # Why topics could not be created, and when it is tried again.
        self.create_errors: list[str] = []
        self.create_again_ms = 0
        self.configured: ConfiguredTopology | None = None
        self.validated_topology_epoch = -1
        self.metadata_hash = 0
        self.topics_version = -1
        self.assignment_configs: dict[str, str] = {}
        self.delayed_until_ms = 0
        self.endpoint_epoch = 0
        self.shutdown_by: str | None = None
        self.is_dead = False

    @property
    def state(self) -> StreamsGroupState:
        if self.is_dead:
            return StreamsGroupState.DEAD
        if not self.members:
            return StreamsGroupState.EMPTY
        if (
            self.topology is None
            or self.topology.epoch != self.validated_topology_epoch
        ):
            return StreamsGroupState.NOT_READY
        if self.group_epoch > self.assignment_epoch:
            return StreamsGroupState.ASSIGNING
        if all(
            member.is_reconciled_to(self.assignment_epoch)
            for member in self.members.values()
        ):
            return StreamsGroupState.STABLE
        return StreamsGroupState.RECONCILING

    @property
    def is_empty(self) -> bool:
        return not self.members

    def is_subscribed_to(self, topic: str) -> bool:
        """Return whether the application reads a topic."""
        return not self.is_empty and topic in self._reads

    def set_topology(self, topology: StreamsGroupTopologyValue | None) -> None:
        """Store the topology."""
        self.topology = topology
        self._reads = {} if topology is None else subtopology_by_input(topology)

    def member(self, member_id: str) -> StreamsMember:
        """Return a member.

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

    def remove(self, member_id: str) -> None:
        """Remove a member with its tasks, if it is known."""
        self.members.pop(member_id, None)
        self.target.pop(member_id, None)
        if not self.members:
            self.shutdown_by = None

    # -- offsets -----------------------------------------------------------------------

    def validate_offset_commit(
        self,
        member_id: str,
        member_epoch: int,
        version: int,
        partitions: Iterable[tuple[str, int]],
    ) -> None:
        """Raise if a member may not commit offsets with this epoch.

        A commit may be under way while a heartbeat brings the member a new epoch. So an
        older epoch will do for the tasks that the member had in it and still has, or
        has to give up.

        Args:
            member_id: the member; "" if the request names none.
            member_epoch: the epoch in the request.
            version: of OffsetCommit.
            partitions: whose offsets are committed; topic and number of each.

        Raises:
            ApiError: UNKNOWN_MEMBER_ID, STALE_MEMBER_EPOCH, or UNSUPPORTED_VERSION in
                versions that do not have a member's epoch.
        """
        if member_epoch < 0 and not self.members:
            return
        member = self.member(member_id)
        if version < _MEMBER_EPOCH_SINCE:
            raise ApiError(
                ErrorCode.UNSUPPORTED_VERSION,
                "OffsetCommit version 9 or above must be used by members using the"
                " streams group protocol",
            )
        if member_epoch < member.member_epoch:
            self._require_tasks_since(member, member_epoch, partitions)
        else:
            self._require_epoch(member, member_epoch)

    def _require_tasks_since(
        self,
        member: StreamsMember,
        epoch: int,
        partitions: Iterable[tuple[str, int]],
    ) -> None:
        """Raise unless a member was given the tasks of these partitions by an epoch."""
        for topic, number in partitions:
            subtopology = self._reads.get(topic, "")
            since = member.assigned.active.get(subtopology, {}).get(number)
            if since is None:
                pending = member.pending_revocation.active
                since = pending.get(subtopology, {}).get(number)
            if since is None:
                raise ApiError(
                    ErrorCode.STALE_MEMBER_EPOCH,
                    f"The member has no task of {topic}-{number}.",
                )
            if epoch < since:
                raise ApiError(
                    ErrorCode.STALE_MEMBER_EPOCH,
                    f"Received member epoch {epoch} is older than assignment epoch"
                    f" {since} for task {subtopology}-{number}.",
                )

    def validate_offset_fetch(self, member_id: str | None, member_epoch: int) -> None:
        """Raise if a member may not fetch offsets; an admin client names no member.

        Raises:
            ApiError: UNKNOWN_MEMBER_ID, STALE_MEMBER_EPOCH.
        """
        if member_id or member_epoch >= 0:
            self._require_epoch(self.member(member_id or ""), member_epoch)

    def _require_epoch(self, member: StreamsMember, epoch: int) -> None:
        if epoch != member.member_epoch:
            raise ApiError(
                ErrorCode.STALE_MEMBER_EPOCH,
                f"The received member epoch {epoch} does not match the expected member"
                f" epoch {member.member_epoch}.",
            )

    # -- the way to the target ---------------------------------------------------------

    def reconcile(self, member: StreamsMember, owned: CurrentTasks | None) -> bool:
        """Bring a member's tasks one step nearer to its target assignment.

        Args:
            member: the member.
            owned: the tasks that the member reports; None: as it last reported.

        Returns:
            Whether its state, epoch or tasks have changed.
        """
        if member.is_reconciled_to(self.assignment_epoch):
            return False
        if member.state is StreamsMemberState.UNREVOKED_TASKS and (
            owned is None or owned.has_any_of(member.pending_revocation)
        ):
            return False
        before = _position(member)
        self._step(member, owned)
        return _position(member) != before

    def _step(self, member: StreamsMember, owned: CurrentTasks | None) -> None:
        target = self.target.get(member.member_id, NO_TARGET)
        have = member.assigned
        kept = CurrentTasks(
            _common_active(have.active, target.active),
            _difference(have.standby, _difference(have.standby, target.standby)),
        )
        revoked = CurrentTasks(
            _without_active(have.active, target.active),
            _difference(have.standby, target.standby),
        )
        if revoked and (owned is None or owned.has_any_of(revoked)):
            # It has to give some up first, and keeps its epoch until it has said so.
            # Only then are they free for others: see `_held`.
            member.state = StreamsMemberState.UNREVOKED_TASKS
            member.assigned, member.pending_revocation = kept, revoked
            return
        # The tasks that it has given up no longer stand in its own way.
        member.assigned, member.pending_revocation = kept, CurrentTasks({}, {})
        unreleased = self._gain(member, target)
        if member.member_epoch != self.assignment_epoch:
            member.previous_epoch = member.member_epoch
            member.member_epoch = self.assignment_epoch
        member.state = (
            StreamsMemberState.UNRELEASED_TASKS
            if unreleased
            else StreamsMemberState.STABLE
        )

    def _gain(self, member: StreamsMember, target: TargetTasks) -> bool:
        """Give a member the tasks of its target that are free; return if some are not.

        A task is judged by what all members have before this step, so that one process
        does not get both copies of it in one step.
        """
        active, standby = member.assigned
        wanted_active = _missing(target.active, active)
        wanted_standby = _missing(target.standby, standby)
        if not wanted_active and not wanted_standby:
            return False
        anywhere, here = self._held(member.process_id)
        free_active = [
            task for task in wanted_active if task not in anywhere and task not in here
        ]
        free_standby = [task for task in wanted_standby if task not in here]
        for subtopology, number in free_active:
            active.setdefault(subtopology, {})[number] = self.assignment_epoch
        for subtopology, number in free_standby:
            standby.setdefault(subtopology, set()).add(number)
        return len(free_active) + len(free_standby) < len(wanted_active) + len(
            wanted_standby
        )

    def _held(self, process_id: str) -> tuple[set[_Task], set[_Task]]:
        """Return the tasks that a member of a process must not get now.

        A task that a member has not revoked yet counts as held by it.

        Returns:
            The active tasks of all members, and the copies of tasks in the process.
        """
        anywhere: set[_Task] = set()
        here: set[_Task] = set()
        for other in self.members.values():
            for tasks in (other.assigned, other.pending_revocation):
                active = {
                    (i, n) for i, numbers in tasks.active.items() for n in numbers
                }
                anywhere |= active
                if other.process_id == process_id:
                    here |= active
                    here.update(
                        (i, n) for i, numbers in tasks.standby.items() for n in numbers
                    )
        return anywhere, here


def _missing(target: Tasks, have: Mapping[str, object]) -> list[tuple[str, int]]:
    """Return the tasks of a target that a member does not have."""
    return [
        (subtopology, number)
        for subtopology, numbers in sorted(target.items())
        for number in sorted(numbers)
        if number not in have.get(subtopology, ())  # type: ignore[operator]
    ]


def _position(member: StreamsMember) -> tuple[object, ...]:
    """Return a copy of the values that a member's current-assignment record has."""
    return (
        member.member_epoch,
        member.previous_epoch,
        member.state,
        copy_tasks(member.assigned),
        copy_tasks(member.pending_revocation),
    )


def copy_tasks(tasks: CurrentTasks) -> CurrentTasks:
    """Return a copy that does not change with the original."""
    return CurrentTasks(
        {each: dict(numbers) for each, numbers in tasks.active.items()},
        {each: set(numbers) for each, numbers in tasks.standby.items()},
    )


def _intersect(
    one: Mapping[str, set[int] | dict[int, int]],
    other: Mapping[str, set[int] | dict[int, int]],
) -> bool:
    return any(
        not set(one.get(each, ())).isdisjoint(numbers)
        for each, numbers in other.items()
    )


def _difference(one: Tasks, other: Tasks) -> Tasks:
    left = {each: numbers - other.get(each, set()) for each, numbers in one.items()}
    return {each: numbers for each, numbers in left.items() if numbers}


def _common_active(have: ActiveTasks, target: Tasks) -> ActiveTasks:
    both = {
        each: {n: epoch for n, epoch in numbers.items() if n in target.get(each, ())}
        for each, numbers in have.items()
    }
    return {each: numbers for each, numbers in both.items() if numbers}


def _without_active(have: ActiveTasks, target: Tasks) -> ActiveTasks:
    left = {
        each: {
            n: epoch for n, epoch in numbers.items() if n not in target.get(each, ())
        }
        for each, numbers in have.items()
    }
    return {each: numbers for each, numbers in left.items() if numbers}

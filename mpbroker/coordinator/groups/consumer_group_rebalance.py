"""Rebalance consumer groups: bring a group from one epoch to the next.

A change of members, of their subscriptions or of topics begins a group epoch. For that
epoch an assignor makes a target assignment. Each member then moves to its share of the
target at its own heartbeats (`ConsumerGroup.reconcile`). The members never all wait at
the same time, as they do in a rebalance of the classic protocol.

Every change is written to the outbox in the order in which a successor replays it. The
answer to the request that made the change waits until these records are on disk.

The requests are served elsewhere: in `consumer_group_heartbeat` for members that speak
KIP-848, in `mixed_protocol` for members that speak the classic protocol.

A classic group becomes a consumer group (upgrade) when a member that speaks KIP-848
joins it, and a classic group again (downgrade) when the last such member has gone.
group.consumer.migration.policy sets which of the two are allowed: bidirectional,
upgrade, downgrade or disabled. The old records are deleted and the new ones written in
the same batch (unless they exceed its 512 KiB), so a coordinator that loads the log
finds exactly one of the two groups.

Source: KIP-848; Kafka's GroupMetadataManager (consumerGroupHeartbeat and what belongs
to it, convertToConsumerGroup and -ClassicGroup).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from mpbroker.coordinator.context import CoordinatorContext
from mpbroker.coordinator.groups.assignors import ASSIGNORS, MemberSpec
from mpbroker.coordinator.groups.classic_group import ClassicGroup, ClassicGroupState
from mpbroker.coordinator.groups.classic_rebalance import (
    LEAST_SESSION_LEFT_MS,
    ClassicRebalance,
)
from mpbroker.coordinator.groups.consumer_group import (
    LEAVE_STATIC_EPOCH,
    ConsumerGroup,
    ConsumerMember,
    MemberState,
)
from mpbroker.coordinator.groups.consumer_group_records import (
    group_epoch_record,
    member_record,
    pattern_record,
    removal_records,
    target_epoch_record,
    target_record,
    tombstones,
)
from mpbroker.coordinator.groups.consumer_protocol import CONSUMER_PROTOCOL
from mpbroker.coordinator.groups.group_config import GroupConfig, setting_of
from mpbroker.coordinator.groups.group_conversion import (
    classic_group_of,
    consumer_group_of,
    creation_records,
    departed_member,
)
from mpbroker.coordinator.groups.group_records import (
    group_metadata_key,
)
from mpbroker.coordinator.groups.patterns import resolve
from mpbroker.coordinator.metadata_hash import metadata_hash
from mpbroker.coordinator.versioned import KeyValue
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.consumer_group_heartbeat import (
    ConsumerGroupHeartbeatRequest,
)

S = ClassicGroupState

SESSION_TIMEOUT: Final = "consumer.session.timeout.ms"

_UPGRADES: Final = frozenset({"bidirectional", "upgrade"})
_DOWNGRADES: Final = frozenset({"bidirectional", "downgrade"})


class ConsumerGroupRebalance:
    """Changes groups' members, epochs and target assignments, and sets timers.

    Args:
        partition_of: returns the partition of __consumer_offsets of a group.
        overrides: returns a group's own settings, which replace the broker's.
        classic: takes over a group that becomes a classic one.
        replaced: called with the new group after an upgrade or a downgrade.
    """

    def __init__(
        self,
        config: GroupConfig,
        context: CoordinatorContext,
        partition_of: Callable[[str], int],
        overrides: Callable[[str], Mapping[str, str]],
        classic: ClassicRebalance,
        replaced: Callable[[ClassicGroup | ConsumerGroup], None],
    ) -> None:
        self.is_guarded = False  # whether there is an authorizer: see patterns.py
        self._config = config
        self._overrides = overrides
        self._out = context.outbox
        self._timers = context.timers
        self._topics = context.topics
        self._sessions = context.sessions
        self._partition_of = partition_of
        self._classic = classic
        self._replaced = replaced

    # -- members ---------------------------------------------------------------------

    def check_join(
        self, group: ConsumerGroup, request: ConsumerGroupHeartbeatRequest
    ) -> None:
        """Raise an error if a new member cannot join a group.

        Raises:
            ApiError: UNRELEASED_INSTANCE_ID, GROUP_MAX_SIZE_REACHED.
        """
        member_id, instance = request.member_id, request.instance_id
        known = group.static_members.get(instance) if instance is not None else None
        if known is not None and known != member_id:
            if group.members[known].member_epoch != LEAVE_STATIC_EPOCH:
                raise ApiError(
                    ErrorCode.UNRELEASED_INSTANCE_ID,
                    f"Static member {member_id} with instance id {instance} cannot join"
                    f" the group because the instance id is owned by member {known}.",
                )
        elif (
            member_id not in group.members
            and len(group.members) >= self._config.group_consumer_max_size
        ):
            raise ApiError(ErrorCode.GROUP_MAX_SIZE_REACHED)

    def replace_static(
        self, group: ConsumerGroup, old_id: str, new_id: str
    ) -> ConsumerMember:
        """Replace the member id of a static member that has joined again."""
        old = group.members[old_id]
        self._cancel(group, old_id)
        target = group.target.get(old_id)
        group.remove(old_id)
        for record in removal_records(group.group_id, old_id):
            self.write(group, record)
        old.member_id = new_id
        old.member_epoch, old.previous_epoch = 0, -1
        old.assigned_since = {}
        group.add(old)
        self.write(group, member_record(group.group_id, old.member_id, old))
        if target is not None:
            group.target[old.member_id] = target
            record = target_record(group.group_id, old.member_id, target)
            self.write(group, record)
        return old

    def remove_members(
        self, group: ConsumerGroup, member_ids: list[str], now_ms: int
    ) -> None:
        """Remove members that have left or are fenced, and free their partitions.

        If all other members speak the classic protocol, and the policy allows it,
        convert the group to a classic one.
        """
        if self.may_downgrade(group, member_ids):
            classic = self.downgrade(group, member_ids, now_ms)
            self._classic.maybe_prepare_rebalance(classic, now_ms)
            # Name a departed member in the group's record, so that a coordinator that
            # loads it begins the rebalance, too.
            classic.departed = departed_member(member_ids[0])
            self._classic.write_group(classic)
            return
        for member_id in member_ids:
            self._cancel(group, member_id)
            group.remove(member_id)
            for record in removal_records(group.group_id, member_id):
                self.write(group, record)
        self.refresh(group, changed=True, now_ms=now_ms, assign=False)

    # -- from one protocol to the other ------------------------------------------------

    def upgrade(
        self, classic: ClassicGroup, request: ConsumerGroupHeartbeatRequest, now_ms: int
    ) -> ConsumerGroup:
        """Convert a classic group to a consumer group, as a KIP-848 member joins it.

        Raises:
            ApiError: the error for the joining member; the group is unchanged.
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
        # The group is not changed before this line. The answers to parked requests make
        # the members join again, and then they find the consumer group.
        self._classic.refuse_waiting(classic, ErrorCode.REBALANCE_IN_PROGRESS)
        self._classic.forget(classic, ErrorCode.REBALANCE_IN_PROGRESS)
        classic.transition_to(S.DEAD, now_ms)
        self.write(group, (group_metadata_key(group_id), None))
        for record in creation_records(group):
            self.write(group, record)
        self._replaced(group)
        self.loaded(group, now_ms)
        return group

    def may_downgrade(self, group: ConsumerGroup, leaving: list[str]) -> bool:
        """Return whether a group may become a classic group when members leave.

        It may if all other members speak the classic protocol, and if
        group.consumer.migration.policy allows it.
        """
        left = len(group.members) - sum(each in group.members for each in leaving)
        return (
            self._config.group_consumer_migration_policy in _DOWNGRADES
            and 0 < left <= self._config.group_max_size
            and group.all_are_classic(but=leaving)
        )

    def downgrade(
        self, group: ConsumerGroup, leaving: list[str], now_ms: int
    ) -> ClassicGroup:
        """Convert a group to a classic group of the members that are not leaving."""
        classic = classic_group_of(group, leaving, self._topics, now_ms)
        for record in tombstones(group):
            self.write(group, record)
        self.forget(group)
        group.is_dead = True
        self._replaced(classic)
        self._classic.write_group(classic)
        for member in classic.members.values():
            self._classic.schedule_session(classic, member, now_ms)
        return classic

    # -- epochs and the target -----------------------------------------------------

    def refresh(
        self, group: ConsumerGroup, *, changed: bool, now_ms: int, assign: bool = True
    ) -> None:
        """Look up the group's topics; begin a new group epoch if anything has changed.

        Args:
            changed: whether members or their subscriptions have changed.
            assign: also make the target assignment; if false, the next heartbeat of a
                member makes it.
        """
        version = self._topics.version()
        if changed or version != group.topics_version:
            group.topics_version = version
            changed = self._refresh_topics(group, now_ms) or changed
        if changed:
            group.group_epoch += 1
            record = group_epoch_record(
                group.group_id, group.group_epoch, group.metadata_hash
            )
            self.write(group, record)
        if assign and group.assignment_epoch < group.group_epoch:
            self._assign(group)

    def _refresh_topics(self, group: ConsumerGroup, now_ms: int) -> bool:
        """Look up the topics of all subscriptions; return whether they have changed."""
        changed = False
        patterns = resolve(group, self._topics, is_guarded=self.is_guarded)
        if patterns != group.patterns:
            for pattern in group.patterns.keys() - patterns.keys():
                self.write(group, pattern_record(group.group_id, pattern, None))
            for pattern, names in patterns.items():
                if group.patterns.get(pattern) != names:
                    record = pattern_record(group.group_id, pattern, names, now_ms)
                    self.write(group, record)
            group.patterns = patterns
            changed = True
        wanted: set[str] = set()
        for member in group.members.values():
            wanted |= group.wanted_topics(member)
        counts = {name: self._topics.partition_count(name) for name in wanted}
        topics = {name: count for name, count in sorted(counts.items()) if count}
        group.topics = topics
        found = metadata_hash(topics)
        if found != group.metadata_hash:
            group.metadata_hash = found
            changed = True
        return changed

    def _assign(self, group: ConsumerGroup) -> None:
        """Make the target assignment for the group epoch."""
        default = self._config.group_consumer_assignors[0]
        group.assignor_name = group.preferred_assignor(default)
        ids = {name: self._topics.topic_id(name) for name in group.topics}
        counts = {
            topic_id: group.topics[name]
            for name, topic_id in ids.items()
            if topic_id is not None
        }
        specs = [
            MemberSpec(
                member.member_id,
                member.instance_id,
                frozenset(
                    topic_id
                    for name in group.wanted_topics(member)
                    if (topic_id := ids.get(name)) is not None
                ),
                group.target.get(member.member_id, {}),
            )
            for member in group.members.values()
        ]
        target = ASSIGNORS[group.assignor_name](specs, counts)
        for member_id, share in target.items():
            if group.target.get(member_id) != share:
                self.write(group, target_record(group.group_id, member_id, share))
        group.target = target
        group.assignment_epoch = group.group_epoch
        # The epoch's record comes last. If a power cut leaves only some of the members'
        # records, a coordinator that loads the log finds an older assignment epoch, and
        # makes the target assignment again.
        self.write(group, target_epoch_record(group.group_id, group.group_epoch))

    # -- timers ----------------------------------------------------------------------

    def schedule(
        self, group: ConsumerGroup, member: ConsumerMember, now_ms: int
    ) -> None:
        """Restart a member's session timer.

        Start or stop the timer within which it must give up revoked partitions.
        """
        self.schedule_session(group, member.member_id, now_ms)
        self._schedule_revocation(group, member, now_ms)

    def _schedule_revocation(
        self, group: ConsumerGroup, member: ConsumerMember, now_ms: int
    ) -> None:
        member_id = member.member_id
        name = ("revocation", group.group_id, member_id)
        if member.state is MemberState.UNREVOKED_PARTITIONS:
            if name not in self._timers:
                epoch = member.member_epoch

                def expire(at_ms: int) -> None:
                    if (
                        group.members.get(member_id) is member
                        and member.state is MemberState.UNREVOKED_PARTITIONS
                        and member.member_epoch == epoch
                    ):
                        self.remove_members(group, [member_id], at_ms)

                timeout_ms = self._timeout_ms(member)
                self._timers.schedule(name, now_ms + timeout_ms, expire)
        else:
            self._timers.cancel(name)

    def schedule_session(
        self, group: ConsumerGroup, member_id: str, now_ms: int
    ) -> None:
        """Start or restart a member's session timer."""
        self._sessions.heard(member_id, now_ms)
        self._schedule_session(group, member_id, now_ms)

    def _schedule_session(
        self, group: ConsumerGroup, member_id: str, now_ms: int, silence_ms: int = 0
    ) -> None:
        member = group.members[member_id]
        timeout_ms = self.setting(
            group, SESSION_TIMEOUT, self._config.group_consumer_session_timeout_ms
        )
        if member.classic is not None:
            timeout_ms = member.classic.session_timeout_ms

        def expire(at_ms: int) -> None:
            if group.members.get(member_id) is member:
                self.remove_members(group, [member_id], at_ms)

        left_ms = timeout_ms
        if silence_ms:
            left_ms = max(timeout_ms - silence_ms, LEAST_SESSION_LEFT_MS)
        self._timers.schedule(
            ("session", group.group_id, member_id), now_ms + left_ms, expire
        )

    def expect_rejoin(
        self, group: ConsumerGroup, member: ConsumerMember, now_ms: int
    ) -> None:
        """Remove a classic member unless it joins again within its rebalance timeout.

        The time begins with the first answer that asks the member to join again; later
        answers do not extend it.
        """
        if ("rejoin", group.group_id, member.member_id) not in self._timers:
            self._expect("rejoin", group, member, now_ms)

    def expect_sync(
        self, group: ConsumerGroup, member: ConsumerMember, now_ms: int
    ) -> None:
        """Remove a classic member that has joined unless it sends its SyncGroup.

        It has its rebalance timeout for this.
        """
        self._timers.cancel(("rejoin", group.group_id, member.member_id))
        self._expect("member sync", group, member, now_ms)

    def synced(self, group: ConsumerGroup, member: ConsumerMember, now_ms: int) -> None:
        """Note that a classic member has sent its SyncGroup."""
        self._timers.cancel(("member sync", group.group_id, member.member_id))
        self.schedule_session(group, member.member_id, now_ms)

    def _expect(
        self, step: str, group: ConsumerGroup, member: ConsumerMember, now_ms: int
    ) -> None:
        def expire(at_ms: int) -> None:
            if group.members.get(member.member_id) is member and member.classic:
                self.remove_members(group, [member.member_id], at_ms)

        name = step, group.group_id, member.member_id
        self._timers.schedule(name, now_ms + self._timeout_ms(member), expire)

    def _timeout_ms(self, member: ConsumerMember) -> int:
        """Return how many ms the group waits for a member that rebalances."""
        most = self._config.max_rebalance_timeout_ms
        return min(member.rebalance_timeout_ms, most)

    def _cancel(self, group: ConsumerGroup, member_id: str) -> None:
        for name in ("session", "revocation", "rejoin", "member sync"):
            self._timers.cancel((name, group.group_id, member_id))

    def loaded(self, group: ConsumerGroup, now_ms: int) -> None:
        """Start the timers of a group that was loaded from the log.

        The time since a member's last request, as the previous coordinator has stored
        it, counts as a part of its session timeout.
        """
        for member_id, member in group.members.items():
            silence_ms = self._sessions.take_over(member_id, now_ms)
            self._schedule_session(group, member_id, now_ms, silence_ms)
            self._schedule_revocation(group, member, now_ms)

    def forget(self, group: ConsumerGroup) -> None:
        """Cancel all timers of a group."""
        for member_id in group.members:
            self._cancel(group, member_id)

    # -- records and settings ----------------------------------------------------------

    def write(self, group: ConsumerGroup, record: KeyValue) -> None:
        self._out.write(self._partition_of(group.group_id), *record)

    def after(self, group: ConsumerGroup) -> tuple[int, ...]:
        """Return the logs that must be on disk before an answer is sent.

        This is the group's log, or none: see `Outbox.written`.
        """
        return self._out.written(self._partition_of(group.group_id))

    def setting(self, group: ConsumerGroup, name: str, default: int) -> int:
        """Return a group's own value of a setting, or ``default`` if it has none."""
        return setting_of(self._overrides(group.group_id), name, default)

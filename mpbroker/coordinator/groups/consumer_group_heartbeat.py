"""ConsumerGroupHeartbeat: everything that a member of a consumer group ever says.

Source: KIP-848; Kafka's GroupMetadataManager (consumerGroupHeartbeat and what belongs
to it); the messages are its too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Final

from mpbroker.coordinator.context import CoordinatorContext
from mpbroker.coordinator.groups.assignors import ASSIGNORS, MemberSpec, Partitions
from mpbroker.coordinator.groups.consumer_group import (
    LEAVE_STATIC_EPOCH,
    ConsumerGroup,
    ConsumerMember,
    MemberState,
    partitions_of,
)
from mpbroker.coordinator.groups.consumer_group_records import (
    current_record,
    group_epoch_record,
    member_record,
    pattern_record,
    removal_records,
    target_epoch_record,
    target_record,
)
from mpbroker.coordinator.groups.group_config import GroupConfig
from mpbroker.coordinator.groups.group_records import KeyValue, fits_a_key
from mpbroker.coordinator.groups.patterns import compile_pattern, resolve, see
from mpbroker.coordinator.outbox import Call
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.consumer_group_heartbeat import (
    Assignment,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    TopicPartitions,
)

SESSION_TIMEOUT: Final = "consumer.session.timeout.ms"
HEARTBEAT_INTERVAL: Final = "consumer.heartbeat.interval.ms"

_JOIN_EPOCH: Final = 0
_CLIENT_MAKES_ID_SINCE: Final = 1


class ConsumerGroupProtocol:
    """What members say, and what comes of it.

    Args:
        overrides: what is set for a group that is otherwise set for the broker.
    """

    def __init__(
        self,
        config: GroupConfig,
        context: CoordinatorContext,
        partition_of: Callable[[str], int],
        new_id: Callable[[], str],
        overrides: Callable[[str], Mapping[str, str]],
    ) -> None:
        self.is_guarded = False  # there is an authorizer: see patterns.py
        self._config = config
        self._overrides = overrides
        self._out = context.outbox
        self._timers = context.timers
        self._topics = context.topics
        self._partition_of = partition_of
        self._new_id = new_id

    # -- a request -----------------------------------------------------------------

    def validate(self, call: Call, request: ConsumerGroupHeartbeatRequest) -> None:
        """Raise what is wrong with a request, whatever the group.

        Raises:
            ApiError: INVALID_REQUEST, UNSUPPORTED_ASSIGNOR.
        """
        epoch = request.member_epoch
        makes_id = call.version < _CLIENT_MAKES_ID_SINCE and epoch == _JOIN_EPOCH
        if not request.member_id and not makes_id:
            _refuse("MemberId can't be empty.")
        if not fits_a_key(request.member_id):
            _refuse(f"MemberId is too long: {len(request.member_id)} characters.")
        for name, value in (
            ("InstanceId", request.instance_id),
            ("RackId", request.rack_id),
        ):
            if value == "":
                _refuse(f"{name} can't be empty.")
        if epoch < LEAVE_STATIC_EPOCH:
            _refuse(f"MemberEpoch is invalid. Received {epoch}.")
        if epoch == LEAVE_STATIC_EPOCH and request.instance_id is None:
            _refuse("InstanceId can't be null.")
        if epoch == _JOIN_EPOCH:
            if request.rebalance_timeout_ms == -1:
                _refuse("RebalanceTimeoutMs must be provided in first request.")
            if request.topic_partitions is None or request.topic_partitions:
                _refuse("TopicPartitions must be empty when (re-)joining.")
            if (
                request.subscribed_topic_names is None
                and request.subscribed_topic_regex is None
            ):
                _refuse(
                    "Either SubscribedTopicNames or SubscribedTopicRegex must be"
                    " non-null when (re-)joining."
                )
        offered = self._config.group_consumer_assignors
        if request.server_assignor not in (None, *offered):
            raise ApiError(
                ErrorCode.UNSUPPORTED_ASSIGNOR,
                f"ServerAssignor {request.server_assignor} is not supported. Supported"
                f" assignors: {', '.join(offered)}.",
            )
        if request.subscribed_topic_regex:
            compile_pattern(request.subscribed_topic_regex)
        names = request.subscribed_topic_names or ()
        if sum(map(len, names)) > self._config.message_max_bytes:
            raise ApiError(
                ErrorCode.UNKNOWN_SERVER_ERROR,
                "What the member subscribes to is larger than a record may be.",
            )

    def heartbeat(
        self,
        call: Call,
        group: ConsumerGroup,
        request: ConsumerGroupHeartbeatRequest,
        now_ms: int,
    ) -> None:
        """Take in what a member says; tell it where it is and what it may read.

        Raises:
            ApiError: what the answer says instead.
        """
        if request.member_epoch < 0:
            self._leave(call, group, request, now_ms)
            return
        member = self._member_of(group, request)
        before = member.position(), member.metadata(), member.subscription()
        assigned_before = before[0][3]
        is_new = member.member_id not in group.members
        if is_new:
            group.add(member)
        self._take_in(call, member, request)
        if is_new or member.metadata() != before[1]:
            self._write(group, member_record(group.group_id, member.member_id, member))
        sees_others = see(group, member, call.access, self._topics)
        changed = is_new or sees_others or member.subscription() != before[2]
        self.refresh(group, changed=changed, now_ms=now_ms)
        owned = None
        if request.topic_partitions is not None:
            owned = partitions_of(
                (row.topic_id, row.partitions) for row in request.topic_partitions
            )
        if request.member_epoch == _JOIN_EPOCH and not is_new:
            # It has lost its memory, and with it all that it had.
            owned = {}
        group.reconcile(member, owned)
        if is_new or member.position() != before[0]:
            self._write(group, current_record(group.group_id, member.member_id, member))
        self._schedule(group, member, now_ms)
        is_full = (
            request.rebalance_timeout_ms != -1
            and request.topic_partitions is not None
            and (
                request.subscribed_topic_names is not None
                or request.subscribed_topic_regex is not None
            )
        )
        tells = is_full or member.position()[3] != assigned_before
        self._answer(call, group, member, tells=tells)

    def _member_of(
        self, group: ConsumerGroup, request: ConsumerGroupHeartbeatRequest
    ) -> ConsumerMember:
        """Find who speaks, or make it a member (which the caller adds)."""
        member_id, instance = request.member_id, request.instance_id
        epoch = request.member_epoch
        if instance is not None:
            known = group.static_members.get(instance)
            if epoch == _JOIN_EPOCH:
                if known is not None and known != member_id:
                    self.check_join(group, request)
                    return self.replace_static(
                        group, known, member_id or self._new_id()
                    )
            elif known is None:
                raise ApiError(ErrorCode.UNKNOWN_MEMBER_ID)
            elif known != member_id:
                raise ApiError(ErrorCode.FENCED_INSTANCE_ID)
        member = group.members.get(member_id)
        if member is None:
            if epoch != _JOIN_EPOCH:
                group.member(member_id)  # raises
            self.check_join(group, request)
            return ConsumerMember(member_id or self._new_id(), instance)
        if epoch != _JOIN_EPOCH:
            _check_epoch(member, request)
        elif member.member_epoch == LEAVE_STATIC_EPOCH:
            member.member_epoch = 0
        return member

    def check_join(
        self, group: ConsumerGroup, request: ConsumerGroupHeartbeatRequest
    ) -> None:
        """Raise why a member cannot come into a group, where it is not in yet.

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
        """A static member comes back under a new id: it has what it had."""
        old = group.members[old_id]
        self._cancel(group, old_id)
        target = group.target.get(old_id)
        group.remove(old_id)
        for record in removal_records(group.group_id, old_id):
            self._write(group, record)
        old.member_id = new_id
        old.member_epoch, old.previous_epoch = 0, -1
        group.add(old)
        self._write(group, member_record(group.group_id, old.member_id, old))
        if target is not None:
            group.target[old.member_id] = target
            record = target_record(group.group_id, old.member_id, target)
            self._write(group, record)
        return old

    def _take_in(
        self,
        call: Call,
        member: ConsumerMember,
        request: ConsumerGroupHeartbeatRequest,
    ) -> None:
        """What is null has not changed."""
        member.client_id, member.client_host = call.client_id, call.client_host
        member.classic = None
        if request.rack_id is not None:
            member.rack_id = request.rack_id
        if request.rebalance_timeout_ms != -1:
            member.rebalance_timeout_ms = request.rebalance_timeout_ms
        if request.server_assignor is not None:
            member.server_assignor = request.server_assignor
        if request.subscribed_topic_names is not None:
            member.topic_names = tuple(sorted(set(request.subscribed_topic_names)))
        if request.subscribed_topic_regex is not None:
            member.topic_regex = request.subscribed_topic_regex or None

    # -- leaving -------------------------------------------------------------------

    def _leave(
        self,
        call: Call,
        group: ConsumerGroup,
        request: ConsumerGroupHeartbeatRequest,
        now_ms: int,
    ) -> None:
        member_id, instance = request.member_id, request.instance_id
        if instance is not None:
            known = group.static_members.get(instance)
            if known is None:
                raise ApiError(ErrorCode.UNKNOWN_MEMBER_ID)
            if known != member_id:
                raise ApiError(ErrorCode.FENCED_INSTANCE_ID)
        member = group.member(member_id)
        if request.member_epoch == LEAVE_STATIC_EPOCH:
            # It comes back: nobody gets what it has until its session ends.
            member.member_epoch = LEAVE_STATIC_EPOCH
            group.give_up_pending(member)
            self._write(group, current_record(group.group_id, member_id, member))
        else:
            self.remove_members(group, [member_id], now_ms)
        self._out.answer(
            call,
            ConsumerGroupHeartbeatResponse(
                member_id=member_id, member_epoch=request.member_epoch
            ),
            (self._partition_of(group.group_id),),
        )

    def remove_members(
        self, group: ConsumerGroup, member_ids: list[str], now_ms: int
    ) -> None:
        """Members have left or are fenced: what they had is free."""
        for member_id in member_ids:
            self._cancel(group, member_id)
            group.remove(member_id)
            for record in removal_records(group.group_id, member_id):
                self._write(group, record)
        self.refresh(group, changed=True, now_ms=now_ms, assign=False)

    # -- epochs and the target -----------------------------------------------------

    def refresh(
        self, group: ConsumerGroup, *, changed: bool, now_ms: int, assign: bool = True
    ) -> None:
        """See what topics there are; begin a new epoch if anything is different.

        Args:
            changed: members or their subscriptions have changed.
            assign: also make the target; else the next heartbeat does.
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
            self._write(group, record)
        if assign and group.assignment_epoch < group.group_epoch:
            self._assign(group)

    def _refresh_topics(self, group: ConsumerGroup, now_ms: int) -> bool:
        """Look up what the members want; say if that is something else than before."""
        changed = False
        patterns = resolve(group, self._topics, is_guarded=self.is_guarded)
        if patterns != group.patterns:
            for pattern in group.patterns.keys() - patterns.keys():
                self._write(group, pattern_record(group.group_id, pattern, None))
            for pattern, names in patterns.items():
                if group.patterns.get(pattern) != names:
                    record = pattern_record(group.group_id, pattern, names, now_ms)
                    self._write(group, record)
            group.patterns = patterns
            changed = True
        wanted: set[str] = set()
        for member in group.members.values():
            wanted |= group.wanted_topics(member)
        counts = {name: self._topics.partition_count(name) for name in wanted}
        topics = {name: count for name, count in sorted(counts.items()) if count}
        group.topics = topics
        metadata_hash = _hash(topics)
        if metadata_hash != group.metadata_hash:
            group.metadata_hash = metadata_hash
            changed = True
        return changed

    def _assign(self, group: ConsumerGroup) -> None:
        """Make the target assignment of the group's epoch."""
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
                self._write(group, target_record(group.group_id, member_id, share))
        group.target = target
        group.assignment_epoch = group.group_epoch
        self._write(group, target_epoch_record(group.group_id, group.group_epoch))

    # -- timers ----------------------------------------------------------------------

    def _schedule(
        self, group: ConsumerGroup, member: ConsumerMember, now_ms: int
    ) -> None:
        member_id = member.member_id
        self.schedule_session(group, member_id, now_ms)
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

                self._timers.schedule(
                    name, now_ms + member.rebalance_timeout_ms, expire
                )
        else:
            self._timers.cancel(name)

    def schedule_session(
        self, group: ConsumerGroup, member_id: str, now_ms: int
    ) -> None:
        """(Re)start a member's session timer."""

        member = group.members[member_id]
        timeout_ms = self._own_or(
            group, SESSION_TIMEOUT, self._config.group_consumer_session_timeout_ms
        )
        if member.classic is not None:
            timeout_ms = member.classic.session_timeout_ms

        def expire(at_ms: int) -> None:
            if group.members.get(member_id) is member:
                self.remove_members(group, [member_id], at_ms)

        self._timers.schedule(
            ("session", group.group_id, member_id), now_ms + timeout_ms, expire
        )

    def _cancel(self, group: ConsumerGroup, member_id: str) -> None:
        self._timers.cancel(("session", group.group_id, member_id))
        self._timers.cancel(("revocation", group.group_id, member_id))

    def loaded(self, group: ConsumerGroup, now_ms: int) -> None:
        """A group is back from the log: its members have their time again."""
        for member in group.members.values():
            self._schedule(group, member, now_ms)

    def forget(self, group: ConsumerGroup) -> None:
        """Run no more timers of a group."""
        for member_id in group.members:
            self._cancel(group, member_id)

    # -- out -------------------------------------------------------------------------

    def _write(self, group: ConsumerGroup, record: KeyValue) -> None:
        self._out.write(self._partition_of(group.group_id), *record)

    def _answer(
        self, call: Call, group: ConsumerGroup, member: ConsumerMember, *, tells: bool
    ) -> None:
        assignment = None
        if tells:
            assignment = Assignment(topic_partitions=_rows(member.assigned))
        self._out.answer(
            call,
            ConsumerGroupHeartbeatResponse(
                member_id=member.member_id,
                member_epoch=member.member_epoch,
                heartbeat_interval_ms=self._own_or(
                    group,
                    HEARTBEAT_INTERVAL,
                    self._config.group_consumer_heartbeat_interval_ms,
                ),
                assignment=assignment,
            ),
            self._after(group),
        )

    def _own_or(self, group: ConsumerGroup, name: str, default: int) -> int:
        """A group's own setting; the broker's if it has none."""
        text = self._overrides(group.group_id).get(name)
        return default if text is None else int(text)

    def _after(self, group: ConsumerGroup) -> tuple[int, ...]:
        """What an answer rests on, if anything is to be written at all."""
        partition = self._partition_of(group.group_id)
        return (partition,) if partition in self._out.records else ()


def _check_epoch(
    member: ConsumerMember, request: ConsumerGroupHeartbeatRequest
) -> None:
    """Fence who is not where it says; but not who has missed an answer."""
    epoch = request.member_epoch
    if epoch == member.member_epoch:
        return
    if epoch < member.member_epoch and epoch == member.previous_epoch:
        owned = request.topic_partitions
        if owned is not None and all(
            set(row.partitions) <= member.assigned.get(row.topic_id, set())
            for row in owned
        ):
            return
    relation = "greater" if epoch > member.member_epoch else "smaller"
    raise ApiError(
        ErrorCode.FENCED_MEMBER_EPOCH,
        f"The consumer group member has a {relation} member epoch ({epoch}) than the"
        f" one known by the group coordinator ({member.member_epoch}). The member must"
        " abandon all its partitions and rejoin.",
    )


def _refuse(message: str) -> None:
    raise ApiError(ErrorCode.INVALID_REQUEST, message)


def _hash(topics: dict[str, int]) -> int:
    """What a successor needs to see whether topics have changed; 0 of none."""
    if not topics:
        return 0
    text = repr(sorted(topics.items())).encode()
    return int.from_bytes(sha256(text).digest()[:8], "big", signed=True)


def _rows(partitions: Partitions) -> list[TopicPartitions]:
    return [
        TopicPartitions(topic_id=topic, partitions=sorted(numbers))
        for topic, numbers in sorted(partitions.items())
    ]

"""Serve ShareGroupHeartbeat, the request that keeps members of share groups alive.

With this request a member joins, subscribes and leaves. The answer has the member's
epoch and assignment. Members get their records by another request, ShareFetch.

Source: KIP-932; Kafka's GroupMetadataManager (shareGroupHeartbeat and what belongs to
it), with its error messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from mpbroker.base.java_text import is_blank
from mpbroker.coordinator.context import CoordinatorContext
from mpbroker.coordinator.groups.assignors import MemberSpec, assign_simple
from mpbroker.coordinator.groups.group_config import GroupConfig, setting_of
from mpbroker.coordinator.groups.share_group import (
    ShareGroup,
    ShareMember,
    current_record,
    epoch_record,
    initialized_record,
    member_record,
    removal_records,
    target_epoch_record,
    target_record,
)
from mpbroker.coordinator.metadata_hash import metadata_hash
from mpbroker.coordinator.outbox import Call
from mpbroker.coordinator.versioned import KeyValue
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.share_group_heartbeat import (
    Assignment,
    ShareGroupHeartbeatRequest,
    ShareGroupHeartbeatResponse,
    TopicPartitions,
)

_JOIN_EPOCH: Final = 0
_LEAVE_EPOCH: Final = -1
# After its group is loaded, a member has at least this time to send a request.
_LEAST_SESSION_LEFT_MS: Final = 2000


class ShareGroupHeartbeat:
    """Serves the heartbeats of share groups' members, and ends their sessions.

    Args:
        partition_of: returns the partition of __consumer_offsets that has the records
            of a group.
        overrides: returns a group's own settings, which replace the broker's.
    """

    def __init__(
        self,
        config: GroupConfig,
        context: CoordinatorContext,
        partition_of: Callable[[str], int],
        overrides: Callable[[str], Mapping[str, str]],
    ) -> None:
        self._config = config
        self._out = context.outbox
        self._timers = context.timers
        self._topics = context.topics
        self._sessions = context.sessions
        self._partition_of = partition_of
        self._overrides = overrides

    def validate(self, request: ShareGroupHeartbeatRequest) -> None:
        """Raise an error if a request is invalid, whatever its group's state is.

        Raises:
            ApiError: INVALID_REQUEST.
        """
        epoch = request.member_epoch
        if is_blank(request.member_id):
            _refuse("MemberId can't be empty.")
        if is_blank(request.rack_id):
            _refuse("RackId can't be empty.")
        if epoch == _JOIN_EPOCH and not request.subscribed_topic_names:
            _refuse("SubscribedTopicNames must be set in first request.")
        if epoch < _LEAVE_EPOCH:
            _refuse("MemberEpoch is invalid.")

    def heartbeat(
        self,
        call: Call,
        group: ShareGroup,
        request: ShareGroupHeartbeatRequest,
        now_ms: int,
    ) -> None:
        """Apply a member's heartbeat; answer with its epoch and its assignment.

        Raises:
            ApiError: the error to answer with.
        """
        member_id = request.member_id
        if request.member_epoch == _LEAVE_EPOCH:
            group.member(member_id)  # raises
            self._remove(group, member_id, now_ms)
            self._answer(call, group, member_id, _LEAVE_EPOCH)
            return
        member, is_new = self._member_of(group, request)
        before = member.metadata()
        member.client_id, member.client_host = call.client_id, call.client_host
        if request.rack_id is not None:
            member.rack_id = request.rack_id
        if request.subscribed_topic_names is not None:
            member.topic_names = tuple(sorted(set(request.subscribed_topic_names)))
        group.members[member_id] = member
        if is_new or member.metadata() != before:
            self._write(group, member_record(group.group_id, member_id, member))
        self.refresh(group, changed=is_new or member.topic_names != before[3])
        if group.assignment_epoch < group.group_epoch:
            self._assign(group, now_ms)
        tells = request.member_epoch == _JOIN_EPOCH
        if member.member_epoch != group.assignment_epoch:
            target = group.target.get(member_id, {})
            tells = tells or target != member.assigned
            member.previous_epoch = member.member_epoch
            member.member_epoch = group.assignment_epoch
            member.assigned = target
            self._write(group, current_record(group.group_id, member_id, member))
        self.schedule(group, member_id, now_ms)
        self._answer(call, group, member_id, member.member_epoch, member, tells=tells)

    def _member_of(
        self, group: ShareGroup, request: ShareGroupHeartbeatRequest
    ) -> tuple[ShareMember, bool]:
        member = group.members.get(request.member_id)
        epoch = request.member_epoch
        if member is None:
            if epoch != _JOIN_EPOCH:
                group.member(request.member_id)  # raises
            if len(group.members) >= self._config.group_share_max_size:
                raise ApiError(
                    ErrorCode.GROUP_MAX_SIZE_REACHED,
                    "The share group has reached its maximum capacity of"
                    f" {self._config.group_share_max_size} members.",
                )
            return ShareMember(request.member_id), True
        if epoch > member.member_epoch or (
            0 < epoch < member.member_epoch and epoch != member.previous_epoch
        ):
            relation = "greater" if epoch > member.member_epoch else "smaller"
            raise ApiError(
                ErrorCode.FENCED_MEMBER_EPOCH,
                f"The share group member has a {relation} member epoch ({epoch}) than"
                f" the one known by the group coordinator ({member.member_epoch}). The"
                " member must abandon all its partitions and rejoin.",
            )
        return member, False

    # -- epochs and the target -------------------------------------------------------

    def refresh(self, group: ShareGroup, *, changed: bool) -> None:
        """Look up the group's topics; begin a new group epoch if anything has changed.

        Args:
            changed: whether members or their subscriptions have changed.
        """
        version = self._topics.version()
        if changed or version != group.topics_version:
            group.topics_version = version
            found = metadata_hash(self._counts(group))
            changed = changed or found != group.metadata_hash
            group.metadata_hash = found
        if changed:
            group.group_epoch += 1
            self._write(group, epoch_record(group))

    def _counts(self, group: ShareGroup) -> dict[str, int]:
        """Return the partition count of each existing topic of all subscriptions."""
        names = {
            name for member in group.members.values() for name in member.topic_names
        }
        counts = {name: self._topics.partition_count(name) for name in sorted(names)}
        return {name: count for name, count in counts.items() if count}

    def _assign(self, group: ShareGroup, now_ms: int) -> None:
        counts = {
            topic_id: (name, count)
            for name, count in self._counts(group).items()
            if (topic_id := self._topics.topic_id(name)) is not None
        }
        specs = [
            MemberSpec(
                member.member_id,
                None,
                frozenset(
                    topic_id
                    for topic_id, (name, _) in counts.items()
                    if name in member.topic_names
                ),
                {},
            )
            for member in group.members.values()
        ]
        target = assign_simple(
            specs, {topic: count for topic, (_, count) in counts.items()}
        )
        for member_id, share in target.items():
            if group.target.get(member_id) != share:
                self._write(group, target_record(group.group_id, member_id, share))
        group.target = target
        group.assignment_epoch = group.group_epoch
        # The epoch's record comes last, as in consumer groups.
        self._write(
            group, target_epoch_record(group.group_id, group.group_epoch, now_ms)
        )
        self._initialize(group)

    def _initialize(self, group: ShareGroup) -> None:
        """Record for which partitions the group has a delivery state from now on.

        These are all partitions of the topics to which members subscribe.
        """
        changed = False
        for name, count in self._counts(group).items():
            topic_id = self._topics.topic_id(name)
            if topic_id is None:
                continue
            _, known = group.initialized.get(topic_id, (name, set()))
            if len(known) < count:
                group.initialized[topic_id] = name, set(range(count))
                changed = True
        if changed:
            self._write(group, initialized_record(group.group_id, group.initialized))

    def write_initialized(self, group: ShareGroup) -> tuple[int, ...]:
        """Write the record of the partitions for which a group has a delivery state.

        Return the logs that the answer must wait for.
        """
        self._write(group, initialized_record(group.group_id, group.initialized))
        return self.after(group)

    # -- members that go ---------------------------------------------------------------

    def _remove(self, group: ShareGroup, member_id: str, now_ms: int) -> None:
        self._timers.cancel(("share session", group.group_id, member_id))
        del group.members[member_id]
        group.target.pop(member_id, None)
        for record in removal_records(group.group_id, member_id):
            self._write(group, record)
        self.refresh(group, changed=True)

    def schedule(
        self, group: ShareGroup, member_id: str, now_ms: int, silence_ms: int = -1
    ) -> None:
        """Start or restart a member's session timer.

        Args:
            silence_ms: the time since the member's last request; -1: it has just sent
                one.
        """
        timeout_ms = self.setting(
            group.group_id,
            "share.session.timeout.ms",
            self._config.group_share_session_timeout_ms,
        )
        if silence_ms < 0:
            self._sessions.heard(member_id, now_ms)
        else:
            timeout_ms = max(timeout_ms - silence_ms, _LEAST_SESSION_LEFT_MS)

        def expire(at_ms: int) -> None:
            if member_id in group.members and not group.is_dead:
                self._remove(group, member_id, at_ms)

        name = ("share session", group.group_id, member_id)
        self._timers.schedule(name, now_ms + timeout_ms, expire)

    def loaded(self, group: ShareGroup, now_ms: int) -> None:
        """Start the session timers of a group that was loaded from the log.

        The time since a member's last request, as the previous coordinator has stored
        it, counts as a part of its session timeout.
        """
        for member_id in group.members:
            silence_ms = self._sessions.take_over(member_id, now_ms)
            self.schedule(group, member_id, now_ms, silence_ms)

    def forget(self, group: ShareGroup) -> None:
        """Cancel all timers of a group."""
        for member_id in group.members:
            self._timers.cancel(("share session", group.group_id, member_id))

    # -- records, settings, answers ----------------------------------------------------

    def _write(self, group: ShareGroup, record: KeyValue) -> None:
        self._out.write(self._partition_of(group.group_id), *record)

    def after(self, group: ShareGroup) -> tuple[int, ...]:
        """Return the logs that must be on disk before an answer is sent.

        This is the group's log, or none: see `Outbox.written`.
        """
        return self._out.written(self._partition_of(group.group_id))

    def setting(self, group_id: str, name: str, default: int) -> int:
        """Return a group's own value of a setting, or ``default`` if it has none."""
        return setting_of(self._overrides(group_id), name, default)

    def _answer(
        self,
        call: Call,
        group: ShareGroup,
        member_id: str,
        epoch: int,
        member: ShareMember | None = None,
        *,
        tells: bool = False,
    ) -> None:
        assignment = None
        if tells and member is not None:
            assignment = Assignment(
                topic_partitions=[
                    TopicPartitions(topic_id=topic, partitions=sorted(numbers))
                    for topic, numbers in sorted(member.assigned.items())
                ]
            )
        interval_ms = 0
        if member is not None:
            interval_ms = self.setting(
                group.group_id,
                "share.heartbeat.interval.ms",
                self._config.group_share_heartbeat_interval_ms,
            )
        self._out.answer(
            call,
            ShareGroupHeartbeatResponse(
                member_id=member_id,
                member_epoch=epoch,
                heartbeat_interval_ms=interval_ms,
                assignment=assignment,
            ),
            self.after(group),
        )


def _refuse(message: str) -> None:
    raise ApiError(ErrorCode.INVALID_REQUEST, message)

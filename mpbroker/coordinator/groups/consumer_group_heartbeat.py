"""Serve ConsumerGroupHeartbeat, the request of members that speak KIP-848.

With this request a member joins, subscribes, reports its partitions, and leaves. The
answer has the member's epoch and assignment.

Source: KIP-848; Kafka's GroupMetadataManager (consumerGroupHeartbeat and what belongs
to it), with its error messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from mpbroker.base.java_text import is_blank
from mpbroker.coordinator.context import CoordinatorContext
from mpbroker.coordinator.groups.assignors import Partitions
from mpbroker.coordinator.groups.consumer_group import (
    LEAVE_STATIC_EPOCH,
    ConsumerGroup,
    ConsumerMember,
)
from mpbroker.coordinator.groups.consumer_group_rebalance import (
    ConsumerGroupRebalance,
)
from mpbroker.coordinator.groups.consumer_group_records import (
    current_record,
    member_record,
)
from mpbroker.coordinator.groups.group_config import GroupConfig
from mpbroker.coordinator.groups.partition_rows import partitions_of
from mpbroker.coordinator.groups.patterns import compile_pattern, see
from mpbroker.coordinator.outbox import Call
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.consumer_group_heartbeat import (
    Assignment,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    TopicPartitions,
)

HEARTBEAT_INTERVAL: Final = "consumer.heartbeat.interval.ms"

_JOIN_EPOCH: Final = 0
_CLIENT_MAKES_ID_SINCE: Final = 1


class ConsumerGroupHeartbeat:
    """Serves the heartbeats of members that speak KIP-848.

    Args:
        new_id: makes a member id, for clients that do not make one themselves.
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

    # -- a request -----------------------------------------------------------------

    def validate(self, call: Call, request: ConsumerGroupHeartbeatRequest) -> None:
        """Raise an error if a request is invalid, whatever its group's state is.

        Raises:
            ApiError: INVALID_REQUEST, UNSUPPORTED_ASSIGNOR, INVALID_REGULAR_EXPRESSION,
                UNKNOWN_SERVER_ERROR.
        """
        epoch = request.member_epoch
        makes_id = call.version < _CLIENT_MAKES_ID_SINCE and epoch == _JOIN_EPOCH
        if is_blank(request.member_id) and not (makes_id and not request.member_id):
            _refuse("MemberId can't be empty.")
        for name, value in (
            ("InstanceId", request.instance_id),
            ("RackId", request.rack_id),
        ):
            if is_blank(value):
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
                    "Either SubscribedTopicNames or SubscribedLinearRegex must be"
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
                "The subscribed topics do not fit in a record of the log.",
            )

    def heartbeat(
        self,
        call: Call,
        group: ConsumerGroup,
        request: ConsumerGroupHeartbeatRequest,
        now_ms: int,
    ) -> bool:
        """Apply a member's heartbeat; answer with its epoch and its assignment.

        Returns:
            Whether equal requests of the same client get the same answer, as long as
            `beat_again` returns True for them.

        Raises:
            ApiError: the error to answer with.
        """
        if request.member_epoch < 0:
            self._leave(call, group, request, now_ms)
            return False
        member = self._member_of(group, request)
        before = member.position(), member.metadata(), member.subscription()
        assigned_before = before[0][3]
        is_new = member.member_id not in group.members
        if is_new:
            group.add(member)
        self._take_in(call, member, request)
        if is_new or member.metadata() != before[1]:
            self._rebalance.write(
                group, member_record(group.group_id, member.member_id, member)
            )
        sees_others = see(group, member, call.access, self._topics)
        changed = is_new or sees_others or member.subscription() != before[2]
        self._rebalance.refresh(group, changed=changed, now_ms=now_ms)
        owned = None
        if request.topic_partitions is not None:
            owned = partitions_of(
                (row.topic_id, row.partitions) for row in request.topic_partitions
            )
        if request.member_epoch == _JOIN_EPOCH and not is_new:
            # The member has started anew, and has none of its partitions any more.
            owned = {}
        group.reconcile(member, owned)
        if is_new or member.position() != before[0]:
            self._rebalance.write(
                group, current_record(group.group_id, member.member_id, member)
            )
        self._rebalance.schedule(group, member, now_ms)
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
        # The topics that a member may see by its pattern are looked up each time.
        sees_all = call.access is None or not member.topic_regex
        return not tells and sees_all and _has_no_news(request)

    def beat_again(
        self,
        group: ConsumerGroup,
        request: ConsumerGroupHeartbeatRequest,
        client: tuple[str, str],
        now_ms: int,
    ) -> bool:
        """Restart a member's timers, if a heartbeat without news changes nothing else.

        Args:
            group: the member's group.
            request: a request for which `heartbeat` has returned True.
            client: the client id and host of the sender.
            now_ms: the time.

        Returns:
            False if nothing was done: the heartbeat may have another answer by now.

        Raises:
            ApiError: the member is unknown or fenced, and nothing was done.
        """
        member = self._member_of(group, request)
        if (
            group.topics_version != self._topics.version()
            or not group.is_settled(member)
            or member.member_epoch != request.member_epoch
            or (member.client_id, member.client_host) != client
        ):
            return False
        self._rebalance.schedule(group, member, now_ms)
        return True

    def _member_of(
        self, group: ConsumerGroup, request: ConsumerGroupHeartbeatRequest
    ) -> ConsumerMember:
        """Return the member that sent a request; the caller adds it if it is new."""
        member_id, instance = request.member_id, request.instance_id
        epoch = request.member_epoch
        if instance is not None and epoch == _JOIN_EPOCH:
            known = group.static_members.get(instance)
            if known is not None and known != member_id:
                self._rebalance.check_join(group, request)
                return self._rebalance.replace_static(
                    group, known, member_id or self._new_id()
                )
        elif instance is not None:
            group.validate_instance(member_id, instance)
        member = group.members.get(member_id)
        if member is None:
            if epoch != _JOIN_EPOCH:
                group.member(member_id)  # raises
            self._rebalance.check_join(group, request)
            return ConsumerMember(member_id or self._new_id(), instance)
        if epoch != _JOIN_EPOCH:
            _check_epoch(member, request)
        elif member.member_epoch == LEAVE_STATIC_EPOCH:
            member.member_epoch = 0
        return member

    def _take_in(
        self,
        call: Call,
        member: ConsumerMember,
        request: ConsumerGroupHeartbeatRequest,
    ) -> None:
        """Store the fields of a request that are not null; keep the other values."""
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
            group.validate_instance(member_id, instance)
        member = group.member(member_id)
        if request.member_epoch == LEAVE_STATIC_EPOCH:
            # A static member will come back: it keeps its partitions until its session
            # ends.
            member.member_epoch = LEAVE_STATIC_EPOCH
            group.give_up_pending(member)
            self._rebalance.write(
                group, current_record(group.group_id, member_id, member)
            )
        else:
            self._rebalance.remove_members(group, [member_id], now_ms)
        self._out.answer(
            call,
            ConsumerGroupHeartbeatResponse(
                member_id=member_id, member_epoch=request.member_epoch
            ),
            self._rebalance.after(group),
        )

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
                heartbeat_interval_ms=self._rebalance.setting(
                    group,
                    HEARTBEAT_INTERVAL,
                    self._config.group_consumer_heartbeat_interval_ms,
                ),
                assignment=assignment,
            ),
            self._rebalance.after(group),
        )


def _has_no_news(request: ConsumerGroupHeartbeatRequest) -> bool:
    """Return whether a request says only that the member is alive."""
    return (
        request.member_epoch > _JOIN_EPOCH
        and request.rebalance_timeout_ms == -1
        and request.topic_partitions is None
        and request.subscribed_topic_names is None
        and request.subscribed_topic_regex is None
        and request.server_assignor is None
        and request.rack_id is None
    )


def _check_epoch(
    member: ConsumerMember, request: ConsumerGroupHeartbeatRequest
) -> None:
    """Check a request's member epoch.

    The previous epoch is valid, too, if the member only reports partitions that it has:
    then it has missed the answer with its new epoch.

    Raises:
        ApiError: FENCED_MEMBER_EPOCH.
    """
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


def _rows(partitions: Partitions) -> list[TopicPartitions]:
    return [
        TopicPartitions(topic_id=topic, partitions=sorted(numbers))
        for topic, numbers in sorted(partitions.items())
    ]

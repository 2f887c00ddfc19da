"""Serve StreamsGroupHeartbeat, the only request with which members of a group live.

With it a Kafka Streams client joins and sends its topology, reports the tasks that it
has, and leaves. The answer has its epoch and its tasks. Unlike Kafka, which creates
internal topics after the answer, this creates them before it, so a new application has
its tasks an interval earlier.

Source: KIP-1071; Kafka's GroupMetadataManager (streamsGroupHeartbeat and what belongs
to it), with its error messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.coordinator.context import CoordinatorContext
from mpbroker.coordinator.metadata_hash import metadata_hash
from mpbroker.coordinator.outbox import Call
from mpbroker.coordinator.streams.endpoints import partitions_by_endpoint
from mpbroker.coordinator.streams.group_log import (
    current_record,
    epoch_record,
    member_record,
    removal_records,
    target_epoch_record,
    target_record,
    topology_record,
)
from mpbroker.coordinator.streams.record_types import StreamsGroupTopologyValue
from mpbroker.coordinator.streams.streams_config import (
    HEARTBEAT_INTERVAL,
    INITIAL_REBALANCE_DELAY,
    NUM_STANDBY_REPLICAS,
    SESSION_TIMEOUT,
    StreamsConfig,
)
from mpbroker.coordinator.streams.streams_group import (
    NO_TARGET,
    CurrentTasks,
    StreamsGroup,
    StreamsMember,
    StreamsMemberState,
    TargetTasks,
    copy_tasks,
)
from mpbroker.coordinator.streams.streams_requests import (
    read_tasks,
    read_topology,
    task_rows,
    validate,
)
from mpbroker.coordinator.streams.task_assignor import (
    SubtopologyTasks,
    TaskMember,
    assign_tasks,
)
from mpbroker.coordinator.streams.topology import (
    ConfiguredTopology,
    InternalTopic,
    Problem,
    StatusCode,
    configure,
    required_topics,
)
from mpbroker.coordinator.versioned import KeyValue
from mpbroker.protocol.acl import AclOperation
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.streams_group_heartbeat import (
    Status,
    StreamsGroupHeartbeatRequest,
    StreamsGroupHeartbeatResponse,
)

_JOIN_EPOCH: Final = 0
# Once a coordinator is loaded, a member has so long to be heard of at least.
_LEAST_SESSION_LEFT_MS: Final = 2000
# The answer names so many topics that could not be created at most.
_ERRORS_TOLD: Final = 3
# A string of the protocol has 32,767 bytes at most.
_MAX_DETAIL: Final = 8000
# A batch's header and a record's, generously.
_RECORD_HEAD: Final = 256
_CHARACTER_BYTES: Final = 4  # at most, in UTF-8
_TAG_BYTES: Final = 8  # the lengths of a tag's key and value
# The record of a member's tasks has four lists: active ones and standbys, that it has
# and that it gives up. Each names subtopologies. A task is in two at most, as two
# numbers.
_LISTS: Final = 4
_TASK_BYTES: Final = 2 * 8
# -1 and 0 stand for the broker's default.
_POSSIBLE_FACTORS: Final = (-1, 0, 1)
# As many as one CreateTopics may create.
_MAX_NEW_PARTITIONS: Final = 10_000


class Limits(NamedTuple):
    """Limits that streams groups share with the other kinds.

    Attributes:
        rebalance_timeout_ms: a member that has to give tasks up is waited for so long
            at most, whatever it asks for.
        record_bytes: the largest batch of __consumer_offsets.
    """

    rebalance_timeout_ms: int
    record_bytes: int


class StreamsGroupHeartbeat:
    """Serves the heartbeats of streams groups' members, and their sessions.

    Args:
        config: the broker's settings.
        limits: see Limits.
        context: the outbox, the timers, the topics.
        partition_of: returns the partition of __consumer_offsets of a group.
        overrides: returns a group's own settings, which replace the broker's.
    """

    def __init__(
        self,
        config: StreamsConfig,
        limits: Limits,
        context: CoordinatorContext,
        partition_of: Callable[[str], int],
        overrides: Callable[[str], Mapping[str, str]],
    ) -> None:
        self._config = config
        self._most_rebalance_ms, self._max_record_bytes = limits
        self._out = context.outbox
        self._timers = context.timers
        self._topics = context.topics
        self._sessions = context.sessions
        self._partition_of = partition_of
        self._overrides = overrides

    def validate(self, request: StreamsGroupHeartbeatRequest) -> None:
        """Raise if a request is invalid for every state of its group.

        Raises:
            ApiError: INVALID_REQUEST, STREAMS_INVALID_TOPOLOGY.
        """
        validate(request)

    def heartbeat(
        self,
        call: Call,
        group: StreamsGroup,
        request: StreamsGroupHeartbeatRequest,
        now_ms: int,
    ) -> None:
        """Store what a member reports; answer with its epoch and its tasks.

        Raises:
            ApiError: the error to answer with; the group is unchanged.
        """
        if request.member_epoch < 0:
            self._leave(call, group, request, now_ms)
            return
        member = self._member_of(group, request)
        topology = _topology_of(group, request)
        self._require_room(group.group_id, request, topology)
        configured, errors = self._configured(group, topology, call, now_ms)
        self._require_room_for_tasks(configured)
        _require_tasks(configured, request)
        # The request is accepted: only from here on the group changes.
        is_new = member.member_id not in group.members
        was_empty = group.is_empty
        before = copy_tasks(member.assigned)
        changed = _take_in(call, member, request) or is_new
        is_new_topology = topology is not group.topology
        if is_new_topology:
            group.set_topology(topology)
        looked = configured is not group.configured
        group.configured = configured
        # If topics could not be created, a later heartbeat tries again.
        group.topics_version = -1 if errors else self._topics.version()
        group.members[member.member_id] = member
        # The epoch's record comes first. If a death leaves only some of these records,
        # the target's epoch is older than the group's, and the target is made anew.
        self._begin_epoch(group, changed=changed, looked=looked)
        if is_new_topology:
            self._write(group, topology_record(group.group_id, topology))
        if changed:
            record = member_record(group.group_id, member.member_id, member)
            self._write(group, record)
        if was_empty:
            self._delay(group, now_ms)
        statuses = self._statuses(group, member, errors)
        if group.delayed_until_ms:
            detail = "Assignment delayed due to the configured initial rebalance delay."
            statuses.append(Problem(StatusCode.ASSIGNMENT_DELAYED, detail))
        elif group.assignment_epoch < group.group_epoch:
            self._assign(group, now_ms)
        owned = _owned(request)
        moved = group.reconcile(member, owned)
        if moved:
            record = current_record(group.group_id, member.member_id, member)
            self._write(group, record)
        changes = request.member_epoch == _JOIN_EPOCH or before != member.assigned
        if changes and member.user_endpoint is not None:
            group.endpoint_epoch += 1
        # An answer that has told of tasks may have been lost; nobody else has them.
        tells = changes or (owned is not None and not _has_same(owned, member))
        if moved:  # what it has to give up now has a time of its own
            self._timers.cancel(_revocation_of(group, member.member_id))
        self.schedule(group, member, now_ms)
        if request.shutdown_application:
            group.shutdown_by = group.shutdown_by or member.member_id
        self._answer(call, group, member, request, statuses, tells=tells)

    def _require_room(
        self,
        group_id: str,
        request: StreamsGroupHeartbeatRequest,
        topology: StreamsGroupTopologyValue,
    ) -> None:
        """Refuse a member whose records would not fit in a batch of the log.

        A batch that cannot be appended would take all groups of the log with it.

        Raises:
            ApiError: UNKNOWN_SERVER_ERROR, as for consumers that name too many topics.
        """
        if request.member_epoch != _JOIN_EPOCH and request.client_tags is None:
            return
        tags = request.client_tags or ()
        described = sum(len(row.key) + len(row.value) for row in tags)
        described += len(request.process_id or "") + len(request.rack_id or "")
        if request.user_endpoint is not None:
            described += len(request.user_endpoint.host)
        described = _CHARACTER_BYTES * described + _TAG_BYTES * len(tags)
        key, value = topology_record(group_id, topology)
        self._require_fit(max(described, len(key) + len(value or b"")))

    def _require_room_for_tasks(self, configured: ConfiguredTopology) -> None:
        """Refuse a topology if a member with all its tasks would not fit in a batch.

        Raises:
            ApiError: UNKNOWN_SERVER_ERROR.
        """
        self._require_fit(
            sum(
                _LISTS * len(name.encode()) + _TASK_BYTES * each.num_tasks
                for name, each in (configured.subtopologies or {}).items()
            )
        )

    def _require_fit(self, content_bytes: int) -> None:
        size = content_bytes + _RECORD_HEAD
        if size > self._max_record_bytes:
            raise ApiError(
                ErrorCode.UNKNOWN_SERVER_ERROR,
                "The topology or the member does not fit in a record of the log:"
                f" {size} bytes are more than {self._max_record_bytes}.",
            )

    # -- members -----------------------------------------------------------------------

    def _member_of(
        self, group: StreamsGroup, request: StreamsGroupHeartbeatRequest
    ) -> StreamsMember:
        """Return the member that sends a request; a new one if it joins.

        Raises:
            ApiError: UNKNOWN_MEMBER_ID, FENCED_MEMBER_EPOCH, GROUP_MAX_SIZE_REACHED.
        """
        epoch = request.member_epoch
        member = group.members.get(request.member_id)
        if epoch == _JOIN_EPOCH:
            most = self._config.max_size
            if member is None and len(group.members) >= most:
                raise ApiError(
                    ErrorCode.GROUP_MAX_SIZE_REACHED,
                    "The streams group has reached its maximum capacity of"
                    f" {most} members.",
                )
            return member or StreamsMember(request.member_id)
        member = group.member(request.member_id)
        # The answer with the new epoch may have been lost: then the member has no task
        # but its present ones.
        is_previous = epoch == member.previous_epoch and _owns_no_others(
            member, request
        )
        if epoch > member.member_epoch or (
            epoch < member.member_epoch and not is_previous
        ):
            relation = "greater" if epoch > member.member_epoch else "smaller"
            raise ApiError(
                ErrorCode.FENCED_MEMBER_EPOCH,
                f"The streams group member has a {relation} member epoch ({epoch}) than"
                f" the one known by the group coordinator ({member.member_epoch}). The"
                " member must abandon all its partitions and rejoin.",
            )
        return member

    def _leave(
        self,
        call: Call,
        group: StreamsGroup,
        request: StreamsGroupHeartbeatRequest,
        now_ms: int,
    ) -> None:
        group.member(request.member_id)  # raises
        if request.shutdown_application:
            group.shutdown_by = group.shutdown_by or request.member_id
        self._remove(group, request.member_id)
        self._out.answer(
            call,
            StreamsGroupHeartbeatResponse(
                member_id=request.member_id,
                member_epoch=request.member_epoch,
                status=[],
            ),
            self.after(group),
        )

    def _remove(self, group: StreamsGroup, member_id: str) -> None:
        """Remove a member that has left or is fenced, and begin a new epoch."""
        self._cancel(group, member_id)
        group.remove(member_id)
        group.group_epoch += 1
        self._write(group, epoch_record(group))  # first, as in `heartbeat`
        for record in removal_records(group.group_id, member_id):
            self._write(group, record)

    # -- topics ------------------------------------------------------------------------

    def _configured(
        self,
        group: StreamsGroup,
        topology: StreamsGroupTopologyValue,
        call: Call,
        now_ms: int,
    ) -> tuple[ConfiguredTopology, list[str]]:
        """Hold a topology against the existing topics; create those that are missing.

        Returns:
            The topology with its topics, and why topics could not be created.

        Raises:
            ApiError: STREAMS_INVALID_TOPOLOGY.
        """
        known = group.configured
        is_same = topology is group.topology
        if is_same and known and self._topics.version() == group.topics_version:
            return known, []
        configured = configure(topology, self._topics.partition_count)
        if not configured.missing:
            return configured, []
        if group.create_errors and now_ms < group.create_again_ms:
            return configured, group.create_errors
        errors = self._create(configured.missing, call)
        # Not with each heartbeat of each member: that may be hundreds a second.
        group.create_errors = errors
        group.create_again_ms = now_ms + 2 * self._heartbeat_interval_ms(group)
        return configure(topology, self._topics.partition_count), errors

    def _create(self, missing: Sequence[InternalTopic], call: Call) -> list[str]:
        """Create internal topics; return why some could not be created."""
        access = call.access
        if access is not None and not access.may_cluster(
            AclOperation.CREATE, log=False
        ):
            denied = [
                topic.name
                for topic in missing
                if not access.may_topic(AclOperation.CREATE, topic.name)
            ]
            if denied:
                return [f"Unauthorized to CREATE on topics {', '.join(denied)}"]
        num_partitions = sum(topic.num_partitions for topic in missing)
        if num_partitions > _MAX_NEW_PARTITIONS:
            return [
                f"Creation failed: {num_partitions} partitions are more than the"
                f" {_MAX_NEW_PARTITIONS} that may be created at once"
            ]
        failed = dict(
            self._topics.create(
                [
                    (each.name, each.num_partitions, each.configs)
                    for each in missing
                    if each.replication_factor in _POSSIBLE_FACTORS
                ]
            )
        )
        for each in missing:
            if each.replication_factor not in _POSSIBLE_FACTORS:
                failed[each.name] = (
                    f"replication factor {each.replication_factor}: this broker keeps"
                    " one replica"
                )
        if not failed:
            return []
        told = [f"{name} ({text})" for name, text in sorted(failed.items())]
        more = len(told) - _ERRORS_TOLD
        text = ", ".join(told[:_ERRORS_TOLD]) + (
            f" and {more} more" if more > 0 else ""
        )
        return [f"Creation failed: {text}"]

    def _statuses(
        self, group: StreamsGroup, member: StreamsMember, errors: Sequence[str]
    ) -> list[Problem]:
        """Return what a member is told beside its tasks."""
        assert group.topology is not None and group.configured is not None
        found = []
        if member.topology_epoch < group.topology.epoch:
            detail = (
                f"The member's topology epoch {member.topology_epoch} is behind the"
                f" group's topology epoch {group.topology.epoch}."
            )
            found.append(Problem(StatusCode.STALE_TOPOLOGY, detail))
        problem = group.configured.problem
        if problem is not None:
            detail = "; ".join((problem.detail, *errors))
            found.append(Problem(problem.code, detail + ("." if errors else "")))
        return found

    # -- epochs and the target ---------------------------------------------------------

    def _begin_epoch(self, group: StreamsGroup, *, changed: bool, looked: bool) -> None:
        """Begin a new group epoch if members, topology, topics or settings changed.

        Args:
            group: the group.
            changed: whether members have changed.
            looked: whether the topology was held against the topics again.
        """
        assert group.topology is not None and group.configured is not None
        topics_hash = group.metadata_hash
        if looked:
            counts = {
                name: count
                for name in required_topics(group.topology)
                if (count := self._topics.partition_count(name))
            }
            topics_hash = metadata_hash(counts)
        found = (
            topics_hash,
            group.topology.epoch if group.configured.problem is None else -1,
            {"num.standby.replicas": str(self._num_standbys(group))},
        )
        known = (
            group.metadata_hash,
            group.validated_topology_epoch,
            group.assignment_configs,
        )
        if not changed and found == known:
            return
        (
            group.metadata_hash,
            group.validated_topology_epoch,
            group.assignment_configs,
        ) = found
        group.group_epoch += 1
        self._write(group, epoch_record(group))

    def _delay(self, group: StreamsGroup, now_ms: int) -> None:
        """Make the first assignment later, when more members may have joined."""
        delay_ms = self.setting(
            group, INITIAL_REBALANCE_DELAY, self._config.initial_rebalance_delay_ms
        )
        if delay_ms <= 0 or group.delayed_until_ms:
            return

        def expire(at_ms: int) -> None:
            group.delayed_until_ms = 0
            if group.members and not group.is_dead:
                self._assign(group, at_ms)

        group.delayed_until_ms = now_ms + delay_ms
        name = ("streams delay", group.group_id)
        self._timers.schedule(name, group.delayed_until_ms, expire)

    def _assign(self, group: StreamsGroup, now_ms: int) -> None:
        """Make the target assignment for the group epoch."""
        configured = group.configured
        tasks: dict[str, SubtopologyTasks] = {}
        if configured is not None and configured.problem is None:
            tasks = {
                each: SubtopologyTasks(
                    subtopology.num_tasks, bool(subtopology.state_changelog_topics)
                )
                for each, subtopology in (configured.subtopologies or {}).items()
            }
        members = [
            TaskMember(
                member.member_id,
                member.process_id,
                *group.target.get(member.member_id, NO_TARGET),
            )
            for member in group.members.values()
        ]
        found = assign_tasks(members, tasks, self._num_standbys(group))
        target = {each: TargetTasks(*share) for each, share in found.items()}
        for member_id, share in target.items():
            if group.target.get(member_id) != share:
                self._write(group, target_record(group.group_id, member_id, share))
        group.target = target
        group.assignment_epoch = group.group_epoch
        # The epoch's record comes last. If a power cut leaves only some of those above
        # it, a successor finds an older assignment epoch, and makes the target anew.
        record = target_epoch_record(group.group_id, group.group_epoch, now_ms)
        self._write(group, record)

    def _num_standbys(self, group: StreamsGroup) -> int:
        default = self._config.num_standby_replicas
        return self.setting(group, NUM_STANDBY_REPLICAS, default)

    # -- timers ------------------------------------------------------------------------

    def schedule(
        self,
        group: StreamsGroup,
        member: StreamsMember,
        now_ms: int,
        silence_ms: int = -1,
    ) -> None:
        """Restart a member's session timer; start or stop its revocation timer.

        Args:
            group: the group.
            member: the member.
            now_ms: the time.
            silence_ms: how long the member has sent no request; -1: it sends one now.
        """
        timeout_ms = self.setting(
            group, SESSION_TIMEOUT, self._config.session_timeout_ms
        )
        if silence_ms < 0:
            self._sessions.heard(member.member_id, now_ms)
        else:
            timeout_ms = max(timeout_ms - silence_ms, _LEAST_SESSION_LEFT_MS)

        def expire(at_ms: int) -> None:
            if group.members.get(member.member_id) is member and not group.is_dead:
                self._remove(group, member.member_id)

        name = ("streams session", group.group_id, member.member_id)
        self._timers.schedule(name, now_ms + timeout_ms, expire)
        self._schedule_revocation(group, member, now_ms)

    def _schedule_revocation(
        self, group: StreamsGroup, member: StreamsMember, now_ms: int
    ) -> None:
        name = _revocation_of(group, member.member_id)
        if member.state is not StreamsMemberState.UNREVOKED_TASKS:
            self._timers.cancel(name)
            return
        if name in self._timers:
            return
        epoch = member.member_epoch

        def expire(at_ms: int) -> None:
            if (
                group.members.get(member.member_id) is member
                and member.state is StreamsMemberState.UNREVOKED_TASKS
                and member.member_epoch == epoch
            ):
                self._remove(group, member.member_id)

        timeout_ms = min(member.rebalance_timeout_ms, self._most_rebalance_ms)
        self._timers.schedule(name, now_ms + timeout_ms, expire)

    def _cancel(self, group: StreamsGroup, member_id: str) -> None:
        self._timers.cancel(("streams session", group.group_id, member_id))
        self._timers.cancel(_revocation_of(group, member_id))

    def loaded(self, group: StreamsGroup, now_ms: int) -> None:
        """Start the timers of a group that was loaded; sessions go on."""
        for member_id, member in group.members.items():
            silence_ms = self._sessions.take_over(member_id, now_ms)
            self.schedule(group, member, now_ms, silence_ms)

    def forget(self, group: StreamsGroup) -> None:
        """Cancel all timers of a group."""
        self._timers.cancel(("streams delay", group.group_id))
        for member_id in group.members:
            self._cancel(group, member_id)

    # -- records, settings, answers ----------------------------------------------------

    def _write(self, group: StreamsGroup, record: KeyValue) -> None:
        self._out.write(self._partition_of(group.group_id), *record)

    def after(self, group: StreamsGroup) -> tuple[int, ...]:
        """Return the logs that an answer must wait for so that new records are on disk.

        It is the group's log, or none: see `Outbox.written`.
        """
        return self._out.written(self._partition_of(group.group_id))

    def setting(self, group: StreamsGroup, name: str, default: int) -> int:
        """Return a setting of a group, or the broker's if it has none of its own."""
        text = self._overrides(group.group_id).get(name)
        return default if text is None else int(text)

    def _heartbeat_interval_ms(self, group: StreamsGroup) -> int:
        default = self._config.heartbeat_interval_ms
        return self.setting(group, HEARTBEAT_INTERVAL, default)

    def _answer(
        self,
        call: Call,
        group: StreamsGroup,
        member: StreamsMember,
        request: StreamsGroupHeartbeatRequest,
        statuses: list[Problem],
        *,
        tells: bool,
    ) -> None:
        if group.shutdown_by is not None:
            detail = (
                f"Streams group member {group.shutdown_by} encountered a fatal error"
                " and requested a shutdown for the entire application."
            )
            statuses.append(Problem(StatusCode.SHUTDOWN_APPLICATION, detail))
        response = StreamsGroupHeartbeatResponse(
            member_id=member.member_id,
            member_epoch=member.member_epoch,
            heartbeat_interval_ms=self._heartbeat_interval_ms(group),
            status=[
                Status(status_code=code, status_detail=detail[:_MAX_DETAIL])
                for code, detail in statuses
            ],
            endpoint_information_epoch=group.endpoint_epoch,
        )
        if tells:
            response.active_tasks = task_rows(member.assigned.active)
            response.standby_tasks = task_rows(member.assigned.standby)
            response.warmup_tasks = []
        if request.endpoint_information_epoch != group.endpoint_epoch:
            response.partitions_by_user_endpoint = partitions_by_endpoint(
                group, self._topics.partition_count
            )
        self._out.answer(call, response, self.after(group))


def _revocation_of(group: StreamsGroup, member_id: str) -> tuple[str, str, str]:
    """Return the name of the timer by which a member must have given tasks up."""
    return "streams revocation", group.group_id, member_id


def _take_in(
    call: Call, member: StreamsMember, request: StreamsGroupHeartbeatRequest
) -> bool:
    """Store what a member says of itself; return whether it has changed."""
    before = member.metadata()
    member.client_id, member.client_host = call.client_id, call.client_host
    if request.rack_id is not None:
        member.rack_id = request.rack_id
    if request.rebalance_timeout_ms != -1:
        member.rebalance_timeout_ms = request.rebalance_timeout_ms
    if request.topology is not None:
        member.topology_epoch = request.topology.epoch
    if request.process_id is not None:
        member.process_id = request.process_id
    if (endpoint := request.user_endpoint) is not None:
        member.user_endpoint = endpoint.host, endpoint.port
    if request.client_tags is not None:
        tags = {row.key: row.value for row in request.client_tags}
        member.client_tags = tuple(sorted(tags.items()))
    return member.metadata() != before


def _topology_of(
    group: StreamsGroup, request: StreamsGroupHeartbeatRequest
) -> StreamsGroupTopologyValue:
    """Return the group's topology: its own, or the request's if it has none.

    Raises:
        ApiError: INVALID_REQUEST: another topology of the same or a later epoch.
    """
    known, sent = group.topology, request.topology
    if sent is None:
        if known is None:
            raise ApiError(
                ErrorCode.UNKNOWN_SERVER_ERROR,
                f"Streams group {group.group_id} has no topology.",
            )
        return known
    read = read_topology(sent)
    if known is None:
        return read
    if known.epoch > sent.epoch:
        return known  # the member is told that its topology is stale
    if known.encode(0) != read.encode(0):
        raise ApiError(
            ErrorCode.INVALID_REQUEST, "Topology updates are not supported yet."
        )
    return known


def _owned(request: StreamsGroupHeartbeatRequest) -> CurrentTasks | None:
    """Return the tasks that a member reports; None if it reports none."""
    if request.active_tasks is None or request.standby_tasks is None:
        return None
    active = read_tasks(request.active_tasks)
    return CurrentTasks(
        {each: dict.fromkeys(numbers, 0) for each, numbers in active.items()},
        read_tasks(request.standby_tasks),
    )


def _has_same(owned: CurrentTasks, member: StreamsMember) -> bool:
    """Return whether a member reports just the tasks that it is to have now."""
    return all(
        {each: set(numbers) for each, numbers in reported.items() if numbers}
        == {each: set(numbers) for each, numbers in given.items() if numbers}
        for reported, given in (
            (owned.active, member.assigned.active),
            (owned.standby, member.assigned.standby),
        )
    )


def _owns_no_others(
    member: StreamsMember, request: StreamsGroupHeartbeatRequest
) -> bool:
    """Return whether a member reports its tasks, and all are among its present ones."""
    owned = _owned(request)
    if owned is None:
        return False
    return all(
        numbers <= set(has.get(each, ()))
        for tasks, has in (
            (read_tasks(request.active_tasks or []), member.assigned.active),
            (owned.standby, member.assigned.standby),
        )
        for each, numbers in tasks.items()
    )


def _require_tasks(
    configured: ConfiguredTopology, request: StreamsGroupHeartbeatRequest
) -> None:
    """Refuse a report of tasks that the topology does not have.

    Raises:
        ApiError: INVALID_REQUEST.
    """
    if configured.problem or configured.subtopologies is None:
        return
    for row in (*(request.active_tasks or ()), *(request.standby_tasks or ())):
        subtopology = configured.subtopologies.get(row.subtopology_id)
        if subtopology is None:
            raise ApiError(
                ErrorCode.INVALID_REQUEST,
                f"Subtopology {row.subtopology_id} does not exist in the topology.",
            )
        for number in row.partitions:
            if not 0 <= number < subtopology.num_tasks:
                raise ApiError(
                    ErrorCode.INVALID_REQUEST,
                    f"Task {number} for subtopology {row.subtopology_id} is invalid."
                    " Number of tasks for this subtopology:"
                    f" {subtopology.num_tasks}",
                )

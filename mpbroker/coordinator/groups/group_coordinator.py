"""Execute the APIs of groups, with one method for each API: GroupCoordinator.

Sans-IO: methods get requests and the time, and put records and answers into the outbox,
which `record_writer` empties. All records of a group are in one partition of
__consumer_offsets, which a hash of the group's id chooses, as in Kafka. The groups of a
partition are served after the partition was loaded. If it can no longer be written, its
groups are forgotten, because only the records in the log count.

Source: Kafka's GroupCoordinatorService and GroupCoordinatorShard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final

from mpbroker.base.java_hash import java_hash
from mpbroker.base.java_text import is_blank
from mpbroker.coordinator.context import CoordinatorContext
from mpbroker.coordinator.groups.classic_group import ClassicGroup, ClassicGroupState
from mpbroker.coordinator.groups.classic_protocol import (
    ClassicProtocol,
)
from mpbroker.coordinator.groups.classic_rebalance import ClassicRebalance, refused_join
from mpbroker.coordinator.groups.consumer_group import ConsumerGroup
from mpbroker.coordinator.groups.consumer_group_heartbeat import ConsumerGroupHeartbeat
from mpbroker.coordinator.groups.consumer_group_rebalance import ConsumerGroupRebalance
from mpbroker.coordinator.groups.consumer_group_records import replay, tombstones
from mpbroker.coordinator.groups.group_config import GroupConfig
from mpbroker.coordinator.groups.group_listing import GroupListing, is_empty
from mpbroker.coordinator.groups.group_offsets import OffsetAndMetadata
from mpbroker.coordinator.groups.group_records import (
    ConsumerGroupMetadataKey,
    GroupMetadataKey,
    GroupMetadataValue,
    OffsetCommitKey,
    OffsetCommitValue,
    group_metadata_key,
)
from mpbroker.coordinator.groups.mixed_protocol import MixedProtocol
from mpbroker.coordinator.groups.offset_answers import (
    each_group_once,
    fetched_topics,
    refused_commit,
    single_group,
)
from mpbroker.coordinator.groups.offset_metadata_manager import OffsetMetadataManager
from mpbroker.coordinator.groups.share_group import (
    ShareGroup,
    deletes_group,
    is_share_key,
)
from mpbroker.coordinator.groups.share_group import replay as replay_share
from mpbroker.coordinator.groups.share_group import tombstones as share_tombstones
from mpbroker.coordinator.groups.share_group_heartbeat import ShareGroupHeartbeat
from mpbroker.coordinator.outbox import NOW, Again, Call
from mpbroker.coordinator.streams.group_log import (
    deletes_group as deletes_streams_group,
)
from mpbroker.coordinator.streams.group_log import is_streams_key
from mpbroker.coordinator.streams.group_log import replay as replay_streams
from mpbroker.coordinator.streams.group_log import tombstones as streams_tombstones
from mpbroker.coordinator.streams.streams_group import StreamsGroup
from mpbroker.coordinator.streams.streams_heartbeat import Limits as StreamsLimits
from mpbroker.coordinator.streams.streams_heartbeat import StreamsGroupHeartbeat
from mpbroker.coordinator.versioned import KeyValue
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.message import Message
from mpbroker.protocol.messages.consumer_group_heartbeat import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
)
from mpbroker.protocol.messages.delete_groups import (
    DeletableGroupResult,
    DeleteGroupsRequest,
    DeleteGroupsResponse,
)
from mpbroker.protocol.messages.heartbeat import HeartbeatRequest, HeartbeatResponse
from mpbroker.protocol.messages.join_group import JoinGroupRequest
from mpbroker.protocol.messages.leave_group import (
    LeaveGroupRequest,
    LeaveGroupResponse,
)
from mpbroker.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitResponse,
)
from mpbroker.protocol.messages.offset_delete import (
    OffsetDeleteRequest,
    OffsetDeleteResponse,
)
from mpbroker.protocol.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopics,
    OffsetFetchResponse,
    OffsetFetchResponseGroup,
)
from mpbroker.protocol.messages.share_group_heartbeat import (
    ShareGroupHeartbeatRequest,
    ShareGroupHeartbeatResponse,
)
from mpbroker.protocol.messages.streams_group_heartbeat import (
    StreamsGroupHeartbeatRequest,
    StreamsGroupHeartbeatResponse,
)
from mpbroker.protocol.messages.sync_group import SyncGroupRequest, SyncGroupResponse
from mpbroker.server.answer_budget import AnswerBudget

S = ClassicGroupState
Group = ClassicGroup | ConsumerGroup | StreamsGroup

# How many groups are looked at for expired offsets before requests are served again.
_EXPIRY_SLICE: Final = 200
_OFFSET_FETCH_GROUPS_SINCE: Final = 8
_TOPIC_IDS_SINCE: Final = 10
_GROUP_ID_NOT_FOUND_SINCE: Final = 9
_PROTOCOL_NAMED_SINCE: Final = 5  # by SyncGroup
# The copy of a cluster's metadata is behind by half a second, and more for a moment.
_COPY_IS_BEHIND_MS: Final = 60_000
# A member of such a group says which topics it reads; offsets of others can be deleted.
_SUBSCRIBED: Final = ("consumer", "streams")


class GroupCoordinator:
    """Keeps groups, members and committed offsets, and serves requests about them.

    Args:
        num_partitions: the number of partitions of __consumer_offsets.
        new_id: makes the random part of a member id.
        overrides: returns the dynamic configs of a group.
    """

    def __init__(
        self,
        config: GroupConfig,
        context: CoordinatorContext,
        num_partitions: int,
        new_id: Callable[[], str],
        overrides: Callable[[str], Mapping[str, str]] = lambda group_id: {},
    ) -> None:
        self._config = config
        self._out = context.outbox
        self._timers = context.timers
        self._sessions = context.sessions
        self.num_partitions = num_partitions
        self._groups: dict[str, Group] = {}
        self._loading: set[int] = set()
        self._failed: set[int] = set()
        self._is_sharded = False
        self._unknown: set[int] = set()  # of the loading ones: may be on other nodes
        self._sessions = context.sessions
        self._replayed: set[str] = set()  # groups of partitions still being loaded
        self.offsets = OffsetMetadataManager(config, context, self.partition_for)
        self._topics = context.topics
        self._classic_rebalance = ClassicRebalance(config, context, self.partition_for)
        self._classic = ClassicProtocol(
            config, context, self._classic_rebalance, new_id, self._emptied
        )
        self._consumer_rebalance = ConsumerGroupRebalance(
            config,
            context,
            self.partition_for,
            overrides,
            self._classic_rebalance,
            self._replaced,
        )
        self._consumer = ConsumerGroupHeartbeat(
            config, context, self._consumer_rebalance, new_id
        )
        self._mixed = MixedProtocol(config, context, self._consumer_rebalance, new_id)
        # Share groups are kept apart: all that they share with the other groups is that
        # no two groups have the same id.
        self._shares: dict[str, ShareGroup] = {}
        self._share = ShareGroupHeartbeat(
            config, context, self.partition_for, overrides
        )
        self._streams = StreamsGroupHeartbeat(
            config.streams,
            StreamsLimits(config.max_rebalance_timeout_ms, config.message_max_bytes),
            context,
            self.partition_for,
            overrides,
        )
        # Deletes a group's share states; returns the logs that the answer waits for.
        self.delete_share_states: Callable[[str], tuple[int, ...]] = lambda group_id: ()
        self._listing = GroupListing(
            self._groups, self._shares, self.check_group, context.topics
        )

    def be_guarded(self) -> None:
        """Note that the broker has an authorizer, so members may not see all topics."""
        self._consumer_rebalance.is_guarded = True

    def be_sharded(self) -> None:
        """Serve only some partitions: other nodes of the cluster have the others.

        Until it is known which, all count as being loaded.
        """
        self._is_sharded = self._out.is_volatile = True
        self._loading.update(range(self.num_partitions))
        self._unknown.update(range(self.num_partitions))

    def __len__(self) -> int:
        return len(self._groups) + len(self._shares)

    def counts(self) -> Counter[tuple[str, str]]:
        """Return how many groups there are of each type and state.

        The keys are such as ("classic", "Stable").
        """
        counts = Counter(
            (group.type_name, group.state) for group in self._groups.values()
        )
        named = Counter({(kind, s.value): n for (kind, s), n in counts.items()})
        stable = sum(bool(group.members) for group in self._shares.values())
        named["share", "Stable"] = stable
        named["share", "Empty"] = len(self._shares) - stable
        return named

    def partition_for(self, group_id: str) -> int:
        return java_hash(group_id) % self.num_partitions

    def group(self, group_id: str) -> Group | None:
        return self._groups.get(group_id)

    # -- which groups are served ---------------------------------------------------

    def check_group(self, group_id: str, *, empty_id: bool = False) -> None:
        """Raise an error if requests for a group cannot be served now.

        Args:
            empty_id: whether "" is a valid group id: old consumers commit to it.

        Raises:
            ApiError: INVALID_GROUP_ID, COORDINATOR_LOAD_IN_PROGRESS,
                COORDINATOR_NOT_AVAILABLE, or NOT_COORDINATOR in a cluster.
        """
        if not group_id and not empty_id:
            raise ApiError(ErrorCode.INVALID_GROUP_ID)
        partition = self.partition_for(group_id)
        if partition in self._loading:
            raise ApiError(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
        if partition in self._failed:
            if self._is_sharded:
                raise ApiError(ErrorCode.NOT_COORDINATOR)
            raise ApiError(ErrorCode.COORDINATOR_NOT_AVAILABLE)

    # -- the classic protocol ------------------------------------------------------

    def join_group(self, call: Call, request: JoinGroupRequest, now_ms: int) -> None:
        config = self._config
        try:
            self.check_group(request.group_id)
            least = config.group_min_session_timeout_ms
            most = config.group_max_session_timeout_ms
            if not least <= request.session_timeout_ms <= most:
                raise ApiError(ErrorCode.INVALID_SESSION_TIMEOUT)
            if request.group_id in self._shares:
                raise ApiError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
            group = self._groups.get(request.group_id)
            if isinstance(group, ConsumerGroup):
                if not group.is_empty:
                    self._mixed.join(call, group, request, now_ms)
                    return
                self._write_all(group.group_id, tombstones(group))
                del self._groups[group.group_id]
                group = None
            elif isinstance(group, StreamsGroup):
                if not group.is_empty:
                    raise ApiError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
                self._remove_group(group, now_ms)
                group = None
            if group is None:
                if request.member_id and not self._classic.may_know_its_id(
                    call, request
                ):
                    raise ApiError(ErrorCode.UNKNOWN_MEMBER_ID)
                group = ClassicGroup(request.group_id, now_ms)
                self._classic.join(call, group, request, now_ms)
                self._groups[request.group_id] = group
            else:
                self._classic.join(call, group, request, now_ms)
        except ApiError as error:
            too_many = error.error_code is ErrorCode.GROUP_MAX_SIZE_REACHED
            member_id = "" if too_many else request.member_id
            self._out.answer(call, refused_join(call, error.error_code, member_id))

    def sync_group(self, call: Call, request: SyncGroupRequest, now_ms: int) -> None:
        try:
            if call.version >= _PROTOCOL_NAMED_SINCE and None in (
                request.protocol_type,
                request.protocol_name,
            ):
                raise ApiError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
            self.check_group(request.group_id)
            group = self._member_group(request.group_id)
            if isinstance(group, ConsumerGroup):
                self._mixed.sync(call, group, request, now_ms)
            else:
                self._classic.sync(call, group, request, now_ms)
        except ApiError as error:
            self._out.answer(call, SyncGroupResponse(error_code=error.error_code))

    def heartbeat(self, call: Call, request: HeartbeatRequest, now_ms: int) -> None:
        self._note_heartbeat(request.group_id, request.member_id, now_ms)
        try:
            self.check_group(request.group_id)
            group = self._member_group(request.group_id)
            if isinstance(group, ConsumerGroup):
                self._mixed.heartbeat(call, group, request, now_ms)
            else:
                self._classic.heartbeat(call, group, request, now_ms)
                self._may_repeat(call, partial(self._beat_again, request))
        except ApiError as error:
            code = error.error_code
            # The member's session begins anew once the group is loaded, as after any
            # heartbeat. So answer NONE: not every client understands the error, and
            # aiokafka gives up. But if another node may have the group, the client must
            # ask which: its session ends there.
            if code is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS:
                is_elsewhere = self.partition_for(request.group_id) in self._unknown
                code = ErrorCode.NOT_COORDINATOR if is_elsewhere else ErrorCode.NONE
            self._out.answer(call, HeartbeatResponse(error_code=code))

    def _may_repeat(self, call: Call, again: Again) -> None:
        """Let equal requests be answered equally as long as a function returns True.

        Not in a cluster, whose node may lose a group without a record.
        """
        if not self._is_sharded:
            call.again = again

    def _beat_again(self, request: HeartbeatRequest, now_ms: int) -> bool:
        """Execute a heartbeat of a classic group; False if its answer is not NONE."""
        group = self._groups.get(request.group_id)
        try:
            self.check_group(request.group_id)
            return (
                isinstance(group, ClassicGroup)
                and self._classic.beat(group, request, now_ms) is ErrorCode.NONE
            )
        except ApiError:
            return False

    def leave_group(self, call: Call, request: LeaveGroupRequest, now_ms: int) -> None:
        try:
            self.check_group(request.group_id)
            group = self._groups.get(request.group_id)
            if isinstance(group, ConsumerGroup):
                self._mixed.leave(call, group, request, now_ms)
            elif isinstance(group, StreamsGroup):
                raise ApiError(ErrorCode.UNKNOWN_MEMBER_ID)
            else:
                self._classic.leave(call, group, request, now_ms)
        except ApiError as error:
            self._out.answer(call, LeaveGroupResponse(error_code=error.error_code))

    def _note_heartbeat(self, group_id: str, member_id: str, now_ms: int) -> None:
        """Note that a member is alive whose group is still being loaded.

        Its session timer starts with the end of the load. Without this note a member
        that was silent before would then have LEAST_SESSION_LEFT_MS left at worst,
        which is less than the interval of most clients' heartbeats.
        """
        if member_id and self.partition_for(group_id) in self._loading:
            self._sessions.heard_while_loading(member_id, now_ms)

    def _member_group(self, group_id: str) -> ClassicGroup | ConsumerGroup:
        group = self._groups.get(group_id)
        if group is None or isinstance(group, StreamsGroup):
            raise ApiError(ErrorCode.UNKNOWN_MEMBER_ID)
        return group

    def _replaced(self, group: Group) -> None:
        self._groups[group.group_id] = group

    # -- the consumer protocol -----------------------------------------------------

    def consumer_group_heartbeat(
        self, call: Call, request: ConsumerGroupHeartbeatRequest, now_ms: int
    ) -> None:
        group_id = request.group_id
        if request.member_epoch > 0:
            self._note_heartbeat(group_id, request.member_id, now_ms)
        try:
            if "consumer" not in self._config.rebalance_protocols:
                raise ApiError(ErrorCode.UNSUPPORTED_VERSION)
            if is_blank(group_id):
                raise ApiError(ErrorCode.INVALID_REQUEST, "GroupId can't be empty.")
            self.check_group(group_id)
            self._consumer.validate(call, request)
            if group_id in self._shares:
                raise ApiError(
                    ErrorCode.GROUP_ID_NOT_FOUND,
                    f"Group {group_id} is not a consumer group.",
                )
            group = self._consumer_group(request, now_ms)
            if self._consumer.heartbeat(call, group, request, now_ms):
                client = call.client_id, call.client_host
                again = partial(self._consumer_beat_again, request, client)
                self._may_repeat(call, again)
            # If its last KIP-848 member has left, a classic group has replaced it.
            self._groups.setdefault(group_id, group)
        except ApiError as error:
            self._out.answer(
                call,
                ConsumerGroupHeartbeatResponse(
                    error_code=error.error_code, error_message=error.message or None
                ),
            )

    def _consumer_beat_again(
        self,
        request: ConsumerGroupHeartbeatRequest,
        client: tuple[str, str],
        now_ms: int,
    ) -> bool:
        """Execute a heartbeat without news; False if it may have another answer."""
        group = self._groups.get(request.group_id)
        try:
            self.check_group(request.group_id)
            return isinstance(group, ConsumerGroup) and self._consumer.beat_again(
                group, request, client, now_ms
            )
        except ApiError:
            return False

    def _consumer_group(
        self, request: ConsumerGroupHeartbeatRequest, now_ms: int
    ) -> ConsumerGroup:
        """Return a member's group; a member that joins may be the first of a new group.

        A classic group that it joins is converted, or replaced if it is empty.
        """
        group_id = request.group_id
        group = self._groups.get(group_id)
        if isinstance(group, ConsumerGroup):
            return group
        if request.member_epoch != 0 or isinstance(group, StreamsGroup):
            kind = "found" if group is None else "a consumer group"
            raise ApiError(
                ErrorCode.GROUP_ID_NOT_FOUND, f"Group {group_id} is not {kind}."
            )
        if group is not None:
            if not group.is_in(S.EMPTY):
                return self._consumer_rebalance.upgrade(group, request, now_ms)
            self._remove_group(group, now_ms)
        return ConsumerGroup(group_id)

    def consumer_group_describe(
        self, call: Call, request: Message, now_ms: int
    ) -> None:
        self._out.answer(call, self._listing.describe_consumer(call, request))

    # -- share groups --------------------------------------------------------------

    def share_group_heartbeat(
        self, call: Call, request: ShareGroupHeartbeatRequest, now_ms: int
    ) -> None:
        group_id = request.group_id
        if request.member_epoch > 0:
            self._note_heartbeat(group_id, request.member_id, now_ms)
        try:
            if is_blank(group_id):
                raise ApiError(ErrorCode.INVALID_REQUEST, "GroupId can't be empty.")
            self.check_group(group_id)
            self._share.validate(request)
            group = self.share_group(group_id, may_make=request.member_epoch == 0)
            self._share.heartbeat(call, group, request, now_ms)
        except ApiError as error:
            self._out.answer(
                call,
                ShareGroupHeartbeatResponse(
                    error_code=error.error_code, error_message=error.message or None
                ),
            )
            return
        self._shares[group_id] = group

    def share_group(self, group_id: str, *, may_make: bool = False) -> ShareGroup:
        """Return the share group that has this id.

        Args:
            may_make: return a new group if there is no group with this id. The caller
                stores it, or calls `begin_share_epoch`.

        Raises:
            ApiError: GROUP_ID_NOT_FOUND.
        """
        group = self._shares.get(group_id)
        if group is not None:
            return group
        if group_id in self._groups:
            raise ApiError(
                ErrorCode.GROUP_ID_NOT_FOUND, f"Group {group_id} is not a share group."
            )
        if not may_make or self._is_sharded:  # a cluster has no share groups
            raise ApiError(
                ErrorCode.GROUP_ID_NOT_FOUND, f"Share group {group_id} not found."
            )
        return ShareGroup(group_id)

    def begin_share_epoch(self, group: ShareGroup) -> tuple[int, ...]:
        """Begin a new epoch of a share group whose partitions have changed.

        Store the group if it is new. Return the logs that the answer must wait for.
        """
        self._shares[group.group_id] = group
        self._share.refresh(group, changed=True)
        return self._share.write_initialized(group)

    def write_share_topics(self, group: ShareGroup) -> tuple[int, ...]:
        """Write the record of the partitions for which a group has a delivery state.

        Return the logs that the answer must wait for.
        """
        return self._share.write_initialized(group)

    def share_group_describe(self, call: Call, request: Message, now_ms: int) -> None:
        self._out.answer(call, self._listing.describe_share(call, request))

    # -- streams groups --------------------------------------------------------------

    def streams_group_heartbeat(
        self, call: Call, request: StreamsGroupHeartbeatRequest, now_ms: int
    ) -> None:
        group_id = request.group_id
        if request.member_epoch > 0:
            self._note_heartbeat(group_id, request.member_id, now_ms)
        try:
            if "streams" not in self._config.rebalance_protocols:
                raise ApiError(ErrorCode.UNSUPPORTED_VERSION)
            if is_blank(group_id):
                raise ApiError(ErrorCode.INVALID_REQUEST, "GroupId can't be empty.")
            self.check_group(group_id)
            self._streams.validate(request)
            group = self._streams_group(group_id, may_make=request.member_epoch == 0)
            replaces = self._groups.get(group_id)
            self._streams.heartbeat(call, group, request, now_ms)
        except ApiError as error:
            self._out.answer(
                call,
                StreamsGroupHeartbeatResponse(
                    error_code=error.error_code, error_message=error.message or None
                ),
            )
            return
        if replaces is not None and replaces is not group:
            self._remove_group(replaces, now_ms)  # its offsets stay
        self._groups[group_id] = group

    def _streams_group(self, group_id: str, *, may_make: bool) -> StreamsGroup:
        """Return a streams group.

        Args:
            group_id: its id.
            may_make: return a new group if there is none of this id, or only an empty
                classic one, which has the offsets of the application until now.

        Raises:
            ApiError: GROUP_ID_NOT_FOUND.
        """
        group = self._groups.get(group_id)
        if isinstance(group, StreamsGroup):
            return group
        is_empty_classic = isinstance(group, ClassicGroup) and is_empty(group)
        if may_make and (
            is_empty_classic or (group is None and group_id not in self._shares)
        ):
            return StreamsGroup(group_id)
        if group is None and group_id not in self._shares:
            raise ApiError(
                ErrorCode.GROUP_ID_NOT_FOUND, f"Streams group {group_id} not found."
            )
        raise ApiError(
            ErrorCode.GROUP_ID_NOT_FOUND, f"Group {group_id} is not a streams group."
        )

    def streams_group_describe(self, call: Call, request: Message, now_ms: int) -> None:
        if "streams" not in self._config.rebalance_protocols:
            raise ApiError(ErrorCode.UNSUPPORTED_VERSION)
        self._out.answer(call, self._listing.describe_streams(call, request))

    # -- offsets -------------------------------------------------------------------

    def offset_commit(
        self, call: Call, request: OffsetCommitRequest, now_ms: int
    ) -> None:
        group_id = request.group_id
        try:
            self.check_group(group_id, empty_id=True)
            self._validate_commit(call, request, now_ms)
        except ApiError as error:
            answer = refused_commit(
                request, call.version, error.error_code, self._topics
            )
            self._out.answer(call, answer)
            return
        topics, wrote = self.offsets.commit(group_id, request, call.version, now_ms)
        after = (self.partition_for(group_id),) if wrote else NOW
        self._out.answer(call, OffsetCommitResponse(topics=topics), after)

    def _validate_commit(
        self, call: Call, request: OffsetCommitRequest, now_ms: int
    ) -> None:
        group_id, generation = request.group_id, request.generation_id_or_member_epoch
        if group_id in self._shares:
            raise ApiError(ErrorCode.GROUP_ID_NOT_FOUND)
        group = self._groups.get(group_id)
        if group is None:
            if generation >= 0:
                code = ErrorCode.ILLEGAL_GENERATION
                if call.version >= _GROUP_ID_NOT_FOUND_SINCE:
                    code = ErrorCode.GROUP_ID_NOT_FOUND
                raise ApiError(code)
            # Without group management: a group that only has committed offsets.
            self._groups[group_id] = ClassicGroup(group_id, now_ms)
            return
        by_id = call.version >= _TOPIC_IDS_SINCE
        if isinstance(group, ConsumerGroup):
            held = (
                (
                    row.topic_id if by_id else self._topics.topic_id(row.name),
                    part.partition_index,
                )
                for row in request.topics
                for part in row.partitions
            )
            group.validate_offset_commit(
                request.member_id, generation, call.version, held
            )
            return
        if isinstance(group, StreamsGroup):
            partitions = (
                (
                    (self._topics.topic_name(row.topic_id) if by_id else row.name)
                    or "",
                    part.partition_index,
                )
                for row in request.topics
                for part in row.partitions
            )
            group.validate_offset_commit(
                request.member_id, generation, call.version, partitions
            )
            return
        group.validate_offset_commit(
            request.member_id, request.group_instance_id, generation
        )
        self._classic.touch(group, request.member_id, now_ms)

    def commit_in_transaction(
        self,
        group_id: str,
        topic: str,
        partition: int,
        committed: OffsetAndMetadata,
        producer: tuple[int, int],
    ) -> None:
        """Write an offset that becomes valid when the producer's transaction commits.

        Args:
            producer: the id and the epoch of the producer.
        """
        if group_id not in self._groups:
            now_ms = committed.commit_timestamp_ms
            self._groups[group_id] = ClassicGroup(group_id, now_ms)
        self.offsets.put_in_transaction(group_id, topic, partition, committed, producer)

    def offset_fetch(
        self, call: Call, request: OffsetFetchRequest, now_ms: int
    ) -> None:
        if call.version >= _OFFSET_FETCH_GROUPS_SINCE:
            budget = AnswerBudget()
            groups = [
                self._fetch_group(call, group, budget, stable=request.require_stable)
                for group in each_group_once(request.groups)
            ]
            answer = OffsetFetchResponse(groups=groups)
            self._out.answer(call, answer, self._shown(groups))
            if len(request.groups) == 1 and not groups[0].error_code:
                self._may_fetch_again(call, request.groups[0])
            return
        rows = None
        if request.topics is not None:
            rows = [
                OffsetFetchRequestTopics(
                    name=row.name, partition_indexes=row.partition_indexes
                )
                for row in request.topics
            ]
        asked = OffsetFetchRequestGroup(group_id=request.group_id, topics=rows)
        found = self._fetch_group(
            call, asked, AnswerBudget(), stable=request.require_stable
        )
        answer = single_group(call.version, request, found)
        self._out.answer(call, answer, self._shown([found]))
        if not found.error_code:
            self._may_fetch_again(call, asked)

    def _shown(self, groups: Iterable[OffsetFetchResponseGroup]) -> tuple[int, ...]:
        """Return the logs whose offsets are shown to a client.

        They must be on disk: a power cut must not take back what a client was shown.
        """
        return tuple(
            {self.partition_for(row.group_id) for row in groups if not row.error_code}
        )

    def _fetch_group(
        self,
        call: Call,
        asked: OffsetFetchRequestGroup,
        budget: AnswerBudget,
        *,
        stable: bool,
    ) -> OffsetFetchResponseGroup:
        group_id = asked.group_id
        try:
            budget.check()
            self.check_group(group_id, empty_id=True)
            if group_id in self._shares:
                raise ApiError(ErrorCode.GROUP_ID_NOT_FOUND)
            group = self._groups.get(group_id)
            if isinstance(group, (ConsumerGroup, StreamsGroup)):
                group.validate_offset_fetch(asked.member_id, asked.member_epoch)
            by_id = call.version >= _TOPIC_IDS_SINCE
            answers = fetched_topics(
                self.offsets, self._topics, asked, by_id=by_id, stable=stable
            )
            found = OffsetFetchResponseGroup(group_id=group_id, topics=answers)
            budget.spend(found)
        except ApiError as error:
            return OffsetFetchResponseGroup(
                group_id=group_id, error_code=error.error_code
            )
        return found

    def _may_fetch_again(self, call: Call, asked: OffsetFetchRequestGroup) -> None:
        """Let equal requests for a group's offsets be answered equally."""
        offsets = self.offsets.offsets(asked.group_id)
        if offsets is not None:
            version = self._topics.version(), offsets.version
            again = partial(
                self._fetch_again,
                asked.group_id,
                asked.member_id,
                asked.member_epoch,
                version,
            )
            self._may_repeat(call, again)

    def _fetch_again(
        self,
        group_id: str,
        member_id: str | None,
        member_epoch: int,
        version: tuple[int, int],
        now_ms: int,
    ) -> bool:
        """Return whether a member's OffsetFetch has the answer of this version."""
        group, offsets = self._groups.get(group_id), self.offsets.offsets(group_id)
        try:
            self.check_group(group_id, empty_id=True)
            if isinstance(group, (ConsumerGroup, StreamsGroup)):
                group.validate_offset_fetch(member_id, member_epoch)
        except ApiError:
            return False
        return (
            group is not None
            and offsets is not None
            and (self._topics.version(), offsets.version) == version
        )

    def offset_delete(
        self, call: Call, request: OffsetDeleteRequest, now_ms: int
    ) -> None:
        group_id = request.group_id
        try:
            self.check_group(group_id)
            group = self._groups.get(group_id)
            if group is None:
                raise ApiError(ErrorCode.GROUP_ID_NOT_FOUND)
            if not is_empty(group) and group.protocol_type not in _SUBSCRIBED:
                raise ApiError(ErrorCode.NON_EMPTY_GROUP)
        except ApiError as error:
            self._out.answer(call, OffsetDeleteResponse(error_code=error.error_code))
            return
        topics = self.offsets.delete(
            group_id,
            request.topics,
            lambda topic: not is_empty(group) and group.is_subscribed_to(topic),
        )
        after = self._written([group_id])
        self._out.answer(call, OffsetDeleteResponse(topics=topics), after)

    def _written(self, group_ids: Iterable[str]) -> tuple[int, ...]:
        """Return the logs of these groups that must be on disk before an answer.

        See `Outbox.written`. Groups that are not served are left out.
        """
        partitions = {self.partition_for(group_id) for group_id in group_ids}
        partitions -= self._loading | self._failed
        return tuple(log for each in partitions for log in self._out.written(each))

    # -- administration --------------------------------------------------------------

    def describe_groups(self, call: Call, request: Message, now_ms: int) -> None:
        self._out.answer(call, self._listing.describe(call, request))

    def list_groups(self, call: Call, request: Message, now_ms: int) -> None:
        loading = bool(self._loading)
        self._out.answer(call, self._listing.list(request, loading=loading))

    def delete_groups(
        self, call: Call, request: DeleteGroupsRequest, now_ms: int
    ) -> None:
        """Delete empty groups and their offsets."""
        results = []
        of_states: set[int] = set()
        for group_id in dict.fromkeys(request.groups_names):
            code = ErrorCode.NONE
            try:
                self.check_group(group_id, empty_id=True)
                if group_id in self._shares:
                    of_states.update(self._delete_share_group(group_id))
                else:
                    self._delete_group(group_id, now_ms)
            except ApiError as error:
                code = error.error_code
            results.append(DeletableGroupResult(group_id=group_id, error_code=code))
        after = (*self._written(row.group_id for row in results), *of_states)
        self._out.answer(call, DeleteGroupsResponse(results=results), after)

    def _delete_group(self, group_id: str, now_ms: int) -> None:
        group = self._groups.get(group_id)
        if group is None:
            raise ApiError(ErrorCode.GROUP_ID_NOT_FOUND)
        if not is_empty(group):
            raise ApiError(ErrorCode.NON_EMPTY_GROUP)
        self.offsets.remove_all(group_id)
        self._remove_group(group, now_ms)

    def _delete_share_group(self, group_id: str) -> tuple[int, ...]:
        """Delete a share group and its delivery states; return the logs with these."""
        group = self._shares[group_id]
        if not group.is_empty:
            raise ApiError(ErrorCode.NON_EMPTY_GROUP)
        del self._shares[group_id]
        group.is_dead = True
        self._write_all(group_id, share_tombstones(group))
        return self.delete_share_states(group_id)

    def _remove_group(self, group: Group, now_ms: int) -> None:
        """Delete an empty group; the caller deletes its offsets."""
        group_id = group.group_id
        del self._groups[group_id]
        if isinstance(group, ConsumerGroup):
            group.is_dead = True
            self._write_all(group_id, tombstones(group))
            return
        if isinstance(group, StreamsGroup):
            group.is_dead = True
            self._streams.forget(group)
            self._write_all(group_id, streams_tombstones(group))
            return
        self._classic_rebalance.forget(group, ErrorCode.UNKNOWN_MEMBER_ID)
        group.transition_to(S.DEAD, now_ms)
        self._write_all(group_id, [(group_metadata_key(group_id), None)])

    def _emptied(self, group: ClassicGroup, now_ms: int) -> None:
        """Forget a group that only clients had which never joined it.

        No record has it. Groups that had members, or have offsets, stay until
        `_expire_slice` deletes them.
        """
        group_id = group.group_id
        if (
            self._groups.get(group_id) is group
            and is_empty(group)
            and not group.generation_id
            and self.offsets.offsets(group_id) is None
        ):
            del self._groups[group_id]
            group.transition_to(S.DEAD, now_ms)

    def _write_all(self, group_id: str, records: Iterable[KeyValue]) -> None:
        partition = self.partition_for(group_id)
        for key, value in records:
            self._out.write(partition, key, value)

    # -- time ------------------------------------------------------------------------

    def start_expiry(self, now_ms: int) -> None:
        """Start to delete expired offsets, at intervals.

        The interval is offsets.retention.check.interval.ms.
        """
        interval = self._config.offsets_retention_check_interval_ms
        self._timers.schedule("expiry", now_ms + interval, self._expire_offsets)

    def _expire_offsets(self, now_ms: int) -> None:
        self._expire_slice(list(self._groups), now_ms)
        self.start_expiry(now_ms)

    def _expire_slice(self, group_ids: list[str], now_ms: int) -> None:
        for group_id in group_ids[:_EXPIRY_SLICE]:
            group = self._groups.get(group_id)
            if group is None or self.partition_for(group_id) in self._loading:
                continue
            self.offsets.expire(group_id, group, now_ms)
            if is_empty(group) and self.offsets.offsets(group_id) is None:
                self._remove_group(group, now_ms)
        rest = group_ids[_EXPIRY_SLICE:]
        if rest:
            self._timers.schedule(
                "expiry slice",
                now_ms + 1,
                lambda at_ms: self._expire_slice(rest, at_ms),
            )

    # -- the log ---------------------------------------------------------------------

    def begin_loading(self, partitions: Iterable[int]) -> None:
        """Stop serving the groups of these partitions, whose records are loaded now."""
        begun = set(partitions)
        self._loading |= begun
        self._unknown -= begun
        self._failed -= self._loading

    def is_loading(self, partition: int) -> bool:
        """Return whether a partition of __consumer_offsets is still being loaded."""
        return partition in self._loading

    def replay_offset(
        self,
        group_id: str,
        topic: str,
        partition: int,
        committed: OffsetAndMetadata | None,
        now_ms: int,
        producer_id: int = -1,
    ) -> None:
        """Apply the record of a committed offset; records come in the log's order.

        Args:
            committed: the offset; None: the record deletes it.
            producer_id: the producer of the record's transaction; -1: there is none.
        """
        self._replayed.add(group_id)
        if committed is not None and group_id not in self._groups:
            self._groups[group_id] = ClassicGroup(group_id, now_ms)
        self.offsets.replay(group_id, topic, partition, committed, producer_id)

    def replay(
        self, key: Message, value: Message | None, now_ms: int, producer_id: int = -1
    ) -> None:
        """Apply a record of __consumer_offsets; records come in the log's order.

        Args:
            producer_id: the producer of the record's transaction; -1: there is none.
        """
        if isinstance(key, OffsetCommitKey):
            committed = None
            if isinstance(value, OffsetCommitValue):
                committed = OffsetAndMetadata.of_record(value)
            self.replay_offset(
                key.group, key.topic, key.partition, committed, now_ms, producer_id
            )
            return
        self._replayed.add(getattr(key, "group", "") or getattr(key, "group_id", ""))
        if isinstance(key, GroupMetadataKey):
            if isinstance(value, GroupMetadataValue):
                group = ClassicGroup.of_record(key.group, value, now_ms)
                self._groups[key.group] = group
            elif isinstance(self._groups.get(key.group), ClassicGroup):
                del self._groups[key.group]
        elif is_share_key(key):
            self._replay_share_group(key, value)
        elif is_streams_key(key):
            self._replay_streams_group(key, value)
        else:
            self._replay_consumer_group(key, value)

    def _replay_share_group(self, key: Message, value: Message | None) -> None:
        group_id: str = key.group_id  # type: ignore[attr-defined]
        group = self._shares.get(group_id)
        if deletes_group(key, value):
            self._shares.pop(group_id, None)
            return
        if group is None:
            if value is None:
                return
            group = self._shares[group_id] = ShareGroup(group_id)
        replay_share(group, key, value)

    def _replay_streams_group(self, key: Message, value: Message | None) -> None:
        group_id: str = key.group_id  # type: ignore[attr-defined]
        group = self._groups.get(group_id)
        if not isinstance(group, StreamsGroup):
            if value is None:
                return
            group = self._groups[group_id] = StreamsGroup(group_id)
        if deletes_streams_group(key, value):
            del self._groups[group_id]
        else:
            replay_streams(group, key, value)

    def _replay_consumer_group(self, key: Message, value: Message | None) -> None:
        group_id: str = key.group_id  # type: ignore[attr-defined]
        group = self._groups.get(group_id)
        if not isinstance(group, ConsumerGroup):
            if value is None:
                return
            group = self._groups[group_id] = ConsumerGroup(group_id)
        if isinstance(key, ConsumerGroupMetadataKey) and value is None:
            del self._groups[group_id]
        else:
            replay(group, key, value)

    def replay_end_of_transaction(
        self, partition: int, producer_id: int, *, commit: bool
    ) -> None:
        """Commit or drop a transaction's offsets, as the marker in the log says.

        Args:
            partition: the partition of __consumer_offsets that has the marker.
        """
        for group_id in self.offsets.groups_of_producer(producer_id):
            if self.partition_for(group_id) == partition:
                self.offsets.complete_transaction(group_id, producer_id, commit=commit)

    def loaded(self, partition: int, now_ms: int) -> None:
        """Serve the groups of a partition, after all its records were replayed."""
        self._loading.discard(partition)
        for group_id in list(self._replayed):
            if self.partition_for(group_id) == partition:
                self._replayed.discard(group_id)
                if (group := self._groups.get(group_id)) is not None:
                    self._loaded_group(group, now_ms)
                if (share := self._shares.get(group_id)) is not None:
                    self._share.loaded(share, now_ms)
        if self._is_sharded:
            # Not now: a topic that seems to be deleted may have been made just now, by
            # another node.
            self._timers.schedule(
                "deleted topics",
                now_ms + _COPY_IS_BEHIND_MS,
                lambda at_ms: self.offsets.forget_deleted_topics(),
            )
        elif not self._loading:
            self.offsets.forget_deleted_topics()

    def _loaded_group(self, group: Group, now_ms: int) -> None:
        if isinstance(group, ConsumerGroup):
            self._consumer_rebalance.loaded(group, now_ms)
            return
        if isinstance(group, StreamsGroup):
            self._streams.loaded(group, now_ms)
            return
        self._classic_rebalance.loaded(group, now_ms)
        if len(group.members) > self._config.group_max_size:
            self._classic_rebalance.maybe_prepare_rebalance(group, now_ms)

    def topic_deleted(self, topic: str) -> None:
        """Delete the groups' committed offsets in a topic that was deleted."""
        self.offsets.topic_deleted(topic)

    def refuse_waiting(self) -> None:
        """Answer requests that wait for other members; called when the broker stops."""
        for group in self._groups.values():
            if not isinstance(group, ClassicGroup):
                continue  # its members never wait for each other
            if group.num_awaiting_join or group.is_in(S.COMPLETING_REBALANCE):
                self._classic_rebalance.refuse_waiting(group, ErrorCode.NOT_COORDINATOR)

    def failed(self, partition: int) -> None:
        """Forget the groups of a partition that cannot be loaded or written.

        Their state in memory may be ahead of the log, and only the log counts.
        """
        self._failed.add(partition)
        for group_id, group in list(self._groups.items()):
            if self.partition_for(group_id) == partition:
                del self._groups[group_id]
                self.offsets.forget(group_id)
                if isinstance(group, ConsumerGroup):
                    self._consumer_rebalance.forget(group)
                    group.is_dead = True
                elif isinstance(group, StreamsGroup):
                    self._streams.forget(group)
                    group.is_dead = True
                else:
                    self._classic_rebalance.forget(group, ErrorCode.NOT_COORDINATOR)
                    group.state = S.DEAD
        for group_id, share in list(self._shares.items()):
            if self.partition_for(group_id) == partition:
                del self._shares[group_id]
                self._share.forget(share)
                share.is_dead = True
        self._out.records.pop(partition, None)
        self._out.transactional.pop(partition, None)

    def lost(self, partition: int) -> None:
        """Forget the groups of a partition that another node has, or may have.

        If they come back, their members begin new sessions here.
        """
        for group_id, group in self._groups.items():
            if self.partition_for(group_id) == partition:
                for member_id in group.members:
                    self._sessions.forget(member_id)
        self._loading.discard(partition)
        self._unknown.discard(partition)
        self.failed(partition)

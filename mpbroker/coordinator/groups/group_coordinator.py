"""Execute the APIs of groups, with one method for each API: GroupCoordinator.

Sans-IO: requests and the time come in; records and answers go out by the outbox. All
records of a group are in one partition of __consumer_offsets, which a hash of the
group's id chooses, as in Kafka. The groups of a partition are served after it was
loaded. If the partition can no longer be written, they are forgotten, because only the
records in the log count.

Source: Kafka's GroupCoordinatorService and GroupCoordinatorShard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from mpbroker.coordinator.context import CoordinatorContext
from mpbroker.coordinator.groups.classic_group import ClassicGroup, ClassicGroupState
from mpbroker.coordinator.groups.classic_protocol import (
    ClassicProtocol,
    may_have_been_parked,
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
    KeyValue,
    OffsetCommitKey,
    OffsetCommitValue,
    fits_a_key,
    group_metadata_key,
)
from mpbroker.coordinator.groups.mixed_protocol import MixedProtocol
from mpbroker.coordinator.groups.offset_answers import (
    fetched_topics,
    refused_commit,
    single_group,
)
from mpbroker.coordinator.groups.offset_metadata_manager import OffsetMetadataManager
from mpbroker.coordinator.java_hash import java_hash
from mpbroker.coordinator.outbox import NOW, Call
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
from mpbroker.protocol.messages.sync_group import SyncGroupRequest, SyncGroupResponse

S = ClassicGroupState
Group = ClassicGroup | ConsumerGroup

# How many groups are looked at for expired offsets before requests are served again.
_EXPIRY_SLICE: Final = 200
_OFFSET_FETCH_GROUPS_SINCE: Final = 8
_TOPIC_IDS_SINCE: Final = 10
_GROUP_ID_NOT_FOUND_SINCE: Final = 9


class GroupCoordinator:
    """The groups, their members, and their committed offsets.

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
        self.num_partitions = num_partitions
        self._groups: dict[str, Group] = {}
        self._loading: set[int] = set()
        self._failed: set[int] = set()
        self._replayed: set[str] = set()  # groups of partitions still being loaded
        self.offsets = OffsetMetadataManager(config, context, self.partition_for)
        self._topics = context.topics
        self._classic_rebalance = ClassicRebalance(config, context, self.partition_for)
        self._classic = ClassicProtocol(
            config, context, self._classic_rebalance, new_id
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
        self._listing = GroupListing(self._groups, self.check_group, context.topics)

    def be_guarded(self) -> None:
        """Note that there is an authorizer, which may hide topics from members."""
        self._consumer_rebalance.is_guarded = True

    def __len__(self) -> int:
        return len(self._groups)

    def partition_for(self, group_id: str) -> int:
        return java_hash(group_id) % self.num_partitions

    def group(self, group_id: str) -> Group | None:
        return self._groups.get(group_id)

    # -- which groups are served ---------------------------------------------------

    def check_group(self, group_id: str, *, empty_id: bool = False) -> None:
        """Raise if requests for a group cannot be served now.

        Args:
            empty_id: whether "" is a valid group id: old consumers commit to it.

        Raises:
            ApiError: INVALID_GROUP_ID, COORDINATOR_LOAD_IN_PROGRESS,
                COORDINATOR_NOT_AVAILABLE.
        """
        if (not group_id and not empty_id) or not fits_a_key(group_id):
            raise ApiError(ErrorCode.INVALID_GROUP_ID)
        partition = self.partition_for(group_id)
        if partition in self._loading:
            raise ApiError(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
        if partition in self._failed:
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
            group = self._groups.get(request.group_id)
            if isinstance(group, ConsumerGroup):
                if not group.is_empty:
                    self._mixed.join(call, group, request, now_ms)
                    return
                self._write_all(group.group_id, tombstones(group))
                del self._groups[group.group_id]
                group = None
            if group is None:
                if request.member_id and not may_have_been_parked(call, request):
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
            self.check_group(request.group_id)
            group = self._member_group(request.group_id)
            if isinstance(group, ConsumerGroup):
                self._mixed.sync(call, group, request, now_ms)
            else:
                self._classic.sync(call, group, request, now_ms)
        except ApiError as error:
            self._out.answer(call, SyncGroupResponse(error_code=error.error_code))

    def heartbeat(self, call: Call, request: HeartbeatRequest, now_ms: int) -> None:
        try:
            self.check_group(request.group_id)
            group = self._member_group(request.group_id)
            if isinstance(group, ConsumerGroup):
                self._mixed.heartbeat(call, group, request, now_ms)
            else:
                self._classic.heartbeat(call, group, request, now_ms)
        except ApiError as error:
            code = error.error_code
            # Its members' session timers start anew when the group is loaded, so it may
            # be answered at once. Not every client understands the error: aiokafka
            # gives up.
            if code is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS:
                code = ErrorCode.NONE
            self._out.answer(call, HeartbeatResponse(error_code=code))

    def leave_group(self, call: Call, request: LeaveGroupRequest, now_ms: int) -> None:
        try:
            self.check_group(request.group_id)
            group = self._groups.get(request.group_id)
            if isinstance(group, ConsumerGroup):
                self._mixed.leave(call, group, request, now_ms)
            else:
                self._classic.leave(call, group, request, now_ms)
        except ApiError as error:
            self._out.answer(call, LeaveGroupResponse(error_code=error.error_code))

    def _member_group(self, group_id: str) -> Group:
        group = self._groups.get(group_id)
        if group is None:
            raise ApiError(ErrorCode.UNKNOWN_MEMBER_ID)
        return group

    def _replaced(self, group: Group) -> None:
        self._groups[group.group_id] = group

    # -- the consumer protocol -----------------------------------------------------

    def consumer_group_heartbeat(
        self, call: Call, request: ConsumerGroupHeartbeatRequest, now_ms: int
    ) -> None:
        group_id = request.group_id
        try:
            if "consumer" not in self._config.rebalance_protocols:
                raise ApiError(ErrorCode.UNSUPPORTED_VERSION)
            if not group_id:
                raise ApiError(ErrorCode.INVALID_REQUEST, "GroupId can't be empty.")
            self.check_group(group_id)
            self._consumer.validate(call, request)
            group = self._consumer_group(request, now_ms)
            self._consumer.heartbeat(call, group, request, now_ms)
            # If its last KIP-848 member has left, a classic group has replaced it.
            self._groups.setdefault(group_id, group)
        except ApiError as error:
            self._out.answer(
                call,
                ConsumerGroupHeartbeatResponse(
                    error_code=error.error_code, error_message=error.message or None
                ),
            )

    def _consumer_group(
        self, request: ConsumerGroupHeartbeatRequest, now_ms: int
    ) -> ConsumerGroup:
        """Return a member's group, which a joining member may make."""
        group_id = request.group_id
        group = self._groups.get(group_id)
        if isinstance(group, ConsumerGroup):
            return group
        if request.member_epoch != 0:
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

    # -- offsets -------------------------------------------------------------------

    def offset_commit(
        self, call: Call, request: OffsetCommitRequest, now_ms: int
    ) -> None:
        group_id = request.group_id
        try:
            self.check_group(group_id, empty_id=True)
            self._validate_commit(call, request, now_ms)
        except ApiError as error:
            self._out.answer(call, refused_commit(request, error.error_code))
            return
        topics, wrote = self.offsets.commit(group_id, request, call.version, now_ms)
        after = (self.partition_for(group_id),) if wrote else NOW
        self._out.answer(call, OffsetCommitResponse(topics=topics), after)

    def _validate_commit(
        self, call: Call, request: OffsetCommitRequest, now_ms: int
    ) -> None:
        group_id, generation = request.group_id, request.generation_id_or_member_epoch
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
        if isinstance(group, ConsumerGroup):
            group.validate_offset_commit(request.member_id, generation, call.version)
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
        """Keep a position that counts if a producer's transaction commits."""
        if group_id not in self._groups:
            now_ms = committed.commit_timestamp_ms
            self._groups[group_id] = ClassicGroup(group_id, now_ms)
        self.offsets.put_in_transaction(group_id, topic, partition, committed, producer)

    def offset_fetch(
        self, call: Call, request: OffsetFetchRequest, now_ms: int
    ) -> None:
        if call.version >= _OFFSET_FETCH_GROUPS_SINCE:
            groups = [
                self._fetch_group(call, group, stable=request.require_stable)
                for group in request.groups
            ]
            # Wait until the offsets are on disk: a power cut must not take back what a
            # client was shown.
            after = tuple({self.partition_for(row.group_id) for row in request.groups})
            self._out.answer(call, OffsetFetchResponse(groups=groups), after)
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
        found = self._fetch_group(call, asked, stable=request.require_stable)
        answer = single_group(call.version, request, found)
        self._out.answer(call, answer, (self.partition_for(request.group_id),))

    def _fetch_group(
        self, call: Call, asked: OffsetFetchRequestGroup, *, stable: bool
    ) -> OffsetFetchResponseGroup:
        group_id = asked.group_id
        try:
            self.check_group(group_id, empty_id=True)
            group = self._groups.get(group_id)
            if isinstance(group, ConsumerGroup):
                group.validate_offset_fetch(asked.member_id, asked.member_epoch)
        except ApiError as error:
            return OffsetFetchResponseGroup(
                group_id=group_id, error_code=error.error_code
            )
        by_id = call.version >= _TOPIC_IDS_SINCE
        answers = fetched_topics(
            self.offsets, self._topics, asked, by_id=by_id, stable=stable
        )
        return OffsetFetchResponseGroup(group_id=group_id, topics=answers)

    def offset_delete(
        self, call: Call, request: OffsetDeleteRequest, now_ms: int
    ) -> None:
        group_id = request.group_id
        try:
            self.check_group(group_id)
            group = self._groups.get(group_id)
            if group is None:
                raise ApiError(ErrorCode.GROUP_ID_NOT_FOUND)
            if not is_empty(group) and group.protocol_type != "consumer":
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
        """Return the logs of these groups that get records now."""
        partitions = {self.partition_for(group_id) for group_id in group_ids}
        return tuple(partitions & self._out.records.keys())

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
        for group_id in dict.fromkeys(request.groups_names):
            code = ErrorCode.NONE
            try:
                self.check_group(group_id, empty_id=True)
                self._delete_group(group_id, now_ms)
            except ApiError as error:
                code = error.error_code
            results.append(DeletableGroupResult(group_id=group_id, error_code=code))
        after = self._written(row.group_id for row in results)
        self._out.answer(call, DeleteGroupsResponse(results=results), after)

    def _delete_group(self, group_id: str, now_ms: int) -> None:
        group = self._groups.get(group_id)
        if group is None:
            raise ApiError(ErrorCode.GROUP_ID_NOT_FOUND)
        if not is_empty(group):
            raise ApiError(ErrorCode.NON_EMPTY_GROUP)
        self.offsets.remove_all(group_id)
        self._remove_group(group, now_ms)

    def _remove_group(self, group: Group, now_ms: int) -> None:
        """Delete an empty group; the caller deletes its offsets."""
        group_id = group.group_id
        del self._groups[group_id]
        if isinstance(group, ConsumerGroup):
            group.is_dead = True
            self._write_all(group_id, tombstones(group))
            return
        self._classic_rebalance.forget(group, ErrorCode.UNKNOWN_MEMBER_ID)
        group.transition_to(S.DEAD, now_ms)
        self._write_all(group_id, [(group_metadata_key(group_id), None)])

    def _write_all(self, group_id: str, records: Iterable[KeyValue]) -> None:
        partition = self.partition_for(group_id)
        for key, value in records:
            self._out.write(partition, key, value)

    # -- time ------------------------------------------------------------------------

    def start_expiry(self, now_ms: int) -> None:
        """Look for expired offsets at each offsets.retention.check.interval.ms."""
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
        """Stop serving the groups of these partitions until they are loaded."""
        self._loading.update(partitions)
        self._failed.difference_update(self._loading)

    def is_loading(self, partition: int) -> bool:
        """Return whether a partition has not been replayed to its end yet."""
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
        """Apply the record of a committed offset. Records come in the log's order."""
        self._replayed.add(group_id)
        if committed is not None and group_id not in self._groups:
            self._groups[group_id] = ClassicGroup(group_id, now_ms)
        self.offsets.replay(group_id, topic, partition, committed, producer_id)

    def replay(
        self, key: Message, value: Message | None, now_ms: int, producer_id: int = -1
    ) -> None:
        """Apply a record of the log. Records come in the log's order."""
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
        else:
            self._replay_consumer_group(key, value)

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
        """Apply a marker of the log to the offsets of the producer's transaction."""
        for group_id in self.offsets.groups_of_producer(producer_id):
            if self.partition_for(group_id) == partition:
                self.offsets.complete_transaction(group_id, producer_id, commit=commit)

    def loaded(self, partition: int, now_ms: int) -> None:
        """Serve the groups of a partition: all its records were replayed."""
        self._loading.discard(partition)
        for group_id in list(self._replayed):
            if self.partition_for(group_id) == partition:
                self._replayed.discard(group_id)
                if (group := self._groups.get(group_id)) is not None:
                    self._loaded_group(group, now_ms)
        if not self._loading:
            self.offsets.forget_deleted_topics()

    def _loaded_group(self, group: Group, now_ms: int) -> None:
        if isinstance(group, ConsumerGroup):
            self._consumer_rebalance.loaded(group, now_ms)
            return
        self._classic_rebalance.loaded(group, now_ms)
        if len(group.members) > self._config.group_max_size:
            self._classic_rebalance.maybe_prepare_rebalance(group, now_ms)

    def topic_deleted(self, topic: str) -> None:
        """Delete the offsets in a topic that was deleted."""
        self.offsets.topic_deleted(topic)

    def refuse_waiting(self) -> None:
        """Answer requests that wait for other members, as the broker stops."""
        for group in self._groups.values():
            if isinstance(group, ConsumerGroup):
                continue  # its members never wait for each other
            if group.num_awaiting_join or group.is_in(S.COMPLETING_REBALANCE):
                self._classic_rebalance.refuse_waiting(group, ErrorCode.NOT_COORDINATOR)

    def failed(self, partition: int) -> None:
        """Forget the groups of a partition that cannot be written.

        Their state in memory may say more than the log, and only the log counts.
        """
        self._failed.add(partition)
        for group_id, group in list(self._groups.items()):
            if self.partition_for(group_id) == partition:
                del self._groups[group_id]
                self.offsets.forget(group_id)
                if isinstance(group, ConsumerGroup):
                    self._consumer_rebalance.forget(group)
                    group.is_dead = True
                else:
                    self._classic_rebalance.forget(group, ErrorCode.NOT_COORDINATOR)
                    group.state = S.DEAD
        self._out.records.pop(partition, None)

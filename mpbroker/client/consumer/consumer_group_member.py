"""ConsumerGroupMember: a member of a group whose coordinator assigns the partitions.

With group.protocol=consumer there are no rounds in which all members wait for each
other. Heartbeats tell the coordinator the topics that a member wants and the partitions
that it owns; the responses tell the member its assignment. A member stops reading a
partition, and tells the coordinator so, before another member gets it. All other
partitions are read meanwhile.

Source: KIP-848.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Final
from uuid import uuid4

from mpbroker.base.errors import MpbrokerError
from mpbroker.client.cluster import TopicPartition
from mpbroker.client.consumer.consumer_metrics import ConsumerMetrics
from mpbroker.client.consumer.group_member import GroupMember, GroupSettings
from mpbroker.client.consumer.position_epochs import PositionEpochs
from mpbroker.client.errors import check_error, error_code_of
from mpbroker.client.settings import ClientSettings
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.consumer_group_heartbeat import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    TopicPartitions,
)
from mpbroker.protocol.messages.offset_commit import OffsetCommitRequest

_JOIN: Final = 0
_LEAVE: Final = -1
_LEAVE_FOR_A_WHILE: Final = -2  # a static member
_LOST: Final = frozenset({ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.FENCED_MEMBER_EPOCH})
_RETRY_INTERVAL_S: Final = 0.1

_Assigned = list[tuple[bytes, int]]  # topic ids and partitions


class ConsumerGroupMember(GroupMember):
    """Joins a group of the consumer protocol (KIP-848), and sends its heartbeats.

    Its `generation` is the member epoch.
    """

    has_rounds = False

    def __init__(
        self,
        client: ClientSettings,
        settings: GroupSettings,
        metrics: ConsumerMetrics | None = None,
        epochs: PositionEpochs | None = None,
    ) -> None:
        super().__init__(client, settings, metrics, epochs)
        self._topics: list[str] = []
        self._names: dict[bytes, str] = {}
        self._ids: dict[str, bytes] = {}
        self._target: _Assigned = []  # the newest assignment by the coordinator
        # The partitions that this member owns, as it has told the coordinator.
        self._told: set[TopicPartition] | None = None

    @property
    def is_cooperative(self) -> bool:
        """Whether members go on reading during a rebalance: always."""
        return True

    def check_topics(self) -> None:
        """Do nothing: the coordinator watches the partition counts."""

    def join(
        self, topics: Sequence[str], owned: Collection[TopicPartition] = ()
    ) -> list[TopicPartition] | None:
        """Join the group, or report changed topics and partitions to the coordinator.

        Return the assigned partitions. `GroupMember.join` has the arguments and errors.
        """
        self._is_joining = True
        began = time.monotonic()
        try:
            if not self.is_member and owned:
                return None
            self._must_join = False  # here: an answer may set it again
            if not self.is_member:
                self._told = None
                self._beat_with(list(topics), [])
            elif list(topics) != self._topics or set(owned) != self._told:
                self._beat_with(list(topics), owned)
            assigned = self._resolved()
            if set(assigned) != self._told:
                self._must_join = True  # tell the coordinator when they are taken
        except BaseException:
            self._must_join = True
            raise
        finally:
            self._is_joining = False
        self._note("rebalance", "rebalance-latency", began)
        self._start_heart()
        return assigned

    def _beat_with(self, topics: list[str], owned: Collection[TopicPartition]) -> None:
        """Send a heartbeat with all fields, and apply its response.

        Args:
            topics: the subscribed topics.
            owned: the partitions that this member still reads.
        """
        with self._lock:
            self._learn_ids(topics)
            by_topic: dict[str, list[int]] = {}
            for topic, partition in owned:
                by_topic.setdefault(topic, []).append(partition)
            if not self.is_member:
                self.member_id = self.member_id or str(uuid4())
            settings = self._settings
            request = ConsumerGroupHeartbeatRequest(
                group_id=settings.group_id,
                member_id=self.member_id,
                member_epoch=max(self.generation, _JOIN),
                instance_id=settings.group_instance_id,
                rebalance_timeout_ms=settings.max_poll_interval_ms,
                subscribed_topic_names=topics,
                server_assignor=settings.group_remote_assignor,
                topic_partitions=[
                    TopicPartitions(topic_id=self._ids[name], partitions=partitions)
                    for name, partitions in by_topic.items()
                ],
            )
            code = self._send(request)
            if not code:
                self._topics, self._told = topics, set(owned)

    def _beat_once(self) -> None:
        with self._lock:
            if self._is_joining or not self.is_member:
                return
            request = ConsumerGroupHeartbeatRequest(
                group_id=self._settings.group_id,
                member_id=self.member_id,
                member_epoch=self.generation,
                instance_id=self._settings.group_instance_id,
            )
            try:
                self._send(request)
            except ApiError as error:
                self._fatal = error  # the next poll raises it

    def _send(self, request: ConsumerGroupHeartbeatRequest) -> int:
        """Send a heartbeat, apply its response, and return the response's error code.

        A code other than 0 says that the coordinator has removed this member.

        Raises:
            ApiError: the group refuses this member.
        """
        began = time.monotonic()
        response = self._ask(
            request, ConsumerGroupHeartbeatResponse, lambda answer: answer.error_code
        )
        self._note("heartbeat", "heartbeat-response-time", began)
        code = error_code_of(response.error_code)
        if code in _LOST:
            self.generation, self._target = -1, []  # others may have our partitions
            self._must_join = True
            return code
        what = f"group {self._settings.group_id!r}"
        check_error(response.error_code, what, response.error_message)
        self.generation = response.member_epoch
        self._interval_s = response.heartbeat_interval_ms / 1000
        if response.assignment is not None:
            self._target = [
                (bytes(topic.topic_id), partition)
                for topic in response.assignment.topic_partitions
                for partition in topic.partitions
            ]
            self._must_join = True
        return code

    def _learn_ids(self, topics: Sequence[str]) -> None:
        for topic in self._cluster.metadata(topics).topics:
            if not topic.error_code and topic.name:
                self._names[bytes(topic.topic_id)] = topic.name
                self._ids.setdefault(topic.name, bytes(topic.topic_id))

    def _resolved(self) -> list[TopicPartition]:
        """Return the assigned partitions by name, without those of unknown topics."""
        with self._lock:
            target = list(self._target)
            if any(topic_id not in self._names for topic_id, _ in target):
                self._learn_ids(self._topics)
        found = []
        for topic_id, partition in target:
            name = self._names.get(topic_id)
            if name is None:
                self._must_join = True  # look again: it may be just created
                continue
            self._ids[name] = topic_id
            found.append(TopicPartition(name, partition))
        return sorted(found)

    def leave(self) -> None:
        """Leave the group, so that others get the partitions at once."""
        if not self.is_member:
            return
        static = self._settings.group_instance_id is not None
        request = ConsumerGroupHeartbeatRequest(
            group_id=self._settings.group_id,
            member_id=self.member_id,
            member_epoch=_LEAVE_FOR_A_WHILE if static else _LEAVE,
            instance_id=self._settings.group_instance_id,
        )
        if self._take_lock():
            try:
                self._find().request(request, ConsumerGroupHeartbeatResponse)
            except MpbrokerError:
                pass  # the coordinator drops it when its session ends
            finally:
                self._lock.release()
        self.generation, self._target, self._told = -1, [], None

    def send_commit(self, request: OffsetCommitRequest) -> None:
        """Send a commit; send it again if the member epoch has risen meanwhile.

        See `GroupMember.send_commit`.
        """
        deadline = min(time.monotonic() + self._timeout_s, self._end_s)
        while True:
            try:
                super().send_commit(request)
            except ApiError as error:
                code = error.error_code
                if code in _LOST:
                    self.generation, self._must_join = -1, True
                    raise self._rebalanced(code) from None
                if code != ErrorCode.STALE_MEMBER_EPOCH or time.monotonic() > deadline:
                    raise
                self._beat_once()
                if not self.is_member:
                    raise self._rebalanced(code) from None
                if request.generation_id_or_member_epoch == self.generation:
                    time.sleep(_RETRY_INTERVAL_S)
                request.generation_id_or_member_epoch = self.generation
            else:
                return

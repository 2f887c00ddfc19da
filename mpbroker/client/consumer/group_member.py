"""GroupMember joins a consumer group, gets partitions, sends heartbeats and commits.

A thread sends the heartbeats, over a connection to the coordinator. So a consumer that
takes long to use its records keeps its partitions for up to max.poll.interval.ms.

Source: Kafka protocol guide, "Group Membership API"; KIP-62, KIP-345 (static members),
KIP-394, KIP-429 (cooperative rebalancing).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import ClassVar, Final, NamedTuple, TypeVar

from mpbroker.base.errors import MpbrokerError
from mpbroker.client.addresses import Address
from mpbroker.client.assignor import (
    COOPERATIVE_STICKY,
    RANGE,
    Subscription,
    assignor_of,
    decode_assignment,
    decode_subscription,
    encode_assignment,
    encode_subscription,
)
from mpbroker.client.client_request import NetworkCounts
from mpbroker.client.cluster import Broker, Cluster, TopicPartition
from mpbroker.client.consumer.consumer_metrics import ConsumerMetrics
from mpbroker.client.consumer.position_epochs import PositionEpochs
from mpbroker.client.errors import (
    BrokerUnavailableError,
    ClientError,
    RequestTimeoutError,
    check_error,
    describe_error,
    error_code_of,
)
from mpbroker.client.group_metadata import GroupMetadata
from mpbroker.client.settings import ClientSettings
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.message import Message
from mpbroker.protocol.messages.find_coordinator import (
    FindCoordinatorRequest,
    FindCoordinatorResponse,
)
from mpbroker.protocol.messages.heartbeat import HeartbeatRequest, HeartbeatResponse
from mpbroker.protocol.messages.join_group import (
    JoinGroupRequest,
    JoinGroupRequestProtocol,
    JoinGroupResponse,
)
from mpbroker.protocol.messages.leave_group import (
    LeaveGroupRequest,
    LeaveGroupResponse,
    MemberIdentity,
)
from mpbroker.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetCommitResponse,
)
from mpbroker.protocol.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestTopic,
    OffsetFetchResponse,
)
from mpbroker.protocol.messages.sync_group import (
    SyncGroupRequest,
    SyncGroupRequestAssignment,
    SyncGroupResponse,
)

ResponseT = TypeVar("ResponseT", bound=Message)

_RETRY_INTERVAL_S: Final = 0.1  # Kafka's retry.backoff.ms
_MISSING_S: Final = 1.0  # before looking again for a topic that does not exist
# How long a member that ends tries to reach a broker, and how long it waits for a
# thread of its own that was told to end.
_AWAY_S: Final = 5.0
_GRACE_S: Final = 1.0
# Later versions ask for several groups, or name topics by id.
_ONE_GROUP_MAX_VERSION: Final = 7  # of OffsetFetch
_NAMED_TOPICS_MAX_VERSION: Final = 9  # of OffsetCommit

_FIND_AGAIN: Final = frozenset(
    {ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE}
)
_JOIN_AGAIN: Final = frozenset(
    {
        ErrorCode.REBALANCE_IN_PROGRESS,
        ErrorCode.ILLEGAL_GENERATION,
        ErrorCode.UNKNOWN_MEMBER_ID,
    }
)


class RebalancedError(ClientError):
    """The group has assigned its partitions anew since this member's last poll().

    Call poll() again.
    """


class RebalanceListener:
    """Gets calls from `poll` when partitions are assigned or taken away.

    Override the methods you need.
    """

    def on_partitions_revoked(self, partitions: Collection[TopicPartition]) -> None:
        """Finish work on these partitions, and commit: other members read them next."""

    def on_partitions_assigned(self, partitions: Collection[TopicPartition]) -> None:
        """Begin with these partitions, besides those that were assigned before."""

    def on_partitions_lost(self, partitions: Collection[TopicPartition]) -> None:
        """Drop these partitions: others have them, as the group removed this member.

        A commit of these partitions would fail. The default calls
        on_partitions_revoked, as Kafka's does: override this method if that one
        commits.
        """
        self.on_partitions_revoked(partitions)


CLASSIC: Final = "classic"
CONSUMER: Final = "consumer"
"""The values of group.protocol: members assign partitions, or the coordinator does."""


class GroupSettings(NamedTuple):
    """The settings of a member of a group."""

    group_id: str
    group_instance_id: str | None = None
    session_timeout_ms: int = 45_000
    heartbeat_interval_ms: int = 3_000
    max_poll_interval_ms: int = 300_000
    assignors: tuple[str, ...] = (RANGE, COOPERATIVE_STICKY)
    group_protocol: str = CLASSIC
    group_remote_assignor: str | None = None


class GroupMember:
    """Joins a group of the classic protocol, and commits offsets for it.

    The consumer's thread uses it; a thread of its own sends the heartbeats.

    Attributes:
        member_id: the id that the coordinator gave; "" while there is none.
        generation: the group's generation that this member is in; -1 if it is in none.
        has_rounds: whether all members are assigned partitions at once. Then a listener
            is told of each round, even if this member has got no new partition.
    """

    has_rounds: ClassVar[bool] = True

    def __init__(
        self,
        client: ClientSettings,
        settings: GroupSettings,
        metrics: ConsumerMetrics | None = None,
        epochs: PositionEpochs | None = None,
    ) -> None:
        self._metrics = metrics or ConsumerMetrics()
        self._epochs = epochs or PositionEpochs()
        self.member_id = ""
        self.generation = -1
        self._timeout_s = client.request_timeout_ms / 1000
        self._end_s = float("inf")  # no call waits longer; see `end_by`
        self._cluster = Cluster(client.bootstrap, self._timeout_s, client)
        self._settings = settings
        self._coordinator: Broker | None = None
        self._lock = threading.RLock()  # guards the connection and its responses
        self._must_join = True
        self._is_joining = False  # then the coordinator knows that we are alive
        self._fatal: MpbrokerError | None = None
        # If this member leads the group: the topics and partition counts of the last
        # assignment, and when to look whether they have changed.
        self._wanted: list[str] = []
        self._counts: dict[str, int] = {}
        self._look_at = float("inf")
        self._max_age_s = client.metadata_max_age_ms / 1000
        self._last_poll = time.monotonic()
        self._stop = threading.Event()
        self._interval_s = settings.heartbeat_interval_ms / 1000
        self._heart: threading.Thread | None = None

    # -- the coordinator ---------------------------------------------------------------

    def _ask(
        self,
        request: Message,
        response_type: type[ResponseT],
        code_of: Callable[[ResponseT], int],
        *,
        wait_s: float | None = None,
        max_version: int | None = None,
    ) -> ResponseT:
        """Send a request to the coordinator; find another one, or wait, if necessary.

        Args:
            request: the request.
            response_type: the class that decodes the response.
            code_of: returns the error code of a response.
            wait_s: the limit for the response, in seconds; None: request.timeout.ms.
            max_version: the highest version to send; None: no limit.

        Raises:
            BrokerUnavailableError: no coordinator answers within request.timeout.ms.
        """
        began = time.monotonic()
        deadline = began + self._timeout_s
        while True:
            try:
                with self._lock:
                    broker = self._find()
                    response = broker.request(
                        request,
                        response_type,
                        max_version=max_version,
                        timeout_s=wait_s,
                    )
                code = error_code_of(code_of(response))
                if code not in _FIND_AGAIN and (
                    code != ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
                ):
                    return response
                if time.monotonic() > min(deadline, self._end_s):
                    return response
                if code in _FIND_AGAIN:
                    self._find_again()
            except BrokerUnavailableError:
                self._find_again()
                if self._is_ending:
                    # A broker that restarts comes back within this; for one that is
                    # away nobody waits who wants to end.
                    deadline = min(deadline, began + _AWAY_S)
                if time.monotonic() > min(deadline, self._end_s):
                    raise
            time.sleep(_RETRY_INTERVAL_S)

    def _find(self) -> Broker:
        if self._coordinator is not None:
            return self._coordinator
        request = FindCoordinatorRequest(key=self._settings.group_id)
        found = self._cluster.request(request, FindCoordinatorResponse, max_version=3)
        what = f"coordinator of group {self._settings.group_id!r}"
        code = error_code_of(found.error_code)
        if code in _FIND_AGAIN or code == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS:
            raise BrokerUnavailableError(f"{what}: {describe_error(code, None)}")
        check_error(found.error_code, what, found.error_message)
        self._coordinator = self._cluster.at(Address(found.host, found.port))
        return self._coordinator

    def _find_again(self) -> None:
        with self._lock:
            self._coordinator = None

    @property
    def network_counts(self) -> NetworkCounts:
        """The totals of requests, bytes and times of the coordinator's connection."""
        return self._cluster.client.counts

    @property
    def connection_count(self) -> int:
        return self._cluster.client.connection_count()

    def _note(self, what: str, time_name: str, began: float) -> None:
        self._metrics.asked(what, time_name, (time.monotonic() - began) * 1000)

    # -- membership --------------------------------------------------------------------

    @property
    def must_join(self) -> bool:
        """Whether this member must join the group's next generation.

        Raises:
            ApiError: another member has taken this member's group.instance.id.
        """
        if self._fatal is not None:
            raise self._fatal
        return self._must_join

    @property
    def is_member(self) -> bool:
        """Whether this member is in a generation, and so owns its partitions."""
        return bool(self.member_id) and self.generation >= 0

    @property
    def is_cooperative(self) -> bool:
        """Whether members keep reading unmoved partitions during a rebalance."""
        return self._settings.assignors == (COOPERATIVE_STICKY,)

    def join_again(self) -> None:
        """Have the next poll join the group anew: topics or partitions changed."""
        self._must_join = True

    def note_poll(self) -> None:
        """Note that the user has called poll()."""
        self._last_poll = time.monotonic()

    def join(
        self, topics: Sequence[str], owned: Collection[TopicPartition] = ()
    ) -> list[TopicPartition] | None:
        """Join the group, or its next generation; return the assigned partitions.

        Args:
            topics: the topics to read.
            owned: the partitions that this member reads now and goes on reading.

        Returns:
            None if the group has forgotten this member. Other members may have read the
            partitions that it owns: give them up, and join again.

        Raises:
            ApiError: the group refuses this member.
            BrokerUnavailableError: no coordinator answers within the timeout.
        """
        self._is_joining = True
        began = time.monotonic()
        try:
            assigned = None
            while assigned is None:
                if owned and not self.is_member:
                    return None
                subscription = Subscription(list(topics), list(owned), self.generation)
                response = self._join_once(encode_subscription(subscription))
                if self._took_id(response):
                    assigned = self._sync(response)
            self._must_join = False  # here: the next heartbeat may set it again
        finally:
            self._is_joining = False
        self._note("rebalance", "rebalance-latency", began)
        self._start_heart()
        return assigned

    def _took_id(self, response: JoinGroupResponse) -> bool:
        """Store the member id and generation of a JoinGroup response.

        Returns:
            False if this member must send JoinGroup again.
        """
        code = error_code_of(response.error_code)
        if code == ErrorCode.MEMBER_ID_REQUIRED:
            self.member_id = response.member_id
            return False
        if code in (ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.ILLEGAL_GENERATION):
            self.member_id, self.generation = "", -1
            return False
        if code == ErrorCode.REBALANCE_IN_PROGRESS:
            time.sleep(_RETRY_INTERVAL_S)  # another rebalance runs: join the next one
            return False
        check_error(code, f"joining group {self._settings.group_id!r}")
        self.member_id = response.member_id
        self.generation = response.generation_id
        return True

    def _join_once(self, metadata: bytes) -> JoinGroupResponse:
        settings = self._settings
        request = JoinGroupRequest(
            group_id=settings.group_id,
            session_timeout_ms=settings.session_timeout_ms,
            rebalance_timeout_ms=settings.max_poll_interval_ms,
            member_id=self.member_id,
            group_instance_id=settings.group_instance_id,
            protocol_type="consumer",
            protocols=[
                JoinGroupRequestProtocol(name=name, metadata=metadata)
                for name in settings.assignors
            ],
        )
        # The response comes when all members have joined, which may take this long.
        wait_s = settings.max_poll_interval_ms / 1000 + self._timeout_s
        began = time.monotonic()
        response = self._ask(
            request, JoinGroupResponse, lambda answer: answer.error_code, wait_s=wait_s
        )
        if not response.error_code:
            self._note("join", "join-time", began)
        return response

    def _sync(self, joined: JoinGroupResponse) -> list[TopicPartition] | None:
        """Send SyncGroup, with all assignments if this member leads; return its own.

        Returns:
            None if this member must join again.
        """
        assignments: list[SyncGroupRequestAssignment] = []
        self._look_at = float("inf")
        if joined.leader == joined.member_id and not joined.skip_assignment:
            assignments = self._assign(joined)
        request = SyncGroupRequest(
            group_id=self._settings.group_id,
            generation_id=joined.generation_id,
            member_id=joined.member_id,
            group_instance_id=self._settings.group_instance_id,
            protocol_type="consumer",
            protocol_name=joined.protocol_name or self._settings.assignors[0],
            assignments=assignments,
        )
        wait_s = self._settings.max_poll_interval_ms / 1000 + self._timeout_s
        began = time.monotonic()
        response = self._ask(
            request, SyncGroupResponse, lambda answer: answer.error_code, wait_s=wait_s
        )
        code = error_code_of(response.error_code)
        if not code:
            self._note("sync", "sync-time", began)
        if code in _JOIN_AGAIN:
            if code == ErrorCode.UNKNOWN_MEMBER_ID:
                self.member_id, self.generation = "", -1
            return None
        check_error(code, f"group {self._settings.group_id!r}")
        return decode_assignment(response.assignment)

    def _assign(self, joined: JoinGroupResponse) -> list[SyncGroupRequestAssignment]:
        assign = assignor_of(joined.protocol_name or self._settings.assignors[0])
        subscriptions = {
            member.member_id: decode_subscription(member.metadata)
            for member in joined.members
        }
        self._wanted = sorted(
            {name for member in subscriptions.values() for name in member.topics}
        )
        self._counts = counts = self._partition_counts()
        return [
            SyncGroupRequestAssignment(
                member_id=member, assignment=encode_assignment(partitions)
            )
            for member, partitions in assign(subscriptions, counts).items()
        ]

    def _partition_counts(self) -> dict[str, int]:
        with self._lock:
            topics = self._cluster.metadata(self._wanted).topics
        found = {
            topic.name or "": len(topic.partitions)
            for topic in topics
            if not topic.error_code
        }
        # A topic that does not exist yet may be created soon.
        is_whole = found.keys() >= set(self._wanted)
        wait_s = self._max_age_s if is_whole else min(_MISSING_S, self._max_age_s)
        self._look_at = time.monotonic() + wait_s
        return found

    def check_topics(self) -> None:
        """Note that this member must join again if partition counts have changed.

        Only the group's leader looks for changes, at intervals.
        """
        if self._must_join or time.monotonic() < self._look_at:
            return
        try:
            if self._partition_counts() != self._counts:
                self._must_join = True
        except BrokerUnavailableError:
            self._look_at = time.monotonic() + _MISSING_S

    def _start_heart(self) -> None:
        if self._heart is None:
            self._heart = threading.Thread(
                target=self._beat,
                name=f"kafka-coordinator-heartbeat-thread | {self._settings.group_id}",
                daemon=True,
            )
            self._heart.start()

    def _beat(self) -> None:
        while not self._stop.wait(self._interval_s):
            if not self.is_member or self._is_joining or self._fatal is not None:
                continue
            if self._is_idle():
                with self._lock:
                    # Look again: the user's thread may have had the lock, in a call
                    # that it has made since.
                    if self._is_idle() and not self._is_joining:
                        self._must_join = True  # others may get our partitions
                        self.leave()
                continue
            try:
                self._beat_once()
            except (MpbrokerError, OSError):
                continue  # a later heartbeat, or a call of the user, may succeed

    def _is_idle(self) -> bool:
        idle_ms = (time.monotonic() - self._last_poll) * 1000
        return idle_ms > self._settings.max_poll_interval_ms

    def _beat_once(self) -> None:
        with self._lock:
            # Look only now: the user's thread may have joined while we waited for the
            # lock.
            if self._is_joining or not self.is_member:
                return
            generation = self.generation
            request = HeartbeatRequest(
                group_id=self._settings.group_id,
                generation_id=generation,
                member_id=self.member_id,
                group_instance_id=self._settings.group_instance_id,
            )
            broker = self._find()
            began = time.monotonic()
            response = broker.request(request, HeartbeatResponse)
            self._note("heartbeat", "heartbeat-response-time", began)
            code = error_code_of(response.error_code)
            if code in _FIND_AGAIN:
                self._find_again()
            elif code in _JOIN_AGAIN and generation == self.generation:
                if code != ErrorCode.REBALANCE_IN_PROGRESS:
                    self.generation = -1  # others may have our partitions
                if code == ErrorCode.UNKNOWN_MEMBER_ID:
                    self.member_id = ""
                self._must_join = True
            elif code == ErrorCode.FENCED_INSTANCE_ID:
                self._fatal = ApiError(
                    code,
                    f"group {self._settings.group_id!r}: another member has taken"
                    f" group.instance.id={self._settings.group_instance_id}; each"
                    " member needs a name of its own",
                )

    def leave(self) -> None:
        """Leave the group, so that others get the partitions at once."""
        if not self.member_id or self._settings.group_instance_id is not None:
            return  # a static member comes back under its name
        identity = MemberIdentity(member_id=self.member_id)
        request = LeaveGroupRequest(group_id=self._settings.group_id)
        if self._take_lock():
            try:
                broker = self._find()
                if broker.version_for(LeaveGroupRequest) >= 3:
                    request.members = [identity]
                else:
                    request.member_id = self.member_id
                broker.request(request, LeaveGroupResponse)
            except MpbrokerError:
                pass  # the coordinator drops it at session.timeout.ms
            finally:
                self._lock.release()
        self.member_id, self.generation = "", -1

    def _take_lock(self) -> bool:
        """Wait for the lock until the time of `end_by`; return whether it was taken.

        A thread that has it waits no longer than that for a broker, either.
        """
        return self._lock.acquire(timeout=self._left_s())

    def _left_s(self) -> float:
        left = max(self._end_s - time.monotonic(), 0)
        return min(left + _GRACE_S, threading.TIMEOUT_MAX)

    @property
    def _is_ending(self) -> bool:
        return self._end_s < float("inf")

    def end_by(self, end_s: float) -> None:
        """Let no call wait beyond a time, not even one that waits in another thread.

        Args:
            end_s: the time of the monotonic clock, in seconds.
        """
        self._end_s = end_s
        self._cluster.end_by(end_s)

    def close(self) -> None:
        """Leave the group, end the thread, and close the connection."""
        self._stop.set()
        try:
            if self._heart is not None:
                self._heart.join(self._left_s())
            self.leave()
            self._coordinator = None
        finally:
            self._cluster.close()

    @property
    def metadata(self) -> GroupMetadata:
        """The group and this member of it, as they are now."""
        return GroupMetadata(
            self._settings.group_id,
            self.generation,
            self.member_id,
            self._settings.group_instance_id,
        )

    # -- offsets -----------------------------------------------------------------------

    def commit(self, offsets: Mapping[TopicPartition, int], *, as_member: bool) -> None:
        """Commit offsets; see `commit_request` and `send_commit`."""
        self.send_commit(self.commit_request(offsets, as_member=as_member))

    def commit_request(
        self, offsets: Mapping[TopicPartition, int], *, as_member: bool
    ) -> OffsetCommitRequest:
        """Return the request that commits offsets.

        Args:
            offsets: the next offset to read, by partition.
            as_member: whether to refuse if this client is not a member now. Without
                that, it could commit older offsets for a group that has become empty.

        Raises:
            RebalancedError: other members may read the partitions by now.
        """
        if as_member and not self.is_member:
            self._must_join = True
            raise self._rebalanced(ErrorCode.UNKNOWN_MEMBER_ID)
        topics: dict[str, list[OffsetCommitRequestPartition]] = {}
        for partition, offset in offsets.items():
            topics.setdefault(partition.topic, []).append(
                OffsetCommitRequestPartition(
                    partition_index=partition.partition,
                    committed_offset=offset,
                    committed_leader_epoch=self._epochs.before(partition, offset),
                    committed_metadata="",
                )
            )
        return OffsetCommitRequest(
            group_id=self._settings.group_id,
            generation_id_or_member_epoch=self.generation,
            member_id=self.member_id,
            group_instance_id=self._settings.group_instance_id,
            topics=[
                OffsetCommitRequestTopic(name=name, partitions=partitions)
                for name, partitions in topics.items()
            ],
        )

    def send_commit(self, request: OffsetCommitRequest) -> None:
        """Send a request of `commit_request`, and wait for its response.

        Raises:
            RebalancedError: other members may read the partitions by now.
            ApiError: another refusal.
        """
        began = time.monotonic()
        response = self._ask(
            request,
            OffsetCommitResponse,
            _first_commit_error,
            max_version=_NAMED_TOPICS_MAX_VERSION,
        )
        code = error_code_of(_first_commit_error(response))
        if not code:
            self._note("commit", "commit-latency", began)
        if code in _JOIN_AGAIN:
            if request.generation_id_or_member_epoch == self.generation:
                if code != ErrorCode.REBALANCE_IN_PROGRESS:
                    self.generation = -1  # others may have our partitions
                self._must_join = True
            raise self._rebalanced(code)
        check_error(code, f"commit of group {self._settings.group_id!r}")

    def _rebalanced(self, code: ErrorCode) -> RebalancedError:
        return RebalancedError(
            f"group {self._settings.group_id!r}: {code.name}: nothing is committed;"
            " call poll() again, and go on with the partitions it assigns"
        )

    def committed(
        self, partitions: Iterable[TopicPartition], *, goes_there: bool = False
    ) -> dict[TopicPartition, int]:
        """Return the committed offsets of partitions; those without one are left out.

        Args:
            partitions: the partitions to ask about.
            goes_there: whether the consumer will read from these offsets. If so, the
                leader epochs that were committed with them are stored.

        Raises:
            ApiError: the coordinator refused.
            RequestTimeoutError: an open transaction holds the offsets.
        """
        topics: dict[str, list[int]] = {}
        for topic, partition in partitions:
            topics.setdefault(topic, []).append(partition)
        request = OffsetFetchRequest(
            group_id=self._settings.group_id,
            topics=[
                OffsetFetchRequestTopic(name=name, partition_indexes=indexes)
                for name, indexes in topics.items()
            ],
        )
        deadline = min(time.monotonic() + self._timeout_s, self._end_s)
        while True:
            response = self._ask(
                request,
                OffsetFetchResponse,
                lambda found: found.error_code,
                max_version=_ONE_GROUP_MAX_VERSION,
            )
            check_error(response.error_code, f"group {self._settings.group_id!r}")
            found = {}
            unstable = False
            for answer in response.topics:
                for entry in answer.partitions:
                    where = TopicPartition(answer.name, entry.partition_index)
                    if entry.error_code == ErrorCode.UNSTABLE_OFFSET_COMMIT:
                        unstable = True
                        continue
                    check_error(entry.error_code, f"position of {where}")
                    if entry.committed_offset >= 0:
                        found[where] = at = entry.committed_offset
                        epoch = entry.committed_leader_epoch
                        if goes_there:
                            self._epochs.note(where, at - 1, at, epoch)
            if not unstable:
                return found
            if time.monotonic() > deadline:
                raise RequestTimeoutError("a transaction holds the group's offsets")
            time.sleep(_RETRY_INTERVAL_S)


def _first_commit_error(response: OffsetCommitResponse) -> int:
    for topic in response.topics:
        for entry in topic.partitions:
            if entry.error_code:
                return entry.error_code
    return 0

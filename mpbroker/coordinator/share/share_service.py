"""Serve ShareFetch and ShareAcknowledge: deliver records to members of share groups.

A fetch looks for the first offset that can be acquired in each partition of its
session, reads the record batches from there on, and acquires them. The answer names
ranges of the log's files, so that records are not copied here. A fetch that finds less
than min.bytes waits until a log grows, until records become available again, or for
max.wait.ms.

Acknowledgements are written to the log before they are answered.

Source: KIP-932; Kafka's SharePartitionManager, DelayedShareFetch and KafkaApis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.coordinator.context import CoordinatorContext
from mpbroker.coordinator.outbox import Call
from mpbroker.coordinator.share.share_partition import (
    Acknowledgement,
    Acquired,
    Limits,
    SharePartition,
    check_acknowledgements,
)
from mpbroker.coordinator.share.share_records import ShareKey
from mpbroker.coordinator.share.share_sessions import (
    FINAL_EPOCH,
    INITIAL_EPOCH,
    ShareSession,
    ShareSessions,
)
from mpbroker.coordinator.share.share_states import ShareState, ShareStates
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages import share_acknowledge as acknowledge_messages
from mpbroker.protocol.messages.share_acknowledge import (
    AcknowledgeType,
    ShareAcknowledgeRequest,
    ShareAcknowledgeResponse,
    ShareAcknowledgeTopicResponse,
)
from mpbroker.protocol.messages.share_fetch import (
    AcquiredRecords,
    LeaderIdAndEpoch,
    PartitionData,
    ShareFetchableTopicResponse,
    ShareFetchRequest,
    ShareFetchResponse,
)

_MAX_WAIT_MS: Final = 60_000
# How often the coordinator looks for sessions whose connections are closed.
_LOOK_MS: Final = 1000
_RECORD_LIMIT: Final = 1  # share_acquire_mode: strictly no more than max.records


class ShareRead(Protocol):
    """Record batches that were found in a log."""

    @property
    def batches(self) -> Sequence[tuple[int, int]]:
        """The first and last offset of each batch.

        The first batch begins at the offset from which the log was read.
        """

    @property
    def aborted(self) -> Sequence[tuple[int, int]]:
        """The first and last offset of each batch of an aborted transaction."""

    @property
    def length(self) -> int: ...

    def records(self, first: int, last: int) -> Any:
        """Return the batches with these offsets: as bytes, or as a range of a file."""


class ShareReader(Protocol):
    """Reads the partitions of topics for share groups."""

    def name(self, topic_id: bytes) -> str | None: ...

    def has_partition(self, topic_id: bytes, partition: int) -> bool: ...

    def offsets(self, topic_id: bytes, partition: int) -> tuple[int, int]:
        """Return the start offset and the end offset of a partition's log."""

    def offset_at(self, topic_id: bytes, partition: int, timestamp: int) -> int:
        """Return the first offset with this timestamp (ms) or a later one."""

    def read(
        self,
        key: ShareKey,
        offset: int,
        max_bytes: int,
        max_records: int,
        *,
        min_one_batch: bool,
        read_committed: bool,
    ) -> ShareRead: ...

    def watch(self, key: ShareKey) -> int | None:
        """Have the coordinator notified when a share group's partition gets records.

        Return the log's row (the number of its entry in shared memory), or None if
        there is no such log.
        """


class Connections(Protocol):
    """Tells which clients' connections are open, to end sessions with them."""

    def identify(self, call: Call) -> tuple[int, int]:
        """Return an identifier of the connection of a request, which is never reused.

        It consists of the connection's row in shared memory and the row's generation.
        """

    def is_open(self, connection: tuple[int, int]) -> bool: ...


class GroupSettings(NamedTuple):
    """The settings of a share group that concern its fetches."""

    limits: Limits = Limits()
    read_committed: bool = False
    auto_offset_reset: str = "latest"


class _Plan(NamedTuple):
    """The record batches of one partition that a fetch has read, and may acquire."""

    key: ShareKey
    share: SharePartition
    read: ShareRead


class _Fetch:
    """A ShareFetch request that is executed now, or waits for records."""

    __slots__ = (
        "after",
        "answers",
        "call",
        "deadline_ms",
        "keys",
        "request",
        "rows",
        "session",
        "settings",
    )

    def __init__(
        self,
        call: Call,
        request: ShareFetchRequest,
        session: ShareSession,
        settings: GroupSettings,
    ) -> None:
        self.call = call
        self.settings = settings  # of the group, as of the last attempt
        self.request = request
        self.session = session
        self.keys = _rotated(list(session.keys), session.epoch)
        self.answers: dict[ShareKey, PartitionData] = {}
        self.after: set[int] = set()  # the logs that its answer waits for
        self.rows: set[int] = set()
        self.deadline_ms = 0

    def answer_for(self, key: ShareKey) -> PartitionData:
        """Return the part of the answer about a partition; it is added if need be."""
        answer = self.answers.get(key)
        if answer is None:
            answer = self.answers[key] = PartitionData(
                partition_index=key.partition, acquired_records=[]
            )
        return answer


class ShareService:
    """Serves the fetches and acknowledgements of share groups.

    Args:
        settings: returns the settings of a group.
        duration_ms: returns the duration (ms) of a reset strategy "by_duration:...".
        connections: tells which connections are open.
        max_sessions: group.share.max.share.sessions.
        max_bytes: fetch.max.bytes.
    """

    def __init__(
        self,
        context: CoordinatorContext,
        states: ShareStates,
        reader: ShareReader,
        settings: Callable[[str], GroupSettings],
        duration_ms: Callable[[str], int | None],
        connections: Connections,
        max_sessions: int = 2000,
        max_bytes: int = 57_671_680,
    ) -> None:
        self._out = context.outbox
        self._timers = context.timers
        self._states = states
        self._reader = reader
        self._settings = settings
        self._duration_ms = duration_ms
        self._connections = connections
        self._max_bytes = max_bytes
        self.sessions = ShareSessions(max_sessions)
        # Called with an AcknowledgeType, and the number of records acknowledged so.
        self.on_acknowledged: Callable[[int, int], None] = lambda kind, records: None
        # The waiting fetches, in the order in which they came: by the row of a log that
        # may grow, and by a share-partition whose records may become available.
        self._by_row: dict[int, dict[_Fetch, None]] = {}
        self._by_key: dict[ShareKey, dict[_Fetch, None]] = {}
        self._rows: dict[int, ShareKey] = {}  # a share-partition of each log
        self._grown: dict[int, None] = {}
        states.on_available = self._available

    # -- requests ----------------------------------------------------------------------

    def share_fetch(self, call: Call, request: ShareFetchRequest, now_ms: int) -> None:
        try:
            _check(request, "ShareFetch")
            if request.is_renew_ack and (
                request.max_bytes
                or request.min_bytes
                or request.max_records
                or request.max_wait_ms
            ):
                raise ApiError(
                    ErrorCode.INVALID_REQUEST,
                    "A request that renews locks must not fetch records.",
                )
            session = self._session(call, request, now_ms)
            fetch = _Fetch(call, request, session, self._settings(session.group_id))
        except ApiError as error:
            self._out.answer(
                call,
                ShareFetchResponse(
                    error_code=error.error_code,
                    error_message=error.message or None,
                    responses=[],
                ),
            )
            return
        self._take_acknowledgements(fetch, now_ms)
        if request.share_session_epoch == FINAL_EPOCH:
            fetch.keys = []
            self._release(session, now_ms)
        elif request.is_renew_ack:
            fetch.keys = []
        wait_ms = min(request.max_wait_ms, _MAX_WAIT_MS) - call.waited_ms
        fetch.deadline_ms = now_ms + max(0, wait_ms)
        if not fetch.keys or self._attempt(fetch, now_ms, final=wait_ms <= 0):
            self._answer(fetch)
            return
        self._park(fetch, now_ms)

    def _session(
        self, call: Call, request: ShareFetchRequest, now_ms: int
    ) -> ShareSession:
        """Return the share session of a ShareFetch; update its list of partitions.

        Raises:
            ApiError: INVALID_REQUEST, SHARE_SESSION_NOT_FOUND,
                INVALID_SHARE_SESSION_EPOCH, SHARE_SESSION_LIMIT_REACHED.
        """
        assert request.group_id is not None and request.member_id is not None
        group_id, member_id = request.group_id, request.member_id
        epoch = request.share_session_epoch
        if epoch == FINAL_EPOCH:
            return self.sessions.find(group_id, member_id)
        if epoch == INITIAL_EPOCH:
            if any(
                row.acknowledgement_batches
                for topic in request.topics
                for row in topic.partitions
            ):
                raise ApiError(
                    ErrorCode.INVALID_REQUEST,
                    "The first request of a share session must not acknowledge.",
                )
            connection = self._connections.identify(call)
            session = self.sessions.begin(group_id, member_id, connection)
            if "share connections" not in self._timers:
                self._watch_connections(now_ms)
        else:
            session = self.sessions.next(group_id, member_id, epoch)
        for topic in request.topics:
            for row in topic.partitions:
                session.add(
                    ShareKey(group_id, bytes(topic.topic_id), row.partition_index)
                )
        for forgotten in request.forgotten_topics_data:
            for partition in forgotten.partitions:
                key = ShareKey(group_id, bytes(forgotten.topic_id), partition)
                session.keys.pop(key, None)
        return session

    def share_acknowledge(
        self, call: Call, request: ShareAcknowledgeRequest, now_ms: int
    ) -> None:
        try:
            _check(request, "ShareAcknowledge")
            assert request.group_id is not None and request.member_id is not None
            group_id, member_id = request.group_id, request.member_id
            epoch = request.share_session_epoch
            if epoch == INITIAL_EPOCH:
                raise ApiError(
                    ErrorCode.INVALID_SHARE_SESSION_EPOCH,
                    "The share session epoch is invalid.",
                )
            if epoch == FINAL_EPOCH:
                session = self.sessions.find(group_id, member_id)
            else:
                session = self.sessions.next(group_id, member_id, epoch)
        except ApiError as error:
            self._out.answer(
                call,
                ShareAcknowledgeResponse(
                    error_code=error.error_code, error_message=error.message or None
                ),
            )
            return
        after: set[int] = set()
        limits = self._settings(group_id).limits
        responses = []
        for topic in request.topics:
            rows = []
            for row in topic.partitions:
                key = ShareKey(group_id, bytes(topic.topic_id), row.partition_index)
                code, message = self._acknowledge(
                    call,
                    member_id,
                    key,
                    row,
                    limits,
                    after,
                    now_ms,
                    renews=request.is_renew_ack,
                )
                rows.append(
                    acknowledge_messages.PartitionData(
                        partition_index=row.partition_index,
                        error_code=code,
                        error_message=message,
                    )
                )
            responses.append(
                ShareAcknowledgeTopicResponse(topic_id=topic.topic_id, partitions=rows)
            )
        if epoch == FINAL_EPOCH:
            self._release(session, now_ms)
        self._out.answer(
            call,
            ShareAcknowledgeResponse(
                acquisition_lock_timeout_ms=limits.lock_ms,
                responses=responses,
            ),
            tuple(after),
        )

    # -- acknowledgements --------------------------------------------------------------

    def _take_acknowledgements(self, fetch: _Fetch, now_ms: int) -> None:
        request = fetch.request
        for topic in request.topics:
            for row in topic.partitions:
                if not row.acknowledgement_batches:
                    continue
                key = ShareKey(
                    fetch.session.group_id, bytes(topic.topic_id), row.partition_index
                )
                code, message = self._acknowledge(
                    fetch.call,
                    fetch.session.member_id,
                    key,
                    row,
                    fetch.settings.limits,
                    fetch.after,
                    now_ms,
                    renews=request.is_renew_ack,
                )
                answer = fetch.answer_for(key)
                answer.acknowledge_error_code = code
                answer.acknowledge_error_message = message

    def _acknowledge(
        self,
        call: Call,
        member_id: str,
        key: ShareKey,
        row: Any,
        limits: Limits,
        after: set[int],
        now_ms: int,
        *,
        renews: bool,
    ) -> tuple[ErrorCode, str | None]:
        """Apply a member's acknowledgements in one partition.

        Add the log of their record to ``after``. Return an error code and its message.
        """
        batches = [
            Acknowledgement(each.first_offset, each.last_offset, each.acknowledge_types)
            for each in row.acknowledgement_batches
        ]
        try:
            self._check_topic(call, key)
            check_acknowledgements(batches)
            if not renews and any(AcknowledgeType.RENEW in b.types for b in batches):
                raise ApiError(
                    ErrorCode.INVALID_REQUEST,
                    "The request does not say that it renews.",
                )
            state = self._states.get(key)
            if state is None or state.share is None:
                raise ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
            had = state.share.has_available()
            changed = state.share.acknowledge(member_id, batches, limits, now_ms)
        except ApiError as error:
            return error.error_code, error.message or None
        for first, last, types in batches:
            if len(types) == 1:
                self.on_acknowledged(types[0], last - first + 1)
            else:
                for kind in types:
                    self.on_acknowledged(kind, 1)
        if changed:
            self._states.changed(key, changed, now_ms)
            after.add(self._states.log_of(key))
        else:
            self._states.watch_locks(key, now_ms)
        # Records were released, or the number of locks is below the limit again.
        if changed or had != state.share.has_available():
            self._available(key, now_ms)
        return ErrorCode.NONE, None

    def _check_topic(self, call: Call, key: ShareKey) -> None:
        """Check that a partition exists, and that the client may read its topic.

        Raises:
            ApiError: UNKNOWN_TOPIC_ID, UNKNOWN_TOPIC_OR_PARTITION,
                TOPIC_AUTHORIZATION_FAILED.
        """
        name = self._reader.name(key.topic_id)
        if name is None:
            raise ApiError(ErrorCode.UNKNOWN_TOPIC_ID)
        if call.access is not None and not call.access.may_read(name):
            raise ApiError(ErrorCode.TOPIC_AUTHORIZATION_FAILED)
        if not self._reader.has_partition(key.topic_id, key.partition):
            raise ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)

    def _release(self, session: ShareSession, now_ms: int) -> None:
        """End a share session, and release the records that its member has acquired."""
        self.sessions.end(session)
        # Also in partitions that the session has forgotten meanwhile.
        for key in self._states.keys_of(session.group_id):
            self._states.release(session.member_id, key, now_ms)

    def _watch_connections(self, now_ms: int) -> None:
        """End share sessions whose connections are closed; repeat this by a timer."""
        for session in self.sessions.all():
            if not self._connections.is_open(session.connection):
                self._release(session, now_ms)
        if len(self.sessions):
            self._timers.schedule(
                "share connections", now_ms + _LOOK_MS, self._watch_connections
            )

    # -- fetches -----------------------------------------------------------------------

    def _attempt(self, fetch: _Fetch, now_ms: int, *, final: bool) -> bool:
        """Acquire records for a ShareFetch; return whether it can be answered now.

        Args:
            final: answer even if fewer than min.bytes were found.
        """
        request, settings = fetch.request, fetch.settings
        left = min(request.max_bytes, self._max_bytes)
        plans: list[_Plan] = []
        found = 0
        for key in fetch.keys:
            try:
                plan = self._plan(
                    fetch, key, settings, left - found, found == 0, now_ms
                )
            except ApiError as error:
                answer = fetch.answer_for(key)
                answer.error_code = error.error_code
                answer.current_leader = LeaderIdAndEpoch(leader_id=-1, leader_epoch=-1)
                answer.error_message = error.message or None
                final = True
                continue
            if plan is not None:
                plans.append(plan)
                found += plan.read.length
                if found >= left:
                    break
        if not final and found < max(1, request.min_bytes):
            return False
        acquired = 0
        most = request.max_records if request.max_records > 0 else 0x7FFF_FFFF
        for plan in plans:
            if acquired >= most:
                break
            acquired += self._acquire(fetch, plan, settings, most - acquired, now_ms)
        return final or acquired > 0

    def _plan(
        self,
        fetch: _Fetch,
        key: ShareKey,
        settings: GroupSettings,
        max_bytes: int,
        is_first: bool,
        now_ms: int,
    ) -> _Plan | None:
        """Read the record batches of a partition in which records can be acquired.

        Return None if nothing can be acquired now.

        Raises:
            ApiError: the error to answer for the partition.
        """
        self._check_topic(fetch.call, key)
        state = self._states.get(key)
        start, end = self._reader.offsets(key.topic_id, key.partition)
        if state is None or state.share is None:
            state = self._begin(key, state, settings, (start, end), now_ms)
            fetch.after.add(self._states.log_of(key))
        share = state.share
        assert share is not None
        if start > share.start_offset and share.move_start(start):
            self._states.changed(key, (), now_ms)
        offset = share.next_fetch_offset(settings.limits)
        if offset is None or offset >= end:
            return None
        read = self._reader.read(
            key,
            offset,
            max_bytes,
            max(1, fetch.request.max_records),
            min_one_batch=is_first,
            read_committed=settings.read_committed,
        )
        return _Plan(key, share, read) if read.batches else None

    def _begin(
        self,
        key: ShareKey,
        state: ShareState | None,
        settings: GroupSettings,
        offsets: tuple[int, int],
        now_ms: int,
    ) -> ShareState:
        """Choose the offset at which a group begins to read a partition.

        share.auto.offset.reset tells how. The offset is written at once, and not with
        the first acknowledgement as by Kafka: otherwise a group with "latest" would
        skip records if its coordinator died before that.
        """
        start, end = offsets
        strategy = settings.auto_offset_reset
        offset = end
        if strategy == "earliest":
            offset = start
        elif strategy != "latest":
            duration_ms = self._duration_ms(strategy) or 0
            offset = self._reader.offset_at(
                key.topic_id, key.partition, now_ms - duration_ms
            )
        epoch = 0 if state is None else state.state_epoch
        return self._states.begin(key, offset, epoch, now_ms)

    def _acquire(
        self,
        fetch: _Fetch,
        plan: _Plan,
        settings: GroupSettings,
        max_records: int,
        now_ms: int,
    ) -> int:
        """Acquire records in one share-partition; return how many."""
        key, share, read = plan
        got, archived = share.acquire(
            fetch.session.member_id,
            read.batches,
            max_records,
            settings.limits,
            now_ms,
            strict=fetch.request.share_acquire_mode == _RECORD_LIMIT,
            aborted=read.aborted,
        )
        if archived:
            self._states.changed(key, archived, now_ms)
        else:
            self._states.watch_locks(key, now_ms)
        if not got:
            return 0
        answer = fetch.answer_for(key)
        answer.records = read.records(got[0].first, got[-1].last)
        answer.acquired_records = [
            AcquiredRecords(
                first_offset=each.first,
                last_offset=each.last,
                delivery_count=each.delivery_count,
            )
            for each in _in_batches(got, read.batches, fetch.request.batch_size)
        ]
        return sum(each.last - each.first + 1 for each in got)

    def _answer(self, fetch: _Fetch) -> None:
        topics: dict[bytes, ShareFetchableTopicResponse] = {}
        for key, answer in fetch.answers.items():
            topic = topics.get(key.topic_id)
            if topic is None:
                topic = topics[key.topic_id] = ShareFetchableTopicResponse(
                    topic_id=key.topic_id, partitions=[]
                )
            topic.partitions.append(answer)
        self._out.answer(
            fetch.call,
            ShareFetchResponse(
                acquisition_lock_timeout_ms=fetch.settings.limits.lock_ms,
                responses=list(topics.values()),
            ),
            tuple(fetch.after),
        )

    # -- fetches that wait -------------------------------------------------------------

    def _park(self, fetch: _Fetch, now_ms: int) -> None:
        for key in fetch.keys:
            self._by_key.setdefault(key, {})[fetch] = None
            row = self._reader.watch(key)
            if row is not None:
                fetch.rows.add(row)
                self._rows[row] = key
                self._by_row.setdefault(row, {})[fetch] = None
        # Look again, but only after watch(): records that were appended before it have
        # caused no notice, and without this look the fetch would not see them.
        if self._attempt(fetch, now_ms, final=False):
            self._end(fetch)
            return

        def expire(at_ms: int) -> None:
            self._attempt_again(fetch, at_ms, final=True)
            self._end(fetch)

        def end_wait() -> None:
            self._end(fetch)

        fetch.call.end_wait = end_wait
        self._timers.schedule(("share fetch", fetch), fetch.deadline_ms, expire)

    def _end(self, fetch: _Fetch) -> None:
        """Answer a waiting ShareFetch with the records acquired so far."""
        self._timers.cancel(("share fetch", fetch))
        for key in fetch.keys:
            _discard(self._by_key, key, fetch)
        for row in fetch.rows:
            _discard(self._by_row, row, fetch)
        fetch.call.end_wait = None
        self._answer(fetch)

    def has_grown(self, row: int) -> None:
        """Note that a log has grown, so that `go_on` tries the fetches waiting for it.

        Args:
            row: the number of the log's entry in shared memory.
        """
        if row in self._by_row:
            self._grown[row] = None

    def has_lost_notices(self) -> None:
        """Note that any log may have grown: messages about growth were lost."""
        self._grown.update(dict.fromkeys(self._by_row))

    def go_on(self, now_ms: int) -> bool:
        """Try again the fetches that wait for logs that grew since the last call.

        Returns:
            Whether any log has grown.
        """
        rows, self._grown = self._grown, {}
        for row in rows:
            waiting = self._by_row.get(row)
            if waiting:
                # Ask for the next notice before looking at the log. In the other order
                # a record that is appended in between would cause no notice.
                self._reader.watch(self._rows[row])
                self._look_at(waiting, now_ms)
        return bool(rows)

    def _available(self, key: ShareKey, now_ms: int) -> None:
        """Have fetches that wait for a share-partition tried again: it has records."""
        waiting = self._by_key.get(key)
        if waiting:
            # Not at once: the caller may be in the middle of a request.
            self._timers.schedule(
                ("share available", key),
                now_ms,
                lambda at_ms: self._look_at(self._by_key.get(key, {}), at_ms),
            )

    def refuse_waiting(self) -> None:
        """Answer all waiting ShareFetch requests; called when the broker stops."""
        for waiting in list(self._by_key.values()):
            for fetch in list(waiting):
                self._end(fetch)

    def _look_at(self, waiting: Mapping[_Fetch, None], now_ms: int) -> None:
        for fetch in list(waiting):
            if fetch.call.answered:
                self._end(fetch)  # an error was sent, because the request met a bug
            elif self._attempt_again(fetch, now_ms, final=False):
                self._end(fetch)

    def _attempt_again(self, fetch: _Fetch, now_ms: int, *, final: bool) -> bool:
        """Repeat `_attempt` for a fetch that has waited: with the settings of now."""
        fetch.settings = self._settings(fetch.session.group_id)
        return self._attempt(fetch, now_ms, final=final)


def _check(request: ShareFetchRequest | ShareAcknowledgeRequest, name: str) -> None:
    """Raise an error if a request does not name its group and its member.

    Raises:
        ApiError: INVALID_REQUEST.
    """
    if not request.group_id:
        raise ApiError(ErrorCode.INVALID_REQUEST, "Invalid group id in the request.")
    if not request.member_id:
        raise ApiError(ErrorCode.INVALID_REQUEST, "Invalid member id in the request.")


def _rotated(keys: list[ShareKey], epoch: int) -> list[ShareKey]:
    """Rotate a session's partitions by its epoch, so that each comes first in turn."""
    if not keys:
        return keys
    first = epoch % len(keys)
    return keys[first:] + keys[:first]


def _discard(
    waiting: dict[Any, dict[_Fetch, None]], name: object, fetch: _Fetch
) -> None:
    fetches = waiting.get(name)
    if fetches is not None:
        fetches.pop(fetch, None)
        if not fetches:
            del waiting[name]


def _in_batches(
    acquired: Sequence[Acquired], batches: Sequence[tuple[int, int]], size: int
) -> list[Acquired]:
    """Split acquired ranges of offsets at ends of record batches.

    Each piece has at least ``size`` offsets, except the last one of a range. If
    ``size`` is 0, nothing is split.
    """
    if size <= 0:
        return list(acquired)
    pieces: list[Acquired] = []
    ends = [last for _, last in batches]
    for each in acquired:
        first = each.first
        for end in ends:
            if first <= end < each.last and end - first + 1 >= size:
                pieces.append(Acquired(first, end, each.delivery_count))
                first = end + 1
        pieces.append(Acquired(first, each.last, each.delivery_count))
    return pieces

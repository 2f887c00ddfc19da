"""Fetches with their sessions and their waiting: what the handler for Fetch does.

A fetch that finds less than min.bytes is parked (see purgatory) and read again when
one of its partitions grows, or when max.wait.ms is over. A plain one is read by the
compiled core (see plain_requests), again and again until it is answered, or not plain
any more: then it is handled here as if it had just come.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from mpbroker.ipc.counters.fetched_bytes import first_word
from mpbroker.ipc.response_parts import FilePart
from mpbroker.protocol.acl import AclOperation
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.fetch import FetchRequest, FetchResponse
from mpbroker.server.fetch.fetch_handler import (
    MayRead,
    Reading,
    SegmentRegion,
    Target,
    full_targets,
    grouped,
    partition_data,
    read_targets,
    session_error,
)
from mpbroker.server.fetch.fetch_session import (
    FINAL_EPOCH,
    INITIAL_EPOCH,
    NO_SESSION,
    FetchSessions,
    SessionEntry,
)
from mpbroker.server.purgatory import Purgatory
from mpbroker.server.request import (
    CLOSE,
    PARKED,
    Deferred,
    Request,
    parse_request,
)

if TYPE_CHECKING:
    from mpbroker.metadata.topics import Topic, TopicRegistry
    from mpbroker.network.request_channel import HandlerEnd
    from mpbroker.server.authorization.authorization import Authorization
    from mpbroker.server.core_cache import PlainRequests
    from mpbroker.server.quotas.client_quotas import ClientQuotas
    from mpbroker.storage.log.log_reader import ReadResult
    from mpbroker.storage.log.partition_log import PartitionLog

# Up to here a copy into the answer is cheaper than another system call for the file.
_SMALL_BYTES: Final = 32 * 1024
# A parked fetch holds a slot, and so it does when its client has gone: answered with
# nothing after this long, a client that asked to wait longer just asks again.
_MAX_WAIT_MS: Final = 60_000
_SESSIONS_FROM: Final = 7
_NONE: Final = ErrorCode.NONE
_DENIED: Final = ErrorCode.TOPIC_AUTHORIZATION_FAILED


class Answer:
    """A fetch's partitions and how its answer is made of what they give."""

    __slots__ = ("again", "base", "full", "session_id", "targets")

    def __init__(
        self, targets: list[Target], session_id: int, base: int, *, full: bool
    ) -> None:
        self.targets = targets
        self.session_id = session_id
        self.base = base  # the session's handle; -1: none
        self.full = full  # name all partitions, not only those that have something new
        # It was executed before: what is noted as told may never have been sent.
        self.again = False


class FetchService:
    """Fetches of one handler process."""

    def __init__(
        self,
        channel: HandlerEnd,
        registry: TopicRegistry,
        log: Callable[[Topic, int], PartitionLog],
        sessions: FetchSessions,
        purgatory: Purgatory,
        fetch_max_bytes: int,
        authorization: Authorization | None = None,
        *,
        handler: int = 0,
        plain: PlainRequests | None = None,
        count_error: Callable[[int, int], None] | None = None,
    ) -> None:
        """Args:
        authorization: says who may read what; None: everybody everything.
        count_error: told of an API's key and each error in an answer.
        """
        self._count_error = count_error
        self._authorization = authorization
        self._channel = channel
        self._registry = registry
        self._log = log
        self._sessions = sessions
        self._purgatory = purgatory
        self._fetch_max_bytes = fetch_max_bytes
        self._fetched_word = first_word(handler)
        self.quotas: ClientQuotas | None = None
        self._plain = plain
        self._parked: dict[int, DelayedPlainFetch] = {}  # by slot
        if plain is not None:
            plain.take_fetches(
                handler, fetch_max_bytes, self.park_plain, self._was_answered
            )

    def handle(self, request: Request) -> list[bytes | FilePart] | Deferred:
        """Answer a fetch now, or park it."""
        message = FetchRequest.decode(request.api_version, request.body)
        self._limit(request, message)
        may_read = access = None
        if self._authorization is not None:
            access = self._authorization.access(request)
            if access is None:
                return CLOSE  # nobody is there to be answered
            may_read = access.may_read
        try:
            answer = self._targets(message, request, may_read)
        except ApiError as error:
            self._count(request, error.error_code)
            response = session_error(error.error_code)
            return _parts(response, request.api_version)
        reading = self._read(message, answer)
        if self._plain is not None and not answer.session_id and not reading.has_error:
            for target in answer.targets:
                if target.log is not None:
                    self._plain.learn_fetch(
                        target.name, target.topic_id, target.partition, target.log
                    )
                    self._plain.allow(
                        access, AclOperation.READ, target.name, target.topic_id
                    )
        if self._is_enough(message, answer, reading):
            return self._respond(request, answer, reading)
        now = time.monotonic_ns()
        deadline = self._deadline_ns(request.slot, message.max_wait_ms, now)
        if deadline <= now:
            return self._respond(request, answer, reading)
        operation = DelayedFetch(self, request, message, answer, deadline)
        self._channel.park(request.slot, deadline)
        self._purgatory.watch(operation)
        # What was appended before our bit was in the row sends no notice.
        if any(operation.has_more(target) for target in answer.targets):
            try:
                reading = self._read(message, answer)
                enough = self._is_enough(message, answer, reading)
            except BaseException:
                self._unpark(operation)  # or it would be answered twice
                raise
            if enough:
                self._unpark(operation)
                return self._respond(request, answer, reading)
        return PARKED

    def _limit(self, request: Request, message: FetchRequest) -> None:
        """Ask for no more than the sender's quota will ever let pass."""
        if self.quotas is not None:
            window = self.quotas.fetch_window(request)
            if window is not None:
                message.max_bytes = min(message.max_bytes, window)
                message.min_bytes = min(message.min_bytes, message.max_bytes)

    def _deadline_ns(self, slot: int, max_wait_ms: int, now_ns: int) -> int:
        """When to answer at the latest: as was said when it was first parked."""
        return self._channel.deadline_ns(slot) or (
            now_ns + min(max_wait_ms, _MAX_WAIT_MS) * 1_000_000
        )

    def park_plain(self, slot: int, max_wait_ms: int, rows: tuple[int, ...]) -> None:
        """Keep a fetch for which the core has found too little."""
        deadline = self._deadline_ns(slot, max_wait_ms, time.monotonic_ns())
        operation = DelayedPlainFetch(self, slot, rows, deadline)
        self._channel.park(slot, deadline)
        self._purgatory.watch(operation)
        assert self._plain is not None
        self._parked[slot] = operation
        self._plain.waiting.update(dict.fromkeys(rows, slot))
        # What was appended before our bit was in the row sends no notice.
        self._purgatory.look_at(operation, rows[0])

    def _was_answered(self, slot: int) -> None:
        """The core has answered a parked fetch, with what it has appended."""
        operation = self._parked[slot]
        self.forget_plain(slot)
        self._purgatory.unwatch(operation)

    def forget_plain(self, slot: int) -> None:
        """It is parked no more: the core must not answer it."""
        operation = self._parked.pop(slot, None)
        if operation is None or self._plain is None:
            return
        waiting = self._plain.waiting
        for row in operation.keys:
            if waiting.get(row) == slot:
                del waiting[row]

    def try_plain(self, slot: int, *, must_answer: bool) -> bool:
        """Answer a parked fetch by the core, or see to it here; False: it waits on."""
        waits = False
        try:
            waits = not self._try_plain(slot, must_answer=must_answer)
        finally:
            if not waits:
                self.forget_plain(slot)
        return not waits

    def _try_plain(self, slot: int, *, must_answer: bool) -> bool:
        assert self._plain is not None
        answered = self._plain.try_fetch(slot, must_answer=must_answer)
        if answered is not None:
            return answered
        self._registry.catch_up()
        request = self.request(slot)
        parts = self.handle(request)
        if parts is PARKED:
            return True  # another operation watches over it now
        self._channel.unpark(slot)
        if isinstance(parts, Deferred):
            self._channel.close_connection(slot)
        else:
            send_parts(self._channel, request, parts)
        return True

    def request(self, slot: int) -> Request:
        """A plain fetch's request as all others are seen."""
        return parse_request(*self._channel.request(slot))

    def _unpark(self, operation: DelayedFetch) -> None:
        self._purgatory.unwatch(operation)
        self._channel.unpark(operation.request.slot)

    def _read(self, message: FetchRequest, answer: Answer) -> Reading:
        limit = min(message.max_bytes, self._fetch_max_bytes)
        first = 0
        if answer.base >= 0 and answer.targets:
            # Clients rotate the partitions of full requests; of a session we must.
            first = message.session_epoch % len(answer.targets)
        return read_targets(answer.targets, message, limit, first)

    def _is_enough(
        self, message: FetchRequest, answer: Answer, reading: Reading
    ) -> bool:
        return (
            reading.bytes_found >= message.min_bytes
            or reading.has_error
            or message.max_wait_ms <= 0
            or not answer.targets
        )

    # -- sessions --------------------------------------------------------------------

    def _targets(
        self, message: FetchRequest, request: Request, may_read: MayRead | None
    ) -> Answer:
        version = request.api_version
        session_id, epoch = message.session_id, message.session_epoch
        if version < _SESSIONS_FROM or epoch in (FINAL_EPOCH, INITIAL_EPOCH):
            if version >= _SESSIONS_FROM and session_id != NO_SESSION:
                self._sessions.close(session_id)
            targets = full_targets(
                message, version, self._registry, self._log, may_read
            )
            created = NO_SESSION
            if version >= _SESSIONS_FROM and epoch == INITIAL_EPOCH:
                created = self._create(targets, uses_ids=version >= 13)
            return Answer(targets, created, -1, full=True)
        claimed = self._channel.session_claim(request.slot)
        # First: who is killed behind the claim has said whose it is.
        self._channel.set_session_claim(request.slot, epoch + 1)
        error, base = self._sessions.claim(
            session_id, epoch, time.monotonic_ns(), claimed, uses_ids=version >= 13
        )
        if error:
            raise ApiError(error, f"fetch session {session_id} at epoch {epoch}")
        answer = self._continue(message, version, session_id, base, may_read)
        answer.again = claimed == epoch + 1
        return answer

    def _create(self, targets: list[Target], *, uses_ids: bool) -> int:
        entries = []
        for target in targets:
            if target.error or target.log is None:
                return NO_SESSION  # it must go on naming what does not exist yet
            entries.append(_entry(target))
        return self._sessions.create(entries, time.monotonic_ns(), uses_ids=uses_ids)

    def _continue(
        self,
        message: FetchRequest,
        version: int,
        session_id: int,
        base: int,
        may_read: MayRead | None,
    ) -> Answer:
        entries = self._sessions.entries(base)
        if message.topics or message.forgotten_topics_data:
            entries = self._changed(message, version, session_id, entries, may_read)
            if not entries:
                self._sessions.close(session_id)
                return Answer([], NO_SESSION, -1, full=True)
            if not self._sessions.store(session_id, base, entries):
                self._sessions.close(session_id)
                raise ApiError(
                    ErrorCode.FETCH_SESSION_ID_NOT_FOUND,
                    "it has grown too large, or has ended",
                )
        targets = []
        for index, entry in enumerate(entries):
            found = self._registry.partition_by_row(entry.row)
            if found is None:  # deleted: a full request gets the error for it
                self._sessions.close(session_id)
                raise ApiError(
                    ErrorCode.FETCH_SESSION_ID_NOT_FOUND, "a topic of it is gone"
                )
            topic, partition, _ = found
            allowed = may_read is None or may_read(topic.name)
            targets.append(
                Target(
                    topic.name,
                    topic.topic_id,
                    partition,
                    entry.fetch_offset,
                    entry.max_bytes,
                    entry.leader_epoch,
                    self._log(topic, partition) if allowed else None,
                    _NONE if allowed else _DENIED,
                    entry=index,
                )
            )
        return Answer(targets, session_id, base, full=False)

    def _changed(
        self,
        message: FetchRequest,
        version: int,
        session_id: int,
        entries: list[SessionEntry],
        may_read: MayRead | None,
    ) -> list[SessionEntry]:
        """Apply what a request adds, moves and forgets."""
        by_row = {entry.row: entry for entry in entries}
        for forgotten in message.forgotten_topics_data:
            topic = (
                self._registry.topic_by_id(forgotten.topic_id)
                if version >= 13
                else self._registry.topic(forgotten.topic)
            )
            for partition in forgotten.partitions:
                if topic is not None and 0 <= partition < len(topic.partitions):
                    by_row.pop(topic.partitions[partition], None)
        for target in full_targets(
            message, version, self._registry, self._log, may_read
        ):
            if target.error or target.log is None:
                self._sessions.close(session_id)
                raise ApiError(
                    ErrorCode.FETCH_SESSION_ID_NOT_FOUND,
                    "it names what does not exist; a full request says what",
                )
            row = target.log.row.index
            known = by_row.get(row)
            entry = _entry(target)
            if known is not None:
                entry = entry._replace(
                    sent_high_watermark=known.sent_high_watermark,
                    sent_log_start=known.sent_log_start,
                )
            by_row[row] = entry
        return list(by_row.values())

    # -- answers -----------------------------------------------------------------------

    def _respond(
        self, request: Request, answer: Answer, reading: Reading
    ) -> list[bytes | FilePart]:
        quotas = self.quotas
        if quotas is not None and not quotas.charge_fetch(request, reading.bytes_found):
            return self._throttled(request, answer)
        answers = []
        if answer.full and answer.session_id:
            self._note_all_sent(answer.session_id, reading)
        for target, result, error in reading.results:
            if error:
                self._count(request, error)
            if not answer.full and not self._is_news(answer, target, result, error):
                continue
            answers.append((target, partition_data(target, result, error, read_small)))
            if result is not None and target.log is not None:
                row = target.log.row
                row.words[self._fetched_word + row.index] += result.length
        response = FetchResponse(
            session_id=answer.session_id, responses=grouped(answers)
        )
        parts = _parts(response, request.api_version)
        if quotas is not None:
            quotas.charge_rest_of_fetch(request, parts, reading.bytes_found)
        return parts

    def _count(self, request: Request, error: ErrorCode) -> None:
        if self._count_error is not None:
            self._count_error(request.api_key, error)

    def _throttled(self, request: Request, answer: Answer) -> list[bytes | FilePart]:
        """Nothing, and for how long to be quiet; a session that exists goes on."""
        session_id = answer.session_id
        if answer.full and session_id:
            self._sessions.close(session_id)
            session_id = NO_SESSION
        response = FetchResponse(
            throttle_time_ms=request.throttle_ms, session_id=session_id, responses=[]
        )
        return _parts(response, request.api_version)

    def _note_all_sent(self, session_id: int, reading: Reading) -> None:
        """The answer that starts a session: the next names only what is new then."""
        base = self._sessions.find(session_id)
        if base is None:
            return
        # In the order in which the session's entries were made.
        for index, (_, result, error) in enumerate(reading.results):
            if result is not None:
                high_watermark, log_start = (
                    result.high_watermark,
                    result.log_start_offset,
                )
                self._sessions.note_sent(
                    session_id, base, index, high_watermark, log_start, error
                )

    def _is_news(
        self,
        answer: Answer,
        target: Target,
        result: ReadResult | None,
        error: ErrorCode,
    ) -> bool:
        """Whether an incremental answer must name this partition."""
        high_watermark = result.high_watermark if result is not None else -1
        log_start = result.log_start_offset if result is not None else -1
        base = answer.base
        sent = self._sessions.sent(base, target.entry)
        is_same = sent == (high_watermark, log_start, error)
        if is_same and not error and not answer.again:
            return result is not None and result.length > 0
        self._sessions.note_sent(
            answer.session_id, base, target.entry, high_watermark, log_start, error
        )
        return True

    def complete(self, operation: DelayedFetch, reading: Reading) -> None:
        """Answer a parked fetch."""
        request = operation.request
        self._channel.unpark(request.slot)
        parts = self._respond(request, operation.answer, reading)
        send_parts(self._channel, request, parts)

    def read_again(self, operation: DelayedFetch) -> Reading:
        return self._read(operation.message, operation.answer)

    def is_enough(self, operation: DelayedFetch, reading: Reading) -> bool:
        return self._is_enough(operation.message, operation.answer, reading)


class DelayedPlainFetch:
    """A fetch that waits for more, and that the core may answer."""

    may_end_early = True

    def __init__(
        self, service: FetchService, slot: int, rows: Iterable[int], deadline_ns: int
    ) -> None:
        self._service = service
        self._slot = slot
        self.keys = rows
        self.deadline_ns = deadline_ns
        self.done = False

    @property
    def request(self) -> Request:
        return self._service.request(self._slot)

    def try_complete(self, row: int) -> bool:
        return self._service.try_plain(self._slot, must_answer=False)

    def expire(self) -> None:
        self._service.try_plain(self._slot, must_answer=True)


class DelayedFetch:
    """A fetch that waits for more."""

    may_end_early = True

    def __init__(
        self,
        service: FetchService,
        request: Request,
        message: FetchRequest,
        answer: Answer,
        deadline_ns: int,
    ) -> None:
        self._service = service
        self.request = request
        self.message = message
        self.answer = answer
        self.deadline_ns = deadline_ns
        self.done = False
        self._by_row = {
            target.log.row.index: target
            for target in answer.targets
            if target.log is not None
        }
        self.keys: Iterable[int] = self._by_row.keys()

    def has_more(self, target: Target) -> bool:
        """Whether there is anything to read, or to say, about a partition."""
        log = target.log
        return log is not None and (
            log.row.log_end_offset > target.fetch_offset or log.row.status != _ONLINE
        )

    def try_complete(self, row: int) -> bool:
        if not self.has_more(self._by_row[row]):
            return False
        reading = self._service.read_again(self)
        if not self._service.is_enough(self, reading):
            return False
        self._service.complete(self, reading)
        return True

    def expire(self) -> None:
        self._service.complete(self, self._service.read_again(self))


_ONLINE: Final = 1  # RowStatus.ONLINE, as an int for the hot path


def _entry(target: Target) -> SessionEntry:
    assert target.log is not None
    return SessionEntry(
        target.log.row.index,
        target.fetch_offset,
        target.max_bytes,
        target.leader_epoch,
    )


def read_small(result: ReadResult) -> bytes | None:
    """The records themselves if they are few; None if the file should be sent."""
    if result.length > _SMALL_BYTES:
        return None
    try:
        # Where descriptors lack, a later partition's read closes the earlier ones'
        # files; and their numbers go to others, perhaps to another topic's.
        if os.fstat(result.fd).st_ino != result.segment_inode:
            return None
        records = os.pread(result.fd, result.length, result.position)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        return None
    return records if len(records) == result.length else None


def _parts(response: FetchResponse, version: int) -> list[bytes | FilePart]:
    parts: list[bytes | FilePart] = []
    for part in response.encode_parts(version):
        if isinstance(part, SegmentRegion):
            parts.append(
                FilePart(part.path, part.inode, part.position, part.size_in_bytes)
            )
        else:
            assert isinstance(part, bytes)
            parts.append(part)
    return parts


def send_parts(
    channel: HandlerEnd, request: Request, parts: list[bytes | FilePart]
) -> None:
    """Frame and send an answer in parts; as plain bytes if it is one part."""
    framed = request.frame_parts(parts)
    if len(framed) == 1 and isinstance(framed[0], bytes):
        channel.send_bytes(request.slot, framed[0])
    else:
        channel.send_parts(request.slot, framed)


__all__ = ["DelayedFetch", "FetchService", "send_parts"]

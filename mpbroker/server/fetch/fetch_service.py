"""Execute Fetch requests: sessions, reads, and waiting for more records.

A fetch that finds less than min.bytes is parked (kept unanswered) in the purgatory. Its
partitions are read again when one of them grows, and it is answered at max.wait.ms at
the latest. The fetches that the compiled core reads are parked by core_fetches.py.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Final

from mpbroker.base.file_id import file_id
from mpbroker.ipc.counters.fetched_bytes import first_word
from mpbroker.ipc.response_parts import FilePart
from mpbroker.ipc.session_layout import NO_ROW
from mpbroker.protocol.acl import AclOperation
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.message import SizedRegion
from mpbroker.protocol.messages.fetch import FetchRequest, FetchResponse
from mpbroker.server.fetch.core_fetches import CoreFetches
from mpbroker.server.fetch.fetch_handler import (
    MayRead,
    Reading,
    SegmentRegion,
    Target,
    find_log,
    full_targets,
    grouped,
    partition_data,
    read_targets,
    session_error,
)
from mpbroker.server.fetch.fetch_session import (
    FINAL_EPOCH,
    INITIAL_EPOCH,
    NO_ID,
    NO_SESSION,
    FetchSessions,
    SessionEntry,
    SessionTopic,
    SessionTopics,
)
from mpbroker.server.request import CLOSE, PARKED, Deferred, Request

if TYPE_CHECKING:
    from mpbroker.base.storage_errors import RemoteWait
    from mpbroker.metadata.topics import Topic
    from mpbroker.network.request_channel import HandlerEnd
    from mpbroker.server.authorization.authorization import Access
    from mpbroker.server.quotas.client_quotas import ClientQuotas
    from mpbroker.server.service_parts import ServiceParts
    from mpbroker.storage.log.log_reader import ReadResult

# Up to here a copy into the answer is cheaper than another system call for the file.
SMALL_BYTES: Final = 32 * 1024
# A parked fetch holds a slot until the kernel says that its client has gone. If the
# client's machine has lost its power, that takes long. So a fetch is answered with
# nothing after ten minutes; a client that asked to wait longer asks again. Kafka closes
# its connection then (connections.max.idle.ms), whatever waits there. If others need
# the slot, the wait ends before that (network/waits.py).
_MAX_WAIT_MS: Final = 600_000
_SESSIONS_FROM: Final = 7
_NONE: Final = ErrorCode.NONE
_DENIED: Final = ErrorCode.TOPIC_AUTHORIZATION_FAILED


class Answer:
    """Holds the partitions that a fetch reads, and which of them the answer names."""

    __slots__ = ("again", "base", "begun_ns", "full", "session_id", "targets")

    def __init__(
        self, targets: list[Target], session_id: int, base: int, *, full: bool
    ) -> None:
        self.targets = targets
        self.session_id = session_id
        self.base = base  # the session's handle; -1: none
        self.full = full  # name all partitions, not only those that have something new
        # It was executed before: what is noted as sent may never have been sent.
        self.again = False
        self.begun_ns = time.monotonic_ns()


class FetchService:
    """Executes the Fetch requests of one handler process.

    Args:
        parts: the objects that it shares with the service of Produce.
        sessions: the fetch sessions of all handlers.
        max_bytes: fetch.max.bytes.
        quotas: charge clients for what they fetch; None: nothing is charged.
        handler: this process's id.
        remote_wait_ms: remote.fetch.max.wait.ms.
        is_behind: says whether logs of shared topics may lack what was acknowledged
            before a time (CLOCK_MONOTONIC); None: the broker is in no cluster.
    """

    def __init__(
        self,
        parts: ServiceParts,
        sessions: FetchSessions,
        max_bytes: int,
        quotas: ClientQuotas | None = None,
        *,
        handler: int = 0,
        remote_wait_ms: int = 500,
        is_behind: Callable[[int], bool] | None = None,
    ) -> None:
        self._is_behind = is_behind
        self._remote_wait_ms = remote_wait_ms
        self._parts = parts
        self._channel = parts.channel
        self._registry = parts.registry
        self._log = parts.log
        self._purgatory = parts.purgatory
        self._sessions = sessions
        self._max_bytes = max_bytes
        self._quotas = quotas
        self._fetched_word = first_word(handler)
        parts.core_cache.execute_fetches(handler, max_bytes, CoreFetches(parts, self))

    def handle(self, request: Request) -> list[bytes | FilePart] | Deferred:
        """Answer a fetch now, or keep it until there are enough records.

        Returns:
            The answer in parts, or a Deferred. CLOSE if the client has disconnected.
        """
        message = FetchRequest.decode(request.api_version, request.body)
        self._limit(request, message)
        authorization = self._parts.authorization
        may_read = access = None
        if authorization is not None:
            access = authorization.access(request)
            if access is None:
                return CLOSE  # its client has gone
            may_read = access.may_read
        try:
            answer = self._targets(message, request, may_read)
        except ApiError as error:
            self._parts.count_error(request.api_key, error.error_code)
            response = session_error(error.error_code)
            return _parts(response, request.api_version)
        reading = self._read(message, answer)
        if not answer.session_id and not reading.has_error:
            self._teach_core(answer.targets, access)
        if self._is_enough(message, answer, reading):
            return self._respond(request, answer, reading)
        now = time.monotonic_ns()
        wait_ms = self._remote_wait_ms if reading.pending else message.max_wait_ms
        deadline = self.deadline_ns(request.slot, wait_ms, now)
        if deadline <= now:
            return self._respond(request, answer, reading)
        return self._park(request, message, answer, deadline, reading)

    def _teach_core(self, targets: list[Target], access: Access | None) -> None:
        """Let the C core, instead of Python, execute fetches like this one from now on.

        It may read these partitions, for this sender.
        """
        core_cache = self._parts.core_cache
        for target in targets:
            if target.log is not None:
                name, topic_id = target.name, target.topic_id
                core_cache.learn_fetch(name, topic_id, target.partition, target.log)
                core_cache.allow(access, AclOperation.READ, name, topic_id)

    def _park(
        self,
        request: Request,
        message: FetchRequest,
        answer: Answer,
        deadline: int,
        reading: Reading,
    ) -> list[bytes | FilePart] | Deferred:
        """Keep a fetch until it has enough records, and return PARKED.

        Return the fetch's answer instead, if enough records came meanwhile.
        """
        operation = DelayedFetch(self, request, message, answer, deadline)
        operation.pending = reading.pending
        self._channel.park(request.slot, deadline)
        self._purgatory.watch(operation)
        # An append sends notices to the handlers whose bits it finds in the row. Look
        # again now that watch() has set ours: what came before it sends no notice.
        if any(operation.has_more(target) for target in answer.targets):
            try:
                reading = self._read(message, answer)
                enough = self._is_enough(message, answer, reading)
            except BaseException:
                self._unpark(operation)  # the dispatcher answers the bug: only once
                raise
            if enough:
                self._unpark(operation)
                return self._respond(request, answer, reading)
        return PARKED

    def _limit(self, request: Request, message: FetchRequest) -> None:
        """Lower the request's max_bytes and min_bytes to the sender's quota.

        A fetch of more bytes could never be answered with records.
        """
        if self._quotas is not None:
            window = self._quotas.fetch_window(request)
            if window is not None:
                message.max_bytes = min(message.max_bytes, window)
                message.min_bytes = min(message.min_bytes, message.max_bytes)

    def deadline_ns(self, slot: int, max_wait_ms: int, now_ns: int) -> int:
        """Return the latest time at which a fetch must be answered (CLOCK_MONOTONIC).

        If a handler had parked the fetch and has died, return the deadline that it had
        set. Return ``now_ns`` if the request must not wait (network/waits.py).
        """
        if self._channel.must_end(slot):
            return now_ns
        return self._channel.deadline_ns(slot) or (
            now_ns + min(max_wait_ms, _MAX_WAIT_MS) * 1_000_000
        )

    def _unpark(self, operation: DelayedFetch) -> None:
        self._purgatory.unwatch(operation)
        self._channel.unpark(operation.request.slot)

    def _read(self, message: FetchRequest, answer: Answer) -> Reading:
        limit = min(message.max_bytes, self._max_bytes)
        first = 0
        if answer.base >= 0 and answer.targets:
            # Clients rotate the partitions of full requests; those of a session are
            # rotated here, so that the last ones get their bytes, too.
            first = message.session_epoch % len(answer.targets)
        if self._is_behind is None:
            return read_targets(answer.targets, message, limit, first)
        is_behind = partial(self._is_behind, answer.begun_ns)
        return read_targets(answer.targets, message, limit, first, is_behind)

    def _is_enough(
        self, message: FetchRequest, answer: Answer, reading: Reading
    ) -> bool:
        # What comes from the remote store is waited for, whatever min.bytes says.
        found, wanted = reading.bytes_found, message.min_bytes
        return (
            (found > 0 if reading.pending else found >= wanted)
            or reading.has_error
            or message.max_wait_ms <= 0
            or all(target.log is None for target in answer.targets)
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
        # Before the session is claimed: if this process is killed after the claim, the
        # next execution sees that the claimed epoch is this request's.
        self._channel.set_session_claim(request.slot, epoch + 1)
        error, base = self._sessions.claim(
            session_id, epoch, time.monotonic_ns(), claimed, uses_ids=version >= 13
        )
        if error:
            raise ApiError(error, f"fetch session {session_id} at epoch {epoch}")
        answer = Answer([], session_id, base, full=False)
        answer.again = claimed == epoch + 1
        if message.topics or message.forgotten_topics_data:
            self._change(message, version, answer, may_read)
        entries = self._sessions.entries(base)
        if not entries:
            self._sessions.close(session_id)
            return Answer([], NO_SESSION, -1, full=True)
        answer.targets = [
            self._target_of(answer, index, entry, may_read)
            for index, entry in enumerate(entries)
        ]
        return answer

    def _create(self, targets: list[Target], *, uses_ids: bool) -> int:
        topics = SessionTopics()
        entries = [self._entry(target, topics, uses_ids=uses_ids) for target in targets]
        now = time.monotonic_ns()
        return self._sessions.create(entries, topics, now, uses_ids=uses_ids)

    def _entry(
        self, target: Target, topics: SessionTopics, *, uses_ids: bool
    ) -> SessionEntry:
        topic = SessionTopic(target.name, target.topic_id if uses_ids else NO_ID)
        log = target.log
        return SessionEntry(
            NO_ROW if log is None else self._registry.row_id(log.row.index),
            target.fetch_offset,
            target.max_bytes,
            target.leader_epoch,
            named=topics.named(topic, target.partition),
        )

    def _target_of(
        self, answer: Answer, index: int, entry: SessionEntry, may_read: MayRead | None
    ) -> Target:
        """Find the partition of a session's entry, or the error that it gets."""
        found = self._registry.partition_by_row_id(entry.row_id)
        if found is not None:
            topic: Topic | None = found.topic
            name, topic_id, unknown = found.topic.name, found.topic.topic_id, _NONE
        else:
            name, topic_id = known = self._sessions.topic(answer.base, entry.place)
            topic, unknown = self._look_for(known, entry.partition)
            if topic is not None:
                name, topic_id = topic.name, topic.topic_id
        if may_read is not None and name and not may_read(name):
            topic, unknown = None, _DENIED
        log, error = find_log(topic, entry.partition, unknown, self._log)
        if found is None and log is not None:
            row_id = self._registry.row_id(log.row.index)
            self._sessions.note_row(answer.session_id, answer.base, index, row_id)
        return Target(
            name,
            topic_id,
            entry.partition,
            entry.fetch_offset,
            entry.max_bytes,
            entry.leader_epoch,
            log,
            error,
            entry=index,
        )

    def _look_for(
        self, known: SessionTopic, partition: int
    ) -> tuple[Topic | None, ErrorCode]:
        """Look again for a topic that did not exist, or that was deleted.

        Returns:
            The topic and NONE; or None and the error that tells what is wrong, as in
            Kafka: UNKNOWN_TOPIC_ID if no topic has had this id,
            INCONSISTENT_TOPIC_ID if another topic has the name of the deleted one.
        """
        named = self._registry.topic(known.name)
        if known.topic_id == NO_ID:
            return named, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        topic = self._registry.topic_by_id(known.topic_id)
        if topic is not None:
            return topic, _NONE
        if not known.name:
            return None, ErrorCode.UNKNOWN_TOPIC_ID
        if named is not None and partition < len(named.partitions):
            return None, ErrorCode.INCONSISTENT_TOPIC_ID
        return None, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION

    def _change(
        self,
        message: FetchRequest,
        version: int,
        answer: Answer,
        may_read: MayRead | None,
    ) -> None:
        """Make the changes to a session that a request asks for.

        A request adds partitions, changes fetch offsets, and forgets partitions.

        Raises:
            ApiError: FETCH_SESSION_ID_NOT_FOUND if the session has grown too large, or
                has ended.
        """
        uses_ids = version >= 13
        sessions, base = self._sessions, answer.base
        topics = sessions.topics(base)
        entries = {entry.named: entry for entry in sessions.entries(base)}
        for forgotten in message.forgotten_topics_data:
            topic = (
                SessionTopic("", forgotten.topic_id)
                if uses_ids
                else SessionTopic(forgotten.topic, NO_ID)
            )
            for partition in forgotten.partitions:
                entries.pop(topics.find(topic, partition), None)
        for target in full_targets(
            message, version, self._registry, self._log, may_read
        ):
            entry = self._entry(target, topics, uses_ids=uses_ids)
            known = entries.get(entry.named)
            if known is not None:
                entry = entry._replace(
                    sent_high_watermark=known.sent_high_watermark,
                    sent_log_start=known.sent_log_start,
                )
            entries[entry.named] = entry
        stored = sessions.store(answer.session_id, base, list(entries.values()), topics)
        if not stored:
            sessions.close(answer.session_id)
            raise ApiError(
                ErrorCode.FETCH_SESSION_ID_NOT_FOUND,
                "it has grown too large, or has ended",
            )

    # -- answers -----------------------------------------------------------------------

    def _respond(
        self, request: Request, answer: Answer, reading: Reading
    ) -> list[bytes | FilePart]:
        quotas = self._quotas
        if quotas is not None and not quotas.charge_fetch(request, reading.bytes_found):
            return self._throttled(request, answer)
        if reading.pending:
            reading.results = [_given_up(each, reading) for each in reading.results]
        answers = []
        if answer.full and answer.session_id:
            self._note_all_sent(answer.session_id, reading)
        for target, result, error in reading.results:
            if error:
                self._parts.count_error(request.api_key, error)
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

    def _throttled(self, request: Request, answer: Answer) -> list[bytes | FilePart]:
        """Return an answer without records, which has the throttle time.

        Close the fetch session if this request began it. An older session stays.
        """
        session_id = answer.session_id
        if answer.full and session_id:
            self._sessions.close(session_id)
            session_id = NO_SESSION
        response = FetchResponse(
            throttle_time_ms=request.throttle_ms, session_id=session_id, responses=[]
        )
        return _parts(response, request.api_version)

    def _note_all_sent(self, session_id: int, reading: Reading) -> None:
        """Store the offsets and errors that a session's first answer has.

        Later answers name only the partitions for which these have changed, or for
        which there are records.
        """
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
        """Return whether a session's later answer must name a partition.

        It must if there are records or an error, or if the high watermark or the log
        start has changed since the session's last answer. Store the values that have
        changed.
        """
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
        """Send the answer to a fetch that has waited."""
        request = operation.request
        self._channel.unpark(request.slot)
        parts = self._respond(request, operation.answer, reading)
        self.send(request, parts)

    def send(self, request: Request, parts: list[bytes | FilePart]) -> None:
        send_parts(self._channel, request, parts)

    def read_again(self, operation: DelayedFetch) -> Reading:
        return self._read(operation.message, operation.answer)

    def is_enough(self, operation: DelayedFetch, reading: Reading) -> bool:
        return self._is_enough(operation.message, operation.answer, reading)


class DelayedFetch:
    """Keeps a fetch that waits until its partitions have more records."""

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
        self.slot = request.slot
        self.message = message
        self.answer = answer
        self.deadline_ns = deadline_ns
        self.done = False
        self.pending: dict[int, RemoteWait] = {}  # as of the last reading
        self._by_row = {
            target.log.row.index: target
            for target in answer.targets
            if target.log is not None
        }
        self.keys: Iterable[int] = self._by_row.keys()

    def has_more(self, target: Target) -> bool:
        """Return whether a partition has more records for this fetch, or is offline."""
        log = target.log
        return log is not None and (
            log.row.log_end_offset > target.fetch_offset or log.row.status != _ONLINE
        )

    def try_complete(self, row: int) -> bool:
        if not self.has_more(self._by_row[row]):
            return False
        wait = self.pending.get(row)
        if wait is not None and not wait.is_over():
            return False  # the notice was of an append
        reading = self._service.read_again(self)
        self.pending = reading.pending
        if not self._service.is_enough(self, reading):
            return False
        self._service.complete(self, reading)
        return True

    def expire(self) -> None:
        self._service.complete(self, self._service.read_again(self))


def _given_up(
    found: tuple[Target, ReadResult | None, ErrorCode], reading: Reading
) -> tuple[Target, ReadResult | None, ErrorCode]:
    """Return a partition's result, or an error if its remote segment cannot be read.

    Args:
        found: the partition, its result and its error.
        reading: says for which partitions the remote store was asked.
    """
    target, _, error = found
    wait = None if target.log is None else reading.pending.get(target.log.row.index)
    if error or wait is None or not wait.failure():
        return found
    return target, None, ErrorCode.KAFKA_STORAGE_ERROR


_ONLINE: Final = 1  # RowStatus.ONLINE, as an int for the hot path


def read_small(result: ReadResult) -> bytes | None:
    """Return the records that a read has found as bytes, if they are at most 32 KiB.

    Return None if they are more, or cannot be read by this process. Then the processor
    sends the range of the file.
    """
    if result.length > SMALL_BYTES:
        return None
    try:
        # Where descriptors lack, the read of a later partition closes the files of the
        # earlier ones, and their numbers go to other files, perhaps of another topic.
        if file_id(result.fd) != result.segment_id:
            return None
        records = os.pread(result.fd, result.length, result.position)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        return None
    return records if len(records) == result.length else None


def _parts(response: FetchResponse, version: int) -> list[bytes | FilePart]:
    return file_parts(response.encode_parts(version))


def file_parts(encoded: Iterable[bytes | SizedRegion]) -> list[bytes | FilePart]:
    """Return an encoded answer's parts; a file's range takes the place of its records.

    The network process sends that range from the page cache.
    """
    parts: list[bytes | FilePart] = []
    for part in encoded:
        if isinstance(part, SegmentRegion):
            parts.append(
                FilePart(part.path, part.file_id, part.position, part.size_in_bytes)
            )
        else:
            assert isinstance(part, bytes)
            parts.append(part)
    return parts


def send_parts(
    channel: HandlerEnd, request: Request, parts: list[bytes | FilePart]
) -> None:
    """Send an answer in parts, with size and header; send a single part as bytes."""
    framed = request.frame_parts(parts)
    if len(framed) == 1 and isinstance(framed[0], bytes):
        channel.send_bytes(request.slot, framed[0])
    else:
        channel.send_parts(request.slot, framed)


__all__ = ["DelayedFetch", "FetchService", "file_parts", "send_parts"]

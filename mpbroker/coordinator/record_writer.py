"""Empty the outbox: append its records, sync them, then send its answers.

All promises to clients depend on this order:

    1. append the records, one batch to each log
    2. call the functions that wait for an append (Outbox.once_appended): they let other
       processes see what the records say
    3. append markers, of transactions whose end is on disk since an earlier flush
    4. send the answers and call the steps whose records are on disk, or let them wait

If the process is killed between two of these steps, its successor finds in the logs
everything that a client or another process can have seen. A change whose record was not
appended has not happened: no client was answered, and no other process saw it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Final, cast

from mpbroker.base.logger import get_logger
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.coordinator.coordinator_logs import CoordinatorLogs
from mpbroker.coordinator.durability import Awaited, Durability
from mpbroker.coordinator.outbox import Answer, Markers, Outbox, Step
from mpbroker.coordinator.repeated_calls import RepeatedCalls
from mpbroker.coordinator.transactions.transaction_markers import MarkerWriter
from mpbroker.coordinator.written_log import WrittenLog
from mpbroker.metadata.topic_names import TopicPartition
from mpbroker.network.request_channel import HandlerEnd
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError, ProtocolError
from mpbroker.server.errors import AuthorizerError
from mpbroker.server.fetch.fetch_service import file_parts, send_parts
from mpbroker.server.group_commit import GroupCommit
from mpbroker.server.quotas.client_quotas import with_throttle
from mpbroker.server.request import Request
from mpbroker.storage.log.disk_sync import DiskSync

if TYPE_CHECKING:
    from mpbroker.protocol.messages.share_fetch import ShareFetchResponse

_LOG = get_logger(__name__)

# How long a batch may grow while earlier ones are synced: a sync takes 1 to 5 ms.
HOLD_NS: Final = 2_000_000


class Syncs(NamedTuple):
    """Objects that force logs to disk, and a function that wakes waiting fetches."""

    disk: DiskSync
    commit: GroupCommit
    durability: Durability
    grown: Callable[[WrittenLog], object]  # wakes the fetches that wait for a log


class Replies:
    """Sends answers to their connections.

    Args:
        answer_error: makes an answer's body from an error code; None if the API has no
            field for it.
        repeated: gets the answers that equal requests are given, too.
        refusal: the error if records could not be written.
    """

    def __init__(
        self,
        channel: HandlerEnd,
        answer_error: Callable[[Request, ErrorCode], bytes | None],
        repeated: RepeatedCalls,
        refusal: ErrorCode = ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ) -> None:
        self._channel = channel
        self._answer_error = answer_error
        self._repeated = repeated
        self._refusal = refusal

    def send(self, answer: Answer) -> None:
        request: Request = answer.call.request
        try:
            if answer.call.amend is not None:
                answer.call.amend(answer.response)
            if answer.response.api_key is ApiKey.SHARE_FETCH:
                self._send_in_parts(answer, request)
                return
            body = answer.response.encode(request.api_version)
            frame = request.frame(with_throttle(request, body))
            if answer.call.again is not None:
                self._repeated.keep(answer.call, frame)
            self._channel.send_bytes(request.slot, frame)
        except (ProtocolError, OverflowError):
            # A bug of ours, or the answer is larger than the memory for all answers.
            _LOG.exception("an answer of the coordinator cannot be sent")
            self._channel.close_connection(request.slot)
        except AuthorizerError:
            _LOG.exception("an answer cannot be given: the authorizer has failed")
            self._channel.close_connection(request.slot)

    def _send_in_parts(self, answer: Answer, request: Request) -> None:
        """Send a ShareFetch answer whose records are in log files.

        The process that owns the connection sends them from the files.
        """
        response = cast("ShareFetchResponse", answer.response)
        response.throttle_time_ms = request.throttle_ms
        parts = file_parts(response.encode_parts(request.api_version))
        send_parts(self._channel, request, parts)

    def refuse(self, answer: Answer) -> None:
        """Send an error instead: the records could not be synced."""
        request: Request = answer.call.request
        body = self._answer_error(request, self._refusal)
        if body is not None:
            self._channel.send_bytes(request.slot, request.frame(body))
        elif answer.refuse(self._refusal):
            self.send(answer)
        else:
            self._channel.close_connection(request.slot)

    def flush(self) -> None:
        """Give the answers to the processes that send them, before this turn ends."""
        self._channel.flush()


class RecordWriter:
    """Appends the outbox's records, and sends its answers when these are on disk.

    The outbox has what the state machines want to be written and sent.

    Args:
        lost: called with the number of a log that cannot be written or synced.
    """

    def __init__(
        self,
        outbox: Outbox,
        logs: CoordinatorLogs,
        markers: MarkerWriter,
        syncs: Syncs,
        replies: Replies,
        now_ms: Callable[[], int],
        lost: Callable[[int], None],
    ) -> None:
        self._out = outbox
        self._logs = logs
        self._markers = markers
        self._disk = syncs.disk
        self._durability = syncs.durability
        self._replies = replies
        self._now_ms = now_ms
        self._lost = lost
        # Answers whose records are held back.
        self._held: list[Answer] = []
        # When the first record was held back, in ns of the monotonic clock; 0: none is.
        self._held_since_ns = 0

    @property
    def holds_answers(self) -> bool:
        """Whether answers wait for records that are held back."""
        return bool(self._held)

    @property
    def holds_records(self) -> bool:
        """Whether records are held back while others are synced, see HOLD_NS."""
        return self._held_since_ns > 0

    def flush(self, *, may_hold: bool) -> None:
        """Append all waiting records; send answers and run steps that need not wait.

        The other answers and steps follow when their logs are on disk. The module's
        docstring has the order.

        Args:
            may_hold: while earlier records are being synced, new records may wait up
                to HOLD_NS, with the answers that depend on them. They then share one
                sync.
        """
        # Repeated, because a step that need not wait may add to the outbox.
        while (self._out or self._held) and self._flush_once(may_hold=may_hold):
            pass

    def _flush_once(self, *, may_hold: bool) -> bool:
        """Append the waiting records and send answers, once, as ``flush`` does.

        Return False if the records are kept back, to share a later sync.
        """
        out, logs = self._out, self._logs
        if may_hold and self._holds_back():
            self._send_what_rests_on_nothing()
            return False
        now_ms = self._now_ms()
        for number, records in out.take_records().items():
            try:
                logs.append(number, records, now_ms)
            except ApiError as error:
                self._cannot_write(number, error)
        for number, transactional in out.take_transactional().items():
            try:
                logs.append_transactional(number, transactional, now_ms)
            except ApiError as error:
                self._cannot_write(number, error)
        # Only after the appends, because these functions let producers write to
        # partitions. If they were called first, and this process were killed before the
        # append, a producer could write to a transaction that no successor knows.
        for number, run in out.take_appended():
            if not logs.is_lost(number):
                run()
        for markers in out.take_markers():
            self._mark(markers, now_ms)
        waiting = self._give_answers()
        if out.steps and waiting:
            # A client whose EndTxn is answered need not wait for the step that follows,
            # which appends the markers.
            self._replies.flush()
        for step in out.take_steps():
            self._go_on(step)
        return True

    # -- records -----------------------------------------------------------------------

    def _holds_back(self) -> bool:
        """Return whether to keep new records in the outbox while syncs are running.

        Records that come meanwhile then share one batch and one sync. If no sync is
        running, as for a single commit, records are appended at once.
        """
        if not (self._out.records or self._out.transactional) or self._disk.is_idle:
            return False
        now_ns = time.monotonic_ns()
        if not self._held_since_ns:
            self._held_since_ns = now_ns
        return now_ns - self._held_since_ns < HOLD_NS

    def _send_what_rests_on_nothing(self) -> None:
        for answer in self._out.take_answers():
            if answer.after:
                self._held.append(answer)
            else:
                self._replies.send(answer)

    def _cannot_write(self, number: int, error: ApiError) -> None:
        _LOG.error("records cannot be written to %s: %s", self._logs[number], error)
        self._lost(number)

    def _mark(self, markers: Markers, now_ms: int) -> None:
        """Append a transaction's markers, then call ``markers.done`` with the results.

        If ``markers.waits``, call it only when the markers are on disk.
        """
        results, awaited, appended = self._markers.append(markers, now_ms)

        def complete(failed: list[Hashable]) -> None:
            for partition in cast("list[TopicPartition]", failed):
                if partition in results:
                    results[partition] = ErrorCode.KAFKA_STORAGE_ERROR
            markers.done(results, self._now_ms(), appended)

        self._when_durable(awaited if markers.waits else [], complete)

    # -- answers and steps -------------------------------------------------------------

    def _give_answers(self) -> bool:
        """Send each answer, at once or when the logs that it waits for are on disk.

        Return whether any answer waits for a log.
        """
        held, self._held, self._held_since_ns = self._held, [], 0
        resting: dict[tuple[int, ...], list[Answer]] = {}
        for answer in (*held, *self._out.take_answers()):
            if answer.after:
                resting.setdefault(answer.after, []).append(answer)
            else:
                self._replies.send(answer)
        for after, answers in resting.items():
            self._give(answers, after)
        return bool(resting)

    def _give(self, answers: list[Answer], after: tuple[int, ...]) -> None:
        def complete(failed: list[Hashable]) -> None:
            for answer in answers:
                if failed:
                    self._replies.refuse(answer)
                else:
                    self._replies.send(answer)
            self._lose_all(failed)

        awaited = self._logs.awaited(after)
        if awaited is None:
            for answer in answers:
                self._replies.refuse(answer)
        else:
            self._when_durable(awaited, complete)

    def _go_on(self, step: Step) -> None:
        def complete(failed: list[Hashable]) -> None:
            # The failed logs first: the step must not use the groups or transactions
            # that are forgotten with them.
            self._lose_all(failed)
            step.run(not failed)

        awaited = self._logs.awaited(step.after)
        if awaited is None:
            step.run(False)
        else:
            self._when_durable(awaited, complete)

    def _lose_all(self, failed: list[Hashable]) -> None:
        for number in cast("list[int]", failed):
            self._lost(number)

    def _when_durable(
        self,
        awaited: Sequence[Awaited[WrittenLog]],
        complete: Callable[[list[Hashable]], None],
    ) -> None:
        """Call ``complete`` with the failed logs, once each is on disk or has failed.

        Do not wait for the logs of topics with flush.acks.all=false.
        """
        awaited = [each for each in awaited if each.log.view.config.flush_acks_all]
        self._durability.when(awaited, complete, time.monotonic_ns())

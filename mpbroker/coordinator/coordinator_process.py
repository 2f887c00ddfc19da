"""Run the coordinator's loop, which serves all groups and transactions.

A turn takes requests from the lane and executes them, calls the timers that are due,
appends the records of both (one batch for each log), starts the syncs, and sends the
answers whose records are on disk. The loop waits for a sync only if it has a single
request and the disk is fast: see GroupCommit.sync_at_once.

    killed anywhere        the supervisor puts its requests back on the lane; a
                           successor reads the logs and executes them again
    append or sync fails   the log is lost: its groups or transactions are forgotten,
                           and clients get COORDINATOR_NOT_AVAILABLE

A parked request (a join, a sync) holds a slot and costs nothing else.

Source: Kafka's CoordinatorRuntime.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from mpbroker.coordinator.coordinator_apis import CoordinatorApis
from mpbroker.coordinator.coordinator_logs import CoordinatorLogs, StateMachines
from mpbroker.coordinator.log_loading import LogLoading
from mpbroker.coordinator.outbox import Call
from mpbroker.coordinator.record_writer import HOLD_NS, RecordWriter, Replies, Syncs
from mpbroker.ipc.black_box import EventKind, own_box
from mpbroker.ipc.doorbell import Doorbell
from mpbroker.ipc.lane import CoordinatorLane
from mpbroker.ipc.layout import (
    COORDINATOR,
    HANDLER_ACTIVE,
    HANDLER_BUSY_SINCE,
    HANDLER_BUSY_SLOT,
    HANDLER_COUNTERS,
    HANDLER_PID,
    HANDLER_STEPS,
    HEADER,
    HEADER_PHASE,
    HandlerCounter,
    Phase,
    handler_row,
)
from mpbroker.ipc.segment import Segment
from mpbroker.network.connection_rows import connection_name, peer_address
from mpbroker.network.request_channel import HandlerEnd
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.server.dispatcher import RequestDispatcher
from mpbroker.server.quotas.client_quotas import ClientQuotas
from mpbroker.server.request import CLOSE, Request

if TYPE_CHECKING:
    from mpbroker.server.authorization.authorization import Authorization

# The most requests of a turn, which share appends and syncs: 5 ms of work or so.
_MAX_BATCH: Final = 64
_IDLE_POLL_S: Final = 1.0
_UNPLACED_POLL_S: Final = 0.001
# The process loads for so long before it takes the first request. What is not loaded by
# then answers COORDINATOR_LOAD_IN_PROGRESS until it is.
_LOAD_PATIENCE_S: Final = 0.5
# How long each turn loads, once requests are served beside it.
_LOAD_TURN_S: Final = 0.02


class Clock:
    """Milliseconds of the wall clock that never go back, as timers need them."""

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def now_ms(self) -> int:
        return (time.monotonic_ns() + self._offset_ns) // 1_000_000


class RequestPort(NamedTuple):
    """The shared queues that requests come from and that answers go to."""

    control: Segment
    lane: CoordinatorLane
    doorbell: Doorbell
    channel: HandlerEnd


class CoordinatorProcess:
    """The loop of the coordinator.

    Args:
        catch_up: reads the new records of the metadata log.
        answer_error: makes an answer's body from an error code; None if the API has no
            field for it.
        authorization: asks the authorizer; None: there is none, all is allowed.
    """

    def __init__(
        self,
        port: RequestPort,
        state: StateMachines,
        syncs: Syncs,
        clock: Clock,
        catch_up: Callable[[], object],
        answer_error: Callable[[Request, ErrorCode], bytes | None],
        authorization: Authorization | None = None,
        quotas: ClientQuotas | None = None,
    ) -> None:
        self._words = words = port.control.words
        self._row = handler_row(COORDINATOR)
        self._lane = port.lane
        self._channel = port.channel
        self._groups = state.groups
        self._transactions = state.transactions.coordinator
        self._out = state.context.outbox
        self._timers = state.context.timers
        self._syncs = syncs
        self._clock = clock
        self._catch_up = catch_up
        self._quotas = quotas
        self._call: Call | None = None  # of the request that is being executed
        if authorization is not None:
            state.groups.be_guarded()
        apis = CoordinatorApis(
            (state.groups, *state.transactions.parts),
            lambda connection: f"/{peer_address(words, connection)[0]}",
            clock.now_ms,
            self._began,
            authorization,
        )
        self._dispatcher = RequestDispatcher(
            apis.apis, {}, answer_error, partial(connection_name, words)
        )
        self._logs = CoordinatorLogs(
            state, lambda log: syncs.purgatory.notify_waiters(log.row)
        )
        self._loading = LogLoading(self._logs, state, clock.now_ms)
        self._writer = RecordWriter(
            self._out,
            self._logs,
            state.transactions.markers,
            syncs,
            Replies(port.channel, answer_error),
            clock.now_ms,
            self._lose,
        )
        self._epoll = select.epoll(flags=select.EPOLL_CLOEXEC)
        self._epoll.register(port.doorbell.fd, select.EPOLLIN | select.EPOLLET)
        if syncs.disk.event_fd >= 0:
            self._epoll.register(syncs.disk.event_fd, select.EPOLLIN | select.EPOLLET)
        # One of our topics was deleted or recreated. A new process has to find out what
        # is left of it, and what each partition holds now.
        self.must_restart = False

    # -- the loop ------------------------------------------------------------------

    def run(self) -> None:
        """Serve until the broker stops."""
        # The supervisor does not wait until this process is ready, as it does for
        # handlers, so the process stores its pid itself.
        self._words[self._row + HANDLER_PID] = os.getpid()
        self._words[self._row + HANDLER_ACTIVE] = 1
        own_box().note(EventKind.SERVING)
        self._loading.begin()
        self._loading.go_on(_LOAD_PATIENCE_S)
        self._groups.start_expiry(self._clock.now_ms())
        self._transactions.start_timers(self._clock.now_ms())
        while self._phase < Phase.STOPPED and not self.must_restart:
            self.turn()
        own_box().note(EventKind.ENDING)
        self._channel.flush()

    @property
    def _phase(self) -> int:
        return self._words[HEADER + HEADER_PHASE]

    @property
    def _is_draining(self) -> bool:
        return self._phase >= Phase.DRAINING

    def turn(self) -> None:
        """Serve requests and all that is due; wait if there is neither."""
        self._words[self._row + HANDLER_STEPS] += 1  # for the supervisor's lease
        slots = self._lane.take(_MAX_BATCH, arm=False)
        self._work(slots)
        if not slots:
            slots = self._lane.take(_MAX_BATCH, arm=True)
            if slots:
                self._work(slots)
            else:
                self._wait()

    def _work(self, slots: list[int]) -> None:
        self._catch_up()
        self._see_to_topics()
        if self.must_restart and not self._is_draining:
            return  # its successor executes what is claimed, and all that is parked
        # What a single request writes may be synced at once: no other request waits.
        alone = len(slots) <= 1 and not self._writer.holds_answers
        self._syncs.commit.is_alone = alone
        if slots:
            self._execute_all(slots)
        if self._loading:
            self._loading.go_on(_LOAD_TURN_S)
        if self._is_draining:
            # No member joins any more, so answer those that wait for one. Timers are
            # not called: what they write might come behind the last flush.
            self._groups.refuse_waiting()
            self._transactions.refuse_waiting(self._clock.now_ms())
        else:
            self._timers.expire(self._clock.now_ms())
        self._flush()
        self._see_to_syncs()
        while self._syncs.durability.go_on(time.monotonic_ns()):
            if self._out:
                # Answers go out first: a client whose EndTxn is answered need not wait
                # until its markers are appended.
                self._channel.flush()
                self._flush()
            self._see_to_syncs()
        self._channel.flush()

    def _wait(self) -> None:
        if self._loading or self._out.answers or self.must_restart:
            return
        timeout = _UNPLACED_POLL_S if self._channel.has_unplaced else _IDLE_POLL_S
        if self._writer.holds_records:
            timeout = HOLD_NS / 1e9
        until_timer = (self._timers.next_ms - self._clock.now_ms()) / 1e3
        if self._is_draining:
            until_timer = _IDLE_POLL_S  # no timer is called any more
        self._epoll.poll(max(0.0, min(timeout, until_timer)))

    def _flush(self) -> None:
        self._writer.flush(may_hold=not self._is_draining)

    def _see_to_syncs(self) -> None:
        commit = self._syncs.commit
        if not commit.is_idle:
            commit.start()
            if not self._syncs.disk.is_idle:
                commit.process_finished()

    def _see_to_topics(self) -> None:
        if self._logs.have_changed:
            self.must_restart = True

    def _lose(self, number: int) -> None:
        """Forget a log that cannot be written or synced, and load it again later."""
        self._see_to_topics()
        self._logs.lose(number)
        self._loading.load_again(number)

    # -- requests ------------------------------------------------------------------

    def _execute_all(self, slots: list[int]) -> None:
        words, row = self._words, self._row
        words[row + HANDLER_BUSY_SINCE] = time.monotonic_ns()
        for slot in slots:
            # Stored before the request is executed: if we die, the supervisor finds
            # here which request may have been the cause.
            words[row + HANDLER_BUSY_SLOT] = slot + 1
            self._execute(slot)
        words[row + HANDLER_BUSY_SLOT] = 0
        words[row + HANDLER_COUNTERS + HandlerCounter.REQUESTS] += len(slots)

    def _execute(self, slot: int) -> None:
        received = self._channel.request(slot)
        request = self._dispatcher.parse(*received)
        if not isinstance(request, Request):
            # A bug: handlers forward only requests that they could read.
            self._channel.close_connection(slot)
            return
        self._call = None
        started = time.monotonic_ns()
        answer = self._dispatcher.dispatch(request)
        done = time.monotonic_ns()
        if self._quotas is not None:
            self._quotas.charge_time(request, done - started)
        self._channel.note_wait(slot, done)
        if isinstance(answer, bytes) or answer is CLOSE:
            # The request is malformed, or has met a bug of the broker. Its Call must
            # not be answered a second time.
            if self._call is not None:
                if self._call.answered:
                    return
                self._call.answered = True
            if isinstance(answer, bytes):
                self._channel.send_bytes(slot, request.frame(answer))
            else:
                self._channel.close_connection(slot)

    def _began(self, call: Call) -> None:
        self._call = call

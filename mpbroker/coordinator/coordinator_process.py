"""Run the coordinator's loop, which serves all groups and transactions.

A turn takes requests from the coordinator's queue in shared memory (the lane), executes
them, calls the timers that are due, appends the records of both (one batch for each
log), starts the syncs, and sends the answers whose records are on disk. The loop waits
for a sync only if it has a single request and the disk is fast: see
GroupCommit.sync_at_once.

    killed anywhere        the supervisor puts its requests back on the lane; a
                           successor reads the logs and executes them again
    append or sync fails   the log is lost: its groups or transactions are forgotten,
                           and clients get COORDINATOR_NOT_AVAILABLE

A client whose requests have had more CPU time than those of all others waits for its
turns while others wait (server/turns.py). So one client's long requests do not keep all
groups waiting, on however many connections they come.

A parked request (a JoinGroup or SyncGroup that waits for other members) keeps its slot,
the place of one request in shared memory, and costs nothing else. Its wait ends when
its client hangs up (waiting_calls.py).

Source: Kafka's CoordinatorRuntime.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.coordinator.coordinator_apis import CoordinatorApis
from mpbroker.coordinator.coordinator_logs import CoordinatorLogs, StateMachines
from mpbroker.coordinator.group_figures import GroupFigures
from mpbroker.coordinator.log_loading import LogLoading
from mpbroker.coordinator.outbox import Call
from mpbroker.coordinator.record_writer import HOLD_NS, RecordWriter, Replies, Syncs
from mpbroker.coordinator.repeated_calls import RepeatedCalls
from mpbroker.coordinator.waiting_calls import WaitingCalls
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
    SLOT_CONNECTION,
    HandlerCounter,
    Phase,
    handler_row,
    slot_row,
)
from mpbroker.ipc.segment import Segment
from mpbroker.network.connection_rows import connection_name, peer_address
from mpbroker.network.request_channel import HandlerEnd
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.server.dispatcher import RequestDispatcher
from mpbroker.server.quotas.client_quotas import ClientQuotas
from mpbroker.server.request import CLOSE, Request
from mpbroker.server.turns import LONG_NS, Turns

if TYPE_CHECKING:
    from mpbroker.coordinator.shard_topic import ShardTopic
    from mpbroker.coordinator.shard_transactions import ShardTransactions
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
    """Reads the wall clock in ms; its time never goes back, as timers require.

    It is the wall clock's time at the start, plus the time that has passed since.
    """

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def now_ms(self) -> int:
        return (time.monotonic_ns() + self._offset_ns) // 1_000_000


class _LaterCall(NamedTuple):
    """A request that waits for its turn: see Turns."""

    client: int
    slot: int
    done: bool = False


class RequestPort(NamedTuple):
    """Holds the shared queues for the coordinator's requests and answers."""

    control: Segment
    lane: CoordinatorLane
    doorbell: Doorbell
    channel: HandlerEnd


def _refusal(state: StateMachines) -> ErrorCode:
    """Return the error of an answer whose records could not be written.

    In a cluster another node has them, most likely. Besides, not every client takes
    COORDINATOR_NOT_AVAILABLE for an answer to OffsetFetch.
    """
    if state.shards is None:
        return ErrorCode.COORDINATOR_NOT_AVAILABLE
    return ErrorCode.NOT_COORDINATOR


class CoordinatorProcess:
    """Runs the loop of the coordinator.

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
        self._turns = Turns[_LaterCall]()
        self._waiting = WaitingCalls(port.channel, self._out)
        syncs.durability.on_slot = self._waiting.end
        self._share = state.share.service
        syncs.durability.on_row = self._share.has_grown
        syncs.durability.on_lost = self._share.has_lost_notices
        self._figures = figures = GroupFigures(
            words, self._row, state.groups, state.share.service.sessions
        )
        state.share.service.on_acknowledged = figures.acknowledged
        state.share.states.on_expired = figures.locks_ended
        if authorization is not None:
            state.groups.be_guarded()
        apis = CoordinatorApis(
            (
                state.groups,
                *state.transactions.parts,
                state.share.service,
                state.share.offsets,
                state.share.state_apis,
            ),
            lambda connection: f"/{peer_address(words, connection)[0]}",
            clock.now_ms,
            self._began,
            state.context.levels,
            authorization,
        )
        self._dispatcher = RequestDispatcher(
            apis.apis, {}, answer_error, partial(connection_name, words)
        )
        self._logs = CoordinatorLogs(state, syncs.grown)
        self._loading = LogLoading(self._logs, state, clock.now_ms)
        self._repeated = RepeatedCalls(words, port.channel, quotas, authorization)
        self._writer = RecordWriter(
            self._out,
            self._logs,
            state.transactions.markers,
            syncs,
            Replies(port.channel, answer_error, self._repeated, _refusal(state)),
            clock.now_ms,
            self._lose,
        )
        self._epoll = select.epoll(flags=select.EPOLL_CLOEXEC)
        self._epoll.register(port.doorbell.fd, select.EPOLLIN | select.EPOLLET)
        if syncs.disk.event_fd >= 0:
            self._epoll.register(syncs.disk.event_fd, select.EPOLLIN | select.EPOLLET)
        self._shard_transactions = state.shard_transactions
        self._shards = state.shards
        if self._shards is not None:
            self._serve_shards(self._shards)
        # One of our topics was deleted or recreated. A new process has to find out what
        # is left of it, and what each partition holds now.
        self.must_restart = False

    def _serve_shards(self, shards: ShardTopic) -> None:
        """Have this object told of the shards of groups that this node has."""
        shards.on_taken = lambda number: self._groups.begin_loading([number])
        shards.on_loaded = self._loading.load
        shards.on_lost = self._lost_shard
        shards.on_written = self._syncs.durability.sync_ended
        if self._shard_transactions is not None:
            shards.on_exchange = self._shard_transactions.take
        self._epoll.register(shards.event_fd, select.EPOLLIN | select.EPOLLET)

    def _look_at(self, shards: ShardTopic) -> None:
        """Take note of the shards that have come or gone."""
        if self._writer.holds_answers:
            # Their records are for the shards as they were. Shards that are lost take
            # their records along, and if they come back at once, the answers would seem
            # to rest on nothing.
            self._writer.flush(may_hold=False)
        shards.go_on()
        if self._shard_transactions is not None:
            self._shard_transactions.go_on()
            if shards.ends_to_append():
                self._end_offsets(shards, self._shard_transactions)

    def _end_offsets(self, shards: ShardTopic, transactions: ShardTransactions) -> None:
        """Commit or drop the offsets of transactions that have ended."""
        # An end comes behind the offsets that are known so far.
        self._writer.flush(may_hold=False)
        for each in shards.ends_to_append():
            end = each.end
            if self._groups.is_loading(end.shard) or self._logs.is_lost(end.shard):
                continue  # again at the next look, when it is loaded
            transactions.refuse(end)
            self._groups.replay_end_of_transaction(
                end.shard, end.producer_id, commit=end.commit
            )
            self._logs.append_end(each)

    # -- the loop ------------------------------------------------------------------

    def run(self) -> None:
        """Serve requests until the broker stops, or this process must be replaced."""
        # The supervisor does not wait until this process is ready, as it does for
        # handlers, so the process stores its pid itself.
        self._words[self._row + HANDLER_PID] = os.getpid()
        self._words[self._row + HANDLER_ACTIVE] = 1
        own_box().note(EventKind.SERVING)
        if self._shards is not None:
            self._shards.start()
        self._loading.begin()
        self._loading.go_on(_LOAD_PATIENCE_S)
        self._groups.start_expiry(self._clock.now_ms())
        self._transactions.start_timers(self._clock.now_ms())
        while self._phase < Phase.STOPPED and not self.must_restart:
            self.turn()
        own_box().note(EventKind.ENDING)
        self._channel.flush()
        if self._shards is not None and not self.must_restart:
            self._shards.end()

    @property
    def _phase(self) -> int:
        return self._words[HEADER + HEADER_PHASE]

    @property
    def _is_draining(self) -> bool:
        return self._phase >= Phase.DRAINING

    def turn(self) -> None:
        """Serve requests, timers and finished syncs; wait if there is no request."""
        self._words[self._row + HANDLER_STEPS] += 1  # for the supervisor's lease
        slots = self._lane.take(_MAX_BATCH, arm=False)
        self._work(slots)
        if not slots and not self._turns:
            slots = self._lane.take(_MAX_BATCH, arm=True)
            if slots:
                self._work(slots)
            else:
                self._wait()

    def _work(self, slots: list[int]) -> None:
        self._catch_up()
        self._see_to_topics()
        if self._shards is not None:
            self._look_at(self._shards)
            if self._is_draining:
                self._shards.stop_all()
        if self.must_restart and not self._is_draining:
            return  # its successor executes what is claimed, and all that is parked
        # What a single request writes may be synced at once: no other request waits.
        alone = len(slots) <= 1 and not self._writer.holds_answers
        self._syncs.commit.is_alone = alone
        if slots:
            self._execute_all(slots)
        if self._turns:
            self._take_turn(is_idle=not slots)
        if self._loading:
            self._loading.go_on(_LOAD_TURN_S)
        if self._is_draining:
            # No member joins any more, so answer those that wait for one. Timers are
            # not called: what they write might come behind the last flush.
            self._groups.refuse_waiting()
            self._share.refuse_waiting()
            self._transactions.refuse_waiting(self._clock.now_ms())
        else:
            self._timers.expire(self._clock.now_ms())
        if self._shards is not None:
            # A long turn may have outlasted the node's lease.
            self._look_at(self._shards)
        self._flush()
        self._see_to_syncs()
        while self._syncs.durability.go_on(time.monotonic_ns()) or self._share_grows():
            if self._out:
                # Answers go out first: a client whose EndTxn is answered need not wait
                # until its markers are appended.
                self._channel.flush()
                self._flush()
            self._see_to_syncs()
        self._channel.flush()

    def _share_grows(self) -> bool:
        """Try waiting ShareFetch requests again whose logs have grown.

        Return whether any log has grown.
        """
        return not self._is_draining and self._share.go_on(self._clock.now_ms())

    def _wait(self) -> None:
        if self._loading or self._out.answers or self.must_restart:
            return
        self._figures.look(self._clock.now_ms())  # at each _IDLE_POLL_S at least
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
        """Drop the state of a log that cannot be written; load the log again later."""
        self._see_to_topics()
        self._logs.lose(number)
        if self._shards is not None:
            self._shards.drop(number)
        self._loading.load_again(number)

    def _lost_shard(self, number: int) -> None:
        """Forget a shard that another node has, or may have."""
        self._groups.lost(number)
        self._logs.lose(number)
        self._loading.forget(number)
        if self._shard_transactions is not None:
            self._shard_transactions.lost(number)

    # -- requests ------------------------------------------------------------------

    def _execute_all(self, slots: list[int]) -> None:
        words, row, turns = self._words, self._row, self._turns
        words[row + HANDLER_BUSY_SINCE] = time.monotonic_ns()
        is_alone = len(slots) == 1 and not turns
        for slot in slots:
            if turns.debts and not is_alone:
                client = self._client_of(slot)
                if turns.owes(client):
                    # Nothing waits in this slot any more.
                    self._waiting.executed(slot, None)
                    turns.add(_LaterCall(client, slot))
                    continue
            # Stored before the request is executed: if this process dies, the
            # supervisor finds here which request may have been the cause.
            words[row + HANDLER_BUSY_SLOT] = slot + 1
            self._execute(slot)
        words[row + HANDLER_BUSY_SLOT] = 0
        words[row + HANDLER_COUNTERS + HandlerCounter.REQUESTS] += len(slots)

    def _client_of(self, slot: int) -> int:
        return self._channel.client_of(self._words[slot_row(slot) + SLOT_CONNECTION])

    def _take_turn(self, *, is_idle: bool) -> None:
        """Execute a request that waits for its turn, if that has come.

        If the broker stops, execute all of them.
        """
        words, row, turns = self._words, self._row, self._turns
        is_last = self._is_draining
        while (later := turns.take(is_idle=is_idle or is_last)) is not None:
            began = words[row + HANDLER_BUSY_SINCE] = time.monotonic_ns()
            words[row + HANDLER_BUSY_SLOT] = later.slot + 1
            self._execute(later.slot)
            words[row + HANDLER_BUSY_SLOT] = 0
            turns.took(began)
            if not is_last:
                return

    def _execute(self, slot: int) -> None:
        received = self._channel.request(slot)
        if self._repeated.repeat(*received[:3], self._clock.now_ms()):
            self._waiting.executed(slot, None)
            return
        request = self._dispatcher.parse(*received)
        if not isinstance(request, Request):
            # A bug: handlers forward only requests that they could read.
            self._channel.close_connection(slot)
            return
        self._call = None
        started, computed = time.monotonic_ns(), time.thread_time_ns()
        answer = self._dispatcher.dispatch(request)
        done = time.monotonic_ns()
        if done - started > LONG_NS:
            computed = time.thread_time_ns() - computed
            self._turns.charge(self._client_of(slot), computed)
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
            return
        self._waiting.executed(slot, self._call)

    def _began(self, call: Call) -> None:
        self._call = call

"""RequestHandler: the loop of one handler process.

The loop takes a fair share of the waiting requests, executes them and pushes the
answers. After that it sees to parked requests, which wait for records or for the disk:
it takes notices of changed logs, ends finished syncs, and looks at deadlines. The loop
waits at its epoll only, and holds no lock and no claimed request while it waits. C code
(the core) executes what core_cache.py allows it; the dispatcher executes the rest.

Source: Kafka KafkaRequestHandler.run.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import Final

from mpbroker.ipc.black_box import NO_API, EventKind, own_box
from mpbroker.ipc.doorbell import Doorbell
from mpbroker.ipc.layout import (
    HANDLER_ACTIVE,
    HANDLER_BUSY_SINCE,
    HANDLER_BUSY_SLOT,
    HANDLER_COUNTERS,
    HANDLER_INCARNATION,
    HANDLER_READY,
    HEADER,
    HEADER_ACTIVE_HANDLERS,
    HEADER_PHASE,
    SLOT_DEQUEUED,
    SLOT_WORDS,
    SLOTS,
    HandlerCounter,
    Phase,
    handler_row,
)
from mpbroker.ipc.segment import Segment
from mpbroker.network.request_channel import HandlerEnd
from mpbroker.server.core_cache import CoreCache, NoCoreCache, Woken
from mpbroker.server.dispatcher import RequestDispatcher
from mpbroker.server.fetch.fetch_service import send_parts
from mpbroker.server.group_commit import GroupCommit
from mpbroker.server.purgatory import DelayedOperation, Purgatory
from mpbroker.server.request import CLOSE, NO_RESPONSE, PARKED, Answer, Request
from mpbroker.server.turns import LONG_NS, PATIENCE_NS, DelayedTurn

# Batched takes are worth 1.3-1.4x in pure Python; more than this only adds latency.
_MAX_BATCH: Final = 16
# Answers wait until the batch ends, but not longer than this for a slow request in it.
_SLOW_NS: Final = 300_000
_IDLE_POLL_S: Final = 1.0
_UNPLACED_POLL_S: Final = 0.001
# How long a handler that retires waits until its last answers have room. Clients that
# read slowly are closed before (slow_clients.py).
_PLACE_NS: Final = 5_000_000_000
_GIVE_BACK_NS: Final = 5_000_000_000


def _hold_nothing() -> None:
    """Do nothing: the default of ``let_go``, for a process that uses no partitions."""


class RequestHandler:
    """Runs the loop of one handler process.

    Attributes:
        let_go: called between requests, to let go of deleted partitions.

    Args:
        handler: the handler's id.
        control: the control segment.
        channel: requests come from it, and answers go into it.
        dispatcher: executes what the core leaves to Python.
        purgatory: keeps the requests that wait.
        group_commit: makes the appended records durable.
        doorbell: wakes this process.
        core_cache: is asked to execute each request before Python does.
    """

    def __init__(
        self,
        handler: int,
        control: Segment,
        channel: HandlerEnd,
        dispatcher: RequestDispatcher,
        purgatory: Purgatory,
        group_commit: GroupCommit,
        doorbell: Doorbell,
        core_cache: CoreCache | NoCoreCache,
    ) -> None:
        self._words = control.words
        self._row = handler_row(handler)
        self._channel = channel
        self._dispatcher = dispatcher
        self._purgatory = purgatory
        self._turns = purgatory.turns
        purgatory.on_bug = self._answer_bug
        purgatory.must_end = channel.must_end
        self._group_commit = group_commit
        self._disk = disk = group_commit.disk
        self._core_cache = core_cache
        self.let_go: Callable[[], None] = _hold_nothing
        self._execute_in_core = core_cache.execute
        self._epoll = select.epoll(flags=select.EPOLL_CLOEXEC)
        self._epoll.register(doorbell.fd, select.EPOLLIN | select.EPOLLET)
        if disk.event_fd >= 0:
            self._epoll.register(disk.event_fd, select.EPOLLIN | select.EPOLLET)
        self._wait_in_core = core_cache.wait_at(self._epoll.fileno(), channel, handler)
        self._box = own_box()
        self._one_by_one = False
        self._is_alone = False  # no other request waits for this process
        self._next_give_back = 0

    def run(self) -> None:
        """Serve until the broker stops, or this handler id is retired."""
        words, row = self._words, self._row
        words[row + HANDLER_READY] = words[row + HANDLER_INCARNATION]
        self._box.note(EventKind.SERVING, words[row + HANDLER_INCARNATION])
        while not self._must_stop():
            self.turn()
        self._box.note(EventKind.ENDING)
        self._channel.flush()
        self._retire()

    def _must_stop(self) -> bool:
        words = self._words
        return (
            words[HEADER + HEADER_PHASE] >= Phase.STOPPED
            or not words[self._row + HANDLER_ACTIVE]
        )

    def turn(self) -> None:
        """Do one turn of the loop: requests, waiting requests, syncs, then answers.

        If there are no requests, wait for events.
        """
        self.let_go()
        handlers = max(1, self._words[HEADER + HEADER_ACTIVE_HANDLERS])
        limit = 1 if self._one_by_one else _MAX_BATCH
        slots = self._channel.receive_requests(limit, handlers, arm=False)
        if slots:
            self._execute(slots)
        self._see_to_parked()
        if self._turns:
            self._take_turn(is_idle=not slots)
        elif not slots:
            # Look once more with the wake-up armed: from here on each put rings the
            # doorbell, so no slot is overlooked while this process sleeps.
            slots = self._channel.receive_requests(limit, handlers, arm=True)
            if slots:
                self._execute(slots)
                self._see_to_parked()
            else:
                self._wait(limit)

    def _wait(self, limit: int) -> None:
        """Wait for events, in C code if that is used.

        The C code may execute a request that comes, before this method goes on.
        """
        if self._purgatory.has_notices:
            return
        started = time.monotonic_ns()
        if started >= self._next_give_back:
            self._next_give_back = started + _GIVE_BACK_NS
            self._channel.give_back_memory()
        timeout = _UNPLACED_POLL_S if self._channel.has_unplaced else _IDLE_POLL_S
        left = (self._purgatory.next_deadline_ns - started) / 1e9
        timeout = max(0.0, min(timeout, left))
        idle = self._row + HANDLER_COUNTERS + HandlerCounter.IDLE_NS
        if self._wait_in_core is None:
            self._epoll.poll(timeout)
            self._words[idle] += time.monotonic_ns() - started
            return
        woken = self._wait_in_core(timeout, limit)
        self._words[idle] += woken.at_ns - started
        if woken.fetched:
            self._count_parked()
        if woken.slots:
            self._execute(woken.slots, woken)
            self._see_to_parked()

    def _count_parked(self) -> None:
        words, counters = self._words, self._row + HANDLER_COUNTERS
        words[counters + HandlerCounter.PARKED] = self._purgatory.size
        words[counters + HandlerCounter.PARKED_FETCHES] = self._purgatory.fetches

    def _see_to_parked(self) -> None:
        """Start syncs, answer waiting requests that are ready or late, send answers."""
        purgatory = self._purgatory
        self._see_to_syncs()
        if purgatory.size:
            if purgatory.process_notices():
                self._channel.flush()  # its client waits for just this
            purgatory.expire(time.monotonic_ns())
            if self._words[HEADER + HEADER_PHASE] >= Phase.DRAINING:
                purgatory.end_early()
            self._count_parked()
            # What came too late for the sync that has just ended wants the next one. It
            # begins here, because no event would wake this process for it.
            self._see_to_syncs()
        self._channel.flush()

    def _see_to_syncs(self) -> None:
        commit = self._group_commit
        if not commit.is_idle:
            commit.start()
            if not self._disk.is_idle:
                commit.process_finished()

    def _execute(self, slots: list[int], woken: Woken | None = None) -> None:
        words, row, execute = self._words, self._row, self._execute_in_core
        totals, requests, spent = self._box.words, self._box.requests, self._box.spent
        before = since = started = woken.at_ns if woken else time.monotonic_ns()
        words[row + HANDLER_BUSY_SINCE] = started
        # If a single slot was taken, no other request was waiting.
        self._group_commit.is_alone = self._is_alone = len(slots) == 1
        # Totals are noted once for each run of requests of one API.
        current, alike = NO_API, 0
        for slot in slots:
            if woken is None or not woken.has_executed:
                # The supervisor reads whose request this is if the handler dies, so
                # BUSY_SLOT is stored before anything is executed.
                words[row + HANDLER_BUSY_SLOT] = slot + 1
                words[SLOTS + slot * SLOT_WORDS + SLOT_DEQUEUED] = before
                api_key = execute(slot)
            else:
                # The core has answered: the slot may be another request's by now, so
                # nothing is stored in it.
                api_key = self._core_cache.finish(slot, woken.result)
            if api_key is None:
                api_key = self._execute_one(slot, before)
            if api_key != current:
                if alike:
                    totals[requests + current] += alike
                    totals[spent + current] += before - since
                current, alike, since = api_key, 0, before
            alike += 1
            before = time.monotonic_ns()
            if before - started > _SLOW_NS:
                self._channel.flush()
                started = before
        totals[requests + current] += alike
        totals[spent + current] += before - since
        words[row + HANDLER_BUSY_SLOT] = 0
        words[row + HANDLER_COUNTERS + HandlerCounter.REQUESTS] += len(slots)

    def _execute_one(self, slot: int, began_ns: int) -> int:
        """Execute a request in Python that the C core has not executed.

        If its client owes time to others that wait, it is parked until its turn.

        Return its API key, or NO_API if its header was refused.
        """
        channel = self._channel
        request = self._dispatcher.parse(*channel.request(slot))
        if isinstance(request, Request):
            if self._turns.debts and self._must_wait(request):
                self._send(request, self._wait_for_turn(request))
                return request.api_key
            computed = time.thread_time_ns()
            answer = self._dispatch(request)
            # Not by the clock: others may have kept it waiting for a lock or a CPU.
            if time.monotonic_ns() - began_ns > LONG_NS:
                client = channel.client_of(request.connection)
                self._turns.charge(client, time.thread_time_ns() - computed)
            self._send(request, answer)
            return request.api_key
        if request is None:
            channel.close_connection(slot)
        else:
            channel.send_bytes(slot, request)
        return NO_API

    def _dispatch(self, request: Request) -> Answer:
        answer = self._dispatcher.dispatch(request)
        self._core_cache.learn_request(request, answer)
        return answer

    def _must_wait(self, request: Request) -> bool:
        """Return whether a request's client owes time, and others wait."""
        if self._is_alone and not self._turns:
            return False
        return self._turns.owes(self._channel.client_of(request.connection))

    def _wait_for_turn(self, request: Request) -> Answer:
        """Park a request whose client owes time to others, until its turn.

        A request that must not wait, for example because its client has hung up, is
        refused instead.
        """
        channel, slot = self._channel, request.slot
        if channel.must_end(slot):
            return self._dispatcher.out_of_turn(request)

        def refuse() -> None:
            channel.unpark(slot)
            self._send(request, self._dispatcher.out_of_turn(request))

        operation = DelayedTurn(
            request,
            channel.client_of(request.connection),
            lambda: self._dispatch(request),
            refuse,
            time.monotonic_ns() + PATIENCE_NS,
        )
        # No deadline: that of a Fetch is its own, if another process executes it.
        channel.park(slot, 0)
        self._purgatory.watch(operation)
        self._turns.add(operation)
        return PARKED

    def _take_turn(self, *, is_idle: bool) -> None:
        """Execute a parked request that may compute for long, if it is its turn."""
        operation = self._turns.take(is_idle=is_idle)
        if operation is None:
            return
        words, row, slot = self._words, self._row, operation.slot
        self._purgatory.unwatch(operation)
        self._channel.unpark(slot)
        began = words[row + HANDLER_BUSY_SINCE] = time.monotonic_ns()
        words[row + HANDLER_BUSY_SLOT] = slot + 1
        computed = time.thread_time_ns()
        answer: Answer
        try:
            answer = operation.run()
        except Exception:  # noqa: BLE001 - whatever it is, serving goes on
            answer = self._dispatcher.met_bug(operation.request)
        self._send(operation.request, answer)
        words[row + HANDLER_BUSY_SLOT] = 0
        self._turns.took(began)
        self._turns.charge(operation.client, time.thread_time_ns() - computed)
        self._see_to_parked()

    def _send(self, request: Request, answer: Answer) -> None:
        channel, slot = self._channel, request.slot
        try:
            if isinstance(answer, bytes):
                channel.send_bytes(slot, request.frame(answer))
            elif isinstance(answer, list):
                send_parts(channel, request, answer)
            elif answer is NO_RESPONSE:
                channel.send_nothing(slot)
            elif answer is CLOSE:
                channel.close_connection(slot)
            # Other answers are sent later: PARKED by the purgatory, FORWARDED by the
            # coordinator.
        except OverflowError:
            # Larger than all the memory for answers, in any handler.
            self._dispatcher.met_bug(request)
            channel.close_connection(slot)

    def _answer_bug(self, operation: DelayedOperation) -> None:
        """Answer a waiting request for which Python raised an unexpected exception."""
        request = operation.request
        self._channel.unpark(request.slot)
        self._send(request, self._dispatcher.met_bug(request))

    def _retire(self) -> None:
        """Hand this process's work to the other handlers, before it ends.

        First send the answers of executed requests, and end the running syncs, since
        other handlers wait for notices about them. Then put waiting (parked) requests
        back on the ring of requests, with their progress and deadlines. This wakes all
        other handlers, because a wake-up for one of them may have gone to this process.
        If the broker stops meanwhile, return at once.
        """
        until_ns = time.monotonic_ns() + _PLACE_NS
        while self._words[HEADER + HEADER_PHASE] < Phase.STOPPED:
            if time.monotonic_ns() > until_ns:
                self._channel.give_up_unplaced()
            # A sync that could not begin just now is begun by the handler that gets its
            # requests.
            if not self._channel.has_unplaced and not self._group_commit.is_syncing:
                break
            self._see_to_parked()
            self._epoll.poll(_UNPLACED_POLL_S)
        else:
            return
        self._channel.put_back(
            [operation.slot for operation in self._purgatory.operations()]
        )

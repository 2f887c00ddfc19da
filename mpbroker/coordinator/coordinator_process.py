"""The coordinator's process: its lane, its log, its clock; it never waits for one.

A turn: take requests from the lane, execute them, call the timers that are due, append
what came of it to __consumer_offsets (one batch a partition, whatever the number of
requests), start the syncs, give the answers whose records are on disk. Only for a lone
request are syncs waited for, where they take no time: see GroupCommit.sync_at_once.

    killed anywhere        its requests are put back and executed again by a successor,
                           which has everything from the log
    append or sync fails   the partition is off line, its groups are forgotten,
                           and whoever waits is told to look for a coordinator again

A request that parks (a join, a sync) costs its slot and nothing else.

Source: Kafka's CoordinatorRuntime.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Final, cast

from mpbroker.base.logger import get_logger
from mpbroker.coordinator.clock import Clock
from mpbroker.coordinator.coordinator_apis import CoordinatorApis
from mpbroker.coordinator.coordinator_topic import (
    CoordinatorTopic,
    LoadedRecord,
    newest,
)
from mpbroker.coordinator.durability import Awaited, Durability
from mpbroker.coordinator.groups.group_coordinator import GroupCoordinator
from mpbroker.coordinator.groups.group_offsets import OffsetAndMetadata
from mpbroker.coordinator.groups.group_records import read_offset, read_record
from mpbroker.coordinator.outbox import (
    Answer,
    Call,
    Markers,
    Outbox,
    Step,
    TopicPartition,
    rests_on,
    transaction_log,
)
from mpbroker.coordinator.timers import Timers
from mpbroker.coordinator.transactions.transactions import Transactions
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
    HEADER,
    HEADER_PHASE,
    HandlerCounter,
    Phase,
    handler_row,
)
from mpbroker.ipc.segment import Segment
from mpbroker.network.request_channel import HandlerEnd
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError, ProtocolError
from mpbroker.server.authorization.authorizer_error import AuthorizerError
from mpbroker.server.dispatcher import RequestDispatcher
from mpbroker.server.group_commit import GroupCommit
from mpbroker.server.purgatory import Purgatory
from mpbroker.server.quotas.client_quotas import ClientQuotas, with_throttle
from mpbroker.server.request import CLOSE, Request
from mpbroker.storage.log.disk_sync import DiskSync
from mpbroker.storage.log.partition_log import PartitionLog

if TYPE_CHECKING:
    from mpbroker.server.authorization.authorization import Authorization

_LOG = get_logger(__name__)

# So many requests share an append and a sync; a turn of them takes some 5 ms.
_MAX_BATCH: Final = 64
_IDLE_POLL_S: Final = 1.0
_UNPLACED_POLL_S: Final = 0.001
# So long a batch may grow while others are written to disk: a sync takes 1 to 5 ms.
_HOLD_NS: Final = 2_000_000
# While less is left to load than this takes, requests wait for it on the lane; after
# that they are told COORDINATOR_LOAD_IN_PROGRESS.
_LOAD_PATIENCE_S: Final = 0.5
# A turn's share of loading, once requests are served beside it.
_LOAD_TURN_S: Final = 0.02
_LOOK_AGAIN_MS: Final = 2000


class CoordinatorProcess:
    """The loop of the coordinator.

    Args:
        answer_error: makes the body that says an error, or None if the API cannot.
        sync: answers wait until their records are on disk.
        authorization: says who may do what; None: everybody everything.
    """

    def __init__(
        self,
        control: Segment,
        lane: CoordinatorLane,
        channel: HandlerEnd,
        doorbell: Doorbell,
        coordinator: GroupCoordinator,
        outbox: Outbox,
        timers: Timers,
        clock: Clock,
        topic: CoordinatorTopic,
        transactions: Transactions,
        purgatory: Purgatory,
        group_commit: GroupCommit,
        durability: Durability,
        disk: DiskSync,
        catch_up: Callable[[], object],
        client_host: Callable[[int], str],
        connection_name: Callable[[int], str],
        answer_error: Callable[[Request, ErrorCode], bytes | None],
        *,
        sync: bool,
        authorization: Authorization | None = None,
    ) -> None:
        self._words = control.words
        self._row = handler_row(COORDINATOR)
        self._lane = lane
        self._channel = channel
        self._coordinator = coordinator
        self._out = outbox
        self._timers = timers
        self._clock = clock
        self._topic = topic
        self._transactions = transactions
        self._purgatory = purgatory
        self._commit = group_commit
        self._durability = durability
        self._disk = disk
        self._catch_up = catch_up
        self._answer_error = answer_error
        self._sync = sync
        self.quotas: ClientQuotas | None = None
        self._call: Call | None = None
        apis = CoordinatorApis(
            coordinator,
            client_host,
            clock.now_ms,
            self._began,
            transactions.handlers,
            authorization,
        )
        self._dispatcher = RequestDispatcher(
            apis.apis, {}, answer_error, connection_name
        )
        self._loads: list[Iterator[int]] = []
        self._to_load: set[int] = set()  # the logs that these are of
        # What was last appended to each log: the log, and the offset behind it.
        self._ends: dict[int, tuple[PartitionLog, int]] = {}
        # Logs that could not be written or synced, and were not loaded again since:
        # nothing goes on that rests on them, however late in the turn it is looked at.
        self._lost: set[int] = set()
        # Answers whose records are still to be written, and since when the first waits.
        self._held: list[Answer] = []
        self._held_since_ns = 0
        self._epoll = select.epoll(flags=select.EPOLL_CLOEXEC)
        self._epoll.register(doorbell.fd, select.EPOLLIN | select.EPOLLET)
        if disk.event_fd >= 0:
            self._epoll.register(disk.event_fd, select.EPOLLIN | select.EPOLLET)
        # The topic was deleted under us, or somebody has made it with another number of
        # partitions: only a new start knows what is left, and who is in which.
        self.must_restart = False

    # -- the loop ------------------------------------------------------------------

    def run(self) -> None:
        """Serve until the broker stops."""
        # Nobody waits for it to be ready, so it says itself who it is.
        self._words[self._row + HANDLER_PID] = os.getpid()
        self._words[self._row + HANDLER_ACTIVE] = 1
        own_box().note(EventKind.SERVING)
        self._begin_loading()
        self._load(_LOAD_PATIENCE_S)
        self._coordinator.start_expiry(self._clock.now_ms())
        self._transactions.coordinator.start_timers(self._clock.now_ms())
        while (
            self._words[HEADER + HEADER_PHASE] < Phase.STOPPED and not self.must_restart
        ):
            self.turn()
        own_box().note(EventKind.ENDING)
        self._channel.flush()

    def turn(self) -> None:
        """Some requests and all that is due; or wait for something."""
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
        if self.must_restart and self._words[HEADER + HEADER_PHASE] < Phase.DRAINING:
            return  # what is claimed, and all that waits, is its successor's
        # Then what it asks for may be synced at once: nobody is held up by that.
        self._commit.is_alone = len(slots) <= 1 and not self._held
        if slots:
            words, row = self._words, self._row
            words[row + HANDLER_BUSY_SINCE] = time.monotonic_ns()
            for slot in slots:
                words[row + HANDLER_BUSY_SLOT] = slot + 1
                self._execute(slot)
            words[row + HANDLER_BUSY_SLOT] = 0
            words[row + HANDLER_COUNTERS + HandlerCounter.REQUESTS] += len(slots)
        if self._loads:
            self._load(_LOAD_TURN_S)
        if self._words[HEADER + HEADER_PHASE] >= Phase.DRAINING:
            # Nobody will come any more; and no timer may write behind the last flush.
            self._coordinator.refuse_waiting()
            self._transactions.coordinator.refuse_waiting(self._clock.now_ms())
        else:
            self._timers.expire(self._clock.now_ms())
        self._flush()
        self._see_to_syncs()
        while self._durability.go_on(time.monotonic_ns()):
            if self._out:
                # Who was told of a commit need not wait for its markers.
                self._channel.flush()
                self._flush()
            self._see_to_syncs()
        self._channel.flush()

    def _wait(self) -> None:
        if self._loads or self._out.answers or self.must_restart:
            return
        timeout = _UNPLACED_POLL_S if self._channel.has_unplaced else _IDLE_POLL_S
        if self._held_since_ns:
            timeout = _HOLD_NS / 1e9
        until_timer = (self._timers.next_ms - self._clock.now_ms()) / 1e3
        if self._words[HEADER + HEADER_PHASE] >= Phase.DRAINING:
            until_timer = _IDLE_POLL_S  # none is called any more
        self._epoll.poll(max(0.0, min(timeout, until_timer)))

    def _see_to_syncs(self) -> None:
        commit = self._commit
        if not commit.is_idle:
            commit.start()
            if not self._disk.is_idle:
                commit.process_finished()

    # -- requests ------------------------------------------------------------------

    def _execute(self, slot: int) -> None:
        received = self._channel.request(slot)
        request = self._dispatcher.parse(*received)
        if not isinstance(request, Request):
            # Handlers forward only what they could read and we serve.
            self._channel.close_connection(slot)
            return
        self._call = None
        started = time.monotonic_ns()
        answer = self._dispatcher.dispatch(request)
        done = time.monotonic_ns()
        if self.quotas is not None:
            self.quotas.charge_time(request, done - started)
        self._channel.note_wait(slot, done)
        if isinstance(answer, bytes) or answer is CLOSE:
            # Malformed, or it met a bug of ours; what it had begun must not answer it
            # a second time.
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

    # -- records and answers -------------------------------------------------------

    def _flush(self) -> None:
        """Append what is to be written; give or hold back what is to be answered.

        A step that need not wait may leave more of both.
        """
        while (self._out or self._held) and self._flush_once():
            pass

    def _flush_once(self) -> bool:
        """Say whether anything was done but to hold back."""
        out = self._out
        if self._holds_back():
            for answer in out.take_answers():
                if answer.after:
                    self._held.append(answer)
                else:
                    self._send(answer)
            return False
        now_ms = self._clock.now_ms()
        for partition, records in out.take_records().items():
            try:
                if partition < 0:
                    log, end = self._transactions.topic.append(
                        transaction_log(partition), records, now_ms
                    )
                else:
                    log, end = self._topic.append(partition, records, now_ms)
            except ApiError as error:
                self._failed(partition, error)
                continue
            self._ends[partition] = log, end
            self._purgatory.notify_waiters(log.row)
        for partition, transactional in out.take_transactional().items():
            try:
                log, end = self._topic.append_transactional(
                    partition, transactional, now_ms
                )
            except ApiError as error:
                self._failed(partition, error)
                continue
            self._ends[partition] = log, end
            self._purgatory.notify_waiters(log.row)
        for number, run in out.take_appended():
            if number not in self._lost:
                run()
        for markers in out.take_markers():
            self._mark(markers, now_ms)
        held, self._held, self._held_since_ns = self._held, [], 0
        resting: dict[tuple[int, ...], list[Answer]] = {}
        for answer in (*held, *out.take_answers()):
            if answer.after:
                resting.setdefault(answer.after, []).append(answer)
            else:
                self._send(answer)
        for after, answers in resting.items():
            self._give(answers, after)
        if out.steps and resting:
            # Who was told of a commit need not wait for what comes of it.
            self._channel.flush()
        for step in out.take_steps():
            self._go_on(step)
        return True

    def _failed(self, log: int, error: ApiError) -> None:
        """A log cannot be written."""
        _LOG.error("the coordinator's records cannot be written: %s", error)
        self._see_to_topics()
        self._lose(log)

    def _see_to_topics(self) -> None:
        if self._topic.has_changed or self._transactions.topic.has_changed:
            self.must_restart = True

    def _lose(self, log: int) -> None:
        self._lost.add(log)
        self._ends.pop(log, None)
        if log < 0:
            self._transactions.coordinator.failed(transaction_log(log))
        else:
            self._coordinator.failed(log)
        self._load_again(log)

    def _load_again(self, log: int) -> None:
        """See every so often whether a log that was lost can be used again.

        A disk that was full may have room; what a sync has failed on is off line until
        the broker's next start.
        """
        partition = log if log >= 0 else transaction_log(log)
        topic = self._topic if log >= 0 else self._transactions.topic

        def look(now_ms: int) -> None:
            try:
                topic.log_of(partition).require_online()
            except (ApiError, OSError):
                self._load_again(log)
                return
            if log in self._to_load:  # lost once more: first that load has to end
                self._load_again(log)
                return
            self._to_load.add(log)
            _LOG.info("%s-%d is loaded again", topic.name, partition)
            if log < 0:
                self._transactions.coordinator.begin_loading([partition])
                self._loads.insert(0, self._load_transactions(partition))
            else:
                self._coordinator.begin_loading([partition])
                self._loads.insert(0, self._load_partition(partition))

        due_ms = self._clock.now_ms() + _LOOK_AGAIN_MS
        self._timers.schedule(("load again", log), due_ms, look)

    def _holds_back(self) -> bool:
        """Whether what is to be written waits for the syncs under way.

        One batch and one sync for all that came meanwhile, instead of one each; a
        commit that comes alone meets no sync, and waits for none.
        """
        if not (self._out.records or self._out.transactional):
            return False
        if self._disk.is_idle or self._words[HEADER + HEADER_PHASE] >= Phase.DRAINING:
            return False
        now_ns = time.monotonic_ns()
        if not self._held_since_ns:
            self._held_since_ns = now_ns
        return now_ns - self._held_since_ns < _HOLD_NS

    def _give(self, answers: list[Answer], after: tuple[int, ...]) -> None:
        """Send what rests on the same logs, once these are on disk."""
        awaited = self._awaited(after)
        if awaited is None:
            for answer in answers:
                self._give_error(answer)
            return
        self._when_durable(
            awaited, lambda failed: self._complete(answers, cast("list[int]", failed))
        )

    def _awaited(self, after: tuple[int, ...]) -> list[Awaited] | None:
        """Which logs are still to be synced; None: one could not be written."""
        awaited = []
        for each in after:
            number, waits_for_disk = rests_on(each)
            if number in self._lost:
                return None
            found = self._ends.get(number) if waits_for_disk else None
            if found is not None:
                awaited.append(Awaited(number, *found))
        return awaited

    def _go_on(self, step: Step) -> None:
        awaited = self._awaited(step.after)
        if awaited is None:
            return step.run(False)

        def complete(failed: list[Hashable]) -> None:
            for log in cast("list[int]", failed):
                self._lose(log)
            step.run(not failed)

        self._when_durable(awaited, complete)

    def _mark(self, markers: Markers, now_ms: int) -> None:
        """Append markers, and say so; when they are on disk, if somebody waits."""
        results, awaited, appended = self._transactions.markers.append(markers, now_ms)

        def complete(failed: list[Hashable]) -> None:
            for partition in cast("list[TopicPartition]", failed):
                if partition in results:
                    results[partition] = ErrorCode.KAFKA_STORAGE_ERROR
            markers.done(results, self._clock.now_ms(), appended)

        self._when_durable(awaited if markers.waits else [], complete)

    def _when_durable(
        self, awaited: list[Awaited], complete: Callable[[list[Hashable]], None]
    ) -> None:
        """Go on when all logs are on disk as far as is wanted, perhaps at once."""
        if self._sync:
            self._durability.when(awaited, complete, time.monotonic_ns())
        else:
            complete([])

    def _send(self, answer: Answer) -> None:
        request: Request = answer.call.request
        try:
            if answer.call.amend is not None:
                answer.call.amend(answer.response)
            body = answer.response.encode(request.api_version)
            body = with_throttle(request, body)
            self._channel.send_bytes(request.slot, request.frame(body))
        except (ProtocolError, OverflowError):
            # A bug of ours, or larger than all the memory for answers.
            _LOG.exception("an answer of the coordinator cannot be sent")
            self._channel.close_connection(request.slot)
        except AuthorizerError:
            _LOG.exception("an answer cannot be given: the authorizer has failed")
            self._channel.close_connection(request.slot)

    def _give_error(self, answer: Answer) -> None:
        """What it asked for could not be written."""
        request: Request = answer.call.request
        body = self._answer_error(request, ErrorCode.COORDINATOR_NOT_AVAILABLE)
        if body is not None:
            self._channel.send_bytes(request.slot, request.frame(body))
        elif answer.refuse(ErrorCode.COORDINATOR_NOT_AVAILABLE):
            self._send(answer)
        else:
            self._channel.close_connection(request.slot)

    def _complete(self, answers: list[Answer], lost: list[int]) -> None:
        """What answers waited for is on disk, or (lost logs) never will be.

        A partition that cannot be synced is off line for good.
        """
        for answer in answers:
            if lost:
                self._give_error(answer)
            else:
                self._send(answer)
        for log in lost:
            self._lose(log)

    # -- loading -------------------------------------------------------------------

    def _begin_loading(self) -> None:
        partitions = self._topic.partitions_to_load()
        self._coordinator.begin_loading(partitions)
        others = self._transactions.topic.partitions_to_load()
        self._transactions.coordinator.begin_loading(others)
        # Partitions are closed until transactions' ends are whole: they come first.
        self._loads = [self._load_transactions(partition) for partition in others]
        self._loads.append(self._end_transactions())
        self._loads.extend(map(self._load_partition, partitions))
        self._to_load.update(partitions, map(transaction_log, others))
        self._loads.reverse()

    def _load(self, patience_s: float) -> None:
        """Go on loading for so long at most; a little more, if that is the end."""
        until = time.monotonic() + patience_s
        while self._loads and time.monotonic() < until:
            if next(self._loads[-1], None) is None:
                self._loads.pop()

    def _end_transactions(self) -> Iterator[int]:
        """Behind the transactions, before the groups."""
        self._transactions.loading.finish()
        yield from ()

    def _load_partition(self, partition: int) -> Iterator[int]:
        coordinator, clock = self._coordinator, self._clock
        replayed = 0
        try:
            for records in self._topic.load(partition):
                now_ms = clock.now_ms()
                for record in newest(records):
                    self._replay(partition, record, now_ms)
                replayed += len(records)
                yield replayed
            self._note_end(partition, self._topic.log_of(partition))
        except (ApiError, OSError) as error:
            _LOG.error("partition %d of groups cannot be loaded: %s", partition, error)
            coordinator.failed(partition)
            self._load_again(partition)
        self._to_load.discard(partition)
        coordinator.loaded(partition, clock.now_ms())

    def _load_transactions(self, partition: int) -> Iterator[int]:
        transactions, log = self._transactions, transaction_log(partition)
        try:
            yield from transactions.loading.replay(partition)
            self._note_end(log, transactions.topic.log_of(partition))
        except (ApiError, OSError) as error:
            _LOG.error(
                "partition %d of transactions cannot be loaded: %s", partition, error
            )
            transactions.coordinator.failed(partition)
            self._load_again(log)
        self._to_load.discard(log)
        transactions.coordinator.loaded(partition, self._clock.now_ms())

    def _note_end(self, number: int, log: PartitionLog) -> None:
        """What was loaded may not be on disk yet.

        A predecessor may have died between append and sync, and be asked for it again.
        """
        self._lost.discard(number)
        self._ends[number] = log, log.row.log_end_offset

    def _replay(self, partition: int, record: LoadedRecord, now_ms: int) -> None:
        if record.commit is not None:
            self._coordinator.replay_end_of_transaction(
                partition, record.producer_id, commit=record.commit
            )
            return
        offset = read_offset(record.key, record.value)
        if offset is not None:
            group_id, topic, index, committed = offset
            self._coordinator.replay_offset(
                group_id,
                topic,
                index,
                None if committed is None else OffsetAndMetadata._make(committed),
                now_ms,
                record.producer_id,
            )
            return
        try:
            read = read_record(record.key, record.value)
            if read is not None:
                self._coordinator.replay(*read, now_ms, record.producer_id)
        except (ProtocolError, ValueError) as error:
            _LOG.error("an unreadable record of partition %d: %s", partition, error)

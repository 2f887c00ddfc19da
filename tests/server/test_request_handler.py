"""The handler's loop: nothing that is due waits, and no bug ends it."""

from __future__ import annotations

import time

import pytest

import mpbroker.server.request_handler as module
from mpbroker.ipc.layout import (
    HANDLER_ACTIVE,
    HANDLER_BUSY_SLOT,
    HANDLER_READY,
    PROCESSOR_SLOTS_USED,
    SLOT_RESPONSE_KIND,
    SLOT_RESPONSE_LENGTH,
    SLOT_RESPONSE_OFFSET,
    Phase,
    ResponseKind,
    handler_row,
    processor_row,
    slot_row,
)
from mpbroker.ipc.tables.partition_table import LogState
from mpbroker.network.request_channel import HandlerEnd, ProcessorEnd
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.headers import encode_request_header
from mpbroker.server.core_cache import NoCoreCache
from mpbroker.server.dispatcher import RequestDispatcher, ServedApi
from mpbroker.server.group_commit import GroupCommit
from mpbroker.server.purgatory import Purgatory, sync_key
from mpbroker.server.request import CLOSE, NO_RESPONSE, PARKED
from mpbroker.server.request_handler import RequestHandler
from mpbroker.storage.log.disk_sync import DiskSync
from tests.server.test_group_commit import Disk, Log
from tests.support.children import running, wait_until
from tests.support.memory import claimer_of


class Stage:
    """A handler with one API, Metadata, that does what the test says."""

    def __init__(self, memory, handler=0, disk=None):
        self.memory = memory
        self.number = handler
        self.disk = disk or Disk()
        self.disk.event_fd = getattr(self.disk, "event_fd", -1)
        self.channel = HandlerEnd(
            handler,
            memory.control,
            memory.arena,
            memory.arena_layout,
            memory.ring,
            memory.responses,
        )
        self.purgatory = Purgatory(handler, memory.table, memory.notices)
        self.commit = GroupCommit(handler, self.disk, self.purgatory.notify)
        self.handle = lambda request: b"fine"
        self.dispatcher = RequestDispatcher(
            {
                3: ServedApi(
                    ApiKey.METADATA, (0, 13), lambda request: self.handle(request)
                )
            },
            {},
            lambda request, code: b"error %d" % code,
            str,
        )
        memory.control.words[handler_row(handler) + HANDLER_ACTIVE] = 1
        self.handler = RequestHandler(
            handler,
            memory.control,
            self.channel,
            self.dispatcher,
            self.purgatory,
            self.commit,
            memory.handler_bells[handler],
            NoCoreCache(),
        )

    def send(self, slot, body=b""):
        """Publish a Metadata request in a slot."""
        memory = self.memory
        used = processor_row(0) + PROCESSOR_SLOTS_USED
        words = memory.control.words
        words[used] = max(words[used], slot + 1)
        frame = encode_request_header(ApiKey.METADATA, 1, slot, "test") + body
        at = memory.arena_layout.block(slot) + 4
        memory.arena.view[at : at + len(frame)] = frame
        end = ProcessorEnd(memory.control, memory.ring, memory.responses[0])
        end.send_request(slot, at, len(frame), at + 13 * 1024, time.monotonic_ns())
        end.flush()

    def answers(self):
        """What has been answered: the body, or the response's kind."""
        found = {}
        words = self.memory.control.words
        for slot in self.memory.responses[0].pop():
            row = slot_row(slot)
            at = words[row + SLOT_RESPONSE_OFFSET]
            length = words[row + SLOT_RESPONSE_LENGTH]
            kind = ResponseKind(words[row + SLOT_RESPONSE_KIND])
            assert slot not in found
            found[slot] = kind
            if kind == ResponseKind.BYTES:
                frame = bytes(self.memory.arena.view[at : at + length])
                assert int.from_bytes(frame[:4], "big") == len(frame) - 4
                assert int.from_bytes(frame[4:8], "big") == slot
                found[slot] = frame[8:]
        return found


@pytest.fixture
def stage(memory, monkeypatch):
    monkeypatch.setattr(module, "_IDLE_POLL_S", 0)
    return Stage(memory)


def test_each_kind_of_answer_becomes_what_the_processor_does(stage):
    kinds = {1: b"body", 2: CLOSE, 3: NO_RESPONSE, 4: [b"some", b"parts"]}
    stage.handle = lambda request: kinds[request.slot]
    for slot in kinds:
        stage.send(slot)
    stage.handler.turn()
    assert stage.answers() == {
        1: b"body",
        2: ResponseKind.CLOSE,
        3: ResponseKind.NONE,
        4: b"someparts",
    }


def test_a_bug_is_answered_and_the_next_request_is_served(stage, caplog):
    def handle(request):
        if request.slot == 1:
            raise ZeroDivisionError("of ours")
        return b"fine"

    stage.handle = handle
    stage.send(1)
    stage.send(2)
    stage.handler.turn()
    assert stage.answers() == {1: b"error -1", 2: b"fine"}
    assert "ZeroDivisionError: of ours" in caplog.text


def test_an_answer_too_large_for_any_memory_closes_its_connection(stage):
    stage.handle = lambda request: (
        b"fine" if request.slot == 2 else bytes(65 * 1024 * 1024)
    )
    stage.send(1)
    stage.send(2)
    stage.handler.turn()
    assert stage.answers() == {1: ResponseKind.CLOSE, 2: b"fine"}


def test_a_request_that_cannot_be_read_closes_its_connection(stage):
    stage.send(1)
    stage.memory.arena.view[stage.memory.arena_layout.block(1) + 12] = 0x7F
    stage.send(2)
    stage.handler.turn()
    assert stage.answers() == {1: ResponseKind.CLOSE, 2: b"fine"}


def test_the_word_for_the_request_under_way_names_it_and_only_then(stage):
    seen = []
    word = handler_row(0) + HANDLER_BUSY_SLOT
    words = stage.memory.control.words

    def handle(request):
        seen.append(words[word])
        return b""

    stage.handle = handle
    for slot in (4, 9):
        stage.send(slot)
    stage.handler.turn()
    assert seen == [5, 10]
    assert words[word] == 0


class Parked:
    """A request that is answered when its row's log is on disk up to an offset."""

    may_end_early = False

    def __init__(self, stage, request, log, offset, bug=False):
        self.stage, self.request, self.log = stage, request, log
        self.slot = request.slot
        self.offset, self.bug = offset, bug
        self.keys = [sync_key(log.row.index)]
        self.deadline_ns = 1 << 62
        self.done = False

    def try_complete(self, row):
        if self.log.row.durable_end_offset < self.offset:
            self.stage.commit.want(self.log)
            return False
        if self.bug:
            raise ZeroDivisionError("when answering")
        self.expire()
        return True

    def expire(self):
        self.stage.channel.unpark(self.request.slot)
        self.stage.channel.send_bytes(self.request.slot, self.request.frame(b"late"))


def park_until_durable(stage, log, **options):
    """A handler that appends one record and waits for the disk."""

    def handle(request):
        end = log.row.log_end_offset + 1
        log.row.publish(LogState(log_end_offset=end))
        operation = Parked(stage, request, log, end, **options)
        stage.channel.park(request.slot, 1 << 62)
        stage.purgatory.watch(operation)
        stage.commit.want(log)
        return PARKED

    return handle


def test_a_request_that_waits_for_the_disk_is_answered_when_it_is_there(stage):
    log = Log(stage.memory, 1)
    stage.handle = park_until_durable(stage, log)
    stage.send(1)
    stage.handler.turn()
    assert stage.answers() == {}
    stage.disk.end()
    stage.handler.turn()
    assert stage.answers() == {1: b"late"}


def test_what_came_too_late_for_anothers_sync_starts_the_next_at_once(stage):
    """Not when something happens to wake this handler."""
    log = Log(stage.memory, 1)
    other = GroupCommit(5, Disk(), stage.purgatory.notify)
    log.row.publish(LogState(log_end_offset=1))
    other.want(log)
    other.start()
    stage.handle = park_until_durable(stage, log)
    stage.send(1)
    stage.handler.turn()
    assert stage.disk.started == []  # asked to be told of the other's
    other.disk.end()
    other.process_finished()
    stage.handler.turn()
    assert len(stage.disk.started) == 1
    stage.disk.end()
    stage.handler.turn()
    assert stage.answers() == {1: b"late"}


def test_syncs_that_are_made_at_once_are_answered_in_the_same_turn(memory, tmp_path):
    def no_aio(*_):
        return -1

    stage = Stage(memory, disk=DiskSync(no_aio))
    log = Log(memory, 1)
    with open(tmp_path / "log", "wb") as file:
        log.sync.segments_to_sync = lambda start, end: [file.fileno()]
        stage.handle = park_until_durable(stage, log)
        stage.send(1)
        stage.handler.turn()
    assert stage.answers() == {1: b"late"}


def test_a_bug_in_answering_what_was_parked_is_answered_too(stage, caplog):
    bad, good = Log(stage.memory, 1), Log(stage.memory, 2)
    handlers = {
        1: park_until_durable(stage, bad, bug=True),
        2: park_until_durable(stage, good),
    }
    stage.handle = lambda request: handlers[request.slot](request)
    stage.send(1)
    stage.send(2)
    stage.handler.turn()
    stage.disk.end()
    stage.handler.turn()
    assert stage.answers() == {1: b"error -1", 2: b"late"}
    assert "when answering" in caplog.text
    assert stage.purgatory.size == 0


def test_a_retiring_handler_hands_what_is_parked_to_the_others(memory):
    stage = Stage(memory, handler=3)
    log = Log(memory, 1)
    # The sync is another's: a handler waits for its own before it retires.
    other = GroupCommit(5, Disk(), stage.purgatory.notify)
    other.want(log)
    other.start()
    stage.handle = park_until_durable(stage, log)
    stage.send(7)

    def live():
        stage.handler.run()

    row = handler_row(3)
    with running(live) as (child,):
        wait_until(lambda: memory.table.row(1).log_end_offset == 1)
        assert memory.control.words[row + HANDLER_READY] == 0
        memory.control.words[row + HANDLER_ACTIVE] = 0
        memory.handler_bells[3].ring()
        assert child.wait() == 0
    assert memory.ring.take(9, 1, 1, arm=False) == [7]
    assert claimer_of(memory, 7) == 1


def test_a_handler_ends_when_the_broker_has_stopped(memory):
    stage = Stage(memory)
    with running(stage.handler.run) as (child,):
        memory.phase = Phase.STOPPED
        memory.wake_everybody()
        assert child.wait() == 0


def test_a_sleeping_handler_is_woken_by_requests_notices_and_syncs(memory, tmp_path):
    """It sleeps without a timeout: without a wake-up it would never answer."""
    with open(tmp_path / "log", "wb") as file:
        stage = Stage(memory, disk=DiskSync())
        log = Log(memory, 1)
        log.sync.segments_to_sync = lambda start, end: [file.fileno()]
        stage.handle = park_until_durable(stage, log)

        def live():
            module._IDLE_POLL_S = 1000.0
            # Its own asynchronous I/O: a context is not inherited.
            mine = Stage(memory, disk=DiskSync())
            mine.handle = park_until_durable(mine, log)
            mine.handler.run()

        with running(live):
            answered = {}
            for slot in range(20):
                stage.send(slot)
                wait_until(lambda: answered.update(stage.answers()) or answered)
                assert answered == {slot: b"late"}
                answered.clear()

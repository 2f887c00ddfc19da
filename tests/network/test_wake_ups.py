"""A processor that sleeps is woken by whatever it should do next.

It runs in a process of its own and sleeps without end: who is not woken never answers.
"""

from __future__ import annotations

import mmap
import select
import socket
import threading

import pytest

import mpbroker.network.processor as processor_module
from mpbroker.ipc.compiled import IS_COMPILED
from mpbroker.ipc.layout import (
    HEADER,
    HEADER_COUNTERS,
    HEADER_KEEPER,
    PROCESSOR_LISTENER,
    PROCESSOR_READY,
    Phase,
    ProcessorCounter,
    processor_row,
)
from mpbroker.network.processor import Processor, ProcessorParts
from mpbroker.supervisor.connection_moves import is_moved, move_connections
from tests.network.rig import Client, Rig, frame
from tests.support.children import running, wait_until
from tests.support.memory import MAX_REQUEST_BYTES, broker_memory


def is_readable(sock: socket.socket) -> bool:
    poll = select.poll()  # select() knows no descriptor above 1023
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


class Counted(Processor):
    """A processor that says how often Python had a turn."""

    turns: mmap.mmap

    def turn(self) -> None:
        turns = int.from_bytes(self.turns[:8], "little") + 1
        self.turns[:8] = turns.to_bytes(8, "little")
        super().turn()


class Outside(Rig):
    """A rig whose processor runs in a child."""

    def start_processor(self) -> None:
        """Not here."""
        self._turns = mmap.mmap(-1, mmap.PAGESIZE)

    @property
    def python_turns(self) -> int:
        return int.from_bytes(self._turns[:8], "little")

    def run(self) -> None:
        processor_module._IDLE_POLL_S = 1000.0
        memory = self.memory
        Counted.turns = self._turns
        parts = ProcessorParts(
            memory.control,
            memory.arena,
            memory.arena_layout,
            memory.ring,
            memory.processor_bells[0],
            memory.handovers,
            memory.keeper_link,
            memory.notices,
        )
        Counted(0, parts, MAX_REQUEST_BYTES, 0).run()

    def until(self, condition):
        def look():
            for client in self.clients:
                client.turn()
            if self.handles:
                self.handle()
            return condition()

        return wait_until(look)


@pytest.fixture
def outside(request):
    limit = getattr(request, "param", 500)
    with broker_memory(queued_max_requests=limit) as memory:
        rig = Outside(memory)
        ready = processor_row(0) + PROCESSOR_READY
        memory.control.words[ready] = -1
        with running(rig.run) as (child,):
            wait_until(lambda: memory.control.words[ready] == 0)
            rig.child = child
            yield rig
            for client in rig.clients:
                client.close()


def fall_asleep(outside: Outside) -> None:
    """Let a request and its answer pass, so that the processor has nothing to do."""
    client = outside.connect()
    client.send(frame(b"?"))
    outside.until(client.frames)


def test_a_sleeping_processor_is_woken_by_bytes_connections_and_answers(outside):
    fall_asleep(outside)
    first = outside.connect()
    outside.answer = outside.hold
    first.send(frame(b"1"))
    outside.until(lambda: outside.held)
    second = outside.connect()
    second.send(frame(b"2"))
    outside.until(lambda: len(outside.held) == 2)
    for client in (first, second):
        outside.release(1)
        outside.until(client.frames)
    assert first.frames() + second.frames() == [b"1", b"2"]


def test_a_sleeping_processor_is_woken_to_read_behind_a_request_that_waits(outside):
    fall_asleep(outside)
    client = outside.connect()
    outside.answer = outside.hold
    for number in range(1, 4):
        client.send(frame(b"\0\0%d" % number))
        outside.until(lambda number=number: len(outside.held) == number)
        outside.handler.read_on(outside.held[-1][0])
    outside.held.reverse()
    outside.release()
    outside.until(lambda: len(client.frames()) == 3)
    assert client.frames() == [b"\0\0001", b"\0\0002", b"\0\0003"]


def test_pipelined_requests_never_wait_for_something_else_to_happen(outside):
    client = outside.connect()
    client.send(frame(b"x") * 500)
    outside.until(lambda: len(client.frames()) == 500)


@pytest.mark.parametrize("outside", [1, 2], indirect=True)
def test_what_a_full_ring_held_back_is_published_when_there_is_room(outside):
    """Although no answer comes: those taken wait, as fetches do."""
    outside.answer = outside.hold
    outside.handles = False
    clients = [outside.connect() for _ in range(9)]
    for number, client in enumerate(clients):
        client.send(frame(b"%d" % number))
        client.turn()
    outside.until(lambda: not outside.memory.ring.has_room())
    late = [outside.connect() for _ in range(3)]
    for client in late:
        client.send(frame(b"late"))
    # Until it has seen that these too have something to say, and cannot read it.
    outside.until(lambda: outside.counter(ProcessorCounter.CONNECTIONS) == 12)
    turns = iter(range(200))
    outside.until(lambda: next(turns, None) is None)
    outside.handles = True
    outside.until(lambda: len(outside.held) == 12)


def test_large_answers_go_on_as_soon_as_they_are_read(outside):
    outside.answer = lambda end, slot, _: end.send_bytes(slot, frame(b"x" * 9_000_000))
    client = outside.connect()
    client.send(frame(b"?") * 5)
    outside.until(lambda: len(client.frames()) == 5)


def test_a_processor_ends_when_the_broker_drains_and_answers_what_it_has(outside):
    outside.answer = outside.hold
    idle: Client = outside.connect()
    busy = outside.connect()
    busy.send(frame(b"x"))
    outside.until(lambda: outside.held)
    outside.memory.phase = Phase.DRAINING
    outside.memory.wake_everybody()
    outside.until(lambda: idle.is_closed)
    outside.release()
    outside.until(lambda: busy.is_closed)
    assert busy.frames() == [b"x"]
    assert outside.child.wait() == 0


in_core = pytest.mark.skipif(not IS_COMPILED, reason="Python has a turn a wake-up")


@in_core
def test_plain_requests_and_answers_pass_without_any_python(outside):
    fall_asleep(outside)
    clients = [outside.connect() for _ in range(3)]
    for client in clients:
        client.send(frame(b"?"))
    outside.until(lambda: all(client.frames() for client in clients))
    before = outside.python_turns
    for client in clients * 100:
        client.send(frame(b"?"))
        answers = len(client.frames())
        outside.until(lambda of=client, had=answers: len(of.frames()) > had)
    assert outside.python_turns - before < 10


def test_who_stays_in_the_core_hears_of_a_new_keeper_and_of_an_order(outside):
    memory, keeper = outside.memory, outside.memory.keeper_pair[1]
    words = memory.control.words
    words[HEADER + HEADER_COUNTERS] = 1  # the kernel's can be relied on
    for processor in (0, 1):
        words[processor_row(processor) + PROCESSOR_LISTENER] = 1
    for _ in range(3):
        fall_asleep(outside)
    for _ in range(2):
        words[HEADER + HEADER_KEEPER] += 1
        memory.processor_bells[0].ring()
        outside.until(lambda: is_readable(keeper))
        keeper.recv(1 << 16)
    for _ in range(2):
        move_connections(memory, 0, [1], 1)
        outside.until(lambda: is_moved(memory, 0))
    assert outside.counter(ProcessorCounter.MOVED_OUT) == 2


@in_core
def test_who_stays_in_the_core_comes_back_when_the_time_is_over(make_rig):
    """Though there is always something to do."""
    rig = make_rig()
    client = rig.connect()
    client.send(frame(b"?"))
    rig.pump(client.frames)
    rig.memory.processor_bells[0].ring()  # the first is news
    rig.turns()
    is_back = threading.Event()
    answered = 0

    def go_on():
        nonlocal answered
        while not is_back.is_set():
            client.send(frame(b"?"))
            before = len(client.frames())
            while len(client.frames()) == before and not is_back.is_set():
                client.turn()
                rig.handle()
            answered += 1

    others = threading.Thread(target=go_on)
    others.start()
    try:
        rig.processor._compiled.turn(500, True)
    finally:
        is_back.set()
        others.join()
    assert answered > 1

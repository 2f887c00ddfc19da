"""A throttled connection is answered at once, and not heard before its time is over.

Kafka's SocketServerTest (responses with a throttled channel) and
ThrottledChannelExpirationTest; the time is what the test says it is.
"""

from __future__ import annotations

import pytest

from mpbroker.ipc.compiled import core
from mpbroker.ipc.layout import (
    CONNECTION_MUTED_UNTIL,
    SLOT_CONNECTION,
    ConnectionState,
    ProcessorCounter,
    connection_row,
    slot_row,
)
from mpbroker.network import processor as processor_module
from mpbroker.network.channel import Channel
from mpbroker.network.throttles import Throttles
from mpbroker.supervisor.repair.recovery import Repair
from tests.network.rig import echo, frame
from tests.network.test_departures import Two

READING = ConnectionState.READING
S = 1_000_000_000


class Clock:
    """The processor's: it stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1_000 * S

    def monotonic_ns(self) -> int:
        return self.now


class CoreAtClock:
    """The compiled core, which knows no other time than the real one."""

    def __init__(self, core, clock) -> None:
        self._core = core
        self._clock = clock
        self.answer = core.answer

    def turn(self, timeout_ms, may_stay):
        events, answers, _, waited, is_busy = self._core.turn(timeout_ms, may_stay)
        return events, answers, self._clock.now, waited, is_busy


@pytest.fixture(params=["compiled", "python"])
def clock(request, monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(processor_module, "time", made)
    compiled = processor_module.compiled_turn
    monkeypatch.setattr(
        processor_module,
        "compiled_turn",
        lambda *args: (
            CoreAtClock(compiled(*args), made)
            if request.param == "compiled" and core is not None
            else None
        ),
    )
    return made


def mute(end, slot, until_ns):
    """What a handler does before it answers."""
    words = end._words
    connection = words[slot_row(slot) + SLOT_CONNECTION]
    words[connection_row(connection) + CONNECTION_MUTED_UNTIL] = until_ns


def throttling(clock, for_ns, *, answers=True):
    """An ``answer`` that throttles requests that begin with a T."""

    def answer(end, slot, body):
        if body.startswith(b"T"):
            mute(end, slot, clock.now + for_ns)
        if answers:
            echo(end, slot, body)
        else:
            end.send_nothing(slot)

    return answer


@pytest.fixture
def throttled(make_rig, clock):
    rig = make_rig(answer=throttling(clock, 5 * S))
    client = rig.connect()
    client.send(frame(b"T"))
    rig.pump(lambda: client.frames() == [b"T"])
    return rig, client


def test_the_answer_comes_at_once_and_the_next_request_waits(throttled, clock):
    rig, client = throttled
    client.send(frame(b"next"))
    rig.turns()
    clock.now += 5 * S - 1
    rig.turns()
    assert rig.requests == [b"T"]
    clock.now += 1
    rig.pump(lambda: client.frames() == [b"T", b"next"])


def test_what_was_pipelined_behind_it_waits_too(make_rig, clock):
    rig = make_rig(answer=throttling(clock, 5 * S))
    client = rig.connect()
    client.send(frame(b"T 1") + frame(b"T 2") + frame(b"3"))
    rig.pump(lambda: client.frames() == [b"T 1"])
    for answered in ([b"T 1", b"T 2"], [b"T 1", b"T 2", b"3"]):
        rig.turns()
        assert client.frames() == answered[:-1]
        clock.now += 5 * S
        rig.pump(lambda answered=answered: client.frames() == answered)


def test_without_an_answer_it_is_muted_as_well(make_rig, clock):
    rig = make_rig(answer=throttling(clock, S, answers=False))
    client = rig.connect()
    client.send(frame(b"T") + frame(b"next"))
    rig.pump(lambda: rig.requests)
    rig.turns()
    assert rig.requests == [b"T"]
    clock.now += S
    rig.pump(lambda: rig.requests == [b"T", b"next"])


def test_an_answer_that_comes_after_its_time_mutes_nobody(make_rig, clock):
    rig = make_rig()
    rig.answer = rig.hold
    client = rig.connect()
    client.send(frame(b"slow") + frame(b"next"))
    [(slot, _)] = rig.pump(lambda: rig.held)
    mute(rig.handler, slot, clock.now + S)
    clock.now += S
    rig.answer = echo
    rig.release()
    rig.pump(lambda: client.frames() == [b"slow", b"next"])
    row = connection_row(rig.memory.control.words[slot_row(slot) + SLOT_CONNECTION])
    assert rig.memory.control.words[row + CONNECTION_MUTED_UNTIL] == 0


def test_others_are_served_meanwhile(throttled, clock):
    rig, client = throttled
    client.send(frame(b"next"))
    other = rig.connect()
    for number in range(20):
        other.send(frame(b"%d" % number))
    rig.pump(lambda: len(other.frames()) == 20)
    assert client.frames() == [b"T"]
    clock.now += 5 * S
    rig.pump(lambda: len(client.frames()) == 2)


def test_who_is_muted_keeps_nobody_waiting_when_the_ring_has_room(make_rig, clock):
    rig = make_rig(queued_max_requests=1)
    rig.answer = rig.hold
    muted, *others, late = (rig.connect() for _ in range(4))
    rig.pump(lambda: rig.connections == 4)
    muted.send(frame(b"T") + frame(b"next"))
    [(slot, _)] = rig.pump(lambda: rig.held)
    mute(rig.handler, slot, clock.now + S)
    rig.handles = False
    for other in others:
        other.send(frame(b"early"))
    rig.pump(lambda: rig.processor._requests.is_blocked)
    rig.release()
    rig.pump(lambda: len(rig.processor._postponed) == 1)
    late.send(frame(b"late"))
    rig.pump(lambda: len(rig.processor._postponed) == 2)
    rig.handle()
    rig.processor.turn()
    assert not rig.processor._postponed
    clock.now += S


def test_a_client_may_go_while_it_is_throttled(throttled, clock):
    rig, client = throttled
    client.send(frame(b"next"))
    rig.turns()
    client.close()
    rig.turns()
    clock.now += 5 * S
    rig.pump(lambda: not rig.connections)


def test_who_is_muted_for_longer_than_it_may_be_idle_is_closed(make_rig, clock):
    """After idleExpiryWithBufferedReceives: a look in between is no activity."""
    rig = make_rig(answer=throttling(clock, 3600 * S), max_idle_ns=10 * S)
    client = rig.connect()
    client.send(frame(b"T") + frame(b"next"))
    rig.pump(lambda: client.frames() == [b"T"])
    for _ in range(8):
        clock.now += S
        client.send(frame(b"more"))
        rig.turns(5)
    assert not client.is_closed
    clock.now += 4 * S
    rig.pump(lambda: client.is_closed)
    assert rig.counter(ProcessorCounter.CLOSED_IDLE) == 1
    assert rig.requests == [b"T"]


def test_the_successor_of_a_processor_goes_on_muting(make_rig, clock):
    rig = make_rig(kind=Two, answer=throttling(clock, 5 * S))
    client = rig.connect()
    client.send(frame(b"T"))
    rig.pump(lambda: client.frames() == [b"T"])
    client.send(frame(b"next"))
    rig.turns()
    for channel in rig.processor._channels.values():
        channel.sock.close()  # killed; the keeper has a duplicate
    Repair(rig.memory).after_processor(0)
    rig.start_processor()
    rig.processor.take_over()
    rig.turns()
    assert rig.requests == [b"T"]
    clock.now += 5 * S
    rig.pump(lambda: client.frames() == [b"T", b"next"])


def test_a_throttled_connection_that_moves_stays_muted(make_rig, clock):
    rig = make_rig(kind=Two, answer=throttling(clock, 5 * S))
    client = rig.connect()
    client.send(frame(b"T"))
    rig.pump(lambda: client.frames() == [b"T"])
    client.send(frame(b"next"))
    rig.turns()
    rig.move()
    rig.pump(lambda: rig.other.connections == 1)
    rig.turns()
    assert rig.requests == [b"T"]
    clock.now += 5 * S
    rig.pump(lambda: client.frames() == [b"T", b"next"])


# -- the timers -----------------------------------------------------------------------


class _Sock:
    def fileno(self):
        return 7


def test_each_is_due_once_in_the_order_of_their_times():
    words = memoryview(bytearray(8 * 200)).cast("q")
    throttles = Throttles(words)
    assert throttles.poll_s(1.0, 0) == 1.0
    channels = []
    for place, until in enumerate([30, 10, 20, 10]):
        channel = Channel(_Sock(), place, 32 * place)
        words[32 * place + CONNECTION_MUTED_UNTIL] = until * S
        assert throttles.holds(channel, 0)
        channels.append(channel)
    assert throttles.poll_s(15.0, 0) == 10.0
    assert list(throttles.due(10 * S - 1)) == []
    assert list(throttles.due(20 * S)) == [channels[1], channels[3], channels[2]]
    assert list(throttles.due(20 * S)) == []
    assert throttles.poll_s(15.0, 40 * S) == 0.0
    assert [channel.waiting for channel in channels] == [True, False, False, False]
    assert not throttles.holds(channels[1], 10 * S)
    assert words[32 + CONNECTION_MUTED_UNTIL] == 0

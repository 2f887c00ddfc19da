"""Clients that hold on to what is not theirs, and those that are in a hurry."""

from __future__ import annotations

import socket

from mpbroker.ipc.layout import (
    SLOT_COMPLETED,
    ConnectionState,
    ProcessorCounter,
    slot_row,
)
from tests.network.rig import echo, frame
from tests.network.test_slow_and_gone import big_answer, narrow_pair

IDLE_NS = 30_000_000


def never_read(rig):
    """A client that has asked for much, and does not read it."""
    client = rig.connect(narrow_pair())
    client.reads = False
    client.send(frame(b"big"))
    rig.pump(lambda: channel_in(rig, ConnectionState.SENDING))
    return client


def channel_in(rig, state):
    channels = rig.processor._channels.values()
    return next((each for each in channels if each.state == state), None)


def answer_by_size(end, slot, body):
    (big_answer if body == b"big" else echo)(end, slot, body)


def test_who_reads_no_answer_is_closed_when_its_time_is_over(make_rig):
    rig = make_rig(answer=answer_by_size)
    silent = never_read(rig)
    others = rig.connect()
    for number in range(20):
        others.send(frame(b"%d" % number))
    rig.pump(lambda: len(others.frames()) == 20)
    others.close()
    rig.pump(lambda: rig.connections == 1)
    rig.processor._max_idle_ns = IDLE_NS
    rig.pump(lambda: not rig.connections)
    assert rig.counter(ProcessorCounter.CLOSED_IDLE) == 1
    silent.reads = True
    rig.pump(lambda: silent.is_closed)
    assert not silent.frames()
    rig.pump(rig.nothing_is_held)


def test_the_time_of_who_does_not_read_begins_with_its_answer(make_rig):
    """However long that took: it was ours until then."""
    held = []
    rig = make_rig(answer=lambda end, slot, body: held.append((slot, body)))
    client = rig.connect(narrow_pair())
    client.reads = False
    client.send(frame(b"big"))
    rig.pump(lambda: held)
    rests = rig.processor._connections.rests
    assert not rests(channel_in(rig, ConnectionState.IN_FLIGHT), 1 << 62)
    for slot, body in held:
        big_answer(rig.handler, slot, body)
    rig.handler.flush()
    channel = rig.pump(lambda: channel_in(rig, ConnectionState.SENDING))
    answered = rig.memory.control.words[slot_row(channel.slot) + SLOT_COMPLETED]
    assert answered > 0
    assert not rests(channel, answered)
    channel.active_ns = 0
    assert not rests(channel, answered)
    assert rests(channel, answered + 1)
    client.reads = True
    rig.pump(client.frames)
    assert rests(channel, 1 << 62)  # it reads again: silence is silence


def test_whoever_sends_a_byte_at_a_time_holds_nobody_up(make_rig):
    rig = make_rig()
    slow, quick = rig.connect(), rig.connect()
    for count, byte in enumerate(frame(b"a rather slow request")[:-1]):
        slow.send(bytes([byte]))
        quick.send(frame(b"quick"))
        rig.pump(lambda count=count: len(quick.frames()) > count)
    assert rig.requests.count(b"quick") == len(rig.requests)
    quick.close()
    rig.pump(lambda: rig.connections == 1)
    assert not slow.is_closed
    rig.processor._max_idle_ns = IDLE_NS
    rig.pump(lambda: slow.is_closed)  # the rest never comes
    assert rig.counter(ProcessorCounter.CLOSED_IDLE) == 1
    rig.pump(rig.nothing_is_held)


def test_what_was_sent_before_a_close_is_all_executed(make_rig):
    """Nobody waits for an answer, so the client may go as soon as it has sent."""
    rig = make_rig(answer=lambda end, slot, body: end.send_nothing(slot))
    client = rig.connect()
    client.sock.setblocking(True)
    client.sock.sendall(b"".join(frame(b"%d" % number) for number in range(10)))
    client.close()
    rig.pump(lambda: len(rig.requests) == 10)
    rig.pump(lambda: not rig.connections)
    assert rig.requests == [b"%d" % number for number in range(10)]


def test_a_storm_of_clients_that_leave_at_once_leaves_nothing_behind(make_rig):
    rig = make_rig()
    steady = rig.connect()
    for number in range(300):
        client = rig.connect()
        if number % 3 == 0:
            client.send(frame(b"x" * (number * 10))[: number + 1])
        elif number % 3 == 1:
            client.sock.shutdown(socket.SHUT_WR)
        rig.turn()
        client.close()
        if number % 50 == 0:
            steady.send(frame(b"here"))
    rig.pump(lambda: rig.connections == 1)
    rig.pump(lambda: len(steady.frames()) == 6)
    assert not steady.is_closed

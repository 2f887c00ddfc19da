"""When slots, memory or the ring run short, connections wait; none is lost."""

from __future__ import annotations

import socket
import time
from collections import deque

import pytest

from mpbroker.ipc.arena import HANDLER_REGION_BYTES
from mpbroker.ipc.layout import ProcessorCounter
from tests.network.rig import connected_pair, echo, frame

BIG = 4 * 1024 * 1024
WAITS_FOR_SLOT = ProcessorCounter.WAITS_FOR_SLOT
WAITS_FOR_EXTENT = ProcessorCounter.WAITS_FOR_EXTENT
WAITS_FOR_RING = ProcessorCounter.WAITS_FOR_RING


# -- slots --------------------------------------------------------------------------


def test_parts_of_frames_do_not_keep_others_from_being_served(rig):
    rig.leave_slots(3)
    slow = [rig.connect() for _ in range(10)]
    for number, client in enumerate(slow):
        client.send(frame(b"slow %d" % number)[:-1])
    rig.pump(lambda: rig.connections == 10)
    rig.turns()
    quick = rig.connect()
    quick.send(frame(b"quick"))
    rig.pump(lambda: quick.frames() == [b"quick"])
    assert rig.counter(WAITS_FOR_SLOT)
    for number, client in enumerate(slow):
        client.send(b"%d" % number)
    rig.pump(lambda: all(client.frames() for client in slow))
    assert [client.frames() for client in slow] == [
        [b"slow %d" % number] for number in range(10)
    ]


def test_a_connection_without_a_slot_is_read_when_an_answer_frees_one(make_rig):
    rig = make_rig()
    rig.answer = rig.hold
    rig.leave_slots(2)
    clients = [rig.connect() for _ in range(5)]
    for number, client in enumerate(clients):
        client.send(frame(b"%d" % number))
    rig.pump(lambda: len(rig.held) == 2)
    rig.turns()
    assert len(rig.held) == 2
    done = 0
    while done < 5:
        rig.pump(lambda: rig.held)
        rig.release(1)
        done += 1
        # A quick client's slot is taken away for those that have none.
        rig.pump(lambda done=done: sum(len(c.frames()) for c in clients) == done)
        for client in clients:
            if client.frames():
                client.close()
    assert rig.counter(WAITS_FOR_SLOT)


def test_many_that_lack_a_slot_do_not_have_all_others_looked_at_each_time(
    make_rig, monkeypatch
):
    """It is in vain while all slots have requests, and there may be 16,384 others."""
    rig = make_rig()
    rig.answer = rig.hold
    rig.leave_slots(1)
    first = rig.connect()
    first.send(frame(b"1"))
    rig.pump(lambda: rig.held)
    looks = []
    spill = rig.processor._reader.spill

    def look(channels):
        looks.append(1)
        time.sleep(0.001)  # as if there were many
        spill(channels)

    monkeypatch.setattr(rig.processor._reader, "spill", look)
    monkeypatch.setattr("mpbroker.network.processor._SPILL_PAUSE", 10**6)
    others = [rig.connect() for _ in range(20)]
    for number, client in enumerate(others):
        client.send(frame(b"%d" % number))
    rig.pump(lambda: rig.counter(WAITS_FOR_SLOT) >= len(others))
    rig.turns()
    assert len(looks) == 1
    rig.answer = echo
    rig.release()
    first.close()
    for number, client in enumerate(others):
        rig.pump(lambda client=client: client.frames())
        assert client.frames() == [b"%d" % number]
        client.close()


def test_a_connection_that_waits_for_a_slot_may_go_away(make_rig):
    rig = make_rig()
    rig.answer = rig.hold
    rig.leave_slots(1)
    first, second, third = (rig.connect() for _ in range(3))
    first.send(frame(b"1"))
    rig.pump(lambda: rig.held)
    second.send(frame(b"2"))
    rig.pump(lambda: rig.counter(WAITS_FOR_SLOT))
    third.send(frame(b"3"))
    rig.turns()
    second.close()
    rig.turns()
    rig.release()
    first.close()

    def has_the_third_its_turn() -> bool:
        bodies = [body for _, body in rig.held]
        if bodies == [b"2"]:
            rig.release()  # it had sent this before it went
        return bodies == [b"3"]

    rig.pump(has_the_third_its_turn)


def test_a_frame_that_was_put_aside_keeps_its_bytes_whatever_comes_next(rig):
    rig.leave_slots(1)
    whole = frame(bytes(range(256)) * 30)
    clients = [rig.connect() for _ in range(4)]
    for at in range(0, len(whole), 700):
        for client in clients:
            client.send(whole[at : at + 700])
            rig.turns(3)
    rig.pump(lambda: all(client.frames() for client in clients))
    assert all(client.frames() == [whole[4:]] for client in clients)


# -- extents ------------------------------------------------------------------------


PATIENCE = "mpbroker.network.processor.PATIENCE_NS"


@pytest.fixture
def crowded(rig, monkeypatch):
    """A rig whose memory for large frames is all taken by those who send slowly."""
    monkeypatch.setattr(PATIENCE, 3600 * 10**9)  # a test that wants less says so
    while not rig.counter(WAITS_FOR_EXTENT):
        client = rig.connect()
        client.send(frame(bytes(BIG))[:20_000])
        rig.turns(5)
        assert len(rig.clients) < 100
    return rig


def test_a_large_frame_waits_until_another_has_been_answered(crowded):
    *slow, waiting = crowded.clients
    crowded.turns()
    slow[0].send(frame(bytes(BIG))[20_000:])
    crowded.pump(slow[0].frames)
    waiting.send(frame(bytes(BIG))[20_000:])
    crowded.pump(waiting.frames)
    assert waiting.frames() == [bytes(BIG)]


def test_those_that_wait_for_memory_keep_no_slot_from_others(crowded):
    """Four bytes are enough to wait, on as many connections as there are slots."""
    *slow, first = crowded.clients
    crowded.leave_slots(3)
    waiting = [crowded.connect() for _ in range(10)]
    frames = [frame(bytes([number]) * BIG) for number in range(10)]
    for number, client in enumerate(waiting):
        client.send(frames[number][: 4 + 100 * number])
    crowded.pump(lambda: crowded.connections == len(crowded.clients))
    crowded.turns()
    for body in (b"quick", b"again"):
        quick = crowded.connect()
        quick.send(frame(body))
        crowded.pump(lambda quick=quick, body=body: quick.frames() == [body])
    assert crowded.counter(WAITS_FOR_SLOT)
    for client in (*slow, first):
        client.close()
    for number, client in enumerate(waiting):
        client.send(frames[number][4 + 100 * number :])
    crowded.pump(lambda: all(client.frames() for client in waiting))
    for client, sent in zip(waiting, frames, strict=True):
        assert client.frames() == [sent[4:]]


def test_small_requests_are_served_while_large_ones_wait(crowded):
    quick = crowded.connect()
    quick.send(frame(b"quick"))
    crowded.pump(lambda: quick.frames() == [b"quick"])


def test_a_large_frame_goes_on_when_one_before_it_is_given_up(crowded):
    waiting = crowded.clients[-1]
    crowded.clients[0].close()
    waiting.send(frame(bytes(BIG))[20_000:])
    crowded.pump(waiting.frames)


def test_the_slowest_client_is_closed_if_others_wait_for_its_memory(
    crowded, monkeypatch, caplog
):
    caplog.set_level("INFO")
    slow = crowded.clients[0]
    for client in crowded.clients[1:]:
        client.send(frame(bytes(BIG))[20_000:-1])
    crowded.pump(lambda: all(client.has_sent for client in crowded.clients[1:-1]))
    monkeypatch.setattr(PATIENCE, 0)
    crowded.pump(lambda: slow.is_closed)
    for client in crowded.clients[1:]:
        client.send(b"\0")
    crowded.pump(lambda: all(client.frames() for client in crowded.clients[1:]))
    assert "it sent 20000 of 4194308 bytes of a request" in caplog.text


def test_a_byte_now_and_then_does_not_make_a_client_fast(crowded, monkeypatch):
    monkeypatch.setattr(PATIENCE, 0)
    *slow, waiting = crowded.clients
    waiting.send(frame(bytes(BIG))[20_000:])

    def is_served() -> bool:
        for client in slow:
            if not client.is_closed:
                client.send(b"\0")
        return bool(waiting.frames())

    crowded.pump(is_served)


def test_a_slow_client_is_served_if_no_other_needs_its_memory(rig, monkeypatch):
    slow = rig.connect()
    slow.send(frame(bytes(BIG))[:20_000])
    rig.turns()
    _in_an_hour(monkeypatch)
    rig.turns()
    slow.send(frame(bytes(BIG))[20_000:])
    rig.pump(slow.frames)
    assert slow.frames() == [bytes(BIG)]


def test_frames_up_to_one_mebibyte_are_read_while_large_ones_fill_the_memory(crowded):
    small = crowded.connect()
    small.send(frame(bytes(1 << 20)))
    crowded.pump(small.frames)
    assert not any(client.is_closed for client in crowded.clients)


def test_small_frames_that_fill_all_memory_give_way_to_a_large_one(rig):
    while not rig.counter(WAITS_FOR_EXTENT):
        rig.connect().send(frame(bytes(1 << 20))[:20_000])
        rig.turns(5)
        assert len(rig.clients) < 200
    late = rig.connect()
    late.send(frame(bytes(BIG)))
    rig.pump(late.frames)


def test_who_comes_later_gets_no_memory_before_those_who_wait(crowded):
    slow, waiting = crowded.clients[0], crowded.clients[-1]
    late = crowded.connect()
    late.send(frame(bytes(BIG)))
    crowded.turns()
    slow.close()
    waiting.send(frame(bytes(BIG))[20_000:])
    crowded.pump(waiting.frames)
    assert crowded.requests[0] == bytes(BIG)
    assert waiting.frames()
    crowded.pump(late.frames)


def test_small_frames_that_are_served_now_and_then_do_not_hold_up_a_large_one(
    crowded, monkeypatch
):
    crowded.processor._compiled = None  # it knows no other clock than the real one
    now_ns = time.monotonic_ns()
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns)
    monkeypatch.setattr(PATIENCE, 100 * 10**9)
    waiting = crowded.clients[-1]
    waiting.send(frame(bytes(BIG))[20_000:])
    small, body = deque(), frame(bytes(1 << 20))
    while not crowded.processor._small:
        small.append(crowded.connect())
        small[-1].send(body[:20_000])
        crowded.turns(5)
    for _ in range(50):
        now_ns += 60 * 10**9
        small[0].send(body[20_000:])
        crowded.pump(small[0].frames)
        small.popleft().close()
        small.append(crowded.connect())
        small[-1].send(body[:20_000])
        crowded.pump(lambda: crowded.processor._small or not crowded.processor._large)
        if not crowded.processor._large:
            break
    crowded.pump(waiting.frames)
    assert waiting.frames() == [bytes(BIG)]
    assert not any(client.is_closed for client in small)


def _in_an_hour(monkeypatch):
    now_ns = time.monotonic_ns
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns() + 3600 * 10**9)


def test_all_memory_comes_back_after_the_crowd(crowded):
    for client in crowded.clients:
        client.send(frame(bytes(BIG))[20_000:])
    crowded.pump(lambda: all(client.frames() for client in crowded.clients))
    crowded.end()


# -- answers ------------------------------------------------------------------------

ANSWER = 20_000_000
READERS_PATIENCE = "mpbroker.network.connections.PATIENCE_NS"


def answer_as_asked(end, slot, body):
    """Answer b"big" with 20 MB, of which two fit a handler's region; echo the rest."""
    end.send_bytes(slot, frame(bytes(ANSWER) if body == b"big" else body))


def ask_and_not_read(rig, body):
    """Send a request whose answer the client does not read."""
    client, accepted = connected_pair()
    # Otherwise the kernel may let its buffers grow until it takes the whole answer.
    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    made = rig.connect((client, accepted))
    made.reads = False
    made.send(frame(body))


@pytest.fixture
def unread(make_rig, monkeypatch):
    """A rig with three answers that are not read; the last waits for room."""
    monkeypatch.setattr(READERS_PATIENCE, 3600 * 10**9)
    monkeypatch.setattr("mpbroker.network.processor._HOUSEKEEPING_NS", 0)
    rig = make_rig(answer=answer_as_asked)
    for _ in range(3):
        ask_and_not_read(rig, b"big")
        rig.pump(lambda: len(rig.requests) == len(rig.clients))
    assert rig.handler.has_unplaced
    return rig


def test_small_answers_have_room_while_large_ones_are_not_read(unread):
    room = HANDLER_REGION_BYTES - 2 * ANSWER
    while room > 0:  # the rest of what large answers may have
        ask_and_not_read(unread, bytes(BIG - 4))
        room -= BIG
    unread.pump(lambda: len(unread.requests) == len(unread.clients))
    quick = unread.connect()
    quick.send(frame(bytes(60_000)))
    unread.pump(quick.frames)
    assert not any(client.is_closed for client in unread.clients)


def test_the_slowest_reader_is_closed_if_other_answers_wait_for_room(
    unread, monkeypatch, caplog
):
    caplog.set_level("INFO")
    reader = unread.clients[2]
    reader.reads = True
    monkeypatch.setattr(READERS_PATIENCE, 0)
    unread.pump(reader.frames)
    assert reader.frames() == [bytes(ANSWER)]
    for client in unread.clients[:2]:
        client.reads = True
    unread.turns()
    assert [client.is_closed for client in unread.clients] == [True, False, False]
    assert f"of {ANSWER + 4} bytes of an answer" in caplog.text


def test_an_answer_that_waits_for_room_is_dropped_if_its_client_has_gone(
    unread, monkeypatch
):
    unread.clients[2].close()
    unread.turns()
    assert unread.handler.has_unplaced
    monkeypatch.setattr("mpbroker.network.slow_clients._TOO_NEW_NS", 3600 * 10**9)
    monkeypatch.setattr(READERS_PATIENCE, 0)
    unread.pump(lambda: not unread.handler.has_unplaced)
    assert not any(client.is_closed for client in unread.clients)
    unread.pump(lambda: len(unread.busy_slots()) == 2)


def test_answers_that_wait_for_room_are_bounded(unread, monkeypatch):
    monkeypatch.setattr(
        "mpbroker.network.request_channel._MAX_UNPLACED_BYTES", ANSWER + BIG * 3 // 2
    )
    for _ in range(5):  # four fit, and one waits
        ask_and_not_read(unread, bytes(BIG - 4))
    unread.pump(lambda: len(unread.requests) == len(unread.clients))
    unread.turns()
    assert not any(client.is_closed for client in unread.clients)
    another = unread.connect()
    another.send(frame(bytes(BIG - 8)))
    unread.clients[2].reads = True
    unread.pump(lambda: unread.clients[2].is_closed)  # the largest that waits
    unread.clients[0].close()
    unread.pump(another.frames)


def test_a_handler_that_retires_gives_up_answers_that_have_no_room(unread):
    unread.handler.give_up_unplaced()
    unread.handler.flush()
    unread.clients[2].reads = True
    unread.pump(lambda: unread.clients[2].is_closed)
    assert not unread.handler.has_unplaced


# -- the ring -----------------------------------------------------------------------


def test_a_full_ring_stops_reading_and_loses_nothing(make_rig):
    rig = make_rig(queued_max_requests=3)
    rig.handles = False
    clients = [rig.connect() for _ in range(12)]
    for number, client in enumerate(clients):
        client.send(frame(b"%d" % number))
    rig.turns()
    assert len(rig.memory.ring) == 3
    assert rig.counter(WAITS_FOR_RING) == 1  # until there is room again
    rig.handles = True
    rig.pump(lambda: all(client.frames() for client in clients))
    assert [client.frames() for client in clients] == [
        [b"%d" % number] for number in range(12)
    ]


def test_a_full_ring_never_stops_writing(make_rig):
    rig = make_rig(queued_max_requests=2)
    rig.answer = rig.hold
    first = rig.connect()
    first.send(frame(b"first"))
    rig.pump(lambda: rig.held)
    rig.handles = False
    others = [rig.connect() for _ in range(6)]
    for client in others:
        client.send(frame(b"other"))
    rig.turns()
    assert not rig.memory.ring.has_room()
    rig.release()
    rig.pump(lambda: first.frames() == [b"first"])
    rig.handles = True
    rig.pump(lambda: len(rig.held) == 2)
    rig.release()
    rig.answer = lambda end, slot, body: end.send_bytes(slot, frame(body))
    rig.pump(lambda: rig.release() or all(client.frames() for client in others))


def test_a_client_that_leaves_before_its_request_fits_the_ring_harms_nobody(make_rig):
    rig = make_rig(queued_max_requests=1)
    rig.handles = False
    clients = [rig.connect() for _ in range(6)]
    for number, client in enumerate(clients):
        client.send(frame(b"%d" % number))
    rig.turns()
    for client in clients[1:5]:
        client.close()
    rig.turns()
    rig.handles = True
    rig.pump(lambda: clients[0].frames() and clients[5].frames())
    rig.pump(lambda: rig.connections == 2)


@pytest.fixture
def sleepless(make_rig):
    """A rig with a full ring, whose next answer is received just before its sleep.

    A request is pipelined behind it, for which the ring has no room.
    """
    rig = make_rig(queued_max_requests=1)
    rig.answer = rig.hold
    first, second, _ = (rig.connect() for _ in range(3))
    rig.pump(lambda: rig.connections == 3)
    first.send(frame(b"1") + frame(b"pipelined"))
    rig.pump(lambda: rig.held)
    rig.handles = False
    second.send(frame(b"2"))
    rig.pump(lambda: not rig.memory.ring.has_room())
    rig.turns()
    rig.release()
    return rig


def test_room_that_comes_before_the_poll_does_not_end_all_reading(
    sleepless, monkeypatch
):
    wait_s = sleepless.processor._wait_s

    def and_meanwhile_a_handler_takes_one() -> float:
        result = wait_s()
        sleepless.handle()
        return result

    with monkeypatch.context() as patched:
        patched.setattr(
            sleepless.processor, "_wait_s", and_meanwhile_a_handler_takes_one
        )
        sleepless.turns(5)
    sleepless.handles = True
    sleepless.clients[2].send(frame(b"3"))
    sleepless.pump(lambda: sleepless.requests == [b"1", b"2", b"pipelined", b"3"])


def test_who_waited_for_the_ring_is_read_before_the_processor_sleeps(
    sleepless, monkeypatch
):
    processor = sleepless.processor
    processor.turn()
    late = sleepless.clients[2]
    late.send(frame(b"3"))
    late.turn()
    for _ in range(5):
        processor.turn()
    assert processor._postponed
    sleepless.handle()
    _never_sleep_with_work_left(processor, monkeypatch)
    for _ in range(20):
        processor.turn()
        sleepless.handle()
    assert sleepless.requests == [b"1", b"2", b"pipelined", b"3"]


def _never_sleep_with_work_left(processor, monkeypatch):
    wait_s = processor._wait_s

    def sleeps_only_without_work() -> float:
        monkeypatch.setattr("mpbroker.network.processor._IDLE_POLL_S", 1)
        assert not (wait_s() and processor._postponed)
        monkeypatch.setattr("mpbroker.network.processor._IDLE_POLL_S", 0)
        return 0.0

    monkeypatch.setattr(processor, "_wait_s", sleeps_only_without_work)

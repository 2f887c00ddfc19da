"""No client keeps the slots from the others, whatever it does with its connections."""

from __future__ import annotations

import socket
import time

import pytest

from mpbroker.ipc.layout import (
    CONNECTION_MUTED_UNTIL,
    CONNECTIONS_PER_PROCESSOR,
    SLOT_CONNECTION,
    ProcessorCounter,
    SlotState,
    connection_row,
    slot_row,
)
from mpbroker.network import connections
from mpbroker.network.moves.departures import ALL
from mpbroker.network.request_channel import HandlerEnd
from tests.network.rig import Client, Rig, connected_pair, echo, frame
from tests.network.test_departures import Two

WAITS_FOR_SLOT = ProcessorCounter.WAITS_FOR_SLOT
GREEDY = "127.0.0.2"
SLOTS = 4


def greedy_clients(rig: Rig, count: int = SLOTS) -> list[Client]:
    """Connections of one client, by default as many as there are slots."""
    rig.leave_slots(SLOTS)
    clients = [rig.connect(connected_pair(GREEDY)) for _ in range(count)]
    rig.pump(lambda: rig.connections == count)
    return clients


def is_served(rig: Rig, body: bytes = b"other") -> None:
    other = rig.connect()
    other.send(frame(body))
    rig.pump(other.frames)
    assert other.frames() == [body]


# -- requests on the way ------------------------------------------------------------


def test_pipelined_requests_give_way_to_those_of_another_client(make_rig):
    rig = make_rig()
    clients = greedy_clients(rig)
    for client in clients:
        client.send(frame(b"greedy") * 1000)
    rig.pump(lambda: all(client.frames() for client in clients))
    is_served(rig)
    assert rig.requests.count(b"greedy") < len(clients) * 1000
    rig.pump(lambda: all(len(client.frames()) == 1000 for client in clients))


def test_pipelined_requests_that_gave_way_keep_their_order_and_their_bytes(make_rig):
    rig = make_rig()
    clients = greedy_clients(rig, 3 * SLOTS)
    bodies = [bytes([number % 256]) * (97 * number % 9000) for number in range(60)]
    for client in clients:
        client.send(b"".join(map(frame, bodies)))
    rig.pump(lambda: all(len(client.frames()) == len(bodies) for client in clients))
    assert all(client.frames() == bodies for client in clients)


@pytest.mark.parametrize("count", [3, ALL])
def test_pipelined_requests_that_gave_way_are_answered_if_connections_move(
    make_rig, count
):
    rig = make_rig(kind=Two)
    clients = greedy_clients(rig, 3 * SLOTS)
    bodies = [b"%d" % number for number in range(100)]
    for client in clients:
        client.send(b"".join(map(frame, bodies)))
    rig.pump(lambda: any(each.spilled for each in rig.processor._channels.values()))
    rig.move(count)
    rig.pump(lambda: all(len(client.frames()) == len(bodies) for client in clients))
    assert all(client.frames() == bodies for client in clients)
    assert rig.other.connections


def test_a_request_that_comes_later_takes_no_slot_for_which_others_wait(make_rig):
    rig = make_rig()
    rig.answer = rig.hold
    rig.leave_slots(1)
    first, second, third = (rig.connect() for _ in range(3))
    first.send(frame(b"first"))
    rig.pump(lambda: rig.held)
    second.send(frame(b"second"))
    rig.pump(lambda: rig.processor._waiting)
    third.send(frame(b"third"))
    third.turn()
    rig.release()  # the same turn finds the answer and the third request
    for _ in range(2):
        rig.pump(lambda: rig.held)
        rig.release()
    rig.pump(third.frames)
    assert rig.requests == [b"first", b"second", b"third"]


def test_clients_have_their_turns_when_the_ring_was_full(make_rig):
    rig = make_rig(queued_max_requests=1)
    rig.handles = False
    early, late = (
        [rig.connect(connected_pair(GREEDY)) for _ in range(count)] for count in (3, 20)
    )
    for client in early:
        client.send(frame(b"early"))
    rig.pump(lambda: rig.processor._requests.is_blocked)
    for client in late:
        client.send(frame(b"greedy"))
    rig.pump(lambda: len(rig.processor._postponed) >= 20)
    other = rig.connect()
    other.send(frame(b"other"))
    rig.pump(lambda: len(rig.processor._postponed) >= 21)
    rig.handles = True
    rig.pump(lambda: all(client.frames() for client in (*late, other)))
    assert rig.requests.index(b"other") <= len(early) + 1


def test_neither_a_full_ring_nor_a_lack_of_slots_keeps_the_other_waiting(make_rig):
    """With room for one request in the ring at a time, one kind would go first."""
    rig = make_rig(queued_max_requests=1)
    clients = greedy_clients(rig, 6 * SLOTS)
    for client in clients:
        client.send(frame(b"greedy") * 100)
    rig.pump(lambda: all(client.frames() for client in clients))
    is_served(rig)
    rig.pump(lambda: all(len(client.frames()) == 100 for client in clients))


def test_a_wait_for_a_slot_is_counted_once(make_rig):
    rig = make_rig()
    rig.answer = rig.hold
    rig.leave_slots(1)
    first, second = rig.connect(), rig.connect()
    first.send(frame(b"first"))
    rig.pump(lambda: rig.held)
    second.send(frame(b"second"))
    rig.pump(lambda: rig.processor._waiting)
    rig.turns()
    assert rig.counter(WAITS_FOR_SLOT) == 1
    rig.release()
    rig.pump(lambda: rig.held)


# -- throttled clients --------------------------------------------------------------


def throttle(rig: Rig, client: bytes) -> None:
    """Have each answer to a request of a client throttle it for an hour."""
    words = rig.memory.control.words

    def answer(end: HandlerEnd, slot: int, body: bytes) -> None:
        if body == client:
            row = connection_row(words[slot_row(slot) + SLOT_CONNECTION])
            words[row + CONNECTION_MUTED_UNTIL] = time.monotonic_ns() + 3600 * 10**9
        echo(end, slot, body)

    rig.answer = answer


def end_throttling(rig: Rig) -> None:
    throttles = rig.processor._throttles
    rig.answer = echo
    for channel in rig.processor._channels.values():
        rig.memory.control.words[channel.row + CONNECTION_MUTED_UNTIL] = 0
    throttles._timers = [(0, *timer[1:]) for timer in throttles._timers]


def test_what_a_throttled_client_has_pipelined_keeps_no_slot(make_rig):
    rig = make_rig()
    throttle(rig, b"greedy")
    clients = greedy_clients(rig)
    for client in clients:
        client.send(frame(b"greedy") + frame(b"next"))
    rig.pump(lambda: all(client.frames() for client in clients))
    is_served(rig)
    assert b"next" not in rig.requests
    end_throttling(rig)
    rig.pump(lambda: all(len(client.frames()) == 2 for client in clients))
    assert all(client.frames() == [b"greedy", b"next"] for client in clients)


def test_a_client_throttled_before_slots_ran_short_keeps_none_either(make_rig):
    rig = make_rig()
    throttle(rig, b"greedy")
    clients = [rig.connect(connected_pair(GREEDY)) for _ in range(SLOTS)]
    for client in clients:
        client.send(frame(b"greedy") + frame(b"next"))
    rig.pump(lambda: all(client.frames() for client in clients))
    rig.turns()
    assert len(rig.busy_slots()) == SLOTS
    rig.leave_slots(1)
    holder = rig.connect()
    holder.send(frame(b"waits")[:-1])
    rig.turns()
    is_served(rig)
    rig.answer = rig.hold
    others = [rig.connect() for _ in range(SLOTS)]
    for other in others:
        other.send(frame(b"held"))
    rig.pump(lambda: len(rig.held) == SLOTS)
    rig.release()
    end_throttling(rig)
    rig.pump(lambda: all(len(client.frames()) == 2 for client in clients))
    assert all(client.frames() == [b"greedy", b"next"] for client in clients)


# -- slow clients -------------------------------------------------------------------

PATIENCE = "mpbroker.network.processor.PATIENCE_NS"


def in_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = time.monotonic_ns
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns() + 3600 * 10**9)


def test_clients_that_do_not_read_small_answers_are_closed_for_others(
    make_rig, monkeypatch, caplog
):
    caplog.set_level("INFO")
    monkeypatch.setattr(PATIENCE, 0)
    rig = make_rig()
    clients = []
    for _ in range(SLOTS):
        client, accepted = connected_pair(GREEDY)
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        clients.append(rig.connect((client, accepted)))
    rig.leave_slots(SLOTS)
    for client in clients:
        client.reads = False
        client.send(frame(bytes(1000)) * 200)
    rig.pump(
        lambda: (
            list(rig.busy_slots().values()) == [SlotState.RESPONDING] * SLOTS
            and all(each.outgoing for each in rig.processor._channels.values())
        )
    )
    rig.turns()
    in_an_hour(monkeypatch)
    is_served(rig)
    for client in clients:
        client.reads = True
    rig.pump(lambda: any(client.is_closed for client in clients))
    assert not all(client.is_closed for client in clients)
    assert "bytes of an answer" in caplog.text
    assert "other connections need the slot" in caplog.text


def test_clients_that_send_slowly_are_closed_if_others_lack_slots_only(
    make_rig, monkeypatch
):
    monkeypatch.setattr(PATIENCE, 0)
    rig = make_rig()
    clients = greedy_clients(rig)
    for client in clients:
        client.send(frame(bytes(20_000))[:-1])
    rig.pump(lambda: all(each.extent for each in rig.processor._channels.values()))
    in_an_hour(monkeypatch)
    is_served(rig)
    rig.pump(lambda: any(client.is_closed for client in clients))
    assert not all(client.is_closed for client in clients)


def test_a_slow_client_that_holds_few_slots_is_not_closed(make_rig, monkeypatch):
    monkeypatch.setattr(PATIENCE, 0)
    rig = make_rig()
    rig.leave_slots(SLOTS)
    few, *many = (
        rig.connect(connected_pair(client_ip))
        for client_ip in ("127.0.0.3", *[GREEDY] * (SLOTS - 1))
    )
    for client in (few, *many):
        client.send(frame(bytes(20_000))[:-1])
    rig.pump(lambda: len(rig.processor._channels) == SLOTS)
    rig.pump(lambda: all(each.extent for each in rig.processor._channels.values()))
    in_an_hour(monkeypatch)
    is_served(rig)
    few.send(bytes(1))
    rig.pump(few.frames)
    assert not few.is_closed


# -- connections --------------------------------------------------------------------


def test_the_last_rows_are_for_clients_with_less_than_an_equal_share(
    make_rig, monkeypatch
):
    """All rows of the table but four count as the last ones."""
    monkeypatch.setattr(connections, "_SHARED_ROWS", 4)
    monkeypatch.setattr(connections, "_SPARE_ROWS", CONNECTIONS_PER_PROCESSOR)
    rig = make_rig()
    greedy = [rig.connect(connected_pair(GREEDY)) for _ in range(6)]
    rig.pump(lambda: sum(each.is_closed for each in greedy) == 2)
    assert rig.connections == 4
    assert rig.counter(ProcessorCounter.CLOSED_EXCESS) == 2
    is_served(rig)
    others = [rig.connect() for _ in range(3)]
    rig.pump(lambda: any(each.is_closed for each in others))
    assert rig.connections == 6  # two of each client's share of two, two from before
    # What a client closes counts no more.
    for each in greedy:
        each.close()
    rig.pump(lambda: rig.connections == 2)
    is_served(rig)

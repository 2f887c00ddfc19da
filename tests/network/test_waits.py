"""Requests that wait end when their clients hang up, or when others need the slots."""

from __future__ import annotations

import socket
import time

import pytest

from mpbroker.ipc.layout import (
    COORDINATOR,
    NOTIFICATION_RING_CAPACITY,
    SLOT_STATE,
    SLOTS_PER_PROCESSOR,
    STATE_HANDLER_SHIFT,
    SlotState,
    client_of,
    slot_row,
)
from mpbroker.ipc.ring import slot_notice
from mpbroker.network.request_reader import PLENTY_OF_SLOTS
from mpbroker.network.waits import _RESERVE, fair_level
from mpbroker.supervisor.repair.recovery import Repair
from tests.network.rig import Rig, frame

DEADLINE_NS = 1 << 62


def hold_and_park(rig: Rig) -> None:
    """Park each request, as the rig's handler, until it is released."""

    def answer(end, slot, body):
        rig.held.append((slot, body))
        end.park(slot, DEADLINE_NS)

    rig.answer = answer


def parked(rig: Rig, count: int) -> list[int]:
    rig.pump(lambda: len(rig.held) >= count)
    return [slot for slot, _ in rig.held]


def release(rig: Rig) -> None:
    for slot, _ in rig.held:
        rig.handler.unpark(slot)
    rig.release()


def notices(rig: Rig, handler: int = 0) -> list[int]:
    """Take the slots that the handler has been told of."""
    told, _ = rig.memory.notices[handler].take()
    return [slot_notice(notice) for notice in told]


def look_again(rig: Rig) -> None:
    """What a processor does once a second."""
    rig.processor._next_housekeeping = 0
    rig.turn()


@pytest.fixture
def parking(make_rig):
    rig = make_rig()
    hold_and_park(rig)
    yield rig
    release(rig)


def test_the_handler_of_a_parked_request_is_told_of_a_hang_up(parking):
    client, other = parking.connect(), parking.connect()
    client.send(frame(b"one"))
    (slot,) = parked(parking, 1)
    other.send(frame(b"two"))
    parked(parking, 2)
    assert not parking.handler.must_end(slot)
    client.close()
    parking.pump(lambda: parking.handler.must_end(slot))
    assert notices(parking) == [slot]


def test_a_hang_up_over_tls_is_one(tls_rig, certificates):
    rig = tls_rig()
    hold_and_park(rig)
    client = rig.connect_tls(certificates.client_context())
    client.send(frame(b"one"))
    (slot,) = parked(rig, 1)
    client.close()
    rig.pump(lambda: notices(rig) == [slot])
    assert rig.handler.must_end(slot)
    release(rig)
    rig.pump(lambda: not rig.connections)


def test_half_a_hang_up_is_one_and_the_answer_arrives_all_the_same(parking):
    client = parking.connect()
    client.send(frame(b"one"))
    (slot,) = parked(parking, 1)
    client.sock.shutdown(socket.SHUT_WR)
    parking.pump(lambda: notices(parking) == [slot])
    release(parking)
    parking.pump(client.frames)
    assert client.frames() == [b"one"]


def test_a_request_that_is_read_after_the_hang_up_may_not_wait_at_all(parking):
    client = parking.connect()
    client.send(frame(b"one") + frame(b"two"))
    client.turn()
    client.close()
    (slot,) = parked(parking, 1)
    assert parking.handler.must_end(slot)
    release(parking)
    # The one that was pipelined is read when the first is answered, or is not at all.
    parking.pump(lambda: parking.held or not parking.connections)
    for slot, _ in parking.held:
        assert parking.handler.must_end(slot)


def test_what_is_pipelined_behind_a_hang_up_may_not_wait_either(parking):
    client = parking.connect()
    client.send(frame(b"one") + frame(b"two") + frame(b"three"))
    (slot,) = parked(parking, 1)
    client.sock.shutdown(socket.SHUT_WR)
    parking.pump(lambda: parking.handler.must_end(slot))
    for _ in range(2):
        release(parking)
        (slot,) = parked(parking, 1)
        assert parking.handler.must_end(slot)


def test_the_next_request_of_a_slot_may_wait_again(parking):
    client = parking.connect()
    client.send(frame(b"one"))
    (slot,) = parked(parking, 1)
    client.close()
    parking.pump(lambda: parking.handler.must_end(slot))
    release(parking)
    parking.pump(lambda: not parking.connections)
    client = parking.connect()
    client.send(frame(b"two"))
    assert parked(parking, 1) == [slot]
    assert not parking.handler.must_end(slot)
    look_again(parking)
    notices(parking)
    look_again(parking)
    assert notices(parking) == []


def test_notices_are_repeated_until_the_request_is_answered(parking):
    """A handler that died took the first ones with it."""
    client = parking.connect()
    client.send(frame(b"one"))
    (slot,) = parked(parking, 1)
    client.close()
    parking.pump(lambda: notices(parking))
    for _ in range(3):
        look_again(parking)
        assert notices(parking) == [slot]
    release(parking)
    parking.pump(lambda: not parking.connections)
    look_again(parking)
    assert notices(parking) == []
    assert not parking.processor._waits._ending


def test_the_coordinator_is_told_of_a_request_that_it_has_claimed(parking):
    client = parking.connect()
    client.send(frame(b"one"))
    (slot,) = parked(parking, 1)
    words, word = parking.memory.control.words, slot_row(slot) + SLOT_STATE
    words[word] = (
        words[word] & ~0xFF_FFFF
        | COORDINATOR + 1 << STATE_HANDLER_SHIFT
        | SlotState.CLAIMED
    )
    client.close()
    parking.pump(lambda: notices(parking, COORDINATOR) == [slot])


def test_notices_for_which_there_is_no_room_are_sent_later(make_rig):
    rig = make_rig()
    hold_and_park(rig)
    many = NOTIFICATION_RING_CAPACITY + 20
    clients = [rig.connect() for _ in range(many)]
    for client in clients:
        client.send(frame(b"?"))
    slots = parked(rig, many)
    for client in clients:
        client.close()
    rig.pump(lambda: rig.processor._waits.is_behind)
    told, look_at_all = rig.memory.notices[0].take()
    assert not look_at_all  # or the handler would read all that it has parked again
    rig.pump(lambda: not rig.processor._waits.is_behind)
    told += rig.memory.notices[0].take()[0]
    assert {slot_notice(notice) for notice in told} == set(slots)
    release(rig)


def test_a_request_whose_connection_is_closed_by_the_processor_ends(parking):
    client = parking.connect()
    client.send(frame(b"one"))
    (slot,) = parked(parking, 1)
    (channel,) = parking.processor._channels.values()
    parking.processor._connections.close(channel, 0)
    assert parking.handler.must_end(slot)
    assert notices(parking) == [slot]


def test_a_successor_ends_the_requests_of_connections_that_it_does_not_get(parking):
    """There is no keeper here, so no socket comes."""
    client = parking.connect()
    client.send(frame(b"one"))
    (slot,) = parked(parking, 1)
    (channel,) = parking.processor._channels.values()
    channel.sock.close()
    Repair(parking.memory).after_processor(0)
    parking.start_processor()
    parking.processor.take_over()
    parking.processor._waits.take_over()
    assert parking.handler.must_end(slot)
    assert notices(parking) == [slot]


def test_a_successor_ends_what_its_predecessor_died_of_ending(parking):
    """The predecessor had closed the connection, and had not told the handler."""
    client = parking.connect()
    client.send(frame(b"one"))
    (slot,) = parked(parking, 1)
    (channel,) = parking.processor._channels.values()
    parking.processor._connections.left_behind = lambda slot: None
    parking.processor._connections.close(channel, 0)
    Repair(parking.memory).after_processor(0)
    parking.start_processor()
    parking.processor.take_over()
    parking.processor._waits.take_over()
    assert parking.handler.must_end(slot)
    assert notices(parking) == [slot]


# -- shares -------------------------------------------------------------------------


def test_when_slots_run_short_the_largest_client_waits_no_more(make_rig):
    rig = make_rig()
    hold_and_park(rig)
    clients = [rig.connect() for _ in range(3)]
    for client in clients[:2]:
        client.send(frame(b"early"))
    early = parked(rig, 2)
    rig.leave_slots(PLENTY_OF_SLOTS - 1)
    waits = rig.processor._waits
    (client,) = {
        client_of(waits._words, rig.processor._in_flight[slot].row) for slot in early
    }
    # As if it had nearly all slots.
    waits._held[client], waits._level = 8000, 7168
    waits._next_count_ns = DEADLINE_NS
    clients[2].send(frame(b"late"))
    late = parked(rig, 3)[-1]
    assert rig.handler.must_end(late)
    release(rig)


def test_a_client_with_few_requests_waits_while_slots_run_short(make_rig):
    rig = make_rig()
    hold_and_park(rig)
    rig.leave_slots(PLENTY_OF_SLOTS - 1)
    client = rig.connect()
    client.send(frame(b"?"))
    (slot,) = parked(rig, 1)
    rig.turns()
    assert not rig.handler.must_end(slot)
    release(rig)


def test_no_request_waits_when_hardly_any_slot_is_left(make_rig):
    rig = make_rig()
    hold_and_park(rig)
    rig.leave_slots(_RESERVE)
    client = rig.connect()
    client.send(frame(b"?"))
    (slot,) = parked(rig, 1)
    assert rig.handler.must_end(slot)
    release(rig)


def test_waits_above_the_share_end_until_there_are_plenty_of_slots(
    make_rig, monkeypatch
):
    """Eight waits of one client, when five would leave plenty of slots."""
    monkeypatch.setattr("mpbroker.network.waits._COUNT_NS", 0)
    rig = make_rig()
    hold_and_park(rig)
    clients = [rig.connect() for _ in range(8)]
    for client in clients:
        client.send(frame(b"?"))
    slots = parked(rig, 8)
    monkeypatch.setattr("mpbroker.network.waits.fair_level", lambda *_: 5)
    rig.leave_slots(PLENTY_OF_SLOTS - 3)
    rig.turns(5)
    ended = [slot for slot in slots if rig.handler.must_end(slot)]
    assert len(ended) == 3
    assert sorted(set(notices(rig))) == sorted(ended)
    release(rig)


def test_a_processor_does_more_than_to_share_slots_out(make_rig, monkeypatch):
    """On a busy machine that may take longer than the interval between two times."""
    rig = make_rig()
    now, late, times = time.monotonic_ns, 0, 0
    monkeypatch.setattr(time, "monotonic_ns", lambda: now() + late)

    def take_long(free: int) -> None:
        nonlocal late, times
        late += 10**9
        times += 1

    monkeypatch.setattr(rig.processor._waits, "make_room", take_long)
    rig.leave_slots(PLENTY_OF_SLOTS - 1)
    rig.turns(20)
    assert times == 1
    late += 10**10
    rig.turns(20)
    assert times == 2


@pytest.mark.parametrize(
    ("held", "limit", "level"),
    [
        ([], 10, None),
        ([10], 10, None),
        ([11], 10, 10),
        ([3, 7], 10, None),
        ([3, 8], 10, 7),
        ([8, 8], 10, 5),
        ([1, 9, 9], 10, 4),
        ([1, 2, 100, 100], 13, 5),
    ],
)
def test_clients_that_hold_little_leave_the_rest_to_the_others(held, limit, level):
    assert fair_level(held, limit) == (level or SLOTS_PER_PROCESSOR)
    if level is not None:
        assert sum(min(each, level) for each in held) <= limit


def test_idle_connections_give_their_slots_back_before_waits_end(make_rig):
    rig = make_rig()
    clients = [rig.connect() for _ in range(40)]
    for client in clients:
        client.send(frame(b"?"))
    rig.pump(lambda: all(client.frames() for client in clients))
    assert len(rig.busy_slots()) == 40
    rig.leave_slots(PLENTY_OF_SLOTS - 1)
    rig.turns(3)
    assert not rig.busy_slots()

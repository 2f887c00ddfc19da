"""Connections change their processor, busy or idle, and clients notice nothing."""

from __future__ import annotations

import time

import pytest

from mpbroker.ipc.arena import extent_bytes
from mpbroker.ipc.fdpass import send_fds
from mpbroker.ipc.layout import (
    CONNECTION_OWNER,
    HEADER,
    HEADER_COUNTERS,
    HEADER_KEEPER,
    PROCESSOR_DELIVERED,
    PROCESSOR_LISTENER,
    Phase,
    ProcessorCounter,
    connection_row,
    processor_row,
)
from mpbroker.network.connection_rows import live_rows
from mpbroker.network.moves import arrivals
from mpbroker.network.moves.departures import ALL
from mpbroker.network.moves.hand_over import HAND_OVER, HandOver
from mpbroker.network.moves.keeper import Keeper
from mpbroker.supervisor.connection_moves import (
    is_moved,
    move_connections,
    rebalance,
    rescue_connections,
    stop_accepting,
)
from mpbroker.supervisor.repair.recovery import Repair
from tests.network.descriptors import descriptors_left
from tests.network.rig import Client, Rig, connected_pair, echo, frame

LARGE = 300_000


class Two(Rig):
    """A rig with a second processor beside the first, and a keeper."""

    other_kind = Rig

    def __init__(self, memory, **options) -> None:
        super().__init__(memory, **options)
        memory.control.words[processor_row(1) + PROCESSOR_LISTENER] = 1
        memory.control.words[processor_row(0) + PROCESSOR_LISTENER] = 1
        self.other = self.other_kind(memory, **options, processor=1)
        self.other.clients = self.clients
        self.keeper = Keeper(
            memory.control,
            memory.keeper_pair[1],
            {number: ends[0] for number, ends in enumerate(memory.handovers)},
            memory.keeper_bell,
            memory.processor_bells,
        )
        memory.control.words[HEADER + HEADER_COUNTERS] = 1  # they have been tried

    def turn(self) -> None:
        super().turn()
        self.other.processor.turn()
        self.keeper.turn(0)

    def deliver(self) -> None:
        if hasattr(self, "keeper"):
            self.keeper.turn(0)
        else:
            super().deliver()

    def keep(self, accepted) -> None:
        self.memory.keeper_link.keep_new(accepted, 0, 0, len(self.clients))

    def move(self, count: int = ALL) -> None:
        move_connections(self.memory, 0, [1], count)

    def end(self) -> None:
        super().end()
        # Also of connections that no keeper has, of which it need not hear.
        self.pump(lambda: not self.other.connections and self.other.nothing_is_held())
        self.pump(lambda: self.keeper.count == 0)
        self.keeper.close()


@pytest.fixture
def two(make_rig):
    return make_rig(kind=Two)


def test_an_idle_connection_is_served_by_the_other(two):
    client = two.connect()
    client.send(frame(b"first"))
    two.pump(client.frames)
    two.move()
    two.pump(lambda: two.other.connections == 1 and two.connections == 0)
    client.send(frame(b"second"))
    two.pump(lambda: client.frames() == [b"first", b"second"])
    assert is_moved(two.memory, 0)
    assert two.counter(ProcessorCounter.MOVED_OUT) == 1
    assert two.other.counter(ProcessorCounter.MOVED_IN) == 1


@pytest.mark.parametrize("length", [10, 9_000, 13_000, LARGE])
@pytest.mark.parametrize("cut", [1, 4, 7, 0.5, -1])
def test_a_part_of_a_request_goes_along(two, length, cut):
    client = two.connect()
    data = frame(bytes(range(256)) * (length // 256 + 1))
    at = int(len(data) * cut) if cut == 0.5 else cut
    client.send(frame(b"before it") + data[:at])
    two.pump(client.frames)
    two.turns(5)
    two.move()
    two.pump(lambda: two.other.connections == 1 and two.connections == 0)
    client.send(data[at:] + frame(b"behind it"))
    two.pump(lambda: len(client.frames()) == 3)
    assert client.frames() == [b"before it", data[4:], b"behind it"]
    two.pump(lambda: two.processor._reader.is_unused or two.processor._housekeep())


def test_a_small_frame_has_room_though_a_large_one_before_it_has_none(two):
    large, small = two.connect(), two.connect()
    body = bytes(2 << 20)
    large.send(frame(body)[:100_000])
    two.pump(lambda: large.has_sent)
    small.send(frame(b"x" * LARGE)[:100_000])
    two.pump(lambda: small.has_sent)
    reader = two.other.processor._reader
    taken: dict[int, list[int]] = {len(body): [], LARGE: []}
    for length, extents in taken.items():
        while (extent := reader._allocate(length)) is not None:
            extents.append(extent)

    def free(length: int) -> None:
        for extent in taken[length]:
            reader._extents.free(extent, extent_bytes(length))

    two.move()
    two.pump(lambda: two.other.connections == 2)
    small.send(frame(b"x" * LARGE)[100_000:])
    free(LARGE)
    two.pump(lambda: small.frames() == [b"x" * LARGE])
    assert large.frames() == []
    free(len(body))
    large.send(frame(body)[100_000:])
    two.pump(lambda: large.frames() == [body])


def test_a_busy_connection_goes_when_its_answer_is_out(two):
    two.answer = two.hold
    client = two.connect()
    client.send(frame(b"slow") + frame(b"pipelined"))
    two.pump(lambda: two.held)
    two.move()
    two.turns()
    assert two.connections == 1
    two.answer = echo
    two.release()
    two.pump(lambda: client.frames() == [b"slow", b"pipelined"])
    assert two.connections == 0 and two.other.connections == 1


@pytest.mark.parametrize("count", [1, ALL])
def test_a_connection_goes_though_its_client_never_waits_for_an_answer(two, count):
    client, sent = two.connect(), 0

    def has_moved() -> bool:
        nonlocal sent
        while sent < len(client.frames()) + 5:
            client.send(frame(b"%d" % sent))
            sent += 1
        return two.other.connections == 1

    two.pump(lambda: has_moved() or client.frames())
    two.move(count)
    two.pump(has_moved)
    two.pump(lambda: len(client.frames()) == sent)
    assert client.frames() == [b"%d" % number for number in range(sent)]


def test_connections_that_come_to_one_that_gives_all_away_are_passed_on(two):
    two.move()
    two.turns(5)
    client = two.connect()
    client.send(frame(b"hello"))
    two.pump(client.frames)
    assert two.connections == 0 and two.other.connections == 1


def test_so_many_go_as_were_asked_for(two):
    clients = [two.connect() for _ in range(10)]
    two.pump(lambda: two.connections == 10)
    two.move(4)
    two.pump(lambda: is_moved(two.memory, 0))
    two.pump(lambda: (two.connections, two.other.connections) == (6, 4))
    for number, client in enumerate(clients):
        client.send(frame(b"%d" % number))
    two.pump(lambda: all(client.frames() for client in clients))


def test_pools_are_evened_out(two):
    for _ in range(9):
        two.connect()
    two.pump(lambda: two.connections == 9)
    assert rebalance(two.memory, [0, 1]) == 4
    two.pump(lambda: (two.connections, two.other.connections) == (5, 4))


def test_nobody_gets_connections_of_a_listener_that_he_does_not_serve(two):
    two.memory.control.words[processor_row(1) + PROCESSOR_LISTENER] = 2
    client = two.connect()
    two.pump(lambda: two.connections == 1)
    two.move()
    client.send(frame(b"hello"))
    two.pump(client.frames)
    assert two.connections == 1
    assert not is_moved(two.memory, 0)


def test_a_processor_ends_when_all_it_had_is_elsewhere(two):
    two.answer = two.hold
    client, busy = two.connect(), two.connect()
    client.send(frame(b"h" * LARGE)[:100_000])
    busy.send(frame(b"busy"))
    two.pump(lambda: two.held)
    two.move()
    two.pump(lambda: two.other.connections == 1)
    two.turns()
    assert not two.processor._has_retired()
    two.answer = echo
    two.release()
    two.pump(two.processor._has_retired)
    client.send(frame(b"h" * LARGE)[100_000:])
    two.pump(lambda: client.frames() and busy.frames())
    assert two.processor._has_retired()


def test_the_keeper_brings_what_a_giver_died_over(two, monkeypatch):
    """Killed between the row's new owner and the socket's departure."""
    client = two.connect()
    client.send(frame(b"some"))
    two.pump(client.frames)
    client.send(frame(b"more")[:5])
    two.turns(5)
    monkeypatch.setattr(two.processor._departures, "send", lambda: None)
    two.move()
    two.pump(lambda: two.connections == 0)
    for channels in two.processor._departures._unsent:
        for channel in channels[1]:
            channel.sock.close()
    Repair(two.memory).after_processor(0)
    two.start_processor()
    two.processor.take_over()
    two.pump(lambda: two.other.connections == 1)
    client.send(frame(b"more")[5:])
    two.pump(lambda: client.frames() == [b"some", b"more"])


def replace_keeper(two) -> None:
    """Kill it; its successor has nothing yet, and the processors have heard of it."""
    for fd in list(two.keeper._cookies):
        two.keeper._drop(fd)
    two.memory.control.words[HEADER + HEADER_KEEPER] += 1
    for number in (0, 1):
        two.memory.processor_bells[number].ring()


def lives_on(two, client) -> bool:
    """Whether the keeper has what a successor of the connection's processor needs."""
    two.turns(5)
    two.other.deliver = two.deliver
    for channel in two.other.processor._channels.values():
        channel.sock.close()
    Repair(two.memory).after_processor(1)
    two.other.start_processor()
    two.other.processor.take_over()
    client.send(frame(b"more"))
    two.pump(lambda: client.is_closed or b"more" in client.frames())
    return not client.is_closed


def test_one_that_moves_while_the_keeper_dies_is_left_with_the_next(two, monkeypatch):
    client = two.connect()
    client.send(frame(b"some"))
    two.pump(client.frames)
    with monkeypatch.context() as patch:
        patch.setattr(two.processor._departures, "send", lambda: None)
        two.move()
        two.pump(lambda: two.connections == 0)
        replace_keeper(two)
        two.turns(5)  # neither has it among its own
    two.pump(lambda: two.other.connections == 1)
    assert lives_on(two, client)


def test_a_new_one_that_was_not_read_when_the_keeper_died_is_left_with_the_next(two):
    link = two.memory.keeper_link
    two.other.keep = lambda accepted: link.keep_new(accepted, 1, 0, 0)
    two.turns(5)
    client = two.other.connect()
    two.keeper.turn(0)
    replace_keeper(two)
    two.pump(lambda: two.other.connections == 1)
    assert lives_on(two, client)


def test_what_a_dead_target_had_not_read_is_left_with_a_new_keeper(two):
    client = two.connect()
    client.send(frame(b"some"))
    two.pump(client.frames)
    two.move()
    for _ in range(10):
        Rig.turn(two)  # it is sent, and nobody reads it
    assert two.connections == 0
    two.keeper.turn(0)
    replace_keeper(two)
    Repair(two.memory).after_processor(1)
    two.other.start_processor()
    two.other.processor.take_over()
    two.pump(lambda: two.other.connections == 1)
    assert lives_on(two, client)


def test_a_successor_waits_for_what_its_giver_has_not_sent_yet(two, monkeypatch):
    """Its predecessor owned the connection and never had the socket."""
    client = two.connect()
    client.send(frame(b"some"))
    two.pump(client.frames)
    with monkeypatch.context() as patch:
        patch.setattr(two.processor._departures, "send", lambda: None)
        two.move()
        two.pump(lambda: two.connections == 0)
        Repair(two.memory).after_processor(1)
        two.other.start_processor()  # the keeper has said already that this is all
        monkeypatch.setattr(two.other.processor._arrivals, "_message", lambda: None)
        two.other.processor.take_over()
        monkeypatch.undo()
    assert len(list(live_rows(two.memory.control.words))) == 1
    two.pump(lambda: two.other.connections == 1)
    client.send(frame(b"more"))
    two.pump(lambda: client.frames() == [b"some", b"more"])


def test_the_row_of_a_connection_that_never_comes_is_free_after_a_while(
    two, monkeypatch
):
    monkeypatch.setattr("mpbroker.network.connections._ON_ITS_WAY_NS", 0)
    client = two.connect()
    two.pump(lambda: two.connections == 1)
    monkeypatch.setattr(two.processor._departures, "send", lambda: None)
    two.move()
    two.pump(lambda: two.connections == 0)
    for channels in two.processor._departures._unsent:
        channels[1][0].sock.close()
    two.processor._departures._unsent.clear()
    for fd in list(two.keeper._cookies):
        two.keeper._drop(fd)  # it was killed as well
    two.other.start_processor()
    monkeypatch.setattr(two.other.processor._arrivals, "_message", lambda: None)
    two.other.processor.take_over()
    assert len(list(live_rows(two.memory.control.words))) == 1
    two.other.processor._housekeep()
    two.other.processor.turn()
    two.other.processor._housekeep()
    assert not list(live_rows(two.memory.control.words))
    client.close()


def given_without_descriptors(two, count: int, left: int) -> list:
    """Connections of the first processor, given to the other one at a bad time."""
    clients = [two.connect() for _ in range(count)]
    for client in clients:
        client.send(frame(b"some"))
    two.pump(lambda: all(client.frames() for client in clients))
    two.move()
    for _ in range(10):
        Rig.turn(two)
    assert two.connections == 0
    with descriptors_left(left):
        for _ in range(10):
            two.other.processor.turn()
    assert two.other.connections == left
    return clients


def test_whoever_comes_when_no_descriptor_is_left_is_served_when_there_is(two):
    clients = given_without_descriptors(two, 3, 1)
    two.other.processor._housekeep()
    two.pump(lambda: two.other.connections == 3)
    for client in clients:
        client.send(frame(b"more"))
    two.pump(lambda: all(len(client.frames()) == 2 for client in clients))


def test_whoever_asks_while_the_keeper_is_still_sending_asks_again(two):
    clients = given_without_descriptors(two, 3, 1)
    words, row = two.memory.control.words, processor_row(two.other.number)
    words[row + PROCESSOR_DELIVERED] = 0
    two.other.processor._housekeep()
    two.other.deliver()  # and now it says that it has sent all, the lost ones included
    two.other.processor._housekeep()
    two.pump(lambda: two.other.connections == 3)
    for client in clients:
        client.close()


def test_what_the_keeper_sends_late_is_not_given_up_at_that_moment(two, monkeypatch):
    monkeypatch.setattr("mpbroker.network.connections._ON_ITS_WAY_NS", 0)
    clients = given_without_descriptors(two, 3, 1)
    two.other.processor._housekeep()
    for _ in range(2):
        two.other.processor._now += 1_000_000_000
        two.keeper.turn(0)
        two.other.processor._housekeep()  # between the poll of a turn and the next
        two.other.processor.turn()
    two.pump(lambda: two.other.connections == 3)
    for client in clients:
        client.close()


def test_rows_of_sockets_that_found_no_descriptor_anywhere_come_free(two, monkeypatch):
    monkeypatch.setattr("mpbroker.network.connections._ON_ITS_WAY_NS", 0)
    monkeypatch.setattr(two.keeper, "_keep", lambda fd: pytest.fail("kept"))
    monkeypatch.setattr(two, "keep", lambda accepted: None)
    clients = given_without_descriptors(two, 3, 1)
    assert len(list(live_rows(two.memory.control.words))) == 3
    with descriptors_left(0):  # neither for this
        for _ in range(3):
            two.other.processor._housekeep()
            two.keeper.turn(0)
            two.other.processor.turn()
    assert len(list(live_rows(two.memory.control.words))) == 1
    for client in clients:
        client.close()
    monkeypatch.undo()


def die(two) -> None:
    """The first processor is killed: its descriptors go, and nothing else."""
    for channel in list(two.processor._channels.values()):
        channel.sock.close()
    Repair(two.memory).after_processor(two.number)


def three_that_are_served(two) -> list:
    clients = [two.connect() for _ in range(3)]
    for client in clients:
        client.send(frame(b"some"))
    two.pump(lambda: all(client.frames() for client in clients))
    return clients


def test_a_successor_without_descriptors_goes_on_when_it_has_some(two):
    clients = three_that_are_served(two)
    die(two)
    two.start_processor()
    with descriptors_left(1):
        two.processor.take_over()
    assert two.connections == 1
    two.processor._housekeep()
    two.pump(lambda: two.connections == 3)
    for client in clients:
        client.send(frame(b"more"))
    two.pump(lambda: all(len(client.frames()) == 2 for client in clients))


@pytest.mark.parametrize("is_new", [True, False])
def test_whom_a_successor_gives_up_is_told_though_the_keeper_has_the_socket(
    two, monkeypatch, is_new
):
    monkeypatch.setattr("mpbroker.network.moves.arrivals._DELIVERY_S", 0)
    clients = three_that_are_served(two)
    if is_new:  # it has not looked yet whether they are in rows, and hands them on
        assert two.keeper._new
    else:
        two.keeper._look_for_lost()
    die(two)
    with monkeypatch.context() as patch:
        patch.setattr(two, "deliver", lambda: None)  # it is stopped, or has no time
        two.start_processor()
    two.processor.take_over()
    two.pump(lambda: all(client.is_closed for client in clients))
    two.pump(lambda: two.keeper.count == 0)
    assert not list(live_rows(two.memory.control.words))


def test_the_keeper_ends_nobody_who_has_a_row_or_is_on_the_way_to_one(two):
    clients = three_that_are_served(two)
    new = two.connect()
    two.memory.keeper_bell.ring()
    two.keeper.turn(0)
    for client in [*clients, new]:
        client.send(frame(b"more"))
    two.pump(lambda: [len(each.frames()) for each in (*clients, new)] == [2, 2, 2, 1])


def test_nobody_takes_a_connection_that_another_has_been_given_meanwhile(two):
    """It lies unread at one that retired, and later there is another of that id."""
    mine, accepted = connected_pair()
    duplicate = accepted.dup()
    client = two.connect((mine, accepted))
    two.pump(lambda: two.connections == 1)
    send_fds(
        two.memory.handovers[1][0],
        HAND_OVER.pack(HandOver.NEW, 0, 1, 0),
        [duplicate.fileno()],
    )
    duplicate.close()
    two.turns(5)
    assert (two.connections, two.other.connections) == (1, 0)
    client.send(frame(b"hello"))
    two.pump(client.frames)


def test_connections_given_to_one_that_is_no_more_are_given_to_another(two):
    client = two.connect()
    client.send(frame(b"1"))
    two.pump(client.frames)
    words = two.memory.control.words
    (row,) = live_rows(words)
    move_connections(two.memory, 0, [1])
    for _ in range(5):
        two.processor.turn()  # and the other does not get to read it
    assert words[connection_row(row) + CONNECTION_OWNER] == 2
    stop_accepting(two.memory, 1)
    two.start_processor()
    words[processor_row(0) + PROCESSOR_LISTENER] = 1
    assert rescue_connections(two.memory, [0]) == 1
    two.pump(lambda: two.connections == 1)
    client.send(frame(b"2"))
    two.pump(lambda: client.frames() == [b"1", b"2"])


@pytest.mark.parametrize(("before", "found", "then"), [(0, False, -1), (1, False, 1)])
def test_the_counters_are_doubted_at_the_start_or_never(
    two, monkeypatch, before, found, then
):
    monkeypatch.setattr(
        "mpbroker.network.moves.keeper.counters_are_exact", lambda: found
    )
    words = two.memory.control.words
    words[HEADER + HEADER_COUNTERS] = before
    phase, two.memory.phase = two.memory.phase, Phase.STOPPED
    two.keeper.run()
    two.memory.phase = phase
    assert words[HEADER + HEADER_COUNTERS] == then


def test_a_connection_moves_before_any_keeper_has_tried_the_counters(two):
    """One that dies over its start must not cost those that move meanwhile."""
    words = two.memory.control.words
    words[HEADER + HEADER_COUNTERS] = 0
    client = two.connect()
    client.send(frame(b"1"))
    two.pump(client.frames)
    two.move()
    two.pump(lambda: two.other.connections == 1)
    client.send(frame(b"2"))
    two.pump(lambda: client.frames() == [b"1", b"2"])
    assert words[HEADER + HEADER_COUNTERS] == 1


# -- one connection that is handed to two processors -----------------------------------


def hand(two, number: int, kind: HandOver, sock, accepted_ns: int = 0) -> None:
    message = HAND_OVER.pack(kind, 0, 0, accepted_ns)
    send_fds(two.memory.handovers[number][0], message, [sock.fileno()])


def rows_of(two) -> int:
    return len(list(live_rows(two.memory.control.words)))


def is_answered_once(two, client) -> bool:
    two.pump(lambda: rows_of(two))
    two.turns(5)
    client.send(frame(b"hello"))
    two.pump(client.frames)
    return rows_of(two) == 1 and two.connections + two.other.connections == 1


def beside(two, monkeypatch, name: str) -> None:
    """Let the other processor run in the middle of what the first one does."""
    real = getattr(two.processor._connections, name)

    def run(*arguments, **options):
        found = real(*arguments, **options)
        monkeypatch.undo()
        for _ in range(5):
            two.other.processor.turn()
        return found

    monkeypatch.setattr(two.processor._connections, name, run)


def test_one_that_is_handed_to_two_at_once_is_served_by_one(two, monkeypatch):
    """A processor that retires forwards it to one, the keeper hands it to another."""
    client, accepted = connected_pair()
    for number in (0, 1):
        hand(two, number, HandOver.AGAIN, accepted)
    accepted.close()
    beside(two, monkeypatch, "is_elsewhere")
    two.clients.append(Client(client))
    assert is_answered_once(two, two.clients[0])


def test_one_that_came_in_time_and_was_looked_at_late_is_served_by_one(
    two, monkeypatch
):
    """During a long succession the keeper hands it over again, to another processor."""
    client, accepted = connected_pair()
    hand(two, 0, HandOver.NEW, accepted, time.monotonic_ns())
    waiting = two.processor._arrivals
    waiting.wait_for([], two.memory.keeper_link, two.processor._selector)
    assert waiting.has_early
    hand(two, 1, HandOver.AGAIN, accepted)
    accepted.close()
    two.other.processor.turn()
    two.other.processor.turn()
    assert two.other.connections == 1
    monkeypatch.setattr(arrivals, "_LATE_NS", -1)  # so long did it take
    two.clients.append(Client(client))
    assert is_answered_once(two, two.clients[0])


def test_one_that_came_in_time_to_a_processor_that_retires_is_served_by_one(two):
    """After a death the keeper hands on at once what has no row yet."""
    client, accepted = connected_pair()
    stop_accepting(two.memory, 0)
    hand(two, 1, HandOver.AGAIN, accepted)
    hand(two, 0, HandOver.NEW, accepted, time.monotonic_ns() + 10**12)
    accepted.close()
    two.other.processor.turn()
    two.other.processor.turn()
    assert two.other.connections == 1
    two.clients.append(Client(client))
    assert is_answered_once(two, two.clients[0])


def test_one_that_is_handed_over_again_after_its_end_is_not_read(two):
    """Its bytes would be taken for requests, from wherever the first reader ended."""
    mine, accepted = connected_pair()
    duplicate = accepted.dup()
    client = two.connect((mine, accepted))
    two.pump(lambda: two.connections == 1)
    no_length, empty_requests = b"\xff" * 4, bytes(100_000)
    client.send(no_length + empty_requests)
    two.pump(lambda: client.has_sent and two.connections == 0)
    hand(two, 0, HandOver.AGAIN, duplicate)
    duplicate.close()
    two.turns(5)
    assert two.requests == [] and rows_of(two) == 0
    assert two.counter(ProcessorCounter.LOST) == 0

"""A connection has up to five Produces at the cluster's writer, answered in order."""

from __future__ import annotations

import pytest

from mpbroker.ipc.layout import (
    CONNECTION_MUTED_UNTIL,
    CONNECTION_STATE,
    SLOT_CONNECTION,
    SLOT_STATE,
    STATE_MASK,
    ConnectionState,
    Phase,
    ProcessorCounter,
    SlotState,
    connection_row,
    is_request_of,
    slot_row,
)
from mpbroker.network.connection_rows import is_private, live_rows
from mpbroker.network.moves.departures import ALL
from mpbroker.supervisor.repair.recovery import Repair
from tests.network.rig import Rig, frame
from tests.network.test_departures import Two
from tests.network.test_slow_and_gone import narrow_pair

DEADLINE_NS = 1 << 62


def produce(text: str, padding: int = 0) -> bytes:
    return b"\0\0" + text.encode() + bytes(padding)


class Writer:
    """The rig's handler: parks each Produce, and says "read on"; echoes the rest."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.parked: dict[str, tuple[int, bytes]] = {}
        self.order: list[str] = []
        rig.answer = self.take

    def take(self, end, slot, body):
        if not body.startswith(b"\0\0"):
            end.send_bytes(slot, frame(body))
            return
        name = body[2:].rstrip(b"\0").decode()
        self.order.append(name)
        self.parked[name] = slot, body
        end.park(slot, DEADLINE_NS)
        if not name.startswith("local"):
            end.read_on(slot)

    def has(self, *names: str) -> None:
        """Wait until these requests are parked, and see that there are no others."""
        self.rig.pump(lambda: set(names) <= self.parked.keys())
        self.rig.turns()
        assert set(self.parked) == set(names)

    def answer(self, *names: str) -> None:
        for name in names:
            slot, body = self.parked.pop(name)
            self.rig.handler.unpark(slot)
            self.rig.handler.send_bytes(slot, frame(body))
        self.rig.handler.flush()

    def close(self, name: str) -> None:
        slot, _ = self.parked.pop(name)
        self.rig.handler.unpark(slot)
        self.rig.handler.close_connection(slot)
        self.rig.handler.flush()

    def slot(self, name: str) -> int:
        return self.parked[name][0]


@pytest.fixture
def writer(rig):
    writer = Writer(rig)
    yield writer
    writer.answer(*writer.parked)


def send(client, *names: str, padding: int = 0) -> None:
    client.send(b"".join(frame(produce(name, padding)) for name in names))


def answers(rig: Rig, client, *names: str) -> None:
    """Wait for exactly these answers, in this order, since the connection began."""
    rig.pump(lambda: len(client.frames()) >= len(names))
    rig.turns()
    found = [each[2:].rstrip(b"\0").decode() for each in client.frames()]
    assert found == list(names)


def row_of(rig: Rig, slot: int) -> int:
    words = rig.memory.control.words
    return connection_row(words[slot_row(slot) + SLOT_CONNECTION])


def state_of_row(rig: Rig, row: int) -> int:
    return rig.memory.control.words[row + CONNECTION_STATE] & STATE_MASK


@pytest.mark.parametrize("padding", [0, 6_000, 40_000])
def test_five_requests_are_in_flight_and_answered_in_their_order(rig, writer, padding):
    client = rig.connect()
    send(client, *"abcdefgh", padding=padding)
    writer.has(*"abcde")
    writer.answer("c", "b")
    answers(rig, client)
    writer.answer("a")
    answers(rig, client, *"abc")
    writer.has(*"defgh")
    writer.answer("h", "g", "f", "e", "d")
    answers(rig, client, *"abcdefgh")
    assert writer.order == list("abcdefgh")
    # Nothing of it is left: the connection is as any other.
    send(client, "i", padding=padding)
    writer.has("i")
    writer.answer("i")
    answers(rig, client, *"abcdefghi")
    (channel,) = rig.processor._channels.values()
    assert channel.pipeline is None and channel.state == ConnectionState.READING


def test_it_is_the_same_over_tls(tls_rig, certificates):
    rig = tls_rig()
    writer = Writer(rig)
    client = rig.connect_tls(certificates.client_context())
    send(client, *"abcdefg", padding=20_000)
    writer.has(*"abcde")
    writer.answer(*"edcba")
    writer.has(*"fg")
    writer.answer(*"gf")
    answers(rig, client, *"abcdefg")


def test_nothing_is_read_behind_a_request_that_the_writer_has_not_taken(rig, writer):
    client = rig.connect()
    send(client, "a", "local", "b")
    writer.has("a", "local")
    writer.answer("local")
    rig.turns()
    writer.has("a")
    writer.answer("a")
    answers(rig, client, "a", "local")
    writer.has("b")


def test_only_a_produce_is_executed_before_others_are_answered(rig, writer):
    client = rig.connect()
    send(client, "a", "b")
    client.send(frame(b"\0\1fetch"))
    send(client, "c")
    writer.has("a", "b")
    assert b"\0\1fetch" not in rig.requests
    writer.answer("b")
    rig.turns()
    assert b"\0\1fetch" not in rig.requests
    writer.answer("a")
    answers(rig, client, "a", "b", "fetch")
    writer.has("c")


def test_a_request_that_arrives_in_parts_meanwhile_is_read_to_its_end(rig, writer):
    for padding in (0, 40_000):
        client = rig.connect()
        whole = frame(produce("b", padding))
        send(client, "a")
        writer.has("a")
        client.send(whole[: len(whole) // 2])
        rig.turns()
        writer.answer("a")
        answers(rig, client, "a")
        client.send(whole[len(whole) // 2 :])
        writer.has("b")
        writer.answer("b")
        answers(rig, client, "a", "b")


def test_a_slot_names_the_request_before_and_its_connection(rig, writer):
    client = rig.connect()
    send(client, *"abc")
    writer.has(*"abc")
    end, words = rig.handler, rig.memory.control.words
    slots = [writer.slot(name) for name in "abc"]
    keys = [(slot, end.generation(slot)) for slot in slots]
    assert [end.request_before(slot) for slot in slots] == [None, *keys[:2]]
    row = row_of(rig, slots[0])
    assert all(is_request_of(words, row, slot) for slot in slots)
    assert state_of_row(rig, row) == ConnectionState.PIPELINED
    writer.close("a")
    rig.pump(lambda: not rig.connections)
    assert not any(is_request_of(words, row, slot) for slot in slots)
    other = rig.connect()
    send(other, *"de")
    writer.has(*"bcde")
    assert row_of(rig, writer.slot("d")) == row
    assert not any(is_request_of(words, row, writer.slot(name)) for name in "bc")


def test_a_client_that_goes_leaves_nothing_behind(rig, writer):
    client = rig.connect()
    send(client, *"abc")
    client.send(frame(produce("d", 40_000))[:30_000])
    writer.has(*"abc")
    writer.answer("b")
    rig.turns()
    client.close()
    rig.pump(lambda: all(rig.handler.must_end(writer.slot(name)) for name in "ac"))
    writer.answer("a", "c")
    rig.pump(lambda: not rig.connections and rig.nothing_is_held())


def test_half_a_hang_up_gets_all_answers(rig, writer):
    client = rig.connect()
    send(client, *"abcdefg")
    writer.has(*"abcde")
    client.sock.shutdown(1)
    rig.turns()
    writer.answer(*"abcde")
    for name in "fg":
        writer.has(name)  # nothing is read ahead any more
        writer.answer(name)
    answers(rig, client, *"abcdefg")
    rig.pump(lambda: client.is_closed)


def test_answers_that_a_client_does_not_read_wait(rig, writer):
    client = rig.connect()
    client.reads = False
    send(client, *"abcde", padding=3_000_000)
    writer.has(*"abcde")
    writer.answer(*"edcba")
    rig.turns()
    assert any(state == SlotState.RESPONDING for state in rig.busy_slots().values())
    client.reads = True
    answers(rig, client, *"abcde")


def test_a_slow_reader_of_several_answers_is_closed(make_rig):
    rig = make_rig()
    writer = Writer(rig)
    client = rig.connect(narrow_pair())
    client.reads = False
    send(client, *"ab", padding=3_900_000)
    writer.has("a", "b")
    rig.processor._max_idle_ns = 1
    writer.answer("a")

    def is_closed():
        rig.processor._next_housekeeping = 0
        return rig.counter(ProcessorCounter.CLOSED_IDLE)

    rig.pump(is_closed)
    writer.answer("b")


def test_an_order_to_close_ends_the_connection(rig, writer):
    client = rig.connect()
    send(client, *"abc")
    writer.has(*"abc")
    writer.close("b")
    rig.turns()
    assert not client.is_closed  # "a" has not been answered
    writer.answer("a")
    rig.pump(lambda: client.is_closed)
    assert [each[2:] for each in client.frames()] == [b"a"]


def test_a_bad_length_behind_others_closes_the_connection(rig, writer):
    client = rig.connect()
    send(client, "a")
    client.send(b"\xff\xff\xff\xff")
    writer.has("a")
    rig.pump(lambda: client.is_closed)


def test_a_throttled_client_is_not_read_ahead(rig, writer):
    client = rig.connect()
    send(client, "a")
    writer.has("a")
    words, row = rig.memory.control.words, row_of(rig, writer.slot("a"))
    words[row + CONNECTION_MUTED_UNTIL] = DEADLINE_NS
    send(client, "b")
    writer.has("a")
    words[row + CONNECTION_MUTED_UNTIL] = 1
    writer.answer("a")
    writer.has("b")


def test_few_free_slots_end_reading_ahead(rig, writer):
    client = rig.connect()
    rig.leave_slots(3)
    send(client, "a", "b")
    writer.has("a")
    writer.answer("a")
    writer.has("b")
    writer.answer("b")
    answers(rig, client, "a", "b")


@pytest.mark.parametrize("last", ["c", "local"])
@pytest.mark.parametrize("last_is_answered", [True, False])
@pytest.mark.parametrize("rest", [b"", b"\0\0\0\7\0\0d", b"\0\0\xff\0\0\0d"])
def test_the_processor_s_next_process_closes_it(make_rig, rest, last_is_answered, last):
    rig = make_rig(kind=Two)
    writer = Writer(rig)
    client, other = rig.connect(), rig.connect()
    send(client, "a", "b", last)
    client.send(rest)
    send(other, "y", "z")
    writer.has("a", "b", last, "y", "z")
    writer.answer("b", "y", "z")
    if last_is_answered:
        writer.answer(last)
    answers(rig, other, "y", "z")
    row = row_of(rig, writer.slot("a"))
    (connection,) = {
        each
        for each in live_rows(rig.memory.control.words)
        if connection_row(each) == row
    }
    assert is_private(rig.memory.control.words, connection)
    replace_processor(rig)
    rig.pump(lambda: client.is_closed)
    assert rig.counter(ProcessorCounter.LOST) == 1
    # The other one had got all its answers.
    send(other, "x")
    rig.pump(lambda: "x" in writer.parked)
    writer.answer(*writer.parked)
    answers(rig, other, "y", "z", "x")
    rig.pump(lambda: len(rig.busy_slots()) <= 1)


@pytest.mark.parametrize("padding", [0, 40_000])
@pytest.mark.parametrize("is_answered_first", [True, False])
def test_one_request_that_waits_outlives_its_processor(
    make_rig, is_answered_first, padding
):
    rig = make_rig(kind=Two)
    writer = Writer(rig)
    client = rig.connect()
    send(client, "a", padding=padding)
    writer.has("a")
    (channel,) = rig.processor._channels.values()
    assert channel.state == ConnectionState.PIPELINED
    if is_answered_first:
        writer.answer("a")
        answers(rig, client, "a")
    replace_processor(rig)
    rig.turns()
    if not is_answered_first:
        writer.answer("a")
    answers(rig, client, "a")
    send(client, "b", "c", padding=padding)
    writer.has("b", "c")
    writer.answer("c", "b")
    answers(rig, client, "a", "b", "c")


def replace_processor(rig: Two) -> None:
    """Kill it, and start the next one, which gets the sockets from the keeper."""
    for channel in rig.processor._channels.values():
        channel.sock.close()
    Repair(rig.memory).after_processor(0)
    rig.start_processor()
    rig.processor.take_over()


def test_a_processor_that_drains_sends_all_answers_first(rig, writer):
    client = rig.connect()
    send(client, *"abcdefg")
    writer.has(*"abcde")
    rig.memory.phase = Phase.DRAINING
    rig.turns()
    writer.answer(*"edcba")
    answers(rig, client, *"abcde")
    rig.pump(lambda: client.is_closed)


def test_a_processor_that_retires_answers_first(rig, writer):
    client = rig.connect()
    send(client, *"ab")
    writer.has(*"ab")
    rig.processor._departures.left = ALL
    send(client, "c")
    writer.has(*"ab")
    rig.processor._departures.left = 0
    writer.answer(*"ab")
    writer.has("c")


def test_the_words_of_a_request_are_not_those_of_the_slot_s_next_one(rig, writer):
    client = rig.connect()
    send(client, "a", "b")
    writer.has("a", "b")
    slot = writer.slot("b")
    writer.answer("a", "b")
    answers(rig, client, "a", "b")
    generation = rig.memory.control.words[slot_row(slot) + SLOT_STATE]
    assert generation  # it was used
    for _ in range(3):
        send(client, "c")
        writer.has("c")
        assert rig.handler.request_before(writer.slot("c")) is None
        writer.answer("c")

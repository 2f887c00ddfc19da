"""Requests are cut from the stream, however it arrives, and answered in order."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpbroker.ipc.arena import ANSWER_BYTES, REQUEST_PART_BYTES
from mpbroker.ipc.layout import ProcessorCounter, SlotState
from mpbroker.network.processor import NEW_CONNECTIONS
from tests.network.rig import frame

# A frame with its size field just fits the request part of a block.
FITS = REQUEST_PART_BYTES - 4
sizes = st.one_of(
    st.integers(0, 20),
    st.sampled_from([FITS - 1, FITS, FITS + 1, FITS // 2, FITS // 2 + 1]),
    st.integers(0, 40_000),
)


def payload(number: int, size: int) -> bytes:
    pattern = number.to_bytes(4, "big") + bytes(range(251))
    return (pattern * (size // len(pattern) + 1))[:size]


@pytest.mark.parametrize(
    "size",
    [0, 1, 4, FITS - 1, FITS, FITS + 1, 100 * 1024, 1 << 20, 4 * 1024 * 1024],
)
def test_a_frame_of_any_size_is_received_and_answered_whole(rig, size):
    client = rig.connect()
    client.send(frame(payload(1, size)) + frame(b"next"))
    rig.pump(lambda: len(client.frames()) == 2)
    assert client.frames() == [payload(1, size), b"next"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    sizes=st.lists(sizes, max_size=8),
    cuts=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3)), max_size=6),
)
def test_requests_and_answers_do_not_depend_on_how_the_stream_was_cut(rig, sizes, cuts):
    payloads = [payload(number, size) for number, size in enumerate(sizes)]
    stream = b"".join(map(frame, payloads))
    rig.requests.clear()
    client = rig.connect()
    start = 0
    for fraction, turns in sorted(cuts):
        end = int(fraction * len(stream))
        client.send(stream[start:end])
        start = end
        rig.pump(lambda: client.has_sent)
        rig.turns(turns)
    client.send(stream[start:])
    rig.pump(lambda: len(client.frames()) == len(payloads))
    assert rig.requests == client.frames() == payloads
    client.close()
    rig.clients.remove(client)
    rig.pump(lambda: not rig.connections)
    assert rig.nothing_is_held()


def test_a_stream_that_comes_byte_by_byte_is_read_as_well(rig):
    client = rig.connect()
    for byte in frame(b"one") + frame(b"") + frame(b"three"):
        client.send(bytes([byte]))
        rig.turns(2)
    rig.pump(lambda: len(client.frames()) == 3)
    assert client.frames() == [b"one", b"", b"three"]


def test_many_pipelined_requests_are_answered_in_order(rig):
    client = rig.connect()
    payloads = [payload(number, number * 7 % 3000) for number in range(300)]
    client.send(b"".join(map(frame, payloads)))
    rig.pump(lambda: len(client.frames()) == 300)
    assert client.frames() == payloads


def test_a_connection_has_one_request_in_flight(make_rig):
    rig = make_rig()
    rig.answer = rig.hold
    client = rig.connect()
    client.send(frame(b"1") + frame(b"2") + frame(b"3"))
    for number in (b"1", b"2", b"3"):
        rig.pump(lambda: rig.held)
        rig.turns()
        assert [body for _, body in rig.held] == [number]
        rig.release()


def test_requests_of_many_connections_are_published_in_one_turn(rig):
    rig.handles = False
    clients = [rig.connect() for _ in range(30)]
    rig.pump(lambda: rig.connections == 30)
    for client in clients:
        client.send(frame(b"x"))
        client.turn()
    rig.processor.turn()
    rig.processor.turn()
    assert len(rig.memory.ring) == 30


def test_new_connections_come_twenty_a_turn_and_those_there_are_served_between(rig):
    """As Kafka since KAFKA-7719: a storm of newcomers keeps nobody waiting."""
    steady = rig.connect()
    rig.pump(lambda: rig.connections == 1)
    for _ in range(5 * NEW_CONNECTIONS):
        rig.connect()
    steady.send(frame(b"meanwhile"))
    counts = [rig.connections]
    answered = 0
    while rig.connections <= 5 * NEW_CONNECTIONS:
        rig.turn()
        counts.append(rig.connections)
        answered = answered or (len(counts) if steady.frames() else 0)
        assert len(counts) < 1000
    assert max(after - before for before, after in pairwise(counts)) == NEW_CONNECTIONS
    assert 0 < answered < len(counts)


# -- what is no request -------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (b"\xff\xff\xff\xff", "-1 bytes"),
        (b"\x80\x00\x00\x00", "-2147483648 bytes"),
        ((4 * 1024 * 1024 + 1).to_bytes(4, "big"), "socket.request.max.bytes"),
        (b"\x7f\xff\xff\xff", "socket.request.max.bytes"),
        (b"\x16\x03\x01\x02", "TLS"),
        (b"GET / HTTP/1.1\r\n\r\n", "HTTP"),
        (b"POST /topics HTTP/1.1\r\n", "HTTP"),
        (b"PROXY TCP4 10.0.0.1 10.0.0.2 40000 9092\r\n", "PROXY protocol"),
        (b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c" + bytes(12), "PROXY protocol"),
    ],
)
def test_what_cannot_be_a_frame_closes_the_connection_and_says_why(
    rig, caplog, head, reason
):
    caplog.set_level("INFO")
    client = rig.connect()
    client.send(frame(b"fine"))
    rig.pump(lambda: client.frames())
    client.send(head)
    rig.pump(lambda: client.is_closed)
    assert reason in caplog.text
    assert rig.counter(ProcessorCounter.CLOSED_BAD_FRAME) == 1
    assert client.frames() == [b"fine"]


def test_a_request_before_the_nonsense_is_still_answered(rig):
    client = rig.connect()
    client.send(frame(b"fine") + b"\xff\xff\xff\xff")
    rig.pump(lambda: client.is_closed)
    assert client.frames() == [b"fine"]


def test_a_size_is_judged_before_any_memory_is_given_for_it(rig):
    client = rig.connect()
    client.send((4 * 1024 * 1024).to_bytes(4, "big"))
    rig.pump(lambda: not rig.processor._reader._extents.is_unused)
    other = rig.connect()
    other.send(b"\x7f\xff\xff\xff")
    rig.pump(lambda: other.is_closed)
    assert rig.counter(ProcessorCounter.WAITS_FOR_EXTENT) == 0


def test_a_limit_counts_for_what_comes_whole_in_one_go_too(make_rig):
    rig = make_rig(max_request_bytes=100)
    client = rig.connect()
    client.send(frame(b"x" * 100) + frame(b"y" * 101))
    rig.pump(lambda: client.is_closed)
    assert rig.requests == client.frames() == [b"x" * 100]
    assert rig.counter(ProcessorCounter.CLOSED_BAD_FRAME) == 1


# -- answers ------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, ANSWER_BYTES - 4, ANSWER_BYTES - 3, 5_000_000])
def test_an_answer_of_any_size_arrives_whole(make_rig, size):
    def big(end, slot, body):
        end.send_bytes(slot, frame(payload(9, size)))

    rig = make_rig(answer=big)
    client = rig.connect()
    client.send(frame(b"a") + frame(b"b"))
    rig.pump(lambda: len(client.frames()) == 2)
    assert client.frames() == [payload(9, size)] * 2


def test_a_request_without_an_answer_is_followed_by_the_next(make_rig):
    def only_second(end, slot, body):
        if body == b"silent":
            end.send_nothing(slot)
        else:
            end.send_bytes(slot, frame(body))

    rig = make_rig(answer=only_second)
    client = rig.connect()
    client.send(frame(b"silent") + frame(b"loud") + frame(b"silent"))
    rig.pump(lambda: len(rig.requests) == 3)
    rig.turns()
    assert client.frames() == [b"loud"]


def test_a_handler_can_close_a_connection(make_rig):
    rig = make_rig(answer=lambda end, slot, body: end.close_connection(slot))
    client = rig.connect()
    client.send(frame(b"a") + frame(b"b"))
    rig.pump(lambda: client.is_closed)
    assert rig.requests == [b"a"]
    assert rig.counter(ProcessorCounter.CLOSED_BY_HANDLER) == 1


def test_an_answered_connection_holds_nothing_of_its_handlers(make_rig):
    """Its slot it may keep, for its next request."""
    rig = make_rig(answer=lambda end, slot, _: end.send_bytes(slot, frame(b"x" * 9999)))
    client = rig.connect()
    client.send(frame(b"a"))
    rig.pump(client.frames)
    rig.turn()
    assert SlotState.RESPONDING not in rig.busy_slots().values()
    rig.handler.give_back_memory()
    assert rig.handler._extents.is_unused

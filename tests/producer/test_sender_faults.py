"""What a broken peer, a broken stream or a broken clock does to a `Sender`: nothing."""

from __future__ import annotations

import itertools
import struct
import time
from unittest import mock

import pytest

from mpbroker.protocol.error_code import ErrorCode
from tests.client.fake_wire import Sent
from tests.producer.rig import SenderRig

IN_FLIGHT = 3


def answer_bytes(rig: SenderRig, sent: Sent) -> bytes:
    """Return the answer to a Produce as it would come."""
    rig.reply(sent, turn=False)
    _, _, data = rig.wire._events.pop()
    assert isinstance(data, bytes)
    return data


def again(rig: SenderRig, future, sequence: int) -> None:
    """Have the retry of a record that the broker has already be acknowledged."""
    for _ in range(20):
        rig.pass_ms(1000)
        rig.turns(3)
        if rig.produces:
            break
    (sent,) = rig.produces
    assert rig.header(sent).base_sequence == sequence
    assert rig.values(sent) == [b"x"]
    rig.reply(sent, code=ErrorCode.DUPLICATE_SEQUENCE_NUMBER)
    assert future.result(0).offset == -1  # it is there; where, nobody remembers


def test_an_answer_cut_at_any_byte_has_the_batch_sent_again_by_its_sequence():
    rig = SenderRig().ready().introduce()
    whole = 2
    cut = 0
    while cut < whole:
        future = rig.send(b"x")
        sent = rig.produces[0]
        data = answer_bytes(rig, sent)
        whole = len(data)
        rig.wire.raw(sent.node, data[:cut])
        rig.turns()
        assert not future.done()
        rig.wire.hang_up(sent.node)
        rig.turns()
        assert not future.done()
        again(rig, future, sequence=1 + cut)
        cut += 1
    assert whole > 40


@pytest.mark.parametrize(
    "order", list(itertools.permutations(range(IN_FLIGHT)))[1:], ids=str
)
def test_answers_in_another_order_are_not_believed_and_lose_nothing(order):
    rig = SenderRig().ready().introduce()
    futures = [rig.send(b"%d" % i) for i in range(IN_FLIGHT)]
    sent = rig.produces
    assert len(sent) == IN_FLIGHT
    answers = [answer_bytes(rig, each) for each in sent]
    for index in order:
        rig.wire.raw(0, answers[index])
    rig.turns()
    # What came in turn counts; from the first that did not, the rest is asked again.
    in_turn = next(i for i in range(IN_FLIGHT) if order[i] != i)
    for _ in range(60):
        rig.pass_ms(1000)
        rig.turns(2)
        for each in rig.produces:
            place = int(rig.values(each)[0])
            assert rig.header(each).base_sequence == 1 + place
            rig.reply(each, base_offset=1 + place, turn=False)
        rig.turns()
        if all(future.done() for future in futures):
            break
    assert [future.result(0).offset for future in futures] == [1, 2, 3]
    assert rig.metrics.snapshot(rig.wire.now_ms)["producer-metrics"][
        "record-retry-total"
    ] >= IN_FLIGHT - max(in_turn, 0)


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(
            lambda data: data[:4] + struct.pack(">i", 77) + data[8:],
            id="another correlation id",
        ),
        pytest.param(
            lambda data: struct.pack(">i", len(data) - 12) + data[4:-8],
            id="a frame that ends too soon",
        ),
        pytest.param(
            lambda data: struct.pack(">i", 0x7FFFFFFF) + data[4:], id="2 GiB to come"
        ),
        pytest.param(
            lambda data: struct.pack(">i", -1) + data[4:], id="a negative length"
        ),
        pytest.param(
            lambda data: struct.pack(">i", len(data)) + data[4:] + b"!" * 4,
            id="bytes behind the answer",
        ),
        pytest.param(lambda data: data + data, id="the same answer twice"),
    ],
)
def test_what_is_no_answer_ends_the_connection_and_not_the_record(spoil):
    rig = SenderRig().ready().introduce()
    before = len(rig.wire.connects)
    future = rig.send(b"x")
    sent = rig.produces[0]
    rig.wire.raw(sent.node, spoil(answer_bytes(rig, sent)))
    rig.turns()
    if not rig.produces and not future.done():
        again(rig, future, sequence=1)
    assert future.result(0) is not None
    rig.pass_ms(5000)
    rig.turns(6)
    rig.send(b"y")
    for _ in range(20):
        if rig.produces:
            break
        rig.pass_ms(1000)
        rig.turns(3)
    assert rig.header(rig.produces[0]).base_sequence == 2
    assert len(rig.wire.connects) > before


def test_a_wall_clock_that_jumps_moves_no_deadline():
    rig = SenderRig(linger_ms=20, request_timeout_ms=1000).ready().introduce()
    year_s = 365 * 86_400
    now_s = time.time()
    jumps = itertools.cycle([now_s, now_s - year_s, now_s + year_s])
    with (
        mock.patch("time.time", side_effect=jumps),
        mock.patch("time.time_ns", side_effect=lambda: int(next(jumps) * 1e9)),
    ):
        futures = [rig.append(b"%d" % i) for i in range(6)]
        rig.turns(3)
        assert not rig.produces  # lingering goes by the other clock
        rig.pass_ms(20)
        rig.turns()
        (sent,) = rig.produces
        rig.turns(3)
        assert rig.produces == [sent]  # nothing is late
    header = rig.header(sent)
    assert header.max_timestamp - header.base_timestamp <= 2 * year_s * 1000
    assert header.max_timestamp > now_s * 1000
    assert rig.values(sent) == [b"%d" % i for i in range(6)]
    rig.reply(sent)
    assert [future.result(0).offset for future in futures] == list(range(1, 7))
    times = {future.result(0).timestamp for future in futures}
    assert len(times) == 3

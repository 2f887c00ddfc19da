"""What a processor notes of each request: the same in C and in Python."""

from __future__ import annotations

import socket
import struct

import pytest

from mpbroker.ipc.compiled import IS_COMPILED
from mpbroker.ipc.counters.network_costs import network_ns
from mpbroker.ipc.counters.request_metrics import (
    Stage,
    bounds_s,
    bucket_of,
    log_above,
    read_apis,
    read_logged,
)
from mpbroker.ipc.layout import (
    API_ROWS,
    LOG_ENTRIES,
    SLOT_COMPLETED,
    SLOT_DEQUEUED,
    SLOT_PARKED,
    SLOT_RECEIVED,
    slot_row,
)
from tests.network.rig import Rig, echo, frame
from tests.support.memory import broker_memory

PRODUCE = b"\0\0\0\x09" + (77).to_bytes(4, "big") + b"payload"
ALL = range(16)
MS = 1_000_000


@pytest.fixture(
    params=[
        pytest.param(
            True, marks=pytest.mark.skipif(not IS_COMPILED, reason="no compiled core")
        ),
        False,
    ],
    ids=["compiled", "python"],
)
def rig(request):
    with broker_memory() as memory:
        made = Rig(memory)
        if not request.param:
            made.processor._compiled = None
        yield made
        made.end()


def ask(rig, payload=PRODUCE, answers=1):
    client = rig.clients[0] if rig.clients else rig.connect()
    before = len(client.frames())
    client.send(frame(payload) * answers)
    rig.pump(lambda: len(client.frames()) == before + answers)


def stamped(rig, *, queue, local, remote):
    """An answer to a request that came that long ago, and had to wait."""

    def answer(end, slot, body):
        echo(end, slot, body)
        words, row = rig.memory.control.words, slot_row(slot)
        completed = words[row + SLOT_COMPLETED]
        words[row + SLOT_PARKED] = completed - remote
        words[row + SLOT_DEQUEUED] = completed - remote - local
        words[row + SLOT_RECEIVED] = completed - remote - local - queue

    return answer


def metrics(rig):
    return read_apis(rig.memory.control.words, ALL)


def test_requests_and_their_bytes_are_counted_by_api(rig):
    ask(rig, answers=3)
    ask(rig, b"\0\x12\0\x03" + bytes(4))
    found = metrics(rig)
    assert {key: each.requests for key, each in found.items()} == {0: 3, 18: 1}
    assert found[0].request_bytes == found[0].response_bytes == 3 * len(frame(PRODUCE))


def test_requests_are_counted_by_version(rig):
    for version in (9, 9, 3, 0, 30, 31, 32, 255, 256, 0x7FFF):
        ask(rig, b"\0\0" + version.to_bytes(2, "big") + bytes(8))
    ask(rig, b"\0\x12\0\x04" + bytes(8))
    found = metrics(rig)
    assert found[0].versions == {0: 1, 3: 1, 9: 2, 30: 1, 31: 5}
    assert found[18].versions == {4: 1}


def test_each_stage_gets_the_time_that_was_spent_in_it(rig):
    rig.answer = stamped(rig, queue=3 * MS, local=5 * MS, remote=700 * MS)
    ask(rig)
    stages = metrics(rig)[0].stages
    for stage, ns in (
        (Stage.QUEUE, 3 * MS),
        (Stage.LOCAL, 5 * MS),
        (Stage.REMOTE, 700 * MS),
    ):
        assert stages[stage].sum_ns == ns
        assert stages[stage].counts[bucket_of(ns)] == 1
    parts = sum(each.sum_ns for each in stages[: Stage.TOTAL])
    assert stages[Stage.TOTAL].sum_ns == parts >= 708 * MS


def test_a_processor_says_what_a_request_costs_it(rig):
    assert network_ns(rig.memory.control.words, 0, 0) == 0
    for _ in range(50):  # seconds with fewer requests say nothing
        ask(rig, answers=200)
        rig.processor._housekeep()
        if network_ns(rig.memory.control.words, 0, 0):
            return
    pytest.fail("nothing after 10,000 requests")


def test_a_request_that_did_not_wait_has_no_remote_time(rig):
    ask(rig)
    remote = metrics(rig)[0].stages[Stage.REMOTE]
    assert (remote.sum_ns, remote.counts[0]) == (0, 1)


def test_stamps_that_are_missing_or_out_of_order_take_no_time_back(rig):
    def answer(end, slot, body):
        echo(end, slot, body)
        words, row = rig.memory.control.words, slot_row(slot)
        words[row + SLOT_DEQUEUED], words[row + SLOT_COMPLETED] = 1 << 62, 5
        words[row + SLOT_PARKED] = -9

    rig.answer = answer
    ask(rig)
    assert all(each.sum_ns >= 0 for each in metrics(rig)[0].stages)


@pytest.mark.parametrize("payload", [b"", b"\0", b"\xff\xff\0\0" + bytes(9), b"\1" * 8])
def test_what_is_no_request_is_counted_as_no_api(rig, payload):
    ask(rig, payload)
    assert list(metrics(rig)) == [API_ROWS - 1]
    assert metrics(rig)[API_ROWS - 1].versions == {0: 1}


def test_a_successor_goes_on_counting(rig):
    ask(rig)
    compiled = rig.processor._compiled
    rig.clients[0].close()
    rig.clients.clear()
    rig.pump(lambda: not rig.connections)
    rig.start_processor()
    if compiled is None:
        rig.processor._compiled = None
    ask(rig)
    assert metrics(rig)[0].requests == 2


def test_nothing_is_logged_unless_it_is_asked_for(rig):
    ask(rig)
    assert read_logged(rig.memory.control.words, 0, 0) == ([], 0, 0)


def test_requests_slower_than_the_threshold_are_logged_with_all_their_times(rig):
    words = rig.memory.control.words
    log_above(words, 5000 * MS)
    ask(rig)
    rig.answer = stamped(rig, queue=4000 * MS, local=3000 * MS, remote=0)
    ask(rig, PRODUCE)
    found, missed, following = read_logged(words, 0, 0)
    assert (len(found), missed, following) == (1, 0, 1)
    entry = found[0]
    assert (entry.api_key, entry.api_version, entry.correlation_id) == (0, 9, 77)
    assert entry.dequeued_ns - entry.received_ns == 4000 * MS
    assert entry.received_ns < entry.dequeued_ns < entry.completed_ns
    assert entry.completed_ns <= entry.taken_ns <= entry.sent_ns
    assert entry.request_bytes == entry.response_bytes == len(frame(PRODUCE))


def test_a_reader_that_comes_late_is_told_how_much_it_missed(rig):
    words = rig.memory.control.words
    log_above(words, 0)
    ask(rig, answers=LOG_ENTRIES + 5)
    found, missed, following = read_logged(words, 0, 0)
    assert (len(found), missed, following) == (LOG_ENTRIES, 5, LOG_ENTRIES + 5)


def test_an_answer_that_is_sent_in_pieces_is_counted_once_it_is_out(rig):
    client = rig.connect()
    client.reads = False
    large = PRODUCE + bytes(3_000_000)
    client.send(frame(large))
    rig.pump(lambda: client.has_sent and rig.requests)
    assert not metrics(rig)
    client.reads = True
    rig.pump(lambda: client.frames())
    rig.pump(lambda: metrics(rig))
    assert metrics(rig)[0].requests == 1


def test_every_time_has_a_bucket_that_ends_after_it():
    ends = [round(bound * 1e9) for bound in bounds_s()]
    for ns in (0, 1, 8191, 8192, 8193, 16383, 16384, 1 << 34, 1 << 35, 1 << 60):
        bucket = bucket_of(ns)
        assert bucket == len(ends) or ns < ends[bucket]
        assert bucket == 0 or ns >= ends[bucket - 1]


@pytest.mark.parametrize("size", [0, 550_000])
@pytest.mark.parametrize("resets", [False, True])
def test_a_request_whose_client_has_gone_is_counted_all_the_same(rig, size, resets):
    held = []
    rig.answer = lambda end, slot, body: held.append(slot)
    client = rig.connect()
    client.send(frame(PRODUCE))
    rig.pump(lambda: held)
    if resets:
        linger = struct.pack("ii", 1, 0)
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    client.close()
    rig.handler.send_bytes(held[0], frame(bytes(size)))
    rig.handler.flush()
    rig.pump(lambda: metrics(rig))
    assert sum(metrics(rig)[0].stages[Stage.TOTAL].counts) == 1

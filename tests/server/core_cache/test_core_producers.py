"""Batches of idempotent producers, by the short cut in C and by the usual way."""

from __future__ import annotations

import contextlib
import signal
import struct
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpbroker.ipc.compiled import IS_COMPILED
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.records.record_batch import RecordBatchBuilder
from tests.server.core_cache.handler_stage import Stage, produce_request
from tests.storage.batches import read_all
from tests.support.children import deaths, die, fork, kill_at_step, steps_of
from tests.support.memory import broker_memory

pytestmark = pytest.mark.skipif(
    not IS_COMPILED, reason="the compiled core is not there"
)

NOW = time.time_ns() // 1_000_000
PRODUCE = int(ApiKey.PRODUCE)
LAST_SEQUENCE = 2**31 - 1
OUT_OF_ORDER, STALE_EPOCH = 45, 47


def batch_of(sequence, *, producer=7, epoch=0, count=1):
    """Of nobody if there is no sequence."""
    fields = {}
    if sequence is not None:
        fields = {
            "producer_id": producer,
            "producer_epoch": epoch,
            "base_sequence": sequence,
        }
    builder = RecordBatchBuilder(**fields)
    for number in range(count):
        builder.append(NOW + number, None, b"x")
    return bytes(builder.build())


def request(sequence, **fields):
    return produce_request("one", 0, batch_of(sequence, **fields), version=7)


PLAIN = produce_request("one", 0, batch_of(None), version=7)


@contextlib.contextmanager
def stages(directory):
    with broker_memory() as first, broker_memory() as second:
        pair = (
            Stage(first, directory / "short", short=True),
            Stage(second, directory / "usual", short=False),
        )
        for stage in pair:
            stage.registry.create_topic("one", 1)
        yield pair
        for stage in pair:
            stage.logs.close_files()


@pytest.fixture
def pair(tmp_path):
    with stages(tmp_path) as made:
        yield made


@pytest.fixture
def short(pair):
    """It knows producer 7, whose next sequence is 2."""
    for sequence in (0, 1):
        pair[0].ask(request(sequence))
    return pair[0]


def answered(answer):
    """Error code and base offset."""
    return struct.unpack_from(">hq", answer[1], 25)


def known(stage):
    """What the process knows of its producers, as of the log's end."""
    log = stage.log("one")
    producers = log.producers.at(log.view.state())
    return producers.end_offset, {
        number: (entry.epoch, entry.batches, entry.last_timestamp)
        for number, entry in producers.entries.items()
    }


def test_the_next_batch_of_a_known_producer_takes_it(pair):
    for frame in [request(0), *(request(1 + 3 * n, count=3) for n in range(9))]:
        assert pair[0].ask(frame) == pair[1].ask(frame)
    assert len(pair[0].short_ways) == 8
    assert known(pair[0]) == known(pair[1])


def test_a_sequence_wraps_to_zero(pair):
    for frame in [
        request(LAST_SEQUENCE - 3),
        request(LAST_SEQUENCE - 2),
        request(LAST_SEQUENCE - 1, count=5),
        request(3),
    ]:
        assert pair[0].ask(frame) == pair[1].ask(frame)
    assert len(pair[0].short_ways) == 2
    assert known(pair[0]) == known(pair[1])


def test_a_batch_that_comes_again_is_answered_with_its_first_offset(short):
    for sequence in (2, 3, 4):
        assert answered(short.ask(request(sequence))) == (0, sequence)
    for sequence in (2, 4):
        assert answered(short.ask(request(sequence))) == (0, sequence)
    assert len(read_all(short.log("one"))) == 5
    assert len(short.short_ways) == 3


def test_a_gap_and_an_old_epoch_are_refused(short):
    assert answered(short.ask(request(3)))[0] == OUT_OF_ORDER
    short.ask(request(0, epoch=1))
    assert answered(short.ask(request(2)))[0] == STALE_EPOCH
    assert short.short_ways == []
    short.ask(request(1, epoch=1))
    assert short.short_ways == [PRODUCE]


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(st.sampled_from([7, 7, 8]), st.integers(0, 1), st.integers(-1, 1))
        | st.none(),
        max_size=40,
    )
)
def test_any_order_of_batches_ends_the_same_either_way(tmp_path_factory, asked):
    """None: a batch of nobody; else a producer, its epoch, and how far it is off."""
    following = {}
    with stages(tmp_path_factory.mktemp("data")) as pair:
        for each in asked:
            frame = PLAIN
            if each is not None:
                producer, epoch, off = each
                sequence = max(0, following.get((producer, epoch), 0) + off)
                if off == 0:
                    following[producer, epoch] = sequence + 1
                frame = request(sequence, producer=producer, epoch=epoch)
            assert pair[0].ask(frame) == pair[1].ask(frame)
        assert known(pair[0]) == known(pair[1])
        assert read_all(pair[0].log("one")) == read_all(pair[1].log("one"))


def test_what_another_process_has_appended_is_known_before_the_next_batch(short):
    def others_appends():
        for frame in (request(2), PLAIN, request(3)):
            short.ask(frame)

    assert fork(others_appends) == 0
    assert answered(short.ask(request(4))) == (0, 5)
    assert short.short_ways == [PRODUCE]
    assert fork(others_appends_nothing_but(short, request(5))) == 0
    assert answered(short.ask(request(5))) == (0, 6)  # it was sent again
    assert answered(short.ask(request(7)))[0] == OUT_OF_ORDER
    assert [offset for offset, _ in read_all(short.log("one"))] == list(range(7))


def others_appends_nothing_but(stage, frame):
    return lambda: stage.ask(frame)


def test_another_process_that_rolled_or_began_an_epoch_is_seen(short):
    def others_appends():
        log = short.log("one")
        with log.row.locked():
            log.roll_locked(NOW)
        short.ask(request(2))
        short.ask(request(0, epoch=1))

    assert fork(others_appends) == 0
    assert answered(short.ask(request(3)))[0] == STALE_EPOCH
    assert answered(short.ask(request(1, epoch=1)))[0] == 0
    assert known(short)[1][7][0] == 1


def test_a_handler_killed_at_any_step_has_appended_its_batch_once(short):
    row = short.log("one").row
    total = steps_of(lambda: short.ask(request(2)))
    outcomes = set()
    for step in deaths(total, 40, seed=3):
        sequence = start = row.log_end_offset  # one record a batch
        short.publish(request(sequence))

        def doomed(step=step):
            kill_at_step(step)
            short.handler.turn()
            die()

        assert fork(doomed) == -signal.SIGKILL
        row.settle()
        outcomes.add(row.log_end_offset - start)
        short.memory.ring.reclaim(0)
        if not short.memory.responses[0].waiting():
            if not short.memory.ring.waiting():
                short.memory.ring.put_back([3])
            short.handler.turn()
        assert answered(short.answer(3)) == (0, start)
        # The client did not get the answer, and sends it again.
        assert answered(short.ask(request(sequence))) == (0, start)
        assert row.log_end_offset == start + 1
    assert outcomes == {0, 1}
    assert known(short)[0] == row.log_end_offset

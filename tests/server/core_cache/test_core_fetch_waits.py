"""A fetch that waits is answered with the produce that wakes its handler."""

from __future__ import annotations

import pytest

from mpbroker.ipc.compiled import IS_COMPILED
from mpbroker.ipc.layout import (
    HANDLER_COUNTERS,
    HandlerCounter,
    SlotState,
    handler_row,
)
from tests.server.core_cache.handler_stage import produce_request
from tests.server.core_cache.test_core_fetches import (
    CLIENT,
    FOREVER,
    PRODUCER,
    RECORDS,
    batch,
    offsets_in,
    pairs,
)
from tests.support.memory import state_of

pytestmark = pytest.mark.skipif(
    not IS_COMPILED, reason="the compiled core is not there"
)

OTHER = 7  # a slot


@pytest.fixture
def pair(tmp_path):
    with pairs(tmp_path, syncs=True) as made:
        yield made


@pytest.fixture
def short(pair):
    return pair.short


@pytest.fixture
def seen(short, monkeypatch):
    """What was answered whenever Python had its first turn after the core."""
    found = []
    core_cache = short.stage.core_cache
    answers = short.stage.memory.responses[0]
    finish = core_cache.finish

    def look(slot, result):
        found.append((answers.waiting(), len(short.stage.disk.started)))
        return finish(slot, result)

    monkeypatch.setattr(core_cache, "finish", look)
    return found


def wake(consumer, records=RECORDS, *, acks=1, topic="one", partition=0):
    """A produce wakes the handler; who was answered."""
    frame = produce_request(topic, partition, records, acks=acks)
    consumer.stage.publish(frame, PRODUCER)
    consumer.stage.handler._wait(16)
    return consumer.stage.memory.responses[0].pop()


def parked(consumer):
    row = handler_row(0) + HANDLER_COUNTERS + HandlerCounter.PARKED
    counted = consumer.stage.memory.control.words[row]
    assert counted == consumer.stage.purgatory.size
    return counted


def test_it_is_answered_before_python_has_a_turn(short, seen):
    for offset in (2, 3, 4):
        assert short.ask(short.frame({0: offset})) is None
        assert parked(short) == 1
        assert wake(short) == [PRODUCER, CLIENT]
        assert seen.pop() == ([PRODUCER, CLIENT], 0)
        assert offsets_in(short.read()) == [offset]
        assert parked(short) == 0 and short.stage.core_cache.waiting == {}
    # And by a handler that was awake, whose notice has to come.
    assert short.ask(short.frame({0: 5})) is None
    assert short.produce() == [CLIENT]
    assert offsets_in(short.read()) == [5]


@pytest.mark.parametrize("version", [4, 11, 12, 17])
def test_the_answer_is_the_usual_one(pair, version):
    assert pair.ask(2, version=version) is None
    records = batch(20)
    assert wake(pair.short, records) == [PRODUCER, CLIENT]
    assert pair.usual.produce(records) == [CLIENT]
    pair.answer()


def test_it_waits_for_no_disk(short, seen):
    assert short.ask(short.frame({0: 2})) is None
    assert wake(short, acks=-1) == [CLIENT]
    assert seen[-1] == ([CLIENT], 0)
    assert offsets_in(short.read()) == [2]
    assert state_of(short.stage.memory, PRODUCER) == SlotState.PARKED
    short.stage.end_syncs()
    assert short.stage.memory.responses[0].pop() == [PRODUCER]


def test_of_several_that_wait_all_are_answered(short):
    assert short.ask(short.frame({0: 2})) is None
    short.stage.publish(short.frame({0: 2}), OTHER)
    short.stage.handler.turn()
    assert parked(short) == 2
    assert sorted(wake(short)) == [CLIENT, PRODUCER, OTHER]
    assert parked(short) == 0 and short.stage.core_cache.waiting == {}


def test_what_waits_for_several_partitions_is_answered_by_the_first(short):
    assert short.ask(short.frame({0: 2, 1: 2}, topic="two")) is None
    assert wake(short, topic="two", partition=1) == [PRODUCER, CLIENT]
    assert parked(short) == 0 and short.stage.core_cache.waiting == {}
    assert wake(short, topic="two") == [PRODUCER]


def test_it_waits_on_for_its_least_bytes(short):
    assert short.ask(short.frame({0: 2}, min_bytes=100)) is None
    assert wake(short) == [PRODUCER]
    assert parked(short) == 1
    assert wake(short) == [PRODUCER, CLIENT]
    assert offsets_in(short.read()) == [2, 3]


def test_what_was_answered_otherwise_is_not_answered_again(short):
    assert short.ask(short.frame({0: 2})) is None
    short.stage.purgatory.expire(FOREVER)
    short.stage.channel.flush()
    assert short.stage.memory.responses[0].pop() == [CLIENT]
    assert short.stage.core_cache.waiting == {}
    assert wake(short) == [PRODUCER]


def test_a_slot_that_is_parked_no_more_is_left_alone(short):
    """Whoever names it."""
    short.stage.publish(short.frame({0: 0}), CLIENT)
    short.stage.handler.turn()
    short.stage.memory.responses[0].pop()
    short.stage.core_cache.waiting[short.stage.log("one").row.index] = CLIENT
    short.stage.publish(short.frame({0: 2}), OTHER)
    short.stage.handler.turn()
    short.stage.core_cache.waiting[short.stage.log("one").row.index] = CLIENT
    assert wake(short) == [PRODUCER, OTHER]


def test_what_is_not_plain_any_more_is_answered_the_usual_way(short, seen):
    assert short.ask(short.frame({0: 2})) is None
    short.stage.core_cache._compiled.readable.clear()
    assert wake(short) == [PRODUCER, CLIENT]
    assert seen[-1] == ([PRODUCER], 0)
    assert offsets_in(short.read()) == [2]
    assert parked(short) == 0 and short.stage.core_cache.waiting == {}


def test_a_bug_forgets_it_too(short, monkeypatch):
    assert short.ask(short.frame({0: 2})) is None
    short.stage.core_cache._compiled.readable.clear()

    def fail(*args, **options):
        raise RuntimeError("a bug")

    monkeypatch.setattr(short.stage.core_cache, "try_fetch", fail)
    assert wake(short) == [PRODUCER, CLIENT]
    assert parked(short) == 0 and short.stage.core_cache.waiting == {}

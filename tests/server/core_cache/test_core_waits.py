"""What wakes a sleeping handler, and is plain, is executed before Python has a turn."""

from __future__ import annotations

import pytest

from mpbroker.ipc.compiled import IS_COMPILED
from mpbroker.ipc.layout import (
    HANDLER_ACTIVE,
    HANDLER_BUSY_SLOT,
    HEADER,
    HEADER_PHASE,
    SLOT_DEQUEUED,
    SLOT_RECEIVED,
    Phase,
    SlotState,
    handler_row,
    slot_row,
)
from mpbroker.protocol.records.record_batch import RecordBatchBuilder
from tests.server.core_cache.handler_stage import Stage, produce_request
from tests.support.memory import broker_memory, state_of

pytestmark = pytest.mark.skipif(
    not IS_COMPILED, reason="the compiled core is not there"
)


def request(acks=1):
    builder = RecordBatchBuilder()
    builder.append(1_700_000_000_000, None, b"x")
    return produce_request("one", 0, bytes(builder.build()), acks=acks)


@pytest.fixture
def stage(tmp_path):
    with broker_memory() as memory:
        made = Stage(memory, tmp_path / "data", short=True, syncs=True)
        made.registry.create_topic("one", 1)
        for _ in range(2):
            made.ask(request())  # the third is plain
        made.memory.control.words[handler_row(0) + HANDLER_BUSY_SLOT] = 0
        yield made
        made.logs.close_files()


def finishing(stage, monkeypatch):
    """What there was to see when Python had its first turn: answered slots."""
    seen = []
    finish = stage.core_cache.finish

    def look(slot, result):
        seen.append(stage.memory.responses[0].waiting())
        return finish(slot, result)

    monkeypatch.setattr(stage.core_cache, "finish", look)
    return seen


def test_a_plain_produce_is_answered_before_python_has_a_turn(stage, monkeypatch):
    seen = finishing(stage, monkeypatch)
    stage.publish(request())
    stage.handler._wait(16)
    assert seen == [[3]]
    assert stage.log("one").row.log_end_offset == 3
    assert stage.answer(3)[1].startswith(bytes(3))
    words = stage.memory.control.words
    assert words[handler_row(0) + HANDLER_BUSY_SLOT] == 0
    assert words[slot_row(3) + SLOT_DEQUEUED] >= words[slot_row(3) + SLOT_RECEIVED]


def test_a_slot_that_is_answered_is_not_written_to_any_more(stage, monkeypatch):
    """It may be another request's before Python has its turn."""
    words, at = stage.memory.control.words, slot_row(3) + SLOT_DEQUEUED

    wait = stage.handler._wait_in_core

    def wait_until_another_comes(timeout_s, limit):
        woken = wait(timeout_s, limit)
        words[at] = 12345
        return woken

    monkeypatch.setattr(stage.handler, "_wait_in_core", wait_until_another_comes)
    stage.publish(request())
    stage.handler._wait(16)
    assert words[at] == 12345


def test_what_waits_for_the_disk_is_answered_when_it_is_there(stage, monkeypatch):
    seen = finishing(stage, monkeypatch)
    stage.publish(request(acks=-1))
    stage.handler._wait(16)
    assert seen == [[]] and stage.purgatory.size == 1
    assert state_of(stage.memory, 3) == SlotState.PARKED
    stage.end_syncs()
    assert stage.answer(3)[1].startswith(bytes(3))
    assert stage.log("one").row.durable_end_offset == 3


def test_what_is_not_plain_goes_the_usual_way(stage):
    stage.core_cache._forget()
    stage.publish(request())
    stage.handler._wait(16)
    assert stage.log("one").row.log_end_offset == 3
    assert stage.answer(3)[1].startswith(bytes(3))


@pytest.mark.parametrize("limit", [1, 16])
def test_of_several_none_is_executed_before_the_others_are_known(
    stage, monkeypatch, limit
):
    seen = finishing(stage, monkeypatch)
    for slot in (3, 4):
        stage.publish(request(), slot)
    stage.handler._wait(limit)
    answered = stage.memory.responses[0].pop()
    assert (answered, seen) == (([3], [[3]]) if limit == 1 else ([3, 4], []))


@pytest.mark.parametrize("what", ["phase", "retired"])
def test_a_handler_that_must_stop_takes_nothing(stage, what):
    words = stage.memory.control.words
    if what == "phase":
        words[HEADER + HEADER_PHASE] = Phase.STOPPED
    else:
        words[handler_row(0) + HANDLER_ACTIVE] = 0
    stage.publish(request())
    stage.handler._wait(16)
    assert stage.memory.ring.waiting() == [3]
    assert stage.memory.responses[0].waiting() == []


def test_rules_of_ones_own_are_asked_before_anything_is_executed(stage, monkeypatch):
    seen = finishing(stage, monkeypatch)
    monkeypatch.setattr(stage.core_cache, "_has_own_rules", True)
    stage.publish(request())
    stage.handler._wait(16)
    assert seen == [] and stage.short_ways[-1:] == [0]
    assert stage.answer(3)[1].startswith(bytes(3))

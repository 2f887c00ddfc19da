"""A handler dies in a produce of a transaction that it executes the short way."""

from __future__ import annotations

import signal

import pytest

from mpbroker.ipc.compiled import IS_COMPILED
from mpbroker.ipc.layout import SLOT_INTENT, slot_row
from tests.server.core_cache.transaction_stage import (
    THREE,
    acquaint,
    begin,
    codes,
    end,
    stages,
    to_three,
)
from tests.storage.batches import read_all
from tests.support.children import deaths, die, fork, kill_at_step, steps_of

pytestmark = pytest.mark.skipif(
    not IS_COMPILED, reason="the compiled core is not there"
)


@pytest.fixture
def short(tmp_path):
    with stages(tmp_path) as made:
        acquaint(made[0])
        yield made[0]


def settle(stage):
    """As the supervisor does after a handler's death."""
    for each in THREE:
        stage.log(*each).row.settle()
    stage.memory.ring.reclaim(0)
    if not stage.memory.responses[0].waiting() and not stage.memory.ring.waiting():
        stage.memory.ring.put_back([3])


@pytest.mark.parametrize("fate", ["goes on", "is ended"])
def test_a_handler_killed_at_any_step_leaves_each_batch_once_or_not_at_all(short, fate):
    """Meanwhile its transaction goes on; or the coordinator aborts it, which ends what
    is there and lets no more come."""
    rows = [short.log(*each).row for each in THREE]
    begin(short)
    sequence = 1
    short.ask(to_three(sequence))  # a first marker of others' is behind us
    total = steps_of(lambda: short.ask(to_three(2)))
    end(short)
    sequence, seen = 3, set()
    for step in deaths(total, 40, seed=5):
        begin(short)
        starts = [row.log_end_offset for row in rows]
        short.publish(to_three(sequence))

        def doomed(step=step):
            kill_at_step(step)
            short.handler.turn()
            die()

        assert fork(doomed) == -signal.SIGKILL
        short.forwarded.clear()
        if fate == "is ended":
            # The marker's append settles what the dead one left under a lock.
            end(short, commit=False)
        settle(short)
        done = short.progress()[0]
        seen.add(done)
        answered = bool(short.memory.responses[0].waiting())
        if not answered:
            short.handler.turn()
        ended = fate == "is ended"
        if ended and not answered:
            assert short.forwarded == [3]  # who refuses it, or begins a new one
            assert short.memory.responses[0].pop() == []
        else:
            answer = short.answer(3)
            assert [code for _, code, _ in codes(answer)] == [0, 0, 0]
            done = 3
        for number, (row, start) in enumerate(zip(rows, starts, strict=True)):
            there = int(number < done)
            assert row.log_end_offset == start + there + (ended and there)
            open_from = start if there and not ended else -1
            assert row.snapshot().first_unstable_offset == open_from
        if ended:
            # What was there before the death counts in its partition, so in all.
            begin(short)
            assert [code for _, code, _ in codes(short.ask(to_three(sequence)))] == [
                0,
                0,
                0,
            ]
        else:
            assert short.memory.control.words[slot_row(3) + SLOT_INTENT] == 0
        end(short)
        sequence += 1
    assert seen == {0, 1, 2, 3}
    for each in THREE:
        offsets = [offset for offset, _ in read_all(short.log(*each))]
        assert offsets == sorted(set(offsets))

"""When records wait for an answer, and for how long: linger.ms below `GATHER_MS`.

Kafka's producer has no such rule, so none of its tests is mirrored here.
"""

from __future__ import annotations

import pytest

from mpbroker.producer.accumulator import GATHER_MS
from tests.producer.rig import SenderRig
from tests.producer.test_accumulator import Rig


def test_a_node_that_has_not_answered_is_asked_for_more_a_moment_later():
    rig = Rig(linger_ms=0)
    rig.append()
    assert rig.ready(unanswered_ms=rig.now_ms - GATHER_MS).nodes == {0}
    soon = rig.ready(unanswered_ms=rig.now_ms - GATHER_MS / 4)
    assert (soon.nodes, soon.next_check_ms) == (set(), GATHER_MS * 3 / 4)
    # However often other batches go meanwhile.
    rig.now_ms += GATHER_MS
    assert rig.ready(unanswered_ms=rig.now_ms).nodes == {0}


@pytest.mark.parametrize("what", ["full", "flush", "close", "transaction", "retry"])
def test_what_must_go_at_once_does_not_wait_for_an_answer(what):
    rig = Rig(linger_ms=0)
    rig.append()
    assert not rig.ready(unanswered_ms=rig.now_ms).nodes
    if what == "full":
        rig.fill()
    elif what == "flush":
        rig.accumulator.flushes.add("one")
    elif what == "close":
        rig.accumulator.is_closed = True
    elif what == "transaction":
        rig.accumulator.completing_transaction = True
    else:
        (batch,) = rig.drain()
        rig.accumulator.reenqueue(batch, rig.now_ms)
        rig.now_ms += 121
    assert rig.ready(unanswered_ms=rig.now_ms).nodes == {0}


def test_who_lingers_longer_does_not_wait_for_an_answer_too():
    rig = Rig(linger_ms=5)
    rig.append()
    rig.now_ms += 5
    assert rig.ready(unanswered_ms=rig.now_ms).nodes == {0}


def test_records_gather_while_a_node_has_something_to_answer():
    rig = SenderRig({"t": [0, 1]}).ready().introduce()
    rig.reply()
    rig.send(b"0")
    rig.append(b"1")
    rig.turns()
    rig.append(b"2")
    rig.append(b"of another node", partition=1)
    rig.turns(2)
    assert [sent.node for sent in rig.produces] == [0, 1]
    assert rig.wire.waits[-1] == GATHER_MS
    rig.reply()
    rig.turns()
    assert [rig.values(sent) for sent in rig.produces if not sent.node] == [
        [b"1", b"2"]
    ]


def test_what_gathers_does_not_wait_long_for_an_answer():
    rig = SenderRig().ready().introduce()
    rig.send(b"0")
    rig.pass_ms(GATHER_MS / 2)
    rig.append(b"1")
    rig.turns()
    assert rig.wire.waits[-1] == GATHER_MS / 2
    rig.pass_ms(GATHER_MS / 2)
    rig.turns()
    assert [rig.values(sent) for sent in rig.produces] == [[b"0"], [b"1"]]


def test_without_acks_there_is_no_answer_to_gather_for():
    rig = SenderRig(acks=0).ready()
    assert rig.send().done()
    last = rig.append()
    rig.turns()
    assert last.done()

"""Polls that come back with nothing: counted, and told to the log if they are many."""

from __future__ import annotations

import logging
import signal

import pytest

import mpbroker.network.processor as processor_module
from mpbroker.ipc.compiled import IS_COMPILED
from mpbroker.ipc.layout import PROCESSOR_COUNTERS, processor_row
from mpbroker.ipc.layout import ProcessorCounter as C
from mpbroker.network.polls import Polls
from mpbroker.network.security.secure_selector import SecureSelector
from tests.network.rig import frame
from tests.support.memory import broker_memory

S = 1_000_000_000


@pytest.fixture
def memory():
    with broker_memory() as made:
        yield made


def counts(memory, processor=0):
    row = processor_row(processor) + PROCESSOR_COUNTERS
    words = memory.control.words
    return words[row + C.POLLS], words[row + C.EMPTY_POLLS]


def test_only_who_waited_and_came_back_early_with_nothing_is_an_empty_poll(memory):
    polls = Polls(0, memory.control.words)
    polls.count((0, 0.0), 0)  # it only looked
    polls.count((1, 0.3), 0)  # there was something
    polls.count((0, 0.3), 299_000_000)  # its time was over, or nearly
    assert counts(memory) == (3, 0)
    polls.count((0, 0.3), 1000)
    assert counts(memory) == (4, 1)
    Polls(0, memory.control.words).count((0, 0.3), 0)  # a successor goes on
    assert counts(memory) == (5, 2)


def test_many_of_them_are_told_to_the_log_once_a_minute(memory, caplog):
    polls = Polls(3, memory.control.words)
    with caplog.at_level(logging.WARNING, "mpbroker"):
        for second in range(90):
            for _ in range(1000):
                polls.count((0, 0.3), 0)
            polls.look(second * S)
            # An accident now and then is none of it.
            quiet = Polls(4, memory.control.words)
            quiet.count((0, 0.3), 0)
            quiet.look(second * S)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and all("processor 3: 1000 polls" in line for line in told)


def test_what_a_processor_finds_and_what_it_does_not_is_counted(make_rig):
    rig = make_rig()
    client = rig.connect()
    client.send(frame(b"x" * 20))
    rig.pump(lambda: client.frames())
    assert rig.counter(C.POLLS) > 1
    assert rig.counter(C.EMPTY_POLLS) == 0


def test_a_poll_in_vain_is_counted_by_either_twin(make_rig, monkeypatch):
    rig = make_rig()
    rig.connect()
    rig.pump(lambda: rig.connections == 1)
    # Until there is nothing more to do, so that the next turn would sleep.
    while rig.processor._busy:
        rig.processor.turn()
    before = rig.counter(C.EMPTY_POLLS)
    with monkeypatch.context() as patch:
        patch.setattr(processor_module, "_IDLE_POLL_S", 1000.0)
        if IS_COMPILED:
            interrupted(rig.processor.turn)
        else:
            patch.setattr(type(rig.processor._selector), "poll", in_vain)
            rig.processor.turn()
    assert rig.counter(C.EMPTY_POLLS) == before + 1


def in_vain(selector, timeout_s):
    selector.last_poll = (0, timeout_s)
    return []


def test_who_has_to_look_at_clients_soon_polls_in_vain_and_does_not_spin(memory):
    selector = SecureSelector()
    selector.due_s = lambda: 0.0
    polls = Polls(0, memory.control.words)
    selector.poll(1000.0)
    polls.count(selector.last_poll, 10)
    assert counts(memory) == (1, 0)


def interrupted(sleep):
    """The core asks the kernel itself, which comes back early for a signal."""
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    # One that comes before it sleeps is lost, so there are more of them.
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    try:
        sleep()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

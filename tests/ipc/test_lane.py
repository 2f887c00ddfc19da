"""The coordinator's lane: a forwarded request is one process's at every moment."""

from __future__ import annotations

import select
import signal

import pytest

from mpbroker.ipc.compiled import IS_COMPILED
from mpbroker.ipc.layout import (
    COORDINATOR,
    PROCESSOR_SLOTS_USED,
    SLOT_RETRIES,
    SlotState,
    processor_row,
    slot_row,
)
from mpbroker.supervisor.repair.recovery import Repair
from tests.support.children import (
    deaths,
    die,
    fork,
    kill_at_line,
    kill_at_step,
    lines_of,
    steps_of,
)
from tests.support.memory import claimer_of, state_of

FILES = ("mpbroker/ipc/lane.py",)


@pytest.fixture(params=["compiled", "python"])
def forward(request, memory):
    """Hands a slot over, in C or in Python; the same lane."""
    if request.param == "python":
        return memory.lane.forward
    if not IS_COMPILED:
        pytest.skip("the compiled core is not there")
    return lambda slot: memory.lane.compiled.push([slot])


def claim(memory, slots, handler=3):
    """Make slots a handler's, as if it had taken them from the ring."""
    used = processor_row(0) + PROCESSOR_SLOTS_USED
    memory.control.words[used] = max(memory.control.words[used], max(slots) + 1)
    for slot in slots:
        memory.control.words[slot_row(slot) + SLOT_RETRIES] = 0
    memory.ring.put(slots)
    assert memory.ring.take(len(slots), handler, 1, arm=False) == list(slots)


def die_in(operation, line, kill=lambda line: kill_at_line(line, FILES)):
    def work():
        kill(line)
        operation()
        die()

    assert fork(work) == -signal.SIGKILL


def test_requests_are_taken_in_the_order_in_which_they_were_forwarded(memory, forward):
    claim(memory, [4, 9, 2])
    for slot in (4, 9, 2):
        forward(slot)
    assert len(memory.lane) == 3
    assert memory.lane.take(2, arm=False) == [4, 9]
    assert memory.lane.take(2, arm=False) == [2]
    assert memory.lane.take(2, arm=False) == []


def test_a_forwarded_request_is_the_coordinators_once_it_is_taken(memory, forward):
    claim(memory, [7], handler=3)
    forward(7)
    assert claimer_of(memory, 7) == 3
    memory.lane.take(1, arm=False)
    assert claimer_of(memory, 7) == COORDINATOR
    assert state_of(memory, 7) == SlotState.CLAIMED


@pytest.mark.parametrize("waits", [False, True])
def test_a_sleeping_coordinator_is_woken_once(memory, forward, waits):
    bell = memory.handler_bells[COORDINATOR]
    poll = select.epoll()
    poll.register(bell.fd, select.EPOLLIN | select.EPOLLET)
    poll.poll(0)
    claim(memory, [1, 2])
    if waits:
        forward(1)
    memory.lane.take(5, arm=True)
    forward(2)
    assert bool(poll.poll(0)) is not waits
    forward(1)
    assert poll.poll(0) == []


@pytest.mark.parametrize("sleeps", [False, True])
@pytest.mark.parametrize("way", ["compiled", "python"])
def test_a_handler_killed_while_it_forwards_leaves_one_owner(memory, way, sleeps):
    if way == "compiled" and not IS_COMPILED:
        pytest.skip("the compiled core is not there")

    def prepare():
        memory.lane.take(99, arm=False)
        memory.ring.take(99, 0, 1, arm=False)
        memory.lane.take(99, arm=sleeps)
        claim(memory, [11])

    def forward():
        if way == "python":
            memory.lane.forward(11)
        else:
            memory.lane.compiled.push([11])

    prepare()
    if way == "python":
        total, kill = lines_of(forward, FILES), lambda line: kill_at_line(line, FILES)
    else:
        total, kill = steps_of(forward), kill_at_step
    lost = set()
    for death in deaths(total, 1000, seed=1):
        prepare()
        die_in(forward, death, kill)
        Repair(memory).after_handler(3, 0)
        again, forwarded = memory.ring.waiting(), memory.lane.waiting()
        assert again + forwarded == [11]
        lost.add(bool(again))
    assert lost == {False, True}


def test_a_coordinator_killed_while_it_takes_loses_nothing(memory):
    def take():
        memory.lane.take(2, arm=True)

    for line in deaths(lines_of(take, FILES), 1000, seed=1):
        memory.lane.take(99, arm=False)
        memory.ring.take(99, 0, 1, arm=False)
        claim(memory, [11, 12])
        memory.lane.forward(11)
        memory.lane.forward(12)
        die_in(take, line)
        Repair(memory).after_coordinator(0)
        assert sorted(memory.ring.waiting() + memory.lane.waiting()) == [11, 12]


def test_the_death_of_who_forwarded_it_does_not_touch_a_request(memory):
    claim(memory, [11, 12, 13])
    memory.lane.forward(11)
    memory.lane.forward(12)
    assert memory.lane.take(1, arm=False) == [11]
    Repair(memory).after_handler(3, 0)
    assert memory.ring.waiting() == [13]
    assert memory.lane.waiting() == [12]
    assert claimer_of(memory, 11) == COORDINATOR

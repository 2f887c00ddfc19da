"""A process killed at any point of a ring's operation leaves all of it or nothing.

Any point is any source line of the Python twin, and any step of the compiled one.
"""

from __future__ import annotations

import select
import signal

import pytest

from mpbroker.ipc.layout import SlotState
from tests.support.children import (
    deaths,
    fork,
    kill_at_line,
    kill_at_step,
    lines_of,
    running,
    steps_of,
)
from tests.support.memory import broker_memory, claimer_of, state_of

FILES = ("mpbroker/ipc/ring.py",)

pytestmark = pytest.mark.usefixtures("rings")


def is_compiled(operation, memory):
    return memory.responses[0].compiled is not None and operation not in IN_PYTHON


def each_death(operation, memory):
    """Say where ``operation`` may die: a number for each point of it."""
    if is_compiled(operation, memory):
        total = steps_of(lambda: operation(memory))
        assert total >= 2
    else:
        total = lines_of(lambda: operation(memory), FILES)
        assert total > 5
    return deaths(total, 1000, seed=1)


def die_in(operation, memory, point):
    def work():
        if is_compiled(operation, memory):
            kill_at_step(point)
        else:
            kill_at_line(point, FILES)
        operation(memory)

    assert fork(work) == -signal.SIGKILL


def put(memory):
    memory.ring.put([11, 12])


def take(memory):
    memory.ring.take(2, 4, 1, arm=True)


def arm(memory):
    memory.ring.take(2, 4, 1, arm=True)


def push(memory):
    memory.responses[0].push([11, 12])


def pop(memory):
    memory.responses[0].pop(arm=True)


def notify(memory):
    memory.notices[4].put(77)


def notify_of_slot(memory):
    memory.notices[4].try_put_slot(~77)  # as a notice it is 77


def take_notices(memory):
    memory.notices[4].take()


IN_PYTHON = (notify, notify_of_slot, take_notices)  # only there


def test_a_processor_killed_in_a_put_has_published_all_or_nothing(memory):
    published = set()
    for line in each_death(put, memory):
        memory.ring.take(99, 0, 1, arm=False)
        die_in(put, memory, line)
        waiting = memory.ring.waiting()
        assert waiting in ([], [11, 12])
        published.add(len(waiting))
        memory.ring.put([13])  # the lock is free and the ring in order
        assert memory.ring.take(99, 0, 1, arm=False) == [*waiting, 13]
    assert published == {0, 2}


def test_a_handler_killed_in_a_take_has_taken_all_or_nothing(memory):
    taken = set()
    memory.ring.put([11, 12, 13])
    for line in each_death(take, memory):
        memory.ring.take(99, 0, 1, arm=False)
        memory.ring.put([11, 12, 13])
        die_in(take, memory, line)
        waiting = memory.ring.waiting()
        assert waiting in ([11, 12, 13], [13])
        memory.ring.reclaim(4)
        assert {state_of(memory, slot) for slot in waiting} == {SlotState.READY}
        for slot in {11, 12} - set(waiting):
            assert state_of(memory, slot) == SlotState.CLAIMED
            assert claimer_of(memory, slot) == 4
        taken.add(len(waiting))
    assert taken == {1, 3}


def test_what_a_dead_handler_had_marked_but_not_taken_goes_to_another(memory):
    memory.ring.put([11, 12])
    for line in each_death(take, memory):
        memory.ring.take(99, 0, 1, arm=False)
        memory.ring.put([11, 12])
        die_in(take, memory, line)
        taken = memory.ring.take(99, 5, 1, arm=False)
        memory.ring.reclaim(4)  # comes too late to take them away
        assert all(claimer_of(memory, slot) == 5 for slot in taken)


def test_a_handler_killed_on_its_way_to_sleep_leaves_the_ring_in_order(memory):
    for line in each_death(arm, memory):
        die_in(arm, memory, line)
        memory.ring.put([11])
        assert memory.ring.take(99, 0, 1, arm=False) == [11]


def test_a_handler_killed_in_a_push_has_answered_all_or_nothing(memory):
    pushed = set()
    for line in each_death(push, memory):
        memory.responses[0].pop()
        die_in(push, memory, line)
        waiting = memory.responses[0].waiting()
        assert waiting in ([], [11, 12])
        pushed.add(len(waiting))
    assert pushed == {0, 2}


def test_a_processor_killed_in_a_pop_has_marked_all_that_it_took(memory):
    popped = set()
    memory.responses[0].push([11, 12])
    for line in each_death(pop, memory):
        memory.ring.put([11, 12])
        memory.ring.take(99, 0, 1, arm=False)
        memory.responses[0].push([11, 12])
        die_in(pop, memory, line)
        waiting = memory.responses[0].waiting()
        memory.responses[0].pop()
        assert waiting in ([], [11, 12])
        if not waiting:
            states = {state_of(memory, slot) for slot in (11, 12)}
            assert states == {SlotState.RESPONDING}
        popped.add(len(waiting))
    assert popped == {0, 2}


@pytest.mark.parametrize("operation", [notify, notify_of_slot, take_notices])
def test_a_death_beside_a_notification_ring_loses_at_most_its_own_notices(operation):
    with broker_memory() as memory:
        notices = memory.notices[4]
        notices.put(1)
        for line in each_death(operation, memory):
            notices.take()
            notices.put(66)
            die_in(operation, memory, line)
            rows, _ = notices.take()
            assert rows in ([], [66], [66, 77])
            notices.put(5)
            assert notices.take() == ([5], False)


def test_handlers_and_processors_that_sleep_are_always_woken(memory):
    # They wait without a timeout: one lost wake-up, and this never ends.
    rounds = 3000

    def handler(number):
        epoll = select.epoll()
        bell = memory.handler_bells[number]
        epoll.register(bell.fd, select.EPOLLIN | select.EPOLLET)
        while True:
            slots = memory.ring.take(16, number, 2, arm=True)
            if slots:
                memory.responses[0].push(slots)
            else:
                epoll.poll()  # for ever

    def processor():
        epoll = select.epoll()
        bell = memory.processor_bells[0]
        epoll.register(bell.fd, select.EPOLLIN | select.EPOLLET)
        answered = 0
        for turn in range(rounds):
            memory.ring.put([turn % 512, 512 + turn % 512][: 1 + turn % 2])
            wanted = 1 + turn % 2
            while wanted:
                slots = memory.responses[0].pop(arm=True)
                wanted -= len(slots)
                answered += len(slots)
                if not slots:
                    epoll.poll()
        assert answered == rounds + rounds // 2

    with running(lambda: handler(0), lambda: handler(1), processor) as children:
        assert children[2].wait() == 0

"""The rings: order, fair shares, limits, tombs, and waking exactly who sleeps."""

from __future__ import annotations

import select
import signal

import pytest

from mpbroker.ipc.errors import DamagedSegmentError
from mpbroker.ipc.layout import (
    GENERATION_SHIFT,
    HANDLER_IDS,
    MASK_BITS,
    MAX_HANDLERS,
    NOTIFICATION_RING_CAPACITY,
    REQUEST_RING,
    RING_ENTRIES,
    RING_MUTEX,
    RING_SLEEPERS,
    SLOT_STATE,
    SlotState,
    notification_ring,
    response_ring,
    slot_row,
)
from mpbroker.ipc.ring import RequestRing, slot_notice
from mpbroker.ipc.robust_mutex import RobustMutex
from tests.support.children import die, fork, running
from tests.support.memory import claimer_of, slots_of, state_of

pytestmark = pytest.mark.usefixtures("rings")


def take(memory, count=16, handler=0, handlers=1, *, arm=False):
    return memory.ring.take(count, handler, handlers, arm=arm)


class Bells:
    """Which doorbells have rung since the last look."""

    def __init__(self, memory, count=4):
        self._epoll = select.epoll()
        self._names = {}
        for kind in ("handler", "processor"):
            for number, bell in enumerate(getattr(memory, f"{kind}_bells")[:count]):
                self._epoll.register(bell.fd, select.EPOLLIN | select.EPOLLET)
                self._names[bell.fd] = f"{kind} {number}"

    def rung(self):
        return sorted(self._names[fd] for fd, _ in self._epoll.poll(0))


# -- the request ring ---------------------------------------------------------------


def test_requests_are_taken_in_the_order_in_which_they_were_put(memory):
    memory.ring.put([5, 3])
    memory.ring.put([8])
    assert take(memory) == [5, 3, 8]
    assert take(memory) == []


def test_order_survives_many_turns_around_the_ring(memory):
    expected = iter(range(10**9))
    put = 0
    for _ in range(400):
        memory.ring.put([n % 8192 for n in range(put, put + 397)])
        put += 397
        while taken := take(memory, count=100):
            assert taken == [next(expected) % 8192 for _ in taken]


def test_a_slot_is_ready_while_it_waits_and_claimed_by_who_takes_it(memory):
    memory.ring.put([7])
    assert state_of(memory, 7) == SlotState.READY
    take(memory, handler=3)
    assert state_of(memory, 7) == SlotState.CLAIMED
    assert claimer_of(memory, 7) == 3


def test_the_generation_of_a_slot_survives_the_ring(memory):
    word = slot_row(7) + SLOT_STATE
    memory.control.words[word] = 99 << GENERATION_SHIFT | SlotState.HELD
    memory.ring.put([7])
    take(memory, handler=59)
    memory.responses[0].push([7])
    memory.responses[0].pop()
    assert memory.control.words[word] >> GENERATION_SHIFT == 99


@pytest.mark.parametrize(
    ("queued", "handlers", "at_most", "share"),
    [(8, 4, 16, 2), (9, 4, 16, 3), (1, 4, 16, 1), (100, 2, 16, 16), (5, 1, 3, 3)],
)
def test_a_handler_takes_no_more_than_its_fair_share(
    memory, queued, handlers, at_most, share
):
    memory.ring.put(list(range(queued)))
    taken = take(memory, count=at_most, handlers=handlers)
    assert taken == list(range(share))
    assert len(memory.ring) == queued - share


def test_a_put_beyond_the_limit_says_how_many_there_was_room_for(memory):
    ring = RequestRing(memory.control, memory.handler_bells, 5)
    assert ring.put([1, 2, 3]) == 3
    assert ring.has_room()
    assert ring.put([4, 5, 6, 7]) == 2
    assert not ring.has_room()
    assert ring.put([6]) == 0
    assert take(memory) == [1, 2, 3, 4, 5]
    assert ring.put([6, 7]) == 2


def test_the_limit_does_not_hold_for_what_is_put_back(memory):
    ring = RequestRing(memory.control, memory.handler_bells, 2)
    ring.put([1, 2])
    ring.put_back([3, 4])
    assert take(memory) == [1, 2, 3, 4]


def test_a_take_that_does_not_arm_leaves_no_sleep_flag(memory):
    bells = Bells(memory)
    assert take(memory) == []
    memory.ring.put([1])
    assert bells.rung() == []


def test_a_put_wakes_one_sleeper_and_a_take_that_leaves_some_wakes_the_next(memory):
    bells = Bells(memory)
    for handler in (1, 2, 3):
        assert take(memory, handler=handler, arm=True) == []
    memory.ring.put([1, 2, 3, 4])
    assert bells.rung() == ["handler 1"]
    assert take(memory, handler=1, handlers=4) == [1]
    assert bells.rung() == ["handler 2"]
    assert take(memory, handler=2, handlers=1) == [2, 3, 4]
    assert bells.rung() == []  # nothing was left to wake handler 3 for
    memory.ring.put([5])
    assert bells.rung() == ["handler 3"]


def test_sleepers_are_woken_wherever_their_bits_lie(memory):
    bells = Bells(memory, HANDLER_IDS)
    for handler in (MAX_HANDLERS - 1, MASK_BITS, MASK_BITS - 1):
        assert take(memory, handler=handler, arm=True) == []
    memory.ring.put([1, 2, 3])
    assert bells.rung() == [f"handler {MASK_BITS - 1}"]
    assert take(memory, handler=MASK_BITS - 1, handlers=3) == [1]
    assert bells.rung() == [f"handler {MASK_BITS}"]
    assert take(memory, handler=MASK_BITS, handlers=2) == [2]
    assert bells.rung() == [f"handler {MAX_HANDLERS - 1}"]
    assert take(memory, handler=MASK_BITS) == [3]
    take(memory, handler=MASK_BITS, arm=True)
    take(memory, handler=MASK_BITS + 1, arm=True)
    memory.ring.put([4])
    assert take(memory, handler=MASK_BITS + 1) == [4]  # it sleeps no more
    memory.ring.put([5])
    assert bells.rung() == [f"handler {MASK_BITS}"]


def test_a_sleeper_that_woke_by_itself_and_took_a_request_sleeps_no_more(memory):
    bells = Bells(memory)
    words = memory.control.words
    take(memory, handler=0, arm=True)
    words[REQUEST_RING + RING_SLEEPERS] = 0
    memory.ring.put([1])  # finds nobody asleep
    words[REQUEST_RING + RING_SLEEPERS] = 1
    assert take(memory, handler=0) == [1]
    take(memory, handler=1, arm=True)
    memory.ring.put([2])
    assert bells.rung() == ["handler 1"]


def test_what_is_put_back_wakes_everybody(memory):
    bells = Bells(memory)
    memory.ring.put_back([1])
    assert bells.rung() == [f"handler {number}" for number in range(4)]


# -- the response ring --------------------------------------------------------------


def test_answers_come_back_in_the_order_in_which_they_were_pushed(memory):
    ring = memory.responses[2]
    slots = slots_of(2, 3)
    ring.push(slots[:2])
    ring.push(slots[2:])
    assert ring.pop() == list(slots)
    assert ring.pop() == []
    assert {state_of(memory, slot) for slot in slots} == {SlotState.RESPONDING}


def test_every_slot_of_a_processor_fits_its_response_ring(memory):
    ring = memory.responses[1]
    every = slots_of(1, 8192)
    for _ in range(2):
        ring.push(every)
        assert ring.pop() == list(every)


def test_a_push_rings_only_for_a_processor_that_sleeps(memory):
    bells = Bells(memory)
    ring = memory.responses[1]
    ring.push([8192])
    assert bells.rung() == []
    assert ring.pop(arm=True) == [8192]  # armed only if nothing is there
    ring.push([8193])
    assert bells.rung() == []
    ring.pop()
    assert ring.pop(arm=True) == []
    ring.push([8192])
    assert bells.rung() == ["processor 1"]
    ring.push([8193])
    assert bells.rung() == []  # once is enough


# -- the notification ring ----------------------------------------------------------


def test_notices_arrive_in_order_and_always_ring(memory):
    bells = Bells(memory)
    notices = memory.notices[1]
    assert notices.is_empty() and notices.take() == ([], False)
    notices.put(70)
    assert bells.rung() == ["handler 1"]
    notices.put(71)
    assert bells.rung() == ["handler 1"]
    assert not notices.is_empty()
    assert notices.take() == ([70, 71], False)
    assert notices.is_empty()


def test_a_full_notification_ring_says_look_at_all(memory):
    notices = memory.notices[0]
    for row in range(NOTIFICATION_RING_CAPACITY + 1):
        notices.put(row)
    rows, look_at_all = notices.take()
    assert rows == list(range(NOTIFICATION_RING_CAPACITY)) and look_at_all
    notices.put(5)
    assert notices.take() == ([5], False)


def test_a_slot_for_which_a_notification_ring_has_no_room_is_put_later(memory):
    notices = memory.notices[0]
    for slot in range(NOTIFICATION_RING_CAPACITY):
        assert notices.try_put_slot(slot)
    assert not notices.try_put_slot(9999)
    told, look_at_all = notices.take()
    assert [slot_notice(notice) for notice in told] == list(
        range(NOTIFICATION_RING_CAPACITY)
    )
    assert all(notice < 0 for notice in told) and not look_at_all
    assert notices.try_put_slot(9999)
    assert notices.take() == ([slot_notice(9999)], False)


def test_notices_go_on_after_many_turns_around_the_ring(memory):
    notices = memory.notices[0]
    for turn in range(1000):
        notices.put(turn)
        notices.put(turn + 1)
        assert notices.take() == ([turn, turn + 1], False)


def test_after_a_death_a_handler_is_told_to_look_at_all(memory):
    notices = memory.notices[0]
    notices.overflow()
    assert not notices.is_empty()
    assert notices.take() == ([], True)
    assert notices.is_empty()


def test_being_told_to_look_at_all_is_not_lost_beside_a_take(memory):
    # take() reads and clears the flag under the mutex; so it is set under it.
    notices = memory.notices[0]
    mutex = RobustMutex(memory.control, notification_ring(0) + RING_MUTEX)
    with mutex, running(notices.overflow) as (child,), pytest.raises(TimeoutError):
        child.wait(0.1)


# -- deaths at the seams ------------------------------------------------------------


class DyingRing(RequestRing):
    """Killed when the entries are in memory and not yet published."""

    def _write_entries(self, tail, slots):
        super()._write_entries(tail, slots)
        die()


def dying_ring(memory):
    return DyingRing(memory.control, memory.handler_bells, 500)


def test_a_slot_whose_processor_was_killed_before_the_commit_is_never_seen(memory):
    assert fork(lambda: dying_ring(memory).put([7])) == -signal.SIGKILL
    assert take(memory, count=8) == []


def test_the_ring_goes_on_after_a_processor_was_killed_in_a_put(memory):
    memory.ring.put([1])
    fork(lambda: dying_ring(memory).put([7, 8]))
    memory.ring.put([2])
    assert take(memory) == [1, 2]


# -- damage -------------------------------------------------------------------------


@pytest.mark.parametrize("slot", [-1, 1 << 40])
def test_a_ring_that_holds_what_is_no_slot_is_said_to_be_damaged(memory, slot):
    if memory.ring.compiled is None:
        pytest.skip("the twins trust their memory")
    memory.ring.put([5])
    memory.responses[0].push([3])
    for ring in (REQUEST_RING, response_ring(0)):
        memory.control.words[ring + RING_ENTRIES] = slot
    with pytest.raises(DamagedSegmentError, match="the request ring holds"):
        take(memory)
    with pytest.raises(DamagedSegmentError, match="a response ring holds"):
        memory.responses[0].pop()

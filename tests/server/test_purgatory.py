"""Parked requests: completed in time, answered once, and cheap while they wait."""

from __future__ import annotations

import pytest

from mpbroker.ipc.layout import NOTIFICATION_RING_CAPACITY, ROW_WAITERS
from mpbroker.server.purgatory import sync_key
from tests.server.waiting import Waiting, append, purgatory
from tests.support.children import running, wait_until


def test_an_append_completes_waiting_operations_of_the_same_process(memory):
    own = purgatory(memory)
    operation = Waiting(memory, 3)
    own.watch(operation)
    assert not own.process_notices()
    append(memory, 3, 1, own)
    assert own.process_notices()
    assert (operation.completed, own.size) == (1, 0)


def test_an_append_completes_waiting_operations_of_another_handler(memory):
    mine, others = purgatory(memory, 0), purgatory(memory, 5)
    operation = Waiting(memory, 3)
    others.watch(operation)
    append(memory, 3, 1, mine)
    others.process_notices()
    assert operation.completed == 1


def test_a_change_that_is_not_enough_leaves_it_waiting_for_the_next(memory):
    own = purgatory(memory)
    operation = Waiting(memory, 3, offset=3)
    own.watch(operation)
    for end in (1, 2, 3):
        append(memory, 3, end, own)
        own.process_notices()
    assert (operation.looked, operation.completed) == (3, 1)


def test_a_change_of_an_unwatched_row_tries_no_operation(memory):
    own = purgatory(memory)
    operation = Waiting(memory, 3)
    own.watch(operation)
    append(memory, 4, 1, own)
    assert not own.process_notices()
    assert operation.looked == 0


def test_it_completes_once_whichever_of_its_rows_change(memory):
    own = purgatory(memory)
    operation = Waiting(memory, 1, 2, 3)
    own.watch(operation)
    for row in (1, 2, 3):
        append(memory, row, 1, own)
    own.process_notices()
    append(memory, 2, 2, own)
    own.process_notices()
    own.expire(1 << 61)
    assert (operation.completed, operation.expired) == (1, 0)


def test_the_deadline_answers_operations_that_were_not_completed(memory):
    own = purgatory(memory)
    late = Waiting(memory, 1, deadline_ns=200)
    early = Waiting(memory, 1, deadline_ns=100)
    own.watch(late)
    own.watch(early)
    assert own.next_deadline_ns == 100
    own.expire(99)
    assert early.expired == 0
    own.expire(100)
    assert (early.expired, late.expired, own.size) == (1, 0, 1)
    assert own.next_deadline_ns == 200
    append(memory, 1, 1, own)
    own.process_notices()
    assert (early.completed, late.completed) == (0, 1)
    assert own.next_deadline_ns > 1 << 61


def test_an_unwatched_operation_is_not_completed_and_does_not_expire(memory):
    own = purgatory(memory)
    operation = Waiting(memory, 1, deadline_ns=100)
    own.watch(operation)
    own.unwatch(operation)
    own.unwatch(operation)
    append(memory, 1, 1, own)
    own.process_notices()
    own.expire(1 << 61)
    assert (operation.completed, operation.expired, own.size) == (0, 0, 0)
    assert own.operations() == []


def test_many_that_came_and_went_leave_no_timers_behind(memory):
    own = purgatory(memory)
    for _ in range(5000):
        operation = Waiting(memory, 1)
        own.watch(operation)
        own.unwatch(operation)
    assert len(own._timers) < 200
    assert not own._watchers and not own._keys


def test_too_many_notices_at_once_make_it_look_at_everything(memory):
    own, other = purgatory(memory), purgatory(memory, 1)
    operation = Waiting(memory, 7)
    own.watch(operation)
    for _ in range(NOTIFICATION_RING_CAPACITY + 5):
        other.notify(1, handlers=1)
    append(memory, 7, 1, other)  # its notice does not fit any more
    own.process_notices()
    assert operation.completed == 1


def test_after_a_death_it_looks_at_everything_and_asks_for_notices_again(memory):
    own = purgatory(memory)
    data, sync = Waiting(memory, 2), Waiting(memory, sync_key(3))
    own.watch(data)
    own.watch(sync)
    row = memory.table.row(2)
    row.words[row.base + ROW_WAITERS] = (
        0  # cleared by a process that died before it sent the notice
    )
    memory.notices[0].overflow()
    own.process_notices()
    assert (data.looked, sync.looked) == (1, 1)
    append(memory, 2, 1, own)
    own.process_notices()
    assert data.completed == 1


def test_an_operation_that_waits_for_a_sync_is_not_tried_for_new_data(memory):
    own = purgatory(memory)
    operation = Waiting(memory, sync_key(2))
    own.watch(operation)
    append(memory, 2, 1, own)
    assert not own.process_notices()
    own.notify(2, handlers=1)
    own.process_notices()
    assert operation.completed == 1


def test_a_notice_to_itself_takes_no_ring_and_is_not_slept_over(memory):
    own = purgatory(memory)
    operation = Waiting(memory, 1)
    own.watch(operation)
    assert not own.has_notices
    append(memory, 1, 1, own)
    assert memory.notices[0].is_empty()
    assert own.has_notices
    own.process_notices()
    assert operation.completed == 1
    assert not own.has_notices


def test_an_own_change_without_waiters_does_not_use_up_the_next_notice(
    memory,
):
    own, other = purgatory(memory), purgatory(memory, 1)
    gone = Waiting(memory, 1)
    own.watch(gone)
    own.unwatch(gone)
    append(memory, 1, 1, own)
    assert not own.has_notices
    operation = Waiting(memory, 1)
    own.watch(operation)
    append(memory, 1, 2, other)
    own.process_notices()
    assert operation.completed == 1


def test_ten_thousand_that_wait_cost_an_append_elsewhere_nothing(memory):
    own, other = purgatory(memory), purgatory(memory, 1)
    operations = [Waiting(memory, index % 4) for index in range(10_000)]
    for operation in operations:
        own.watch(operation)
    assert own.size == 10_000
    for end in range(1, 50):
        append(memory, 6, end, other)
        own.process_notices()
        own.expire(1)
    assert not any(operation.looked for operation in operations)
    append(memory, 1, 1, other)
    own.process_notices()
    assert sum(operation.looked for operation in operations) == 2500
    assert own.size == 7500


def test_one_append_tells_each_waiting_handler_once(memory):
    own, other = purgatory(memory, 0), purgatory(memory, 1)
    for _ in range(5):
        own.watch(Waiting(memory, 2, offset=99))
        other.watch(Waiting(memory, 2, offset=99))
    append(memory, 2, 1, purgatory(memory, 2))
    assert memory.notices[0].take() == ([2], False)
    assert memory.notices[1].take() == ([2], False)
    append(memory, 2, 2, other)  # no operation has set the bit again yet
    assert memory.notices[0].is_empty()


def test_no_append_beside_a_watch_is_missed(memory):
    """Another process appends without a pause; each offset is waited for in turn."""
    words, rounds = memory.control.words, 500

    def produce():
        own = purgatory(memory, 1)
        for end in range(1, rounds + 1):
            while words[9] < end - 1:
                pass
            append(memory, 4, end, own)

    own = purgatory(memory, 0)
    row = memory.table.row(4)
    with running(produce) as (child,):
        for end in range(1, rounds + 1):
            operation = Waiting(memory, 4, offset=end)
            own.watch(operation)
            if row.log_end_offset >= end:  # the look that watch() asks for
                own.unwatch(operation)
            else:
                wait_until(lambda op=operation: own.process_notices() and op.completed)
            words[9] = end
        assert child.wait() == 0


def test_no_append_beside_a_ring_that_overflows_is_missed(memory):
    """More rows change at once than the ring has entries, while it is emptied."""
    words, rounds = memory.control.words, 20
    rows = range(1, NOTIFICATION_RING_CAPACITY + 101)
    for row in rows:
        memory.table.initialise_row(row)

    def produce():
        own = purgatory(memory, 1)
        for end in range(1, rounds + 1):
            while words[9] < end:
                pass
            for row in rows:
                append(memory, row, end, own)

    own, overflows = purgatory(memory, 0), 0
    take = own._own.take

    def counted():
        nonlocal overflows
        found = take()
        overflows += found[1]
        return found

    own._own.take = counted
    with running(produce) as (child,):
        for end in range(1, rounds + 1):
            waiting = [Waiting(memory, row, offset=end) for row in rows]
            for operation in waiting:
                own.watch(operation)
            words[9] = end
            if end % 2:  # the others are emptied while they are filled
                row = memory.table.row(rows[-1])
                wait_until(lambda row=row, end=end: row.log_end_offset == end)
            wait_until(lambda: own.process_notices() and not own.size)
            assert all(operation.completed == 1 for operation in waiting)
        assert child.wait() == 0
    assert overflows >= rounds // 2


class Buggy(Waiting):
    def try_complete(self, row):
        raise ZeroDivisionError

    def expire(self):
        raise ZeroDivisionError


def test_a_bug_in_one_does_not_keep_the_others_waiting(memory):
    own, met = purgatory(memory), []
    own.on_bug = met.append
    bad, good = Buggy(memory, 1), Waiting(memory, 1)
    own.watch(bad)
    own.watch(good)
    append(memory, 1, 1, own)
    own.process_notices()
    assert (met, good.completed, own.size) == ([bad], 1, 0)
    late = Buggy(memory, 1, deadline_ns=5)
    own.watch(late)
    own.expire(5)
    assert met == [bad, late]


def test_without_a_handler_for_bugs_the_exception_is_raised(memory):
    own = purgatory(memory)
    own.watch(Buggy(memory, 1, deadline_ns=5))
    with pytest.raises(ZeroDivisionError):
        own.expire(5)


def test_when_the_broker_stops_operations_that_may_end_early_are_answered(memory):
    own = purgatory(memory)
    fetch, produce = Waiting(memory, 1), Waiting(memory, 1)
    produce.may_end_early = False
    own.watch(fetch)
    own.watch(produce)
    own.end_early()
    assert (fetch.expired, produce.expired, own.size) == (1, 0, 1)


# -- requests that must end ------------------------------------------------------------


def ending(memory, *slots: int):
    """A purgatory that is told to end what waits in these slots."""
    own = purgatory(memory)
    own.must_end = lambda slot: slot in slots
    for slot in slots:
        assert memory.notices[0].try_put_slot(slot)
    return own


def test_a_fetch_that_must_end_is_answered_with_what_there_is(memory):
    own = ending(memory, 7)
    other, operation = Waiting(memory, 3, slot=6), Waiting(memory, 3, slot=7)
    own.watch(other)
    own.watch(operation)
    assert own.process_notices()
    assert (operation.expired, operation.done, own.size) == (1, True, 1)
    assert not other.expired


def test_an_old_notice_does_not_end_the_next_request_of_the_slot(memory):
    own = ending(memory, 7)
    own.must_end = lambda slot: False
    operation = Waiting(memory, 3, slot=7)
    own.watch(operation)
    own.process_notices()
    assert (operation.expired, own.size) == (0, 1)


def test_a_produce_waits_for_the_disk_though_its_client_has_gone(memory):
    own = ending(memory, 7)
    operation = Waiting(memory, 3, slot=7)
    operation.may_end_early = False
    own.watch(operation)
    own.process_notices()
    assert (operation.expired, own.size) == (0, 1)


def test_a_notice_about_a_slot_is_not_lost_when_others_are(memory):
    own = ending(memory, 7)
    operation = Waiting(memory, 3, slot=7)
    own.watch(operation)
    memory.notices[0].overflow()
    own.process_notices()
    assert operation.expired == 1


def test_the_latest_operation_of_a_slot_is_the_one_that_ends(memory):
    """A fetch that the core has parked may be parked again by Python."""
    own = ending(memory, 7)
    first, second = Waiting(memory, 3, slot=7), Waiting(memory, 3, slot=7)
    own.watch(first)
    own.watch(second)
    own.unwatch(first)
    own.process_notices()
    assert (first.expired, second.expired, own.size) == (0, 1, 0)

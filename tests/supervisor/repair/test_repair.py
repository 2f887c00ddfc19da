"""What the supervisor makes of the dead: every request answered once, no slot lost."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from typing import Final

import pytest

from mpbroker.ipc.layout import (
    CONNECTION_SLOT,
    CONNECTION_STATE,
    HANDLER_BUSY_SLOT,
    HOUSEKEEPER,
    PROCESSOR_SLOTS_USED,
    ROW_SYNC_OWNER,
    SLOT_CONNECTION,
    SLOT_INTENT,
    SLOT_PROGRESS,
    SLOT_PROGRESS_OFFSET,
    SLOT_RESPONSE_KIND,
    SLOT_RETRIES,
    SLOT_STATE,
    ConnectionState,
    Phase,
    ResponseKind,
    SlotState,
    connection_row,
    handler_row,
    processor_row,
    slot_row,
)
from mpbroker.ipc.robust_mutex import spin_lock
from mpbroker.ipc.tables.partition_table import LogState
from mpbroker.network.request_channel import HandlerEnd, ProcessorEnd
from mpbroker.supervisor.memory import BrokerMemory
from mpbroker.supervisor.repair.last_tries import MAX_EXCUSED
from mpbroker.supervisor.repair.recovery import MAX_RETRIES, Death, Repair
from tests.support.children import (
    deaths,
    die,
    fork,
    kill_at_line,
    lines_of,
    running,
    wait_until,
)
from tests.support.memory import broker_memory, slots_of, state_of

# How many deaths a line-kill test dies; more with MPBROKER_TEST_DEATHS=5000.
DEATHS: Final = int(os.environ.get("MPBROKER_TEST_DEATHS", "150"))
FILES: Final = (
    "mpbroker/ipc/ring.py",
    "mpbroker/network/request_channel.py",
    "mpbroker/ipc/tables/partition_table.py",
)
FREE, READY, CLAIMED = SlotState.FREE, SlotState.READY, SlotState.CLAIMED


@pytest.fixture
def memory():
    with broker_memory() as made:
        yield made


def handler_end(memory: BrokerMemory, handler: int = 0) -> HandlerEnd:
    return HandlerEnd(
        handler,
        memory.control,
        memory.arena,
        memory.arena_layout,
        memory.ring,
        memory.responses,
    )


def send(memory: BrokerMemory, slots: list[int] | range) -> None:
    """Publish a request in each slot, as its processor does."""
    for slot in slots:
        end = ProcessorEnd(memory.control, memory.ring, memory.responses[slot // 8192])
        used = processor_row(slot // 8192) + PROCESSOR_SLOTS_USED
        words = memory.control.words
        words[used] = max(words[used], slot % 8192 + 1)
        block = memory.arena_layout.block(slot)
        end.send_request(slot, block + 4, 10, block + 13 * 1024, 1)
        assert end.flush() == 0


# -- a handler's death --------------------------------------------------------------


def test_what_a_dead_handler_had_claimed_is_taken_by_another(memory):
    send(memory, [1, 2, 3])
    assert handler_end(memory, 0).receive_requests(16, 1, arm=False) == [1, 2, 3]
    Repair(memory).after_handler(0, 0)
    assert handler_end(memory, 1).receive_requests(16, 1, arm=False) == [1, 2, 3]


def test_what_a_dead_handler_had_parked_is_taken_by_another_with_its_deadline(memory):
    send(memory, [1])
    dead, alive = handler_end(memory, 0), handler_end(memory, 1)
    dead.receive_requests(16, 1, arm=False)
    dead.park(1, 12345)
    Repair(memory).after_handler(0, 0)
    assert alive.receive_requests(16, 1, arm=False) == [1]
    assert alive.deadline_ns(1) == 12345


def test_what_a_dead_handler_had_answered_is_not_executed_again(memory):
    send(memory, [1, 2])
    dead = handler_end(memory, 0)
    dead.receive_requests(16, 1, arm=False)
    dead.send_bytes(1, b"answer")
    dead.flush()
    dead.send_bytes(2, b"written, but not pushed")
    Repair(memory).after_handler(0, 0)
    assert memory.ring.waiting() == [2]
    assert memory.responses[0].waiting() == [1]


def test_requests_of_other_handlers_are_left_alone(memory):
    send(memory, [1, 2])
    handler_end(memory, 0).receive_requests(1, 1, arm=False)
    handler_end(memory, 1).receive_requests(1, 1, arm=False)
    Repair(memory).after_handler(0, 0)
    assert memory.ring.waiting() == [1]
    assert state_of(memory, 2) == CLAIMED


def test_a_handlers_death_releases_the_syncs_it_owned(memory):
    for index in range(3):
        memory.table.initialise_row(index)
        row = memory.table.row(index)
        row.words[row.base + ROW_SYNC_OWNER] = index
    Repair(memory).after_handler(1, 3)
    owners = [
        row.words[row.base + ROW_SYNC_OWNER]
        for row in (memory.table.row(index) for index in range(3))
    ]
    assert owners == [0, 1, 0]


def test_the_housekeepers_death_releases_its_syncs_and_tells_those_that_wait(memory):
    memory.table.initialise_row(0)
    row = memory.table.row(0)
    assert row.begin_sync(HOUSEKEEPER) == 0
    Repair(memory).after_housekeeper(1)
    assert row.words[row.base + ROW_SYNC_OWNER] == 0
    assert memory.notices[3].take() == ([], True)


def test_after_a_death_every_handler_is_told_to_look_at_all_it_waits_for(memory):
    Repair(memory).after_handler(0, 0)
    assert memory.notices[3].take() == ([], True)


def test_a_request_that_ends_every_handler_closes_its_connection(memory):
    send(memory, [1])
    repair = Repair(memory)
    for death in range(MAX_RETRIES + 1):
        assert memory.ring.waiting() == [1], death
        handler_end(memory, 0).receive_requests(16, 1, arm=False)
        repair.after_handler(0, 0)
    assert memory.ring.waiting() == []
    assert memory.responses[0].pop() == [1]
    words = memory.control.words
    assert words[slot_row(1) + SLOT_RESPONSE_KIND] == ResponseKind.CLOSE
    assert repair.quarantined == 1


def test_innocent_requests_outlive_the_one_that_ends_their_handler(memory):
    """The word that says which request is being executed tells them apart."""
    send(memory, [1, 2, 3, 4])
    repair, words = Repair(memory), memory.control.words
    for _ in range(MAX_RETRIES + 1):
        dead = handler_end(memory, 0)
        for slot in dead.receive_requests(16, 1, arm=False):
            if slot == 4:
                dead.park(4, 1)  # innocent too, and waits since the last time
        words[handler_row(0) + HANDLER_BUSY_SLOT] = 2 + 1
        repair.after_handler(0, 0)
    assert memory.responses[0].waiting() == [2]
    assert sorted(memory.ring.waiting()) == [1, 3, 4]
    assert [words[slot_row(n) + SLOT_RETRIES] for n in (1, 3, 4)] == [0, 0, 0]


def test_a_handler_that_dies_idle_over_parked_requests_is_not_restarted_for_ever(
    memory,
):
    """None was being executed: any of them may be what ends handlers."""
    send(memory, [1])
    repair = Repair(memory)
    for _ in range(MAX_RETRIES + 1):
        dead = handler_end(memory, 0)
        dead.receive_requests(16, 1, arm=False)
        dead.park(1, 1)
        repair.after_handler(0, 0)
    assert repair.quarantined == 1


def test_a_request_that_waited_is_not_to_blame_for_kills_from_outside(memory):
    """A slow disk keeps a produce waiting over the deaths of many handlers."""
    send(memory, [1])
    repair = Repair(memory)
    for _ in range(MAX_RETRIES + 3):
        dead = handler_end(memory, 0)
        assert dead.receive_requests(16, 1, arm=False) == [1]
        dead.park(1, 1)
        repair.after_handler(0, 0, Death.KILLED)
    assert repair.quarantined == 0
    assert memory.ring.waiting() == [1]


def execute_and_die(memory: BrokerMemory, repair: Repair, handler: int = 0) -> None:
    """Let a handler be killed over request 1."""
    assert handler_end(memory, handler).receive_requests(16, 1, arm=False) == [1]
    memory.control.words[handler_row(handler) + HANDLER_BUSY_SLOT] = 1 + 1
    repair.after_handler(handler, 0, Death.KILLED)


def test_a_request_that_a_process_computed_over_for_a_lease_is_not_tried_again(memory):
    send(memory, [1, 2])
    repair = Repair(memory)
    given_up: list[int] = []
    repair.on_quarantine = given_up.append
    assert handler_end(memory, 0).receive_requests(16, 1, arm=False) == [1, 2]
    memory.control.words[handler_row(0) + HANDLER_BUSY_SLOT] = 1 + 1
    repair.after_handler(0, 0, Death.OVERRAN)
    assert given_up == [1]
    assert memory.ring.waiting() == [2]


def wait_for_its_last_try(memory: BrokerMemory, repair: Repair) -> None:
    assert not memory.ring.waiting()
    wait_until(lambda: repair.look_at_held() is None)
    assert memory.ring.waiting() == [1]
    assert repair.is_at_rest


def wait_for_the_verdict(memory: BrokerMemory, repair: Repair) -> None:
    wait_until(lambda: repair.look_at_held() is None)
    assert not memory.ring.waiting()


def test_a_request_that_three_killed_handlers_executed_is_given_up(memory):
    send(memory, [1])
    repair = Repair(memory)
    execute_and_die(memory, repair)
    execute_and_die(memory, repair)
    wait_for_its_last_try(memory, repair)
    execute_and_die(memory, repair)
    wait_for_the_verdict(memory, repair)
    assert repair.quarantined == 1


def test_a_request_has_its_last_try_when_nobody_is_killed(memory):
    """Whoever kills all handlers, one by one, has then done it."""
    send(memory, [1])
    repair = Repair(memory)
    execute_and_die(memory, repair, 0)
    execute_and_die(memory, repair, 1)
    for handler in (2, 0, 1):  # its successors too; none of them executes anything
        repair.after_handler(handler, 0, Death.KILLED)
        assert not repair.is_at_rest
        assert not memory.ring.waiting()
    wait_for_its_last_try(memory, repair)
    assert handler_end(memory, 1).receive_requests(16, 1, arm=False) == [1]
    assert repair.quarantined == 0


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("role", ["handler", "processor"])
def test_a_last_try_is_made_again_if_others_are_killed_too(memory, role, order):
    """And not for ever: a client waits for it."""

    def kill_another():
        if role == "handler":
            repair.after_handler(3, 0, Death.KILLED)
        else:
            repair.after_processor(1)

    send(memory, [1])
    repair = Repair(memory)
    execute_and_die(memory, repair)
    execute_and_die(memory, repair)
    for _ in range(MAX_EXCUSED):
        wait_for_its_last_try(memory, repair)
        if order == "before":
            kill_another()
        execute_and_die(memory, repair)
        if order == "after":
            kill_another()
    wait_for_its_last_try(memory, repair)
    execute_and_die(memory, repair)
    kill_another()
    wait_for_the_verdict(memory, repair)
    assert repair.quarantined == 1


def test_a_slot_does_not_inherit_the_last_try_of_an_earlier_request(memory):
    repair, words = Repair(memory), memory.control.words
    for _ in range(3):
        send(memory, [1])
        execute_and_die(memory, repair)
        execute_and_die(memory, repair)
        wait_for_its_last_try(memory, repair)
        end = handler_end(memory)
        end.receive_requests(16, 1, arm=False)
        end.send_bytes(1, b"answer")
        end.flush()
        assert memory.responses[0].pop() == [1]
        words[slot_row(1) + SLOT_STATE] = SlotState.HELD
    assert repair.quarantined == 0


def test_no_request_is_held_when_the_broker_stops(memory):
    send(memory, [1])
    repair = Repair(memory)
    execute_and_die(memory, repair)
    execute_and_die(memory, repair)
    repair.hold_no_more()
    assert memory.ring.waiting() == [1]
    memory.phase = Phase.DRAINING
    repair.after_handler(0, 0, Death.KILLED)
    assert memory.ring.waiting() == [1]


def test_a_committed_append_is_noted_before_its_request_is_put_back(memory):
    memory.table.initialise_row(7)
    send(memory, [1])
    end = handler_end(memory, 0)
    end.receive_requests(16, 1, arm=False)

    def append_and_die():
        row = memory.table.row(7)
        row.lock()
        row.set_intent(1, 0, 50)
        row.publish(LogState(log_end_offset=53))
        die()

    memory.table.row(7).publish(LogState(log_end_offset=50))
    fork(append_and_die)
    Repair(memory).after_handler(0, 8)
    assert memory.ring.waiting() == [1]
    assert handler_end(memory, 1).progress(1) == [50]


def test_a_repair_does_not_wait_for_a_lock_whose_owner_waits_for_a_disk(memory):
    """The supervisor would be taken for hung, and the broker ended."""
    memory.table.initialise_row(0)
    row, words = memory.table.row(0), memory.control.words
    row.publish(LogState(log_end_offset=50))
    send(memory, [1])

    def die_before_the_commit() -> None:
        handler_end(memory, 0).receive_requests(16, 1, arm=False)
        row.begin_sync(0)
        row.lock()
        row.set_intent(1, 0, 50)
        die()

    def take_it_and_hang() -> None:
        row.lock()
        words[9] = 1
        signal.pause()

    fork(die_before_the_commit)
    with running(take_it_and_hang):
        wait_until(lambda: words[9])
        assert fork(lambda: Repair(memory).after_handler(0, 1)) == 0
        assert not row.owns_sync(0)
    assert words[slot_row(1) + SLOT_PROGRESS] == 0
    assert handler_end(memory, 1).receive_requests(16, 1, arm=False) == [1]


def take_and_stop(row, words):
    """Be the next owner of a dead handler's lock, and stop before it settles."""
    spin_lock(row._argument)  # without the rest of lock()
    words[9] = 1
    signal.pause()


def test_a_request_waits_until_what_it_had_begun_is_settled(memory):
    """Its lock's next owner is stopped before it can do so."""
    memory.table.initialise_row(0)
    row, words = memory.table.row(0), memory.control.words
    row.publish(LogState(log_end_offset=50))
    send(memory, [1, 2])

    def die_behind_the_commit() -> None:
        handler_end(memory, 0).receive_requests(16, 1, arm=False)
        row.lock()
        row.set_intent(1, 0, 50)
        row.publish(LogState(log_end_offset=51))
        die()

    fork(die_behind_the_commit)
    repair = Repair(memory)
    with running(partial(take_and_stop, row, words)):
        wait_until(lambda: words[9])
        repair.after_handler(0, 1)
        assert memory.ring.waiting() == [2]
        assert not repair.is_at_rest
        assert repair.look_at_held() is not None
        repair.after_handler(0, 1)  # a successor's death leaves it alone
        assert memory.ring.waiting() == [2]
    assert repair.look_at_held() is None
    assert repair.is_at_rest
    assert memory.ring.waiting() == [2, 1]
    assert words[slot_row(1) + SLOT_PROGRESS] == 1


def test_a_quarantined_request_is_answered_when_what_it_had_begun_is_settled(memory):
    """Its answer frees the slot: the append must not be noted in the next request."""
    memory.table.initialise_row(0)
    row, words = memory.table.row(0), memory.control.words
    row.publish(LogState(log_end_offset=50))
    send(memory, [1])

    def loop_behind_the_commit() -> None:
        handler_end(memory, 0).receive_requests(16, 1, arm=False)
        words[handler_row(0) + HANDLER_BUSY_SLOT] = 1 + 1
        row.lock()
        row.set_intent(1, 0, 50)
        row.publish(LogState(log_end_offset=51))
        die()

    fork(loop_behind_the_commit)
    repair = Repair(memory)
    with running(partial(take_and_stop, row, words)):
        wait_until(lambda: words[9])
        repair.after_handler(0, 1, Death.OVERRAN)
        repair.look_at_held()
        assert memory.responses[0].waiting() == []
        assert not repair.is_at_rest
    repair.look_at_held()
    assert repair.is_at_rest
    assert memory.responses[0].waiting() == [1]
    assert memory.ring.waiting() == []
    assert repair.quarantined == 1


# -- a processor's death ------------------------------------------------------------


def connect(memory: BrokerMemory, slot: int, state: ConnectionState) -> None:
    """Make the connection row of a slot's number name it."""
    words, row = memory.control.words, connection_row(slot)
    words[slot_row(slot) + SLOT_CONNECTION] = slot
    words[row + CONNECTION_SLOT] = slot + 1
    words[row + CONNECTION_STATE] = state


def test_what_no_connection_of_a_dead_processor_has_is_free(memory):
    words = memory.control.words
    send(memory, [1, 2])
    handler_end(memory).receive_requests(1, 1, arm=False)
    memory.responses[0].push([1])
    memory.responses[0].pop()  # 1 is RESPONDING, 2 is READY
    words[slot_row(0) + SLOT_STATE] = SlotState.HELD
    Repair(memory).after_processor(0)
    assert [state_of(memory, slot) for slot in (0, 1, 2)] == [FREE, FREE, READY]
    assert memory.ring.waiting() == [2]


def test_what_connections_have_is_left_to_the_successor(memory):
    words = memory.control.words
    for slot, slot_state, state in (
        (0, SlotState.HELD, ConnectionState.READING),
        (1, SlotState.RESPONDING, ConnectionState.IN_FLIGHT),  # partly sent
        (2, SlotState.RESPONDING, ConnectionState.READING),  # sent, and noted
        (3, SlotState.READY, ConnectionState.IN_FLIGHT),  # not on the ring
    ):
        words[slot_row(slot) + SLOT_STATE] = slot_state
        connect(memory, slot, state)
    words[processor_row(0) + PROCESSOR_SLOTS_USED] = 4
    Repair(memory).after_processor(0)
    held = SlotState.HELD
    states = [state_of(memory, slot) for slot in range(4)]
    assert states == [held, SlotState.RESPONDING, held, held]


def test_answers_that_a_dead_processor_had_not_taken_wait_for_its_successor(memory):
    send(memory, [1, 2])
    end = handler_end(memory)
    for slot in end.receive_requests(16, 1, arm=False):
        end.send_nothing(slot)
    end.flush()
    words = memory.control.words
    # It died in the middle of taking them.
    words[slot_row(1) + SLOT_STATE] = SlotState.RESPONDING
    Repair(memory).after_processor(0)
    assert memory.responses[0].waiting() == [1, 2]
    assert [state_of(memory, slot) for slot in (1, 2)] == [
        SlotState.RESPONDING,
        CLAIMED,
    ]


def test_a_slot_that_a_handler_works_on_stays_its_own_until_it_is_answered(memory):
    send(memory, [1, 2])
    end = handler_end(memory)
    end.receive_requests(16, 1, arm=False)
    end.park(2, 99)
    Repair(memory).after_processor(0)
    assert state_of(memory, 1) == CLAIMED
    assert state_of(memory, 2) == SlotState.PARKED
    end.send_nothing(1)
    end.flush()
    assert memory.responses[0].pop() == [1]  # its successor frees what it knows not


def test_an_answer_pushed_beside_the_repair_is_not_freed_twice(memory, monkeypatch):
    """Free, and on the ring as well, a slot would get two connections."""
    send(memory, [1])
    end = handler_end(memory)
    end.receive_requests(16, 1, arm=False)
    end.send_nothing(1)
    waiting = memory.responses[0].waiting

    def look_and_be_late():
        seen = waiting()
        end.flush()
        return seen

    monkeypatch.setattr(memory.responses[0], "waiting", look_and_be_late)
    Repair(memory).after_processor(0)
    assert waiting() == [1]
    assert state_of(memory, 1) == CLAIMED


def test_other_processors_lose_nothing(memory):
    mine, other = slots_of(0, 2), slots_of(1, 2)
    send(memory, [mine[0], other[0], mine[1], other[1]])
    Repair(memory).after_processor(0)
    assert memory.ring.waiting() == [mine[0], other[0], mine[1], other[1]]
    assert [state_of(memory, slot) for slot in other] == [READY, READY]


# -- killed at any line -------------------------------------------------------------


def test_handlers_killed_at_any_line_leave_every_request_answered_once(memory):
    """Each child takes, parks, unparks and answers until it dies somewhere in that."""
    memory.table.initialise_row(0)
    repair, words = Repair(memory), memory.control.words

    def handle():
        end = handler_end(memory)
        row = memory.table.row(0)
        while slots := end.receive_requests(3, 1, arm=True):
            for slot in slots:
                append_once(row, end, slot)
                if slot % 2:
                    end.park(slot, 5)
                    end.unpark(slot)
                # Some answers lie in an extent.
                end.send_bytes(slot, b"a" * (2000 if slot % 3 else 10))
            end.flush()

    def append_once(row, end, slot):
        if end.progress(slot):
            return
        with row.locked():
            log_end = row.log_end_offset
            row.set_intent(slot, 0, log_end)
            row.publish(LogState(log_end_offset=log_end + 1))
            row.clear_intent()

    requests = list(range(9))

    def reset():
        send(memory, requests)

    def count():
        reset()
        handle()
        assert sorted(memory.responses[0].pop()) == requests

    total = lines_of(count, FILES)
    for line in deaths(total, DEATHS, seed=3):
        before = memory.table.row(0).log_end_offset
        reset()

        def work(line=line):
            kill_at_line(line, FILES)
            handle()

        answered = []
        if fork(work) == -signal.SIGKILL:
            answered += memory.responses[0].pop()
            repair.after_handler(0, 1)
        assert fork(handle) == 0
        answered += memory.responses[0].pop()
        assert sorted(answered) == requests
        assert memory.ring.waiting() == []
        # Nor was anything appended twice, or not at all.
        assert memory.table.row(0).log_end_offset == before + len(requests)
        for slot in requests:
            assert words[slot_row(slot) + SLOT_INTENT] == 0
            assert words[slot_row(slot) + SLOT_PROGRESS] == 1
            where = words[slot_row(slot) + SLOT_PROGRESS_OFFSET] // 8
            assert before <= memory.arena.words[where] < before + len(requests)


def test_processors_killed_at_any_line_leave_every_slot_free_or_with_a_handler(memory):
    """A handler lives beside each; afterwards a successor gets all slots back."""
    repair, words = Repair(memory), memory.control.words
    count = 6
    slots = slots_of(0, count)
    words[processor_row(0) + PROCESSOR_SLOTS_USED] = count
    end = handler_end(memory)

    def process():
        mine = ProcessorEnd(memory.control, memory.ring, memory.responses[0])
        free = [slot for slot in slots if state_of(memory, slot) == FREE]
        for slot in free:
            block = memory.arena_layout.block(slot)
            mine.send_request(slot, block + 4, 10, block + 13 * 1024, 1)
            if slot % 2:
                mine.flush()
        mine.flush()
        handle(2)
        for slot in mine.receive_responses(arm=True):
            mine.response(slot)
            words[slot_row(slot) + SLOT_STATE] &= ~0xFF_FFFF
        handle(2)

    def handle(wanted):
        # In the child, as if a handler ran just then; it is not what dies.
        trace = sys.gettrace()
        sys.settrace(None)
        for slot in end.receive_requests(wanted, 1, arm=False):
            end.close_connection(slot)
        end.flush()
        sys.settrace(trace)

    total = lines_of(process, FILES)
    repair.after_processor(0)
    handle_all(memory, end)
    for line in deaths(total, DEATHS, seed=4):

        def work(line=line):
            kill_at_line(line, FILES)
            process()

        assert fork(work) in (0, -signal.SIGKILL)
        repair.after_processor(0)
        free = {slot for slot in slots if state_of(memory, slot) == FREE}
        waiting, coming = memory.ring.waiting(), memory.responses[0].waiting()
        assert not free & set(coming) and not free & set(waiting)
        assert len(set(coming)) == len(coming)
        for slot in set(slots) - free - set(waiting):
            if slot in coming and state_of(memory, slot) == SlotState.RESPONDING:
                continue  # killed while it took them
            assert state_of(memory, slot) == CLAIMED
            answered = words[slot_row(slot) + SLOT_RESPONSE_KIND] == ResponseKind.CLOSE
            assert answered == (slot in coming)
        handle_all(memory, end)
        assert {state_of(memory, slot) for slot in slots} == {FREE}


def handle_all(memory, end):
    """Answer what is still with the handler; free it as a successor does."""
    words = memory.control.words
    while end.receive_requests(16, 1, arm=False):
        pass
    claimed = [slot for slot in slots_of(0, 6) if state_of(memory, slot) == CLAIMED]
    pushed = set(memory.responses[0].waiting())
    for slot in claimed:
        if slot not in pushed:
            end.close_connection(slot)
    end.flush()
    for slot in memory.responses[0].pop():
        words[slot_row(slot) + SLOT_STATE] &= ~0xFF_FFFF

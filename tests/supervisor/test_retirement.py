"""A handler that is killed while it hands its requests back loses none of them."""

from __future__ import annotations

import os
from typing import Final

import pytest

from mpbroker.supervisor.repair.recovery import Repair
from tests.supervisor.repair.test_repair import FILES, handler_end, send
from tests.support.children import deaths, fork, kill_at_line, lines_of
from tests.support.memory import broker_memory

# How many deaths it dies; more with MPBROKER_TEST_DEATHS=5000.
DEATHS: Final = int(os.environ.get("MPBROKER_TEST_DEATHS", "50"))
SLOTS: Final = [1, 2, 3, 4, 5]


@pytest.fixture
def memory():
    with broker_memory() as made:
        yield made


def retire(memory):
    """What a retiring handler does whose requests are parked."""
    end = handler_end(memory, 0)
    slots = end.receive_requests(16, 1, arm=False)
    for slot in slots:
        end.park(slot, 12345)
    end.put_back(slots)


def take_all(memory, handler):
    end = handler_end(memory, handler)
    taken = []
    while slots := end.receive_requests(16, 1, arm=False):
        taken += slots
    for slot in taken:
        end.send_nothing(slot)
    end.flush()
    return taken


@pytest.mark.parametrize("others_are_faster", [False, True])
def test_killed_at_any_line_every_request_is_taken_once(memory, others_are_faster):
    send(memory, SLOTS)
    total = lines_of(lambda: retire(memory), FILES)
    assert total > 40
    assert take_all(memory, 1) == SLOTS
    memory.responses[0].pop()
    for number in deaths(total, DEATHS, seed=5):
        send(memory, SLOTS)

        def retire_and_die(number=number):
            kill_at_line(number, FILES)
            retire(memory)

        fork(retire_and_die)
        # Another handler may take what is on the ring before the repair or after it.
        taken = take_all(memory, 1) if others_are_faster else []
        Repair(memory).after_handler(0, 0)
        taken += take_all(memory, 1)
        assert sorted(taken) == SLOTS, f"killed at line {number} of {total}"
        memory.responses[0].pop()

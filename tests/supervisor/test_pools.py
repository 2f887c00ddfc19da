"""Which processes are started and retired on the way to other numbers of them."""

from __future__ import annotations

import math
import os
import signal
from functools import partial
from types import SimpleNamespace

import pytest

from mpbroker.base.errors import MpbrokerError
from mpbroker.ipc.layout import (
    CONNECTION_OWNER,
    CONNECTION_STATE,
    CONNECTIONS_PER_PROCESSOR,
    HANDLER_ACTIVE,
    HEADER,
    HEADER_ACTIVE_HANDLERS,
    MAX_HANDLERS,
    PROCESSOR_LISTENER,
    PROCESSOR_ROWS_USED,
    ConnectionState,
    connection_row,
    handler_row,
    processor_row,
)
from mpbroker.supervisor import pools
from mpbroker.supervisor.child import ChildEvent, ChildState, Role
from mpbroker.supervisor.pools import Pools, PoolSizes
from tests.support.memory import broker_memory

READY, STARTING = ChildState.READY, ChildState.STARTING


class NoRoles:
    """Builds nothing: no process is started here."""

    def run_handler(self, number):
        raise AssertionError

    run_processor = run_acceptor = run_handler


class Family:
    """Pools whose children are started, and end, when the test says so."""

    def __init__(self, memory, handlers, processors=0):
        self.memory = memory
        self.children = []
        self.started = []
        listeners = [SimpleNamespace(number=0)] * (processors > 0)
        sizes = PoolSizes(handlers, (processors,) * (processors > 0))
        self.pools = Pools(
            NoRoles(), memory, listeners, sizes, self.children, self._spawn
        )
        for child in list(self.children):
            self._spawn(child)
        self.all_serve()

    def _spawn(self, child):
        child.state = STARTING
        child.started_at = 0.0
        self.started.append(child)

    def all_serve(self):
        for child in self.started:
            if child.state is STARTING:
                child.happens(ChildEvent.REPORTED_READY)

    def all_end(self):
        for child in self.draining():
            child.happens(ChildEvent.EXITED)
            self.pools.forget(child)

    def draining(self):
        return [each for each in self.children if each.state is ChildState.DRAINING]

    def processor(self, number):
        (found,) = (
            each
            for each in self.children
            if (each.role, each.number) == (Role.PROCESSOR, number)
        )
        return found

    def connect(self, processor):
        """Let a processor own a connection."""
        words = self.memory.control.words
        words[processor_row(processor) + PROCESSOR_ROWS_USED] = 1
        row = connection_row(processor * CONNECTIONS_PER_PROCESSOR)
        words[row + CONNECTION_OWNER] = processor + 1
        words[row + CONNECTION_STATE] = ConnectionState.READING

    def numbers(self, state=READY):
        return sorted(each.number for each in self.children if each.state is state)


@pytest.fixture
def family():
    with broker_memory() as memory:
        yield partial(Family, memory)


def test_more_are_started_on_the_lowest_spare_ids(family):
    one = family(2)
    one.pools.want(PoolSizes(4, ()))
    assert one.pools.step()
    assert one.numbers() == [0, 1] and one.numbers(STARTING) == [2, 3]
    assert not one.pools.settled
    one.all_serve()
    assert one.pools.settled and not one.pools.step()


@pytest.mark.parametrize("at_once", [1, 3])
def test_they_are_started_a_few_at_a_time(family, monkeypatch, at_once):
    """Whoever is served waits for a core with all who start."""
    monkeypatch.setattr(pools, "AT_ONCE", at_once)
    one = family(1)
    spawn = one.pools._spawn

    def spawn_just_now(child):
        spawn(child)
        child.started_at = math.inf  # it has lived no second yet, however slow we are

    monkeypatch.setattr(one.pools, "_spawn", spawn_just_now)
    one.pools.want(PoolSizes(8, ()))
    seen = []
    while not one.pools.settled:
        one.pools.step()
        assert not one.pools.step()  # no more of them before these serve
        seen.append(len(one.numbers(STARTING)))
        one.all_serve()
    assert seen == [at_once] * (7 // at_once) + [7 % at_once] * (7 % at_once > 0)
    assert one.numbers() == list(range(8))


def test_one_that_takes_long_to_start_holds_up_nobody(family, monkeypatch):
    monkeypatch.setattr(pools, "AT_ONCE", 1)
    one = family(1)  # whose children start at the beginning of time
    one.pools.want(PoolSizes(4, ()))
    one.pools.step()
    assert one.numbers(STARTING) == [1, 2, 3]


def test_those_with_the_highest_ids_retire(family):
    one = family(5)
    one.pools.want(PoolSizes(2, ()))
    one.pools.step()
    assert [child.number for child in one.draining()] == [2, 3, 4]
    words = one.memory.control.words
    assert [words[handler_row(n) + HANDLER_ACTIVE] for n in range(5)] == [1, 1, 0, 0, 0]
    assert words[HEADER + HEADER_ACTIVE_HANDLERS] == 2
    one.all_end()
    assert one.pools.settled


def test_nobody_retires_while_fewer_than_are_wanted_serve(family):
    one = family(2)
    one.pools.replace(Role.HANDLER, 0)
    one.pools.step()
    assert not one.draining() and one.numbers(STARTING) == [2]
    one.all_serve()
    one.pools.step()
    assert [child.number for child in one.draining()] == [0]
    one.all_end()
    assert one.numbers() == [1, 2] and one.pools.settled


def test_what_does_not_serve_yet_retires_at_once(family):
    one = family(1)
    one.pools.want(PoolSizes(6, ()))
    one.pools.step()
    one.pools.want(PoolSizes(1, ()))
    one.pools.step()
    assert one.numbers() == [0] and len(one.draining()) == 5


def test_in_a_full_pool_one_goes_before_its_successor_comes(family):
    one = family(MAX_HANDLERS)
    for number in range(MAX_HANDLERS):
        one.pools.replace(Role.HANDLER, number)
    before = list(one.children)
    for _ in range(3 * MAX_HANDLERS):
        one.pools.step()
        assert len(one.draining()) <= 1
        assert len(one.numbers()) >= MAX_HANDLERS - 1
        one.all_end()
        one.pools.step()
        one.all_serve()
    assert one.pools.settled
    assert not set(map(id, before)) & set(map(id, one.children))


def test_an_id_is_not_given_away_before_its_process_has_ended(family):
    one = family(3)
    one.pools.want(PoolSizes(2, ()))
    one.pools.step()
    one.pools.want(PoolSizes(3, ()))
    one.pools.step()
    assert one.numbers(STARTING) == [3]


def test_the_dead_that_are_too_many_have_no_successors(family):
    one = family(3)
    one.children[2].state = ChildState.BACKOFF
    one.pools.want(PoolSizes(2, ()))
    one.pools.step()
    assert one.numbers() == [0, 1] and one.pools.settled


def test_a_dead_processor_whose_connections_live_has_a_successor_first(family):
    one = family(1, 2)
    one.connect(1)
    dead = one.processor(1)
    dead.happens(ChildEvent.EXITED)
    one.pools.want(PoolSizes(1, (1,)))
    one.pools.step()
    assert one.processor(1) is dead and dead.state is ChildState.BACKOFF
    one._spawn(dead)
    one.pools.step()
    assert one.processor(1).state is ChildState.DRAINING  # and gives them away


def test_a_dead_processor_that_had_been_ready_gets_no_connections_any_more(family):
    """It carried an order of its predecessor out, and ended as that had said."""
    one = family(1, 2)
    dead = one.processor(1)
    word = processor_row(1) + PROCESSOR_LISTENER
    assert one.memory.control.words[word]
    dead.happens(ChildEvent.EXITED)
    one.pools.want(PoolSizes(1, (1,)))
    one.pools.step()
    assert dead not in one.children
    assert one.memory.control.words[word] == 0


def test_a_processor_that_dies_over_its_retirement_is_not_forked_at_once(family):
    """Others may have died with it; and who dies all the time does so more slowly."""
    one = family(1, 2)
    one.connect(1)
    one.pools.want(PoolSizes(1, (1,)))
    one.pools.step()
    dead, before = one.processor(1), len(one.started)
    dead.happens(ChildEvent.EXITED)
    dead.failures, dead.restart_at = 3, 1e9
    one.pools.forget(dead, was_killed=True)
    assert len(one.started) == before
    successor = one.processor(1)
    assert successor is not dead and successor.state is ChildState.BACKOFF
    assert (successor.failures, successor.restart_at) == (3, 1e9)
    one.pools.step()
    assert one.processor(1) is successor


def test_who_is_not_there_cannot_be_replaced(family):
    with pytest.raises(MpbrokerError, match="no handler 7; there are 0, 1"):
        family(2).pools.replace(Role.HANDLER, 7)


def test_whoever_does_not_retire_in_time_is_killed(family, monkeypatch):
    one = family(2)
    pid = os.fork()
    if pid == 0:
        while True:
            signal.pause()
    monkeypatch.setattr("mpbroker.supervisor.pools._RETIRE_S", 0.0)
    one.children[1].pid, one.children[1].pidfd = pid, os.pidfd_open(pid)
    one.pools.want(PoolSizes(1, ()))
    one.pools.step()
    one.pools.step()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9
    os.close(one.children[1].pidfd)

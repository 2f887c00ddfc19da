"""Requests that compute for long alternate with all others in a handler."""

from __future__ import annotations

import time

import pytest

import mpbroker.server.request_handler as module
import mpbroker.server.turns as turns_module
from mpbroker.ipc.layout import (
    CONNECTION_PEER_ADDRESS,
    SLOT_CONNECTION,
    connection_row,
    slot_row,
)
from mpbroker.network.request_channel import ProcessorEnd
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.server.request import PARKED
from mpbroker.server.turns import LONG_NS, DelayedTurn, Turns
from tests.server.test_request_handler import Stage

NEVER = 1 << 62


class TurnStage(Stage):
    """A handler whose requests with the body "heavy" wait for their turn."""

    def __init__(self, memory):
        super().__init__(memory)
        self.executed = []
        self.handle = self._handle
        self.turns = self.purgatory.turns

    def _handle(self, request):
        if bytes(request.body) != b"heavy":
            self.executed.append(request.slot)
            return b"fine"
        slot, deadline = request.slot, time.monotonic_ns() + 10**12

        def run():
            self.executed.append(slot)
            if self.fails:
                raise ZeroDivisionError("of ours")
            return b"heavy"

        def refuse():
            self.channel.unpark(slot)
            self.channel.send_bytes(slot, request.frame(b"refused"))

        operation = DelayedTurn(request, 0, run, refuse, deadline)
        self.channel.park(slot, deadline)
        self.purgatory.watch(operation)
        self.turns.add(operation)
        return PARKED

    fails = False


@pytest.fixture
def stage(memory, monkeypatch):
    monkeypatch.setattr(module, "_IDLE_POLL_S", 0)
    return TurnStage(memory)


def test_a_heavy_request_comes_behind_those_that_wait_already(stage):
    stage.send(1, b"heavy")
    stage.send(2)
    stage.handler.turn()
    assert stage.executed == [2, 1]
    assert stage.answers() == {1: b"heavy", 2: b"fine"}
    assert stage.purgatory.size == 0 and not stage.turns


def test_a_heavy_request_waits_as_long_as_the_last_one_took_if_others_come(stage):
    stage.turns._next_ns = NEVER
    stage.send(1, b"heavy")
    for slot in (2, 3, 4):
        stage.send(slot)
        stage.handler.turn()
        assert stage.answers() == {slot: b"fine"}
    stage.handler.turn()  # none has come: nobody is kept waiting
    assert stage.answers() == {1: b"heavy"}
    assert stage.turns._next_ns < NEVER


def test_heavy_requests_have_their_turns_one_by_one_in_their_order(stage):
    for slot in (3, 1, 2):
        stage.send(slot, b"heavy")
    stage.handler.turn()
    while stage.turns:
        stage.send(9)
        stage.turns._next_ns = 0
        stage.handler.turn()
    assert [slot for slot in stage.executed if slot != 9] == [3, 1, 2]
    assert max(stage.executed.count(slot) for slot in (1, 2, 3)) == 1


def test_a_heavy_request_that_must_not_wait_is_refused_and_not_executed(stage):
    stage.turns._next_ns = NEVER
    stage.send(1, b"heavy")
    stage.send(2)
    stage.handler.turn()
    stage.purgatory.end_early()  # as when its client has hung up
    stage.handler.turn()
    assert stage.answers() == {1: b"refused", 2: b"fine"}
    stage.handler.turn()
    assert stage.executed == [2] and not stage.turns


def test_a_bug_in_a_heavy_request_is_answered(stage, caplog):
    stage.fails = True
    stage.send(1, b"heavy")
    stage.handler.turn()
    stage.handler.turn()
    assert stage.answers() == {1: b"error -1"}
    assert stage.dispatcher.errors == 1


class DebtStage(Stage):
    """A handler whose requests compute for as many seconds as their bodies say.

    The number of a client is that of its connection's row.
    """

    def __init__(self, memory, monkeypatch):
        super().__init__(memory)
        self.executed = []
        self.handle = self._handle
        self.turns = self.purgatory.turns
        self.computed_ns = 0
        monkeypatch.setattr(time, "thread_time_ns", lambda: self.computed_ns)
        monkeypatch.setattr(module, "LONG_NS", -1)  # by the clock nothing takes long
        monkeypatch.setattr(turns_module, "_MOST_NS", NEVER)

    def _handle(self, request):
        self.executed.append(request.slot)
        self.computed_ns += int(bytes(request.body)) * 10**9
        return b"fine"

    def ask(self, slot, client, seconds=0):
        words = self.memory.control.words
        words[slot_row(slot) + SLOT_CONNECTION] = client
        words[connection_row(client) + CONNECTION_PEER_ADDRESS + 1] = client
        self.send(slot, b"%d" % seconds)

    def finish(self):
        """Let turns pass until nothing waits, while a client without debts asks."""
        answers = self.answers()
        while self.turns:
            self.ask(99, 99)
            self.turns._next_ns = 0
            self.handler.turn()
            answers |= self.answers()
            assert answers.pop(99) == b"fine"
        executed, self.executed = self.executed, []
        assert answers == dict.fromkeys(set(executed) - {99}, b"fine")
        return [slot for slot in executed if slot != 99]


@pytest.fixture
def debts(memory, monkeypatch):
    monkeypatch.setattr(module, "_IDLE_POLL_S", 0)
    return DebtStage(memory, monkeypatch)


def test_the_requests_of_a_client_that_computed_for_long_come_after_those_of_others(
    debts,
):
    for slot in (1, 2, 3):
        debts.ask(slot, client=1, seconds=10**6)
    debts.ask(4, client=2)
    debts.handler.turn()
    assert debts.executed[:2] == [1, 4]
    assert debts.finish() == [1, 4, 2, 3]
    assert debts.purgatory.size == 0


def test_a_client_in_debt_does_not_wait_if_nobody_else_does(debts):
    for slot in (1, 2, 3):
        debts.ask(slot, client=1, seconds=10**6)
        debts.handler.turn()
        assert debts.executed == list(range(1, slot + 1))


def test_clients_in_debt_take_turns(debts):
    for slot, client, millions in ((1, 1, 3), (2, 2, 2)):
        debts.ask(slot, client, seconds=millions * 10**6)
        debts.handler.turn()
    for slot, client in ((3, 1), (4, 1), (5, 1), (6, 2)):
        debts.ask(slot, client)
    debts.handler.turn()
    assert debts.finish() == [1, 2, 3, 6, 4, 5]


def test_a_debt_comes_to_an_end(debts):
    debts.ask(1, client=1, seconds=10**6)
    debts.handler.turn()
    debts.computed_ns *= 2  # for others
    for slot, client in ((2, 1), (3, 2)):
        debts.ask(slot, client)
    debts.handler.turn()
    assert debts.executed == [1, 2, 3]


def test_a_request_out_of_turn_that_must_not_wait_is_refused_and_not_executed(debts):
    debts.ask(1, client=1, seconds=10**6)
    debts.handler.turn()
    for slot in (2, 3):
        debts.ask(slot, client=1)
    end = ProcessorEnd(
        debts.memory.control, debts.memory.ring, debts.memory.responses[0]
    )
    end.end_wait(2)  # its client has hung up
    debts.turns._next_ns = NEVER
    debts.handler.turn()
    debts.purgatory.end_early()
    debts.handler.turn()
    refused = b"error %d" % ErrorCode.REQUEST_TIMED_OUT
    assert debts.answers() == {1: b"fine", 2: refused, 3: refused}
    assert debts.executed == [1]


class Clock:
    """The CPU time of a process, in the place of the module time.

    Attributes:
        computed_ms: the CPU time.
    """

    def __init__(self):
        self.computed_ms = 1000

    def thread_time_ns(self):
        return self.computed_ms * 10**6

    def compute(self, turns, client, for_ms):
        self.computed_ms += for_ms
        turns.charge(client, for_ms * 10**6)


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(turns_module, "time", made)
    return made


def test_a_client_owes_what_it_had_more_than_the_others(clock):
    turns = Turns()
    clock.compute(turns, 1, 300)
    assert turns.owes(1) and not turns.owes(2)
    clock.compute(turns, 2, 199)
    assert turns.owes(1)
    clock.compute(turns, 2, 1)
    assert not turns.owes(1)


@pytest.mark.parametrize(("others_ms", "owes"), [(5, False), (4, True)])
def test_many_short_requests_count_as_one_long_one(clock, others_ms, owes):
    """With half of the time a client never owes any, whatever others do."""
    turns = Turns()
    for _ in range(200):
        clock.compute(turns, 1, 5)
        clock.computed_ms += others_ms
    assert turns.owes(1) is owes


def test_what_takes_no_time_to_speak_of_is_not_counted(clock):
    turns = Turns()
    for _ in range(5000):
        turns.charge(1, LONG_NS - 1)
    assert not turns.owes(1)


def test_debts_that_are_over_are_forgotten(clock):
    turns = Turns()
    for client in range(5000):
        clock.compute(turns, client, 5)
        clock.computed_ms += 5
    assert not any(map(turns.owes, range(5000)))
    assert len(turns.debts) <= turns_module._MANY


def test_a_debt_has_a_limit(clock):
    turns = Turns()
    clock.compute(turns, 1, 10**6)
    clock.computed_ms += 29_000
    assert turns.owes(1)
    clock.computed_ms += 1000
    assert not turns.owes(1)

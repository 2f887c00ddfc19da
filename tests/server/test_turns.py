"""Requests that compute for long alternate with all others in a handler."""

from __future__ import annotations

import time

import pytest

import mpbroker.server.request_handler as module
from mpbroker.server.request import PARKED
from mpbroker.server.turns import DelayedTurn
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

        operation = DelayedTurn(request, run, refuse, deadline)
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

"""Joins and syncs that must not wait: ended once, and only while they wait."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mpbroker.coordinator.outbox import Call, Outbox
from mpbroker.coordinator.waiting_calls import WaitingCalls
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode

SLOT = 5


class Slots:
    """Slots about which a test decides."""

    def __init__(self) -> None:
        self.claimed = True
        self.ending = False

    def has_claimed(self, slot: int) -> bool:
        return self.claimed

    def must_end(self, slot: int) -> bool:
        return self.ending


class Stage:
    def __init__(self) -> None:
        self.slots, self.out = Slots(), Outbox()
        self.waiting = WaitingCalls(self.slots, self.out)

    @property
    def codes(self) -> list[int]:
        answers: Any = [answer.response for answer in self.out.answers]
        return [response.error_code for response in answers]


@pytest.fixture
def stage() -> Stage:
    return Stage()


def call_of(api_key: ApiKey, version: int = 5) -> Call:
    return Call(version, "c", "/h", SimpleNamespace(slot=SLOT, api_key=int(api_key)))


def test_a_request_that_must_not_wait_is_answered_with_an_error(stage):
    call = call_of(ApiKey.JOIN_GROUP)
    stage.waiting.executed(SLOT, call)
    assert not call.answered
    stage.slots.ending = True
    stage.waiting.end(SLOT)
    assert stage.codes == [ErrorCode.COORDINATOR_LOAD_IN_PROGRESS]
    stage.waiting.end(SLOT)
    assert (len(stage.out.answers), len(stage.waiting)) == (1, 0)


def test_a_request_that_must_not_wait_is_ended_when_it_would(stage):
    stage.slots.ending = True
    stage.waiting.executed(SLOT, call_of(ApiKey.JOIN_GROUP))
    assert stage.codes == [ErrorCode.COORDINATOR_LOAD_IN_PROGRESS]


def test_an_answered_request_is_not_answered_again(stage):
    call = call_of(ApiKey.JOIN_GROUP)
    stage.waiting.executed(SLOT, call)
    call.answered = True
    stage.slots.ending = True
    stage.waiting.end(SLOT)
    assert stage.codes == []


def test_another_request_in_the_slot_is_left_alone(stage):
    """The one that waited was answered; the next one rests on a sync."""
    stage.waiting.executed(SLOT, call_of(ApiKey.JOIN_GROUP))
    stage.waiting.executed(SLOT, call_of(ApiKey.END_TXN))
    stage.slots.ending = True
    stage.waiting.end(SLOT)
    assert stage.codes == []


def test_a_slot_that_is_another_process_s_by_now_is_left_alone(stage):
    stage.waiting.executed(SLOT, call_of(ApiKey.JOIN_GROUP))
    stage.slots.claimed = False
    stage.slots.ending = True
    stage.waiting.end(SLOT)
    assert stage.codes == []

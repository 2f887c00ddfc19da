"""Answers that are given again to equal requests of a connection.

That they are the right answers, rig.py asserts in all tests of groups.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest

from mpbroker.coordinator.outbox import Call
from mpbroker.coordinator.repeated_calls import (
    MAX_BYTES,
    MAX_FRAME_BYTES,
    RepeatedCalls,
)
from mpbroker.ipc.layout import (
    CONNECTION_PRINCIPAL,
    CONNECTION_SLOT,
    CONNECTION_STATE,
    GENERATION_SHIFT,
    connection_row,
)

SLOT = 7
HERE, ELSEWHERE = 3, 4


class Stage:
    """The requests and answers of two connections."""

    def __init__(self) -> None:
        self.words: Any = defaultdict(int)
        self.sent: list[bytes] = []
        self.frame = b""
        self.holds = True
        self.times: list[int] = []
        self.quotas = SimpleNamespace(count_requests=False)
        self.rules: SimpleNamespace | None = SimpleNamespace(version=5)
        self.repeated = self.make()

    def make(self) -> RepeatedCalls:
        return RepeatedCalls(self.words, self, self.quotas, self.rules)  # type: ignore[arg-type]

    # What a HandlerEnd has.
    def request(self, slot: int) -> tuple[int, int, memoryview, int]:
        return slot, HERE, memoryview(self.frame), 0

    def send_bytes(self, slot: int, answer: bytes) -> None:
        self.sent.append(answer)

    def again(self, now_ms: int) -> bool:
        self.times.append(now_ms)
        return self.holds

    def answers(
        self, body: bytes = b"answer", request: bytes = b"request", **call: Any
    ) -> None:
        """Let a request be executed and answered."""
        self.frame = frame_of(1, request)
        asked = SimpleNamespace(slot=SLOT, throttle_ms=call.pop("throttle_ms", 0))
        made = Call(4, "c", "/host", asked, access=call.pop("access", self.rules))
        made.again, made.amend = self.again, call.pop("amend", None)
        self.words[connection_row(HERE) + CONNECTION_SLOT] = SLOT + 1
        self.repeated.keep(made, answer_of(1, body))

    def repeats(
        self, number: int, request: bytes = b"request", connection: int = HERE
    ) -> bool:
        self.words[connection_row(connection) + CONNECTION_SLOT] = SLOT + 1
        frame = memoryview(frame_of(number, request))
        return self.repeated.repeat(SLOT, connection, frame, 99)


def frame_of(number: int, body: bytes) -> bytes:
    return struct.pack(">hhi", 12, 4, number) + body


def answer_of(number: int, body: bytes) -> bytes:
    return struct.pack(">ii", 4 + len(body), number) + body


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_an_equal_request_of_the_connection_gets_the_answer_with_its_own_number(
    stage: Stage,
) -> None:
    stage.answers()
    assert stage.repeats(2)
    assert stage.repeats(3)
    assert stage.sent == [answer_of(2, b"answer"), answer_of(3, b"answer")]
    assert stage.times == [99, 99]


def test_other_requests_and_other_connections_are_executed(stage: Stage) -> None:
    stage.answers()
    assert not stage.repeats(2, b"another")
    assert not stage.repeats(2, connection=ELSEWHERE)
    row = connection_row(HERE)
    for word, value in (
        (CONNECTION_STATE, 1 << GENERATION_SHIFT),
        (CONNECTION_PRINCIPAL, 8),
    ):
        before, stage.words[row + word] = stage.words[row + word], value
        assert not stage.repeats(2)
        stage.words[row + word] = before
    assert not stage.repeated.repeat(SLOT + 1, HERE, memoryview(stage.frame), 99)
    assert stage.times == []
    assert stage.repeats(2)


def test_an_answer_that_does_not_hold_any_more_is_forgotten(stage: Stage) -> None:
    stage.answers()
    stage.holds = False
    assert not stage.repeats(2)
    assert len(stage.repeated) == 0
    assert stage.sent == []


def test_nothing_is_repeated_while_clients_have_quotas(stage: Stage) -> None:
    stage.answers()
    stage.quotas.count_requests = True
    assert not stage.repeats(2)
    stage.answers()
    assert len(stage.repeated) == 0


def test_answers_hold_for_the_rules_of_the_authorizer(stage: Stage) -> None:
    assert stage.rules is not None
    stage.answers(access=SimpleNamespace(version=4))  # they have changed meanwhile
    stage.answers(access=SimpleNamespace(version=None))
    assert len(stage.repeated) == 0
    stage.answers()
    stage.rules.version = 6
    assert not stage.repeats(2)


def test_no_answer_is_kept_that_is_the_request_s_own(stage: Stage) -> None:
    stage.answers(amend=lambda response: None)
    stage.answers(throttle_ms=1)
    stage.answers(request=bytes(MAX_FRAME_BYTES))
    stage.answers(body=bytes(MAX_FRAME_BYTES))
    assert len(stage.repeated) == 0


def test_the_last_answer_to_a_request_counts(stage: Stage) -> None:
    stage.answers(b"old")
    stage.answers(b"new")
    assert stage.repeats(2)
    assert stage.sent == [answer_of(2, b"new")]


def test_the_memory_of_answers_is_bounded(stage: Stage) -> None:
    most = 0
    for number in range(3 * MAX_BYTES // MAX_FRAME_BYTES):
        stage.answers(request=b"%01900d" % number)
        most = max(most, len(stage.repeated))
    assert 1000 < most < MAX_BYTES // 1900
    assert stage.repeats(2, stage.frame[8:])


def test_without_authorizer_or_quotas_nothing_is_asked(stage: Stage) -> None:
    stage.rules = None
    stage.repeated = RepeatedCalls(stage.words, stage, None, None)  # type: ignore[arg-type]
    stage.answers(access=None)
    assert stage.repeats(2)

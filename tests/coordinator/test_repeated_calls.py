"""Answers that are given again to equal requests of a connection.

That they are the right answers, rig.py asserts in all tests of groups.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest

from mpbroker.coordinator.commit_layout import CommitNumbers
from mpbroker.coordinator.outbox import NOW, Call, EncodedResponse, Outbox
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
from mpbroker.network.request_channel import ReceivedRequest
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.heartbeat import HeartbeatResponse
from mpbroker.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetCommitResponse,
    OffsetCommitResponsePartition,
    OffsetCommitResponseTopic,
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
        self.numbers: list[CommitNumbers] = []
        self.waits: list[int] = []
        self.quotas = SimpleNamespace(count_requests=False)
        self.rules: SimpleNamespace | None = SimpleNamespace(version=5)
        self.out = Outbox()
        self.after: tuple[int, ...] = NOW
        self.repeated = self.make()

    def make(self) -> RepeatedCalls:
        return RepeatedCalls(
            self.words,
            self,  # type: ignore[arg-type]
            self.out,
            self.quotas,  # type: ignore[arg-type]
            self.rules,
        )

    # What a HandlerEnd has.
    def request(self, slot: int) -> tuple[int, int, memoryview, int]:
        return slot, HERE, memoryview(self.frame), 0

    def send_bytes(self, slot: int, answer: bytes) -> None:
        self.sent.append(answer)

    def note_wait(self, slot: int, now_ns: int) -> None:
        self.waits.append(slot)

    def again(self, numbers: CommitNumbers, now_ms: int) -> tuple[int, ...] | None:
        self.numbers.append(numbers)
        self.times.append(now_ms)
        return self.after if self.holds else None

    def answers(
        self, body: bytes = b"answer", request: bytes = b"request", **call: Any
    ) -> None:
        """Let a request be executed and answered."""
        self.frame = frame_of(1, request)
        asked = SimpleNamespace(slot=SLOT, throttle_ms=call.pop("throttle_ms", 0))
        made = Call(4, "c", "/host", asked, access=call.pop("access", self.rules))
        made.again, made.amend = self.again, call.pop("amend", None)
        self.words[connection_row(HERE) + CONNECTION_SLOT] = SLOT + 1
        self.repeated.keep(made, HeartbeatResponse, answer_of(1, body))

    def repeats(
        self, number: int, request: bytes = b"request", connection: int = HERE
    ) -> bool:
        self.words[connection_row(connection) + CONNECTION_SLOT] = SLOT + 1
        return self.receives(frame_of(number, request), connection)

    def receives(self, frame: bytes, connection: int = HERE, slot: int = SLOT) -> bool:
        received = ReceivedRequest(slot, connection, memoryview(frame), 0)
        return self.repeated.repeat(received, 99)


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
    assert not stage.receives(stage.frame, slot=SLOT + 1)
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
    stage.repeated = RepeatedCalls(stage.words, stage, stage.out, None, None)  # type: ignore[arg-type]
    stage.answers(access=None)
    assert stage.repeats(2)


def commit_of(offset: int, name: str = "t") -> OffsetCommitRequest:
    return OffsetCommitRequest(
        group_id="g",
        topics=[
            OffsetCommitRequestTopic(
                name=name,
                partitions=[
                    OffsetCommitRequestPartition(
                        partition_index=number,
                        committed_offset=offset + number,
                        committed_leader_epoch=number,
                        committed_metadata="",
                    )
                    for number in range(2)
                ],
            )
        ],
    )


def commit_frame(number: int, request: OffsetCommitRequest) -> bytes:
    name = b"\0\1c\0"  # the client id, and no tagged fields
    return struct.pack(">hhi", 8, 9, number) + name + request.encode(9)


COMMITTED = OffsetCommitResponse(
    topics=[
        OffsetCommitResponseTopic(
            name="t", partitions=[OffsetCommitResponsePartition(partition_index=0)]
        )
    ]
)


def commits(stage: Stage, request: OffsetCommitRequest) -> bytes:
    """Let a commit be executed and answered; return the body of the answer."""
    body = COMMITTED.encode(9)
    stage.after = (5,)
    stage.frame = commit_frame(1, request)
    asked = SimpleNamespace(slot=SLOT, throttle_ms=0)
    call = Call(9, "c", "/host", asked, access=stage.rules)  # type: ignore[arg-type]
    call.again, call.commit = stage.again, request
    stage.words[connection_row(HERE) + CONNECTION_SLOT] = SLOT + 1
    stage.repeated.keep(call, OffsetCommitResponse, answer_of(1, b"\0" + body))
    return body


def test_commits_of_other_offsets_are_answered_when_they_are_on_disk(
    stage: Stage,
) -> None:
    body = commits(stage, commit_of(10))
    assert not stage.receives(commit_frame(2, commit_of(20, name="u")))
    assert stage.receives(commit_frame(3, commit_of(30)))
    assert stage.numbers == [CommitNumbers([30, 31], [0, 1])]
    assert stage.sent == []
    assert stage.waits == [SLOT]
    (answer,) = stage.out.take_answers()
    response = answer.response
    assert isinstance(response, EncodedResponse)
    assert answer.after == (5,)
    frame = answer.call.request.frame(response.body)
    assert frame == answer_of(3, b"\0" + body)
    # If its records are lost, the client learns of it.
    assert answer.refuse(ErrorCode.COORDINATOR_NOT_AVAILABLE)
    refused = OffsetCommitResponse.decode(9, response.body)
    (part,) = refused.topics[0].partitions
    assert part.error_code == ErrorCode.COORDINATOR_NOT_AVAILABLE
    # And only it: the next commit has the answer of the first one.
    assert stage.receives(commit_frame(4, commit_of(40)))
    (answer,) = stage.out.take_answers()
    assert isinstance(answer.response, EncodedResponse)
    assert answer.response.body == body


def test_a_connection_may_commit_for_several_groups(stage: Stage) -> None:
    for name in "tuv":
        commits(stage, commit_of(10, name=name))
    for name in "vut":
        assert stage.receives(commit_frame(3, commit_of(30, name=name)))
    assert not stage.receives(commit_frame(3, commit_of(30, name="w")))
    assert not stage.receives(commit_frame(3, commit_of(30, name="long")))

"""Fetches that wait: how long, and that they tell a later session nothing."""

from __future__ import annotations

import time

import pytest

from mpbroker.protocol.acl import AclOperation
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.headers import encode_request_header
from mpbroker.protocol.messages.fetch import (
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
)
from mpbroker.protocol.records.record_batch import RecordBatchBuilder
from mpbroker.server.fetch.fetch_session import FetchSessions
from tests.server.authorization.authorization_stage import Granting
from tests.server.core_cache.handler_stage import Stage, produce_request

VERSION = 12
HEADER_BYTES = 9  # of an answer: size, correlation id, tagged fields


@pytest.fixture
def stage(memory, tmp_path):
    made = Stage(memory, tmp_path / "data", short=False)
    made.registry.create_topic("t", 3)
    return made


def fetch_request(partitions, session, epoch, max_wait_ms=0):
    """Partition -> how many bytes of it at most."""
    wanted = [
        FetchPartition(partition=index, fetch_offset=0, partition_max_bytes=size)
        for index, size in partitions.items()
    ]
    message = FetchRequest(
        session_id=session,
        session_epoch=epoch,
        topics=[FetchTopic(topic="t", partitions=wanted)] if wanted else [],
        max_wait_ms=max_wait_ms,
        min_bytes=1,
        max_bytes=1 << 20,
    )
    header = encode_request_header(ApiKey.FETCH, VERSION, 77, "test")
    return header + message.encode(VERSION)


def fetch(stage, slot, *arguments):
    stage.ask(fetch_request(*arguments), slot)
    return FetchResponse.decode(VERSION, stage.sent(slot)[HEADER_BYTES:])


def produce(stage, partition):
    builder = RecordBatchBuilder()
    builder.append(1_700_000_000_000, None, b"v")
    stage.publish(produce_request("t", partition, bytes(builder.build())), slot=5)
    stage.handler.turn()
    return stage.memory.responses[0].pop()


def test_a_parked_fetch_notes_nothing_in_the_session_that_came_after_its_own(stage):
    first = fetch(stage, 3, {0: 1 << 20}, 0, 0).session_id
    stage.publish(fetch_request({}, first, 1, 60_000), slot=3)
    stage.handler.turn()
    assert stage.purgatory.size == 1
    # Its client has gone, and begins anew.
    second = fetch(stage, 4, {1: 0, 2: 1 << 20}, first, 0).session_id
    assert second not in (0, first)
    assert sorted(produce(stage, 0)) == [3, 5]
    for partition in (1, 2):
        produce(stage, partition)
    (topic,) = fetch(stage, 4, {}, second, 1).responses
    told = {each.partition_index: each.high_watermark for each in topic.partitions}
    assert told == {1: 1, 2: 1}


class Killed(BaseException):
    """In the place of a handler's death."""


@pytest.mark.parametrize("times", [1, 2])
def test_a_fetch_whose_handler_dies_behind_its_claim_goes_on_with_its_session(
    stage, monkeypatch, times
):
    session = fetch(stage, 3, {0: 1 << 20}, 0, 0).session_id
    claim = FetchSessions.claim

    def claim_and_die(*arguments, **options):
        claim(*arguments, **options)
        raise Killed

    stage.publish(fetch_request({}, session, 1), slot=3)
    with monkeypatch.context() as patch:
        patch.setattr(FetchSessions, "claim", claim_and_die)
        for _ in range(times):
            with pytest.raises(Killed):
                stage.handler.turn()
            stage.memory.ring.put_back([3])  # as the supervisor does
    stage.handler.turn()
    assert stage.memory.responses[0].pop() == [3]
    answer = FetchResponse.decode(VERSION, stage.sent(3)[HEADER_BYTES:])
    assert (answer.error_code, answer.session_id) == (0, session)
    assert fetch(stage, 3, {}, session, 1).error_code != 0
    assert fetch(stage, 3, {}, session, 2).error_code == 0


def test_what_a_dead_handler_was_about_to_tell_is_told(stage, monkeypatch):
    """Of partition 1 there is nothing else to tell: its turn to be read is later."""
    session = fetch(stage, 3, {0: 1 << 20, 1: 0}, 0, 0).session_id
    assert fetch(stage, 3, {}, session, 1).responses == []
    for partition in (0, 1):
        produce(stage, partition)
    note = FetchSessions.note_sent

    def note_and_die(sessions, session_id, base, index, *told):
        note(sessions, session_id, base, index, *told)
        if index == 1:
            raise Killed

    stage.publish(fetch_request({}, session, 2), slot=3)
    with monkeypatch.context() as patch:
        patch.setattr(FetchSessions, "note_sent", note_and_die)
        with pytest.raises(Killed):
            stage.handler.turn()
    stage.memory.ring.put_back([3])
    stage.handler.turn()
    assert stage.memory.responses[0].pop() == [3]
    answer = FetchResponse.decode(VERSION, stage.sent(3)[HEADER_BYTES:])
    told = {
        each.partition_index: each.high_watermark
        for topic in answer.responses
        for each in topic.partitions
    }
    assert told == {0: 1, 1: 1}


@pytest.mark.parametrize("version", [VERSION, 13])
def test_a_session_reads_no_topic_that_its_sender_may_not_read(
    memory, tmp_path, version
):
    """It has no row then, and is looked for again in each request."""
    may_read = Granting()
    stage = Stage(
        memory, tmp_path / "data", short=False, authorizer=lambda registry: may_read
    )
    topic_id = stage.registry.create_topic("t", 1).topic_id

    def errors(slot, session, epoch):
        wanted = FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=9)
        topic = FetchTopic(topic="t", topic_id=topic_id, partitions=[wanted])
        message = FetchRequest(
            session_id=session,
            session_epoch=epoch,
            topics=[] if session else [topic],
            max_bytes=1 << 20,
        )
        header = encode_request_header(ApiKey.FETCH, version, 77, "test")
        stage.ask(header + message.encode(version), slot)
        answer = FetchResponse.decode(version, stage.sent(slot)[HEADER_BYTES:])
        assert not answer.error_code
        told = [each for topic in answer.responses for each in topic.partitions]
        return answer.session_id, [ErrorCode(each.error_code) for each in told]

    denied = [ErrorCode.TOPIC_AUTHORIZATION_FAILED]
    session, told = errors(3, 0, 0)
    assert session and told == denied
    assert errors(3, session, 1) == (session, denied)
    may_read.granted.add((AclOperation.READ, "t"))
    may_read.kept_version += 1
    assert errors(3, session, 2) == (session, [ErrorCode.NONE])
    assert errors(3, session, 3) == (session, [])
    may_read.granted.clear()
    may_read.kept_version += 1
    assert errors(3, session, 4) == (session, denied)


@pytest.mark.parametrize(
    ("asked_ms", "waits_ms"),
    [(1000, 1000), (300_000, 300_000), (600_001, 600_000), (2**31 - 1, 600_000)],
)
def test_a_fetch_waits_as_long_as_it_asks_up_to_ten_minutes(stage, asked_ms, waits_ms):
    before = time.monotonic_ns()
    stage.publish(fetch_request({0: 1 << 20}, 0, -1, asked_ms), slot=3)
    stage.handler.turn()
    after = time.monotonic_ns()
    deadline = stage.channel.deadline_ns(3) - waits_ms * 1_000_000
    assert before <= deadline <= after

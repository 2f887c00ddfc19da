"""A Produce to several partitions, whose records are on disk before it is parked."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from mpbroker.ipc.layout import ResponseKind, RowStatus
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.headers import encode_request_header
from mpbroker.protocol.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)
from mpbroker.protocol.records.record_batch import RecordBatchBuilder
from mpbroker.server.group_commit import GroupCommit
from tests.server.core_cache.handler_stage import Stage
from tests.support.memory import broker_memory

VERSION = 9
HEAD = 4 + 4 + 1  # size, correlation id, tagged fields


@pytest.fixture
def stage(tmp_path) -> Iterator[Stage]:
    with broker_memory() as memory:
        made = Stage(memory, tmp_path / "data", short=False, syncs=True)
        made.registry.create_topic("two", 2)
        yield made
        made.logs.close_files()


def to_both() -> bytes:
    """A request of acks=all for both partitions of the topic."""
    builder = RecordBatchBuilder()
    builder.append(time.time_ns() // 1_000_000, None, b"x")
    records = bytes(builder.build())
    rows = [PartitionProduceData(index=index, records=records) for index in range(2)]
    message = ProduceRequest(
        acks=-1,
        timeout_ms=1000,
        topic_data=[TopicProduceData(name="two", partition_data=rows)],
    )
    header = encode_request_header(ApiKey.PRODUCE, VERSION, 77, "test")
    return header + message.encode(VERSION)


def codes(answer: tuple[ResponseKind, bytes]) -> list[int]:
    (topic,) = ProduceResponse.decode(VERSION, answer[1][HEAD:]).responses
    return [row.error_code for row in topic.partition_responses]


def test_on_a_quick_disk_it_is_answered_in_the_turn_that_took_it(stage):
    stage.disk.is_quick = True
    assert codes(stage.ask(to_both())) == [0, 0]
    assert stage.disk.started == [] and len(stage.disk.made) >= 2
    assert stage.purgatory.size == 0
    for partition in range(2):
        assert stage.log("two", partition).row.durable_end_offset == 1


def test_on_another_it_is_parked_until_the_disk_has_answered(stage):
    stage.publish(to_both())
    stage.handler.turn()
    assert stage.purgatory.size == 1 and stage.disk.made == []
    stage.end_syncs()
    assert codes(stage.answer(3)) == [0, 0]


def test_with_others_behind_it_it_holds_up_none(stage):
    stage.disk.is_quick = True
    stage.publish(to_both(), 3)
    stage.publish(to_both(), 4)
    stage.handler.turn()
    assert stage.disk.made == []
    stage.end_syncs()
    assert sorted(stage.memory.responses[0].pop()) == [3, 4]


def test_a_disk_that_fails_is_told_of_and_never_asked_again(stage):
    stage.disk.is_quick, stage.disk.error = True, 5
    failed = [ErrorCode.KAFKA_STORAGE_ERROR] * 2
    assert codes(stage.ask(to_both())) == failed
    assert stage.purgatory.size == 0
    assert stage.log("two").row.status == RowStatus.OFFLINE
    made = list(stage.disk.made)
    assert codes(stage.ask(to_both())) == failed
    assert stage.disk.made == made and stage.disk.started == []


def go_offline(stage: Stage) -> None:
    """Fail a sync after an end was published that it should not have been."""
    for partition in range(2):
        row = stage.log("two", partition).row
        row.status, row.durable_end_offset = RowStatus.OFFLINE, 1


def test_what_is_offline_is_refused_however_far_it_is_said_to_be_on_disk(stage):
    stage.publish(to_both())
    stage.handler.turn()
    go_offline(stage)
    stage.end_syncs()
    assert codes(stage.answer(3)) == [ErrorCode.KAFKA_STORAGE_ERROR] * 2


def test_what_goes_offline_in_a_sync_at_once_is_refused_as_well(stage, monkeypatch):
    stage.disk.is_quick = True
    monkeypatch.setattr(GroupCommit, "sync_at_once", lambda *_: go_offline(stage))
    failed = [ErrorCode.KAFKA_STORAGE_ERROR] * 2
    assert codes(stage.ask(to_both())) == failed

"""Produces into a topic that is being mirrored, and copies into one that is not."""

from __future__ import annotations

import pytest

from mpbroker.ipc.layout import ResponseKind
from mpbroker.protocol.acl import CLUSTER_NAME, AclOperation
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.headers import encode_request_header
from mpbroker.protocol.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)
from mpbroker.protocol.records.batch_header import parse_batch_header
from mpbroker.protocol.records.compression import Codec
from mpbroker.protocol.records.copied_batch import copied_batch, empty_batch
from mpbroker.protocol.records.record_batch import RecordBatchBuilder
from tests.server.authorization.authorization_stage import Granting
from tests.server.core_cache.handler_stage import Stage
from tests.support.memory import broker_memory


@pytest.fixture
def stage(tmp_path):
    with broker_memory() as memory:
        made = Stage(memory, tmp_path / "data", short=False)
        made.registry.create_topic("plain", 1)
        made.registry.create_topic("copy", 1, {"mirror.source": "old:9092"})
        yield made
        made.logs.close_files()


def batch(**settings: object) -> bytes:
    builder = RecordBatchBuilder(**settings)
    builder.append(1_000, None, b"x", ())
    builder.append(1_001, None, b"y", ())
    return bytes(builder.build())


def at(offset: int, data: bytes) -> bytes:
    return offset.to_bytes(8, "big") + data[8:]


def ask(stage, topic, records, start=-1, since=None):
    """Return the answer for one partition."""
    partition = PartitionProduceData(
        index=0,
        records=records,
        source_log_start_offset=start,
        source_offset=(-1 if start < 0 else 0) if since is None else since,
    )
    request = ProduceRequest(
        acks=1,
        timeout_ms=1_000,
        topic_data=[TopicProduceData(name=topic, partition_data=[partition])],
    )
    header = encode_request_header(ApiKey.PRODUCE, 9, 77, "test")
    kind, answer = stage.ask(header + request.encode(9))
    assert kind is not ResponseKind.CLOSE
    response = ProduceResponse.decode(9, memoryview(answer), 9)
    return response.responses[0].partition_responses[0]


def test_a_copy_keeps_its_offsets_and_moves_the_start_to_that_of_the_source(stage):
    answer = ask(stage, "copy", at(40, batch()), start=40)
    assert (answer.error_code, answer.base_offset) == (0, 40)
    assert answer.log_start_offset == 40
    answer = ask(stage, "copy", at(50, batch(codec=Codec.ZSTD)), start=41)
    assert (answer.error_code, answer.base_offset) == (0, 50)
    assert answer.log_start_offset == 41
    assert ask(stage, "copy", empty_batch(60), start=41).error_code == 0
    assert stage.log("copy").row.log_end_offset == 61


def test_batches_that_are_there_are_skipped(stage):
    """A request that was executed before its handler or its client died, say."""
    both = at(4, batch()) + at(9, batch())
    ask(stage, "copy", at(4, batch()), start=0)
    for _ in range(2):
        answer = ask(stage, "copy", both, start=0)
        assert (answer.error_code, answer.base_offset) == (0, 4)
        assert stage.log("copy").row.log_end_offset == 11
    row = stage.log("copy").row
    assert row.snapshot().active_size == len(both)


def test_a_batch_that_overlaps_the_end_is_refused(stage):
    ask(stage, "copy", at(4, batch()), start=0)
    answer = ask(stage, "copy", at(5, batch()), start=0)
    assert answer.error_code == ErrorCode.OFFSET_OUT_OF_RANGE
    assert stage.log("copy").row.log_end_offset == 6


def test_copies_that_would_leave_out_records_are_refused(stage):
    """The broker has lost what it answered, and its client does not know yet."""
    ask(stage, "copy", at(4, batch()), start=0)
    answer = ask(stage, "copy", at(9, batch()), start=0, since=8)
    assert answer.error_code == ErrorCode.OFFSET_OUT_OF_RANGE
    assert stage.log("copy").row.log_end_offset == 6
    assert ask(stage, "copy", at(9, batch()), start=0, since=6).error_code == 0


def test_other_producers_are_refused_as_long_as_a_topic_is_mirrored(stage):
    """After the setting is gone they may write, and copies are refused."""
    answer = ask(stage, "copy", batch())
    assert answer.error_code == ErrorCode.POLICY_VIOLATION
    assert "being mirrored from old:9092" in answer.error_message
    assert stage.log("copy").row.log_end_offset == 0
    answer = ask(stage, "plain", batch(), start=0)
    assert answer.error_code == ErrorCode.POLICY_VIOLATION
    assert ask(stage, "plain", batch()).error_code == 0
    assert stage.log("plain").row.log_end_offset == 2


@pytest.mark.parametrize("short", [False, True])
def test_a_topic_refuses_producers_from_the_moment_it_is_mirrored(tmp_path, short):
    """Also by the compiled core, which knew the topic before."""
    with broker_memory() as memory:
        stage = Stage(memory, tmp_path / "data", short=short)
        stage.registry.create_topic("t", 1)
        for _ in range(3):
            assert ask(stage, "t", batch()).error_code == 0
        stage.registry.alter_topic_config("t", lambda _: {"mirror.source": "old:9092"})
        assert ask(stage, "t", batch()).error_code == ErrorCode.POLICY_VIOLATION
        assert stage.log("t").row.log_end_offset == 6
        stage.logs.close_files()


@pytest.mark.parametrize(
    "settings",
    [
        {"producer_id": 7, "producer_epoch": 0, "base_sequence": 0},
        {
            "producer_id": 7,
            "producer_epoch": 0,
            "base_sequence": 0,
            "transactional": True,
        },
    ],
)
def test_a_copy_has_no_producer_and_no_transaction(stage, settings):
    data = batch(**settings)
    answer = ask(stage, "copy", data, start=0)
    assert answer.error_code == ErrorCode.INVALID_RECORD
    copied = bytes(copied_batch(parse_batch_header(data), data))
    assert copied == batch()
    assert ask(stage, "copy", copied, start=0).error_code == 0


def test_a_damaged_copy_is_refused(stage):
    data = bytearray(batch())
    data[-1] ^= 1
    answer = ask(stage, "copy", bytes(data), start=0)
    assert answer.error_code == ErrorCode.CORRUPT_MESSAGE
    assert stage.log("copy").row.log_end_offset == 0
    for cut in (1, 30, 61, len(batch()) - 1):
        answer = ask(stage, "copy", batch()[:cut], start=0)
        assert answer.error_code in (
            ErrorCode.CORRUPT_MESSAGE,
            ErrorCode.INVALID_RECORD,
        )
    assert stage.log("copy").row.log_end_offset == 0


def test_copying_needs_the_permission_of_a_broker_for_the_cluster(tmp_path):
    """Else each sender with WRITE for a topic could move its end to any offset."""
    granting = Granting((AclOperation.WRITE, "copy"))
    with broker_memory() as memory:
        stage = Stage(
            memory,
            tmp_path / "data",
            short=False,
            authorizer=lambda registry: granting,
        )
        stage.registry.create_topic("copy", 1, {"mirror.source": "old:9092"})
        answer = ask(stage, "copy", at(9, batch()), start=0)
        assert answer.error_code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED
        granting.granted.add((AclOperation.CLUSTER_ACTION, CLUSTER_NAME))
        granting.kept_version += 1
        assert ask(stage, "copy", at(9, batch()), start=0).error_code == 0
        stage.logs.close_files()

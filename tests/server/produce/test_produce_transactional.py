"""Records of a transaction are taken only from who names it."""

from __future__ import annotations

import pytest

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
from tests.server.core_cache.handler_stage import Stage


def transactional_batch():
    builder = RecordBatchBuilder(
        producer_id=5, producer_epoch=0, base_sequence=0, transactional=True
    )
    builder.append(1_700_000_000_000, None, b"x")
    return bytes(builder.build())


def produce(stage, version, partitions):
    topic = stage.registry.topic("t")
    data = [
        PartitionProduceData(index=index, records=transactional_batch())
        for index in range(partitions)
    ]
    message = ProduceRequest(
        acks=1,
        timeout_ms=1000,
        topic_data=[
            TopicProduceData(name="t", topic_id=topic.topic_id, partition_data=data)
        ],
    )
    header = encode_request_header(ApiKey.PRODUCE, version, 77, "test")
    _, answer = stage.ask(header + message.encode(version))
    head = 8 if version < 9 else 9
    response = ProduceResponse.decode(version, memoryview(answer)[head:])
    return response.responses[0].partition_responses


@pytest.mark.parametrize("partitions", [1, 2])
@pytest.mark.parametrize("version", range(3, 14))
def test_who_names_no_transaction_begins_none(memory, tmp_path, version, partitions):
    """Nobody would end it, and who reads what is committed would wait for that."""
    stage = Stage(memory, tmp_path / "data", short=False)
    stage.registry.create_topic("t", partitions)
    answers = produce(stage, version, partitions)
    refused = ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    assert [answer.error_code for answer in answers] == [refused] * partitions
    for index in range(partitions):
        state = stage.log("t", index).view.state()
        assert (state.log_end_offset, state.first_unstable_offset) == (0, -1)

"""A range of offsets, read from a broker that also misbehaves."""

from __future__ import annotations

import pytest

from mpbroker.client.cluster import TopicPartition
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.messages.fetch import EpochEndOffset
from mpbroker.spark.offsets import OffsetRange
from mpbroker.spark.options import parse_source_options
from mpbroker.spark.partition_reader import read_range
from tests.client.fake_broker import FakeBroker
from tests.client.test_fetcher import answer_for, batch_of


@pytest.mark.parametrize("lossy", ["true", "false"])
def test_what_an_answer_says_of_other_leaders_logs_is_no_loss(lossy):
    broker = FakeBroker({"t": 1})
    try:
        for number in range(3):
            broker.append("t", 0, batch_of(b"%d" % number))

        def diverging(request):
            answer = answer_for()(request)
            (data,) = answer.responses[0].partitions
            data.diverging_epoch = EpochEndOffset(epoch=0, end_offset=0)
            return answer

        broker.answer_with(ApiKey.FETCH, diverging)
        options = parse_source_options(
            {
                "kafka.bootstrap.servers": str(broker.address),
                "subscribe": "t",
                "failOnDataLoss": lossy,
            },
            streaming=False,
        )
        range_ = OffsetRange(TopicPartition("t", 0), 1, 3)
        rows = [
            row for batch in read_range(range_, options) for row in batch.to_pylist()
        ]
        assert [row["value"] for row in rows] == [b"1", b"2"]
    finally:
        broker.close()

"""DescribeProducers: the producers of a partition and their transactions."""

import pytest

from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.describe_producers import (
    DescribeProducersRequest,
    DescribeProducersResponse,
    TopicRequest,
)
from mpbroker.protocol.records.control_record import (
    EndTransactionMarker,
    build_end_transaction_marker,
)
from mpbroker.server.handlers.describe_producers import handle_describe_producers
from tests.server.contexts import context, fake_logs
from tests.storage.batches import batch, validated
from tests.storage.conftest import open_log, table
from tests.support.metadata import start

__all__ = ["open_log", "table"]  # fixtures


@pytest.fixture
def describe(tmp_path, open_log):
    """Ask about partitions of "there", which has two, both of them this log."""
    registry = start(tmp_path)
    registry.create_topic("there", 2)
    log = open_log()

    def ask(*partitions, topic="there"):
        request = DescribeProducersRequest(
            topics=[TopicRequest(name=topic, partition_indexes=list(partitions))]
        )
        request = DescribeProducersRequest.decode(0, request.encode(0))
        answer = handle_describe_producers(request, ask.context)
        (row,) = DescribeProducersResponse.decode(0, answer.encode(0)).topics
        assert row.name == topic
        return row.partitions

    ask.log = log
    ask.context = context(registry, logs=fake_logs(log=lambda *_: log))
    return ask


def fields(partition):
    assert (partition.error_code, partition.error_message) == (0, None)
    return [
        (
            row.producer_id,
            row.producer_epoch,
            row.last_sequence,
            row.last_timestamp,
            row.coordinator_epoch,
            row.current_txn_start_offset,
        )
        for row in partition.active_producers
    ]


def test_a_partition_without_records_has_no_producers(describe):
    (partition,) = describe(1)
    assert partition.partition_index == 1
    assert fields(partition) == []


def test_producers_and_their_open_transactions_are_described(describe):
    log = describe.log
    log.append(batch(b"a", b"b", producer=(7, 2, 0), timestamp=5_000), now_ms=1)
    mine = batch(b"c", producer=(8, 1, 4), timestamp=6_000, transactional=True)
    log.append(mine, now_ms=1)
    (partition,) = describe(0)
    assert fields(partition) == [(7, 2, 1, 5_001, -1, -1), (8, 1, 4, 6_000, -1, 2)]
    marker = build_end_transaction_marker(8, 1, EndTransactionMarker(False, 3), 7_000)
    log.append(validated(marker), now_ms=1)
    (partition,) = describe(0)
    assert fields(partition)[1] == (8, 1, 4, 7_000, 3, -1)


def test_a_missing_partition_has_an_error_beside_the_others(describe):
    assert [row.error_code for row in describe(0, 2, -1, 1)] == [
        0,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        0,
    ]
    (row,) = describe(0, topic="missing")
    assert row.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert "missing" in row.error_message


def test_a_long_name_is_not_repeated_for_each_partition(describe):
    """Or a request of 52 KB had an answer of 164 MB."""
    for partition in describe(*range(5000), topic="y" * 32_767):
        assert partition.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        assert len(partition.error_message) < 300


def test_a_partition_that_is_named_again_is_described_once(describe):
    """Or a request of 1 MB made an answer of gigabytes."""
    assert [row.partition_index for row in describe(0, 1, 0, 1, 1)] == [0, 1]
    request = DescribeProducersRequest(
        topics=[TopicRequest(name="none", partition_indexes=[0])] * 3
    )
    answer = handle_describe_producers(request, describe.context)
    (row,) = answer.topics
    assert [each.partition_index for each in row.partitions] == [0]

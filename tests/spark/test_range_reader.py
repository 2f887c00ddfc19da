"""A range of offsets, read from a broker that also misbehaves."""

from __future__ import annotations

import pytest

from mpbroker.client.cluster import TopicPartition
from mpbroker.client.errors import BrokerUnavailableError
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.messages.fetch import EpochEndOffset
from mpbroker.protocol.records.record_batch import RecordBatchBuilder
from mpbroker.spark import partition_reader
from mpbroker.spark.offsets import DataLossError, OffsetRange
from mpbroker.spark.options import parse_source_options
from mpbroker.spark.partition_reader import read_range
from tests.client.fake_broker import CLOSE, FakeBroker
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


class FakeClock:
    """Stands for module time: stands still but for `sleep`, which it writes down."""

    def __init__(self):
        self.now = 0.0
        self.pauses = []

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    found = FakeClock()
    monkeypatch.setattr(partition_reader, "time", found)
    return found


@pytest.fixture
def fake_broker():
    broker = FakeBroker({"t": 1})
    yield broker
    broker.close()


def read(broker, start, end, **more):
    given = {"kafka.bootstrap.servers": str(broker.address), "subscribe": "t", **more}
    options = parse_source_options(given, streaming=False)
    return read_range(OffsetRange(TopicPartition("t", 0), start, end), options)


def test_a_query_may_take_longer_with_rows_than_a_broker_may_be_silent(
    fake_broker, clock
):
    for _ in range(3):
        fake_broker.append("t", 0, batch_of(*[b"v"] * 10_000))
    rows = 0
    for batch in read(fake_broker, 0, 30_000):
        rows += batch.num_rows
        clock.now += 1_000
    assert rows == 30_000
    assert clock.pauses == []


def test_a_broker_that_hangs_up_is_left_alone_for_longer_each_time(fake_broker, clock):
    fake_broker.append("t", 0, batch_of(b"v"))
    fake_broker.answer_with(ApiKey.FETCH, *[lambda _: CLOSE] * 1_000)
    with pytest.raises(BrokerUnavailableError, match="no record from offset 0 on in 1"):
        list(read(fake_broker, 0, 1))
    assert clock.pauses[:6] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0]
    assert set(clock.pauses[6:]) == {2.0}
    assert 120 < sum(clock.pauses) <= 122
    # One connection after each pause, and no others.
    assert len(fake_broker.seen(ApiKey.FETCH)) == len(clock.pauses) + 1


def test_a_broker_that_goes_on_is_asked_again_at_once(fake_broker, clock):
    for _ in range(3):
        fake_broker.append("t", 0, batch_of(b"v"))

    def one(request):
        """Answer with the batch at the offset, and hang up at the next request."""
        offset = request.topics[0].partitions[0].fetch_offset
        return answer_for(records=fake_broker.logs["t", 0][offset])(request)

    for _ in range(3):
        fake_broker.answer_with(ApiKey.FETCH, one, lambda _: CLOSE, lambda _: CLOSE)
    (batch,) = read(fake_broker, 0, 3)
    assert batch.column("offset").to_pylist() == [0, 1, 2]
    assert set(clock.pauses) == {0.1, 0.2}


def test_a_partition_that_is_gone_is_data_loss_or_skipped(fake_broker, clock, caplog):
    for topics in ({}, {"t": 0}):
        fake_broker.topics = topics
        message = (
            "t-0: offsets 2 to 6 cannot be read: the topic or the partition does not"
            " exist any more"
        )
        with pytest.raises(DataLossError, match=f"{message}.*failOnDataLoss=false"):
            list(read(fake_broker, 2, 7))
        caplog.clear()
        assert list(read(fake_broker, 2, 7, failOnDataLoss="false")) == []
        assert caplog.messages == [f"{message}; 5 offsets are skipped"]
        assert clock.pauses == [0.1, 0.2, 0.4, 0.8, 1.6] * 2
        clock.pauses.clear()


def test_a_topic_that_was_made_again_since_the_plan_is_data_loss_or_skipped(
    fake_broker, clock, caplog
):
    fake_broker.append("t", 0, batch_of(*[b"v"] * 9))
    fake_broker.topic_ids["t"] = bytes(range(16))
    partition = TopicPartition("t", 0)

    def rows(topic_id, lossy):
        given = {"kafka.bootstrap.servers": str(fake_broker.address), "subscribe": "t"}
        options = parse_source_options(
            given | {"failOnDataLoss": lossy}, streaming=False
        )
        planned = OffsetRange(partition, 2, 7, topic_id)
        return sum(batch.num_rows for batch in read_range(planned, options))

    for known in (bytes(range(16)).hex(), ""):  # of old brokers none is known
        assert rows(known, "true") == 5
    old = bytes(16 * [5]).hex()
    message = "t-0: offsets 2 to 6 cannot be read: the topic was deleted and made again"
    with pytest.raises(DataLossError, match=f"{message}.*failOnDataLoss=false"):
        rows(old, "true")
    caplog.clear()
    assert rows(old, "false") == 0
    assert caplog.messages == [f"{message}; 5 offsets are skipped"]
    assert clock.pauses == []


@pytest.mark.parametrize("away", ["topic", "partition", "leader"])
@pytest.mark.parametrize("lossy", ["true", "false"])
def test_metadata_that_lack_a_partition_for_a_moment_are_no_loss(
    fake_broker, clock, away, lossy
):
    fake_broker.append("t", 0, batch_of(b"v"))

    def without(_):
        if away == "leader":
            fake_broker.leaderless = {("t", 0)}
        else:
            fake_broker.topics = {} if away == "topic" else {"t": 0}

    def again(_):
        fake_broker.topics, fake_broker.leaderless = {"t": 1}, set()

    fake_broker.answer_with(ApiKey.METADATA, *[without] * 3, again)
    (batch,) = read(fake_broker, 0, 1, failOnDataLoss=lossy)
    assert batch.column("value").to_pylist() == [b"v"]
    assert clock.pauses == [0.1, 0.2, 0.4]


def test_a_partition_without_a_leader_is_named_after_the_patience(fake_broker, clock):
    fake_broker.leaderless = {("t", 0)}
    with pytest.raises(BrokerUnavailableError, match=r"offset 0 on.*t-0 has no leader"):
        list(read(fake_broker, 0, 1, failOnDataLoss="false"))


def test_batches_of_few_records_make_rows_together_and_large_ones_by_themselves(
    fake_broker,
):
    values = [b"%d" % number for number in range(3_000)]
    for value in values:
        fake_broker.append("t", 0, batch_of(value))
    (batch,) = read(fake_broker, 0, 3_000)
    assert batch.column("value").to_pylist() == values
    for _ in range(4):  # of bytes that a task need not hold all at once
        fake_broker.append("t", 0, batch_of(b"x" * (5 << 20)))
    sizes = [batch.num_rows for batch in read(fake_broker, 3_000, 3_004)]
    assert sizes == [2, 2]


def test_rows_of_another_kind_of_timestamp_say_so(fake_broker):
    for kind in (0, 1, 1, 0):
        builder = RecordBatchBuilder(timestamp_type=kind)
        builder.append(1_000, None, b"v", [])
        fake_broker.append("t", 0, builder.build())
    found = [
        (row["offset"], row["timestampType"])
        for batch in read(fake_broker, 0, 4)
        for row in batch.to_pylist()
    ]
    assert found == [(0, 0), (1, 1), (2, 1), (3, 0)]


def test_headers_are_null_where_a_record_has_none(fake_broker):
    builder = RecordBatchBuilder()
    expected = []
    for number in range(20):
        headers = [("h", b"%d" % number), ("n", None)] if number % 3 == 0 else []
        builder.append(1000, None, b"v", headers)
        expected.append([{"key": k, "value": v} for k, v in headers] or None)
    fake_broker.append("t", 0, builder.build())
    for end in (20, 10):
        (batch,) = read(fake_broker, 0, end, includeHeaders="true")
        batch.validate(full=True)
        assert batch.column("headers").to_pylist() == expected[:end]
    (batch,) = read(fake_broker, 1, 3, includeHeaders="true")
    assert batch.column("headers").to_pylist() == [None, None]

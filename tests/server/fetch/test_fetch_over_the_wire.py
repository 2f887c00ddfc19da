"""Fetches as a consumer sees them: waiting, sessions, and what an answer names."""

from __future__ import annotations

import time

import pytest

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.fetch import (
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    ForgottenTopic,
)
from mpbroker.protocol.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)
from mpbroker.protocol.records.record_batch import RecordBatchBuilder
from tests.broker.load import ask, create_topic, dial, frame, receive_frame

VERSION = 12
NOW = time.time_ns() // 1_000_000  # what is old is deleted while it is looked at


class Consumer:
    """One connection that fetches."""

    def __init__(self, broker, topic):
        self.broker, self.topic = broker, topic
        self.sock = dial(broker)

    def body(self, offsets, *, session=0, epoch=-1, forget=(), **options):
        partitions = [
            FetchPartition(
                partition=index, fetch_offset=offset, partition_max_bytes=1 << 20
            )
            for index, offset in offsets.items()
        ]
        topics = [FetchTopic(topic=self.topic, partitions=partitions)]
        forgotten = [ForgottenTopic(topic=self.topic, partitions=list(forget))]
        options = {"max_wait_ms": 0, "min_bytes": 1, "max_bytes": 1 << 24} | options
        return FetchRequest(
            session_id=session,
            session_epoch=epoch,
            topics=topics if partitions else [],
            forgotten_topics_data=forgotten if forget else [],
            **options,
        ).encode(VERSION)

    def fetch(self, offsets, **options):
        body = self.body(offsets, **options)
        answer = ask(self.sock, ApiKey.FETCH, VERSION, body)
        return FetchResponse.decode(VERSION, bytes(answer))

    def produce(self, partition=0, count=1, size=10):
        builder = RecordBatchBuilder()
        for _ in range(count):
            builder.append(NOW, None, b"v" * size)
        data = PartitionProduceData(index=partition, records=bytes(builder.build()))
        topic = TopicProduceData(name=self.topic, partition_data=[data])
        request = ProduceRequest(acks=1, timeout_ms=1000, topic_data=[topic])
        with dial(self.broker) as sock:
            body = ask(sock, ApiKey.PRODUCE, 9, request.encode(9))
        (answer,) = ProduceResponse.decode(9, body).responses[0].partition_responses
        assert answer.error_code == 0


def named(response):
    """Partition -> (error, high watermark, bytes of records)."""
    return {
        data.partition_index: (
            data.error_code,
            data.high_watermark,
            len(data.records or b""),
        )
        for topic in response.responses
        for data in topic.partitions
    }


@pytest.fixture
def consumer(own_broker, topic_name):
    create_topic(own_broker, topic_name, 3)
    made = Consumer(own_broker, topic_name)
    yield made
    made.sock.close()


def test_without_a_session_every_partition_is_named(consumer):
    consumer.produce(1)
    found = named(consumer.fetch({0: 0, 1: 0, 2: 0}))
    assert {index: found[index][:2] for index in found} == {
        0: (0, 0),
        1: (0, 1),
        2: (0, 0),
    }
    assert found[1][2] > 0 and found[0][2] == 0


def test_a_fetch_waits_for_its_bytes_and_no_longer(consumer):
    body = consumer.body({0: 0, 1: 0}, max_wait_ms=25_000)
    consumer.sock.sendall(frame(ApiKey.FETCH, VERSION, body, 5))
    consumer.sock.settimeout(0.1)
    with pytest.raises(TimeoutError):
        consumer.sock.recv(1)
    consumer.sock.settimeout(20)  # less than it would wait by itself
    consumer.produce(1)
    response = FetchResponse.decode(VERSION, receive_frame(consumer.sock)[5:])
    assert named(response)[1][1:2] == (1,)


def test_a_fetch_that_asks_for_more_than_comes_is_answered_at_its_deadline(consumer):
    consumer.produce(0)
    found = named(consumer.fetch({0: 0}, min_bytes=1 << 20, max_wait_ms=150))
    assert found[0][2] > 0


def test_the_first_batch_is_given_whole_however_little_was_asked_for(consumer):
    consumer.produce(0, size=50_000)
    found = named(consumer.fetch({0: 0, 1: 0}, max_bytes=1))
    assert found[0][2] > 50_000


def test_large_answers_come_from_the_file_and_small_ones_from_memory(consumer):
    for size in (10, 40_000, 10, 900_000):
        consumer.produce(0, size=size)
    found = named(consumer.fetch({0: 0}))
    assert found[0][1] == 4 and found[0][2] > 940_000


@pytest.mark.parametrize("offset", [-1, 5, 2**62])
def test_an_offset_that_is_not_there_is_told_at_once(consumer, offset):
    found = named(consumer.fetch({0: offset}, max_wait_ms=25_000))
    assert found[0][0] == ErrorCode.OFFSET_OUT_OF_RANGE


def test_a_partition_that_does_not_exist_is_told_at_once_if_there_is_no_other(consumer):
    found = named(consumer.fetch({77: 0}, max_wait_ms=25_000))
    assert found[77][0] == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_a_partition_that_does_not_exist_ends_no_wait_for_the_others(consumer):
    body = consumer.body({0: 0, 77: 0}, max_wait_ms=25_000)
    consumer.sock.sendall(frame(ApiKey.FETCH, VERSION, body, 5))
    consumer.sock.settimeout(0.1)
    with pytest.raises(TimeoutError):
        consumer.sock.recv(1)
    consumer.sock.settimeout(20)  # less than it would wait by itself
    consumer.produce(0)
    found = named(FetchResponse.decode(VERSION, receive_frame(consumer.sock)[5:]))
    assert found[0][1] == 1
    assert found[77][0] == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


# -- sessions (KIP-227) -------------------------------------------------------------


@pytest.fixture
def session(consumer):
    consumer.produce(0)
    response = consumer.fetch({0: 1, 1: 0, 2: 0}, epoch=0)
    assert response.session_id > 0
    assert set(named(response)) == {0, 1, 2}
    return response.session_id


def test_a_session_names_only_what_has_changed(consumer, session):
    assert named(consumer.fetch({}, session=session, epoch=1)) == {}
    consumer.produce(2)
    response = consumer.fetch({}, session=session, epoch=2)
    assert response.session_id == session
    assert list(named(response)) == [2]
    # Its offset has not been moved: the records are given again.
    assert list(named(consumer.fetch({}, session=session, epoch=3))) == [2]
    assert named(consumer.fetch({2: 1}, session=session, epoch=4)) == {}


def test_a_session_waits_for_any_of_its_partitions(consumer, session):
    body = consumer.body({}, session=session, epoch=1, max_wait_ms=25_000)
    consumer.sock.sendall(frame(ApiKey.FETCH, VERSION, body, 5))
    consumer.produce(1)
    consumer.sock.settimeout(20)
    response = FetchResponse.decode(VERSION, receive_frame(consumer.sock)[5:])
    assert list(named(response)) == [1]


def test_what_a_session_has_forgotten_is_not_named_again(consumer, session):
    consumer.fetch({}, session=session, epoch=1, forget=[1, 2])
    for partition in (0, 1, 2):
        consumer.produce(partition)
    assert list(named(consumer.fetch({}, session=session, epoch=2))) == [0]


@pytest.mark.parametrize("epoch", [2, 3, 99])
def test_a_session_with_a_wrong_epoch_is_told_so(consumer, session, epoch):
    response = consumer.fetch({}, session=session, epoch=epoch)
    assert response.error_code == ErrorCode.INVALID_FETCH_SESSION_EPOCH
    assert response.session_id == 0 and not response.responses


@pytest.mark.parametrize("unknown", [0, 1, 2**31 - 1])
def test_an_unknown_session_is_told_so(consumer, unknown):
    response = consumer.fetch({}, session=unknown, epoch=1)
    assert response.error_code == ErrorCode.FETCH_SESSION_ID_NOT_FOUND


def test_a_session_that_is_ended_is_gone_and_its_last_fetch_is_full(consumer, session):
    response = consumer.fetch({0: 0}, session=session, epoch=-1)
    assert response.session_id == 0
    assert list(named(response)) == [0]
    response = consumer.fetch({}, session=session, epoch=1)
    assert response.error_code == ErrorCode.FETCH_SESSION_ID_NOT_FOUND


def test_a_new_session_replaces_the_one_it_names(consumer, session):
    response = consumer.fetch({0: 0}, session=session, epoch=0)
    assert response.session_id not in (0, session)
    gone = consumer.fetch({}, session=session, epoch=1)
    assert gone.error_code == ErrorCode.FETCH_SESSION_ID_NOT_FOUND

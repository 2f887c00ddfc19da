"""Quotas as clients see them: a throttle time in the answer, and a muted connection.

No times are measured: a throttle shows in ``throttle_time_ms`` and in the order of what
happens, and a rate in how much of it is counted.
"""

from __future__ import annotations

import time

import pytest

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.headers import encode_request_header
from mpbroker.protocol.messages import alter_client_quotas as alter
from mpbroker.protocol.messages import create_partitions as partitions
from mpbroker.protocol.messages import create_topics as topics
from mpbroker.protocol.messages import delete_topics as deletion
from mpbroker.protocol.messages.api_versions import ApiVersionsResponse
from mpbroker.protocol.messages.fetch import (
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
)
from mpbroker.protocol.messages.list_groups import (
    ListGroupsRequest,
    ListGroupsResponse,
)
from mpbroker.protocol.messages.metadata import (
    MetadataRequest,
    MetadataRequestTopic,
    MetadataResponse,
)
from mpbroker.protocol.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)
from mpbroker.protocol.records.record_batch import RecordBatchBuilder
from tests.broker.load import create_topic, dial, receive_frame

PRODUCE, FETCH, METADATA = ApiKey.PRODUCE, ApiKey.FETCH, ApiKey.METADATA


def batch(size):
    builder = RecordBatchBuilder()
    # Of now: what is old is deleted while it is looked at.
    builder.append(time.time_ns() // 1_000_000, None, b"x" * size)
    return bytes(builder.build())


class Client:
    """One connection of a client id."""

    def __init__(self, broker, name):
        self.name = name
        self.sock = dial(broker)
        self.correlation_id = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.sock.close()

    def send(self, key, version, body):
        self.correlation_id += 1
        header = encode_request_header(key, version, self.correlation_id, self.name)
        self.send_frame(header + body)

    def send_frame(self, data):
        self.sock.sendall(len(data).to_bytes(4, "big") + data)

    def send_produce(self, topic, size, acks=1):
        header = encode_request_header(PRODUCE, 9, 5, self.name)
        data = PartitionProduceData(index=0, records=batch(size))
        message = ProduceRequest(
            acks=acks,
            timeout_ms=1000,
            topic_data=[TopicProduceData(name=topic, partition_data=[data])],
        )
        self.send_frame(header + message.encode(9))

    def receive(self, *, flexible=True):
        answer = receive_frame(self.sock)
        return memoryview(answer)[5 if flexible else 4 :]

    def ask(self, response, version, body):
        self.send(response.api_key, version, body)
        key = response.api_key
        return response.decode(version, self.receive(flexible=key != 18))

    def produce(self, topic, size=1000):
        self.send_produce(topic, size)
        return ProduceResponse.decode(9, self.receive()).throttle_time_ms

    def metadata(self):
        body = MetadataRequest(topics=[]).encode(9)
        return self.ask(MetadataResponse, 9, body).throttle_time_ms

    def fetch(self, topic, *, session=0, epoch=-1, max_bytes=1 << 24):
        partition = FetchPartition(
            partition=0, fetch_offset=0, partition_max_bytes=1 << 20
        )
        body = FetchRequest(
            session_id=session,
            session_epoch=epoch,
            min_bytes=1,
            max_wait_ms=0,
            max_bytes=max_bytes,
            topics=[FetchTopic(topic=topic, partitions=[partition])],
        ).encode(12)
        return self.ask(FetchResponse, 12, body)


def set_quota(broker, value, client, key="producer_byte_rate"):
    entity = [alter.EntityData(entity_type="client-id", entity_name=client)]
    operation = alter.OpData(key=key, value=value or 0.0, remove=value is None)
    entry = alter.EntryData(entity=entity, ops=[operation])
    body = alter.AlterClientQuotasRequest(entries=[entry], validate_only=False)
    with Client(broker, "admin") as admin:
        answer = admin.ask(alter.AlterClientQuotasResponse, 1, body.encode(1))
    assert [each.error_code for each in answer.entries] == [0]


@pytest.fixture
def client(own_broker, topic_name):
    with Client(own_broker, topic_name) as made:
        yield made


@pytest.fixture
def topic(own_broker, topic_name):
    create_topic(own_broker, topic_name)
    return topic_name


def test_a_producer_above_its_quota_gets_a_throttle_time_and_is_muted(
    own_broker, client, topic
):
    set_quota(own_broker, 2000.0, client.name)
    # 20,000 bytes are ten seconds' worth; what comes then is to be waited for.
    told = [client.produce(topic, 6000) for _ in range(4)]
    assert told[:3] == [0, 0, 0]
    assert told[3] > 0
    # A connection of the same client is counted with it, and one of another is not.
    with Client(own_broker, client.name) as same:
        assert same.produce(topic, 6000) > told[3]
    with Client(own_broker, "another") as other:
        assert other.produce(topic, 60_000) == 0
    set_quota(own_broker, None, client.name)


def test_a_muted_client_is_read_after_others(own_broker, client, topic):
    set_quota(own_broker, 20_000.0, client.name)
    assert client.produce(topic, 600_000) > 10_000
    client.send(METADATA, 9, MetadataRequest(topics=[]).encode(9))
    with Client(own_broker, "another") as other:
        for _ in range(50):
            assert other.metadata() == 0
    client.sock.setblocking(False)
    with pytest.raises(BlockingIOError):
        client.sock.recv(1)  # some 20 s are still to be waited
    set_quota(own_broker, None, client.name)


def test_a_produce_with_acks_0_mutes_as_well(own_broker, client, topic):
    set_quota(own_broker, 20_000.0, client.name)
    client.send_produce(topic, 600_000, acks=0)
    client.send(METADATA, 9, MetadataRequest(topics=[]).encode(9))
    with Client(own_broker, "another") as other:
        for _ in range(50):
            assert other.metadata() == 0
    client.sock.setblocking(False)
    with pytest.raises(BlockingIOError):
        client.sock.recv(1)
    set_quota(own_broker, None, client.name)


def test_a_fetch_over_the_quota_gets_nothing_and_its_session_goes_on(
    own_broker, client, topic
):
    with Client(own_broker, "another") as other:
        for _ in range(3):
            other.produce(topic, 3000)
    set_quota(own_broker, 700.0, client.name, "consumer_byte_rate")
    first = client.fetch(topic, epoch=0)
    assert first.throttle_time_ms == 0
    assert first.session_id
    got = [data.records for data in first.responses[0].partitions]
    assert 3000 < sum(map(len, got)) <= 7000  # no more than its ten seconds
    second = client.fetch(topic, session=first.session_id, epoch=1)
    assert second.throttle_time_ms > 0
    assert (second.error_code, second.session_id) == (0, first.session_id)
    assert second.responses == []
    # A full fetch is told so too, and begins no session.
    with Client(own_broker, client.name) as same:
        full = same.fetch(topic, epoch=0)
    assert full.throttle_time_ms > 0
    assert (full.error_code, full.session_id, full.responses) == (0, 0, [])
    set_quota(own_broker, None, client.name, "consumer_byte_rate")
    with Client(own_broker, client.name) as same:  # this one is still muted
        third = same.fetch(topic, session=first.session_id, epoch=2)
    assert (third.throttle_time_ms, third.error_code) == (0, 0)


def test_time_is_limited_for_any_request(own_broker, client):
    set_quota(own_broker, 0.0001, client.name, "request_percentage")
    throttles = [client.metadata(), client.metadata()]
    versions = client.ask(ApiVersionsResponse, 2, b"")
    throttles.append(versions.throttle_time_ms)
    # And what the coordinator does.
    body = ListGroupsRequest(states_filter=[]).encode(4)
    throttles.append(client.ask(ListGroupsResponse, 4, body).throttle_time_ms)
    assert all(0 < throttle <= 1000 for throttle in throttles)
    assert versions.api_keys
    set_quota(own_broker, None, client.name, "request_percentage")
    assert client.metadata() == 0


def test_changes_of_topics_are_refused_to_clients_that_know_the_error(
    own_broker, topic_name
):
    set_quota(own_broker, 1.0, topic_name, "controller_mutation_rate")
    refused = ErrorCode.THROTTLING_QUOTA_EXCEEDED

    def ask(response, version, body):
        with Client(own_broker, topic_name) as client:  # those before it are muted
            return client.ask(response, version, body)

    def create(number, count, version=7):
        topic = topics.CreatableTopic(
            name=f"{topic_name}-{number}", num_partitions=count, replication_factor=1
        )
        request = topics.CreateTopicsRequest(topics=[topic], timeout_ms=1000)
        answer = ask(topics.CreateTopicsResponse, version, request.encode(version))
        return answer.topics[0].error_code, answer.throttle_time_ms

    # A bucket of eleven, which may be overdrawn once; what is wrong costs nothing.
    assert create("not a name", 5)[0] == ErrorCode.INVALID_TOPIC_EXCEPTION
    assert create(0, 60) == (0, 0)
    code, throttle_ms = create(1, 1)
    assert code == refused
    assert 0 < throttle_ms <= 60_000
    name = f"{topic_name}-0"
    grown = partitions.CreatePartitionsTopic(name=name, count=61, assignments=None)
    request = partitions.CreatePartitionsRequest(topics=[grown], timeout_ms=1000)
    answer = ask(partitions.CreatePartitionsResponse, 3, request.encode(3))
    assert (answer.results[0].error_code, answer.throttle_time_ms > 0) == (
        refused,
        True,
    )
    gone = deletion.DeleteTopicState(name=name)
    request = deletion.DeleteTopicsRequest(topics=[gone], timeout_ms=1000)
    answer = ask(deletion.DeleteTopicsResponse, 6, request.encode(6))
    assert (answer.responses[0].error_code, answer.throttle_time_ms > 0) == (
        refused,
        True,
    )
    code, throttle_ms = create(3, 5, version=5)
    assert code == 0  # before version 6 it is done, and muted for
    assert throttle_ms > 0
    # A topic that is created because its name was asked for.
    asked = MetadataRequest(topics=[MetadataRequestTopic(name=f"{topic_name}-asked")])
    answer = ask(MetadataResponse, 9, asked.encode(9))
    assert answer.topics[0].error_code == ErrorCode.LEADER_NOT_AVAILABLE
    assert answer.throttle_time_ms > 0
    set_quota(own_broker, None, topic_name, "controller_mutation_rate")

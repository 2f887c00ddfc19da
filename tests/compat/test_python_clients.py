"""confluent-kafka, kafka-python and aiokafka: one contract, each of them."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.compat.adapters import Adapter, Outgoing
from tests.compat.adapters.adapter import CODECS
from tests.compat.records import T0, as_messages, some_records
from tests.support.children import wait_until

MakeTopic = Callable[..., str]


def wait_for_partitions(client: Adapter, topic: str, count: int | None) -> None:
    """Wait until a topic has so many; None: until it is gone.

    mpbroker answers a change when everybody sees it, Apache Kafka when its controller
    has it: its broker, and so the next answer, may be a moment behind.
    """
    wait_until(lambda: client.topics().get(topic) == count)


@pytest.mark.parametrize("codec", CODECS)
def test_records_come_back_as_they_were_published(
    client: Adapter, make_topic: MakeTopic, codec: str
) -> None:
    topic = make_topic()
    records = some_records(50)
    assert client.produce(topic, records, codec=codec) == list(range(50))
    assert client.consume(topic, 0, 0, 50) == as_messages(records)


@pytest.mark.parametrize("acks", [0, 1, "all"])
def test_every_level_of_acks_appends_each_record_once(
    client: Adapter, make_topic: MakeTopic, acks: int | str
) -> None:
    topic = make_topic()
    records = some_records(20)
    offsets = client.produce(topic, records, acks=acks)
    assert offsets == ([-1] * 20 if acks == 0 else list(range(20)))
    # With acks=0 the consumer is what waits for the append.
    assert client.consume(topic, 0, 0, 20) == as_messages(records)
    assert client.offsets(topic, 0) == (0, 20)


@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_an_idempotent_producer_is_given_an_id_and_appends_once(
    client: Adapter, make_topic: MakeTopic, codec: str
) -> None:
    topic = make_topic(2)
    records = [*some_records(30, 0), *some_records(30, 1)]
    client.produce(topic, records, codec=codec, idempotent=True)
    for partition in (0, 1):
        expected = as_messages([r for r in records if r.partition == partition])
        assert client.consume(topic, partition, 0, 30) == expected
        assert client.offsets(topic, partition) == (0, 30)


def test_a_consumer_starts_at_the_offset_it_asks_for(
    client: Adapter, make_topic: MakeTopic
) -> None:
    topic = make_topic()
    records = some_records(40)
    client.produce(topic, records, codec="gzip")
    assert client.consume(topic, 0, 27, 13) == as_messages(records)[27:]


def test_a_consumer_at_the_end_gets_what_is_published_later(
    client: Adapter, make_topic: MakeTopic
) -> None:
    topic = make_topic()
    client.produce(topic, some_records(3))
    later = [Outgoing(b"later", timestamp_ms=T0)]
    client.produce(topic, later)
    assert client.consume(topic, 0, 3, 1) == as_messages(later, 3)


def test_partitions_do_not_mix(client: Adapter, make_topic: MakeTopic) -> None:
    topic = make_topic(3)
    records = [r for i in range(3) for r in some_records(10 + i, partition=i)]
    client.produce(topic, records)
    for partition in range(3):
        mine = [r for r in records if r.partition == partition]
        assert client.consume(topic, partition, 0, len(mine)) == as_messages(mine)


def test_offsets_are_found_by_time(client: Adapter, make_topic: MakeTopic) -> None:
    topic = make_topic()
    records = [Outgoing(b"x", timestamp_ms=T0 + 10 * i) for i in range(20)]
    client.produce(topic, records)
    assert client.offset_for_time(topic, 0, T0) == 0
    assert client.offset_for_time(topic, 0, T0 + 70) == 7
    assert client.offset_for_time(topic, 0, T0 + 71) == 8
    assert client.offset_for_time(topic, 0, T0 + 10_000) is None


def test_a_time_inside_a_compressed_batch_is_found_exactly(
    client: Adapter, make_topic: MakeTopic
) -> None:
    topic = make_topic()
    # Published out of the order of their times, as late events are.
    times = [T0 + 5, T0 + 50, T0 + 1, T0 + 40, T0 + 60]
    client.produce(topic, [Outgoing(b"x", timestamp_ms=t) for t in times], codec="zstd")
    assert client.offset_for_time(topic, 0, T0 + 6) == 1
    assert client.offset_for_time(topic, 0, T0 + 51) == 4


def test_the_broker_stamps_records_where_the_topic_says_so(
    client: Adapter, make_topic: MakeTopic
) -> None:
    topic = make_topic(message_timestamp_type="LogAppendTime")
    before = int(time.time() * 1000)
    client.produce(topic, some_records(5), codec="lz4")
    after = int(time.time() * 1000)
    messages = client.consume(topic, 0, 0, 5)
    assert len(messages) == 5
    assert all(before <= m.timestamp_ms <= after for m in messages)


def test_topics_are_created_listed_grown_and_deleted(
    client: Adapter, topic_name: str
) -> None:
    client.create_topic(topic_name, 2)
    wait_for_partitions(client, topic_name, 2)
    client.create_partitions(topic_name, 5)
    wait_for_partitions(client, topic_name, 5)
    client.produce(topic_name, some_records(3, partition=4))
    assert client.offsets(topic_name, 4) == (0, 3)
    client.delete_topic(topic_name)
    wait_for_partitions(client, topic_name, None)


def test_a_topic_made_again_under_the_same_name_is_empty(
    client: Adapter, topic_name: str
) -> None:
    client.create_topic(topic_name, 1)
    wait_for_partitions(client, topic_name, 1)
    client.produce(topic_name, some_records(3))
    client.delete_topic(topic_name)
    wait_for_partitions(client, topic_name, None)
    client.create_topic(topic_name, 1)
    wait_for_partitions(client, topic_name, 1)
    assert client.offsets(topic_name, 0) == (0, 0)
    client.produce(topic_name, some_records(2))
    assert client.consume(topic_name, 0, 0, 2) == as_messages(some_records(2))
    client.delete_topic(topic_name)


def test_a_topic_that_exists_is_not_created_again(
    client: Adapter, make_topic: MakeTopic
) -> None:
    topic = make_topic()
    with pytest.raises(Exception, match=r"(?i)exists|error code 36"):
        client.create_topic(topic, 1)


def test_a_topic_without_partitions_is_refused(
    client: Adapter, topic_name: str
) -> None:
    with pytest.raises(Exception, match=r"(?i)partition|error code 37"):
        client.create_topic(topic_name, 0)
    assert topic_name not in client.topics()


def test_configurations_are_set_described_and_altered(
    client: Adapter, topic_name: str
) -> None:
    client.create_topic(
        topic_name, 1, {"retention.ms": "3600000", "cleanup.policy": "compact"}
    )
    wait_for_partitions(client, topic_name, 1)
    config = client.topic_config(topic_name)
    assert config["retention.ms"] == "3600000"
    assert config["cleanup.policy"] == "compact"
    assert config["compression.type"] == "producer"  # a default
    client.alter_topic_config(topic_name, {"retention.ms": "7200000"})
    wait_until(lambda: client.topic_config(topic_name)["retention.ms"] == "7200000")
    client.delete_topic(topic_name)


def test_deleted_records_are_gone_and_the_rest_stays(
    client: Adapter, make_topic: MakeTopic
) -> None:
    topic = make_topic()
    records = some_records(10)
    client.produce(topic, records)
    assert client.delete_records(topic, 0, 6) == 6
    assert client.offsets(topic, 0) == (6, 10)
    assert client.consume(topic, 0, 6, 4) == as_messages(records)[6:]


def test_offsets_of_an_empty_partition_are_zero(
    client: Adapter, make_topic: MakeTopic
) -> None:
    topic = make_topic()
    assert client.offsets(topic, 0) == (0, 0)
    assert client.offset_for_time(topic, 0, 0) is None


def test_a_megabyte_comes_back(client: Adapter, make_topic: MakeTopic) -> None:
    topic = make_topic(max_message_bytes="2000000")
    value = bytes(range(256)) * 4096
    record = Outgoing(value, key=b"k", timestamp_ms=T0)
    client.produce(topic, [record], max_request_bytes=2_000_000)
    assert client.consume(topic, 0, 0, 1) == as_messages([record])


def test_twenty_megabytes_come_back_where_the_topic_allows_them(
    client: Adapter, make_topic: MakeTopic
) -> None:
    topic = make_topic(max_message_bytes="21000000")
    value = bytes(range(250)) * 80_000
    record = Outgoing(value, key=b"k", timestamp_ms=T0)
    client.produce(topic, [record], max_request_bytes=21_000_000)
    # More than any consumer asks for: the first batch comes whole all the same.
    assert client.consume(topic, 0, 0, 1) == as_messages([record])


def test_a_record_above_the_topics_limit_is_refused_and_not_appended(
    client: Adapter, make_topic: MakeTopic
) -> None:
    topic = make_topic(max_message_bytes="10000")
    with pytest.raises(Exception, match=r"(?i)too.?large|max_message_size"):
        client.produce(topic, [Outgoing(b"x" * 20_000)])
    assert client.offsets(topic, 0) == (0, 0)

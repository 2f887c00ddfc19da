"""What `Consumer` offers beside reading: deserializers, wakeup, commits, ends."""

from __future__ import annotations

import threading

import pytest

from mpbroker.client.admin.admin_client import AdminClient
from mpbroker.client.consumer.consumer import (
    Consumer,
    RebalancedError,
    RebalanceListener,
    RecordDeserializationError,
    WakeupError,
)
from mpbroker.client.errors import ConfigError
from mpbroker.producer import AbortableError, Producer
from tests.client.test_consumer import fill, make_consumer, topic
from tests.support.children import wait_until

__all__ = ["make_consumer", "topic"]  # fixtures


def read(consumer: Consumer, count: int) -> list[object]:
    found: list[object] = []
    while len(found) < count:
        for records in consumer.poll(1000).values():
            found += [record.value for record in records]
    return found


# -- deserializers ---------------------------------------------------------------------


def test_deserializers_make_values_of_bytes(make_consumer, topic):
    consumer = make_consumer(
        auto_offset_reset="earliest",
        key_deserializer=lambda topic, data: pytest.fail("keys are null"),
        value_deserializer="org.apache.kafka.common.serialization.StringDeserializer",
    )
    consumer.assign([(topic, 0)])
    assert read(consumer, 10) == [str(number) for number in range(10)]


def test_a_record_that_a_deserializer_refuses_can_be_skipped(make_consumer, topic):
    def deserialize(topic, data):
        if data == b"3":
            raise ValueError("three is bad")
        return int(data)

    consumer = make_consumer(
        config={"auto.offset.reset": "earliest", "value.deserializer": deserialize}
    )
    consumer.assign([(topic, 0)])
    assert read(consumer, 3) == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(RecordDeserializationError, match="three is bad") as caught:
            consumer.poll(5000)
    assert (caught.value.partition, caught.value.offset) == ((topic, 0), 3)
    consumer.seek(caught.value.partition, caught.value.offset + 1)
    assert read(consumer, 6) == [4, 5, 6, 7, 8, 9]


def test_a_deserializer_of_the_bytes_alone_is_told_its_arguments(make_consumer, topic):
    consumer = make_consumer(auto_offset_reset="earliest", value_deserializer=int)
    consumer.assign([(topic, 0)])
    # int("topic", b"0"): kafka-python's users have such a one.
    with pytest.raises(
        RecordDeserializationError, match="with the topic and the bytes"
    ):
        consumer.poll(5000)


def test_a_deserializer_that_does_not_exist_is_refused(bootstrap):
    with pytest.raises(ConfigError, match="StringDeserializer"):
        Consumer(bootstrap_servers=bootstrap, key_deserializer="com.example.Mine")


# -- ends ------------------------------------------------------------------------------


def test_the_ends_of_a_log_are_told(make_consumer, topic):
    consumer = make_consumer()
    assert consumer.beginning_offsets([(topic, 0)]) == {(topic, 0): 0}
    assert consumer.end_offsets([(topic, 0)]) == {(topic, 0): 10}


# -- wakeup ----------------------------------------------------------------------------


def test_wakeup_ends_a_poll_that_waits_and_loses_no_record(
    make_consumer, topic, bootstrap
):
    consumer = make_consumer(auto_offset_reset="earliest", fetch_max_wait_ms=60_000)
    consumer.assign([(topic, 0)])
    assert len(read(consumer, 10)) == 10
    for poll in (consumer.poll, consumer.poll_batches):
        waker = threading.Timer(0.2, consumer.wakeup)
        waker.start()
        with pytest.raises(WakeupError):
            poll(3_600_000)
        waker.join()
    fill(bootstrap, topic, range(10, 12))
    assert read(consumer, 2) == [b"10", b"11"]


def test_wakeup_before_a_poll_ends_that_one_only(make_consumer, topic):
    consumer = make_consumer()
    consumer.assign([(topic, 0)])
    consumer.wakeup()
    with pytest.raises(WakeupError):
        consumer.poll(3_600_000)
    assert consumer.poll(0) == {}


# -- commits ---------------------------------------------------------------------------


def test_async_commits_are_made_in_order_and_told(make_consumer, topic, topic_name):
    consumer = make_consumer(group_id=topic_name, enable_auto_commit=False)
    consumer.assign([(topic, 0)])
    told = []
    for offset in range(1, 6):
        consumer.commit_async(
            {(topic, 0): offset}, lambda offsets, error: told.append((offsets, error))
        )

    def all_told():
        consumer.poll(0)
        return len(told) == 5

    wait_until(all_told)
    assert told == [({(topic, 0): offset}, None) for offset in range(1, 6)]
    assert consumer.committed((topic, 0)) == 5


def test_a_commit_waits_for_those_begun_before_and_so_does_close(
    make_consumer, topic, topic_name
):
    consumer = make_consumer(group_id=topic_name, enable_auto_commit=False)
    consumer.assign([(topic, 0)])
    told = []
    consumer.commit_async({(topic, 0): 3}, lambda offsets, error: told.append(offsets))
    consumer.commit({(topic, 0): 2})
    assert told == [{(topic, 0): 3}]
    assert consumer.committed((topic, 0)) == 2
    consumer.commit_async({(topic, 0): 4}, lambda offsets, error: told.append(offsets))
    consumer.close()
    assert len(told) == 2
    again = make_consumer(group_id=topic_name)
    assert again.committed((topic, 0)) == 4


def test_an_async_commit_that_fails_tells_why(make_consumer, topic, topic_name, caplog):
    consumer = make_consumer(group_id=topic_name, enable_auto_commit=False)
    told = []
    missing = {("no.such.topic", 70_000): 1}
    consumer.commit_async(missing, lambda offsets, error: told.append(error))
    consumer.commit_async(missing)
    consumer.commit({})
    assert "UNKNOWN_TOPIC_OR_PARTITION" in str(told[0])
    assert "UNKNOWN_TOPIC_OR_PARTITION" in caplog.text


def test_a_member_commits_with_a_producers_transaction(
    make_consumer, topic, topic_name, bootstrap
):
    first = make_consumer(
        group_id=topic_name, auto_offset_reset="earliest", enable_auto_commit=False
    )
    first.subscribe([topic])
    assert len(read(first, 10)) == 10
    old = first.group_metadata()
    assert old.generation_id >= 1 and old.member_id
    with Producer(bootstrap_servers=bootstrap, transactional_id=topic_name) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        with pytest.warns(UserWarning, match=r"consumer.group_metadata\(\)") as warned:
            producer.send_offsets_to_transaction({}, topic_name)
        assert warned[0].filename == __file__
        producer.send_offsets_to_transaction({(topic, 0): 7}, old)
        producer.commit_transaction()
        # Kafka's markers follow the answer to the commit.
        wait_until(lambda: first.committed((topic, 0)) == 7)
        first.close()
        producer.begin_transaction()
        with pytest.raises(AbortableError):
            producer.send_offsets_to_transaction({(topic, 0): 9}, old)
        producer.abort_transaction()


# -- group.protocol=consumer -----------------------------------------------------------


@pytest.fixture
def make_member(bootstrap, topic_name):
    made = []

    def make(**settings):
        consumer = Consumer(
            bootstrap_servers=bootstrap,
            group_id=topic_name,
            group_protocol="consumer",
            auto_offset_reset="earliest",
            **settings,
        )
        made.append(consumer)
        return consumer

    yield make
    for consumer in made:
        consumer.close()


class Told(RebalanceListener):
    def __init__(self):
        self.said = []

    def on_partitions_assigned(self, partitions):
        self.said.append(("assigned", sorted(p.partition for p in partitions)))

    def on_partitions_revoked(self, partitions):
        self.said.append(("revoked", sorted(p.partition for p in partitions)))

    def on_partitions_lost(self, partitions):
        self.said.append(("lost", sorted(p.partition for p in partitions)))


def test_members_that_the_coordinator_assigns_share_partitions(
    make_member, bootstrap, topic_name
):
    with AdminClient(bootstrap_servers=bootstrap) as admin:
        admin.create_topic(topic_name, partitions=4, replication_factor=1)
    for partition in range(4):
        fill(bootstrap, topic_name, range(5), partition)
    told = Told()
    first = make_member()
    first.subscribe([topic_name], told)
    assert len(read(first, 20)) == 20
    assert told.said[0][0] == "assigned"
    assert len(first.assignment()) == 4
    first.commit()
    second = make_member()
    second.subscribe([topic_name])

    def shared():
        first.poll(50)
        second.poll(50)
        return len(first.assignment()) == len(second.assignment()) == 2

    wait_until(shared)
    assert {*first.assignment(), *second.assignment()} == {
        (topic_name, partition) for partition in range(4)
    }
    gone = {p for what, found in told.said if what == "revoked" for p in found}
    assert gone == {partition for _, partition in second.assignment()}
    # Both go on where the group has committed.
    for partition in range(4):
        fill(bootstrap, topic_name, range(5, 6), partition)
    assert read(first, 2) + read(second, 2) == [b"5"] * 4
    first.commit()
    second.commit()
    assert second.group_metadata().generation_id >= 1
    with AdminClient(bootstrap_servers=bootstrap) as admin:
        assert set(admin.list_group_offsets(topic_name).values()) == {6}
        assert [g.type.lower() for g in admin.list_groups() if g[0] == topic_name] == [
            "consumer"
        ]
    first.close()

    def alone():
        second.poll(50)
        return len(second.assignment()) == 4

    wait_until(alone)


def test_a_member_that_the_coordinator_has_forgotten_comes_back(
    make_member, topic, topic_name
):
    told = Told()
    member = make_member(enable_auto_commit=False)
    member.subscribe([topic], told)
    assert len(read(member, 10)) == 10
    # As after a long silence: it has left, and does not know.
    other = make_member()
    other._member.member_id = member._member.member_id
    other._member.generation = member._member.generation
    other._member.leave()
    with pytest.raises(RebalancedError):
        member.commit()
    assert len(read(member, 10)) == 10  # nothing was committed
    assert told.said == [("assigned", [0]), ("lost", [0]), ("assigned", [0])]
    member.commit()
    assert member.committed((topic, 0)) == 10


def test_the_coordinators_settings_are_not_a_members(bootstrap):
    for name in ("session.timeout.ms", "heartbeat.interval.ms"):
        with pytest.raises(ConfigError, match=f"{name}.*group.protocol=consumer"):
            Consumer(
                {name: 1000, "bootstrap.servers": bootstrap, "group.id": "g"},
                group_protocol="consumer",
            )
    with pytest.raises(ConfigError, match=r"remote\.assignor.*=classic"):
        Consumer(
            bootstrap_servers=bootstrap, group_id="g", group_remote_assignor="range"
        )

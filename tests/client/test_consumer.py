"""`Consumer`, alone and in groups, with the broker under test."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.client.admin import EARLIEST
from mpbroker.client.assignor import (
    assign_range,
    decode_assignment,
    decode_subscription,
    encode_assignment,
    encode_subscription,
)
from mpbroker.client.cluster import TopicPartition
from mpbroker.client.consumer import Consumer, NoOffsetError
from mpbroker.config_def import ConfigError
from mpbroker.producer import Producer
from mpbroker.protocol.errors import ProtocolError


@pytest.fixture
def make_consumer(bootstrap: str) -> Iterator[Callable[..., Consumer]]:
    made: list[Consumer] = []

    def make(**settings: object) -> Consumer:
        consumer = Consumer(
            bootstrap_servers=bootstrap, heartbeat_interval_ms=200, **settings
        )
        made.append(consumer)
        return consumer

    yield make
    for consumer in made:
        consumer.close()


@pytest.fixture
def topic(bootstrap: str, topic_name: str) -> str:
    """A topic with ten records: 0..9, the even ones in its first partition if many."""
    fill(bootstrap, topic_name, range(10))
    return topic_name


def fill(bootstrap: str, topic: str, numbers: range, partition: int = 0) -> None:
    with Producer(bootstrap_servers=bootstrap, linger_ms=0) as producer:
        futures = [
            producer.send(topic, b"%d" % n, partition=partition, timestamp_ms=1000 + n)
            for n in numbers
        ]
        for future in futures:
            future.result(30)


def values(consumer: Consumer, count: int) -> list[int]:
    """Poll until there are so many records."""
    found: list[int] = []
    deadline = time.monotonic() + 40
    while len(found) < count and time.monotonic() < deadline:
        for records in consumer.poll(200).values():
            found += [int(record.value or b"") for record in records]
    return found


def test_assigned_partitions_are_read_from_where_one_seeks(make_consumer, topic):
    consumer = make_consumer(auto_offset_reset="earliest")
    consumer.assign([(topic, 0)])
    assert values(consumer, 10) == list(range(10))
    assert consumer.position((topic, 0)) == 10
    consumer.seek((topic, 0), 4)
    assert values(consumer, 6) == list(range(4, 10))
    consumer.seek_to(1007)
    assert values(consumer, 3) == [7, 8, 9]
    consumer.seek_to(EARLIEST)
    assert values(consumer, 10) == list(range(10))


def test_the_latest_is_what_comes_after(make_consumer, topic, bootstrap):
    consumer = make_consumer()
    consumer.assign([(topic, 0)])
    assert consumer.position((topic, 0)) == 10
    fill(bootstrap, topic, range(10, 13))
    assert values(consumer, 3) == [10, 11, 12]


def test_no_more_records_than_asked_for_come_at_once(make_consumer, topic):
    consumer = make_consumer(auto_offset_reset="earliest", max_poll_records=3)
    consumer.assign([(topic, 0)])
    sizes = []
    while sum(sizes) < 10:
        sizes += [len(records) for records in consumer.poll(500).values()]
    assert max(sizes) == 3


def test_without_a_position_and_a_rule_it_says_so(make_consumer, topic):
    consumer = make_consumer(auto_offset_reset="none")
    consumer.assign([(topic, 0)])
    with pytest.raises(NoOffsetError, match="seek"):
        consumer.poll(10)


def test_groups_need_an_id(make_consumer):
    with pytest.raises(ConfigError, match=r"group\.id"):
        make_consumer().subscribe(["t"])


def test_a_group_goes_on_where_it_committed(make_consumer, topic, bootstrap):
    settings = {
        "group_id": f"g-{topic}",
        "auto_offset_reset": "earliest",
        "enable_auto_commit": False,
    }
    first = make_consumer(**settings)
    first.subscribe([topic])
    assert values(first, 10) == list(range(10))
    assert first.committed((topic, 0)) is None
    first.commit({TopicPartition(topic, 0): 6})
    first.close()
    second = make_consumer(**settings)
    second.subscribe([topic])
    assert values(second, 4) == [6, 7, 8, 9]
    second.commit()
    assert second.committed((topic, 0)) == 10


def test_closing_commits_what_was_polled(make_consumer, topic):
    settings = {"group_id": f"g-{topic}", "auto_offset_reset": "earliest"}
    first = make_consumer(**settings)
    first.subscribe([topic])
    assert len(values(first, 10)) == 10
    first.close()
    second = make_consumer(**settings)
    assert second.committed((topic, 0)) == 10


def test_members_share_partitions_and_take_over_when_one_leaves(
    make_consumer, bootstrap, topic_name
):
    from mpbroker.client.addresses import parse_addresses
    from mpbroker.client.admin import create_topic
    from mpbroker.client.cluster import Cluster

    with Cluster(parse_addresses(bootstrap), 30) as cluster:
        create_topic(cluster, topic_name, partitions=4, replication_factor=1)
        cluster.topic(topic_name, auto_create=True)
    consumers = [make_consumer(group_id=f"g-{topic_name}") for _ in range(2)]
    stop = threading.Event()
    owned: list[list[TopicPartition]] = [[], []]
    leave = threading.Event()

    def run(index: int) -> None:
        consumer = consumers[index]
        consumer.subscribe([topic_name])
        while not stop.is_set():
            consumer.poll(100)
            owned[index] = consumer.assignment()
            if index and leave.is_set():
                consumer.close()
                owned[index] = []
                return

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in (0, 1)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: [len(each) for each in owned] == [2, 2])
        assert set(owned[0]).isdisjoint(owned[1])
        leave.set()
        until(lambda: len(owned[0]) == 4)
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 40
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


# -- the group's bytes -----------------------------------------------------------------

NAMES = st.text(max_size=8)
PARTITIONS = st.lists(
    st.builds(TopicPartition, NAMES, st.integers(0, 9)), max_size=9, unique=True
)


@given(names=st.lists(NAMES, max_size=5))
def test_subscriptions_come_back(names):
    assert decode_subscription(encode_subscription(names)) == names


@given(partitions=PARTITIONS)
def test_assignments_come_back(partitions):
    assert set(decode_assignment(encode_assignment(partitions))) == set(partitions)


@given(data=st.binary(max_size=40))
def test_any_bytes_are_a_protocol_error_or_read(data):
    for decode in (decode_assignment, decode_subscription):
        try:
            decode(data)
        except ProtocolError:
            pass


@given(
    members=st.dictionaries(
        st.text("abc", min_size=1), st.sets(st.sampled_from("xyz"))
    ),
    counts=st.dictionaries(st.sampled_from("xyz"), st.integers(0, 7)),
)
def test_every_partition_has_one_reader_and_shares_differ_by_one(members, counts):
    found = assign_range(members, counts)
    given_out = [where for partitions in found.values() for where in partitions]
    read = {topic for topics in members.values() for topic in topics}
    assert sorted(given_out) == sorted(
        TopicPartition(topic, index)
        for topic in read
        for index in range(counts.get(topic, 0))
    )
    for topic in read:
        shares = [
            sum(where.topic == topic for where in found[member])
            for member, topics in members.items()
            if topic in topics
        ]
        assert max(shares) - min(shares) <= 1

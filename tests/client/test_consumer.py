"""`Consumer`, alone and in groups, with the broker under test."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.base.config_def import ConfigError
from mpbroker.client.addresses import parse_addresses
from mpbroker.client.admin.group_admin import describe_group
from mpbroker.client.admin.topic_admin import (
    EARLIEST,
    LATEST,
    MAX_TIMESTAMP,
    create_topic,
)
from mpbroker.client.assignor import (
    ASSIGNORS,
    Subscription,
    assign_cooperative_sticky,
    assign_sticky,
    decode_assignment,
    decode_subscription,
    encode_assignment,
    encode_subscription,
)
from mpbroker.client.cluster import Cluster, TopicPartition
from mpbroker.client.consumer import offset_lookup
from mpbroker.client.consumer.consumer import Consumer, NoOffsetError, RebalanceListener
from mpbroker.client.errors import ClientError
from mpbroker.producer import Producer
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError, ProtocolError
from tests.support.children import wait_until

# Of the first record. Records of 1970 would be gone as soon as retention looks at them.
START_MS = time.time_ns() // 1_000_000


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
            producer.send(
                topic, b"%d" % n, partition=partition, timestamp_ms=START_MS + n
            )
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
    assert len(found) >= count, f"{found} of {consumer.assignment()}"
    return found


def test_assigned_partitions_are_read_from_where_one_seeks(make_consumer, topic):
    consumer = make_consumer(auto_offset_reset="earliest")
    consumer.assign([(topic, 0)])
    assert values(consumer, 10) == list(range(10))
    assert consumer.position((topic, 0)) == 10
    consumer.seek((topic, 0), 4)
    assert values(consumer, 6) == list(range(4, 10))
    consumer.seek_to(START_MS + 7)
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


@pytest.fixture
def refuse_offsets(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[ErrorCode]]:
    """Have the next questions for offsets refused: refuse_offsets(code, ...)."""
    ask = offset_lookup.list_offsets
    left: list[ErrorCode] = []

    def refuse(*codes: ErrorCode) -> list[ErrorCode]:
        left.extend(codes)
        return left

    def answer(*arguments: Any, **options: Any) -> Any:
        if left:
            raise ApiError(left.pop(0))
        return ask(*arguments, **options)

    monkeypatch.setattr(offset_lookup, "list_offsets", answer)
    return refuse


def test_a_leader_that_does_not_know_of_it_yet_is_asked_again(
    make_consumer, topic, refuse_offsets
):
    consumer = make_consumer(auto_offset_reset="earliest")
    consumer.assign([(topic, 0)])
    left = refuse_offsets(*[ErrorCode.NOT_LEADER_OR_FOLLOWER] * 3)
    assert values(consumer, 10) == list(range(10))
    assert not left
    refuse_offsets(ErrorCode.LEADER_NOT_AVAILABLE)
    assert consumer.offsets_for([(topic, 0)], LATEST) == {(topic, 0): 10}
    refuse_offsets(ErrorCode.TOPIC_AUTHORIZATION_FAILED)
    with pytest.raises(ApiError, match="TOPIC_AUTHORIZATION_FAILED"):
        consumer.offsets_for([(topic, 0)], LATEST)


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
        wait_until(lambda: [len(each) for each in owned] == [2, 2])
        assert set(owned[0]).isdisjoint(owned[1])
        leave.set()
        wait_until(lambda: len(owned[0]) == 4)
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)


class Seen(RebalanceListener):
    """Notes what a listener is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, set[TopicPartition]]] = []

    def on_partitions_revoked(self, partitions) -> None:
        self.events.append(("revoked", set(partitions)))

    def on_partitions_assigned(self, partitions) -> None:
        self.events.append(("assigned", set(partitions)))

    def on_partitions_lost(self, partitions) -> None:
        self.events.append(("lost", set(partitions)))


def test_a_cooperative_member_keeps_what_stays_its_own(
    make_consumer, bootstrap, topic_name
):
    with Cluster(parse_addresses(bootstrap), 30) as cluster:
        create_topic(cluster, topic_name, partitions=4, replication_factor=1)
        cluster.topic(topic_name, auto_create=True)
    settings = {
        "group_id": f"g-{topic_name}",
        "partition_assignment_strategy": "cooperative-sticky",
    }
    first, second = make_consumer(**settings), make_consumer(**settings)
    seen = Seen()
    first.subscribe([topic_name], seen)
    wait_until(lambda: first.poll(0) is not None and len(first.assignment()) == 4)
    everything = set(first.assignment())
    second.subscribe([topic_name])
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            second.poll(50)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        wait_until(lambda: first.poll(50) is not None and len(first.assignment()) == 2)
        wait_until(lambda: len(second.assignment()) == 2)
    finally:
        stop.set()
        thread.join(30)
    kept = set(first.assignment())
    assert kept | set(second.assignment()) == everything
    assert ("assigned", everything) in seen.events
    revoked = [partitions for what, partitions in seen.events if what == "revoked"]
    assert revoked == [everything - kept]  # and never what it kept


def test_the_newest_record_is_found_wherever_it_is(make_consumer, topic, bootstrap):
    with Producer(bootstrap_servers=bootstrap) as producer:
        producer.send(topic, b"10", partition=0, timestamp_ms=START_MS + 99).result(30)
        producer.send(topic, b"11", partition=0, timestamp_ms=START_MS + 50).result(30)
    consumer = make_consumer(auto_offset_reset="earliest")
    assert consumer.offsets_for([(topic, 0)], MAX_TIMESTAMP) == {(topic, 0): 10}
    consumer.assign([(topic, 0)])
    consumer.seek_to(MAX_TIMESTAMP)
    assert values(consumer, 2) == [10, 11]


def test_without_records_there_is_no_newest_one(make_consumer, topic_name, bootstrap):
    with Cluster(parse_addresses(bootstrap), 30) as cluster:
        create_topic(cluster, topic_name, partitions=1, replication_factor=1)
    consumer = make_consumer()
    assert consumer.offsets_for([(topic_name, 0)], MAX_TIMESTAMP) == {
        (topic_name, 0): 0
    }


def test_paused_partitions_give_nothing_and_lose_nothing(make_consumer, topic):
    consumer = make_consumer(auto_offset_reset="earliest", max_poll_records=3)
    consumer.assign([(topic, 0)])
    first = values(consumer, 3)
    consumer.pause([(topic, 0)])
    assert consumer.paused() == {TopicPartition(topic, 0)}
    assert consumer.poll(50) == {}
    assert consumer.position((topic, 0)) == len(first)
    consumer.resume([(topic, 0)])
    assert first + values(consumer, 10 - len(first)) == list(range(10))
    with pytest.raises(ClientError, match="not assigned"):
        consumer.pause([("another", 0)])


def test_a_member_has_its_clients_name_and_a_static_one_its_own(
    make_consumer, bootstrap, topic
):
    group_id = f"g-{topic}"
    consumer = make_consumer(
        group_id=group_id, client_id="reader-7", group_instance_id="i-1"
    )
    consumer.subscribe([topic])
    wait_until(lambda: consumer.poll(0) is not None and bool(consumer.assignment()))
    consumer.close()  # a static member does not leave
    with Cluster(parse_addresses(bootstrap), 30) as cluster:
        (member,) = describe_group(cluster, group_id).members
    assert (member.client_id, member.instance_id) == ("reader-7", "i-1")


def test_heartbeats_must_be_faster_than_the_session():
    with pytest.raises(ConfigError, match=r"heartbeat\.interval\.ms=9"):
        Consumer(
            bootstrap_servers="h:1",
            group_id="g",
            heartbeat_interval_ms=9,
            session_timeout_ms=9,
        )


def test_an_assignor_nobody_knows_is_refused():
    with pytest.raises(ConfigError, match="cooperative-sticky"):
        Consumer(bootstrap_servers="h:1", partition_assignment_strategy="stiky")


# -- metrics ---------------------------------------------------------------------------

# What the documentation of Apache Kafka lists; those of rebalance listeners left out.
METRICS = {
    "consumer-fetch-manager-metrics": (
        "bytes-consumed-rate bytes-consumed-total fetch-latency-avg fetch-latency-max"
        " fetch-rate fetch-total fetch-size-avg fetch-size-max fetch-throttle-time-avg"
        " fetch-throttle-time-max records-consumed-rate records-consumed-total"
        " records-lag-max records-per-request-avg"
    ),
    "consumer-coordinator-metrics": (
        "assigned-partitions commit-latency-avg commit-latency-max commit-rate"
        " commit-total heartbeat-rate heartbeat-total heartbeat-response-time-max"
        " join-rate join-total join-time-avg join-time-max sync-rate sync-total"
        " sync-time-avg sync-time-max rebalance-latency-avg rebalance-latency-max"
        " rebalance-total rebalance-rate-per-hour last-heartbeat-seconds-ago"
        " last-rebalance-seconds-ago"
    ),
    "consumer-metrics": (
        "connection-count connection-creation-rate connection-creation-total"
        " connection-close-total incoming-byte-rate incoming-byte-total"
        " outgoing-byte-total request-rate request-total response-total"
        " network-io-rate network-io-total select-rate select-total io-ratio"
        " io-wait-ratio io-wait-time-ns-total last-poll-seconds-ago"
        " time-between-poll-avg time-between-poll-max"
    ),
}


def test_kafkas_metrics_are_there(make_consumer, topic):
    consumer = make_consumer(group_id=topic, auto_offset_reset="earliest")
    consumer.subscribe([topic])
    values(consumer, 10)
    consumer.commit()
    beats = "heartbeat-total"
    deadline = time.monotonic() + 40
    while not consumer.metrics()["consumer-coordinator-metrics"][beats]:
        assert time.monotonic() < deadline
        consumer.poll(100)
    groups = consumer.metrics()
    for group, names in METRICS.items():
        assert set(names.split()) <= groups[group].keys(), group
    fetch = groups["consumer-fetch-manager-metrics"]
    assert fetch["records-consumed-total"] == 10
    assert fetch["bytes-consumed-total"] > 100
    assert fetch["fetch-total"] >= 1
    assert fetch["fetch-latency-max"] >= fetch["fetch-latency-avg"] > 0
    of_topic = groups[f"consumer-fetch-manager-metrics.{topic}"]
    assert of_topic["records-consumed-total"] == 10
    of_partition = groups[f"consumer-fetch-manager-metrics.{topic}.0"]
    assert of_partition == {"records-lag": 0, "records-lead": 10}
    group = groups["consumer-coordinator-metrics"]
    assert group["assigned-partitions"] == len(consumer.assignment())
    assert group["commit-total"] >= 1
    assert group["join-total"] >= 1
    assert group["rebalance-total"] >= 1
    assert group["last-heartbeat-seconds-ago"] >= 0
    own = groups["consumer-metrics"]
    assert own["connection-count"] >= 2  # the leader's, and the coordinator's
    assert own["request-total"] >= own["response-total"] > 0
    assert own["io-wait-time-ns-total"] > 0
    consumer.unsubscribe()
    assert f"consumer-fetch-manager-metrics.{topic}.0" not in consumer.metrics()


def test_what_came_long_ago_is_in_no_rate(make_consumer, topic, monkeypatch):
    consumer = make_consumer(auto_offset_reset="earliest")
    consumer.assign([(topic, 0)])
    consumer.seek((topic, 0), 0)
    values(consumer, 10)
    for module in ("consumer", "consumer_metrics"):
        clock = f"mpbroker.client.consumer.{module}.monotonic_ms"
        monkeypatch.setattr(clock, lambda: time.monotonic() * 1000 + passed_ms)
    passed_ms = 1_000
    consumer.poll(0)
    passed_ms = 600_000
    own = consumer.metrics()["consumer-metrics"]
    assert own["incoming-byte-rate"] * 60 < own["incoming-byte-total"]


def test_what_is_not_read_yet_is_lag(make_consumer, topic, bootstrap):
    fill(bootstrap, topic, range(10, 20))  # another batch, at least
    consumer = make_consumer(max_partition_fetch_bytes=1, max_poll_records=1)
    consumer.assign([(topic, 0)])
    consumer.seek((topic, 0), 0)
    deadline = time.monotonic() + 40
    while not consumer.poll(200):
        assert time.monotonic() < deadline
    groups = consumer.metrics()
    fetch = groups["consumer-fetch-manager-metrics"]
    assert 0 < fetch["records-lag-max"] < 20  # the answer held the first batch only
    assert fetch["records-consumed-total"] == 1
    of_partition = groups[f"consumer-fetch-manager-metrics.{topic}.0"]
    assert of_partition == {"records-lag": 19, "records-lead": 1}


# -- the group's bytes -----------------------------------------------------------------

NAMES = st.text(max_size=8)
PARTITIONS = st.lists(
    st.builds(TopicPartition, NAMES, st.integers(0, 9)), max_size=9, unique=True
)


@given(
    names=st.lists(NAMES, max_size=5), owned=PARTITIONS, generation=st.integers(-1, 99)
)
def test_subscriptions_come_back(names, owned, generation):
    subscription = Subscription(names, owned, generation)
    found = decode_subscription(encode_subscription(subscription))
    assert found._replace(owned=set(found.owned)) == (names, set(owned), generation)


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


MEMBERS = st.dictionaries(
    st.text("abcd", min_size=1, max_size=2), st.sets(st.sampled_from("xyz"))
)
COUNTS = st.dictionaries(st.sampled_from("xyz"), st.integers(0, 7))


def subscriptions_of(members, owned=None, generation=1):
    return {
        member: Subscription(sorted(topics), (owned or {}).get(member, []), generation)
        for member, topics in members.items()
    }


def partitions_of(topics, counts):
    return {
        TopicPartition(topic, index)
        for topic in topics
        for index in range(counts.get(topic, 0))
    }


@given(name=st.sampled_from(sorted(ASSIGNORS)), members=MEMBERS, counts=COUNTS)
def test_every_partition_has_one_reader_that_wants_it(name, members, counts):
    found = ASSIGNORS[name](subscriptions_of(members), counts)
    given_out = [where for partitions in found.values() for where in partitions]
    read = {topic for topics in members.values() for topic in topics}
    assert len(given_out) == len(set(given_out))
    assert set(given_out) == partitions_of(read, counts)
    for member, partitions in found.items():
        assert {where.topic for where in partitions} <= members[member]


@given(members=MEMBERS, counts=COUNTS)
def test_shares_of_one_topic_differ_by_one(members, counts):
    found = ASSIGNORS["range"](subscriptions_of(members), counts)
    for topic in {topic for topics in members.values() for topic in topics}:
        shares = [
            sum(where.topic == topic for where in found[member])
            for member, topics in members.items()
            if topic in topics
        ]
        assert max(shares) - min(shares) <= 1


@given(members=st.sets(st.text("abcd", min_size=1), min_size=1), counts=COUNTS)
@pytest.mark.parametrize("name", ["roundrobin", "cooperative-sticky"])
def test_members_that_read_the_same_have_shares_that_differ_by_one(
    name, members, counts
):
    everything = {member: set("xyz") for member in members}
    found = ASSIGNORS[name](subscriptions_of(everything), counts)
    shares = [len(partitions) for partitions in found.values()]
    assert max(shares) - min(shares) <= 1


@given(members=MEMBERS, counts=COUNTS, data=st.data())
def test_what_is_even_already_stays_where_it_is(members, counts, data):
    before = assign_sticky(subscriptions_of(members), counts)
    again = assign_sticky(subscriptions_of(members, before), counts)
    assert {m: set(p) for m, p in again.items()} == {
        m: set(p) for m, p in before.items()
    }


@given(old=MEMBERS, members=MEMBERS, counts=COUNTS)
def test_a_cooperative_group_settles_and_nothing_has_two_readers_meanwhile(
    old, members, counts
):
    owned = assign_sticky(subscriptions_of(old), counts)
    for _ in range(3):
        subscriptions = subscriptions_of(members, owned)
        found = assign_cooperative_sticky(subscriptions, counts)
        for member, partitions in found.items():
            for other, theirs in owned.items():
                if other in members and other != member:
                    assert set(partitions).isdisjoint(theirs)
        owned = found
    read = {topic for topics in members.values() for topic in topics}
    assert {w for partitions in owned.values() for w in partitions} == partitions_of(
        read, counts
    )


def test_of_two_that_claim_a_partition_the_later_round_keeps_it():
    where = TopicPartition("x", 0)
    claims = {
        "a": Subscription(["x"], [where], 4),
        "b": Subscription(["x"], [where], 5),
    }
    assert assign_cooperative_sticky(claims, {"x": 1}) == {"a": [], "b": [where]}

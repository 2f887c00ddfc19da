"""`ShareConsumer` with the broker under test."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from mpbroker import (
    AcknowledgeType,
    AdminClient,
    ApiError,
    ClientError,
    ConfigError,
    ConfigResource,
    ConfigResourceType,
    Consumer,
    ErrorCode,
    MpbrokerError,
    Producer,
    ShareConsumer,
    TopicPartition,
    WakeupError,
)
from mpbroker.client.consumer.consumer_record import ConsumerRecord
from tests.client.test_consumer import fill
from tests.support.children import TIMEOUT_S, wait_until

EXPLICIT = {"share.acknowledgement.mode": "explicit"}
MakeShareConsumer = Callable[..., ShareConsumer]


def begin_at_the_start(bootstrap: str, group: str, **configs: str) -> None:
    """Let a group begin with the first record of each partition."""
    configs = {"share_auto_offset_reset": "earliest", **configs}
    with AdminClient(bootstrap_servers=bootstrap) as admin:
        admin.alter_configs(
            ConfigResource(ConfigResourceType.GROUP, group),
            {name.replace("_", "."): value for name, value in configs.items()},
        )


@pytest.fixture
def group(bootstrap: str, topic_name: str) -> str:
    """A group that reads from the first record on."""
    begin_at_the_start(bootstrap, f"queue-of-{topic_name}")
    return f"queue-of-{topic_name}"


@pytest.fixture
def topic(bootstrap: str, topic_name: str) -> str:
    """A topic with the records 0..9."""
    fill(bootstrap, topic_name, range(10))
    return topic_name


@pytest.fixture
def make(bootstrap: str, group: str, topic: str) -> Iterator[MakeShareConsumer]:
    """Make subscribed members of the group."""
    made: list[ShareConsumer] = []

    def make(**settings: object) -> ShareConsumer:
        consumer = ShareConsumer(
            {"bootstrap.servers": bootstrap, "group.id": group}, **settings
        )
        made.append(consumer)
        consumer.subscribe([topic])
        return consumer

    yield make
    for consumer in made:
        consumer.close()


def poll(consumer: ShareConsumer, count: int = 1) -> list[ConsumerRecord]:
    """Poll until one poll has returned records; check how many."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        found = [r for records in consumer.poll(500).values() for r in records]
        if found:
            assert len(found) == count, found
            return found
    raise AssertionError("no records came")


def values(records: list[ConsumerRecord]) -> list[int]:
    return [int(record.value or b"") for record in records]


def errors(results: dict[TopicPartition, MpbrokerError | None]) -> list[object]:
    return [
        error.error_code if isinstance(error, ApiError) else error
        for error in results.values()
    ]


def test_the_next_poll_accepts_the_records_of_the_last_one(make, topic, bootstrap):
    with make() as consumer:
        records = poll(consumer, 10)
        assert values(records) == list(range(10))
        assert {record.delivery_count for record in records} == {1}
        assert consumer.acquisition_lock_timeout_ms() == 30_000
        assert consumer.poll(0) == {}
        assert errors(consumer.commit_sync()) in ([], [None])
    fill(bootstrap, topic, range(10, 13))
    assert values(poll(make(), 3)) == [10, 11, 12]


def test_a_commit_accepts_them_too_and_says_so(make, topic):
    with make() as consumer:
        poll(consumer, 10)
        assert consumer.commit_sync() == {TopicPartition(topic, 0): None}
        assert consumer.commit_sync() == {}


def test_what_is_not_accepted_is_given_back_by_close(make):
    with make() as consumer:
        poll(consumer, 10)
    records = poll(make(), 10)
    assert values(records) == list(range(10))
    assert {record.delivery_count for record in records} == {2}


def test_records_are_accepted_released_and_rejected_one_by_one(make):
    kinds = AcknowledgeType
    with make(**EXPLICIT) as consumer:
        for record in poll(consumer, 10):
            kind = (kinds.ACCEPT, kinds.RELEASE, kinds.REJECT)[record.offset % 3]
            consumer.acknowledge(record, kind)
        again = poll(consumer, 3)
        assert values(again) == [1, 4, 7]
        assert {record.delivery_count for record in again} == {2}
        for record in again:
            consumer.acknowledge(record[:3])
        assert errors(consumer.commit_sync()) == [None]
        assert consumer.poll(100) == {}


def test_the_last_word_on_a_record_counts(make):
    consumer = make(**EXPLICIT)
    for record in poll(consumer, 10):
        consumer.acknowledge(record, AcknowledgeType.RELEASE)
        consumer.acknowledge(record, AcknowledgeType.ACCEPT)
    assert errors(consumer.commit_sync()) == [None]
    with pytest.raises(ClientError, match="not this consumer's"):
        consumer.acknowledge(record)
    assert consumer.poll(100) == {}


def test_poll_wants_an_acknowledgement_of_each_record_in_explicit_mode(make, topic):
    consumer = make(**EXPLICIT)
    first, *others = poll(consumer, 10)
    consumer.acknowledge(first)
    with pytest.raises(ClientError, match=r"9 records .* at offset 1"):
        consumer.poll(0)
    for record in others:
        consumer.acknowledge(record)
    assert consumer.poll(0) == {}


def test_records_are_acknowledged_in_explicit_mode_only(make):
    consumer = make()
    record = poll(consumer, 10)[0]
    with pytest.raises(ClientError, match=r"share\.acknowledgement\.mode=explicit"):
        consumer.acknowledge(record)


def test_a_gap_is_not_for_users(make):
    consumer = make(**EXPLICIT)
    record = poll(consumer, 10)[0]
    with pytest.raises(ClientError, match="GAP"):
        consumer.acknowledge(record, AcknowledgeType.GAP)


def test_a_renewed_record_stays_and_is_accepted_later(make, bootstrap):
    consumer = make(**EXPLICIT)
    first, *others = poll(consumer, 10)
    consumer.acknowledge(first, AcknowledgeType.RENEW)
    for record in others:
        consumer.acknowledge(record)
    assert errors(consumer.commit_sync()) == [None]
    assert consumer.poll(100) == {}  # it does not wait for the renewed one
    consumer.acknowledge(first)
    assert errors(consumer.commit_sync()) == [None]
    consumer.close()
    fill(bootstrap, first.topic, range(10, 11))
    assert values(poll(make())) == [10]


def test_no_more_records_than_asked_for_come_with_record_limit(make):
    sizes = []
    consumer = make(share_acquire_mode="record_limit", max_poll_records=3)
    while sum(sizes) < 10:
        sizes += [len(records) for records in consumer.poll(500).values()]
    assert sizes == [3, 3, 3, 1]


def test_two_members_share_one_partition(make):
    limit = {"share_acquire_mode": "record_limit", "max_poll_records": 5}
    one, other = make(**limit), make(**limit)
    assert sorted(values(poll(one, 5)) + values(poll(other, 5))) == list(range(10))


def test_records_that_come_between_two_polls_are_the_only_ones_of_the_next(make):
    limit = {"share_acquire_mode": "record_limit", "max_poll_records": 5}
    one, other = make(**limit), make(**limit)

    def found_after_a_pause() -> list[ConsumerRecord]:
        time.sleep(0.3)  # for the answer to the last poll's fetch
        return [r for records in one.poll(0).values() for r in records]

    assert len(wait_until(found_after_a_pause)) == 5
    # Nothing else was acquired meanwhile, which nobody would have read.
    assert values(poll(other, 5)) == list(range(5, 10))


def test_a_callback_hears_of_each_acknowledgement(make, topic):
    heard = []
    with make() as consumer:
        consumer.set_acknowledgement_commit_callback(
            lambda offsets, error: heard.append((offsets, error))
        )
        poll(consumer, 10)
        consumer.commit_async()
    assert heard == [({TopicPartition(topic, 0): set(range(10))}, None)]


def test_what_the_broker_refuses_is_told_by_partition(make, topic):
    one, other = make(**EXPLICIT), make(**EXPLICIT)
    first, *others = poll(one, 10)
    (held,) = one._held.values()
    session, place = held[first.offset]
    for record in (first, *others):
        one.acknowledge(record, AcknowledgeType.RELEASE)
    assert errors(one.commit_sync()) == [None]
    poll(other, 10)
    # As if its lock had ended meanwhile, which takes 15 s with Apache Kafka.
    one._fetcher.give(session, place, first.offset, AcknowledgeType.ACCEPT)
    results = one.commit_sync()
    assert list(results) == [TopicPartition(topic, 0)]
    assert errors(results) == [ErrorCode.INVALID_RECORD_STATE]


def test_a_poll_that_waits_can_be_woken_by_another_thread(make, topic):
    consumer = make()
    poll(consumer, 10)
    consumer.commit_sync()
    timer = threading.Timer(0.2, consumer.wakeup)
    timer.start()
    with pytest.raises(WakeupError):
        consumer.poll(TIMEOUT_S * 1000)
    timer.join()
    assert consumer.poll(0) == {}  # once


def test_a_topic_that_comes_later_is_read(bootstrap, topic_name):
    group = f"queue-of-{topic_name}"
    begin_at_the_start(bootstrap, group)
    with ShareConsumer(bootstrap_servers=bootstrap, group_id=group) as consumer:
        with pytest.raises(ClientError, match="subscribe"):
            consumer.poll(0)
        consumer.subscribe(topic_name)
        assert consumer.subscription() == {topic_name}
        assert consumer.poll(100) == {}
        fill(bootstrap, topic_name, range(3))
        wait_until(lambda: consumer.poll(500), TIMEOUT_S)
        consumer.unsubscribe()
        assert consumer.subscription() == set()


def test_a_member_that_unsubscribes_gives_records_back(make, topic):
    one = make()
    poll(one, 10)
    one.unsubscribe()
    assert len(poll(make(), 10)) == 10
    one.subscribe([topic])
    assert one.poll(100) == {}


def test_transaction_markers_and_aborted_records_are_not_delivered(
    bootstrap, topic, group, make
):
    begin_at_the_start(bootstrap, group, share_isolation_level="read_committed")
    consumer = make()
    poll(consumer, 10)
    consumer.commit_sync()
    with Producer(
        bootstrap_servers=bootstrap, transactional_id=f"of-{topic}"
    ) as producer:
        producer.init_transactions()
        for number, commits in enumerate((False, True)):
            producer.begin_transaction()
            producer.send(topic, b"%d" % number, partition=0)
            if commits:
                producer.commit_transaction()
            else:
                producer.abort_transaction()
    assert values(poll(consumer)) == [1]
    # The marker behind it is acknowledged as a gap, so that nothing is left.
    assert errors(consumer.commit_sync()) == [None]
    fill(bootstrap, topic, range(2, 3))
    assert values(poll(consumer)) == [2]


def test_a_group_is_needed():
    with pytest.raises(ConfigError, match=r"group\.id"):
        ShareConsumer(bootstrap_servers="localhost:1")


def test_a_classic_group_cannot_be_joined(bootstrap, topic):
    group = f"classic-{topic}"
    with (
        Consumer(bootstrap_servers=bootstrap, group_id=group) as classic,
        ShareConsumer(bootstrap_servers=bootstrap, group_id=group) as consumer,
    ):
        classic.subscribe([topic])
        classic.poll(500)
        consumer.subscribe([topic])
        with pytest.raises(ApiError, match=group):
            consumer.poll(1000)

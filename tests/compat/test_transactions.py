"""Transactions of several client libraries: what is committed is seen, once; no more.

librdkafka and kafkajs add partitions by request; franz-go and Java, which know
transaction.version 2, by writing to them, and get a new epoch with each end.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from mpbroker.producer import (
    GroupMetadata,
    OffsetAndMetadata,
    ProducerFencedError,
)
from mpbroker.producer import Producer as OwnProducer
from tests.bench.processes import title_of
from tests.compat.adapters.adapter import Outgoing
from tests.compat.adapters.franz_go_adapter import FranzGoAdapter
from tests.compat.adapters.line_client import LineClient, to_json
from tests.compat.records import some_records
from tests.compat.test_java_tools import TOOLS, run_java
from tests.compat.test_other_languages import (
    Ask,
    kafkajs,
    needs_franz_go,
    needs_kafkajs,
)
from tests.support.apache_kafka import java_command
from tests.support.broker import Broker
from tests.support.children import wait_until
from tests.support.fetch_clients import have_java_clients, have_java_tools

MakeTopic = Callable[..., str]

__all__ = ["kafkajs"]  # a fixture

# Each start of Java takes a second, and ten where cores are busy.
pytestmark = pytest.mark.timeout(300)

needs_java = pytest.mark.skipif(
    not have_java_tools(),
    reason="no Apache Kafka in .downloads/java: scripts/test fetches it with Maven",
)

needs_java_client = pytest.mark.skipif(
    not have_java_clients(),
    reason="no client of Kafka's own in .downloads/java: scripts/test builds it",
)


def transactional(bootstrap: str, transactional_id: str, **config: object) -> Producer:
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "transactional.id": transactional_id,
            "linger.ms": 0,
            "log_level": 0,
            **{key.replace("_", "."): value for key, value in config.items()},
        }
    )
    producer.init_transactions(30)
    return producer


def values(
    bootstrap: str, topic: str, partitions: int, isolation: str = "read_committed"
) -> list[bytes]:
    """All that a reader is shown of a topic, until its end."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "unused",
            "isolation.level": isolation,
            "enable.partition.eof": True,
            "log_level": 0,
        }
    )
    consumer.assign([TopicPartition(topic, number, 0) for number in range(partitions)])
    found: list[bytes] = []
    ends = 0
    try:
        while ends < partitions:
            message = consumer.poll(30)
            assert message is not None, f"{ends} of {partitions} ends reached"
            if message.error():
                ends += 1
            else:
                found.append(message.value())
    finally:
        consumer.close()
    return found


def test_only_what_is_committed_is_seen(bootstrap: str, make_topic: MakeTopic) -> None:
    topic = make_topic(3)
    producer = transactional(bootstrap, topic)
    for number, commit in enumerate((True, False, True, False)):
        producer.begin_transaction()
        for partition in range(3):
            producer.produce(topic, f"{number}".encode(), partition=partition)
        producer.flush(30)
        if commit:
            producer.commit_transaction(30)
        else:
            producer.abort_transaction(30)
    assert sorted(values(bootstrap, topic, 3)) == [b"0"] * 3 + [b"2"] * 3
    assert len(values(bootstrap, topic, 3, "read_uncommitted")) == 12


def test_what_is_still_open_is_not_seen_nor_what_lies_behind_it(
    bootstrap: str, make_topic: MakeTopic
) -> None:
    topic = make_topic(1)
    first, second = (
        transactional(bootstrap, f"{topic}-1"),
        Producer({"bootstrap.servers": bootstrap}),
    )
    first.begin_transaction()
    first.produce(topic, b"open")
    first.flush(30)
    second.produce(topic, b"behind")
    second.flush(30)
    assert values(bootstrap, topic, 1) == []
    first.commit_transaction(30)
    assert values(bootstrap, topic, 1) == [b"open", b"behind"]


def test_a_zombie_is_fenced_and_nothing_of_it_is_seen(
    bootstrap: str, make_topic: MakeTopic
) -> None:
    topic = make_topic(1)
    zombie = transactional(bootstrap, topic)
    zombie.begin_transaction()
    zombie.produce(topic, b"of the zombie")
    zombie.flush(30)
    successor = transactional(bootstrap, topic)
    successor.begin_transaction()
    successor.produce(topic, b"of its successor")
    with pytest.raises(KafkaException) as refused:
        zombie.commit_transaction(30)
    assert refused.value.args[0].name() in ("_FENCED", "PRODUCER_FENCED")
    successor.commit_transaction(30)
    assert values(bootstrap, topic, 1) == [b"of its successor"]


def test_consume_transform_produce_is_exactly_once(
    bootstrap: str, make_topic: MakeTopic
) -> None:
    source, target = make_topic(2), make_topic(2)
    plain = Producer({"bootstrap.servers": bootstrap})
    for number in range(20):
        plain.produce(source, str(number).encode(), partition=number % 2)
    plain.flush(30)
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": source,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "log_level": 0,
        }
    )
    consumer.subscribe([source])
    producer = transactional(bootstrap, source)
    for commit in (False, True, False, True, True, False, True):
        producer.begin_transaction()
        for _ in range(5):
            message = consumer.poll(30)
            assert message is not None
            assert not message.error()
            producer.produce(target, message.value(), partition=message.partition())
        assigned = consumer.assignment()
        producer.send_offsets_to_transaction(
            consumer.position(assigned), consumer.consumer_group_metadata(), 30
        )
        if commit:
            producer.commit_transaction(30)
            continue
        producer.abort_transaction(30)
        for committed in consumer.committed(assigned, 30):  # go back to there
            committed.offset = max(0, committed.offset)
            consumer.seek(committed)
    consumer.close()
    found = sorted(int(value) for value in values(bootstrap, target, 2))
    assert found == list(range(20))


def test_our_own_producer_commits_aborts_and_is_fenced(
    bootstrap: str, make_topic: MakeTopic
) -> None:
    topic = make_topic(3)
    settings = {"bootstrap_servers": bootstrap, "transactional_id": topic}
    with OwnProducer(settings) as producer:
        producer.init_transactions()
        for number, commit in enumerate((True, False, True)):
            producer.begin_transaction()
            for partition in range(3):
                producer.send(topic, b"%d" % number, partition=partition)
            position = {(topic, 0): OffsetAndMetadata(10 + number)}
            producer.send_offsets_to_transaction(position, GroupMetadata(topic))
            if commit:
                producer.commit_transaction()
            else:
                producer.abort_transaction()
        with OwnProducer(settings) as successor:
            successor.init_transactions()
            producer.begin_transaction()
            producer.send(topic, b"of a zombie", partition=0)
            with pytest.raises(ProducerFencedError):
                producer.commit_transaction()
    assert sorted(values(bootstrap, topic, 3)) == [b"0"] * 3 + [b"2"] * 3
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": topic})
    (committed,) = consumer.committed([TopicPartition(topic, 0)], 30)
    consumer.close()
    assert committed.offset == 12


@needs_franz_go
def test_franz_go_commits_and_aborts(bootstrap: str, make_topic: MakeTopic) -> None:
    topic = make_topic(3)
    records = [each for number in range(3) for each in some_records(4, number)]
    with FranzGoAdapter(bootstrap) as client:
        for commit in (False, True, False, True):
            client.ask(
                "transact",
                topic=topic,
                records=[to_json(record) for record in records],
                transactional_id=topic,
                commit=commit,
                timeout_s=60,
            )
        assert len(values(bootstrap, topic, 3)) == 24
        assert len(values(bootstrap, topic, 3, "read_uncommitted")) == 48


@needs_kafkajs
def test_kafkajs_commits_and_aborts(
    kafkajs: Callable[[], Ask],
    bootstrap: str,
    make_topic: MakeTopic,
) -> None:
    topic = make_topic(3)
    records = [each for number in range(3) for each in some_records(4, number)]
    ask = kafkajs()
    for commit in (False, True):
        ask(
            "transact",
            topic=topic,
            records=[to_json(record) for record in records],
            transactional_id=topic,
            commit=commit,
        )
    assert len(values(bootstrap, topic, 3)) == 12
    assert len(values(bootstrap, topic, 3, "read_uncommitted")) == 24


@needs_java
def test_java_commits_one_transaction_after_another(
    bootstrap: str, make_topic: MakeTopic
) -> None:
    topic = make_topic(3)
    run_java(
        f"{TOOLS}.ProducerPerformance",
        *("--topic", topic, "--num-records", "2000", "--record-size", "20"),
        *("--throughput", "2000", "--transactional-id", topic),
        *("--transaction-duration-ms", "50"),
        *("--producer-props", f"bootstrap.servers={bootstrap}"),
    )
    seen = run_java(
        f"{TOOLS}.consumer.ConsoleConsumer",
        *("--bootstrap-server", bootstrap, "--topic", topic, "--from-beginning"),
        *("--isolation-level", "read_committed", "--max-messages", "2000"),
        *("--timeout-ms", "30000"),
    )
    assert len(seen.splitlines()) == 2000
    # Every commit brings a new epoch.
    described = transactions(bootstrap, "describe", "--transactional-id", topic)
    assert described["TransactionState"] == "CompleteCommit"
    assert int(described["ProducerEpoch"]) > 3


@pytest.fixture
def java_client(bootstrap: str) -> Iterator[Ask]:
    """The program of tests/compat/java: java_client(command, **arguments)."""
    child = LineClient(java_command("TransactionalClient"), os.environ)

    def ask(command: str, **arguments: Any) -> Any:
        settings = {"transaction_timeout_ms": 60_000, "timeout_s": 60}
        return child.ask(command, bootstrap=bootstrap, **settings | arguments)

    yield ask
    child.close()


@needs_java_client
@pytest.mark.parametrize("group_protocol", ["classic", "consumer"])
def test_java_consumes_transforms_and_produces_exactly_once(
    bootstrap: str, make_topic: MakeTopic, java_client: Ask, group_protocol: str
) -> None:
    source, target = make_topic(2), make_topic(2)
    plain = Producer({"bootstrap.servers": bootstrap})
    for number in range(20):
        plain.produce(source, b"%02d" % number, partition=number % 2)
    assert plain.flush(30) == 0
    ended = java_client(
        "transform",
        source=source,
        target=target,
        transactional_id=source,
        group=source,
        group_protocol=group_protocol,
        batch=4,
        count=20,
    )
    assert ended["committed"] >= 5
    assert ended["aborted"] >= ended["committed"]
    assert sorted(values(bootstrap, target, 2)) == [b"%02d" % n for n in range(20)]
    assert len(values(bootstrap, target, 2, "read_uncommitted")) > 20
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": source})
    asked = [TopicPartition(source, number) for number in range(2)]
    assert [row.offset for row in consumer.committed(asked, 30)] == [10, 10]
    consumer.close()


@needs_java_client
@pytest.mark.parametrize(
    ("kind", "seen"), [("commit", 6), ("abort", 0), ("forget", 0), ("zombie", 0)]
)
def test_javas_transactions_end_as_it_was_told(
    bootstrap: str, make_topic: MakeTopic, java_client: Ask, kind: str, seen: int
) -> None:
    topic = make_topic(3)
    for how, name in ((kind, "this"), ("commit", "next")):
        ended = java_client(
            "transact",
            transactional_id=topic,
            kind=how,
            records=[
                {"topic": topic, **to_json(Outgoing(name.encode(), partition=number))}
                for number in (0, 1, 2, 0, 1, 2)
            ],
        )
        assert ended == ("committed" if how == "commit" else "aborted")
    found = values(bootstrap, topic, 3)
    assert found.count(b"this") == seen
    assert found.count(b"next") == 6


@needs_java
def test_javas_producer_goes_on_when_coordinator_and_handlers_are_killed(
    make_broker: Callable[..., Broker], topic_name: str
) -> None:
    """All its transactions commit; each record is there, and none twice."""
    broker = make_broker({"num.io.threads": 2})
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.create_topics([NewTopic(topic_name, 3)])[topic_name].result(30)
    count = 3000
    command = java_command(
        f"{TOOLS}.ProducerPerformance",
        *("--topic", topic_name, "--num-records", str(count), "--record-size", "20"),
        *("--throughput", "1000", "--transactional-id", topic_name),
        *("--transaction-duration-ms", "20"),
        *("--producer-props", f"bootstrap.servers={broker.bootstrap}"),
    )
    kills = 0
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as java:
        try:
            wait_until(lambda: values(broker.bootstrap, topic_name, 3), 60)
            while java.poll() is None and kills < 6:
                role = ("group-coordinator", "request-handler")[kills % 2]
                kill_one(broker, role)
                kills += 1
                with suppress(subprocess.TimeoutExpired):
                    java.wait(0.7)  # a life that is long enough
            said, _ = java.communicate(timeout=180)
        finally:
            java.kill()
    assert java.returncode == 0, said
    assert f"{count} records sent" in said
    assert kills
    assert len(values(broker.bootstrap, topic_name, 3)) == count
    assert len(values(broker.bootstrap, topic_name, 3, "read_uncommitted")) == count


def kill_one(broker: Broker, role: str) -> None:
    pids = [pid for pid in broker.processes() if role in title_of(pid)]
    if pids:
        os.kill(pids[0], signal.SIGKILL)


def transactions(bootstrap: str, *arguments: str) -> dict[str, str]:
    """The first row that kafka-transactions prints, by its columns' names."""
    said = run_java(
        f"{TOOLS}.TransactionsCommand", "--bootstrap-server", bootstrap, *arguments
    )
    head, row = (re.split(r"\s+", line.strip()) for line in said.splitlines()[:2])
    return dict(zip(head, row, strict=False))


@needs_java
def test_kafka_transactions_shows_an_open_transaction_and_aborts_it(
    bootstrap: str, make_topic: MakeTopic
) -> None:
    topic = make_topic(1)
    producer = transactional(bootstrap, topic)
    producer.begin_transaction()
    producer.produce(topic, b"left open")
    producer.flush(30)
    listed = run_java(
        f"{TOOLS}.TransactionsCommand", "--bootstrap-server", bootstrap, "list"
    )
    row = next(line for line in listed.splitlines() if topic in line)
    assert "Ongoing" in row
    described = transactions(bootstrap, "describe", "--transactional-id", topic)
    assert described["TransactionState"] == "Ongoing"
    assert f"{topic}-0" in described.values()
    where = ("--topic", topic, "--partition", "0")
    producers = transactions(bootstrap, "describe-producers", *where)
    assert producers["ProducerId"] == described["ProducerId"]
    assert producers["CurrentTransactionStartOffset"] == "0"
    assert values(bootstrap, topic, 1) == []
    run_java(
        f"{TOOLS}.TransactionsCommand",
        *("--bootstrap-server", bootstrap, "abort", *where, "--start-offset", "0"),
    )
    producers = transactions(bootstrap, "describe-producers", *where)
    assert producers["CurrentTransactionStartOffset"] == "None"


@needs_java
def test_kafka_transactions_takes_no_transaction_that_is_known_for_hanging(
    bootstrap: str, make_topic: MakeTopic
) -> None:
    """It asks for the partitions' producers, for all transactions, and for each."""
    topic = make_topic(2)
    producer = transactional(bootstrap, topic)
    producer.begin_transaction()
    producer.produce(topic, b"left open", partition=1)
    producer.flush(30)
    said = run_java(
        f"{TOOLS}.TransactionsCommand",
        *("--bootstrap-server", bootstrap, "find-hanging"),
        *("--topic", topic, "--max-transaction-timeout", "0"),
    )
    (head,) = said.splitlines()
    assert head.split() == [
        *("Topic", "Partition", "ProducerId", "ProducerEpoch"),
        *("CoordinatorEpoch", "StartOffset", "LastTimestamp", "Duration(min)"),
    ]
    producer.commit_transaction()
    assert values(bootstrap, topic, 2) == [b"left open"]

"""Quotas as real clients meet them, and as Kafka's own tool sets them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest
from confluent_kafka import Producer
from kafka import KafkaProducer

from tests.broker.load import create_topic, kill
from tests.compat.test_java_tools import TOOLS, run_java
from tests.server.test_quotas_over_the_wire import Client, set_quota
from tests.support.broker import Broker
from tests.support.fetch_clients import have_java_tools
from tests.support.patience import LONGEST_S

RATE = 1_000_000
SIZE, COUNT = 100_000, 115  # more than ten seconds' worth


@pytest.fixture(scope="module")
def quota_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """One whose processors may be killed."""
    broker = Broker(tmp_path_factory.mktemp("quotas") / "data")
    broker.start()
    yield broker
    broker.close()


def test_librdkafka_reports_the_throttle_and_is_held_to_the_rate(
    quota_broker: Broker, topic_name: str
) -> None:
    create_topic(quota_broker, topic_name)
    set_quota(quota_broker, float(RATE), topic_name)
    throttles: list[int] = []

    def stats(text: str) -> None:
        for each in json.loads(text)["brokers"].values():
            throttles.append(each["throttle"]["max"])

    producer = Producer(
        {
            "bootstrap.servers": quota_broker.bootstrap,
            "client.id": topic_name,
            "statistics.interval.ms": 50,
            "stats_cb": stats,
            "linger.ms": 0,
            "batch.size": SIZE,  # a record a request
            "acks": 1,
        }
    )
    delivered: list[int] = []

    def note(error: object, message: object) -> None:
        assert error is None, error
        delivered.append(1)

    started = time.monotonic()
    for _ in range(COUNT):
        producer.produce(topic_name, b"x" * SIZE, callback=note)
    assert producer.flush(LONGEST_S) == 0
    took_s = time.monotonic() - started
    while not any(throttles) and time.monotonic() - started < LONGEST_S:
        producer.poll(0.1)
    assert any(throttles)
    # Ten seconds' worth at once, and what one request may overshoot; then the rate. Who
    # is slow takes longer, so this cannot fail for that.
    assert len(delivered) == COUNT
    assert RATE * (10 + took_s) + 2 * SIZE >= COUNT * SIZE
    set_quota(quota_broker, None, topic_name)


def test_kafka_python_produces_all_and_sees_its_throttle(
    quota_broker: Broker, topic_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    create_topic(quota_broker, topic_name)
    set_quota(quota_broker, 20_000.0, topic_name)
    producer = KafkaProducer(
        bootstrap_servers=quota_broker.bootstrap, client_id=topic_name, acks=1
    )
    try:
        sent = [producer.send(topic_name, b"x" * 10_000) for _ in range(22)]
        for future in sent:
            future.get(LONGEST_S)
        assert "ProduceResponse throttled by broker" in caplog.text
    finally:
        producer.close()
    set_quota(quota_broker, None, topic_name)


def test_a_throttle_outlives_the_processor(
    quota_broker: Broker, topic_name: str
) -> None:
    create_topic(quota_broker, topic_name)
    set_quota(quota_broker, 20_000.0, topic_name)
    with Client(quota_broker, topic_name) as client:
        started = time.monotonic()
        throttle_ms = client.produce(topic_name, 260_000)
        assert throttle_ms > 2000
        set_quota(quota_broker, None, topic_name)
        for _ in range(2):
            kill(quota_broker, "processor")
            with Client(quota_broker, "another") as other:
                assert other.metadata() == 0
        # It is answered, and not before the time that it was told has passed.
        assert client.metadata() == 0
        assert time.monotonic() >= started + throttle_ms / 1e3


@pytest.mark.skipif(not have_java_tools(), reason="no Apache Kafka's tools")
def test_kafka_configs_sets_describes_and_deletes_quotas(quota_broker: Broker) -> None:
    def configs(*arguments: str) -> str:
        return run_java(
            f"{TOOLS}.ConfigCommand",
            "--bootstrap-server",
            quota_broker.bootstrap,
            *arguments,
        )

    # Each of them starts a Java: few calls, with much in each.
    both = ("--entity-type", "users", "--entity-name", "alice")
    both = (*both, "--entity-type", "clients", "--entity-default")
    configs(
        "--alter", *both, "--add-config", "producer_byte_rate=1024,request_percentage=5"
    )
    address = ("--entity-type", "ips", "--entity-name", "127.0.0.1")
    configs("--alter", *address, "--add-config", "connection_creation_rate=1000000")
    configs(
        "--alter",
        *both,
        "--add-config",
        "consumer_byte_rate=2048",
        "--delete-config",
        "request_percentage",
    )
    said = configs("--describe", *both)
    assert "user-principal 'alice'" in said
    assert "producer_byte_rate=1024.0" in said
    assert "consumer_byte_rate=2048.0" in said
    assert "request_percentage" not in said

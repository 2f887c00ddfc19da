"""Real client libraries whose broker loses its processors: none sees a disconnect."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.broker.load import TOPIC, children, create_topic
from tests.support.broker import Broker
from tests.support.children import wait_until
from tests.support.patience import LONGEST_S

# How often a processor is killed under each client; more with MPBROKER_TEST_KILLS=500.
KILLS: Final = int(os.environ.get("MPBROKER_TEST_KILLS", "10"))


@pytest.fixture
def broker(make_broker) -> Broker:
    broker: Broker = make_broker({"num.network.threads": 2, "num.io.threads": 2})
    create_topic(broker)
    return broker


def deaths(broker: Broker) -> Iterator[int]:
    """Kill a processor and give its number; wait until its successor is there."""
    for number in range(KILLS):
        child = ("processor", number % 2)
        pid = children(broker)[child]
        os.kill(pid, signal.SIGKILL)
        yield number
        wait_until(lambda child=child, pid=pid: children(broker)[child] != pid)


class Complaints(logging.Handler):
    """What a client logs that is worth a warning, or speaks of connections."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno >= logging.WARNING or "disconnect" in text.lower():
            self.said.append(text)


class Librdkafka:
    """A producer and a consumer without a group, and all that they complain of."""

    def __init__(self, bootstrap: str) -> None:
        import confluent_kafka

        self.errors: list[Any] = []
        self.complaints = Complaints()
        self.disconnects: dict[str, int] = {}
        logger = logging.getLogger("tests.librdkafka")
        logger.setLevel(logging.DEBUG)
        logger.handlers = [self.complaints]
        common = {
            "bootstrap.servers": bootstrap,
            "error_cb": self.errors.append,
            "statistics.interval.ms": 50,
            "stats_cb": self._note,
            "log.connection.close": True,
        }
        self.producer = confluent_kafka.Producer(
            {**common, "acks": "all", "linger.ms": 0}, logger=logger
        )
        self.consumer = confluent_kafka.Consumer(
            {**common, "group.id": "none", "enable.auto.commit": False}, logger=logger
        )
        self.consumer.assign([confluent_kafka.TopicPartition(TOPIC, 0, 0)])

    def _note(self, text: str) -> None:
        statistics = json.loads(text)
        for name, one in statistics["brokers"].items():
            # The first connection librdkafka itself ends, silently, as soon as it knows
            # the broker's number; of any other end of it there is a complaint.
            if one["source"] != "configured":
                self.disconnects[statistics["name"] + name] = one["disconnects"]

    def send(self, value: bytes) -> None:
        self.producer.produce(TOPIC, value)
        assert self.producer.flush(LONGEST_S) == 0

    def receive(self) -> bytes:
        message = self.consumer.poll(LONGEST_S)
        assert message is not None and message.error() is None, message
        value: bytes = message.value()
        return value

    def close(self) -> None:
        self.consumer.close()


def test_confluent_kafka_sees_no_disconnect(broker):
    client = Librdkafka(broker.bootstrap)
    try:
        client.send(b"first")
        assert client.receive() == b"first"
        for number in deaths(broker):
            client.send(b"%d" % number)
            assert client.receive() == b"%d" % number
        assert client.disconnects
        seen = sum(client.disconnects.values()), client.complaints.said, client.errors
        assert seen == (0, [], [])
    finally:
        client.close()


@pytest.mark.filterwarnings("ignore:(read|open)_text:DeprecationWarning")
def test_kafka_python_sees_no_disconnect(broker):
    from kafka import KafkaConsumer, KafkaProducer, TopicPartition

    complaints = Complaints()
    logger = logging.getLogger("kafka")
    logger.addHandler(complaints)
    producer = KafkaProducer(bootstrap_servers=broker.bootstrap, acks="all")
    consumer = KafkaConsumer(
        bootstrap_servers=broker.bootstrap,
        auto_offset_reset="earliest",
        consumer_timeout_ms=int(LONGEST_S * 1000),
    )
    try:
        consumer.assign([TopicPartition(TOPIC, 0)])
        producer.send(TOPIC, b"first").get(LONGEST_S)
        assert next(consumer).value == b"first"
        complaints.said.clear()  # it closes its bootstrap connection of its own accord
        for number in deaths(broker):
            producer.send(TOPIC, b"%d" % number).get(LONGEST_S)
            assert next(consumer).value == b"%d" % number
        assert complaints.said == []
    finally:
        producer.close()
        consumer.close()
        logger.removeHandler(complaints)

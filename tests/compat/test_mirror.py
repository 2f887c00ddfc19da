"""A mirror of Apache Kafka, and MirrorMaker 2 to take topics away again."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer

from tests.client.mirror import content
from tests.client.mirror.test_mirror import command, mirror, wait_for_end
from tests.support.apache_kafka import ApacheKafka, java_command
from tests.support.broker import Broker
from tests.support.children import wait_until
from tests.support.fetch_clients import have_java_tools

pytestmark = [
    pytest.mark.skipif(
        not have_java_tools(),
        reason="no Apache Kafka in .downloads/java: scripts/test fetches it with Maven",
    ),
    pytest.mark.timeout(600),
]

# Sessions that a busy machine keeps; Kafka's defaults, other than those of most tests.
PROPERTIES = """\
group.consumer.session.timeout.ms=45000
group.consumer.heartbeat.interval.ms=1000
log.cleaner.backoff.ms=100
log.flush.start.offset.checkpoint.interval.ms=100
log.initial.task.delay.ms=100
transaction.state.log.num.partitions=2
"""
COMPACTED = {
    "cleanup.policy": "compact",
    "segment.ms": "200",
    "min.cleanable.dirty.ratio": "0.01",
}


@pytest.fixture
def kafka(tmp_path: Path) -> Iterator[ApacheKafka]:
    with ApacheKafka(tmp_path / "kafka", heap="400m", properties=PROPERTIES) as made:
        yield made


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Broker]:
    with Broker(tmp_path / "target", {"offsets.topic.num.partitions": 2}) as broker:
        yield broker


def produce(bootstrap: str, topic: str, value: bytes, key: bytes | None = None) -> None:
    producer = Producer({"bootstrap.servers": bootstrap})
    producer.produce(topic, value, key)
    assert producer.flush(60) == 0


def has_gaps(bootstrap: str, topic: str) -> bool:
    """Return whether the cleaner has removed records; help it to close a segment."""
    produce(bootstrap, topic, b"more", b"k0")
    first, end = content.watermarks(bootstrap, topic)
    return len(content.read(bootstrap, topic)) < end - first - 20


def read_as_consumer_group(bootstrap: str, group: str, topic: str) -> None:
    """Read some records as a member of a group of the consumer protocol."""
    subprocess.run(
        java_command(
            "org.apache.kafka.tools.consumer.ConsoleConsumer",
            *("--bootstrap-server", bootstrap, "--topic", topic, "--group", group),
            *("--from-beginning", "--max-messages", "10"),
            *("--command-property", "group.protocol=consumer"),
        ),
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=200,
    )


def test_a_mirror_of_apache_kafka_is_the_same_to_its_clients(
    kafka: ApacheKafka, target: Broker
) -> None:
    """Kafka is killed and started again while the mirror follows it."""
    content.fill(kafka.bootstrap)
    content.create(kafka.bootstrap, {"m-cleaned": (1, COMPACTED)})
    for n in range(60):
        produce(kafka.bootstrap, "m-cleaned", b"%d" % n, b"k%d" % (n % 3))
    wait_until(lambda: has_gaps(kafka.bootstrap, "m-cleaned"))
    # From now on it stays as it is, so that the two can be compared.
    content.alter(kafka.bootstrap, "m-cleaned", {"min.compaction.lag.ms": "86400000"})
    read_as_consumer_group(kafka.bootstrap, "new-readers", "m-plain")
    with subprocess.Popen(command(kafka, target, "--follow")) as process:
        wait_for_end(target, "m-plain", 2, 1)
        kafka.kill()
        kafka.start()
        produce(kafka.bootstrap, "m-empty", b"after the crash")
        wait_for_end(
            target,
            "m-empty",
            next(p for p in (0, 1) if content.end(kafka.bootstrap, "m-empty", p)),
            1,
        )
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    done = mirror(kafka, target)
    assert done.returncode == 0, done.stderr
    names = [*content.TOPICS, "m-cleaned"]
    assert content.everything(target.bootstrap, names) == content.everything(
        kafka.bootstrap, names
    )
    for group in (content.GROUP, "new-readers"):
        offsets = content.commits(kafka.bootstrap, group)
        assert offsets
        assert content.commits(target.bootstrap, group) == offsets

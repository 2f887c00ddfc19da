"""`mpbroker mirror` between two brokers of ours; tests/compat has Apache Kafka."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Protocol

import pytest
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import NewPartitions

from mpbroker.client.admin.admin_client import AdminClient
from tests.client.mirror import content
from tests.support.broker import Broker
from tests.support.children import wait_until

_CONFIG = {
    "num.io.threads": 1,
    "num.network.threads": 1,
    "offsets.topic.num.partitions": 1,
    "transaction.state.log.num.partitions": 1,
    "group.initial.rebalance.delay.ms": 0,
}


class Bootstrap(Protocol):
    """A broker, of ours or another."""

    bootstrap: str


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("source") / "data", _CONFIG) as broker:
        content.fill(broker.bootstrap)
        yield broker


@pytest.fixture
def target(tmp_path) -> Iterator[Broker]:
    with Broker(tmp_path / "target", _CONFIG) as broker:
        yield broker


def mirror(
    source: Bootstrap, target: Bootstrap, *options: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(source, target, *options), capture_output=True, text=True, timeout=300
    )


def command(source: Bootstrap, target: Bootstrap, *options: str) -> list[str]:
    return [
        *(sys.executable, "-m", "mpbroker", "mirror"),
        *("--from", source.bootstrap, "-b", target.bootstrap),
        *(options if "--topics" in options else ("--topics", "m-.*", *options)),
    ]


def produce(bootstrap: str, topic: str, *values: bytes) -> None:
    producer = Producer({"bootstrap.servers": bootstrap})
    errors = []
    for value in values:
        producer.produce(
            topic, value, on_delivery=lambda error, _: errors.append(error)
        )
    assert producer.flush(60) == 0
    if any(errors):
        raise KafkaException(next(filter(None, errors)))


def test_everything_is_the_same_on_both_sides(source, target):
    done = mirror(source, target)
    assert done.returncode == 0, done.stderr
    names = list(content.TOPICS)
    assert content.everything(target.bootstrap, names) == content.everything(
        source.bootstrap, names
    )
    assert content.commits(target.bootstrap, content.GROUP) == content.commits(
        source.bootstrap, content.GROUP
    )
    # It is complete: producers may write. A second run finds what it has done.
    again = mirror(source, target)
    assert again.returncode == 0, again.stderr
    assert "m-plain is complete since an earlier run" in again.stderr
    produce(target.bootstrap, "m-plain", b"x")
    # Now the source is behind, and a mirror would have to give offsets twice.
    produce(source.bootstrap, "m-empty", b"x")
    refused = mirror(source, target, "--topics", "m-empty")
    assert refused.returncode == 1
    assert "is not being mirrored" in refused.stderr


def test_a_topic_refuses_producers_until_its_mirror_is_complete(source, target):
    """With --follow it grows with its source, and stays mirrored when it is stopped."""
    names = {"f-one": (1, {})}
    content.create(source.bootstrap, names)
    produce(source.bootstrap, "f-one", *(b"%d" % n for n in range(100)))
    options = ("--topics", "f-.*", "--follow")
    with subprocess.Popen(command(source, target, *options)) as process:
        wait_for_end(target, "f-one", 0, 100)
        with pytest.raises(KafkaException, match="POLICY_VIOLATION"):
            produce(target.bootstrap, "f-one", b"x")
        admin = content.admin_of(source.bootstrap)
        wanted = [NewPartitions("f-one", 2)]
        for future in admin.create_partitions(wanted).values():
            future.result(60)
        content.create(source.bootstrap, {"f-two": (1, {})})
        produce(source.bootstrap, "f-two", b"new")
        wait_for_end(target, "f-two", 0, 1)
        content.commit(source.bootstrap, "follower", {("f-one", 0): 42})
        wait_until(lambda: content.commits(target.bootstrap, "follower"))
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    assert content.partitions(target.bootstrap)["f-one"] == 2
    with pytest.raises(KafkaException, match="POLICY_VIOLATION"):
        produce(target.bootstrap, "f-one", b"x")
    done = mirror(source, target, "--topics", "f-.*")
    assert done.returncode == 0, done.stderr
    assert " 0 copied by this run" in done.stdout
    produce(target.bootstrap, "f-one", b"x")


def wait_for_end(broker: Bootstrap, topic: str, partition: int, end: int) -> None:
    """Wait until a partition has so many offsets."""

    def has() -> bool:
        if topic not in content.partitions(broker.bootstrap):
            return False
        try:
            return content.end(broker.bootstrap, topic, partition) >= end
        except KafkaException:  # it is not loaded yet
            return False

    wait_until(has)


def test_whatever_is_killed_nothing_is_lost_and_nothing_is_doubled(tmp_path):
    """SIGKILL for the mirror, then for the target, then for the source."""
    # So that the copy takes long enough to be killed in its middle.
    slow = {**_CONFIG, "fetch.max.bytes": 50_000}
    with (
        Broker(tmp_path / "source", slow) as source,
        Broker(tmp_path / "target", _CONFIG) as target,
    ):
        pinned(source)
        pinned(target)
        total = 20_000
        content.create(source.bootstrap, {"m-killed": (1, {"segment.bytes": "200000"})})
        producer = Producer({"bootstrap.servers": source.bootstrap, "linger.ms": 1})
        for n in range(total):
            producer.produce("m-killed", os.urandom(100), b"%d" % n)
            if n % 100 == 0:
                producer.flush(60)
        assert producer.flush(60) == 0
        content.create(source.bootstrap, {"m-transactions": (2, {})})
        content.transactions(source.bootstrap, "t", 4)
        limit_rate(source, 50_000)
        reached = 0
        for victim in ("mirror", "target", "source"):
            with subprocess.Popen(command(source, target)) as process:
                wait_for_end(target, "m-killed", 0, reached + 1)
                if victim != "mirror":
                    killed = target if victim == "target" else source
                    killed.kill()
                    killed.start()
                    reached = content.end(target.bootstrap, "m-killed")
                    wait_for_end(target, "m-killed", 0, reached + 1)
                process.kill()
            reached = content.end(target.bootstrap, "m-killed")
            assert reached < total, f"nothing was left to copy after {victim}"
        limit_rate(source, None)
        done = mirror(source, target)
        assert done.returncode == 0, done.stderr
        assert " 0 copied by this run" not in done.stdout
        topics = ["m-killed", "m-transactions"]
        assert content.everything(target.bootstrap, topics) == content.everything(
            source.bootstrap, topics
        )


def limit_rate(broker: Broker, rate: int | None) -> None:
    """Limit the bytes per second that a mirror reads; None: no limit."""
    with AdminClient({"bootstrap.servers": broker.bootstrap}) as admin:
        admin.alter_quotas({"client-id": "mpbroker"}, {"consumer_byte_rate": rate})


def pinned(broker: Broker) -> None:
    """Have a broker keep its port when it is started again."""
    broker.config["listeners"] = f"PLAINTEXT://{broker.bootstrap}"

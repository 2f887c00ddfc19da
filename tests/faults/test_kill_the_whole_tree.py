"""SIGKILL for all processes at once, amid acks=all load, again and again."""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path

import pytest

from tests.bench import wire
from tests.faults.producers import Ledger, Producer
from tests.support.broker import Broker
from tests.support.children import wait_until

CYCLES = int(os.environ.get("MPBROKER_KILL_CYCLES", "20"))
TOPIC = "killed"
PARTITIONS = 2


def address_of(broker: Broker) -> tuple[str, int]:
    host, _, port = broker.bootstrap.rpartition(":")
    return host, int(port)


def producers_for(broker: Broker, topic: str, partitions: int) -> list[Producer]:
    """Return two producers a partition: an idempotent one and a plain one."""
    with wire.Connection(address_of(broker)) as connection:
        connection.create_topic(topic, partitions)
    return [
        Producer(
            address_of(broker),
            topic,
            partition,
            f"{'idempotent' if idempotent else 'plain'}-{partition}",
            idempotent=idempotent,
        )
        for partition in range(partitions)
        for idempotent in (True, False)
    ]


@pytest.mark.timeout(240 + 30 * CYCLES)
def test_what_was_acknowledged_is_there_once_and_in_order(tmp_path: Path) -> None:
    rng = random.Random(5)
    broker = Broker(tmp_path / "data", {"log.flush.scheduler.interval.ms": 100})
    broker.start()
    try:
        producers = producers_for(broker, TOPIC, PARTITIONS)
        ledger = Ledger(TOPIC, producers)
        total = 0
        for _ in range(CYCLES):
            for producer in producers:
                producer.start(address_of(broker))
            # The length of the load is the point here: die anywhere in it.
            time.sleep(rng.uniform(0.2, 0.5))
            broker.kill()
            for producer in producers:
                producer.stop(broker_is_dead=True)
            broker.start()
            total += ledger.check(address_of(broker))
        assert total > CYCLES
        assert all(producer.acknowledged for producer in producers)
        broker.stop()
    finally:
        broker.kill()


def test_a_kill_during_start_leaves_a_data_directory_that_starts(
    tmp_path: Path,
) -> None:
    broker = Broker(tmp_path / "data")
    broker.start()
    producers = producers_for(broker, TOPIC, 1)
    ledger = Ledger(TOPIC, producers)
    for producer in producers:
        producer.start()
    wait_until(lambda: all(producer.acknowledged for producer in producers))
    broker.kill()
    for producer in producers:
        producer.stop(broker_is_dead=True)
    for _ in range(3):  # the second and third start find what a start left
        broker.start()
        broker.kill()
    with broker:
        assert ledger.check(address_of(broker)) > 0


def test_what_a_death_amid_a_deletion_left_goes_with_the_next_start(
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"
    broker = Broker(data)
    broker.start()
    try:
        with wire.Connection(address_of(broker)) as connection:
            for name in ("gone", "again", "stays"):
                connection.create_topic(name, 2)
                batch = wire.batch_of_size(200)
                connection.ask(wire.produce(name, 1, batch))
            for name in ("gone", "again"):
                # As whoever dies before the second of two renames leaves it.
                shutil.copytree(data / f"{name}-1", tmp_path / name)
                connection.delete_topic(name)
        broker.kill()
        for name in ("gone", "again"):
            shutil.move(tmp_path / name, data / f"{name}-1")
        broker.start()
        assert [path.name for path in data.glob("*-1")] == ["stays-1"]
        for name in ("gone", "again"):  # the broker's own deletion, and this start's
            assert len(list(data.glob(f"{name}-1.*-delete"))) == 2
        with wire.Connection(address_of(broker)) as connection:
            connection.create_topic("again", 2)
            assert connection.end_offset("again", 1) == 0
            assert connection.end_offset("stays", 1) > 0
        assert not list(data.glob("*-stray"))
        broker.stop()
    finally:
        broker.kill()

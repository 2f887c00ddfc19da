"""Cleaners compact logs in processes of their own, and may die at any moment."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from mpbroker.inspect.process_state import children_of
from mpbroker.storage.files.checkpoints import read_offsets
from mpbroker.storage.partition_directory import exclusive
from tests.exporter.asking import pids_of, wait_until
from tests.support.broker import Broker

COMPACT = {
    "cleanup.policy": "compact",
    "segment.bytes": "20000",
    "min.cleanable.dirty.ratio": "0.01",
}


def make_topic(broker: Broker, name: str, config: dict[str, str]) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    topic = NewTopic(name, 1, config=config)
    admin.create_topics([topic])[name].result(60)


def fill(broker: Broker, topic: str, rounds: range, keys: int = 50) -> None:
    client = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 1})
    for number in rounds:
        for key in range(keys):
            client.produce(topic, b"%d" % number * 20, b"key %d" % key)
        assert not client.flush(60)


def table_of(broker: Broker, topic: str) -> tuple[dict[bytes, bytes], int]:
    """Read all records; return the newest value of each key, and how many there are."""
    settings = {
        "bootstrap.servers": broker.bootstrap,
        "group.id": "reader",
        "enable.partition.eof": "true",
    }
    client = Consumer(settings)
    client.assign([TopicPartition(topic, 0, 0)])
    found, count = {}, 0
    while True:
        record = client.poll(60)
        assert record is not None
        if record.error():
            break
        found[record.key()] = record.value()
        count += 1
    client.close()
    return found, count


def cleaners(broker: Broker) -> list[int]:
    (housekeeper,) = pids_of(broker, "housekeeper")
    found = []
    for pid in children_of(housekeeper):
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"kafka-log-cleaner" in title:
            found.append(pid)
    return found


def clean_offset(broker: Broker, topic: str) -> int:
    path = broker.data_dir / "cleaner-offset-checkpoint"
    return read_offsets(str(path)).get((topic, 0), 0) if path.exists() else 0


def is_compacted(broker: Broker, topic: str) -> bool:
    """Return whether a process is at it now."""
    with exclusive(str(broker.data_dir / f"{topic}-0")) as is_free:
        return not is_free


def test_as_many_cleaners_as_are_set_compact_logs(tmp_path):
    config = {"log.cleaner.threads": 2, "log.cleaner.backoff.ms": 50}
    with Broker(tmp_path / "data", config) as broker:
        assert cleaners(broker) == []  # there is nothing to compact
        for name in ("a", "b"):
            make_topic(broker, name, COMPACT)
            fill(broker, name, range(20))
        wait_until(lambda: len(cleaners(broker)) == 2)
        for name in ("a", "b"):
            wait_until(lambda name=name: clean_offset(broker, name) > 500)
            found, count = table_of(broker, name)
            assert set(found.values()) == {b"19" * 20}
            assert count < 1000


def test_a_cleaner_that_is_killed_again_and_again_loses_no_newest_record(tmp_path):
    config = {"log.cleaner.threads": 2, "log.cleaner.backoff.ms": 1}
    with Broker(tmp_path / "data", config) as broker:
        make_topic(broker, "a", COMPACT)
        killed: set[int] = set()
        for turn in range(8):
            fill(broker, "a", range(turn * 10, turn * 10 + 10))
            for pid in cleaners(broker):
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            found, _ = table_of(broker, "a")
            assert set(found.values()) == {b"%d" % (turn * 10 + 9) * 20}
        assert killed
        wait_until(lambda: set(cleaners(broker)) - killed)
        wait_until(lambda: clean_offset(broker, "a") > 3500)
        found, count = table_of(broker, "a")
        assert set(found.values()) == {b"79" * 20}
        assert len(found) == 50
        assert count < 4000


def test_a_slow_compaction_holds_up_neither_retention_nor_a_stop(tmp_path):
    config = {
        "log.cleaner.backoff.ms": 50,
        "log.cleaner.io.max.bytes.per.second": 1,
        "log.retention.check.interval.ms": 100,
        "log.initial.task.delay.ms": 0,
    }
    with Broker(tmp_path / "data", config) as broker:
        make_topic(broker, "slow", COMPACT)
        fill(broker, "slow", range(20))
        # It sleeps for its rate in the middle of its work.
        wait_until(lambda: is_compacted(broker, "slow"))
        old = {"retention.bytes": "1", "segment.bytes": "20000"}
        make_topic(broker, "old", old)
        fill(broker, "old", range(20))
        first = broker.data_dir / "old-0" / f"{0:020d}.log"
        wait_until(lambda: not first.exists())
        assert is_compacted(broker, "slow")
        assert clean_offset(broker, "slow") == 0

"""Partitions move between log directories under a producer and a consumer."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from kafka import KafkaAdminClient
from kafka.errors import LogDirNotFoundError, NoError, UnknownTopicOrPartitionError

from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestTopic,
    OffsetFetchResponse,
)
from tests.bench import wire
from tests.exporter.asking import METRICS, get, pids_of, samples
from tests.faults.test_kill_the_whole_tree import address_of
from tests.support.broker import Broker
from tests.support.children import wait_until
from tests.support.dead_disk import kill_disk, revive_disk
from tests.support.patience import LONGEST_S

TOPIC = "t"
STORAGE_ERROR, LOADING = 56, 14  # the protocol's codes
NOT_AVAILABLE = "LEADER_NOT_AVAILABLE"
NOT_LEADER = "NOT_LEADER_OR_FOLLOWER"


class Workload:
    """A producer with acks=all, and what it was told; and a consumer that follows."""

    def __init__(self, bootstrap: str) -> None:
        self._at = {"bootstrap.servers": bootstrap, "log_level": 0}
        self._ends = threading.Event()
        self.acknowledged: dict[int, int] = {}  # offset by number
        self.read: list[int] = []
        self.failures: list[object] = []
        self._threads = [
            threading.Thread(target=work) for work in (self._produce, self._consume)
        ]
        for thread in self._threads:
            thread.start()

    def _produce(self) -> None:
        # Small enough that a batch never waits long, large enough for files' ranges.
        producer = Producer(
            {**self._at, "enable.idempotence": True, "linger.ms": 2, "acks": "all"}
        )
        number = 0
        while not self._ends.is_set():
            for _ in range(20):
                content = b"%d" % number + b"." * 2_000
                producer.produce(TOPIC, content, on_delivery=self._told)
                number += 1
            producer.poll(0.01)
            while len(producer) > 500:
                producer.poll(0.05)
        assert producer.flush(120) == 0

    def _told(self, error: object, message: object) -> None:
        if error is not None:
            self.failures.append(error)
            return
        self.acknowledged[_number(message)] = message.offset()  # type: ignore[attr-defined]

    def _consume(self) -> None:
        consumer = Consumer(
            {**self._at, "group.id": "g", "auto.offset.reset": "earliest"}
        )
        consumer.assign([TopicPartition(TOPIC, 0, 0)])
        while not self._ends.is_set():
            for message in consumer.consume(200, timeout=0.2):
                if message.error() is None:
                    self.read.append(_number(message))
        consumer.close()

    def end(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join(180)
            assert not thread.is_alive()
        assert not self.failures


def _number(message: object) -> int:
    return int(message.value().split(b".")[0])  # type: ignore[attr-defined]


def read_all(bootstrap: str, count: int) -> list[int]:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "all"})
    consumer.assign([TopicPartition(TOPIC, 0, 0)])
    found: list[int] = []

    def are_there() -> bool:
        found.extend(_number(m) for m in consumer.consume(1000, timeout=0.2))
        return len(found) >= count

    wait_until(are_there)
    end = consumer.get_watermark_offsets(TopicPartition(TOPIC, 0), timeout=60)[1]
    assert end == len(found)
    consumer.close()
    return found


def broker_of(tmp_path: Path) -> Broker:
    paths = [str(tmp_path / name) for name in ("data", "b")]
    # Log directories are told from each other by their number of partitions.
    return Broker(tmp_path / "data", {"log.dirs": ",".join(paths)})


def make_topic(broker: Broker) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    topic = NewTopic(TOPIC, 1, config={"segment.bytes": "1000000"})
    admin.create_topics([topic])[TOPIC].result(60)


def place(tmp_path: Path) -> str:
    """The log directory of the partition; at the end of a move two have it shortly."""

    def found() -> list[Path]:
        all_found = [*tmp_path.glob(f"*/{TOPIC}-0")]
        return all_found if len(all_found) == 1 else []

    return str(wait_until(found)[0].parent.name)


def move(admin: KafkaAdminClient, to: Path) -> type:
    (error,) = admin.alter_replica_log_dirs({(TOPIC, 0, 1): str(to)}).values()
    return error  # type: ignore[no-any-return]


def copies(admin: KafkaAdminClient) -> list[tuple[str, int]]:
    """The log directories that have a copy, and its lag."""
    return [
        (Path(directory["log_dir"]).name, partition["offset_lag"])
        for broker in admin.describe_log_dirs()
        for directory in broker["log_dirs"]
        for topic in directory["topics"]
        for partition in topic["partitions"]
        if partition["is_future_key"]
    ]


def test_a_producer_and_a_consumer_lose_and_double_nothing(tmp_path):
    with broker_of(tmp_path) as broker:
        make_topic(broker)
        work = Workload(broker.bootstrap)
        wait_until(lambda: len(work.read) > 3_000)
        admin = KafkaAdminClient(bootstrap_servers=broker.bootstrap)
        for _ in range(4):
            to = tmp_path / ("b" if place(tmp_path) == "data" else "data")
            assert move(admin, to) is NoError
            wait_until(lambda: not copies(admin))
            assert place(tmp_path) == to.name
            seen = len(work.read)
            wait_until(lambda seen=seen: len(work.read) > seen + 500)
        (housekeeper,) = pids_of(broker, "housekeeper")
        to = tmp_path / ("b" if place(tmp_path) == "data" else "data")
        assert move(admin, to) is NoError
        os.kill(housekeeper, signal.SIGKILL)
        wait_until(lambda: not copies(admin))
        assert place(tmp_path) == to.name
        work.end()
        admin.close()
        numbers = read_all(broker.bootstrap, len(work.acknowledged))
        assert numbers == list(range(len(numbers)))
        assert {n: n for n in numbers} == work.acknowledged
        assert work.read == numbers[: len(work.read)]


def test_a_broker_that_is_killed_during_a_move_has_all_that_it_acknowledged(tmp_path):
    broker = broker_of(tmp_path)
    broker.start()
    try:
        make_topic(broker)
        producer = Producer({"bootstrap.servers": broker.bootstrap, "acks": "all"})
        for number in range(9_000):
            producer.produce(TOPIC, b"%d" % number + b"." * 2_000)
            producer.poll(0)
        assert producer.flush(120) == 0
        admin = KafkaAdminClient(bootstrap_servers=broker.bootstrap)
        to = tmp_path / ("b" if place(tmp_path) == "data" else "data")
        assert move(admin, to) is NoError
        admin.close()
        broker.kill()
        broker.start()
        numbers = read_all(broker.bootstrap, 9_000)
        assert numbers == list(range(9_000))
        # It goes on by itself.
        wait_until(lambda: not [*tmp_path.glob(f"*/{TOPIC}-0.*-future")])
        assert place(tmp_path) == to.name
        assert read_all(broker.bootstrap, 9_000) == numbers
    finally:
        broker.stop()


def test_clients_are_told_what_is_wrong(tmp_path):
    with broker_of(tmp_path) as broker:
        make_topic(broker)
        admin = KafkaAdminClient(bootstrap_servers=broker.bootstrap)
        assert move(admin, tmp_path / "nope") is LogDirNotFoundError
        answers = admin.alter_replica_log_dirs({("nope", 0, 1): str(tmp_path / "b")})
        assert [*answers.values()] == [UnknownTopicOrPartitionError]
        # A partition that was never used has no files yet.
        assert move(admin, tmp_path / "b") is NoError
        wait_until(lambda: not copies(admin))
        assert place(tmp_path) == "b"
        admin.close()


def log_dirs(broker: Broker) -> dict[str, tuple[int, set[int]]]:
    """The error code of each log directory, and the topic's partitions in it."""
    admin = KafkaAdminClient(bootstrap_servers=broker.bootstrap)
    (answer,) = admin.describe_log_dirs()
    admin.close()
    return {
        Path(each["log_dir"]).name: (
            each["error_code"],
            {
                partition["partition_index"]
                for topic in each["topics"]
                for partition in topic["partitions"]
                if topic["name"] == TOPIC
            },
        )
        for each in answer["log_dirs"]
    }


def produce(broker: Broker, partitions: Iterable[int]) -> set[str | None]:
    """Produce a record to each partition, with a leader or not; return the errors."""
    content = wire.record_batch([wire.RecordSpec(b"x")])
    with wire.Connection(address_of(broker), LONGEST_S) as connection:
        answers = [
            connection.ask(wire.produce(TOPIC, partition, content))
            for partition in partitions
        ]
    codes = {wire.parse_produce(answer).error_code for answer in answers}
    return {ErrorCode(code).name if code else None for code in codes}


def leaderless(broker: Broker) -> set[int]:
    """The topic's partitions that have no leader, as librdkafka is told."""
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    found = admin.list_topics(TOPIC, timeout=LONGEST_S).topics[TOPIC].partitions
    without = {number for number, each in found.items() if each.leader == -1}
    for number, each in found.items():
        is_led = number not in without
        assert each.error is None if is_led else each.error.name() == NOT_AVAILABLE
    return without


def spread(broker: Broker) -> tuple[set[int], set[int]]:
    """Make a topic; return its partitions in the first and the second directory."""
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.create_topics([NewTopic(TOPIC, 4)])[TOPIC].result(60)
    assert produce(broker, range(4)) == {None}
    found = log_dirs(broker)
    assert found["data"][1] and found["b"][1]
    return found["data"][1], found["b"][1]


def test_a_dead_disk_takes_its_own_partitions_only(tmp_path):
    """While the broker runs, at its clean stop, at its next start, and afterwards."""
    broker = broker_of(tmp_path)
    broker.start()
    try:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        for name in (TOPIC, "doomed"):
            admin.create_topics([NewTopic(name, 4)])[name].result(60)
        everywhere = range(4)
        assert produce(broker, everywhere) == {None}
        before = log_dirs(broker)
        (_, alive), (_, dead) = before["data"], before["b"]
        assert alive and dead and alive | dead == {*everywhere}
        (housekeeper,) = pids_of(broker, "housekeeper")
        kill_disk(tmp_path / "b")
        assert log_dirs(broker) == {"data": (0, alive), "b": (STORAGE_ERROR, set())}
        assert produce(broker, alive) == {None}
        admin.delete_topics(["doomed"])["doomed"].result(60)
        wait_until(lambda: not [*(tmp_path / "data").glob("doomed-?")])
        assert pids_of(broker, "housekeeper") == [housekeeper]
        wait_until(lambda: leaderless(broker) == dead)
        broker.stop()
        assert (tmp_path / "data" / ".kafka_cleanshutdown").exists()
        broker.start()
        assert log_dirs(broker) == {"data": (0, alive), "b": (STORAGE_ERROR, set())}
        assert produce(broker, alive) == {None}
        assert produce(broker, dead) == {NOT_LEADER}
        assert leaderless(broker) == dead
        broker.stop()
        revive_disk(tmp_path / "b")
        broker.start()
        assert log_dirs(broker) == before
        assert produce(broker, everywhere) == {None}
        assert leaderless(broker) == set()
    finally:
        broker.close()


def committed(broker: Broker, group: str) -> tuple[int, int]:
    """The group's offset of the topic's partition 0, and the error code."""
    request = OffsetFetchRequest(
        group_id=group,
        topics=[OffsetFetchRequestTopic(name=TOPIC, partition_indexes=[0])],
    )
    framed = wire.request((request.api_key, 7), request.encode(7))
    with wire.Connection(address_of(broker), 60) as connection:
        answer = OffsetFetchResponse.decode(7, connection.ask(framed)[5:])
    for topic in answer.topics:
        for partition in topic.partitions:
            return partition.committed_offset, answer.error_code or partition.error_code
    return -1, answer.error_code


def test_groups_on_a_dead_disk_are_not_told_that_they_have_no_offsets(tmp_path):
    """They would begin anew: at the log's start or, worse, at its end."""
    groups = [f"group-{number}" for number in range(6)]
    broker = broker_of(tmp_path)
    broker.start()
    try:
        make_topic(broker)
        for group in groups:
            consumer = Consumer(
                {"bootstrap.servers": broker.bootstrap, "group.id": group}
            )
            consumer.commit(offsets=[TopicPartition(TOPIC, 0, 7)], asynchronous=False)
            consumer.close()
        broker.stop()
        assert [*(tmp_path / "data").glob("__consumer_offsets-*")]
        assert [*(tmp_path / "b").glob("__consumer_offsets-*")]
        kill_disk(tmp_path / "b")
        broker.start()

        def answers() -> dict[str, tuple[int, int]]:
            return {group: committed(broker, group) for group in groups}

        wait_until(lambda: LOADING not in {error for _, error in answers().values()})
        found = answers()
        alive = [group for group in groups if found[group] == (7, 0)]
        assert alive and len(alive) < len(groups)
        assert all(error for offset, error in found.values() if offset != 7)
        broker.stop()
        revive_disk(tmp_path / "b")
        broker.start()
        wait_until(lambda: {*answers().values()} == {(7, 0)})
    finally:
        broker.close()


def test_a_broker_with_a_dead_disk_is_upgraded_in_place(tmp_path):
    command = [sys.executable, "-m", "mpbroker", "ctl", "upgrade", "--data-dir"]
    with broker_of(tmp_path) as broker:
        alive, dead = spread(broker)
        kill_disk(tmp_path / "b")
        subprocess.run([*command, tmp_path / "data"], check=True)
        assert log_dirs(broker) == {"data": (0, alive), "b": (STORAGE_ERROR, set())}
        assert produce(broker, alive) == {None}
        assert produce(broker, dead) == {"KAFKA_STORAGE_ERROR"}
        broker.stop()
        revive_disk(tmp_path / "b")
        broker.start()
        assert log_dirs(broker) == {"data": (0, alive), "b": (0, dead)}
        assert produce(broker, range(4)) == {None}


def of(broker: Broker) -> tuple[object, ...]:
    return "--data-dir", broker.data_dir


def at(broker: Broker) -> tuple[str, ...]:
    return "--bootstrap-server", broker.bootstrap, "--format", "json"


def run(*arguments: object) -> str:
    """Run `mpbroker ARGUMENTS`; return what it writes."""
    command = [sys.executable, "-m", "mpbroker", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout


def offline_directories(broker: Broker) -> list[str]:
    """Return the log directories that status, as text and as JSON, tells of."""
    found: list[str] = json.loads(run("ctl", "status", "--json", *of(broker)))[
        "offline_log_dirs"
    ]
    text = run("ctl", "status", *of(broker))
    for path in found:
        assert f"OFFLINE      {path}: its partitions are refused" in text
    return found


def test_a_lost_disk_takes_its_own_partitions_only(tmp_path):
    """It is taken out of log.dirs, or an empty one is mounted in its place."""
    broker = broker_of(tmp_path)
    with broker:
        alive, dead = spread(broker)
    with Broker(tmp_path / "data", METRICS) as alone:
        assert produce(alone, alive) == {None}
        assert produce(alone, dead) == {NOT_LEADER}
        assert leaderless(alone) == dead
        (told,) = json.loads(run("topic", "describe", TOPIC, *at(alone)))
        ends = {each["partition"]: each["end_offset"] for each in told["partitions"]}
        assert {number for number, end in ends.items() if end is None} == dead
        one = f"-p{min(alive)}"
        read = run("consume", "-t", TOPIC, one, "-e", "-b", alone.bootstrap)
        assert read == "x\n" * (ends[min(alive)] or 0)
        assert f"the directory {tmp_path / 'b'} with" in alone.log_path.read_text()
        assert offline_directories(alone) == [str(tmp_path / "b")]
        found = samples(get(alone)[1])
        assert found["mpbroker_partitions_offline"] == len(dead)
        shown = f'mpbroker_log_end_offset{{topic="{TOPIC}",partition="%d"}}'
        assert {n for n in range(4) if shown % n not in found} == dead
    (tmp_path / "b").rename(tmp_path / "away")
    with broker:
        assert produce(broker, alive) == {None}
        assert produce(broker, dead) == {NOT_LEADER}
    shutil.rmtree(tmp_path / "b")
    (tmp_path / "away").rename(tmp_path / "b")
    with broker:
        assert produce(broker, range(4)) == {None}
        assert log_dirs(broker) == {"data": (0, alive), "b": (0, dead)}
        assert offline_directories(broker) == []
    # It is given up, as the log says, while a broker runs without it.
    shutil.rmtree(tmp_path / "b")
    with Broker(tmp_path / "data") as alone:
        assert produce(alone, dead) == {NOT_LEADER}
        assert leaderless(alone) == dead
        run("log-dirs", "forget", "--yes", tmp_path / "b", *of(alone))
        assert offline_directories(alone) == []
        assert leaderless(alone) == set()
        assert produce(alone, range(4)) == {None}
    with broker:
        assert "was given up (mpbroker log-dirs forget)" in broker.log_path.read_text()
        assert produce(broker, range(4)) == {None}

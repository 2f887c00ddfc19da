"""Clients of other projects read a topic of 50 segments, 48 of them in the store."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
)
from kafka import KafkaConsumer
from kafka import TopicPartition as PurePartition

from mpbroker.storage.remote.object_store import ObjectStore
from tests.compat.adapters import ADAPTERS
from tests.compat.test_java_tools import TOOLS, run_java
from tests.support.broker import Broker
from tests.support.children import wait_until
from tests.support.fetch_clients import FRANZ_GO, have_java_tools

# Each start of Java takes a second, and ten where cores are busy.

TOPIC = "tiered"
SEGMENTS, REMOTE = 50, 48
SEGMENT_BYTES = 16_000
# Records are from the near future: markers of transactions have timestamps, too, and
# the first record at or after a time may be one of them.
_AHEAD_MS = 600_000
SETTINGS = {
    "remote.log.storage.system.enable": "true",
    "remote.log.manager.task.interval.ms": "100",
    "log.retention.check.interval.ms": "100",
    "log.initial.task.delay.ms": "0",
    "remote.fetch.max.wait.ms": "5000",
    "num.io.threads": "2",
}
TIERED = {
    "remote.storage.enable": "true",
    "remote.log.copy.disable": "true",
    "segment.bytes": f"{SEGMENT_BYTES}",
    "retention.ms": "-1",
}

needs_java = pytest.mark.skipif(
    not have_java_tools(),
    reason="no Apache Kafka in .downloads/java: scripts/test fetches it with Maven",
)
needs_franz_go = pytest.mark.skipif(
    not FRANZ_GO.exists(), reason="no franz-go in .downloads: scripts/test builds it"
)


class Written:
    """A topic whose first segments are in the store.

    Attributes:
        bootstrap: of its broker.
        committed: (offset, timestamp, value) of all committed records, in order.
        aborted: those of aborted transactions.
        bases: where its segments begin.
        first_local: the first offset that is local.
    """

    def __init__(self, broker: Broker) -> None:
        self.bootstrap = broker.bootstrap
        self.directory = Path(broker.data_dir, f"{TOPIC}-0")
        self.committed: list[tuple[int, int, bytes]] = []
        self.aborted: list[tuple[int, int, bytes]] = []
        self._write()
        self.bases = self.local()
        self.contents = [
            (self.directory / f"{base:020d}.log").read_bytes() for base in self.bases
        ]

    def local(self) -> list[int]:
        return sorted(int(each.stem) for each in self.directory.glob("*.log"))

    def _write(self) -> None:
        """Write transactions, of which each third is aborted, until there are 50."""
        draw = random.Random(22)
        producer = Producer(
            {
                "bootstrap.servers": self.bootstrap,
                "transactional.id": "writer",
                "batch.size": 3000,
            }
        )
        producer.init_transactions(60)
        now = time.time_ns() // 1_000_000 + _AHEAD_MS
        number = turn = 0
        while len(self.local()) < SEGMENTS:
            taken = self.aborted if turn % 3 == 1 else self.committed

            def note(error, message, taken=taken):
                assert error is None, error
                _, timestamp = message.timestamp()
                taken.append((message.offset(), timestamp, message.value()))

            producer.begin_transaction()
            for _ in range(draw.randint(20, 60)):
                value = b"%06d" % number * draw.randint(10, 50)
                producer.produce(
                    TOPIC, value, timestamp=now + 10 * number, on_delivery=note
                )
                number += 1
            assert producer.flush(60) == 0
            if taken is self.aborted:
                producer.abort_transaction(60)
            else:
                producer.commit_transaction(60)
            turn += 1

    def tier(self) -> None:
        """Let all but two segments go to the store."""
        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        changes = {
            "remote.log.copy.disable": "false",
            "local.retention.bytes": f"{len(self.contents[-2])}",
        }
        resource = ConfigResource(
            ConfigResource.Type.TOPIC,
            TOPIC,
            incremental_configs=[
                ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
                for name, value in changes.items()
            ],
        )
        admin.incremental_alter_configs([resource])[resource].result(60)
        wait_until(lambda: len(self.local()) == SEGMENTS - REMOTE)
        (self.first_local, _) = self.local()

    def committed_from(self, offset: int) -> list[tuple[int, int, bytes]]:
        return [each for each in self.committed if each[0] >= offset]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiered")
    (folder / "store").mkdir()
    url = f"file://{folder}/store"
    with Broker(folder / "data", {**SETTINGS, "remote.storage.url": url}) as broker:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        admin.create_topics([NewTopic(TOPIC, 1, config=TIERED)])[TOPIC].result(60)
        topic = Written(broker)
        assert len(topic.committed) > len(topic.aborted) > 500
        assert not list(folder.rglob("store/**/*.log"))
        topic.tier()
        store = ObjectStore(url)
        keys = sorted(each for each in store.list("") if each.endswith(".log"))
        names = [int(each.rpartition("/")[2][:20]) for each in keys]
        assert names[:REMOTE] == topic.bases[:REMOTE]
        # The same bytes as before.
        assert list(map(store.get, keys)) == topic.contents[: len(keys)]
        yield topic


def starts(written):
    """Return offsets to begin at: of the first record, in the store, at the border."""
    return [0, written.bases[17] + 3, written.bases[REMOTE - 1]]


@pytest.mark.parametrize(
    "name",
    ["confluent-kafka", pytest.param("franz-go", marks=needs_franz_go)],
)
def test_a_consumer_of_committed_records_reads_what_it_read_before(written, name):
    with ADAPTERS[name](written.bootstrap) as client:
        for first in starts(written):
            expected = written.committed_from(first)
            found = client.consume(TOPIC, 0, first, len(expected))
            assert [(m.offset, m.timestamp_ms, m.value) for m in found] == expected
        timestamps_are_found(written, client)


def timestamps_are_found(written, client):
    everything = sorted(written.committed + written.aborted)
    for record in everything[:: len(everything) // 12]:
        offset, timestamp, _ = record
        # Timestamps grow by 10, and a lookup does not know of transactions.
        assert client.offset_for_time(TOPIC, 0, timestamp - 5) == offset
    assert client.offsets(TOPIC, 0)[0] == 0


@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
def test_kafka_python_reads_what_it_read_before(written, isolation):
    partition = PurePartition(TOPIC, 0)
    consumer = KafkaConsumer(
        bootstrap_servers=written.bootstrap, isolation_level=isolation
    )
    consumer.assign([partition])
    expected = written.committed
    if isolation == "read_uncommitted":
        expected = sorted(written.committed + written.aborted)
    consumer.seek(partition, 0)
    found = []
    while len(found) < len(expected):
        for each in consumer.poll(timeout_ms=1000).values():
            found += [(one.offset, one.timestamp, one.value) for one in each]
    assert found == expected
    consumer.close()
    with ADAPTERS["kafka-python"](written.bootstrap) as client:
        timestamps_are_found(written, client)


@needs_java
def test_javas_consumer_reads_what_it_read_before(written):
    first = starts(written)[1]
    expected = written.committed_from(first)
    shown = ("timestamp", "offset")
    printed = run_java(
        f"{TOOLS}.consumer.ConsoleConsumer",
        *("--bootstrap-server", written.bootstrap, "--topic", TOPIC),
        *("--partition", "0", "--offset", f"{first}"),
        *("--isolation-level", "read_committed"),
        *("--max-messages", f"{len(expected)}", "--timeout-ms", "60000"),
        *(
            part
            for name in shown
            for part in ("--formatter-property", f"print.{name}=true")
        ),
    )
    assert printed.splitlines() == [
        f"CreateTime:{timestamp}\tOffset:{offset}\t{value.decode()}"
        for offset, timestamp, value in expected
    ]


@needs_java
def test_kafkas_tools_tell_of_both_tiers(written):
    server = ("--bootstrap-server", written.bootstrap)
    middle, timestamp, _ = written.committed[len(written.committed) // 3]
    ends = {
        "earliest-local": written.first_local,
        "latest-tiered": written.bases[-1] - 1,
        "earliest-pending-upload": written.bases[-1],
        f"{timestamp - 5}": middle,
    }
    for asked, offset in ends.items():
        told = run_java(
            f"{TOOLS}.GetOffsetShell", *server, "--topic", TOPIC, "--time", asked
        )
        assert told.strip() == f"{TOPIC}:0:{offset}", asked
    told = run_java(
        f"{TOOLS}.LogDirsCommand", *server, "--describe", "--topic-list", TOPIC
    )
    (directory,) = json.loads(told.splitlines()[-1])["brokers"][0]["logDirs"]
    (partition,) = directory["partitions"]
    # What is on this machine's disk.
    assert partition["size"] == sum(
        (written.directory / f"{base:020d}.log").stat().st_size
        for base in written.local()
    )
    assert partition["size"] < 3 * SEGMENT_BYTES
    topic = ("--entity-type", "topics", "--entity-name", TOPIC)
    config = f"{TOOLS}.ConfigCommand"
    run_java(
        config, *server, *topic, "--alter", "--add-config", "local.retention.ms=90000"
    )
    told = run_java(config, *server, *topic, "--describe")
    assert "local.retention.ms=90000" in told
    assert "remote.storage.enable=true" in told
    assert f"local.retention.bytes={len(written.contents[-2])}" in told

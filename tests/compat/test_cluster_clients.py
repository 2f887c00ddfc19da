"""Clients of other projects on a topic of three nodes, one of which is killed."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.broker.test_shared_topics import HeldCommits, knows, new_cluster
from tests.cluster.conftest import (  # noqa: F401 - fixtures
    cluster_template,
    empty_url,
    execute,
    shared_server,
)
from tests.compat.adapters import ADAPTERS, Outgoing
from tests.compat.adapters.line_client import LineClient, to_json
from tests.support.apache_kafka import java_command
from tests.support.broker import Broker
from tests.support.children import wait_until
from tests.support.fetch_clients import (
    FRANZ_GO,
    NODE_DIR,
    ROOT,
    have_java_clients,
    have_kafkajs,
)

TOPIC = "shared"
RECORDS = 80
VALUE_BYTES = 4000
BATCH_BYTES = 5000  # a record each
DELETED = 7
WRITERS = ("java", "franz-go", "kafkajs", "aiokafka")  # of partitions 0 to 3
READERS = ("aiokafka", "java", "franz-go")  # kafkajs has consumers in groups only
BEGUN = "SELECT 1 FROM mpbroker.partition_head WHERE part = $1 AND high_watermark > 0"


def value(partition: int, number: int) -> bytes:
    return f"{partition}:{number}:".encode().ljust(VALUE_BYTES, b"x")


def outgoing(partition: int) -> list[Outgoing]:
    return [
        Outgoing(value(partition, number), partition=partition)
        for number in range(RECORDS)
    ]


class Clients:
    """The clients of a test, which end with it."""

    def __init__(self, stack: ExitStack, bootstrap: str) -> None:
        self._stack = stack
        # They start slowly: begun now, all of them write at the same time.
        self._ready = {kind: self._start(kind) for kind in ("java", "kafkajs")}
        self._ready["java"].ask(
            "consume", bootstrap=bootstrap, topic=TOPIC, partition=0, count=0
        )
        self._ready["kafkajs"].ask("topics", bootstrap=bootstrap)

    def _start(self, kind: str) -> LineClient:
        if kind == "java":
            child = LineClient(java_command("TransactionalClient"), os.environ)
        else:
            script = ROOT / "tests" / "compat" / "node" / "kafkajs.cjs"
            environ = os.environ | {
                "NODE_PATH": str(NODE_DIR / "node_modules"),
                "KAFKAJS_NO_PARTITIONER_WARNING": "1",
            }
            child = LineClient(["node", str(script)], environ)
        self._stack.callback(child.close)
        return child

    def write(self, kind: str, bootstrap: str, partition: int) -> list[int]:
        """Produce with an id, in order; return the offset of each record."""
        records = outgoing(partition)
        if kind in ADAPTERS:
            with ADAPTERS[kind](bootstrap) as client:
                return client.produce(
                    TOPIC, records, idempotent=True, max_request_bytes=BATCH_BYTES
                )
        found: list[int] = self._ready[kind].ask(
            "stream",
            bootstrap=bootstrap,
            topic=TOPIC,
            records=[to_json(each) for each in records],
            batch_bytes=BATCH_BYTES,
            retries=30,
        )
        return found

    def read(
        self, kind: str, bootstrap: str, partition: int
    ) -> list[tuple[int, bytes | None]]:
        """Return offset and value of a partition's first records."""
        if kind in ADAPTERS:
            with ADAPTERS[kind](bootstrap) as client:
                found = client.consume(TOPIC, partition, 0, RECORDS)
                return [(each.offset, each.value) for each in found]
        answer = self._start(kind).ask(
            "consume",
            bootstrap=bootstrap,
            topic=TOPIC,
            partition=partition,
            count=RECORDS,
        )
        return [(each["offset"], base64.b64decode(each["value"])) for each in answer]


@pytest.fixture
def settings(tmp_path: Path, empty_url: str) -> dict[str, str]:  # noqa: F811
    store = tmp_path / "store"
    store.mkdir()
    return new_cluster(empty_url, f"file://{store}")


@pytest.fixture
def nodes(tmp_path: Path, settings: dict[str, str]) -> Iterator[list[Broker]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                Broker(tmp_path / f"node{number}", {**settings, "node.id": str(number)})
            )
            for number in range(1, 4)
        ]


def content(node: Broker, partition: int) -> bytes:
    """Return the batches of a partition in a stopped node's local log."""
    segments = sorted((node.data_dir / f"{TOPIC}-{partition}").glob("*.log"))
    return b"".join(segment.read_bytes() for segment in segments)


def delete_by_tool(node: Broker, file: Path) -> None:
    """Delete the first records of partition 2 with Kafka's own tool."""
    wanted = {"topic": TOPIC, "partition": 2, "offset": DELETED}
    file.write_text(json.dumps({"partitions": [wanted], "version": 1}))
    command = java_command("org.apache.kafka.tools.DeleteRecordsCommand")
    done = subprocess.run(
        [*command, "--bootstrap-server", node.bootstrap, "--offset-json-file", file],
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"low_watermark: {DELETED}" in done.stdout


def begin_of(node: Broker) -> int:
    with ADAPTERS["confluent-kafka"](node.bootstrap) as client:
        return client.offsets(TOPIC, 2)[0]


def is_busy(writing: dict[int, Future[list[int]]]) -> bool:
    """Return whether a client of the first node is writing."""
    return not (writing[0].done() and writing[3].done())


@pytest.mark.skipif(not have_java_clients(), reason="no client with Kafka's own")
@pytest.mark.skipif(not have_kafkajs(), reason="no kafkajs: scripts/test fetches it")
@pytest.mark.skipif(not FRANZ_GO.exists(), reason="no franz-go client")
def test_every_client_goes_on_when_its_node_is_killed(
    nodes: list[Broker], settings: dict[str, str], tmp_path: Path
) -> None:
    url = settings["cluster.database.url"]
    with ADAPTERS["confluent-kafka"](nodes[0].bootstrap) as admin:
        admin.create_topic(TOPIC, len(WRITERS), {"diskless.enable": "true"})
    wait_until(lambda: all(knows(node, TOPIC) for node in nodes))
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(2 * len(WRITERS)))
        clients = Clients(stack, nodes[2].bootstrap)
        writing: dict[int, Future[list[int]]] = {}

        def begin(partition: int) -> None:
            kind, node = WRITERS[partition], nodes[partition % 3]
            writing[partition] = pool.submit(
                clients.write, kind, node.bootstrap, partition
            )

        for partition in (0, 3):  # at the node that is killed
            begin(partition)
            wait_until(lambda number=partition: execute(url, BEGUN, number))
        # Objects are in the store, and their commits are on the way: these are done,
        # though the node that asked for them is dead.
        held = HeldCommits(url)
        stack.callback(held.release)
        reading = {
            number: pool.submit(clients.read, kind, nodes[number].bootstrap, number)
            for number, kind in enumerate(READERS)
        }
        for partition in (1, 2):
            begin(partition)
        wait_until(lambda: len(held.waiting()) == (3 if is_busy(writing) else 2))
        nodes[0].kill()
        held.release()
        acknowledged = [writing[number].result() for number in range(len(WRITERS))]
        found = {partition: each.result() for partition, each in reading.items()}
    expected = list(range(RECORDS))
    assert acknowledged == [expected] * len(WRITERS)
    for partition, records in found.items():
        assert records == [(each, value(partition, each)) for each in expected]
    nodes[0].start()
    with ExitStack() as stack:
        for node in nodes:
            client = stack.enter_context(ADAPTERS["confluent-kafka"](node.bootstrap))
            for partition in range(len(WRITERS)):
                records = client.consume(TOPIC, partition, 0, RECORDS)
                assert [(each.offset, each.value) for each in records] == [
                    (each, value(partition, each)) for each in expected
                ]
                assert client.offsets(TOPIC, partition) == (0, RECORDS)
    delete_by_tool(nodes[1], tmp_path / "wanted.json")
    for node in nodes:
        wait_until(lambda node=node: begin_of(node) == DELETED)
        node.close()
    for partition in range(len(WRITERS)):
        first, *others = (content(node, partition) for node in nodes)
        assert len(first) > RECORDS * VALUE_BYTES
        assert others == [first, first]

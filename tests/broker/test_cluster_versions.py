"""A cluster is upgraded: first its database, then its nodes, one after the other."""

from __future__ import annotations

import subprocess
import sys

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

import mpbroker
from tests.broker.test_cluster_metadata import create, create_patiently, nodes, topics
from tests.broker.test_cluster_node import store  # noqa: F401 - a fixture
from tests.cluster.conftest import (  # noqa: F401 - fixtures
    empty_url,
    shared_server,
)
from tests.support.broker import Broker, BrokerFailedError
from tests.support.children import wait_until
from tests.support.version_before import python_of, version_before

PATIENCE_S = 60
SHARED = mpbroker.ConfigResource(mpbroker.ConfigResourceType.TOPIC, "shared")
GROUPS = [f"group{number}" for number in range(6)]  # of both nodes


def test_nodes_of_two_versions_work_side_by_side(empty_url, store, tmp_path):  # noqa: F811
    old_python = python_of(version_before(tmp_path / "before"))
    settings = {
        "cluster.database.url": empty_url,
        "diskless.storage.url": store,
        "num.io.threads": "1",
    }
    place = ["--database", empty_url, "--storage", store]
    run([*old_python, "-m", "mpbroker", "cluster", "init", *place])
    old = Broker(
        tmp_path / "node1",
        {**settings, "node.id": "1"},
        command=[*old_python, "-m", "mpbroker"],
    )
    new = Broker(tmp_path / "node2", {**settings, "node.id": "2"})
    with old:
        create(old, "shared", num_partitions=1, config={"diskless.enable": "true"})
        produce(old, "made by the old schema")
        with pytest.raises(BrokerFailedError, match="run 'mpbroker cluster migrate'"):
            new.start()
        run([sys.executable, "-m", "mpbroker", "cluster", "migrate", *place[:2]])
        produce(old, "after the migration")
        with new:
            check_both(old, new, 2)
            # One that crashes in the middle of the upgrade comes back.
            old.kill()
            create_patiently(new, ["meanwhile"])
            old.start()
            wait_until(lambda: "meanwhile" in topics(old))
            check_both(old, new, 4)


def run(command: list[str]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def produce(broker: Broker, text: str) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    producer.produce("shared", text)
    assert producer.flush(PATIENCE_S) == 0


def check_both(one: Broker, other: Broker, records: int) -> None:
    """Change metadata, produce, fetch and commit at both nodes; both have all of it.

    Args:
        records: the number of records that the topic has before.
    """
    for each in (one, other):
        wait_until(lambda each=each: len(nodes(each)) == 2)
    for each, beside in ((one, other), (other, one)):
        produce(each, "more")
        create_patiently(each, [f"t{records}-{each.data_dir.name}"])
        with mpbroker.AdminClient(bootstrap_servers=each.bootstrap) as client:
            client.alter_configs(SHARED, {"retention.ms": f"{60_000_000 + records}"})
        wait_until(lambda each=each, beside=beside: topics(each) == topics(beside))
    ends = {}
    for each in (one, other):
        for group in GROUPS:
            consumer = Consumer(
                {
                    "bootstrap.servers": each.bootstrap,
                    "group.id": group,
                    "enable.auto.commit": False,
                }
            )
            place = TopicPartition("shared", 0)
            if each is one:
                consumer.assign([TopicPartition("shared", 0, 0)])
                assert len(consumer.consume(records + 2, PATIENCE_S)) == records + 2
                consumer.commit(asynchronous=False)
            (ends[group, each.data_dir.name],) = consumer.committed([place], PATIENCE_S)
            consumer.close()
    assert {each.offset for each in ends.values()} == {records + 2}

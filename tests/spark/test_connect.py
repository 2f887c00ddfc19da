"""A session of Spark Connect reads and writes topics, on a real server of its own.

Client and server are processes of their own: a process that has a session of another
kind, as those of the other tests have, may not begin one of Spark Connect.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer

from tests.spark.cluster import has_java, spark_environ
from tests.support.children import wait_until
from tests.support.ports import reusable_port

DIE_WITH_US = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
CLIENT = """
import json, sys
from pyspark.sql import SparkSession
from mpbroker.spark import register

address, bootstrap, topic, other, scratch = sys.argv[1:]
spark = SparkSession.builder.remote(address).getOrCreate()
assert type(spark).__module__ == "pyspark.sql.connect.session"
register(spark)

def options(subscribe):
    return {"kafka.bootstrap.servers": bootstrap, "subscribe": subscribe}

def rows(frame):
    return sorted(map(tuple, frame.selectExpr(
        "partition", "offset", "CAST(key AS STRING)", "CAST(value AS STRING)"
    ).collect()))

found = {}
batch = spark.read.format("mpbroker").options(**options(topic)).load()
found["batch"] = rows(batch)
query = (
    spark.readStream.format("mpbroker")
    .options(startingOffsets="earliest", maxOffsetsPerTrigger="4", **options(topic))
    .load()
    .writeStream.format("parquet")
    .option("path", f"{scratch}/rows")
    .option("checkpointLocation", f"{scratch}/checkpoint")
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()
found["batches"] = query.lastProgress["batchId"] + 1
found["stream"] = rows(spark.read.parquet(f"{scratch}/rows"))
batch.select("key", "value", "partition").write.format("mpbroker").mode(
    "append"
).options(topic=other, **{"kafka.bootstrap.servers": bootstrap}).save()
written = spark.read.format("mpbroker").options(**options(other)).load()
found["written"] = rows(written)
print(json.dumps(found))
"""

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not has_java(), reason="Spark needs Java, and there is none"),
]


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return spark_environ(tmp_path) | {"SPARK_DAEMON_MEMORY": "768m"}  # the server's


@pytest.fixture
def address(environ: dict[str, str], tmp_path: Path) -> Iterator[str]:
    """Run a server of Spark Connect on loopback; give its address."""
    import pyspark

    port = reusable_port()
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(tmp_path / "warehouse"),
        "spark.ui.enabled": "false",
    }
    configured = [
        part
        for name, value in settings.items()
        for part in ("--conf", f"{name}={value}")
    ]
    log = tmp_path / "server.log"
    with log.open("wb") as out:
        server = subprocess.Popen(
            [
                *DIE_WITH_US,
                str(Path(pyspark.__file__).parent / "bin" / "spark-submit"),
                *("--class", "org.apache.spark.sql.connect.service.SparkConnectServer"),
                *("--master", "local[2]", "--driver-memory", "768m"),
                *configured,
                "spark-internal",
            ],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=environ,
            cwd=tmp_path,
        )

    def serves() -> bool:
        assert server.poll() is None, log.read_text()[-3000:]
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        wait_until(serves, 600)
        yield f"sc://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def test_a_session_of_spark_connect_reads_streams_and_writes_topics(
    address, environ, bootstrap, make_topic, tmp_path
):
    topic, other = make_topic(partitions=2), make_topic(partitions=2)
    producer = Producer({"bootstrap.servers": bootstrap})
    sent = [
        [number % 2, number // 2, f"k{number}", f"v{number}"] for number in range(9)
    ]
    for partition, _, key, value in sent:
        producer.produce(topic, value, key, partition)
    assert producer.flush(90) == 0
    done = subprocess.run(
        [
            *(sys.executable, "-c", CLIENT, address, bootstrap, topic, other),
            str(tmp_path / "scratch"),
        ],
        env=environ,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["batch"] == found["stream"] == found["written"] == sorted(sent)
    assert found["batches"] == 3

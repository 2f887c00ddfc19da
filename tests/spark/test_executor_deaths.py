"""An executor is killed inside a task that writes exactly once: each row comes once.

A driver of its own with `local-cluster`, which runs executors as a standalone cluster
does. The task kills the JVM above it amid its rows; its next try, in another executor,
must fence the first, and nothing be lost or doubled. MPBROKER_SPARK_KILLS=0 leaves it
out, as it does `test_kills`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        os.environ.get("MPBROKER_SPARK_KILLS") == "0", reason="MPBROKER_SPARK_KILLS=0"
    ),
]

ROOT = Path(__file__).resolve().parents[2]
ROWS = 2_000

DRIVER = """
    import os, pathlib, signal, sys
    import psutil
    from mpbroker.spark import session

    bootstrap, source, target, scratch = sys.argv[1:]
    marker = pathlib.Path(scratch) / "killed"

    def rows_then_death(batches):
        from pyspark import TaskContext

        first = TaskContext.get().partitionId() == 0 and not marker.exists()
        for batch in batches:
            for start in range(0, batch.num_rows, 100):
                yield batch.slice(start, 100)
            if first:
                marker.touch()
                parents = psutil.Process().parents()
                executor = next(each for each in parents if each.name() == "java")
                executor.kill()
                signal.pause()

    spark = session(
        "deaths",
        master="local-cluster[2,1,512]",
        config={
            "spark.executor.memory": "512m",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.sql.execution.arrow.maxRecordsPerBatch": "100",
        },
    )
    options = {"kafka.bootstrap.servers": bootstrap}
    writer = (
        spark.readStream.format("mpbroker")
        .options(**options, subscribe=source, startingOffsets="earliest")
        .load()
        .select("value")
        .mapInArrow(rows_then_death, "value BINARY")
        .writeStream.format("mpbroker")
        .options(**options, topic=target, exactlyOnce="true")
        .option("checkpointLocation", scratch + "/checkpoint")
        .trigger(availableNow=True)
    )
    from mpbroker.spark.pipeline.ingest import run_query
    from mpbroker.spark.pipeline.progress import Progress

    run_query(writer.start, Progress("deaths"))
    assert marker.exists(), "nobody was killed"
    spark.stop()
"""


def test_a_killed_executors_rows_are_there_once(bootstrap, make_topic, tmp_path):
    if shutil.which("java") is None and not os.environ.get("JAVA_HOME"):
        pytest.skip("Spark needs Java 17 or newer, and there is none")
    source, target = make_topic(partitions=2), make_topic()
    producer = Producer({"bootstrap.servers": bootstrap})
    for number in range(ROWS):
        producer.produce(source, b"%d" % number, partition=number % 2)
    assert producer.flush(60) == 0
    driver = subprocess.run(
        [
            *(sys.executable, "-c", textwrap.dedent(DRIVER)),
            *(bootstrap, source, target, str(tmp_path)),
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=1700,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_DIRS": str(tmp_path / "local"),
            "SPARK_WORKER_DIR": str(tmp_path / "work"),
        },
    )
    assert driver.returncode == 0, driver.stderr[-3000:]
    committed = values(bootstrap, target, ROWS)
    assert sorted(map(int, committed)) == list(range(ROWS))


def values(bootstrap, topic, count):
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "none",
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
        }
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    found = []
    while True:
        message = consumer.poll(60)
        assert message is not None, len(found)
        if not message.error():
            found.append(message.value())
        elif len(found) >= count:  # a commit's markers come behind its answer
            break
    consumer.close()
    return found

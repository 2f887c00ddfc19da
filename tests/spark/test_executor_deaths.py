"""An executor is killed inside a task that writes exactly once: each row comes once.

A driver of its own with `local-cluster`, which runs executors as a standalone cluster
does. The task's writer hands a part of its rows to the producer, waits until the topic
has them, and kills the JVM above it and itself: the transaction stays open with rows in
it. The next try, in another executor, must abort it, and nothing be lost or doubled.
MPBROKER_SPARK_KILLS=0 leaves it out, as it does `test_kills`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections import Counter

import pytest
from confluent_kafka import Producer

from tests.spark.cluster import has_java, spark_environ
from tests.spark.topic_records import topic_records
from tests.support.promises import promised

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not has_java(), reason="Spark needs Java, and there is none"),
    pytest.mark.skipif(
        os.environ.get("MPBROKER_SPARK_KILLS") == "0", reason="MPBROKER_SPARK_KILLS=0"
    ),
]

ROWS = 2_000

DRIVER = """
    import os, pathlib, signal, sys
    import psutil
    from mpbroker.spark import session
    from mpbroker.spark.sink import StreamWriter, parse_sink_options
    from mpbroker.spark.source import MpbrokerDataSource

    bootstrap, source, target, scratch = sys.argv[1:]
    half_sent = pathlib.Path(scratch) / "half-sent"

    class Deadly(MpbrokerDataSource):
        @classmethod
        def name(cls):
            return "deadly"

        def streamWriter(self, schema, overwrite):
            return DeadlyWriter(parse_sink_options(self.options))

    class DeadlyWriter(StreamWriter):
        def write(self, iterator):
            from pyspark import TaskContext

            if TaskContext.get().partitionId() or half_sent.exists():
                return super().write(iterator)
            return super().write(rows_then_death(iterator))

    def rows_then_death(batches):
        yield next(batches)
        # The producer has them all: asked for the next rows, wait for these.
        half_sent.write_text("\\n".join(rows_of_this_try()))
        parents = psutil.Process().parents()
        next(each for each in parents if each.name() == "java").kill()
        os.kill(os.getpid(), signal.SIGKILL)

    def rows_of_this_try():
        from confluent_kafka import Consumer, TopicPartition

        reader = Consumer({
            "bootstrap.servers": bootstrap,
            "group.id": "none",
            "isolation.level": "read_uncommitted",
        })
        reader.assign([TopicPartition(target, 0, 0)])
        found = []
        while len(found) < 100:
            message = reader.poll(1)
            if message is None or message.error():
                continue
            if int(message.value()) % 2 == 0:  # the other task's are odd
                found.append(message.value().decode())
        reader.close()
        return found

    spark = session(
        "deaths",
        master="local-cluster[1,2,512]",
        config={
            "spark.executor.memory": "512m",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.sql.execution.arrow.maxRecordsPerBatch": "100",
        },
    )
    spark.dataSource.register(Deadly)
    options = {"kafka.bootstrap.servers": bootstrap}
    writer = (
        spark.readStream.format("mpbroker")
        .options(**options, subscribe=source, startingOffsets="earliest")
        .load()
        .select("value")
        .writeStream.format("deadly")
        .options(**options, topic=target, exactlyOnce="true")
        .option("checkpointLocation", scratch + "/checkpoint")
        .trigger(availableNow=True)
    )
    from mpbroker.spark.pipeline.query import run_query
    from mpbroker.spark.pipeline.progress import Progress

    run_query(writer.start, Progress("deaths"))
    spark.stop()
"""


def test_a_killed_executors_rows_are_there_once(bootstrap, make_topic, tmp_path):
    source, target = make_topic(partitions=2), make_topic()
    producer = Producer({"bootstrap.servers": bootstrap})
    for number in range(ROWS):
        producer.produce(source, b"%d" % number, partition=number % 2)
    assert producer.flush(90) == 0
    driver = subprocess.run(
        [
            *(sys.executable, "-c", textwrap.dedent(DRIVER)),
            *(bootstrap, source, target, str(tmp_path)),
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=1700,
        env={**spark_environ(tmp_path), "SPARK_WORKER_DIR": str(tmp_path / "work")},
    )
    assert driver.returncode == 0, driver.stderr[-3000:]
    half_sent = (tmp_path / "half-sent").read_text().split()
    assert 0 < len(half_sent) < ROWS // 2
    committed = topic_records(bootstrap, target, count=ROWS)
    with promised("every row is committed once"):
        assert sorted(int(each.value()) for each in committed) == list(range(ROWS))
    # What the dead one had sent lies in the log beside what its next try sent.
    everything = topic_records(bootstrap, target, isolation="read_uncommitted")
    written = Counter(each.value() for each in everything)
    assert min(written[each.encode()] for each in half_sent) >= 2

"""Rows a second into Spark: ours, and Spark's own connector where it can be had.

    python -m tests.bench.spark_read [--rows 1000000] [--rounds 3]

Four partitions, 100 B a record, local[2]. Batch: count, sum of lengths and of offsets,
so that every value is looked at and the count is proved. Stream: micro-batches of
rows / 4 into memory nobody reads (noop), the first one left out, since it starts the
Python workers. Runs alternate; the best and the median of the rounds are shown, with
the machine's load at the time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mpbroker.spark import session
from tests.support.broker import Broker
from tests.support.fetch_clients import SPARK_DIR, have_spark_connector

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PARTITIONS: Final = 4
TOPIC: Final = "bench"
VALUE_BYTES: Final = 100


def fill(bootstrap: str, rows: int) -> None:
    from confluent_kafka import Producer
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(TOPIC, PARTITIONS, 1)])[TOPIC].result(30)
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "linger.ms": 50,
            "batch.size": 1_000_000,
            "queue.buffering.max.messages": 1_000_000,
        }
    )
    value = b"x" * VALUE_BYTES
    for number in range(rows):
        producer.produce(TOPIC, value, partition=number % PARTITIONS)
        if number % 10_000 == 0:
            producer.poll(0)
    assert producer.flush(120) == 0


def batch(spark: SparkSession, kind: str, bootstrap: str, rows: int) -> float:
    """Return the seconds that a whole read took."""
    frame = spark.read.format(kind).options(
        **{"kafka.bootstrap.servers": bootstrap, "subscribe": TOPIC}
    )
    started = time.perf_counter()
    found = (
        frame.load()
        .selectExpr("count(*)", "sum(length(value))", "sum(offset)")
        .collect()[0]
    )
    seconds = time.perf_counter() - started
    each = rows // PARTITIONS
    assert tuple(found) == (
        rows,
        rows * VALUE_BYTES,
        PARTITIONS * each * (each - 1) // 2,
    ), found
    return seconds


def stream(spark: SparkSession, kind: str, bootstrap: str, rows: int) -> list[float]:
    """Return rows a second of each micro-batch but the first."""
    with tempfile.TemporaryDirectory(prefix="mpbroker-bench-") as checkpoint:
        query = (
            spark.readStream.format(kind)
            .options(
                **{
                    "kafka.bootstrap.servers": bootstrap,
                    "subscribe": TOPIC,
                    "startingOffsets": "earliest",
                    "maxOffsetsPerTrigger": str(rows // 4),
                }
            )
            .load()
            .writeStream.format("noop")
            .option("checkpointLocation", checkpoint)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        done = [each for each in query.recentProgress if each.numInputRows]
        assert sum(each.numInputRows for each in done) == rows
        return [each.numInputRows * 1000 / each.batchDuration for each in done[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    kinds, jars = ["mpbroker"], ""
    if have_spark_connector():
        kinds.append("kafka")
        jars = ",".join(map(str, sorted(SPARK_DIR.glob("*.jar"))))
    else:
        print("Spark's own connector is not in .downloads/spark: measured alone")
    figures: dict[tuple[str, str], list[float]] = defaultdict(list)
    with (
        tempfile.TemporaryDirectory(prefix="mpbroker-bench-") as scratch,
        Broker(Path(scratch) / "data") as broker,
    ):
        fill(broker.bootstrap, arguments.rows)
        spark = session("bench", master="local[2]", config={"spark.jars": jars})
        for number in range(arguments.rounds + 1):
            for kind in kinds:
                seconds = batch(spark, kind, broker.bootstrap, arguments.rows)
                if number:  # the first one starts workers and compiles code
                    figures[kind, "batch"].append(arguments.rows / seconds)
        for kind in kinds:
            for rate in stream(spark, kind, broker.bootstrap, arguments.rows):
                figures[kind, "stream"].append(rate)
        spark.stop()
    load = " ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"{arguments.rows:,} rows of {VALUE_BYTES} B; load average {load}")
    for (kind, what), rates in figures.items():
        print(
            f"{kind:>9} {what:>7}: best {max(rates):>11,.0f} rows/s,"
            f" median {statistics.median(rates):>11,.0f}"
        )


if __name__ == "__main__":
    main()

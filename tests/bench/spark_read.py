"""Rows a second into Spark: ours, and Spark's own connector where it can be had.

    scripts/bench spark [--rows 1000000] [--rounds 3]

Four partitions, 100 B a record, local[2]. Batch: count, sum of lengths and of offsets,
so that every value is looked at and the count is proved. Stream: micro-batches of
rows / 4 into memory nobody reads (noop), the first one left out, since it starts the
Python workers. "Overhead" is what a trigger takes besides its batch: asking for
offsets, planning, writing the checkpoint. Runs alternate; the best and the median of
the rounds are shown, with the machine's load at the time, the median of each round's
rate against the others' in that round, and the CPU seconds that a million rows took of
Spark and its Python workers: what others do on the machine changes these least. Part of
them is the query's own, whatever it reads; a query of few rows shows that part.

"ceiling" is a Python data source that makes the same Arrow batches out of memory: what
Spark takes to bring them to its JVM, and so the bound of any Python source.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import psutil
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from mpbroker.spark import session
from mpbroker.spark.schema import SCHEMA_DDL
from tests.support.broker import Broker
from tests.support.fetch_clients import SPARK_DIR, have_spark_connector

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

PARTITIONS: Final = 4
TOPIC: Final = "bench"
VALUE_BYTES: Final = 100
CEILING_BATCH_ROWS: Final = 10_000
FEW_ROWS: Final = 4_000


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


class CeilingPartition(InputPartition):
    """So many rows from an offset on."""

    def __init__(self, number: int, rows: int) -> None:
        super().__init__(number)
        self.number, self.rows = number, rows


class CeilingSource(DataSource):
    """The same rows as a topic's, out of memory."""

    @classmethod
    def name(cls) -> str:
        return "ceiling"

    def schema(self) -> str:
        return SCHEMA_DDL

    def reader(self, schema: StructType) -> CeilingReader:
        return CeilingReader(int(self.options["rows"]))


class CeilingReader(DataSourceReader):
    def __init__(self, rows: int) -> None:
        self._rows = rows

    def partitions(self) -> Sequence[InputPartition]:
        each = self._rows // PARTITIONS
        return [CeilingPartition(number, each) for number in range(PARTITIONS)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, CeilingPartition)
        schema = pa.schema(
            [
                ("key", pa.binary()),
                ("value", pa.binary()),
                ("topic", pa.string()),
                ("partition", pa.int32()),
                ("offset", pa.int64()),
                ("timestamp", pa.timestamp("us", tz="UTC")),
                ("timestampType", pa.int32()),
            ]
        )
        for start in range(0, partition.rows, CEILING_BATCH_ROWS):
            rows = min(CEILING_BATCH_ROWS, partition.rows - start)
            yield pa.RecordBatch.from_arrays(
                [
                    pa.nulls(rows, pa.binary()),
                    pa.repeat(pa.scalar(b"x" * VALUE_BYTES), rows),
                    pa.repeat(pa.scalar(TOPIC), rows),
                    pa.repeat(pa.scalar(partition.number, pa.int32()), rows),
                    pa.array(range(start, start + rows), pa.int64()),
                    pa.repeat(pa.scalar(0, pa.int64()), rows).cast(schema.types[5]),
                    pa.repeat(pa.scalar(0, pa.int32()), rows),
                ],
                schema=schema,
            )


def cpu_seconds(broker: Broker) -> float:
    """Of this process, Spark's JVM and its Python workers, those that ended too."""
    total = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) != broker.pid:
                total += sum(process.cpu_times()[:4])
    return total


def batch(spark: SparkSession, kind: str, bootstrap: str, rows: int) -> float:
    """Return the seconds that a read of the first rows took."""
    each = rows // PARTITIONS
    frame = spark.read.format(kind).options(
        **{
            "kafka.bootstrap.servers": bootstrap,
            "subscribe": TOPIC,
            "endingOffsets": json.dumps(
                {TOPIC: {str(number): each for number in range(PARTITIONS)}}
            ),
            "rows": str(rows),
        }
    )
    started = time.perf_counter()
    found = (
        frame.load()
        .selectExpr("count(*)", "sum(length(value))", "sum(offset)")
        .collect()[0]
    )
    seconds = time.perf_counter() - started
    assert tuple(found) == (
        rows,
        rows * VALUE_BYTES,
        PARTITIONS * each * (each - 1) // 2,
    ), found
    return seconds


class MicroBatch(NamedTuple):
    rows_per_s: float
    overhead_s: float


def stream(
    spark: SparkSession, kind: str, bootstrap: str, rows: int
) -> list[MicroBatch]:
    """Return what each micro-batch but the first took."""
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
        return [
            MicroBatch(
                each.numInputRows * 1000 / each.batchDuration,
                (each.durationMs["triggerExecution"] - each.durationMs["addBatch"])
                / 1000,
            )
            for each in done[1:]
        ]


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/bench spark", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args(argv)
    kinds, jars = ["mpbroker"], ""
    if have_spark_connector():
        kinds.append("kafka")
        jars = ",".join(map(str, sorted(SPARK_DIR.glob("*.jar"))))
    else:
        print("Spark's own connector is not in .downloads/spark: measured alone")
    spent: dict[tuple[str, int], list[float]] = defaultdict(list)
    overheads: dict[str, list[float]] = defaultdict(list)
    figures: dict[tuple[str, str], list[float]] = defaultdict(list)
    with (
        tempfile.TemporaryDirectory(prefix="mpbroker-bench-") as scratch,
        Broker(Path(scratch) / "data") as broker,
    ):
        fill(broker.bootstrap, arguments.rows)
        spark = session("bench", master="local[2]", config={"spark.jars": jars})
        spark.dataSource.register(CeilingSource)
        for number in range(arguments.rounds + 1):
            for kind in ("ceiling", *kinds):
                for rows in (FEW_ROWS, arguments.rows):
                    before = cpu_seconds(broker)
                    took_s = batch(spark, kind, broker.bootstrap, rows)
                    if number:  # the first one starts workers and compiles code
                        spent[kind, rows].append(cpu_seconds(broker) - before)
                        if rows != FEW_ROWS:
                            figures[kind, "batch"].append(rows / took_s)
        for kind in kinds:
            for done in stream(spark, kind, broker.bootstrap, arguments.rows):
                figures[kind, "stream"].append(done.rows_per_s)
                overheads[kind].append(done.overhead_s)
        spark.stop()
    load = " ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"{arguments.rows:,} rows of {VALUE_BYTES} B; load average {load}")
    for (kind, what), rates in figures.items():
        print(
            f"{kind:>9} {what:>7}: best {max(rates):>11,.0f} rows/s,"
            f" median {statistics.median(rates):>11,.0f}"
        )
    for kind, seconds in overheads.items():
        print(
            f"{kind:>9}  stream: overhead of a trigger best {min(seconds):.2f} s,"
            f" median {statistics.median(seconds):.2f}"
        )
    for other in ("ceiling", *kinds[1:]):
        pairs = zip(figures[kinds[0], "batch"], figures[other, "batch"], strict=True)
        ratio = statistics.median(ours / theirs for ours, theirs in pairs)
        print(f"{kinds[0]:>9}   batch: {ratio:.2f} of the rate of {other}")
    for kind in ("ceiling", *kinds):
        own, whole = (min(spent[kind, rows]) for rows in (FEW_ROWS, arguments.rows))
        more = (whole - own) / (arguments.rows - FEW_ROWS) * 1e6
        print(
            f"{kind:>9}   batch: {whole:.2f} CPU s: {own:.2f} the query's own, and"
            f" {more:.2f} for each million rows"
        )


if __name__ == "__main__":
    main(sys.argv[1:])

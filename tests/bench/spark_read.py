"""Rows a second into Spark: ours, and Spark's own connector where it can be had.

    scripts/bench spark [--rows 1000000] [--rounds 5] [--cold 5] [--batch 10000]

Four partitions, 100 B a record, local[2]. Producers send 9,000 records or so in a
batch, or as few as --batch says. Batch: count, sum of lengths and of offsets,
so that every value is looked at and the count is proved. Stream: micro-batches of
rows / 4 into memory nobody reads (noop), the first one left out, since it starts the
Python workers. "Overhead" is what a trigger takes besides its batch: asking for
offsets, planning, writing the checkpoint.

Each round reads with every kind, and every other round in the opposite order. Shown are
the best and the median of the rounds, with the machine's load, and the CPU seconds that
a million rows took of Spark and its Python workers: what others do on the machine
changes these least. Part of them is the query's own, whatever it reads; a query of few
rows shows that part. At the end stand the goals, each with the ratio of every round's
pair, and their median, which counts. If other processes compute before or after the
rounds, it is told.

"ceiling" is a Python data source that makes the same Arrow batches out of memory: what
Spark takes to bring them to its JVM, and so the bound of any Python source. "segments"
reads the broker's files. "cold" is the first query of a Spark that has just started, in
a process of its own each time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
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
from tests.bench.processes import Bystanders
from tests.bench.report import OTHERS_CORES
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
# Kinds of sources: the names of formats, but for the files.
OURS: Final = "mpbroker"
CONNECTOR: Final = "kafka"
SEGMENTS: Final = "segments"


def fill(bootstrap: str, rows: int, batch_records: int) -> None:
    from confluent_kafka import Producer
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(TOPIC, PARTITIONS, 1)])[TOPIC].result(30)
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "linger.ms": 50,
            "batch.size": 1_000_000,
            "batch.num.messages": batch_records,
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


def batch(
    spark: SparkSession, kind: str, bootstrap: str, rows: int, files: Path | None = None
) -> float:
    """Return the seconds that a read of the first rows took.

    Args:
        files: the broker's data directory, for kind "segments".
    """
    each = rows // PARTITIONS
    options = {
        "kafka.bootstrap.servers": bootstrap,
        "subscribe": TOPIC,
        "endingOffsets": json.dumps(
            {TOPIC: {str(number): each for number in range(PARTITIONS)}}
        ),
        "rows": str(rows),
    }
    if kind == SEGMENTS:
        kind = "mpbroker-segments"
        del options["kafka.bootstrap.servers"]  # only beside a remote store
        options |= {"path": str(files), "includeActive": "true"}
    frame = spark.read.format(kind).options(**options)
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


def cold(kind: str, bootstrap: str, rows: int, jars: str) -> float:
    """Return the seconds of the first query of a Spark that has just started."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.bench.spark_read", "--cold-query", kind),
            *("--bootstrap", bootstrap, "--rows", str(rows), "--jars", jars),
        ],
        stdout=subprocess.PIPE,
        check=True,
    )
    return float(done.stdout)


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


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench spark", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", type=int, default=5, help="rounds of first queries")
    parser.add_argument(
        "--batch", type=int, default=10_000, help="most records of a producer's batch"
    )
    # What `cold` starts.
    for name in ("--cold-query", "--bootstrap", "--jars"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


class Figures:
    """What the rounds have measured, by kind of source.

    Attributes:
        batch: rows a second of each round.
        cold: likewise, of first queries.
        stream: rows a second of each stream's micro-batches, their median.
        overhead: seconds of a stream's triggers besides their batches, their median.
        spent: CPU seconds of each round, by kind and number of rows.
        others: cores that other processes had, by when: before and after.
    """

    def __init__(self, kinds: Sequence[str]) -> None:
        self.kinds = kinds
        self.batch: dict[str, list[float]] = defaultdict(list)
        self.cold: dict[str, list[float]] = defaultdict(list)
        self.stream: dict[str, list[float]] = defaultdict(list)
        self.overhead: dict[str, list[float]] = defaultdict(list)
        self.spent: dict[tuple[str, int], list[float]] = defaultdict(list)
        self.others: dict[str, float] = {}

    def own_cpu(self, kind: str) -> float:
        """Return the CPU seconds of a query itself."""
        return statistics.median(self.spent[kind, FEW_ROWS])

    def cpu_per_million(self, kind: str, rows: int) -> list[float]:
        """Return the CPU seconds of each million rows, in each round."""
        own = self.own_cpu(kind)
        million = (rows - FEW_ROWS) / 1e6
        return [(whole - own) / million for whole in self.spent[kind, rows]]


def against(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return each round's figure against the other's in that round."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def measure(figures: Figures, arguments: argparse.Namespace, jars: str) -> None:
    """Start a broker and Spark, and take all figures."""
    rows = arguments.rows
    with (
        tempfile.TemporaryDirectory(prefix="mpbroker-bench-") as scratch,
        Broker(Path(scratch) / "data") as broker,
    ):
        fill(broker.bootstrap, rows, arguments.batch)
        compared = [each for each in figures.kinds if each in (OURS, CONNECTOR)]
        for number in range(arguments.cold):
            told("cold", number)
            for kind in compared[:: -1 if number % 2 else 1]:
                took_s = cold(kind, broker.bootstrap, rows, jars)
                figures.cold[kind].append(rows / took_s)
        spark = session("bench", master="local[2]", config={"spark.jars": jars})
        spark.dataSource.register(CeilingSource)
        for number in range(arguments.rounds + 1):
            told("batch", number)
            for kind in figures.kinds[:: -1 if number % 2 else 1]:
                # The first one starts workers and compiles code.
                measure_batch(figures if number else None, spark, kind, broker, rows)
        for number in range(arguments.rounds):
            told("stream", number)
            for kind in compared[:: -1 if number % 2 else 1]:
                done = stream(spark, kind, broker.bootstrap, rows)
                for seen, values in (
                    (figures.stream, [each.rows_per_s for each in done]),
                    (figures.overhead, [each.overhead_s for each in done]),
                ):
                    seen[kind].append(statistics.median(values))
        spark.stop()


def told(stage: str, number: int) -> None:
    print(f"{time.strftime('%H:%M:%S')} {stage} {number}", file=sys.stderr, flush=True)


def others_now() -> float:
    """Return how many cores other processes have."""
    bystanders = Bystanders([])
    time.sleep(1)
    return bystanders.cores()


def measure_batch(
    figures: Figures | None, spark: SparkSession, kind: str, broker: Broker, rows: int
) -> None:
    """Read few rows, then all, with one kind of source; note what it took."""
    for count in (FEW_ROWS, rows):
        before = cpu_seconds(broker)
        took_s = batch(spark, kind, broker.bootstrap, count, broker.data_dir)
        if figures is None:
            continue
        figures.spent[kind, count].append(cpu_seconds(broker) - before)
        if count != FEW_ROWS:
            figures.batch[kind].append(rows / took_s)


def show(figures: Figures, rows: int) -> None:
    load = " ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"{rows:,} rows of {VALUE_BYTES} B; load average {load}")
    for when, cores in figures.others.items():
        if cores > OTHERS_CORES:
            print(f"DISTURBED: other processes had {cores:.2f} cores {when} the rounds")
    for what in ("cold", "batch", "stream"):
        for kind, rates in getattr(figures, what).items():
            rounds = " ".join(f"{rate / 1000:,.0f}" for rate in rates)
            print(
                f"{kind:>9} {what:>7}: best {max(rates):>11,.0f} rows/s,"
                f" median {statistics.median(rates):>11,.0f} (thousands: {rounds})"
            )
    for kind, seconds in figures.overhead.items():
        print(
            f"{kind:>9}  stream: overhead of a trigger best {min(seconds):.2f} s,"
            f" median {statistics.median(seconds):.2f}"
        )
    for kind in figures.kinds:
        more = statistics.median(figures.cpu_per_million(kind, rows))
        print(
            f"{kind:>9}   batch: {figures.own_cpu(kind):.2f} CPU s are the query's own,"
            f" and {more:.2f} for each million rows"
        )
    of_ceiling = against(figures.batch[OURS], figures.batch["ceiling"])
    print(
        f"{OURS:>9}   batch: {statistics.median(of_ceiling):.2f} of the rate of the"
        " ceiling"
    )
    for goal in goals(figures, rows):
        median = statistics.median(goal.found)
        met = median <= goal.limit if goal.is_most else median >= goal.limit
        pairs = " ".join(f"{each:.2f}" for each in goal.found)
        print(
            f"{'met' if met else 'MISSED':>9}: {goal.what}, at"
            f" {'most' if goal.is_most else 'least'} {goal.limit:g}:"
            f" {median:.2f} ({pairs})"
        )


class Goal(NamedTuple):
    """A ratio, as each round found it, and the limit of its median.

    Attributes:
        is_most: whether the limit is the most that is allowed, not the least.
    """

    what: str
    found: list[float]
    limit: float
    is_most: bool = False


def goals(figures: Figures, rows: int) -> Iterator[Goal]:
    found = against(figures.batch[SEGMENTS], figures.batch[OURS])
    yield Goal("segments, rows/s against ours from the broker", found, 1.1)
    if CONNECTOR not in figures.kinds:
        return
    found = against(figures.batch[OURS], figures.batch[CONNECTOR])
    yield Goal("batch warm, rows/s against the connector's", found, 2)
    if figures.cold:
        found = against(figures.cold[OURS], figures.cold[CONNECTOR])
        yield Goal("batch cold, rows/s against the connector's", found, 1)
    found = against(
        *(figures.cpu_per_million(kind, rows) for kind in (OURS, CONNECTOR))
    )
    yield Goal("CPU a million rows against the connector's", found, 0.8, is_most=True)
    found = against(figures.overhead[OURS], figures.overhead[CONNECTOR])
    yield Goal(
        "overhead of a trigger against the connector's", found, 1.2, is_most=True
    )


def main(argv: Sequence[str]) -> None:
    arguments = _arguments(argv)
    if arguments.cold_query:
        spark = session(
            "bench", master="local[2]", config={"spark.jars": arguments.jars}
        )
        print(
            batch(spark, arguments.cold_query, arguments.bootstrap, arguments.rows),
            flush=True,
        )
        spark.stop()
        return
    kinds, jars = ["ceiling", OURS, SEGMENTS], ""
    if have_spark_connector():
        kinds.append(CONNECTOR)
        jars = ",".join(map(str, sorted(SPARK_DIR.glob("*.jar"))))
    else:
        print("Spark's own connector is not in .downloads/spark: measured alone")
    figures = Figures(kinds)
    figures.others["before"] = others_now()
    measure(figures, arguments, jars)
    figures.others["after"] = others_now()
    show(figures, arguments.rows)


if __name__ == "__main__":
    main(sys.argv[1:])

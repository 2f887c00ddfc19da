"""Lake to topic: rows of a table that `ingest` wrote, as records again.

    mpbroker pipeline run again.toml
    spark-submit .../mpbroker/spark/pipeline/replay.py again.toml

Records keep key, value and timestamp, and their order in each original partition, so
that of each key. Two headers say where they are from. A task that fails and is tried
again sends its records again: at least once.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from mpbroker.client.cluster import Cluster
from mpbroker.producer import Producer
from mpbroker.spark.options import parse_client_settings
from mpbroker.spark.pipeline.decode import row_schema
from mpbroker.spark.pipeline.description import Description, PipelineError, Replay
from mpbroker.spark.pipeline.ingest import main, reason
from mpbroker.spark.pipeline.lake import open_table
from mpbroker.spark.pipeline.progress import Progress
from mpbroker.spark.sink import SinkOptions, parse_sink_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_RUN_HEADER: Final = "mpbroker.replay.run"
_FROM_HEADER: Final = "mpbroker.replay.from"
_TIMEOUT_S: Final = 30


def preview(description: Description) -> Iterator[str]:
    """Yield what will be done; see `run.preview`."""
    assert description.table is not None and description.replay is not None
    options = sink_options(description)
    files = _table_files(description)
    yield f"reads {len(files)} files of {description.table.path}"
    if description.replay.where:
        yield f"only rows where {description.replay.where}"
    count = _target_partitions(description, options)
    yield f"writes to topic {options.topic} ({count} partitions)"
    if description.value.format not in ("raw", "json"):
        raise PipelineError(
            f"value.format={description.value.format!r}: only raw and json values can"
            " be written back"
        )


def sink_options(description: Description) -> SinkOptions:
    given = dict(description.topic)
    bootstrap = description.source.get("kafka.bootstrap.servers")
    if bootstrap:
        given.setdefault("kafka.bootstrap.servers", bootstrap)
    return parse_sink_options(given)


def _table_files(description: Description) -> list[str]:
    assert description.table is not None
    schema = row_schema(description.value, with_headers=False)
    stored = open_table(description.table, schema, description.name)
    files = stored.uris()
    if not files:
        raise PipelineError(f"{description.table.path} has no rows to be replayed")
    return files


def _target_partitions(description: Description, options: SinkOptions) -> int:
    given = {f"kafka.{name}": value for name, value in options.settings.items()}
    settings = parse_client_settings(given)
    with Cluster(settings.bootstrap, _TIMEOUT_S, settings) as cluster:
        return len(cluster.topic(options.topic or "").partitions)


def run(description: Description, spark: SparkSession, progress: Progress) -> None:
    """Send all rows that are chosen, and wait until all are acknowledged.

    Raises:
        PipelineError: an SQL condition that Spark does not understand; more original
            partitions than the target has.
    """
    from pyspark.errors import PySparkException

    assert description.replay is not None
    options = sink_options(description)
    try:
        rows = chosen(description, spark)
        highest = rows.agg({"_partition": "max", "_timestamp": "min"}).toArrow()
    except PySparkException as error:
        raise PipelineError(f"replay: {reason(error)}") from error
    last = highest.column("max(_partition)")[0].as_py()
    if last is None:
        progress.say("no row is chosen")
        return
    targets = _target_partitions(description, options)
    if description.replay.partitions == "original" and last >= targets:
        raise PipelineError(
            f"rows are of partition {last}, and topic {options.topic} has {targets}"
            ' partitions: give it more, or say replay.partitions = "key"'
        )
    tasks = max(1, spark.sparkContext.defaultParallelism)
    first = highest.column("min(_timestamp)").cast(
        pa.timestamp("ms", tz="UTC"), safe=False
    )
    sender = Sender(
        options,
        description.replay,
        tuple(description.value.fields),
        tasks,
        time.time(),
        first.cast(pa.int64())[0].as_py() or 0,
        f"{description.name}-{time.time_ns()}",
    )

    def send(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return sender(batches)

    started = time.monotonic()
    ordered = in_order(rows, tasks, by_time=description.replay.speed > 0)
    try:
        sent = ordered.mapInArrow(send, "sent BIGINT").toArrow()
    except PySparkException as error:
        raise PipelineError(f"replay: {reason(error)}") from error
    count = pc.sum(sent.column("sent")).as_py() or 0
    progress.batch(0, count, time.monotonic() - started)


def in_order(rows: DataFrame, tasks: int, *, by_time: bool) -> DataFrame:
    """Give each task whole partitions, each in the order of its offsets.

    Args:
        by_time: and partitions of one task side by side, as they were written. A
            record waits for the latest timestamp before it: timestamps may go back,
            offsets must not.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as sql

    place = ["_topic", "_partition", "_offset"]
    due = sql.col("_timestamp")
    if by_time:
        due = sql.max("_timestamp").over(
            Window.partitionBy(*place[:2]).orderBy("_offset")
        )
    found = rows.withColumn("_due", due).repartition(tasks, *place[:2])
    return found.sortWithinPartitions(*(["_due"] if by_time else []), *place)


def chosen(description: Description, spark: SparkSession) -> DataFrame:
    assert description.table is not None and description.replay is not None
    files = _table_files(description)
    reader = spark.read.option("basePath", description.table.path)
    rows = reader.parquet(*files)
    if description.replay.where:
        rows = rows.where(description.replay.where)
    return rows


@dataclass(frozen=True)
class Sender:
    """What a task does; plain values that travel."""

    options: SinkOptions
    replay: Replay
    fields: tuple[str, ...]
    tasks: int
    started: float  # wall clock, s: all tasks count from there
    first_ms: int  # the earliest record's timestamp
    run_id: str

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Send rows in order, at the speed that is asked for; yield their number."""
        failures: list[Exception] = []

        def done(_: object, error: Exception | None) -> None:
            if error is not None and not failures:
                failures.append(error)

        count = 0
        with Producer(self.options.settings) as producer:
            for batch in batches:
                stamps, dues = _ms(batch, "_timestamp"), _ms(batch, "_due")
                rows = batch.to_pylist()
                for row, stamp, due in zip(rows, stamps, dues, strict=True):
                    self._wait(count, due)
                    self._send(producer, row, stamp, done)
                    count += 1
                if failures:
                    break
            producer.flush()
        if failures:
            raise failures[0]
        yield pa.RecordBatch.from_pydict({"sent": pa.array([count], pa.int64())})

    def _wait(self, count: int, due_ms: int) -> None:
        if self.replay.rate:
            due = self.started + count * self.tasks / self.replay.rate
        elif self.replay.speed:
            due = self.started + (due_ms - self.first_ms) / 1000 / self.replay.speed
        else:
            return
        ahead_s = due - time.time()
        if ahead_s > 0:
            time.sleep(ahead_s)

    def _send(
        self, producer: Producer, row: Mapping[str, Any], stamp: int, done: Any
    ) -> None:
        origin = f"{row['_topic']}-{row['_partition']}@{row['_offset']}"
        headers = [(each["key"], each["value"]) for each in row.get("_headers") or ()]
        headers += [
            (_RUN_HEADER, self.run_id.encode()),
            (_FROM_HEADER, origin.encode()),
        ]
        producer.send(
            self.options.topic or "",
            self._value(row),
            row["_key"],
            headers=headers,
            partition=(
                row["_partition"] if self.replay.partitions == "original" else None
            ),
            timestamp_ms=stamp,
            callback=done,
        )

    def _value(self, row: Mapping[str, Any]) -> bytes | None:
        if not self.fields:
            return row["value"]  # type: ignore[no-any-return]
        # Fields that were absent are absent again; a tombstone had none at all.
        found = {name: row[name] for name in self.fields if row[name] is not None}
        return orjson.dumps(found) if found else None


def _ms(batch: pa.RecordBatch, name: str) -> list[int]:
    times = batch.column(name).cast(pa.timestamp("ms", tz="UTC"), safe=False)
    found: list[int] = times.cast(pa.int64()).to_pylist()
    return found


if __name__ == "__main__":
    main(sys.argv[1:])

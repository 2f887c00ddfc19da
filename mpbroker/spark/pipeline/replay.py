"""Lake to topic: rows of a table that `ingest` wrote, as records again.

    mpbroker pipeline run again.toml

Records keep key, value and timestamp, and their order in each original partition, so
that of each key. Two headers say where they are from. A task that fails and is tried
again sends its records again: at least once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from mpbroker.base.errors import MpbrokerError
from mpbroker.client.admin.topic_admin import list_offsets
from mpbroker.client.cluster import Cluster, TopicPartition
from mpbroker.producer import Producer
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.spark.options import LATEST, parse_client_settings
from mpbroker.spark.pipeline.decode import row_schema
from mpbroker.spark.pipeline.description import Description, Replay
from mpbroker.spark.pipeline.errors import PipelineError
from mpbroker.spark.pipeline.lake import LakeTable, as_stored, open_table
from mpbroker.spark.pipeline.progress import Progress
from mpbroker.spark.pipeline.query import reason
from mpbroker.spark.sink import SinkOptions, parse_sink_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_RUN_HEADER: Final = "mpbroker.replay.run"
_FROM_HEADER: Final = "mpbroker.replay.from"
_TIMEOUT_S: Final = 30
_SAY_S = 10.0


def preview(description: Description) -> Iterator[str]:
    """Yield what will be done; see `run.preview`."""
    assert description.table is not None and description.replay is not None
    options = sink_options(description)
    _, files = open_stored(description)
    yield f"reads {len(files)} files of {description.table.path}"
    if description.replay.where:
        yield f"only rows where {description.replay.where}"
    count = target_partitions(options)
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


def open_stored(description: Description) -> tuple[LakeTable, list[str]]:
    """Return the table, partitioned as it is, and its files as Spark is told of them.

    Raises:
        PipelineError: it has other columns than the description, or no rows.
    """
    assert description.table is not None
    table, with_headers = as_stored(description.table)
    schema = row_schema(description.value, with_headers=with_headers)
    for name in table.partition_by:
        if name != "date" and name not in schema.names:
            raise PipelineError(
                f"{table.path} is partitioned by {name!r}, which is none of the value's"
                f" fields: give all of them in [value.fields]"
            )
    stored = open_table(table, schema, description.name)
    files = stored.uris()
    if not files:
        raise PipelineError(f"{table.path} has no rows to be replayed")
    return stored, files


def target_partitions(options: SinkOptions) -> int:
    """Return how many partitions the topic has that is written to.

    Raises:
        ApiError: there is no such topic. BrokerUnavailableError: nobody answers.
    """
    with _cluster(options) as cluster:
        try:
            return len(cluster.topic(options.topic or "").partitions)
        except ApiError as error:
            if error.error_code != ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                raise
            raise ApiError(
                error.error_code,
                f"topic: {options.topic} does not exist; create it first"
                " (mpbroker topic create), or mend its name",
            ) from None


def _cluster(options: SinkOptions) -> Cluster:
    given = {f"kafka.{name}": value for name, value in options.settings.items()}
    settings = parse_client_settings(given)
    return Cluster(settings.bootstrap, _TIMEOUT_S, settings)


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
        highest = rows.agg(
            {"_partition": "max", "_timestamp": "min", "*": "count"}
        ).toArrow()
    except PySparkException as error:
        raise PipelineError(f"replay: {reason(error)}") from error
    last = highest.column("max(_partition)")[0].as_py()
    if last is None:
        progress.say("no row is chosen")
        return
    targets = target_partitions(options)
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
    total = highest.column("count(1)")[0].as_py()
    try:
        with _Watch(options, total, progress):
            sent = ordered.mapInArrow(send, "sent BIGINT").toArrow()
    except PySparkException as error:
        raise PipelineError(f"replay: {reason(error)}") from error
    count = pc.sum(sent.column("sent")).as_py() or 0
    progress.batch(0, count, time.monotonic() - started)


class _Watch:
    """Says now and then how much has come to the topic; Spark tells at the end only.

    Args:
        total: how many records are sent.
    """

    def __init__(self, options: SinkOptions, total: int, progress: Progress) -> None:
        self._options, self._total, self._progress = options, total, progress
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            with _cluster(self._options) as cluster:
                before = said = self._end(cluster)
                while not self._ended.wait(_SAY_S):
                    if (end := self._end(cluster)) != said:
                        said = end
                        self._progress.say(
                            f"{end - before:,} of {self._total:,} records are in topic"
                            f" {self._options.topic}"
                        )
        except MpbrokerError as error:
            self._progress.say(f"no more is said until the end: {error}")

    def _end(self, cluster: Cluster) -> int:
        """Return the sum of the ends of the topic's partitions."""
        name = self._options.topic or ""
        leaders = {
            TopicPartition(name, each.partition_index): each.leader_id
            for each in cluster.topic(name).partitions
        }
        answers = list_offsets(cluster, dict.fromkeys(leaders, LATEST), leaders)
        return sum(each.offset for each in answers.values())


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
    stored, files = open_stored(description)
    rows = _read(stored, files, spark)
    if description.replay.where:
        rows = rows.where(description.replay.where)
    return rows


def _read(stored: LakeTable, files: list[str], spark: SparkSession) -> DataFrame:
    from pyspark.sql import functions as sql
    from pyspark.sql.pandas.types import from_arrow_schema

    values = stored.values_by_file()
    if values is None:
        # Directories' names have no types: Spark would read a number out of "007".
        reader = spark.read.schema(from_arrow_schema(stored.schema))
        return reader.option("basePath", stored.table.path).parquet(*files)
    by = list(stored.table.partition_by)
    inside = pa.schema([each for each in stored.schema if each.name not in by])
    known = pa.schema([("_file", pa.string()), *map(stored.schema.field, by)])
    named = [(name, *(each[column] for column in by)) for name, each in values.items()]
    reader = spark.read.schema(from_arrow_schema(inside))
    rows = reader.option("recursiveFileLookup", "true").parquet(*files)
    rows = rows.withColumn("_file", sql.col("_metadata.file_name"))
    parts = spark.createDataFrame(named, from_arrow_schema(known))
    return rows.join(sql.broadcast(parts), "_file").select(*stored.schema.names)


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

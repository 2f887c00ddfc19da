"""Job ``replay``: send the rows of a table that `ingest` wrote to a topic.

    mpbroker pipeline run again.toml

Records keep their key, value and timestamp, and the order of their original partition.
Two headers name the run and the original topic, partition and offset. A task that fails
is tried again and sends its records again: at least once.
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
_SAY_S = 10.0  # between two lines of progress


def preview(description: Description) -> Iterator[str]:
    """Yield lines that say what `run` would do.

    Raises:
        PipelineError, OptionError, ApiError, BrokerUnavailableError: `run` would fail.
    """
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
    """Return the options of [topic]; the addresses may stand in [source].

    Raises:
        OptionError: an option is missing or wrong.
    """
    given = dict(description.topic)
    bootstrap = description.source.get("kafka.bootstrap.servers")
    if bootstrap:
        given.setdefault("kafka.bootstrap.servers", bootstrap)
    return parse_sink_options(given)


def open_stored(description: Description) -> tuple[LakeTable, list[str]]:
    """Return the table with the partitioning that it has, and the URIs of its files.

    Raises:
        PipelineError: the table has no rows, or other columns than the description.
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
        raise PipelineError(f"{table.path} has no rows to replay")
    return stored, files


def target_partitions(options: SinkOptions) -> int:
    """Return the number of partitions of the topic that is written to.

    Raises:
        ApiError: the topic does not exist.
        BrokerUnavailableError: no broker answers.
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
                " (mpbroker topic create), or correct its name",
            ) from None


def _cluster(options: SinkOptions) -> Cluster:
    given = {f"kafka.{name}": value for name, value in options.settings.items()}
    settings = parse_client_settings(given)
    return Cluster(settings.bootstrap, _TIMEOUT_S, settings)


def run(description: Description, spark: SparkSession, progress: Progress) -> None:
    """Send the rows that [replay] selects, and wait until all are acknowledged.

    Raises:
        PipelineError: Spark does not understand the SQL condition, the target topic has
            too few partitions, or a record cannot be sent.
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
        progress.say("no row is selected")
        return
    targets = target_partitions(options)
    if description.replay.partitions == "original" and last >= targets:
        raise PipelineError(
            f"rows are of partition {last}, and topic {options.topic} has {targets}"
            ' partitions: give it more, or set replay.partitions = "key"'
        )
    tasks = max(1, spark.sparkContext.defaultParallelism)
    first = highest.column("min(_timestamp)").cast(
        pa.timestamp("ms", tz="UTC"), safe=False
    )
    sender = Sender(
        options=options,
        replay=description.replay,
        fields=tuple(description.value.fields),
        tasks=tasks,
        started=time.time(),
        first_ms=first.cast(pa.int64())[0].as_py() or 0,
        run_id=f"{description.name}-{time.time_ns()}",
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
    """Prints how many records have reached the topic, while Spark sends them.

    Spark returns the tasks' counts at the end only, so a thread asks for the topic's
    end offsets every ten seconds.

    Args:
        total: the number of records to send.
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
            self._progress.say(f"no progress is shown until the end: {error}")

    def _end(self, cluster: Cluster) -> int:
        """Return the sum of the end offsets of the topic's partitions."""
        name = self._options.topic or ""
        leaders = {
            TopicPartition(name, each.partition_index): each.leader_id
            for each in cluster.topic(name).partitions
        }
        answers = list_offsets(cluster, dict.fromkeys(leaders, LATEST), leaders)
        return sum(each.offset for each in answers.values())


def in_order(rows: DataFrame, tasks: int, *, by_time: bool) -> DataFrame:
    """Give each task whole original partitions, each in the order of its offsets.

    Adds a column ``_due``: the time at which a row is due, for `Sender`.

    Args:
        by_time: interleave the partitions of a task by timestamp. Timestamps of a
            partition may fall, so a row is due at the largest one up to it: the order
            of offsets is kept.
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
    """Return the rows of the table that [replay] selects.

    Raises:
        PipelineError: see `open_stored`.
    """
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
        # Give Spark the types: it would read the number 7 from a directory "x=007".
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
    """Sends the rows of a task; Spark pickles it to its executors.

    Attributes:
        fields: names of the value's fields; empty: values are bytes.
        tasks: how many tasks send at the same time and share the rate.
        started: wall clock in seconds, from which all tasks count.
        first_ms: the earliest timestamp of all rows.
        run_id: the header that names this run.
    """

    options: SinkOptions
    replay: Replay
    fields: tuple[str, ...]
    tasks: int
    started: float
    first_ms: int
    run_id: str

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Send rows in order at the wanted rate or speed, and yield their number.

        Raises:
            ProducerError: a record was refused or not delivered in time.
        """
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
        """Sleep until the next row is due.

        Args:
            count: how many rows this task has sent.
            due_ms: the row's timestamp, in original time.
        """
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
        # Leave out null fields, as the original value did; in a tombstone all are null.
        found = {name: row[name] for name in self.fields if row[name] is not None}
        return orjson.dumps(found) if found else None


def _ms(batch: pa.RecordBatch, name: str) -> list[int]:
    times = batch.column(name).cast(pa.timestamp("ms", tz="UTC"), safe=False)
    found: list[int] = times.cast(pa.int64()).to_pylist()
    return found

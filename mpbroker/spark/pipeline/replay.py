"""Job ``replay``: send the rows of a table that job ``ingest`` wrote to a topic.

    mpbroker pipeline run again.toml

Records keep their key, value and timestamp, and the order of their original partition.
Two headers name the run and the original topic, partition and offset. A task that fails
is tried again and sends its records again: at least once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

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
from mpbroker.spark.pipeline.progress import Progress
from mpbroker.spark.pipeline.query import reason
from mpbroker.spark.pipeline.schemas import column_types
from mpbroker.spark.pipeline.tables.lake import LakeTable
from mpbroker.spark.pipeline.tables.opening import as_stored, open_table
from mpbroker.spark.sink import SinkOptions, parse_sink_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_RUN_HEADER: Final = "mpbroker.replay.run"
_FROM_HEADER: Final = "mpbroker.replay.from"
_TIMEOUT_S: Final = 30
# After a delay, a replay with a rate may send this many seconds' records at once.
_BURST_S: Final = 1.0
_SAY_S = 10.0  # between two lines of progress


def preview(description: Description) -> Iterator[str]:
    """Yield lines of text that say what `run` would send from a table to a topic.

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
    """Return the options for writing to the topic, from the file's section [topic].

    The brokers' addresses may be in the section [source] instead.

    Raises:
        OptionError: an option is missing or wrong.
    """
    given = dict(description.topic)
    bootstrap = description.source.get("kafka.bootstrap.servers")
    if bootstrap:
        given.setdefault("kafka.bootstrap.servers", bootstrap)
    return parse_sink_options(given)


def open_stored(description: Description) -> tuple[LakeTable, list[str]]:
    """Open the table whose rows are sent to a topic; return it, and its files' URIs.

    The table has the partitioning that its files have, whatever the TOML file says.

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
    """Return the number of partitions of the topic to write to.

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
    """Send the rows of a table that replay.where selects to a topic; wait for acks.

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
        pa.timestamp("us", tz="UTC"), safe=False
    )
    total = highest.column("count(1)")[0].as_py()
    ordered = in_order(
        rows,
        tasks,
        description.replay,
        total=total,
        first_s=(first.cast(pa.int64())[0].as_py() or 0) / 1e6,
    )
    sender = Sender(
        options=options,
        replay=description.replay,
        fields=dict(description.value.fields),
        started=time.time(),
        run_id=f"{description.name}-{time.time_ns()}",
    )

    def send(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return sender(batches)

    started = time.monotonic()
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


def in_order(
    rows: DataFrame, tasks: int, replay: Replay, *, total: int, first_s: float
) -> DataFrame:
    """Give each Spark task the rows of whole original partitions, by their offsets.

    Adds a column ``_due``: the seconds after the beginning at which a row is due. With
    a rate, each partition is spread over the whole time that ``total`` rows take. So
    the tasks together keep to the rate, whatever the sizes of their partitions.

    Args:
        total: the number of rows.
        first_s: the earliest timestamp of all rows, in seconds since 1970.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as sql

    place = ["_topic", "_partition", "_offset"]
    partition = Window.partitionBy(*place[:2])
    so_far = partition.orderBy("_offset")
    if replay.rate:
        share = (sql.row_number().over(so_far) - 1) / sql.count("*").over(partition)
        due = share * (total / replay.rate)
    elif replay.speed:
        # Timestamps of a partition may fall, so a row is due at the largest one up to
        # it: the order of offsets is kept.
        latest = sql.max("_timestamp").over(so_far).cast("double")
        due = (latest - first_s) / replay.speed
    else:
        due = sql.lit(0.0)
    found = rows.withColumn("_due", due).repartition(tasks, *place[:2])
    return found.sortWithinPartitions("_due", *place)


def chosen(description: Description, spark: SparkSession) -> DataFrame:
    """Return the table's rows that the condition replay.where selects.

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
        if stored.table.format == "iceberg":  # whose files have all the columns
            return reader.option("recursiveFileLookup", "true").parquet(*files)
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


class Pace:
    """Makes a task send each row when it is due, for the wanted rate or speed."""

    def __init__(
        self,
        started: float,
        burst_s: float | None,
        *,
        now: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Begin a schedule, from which the time of each row is counted.

        Args:
            started: when the schedule begins, in seconds by the clock ``now``.
            burst_s: the seconds of a delay that may be made up for; the rest of the
                delay moves all later rows. None: make up for any delay, even one
                before the first row.
        """
        self._started = started
        self._burst_s = burst_s
        self._now, self._sleep = now, sleep
        self._has_begun = False

    def wait(self, due_s: float) -> None:
        """Sleep until a row is due.

        Args:
            due_s: seconds from the beginning; not less than in the call before.
        """
        late_s = self._now() - self._started - due_s
        if late_s < 0:
            self._sleep(-late_s)
        elif self._burst_s is not None:
            allowed_s = self._burst_s if self._has_begun else 0.0
            self._started += max(0.0, late_s - allowed_s)
        self._has_begun = True


@dataclass(frozen=True)
class Sender:
    """Sends the rows of a task; Spark pickles it to its executors.

    Attributes:
        fields: the types of the value's fields; empty: values are bytes.
        started: the beginning of all tasks' schedules, in seconds since 1970.
        run_id: the value of the header that names this run.
    """

    options: SinkOptions
    replay: Replay
    fields: Mapping[str, str]
    started: float
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
        pace = Pace(self.started, _BURST_S if self.replay.rate else None)
        paced = bool(self.replay.rate or self.replay.speed)
        with Producer(self.options.settings) as producer:
            for batch in batches:
                stamps = _ms(batch, "_timestamp")
                for row, stamp in zip(batch.to_pylist(), stamps, strict=True):
                    if paced:
                        pace.wait(row["_due"])
                    self._send(producer, row, stamp, done)
                    count += 1
                if failures:
                    break
            producer.flush()
        if failures:
            raise failures[0]
        yield pa.RecordBatch.from_pydict({"sent": pa.array([count], pa.int64())})

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
        found = self._struct.plain(row)
        return column_types.json_text(found).encode() if found else None

    @cached_property
    def _struct(self) -> column_types.Struct:
        return column_types.struct(self.fields)


def _ms(batch: pa.RecordBatch, name: str) -> list[int]:
    times = batch.column(name).cast(pa.timestamp("ms", tz="UTC"), safe=False)
    found: list[int] = times.cast(pa.int64()).to_pylist()
    return found

"""Job ``aggregate``: compute windows over event time, into a table or a topic.

    mpbroker pipeline run delays.toml

A window is written once, when the watermark has passed its end. The watermark is the
latest event time less ``aggregate.watermark``. Rows behind the watermark are counted as
late and not added. With trigger "once", the last windows stay in the checkpoint's state
until a later run has read later events.

A table has each window once, even if a process is killed. A topic has it at least once,
or exactly once with ``exactlyOnce = true`` in the TOML file's section [topic].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from mpbroker.spark.pipeline.decode import Decoder
from mpbroker.spark.pipeline.description import Description
from mpbroker.spark.pipeline.errors import PipelineError
from mpbroker.spark.pipeline.ingest import BatchSink, write_stream
from mpbroker.spark.pipeline.progress import Progress
from mpbroker.spark.pipeline.query import read_stream, reason, run_query, start
from mpbroker.spark.pipeline.schemas import column_types
from mpbroker.spark.pipeline.schemas.columns import RECORD_COLUMNS

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.listener import StreamingQueryProgress
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter


def run(description: Description, spark: SparkSession, progress: Progress) -> None:
    """Aggregate a topic's records and write the windows, until the run is stopped.

    With trigger "once", stop after the records that are in the topic now.

    Raises:
        PipelineError: Spark refuses an expression, the table cannot be used, or the
            query failed.
    """
    spark.conf.set("spark.sql.shuffle.partitions", str(_cores(spark)))
    windows = aggregated(description, read_stream(description, spark))
    if description.table is not None:
        from pyspark.sql.pandas.types import to_arrow_schema

        # In UTC, as in the tables of `ingest`.
        schema = to_arrow_schema(windows.schema, timezone="UTC")
        # The column that "date" in partition_by is computed from.
        by = description.table.event_time or "window_start"
        described = replace(
            description, table=replace(description.table, event_time=by)
        )
        sink = BatchSink(described, schema, None, progress)
        query = run_query(
            lambda: start(described, write_stream(windows, sink)), progress
        )
        _Seen(progress, to_topic=False).rest(query)
    else:
        seen = _Seen(progress, to_topic=True)
        query = run_query(
            lambda: start(description, _to_topic(description, windows)),
            progress,
            seen.newest,
        )
        seen.rest(query)


def aggregated(description: Description, stream: DataFrame) -> DataFrame:
    """Return a stream of windows, a row for each: start, end, groups and measures.

    Raises:
        PipelineError: Spark does not understand a measure or a duration.
    """
    from pyspark.errors import PySparkException
    from pyspark.sql import functions as sql

    wanted = description.aggregate
    assert wanted is not None
    event_time = wanted.event_time or "_timestamp"
    rows = decoded(description, stream)
    try:
        window = sql.window(event_time, wanted.window, wanted.slide or None)
        measures = [
            sql.expr(str(text)).alias(name) for name, text in wanted.measures.items()
        ]
        return (
            rows.withWatermark(event_time, wanted.watermark)
            .groupBy(window, *wanted.group_by)
            .agg(*measures)
            .select(
                sql.col("window.start").alias("window_start"),
                sql.col("window.end").alias("window_end"),
                *wanted.group_by,
                *wanted.measures,
            )
        )
    except PySparkException as error:
        raise PipelineError(f"aggregate: {reason(error)}") from error


def decoded(description: Description, stream: DataFrame) -> DataFrame:
    """Return the decoded rows of a stream.

    Values that cannot be decoded are dropped, and counted in the metric "values".
    """
    from pyspark.sql import functions as sql

    value = description.value
    columns = {**(value.fields or {"value": "binary"}), **RECORD_COLUMNS}
    kinds = column_types.struct(columns).fields
    fields = ", ".join(
        f"`{name.replace('`', '``')}` {kind.ddl}" for name, kind in kinds.items()
    )
    ddl = f"{fields}, _bad BOOLEAN"

    def decode(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as arrow

        decoder = Decoder(value, with_headers=False)
        for batch in batches:
            found = decoder.decode(batch)
            rows = found.rows.append_column(
                "_bad", arrow.repeat(False, found.rows.num_rows)
            )
            yield from rows.to_batches()
            if found.bad.num_rows:
                # Only their number matters here, so all columns are null.
                nothing = [
                    arrow.repeat(True, found.bad.num_rows)
                    if field.name == "_bad"
                    else arrow.nulls(found.bad.num_rows, field.type)
                    for field in rows.schema
                ]
                yield arrow.RecordBatch.from_arrays(nothing, schema=rows.schema)

    rows = stream.mapInArrow(decode, ddl)
    rows = rows.observe("values", sql.count_if("_bad").alias("bad"))
    return rows.where("NOT _bad").drop("_bad")


def _to_topic(description: Description, windows: DataFrame) -> DataStreamWriter:
    """Return Spark's writer that sends each window to a topic as a record.

    The key is the window's group columns joined by "|", the value the row as JSON.
    """
    from pyspark.sql import functions as sql

    wanted = description.aggregate
    assert wanted is not None
    key = sql.concat_ws(
        "|", *[sql.col(name).cast("string") for name in wanted.group_by]
    )
    records = windows.select(
        (key if wanted.group_by else sql.lit(None).cast("string")).alias("key"),
        sql.to_json(sql.struct("*")).alias("value"),
    )
    options: dict[str, Any] = {
        "kafka.bootstrap.servers": description.source["kafka.bootstrap.servers"],
        **description.topic,
    }
    return records.writeStream.format("mpbroker").options(**options)


class _Seen:
    """Adds Spark's counts of bad values and late rows to the figures of a run.

    It adds the number of windows, too, if they go to a topic: the sink of a table
    counts its rows itself.
    """

    def __init__(self, progress: Progress, *, to_topic: bool) -> None:
        self._progress, self._to_topic = progress, to_topic
        self._triggers: set[str] = set()

    def newest(self, query: StreamingQuery) -> None:
        """Add Spark's counts for a query's newest batch, unless already added."""
        done = query.lastProgress
        if done is not None:
            self._add(done)

    def rest(self, query: StreamingQuery) -> None:
        """Add Spark's counts for batches that `newest` missed; Spark keeps 2,000."""
        for done in query.recentProgress:
            self._add(done)

    def _add(self, done: StreamingQueryProgress) -> None:
        if done.timestamp in self._triggers:
            return
        self._triggers.add(done.timestamp)
        late = sum(each.numRowsDroppedByWatermark for each in done.stateOperators)
        metrics = done.observedMetrics.get("values")
        bad = (metrics["bad"] or 0) if metrics is not None else 0
        written = max(0, done.sink.numOutputRows)
        if not self._to_topic:
            self._progress.late += late
            self._progress.bad += bad
        elif done.numInputRows or written:  # a batch, not a wait for records
            seconds = done.batchDuration / 1000
            self._progress.batch(done.batchId, written, seconds, bad=bad, late=late)


def _cores(spark: SparkSession) -> int:
    return max(1, spark.sparkContext.defaultParallelism)

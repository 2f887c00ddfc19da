"""Windows over event time, from a topic to a table or to another topic.

    mpbroker pipeline run delays.toml

A window is written once, when the watermark (the latest event time, less
``aggregate.watermark``) has passed its end. What comes later than that is counted as
late, not added. With trigger "once" the last windows stay in the checkpoint's state
until a later run has seen later events.

To a table each window is written once, whoever is killed; to a topic at least once, or
once with ``exactlyOnce = true`` in [topic].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from mpbroker.spark.pipeline.columns import RECORD_COLUMNS
from mpbroker.spark.pipeline.decode import Decoder
from mpbroker.spark.pipeline.description import Description
from mpbroker.spark.pipeline.errors import PipelineError
from mpbroker.spark.pipeline.ingest import BatchSink, write_stream
from mpbroker.spark.pipeline.progress import Progress
from mpbroker.spark.pipeline.query import read_stream, reason, run_query, start

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.listener import StreamingQueryProgress
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter


def run(description: Description, spark: SparkSession, progress: Progress) -> None:
    """Run until there is no more (trigger "once"), or for ever."""
    spark.conf.set("spark.sql.shuffle.partitions", str(_cores(spark)))
    windows = aggregated(description, read_stream(description, spark))
    if description.table is not None:
        from pyspark.sql.pandas.types import to_arrow_schema

        # Times as the tables of `ingest` have them.
        schema = to_arrow_schema(windows.schema, timezone="UTC")
        # What a table's date is of, unless a column is named.
        by = description.table.event_time or "window_start"
        described = replace(
            description, table=replace(description.table, event_time=by)
        )
        sink = BatchSink(described, schema, None, progress)
        query = run_query(
            lambda: start(described, write_stream(windows, sink)), progress
        )
        _Seen(progress, to_topic=False).rest(query)
        if sink.rows.table.compact_every:
            sink.compact()
    else:
        seen = _Seen(progress, to_topic=True)
        query = run_query(
            lambda: start(description, _to_topic(description, windows)),
            progress,
            seen.newest,
        )
        seen.rest(query)


def aggregated(description: Description, stream: DataFrame) -> DataFrame:
    """Return the windows: window_start, window_end, the groups and the measures.

    Raises:
        PipelineError: Spark understands a measure or a duration not.
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
    """Return values as columns; what cannot be read is counted, and left out."""
    from pyspark.sql import functions as sql

    value = description.value
    columns = {**(value.fields or {"value": "binary"}), **RECORD_COLUMNS}
    fields = ", ".join(f"`{name}` {kind}" for name, kind in columns.items())
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
                # Only their number matters here: ingest keeps them.
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
    """Return a writer of records: the groups as the key, a whole row as JSON."""
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
    """Takes what Spark counted in each batch: bad values, late rows, and windows.

    Args:
        to_topic: a table's sink has said itself what it wrote.
    """

    def __init__(self, progress: Progress, *, to_topic: bool) -> None:
        self._progress, self._to_topic = progress, to_topic
        self._triggers: set[str] = set()

    def newest(self, query: StreamingQuery) -> None:
        """Take the newest batch, unless it was seen."""
        done = query.lastProgress
        if done is not None:
            self._take(done)

    def rest(self, query: StreamingQuery) -> None:
        """Take what was not seen of the last 2,000 batches."""
        for done in query.recentProgress:
            self._take(done)

    def _take(self, done: StreamingQueryProgress) -> None:
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
        elif done.numInputRows or written:  # and not one that waited for records
            seconds = done.batchDuration / 1000
            self._progress.batch(done.batchId, written, seconds, bad=bad, late=late)


def _cores(spark: SparkSession) -> int:
    return max(1, spark.sparkContext.defaultParallelism)

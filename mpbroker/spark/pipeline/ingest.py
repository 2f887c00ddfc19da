"""Job ``ingest``: write a topic's records to a table, each record once.

    mpbroker pipeline run flights.toml

This holds even if the driver, an executor or the broker is killed, for three reasons.
Spark stores the offsets of a batch in its checkpoint before the batch runs. The same
offsets bring the same records. A table ignores a batch that it already has (`lake`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from mpbroker.spark.checkpoint import query_id
from mpbroker.spark.pipeline.decode import bad_schema, row_schema
from mpbroker.spark.pipeline.description import Description, ValueFormat
from mpbroker.spark.pipeline.errors import PipelineError
from mpbroker.spark.pipeline.lake import LakeTable, open_table
from mpbroker.spark.pipeline.progress import Progress
from mpbroker.spark.pipeline.query import read_stream, run_query, start
from mpbroker.spark.pipeline.staging import BAD, FILES_DDL, ROWS, Stager, open_directory

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter


class BatchSink:
    """Writes batches to the tables, on the driver; Spark calls it with each batch."""

    def __init__(
        self,
        description: Description,
        schema: pa.Schema,
        value: ValueFormat | None,
        progress: Progress,
    ) -> None:
        """Open the tables; change nothing.

        Args:
            schema: the columns of the rows to write.
            value: how values are decoded; None if the rows have the columns already.

        Raises:
            PipelineError: a table was filled from another checkpoint, has other columns
                or cannot be opened.
        """
        assert description.table is not None
        self._description = description
        self._value = value
        self._progress = progress
        self.rows = open_table(description.table, schema, description.name)
        self.bad: LakeTable | None = None
        if description.dead_letter is not None:
            self.bad = open_table(
                description.dead_letter, bad_schema(), description.name
            )
        known = checkpoint_query(description.checkpoint)
        for table in self._tables():
            table.check_claim(known)
        self._claimed = False

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        """Write a batch to the tables that do not have it yet, and count its rows.

        Raises:
            PipelineError: a table was filled from another checkpoint.
        """
        self._claim()
        started = time.monotonic()
        if all(table.has_batch(batch_id) for table in self._tables()):
            self._progress.skip(batch_id)
            return
        files = self._stage(frame, batch_id)
        for kind, table in ((BAD, self.bad), (ROWS, self.rows)):
            if table is not None and not table.has_batch(batch_id):
                table.commit(batch_id, [each for each in files if each["kind"] == kind])
        seconds = time.monotonic() - started
        counts = {
            kind: sum(each["rows"] for each in files if each["kind"] == kind)
            for kind in (ROWS, BAD)
        }
        late = sum(each["late"] for each in files)
        self._progress.batch(
            batch_id, counts[ROWS], seconds, bad=counts[BAD], late=late
        )
        every = int(self.rows.table.compact_every)
        if every and (batch_id + 1) % every == 0:
            self.compact()

    def compact(self) -> None:
        """Merge small files in all tables."""
        for table in self._tables():
            before, after = table.compact()
            if after < before:
                path = table.table.path
                self._progress.say(f"compacted {path}: {before} files, now {after}")

    def _tables(self) -> list[LakeTable]:
        return [self.rows, *([self.bad] if self.bad is not None else [])]

    def _claim(self) -> None:
        """Bind the tables to the checkpoint, which has an id once a query has begun."""
        if self._claimed:
            return
        query = checkpoint_query(self._description.checkpoint)
        if query is None:
            raise PipelineError(f"{self._description.checkpoint} has no metadata yet")
        for table in self._tables():
            table.claim(query)
        self._claimed = True

    def _stage(self, frame: DataFrame, batch_id: int) -> list[dict[str, Any]]:
        """Have executors write a batch's files; return what they report (FILES_DDL)."""
        directories = {ROWS: self.rows.staging(batch_id)}
        if self.bad is not None:
            directories[BAD] = self.bad.staging(batch_id)
        stager = Stager(
            value=self._value,
            table=self.rows.table,
            dead_letter=None if self.bad is None else self.bad.table,
            directories=directories,
            with_headers="headers" in frame.columns,
            now_s=time.time(),
        )

        def stage(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            return stager(batches)

        found = frame.mapInArrow(stage, FILES_DDL).toArrow()
        rows: list[dict[str, Any]] = found.to_pylist()
        return rows


def checkpoint_query(checkpoint: str) -> str | None:
    """Return the id that Spark gave a checkpoint's query; None before there is one.

    Raises:
        PipelineError: the checkpoint cannot be read, or is not Spark's.
    """
    files, inside = open_directory(checkpoint)
    try:
        return query_id(files, inside)
    except (OSError, ValueError) as error:
        raise PipelineError(f"checkpoint {checkpoint!r}: {error}") from error


def run(description: Description, spark: SparkSession, progress: Progress) -> None:
    """Write what is in the topic (trigger "once"), or go on until it is stopped.

    Raises:
        PipelineError: the tables cannot be used, or the query failed.
    """
    sink = open_sink(description, progress)
    stream = read_stream(description, spark)
    run_query(lambda: start(description, write_stream(stream, sink)), progress)
    if sink.rows.table.compact_every:
        sink.compact()


def open_sink(description: Description, progress: Progress) -> BatchSink:
    """Open the description's tables.

    Raises:
        PipelineError: see `BatchSink`.
    """
    with_headers = description.source.get("includeHeaders", "false").lower() == "true"
    schema = row_schema(description.value, with_headers=with_headers)
    return BatchSink(description, schema, description.value, progress)


def write_stream(stream: DataFrame, sink: BatchSink) -> DataStreamWriter:
    """Return a writer that calls the sink with each of the stream's batches."""

    # foreachBatch wants a plain function, whose arguments it counts.
    def write(frame: DataFrame, batch_id: int) -> None:
        sink(frame, batch_id)

    return stream.writeStream.foreachBatch(write)

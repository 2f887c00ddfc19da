"""Job ``ingest``: write a topic's records to a table, each record once.

    mpbroker pipeline run flights.toml

This holds even if the driver, an executor or the broker is killed, for three reasons.
Spark stores the offsets of a batch in its checkpoint before the batch runs. The same
offsets bring the same records. A table ignores a batch that it already has (`tables`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import orjson

from mpbroker.spark.checkpoint import (
    batch_offsets,
    batch_time_s,
    has_commits,
    query_id,
)
from mpbroker.spark.pipeline.decode import bad_schema, row_schema
from mpbroker.spark.pipeline.description import Description, ValueFormat
from mpbroker.spark.pipeline.errors import PipelineError
from mpbroker.spark.pipeline.event_time import EventTimes
from mpbroker.spark.pipeline.progress import Progress
from mpbroker.spark.pipeline.query import read_stream, run_query, start
from mpbroker.spark.pipeline.registered import Columns, columns_of
from mpbroker.spark.pipeline.schemas import column_types
from mpbroker.spark.pipeline.schemas.columns import HEADERS
from mpbroker.spark.pipeline.schemas.field_names import UNTAKEN_MAX, paths
from mpbroker.spark.pipeline.staging import (
    BAD,
    FILES_DDL,
    LATE,
    REACHED,
    ROWS,
    SEEN,
    UNTAKEN,
    Stager,
    open_directory,
    store_errors,
)
from mpbroker.spark.pipeline.tables.lake import LakeTable
from mpbroker.spark.pipeline.tables.maintain import drop_old_rows
from mpbroker.spark.pipeline.tables.opening import open_table

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter


class BatchSink:
    """Writes a stream's batches to the pipeline's tables; Spark's driver calls it."""

    def __init__(
        self,
        description: Description,
        schema: pa.Schema,
        value: ValueFormat | None,
        progress: Progress,
        columns: Columns | None = None,
    ) -> None:
        """Open the tables of rows, late rows and dead letters; change nothing.

        Args:
            schema: the columns of the rows to write.
            value: how values are decoded; None if the rows have the columns already.
            columns: gives the newest value format before each batch; None if the format
                does not change.

        Raises:
            PipelineError: a table was filled from another checkpoint, lacks batches of
                this one, has other columns or cannot be opened.
        """
        assert description.table is not None
        self._description = description
        self._value = value
        self._columns = columns
        self._with_headers = HEADERS.name in schema.names
        self._progress = progress
        self.rows = open_table(description.table, schema, description.name)
        self.bad: LakeTable | None = None
        if description.dead_letter is not None:
            self.bad = open_table(
                description.dead_letter, bad_schema(), description.name
            )
        self.late: LakeTable | None = None
        if description.late is not None:
            self.late = open_table(description.late, schema, description.name)
        if description.table.late != "keep":
            fate = "dropped" if self.late is None else "set aside"
            progress.late_label = f"late and {fate}"
        self._event_times = EventTimes(description.checkpoint)
        known = checkpoint_query(description.checkpoint)
        for table in self._tables():
            table.check_claim(known)
        # Tables of dead letters and of late rows may come later.
        if known is not None and _has_commits(description.checkpoint):
            self.rows.check_filled(known, description.checkpoint)
        self._claimed = False

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        """Write a batch to the tables that do not have it yet, and count its rows.

        Raises:
            PipelineError: a table was filled from another checkpoint, or a store has
                failed.
        """
        with store_errors(self.rows.table.path):
            self._write(frame, batch_id)

    def _write(self, frame: DataFrame, batch_id: int) -> None:
        self._claim()
        started = time.monotonic()
        if all(table.has_batch(batch_id) for table in self._tables()):
            self._progress.skip(batch_id)
            return
        self._grow()
        files = self._stage(frame, batch_id)
        reached = [int(each["partition"]) for each in files if each["kind"] == REACHED]
        if reached:
            # Before the commits: a batch that is committed does not run again.
            self._event_times.add(batch_id, max(reached))
        offsets = self._offsets(batch_id)
        for kind, table in (
            (BAD, self.bad),
            (LATE, self.late),
            (ROWS, self.rows),
        ):
            if table is not None and not table.has_batch(batch_id):
                staged = [each for each in files if each["kind"] == kind]
                table.commit(batch_id, staged, offsets)
        seconds = time.monotonic() - started
        counts = {
            kind: sum(each["rows"] for each in files if each["kind"] == kind)
            for kind in (ROWS, BAD)
        }
        late = sum(each["late"] for each in files)
        self._progress.batch(
            batch_id, counts[ROWS], seconds, bad=counts[BAD], late=late
        )
        self._note_fields(files)
        # Batches count over all runs. A pipeline that runs from cron has a small batch
        # each time: to compact at each run's end would write the table anew.
        every = int(self.rows.table.compact_every)
        if every and (batch_id + 1) % every == 0:
            self.compact()

    def _note_fields(self, files: list[dict[str, Any]]) -> None:
        """Note the fields that have values, and those that no column takes.

        After the first rows, name the fields without values and the untaken ones.
        """
        if self._value is None:
            return
        is_first = not self._progress.fields and self._progress.rows
        if self._progress.rows:
            self._progress.fields.update(paths(column_types.struct(self._value.fields)))
        for each in files:
            if each["kind"] == SEEN:
                self._progress.seen.update(orjson.loads(each["partition"]))
            if each["kind"] == UNTAKEN and len(self._progress.untaken) < UNTAKEN_MAX:
                self._progress.untaken.update(orjson.loads(each["partition"]))
        if is_first and self._description.trigger_s:
            # The last line may be far away.
            self._progress.say_nulls()
            self._progress.say_untaken()

    def compact(self) -> None:
        """Merge the small files of each table that the pipeline writes.

        A Parquet directory on an object store has no lock, so only this process may
        delete its files: delete those with old rows, too.
        """
        for table in self._tables():
            path = table.table.path
            # Keep in step with `maintain_file`, which chooses the same columns.
            aged_by = table.table.event_time or self._aged_by
            if table is self.bad:
                aged_by = "_timestamp"
            old = drop_old_rows(table, self._description.maintain, aged_by)
            if old:
                self._progress.say(f"{path}: {old:,} files with old rows deleted")
            before, after = table.compact()
            if after < before:
                self._progress.say(f"compacted {path}: {before} files, now {after}")

    @property
    def _aged_by(self) -> str:
        return "_timestamp" if self._description.job == "ingest" else "window_start"

    def _tables(self) -> list[LakeTable]:
        others = (self.bad, self.late)
        return [self.rows, *(each for each in others if each is not None)]

    def _claim(self) -> None:
        """Bind the tables to the query id in Spark's checkpoint, once in each run.

        Raises:
            PipelineError: the checkpoint has no id yet, or a table belongs to another
                query.
        """
        if self._claimed:
            return
        query = checkpoint_query(self._description.checkpoint)
        if query is None:
            raise PipelineError(f"{self._description.checkpoint} has no metadata yet")
        for table in self._tables():
            table.claim(query)
        self._claimed = True

    def _offsets(self, batch_id: int) -> str:
        """Read, from the checkpoint, a batch's end offsets as JSON."""
        files, inside = open_directory(self._description.checkpoint)
        return batch_offsets(files, inside, batch_id)

    def _grow(self) -> None:
        """Add columns to the table for fields that newer registered schemas have.

        A schema is registered before its first value is sent, and that is before this
        batch was planned: so all columns of the batch are known now.
        """
        if self._columns is None or self._value is None:
            return
        value = self._columns.value()
        added = [name for name in value.fields if name not in self._value.fields]
        if value.fields == self._value.fields:
            return
        schema = row_schema(value, with_headers=self._with_headers)
        self._value = value
        self.rows = open_table(self.rows.table, schema, self._description.name)
        if self.late is not None:
            self.late = open_table(self.late.table, schema, self._description.name)
        self._claimed = False
        self._claim()
        names = ", ".join(added) or "in nested fields"
        self._progress.say(f"the table has new columns: {names}")

    def _planned_s(self, batch_id: int) -> float:
        """Return the time at which a batch was planned, in seconds since 1970."""
        files, inside = open_directory(self._description.checkpoint)
        try:
            return batch_time_s(files, inside, batch_id)
        except (OSError, ValueError) as error:
            checkpoint = self._description.checkpoint
            raise PipelineError(f"checkpoint {checkpoint!r}: {error}") from error

    def _stage(self, frame: DataFrame, batch_id: int) -> list[dict[str, Any]]:
        """Let executors write a batch's files; return a dict for each (FILES_DDL)."""
        directories = {ROWS: self.rows.staging(batch_id)}
        if self.bad is not None:
            directories[BAD] = self.bad.staging(batch_id)
        if self.late is not None:
            directories[LATE] = self.late.staging(batch_id)
        writers = {ROWS: self.rows.file_writer()}
        if self.bad is not None:
            writers[BAD] = self.bad.file_writer()
        if self.late is not None:
            writers[LATE] = self.late.file_writer()
        late_after_s = self.rows.table.late_after_s
        stager = Stager(
            value=self._value,
            table=self.rows.table,
            dead_letter=None if self.bad is None else self.bad.table,
            directories=directories,
            with_headers=self._with_headers,
            planned_s=self._planned_s(batch_id),
            late=None if self.late is None else self.late.table,
            writers={kind: each for kind, each in writers.items() if each is not None},
            reached_us=self._event_times.before(batch_id) if late_after_s else None,
        )

        def stage(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            return stager(batches)

        found = frame.mapInArrow(stage, FILES_DDL).toArrow()
        rows: list[dict[str, Any]] = found.to_pylist()
        return rows


def checkpoint_query(checkpoint: str) -> str | None:
    """Return the id that Spark gave a checkpoint's query; None if there is none yet.

    Raises:
        PipelineError: the checkpoint cannot be read, or is not Spark's.
    """
    files, inside = open_directory(checkpoint)
    try:
        return query_id(files, inside)
    except (OSError, ValueError) as error:
        raise PipelineError(f"checkpoint {checkpoint!r}: {error}") from error


def _has_commits(checkpoint: str) -> bool:
    files, inside = open_directory(checkpoint)
    try:
        return has_commits(files, inside)
    except OSError as error:
        raise PipelineError(f"checkpoint {checkpoint!r}: {error}") from error


def run(description: Description, spark: SparkSession, progress: Progress) -> None:
    """Write a topic's records to the pipeline's tables, until the run is stopped.

    With trigger "once", stop after the records that are in the topic now.

    Raises:
        PipelineError: the tables cannot be used, or the query failed.
    """
    sink = open_sink(description, progress)
    stream = read_stream(description, spark)
    run_query(lambda: start(description, write_stream(stream, sink)), progress)


def open_sink(description: Description, progress: Progress) -> BatchSink:
    """Open the tables that a pipeline writes to; return the object that writes to them.

    Raises:
        PipelineError: see `BatchSink`.
    """
    with_headers = description.source.get("includeHeaders", "false").lower() == "true"
    schema = row_schema(description.value, with_headers=with_headers)
    columns = None
    if description.value.format == "registry":
        columns = columns_of(description, progress.say)
    return BatchSink(description, schema, description.value, progress, columns)


def write_stream(stream: DataFrame, sink: BatchSink) -> DataStreamWriter:
    """Return Spark's stream writer, which calls the `BatchSink` with each batch."""

    # foreachBatch wants a plain function, whose arguments it counts.
    def write(frame: DataFrame, batch_id: int) -> None:
        sink(frame, batch_id)

    return stream.writeStream.foreachBatch(write)

"""Write a batch's files on executors: to a staging area, or to their final place.

The driver commits the files afterwards (`tables`). A task that is tried again writes
its files again under other names. Only the files that its last try reports are
committed; the others are deleted later.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import field as setting
from typing import Any, Final
from urllib.parse import quote

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs

from mpbroker.spark.file_systems import find
from mpbroker.spark.pipeline.decode import Decoder, bad_schema
from mpbroker.spark.pipeline.description import Table, ValueFormat
from mpbroker.spark.pipeline.errors import PipelineError

# The columns of a task's report, which has a row for each file.
FILES_DDL: Final = (
    "kind STRING, path STRING, partition STRING, rows BIGINT, bytes BIGINT, late BIGINT"
)
_FILES_SCHEMA: Final = pa.schema(
    [
        ("kind", pa.string()),
        ("path", pa.string()),
        ("partition", pa.string()),
        ("rows", pa.int64()),
        ("bytes", pa.int64()),
        ("late", pa.int64()),
    ]
)
_DAY_US: Final = 86_400 * 1_000_000
_NO_FILE: Final = {"path": "", "partition": "{}", "rows": 0, "bytes": 0, "late": 0}
ROWS: Final = "rows"
BAD: Final = "bad"
LATE: Final = "late"
DROPPED: Final = "dropped"  # late rows that are in no file
# The fields that are not null in all rows of a task: as JSON in the column "partition".
SEEN: Final = "seen"
# The fields of a task's values that no column takes, likewise.
UNTAKEN: Final = "untaken"
# The latest event time of a task's rows, in microseconds since 1970, likewise.
REACHED: Final = "reached"
# A column of staged changes to a table with a key: whether the key's row is deleted.
DELETED: Final = "_deleted"
# The end of a staged file's name. Staged files lie below their table, and many readers
# take each *.parquet there, whatever its directory is called.
STAGED: Final = ".staged"
PARQUET: Final = ".parquet"
# Writes rows to a table's files, and returns an entry of the report for each.
FileWriter = Callable[[pa.Table], list[dict[str, Any]]]
# Rows are kept in memory up to this size and then split by partition value: a file for
# each value would otherwise have to stay open.
_FLUSH_BYTES: Final = 256 * 1024 * 1024


def open_directory(path: str) -> tuple[fs.FileSystem, str]:
    """Return the file system of a path or URI, and the path inside it.

    Raises:
        PipelineError: the file system or the directory cannot be used.
    """
    try:
        found, inside = find(path)
    except (pa.ArrowInvalid, OSError, NotImplementedError) as error:
        raise PipelineError(f"directory {path!r} cannot be used: {error}") from error
    return found, inside


@contextmanager
def store_errors(path: str) -> Iterator[None]:
    """Turn errors of a file system or an object store into PipelineError.

    Raises:
        PipelineError: the store cannot be reached, or has refused.
    """
    try:
        yield
    except OSError as error:
        # delta-rs draws a tree of causes, in colours.
        text = " ".join(re.sub(r"\x1b\[\d*m|\u21b3", " ", str(error)).split())
        raise PipelineError(
            f"{path}: the store cannot be reached or has refused ({text[:300]})."
            " Nothing is lost: run the pipeline again when it answers; for S3, check"
            " AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID and"
            " AWS_SECRET_ACCESS_KEY, of executors too"
        ) from error


def partition_columns(table: Table, schema: pa.Schema) -> list[pa.Field]:
    """Return the columns that a table is partitioned by."""
    return [
        pa.field("date", pa.date32())
        if name == "date" and "date" not in schema.names
        else schema.field(name)
        for name in table.partition_by
    ]


def table_schema(table: Table, schema: pa.Schema) -> pa.Schema:
    """Return a table's columns: those of the rows, and those it is partitioned by.

    A table may be partitioned by "date", which is computed if the rows do not have it.
    """
    for field in partition_columns(table, schema):
        if field.name not in schema.names:
            schema = schema.append(field)
    return schema


@dataclass(frozen=True)
class Stager:
    """Writes the files of a batch's task; Spark pickles it to its executors.

    A task writes up to three kinds of files: ROWS for the table, BAD for values that
    cannot be decoded, and LATE for rows older than the table takes.

    Attributes:
        value: how values are decoded; None if the rows have the columns already.
        directories: the batch's directories in the tables' staging areas, by ROWS, BAD
            and LATE.
        planned_s: the time, in seconds since 1970, at which the batch was planned.
            Later event times are wrong, and do not count as progress.
        late: the table of late rows that are set aside.
        writers: by ROWS, BAD and LATE, the writers of tables that write their files
            themselves.
        reached_us: the latest event time of earlier batches, in microseconds since
            1970, from which the age of rows counts; None: there were none. It is the
            same in each run of a batch: otherwise a row could be late in one run and
            not in another.
    """

    value: ValueFormat | None
    table: Table
    dead_letter: Table | None
    directories: dict[str, str]
    with_headers: bool
    planned_s: float
    late: Table | None = None
    writers: Mapping[str, FileWriter] = setting(default_factory=dict)
    reached_us: int | None = None

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write all rows of a task to files, and yield a table that lists these files.

        Raises:
            PipelineError: a value cannot be decoded, and there is no dead-letter table;
                or the store has failed.
        """
        with store_errors(self.table.path):
            files = self._write_all(batches)
        yield pa.RecordBatch.from_pylist(files, schema=_FILES_SCHEMA)

    def _write_all(self, batches: Iterable[pa.RecordBatch]) -> list[dict[str, Any]]:
        files: list[dict[str, Any]] = []
        bad: list[pa.Table] = []
        rows: list[pa.Table] = []
        size = 0
        decoder = (
            Decoder(self.value, with_headers=self.with_headers) if self.value else None
        )
        for batch in batches:
            if decoder is None:
                rows.append(pa.Table.from_batches([batch]))
            else:
                decoded = decoder.decode(batch)
                found = decoded.rows
                if self.table.key:
                    found = found.append_column(DELETED, decoded.deleted)
                rows.append(found)
                if decoded.bad.num_rows:
                    bad.append(decoded.bad)
            size += rows[-1].nbytes
            if size >= _FLUSH_BYTES:
                files += self._write_rows(rows)
                rows, size = [], 0
        files += self._write_rows(rows)
        if bad:
            files += self._write_bad(pa.concat_tables(bad))
        if decoder is not None and decoder.seen:
            names = orjson.dumps(sorted(decoder.seen)).decode()
            files.append({**_NO_FILE, "kind": SEEN, "partition": names})
        if decoder is not None and decoder.untaken:
            # MessagePack has names that are bytes or numbers.
            names = orjson.dumps(sorted(map(str, decoder.untaken))).decode()
            files.append({**_NO_FILE, "kind": UNTAKEN, "partition": names})
        return files

    def _write_rows(self, tables: list[pa.Table]) -> list[dict[str, Any]]:
        rows = pa.concat_tables(tables) if tables else None
        if rows is None or not rows.num_rows:
            return []
        event_time = rows.column(self.table.event_time or "_timestamp")
        reached = self._reached(event_time)
        late = self._late(event_time)
        count = int(pc.sum(late).as_py() or 0) if late is not None else 0
        if not count or self.table.late == "keep":
            found = self._write_parts(ROWS, self.table, rows)
            found[0]["late"] = count
            return found + reached
        aside, rows = rows.filter(late), rows.filter(pc.invert(late))
        if self.late is not None:
            found = self._write_parts(LATE, self.late, aside)
            found[0]["late"] = count
        else:
            found = [{**_NO_FILE, "kind": DROPPED, "late": count}]
        if len(rows):
            found += self._write_parts(ROWS, self.table, rows)
        return found + reached

    def _write_parts(
        self, kind: str, table: Table, rows: pa.Table
    ) -> list[dict[str, Any]]:
        """Write rows, at least one, to a file for each partition of the table.

        Return a dict for each file, by the columns of FILES_DDL: path, rows, bytes...
        """
        by = partition_columns(table, rows.schema)
        if any(field.name not in rows.schema.names for field in by):
            rows = rows.append_column(_date_field(by), _days(rows, table.event_time))
        if kind in self.writers:
            return self._write_own(kind, rows)
        return [
            self._write(kind, table, part.drop_columns(list(values)), values)
            for values, part in _split(rows, () if table.key else table.partition_by)
        ]

    def _late(self, event_time: pa.ChunkedArray) -> pa.ChunkedArray | None:
        """Return for each row whether it is older than the table takes.

        None: rows may have any age, or nothing is known to count it from.
        """
        if not self.table.late_after_s or self.reached_us is None:
            return None
        limit_us = self.reached_us - int(self.table.late_after_s * 1_000_000)
        if pa.types.is_date(event_time.type):
            limit_us -= limit_us % _DAY_US
        return pc.fill_null(pc.less(_microseconds(event_time), limit_us), False)

    def _reached(self, event_time: pa.ChunkedArray) -> list[dict[str, Any]]:
        """Return the report's entry with the latest event time, if there is any."""
        if not self.table.late_after_s:
            return []
        times = _microseconds(event_time)
        possible = pc.less_equal(times, int(self.planned_s * 1_000_000))
        latest = pc.max(times.filter(possible)).as_py()
        if latest is None:
            return []
        return [{**_NO_FILE, "kind": REACHED, "partition": str(latest)}]

    def _write_bad(self, bad: pa.Table) -> list[dict[str, Any]]:
        if self.dead_letter is None:
            first = bad.slice(0, 1).to_pylist()[0]
            raise PipelineError(
                f"the value at {first['_topic']}-{first['_partition']} offset"
                f" {first['_offset']} cannot be read: {first['_error']}. Add a"
                " [dead_letter] table to set such values aside"
            )
        assert bad.schema == bad_schema()
        if BAD in self.writers:
            return self._write_own(BAD, bad)
        return [self._write(BAD, self.dead_letter, bad, {})]

    def _write_own(self, kind: str, rows: pa.Table) -> list[dict[str, Any]]:
        return [{"kind": kind, "late": 0, **each} for each in self.writers[kind](rows)]

    def _write(
        self, kind: str, table: Table, rows: pa.Table, values: dict[str, Any]
    ) -> dict[str, Any]:
        directory = self.directories[kind]
        written = _write_file(rows, directory, table, values, STAGED)
        return {"kind": kind, "late": 0, **written}


@dataclass(frozen=True)
class PlacedFiles:
    """Writes rows to files in their final place, below their partition's directory.

    This is for tables whose readers see no file before a commit names it. No file has
    to be moved then; in an object store, a move would be a copy.

    Attributes:
        prefix: the beginning of the files' names.
    """

    table: Table
    prefix: str

    def __call__(self, rows: pa.Table) -> list[dict[str, Any]]:
        """Write rows to files; return a dict for each: path, partition, rows, bytes."""
        by = self.table.partition_by
        return [
            _write_file(
                part.drop_columns(list(values)),
                self.table.path,
                self.table,
                values,
                PARQUET,
                f"{hive_directory(values)}/{self.prefix}".lstrip("/"),
            )
            for values, part in _split(rows, by)
        ]


def _write_file(
    rows: pa.Table,
    directory: str,
    table: Table,
    values: dict[str, Any],
    suffix: str,
    name: str = "",
) -> dict[str, Any]:
    """Write rows to a Parquet file; return its path, partition, rows and bytes.

    Args:
        values: the file's partition values, as directories' names have them.
        suffix: the end of the file's name, PARQUET or STAGED.
        name: the beginning of the file's name; it may contain directories.
    """
    files, inside = open_directory(directory)
    path = f"{inside}/{name}{uuid.uuid4().hex}{suffix}"
    files.create_dir(path.rpartition("/")[0], recursive=True)
    pq.write_table(rows, path, filesystem=files, compression=table.compression)
    return {
        "path": path,
        "partition": orjson.dumps(values).decode(),
        "rows": rows.num_rows,
        "bytes": files.get_file_info(path).size,
    }


def _days(rows: pa.Table, event_time: str) -> pa.ChunkedArray:
    """Return the day of each row; a row without event time has that of its record.

    pandas cannot read a table that has days and a partition of null beside them, and
    one tombstone would make that.

    Args:
        event_time: the column that gives the day; empty: the record's timestamp.
    """
    names = [event_time or "_timestamp", "_timestamp"]
    days = [
        rows.column(name).cast(pa.date32())
        for name in names
        if name in rows.schema.names
    ]
    return pc.coalesce(*days)


def _microseconds(event_time: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return times or days as microseconds since 1970; a time of no zone is UTC's.

    Python's datetime does not have all years that a column may have.
    """
    if pa.types.is_date(event_time.type):
        return pc.multiply(event_time.cast(pa.int32()).cast(pa.int64()), _DAY_US)
    unit = pa.timestamp("us", event_time.type.tz)
    return event_time.cast(unit).cast(pa.int64())


def _date_field(fields: list[pa.Field]) -> pa.Field:
    return next(field for field in fields if field.name == "date")


def _split(
    rows: pa.Table, names: Sequence[str]
) -> Iterator[tuple[dict[str, Any], pa.Table]]:
    """Yield each combination of values in the named columns, and its rows in order."""
    if not names:
        yield {}, rows
        return
    for keys in rows.select(names).group_by(list(names)).aggregate([]).to_pylist():
        chosen = None
        for name, value in keys.items():
            column = rows.column(name)
            same = (
                pc.is_null(column)
                if value is None
                else pc.fill_null(
                    pc.equal(column, pa.scalar(value, column.type)), False
                )
            )
            chosen = same if chosen is None else pc.and_(chosen, same)
        values = {name: _directory_value(value) for name, value in keys.items()}
        yield values, rows.filter(chosen)


def _directory_value(value: Any) -> str | None:
    """Return a partition value as a directory's name has it; None for null.

    Empty text becomes None too, as in Spark, which does not read a directory "name=".
    """
    if value is None or value == "":
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)


def hive_directory(values: dict[str, str | None]) -> str:
    """Return a partition's directory, named as by Spark and Hive: ``a=1/b=x``."""
    return "/".join(
        f"{_escaped(name, '')}="
        + ("__HIVE_DEFAULT_PARTITION__" if value is None else _escaped(value, " "))
        for name, value in values.items()
    )


def _escaped(text: str, safe: str) -> str:
    """Percent-encode special ASCII characters only.

    Spark decodes each encoded byte as a character of its own, so it would misread
    encoded UTF-8.
    """
    return "".join(
        quote(letter, safe=safe) if letter.isascii() else letter for letter in text
    )

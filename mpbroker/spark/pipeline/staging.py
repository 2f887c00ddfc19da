"""Write a batch's files on executors, in a staging area that readers ignore.

The driver commits the files afterwards (`lake`). A task that is tried again writes its
files again under other names. Only the files that its last try reports are committed;
the others are deleted later.
"""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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
ROWS: Final = "rows"
BAD: Final = "bad"
# Rows are kept in memory up to this size and then split by partition value: a file for
# each value would otherwise have to stay open.
_FLUSH_BYTES: Final = 256 * 1024 * 1024


def open_directory(path: str, *, make: bool = False) -> tuple[fs.FileSystem, str]:
    """Return the file system of a path or URI, and the path inside it.

    Args:
        make: create the directory if it is missing.

    Raises:
        PipelineError: the file system or the directory cannot be used.
    """
    try:
        found, inside = find(path)
        if make:
            found.create_dir(inside, recursive=True)
    except (pa.ArrowInvalid, OSError, NotImplementedError) as error:
        raise PipelineError(f"directory {path!r} cannot be used: {error}") from error
    return found, inside


def partition_columns(table: Table, schema: pa.Schema) -> list[pa.Field]:
    """Return the columns that a table is partitioned by."""
    return [
        pa.field("date", pa.date32())
        if name == "date" and "date" not in schema.names
        else schema.field(name)
        for name in table.partition_by
    ]


def table_schema(table: Table, schema: pa.Schema) -> pa.Schema:
    """Return a table's columns: those of the rows, and the computed "date"."""
    for field in partition_columns(table, schema):
        if field.name not in schema.names:
            schema = schema.append(field)
    return schema


@dataclass(frozen=True)
class Stager:
    """Writes the files of a batch's task; Spark pickles it to its executors.

    Attributes:
        value: how values are decoded; None if the rows have the columns already.
        directories: of this batch in the tables' staging areas, by ROWS and BAD.
        now_s: the time since 1970 from which late rows are counted.
    """

    value: ValueFormat | None
    table: Table
    dead_letter: Table | None
    directories: dict[str, str]
    with_headers: bool
    now_s: float

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write all rows of a task, and yield its report.

        Raises:
            PipelineError: a value cannot be decoded, and there is no dead-letter table.
        """
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
                rows.append(decoded.rows)
                if decoded.bad.num_rows:
                    bad.append(decoded.bad)
            size += rows[-1].nbytes
            if size >= _FLUSH_BYTES:
                files += self._write_rows(rows)
                rows, size = [], 0
        files += self._write_rows(rows)
        if bad:
            files.append(self._write_bad(pa.concat_tables(bad)))
        yield pa.RecordBatch.from_pylist(files, schema=_FILES_SCHEMA)

    def _write_rows(self, tables: list[pa.Table]) -> list[dict[str, Any]]:
        rows = pa.concat_tables(tables) if tables else None
        if rows is None or not rows.num_rows:
            return []
        event_time = rows.column(self.table.event_time or "_timestamp")
        by = partition_columns(self.table, rows.schema)
        if any(field.name not in rows.schema.names for field in by):
            rows = rows.append_column(_date_field(by), event_time.cast(pa.date32()))
        late = self._late(event_time)
        found = []
        for values, part in _split(rows, [field.name for field in by]):
            inside = part.drop_columns([field.name for field in by]) if by else part
            found.append(self._write(ROWS, self.table, inside, values))
        if found:
            found[0]["late"] = late
        return found

    def _late(self, event_time: pa.ChunkedArray) -> int:
        if not self.table.late_after_s:
            return 0
        earliest = datetime.datetime.fromtimestamp(
            self.now_s - self.table.late_after_s, datetime.UTC
        )
        found = pc.less(event_time, pa.scalar(earliest, event_time.type))
        return int(pc.sum(found).as_py() or 0)

    def _write_bad(self, bad: pa.Table) -> dict[str, Any]:
        if self.dead_letter is None:
            first = bad.slice(0, 1).to_pylist()[0]
            raise PipelineError(
                f"the value at {first['_topic']}-{first['_partition']} offset"
                f" {first['_offset']} cannot be read: {first['_error']}. Add a"
                " [dead_letter] table to set such values aside"
            )
        assert bad.schema == bad_schema()
        return self._write(BAD, self.dead_letter, bad, {})

    def _write(
        self, kind: str, table: Table, rows: pa.Table, values: dict[str, Any]
    ) -> dict[str, Any]:
        files, inside = open_directory(self.directories[kind], make=True)
        path = f"{inside}/{uuid.uuid4().hex}.parquet"
        pq.write_table(rows, path, filesystem=files, compression=table.compression)
        return {
            "kind": kind,
            "path": path,
            "partition": orjson.dumps(values).decode(),
            "rows": rows.num_rows,
            "bytes": files.get_file_info(path).size,
            "late": 0,
        }


def _date_field(fields: list[pa.Field]) -> pa.Field:
    return next(field for field in fields if field.name == "date")


def _split(
    rows: pa.Table, names: list[str]
) -> Iterator[tuple[dict[str, Any], pa.Table]]:
    """Yield the values of each combination in these columns, and its rows in order."""
    if not names:
        yield {}, rows
        return
    for keys in rows.select(names).group_by(names).aggregate([]).to_pylist():
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

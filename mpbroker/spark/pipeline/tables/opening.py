"""Open a pipeline's table as Parquet, Delta or Iceberg, as its TOML file says."""

from __future__ import annotations

from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from msgspec.structs import replace

from mpbroker.spark.pipeline.description import Table
from mpbroker.spark.pipeline.staging import open_directory
from mpbroker.spark.pipeline.tables.iceberg import IcebergTable, iceberg_columns
from mpbroker.spark.pipeline.tables.lake import (
    DeltaTable,
    LakeTable,
    ParquetTable,
    check_delta,
    newest_parquet_files,
    open_delta,
    parquet_files,
)


def open_table(table: Table, schema: pa.Schema, name: str) -> LakeTable:
    """Open a table as Parquet, Delta or Iceberg, as its ``format`` says.

    Args:
        schema: the rows' columns, without computed ones.
        name: the pipeline's name.

    Raises:
        PipelineError: see `LakeTable`; or the format's library is not installed.
    """
    if table.format == "parquet":
        return ParquetTable(table, schema, name)
    if table.format == "iceberg":
        return IcebergTable(table, schema, name)
    check_delta()
    return DeltaTable(table, schema, name)


def as_stored(table: Table) -> tuple[Table, bool]:
    """Return a table's TOML section with the partition columns that its files have.

    A job that reads the table needs them. For Iceberg there are none: the table's
    metadata lists the files.

    Returns:
        The section, and whether the table has a column ``_headers``. For Delta and
        Parquet an empty table's section is unchanged.

    Raises:
        PipelineError: the table cannot be read.
    """
    if table.format == "delta":
        check_delta()
        stored = open_delta(table.path)
        if stored is None:
            return table, False
        by = tuple(stored.metadata().partition_columns)
        names = pa.schema(stored.schema().to_arrow()).names
    elif table.format == "iceberg":
        columns = iceberg_columns(table)
        return replace(table, partition_by=()), "_headers" in columns
    else:
        files, root = open_directory(table.path)
        found = parquet_files(files, root)
        if not found:
            return table, False
        directories = found[0].removeprefix(root).strip("/").split("/")[:-1]
        by = tuple(unquote(each.partition("=")[0]) for each in directories)
        newest = newest_parquet_files(files, root)[0]
        names = pq.read_schema(newest, filesystem=files).names
    return replace(table, partition_by=by), "_headers" in names

"""Bring batches to a lake without Spark, and read it with other libraries.

As a script: bring batches until it is killed, or has brought all.

    python -m tests.spark.lakes FORMAT PATH CATALOG BATCHES
"""

from __future__ import annotations

import sys

import pyarrow as pa
import pyarrow.dataset

from mpbroker.spark.file_systems import find
from mpbroker.spark.pipeline.decode import row_schema
from mpbroker.spark.pipeline.description import Table, ValueFormat
from mpbroker.spark.pipeline.staging import ROWS, Stager
from mpbroker.spark.pipeline.tables.lake import LakeTable, storage_options
from mpbroker.spark.pipeline.tables.opening import open_table

SCHEMA = row_schema(
    ValueFormat("json", {"n": "bigint", "kind": "string"}), with_headers=False
)
BATCH = 10
FORMATS = ("parquet", "delta", "iceberg")


def lake_table(kind: str, path: str, catalog: str, **more) -> Table:
    if kind != "iceberg":
        return Table(path, kind, ("date", "kind"), **more)
    return Table(
        path,
        kind,
        ("date", "kind"),
        identifier="default.lake",
        catalog={"uri": f"sqlite:///{catalog}"},
        **more,
    )


def rows(
    first: int, end: int, schema: pa.Schema = SCHEMA, **more: list
) -> pa.RecordBatch:
    """Return rows numbered ``n``; ``more``: columns that the schema has besides."""
    count = end - first
    columns = {
        "n": range(first, end),
        "kind": [f"a b/{i % 2}" if i % 3 else None for i in range(first, end)],
        "_key": [b"k"] * count,
        "_topic": ["t"] * count,
        "_partition": [0] * count,
        "_offset": range(first, end),
        "_timestamp": [i % 3 * 86_400_000_000 for i in range(first, end)],
        **more,
    }
    return pa.RecordBatch.from_pydict(
        {name: columns[name] for name in schema.names}, schema=schema
    )


def stage(lake: LakeTable, batch_id: int, batch: pa.RecordBatch) -> list[dict]:
    writer = lake.file_writer()
    stager = Stager(
        *(None, lake.table, None, {ROWS: lake.staging(batch_id)}, False, 0),
        writers={ROWS: writer} if writer else {},
    )
    return [each for files in stager([batch]) for each in files.to_pylist()]


def opened(
    table: Table, query: str = "q", name: str = "p", schema: pa.Schema = SCHEMA
) -> LakeTable:
    lake = open_table(table, schema, name)
    lake.claim(query)
    return lake


def bring(lake: LakeTable, batch_id: int) -> None:
    """Write a batch, unless the table has it: rows from BATCH * batch_id on."""
    if not lake.has_batch(batch_id):
        first = BATCH * batch_id
        lake.commit(batch_id, stage(lake, batch_id, rows(first, first + BATCH)), "{}")


def read(table: Table) -> pa.Table:
    """Return the rows by the library that the format comes from."""
    if table.format == "delta":
        from deltalake import DeltaTable

        return DeltaTable(
            table.path, storage_options=storage_options()
        ).to_pyarrow_table()
    if table.format == "iceberg":
        from pyiceberg.catalog import load_catalog

        from mpbroker.spark.pipeline.tables.iceberg import load_iceberg_catalog

        properties = load_iceberg_catalog(table).properties  # how S3 is reached
        catalog = load_catalog("default", **properties)
        return catalog.load_table(table.identifier).scan().to_arrow()
    files, root = find(table.path)
    return pa.dataset.dataset(root, filesystem=files, partitioning="hive").to_table()


def numbers(table: Table) -> list[int]:
    return sorted(read(table)["n"].to_pylist())


def main(kind: str, path: str, catalog: str, batches: str) -> None:
    lake = opened(lake_table(kind, path, catalog))
    # A killed driver's checkpoint tells neither more nor less than this: all the
    # batches before the newest are done, and that one runs again.
    done = 0
    while lake.has_batch(done):
        done += 1
    for batch_id in range(max(0, done - 1), int(batches)):
        bring(lake, batch_id)
        print(batch_id, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

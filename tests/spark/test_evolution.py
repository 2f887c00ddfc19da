"""A table gets new columns, keeps its rows, and refuses what it cannot hold."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mpbroker.spark.pipeline.decode import row_schema
from mpbroker.spark.pipeline.description import Table, ValueFormat
from mpbroker.spark.pipeline.errors import PipelineError
from mpbroker.spark.pipeline.staging import ROWS, Stager
from mpbroker.spark.pipeline.tables.opening import as_stored, open_table
from tests.spark.test_decode import batch_of

OLD = {"n": "bigint", "legs": "array<struct<to: string>>"}
NEW = {
    "n": "bigint",
    "legs": "array<struct<to: string, gate: int>>",
    "price": "decimal(9, 2)",
    "tags": "map<string, string>",
}


@pytest.fixture(params=["parquet", "delta"])
def table(request, tmp_path):
    return Table(str(tmp_path / "lake"), request.param, ("date",))


def opened(table, fields):
    schema = row_schema(ValueFormat("json", fields), with_headers=False)
    lake = open_table(table, schema, "p")
    lake.claim("q")
    return lake


def bring(table, batch_id, fields, *values):
    lake = opened(table, fields)
    value = ValueFormat("json", fields)
    own = lake.file_writer()
    writers = {} if own is None else {ROWS: own}
    directories = {ROWS: lake.staging(batch_id)}
    stager = Stager(value, table, None, directories, False, 0, writers=writers)
    found = [each for files in stager([batch_of(values)]) for each in files.to_pylist()]
    lake.commit(batch_id, [each for each in found if each["kind"] == ROWS])
    return lake


def rows(lake, fields):
    """Return rows as a reader has them that merges the files' columns."""
    if lake.table.format == "delta":
        from deltalake import DeltaTable

        found = DeltaTable(lake.table.path).to_pyarrow_table()
    else:
        files = [pq.ParquetFile(path).read() for path in lake.data_files()]
        found = pa.concat_tables(files, promote_options="permissive")
    return sorted(found.select(list(fields)).to_pylist(), key=lambda row: row["n"])


def test_new_columns_and_new_fields_of_nested_ones_appear(table):
    bring(table, 0, OLD, b'{"n":1,"legs":[{"to":"a"}]}')
    new = b'{"n":2,"legs":[{"to":"b","gate":3}],"price":1.5,"tags":{"x":"y"}}'
    lake = bring(table, 1, NEW, new)
    first, second = rows(lake, NEW)
    assert (first["price"], first["tags"]) == (None, None)
    assert first["legs"][0]["to"] == "a"
    assert second["legs"] == [{"to": "b", "gate": 3}]
    assert (str(second["price"]), second["tags"]) == ("1.50", [("x", "y")])
    # Merged files, also those of old columns only, have all of them.
    assert lake.compact() == (2, 1)
    assert rows(lake, NEW)[1] == second
    assert lake.has_batch(1) and not lake.has_batch(2)
    assert opened(table, NEW).schema.names == lake.schema.names
    assert as_stored(table)[0].partition_by == ("date",)


def test_a_pipeline_without_a_column_of_the_table_is_refused(table):
    bring(table, 0, OLD, b'{"n":1,"legs":[{"to":"a"}]}')
    bring(table, 1, NEW, b'{"n":2}')
    for fields, said in (
        (OLD, "in the table and"),
        (NEW | {"n": "int"}, "'n' is int64 in the table and int32 in the pipeline"),
        (NEW | {"legs": "array<struct<to: string>>"}, "column 'legs'"),
        (NEW | {"legs": "array<struct<to: int, gate: int>>"}, "column 'legs'"),
        (NEW | {"tags": "map<string, int>"}, "column 'tags'"),
    ):
        with pytest.raises(PipelineError, match=said):
            opened(table, fields)
    assert opened(table, NEW).has_batch(1)


def test_a_driver_killed_between_the_columns_and_the_rows_goes_on(table):
    bring(table, 0, OLD, b'{"n":1}')
    opened(table, NEW)  # and killed
    assert len(rows(bring(table, 1, NEW, b'{"n":2}'), ["n"])) == 2


def test_a_delta_table_gets_a_version_for_new_columns_only(tmp_path):
    from deltalake import DeltaTable

    table = Table(str(tmp_path / "lake"), "delta")
    fields = NEW | {"at": "timestamp_ntz", "raw": "binary", "x": "float", "day": "date"}
    bring(table, 0, fields, b'{"n":1}')
    version = DeltaTable(table.path).version()
    opened(table, fields)
    assert DeltaTable(table.path).version() == version
    deeper = "map<string, array<struct<a: int>>>"
    opened(table, fields | {"deep": deeper})
    opened(table, fields | {"deep": deeper.replace("a: int", "a: int, b: string")})
    assert DeltaTable(table.path).version() == version + 2

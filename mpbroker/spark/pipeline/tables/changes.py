"""Apply a batch's changes by key: of each key the newest record wins.

Executors stage the decoded records with a column that says whether the key's row is
deleted: then the record is a tombstone, or a deletion of Debezium's. The driver reads
them, keeps the newest of each key, and merges those into the table in one commit. A
batch must fit into the driver's memory; the source's maxOffsetsPerTrigger bounds it.

The records of a key must be in one partition, as Kafka's partitioner puts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs

from mpbroker.spark.pipeline.staging import DELETED

_ROW: Final = "_row"


def read_changes(
    files: fs.FileSystem, staged: Sequence[dict[str, Any]], key: Sequence[str]
) -> pa.Table:
    """Return the newest staged change of each key.

    Changes without a key are left out: Debezium sends a tombstone, for compaction,
    after each deletion.

    Args:
        staged: the tasks' reports, a dict for each file with its "path".
    """
    tables = [
        pq.read_table(each["path"], filesystem=files, partitioning=None)
        for each in staged
    ]
    found = pa.concat_tables(tables)
    for name in key:
        found = found.filter(pc.is_valid(found.column(name)))
    order = pc.sort_indices(
        found.select(["_partition", "_offset"]),
        sort_keys=[("_partition", "ascending"), ("_offset", "ascending")],
    )
    found = found.take(order)
    numbered = _numbered(found, key)
    newest = numbered.group_by(list(key)).aggregate([(_ROW, "max")])
    return found.take(newest.column(f"{_ROW}_max"))


def kept_rows(changes: pa.Table) -> pa.Table:
    """Return the changes that are not deletions: the rows to put into the table."""
    return changes.filter(pc.invert(changes.column(DELETED))).drop_columns([DELETED])


def without_keys(rows: pa.Table, keys: pa.Table) -> pa.Table | None:
    """Return the rows that have none of the keys; None if that is all rows.

    Args:
        rows: the rows.
        keys: the key columns of the rows to leave out, without null.
    """
    names = keys.column_names
    numbered = _numbered(rows, names)
    found = numbered.join(keys, names, join_type="left semi").column(_ROW)
    if not len(found):
        return None
    stays = pc.invert(pc.is_in(numbered.column(_ROW), value_set=found))
    return rows.filter(stays)


def _numbered(rows: pa.Table, names: Sequence[str]) -> pa.Table:
    # Number the rows and join the numbers: Arrow cannot join columns of lists, such as
    # headers.
    numbers = pa.array(range(rows.num_rows), pa.int64())
    return rows.select(list(names)).append_column(_ROW, numbers)

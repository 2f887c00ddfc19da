"""Build Arrow record batches with the columns of Spark's Kafka connector."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

import pyarrow as pa

if TYPE_CHECKING:
    from mpbroker.protocol.records.record_columns import BinaryColumn, RecordColumns

# Rows in one Arrow batch. Spark has a cost for each batch, so the batches of producers
# that send single records are joined; more rows only take memory. Spark's own default.
_BATCH_ROWS: Final = 10_000
_TIMESTAMP: Final = pa.timestamp("us", tz="UTC")
_HEADER: Final = pa.struct([("key", pa.string()), ("value", pa.binary())])
_NAMES: Final = (
    "key",
    "value",
    "topic",
    "partition",
    "offset",
    "timestamp",
    "timestampType",
)


def record_batch(
    columns: RecordColumns,
    topic: str,
    partition: int,
    timestamp_type: int,
    rows: int,
) -> pa.RecordBatch:
    """Return the first rows of a decoded record batch in Arrow's form, without a copy.

    Args:
        timestamp_type: 0 for CreateTime, 1 for LogAppendTime.
        rows: the number of rows to take.
    """
    timestamps = _numbers(columns.timestamps, pa.timestamp("ms", tz="UTC"), rows)
    arrays = [
        _binary(columns.keys, pa.binary(), rows),
        _binary(columns.values, pa.binary(), rows),
        pa.repeat(pa.scalar(topic, pa.string()), rows),
        pa.repeat(pa.scalar(partition, pa.int32()), rows),
        _numbers(columns.offsets, pa.int64(), rows),
        timestamps.cast(_TIMESTAMP),
        pa.repeat(pa.scalar(timestamp_type, pa.int32()), rows),
    ]
    if columns.headers is None:
        return pa.RecordBatch.from_arrays(arrays, names=_NAMES)
    import pyarrow.compute as pc  # tens of milliseconds that few queries need

    ends, names, contents = columns.headers
    count = len(names[1]) // 4 - 1
    headers = pa.StructArray.from_arrays(
        [_binary(names, pa.string(), count), _binary(contents, pa.binary(), count)],
        fields=list(_HEADER),
    )
    bounds = _numbers(ends, pa.int32(), rows + 1)
    # As in Spark's connector: null, not an empty array, for a record without headers.
    some = pc.not_equal(bounds[:-1], bounds[1:])
    lists = pa.Array.from_buffers(
        pa.list_(_HEADER),
        rows,
        [some.buffers()[1], pa.py_buffer(ends)],
        children=[headers],
    )
    return pa.RecordBatch.from_arrays([*arrays, lists], names=[*_NAMES, "headers"])


def joined(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Join small batches: yield the same rows in batches of 10,000 rows or more.

    The last batch may have fewer.
    """
    pending: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        pending.append(batch)
        rows += batch.num_rows
        if rows >= _BATCH_ROWS:
            yield _one(pending)
            pending, rows = [], 0
    if pending:
        yield _one(pending)


def _one(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _numbers(content: bytes, kind: pa.DataType, rows: int) -> pa.Array:
    return pa.Array.from_buffers(kind, rows, [None, pa.py_buffer(content)])


def _binary(column: BinaryColumn, kind: pa.DataType, rows: int) -> pa.Array:
    validity, offsets, content = column
    return pa.Array.from_buffers(
        kind,
        rows,
        [
            None if validity is None else pa.py_buffer(validity),
            pa.py_buffer(offsets),
            pa.py_buffer(content),
        ],
    )

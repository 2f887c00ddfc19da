"""Build Arrow record batches with the columns of Spark's Kafka connector."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from mpbroker.protocol.records.record_columns import BadRecordsError, read_columns

if TYPE_CHECKING:
    from mpbroker.client.cluster import TopicPartition
    from mpbroker.protocol.records.record_columns import (
        BinaryColumn,
        EncodedRecords,
        RecordColumns,
    )

# Rows in one Arrow batch, and bytes of their records. Spark has a cost for each batch;
# more rows only take memory. The number of rows is Spark's own default.
_BATCH_ROWS: Final = 10_000
_BATCH_BYTES: Final = 8 * 1024 * 1024
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


def record_batches(
    parts: Iterable[EncodedRecords],
    partition: TopicPartition,
    *,
    with_headers: bool,
    end: int | None = None,
    skip: Callable[[BadRecordsError, EncodedRecords], None] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the records of a partition's batches as rows, in order.

    Batches of single records, and of few, are read together: otherwise each would cost
    as much as hundreds of rows. So rows come 10,000 or more at a time, fewer if they
    are large, or if the kind of timestamps changes.

    Args:
        parts: the records of each batch.
        with_headers: whether the rows have headers.
        end: records from this offset on are left out.
        skip: a function that is called with an error and the batch that has it. If it
            returns, the batch is left out. None: the error is raised.

    Raises:
        BadRecordsError: the records of a batch are corrupt.
    """
    pending: list[EncodedRecords] = []
    rows = size = 0
    for part in parts:
        if pending and part.appended != pending[0].appended:
            yield from _rows_of(pending, partition, with_headers, end, skip)
            pending, rows, size = [], 0, 0
        pending.append(part)
        rows += part.record_count
        size += len(part.payload)
        if rows >= _BATCH_ROWS or size >= _BATCH_BYTES:
            yield from _rows_of(pending, partition, with_headers, end, skip)
            pending, rows, size = [], 0, 0
    yield from _rows_of(pending, partition, with_headers, end, skip)


def _rows_of(
    parts: list[EncodedRecords],
    partition: TopicPartition,
    with_headers: bool,
    end: int | None,
    skip: Callable[[BadRecordsError, EncodedRecords], None] | None,
) -> Iterator[pa.RecordBatch]:
    while parts:
        try:
            columns = read_columns(parts, with_headers=with_headers)
        except BadRecordsError as error:
            if skip is None:
                raise
            skip(error, parts[error.part])
            parts = [*parts[: error.part], *parts[error.part + 1 :]]
            continue
        rows = columns.rows
        if end is not None:
            rows = bisect_left(memoryview(columns.offsets).cast("q"), end)
        if rows:
            yield _record_batch(columns, partition, int(parts[0].appended), rows)
        return


def _record_batch(
    columns: RecordColumns, partition: TopicPartition, timestamp_type: int, rows: int
) -> pa.RecordBatch:
    """Return the first rows of decoded records in Arrow's form, without a copy.

    Args:
        timestamp_type: 0 for CreateTime, 1 for LogAppendTime.
        rows: the number of rows to take.
    """
    timestamps = _numbers(columns.timestamps, pa.timestamp("ms", tz="UTC"), rows)
    arrays = [
        _binary(columns.keys, pa.binary(), rows),
        _binary(columns.values, pa.binary(), rows),
        pa.repeat(pa.scalar(partition.topic, pa.string()), rows),
        pa.repeat(pa.scalar(partition.partition, pa.int32()), rows),
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

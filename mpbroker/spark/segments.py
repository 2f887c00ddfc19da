"""``format("mpbroker-segments")``: a broker's segments, read without the broker.

    spark.read.format("mpbroker-segments")
        .option("path", "/var/lib/mpbroker").option("subscribe", "events").load()

Rows are those of format("mpbroker"). The last segment of a partition is being written
to, so it is left out unless ``includeActive``: say that for a stopped broker's
directory, and for an archive that holds closed segments only.

Tombstones are rows with a null value, and compaction shows as missing offsets, as to
any consumer. Every CRC is verified; damage fails the query, or with
failOnDataLoss=false costs the batches up to where the index finds the next.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from mpbroker.protocol.errors import ProtocolError
from mpbroker.protocol.records.batch_header import (
    BatchHeader,
    RecordBatchError,
    compute_crc,
)
from mpbroker.protocol.records.record_columns import read_columns
from mpbroker.spark.arrow import joined, record_batch
from mpbroker.spark.offsets import DataLossError
from mpbroker.spark.options import OptionError
from mpbroker.spark.partition_reader import logger
from mpbroker.spark.schema import HEADERS_DDL, SCHEMA_DDL
from mpbroker.spark.segment_directory import (
    INDEX,
    LOG,
    SegmentError,
    SegmentReader,
    open_path,
    read_file,
)
from mpbroker.spark.segment_index import parse_offset_index
from mpbroker.spark.segment_plan import (
    SegmentOptions,
    SegmentTask,
    parse_segment_options,
    plan,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import fs
    from pyspark.sql.datasource import DataSourceStreamReader
    from pyspark.sql.types import StructType


class SegmentPartition(InputPartition):
    """What one task reads."""

    def __init__(self, task: SegmentTask) -> None:
        super().__init__(tuple(task))
        self.task = task


class SegmentsDataSource(DataSource):
    """Segments of a data directory or an archive of it."""

    @classmethod
    def name(cls) -> str:
        return "mpbroker-segments"

    def schema(self) -> str:
        with_headers = str(self.options.get("includeHeaders", "false")).lower()
        return SCHEMA_DDL + (HEADERS_DDL if with_headers == "true" else "")

    def reader(self, schema: StructType) -> SegmentsReader:
        return SegmentsReader(parse_segment_options(self.options))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        raise OptionError(
            "format mpbroker-segments is for batch queries; for a stream use format"
            " mpbroker, which asks the broker"
        )


class SegmentsReader(DataSourceReader):
    """One task a segment, or several for a large one."""

    def __init__(self, options: SegmentOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        return [SegmentPartition(task) for task in plan(self._options)]

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        if partition is None or partition.value is None:
            return iter(())  # what Spark runs where there are no partitions at all
        assert isinstance(partition, SegmentPartition)
        return joined(read_task(partition.task, self._options))


def read_task(task: SegmentTask, options: SegmentOptions) -> Iterator[pa.RecordBatch]:
    """Yield a task's rows, in order.

    Raises:
        DataLossError: bytes that are no batch, or a wrong CRC, and fail_on_data_loss.
        SegmentError: the file is gone.
    """
    files, _ = open_path(task.root)
    try:
        reader = SegmentReader(files, task.path)
    except FileNotFoundError:
        raise SegmentError(
            f"{task.path} is gone since the query was planned (retention, compaction);"
            " run the query again"
        ) from None
    try:
        yield from _read(reader, files, task, options)
    finally:
        reader.close()


def _read(
    reader: SegmentReader,
    files: fs.FileSystem,
    task: SegmentTask,
    options: SegmentOptions,
) -> Iterator[pa.RecordBatch]:
    unchanged = reader.size == task.size or (task.is_active and reader.size > task.size)
    position = task.position if unchanged else 0
    while position < reader.size:
        try:
            header = reader.header(position)
            if header is not None and header.base_offset >= task.end:
                return
            batch = None if header is None else reader.batch(position, header)
            if header is None or batch is None:
                raise RecordBatchError("the last batch is cut off")
            rows = _rows(header, batch, task, options)
        except ProtocolError as error:
            if task.is_active:
                # The end of what the broker has committed; recovery would cut here.
                logger.warning("%s ends at position %d", task.path, position)
                return
            position = _after_damage(files, task, position, error, options)
            continue
        if rows is not None and rows.num_rows:
            yield rows
        position += header.size_in_bytes


def _rows(
    header: BatchHeader, batch: memoryview, task: SegmentTask, options: SegmentOptions
) -> pa.RecordBatch | None:
    """Return the rows of a batch that this task is to show."""
    if header.next_offset <= task.first:
        return None
    if compute_crc(batch) != header.crc:
        raise RecordBatchError(
            f"the batch at offset {header.base_offset} is corrupt: its CRC is not"
            f" {header.crc:#010x}"
        )
    if header.is_control or (header.is_transactional and _is_aborted(header, task)):
        return None
    columns = read_columns(
        header, batch, task.first, with_headers=options.include_headers
    )
    rows = columns.rows
    if header.last_offset >= task.end:
        rows = bisect_left(memoryview(columns.offsets).cast("q"), task.end)
    topic, number = task.partition
    return record_batch(columns, topic, number, header.timestamp_type, rows)


def _is_aborted(header: BatchHeader, task: SegmentTask) -> bool:
    return any(
        each.producer_id == header.producer_id
        and each.first_offset <= header.base_offset <= each.last_offset
        for each in task.aborted
    )


def _after_damage(
    files: fs.FileSystem,
    task: SegmentTask,
    position: int,
    error: ProtocolError,
    options: SegmentOptions,
) -> int:
    """Return where to go on after damage, or raise."""
    base_offset = int(task.path.rpartition("/")[2].removesuffix(LOG))
    resume = task.size
    try:
        content = read_file(files, task.path.removesuffix(LOG) + INDEX)
    except FileNotFoundError:
        content = b""
    for entry in parse_offset_index(content, base_offset):
        if entry.position > position:
            resume = entry.position
            break
    text = f"{task.partition}: {task.path} is damaged at position {position}: {error}"
    if options.fail_on_data_loss:
        raise DataLossError(
            f"{text}. Read an undamaged copy, or set failOnDataLoss=false to go on at"
            f" position {resume} without what lies between"
        )
    logger.warning("%s; going on at position %d", text, resume)
    return resume

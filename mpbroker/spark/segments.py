"""Read segments for `SegmentsDataSource`, without the broker.

Rows have the columns of format("mpbroker"). A running broker writes to the last segment
of each partition, so that segment is skipped. Set ``includeActive`` to read it: for the
directory of a stopped broker, and for an archive that holds closed segments only.

The path may also be a broker's remote.storage.url. Then its manifests say which closed
segments there are. If kafka.bootstrap.servers is set, too, the broker gives the offsets
at which the query begins and ends, and the records after those segments.

Tombstones are rows with a null value, and compaction leaves gaps between offsets, as
for any consumer. Every CRC is verified. Damage fails the query; with
failOnDataLoss=false reading goes on at the next batch that the index knows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from mpbroker.protocol.errors import ProtocolError
from mpbroker.protocol.records.batch_header import (
    BatchHeader,
    RecordBatchError,
    compute_crc,
)
from mpbroker.protocol.records.record_columns import (
    BadRecordsError,
    EncodedRecords,
    encoded_records,
)
from mpbroker.spark.arrow import record_batches
from mpbroker.spark.offsets import DataLossError, OffsetRange
from mpbroker.spark.remote_store import read_indexes
from mpbroker.spark.segment_directory import (
    INDEX,
    LOG,
    OFFSET_DIGITS,
    SegmentError,
    SegmentReader,
    open_path,
    read_file,
)
from mpbroker.spark.segment_index import IndexEntry, parse_offset_index
from mpbroker.spark.segment_plan import (
    SegmentOptions,
    SegmentTask,
    plan,
    plan_with_tail,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import fs

logger = logging.getLogger(__name__)


class SegmentPartition(InputPartition):
    """The part of a segment that one task reads."""

    def __init__(self, task: SegmentTask) -> None:
        super().__init__(tuple(task))
        self.task = task


class SegmentsReader(DataSourceReader):
    """Plans one task for each segment, several for a large one, and reads the rows."""

    def __init__(self, options: SegmentOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        if self._options.broker is None:
            return [SegmentPartition(task) for task in plan(self._options)]
        # What reads from brokers is imported only where one is asked.
        from mpbroker.spark.readers import RangePartition

        return [
            RangePartition(task)
            if isinstance(task, OffsetRange)
            else SegmentPartition(task)
            for task in plan_with_tail(self._options)
        ]

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        if partition is None or partition.value is None:
            return iter(())  # Spark reads one empty partition where the plan has none
        if isinstance(partition, SegmentPartition):
            return read_task(partition.task, self._options)
        from mpbroker.spark.partition_reader import read_range
        from mpbroker.spark.readers import RangePartition

        assert isinstance(partition, RangePartition)
        assert self._options.broker is not None
        return read_range(partition.range, self._options.broker)


def read_task(task: SegmentTask, options: SegmentOptions) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a task, which reads a part of a segment, in order.

    Raises:
        DataLossError: bytes are not a batch or a CRC is wrong, and
            ``fail_on_data_loss`` is set.
        SegmentError: the file was deleted since the query was planned.
    """

    def skip(error: BadRecordsError, part: EncodedRecords) -> None:
        text = f"{task.partition}: {task.path} is damaged: {error}"
        if options.fail_on_data_loss:
            raise DataLossError(
                f"{text}. Read an undamaged copy, or set failOnDataLoss=false to skip"
                " the batch"
            )
        logger.warning("%s; the batch is skipped", text)

    return record_batches(
        _batches(task, options),
        task.partition,
        with_headers=options.include_headers,
        end=task.end,
        skip=skip,
    )


def _batches(task: SegmentTask, options: SegmentOptions) -> Iterator[EncodedRecords]:
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
) -> Iterator[EncodedRecords]:
    """Yield the records of each batch of a task; the last may have some beyond it."""
    if task.indexes_crc is not None:
        position, end = _bounds(files, task)
        if reader.size != task.size:
            text = f"{task.path} has {reader.size} bytes, not {task.size}"
            if options.fail_on_data_loss:
                raise DataLossError(
                    f"{text}; set failOnDataLoss=false to read the rest"
                )
            logger.warning("%s", text)
        end = min(end, reader.size)
    else:
        grown = task.is_active and reader.size > task.size
        position = task.position if grown or reader.size == task.size else 0
        end = reader.size
    while position < end:
        try:
            header = reader.header(position)
            if header is not None and header.base_offset >= task.end:
                return
            batch = None if header is None else reader.batch(position, header)
            if header is None or batch is None:
                raise RecordBatchError("the last batch is cut off")
            records = _records(header, batch, task)
        except ProtocolError as error:
            if task.is_active:
                # After the last committed batch there may be any bytes: a broker's
                # recovery truncates the log here.
                logger.warning("%s ends at position %d", task.path, position)
                return
            position = _after_damage(files, task, position, error, options)
            continue
        if records is not None:
            yield records
        position += header.size_in_bytes


def _bounds(files: fs.FileSystem, task: SegmentTask) -> tuple[int, int]:
    """Return the first byte of a remote segment that a task reads, and its end byte."""
    if (task.position, task.stop) == (0, task.size) and task.first == _base(task):
        return 0, task.size
    begin = stop = first = 0
    for entry in _offset_index(files, task):
        if entry.offset < task.first:
            first = entry.position
        if entry.position <= task.position:
            begin = entry.position
        if entry.position <= task.stop:
            stop = entry.position
    return max(begin, first), task.size if task.stop == task.size else stop


def _offset_index(files: fs.FileSystem, task: SegmentTask) -> list[IndexEntry]:
    try:
        if task.indexes_crc is not None:
            found = read_indexes(files, task.path, task.indexes_crc)
            content = found.get(INDEX, b"")
        else:
            content = read_file(files, task.path.removesuffix(LOG) + INDEX)
    except FileNotFoundError:
        content = b""
    return parse_offset_index(content, _base(task))


def _base(task: SegmentTask) -> int:
    """Return the first offset of a segment, with which its file's name begins."""
    return int(task.path.rpartition("/")[2][:OFFSET_DIGITS])


def _records(
    header: BatchHeader, batch: memoryview, task: SegmentTask
) -> EncodedRecords | None:
    """Return the records of a batch that belongs to the task; None if it does not.

    Raises:
        RecordBatchError: the CRC is wrong.
        DecompressionError: the records cannot be decompressed.
    """
    if header.next_offset <= task.first:
        return None
    if compute_crc(batch) != header.crc:
        raise RecordBatchError(
            f"the batch at offset {header.base_offset} is corrupt: its CRC is not"
            f" {header.crc:#010x}"
        )
    if header.is_control or (header.is_transactional and _is_aborted(header, task)):
        return None
    return encoded_records(header, batch, task.first)


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
    """Return the position (bytes) in a segment's file to go on from after damage.

    It is that of the next index entry, or else the end of the file.

    Raises:
        DataLossError: ``fail_on_data_loss`` is set.
    """
    resume = task.size
    for entry in _offset_index(files, task):
        if entry.position > position:
            resume = entry.position
            break
    text = f"{task.partition}: {task.path} is damaged at position {position}: {error}"
    if options.fail_on_data_loss:
        raise DataLossError(
            f"{text}. Read an undamaged copy, or set failOnDataLoss=false to skip the"
            f" batches up to position {resume}"
        )
    logger.warning("%s; going on at position %d", text, resume)
    return resume
